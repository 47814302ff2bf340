"""Log-probabilities under the raw logits."""

import numpy as np
import pytest

from stoker.sampling.logprobs import token_logprob
from stoker.sampling.truncation import largest


class _Numbers:
    """A vocabulary whose tokens spell their id."""

    def special_piece(self, token):
        return str(token).encode()


def _reference(row):
    exact = row.astype(np.float64)
    return exact - (exact.max() + np.log(np.exp(exact - exact.max()).sum()))


@pytest.mark.parametrize("num_vocab", [1, 2, 50, 49_152])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(num_vocab):
    """SPEC D6: chosen and top log-probabilities in nats, best first."""
    row = np.random.default_rng(num_vocab).normal(0, 4, num_vocab).astype(np.float32)
    exact = _reference(row)
    order = np.argsort(-row, kind="stable")[:7]
    found = token_logprob(row, num_vocab // 2, 7, _Numbers())
    assert found.token_id == num_vocab // 2
    assert found.token_bytes == str(num_vocab // 2).encode()
    assert found.logprob == pytest.approx(exact[num_vocab // 2], abs=2e-6)
    assert [token for token, _, _ in found.top] == order.tolist()
    assert [text for _, text, _ in found.top] == [str(token).encode() for token in order]
    np.testing.assert_allclose([value for _, _, value in found.top], exact[order], atol=2e-6)


def test_no_alternatives_are_listed_when_none_are_asked_for():
    """SPEC D6: logprobs with no alternatives gives the chosen token only."""
    found = token_logprob(np.zeros(4, np.float32), 3, 0, _Numbers())
    assert found.top == []
    assert found.logprob == pytest.approx(-np.log(4))


def test_ties_are_listed_by_lower_id():
    """SPEC D6: equal logits have one order, also where the list ends among them."""
    row = np.array([1, 5, 3, 5, 3, 3, 0], np.float32)
    assert [token for token, _, _ in token_logprob(row, 0, 4, _Numbers()).top] == [1, 3, 2, 4]


def test_huge_logits_and_forbidden_tokens_do_not_overflow():
    """SPEC D6: the sum is taken relative to the best logit."""
    row = np.array([1e4, 1e4, -np.inf, -1e4], np.float32)
    found = token_logprob(row, 0, 2, _Numbers())
    assert found.logprob == pytest.approx(-np.log(2))
    assert token_logprob(row, 2, 0, _Numbers()).logprob == -np.inf


def test_the_row_is_left_as_it_was():
    """SPEC D6: logprobs are read before the draw, which needs the same row."""
    row = np.random.default_rng(0).normal(size=100).astype(np.float32)
    before = row.copy()
    token_logprob(row, 3, 5, _Numbers())
    np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize("count", [0, 1, 3, 10, 99])
def test_the_largest_values_match_a_full_sort(count):
    """SPEC D6: selection gives what sorting everything would, ties by lower index."""
    values = np.random.default_rng(count).integers(0, 6, 10).astype(np.float32)
    np.testing.assert_array_equal(largest(values, count), np.argsort(-values, kind="stable")[:count])
