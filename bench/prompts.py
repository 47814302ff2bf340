"""Prompts that no cache has seen: common words in an order that the seed decides."""

from __future__ import annotations

import random

# Everyday words, nearly all one token with their leading space in any common vocabulary.
_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea kid body information back parent face others level office door
health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light
voice wife police mind price report decision son view relationship town road arm difference value
building action season society tax director position player record paper space ground form event
official matter center couple site project
"""
WORDS = tuple(_TEXT.split())


def random_prompt(num_words: int, seed: int | str) -> str:
    """`num_words` words (about as many tokens), the same for the same seed.

    Of one seed, a shorter prompt is the beginning of a longer one.
    """
    return "Notes: " + random_words(num_words, seed)


def random_words(num_words: int, seed: int | str) -> str:
    """The words alone, to go on with after a space."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def shuffled(prompt: str, seed: int | str) -> str:
    """Another prompt of as many tokens: its words, but for the first, in another order."""
    first, *others = prompt.split(" ")
    random.Random(seed).shuffle(others)
    return " ".join([first, *others])
