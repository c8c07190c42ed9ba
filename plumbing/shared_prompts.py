"""Responses are read again, with or without gradient, and each prompt only once for all its
responses. A first reading can skip it: `plain` of grpo.py does the same, each response behind its
own prompt.

Why it is here: a prompt is about as long as a response, and eight responses share it.

Alphabet: Q prompts, m of the B responses, b at a time: these have S columns and n sampled tokens; T
columns of Samples; D hidden size.
"""
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from extras.turns import with_replies
from plumbing.compute import by_length
from qwen2_model import Cache, Qwen2
from sampler import read_prompts


class MicroBatch(NamedTuple):
    """Some of m responses, of about the same length, as the model reads them. Here two, p q r s to
    the prompt a b c, and u v w to d e:

        in the cache    inputs     sampled    tokens
        a b             c p q r    1 1 1 1    p q r s u v w
        d               e u v w    1 1 1 0
    """

    rows: Tensor  # (b,) which of the m they are
    inputs: Tensor  # (b, S) the prompt's last token, then what follows, but for the last one
    cache: Cache  # of b rows, which have read their prompts but for the last token
    sampled: Tensor  # (b, S) whether a state predicts a sampled token: no reply's, no padding
    tokens: Tensor  # (n,) these sampled tokens, row by row


def responses(batch: Any, rows: Tensor) -> tuple[list[list[int]], Tensor, Tensor, Tensor, Tensor]:
    """What `read_responses` takes of the responses rows (m,) of a TokenBatch: their prompts, each
    once; which of these each answers (m,); the tokens behind it (m, S); which of them were sampled
    (m, S); and the mask (m, T). In a single turn the last two are the same."""
    groups, prompt_of = batch.group[rows].unique(return_inverse=True)  # those that occur; (m,)
    prompts = [batch.prompts[q] for q in groups.tolist()]
    before = [batch.before[i] for i in rows.tolist()]
    tokens, mask = batch.tokens[rows], batch.mask[rows]  # (m, T) each
    return prompts, prompt_of, *with_replies(tokens, mask, before), mask


def micro_batches(
    cache: Cache, last: Tensor, prompt_of: Tensor, tokens: Tensor, sampled: Tensor, at_once: int
) -> Iterator[MicroBatch]:
    """m responses, ready for the model, at most at_once of like length in a micro-batch.

    cache, last (Q,): what `read_prompts` returned. prompt_of (m,): the prompt of each response.
    tokens (m, S): what follows the prompt. sampled (m, S): True where the policy sampled it, False
    in replies and in padding.
    """
    inputs = torch.cat((last[prompt_of][:, None], tokens[:, :-1]), dim=1)  # (m, S)
    for rows, S in by_length(sampled, at_once):
        real = sampled[rows, :S]  # (b, S)
        yield MicroBatch(rows, inputs[rows, :S], cache.rows(prompt_of[rows]), real,
                         tokens[rows, :S][real])


def predicting_states(model: Qwen2, micro: MicroBatch) -> Tensor:
    """The last hidden states (n, D) that predict the sampled tokens of some rows, with gradient."""
    return model.hidden(micro.inputs, micro.cache)[micro.sampled]


def logprobs(model: Qwen2, micro: MicroBatch) -> Tensor:
    """log pi (n,) of the sampled tokens of a micro-batch, with gradient."""
    return model.logprob(predicting_states(model, micro), micro.tokens)


def read_responses(
    reader: Callable, model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor,
    sampled: Tensor, mask: Tensor, given: Sequence[Tensor] = (), at_once: int = 16
) -> Tensor:
    """What a reader finds of each sampled token, in the columns of Samples, (m, T, ...).

    A reader is a function such as logprobs(model, micro, ...), which returns (n, ...). Of each
    tensor that is given, (m, T, ...), it gets what these n tokens have. mask (m, T) is that of
    Samples. The other arguments: see `micro_batches`.
    """
    cache, last = read_prompts(model, prompts)
    found = None
    for micro in micro_batches(cache, last, prompt_of, tokens, sampled, at_once):
        i, t = mask[micro.rows].nonzero(as_tuple=True)  # (n,) each, in the same order
        at = micro.rows[i], t
        values = reader(model, micro, *(x[at] for x in given))  # (n, ...)
        if found is None:
            found = values.new_zeros(*mask.shape, *values.shape[1:])  # (m, T, ...)
        found[at] = values
    return found


def shared(model: Qwen2, batch: Any, rows: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What `plain` of grpo.py yields, in three quarters of its time. Call backward on each before
    the next.

    First the prompts are read without gradient, and the backward passes of the responses add up the
    gradient of the cached keys and values. In the end the prompts are read again, with gradient,
    which takes that sum on to the weights.
    """
    prompts, prompt_of, tokens, sampled, mask = responses(batch, rows)
    if not prompts:  # no response has credit
        return
    with torch.no_grad():
        cache, last = read_prompts(model, prompts)
    collected = [x.requires_grad_() for x in (*cache.keys, *cache.values)]
    for micro in micro_batches(cache, last, prompt_of, tokens, sampled, at_once):
        logprob = logprobs(model, micro)  # (n,)
        own = mask[micro.rows]  # (b, T) has the same n tokens in the same order
        yield rows[micro.rows], logprob.new_zeros(own.shape).masked_scatter(own, logprob)
    for i in range(0, len(prompts), at_once):
        again = read_prompts(model, prompts[i : i + at_once])[0]  # fewer columns, if short
        C = again.position.shape[1]
        torch.autograd.backward([*again.keys, *again.values],
                                [x.grad[i : i + at_once, :, :C] for x in collected])
