"""All formats, and which of them a template or a name asks for (SPEC D12)."""

from __future__ import annotations

import re
from functools import lru_cache

from stoker.chat.tools.formats.command import COMMAND_FORMAT, COMMAND_R_FORMAT
from stoker.chat.tools.formats.deepseek import DEEPSEEK_FORMAT, DEEPSEEK_V31_FORMAT
from stoker.chat.tools.formats.gemma import FUNCTION_GEMMA_FORMAT, GEMMA3_FORMAT, GEMMA4_FORMAT
from stoker.chat.tools.formats.glm import GLM_FORMAT, HUNYUAN_FORMAT
from stoker.chat.tools.formats.harmony import HARMONY_FORMAT
from stoker.chat.tools.formats.hermes import GENERIC_FORMAT, HERMES_FORMAT
from stoker.chat.tools.formats.invoke import (
    DEEPSEEK_V4_FORMAT,
    DEEPSEEK_V32_FORMAT,
    MINICPM_FORMAT,
    MINIMAX_FORMAT,
)
from stoker.chat.tools.formats.kimi import KIMI_FORMAT
from stoker.chat.tools.formats.lists import (
    APRIEL_FORMAT,
    GRANITE_FORMAT,
    MINIMAX_M1_FORMAT,
    NEMOTRON_FORMAT,
    PHI4_FORMAT,
)
from stoker.chat.tools.formats.llama import FUNCTIONARY_FORMAT, LLAMA3_FORMAT
from stoker.chat.tools.formats.mistral import MISTRAL_ARGS_FORMAT, MISTRAL_FORMAT
from stoker.chat.tools.formats.python import LFM2_FORMAT, PYTHON_FORMAT
from stoker.chat.tools.formats.qwen import QWEN_XML_FORMAT, SEED_FORMAT
from stoker.chat.tools.syntax import ToolFormat
from stoker.errors import InvalidRequestError

FORMATS = (
    HARMONY_FORMAT,
    DEEPSEEK_V4_FORMAT,
    DEEPSEEK_V32_FORMAT,
    DEEPSEEK_FORMAT,
    DEEPSEEK_V31_FORMAT,
    KIMI_FORMAT,
    MINIMAX_FORMAT,
    GEMMA4_FORMAT,
    FUNCTION_GEMMA_FORMAT,
    COMMAND_FORMAT,
    COMMAND_R_FORMAT,
    GRANITE_FORMAT,
    LFM2_FORMAT,
    SEED_FORMAT,
    GLM_FORMAT,
    HUNYUAN_FORMAT,
    MINICPM_FORMAT,
    NEMOTRON_FORMAT,
    APRIEL_FORMAT,
    MINIMAX_M1_FORMAT,
    FUNCTIONARY_FORMAT,
    QWEN_XML_FORMAT,
    PHI4_FORMAT,
    MISTRAL_ARGS_FORMAT,
    MISTRAL_FORMAT,
    HERMES_FORMAT,
    PYTHON_FORMAT,
    LLAMA3_FORMAT,
    GEMMA3_FORMAT,
    GENERIC_FORMAT,
)
"""In the order in which a template is tried: those with marks of their own first."""

_TOOLS = re.compile(r"\btools\b")


@lru_cache(maxsize=64)
def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template shows (Jinja source; None: the model has none).

    A template is taken at its word only where it gets the tools by itself and spells out the family's form.
    """
    template = template or ""
    is_told = _TOOLS.search(template) is not None
    found = (one for one in FORMATS if (is_told or not one.is_native) and one.is_of(template))
    return next(found, GENERIC_FORMAT)


def format_named(name: str, param: str = "tool_format") -> ToolFormat:
    """The format of that name.

    Raises:
        InvalidRequestError: there is none; names those that there are.
    """
    for one in FORMATS:
        if one.name == name:
            return one
    names = ", ".join(sorted(one.name for one in FORMATS))
    raise InvalidRequestError(
        f"{param}: {name[:80]!r} is no format of tool calls; there are {names}", param=param
    )
