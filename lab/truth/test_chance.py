"""What chance and the outcome alone would have, by hand."""
import numpy as np
import pytest

from lab.truth import chance


def test_a_tenth_by_chance_by_hand():
    """Guards against tokens without rollouts that count, and a tenth of those with rollouts."""
    p = np.array([0.5] * 20 + [0.1] * 20)  # the tenth of 40 tokens is 4 of the 20 with rollouts, whose bounds are equal
    truth = {"logprob": np.log(p), "packets": np.repeat([3, 0], 20)}
    at_the_bound, uniform, normal, heavy = map(float, chance.tenth_by_chance(truth))
    assert at_the_bound == pytest.approx(4 / 20) and at_the_bound < uniform < normal < heavy


def test_the_outcomes_sign_by_hand():
    """Guards against a wrong response's sign, and a share of tokens in place of one of A* squared."""
    halves = np.array([[1.0, 3.0], [-2.0, -1.0], [-2.0, -2.0], [1.0, 1.0]])  # squares 3, 2, 4, 1
    truth = {"a_star": halves.mean(1), "a_star_halves": halves, "success": np.array([1.0, 1, 0, 0]),
             "group": np.array([0, 0, 1, 1])}
    assert chance.outcome_sign(truth).value == pytest.approx((3 + 4) / 10)


def test_what_filler_gets_by_hand():
    """Guards against tags that count where they don't, log p for the gradient, and credit without its size."""
    halves = np.array([[1.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 4.0]])  # squares 1, 2, 1, 4
    truth = {"a_star_halves": halves, "group": np.array([0, 0, 1, 1]), "role": np.array([0, 1, 2, 1]),
             "advantage": np.array([1.0, 1, -2, -2]), "logit_grad": np.array([0.5, 0.5, 0.25, 0.25])}
    assert [e.value for e in chance.wasted(truth, False)] == pytest.approx([1 / 4, 1 / 4, 1 / 8, -1 / 8])
    assert [e.value for e in chance.wasted(truth, True)] == pytest.approx([2 / 4, 2 / 4, 2 / 8, -2 / 8])


def test_the_page_is_as_written(run_program, monkeypatch):
    """Guards against a table edited by hand, or of other rows."""
    written = {}
    monkeypatch.setattr(chance.Path, "write_text", lambda file, text, **_: written.update({file: text}))
    run_program(chance)
    assert written == {chance.HERE / "chance.md": (chance.HERE / "chance.md").read_text(encoding="utf-8")}
