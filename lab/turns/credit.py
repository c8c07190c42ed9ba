"""The exact credit of a turn in the guessing game, as a credit function of train.py: a ceiling, not a method.

With V(h, s) of values.py, a turn that guesses g changes the chance to find the secret s by

    A1 = V(h g reply, s) - V(h, s),      with 1 for the first term if g = s
    A2 = the mean of A1 over the secrets C(h) that were still possible: before the reply is known

A1 - A2 is luck: whether the secret was where the guess looked for it. A turn that is no number has -V. Inside a turn V
is the same sum given its tokens so far, so the A1 of a response's tokens sum to its success - V(prompt, s). The tree is
made anew in every step, and its tokens are charged as read.

Run it:  python -m lab.turns.credit --task guess --mitigation exact_turns --luck false      a step takes three seconds
"""
import numpy as np
import torch
from torch import Tensor

import train
from lab.turns.values import Tree, grow
from mitigations import token_credit
from plumbing.registry import require
from rollout import TokenBatch


def exact_turns(batch: TokenBatch, luck: bool = True, mix: float = 0.0) -> Tensor:
    """credit = A1, the exact change of V(h, s), or with luck=False A2, its mean over the secrets still possible (ours).

    --mix m takes (1 - m) of that + m (success - V(prompt, s)), the same on all tokens: every m, and either of both, has
    the same expected gradient. So they change how noisy the update is, and nothing else.
    """
    require(0 <= mix <= 1, "--mix must be between 0 and 1")
    tree = grow(batch.ask.policy, batch.puzzles[0].n)
    k = len(tree.levels)
    needed = 2 * k + (k - 1) * len(tree.words.replies[0])
    require(batch.ask.step == 0 or batch.ask.s.max_new_tokens >= needed,  # the trial step, 0, may cut a game off
            f"--max_new_tokens must be at least {needed}: so long is a game of {k} guesses")
    batch.ask.tokens_read += tree.tokens
    exact = torch.zeros(batch.mask.shape, dtype=torch.float64)  # (B, T)
    for i, (row, mask, success) in enumerate(zip(batch.tokens, batch.mask, batch.success.tolist())):
        found = credits_along(tree, row[mask].tolist(), batch.puzzles[batch.group[i]].secret, success)  # (2, L)
        exact[i, : mask.sum()] = torch.from_numpy(found[0 if luck else 1])
    start = torch.from_numpy(tree.V[0][0]).to(exact)[[puzzle.secret - 1 for puzzle in batch.puzzles]]  # (Q,)
    return (1 - mix) * exact + mix * (batch.success - start[batch.group])[:, None]


def credits_along(tree: Tree, tokens: list[int], secret: int, success: float) -> np.ndarray:
    """A1 and A2 (2, L) of the L tokens of a response, in a game for a secret."""
    level, row, guess, alive, before, found = 0, 0, None, True, tree.V[0][0], []  # values are (n,), by secret - 1
    for token in tokens:
        here = tree.levels[level]
        number = alive and guess is None and token in tree.words.numbers
        ended = alive and guess is not None and token == tree.words.end
        alive = number or ended
        if number:
            guess = tree.words.numbers.index(token)
        after = tree.after[level][row, guess] * (tree.end[level][row, guess] if number else 1) if alive else 0 * before
        change = after - before
        found.append([change[secret - 1], change[here.low[row] - 1 : here.high[row]].mean()])
        before = after
        if ended and guess != secret - 1 and level + 1 < len(tree.levels):
            level, row = level + 1, here.child[row, guess, int(secret - 1 < guess)]
            guess, before = None, tree.V[level][row]
    found[-1][0] += success - before[secret - 1]  # not 0 only where the game went on in other tokens
    return np.array(found).T


def main() -> None:
    """train.py with this function among its own."""
    token_credit(exact_turns)
    train.main()


if __name__ == "__main__":
    main()
