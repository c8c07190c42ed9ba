"""Credit functions against hand computations, and the mechanism by which they become flags.

Run it:  python -m pytest tests/test_mitigations.py
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mitigations
from conftest import make_batch
from mitigations import MITIGATIONS, none, outcome_conditional, reweight

ANSWER = torch.tensor([[False, False, True, True, False], [False, False, False, False, False]])


def test_none_is_the_advantage_on_tokens_and_zero_on_padding():
    """Guards against credit that leaks onto padding."""
    credit = none(make_batch([2, 4], [1.5, -0.5]))
    assert credit.tolist() == [[1.5, 1.5, 0, 0], [-0.5, -0.5, -0.5, -0.5]]


def test_outcome_conditional_by_hand():
    """Guards against the answer's weight landing on the wrong tokens: 4 tokens, weights .5 .5 1 1, mean .75."""
    credit = outcome_conditional(make_batch([4, 5], [3.0, -2.0], in_answer=ANSWER), think_discount=0.5)
    torch.testing.assert_close(credit, torch.tensor([[2.0, 2, 4, 4, 0], [-2, -2, -2, -2, -2]]))


def test_a_discount_of_one_is_plain_grpo_bit_for_bit():
    """Guards against any difference between methods that is not their weights."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 90, (64,)).tolist()
    batch = make_batch(lengths, torch.randn(64).tolist(), in_answer=torch.rand(64, max(lengths)) < 0.3)
    assert torch.equal(outcome_conditional(batch, think_discount=1.0), none(batch))


def test_a_response_without_an_answer_keeps_the_weight_of_plain_grpo():
    """Guards against the original's confusion of credit with format (such responses got half the weight)."""
    batch = make_batch([5, 5], [1.0, 1.0], in_answer=ANSWER)
    assert torch.equal(outcome_conditional(batch, think_discount=0.1)[1], none(batch)[1])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.just(0.0) | st.floats(0.0625, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=5)
)
def test_reweight_has_the_promised_mean(rows):
    """Guards against a normalization over padding, over the wrong axis, or of zero weights."""
    lengths = [len(row) for row in rows]
    weight = torch.tensor([row + [7.0] * (max(lengths) - len(row)) for row in rows])  # 7 on padding must not count
    batch = make_batch(lengths, [1.0] * len(rows))
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        expected = [w * len(row) / sum(row) if sum(row) else 0.0 for w in row]
        assert credit[: len(row)] == pytest.approx(expected, rel=1e-4, abs=1e-6) and not any(credit[len(row) :])
    total = sum(map(sum, rows))
    batch.normalize = "batch"
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        assert credit[: len(row)] == pytest.approx(
            [w * sum(lengths) / total if total else 0.0 for w in row], rel=1e-4, abs=1e-6
        )
    batch.normalize = "none"
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        assert credit[: len(row)] == row


def test_every_method_has_a_formula_and_gives_zero_on_padding():
    """Guards against an undocumented method, and one that forgets the mask."""
    batch = make_batch([3, 5], [1.0, -1.0], in_answer=ANSWER)
    for name, function in MITIGATIONS.items():
        credit = function(batch)
        assert mitigations.summary(name).startswith("credit = ")
        assert credit.shape == batch.mask.shape and not credit[~batch.mask].any() and not credit.requires_grad


def test_hyper_parameters_are_found_by_introspection():
    """Guards against a flag that must be declared in a second place."""
    assert mitigations.parameters("outcome_conditional") == {"think_discount": 0.5}
    assert mitigations.parameters("none") == {}
    assert mitigations.is_reweighting("outcome_conditional") and not mitigations.is_reweighting("none")
