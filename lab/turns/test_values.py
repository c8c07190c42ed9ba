"""Exact values against brute force: every text that the model can write, summed."""
from functools import cache

import numpy as np
import pytest
import torch

from extras.turns import decode, interleave, replies, reply
from lab.turns.values import grow, histories
from rollout import Policy
from tasks import guess_task
from tasks.guess_task import Puzzle
from tests.fixtures import Pieces
from tests.test_grpo import tiny

IDS = {"1": [1], "2": [2], "3": [3], "4": [4], "\nhigher\n": [5, 1], "\nlower\n": [5, 2]}


def six_tokens(end_tokens):
    """A random policy whose vocabulary is an end token, 1 to 4, and one more, which may be an end token, too."""
    tokenizer = Pieces(["" if token in end_tokens else " 1234?"[token] for token in range(6)])
    tokenizer.end_tokens, tokenizer.encode = end_tokens, lambda text: IDS.get(text, [5, 3])
    model = tiny(seed=4).double()  # with which secrets are found in other tokens, too
    model.real_vocab, model.temperature = 6, 0.8
    return Policy(model, tokenizer, guess_task)


@cache
def game(*end_tokens):
    """The policy; and by secret, every text that ends the game or has four tokens: tokens, log-probs, success."""
    policy = six_tokens([*end_tokens])
    found, open_ = {secret: [] for secret in range(1, 5)}, [(secret, [], []) for secret in range(1, 5)]
    while open_:
        texts = [policy.prompt(puzzle) + interleave(tokens, replies(policy, puzzle, tokens))
                 for puzzle, tokens in ((Puzzle(4, secret, 0), tokens) for secret, tokens, _ in open_)]
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)  # (R, C)
        logits = policy.model(rows)[range(len(rows)), [len(text) - 1 for text in texts], :6]  # (R, 6)
        longer = [(secret, [*tokens, x], [*others, logprob[x]]) for (secret, tokens, others), logprob
                  in zip(open_, (logits / 0.8).log_softmax(-1)) for x in range(6)]
        open_ = []
        for secret, tokens, logprobs in longer:
            ended = tokens[-1] in policy.tokenizer.end_tokens and reply(policy, Puzzle(4, secret, 0), tokens) is None
            if ended or len(tokens) == 4:
                success = guess_task.grade("", Puzzle(4, secret, 0), decode(policy, tokens, {})[2])["answer"]
                found[secret].append((tokens, torch.stack(logprobs), success))
            else:
                open_.append((secret, tokens, logprobs))
    return policy, found


def brute_force(found, tokens):
    """The chance to find the secret after these tokens: the sum over all texts that begin so."""
    rest = [(logprob[len(tokens):].sum().exp().item(), success) for text, logprob, success in found
            if text[: len(tokens)] == tokens]
    assert sum(p for p, _ in rest) == pytest.approx(1)
    return sum(p * success for p, success in rest)


@pytest.fixture(autouse=True)
def two_guesses(monkeypatch):
    monkeypatch.setattr(guess_task, "GUESSES", 2)


def test_values_equal_the_sum_over_all_texts():
    """Guards against a token at a wrong place or position, a reply that is not read, and another temperature."""
    policy, texts = game(0)
    tree = grow(policy, 4)
    assert [len(level.low) for level in tree.levels] == [1, 6]
    for secret, found in texts.items():
        assert tree.V[0][0, secret - 1] == pytest.approx(brute_force(found, []), abs=1e-9)
        for (g, reply), row in np.ndenumerate(tree.levels[0].child[0]):
            value = brute_force(found, [g + 1, 0]) if (secret < g + 1) == reply and secret != g + 1 else 0
            assert row == -1 or tree.V[1][row, secret - 1] == pytest.approx(value, abs=1e-9)


def in_other_tokens(tokens):
    """Whether a text has a number that token 5 ends, after turns that token 0 ends."""
    turns = list(zip(tokens[::2], tokens[1::2]))
    return any(0 < g < 5 and end == 5 and all(0 < x < 5 and y == 0 for x, y in turns[:i])
               for i, (g, end) in enumerate(turns))


def test_values_leave_out_numbers_in_other_tokens():
    """A second end token lets the game go on in texts that are no history. Their success is what V(prompt) lacks."""
    policy, texts = game(0, 5)
    tree = grow(policy, 4)
    for secret, found in texts.items():
        left_out = 0.0
        for tokens, logprob, success in found:
            left_out += logprob.sum().exp().item() * success * in_other_tokens(tokens)
        assert left_out > 1e-3
        assert tree.V[0][0, secret - 1] == pytest.approx(brute_force(found, []) - left_out, abs=1e-9)


def test_the_tree_of_the_game():
    """11,005 histories in all; a child is reached by the reply that its parent's guess gets."""
    levels = histories(15, 4)
    assert [len(level.low) for level in levels] == [1, 28, 574, 10402]
    assert (levels[1].low[levels[0].child[0, 6, 0]], levels[1].high[levels[0].child[0, 6, 1]]) == (8, 6)
