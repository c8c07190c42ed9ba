"""The checks of the truth: against made-up rollouts whose values are known, and by hand."""
import math

import numpy as np
import pytest

from lab.truth import checks
from lab.truth.measure import PACKET, add_values


def made_up(wins: int, responses: int, packets: int) -> dict:
    """Four coins, two responses to a puzzle: success is `wins` heads or more, so V and A* (`exact`) are counted."""
    rng, steps = np.random.default_rng(0), 4
    heads = rng.integers(0, 2, (responses, steps))  # (B, 4) 1 is heads
    before = np.cumsum(heads, 1) - heads  # (B, 4)
    value = np.array([[np.mean([bin(x).count("1") + n >= wins for x in range(2**left)]) for left in range(steps)]
                      for n in range(steps + 1)])  # (heads so far, coins left)
    left = np.arange(steps)[::-1]
    other, same = (value[before + side, left].ravel() for side in (1 - heads, heads))  # (N,) U and V_{t+1}
    truth = {"logprob": np.full(other.size, np.log(0.5)), "position": np.tile(np.arange(steps), responses),
             "response": np.repeat(np.arange(responses), steps), "packets": np.full(other.size, packets),
             "group": np.repeat(np.arange(responses) // 2, steps), "exact": (same - other) / 2,
             "success": np.repeat((heads.sum(1) >= wins) * 1.0, steps),
             "solved": rng.binomial(packets * PACKET // 2, other[:, None], (other.size, 2))}
    add_values(truth)
    return truth


@pytest.mark.parametrize("wins", (2, 3))
def test_a_truth_obeys_its_laws(wins):
    """Guards against noise in the squares, V_0 (1 - V_0) of a noisy V_0, errors that fit neither, and checks that
    anything passes."""
    truth = made_up(wins, 500, packets=8)
    square, products, mean = checks.laws(truth).values()
    chance = sum(math.comb(4, heads) for heads in range(wins, 5)) / 16  # V_0
    exact = 4 * np.mean(truth["exact"] ** 2) / (chance * (1 - chance))  # of these responses; 1 on average
    assert square.value == pytest.approx(exact, abs=0.04) and square.value == pytest.approx(1, abs=0.12)
    assert square.low < exact < square.high < square.low + 0.3
    assert products.low < 0 < products.high and mean.low < 0 < mean.high
    total, freedom, p = checks.agreement(truth)
    assert freedom == 250 and 0.7 * freedom < total < 1.3 * freedom and p > 1e-3
    truth["a_star_halves"] = truth["a_star_halves"] * 0.8
    truth["value"] = truth["value"] + 0.2 * (truth["response"] % 2)
    assert checks.laws(truth)["sum of squares"].high < 1 and checks.agreement(truth)[2] < 1e-6


def test_laws_by_hand():
    """Guards against V_0 (1 - V_0) with the noise that V_0^2 has, and a mean over tokens."""
    truth = {"position": np.array([0, 1, 0]), "group": np.array([0, 0, 1]), "success": np.array([1.0, 1.0, 0.0]),
             "a_star_halves": np.array([[0.3, 0.1], [0.2, 0.2], [-0.4, -0.2]])}  # V_0 by halves: 0.5, 0.7; 0.4, 0.2
    variance = (0.6 - 0.5 * 0.7) + (0.3 - 0.4 * 0.2)
    assert [law.value for law in checks.laws(truth).values()] == pytest.approx(
        [(0.03 + 0.04 + 0.08) / variance, (0.5 * 0.3 - 0.07 + 0) / variance, (0.4 - 0.3) / 2])


def test_chi_squared_by_hand():
    """Guards against weights that are errors, a value without an error, and against a p-value of the wrong tail."""
    truth = {"position": np.zeros(4, int), "value": np.array([0.2, 0.5, 0.9, 0.0]), "group": np.array([0, 0, 1, 3]),
             "value_error": np.array([0.1, 0.2, 0.3, 0.0])}
    mean = (0.2 * 100 + 0.5 * 25) / 125
    total, freedom, p = checks.agreement(truth)
    assert total == pytest.approx(100 * (0.2 - mean) ** 2 + 25 * (0.5 - mean) ** 2) and freedom == 1
    assert p == pytest.approx(0.18, abs=0.02)  # that of 1.8 on one degree of freedom


def test_few_tokens_selected_by_one_half_and_squared_by_the_other(monkeypatch):
    """Guards against noise that selects a token and then counts as its size."""
    truth = made_up(3, 500, packets=1)
    monkeypatch.setattr(checks, "SPLITS", 3)
    halves = [checks.top_tenth(np.abs(half)) for half in truth["a_star_halves"].T]
    exact = np.mean([checks.share_of(truth, chosen, truth["exact"] ** 2).value for chosen in halves])
    found = checks.few_tokens(truth)
    assert found.low < exact < found.high and found.value == pytest.approx(exact, abs=0.03)
