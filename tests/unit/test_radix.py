"""The tree of stored prefixes: what it finds, and that it stays as small as what is stored."""

import pytest

from stoker.cache.radix import MAX_VALUES, PrefixMatch, RadixTree, key_of


def _tree(*prefixes):
    tree = RadixTree()
    for prefix in prefixes:
        assert tree.insert(key_of(prefix), tuple(prefix)) is None
        tree.check()
    return tree


def test_an_empty_tree_finds_nothing():
    """SPEC C2: no match is a match of no tokens."""
    tree = _tree()
    assert tree.longest_shared(key_of([1, 2])) == PrefixMatch(0, ())
    assert tree.on_path(key_of([1, 2])) == []
    assert tree.get(key_of([1])) is None
    assert tree.remove(key_of([1])) is None
    tree.check()


def test_the_longest_shared_prefix_is_found_wherever_the_keys_part():
    """SPEC C2: a model that can trim uses any length of a stored prefix."""
    tree = _tree([1, 2, 3, 4], [1, 2, 5], [9])
    assert tree.longest_shared(key_of([1, 2, 3, 7])) == PrefixMatch(3, ((1, 2, 3, 4),))
    assert tree.longest_shared(key_of([1, 2, 3, 4, 5])) == PrefixMatch(4, ((1, 2, 3, 4),))
    assert tree.longest_shared(key_of([9])) == PrefixMatch(1, ((9,),))
    assert tree.longest_shared(key_of([1, 3])).num_tokens == 1
    assert set(tree.longest_shared(key_of([1, 3])).values) == {(1, 2, 3, 4), (1, 2, 5)}
    assert tree.longest_shared(key_of([7, 1, 2])) == PrefixMatch(0, ())


def test_what_ends_at_the_point_reached_is_named_first():
    """SPEC C2: an entry that ends there needs no trimming."""
    tree = _tree([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3])
    match = tree.longest_shared(key_of([1, 2, 3]))
    assert match.num_tokens == 3
    assert match.values[0] == (1, 2, 3)
    assert set(match.values) == {(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5)}


def test_a_crowd_behind_one_prefix_is_named_in_part():
    """SPEC C2: a lookup does not walk the whole tree."""
    tree = _tree(*([1, 2, last] for last in range(50)))
    match = tree.longest_shared(key_of([1, 2]))
    assert match.num_tokens == 2
    assert len(set(match.values)) == len(match.values) == MAX_VALUES


def test_tokens_whose_first_bytes_agree_are_different_tokens():
    """SPEC C1: the tree is over token ids; edges part between them."""
    ids = [1, 1 + (1 << 8), 1 + (1 << 16), 1 + (1 << 24), -1, -257]
    tree = _tree(*([7, each, 7] for each in ids))
    assert tree.longest_shared(key_of([7, 1 + (2 << 24), 7])).num_tokens == 1
    for each in ids:
        assert tree.longest_shared(key_of([7, each])) == PrefixMatch(2, ((7, each, 7),))


def test_entries_that_end_on_the_way_come_shortest_first():
    """SPEC C2: what cannot be trimmed is used where it ends at or before the divergence."""
    tree = _tree([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 9])
    assert tree.on_path(key_of([1, 2, 3, 4, 6])) == [(2, (1, 2)), (4, (1, 2, 3, 4))]
    assert tree.on_path(key_of([1, 2, 3])) == [(2, (1, 2))]
    assert tree.on_path(key_of([1, 2])) == [(2, (1, 2))]
    assert tree.on_path(key_of([1])) == []


def test_only_what_no_other_key_shares_is_ones_own():
    """SPEC C7: tokens saved are those that only this entry saves."""
    tree = _tree([1, 2, 3, 4], [1, 2, 5], [8, 8])
    assert tree.own_tokens(key_of([1, 2, 3, 4])) == 2
    assert tree.own_tokens(key_of([1, 2, 5])) == 1
    assert tree.own_tokens(key_of([8, 8])) == 2
    tree.insert(key_of([1, 2, 3, 4, 5]), None)
    assert tree.own_tokens(key_of([1, 2, 3, 4])) == 0
    with pytest.raises(KeyError, match="3 tokens"):
        tree.own_tokens(key_of([1, 2, 3]))


def test_what_cannot_be_trimmed_counts_from_the_last_entry_before_it():
    """SPEC C2, C7: a longer entry is no substitute for one that ends earlier."""
    tree = _tree([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 9])
    assert tree.own_tokens_exact(key_of([1, 2])) == 2
    assert tree.own_tokens_exact(key_of([1, 2, 3, 4])) == 2
    assert tree.own_tokens_exact(key_of([1, 2, 3, 4, 5])) == 1
    assert tree.own_tokens_exact(key_of([1, 2, 3, 9])) == 2


def test_a_second_value_replaces_the_first():
    """SPEC C1: one entry a prefix."""
    tree = _tree([1, 2, 3])
    assert tree.insert(key_of([1, 2, 3]), "new") == (1, 2, 3)
    assert len(tree) == 1
    assert list(tree) == ["new"]
    assert tree.longest_shared(key_of([1])) == PrefixMatch(1, ("new",))


def test_a_tree_emptied_again_keeps_nothing():
    """SPEC C7: what is evicted leaves no trace in memory."""
    prefixes = [[1, 2, 3], [1, 2], [1, 2, 4], [5], [1, 2, 3, 4, 5]]
    tree = _tree(*prefixes)
    for prefix in prefixes:
        assert tree.remove(key_of(prefix)) == tuple(prefix)
        assert tree.remove(key_of(prefix)) is None
        tree.check()
    assert len(tree) == 0
    assert not tree._root.children
    assert tree._root.sample is None


def test_removing_a_branch_joins_the_edges_it_had_parted():
    """SPEC C2: a lookup takes a step only where stored keys end or part."""
    tree = _tree([1, 2, 3], [1, 2, 4])
    tree.remove(key_of([1, 2, 3]))
    (child,) = tree._root.children.values()
    assert child.end == len(key_of([1, 2, 4]))
    assert not child.children


def test_half_a_token_is_a_bug():
    """SPEC C1: keys are whole tokens."""
    with pytest.raises(AssertionError, match="whole number"):
        _tree([1]).get(b"\x01\x00")
