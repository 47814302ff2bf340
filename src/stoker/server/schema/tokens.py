"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import AliasChoices, Field

from stoker.server.body import Body
from stoker.server.schema.fields import Int


class TokenizeRequest(Body):
    """Text to turn into token ids; as with llama-server no special tokens are added unless asked for."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt", "text"))
    model: str | None = None
    add_special: bool = Field(
        default=False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    tokens: list[Int]
    model: str | None = None
