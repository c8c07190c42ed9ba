"""The weights of the original's undetached form: by hand, by autograd, and in the credit log of a run."""
import math
import sys

import numpy as np
import pytest
import torch

from lab.original import undetached
from methods import MITIGATIONS
from tests.fixtures import make_batch

LN2 = math.log(2)


def test_weights_by_hand_and_by_autograd():
    """Guards against an epsilon at the wrong place, and a gradient that is not the one their loss had."""
    logprob = torch.tensor([[0.0, -LN2, -2 * LN2], [-LN2, 0, 0]], requires_grad=True)  # p is 1, 1/2, 1/4 and 1/2, 1
    batch = make_batch([3, 2], [1.0, 1.0], logprob=logprob.detach(), normalize="none")
    with undetached.registered():
        credit = MITIGATIONS["inverse_undetached"](batch, epsilon=0.5)
        with pytest.raises(ValueError, match="^--epsilon "):
            MITIGATIONS["inverse_undetached"](batch, epsilon=0.0)
    half, quarter = 0.5 / (LN2 + 0.5) ** 2, 0.5 / (2 * LN2 + 0.5) ** 2
    torch.testing.assert_close(credit, torch.tensor([[2, half, quarter], [half, 2, 0]]))
    (logprob / (0.5 - logprob))[batch.mask].sum().backward()  # what their loss had; |log p| is -log p
    torch.testing.assert_close(logprob.grad, credit)


def test_the_command_trains_with_it(tmp_path, monkeypatch, capsys):
    """Guards against a flag that reaches nothing, weights that are rescaled, and a function that stays registered."""
    words = ("--mitigation inverse_undetached --epsilon 0.2 --normalize none --steps 1 --questions 2 --answers 4 "
             f"--max_new_tokens 24 --eval_problems 4 --pass_at 0 --out {tmp_path / 'run'}")
    monkeypatch.setattr(sys, "argv", ["undetached.py", *words.split()])
    undetached.main()
    log = np.load(tmp_path / "run" / "credit" / "step-000001.npz")
    weight = 0.2 / (np.abs(log["logprob"]) + 0.2) ** 2
    np.testing.assert_allclose(log["credit"], log["advantage"] * weight, rtol=1e-5)
    assert np.ptp(weight) > 1 and log["advantage"].any() and "inverse_undetached" not in MITIGATIONS
