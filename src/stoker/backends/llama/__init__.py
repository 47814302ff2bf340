"""llama.cpp as a backend."""

import llama_cpp  # noqa: F401 - before numpy: see `stoker.engine.process.load_native`

from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.smoke.smoke import SmokeSetting, SmokeVerdict, verdict_for

__all__ = ["LlamaBackend", "SmokeSetting", "SmokeVerdict", "load", "verdict_for"]
