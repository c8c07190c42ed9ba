"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response depends on the others in its batch
   by rounding alone, which may flip a token where two are nearly tied.
2. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling: the ratio's pi_old,
   most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch, except on a GPU, which replays a recorded step of fixed shape: see
   plumbing/decoding.py.
4. The responses to a prompt share its forward pass, while sampling and when they are read, up to its last token. A row
   begins with that token, so the state of a row's column t predicts the response's token t:

       column       0      1      2          the prompt "the sky" and the response "is blue ."
       the row      sky    is     blue
       predicts     is     blue   .

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, T columns (while sampling:
as many as a response may have), V vocabulary.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from functools import partial
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.compute import by_rows, distinct_texts, of_like_length
from plumbing.decoding import new_decoder
from qwen2_model import Cache, Qwen2, wide

LOGITS_AT_ONCE = {"cpu": 2**18}  # so many become tokens at a time: on a CPU as many as its cache holds

Replies = Sequence[dict[int, list[int]]]  # for each response, {t: the tokens that it reads before its token t}


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response.

    Log-prob, entropy and logit gradient are those of the model's whole distribution pi, even where a token was excluded
    from the draw.
    """

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), 0 on padding
    entropy: Tensor  # (B, T) entropy of pi before the token, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||: norm of the gradient of log pi in the logits / temperature
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B, what the environment said between the tokens of each, see extras/turns.py; {} in a single turn


# ------------------------------------------------------------------------------------------------- sampling


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token (n, 1) where the cumulative probability passes uniform (n,) times the total.

    p (n, V) is 0 for a token that must not be drawn, so the total may be below 1. The sum is in fp64: fp32 would lose
    the tail of a large vocabulary.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (n, V)
    # right=True finds the first entry strictly above the number. A token of probability 0 adds nothing to the sum, so
    # it is never drawn, unless all are 0.
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)  # (n, 1)
    return token.clamp(max=p.shape[1] - 1)  # NaN gives an index past the end; rollout.py refuses its log-prob


def describe(log_probs: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """Log-prob of a token (n, 1), entropy in nats, and logit gradient, (n, 3), from log_probs and p (n, V).

    The logit gradient ||onehot - p|| is the norm of d log pi / d (logits / temperature). The token's
    own entry of onehot - p is 1 - p_token, which is the sum of the others' p; each other entry is -p. (The shorter form
    sqrt(1 - 2 p_token + sum_v p_v^2) loses all digits where p_token is near 1: in fp32, 0 for true values near 1e-4.)
    """
    entropy = -torch.linalg.vecdot(p, log_probs)
    others = p.scatter(1, token, 0.0)  # (n, V)
    return torch.stack((log_probs.gather(1, token)[:, 0], entropy,
                        torch.hypot(others.sum(1), torch.linalg.vector_norm(others, dim=1))), dim=1)


def draw_and_describe(logits: Tensor, uniform: Tensor, excluded: Tensor | None, greedy: bool) -> tuple[Tensor, Tensor]:
    """A token (n,) from each row of logits (n, V), and its log-prob, entropy and logit gradient (n, 3).

    excluded (n,): a token that must not be drawn. greedy: the most probable token, whatever the random number.
    """
    log_probs = logits.log_softmax(-1)  # (n, V)
    p = log_probs.exp()  # (n, V)
    allowed = p if excluded is None else p.scatter(1, excluded[:, None], 0.0)  # (n, V)
    token = allowed.argmax(1, keepdim=True) if greedy else draw(allowed, uniform)  # (n, 1)
    return token[:, 0], describe(log_probs, p, token)


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
             watch: Callable[[int, float], object] | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): a token that may not be a response's first, so that it goes another way than
    a known one (methods/oracle.py wants that). greedy: take the most probable token, whatever the random number.
    watch(columns, running): called after each column, with their number, and the share of responses still running.
    """
    (B, T), G, device = uniforms.shape, len(uniforms) // len(prompts), model.norm.device
    uniforms, ends = uniforms.to(device), torch.tensor(end_tokens, device=device)
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    facts = wide(torch.zeros(3, B, T, dtype=model.dtype, device=device))  # log-prob, entropy, logit gradient
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    excluded, at_once = None if excluded is None else excluded.to(device), LOGITS_AT_ONCE.get(device.type, 2**26)
    # A tenth faster than no_grad. What is made inside can never get a gradient, so what is returned was made above.
    with torch.inference_mode():
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        cache, token = read_prompts(model, [prompt for prompt in prompts for _ in range(G)])  # of B rows; (B,)
        decoder = new_decoder(model, cache, T)
        for t in range(T):
            logits = model.logits(decoder.states(token))  # (B', V)
            token, found = by_rows(partial(draw_and_describe, greedy=greedy), logits.shape[1], at_once,
                                   logits, uniforms[rows, t], excluded if t == 0 else None)  # (B',), (B', 3)
            tokens[rows, t], mask[rows, t], facts[:, rows, t] = token, True, found.T
            ended[rows] = torch.isin(token, ends)
            running = (limit[rows] > t + 1) & ~ended[rows]  # (B',)
            count = int(running.sum())
            if watch:
                watch(t + 1, count / B)
            if count == 0:
                break
            if count < len(rows):
                order = decoder.keep(running)  # (count,) the old place of each row that stays
                rows, token = rows[order], token[order]
    return Samples(tokens[:, : t + 1], mask[:, : t + 1], *facts[..., : t + 1], ended, ({},) * B)


# ------------------------------------------------------------------------------------------------- prompts


def read_prompts(model: Qwen2, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
    """A cache whose Q rows have read the prompts but for their last tokens; and these tokens (Q,).

    Each distinct text is read once, padded on the right.
    """
    (texts, text_of), device = distinct_texts(prompts), model.norm.device
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)  # (texts, the longest)
    cache = Cache(model, len(texts))
    model.hidden(tokens[:, :-1], cache)
    cache = cache.rows(torch.tensor(text_of, device=device))  # of Q rows
    # Each keeps its prompt but for the last token, and nothing that a longer text or padding has behind that.
    cache.forget_after(torch.tensor([len(prompt) - 1 for prompt in prompts], device=device))
    return cache, torch.tensor([prompt[-1] for prompt in prompts], device=device)


# --------------------------------------------------------------------------------------------- finished responses
# m of the B are read again, b at a time: these have S columns and n sampled tokens. D is the hidden size.


class MicroBatch(NamedTuple):
    """Some of m responses, of about the same length, as the model reads them. Here two, p q r s to the prompt a b c,
    and u v w to d e:

        in the cache    inputs     sampled    tokens
        a b             c p q r    1 1 1 1    p q r s u v w
        d               e u v w    1 1 1 0
    """

    rows: Tensor  # (b,) which of the m they are
    inputs: Tensor  # (b, S) the prompt's last token, then what follows it, but for the very last token
    cache: Cache  # of b rows, which have read their prompts but for the last token
    sampled: Tensor  # (b, S) whether the token that a state predicts was sampled: not so in a reply, nor in padding
    tokens: Tensor  # (n,) these sampled tokens, row by row


def micro_batches(cache: Cache, last: Tensor, prompt_of: Tensor, tokens: Tensor, sampled: Tensor,
                  at_once: int) -> Iterator[MicroBatch]:
    """m responses, ready for the model, at most at_once of like length in a micro-batch. Padding is hardly read.

    cache, last (Q,): what `read_prompts` returned. prompt_of (m,): the prompt of each response. tokens (m, S): what
    follows the prompt. sampled (m, S): True where the policy sampled it, False in replies and in padding.
    """
    inputs = torch.cat((last[prompt_of][:, None], tokens[:, :-1]), dim=1)  # (m, S)
    number = torch.arange(1, 1 + sampled.shape[1], device=sampled.device)  # (S,) 1 2 ... S
    length = (sampled * number).amax(1)  # (m,) the number of the last sampled column
    for rows in of_like_length(length, at_once):
        S = int(length[rows[0]])  # the longest comes first
        real = sampled[rows, :S]  # (b, S)
        yield MicroBatch(rows, inputs[rows, :S], cache.rows(prompt_of[rows]), real, tokens[rows, :S][real])


def predicting_states(model: Qwen2, micro: MicroBatch) -> Tensor:
    """The last hidden states (n, D) that predict the sampled tokens of a micro-batch, with gradient."""
    return model.hidden(micro.inputs, micro.cache)[micro.sampled]


def logprobs(model: Qwen2, micro: MicroBatch) -> Tensor:
    """log pi (n,) of the sampled tokens of a micro-batch, with gradient."""
    return model.logprob(predicting_states(model, micro), micro.tokens)


def read_responses(reader: Callable, model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor,
                   sampled: Tensor, mask: Tensor, given: Sequence[Tensor] = (), at_once: int = 16) -> Tensor:
    """What a reader finds of each sampled token, in the columns of Samples, (m, T, ...).

    A reader is a function such as logprobs(model, micro, ...), which returns (n, ...). Of each tensor that is given,
    (m, T, ...), it gets what these n tokens have. mask (m, T) is that of Samples. The other arguments: see
    `micro_batches`.
    """
    cache, last = read_prompts(model, prompts)
    found = None
    for micro in micro_batches(cache, last, prompt_of, tokens, sampled, at_once):
        i, t = mask[micro.rows].nonzero(as_tuple=True)  # (n,) each: mask has these tokens in the same order
        at = micro.rows[i], t
        values = reader(model, micro, *(x[at] for x in given))  # (n, ...)
        found = values.new_zeros(*mask.shape, *values.shape[1:]) if found is None else found  # (m, T, ...)
        found[at] = values
    return found
