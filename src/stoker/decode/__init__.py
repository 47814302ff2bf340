"""From rows of logits to text: one `Generation` a choice, built on samplers, stop strings and UTF-8."""

from stoker.decode.generation import Drawn, Generation
from stoker.decode.logprobs import token_logprob
from stoker.decode.workspace import Workspace

__all__ = ["Drawn", "Generation", "Workspace", "token_logprob"]
