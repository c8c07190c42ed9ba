"""What is measured in a pretrained model, by hand and by plain autograd, and its tables against their arrays."""
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from lab.gradients import pretrained
from lab.gradients.rank import responses_of
from lab.gradients.test_noise import draw
from qwen2_model import Qwen2
from tests.plain import plain_logprobs


def test_sparsity_by_hand():
    """Guards against signed values, another norm, and ranks from 0."""
    x = np.array([3.0, 0, -4, 0, 0.01], np.float32)
    apart = sum(abs(abs(a) - abs(b)) for a, b in itertools.product(x, x))  # Gini: the mean of these over twice the mean
    found = pretrained.sparsity(x)
    assert [*found.values()] == pytest.approx([(5**0.5 - 7.01 / 25.0001**0.5) / (5**0.5 - 1), apart / 50 / 1.402, 0.6])


def test_groups_that_differ(random_model, tokenizer, exact):
    """Guards against a group without a gradient, a leader that is like the first, and advantages of another group."""
    batch = draw(random_model, tokenizer, (9, 3, 1, 7, 2, 8, 4, 5))
    batch.reward = torch.tensor([1.0, 1, 1, 1, 0, 0, 0.01, 0])
    found = pretrained.differing(batch)
    assert found == {1: [4, 6, 5, 7]}
    group = responses_of(batch, found[1])
    assert torch.equal(group.tokens, batch.tokens[[4, 6, 5, 7]]) and group.prompts == batch.prompts[1:]
    credit = pretrained.credits_of(group, np.random.default_rng(0))
    signs = {name: c[:, 0].sign().tolist() for name, c in credit.items()}
    assert signs == {"GRPO": [-1, 1, -1, -1], "GRPO, binary": [1, -1, 1, -1]}


def test_gradients_at_the_input_embeddings(random_model, tokenizer, exact):
    """Guards against a token's neighbour, a loss before it, and the gradient of the output: with a head of its own and
    tokens that occur once, a row of the embedding's gradient is that at its token."""
    batch, V = draw(random_model, tokenizer, (6, 6, 6, 6)), tokenizer.size
    model = Qwen2(dataclasses.replace(random_model.config, tie_word_embeddings=False)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    batch.ask.policy = batch.ask.policy._replace(model=model)
    unseen = [token for token in range(V) if token not in batch.prompts[1]][:6]
    batch.tokens[:], batch.mask[:] = torch.tensor(unseen), True
    found = pretrained.phase1_columns(batch, 2, np.array([3, 0]))
    logprob = plain_logprobs(model, batch.prompts[1:], batch.tokens[:1], batch.mask[:1])[0]
    whole, fourth, first = (torch.autograd.grad(total, model.embedding, retain_graph=True)[0][unseen[:5]]
                            for total in (logprob.sum(), logprob[4], logprob[1]))
    torch.testing.assert_close(found["norm"], whole.norm(dim=1))
    torch.testing.assert_close(found["mean"], whole.mean(1))
    expected = torch.tensor([first[0].norm(), torch.nan, torch.nan, fourth[3].norm(), torch.nan])
    torch.testing.assert_close(found["next"], expected, equal_nan=True)
    assert found["puzzle"].tolist() == [1] * 5 and found["relative"][3] == 0.5


def test_weights_that_are_missing_are_named(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "weights/smollm2" in refusal(pretrained, "--measure", "math")
