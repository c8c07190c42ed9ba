"""Success-conditioned credit: the ideal by hand, and the tuned copy against plain supervised steps."""
import copy

import numpy as np
import pytest
import torch

import countdown_task
from lab.heads import sample
from lab.truth import conditioned
from rollout import Policy
from tests.plain import plain_logprobs


def test_the_ideal_by_hand():
    """Guards against the value behind a token taken for the one before it, and the log of 0."""
    truth = {"value": np.array([0.5, 0.25, 0.001]), "a_star": np.array([-0.25, -0.249, 0.999])}
    assert conditioned.ideal(truth) == pytest.approx(np.log([0.5, 0.01 / 0.25, 1 / 0.01]))


def test_the_copy_learns_from_right_answers_alone(random_model, tokenizer, exact, monkeypatch):
    """Guards against steps on wrong answers, a mean of responses' means, and a model that is tuned itself."""
    policy, plain = Policy(random_model, tokenizer, countdown_task), copy.deepcopy(random_model)
    batches = []

    def graded(policy, puzzles, answers, key):
        """Six short responses; of the second batch none is right."""
        monkeypatch.setattr("lab.heads.LIMIT", 7)
        batches.append(sample(policy, puzzles, answers, key))
        batches[-1].success = torch.tensor([1.0, 0, 0, 1, 0, 0]) * (len(batches) != 2)
        return batches[-1]

    monkeypatch.setattr(conditioned, "SIZE", 6)
    monkeypatch.setattr(conditioned, "sample", graded)
    start = copy.deepcopy(random_model.state_dict())
    tuned = conditioned.tuned(policy, 3)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-4, weight_decay=0.0)
    for batch in (batches[0], batches[2]):
        right, prompts = [0, 3], batch.ask.prompts
        logprob = plain_logprobs(plain, [prompts[i] for i in right], batch.tokens[right], batch.mask[right])
        optimizer.zero_grad()
        (-logprob.sum() / batch.mask[right].sum()).backward()
        optimizer.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(tuned.state_dict()[name], weight)
        assert torch.equal(random_model.state_dict()[name], start[name])
    assert not torch.equal(tuned.state_dict()["model.norm.weight"], start["model.norm.weight"])
