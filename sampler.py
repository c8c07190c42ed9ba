"""Sampling on a KV cache; and reading responses again, with gradient for an update, or without.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response depends on the
   others in its batch by rounding alone, which may flip a token where two are nearly tied.
2. Log-prob, entropy and logit gradient of each token are recorded while sampling (see Samples): the
   ratio's pi_old, most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch. (On a GPU they stay: extras/recorded.py.)
4. A prompt is read once for all its responses, up to its last token. Each response begins with that
   token, so the state of its column t predicts the response's token t:

       column       0      1      2          the prompt "the sky" and the response "is blue ."
       the row      sky    is     blue
       predicts     is     blue   .

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, T
columns (while sampling: as many as a response may have), V vocabulary, D hidden size. Reading: m of
the responses, b of like length at a time, with n sampled tokens; S columns, replies included.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from extras.recorded import RecordedRoom
from plumbing.compute import in_parts, with_replies
from qwen2_model import Cache, Qwen2

LOGITS_AT_ONCE = 2**18  # that `choose` looks at on a CPU: about as many as stay in its cache
# Keys and values while evaluating, on a CPU: an evaluation of Qwen 0.5B then takes 2.8 GB, about as
# much as a training step. With four times as much it took 3.9.
ROOM_BYTES = 2**27
LIKE = 0.75  # of the longest response's length: shorter ones are not read together with it
RECORDED_ON = ("cuda",)  # devices that replay a recorded decode step

Replies = Sequence[dict[int, list[int]]]  # of each response {t: the tokens read before column t}


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response.

    Log-prob, entropy and logit gradient are those of the model's whole distribution pi, even where
    a token was excluded from the draw.
    """

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), 0 on padding
    entropy: Tensor  # (B, T) entropy of pi before the token, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, see `measure`
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B, what each was told between turns, see extras/turns.py; else {}


# ----------------------------------------------------------------------------------------- a token


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token (n, 1) at which the cumulative sum of p (n, V) passes the
    random number uniform (n,) times the total of p.

    p is 0 for a token that must not be drawn; then the total is below 1. The sum is in fp64: fp32
    would lose the tail of a large vocabulary.
    """
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (n, V)
    # right=True finds the first entry strictly above the number. A token of probability 0 adds
    # nothing to the sum, so it is never drawn, unless all are 0.
    number = uniform[:, None] * cumulative[:, -1:]  # (n, 1)
    token = torch.searchsorted(cumulative, number, right=True)  # (n, 1)
    # NaN gives an index past the end; rollout.py refuses its log-prob.
    return token.clamp(max=p.shape[1] - 1)


def measure(log_probs: Tensor, p: Tensor, token: Tensor) -> Tensor:
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
    """A token (n,) from each row of logits (n, V), and its measures (n, 3), see `measure`.

    uniform, excluded (n,). It takes as many rows at a time as LOGITS_AT_ONCE allows.
    """
    def choose_some(logits: Tensor, uniform: Tensor, excluded: Tensor | None) -> tuple:
        log_probs = logits.log_softmax(-1)  # (n, V)
        p = log_probs.exp()  # (n, V)
        allowed = p if excluded is None else p.scatter(1, excluded[:, None], 0.0)  # (n, V)
        token = allowed.argmax(1, keepdim=True) if greedy else draw(allowed, uniform)  # (n, 1)
        return token[:, 0], measure(log_probs, p, token)

    at_once = 2**26 if logits.is_cuda else LOGITS_AT_ONCE
    return in_parts(choose_some, logits, uniform, excluded,
                    row_size=logits.shape[1], at_once=at_once)


# --------------------------------------------------------------------------------------- responses


class Room(Cache):
    """A cache with room for T more columns, written in place and without gradient, whose rows may
    leave."""

    def __init__(self, prompts: Cache, rows: Tensor, T: int):
        """Its rows go on after what rows (B,) of the prompts' cache have read."""
        self.start, self.columns = prompts.start[rows], prompts.columns
        self.keys = [self.make_room(x[rows], T) for x in prompts.keys]
        self.values = [self.make_room(x[rows], T) for x in prompts.values]

    @staticmethod
    def make_room(x: Tensor, T: int) -> Tensor:
        """x (B, K, columns, d), and T more columns that nobody has written yet."""
        B, K, columns, d = x.shape
        room = x.new_empty(B, K, columns + T, d)
        room[:, :, :columns] = x
        return room

    def next_states(self, model: Qwen2, token: Tensor) -> Tensor:
        """Read one more token of each row (R,). Returns the states (R, D) behind them."""
        return model.hidden(token[:, None], self)[:, 0]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As in Cache."""
        C = self.columns + k.shape[2]
        self.keys[layer][:, :, self.columns : C] = k
        self.values[layer][:, :, self.columns : C] = v
        return self.keys[layer][:, :, :C], self.values[layer][:, :, :C]

    def keep(self, running: Tensor) -> Tensor:
        """Drop the rows where running (R,) is False. Returns the old index (n,) of each that stays.

        Running rows from the end move into the gaps, so that few are copied: 7% faster sampling.
        Running 1 0 1 1 0: row 3 moves into gap 1, and the result is 0 3 2.
        """
        n, C = int(running.sum()), self.columns
        gaps = (~running[:n]).nonzero()[:, 0]
        movers = n + running[n:].nonzero()[:, 0]  # as many
        for x in (*self.keys, *self.values):
            x[gaps, :, :C] = x[movers, :, :C]
        self.keys, self.values = [x[:n] for x in self.keys], [x[:n] for x in self.values]
        order = torch.arange(n, device=running.device)  # (n,)
        order[gaps] = movers
        self.start = self.start[order]
        return order


def rows_that_fit(model: Qwen2, columns: int) -> int:
    """How many rows of so many columns fit into ROOM_BYTES; on a GPU, into 8 times that."""
    c, column_bytes = model.config, model.dtype.itemsize * columns
    row_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * column_bytes
    return ROOM_BYTES * (8 if model.norm.is_cuda else 1) // row_bytes


def read_prompts(model: Qwen2, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
    """A cache whose Q rows have read the prompts but for their last tokens; and these tokens (Q,).
    Padded on the left: see Cache."""
    P, device = max(map(len, prompts)), model.norm.device
    padded = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in prompts], device=device)
    cache = Cache(model, torch.tensor([P - len(prompt) for prompt in prompts], device=device))
    model.hidden(padded[:, :-1], cache)  # (Q, P - 1, D), which nobody asks for
    return cache, padded[:, -1]


class Rules(NamedTuple):
    """How `generate` samples, where it is not as usual."""

    limits: Tensor | None = None  # (B,) the tokens that each response may have, if less than usual
    excluded: Tensor | None = None  # (B,) what the first token may not be: methods/oracle.py
    greedy: bool = False  # take the most probable token, whatever the random number
    # Called after each column: how many there are, and the share of responses still running.
    watch: Callable[[int, float], object] = lambda columns, running: None
    read_prompts: Callable = read_prompts  # or one that reads a common beginning once


def generate(
    model: Qwen2,
    prompts: list[list[int]],
    uniforms: Tensor,
    end_tokens: list[int],
    rules: Rules = Rules(),
) -> Samples:
    """Sample G responses to each of Q prompts; response g to prompt q is row q * G + g.

    uniforms (B, limit) float64 in [0, 1): the random number behind each token. A response stops at
    one of end_tokens, or at the limit, or where the rules say so.
    """
    (B, limit), device = uniforms.shape, model.norm.device
    uniforms, ends = uniforms.to(device), torch.tensor(end_tokens, device=device)
    limits = torch.full((B,), limit, device=device)
    if rules.limits is not None:
        limits = rules.limits.to(device)
    excluded = None if rules.excluded is None else rules.excluded.to(device)
    tokens = torch.zeros(B, limit, dtype=torch.long, device=device)
    measures = torch.zeros(3, B, limit, dtype=model.wide_dtype, device=device)
    length = torch.zeros(B, dtype=torch.long, device=device)
    # A tenth faster than no_grad. No update could use a tensor that is made inside: those that are
    # returned are made outside.
    with torch.inference_mode():
        cache, last = rules.read_prompts(model, prompts)  # last (Q,): the last token of each
        prompt_of = torch.arange(len(prompts), device=device).repeat_interleave(B // len(prompts))
        if device.type in RECORDED_ON:  # a GPU: see extras/recorded.py
            room = RecordedRoom(cache, prompt_of, limit)
        else:
            room = Room(cache, prompt_of, limit)
        token = last[prompt_of]  # (B,)
        rows = torch.arange(B, device=device)  # (B',) the responses that are still running
        for t in range(limit):
            states = room.next_states(model, token)  # (B', D)
            logits = model.logits(states)  # (B', V)
            excluded_now = excluded if t == 0 else None
            token, measured = choose(logits, uniforms[rows, t], excluded_now, rules.greedy)
            tokens[rows, t] = token  # (B',)
            measures[:, rows, t] = measured.T  # (3, B')
            length[rows] = t + 1
            running = ~torch.isin(token, ends) & (limits[rows] > t + 1)  # (B',)
            if not running.all():
                order = room.keep(running)
                rows, token = rows[order], token[order]
            rules.watch(t + 1, len(rows) / B)
            if len(rows) == 0:
                break
    T = t + 1  # of the longest response
    mask = torch.arange(T, device=device) < length[:, None]  # (B, T)
    ended = torch.isin(tokens.gather(1, length[:, None] - 1)[:, 0], ends)  # (B,)
    return Samples(tokens[:, :T], mask, *measures[..., :T], ended, ({},) * B)


# -------------------------------------------------------------------------------------- read again


class Piece(NamedTuple):
    """b of m responses that are read together, up to the last sampled token of the longest."""

    prompt_of: Tensor  # (b,) which of the prompts each answers
    text: Tensor  # (b, S) what stands behind the prompt, with replies
    sampled: Tensor  # (b, S) which of these tokens the policy sampled: n of them
    place: tuple[Tensor, Tensor]  # (n,) each: the response, of m, and the column, of T, of each one


def of_like_length(length: Tensor, at_once: int) -> list[Tensor]:
    """Rows, given their length (m,), in parts (b,) of at most at_once, the longest first."""
    parts = []
    for i in length.argsort(descending=True, stable=True).tolist():
        if parts and len(parts[-1]) < at_once and length[i] >= LIKE * length[parts[-1][0]]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return [torch.tensor(rows, device=length.device) for rows in parts]


def in_pieces(batch: Any, rows: Tensor, at_once: int) -> tuple[list[list[int]], list[Piece]]:
    """The responses rows (m,) of a TokenBatch: their prompts, each once; and they themselves, at
    most at_once in a piece."""
    groups, prompt_of = batch.group[rows].unique(return_inverse=True)  # (q,), (m,)
    mask, before = batch.mask[rows], [batch.before[i] for i in rows.tolist()]  # (m, T), m
    text, sampled = with_replies(batch.tokens[rows], mask, before)  # (m, S) each; else as they are
    column = torch.arange(1, 1 + sampled.shape[1], device=sampled.device)  # (S,)
    length = (sampled * column).amax(1)  # (m,) up to the last sampled token
    pieces = []
    for part in of_like_length(length, at_once):  # (b,)
        S = int(length[part[0]])
        i, t = mask[part].nonzero(as_tuple=True)  # (n,) each, in the order of text[sampled]
        place = part[i], t
        pieces.append(Piece(prompt_of[part], text[part, :S], sampled[part, :S], place))
    return [batch.prompts[q] for q in groups.tolist()], pieces


def put_back(values: list[Tensor], pieces: list[Piece], m: int, T: int) -> Tensor:
    """Values (n, ...) of the sampled tokens of each piece, at their places: (m, T, ...), 0 on
    padding; with gradient."""
    i, t = (torch.cat(index) for index in zip(*(piece.place for piece in pieces)))  # (N,) each
    found = torch.cat(values)  # (N, ...)
    return found.new_zeros(m, T, *found.shape[1:]).index_put((i, t), found)


def states_of(model: Qwen2, inputs: Tensor, cache: Cache, piece: Piece) -> Tensor:
    """The last hidden states (n, D) that predict the sampled tokens of a piece."""
    return model.hidden(inputs, cache)[piece.sampled]


def logprobs_of(model: Qwen2, inputs: Tensor, cache: Cache, piece: Piece) -> Tensor:
    """log pi (n,) of the sampled tokens of a piece."""
    return model.logprob(states_of(model, inputs, cache, piece), piece.text[piece.sampled])


def read_responses(
    model: Qwen2, batch: Any, rows: Tensor, reader: Callable = logprobs_of,
    given: Sequence[Tensor] = (), at_once: int = 16
) -> Tensor:
    """What a reader finds of each sampled token of the responses rows (m,) of a TokenBatch, by
    default log pi: (m, T, ...), 0 on padding. With gradient, where that is enabled.

    Each prompt is read once, and its responses behind it, in pieces of like length. A reader, such
    as `logprobs_of`, returns (n, ...) for the n sampled tokens of a piece. Of each tensor that is
    given, (m, T, ...), it gets what these tokens have.
    """
    prompts, pieces = in_pieces(batch, rows, at_once)
    cache, last = read_prompts(model, prompts)  # last (q,): the last token of each of q prompts
    values = []
    for piece in pieces:  # of b responses, S columns
        # A row begins with its prompt's last token: so column t predicts the response's token t.
        inputs = torch.cat((last[piece.prompt_of, None], piece.text[:, :-1]), dim=1)  # (b, S)
        own_cache = cache.rows(piece.prompt_of)  # of b rows, which have read their prompts
        known = [x[piece.place] for x in given]  # (n, ...) each
        values.append(reader(model, inputs, own_cache, piece, *known))  # (n, ...)
    return put_back(values, pieces, *batch.mask[rows].shape)
