"""What a text repeats: the index over its tokens, against a plain search."""

from random import Random

import pytest

from stoker.speculation.prompt_lookup import GRAM, MAX_MATCH, LookupMatch, SuffixIndex, continuation


def longest_repeat(tokens):
    """How many of the last tokens were there before, by trying; 0: fewer than a GRAM."""
    best = 0
    for place in range(GRAM, len(tokens)):
        length = 0
        while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= GRAM else 0


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_repeat_is_found_however_the_text_grew(seed):
    """SPEC D9: token by token and in bursts; few enough tokens that all earlier places are looked at."""
    random = Random(seed)
    tokens = [random.randrange(3 + seed) for _ in range(random.randrange(30))]
    index = SuffixIndex()
    for _ in range(40):
        burst = random.randrange(1, 4)
        at = random.randrange(len(tokens)) if tokens and random.random() < 0.5 else None
        tokens += (
            [random.randrange(3 + seed) for _ in range(burst)] if at is None else tokens[at : at + burst]
        )
        match = index.match(tokens)
        found = 0 if match is None else min(match.length, MAX_MATCH)
        assert found == longest_repeat(tokens), tokens
        if match is not None:
            seen = min(match.length, MAX_MATCH)
            assert tokens[match.place - seen : match.place] == tokens[len(tokens) - seen :]


def test_the_latest_of_equal_repeats_is_continued():
    """SPEC D9: what was said last is likelier to be said again."""
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 7, 1, 2, 3]
    index = SuffixIndex()
    match = index.match(tokens)
    assert match == LookupMatch(place=8, length=3)
    assert continuation(tokens, match, 3) == [5, 8, 7]


def test_a_continuation_that_reaches_the_end_repeats_itself():
    """SPEC D9: a text that turns in a circle is guessed as far as wanted."""
    tokens = [7, 1, 2, 1, 2, 1, 2]
    index = SuffixIndex()
    match = index.match(tokens)
    assert continuation(tokens, match, 7) == [1, 2, 1, 2, 1, 2, 1]
    assert continuation(tokens, match, 1) == [1]


def test_a_match_is_followed_as_the_text_goes_on_with_it():
    """SPEC D9: its length grows, beyond what is looked back over."""
    text = list(range(100))
    tokens = [*text, 200, *text[:10]]
    index = SuffixIndex()
    assert index.match(tokens) == LookupMatch(place=10, length=10)
    tokens += text[10:60]
    assert index.match(tokens) == LookupMatch(place=60, length=60)
    tokens.append(300)
    assert index.match(tokens) is None


def test_nothing_is_guessed_before_a_long_prompt_is_indexed():
    """SPEC D9: it grows a part at a time, lest it delay a step."""
    text = list(range(4000))
    tokens = [*text, *text[:100]]
    index = SuffixIndex()
    assert index.match(tokens) is None
    assert index.match(tokens) == LookupMatch(place=100, length=MAX_MATCH)


def test_too_short_a_text_repeats_nothing():
    """SPEC D9."""
    for tokens in ([], [1], [1, 1], [1, 1, 1]):
        assert SuffixIndex().match(tokens) is None
