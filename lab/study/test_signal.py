"""The signal to noise of a step: against the moments that random gradients were drawn with, and mixes of credit."""
import numpy as np
import pytest
import torch

from lab.study import signal
from plumbing.report import Estimate
from tests.fixtures import make_batch


def test_signal_to_noise_of_a_step_by_its_moments():
    """Guards against noise that counts as signal, a step of one puzzle, and halves that are the whole."""
    rng, Q = np.random.default_rng(0), 12
    mean, spread = rng.normal(size=30), rng.uniform(5, 9, 30)
    expected = (Q**2 * mean @ mean) / (Q * spread @ spread)  # the sum over Q puzzles
    found = []
    for _ in range(40):
        g = mean + spread * rng.normal(size=(60, 30))  # 60 puzzles
        found.append(signal.signals(g @ g.T, Q))
    whole, *halves = np.array([[e.value for e in three] for three in found]).T
    assert whole.mean() == pytest.approx(expected, abs=3 * whole.std() / 40**0.5)
    assert not np.allclose(whole, halves[0]) and halves[0].std() > whole.std()
    assert abs(np.corrcoef(halves)[0, 1]) < 0.5  # independent
    covered = [three[0].low < expected < three[0].high for three in found]
    assert 0.8 < np.mean(covered)


def test_the_noise_of_a_step_by_its_moments():
    """Guards against signal in the noise, a step of one puzzle, and noise that is not per response."""
    rng, mean, spread = np.random.default_rng(0), 3.0, np.linspace(5, 9, 30)
    found = []
    for _ in range(40):
        g = mean + spread * rng.normal(size=(60, 30))  # 60 puzzles of 8 responses
        found.append(signal.noise(g @ g.T, signal.Arm(12, 8)))
    expected = 12 * spread @ spread / (12 * 8) ** 2
    assert np.mean([e.value for e in found]) == pytest.approx(expected, rel=0.03)
    assert 0.8 < np.mean([e.low < expected < e.high for e in found])


def test_the_geometric_mean_by_hand():
    """Guards against an arithmetic mean, and errors that add up instead of averaging out."""
    found = signal.combined([Estimate(1.0, 0.9, 1.1), Estimate(4.0, 3.6, 4.4)])
    assert found.value == pytest.approx(2) and found.high / found.value == pytest.approx(np.exp(0.1 / 2**0.5))
    assert np.isnan(signal.combined([Estimate(1.0, 0.9, 1.1), Estimate(-0.1, -1.0, 0.9)]).value)


def test_a_mix_has_the_same_sum_in_each_response(monkeypatch):
    """Guards against credit on padding, and a mix that is not between A* and the uniform one."""
    truth = torch.tensor([[0.5, -0.25, 0.0], [0.25, 0.0, 0.0]])
    batch = make_batch([3, 1], [0.0, 0.0], [0, 0], reward=torch.tensor([1.0, 0.0]))
    monkeypatch.setitem(signal.MITIGATIONS, "oracle", lambda batch, k: truth)
    rloo, exact, half, uniform = signal.credits_of(batch, [None, 0.0, 0.5, 1.0])  # (2, 3) each
    assert torch.equal(exact, truth) and torch.equal(half, (exact + uniform) / 2)
    assert torch.equal(uniform, torch.tensor([[0.25, 0.25, 0.25], [0.25, 0, 0]]))
    assert torch.equal(rloo, torch.tensor([[1.0, 1, 1], [-1, 0, 0]]))
