"""What of a prompt machines are chosen by: its turns, as far as its text shows them. Pure.

The gate has no tokenizer and needs none: equal texts are equal tokens at every machine that serves the model.
"""

from __future__ import annotations

import re
import struct

from stoker.chat.turn_ends import TURN_ENDS
from stoker.ipc.request import GenerateRequest
from stoker.routing.hashing import conversation_parts, prefix_chain

MAX_CHARS = 2**18
MAX_PARTS = 64
BLOCK_CHARS = 1024
BLOCK_TOKENS = 256
CHARS_PER_TOKEN = 4
_ROLE_CHARS = 48
_TURN = re.compile("|".join(re.escape(text) for text in sorted(TURN_ENDS, key=len, reverse=True)))


def chain_of(request: GenerateRequest) -> tuple[int, ...]:
    """Hashes of what a prompt begins with, of its caller's own namespace; see `prefix_chain`.

    A conversation has a part a turn that has ended, so that each of its requests has the parts of the one
    before; other prompts have blocks, the last of them whole where it is the only one.
    """
    namespace = f"{request.model}\0{request.cache_salt}".encode()
    if not isinstance(request.prompt, str):
        return prefix_chain(namespace, _token_blocks(request.prompt))
    text = request.prompt[:MAX_CHARS]
    turns = _turns(text)
    if not turns:
        return prefix_chain(namespace, _blocks(text))
    has_system = b"system" in turns[0][:_ROLE_CHARS].lower()
    system, rest = (turns[0], turns[1:]) if has_system else (b"", turns)
    return prefix_chain(namespace, conversation_parts(system, rest))


def num_tokens_of(request: GenerateRequest) -> int:
    """About how many tokens its prompt has."""
    num = len(request.prompt)
    return num // CHARS_PER_TOKEN if isinstance(request.prompt, str) else num


def _turns(text: str) -> list[bytes]:
    """The turns that have ended; what is behind the last is the answer's own beginning."""
    found, start = [], 0
    for end in _TURN.finditer(text):
        found.append(text[start : end.end()].encode(errors="replace"))
        start = end.end()
        if len(found) == MAX_PARTS:
            break
    return found


def _blocks(text: str) -> list[bytes]:
    whole = range(0, min(len(text) // BLOCK_CHARS, MAX_PARTS) * BLOCK_CHARS, BLOCK_CHARS)
    found = [text[start : start + BLOCK_CHARS].encode(errors="replace") for start in whole]
    return found or [text.encode(errors="replace")]


def _token_blocks(tokens: tuple[int, ...]) -> list[bytes]:
    whole = range(0, min(len(tokens) // BLOCK_TOKENS, MAX_PARTS) * BLOCK_TOKENS, BLOCK_TOKENS)
    blocks = [tokens[start : start + BLOCK_TOKENS] for start in whole] or [tokens]
    return [struct.pack(f"<{len(block)}q", *block) for block in blocks]
