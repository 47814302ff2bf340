"""The texts by which chat templates end a turn, for vocabularies whose file does not say that they do.

A template may come with a model that knows its end as an ordinary token, as several tokens, or only from its
training: a file that was converted badly, or a template of the settings. Then the answer ends at that text.
"""

from __future__ import annotations

_ALWAYS = (
    *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end_of_turn|>", "<|eot|>"),
    *("<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_sentence>", "<|role_end|>"),
    *("<|assistant_end|>", "<seed:eos>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
_END, _OWN_TURN = "<|end|>", "<|assistant|>"
"""The first ends a turn where turns begin with the second, and only a part of one in other families."""
TURN_ENDS = frozenset({*_ALWAYS, _END})
"""All of them; an answer that one has ended was ended by its model, not by a stop string of the caller."""


def turn_ends_of(template: str | None, eos_text: str = "") -> tuple[str, ...]:
    """The texts that end an answer, as its chat template shows.

    Args:
        template: Jinja source; None: there is none.
        eos_text: the token that ends the model's text in any case; it is left out.
    """
    template = template or ""
    found = [text for text in _ALWAYS if text in template]
    if _END in template and _OWN_TURN in template:
        found.append(_END)
    return tuple(text for text in found if text != eos_text)
