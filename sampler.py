"""Sampling: responses grow token by token on a KV cache.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response depends on the
   others in its batch by rounding alone, which may flip a token where two are nearly tied.
2. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling:
   the ratio's pi_old, most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch, except on a GPU, which replays a recorded step of
   fixed shape: see plumbing/decoding.py.
4. The responses to a prompt share its forward pass, up to its last token. Each begins with that
   token, so the state of its column t predicts the response's token t:

       column       0      1      2          the prompt "the sky" and the response "is blue ."
       the row      sky    is     blue
       predicts     is     blue   .

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, T
columns (while sampling: as many as a response may have), V vocabulary.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.compute import by_rows, distinct_texts
from plumbing.decoding import new_decoder
from qwen2_model import Cache, Qwen2, wide

LOGITS_AT_ONCE = {"cpu": 2**18}  # so many at a time: on a CPU as many as its cache holds

Replies = Sequence[dict[int, list[int]]]  # each {t: what is read before token t}


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response.

    Log-prob, entropy and logit gradient are those of the model's whole distribution pi, even where
    a token was excluded from the draw.
    """

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), 0 on padding
    entropy: Tensor  # (B, T) entropy of pi before the token, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, see `describe`
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B, what each was told between turns, see extras/turns.py; else {}


class Rules(NamedTuple):
    """Exceptions to the rule that a response has up to T tokens, each drawn from the whole pi."""

    limit: Tensor | None = None  # (B,) the tokens that each response may have; None: T
    excluded: Tensor | None = None  # (B,) what the first token may not be: methods/oracle.py
    greedy: bool = False  # take the most probable token, whatever the random number
    # Called after each column, with their number, and the share of responses still running.
    watch: Callable[[int, float], object] = lambda columns, running: None


# ----------------------------------------------------------------------------------------- a token


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token (n, 1) where the cumulative probability passes uniform (n,)
    times the total.

    p (n, V) is 0 for a token that must not be drawn, so the total may be below 1. The sum is in
    fp64: fp32 would lose the tail of a large vocabulary.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (n, V)
    # right=True finds the first entry strictly above the number. A token of probability 0 adds
    # nothing to the sum, so it is never drawn, unless all are 0.
    number = uniform[:, None] * cumulative[:, -1:]  # (n, 1)
    token = torch.searchsorted(cumulative, number, right=True)  # (n, 1)
    # NaN gives an index past the end; rollout.py refuses its log-prob.
    return token.clamp(max=p.shape[1] - 1)


def describe(log_probs: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """Log-prob of a token (n, 1), entropy in nats, and logit gradient, (n, 3), from log_probs and
    p (n, V).

    The logit gradient ||onehot - p|| is the norm of d log pi / d (logits / temperature). The
    token's own entry of onehot - p is 1 - p_token, which is the sum of the others' p; each other
    entry is -p. (The shorter form sqrt(1 - 2 p_token + sum_v p_v^2) loses all digits where p_token
    is near 1: in fp32, 0 for true values near 1e-4.)
    """
    entropy = -torch.linalg.vecdot(p, log_probs)
    others = p.scatter(1, token, 0.0)  # (n, V)
    norm = torch.hypot(others.sum(1), torch.linalg.vector_norm(others, dim=1))  # (n,)
    return torch.stack((log_probs.gather(1, token)[:, 0], entropy, norm), dim=1)


def choose(
    logits: Tensor, uniform: Tensor, excluded: Tensor | None = None, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """A token (n,) from each row of logits (n, V), and what `describe` finds of it (n, 3).

    uniform, excluded (n,). It takes some rows at a time, which the processor's cache holds.
    """
    def some(logits: Tensor, uniform: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)  # (n, V)
        p = log_probs.exp()  # (n, V)
        allowed = p if excluded is None else p.scatter(1, excluded[:, None], 0.0)  # (n, V)
        token = allowed.argmax(1, keepdim=True) if greedy else draw(allowed, uniform)  # (n, 1)
        return token[:, 0], describe(log_probs, p, token)

    at_once = LOGITS_AT_ONCE.get(logits.device.type, 2**26)
    return by_rows(some, logits.shape[1], at_once, logits, uniform, excluded)


# --------------------------------------------------------------------------------------- responses


def generate(
    model: Qwen2,
    prompts: list[list[int]],
    uniforms: Tensor,
    end_tokens: list[int],
    rules: Rules = Rules(),
) -> Samples:
    """Sample G responses to each of Q prompts; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one
    of end_tokens, or after T tokens, or where the rules say so.
    """
    B, T = uniforms.shape
    G = B // len(prompts)
    device = model.norm.device
    uniforms = uniforms.to(device)
    ends = torch.tensor(end_tokens, device=device)
    limit = (torch.full((B,), T) if rules.limit is None else rules.limit).to(device)  # (B,)
    excluded = None if rules.excluded is None else rules.excluded.to(device)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    facts = wide(torch.zeros(3, B, T, dtype=model.dtype, device=device))  # what `describe` finds
    length = torch.zeros(B, dtype=torch.long, device=device)
    # A tenth faster than no_grad. What is made inside can never get a gradient; what is returned
    # was made above.
    with torch.inference_mode():
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        cache, token = read_prompts(model, [prompt for prompt in prompts for _ in range(G)])
        decoder = new_decoder(model, cache, T)
        for t in range(T):
            logits = model.logits(decoder.states(token))  # (B', V)
            never = excluded if t == 0 else None
            token, found = choose(logits, uniforms[rows, t], never, rules.greedy)  # (B',), (B', 3)
            tokens[rows, t] = token
            facts[:, rows, t] = found.T
            length[rows] = t + 1
            running = ~torch.isin(token, ends) & (limit[rows] > t + 1)  # (B',)
            rows, token = decoder.keep(running, rows, token)
            rules.watch(t + 1, len(rows) / B)
            if len(rows) == 0:
                break
    mask = torch.arange(t + 1, device=device) < length[:, None]  # (B, T): T is now the longest
    ended = torch.isin(tokens.gather(1, length[:, None] - 1)[:, 0], ends)  # (B,)
    return Samples(tokens[:, : t + 1], mask, *facts[..., : t + 1], ended, ({},) * B)


def read_prompts(model: Qwen2, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
    """A cache whose Q rows have read the prompts but for their last tokens; and these tokens (Q,).

    A text is read once, and one that begins another not by itself. Padded on the right.
    """
    (texts, text_of), device = distinct_texts(prompts), model.norm.device
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
    cache = Cache(model, len(texts))
    model.hidden(tokens[:, :-1], cache)
    cache = cache.rows(torch.tensor(text_of, device=device))  # of Q rows
    # Each keeps its prompt but for the last token, and nothing that a longer text or padding has
    # behind that.
    cache.forget_after(torch.tensor([len(prompt) - 1 for prompt in prompts], device=device))
    return cache, torch.tensor([prompt[-1] for prompt in prompts], device=device)
