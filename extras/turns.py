"""Several turns: what the environment says between them, and episodes, which are sampled turn by turn.

A task with `reply` (tasks/guess_task.py) answers a turn of the policy, which ends with an end token, until it has
nothing more to say. An episode is `generate` of sampler.py called again, from the text so far with the reply behind it.
Its columns are the *sampled* tokens alone, so a function of (B, T) tensors stays true if it doesn't ask whether two
responses have read the same: an environment that draws its replies may tell them different things. Replies stand beside
the columns: before[i][t] has the tokens that response i read before it sampled the token of column t.

How this differs from a usual rollout in turns: nothing is kept between turns. The next one reads the whole text again,
which costs a forward pass over it. So no cache needs to know of replies.

Alphabet: B responses, T tokens of a response at most, n responses that take a turn, W tokens of a turn at most.

Run it:  python train.py --task guess
"""
from itertools import pairwise
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.task_file import check_pieces
from qwen2_model import Qwen2
from sampler import Replies, Samples, generate

# ----------------------------------------------------------------------------------------------- texts in turns


def turn_ends(policy: Any, tokens: list[int]) -> list[int]:
    """The columns that follow an end token, where a reply may stand."""
    return [t for t, token in enumerate(tokens, 1) if token in policy.tokenizer.end_tokens]


def reply(policy: Any, puzzle: Any, tokens: list[int]) -> list[int] | None:
    """What the task says after these tokens of a response, the last of which ended a turn; None where it is over.

    It is told the policy's own turns alone: a model that writes a reply itself deceives nobody.
    """
    _, _, turns = decode(policy, tokens, {})
    said = policy.task.reply(turns, puzzle, policy.tokenizer.chat)
    return None if said is None else policy.tokenizer.encode(*check_pieces(said, "reply"))


def replies(policy: Any, puzzle: Any, tokens: list[int]) -> dict[int, list[int]]:
    """The replies, by column, in a response that begins with these tokens and goes on after them."""
    several = hasattr(policy.task, "reply")
    return {t: reply(policy, puzzle, tokens[:t]) for t in turn_ends(policy, tokens)} if several else {}


def interleave(tokens: list, before: dict[int, list]) -> list:
    """The tokens of a response with the replies before each, and behind the last."""
    if not before:
        return tokens
    return [x for t in range(len(tokens) + 1) for x in (*before.get(t, ()), *tokens[t : t + 1])]


class Prefix(NamedTuple):
    """What responses begin with: a puzzle's prompt, and perhaps tokens of a response to it, with the replies so far."""

    puzzle: Any
    prompt: list[int]
    tokens: list[int] = []
    before: dict[int, list[int]] = {}  # as in Samples

    @property
    def response(self) -> list[int]:
        """The response so far: all that the model reads behind the prompt."""
        return interleave(self.tokens, self.before)


def with_replies(tokens: Tensor, mask: Tensor, before: Replies) -> tuple[Tensor, Tensor]:
    """Responses (m, T) with the replies that were read between their tokens: all tokens (m, S), and which of these were
    sampled (m, S). S is at least T. mask (m, T): False on padding."""
    if not any(before):
        return tokens, mask
    texts, sampled = [], []  # m each
    for row, real, said in zip(tokens.tolist(), mask.tolist(), before):
        texts.append(torch.tensor(interleave(row, said)))
        sampled.append(torch.tensor(interleave(real, {t: [False] * len(words) for t, words in said.items()})))
    return tuple(pad_sequence(rows, batch_first=True).to(mask.device) for rows in (texts, sampled))


def decode(policy: Any, tokens: list[int], before: dict[int, list[int]]) -> tuple[str, list[tuple], list[str]]:
    """The text of a response with the replies between its turns, the span of each token, and the texts of its turns."""
    tokenizer, text, spans, turns = policy.tokenizer, "", [], []
    for a, b in pairwise(sorted({0, *turn_ends(policy, tokens), *before, len(tokens)})):  # tokens[a:b] is a turn
        text += tokenizer.decode(before.get(a, ()))[0]
        turn, places = tokenizer.decode(tokens[a:b])
        spans += [(len(text) + start, len(text) + stop) for start, stop in places]
        text, turns = text + turn, [*turns, turn]
    return text, spans, turns


# ----------------------------------------------------------------------------------------------- episodes


def play(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int], limit: Tensor | None,
         excluded: Tensor | None, greedy: bool, watch: Callable[[int, float], object] | None,
         reply: Callable[[int, list[int]], list[int] | None]) -> Samples:
    """Sample an episode for each row of uniforms (B, T): `generate`, whose other arguments are explained there, again
    and again. A row's n-th sampled token belongs to its n-th random number, whatever was said in between.

    reply(row, tokens): what a row reads after these tokens, the last of which ended a turn; None if the episode is
    over. limit counts what is read, too. A reply that leaves no room for a further token is not read: that response is
    cut off. excluded acts on the first turn.
    """
    (B, T), G = uniforms.shape, len(uniforms) // len(prompts)
    sampled, before, ended = [[] for _ in range(B)], tuple({} for _ in range(B)), [False] * B
    fields = [[[] for _ in range(B)] for _ in range(5)]  # tokens to logit_grad: of each response, turn by turn
    limits, rows = [T] * B if limit is None else limit.tolist(), list(range(B))
    while rows:  # the n that take a turn
        read = [interleave(sampled[i], before[i]) for i in rows]  # n, what stands behind the prompt so far
        left = [limits[i] - len(text) for i, text in zip(rows, read)]  # n, how many more tokens fit
        u = pad_sequence([uniforms[i, len(sampled[i]) :][:k] for i, k in zip(rows, left)], batch_first=True)  # (n, W)
        texts = [prompts[i // G] + text for i, text in zip(rows, read)]  # n
        show = watch and (lambda t, running: watch(T - u.shape[1] + t, running * len(rows) / B))
        turn = generate(model, texts, u, end_tokens, torch.tensor(left), excluded, greedy, show)
        turn, going = Samples(*(x.cpu() for x in turn[:6]), turn.before), []
        for row, i in enumerate(rows):
            for field, x in zip(fields, turn[:5]):  # (n, W) each
                field[i].append(x[row, turn.mask[row]])
            new = turn.tokens[row, turn.mask[row]].tolist()
            sampled[i] += new
            said = reply(i, sampled[i]) if turn.ended[row] else None
            ended[i] = bool(turn.ended[row]) and said is None
            if said is not None and len(new) + len(said) < left[row]:  # room for a further token
                before[i][len(sampled[i])] = said
                going.append(i)
        rows, excluded = going, None
    columns = (pad_sequence([*map(torch.cat, field)], batch_first=True) for field in fields)  # (B, T) each
    return Samples(*(x.to(model.norm.device) for x in (*columns, torch.tensor(ended))), before)
