"""The tree of stored prefixes against a list of them that is read through each time."""

from random import Random

import pytest

from stoker.cache.radix import MAX_VALUES, RadixTree, key_of, num_tokens

ALPHABETS = (
    [1, 2],
    [0, 1, 256, 65536, 1 << 24, -1, -256, -65536],
    list(range(50)),
)


class NaivePrefixes:
    """Prefixes as tuples of token ids, each with a value."""

    def __init__(self):
        self.values = {}

    @staticmethod
    def shared(one, other):
        """Leading tokens that are the same."""
        count = 0
        while count < min(len(one), len(other)) and one[count] == other[count]:
            count += 1
        return count

    def others(self, key):
        """All but one of the prefixes."""
        return [other for other in self.values if other != key]

    def longest_shared(self, key):
        """Number of tokens, the values that share them, and the value that ends there."""
        lengths = {other: self.shared(key, other) for other in self.values}
        most = max(lengths.values(), default=0)
        if most == 0:
            return 0, set(), None
        return most, {self.values[k] for k, v in lengths.items() if v == most}, self.values.get(key[:most])

    def on_path(self, key):
        """Lengths and values of what `key` begins with."""
        on = [other for other in self.values if key[: len(other)] == other]
        return [(len(other), self.values[other]) for other in sorted(on, key=len)]

    def own_tokens(self, key):
        """Tokens that no other prefix shares."""
        return len(key) - max((self.shared(key, other) for other in self.others(key)), default=0)

    def own_tokens_exact(self, key):
        """Tokens beyond the longest other prefix of it."""
        return len(key) - max((len(o) for o in self.others(key) if key[: len(o)] == o), default=0)


def make_key(random, alphabet, known):
    """A new prefix, or one made of a known one: cut, grown, edited or as it is."""
    if known and random.random() < 0.7:
        stem = random.choice(known)
        cut = stem[: random.randint(0, len(stem))]
        stem = random.choice([stem, cut])
        return stem + tuple(random.choices(alphabet, k=random.choice([0, 0, 1, 2, 9])))
    return tuple(random.choices(alphabet, k=random.randint(0, 12)))


def compare(tree, naive, key):
    """Every question about one key, put to both."""
    stored = key_of(key)
    match = tree.longest_shared(stored)
    count, values, ends = naive.longest_shared(key)
    assert match.num_tokens == count
    assert len(set(match.values)) == len(match.values) == min(len(values), MAX_VALUES)
    assert set(match.values) <= values
    assert ends is None or match.values[0] == ends
    assert tree.on_path(stored) == naive.on_path(key)
    assert tree.get(stored) == naive.values.get(key)
    if key in naive.values:
        assert num_tokens(stored) == len(key)
        assert tree.own_tokens(stored) == naive.own_tokens(key)
        assert tree.own_tokens_exact(stored) == naive.own_tokens_exact(key)
    else:
        with pytest.raises(KeyError):
            tree.own_tokens(stored)
        with pytest.raises(KeyError):
            tree.own_tokens_exact(stored)


@pytest.mark.parametrize("seed", range(400))
def test_the_tree_answers_as_a_naive_list_does(seed):
    """SPEC C1, C2: whatever is stored and removed, in whatever order."""
    random = Random(seed)
    alphabet = ALPHABETS[seed % len(ALPHABETS)]
    tree, naive = RadixTree(), NaivePrefixes()
    growth = random.choice([0.4, 0.6, 0.8])
    for value in range(1, random.randint(10, 80)):
        known = list(naive.values)
        key = make_key(random, alphabet, known)
        if random.random() < growth:
            assert tree.insert(key_of(key), value) == naive.values.get(key)
            naive.values[key] = value
        else:
            key = random.choice([key, *known])
            assert tree.remove(key_of(key)) == naive.values.pop(key, None)
        tree.check()
        assert len(tree) == len(naive.values)
        assert sorted(tree) == sorted(naive.values.values())
        compare(tree, naive, key)
        compare(tree, naive, make_key(random, alphabet, known))
    for key in naive.values:
        compare(tree, naive, key)
