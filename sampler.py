"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
2. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling: the ratio's pi_old,
   most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch, except on a GPU, which replays a recorded step of fixed shape: see
   plumbing/replay.py.
4. A prompt is computed once for all its responses, while sampling and when they are read, up to its last token. A row
   begins with that token, so the state of a row's column t predicts the response's token t:

       column       0      1      2          the prompt "the sky" and the response "is blue ."
       the row      sky    is     blue
       predicts     is     blue   .

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, T response
columns (while sampling: as many as a response may have), V vocabulary, D hidden size.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.replay import Replayed
from qwen2_model import Cache, Qwen2, token_logprobs, wide

LOGITS_AT_ONCE = {"cpu": 2**18}  # logits that are drawn from at once: on a CPU those that stay in its cache
REPLAYED_ON = {"cuda"}  # devices that replay a recorded decode step
LIKE = 0.75  # a response is padded, to be read with longer ones, if it has at least this share of their length

Replies = Sequence[dict[int, list[int]]]  # for each response, by column t: the tokens of the reply read before it


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
    before: Replies  # B, what the environment said between the tokens of each, see turns.py; {} in a single turn


# ------------------------------------------------------------------------------------------------- sampling


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token (n, 1) where the cumulative probability passes uniform (n,) times the total.

    p (n, V) is 0 for a token that must not be drawn, so the total may be below 1. The sum is in fp64: fp32 would lose
    the tail of a large vocabulary.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (n, V)
    # right=True finds the first entry strictly above the number. A token of probability 0 adds nothing to the sum, so
    # it is never drawn.
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)  # (n, 1)
    return token.clamp(max=p.shape[1] - 1)  # NaN gives an index past the end; rollout.py refuses its log-prob


def describe(log_probs: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """Log-prob of a token (n, 1), entropy in nats, and logit gradient (3, n), from log_probs and p (n, V).

    The logit gradient ||onehot - p|| is the norm of d log pi / d (logits / temperature). The token's
    own entry of onehot - p is 1 - p_token, which is the sum of the others' p; each other entry is -p. (The shorter form
    sqrt(1 - 2 p_token + sum_v p_v^2) loses all digits where p_token is near 1: in fp32, 0 for true values near 1e-4.)
    """
    entropy = -torch.linalg.vecdot(p, log_probs)
    others = p.scatter(1, token, 0.0)  # (n, V)
    return torch.stack((log_probs.gather(1, token)[:, 0], entropy,
                        torch.hypot(others.sum(1), torch.linalg.vector_norm(others, dim=1))))


def draw_and_describe(logits: Tensor, greedy: bool, uniform: Tensor,
                    excluded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A token (n,) from each row of logits (n, V), and its log-prob, entropy and logit gradient (3, n).

    excluded (n,): a token that must not be drawn. greedy: the most probable token, whatever the random number.
    """
    log_probs = logits.log_softmax(-1)  # (n, V)
    p = log_probs.exp()  # (n, V)
    allowed = p if excluded is None else p.scatter(1, excluded[:, None], 0.0)  # (n, V)
    token = allowed.argmax(1, keepdim=True) if greedy else draw(allowed, uniform)  # (n, 1)
    return token[:, 0], describe(log_probs, p, token)


def next_tokens(model: Qwen2, hidden: Tensor, uniform: Tensor, excluded: Tensor | None,
                greedy: bool) -> tuple[Tensor, Tensor]:
    """The token (B',) that follows each state hidden (B', D), and its log-prob, entropy and logit gradient (3, B')."""
    logits = model.logits(hidden)  # (B', V)
    size = max(1, LOGITS_AT_ONCE.get(logits.device.type, 2**26) // logits.shape[1])  # rows
    parts = [draw_and_describe(logits[i : i + size], greedy, uniform[i : i + size],
                               None if excluded is None else excluded[i : i + size])
             for i in range(0, len(logits), size)]
    return torch.cat([token for token, _ in parts]), torch.cat([found for _, found in parts], dim=1)


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
             watch: Callable[[int, float], object] | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): a token that may not be a response's first, so that it goes another way than
    a known one (methods/oracle.py wants that). greedy: take the most probable token, whatever the random number.
    watch(columns, running): called after each column, with their number, and the share of responses still running.
    """
    (B, T), G, device = uniforms.shape, len(uniforms) // len(prompts), model.output_weight.device
    uniforms, ends = uniforms.to(device), torch.tensor(end_tokens, device=device)
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    facts = wide(torch.zeros(3, B, T, dtype=model.dtype, device=device))  # log-prob, entropy, logit gradient
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    # A tenth faster than no_grad. Autograd refuses what is made inside, so all that is returned was made above.
    with torch.inference_mode():
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        read, last = read_prompts(model, prompts)
        cache, token = read.rows(rows // G), last[rows // G]  # of B' rows, (B',)
        cache.reserve(T)
        network = model
        if device.type in REPLAYED_ON:  # 2.4 times as fast on a GPU, which waits for Python else
            network = cache = Replayed(model, cache)  # stands in for both
        for t in range(T):
            forbidden = excluded.to(device) if t == 0 and excluded is not None else None  # (B',)
            state = network.hidden(token[:, None], cache)[:, 0]  # (B', D)
            token, found = next_tokens(model, state, uniforms[rows, t], forbidden, greedy)  # (B',), (3, B')
            tokens[rows, t], mask[rows, t], facts[:, rows, t] = token, True, found
            ended[rows] = torch.isin(token, ends)
            running = (limit[rows] > t + 1) & ~ended[rows]  # (B',)
            count = int(running.sum())
            if watch:
                watch(t + 1, count / B)
            if count == 0:
                break
            if count < len(rows):
                order = cache.keep(running)  # (count,) old row in each place
                rows, token = rows[order], token[order]
    return Samples(tokens[:, : t + 1], mask[:, : t + 1], *facts[..., : t + 1], ended, ({},) * B)


# ------------------------------------------------------------------------------------------------- prompts


def distinct_texts(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The prompts that are not a prefix of another, and for each prompt the index of one of these that extends it.

    Of the prompts 1, 1 2 and 1 2 3 the last serves all three. Equal prompts count once. vineppo samples from many
    prefixes of the same response at once; the longest ones have a third of the tokens of all.
    """
    texts, text_of = [], [0] * len(prompts)
    # In descending order, the prompts that begin with q stand together, q last: 1 2 4, 1 2 3, 1 2. So if any text
    # extends q, the latest one, texts[-1], does.
    for q in sorted(range(len(prompts)), key=prompts.__getitem__, reverse=True):
        if not texts or texts[-1][: len(prompts[q])] != prompts[q]:
            texts.append(prompts[q])
        text_of[q] = len(texts) - 1
    return texts, text_of


def asked_prompts(prompts: list[list[int]], prompt_of: Tensor) -> tuple[list[list[int]], Tensor]:
    """Those prompts that some responses answer, prompt_of (b,), and which of these each does (b,)."""
    asked, index = prompt_of.unique(return_inverse=True)
    return [prompts[q] for q in asked.tolist()], index


def read_prompts(model: Qwen2, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
    """A cache whose Q rows have read the prompts but for their last tokens; and these tokens (Q,).

    Each distinct text is read once, padded on the right.
    """
    texts, text_of = distinct_texts(prompts)
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(model.norm.device)  # (texts, P)
    cache = Cache(model, len(texts))
    model.hidden(tokens[:, :-1], cache)
    row = torch.tensor(text_of, device=tokens.device)  # (Q,)
    length = torch.tensor([len(prompt) - 1 for prompt in prompts], device=tokens.device)  # (Q,) without the last token
    cache = cache.rows(row)
    cache.forget_after(length)  # what a longer text or padding has behind it
    return cache, tokens[row, length]


# --------------------------------------------------------------------------------------------- finished responses


class Part(NamedTuple):
    """Some of b responses: r of about the same length, as the model reads them."""

    rows: Tensor  # (r,) which of the b they are
    inputs: Tensor  # (r, S) the prompt's last token, then what follows it, but for the very last token
    cache: Cache  # of r rows, which have read their prompts
    sampled: Tensor  # (r, S) whether the token that a state predicts was sampled: not so in a reply, nor in padding
    tokens: Tensor  # (n,) these sampled tokens, row by row


def in_parts(cache: Cache, last: Tensor, prompt_of: Tensor, tokens: Tensor, sampled: Tensor,
             at_once: int) -> Iterator[Part]:
    """b responses, ready for the model, at most at_once of like length in a part. Padding is hardly read.

    cache, last (Q,): what `read_prompts` returned. prompt_of (b,): the prompt of each response. tokens (b, S): what
    follows the prompt. sampled (b, S): True where the policy sampled it, False in replies and in padding.
    """
    inputs = torch.cat((last[prompt_of, None], tokens[:, :-1]), dim=1)  # (b, S)
    length = (sampled * torch.arange(1, 1 + sampled.shape[1], device=sampled.device)).amax(1)  # (b,) last sampled token
    for rows in of_like_length(length, at_once):
        S = int(length[rows[0]])
        own = sampled[rows, :S]  # (r, S)
        yield Part(rows, inputs[rows, :S], cache.rows(prompt_of[rows]), own, tokens[rows, :S][own])


def of_like_length(length: Tensor, at_once: int) -> list[Tensor]:
    """Rows, given their length (b,), as groups of indices: the longest first, at most at_once in a group, the shortest
    of which has at least LIKE of the longest one's length."""
    groups = []
    for i in length.argsort(descending=True, stable=True).tolist():
        if groups and len(groups[-1]) < at_once and length[i] >= LIKE * length[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [torch.tensor(rows, device=length.device) for rows in groups]


def part_states(model: Qwen2, part: Part) -> Tensor:
    """The last hidden states (n, D) that predict the sampled tokens of a part, with gradient."""
    return model.hidden(part.inputs, part.cache)[part.sampled]


def part_logprobs(model: Qwen2, part: Part) -> Tensor:
    """log pi (n,) of the sampled tokens of a part, with gradient."""
    return token_logprobs(model, part_states(model, part), part.tokens)


def read_responses(reader: Callable, model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor,
                   sampled: Tensor, per_row: Sequence[Tensor] = (), at_once: int = 16) -> Tensor:
    """What a reader finds of each sampled token, (b, S, ...): column t has that of a row's t-th one, then come zeros.

    A reader is a function such as part_logprobs(model, part, ...), which returns (n, ...). It gets the part's rows of
    each tensor of per_row (b, ...), too. prompt_of (b,): the prompt of each. The other arguments: see `in_parts`.
    """
    prompts, prompt_of = asked_prompts(prompts, prompt_of)
    cache, last = read_prompts(model, prompts)
    found = None
    for part in in_parts(cache, last, prompt_of, tokens, sampled, at_once):
        values = reader(model, part, *(x[part.rows] for x in per_row))  # (n, ...)
        found = values.new_zeros(*sampled.shape, *values.shape[1:]) if found is None else found  # (b, S, ...)
        row = part.sampled.nonzero()[:, 0]  # (n,)
        t = part.sampled.cumsum(1)[part.sampled] - 1  # (n,)
        found = found.index_put((part.rows[row], t), values)
    return found


def response_logprobs(model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor,
                      sampled: Tensor) -> Tensor:
    """log pi (b, S) of the sampled tokens of b responses, with gradient; see `read_responses`."""
    return read_responses(part_logprobs, model, prompts, prompt_of, tokens, sampled)
