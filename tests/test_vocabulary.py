"""plumbing/vocabulary.py against the plain forms: the same log-probs and gradients, and the same token for a number."""
import copy

import pytest
import torch

from plumbing import optimizer, vocabulary
from plumbing.vocabulary import EmbeddingRows, TokenLogprobs, draw_with_facts
from qwen2_model import entropy_and_logit_grad, take
from sampler import draw


@pytest.mark.parametrize("kept", [0, 2**30], ids=["computed again", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_their_gradients_are_autograds(kept, temperature, monkeypatch):
    """Guards against a token left out at the edge of a slab, padded rows that count, gradients that replace a sum."""
    monkeypatch.setattr(vocabulary, "KEPT", kept)
    monkeypatch.setattr(vocabulary, "SLAB", 7)
    monkeypatch.setattr(vocabulary, "ROWS_ON_CPU", 3)
    torch.manual_seed(0)
    V, real, D = 33, 29, 5
    weight = torch.nn.Parameter(torch.randn(V, D, dtype=torch.float64))
    plain, tokens = copy.deepcopy(weight), torch.tensor([0, 6, 7, 13, 14, 28, 28, 3])
    weight.sum_into, before = weight, torch.randn(V, D, dtype=torch.float64)
    weight.grad = before.clone()
    layer, upstream = torch.randn(D, D, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    states = EmbeddingRows.apply(weight, tokens.view(2, 4)).flatten(0, 1) @ layer
    logprob = TokenLogprobs.apply(states, weight, tokens, real, temperature)
    expected = take(((plain[tokens] @ layer) @ plain[:real].T / temperature).log_softmax(-1), tokens)
    torch.testing.assert_close(logprob, expected)
    logprob.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(weight.grad, before + plain.grad)


@pytest.mark.parametrize("V", [5, 511, 512, 513, 3000, 151_936])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_token_and_its_facts_are_those_of_the_plain_forms(V, temperature):
    """Guards against a token of probability 0, one before or after the right one, and facts that lose their digits."""
    torch.manual_seed(V)
    n = 10 if V > 3000 else 50
    logits = 6 * torch.randn(8 * n, V)
    logits[:n, 0] += 40  # nearly certain
    logits[n : 2 * n, :-1] -= torch.inf  # only the last token is possible
    logits[2 * n : 3 * n, 1::2] -= torch.inf
    uniform = torch.rand(8 * n, dtype=torch.float64)
    uniform[::7], uniform[1::7] = 0.0, 1 - 2**-53
    log_probs = (logits.double() / temperature).log_softmax(-1)
    token, facts = draw_with_facts(logits, uniform, temperature)
    assert take(log_probs, token).isfinite().all()
    expected = draw(log_probs, uniform)
    other = token != expected
    assert other[(uniform > 0) & (uniform < 0.999)].float().mean() < 0.01  # exp in float32 moves a few borders
    cumulative = log_probs.exp().cumsum(-1)  # there the number lies at a border
    border = torch.minimum((cumulative - uniform[:, None]).abs().min(1).values, 1 - uniform)
    assert (border[other] < 1e-6).all()
    plain = torch.stack((take(log_probs, token), *entropy_and_logit_grad(log_probs, token)))
    torch.testing.assert_close(facts.double(), plain, rtol=2e-5, atol=2e-6)


def test_gradients_of_bfloat16_weights_arrive_in_the_masters(monkeypatch):
    """Guards against a gradient that the hook of other weights takes, or that is rounded before it is added."""
    monkeypatch.setattr(optimizer, "LARGE", 20)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"lm_head": vocabulary.Embedding(30, 8), "layer": torch.nn.Linear(8, 8)}).bfloat16()
    plain, weight = copy.deepcopy(model).float(), model["lm_head"].weight
    learner, tokens = optimizer.Optimizer(model, 0.1), torch.arange(20)
    learner.zero_grad()
    sums = [torch.zeros(30, 8)]
    for scale in (1.0, 2.0**-12):  # the second is below what bfloat16 would show beside the first
        states = model["layer"](model["lm_head"](tokens))
        (scale * TokenLogprobs.apply(states, weight, tokens, 30, 1.0)).sum().backward()
        sums.append(learner.master["lm_head.weight"].grad.clone())
    states = plain["layer"](plain["lm_head"](tokens))
    take((states @ plain["lm_head"].weight.T).log_softmax(-1), tokens).sum().backward()
    torch.testing.assert_close(sums[1], plain["lm_head"].weight.grad, rtol=0.02, atol=0.05)
    torch.testing.assert_close(2**12 * (sums[2] - sums[1]), sums[1], rtol=0.02, atol=0.02)
    for name, p in plain["layer"].named_parameters():
        torch.testing.assert_close(learner.master[f"layer.{name}"].grad, p.grad, rtol=0.02, atol=0.1)
    assert weight.grad is None
