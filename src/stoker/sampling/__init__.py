"""From rows of logits to text: one `Generation` a choice, built on samplers, stop strings and UTF-8."""

from stoker.sampling.generation import Generation
from stoker.sampling.logprobs import token_logprob
from stoker.sampling.truncation import Workspace

__all__ = ["Generation", "Workspace", "token_logprob"]
