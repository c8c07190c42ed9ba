"""One whole training step, computed a second time by hand. Read this after the README, beside grpo.py.

The puzzle is: make 3 from 1 and 2. The vocabulary has nine tokens, and the model is a Qwen2 so small that its forward
pass fits on half a page of numpy. Everything the project computes in a step is compared with plain arithmetic:

    prompt -> tokens and their log-probs -> rewards -> advantage -> credit -> loss -> gradient -> new weights

Run it:  python -m pytest tests/test_walkthrough.py
"""
import numpy as np
import pytest
import torch

import grpo
from countdown_task import Puzzle
from mitigations import MITIGATIONS
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, read_config

VOCABULARY = ["end", "1", "2", "3", "+", "-", "</think>", "\n<answer>", "</answer>"]
PUZZLE, PROMPT = Puzzle((1, 2), 3), [1, 2, 3]  # the prompt's tokens are just the puzzle's numbers
RIGHT = [6, 7, 1, 4, 2, 8, 0]  # </think> \n<answer> 1 + 2 </answer> end
WRONG = [6, 7, 1, 5, 2, 8, 0]  # </think> \n<answer> 1 - 2 </answer> end
CONFIG = {"model_type": "qwen2", "vocab_size": 9, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
          "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}


class TinyCodec:
    """A tokenizer with the vocabulary above."""

    end_tokens = [0]

    def prompt(self, puzzle):
        return PROMPT

    def decode(self, tokens):
        """The text, and where in it each token starts and stops. The end token is no text."""
        pieces = ["" if token == 0 else VOCABULARY[token] for token in tokens]
        stops = np.cumsum([len(piece) for piece in pieces]).tolist()
        return "".join(pieces), [(stop - len(piece), stop) for piece, stop in zip(pieces, stops)]


# ------------------------------------------------------------------------------------------- Qwen2 in numpy


def rms_norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rope(x):
    """Turn the pairs (x0, x2) and (x1, x3) of each row by its position times 1 and times 1/100."""
    angle = np.arange(len(x))[:, None] * np.array([1, 0.01])  # theta is 10,000, and 10,000^(-1/2) = 1/100
    a, b = x[:, :2], x[:, 2:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(w, tokens):
    """Log-probs (S, 9) of the token after each of S tokens, from the weights by name."""
    layer, S = {name.removeprefix("model.layers.0."): x for name, x in w.items()}, len(tokens)
    x = w["model.embed_tokens.weight"][tokens]  # (S, 4)
    h = rms_norm(x, layer["input_layernorm.weight"])
    q, k, v = (h @ layer[f"self_attn.{p}_proj.weight"].T + layer[f"self_attn.{p}_proj.bias"] for p in "qkv")
    scores = rope(q) @ rope(k).T / np.sqrt(4)  # (S, S)
    scores[np.triu_indices(S, 1)] = -np.inf  # no token sees a later one
    x = x + softmax(scores) @ v @ layer["self_attn.o_proj.weight"].T
    h = rms_norm(x, layer["post_attention_layernorm.weight"])
    gate, up = h @ layer["mlp.gate_proj.weight"].T, h @ layer["mlp.up_proj.weight"].T  # (S, 6)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    logits = rms_norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T  # (S, 9)
    return np.log(softmax(logits))


def response_logprobs(w, response):
    """log pi of each token of a response: what the position before it predicts."""
    log_probs = forward(w, PROMPT + response)[len(PROMPT) - 1 : -1]  # (7, 9)
    return log_probs[np.arange(len(response)), response]


# --------------------------------------------------------------------------------------------------- the step


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Qwen2(read_config(CONFIG)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


def weights_of(model):
    """A copy of the weights, as numpy arrays by name."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def rollout(model):
    """Sample two responses, with random numbers chosen so that they are RIGHT and WRONG.

    A token is drawn where its random number falls among the cumulative probabilities, so the middle of a token's
    interval draws that token.
    """
    uniforms = []
    for response in (RIGHT, WRONG):
        p = np.exp(forward(weights_of(model), PROMPT + response)[len(PROMPT) - 1 : -1])  # (7, 9)
        t = np.arange(len(response))
        uniforms.append(p.cumsum(1)[t, response] - p[t, response] / 2)
    return grpo.rollout(model, TinyCodec(), [PUZZLE], torch.tensor(np.array(uniforms)))


def test_the_sampler_draws_the_tokens_and_records_their_log_probs(model):
    batch = rollout(model)
    assert batch.tokens.tolist() == [RIGHT, WRONG]
    for row, response in zip(batch.logprob, (RIGHT, WRONG)):
        assert row.numpy() == pytest.approx(response_logprobs(weights_of(model), response), abs=1e-6)


def test_the_reward_is_a_tenth_for_the_format_and_one_for_the_answer(model):
    batch = rollout(model)
    assert batch.text == ["</think>\n<answer>1+2</answer>", "</think>\n<answer>1-2</answer>"]
    assert batch.reward.tolist() == pytest.approx([0.1 + 1, 0.1 + 0])


def test_the_advantage_is_the_z_score_of_the_reward_in_its_group(model):
    mean, std = 0.6, 0.5  # of 1.1 and 0.1
    z_scores = [(reward - mean) / (std + 1e-4) for reward in (1.1, 0.1)]
    assert rollout(model).advantage.tolist() == pytest.approx(z_scores)


def test_grpo_gives_every_token_the_same_credit_and_a_reweighting_moves_it(model):
    batch = rollout(model)
    A = 0.5 / 0.5001
    assert MITIGATIONS["none"](batch)[0].tolist() == pytest.approx([A] * 7)
    # outcome_conditional weights a token 1 from <answer> on and 0.5 before it; only </think> comes before it. The
    # weights 0.5 1 1 1 1 1 1 have mean 6.5 / 7 and are divided by it, so that the total stays what it was.
    credit = MITIGATIONS["outcome_conditional"](batch, think_discount=0.5)
    assert credit[0].tolist() == pytest.approx([A * 0.5 * 7 / 6.5] + [A * 7 / 6.5] * 6)
    assert credit.sum(1).tolist() == pytest.approx([7 * A, -7 * A])


def finite_differences(loss, w):
    """d loss / d w by name: nudge one weight at a time, up and down."""
    gradient = {name: np.zeros_like(x) for name, x in w.items()}
    for name, x in w.items():
        for i in np.ndindex(x.shape):
            kept = x[i]
            x[i] = kept + 1e-5
            up = loss(w)
            x[i] = kept - 1e-5
            gradient[name][i] = (up - loss(w)) / 2e-5
            x[i] = kept
    return gradient


@pytest.mark.parametrize("method", ["none", "outcome_conditional"])
def test_the_update_follows_the_gradient_of_the_loss(model, method):
    batch, before = rollout(model), weights_of(model)
    credit = MITIGATIONS[method](batch)  # (2, 7)
    old = [response_logprobs(before, response) for response in (RIGHT, WRONG)]

    def loss(w):
        """Minus the mean over the 14 tokens of ratio * credit. The ratio pi / old pi is near 1, so not clipped."""
        ratios = [np.exp(response_logprobs(w, response) - o) for response, o in zip((RIGHT, WRONG), old)]
        return -sum((ratio * c).sum() for ratio, c in zip(ratios, credit.numpy())) / 14

    optimizer = Optimizer(model, lr=0.01)
    measured = grpo.update(model, optimizer, [PROMPT], batch, credit, max_new_tokens=7, max_grad_norm=1e9)
    assert measured["loss"] == pytest.approx(loss(before), abs=1e-6)
    assert measured["clip_fraction"] == 0

    gradient = finite_differences(loss, before)
    for name, weight in optimizer.weights.items():
        assert weight.grad.numpy() == pytest.approx(gradient[name], abs=1e-6), name
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert measured["grad_norm"] == pytest.approx(norm, abs=1e-6)

    for name, after in weights_of(model).items():  # Adam's first step is lr * g / (|g| + 1e-8): nearly lr * sign(g)
        g = gradient[name]
        clear = np.abs(g) > 1e-4  # smaller ones are mostly the error of the finite differences
        assert after[clear] == pytest.approx((before[name] - 0.01 * g / (np.abs(g) + 1e-8))[clear], abs=1e-6), name
