"""One training step and a second update, computed twice, by this repository's code and by plain arithmetic.

    python tests/test_walkthrough.py

The puzzle is: make 3 from 1 and 2. The vocabulary has nine tokens, and the model is a Qwen2 so small that its forward
pass fits on half a page of numpy. Read it beside grpo.py:

    prompt -> tokens and their log-probs -> rewards -> advantage -> credit -> loss -> gradient -> new weights

The two responses have unequal lengths, so padding and the loss's denominator can be seen. The second update is on the
same responses, so the ratio of a token's probability to that when it was sampled is no longer 1, and the clip takes
the gradient of tokens whose ratio has left 1 ± 0.02. Read the head of grpo.py first: it says what these are for.
"""
import sys
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import countdown_task
from countdown_task import Puzzle
from grpo import LOSS_NORMS, compare, update
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, parse_config, split
from rollout import Policy, token_batch
from sampler import generate
from settings import Settings

VOCABULARY = ["", "1", "2", "3", "+", "-", "</think>", "\n<answer>", "</answer>"]  # token 0 ends a response
PUZZLE, PROMPT = Puzzle((1, 2), 3), [1, 2, 3]  # the prompt's tokens are just the puzzle's numbers
RIGHT = [6, 7, 1, 4, 2, 8, 0]  # </think> \n<answer> 1 + 2 </answer> end
WRONG = [6, 7, 1, 8, 0]  # </think> \n<answer> 1 </answer> end
CONFIG = {"model_type": "qwen2", "vocab_size": 9, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
          "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
# The gradient's norm is not clipped, and the ratio's clip is so narrow that the second update reaches it.
SETTINGS = Settings(answers=2, max_new_tokens=8, max_grad_norm=1e9, clip_low=0.02, clip_high=0.02)
LR = 0.01


class TinyTokenizer:
    """A tokenizer with the vocabulary above."""

    end_tokens = [0]
    chat, start = False, []  # no chat template; no token before every prompt

    def encode(self, text):
        return PROMPT

    def decode(self, tokens):
        """The text, and where in it each token starts and stops. The end token is no text."""
        pieces = [VOCABULARY[token] for token in tokens]
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


def logprobs_by_hand(w, response):
    """log pi of each token of a response: what the position before it predicts."""
    log_probs = forward(w, PROMPT + response)[len(PROMPT) - 1 : -1]  # (L, 9)
    return log_probs[np.arange(len(response)), response]


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


# --------------------------------------------------------------------------------------------------- the step


def make_policy():
    """A model with random weights, in float64."""
    torch.manual_seed(0)
    model = Qwen2(parse_config(CONFIG)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return Policy(model, TinyTokenizer(), countdown_task)


def weights_of(model):
    """A copy of the weights, as numpy arrays by name."""
    return {name: p.detach().numpy().copy() for name, p in split(dict(model.named_parameters()), model.config).items()}


def sample_both(policy):
    """Sample two responses, with random numbers chosen so that they are RIGHT and WRONG.

    A token is drawn where its random number falls among the cumulative probabilities, so the middle of a token's
    interval draws that token.
    """
    uniforms = np.zeros((2, SETTINGS.max_new_tokens))
    for row, response in zip(uniforms, (RIGHT, WRONG)):
        p = np.exp(forward(weights_of(policy.model), PROMPT + response)[len(PROMPT) - 1 : -1])  # (L, 9)
        t = np.arange(len(response))
        row[t] = p.cumsum(1)[t, response] - p[t, response] / 2
    # One prompt, and two rows of random numbers: two responses to it.
    samples = generate(policy.model, [PROMPT], torch.from_numpy(uniforms), [0])
    return token_batch(policy, [PUZZLE], samples, SETTINGS, step=1)


def walk(method):
    """Yield (what it is, by the code, by hand) for every number of the step and of a second update."""
    policy = make_policy()
    before = weights_of(policy.model)
    batch = sample_both(policy)
    yield "tokens, 0 is padding after the end", batch.tokens, [RIGHT, WRONG + [0, 0]]
    old = [logprobs_by_hand(before, response) for response in (RIGHT, WRONG)]
    yield "log-probs while sampling", batch.logprob[batch.mask], np.concatenate(old)
    yield "rewards: 0.1 for the format, 1 for the answer", batch.reward, [0.1 + 1, 0.1 + 0]

    batch.advantage = compare(batch, "grpo")
    mean, std = 0.6, 0.5  # of 1.1 and 0.1
    yield "advantages: z-scores", batch.advantage, [(r - mean) / (std + 1e-4) for r in (1.1, 0.1)]

    credit = MITIGATIONS[method](batch)  # (2, 7)
    A = 0.5 / 0.5001
    # outcome_conditional: 0.5 before <answer>, where only </think> is, and 1 from there on; rescaled, so that the mean
    # of a response's weights is 1.
    right, wrong = {
        "none": ([1] * 7, [1] * 5),
        "outcome_conditional": ([0.5 * 7 / 6.5] + [7 / 6.5] * 6, [0.5 * 5 / 4.5] + [5 / 4.5] * 4)}[method]
    by_hand = [A * np.array(right), -A * np.array(wrong)]
    yield "credit per token", credit, np.array([by_hand[0], [*by_hand[1], 0, 0]])
    # 1 / all 12 tokens; 1 / (2 responses * own 7 or 5 tokens); 1 / (2 responses * limit of 8).
    for name, shares in {"token": (1 / 12, 1 / 12), "sequence": (1 / 14, 1 / 10), "constant": (1 / 16, 1 / 16)}.items():
        share = LOSS_NORMS[name](batch.mask, SETTINGS)[:, 0]
        yield f"each token's share of the loss, --loss_norm {name}", share, shares
    yield from walk_updates(policy, batch, credit, old, by_hand)


def walk_updates(policy, batch, credit, old, by_hand):
    """The same for two updates. old: log pi of each response's tokens when they were sampled; by_hand: their credit."""
    def loss(w):
        """Minus the mean over the 12 tokens of the clipped objective."""
        total = 0
        for response, o, c in zip((RIGHT, WRONG), old, by_hand):
            ratio = np.exp(logprobs_by_hand(w, response) - o)
            total += np.minimum(ratio * c, ratio.clip(0.98, 1.02) * c).sum()
        return -total / 12

    optimizer = Optimizer(policy.model, LR)
    m = v = {name: np.zeros_like(x) for name, x in weights_of(policy.model).items()}  # Adam's moments
    for number in (1, 2):
        w = weights_of(policy.model)
        gradient = finite_differences(loss, w)
        ratios = np.concatenate([np.exp(logprobs_by_hand(w, r) - o) for r, o in zip((RIGHT, WRONG), old)])
        clipped = np.where(np.concatenate(by_hand) > 0, ratios > 1.02, ratios < 0.98)
        measured = update(policy, optimizer, batch, credit, SETTINGS)
        prefix = f"update {number}: "
        yield f"{prefix}mean |log ratio|", measured["ratio_error"], np.abs(np.log(ratios)).mean()
        yield f"{prefix}loss", measured["loss"], loss(w)
        yield f"{prefix}share of tokens that the clip stops", measured["clip_fraction"], clipped.mean()
        yield f"{prefix}gradient's norm", measured["grad_norm"], np.sqrt(sum((g**2).sum() for g in gradient.values()))
        m = {name: 0.9 * m[name] + 0.1 * g for name, g in gradient.items()}
        v = {name: 0.999 * v[name] + 0.001 * g**2 for name, g in gradient.items()}
        now, model = weights_of(policy.model), policy.model
        gradients = split({name: p.grad for name, p in model.named_parameters()}, model.config)
        for name in w:
            step = LR * (m[name] / (1 - 0.9**number)) / (np.sqrt(v[name] / (1 - 0.999**number)) + 1e-8)
            # (The next update sets gradients to 0 when it begins; until then they can be read.)
            yield f"{prefix}gradient of {name}", gradients[name], gradient[name]
            yield f"{prefix}new {name}", now[name], w[name] - step


def test_the_code_does_what_the_arithmetic_says():
    for method in ("none", "outcome_conditional"):
        for what, ours, by_hand in walk(method):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(by_hand), rtol=0, atol=2e-6, err_msg=what)


def test_the_second_update_is_off_policy_and_clipped():
    """Guards against a walkthrough in which nothing happens."""
    found = {what: float(ours) for what, ours, _ in walk("none") if "gradient of" not in what and np.size(ours) == 1}
    assert found["update 1: mean |log ratio|"] < 1e-6 < 0.01 < found["update 2: mean |log ratio|"]
    assert found["update 1: share of tokens that the clip stops"] == 0
    assert 0 < found["update 2: share of tokens that the clip stops"] < 1


def main():
    """Print every number by the code and by hand; of many, the largest difference."""
    torch.set_printoptions(precision=4, sci_mode=False)
    np.set_printoptions(precision=4, suppress=True, linewidth=100)
    for name, response in {"right": RIGHT, "wrong": WRONG}.items():
        print(f"the {name} response, tokens {response}: {''.join(VOCABULARY[token] for token in response)!r}")
    for what, ours, by_hand in walk("none"):
        ours, by_hand = np.atleast_1d(np.asarray(ours)), np.atleast_1d(by_hand)
        print(what)
        if ours.size > 24:
            print(f"    {ours.size} numbers, largest difference {np.abs(ours - by_hand).max():.1e}")
        else:
            print("    by the code ", str(ours).replace("\n", "\n" + " " * 17))
            print("    by hand     ", str(by_hand).replace("\n", "\n" + " " * 17))


if __name__ == "__main__":
    main()
