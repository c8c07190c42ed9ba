"""Several turns: what the environment says between them, and episodes, which are sampled turn by turn.

A task with `reply` (tasks/guess_task.py) answers a turn of the policy, which ends with an end token, until it has
nothing more to say. An episode is `generate` of sampler.py called again, from the text so far with the reply behind it.
Its columns are the *sampled* tokens alone, so every function of (B, T) tensors stays true. Replies stand beside them:
before[i][t] has the tokens that response i read before it sampled the token of column t.

How this differs from a usual rollout in turns: nothing is kept between turns. The next one reads the whole text again,
which costs a forward pass over it and saves a cache that knows of replies.

Alphabet: B responses, T tokens of a response at most, W tokens of a turn. A policy is a Policy of rollout.py.

Run it:  python train.py --task guess
"""
from itertools import pairwise
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.task_file import check_pieces
from qwen2_model import Qwen2
from sampler import Replies, Samples, generate

# ----------------------------------------------------------------------------------------------- texts in turns


def reply(policy: Any, puzzle: Any, tokens: list[int]) -> list[int] | None:
    """What the task says after these tokens of a response, the last of which ended a turn; None where it is over.

    It is told the policy's own turns alone: a model that writes a reply itself forges nothing.
    """
    *_, turns = decode(policy, tokens, {})
    said = policy.task.reply(turns, puzzle, policy.tokenizer.chat)
    return None if said is None else policy.tokenizer.encode(*check_pieces(said, "reply"))


def replies(policy: Any, puzzle: Any, tokens: list[int]) -> dict[int, list[int]]:
    """What was said before each column of a response that begins with these tokens, and goes on after them."""
    if not hasattr(policy.task, "reply"):
        return {}
    ends = policy.tokenizer.end_tokens
    return {t: reply(policy, puzzle, tokens[:t]) for t, token in enumerate(tokens, 1) if token in ends}


def transcript(policy: Any, puzzle: Any, tokens: list[int]) -> list[int]:
    """What the model reads behind the prompt before it continues these tokens of a response: all that was said."""
    return interleave(tokens, replies(policy, puzzle, tokens))


def interleave(tokens: list[int], before: dict[int, list[int]]) -> list[int]:
    """The tokens of a response with the replies before each, and behind the last."""
    return [x for t in range(len(tokens) + 1) for x in (*before.get(t, ()), *tokens[t : t + 1])]


def with_replies(tokens: Tensor, mask: Tensor, before: Replies) -> tuple[Tensor, Tensor]:
    """Responses (b, T) with the replies that were read between their tokens: all tokens (b, S), and which of these were
    sampled (b, S), as many in each row as the mask (b, T) has. S is at least T."""
    if not any(before):
        return tokens, mask
    own = [row[real].tolist() for row, real in zip(tokens, mask)]  # b
    rows = [interleave(row, replies) for row, replies in zip(own, before)]
    sampled = [interleave([1] * len(row), {t: [0] * len(said) for t, said in replies.items()})
               for row, replies in zip(own, before)]
    as_wide = [0] * mask.shape[1]
    padded = [pad_sequence([torch.tensor(row) for row in (*x, as_wide)], batch_first=True)[:-1].to(mask.device)
              for x in (rows, sampled)]
    return padded[0], padded[1].bool()


def decode(policy: Any, tokens: list[int], before: dict[int, list[int]]) -> tuple[str, list[tuple], list[str]]:
    """The text of a response with its replies, the span of each of its tokens, and the texts of its own turns."""
    tokenizer, text, spans, turns = policy.tokenizer, "", [], []
    stops = [t for t, token in enumerate(tokens, 1) if token in tokenizer.end_tokens]
    for a, b in pairwise(sorted({0, *stops, len(tokens)})):
        text += tokenizer.decode(before.get(a, ()))[0]
        turn, own = tokenizer.decode(tokens[a:b])
        spans += [(len(text) + start, len(text) + stop) for start, stop in own]
        text, turns = text + turn, [*turns, turn]
    return text, spans, turns


# ----------------------------------------------------------------------------------------------- episodes


def listener(policy: Any, asked: list[tuple], G: int) -> Callable[[int, list[int]], list[int] | None]:
    """The `reply` of `play` for G responses to each that is asked of `sample` in rollout.py."""
    def hears(row: int, tokens: list[int]) -> list[int] | None:
        puzzle, prefix, _ = asked[row // G]
        return reply(policy, puzzle, prefix + tokens)
    return hears


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
    limit = torch.full((B,), T) if limit is None else limit.cpu()  # (B,)
    turn = generate(model, prompts, uniforms, end_tokens, limit, excluded, greedy, watch)
    padded = [F.pad(x, (0, T - x.shape[1])) for x in turn[:5]]  # (B, T) each
    samples, rows = Samples(*padded, turn.ended, tuple({} for _ in range(B))), list(range(B))
    while rows := hear(samples, rows, limit.tolist(), reply):  # those n that go on
        own, count = [samples.tokens[i][samples.mask[i]].tolist() for i in rows], samples.mask[rows].sum(1)  # (n,)
        said = [interleave(tokens, samples.before[i]) for i, tokens in zip(rows, own)]  # n
        left = limit[rows] - torch.tensor(list(map(len, said)))  # (n,) of the limit
        column = count[:, None] + torch.arange(W := int(left.max()), device=count.device)  # (n, W)
        u = uniforms[rows].gather(1, column.clamp(max=T - 1).to(uniforms.device))  # (n, W)
        texts = [prompts[i // G] + text for i, text in zip(rows, said)]  # n
        turn = generate(model, texts, u, end_tokens, left, None, greedy,
                        watch and (lambda columns, running: watch(T - W + columns, running * len(rows) / B)))
        r, t = turn.mask.nonzero(as_tuple=True)
        for x, new in zip(samples, turn[:5]):
            x[torch.tensor(rows, device=r.device)[r], column[r, t]] = new[r, t]
        samples.ended[rows] = turn.ended
    longest = int(samples.mask.sum(1).max())
    return Samples(*(x[:, :longest] for x in samples[:5]), *samples[5:])


def hear(samples: Samples, rows: list[int], limit: list[int], reply: Callable) -> list[int]:
    """Tell each row whose turn has ended the reply to it. Returns the rows that go on; arguments as of `play`."""
    going = []
    for i in [i for i in rows if samples.ended[i]]:
        tokens, before = samples.tokens[i][samples.mask[i]].tolist(), samples.before[i]
        said = reply(i, tokens)
        samples.ended[i] = said is None
        if said is not None and limit[i] > len(interleave(tokens, before)) + len(said):
            before[len(tokens)] = said
            going.append(i)
    return going
