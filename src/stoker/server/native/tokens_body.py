"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field

from stoker.server.inbound.body import VALUES_WITH_TOKENS, Body, Name, TokenIds


class TokenizeRequest(Body):
    """Text to turn into token ids; as with llama-server no special tokens are added unless asked for."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt", "text"))
    model: Name | None = None
    add_special: bool = Field(
        default=False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    tokens: TokenIds
    model: Name | None = None
