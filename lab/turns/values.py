"""The exact value of every history of the guessing game (tasks/guess_task.py), read off the model.

A history is what was said so far: the prompt, then turns (a number and the first end token), each followed by the reply
that some secret still possible gives. With 15 numbers and 4 guesses, 11,005 histories have a guess to come. With
pi(g | h) the probability of the tokens of that turn, the policy finds the secret s with probability

    V(h, s) = sum over g of pi(g | h) (1 if g = s, else V(h g reply, s)),       0 once the guesses are used up

and V(h) is its mean over the secrets C(h) that agree with all replies, each as likely as any other. So the model says
pi, and the rest is a sum. The histories are a tree, of which the model reads every token once.

A turn that is no number has value 0, exactly. A number in other tokens, or ended by another end token, counts as such a
turn, too, although the game goes on: of the bundled model's V(prompt) that leaves out 4e-07 at most (checks.md). Values
are of success, not of reward.

Alphabet: n numbers, k guesses; at one level of the tree, after as many turns, R histories.

Run it:  python -m lab.turns.values        the value of a model (--model FOLDER)
"""
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from extras.turns import reply
from plumbing.files import require
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from qwen2_model import Cache
from rollout import Policy
from settings import Settings
from start import load_policy
from tasks import guess_task

ROWS = 32  # histories that are read together, each with all its numbers: few enough for a CPU's cache


class Level(NamedTuple):
    """The R histories with the same number of turns. Of replies, 0 is higher and 1 is lower."""

    low: np.ndarray  # (R,) the smallest secret that is still possible
    high: np.ndarray  # (R,) the largest one
    child: np.ndarray  # (R, n, 2) the row of the level below, by guess - 1 and reply; -1 where no secret leads there

    @property
    def possible(self) -> np.ndarray:
        """Whether a secret is (R, n), by secret - 1."""
        s = np.arange(1, self.child.shape[1] + 1)
        return (self.low[:, None] <= s) & (s <= self.high[:, None])


def histories(n: int, k: int) -> list[Level]:
    """The k levels of the tree of a game of n numbers and k guesses."""
    low, high, g, found = np.array([1]), np.array([n]), np.arange(1, n + 1), []
    for _ in range(k):
        lows = np.stack(np.broadcast_arrays(np.maximum(low[:, None], g + 1), low[:, None]), -1)  # (R, n, 2)
        highs = np.stack(np.broadcast_arrays(high[:, None], np.minimum(high[:, None], g - 1)), -1)  # (R, n, 2)
        open_ = lows <= highs
        child = np.where(open_, open_.cumsum().reshape(open_.shape) - 1, -1)
        found.append(Level(low, high, child))
        low, high = lows[open_], highs[open_]
    return found


class Words(NamedTuple):
    """The tokens of the game."""

    prompt: list[int]
    numbers: list[int]  # n, of 1 to n
    end: int  # the first end token
    replies: list[list[int]]  # of higher and of lower


def words_of(policy: Policy, n: int) -> Words:
    """The tokens of a game of n numbers. ValueError where a number takes several, or the replies differ in length."""
    numbers, end = [policy.tokenizer.encode(str(g)) for g in range(1, n + 1)], policy.tokenizer.end_tokens[0]
    replies = [reply(policy, guess_task.Puzzle(n, secret, 0), [*numbers[1], end]) for secret in (3, 1)]
    require({len(x) for x in numbers} == {1} and len(replies[0]) == len(replies[1]),
            "exact values need a model that writes each number as one token, and replies of the same length")
    return Words(policy.prompt(guess_task.Puzzle(n, 1, 0)), [x for x, in numbers], end, replies)


class Tree(NamedTuple):
    """What is known of all histories. Lists have an entry for each level."""

    levels: list[Level]
    V: list[np.ndarray]  # (R, n) V(h, s) by secret - 1, 0 where that is impossible
    tokens: int  # that the model read


@torch.no_grad()
def grow(policy: Policy, n: int = guess_task.N) -> Tree:
    """The tree of a game of n numbers under a policy."""
    levels, words = histories(n, guess_task.GUESSES), words_of(policy, n)
    pi = [np.zeros((len(level.low), n)) for level in levels]  # (R, n) each, by guess - 1
    tokens = read_level(policy, words, levels, 0, np.array([0]), Cache(policy.model, 1),
                        torch.tensor([words.prompt]), pi)
    V = [pi[-1]]  # 0 for impossible numbers
    for level, p in zip(levels[-2::-1], pi[-2::-1]):
        below = np.concatenate((V[0], np.zeros((1, n))))  # a child -1 has value 0
        up = np.arange(n) > np.arange(n)[:, None]  # (n, n) whether the secret is above the guess
        then = np.where(up, below[level.child[:, :, 0]], below[level.child[:, :, 1]]) + np.eye(n)  # (R, n, n)
        V.insert(0, np.einsum("rg,rgs->rs", p, then) * level.possible)
    return Tree(levels, V, tokens)


def read_level(policy: Policy, words: Words, levels: list[Level], depth: int, rows: np.ndarray, cache: Cache,
               step: Tensor, pi: list[np.ndarray]) -> int:
    """Read what leads to some histories of a level, step (r, W), behind the cache of what came before, then every
    number that may follow, then the levels below. rows (r,): the histories. Fills `pi` (R, n) of each level. Returns how
    many tokens were read."""
    level, n = levels[depth], len(words.numbers)
    wanted = np.ones((len(rows), n), bool) if depth + 1 < len(levels) else level.possible[rows]  # (r, n)
    r, g = map(torch.from_numpy, np.nonzero(wanted))  # (M,) each: a row, and guess - 1
    numbers = torch.tensor(words.numbers)  # (n,)
    p = policy.model.logits(policy.model.hidden(step, cache)[:, -1]).softmax(-1)[r, numbers[g]]  # (M,)
    cache = cache.rows(r)
    q = policy.model.logits(policy.model.hidden(numbers[g][:, None], cache)[:, -1]).softmax(-1)[:, words.end]  # (M,)
    pi[depth][rows[r], g] = (p * q).double()
    total = step.numel() + len(g)
    if depth + 1 < len(levels):
        place = np.full(wanted.shape, -1)
        place[wanted] = np.arange(len(g))  # of a row and guess in the cache
        below = level.child[rows]  # (r, n, 2)
        row, guess, said = np.nonzero(below >= 0)  # in the order of the level below
        replies = torch.tensor([[words.end, *text] for text in words.replies])  # (2, W)
        for part in np.array_split(np.arange(len(row)), -(-len(row) // ROWS)):
            some = cache.rows(torch.from_numpy(place[row[part], guess[part]]))
            total += read_level(policy, words, levels, depth + 1, below[row, guess, said][part], some,
                                replies[said[part]], pi)
    return total


@one_sentence()
def main() -> None:
    """Say what a model's value is."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default="", help="a model folder, such as a run's checkpoint; empty: the bundled")
    policy = load_policy(Settings(task="guess", model=parser.parse_args().model))
    began = time.process_time()
    tree = grow(policy)
    print(f"V(prompt) {tree.V[0].mean():.6f}; {sum(len(level.low) for level in tree.levels):,} histories, "
          f"{tree.tokens:,} tokens, {time.process_time() - began:.1f} s of a core")


if __name__ == "__main__":
    main()
