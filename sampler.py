"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
2. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling: the ratio's pi_old,
   most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch. (A GPU replays a recorded step of fixed shape, by plumbing/replay.py:
   there they are computed to the end, and ignored.)
4. A prompt is computed once for all its responses, while sampling and when they are read.

The model reads a flat list of tokens (qwen2_model.py). Who sees whom is said here, by functions called `attend`: that
of KVCache for the new tokens of a step, those of Prompts and Texts for texts that are read as a whole.

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, T response
columns (while sampling: as many as a response may have), N tokens in a flat list, V vocabulary, D hidden size, H query
heads, K key heads, d head size. In attention, R rows of S columns, each of which sees some of C columns.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from typing import Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plumbing.replay import Replayed
from qwen2_model import Qwen2, attention, bias_of, probabilities, rows_at_once, scaled, token_logprobs, wide

SCORES_AT_ONCE = 2**24  # attention scores that are computed at once, at most
ROWS_IN_BLOCK = 4  # rows of a block of attention: few, so that short rows are padded little
PROBABILITIES_KEPT = 2**25  # bytes of attention probabilities in a layer; the backward pass computes more of them again

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
    before: Replies  # B, replies to turns; of these an empty reply is one, too


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

    p is overwritten. The logit gradient ||onehot - p|| is the norm of d log pi / d (logits / temperature). The token's
    own entry of onehot - p is 1 - p_token, which is the sum of the others' p; each other entry is -p. (The shorter form
    sqrt(1 - 2 p_token + sum_v p_v^2) loses all digits where p_token is near 1: in fp32, 0 for true values near 1e-4.)
    """
    entropy = -torch.linalg.vecdot(p, log_probs)
    others = p.scatter_(1, token, 0.0)  # (n, V)
    return torch.stack((log_probs.gather(1, token)[:, 0], entropy,
                        torch.hypot(others.sum(1), torch.linalg.vector_norm(others, dim=1))))


def draw_and_describe(logits: Tensor, temperature: float, greedy: bool, uniform: Tensor,
                    excluded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A token (n,) from each row of logits (n, V), and its log-prob, entropy and logit gradient (3, n).

    excluded (n,): a token that must not be drawn. greedy: the most probable token, whatever the random number.
    """
    log_probs = scaled(logits, temperature).log_softmax(-1)  # (n, V)
    p = log_probs.exp()  # (n, V)
    allowed = p if excluded is None else p.scatter(1, excluded[:, None], 0.0)  # (n, V)
    token = allowed.argmax(1, keepdim=True) if greedy else draw(allowed, uniform)  # (n, 1)
    return token[:, 0], describe(log_probs, p, token)  # at last, because it overwrites p


def next_tokens(model: Qwen2, hidden: Tensor, uniform: Tensor, excluded: Tensor | None,
                greedy: bool) -> tuple[Tensor, Tensor]:
    """The token (B',) that follows each state hidden (B', D), and its log-prob, entropy and logit gradient (3, B')."""
    logits = model.logits(hidden)  # (B', V)
    size = rows_at_once(logits)  # a few rows at a time: in float32 they stay in a CPU's cache
    parts = [draw_and_describe(logits[rows], model.temperature, greedy, uniform[rows],
                               None if excluded is None else excluded[rows])
             for rows in (slice(first, first + size) for first in range(0, len(logits), size))]
    return torch.cat([token for token, _ in parts]), torch.cat([found for _, found in parts], dim=1)


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
             watch: Callable[[int, float], object] | None = None,
             reply: Callable[[int, list[int]], list[int] | None] | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): a token that may not be a response's first, so that it goes another way than
    a known one (methods/oracle.py wants that). greedy: take the most probable token, whatever the random number.
    watch(columns, running): called after each column, with their number, and the share of responses still running.

    reply(row, tokens), in several turns: what a row reads after these tokens, the last of which ended a turn; None if
    the response is over. The row reads it while others sample, a token a column, so its limit counts these tokens, too.
    A reply that leaves no room for a further token is not read: that response is cut off.
    """
    (B, T), G = uniforms.shape, len(uniforms) // len(prompts)
    device = model.output_weight.device
    uniforms = uniforms.to(device)
    is_end = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)  # (V,)
    is_end[end_tokens] = True
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,), later (B',)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    recorded = wide(model.output_weight.new_zeros(3, B, T))  # log-prob, entropy, logit gradient
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    turns = Turns(reply, B, T, device)
    # A tenth faster than no_grad. Autograd refuses tensors that were made inside, so what is returned was made above.
    with torch.inference_mode():
        cache = KVCache(model, prompts, G, T)
        if device.type == "cuda":
            cache = Replayed(cache)  # replays a recorded step: a GPU waited for Python, and was 2.4 times slower
        hidden = cache.last  # (B', D) the state that predicts the next token
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        place = torch.zeros_like(rows)  # (B',) the tokens that each has sampled so far
        for t in range(T):
            forbidden = excluded.to(device) if t == 0 and excluded is not None else None  # (B',)
            token, found = next_tokens(model, hidden, uniforms[rows, place], forbidden, greedy)  # (B',), (3, B')
            # A row that reads writes, too, but stays in its place: its next sampled token overwrites this one.
            tokens[rows, place], mask[rows, place], recorded[:, rows, place] = token, True, found
            told = turns.told[rows, t]  # (B',)
            sampled = told < 0  # (B',)
            over = is_end[token] & sampled  # (B',) whether its turn is
            place, token = place + sampled, torch.where(sampled, token, told)
            ended[rows] = over
            running = (limit > t + 1) & ~over  # (B',)
            for i in over.nonzero()[:, 0].tolist() if reply else ():
                row = int(rows[i])
                ended[row], running[i] = turns.answer(row, tokens[row, : place[i]].tolist(), t + 1, int(limit[i]))
            count = int(running.sum())
            if watch:
                watch(t + 1, count / B)
            if count == 0:
                break
            if count < len(rows):
                order = cache.keep(running)  # (count,) old row in each place; a cache may reorder the rows
                rows, token, limit, place = rows[order], token[order], limit[order], place[order]
            hidden = cache.step(token)  # (B', D)
    longest = int(mask.sum(1).max())  # columns that were filled
    logprob, entropy, logit_grad = recorded[..., :longest]  # (B, longest) each
    return Samples(tokens[:, :longest], mask[:, :longest], logprob, entropy, logit_grad, ended, turns.before)


class Turns:
    """What B responses are told between their turns. A row reads a reply while others sample, a token a column."""

    def __init__(self, reply: Callable[[int, list[int]], list[int] | None] | None, B: int, T: int, device):
        self.reply = reply  # see `generate`
        self.told = torch.full((B, T), -1, device=device)  # what a row reads in a column of the cache; -1: it samples
        self.before = tuple({} for _ in range(B))  # see Samples

    def answer(self, row: int, tokens: list[int], column: int, limit: int) -> tuple[bool, bool]:
        """After these tokens a turn of a row is over. Returns whether its response is, too, and whether the row goes on
        from a column, with the reply. Neither is so where the reply leaves no room, within the limit, for a token."""
        said = self.reply(row, tokens)
        goes_on = said is not None and limit > column + len(said)
        if goes_on:
            self.before[row][len(tokens)] = said
            self.told[row, column : column + len(said)] = torch.tensor(said, dtype=torch.long)
        return said is None, goes_on


# ------------------------------------------------------------------------------------------------- the KV cache


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


class KVCache:
    """The keys and values of all tokens so far, which later tokens attend to: so each token is computed once."""

    def __init__(self, model: Qwen2, prompts: list[list[int]], G: int, room: int):
        """Read Q prompts, for G rows each, padded on the left to P columns, with room for as many more columns.

        Keys are stored transposed, (d, columns): that makes queries times keys twice as fast.
        """
        c, weight, P = model.config, model.output_weight, max(map(len, prompts))
        device = weight.device
        texts, text_of = distinct_texts(prompts)
        reading = Prompts(model, texts)
        length = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (Q,)
        column = torch.arange(P, device=device) - P + length[:, None]  # (Q, P) of the text, below 0 in the padding
        # The places (Q, P) of each prompt's tokens in the list of texts: it is one of these, or the beginning of one.
        place = reading.first[text_of][:, None] + column.clamp(min=0)
        columns = -(-(P + room) // 8) * 8  # rounded up to a multiple of 8: aligned rows in bfloat16, which a GPU wants
        shape = c.num_hidden_layers, len(prompts) * G, c.num_key_value_heads
        self.keys = weight.new_zeros(*shape, c.head_dim, columns)  # (layers, B, K, d, columns), later B' rows
        self.values = weight.new_zeros(*shape, columns, c.head_dim)  # (layers, B, K, columns, d), later B' rows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """As the prompts attend; their keys and values move into the cache."""
            self.keys[layer, ..., :P] = pick(k, place).permute(0, 2, 3, 1).repeat_interleave(G, 0)  # (B, K, d, P)
            self.values[layer, ..., :P, :] = pick(v, place).transpose(1, 2).repeat_interleave(G, 0)  # (B, K, P, d)
            return reading.attend(layer, q, k, v)

        states = model.hidden(reading.tokens, reading.positions, attend)  # (N, D)
        self.model, self.filled = model, P  # columns in use
        self.last = states[place[:, -1]].repeat_interleave(G, 0)  # (B, D) what predicts each response's first token
        self.length = length.repeat_interleave(G)  # (B,) tokens so far, later B' rows
        visible = F.pad(column >= 0, (0, columns - P), value=True).repeat_interleave(G, 0)  # (B, columns)
        bias = bias_of(visible, weight.dtype)[:, None, None]  # (B, 1, 1, columns)
        self.bias = bias.repeat(1, c.num_key_value_heads, 1, 1)  # (B, K, 1, columns), later B' rows

    def step(self, token: Tensor) -> Tensor:
        """Append a token (B',) to each row; returns the state (B', D) that predicts the next one."""
        self.filled += 1
        return self.step_at(token, self.filled)

    def step_at(self, token: Tensor, n: int) -> Tensor:
        """The same, with the token in column n - 1, and the columns before it to look at.

        On a GPU plumbing/replay.py records this once, with n = all columns, and stands in for `step` and `keep`. It
        hides the columns that are not in use, and moves each token on from the last column to its own.
        """
        # Each key head of each row is one of B' K products. These are views: `attend` writes into the cache.
        bias = self.bias[..., :n].flatten(0, 1)  # (B' K, 1, n)
        keys = self.keys[..., :n].flatten(1, 2).unbind()  # of each layer (B' K, d, n)
        values = self.values[..., :n, :].flatten(1, 2).unbind()  # of each layer (B' K, n, d)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer][..., -1], values[layer][:, -1] = k.flatten(0, 1), v.flatten(0, 1)
            scores = torch.baddbmm(bias, q.flatten(0, 1), keys[layer], alpha=q.shape[-1] ** -0.5)  # (B' K, H / K, n)
            return torch.bmm(scores.softmax(-1), values[layer]).view_as(q)

        states = self.model.hidden(token, self.length, attend)  # (B', D)
        self.length += 1  # in place, for a CUDA graph
        return states

    def keep(self, running: Tensor) -> Tensor:
        """Drop the rows where running (B',) is False. Returns the old index (count,) of each that stays.

        Few rows are copied: of the first `count` places, those whose row ended are gaps, and as many running rows lie
        beyond `count`; the k-th gap takes the k-th of them. Running 1 0 1 1 0: row 3 moves into gap 1, order 0 3 2.
        """
        count = int(running.sum())
        order = torch.arange(count, device=running.device)  # (count,) the old index of the row in each place
        gaps = (~running[:count]).nonzero()[:, 0]
        order[gaps] = running[count:].nonzero()[:, 0] + count
        self.keys[:, gaps, ..., : self.filled] = self.keys[:, order[gaps], ..., : self.filled]
        self.values[:, gaps, :, : self.filled] = self.values[:, order[gaps], :, : self.filled]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.bias, self.length = self.bias[order], self.length[order]
        return order


# --------------------------------------------------------------------------------------------- finished responses


def pick(x: Tensor, place: Tensor) -> Tensor:
    """x[place], (R, C, ...), for x (N, ...) and place (R, C), with a faster backward pass."""
    return x.index_select(0, place.flatten()).unflatten(0, place.shape)


class Rows:
    """R rows of tokens in the flat list, padded on the right to S columns, and what they may see: C >= S columns.

    The last S of these are the row's own tokens; before them come its prompt's, if the row is a response. Attention is
    computed for blocks of a few rows, each only as wide as its longest row.
    """

    def __init__(self, own: Tensor, seen: Tensor, real: Tensor, visible: Tensor, model: Qwen2,
                 block: int = ROWS_IN_BLOCK):
        """own (R, S), seen (R, C): the place of each column's token in the flat list, on padding any valid place.

        real (R, S): False on padding. visible (R, S, C): whether a column of `own` may see one of `seen`. block: rows.
        """
        (R, S), C, self.shape = own.shape, seen.shape[1], visible.shape
        scores = S * C * model.config.num_attention_heads  # of a row
        size = max(1, min(block, SCORES_AT_ONCE // max(1, scores)))
        bias = bias_of(visible, model.output_weight.dtype)  # (R, S, C)
        self.recompute = R * scores * bias.itemsize > PROBABILITIES_KEPT
        self.blocks = []
        for rows in (slice(first, first + size) for first in range(0, R, size)):
            s = int(real[rows].any(0).sum())  # columns of the longest of these rows, at most S
            c = C - S + s
            places = real[rows, :s].flatten().nonzero()[:, 0]  # of the real ones among the block's columns
            self.blocks.append((own[rows, :s], seen[rows, :c], bias[rows, :s, :c], places))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attention` for the n tokens of these rows, (n, K, H / K, d), from q (N, K, H / K, d), k and v (N, K, d)."""
        found = [q[:0]]  # for no rows at all
        for own, seen, bias, places in self.blocks:  # (r, s), (r, c), (r, s, c), (m,)
            block = pick(q, own).permute(0, 2, 3, 1, 4), *(pick(x, seen).transpose(1, 2) for x in (k, v)), bias
            if self.recompute and torch.is_grad_enabled():
                out = checkpoint(attention, *block, use_reentrant=False, preserve_rng_state=False)
            else:
                out = attention(*block)  # (r, K, H / K, s, d)
            found.append(out.permute(0, 3, 1, 2, 4).flatten(0, 1).index_select(0, places))  # (m, K, H / K, d)
        return torch.cat(found)

    def attention_paid(self, q: Tensor, k: Tensor) -> Tensor:
        """How much each column attends to those that its row sees: probabilities (R, S, C) averaged over heads."""
        found = [q.new_zeros(0, *self.shape[1:])]
        for own, seen, bias, _ in self.blocks:
            p = probabilities(pick(q, own).permute(0, 2, 3, 1, 4), pick(k, seen).transpose(1, 2), bias)
            missing = self.shape[1] - own.shape[1]  # columns up to S
            found.append(F.pad(p.mean((1, 2)), (0, missing, 0, missing)))
        return torch.cat(found)


class Prompts:
    """Q prompts as one flat list of N tokens. Each prompt sees itself alone."""

    def __init__(self, model: Qwen2, prompts: list[list[int]]):
        device = model.output_weight.device
        self.length = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (Q,)
        self.first = self.length.cumsum(0) - self.length  # (Q,) the place of each prompt's first token
        column = torch.arange(max(map(len, prompts)), device=device)  # (P,)
        self.real = column < self.length[:, None]  # (Q, P)
        self.places = (self.first[:, None] + column).where(self.real, 0)  # (Q, P)
        self.tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)  # (N,)
        self.positions = column.expand_as(self.real)[self.real]  # (N,)
        causal = torch.ones(len(column), len(column), dtype=torch.bool, device=device).tril()  # (P, P)
        self.rows = Rows(self.places, self.places, self.real, causal.expand(len(prompts), -1, -1), model)

    def attend(self, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See Qwen2.hidden."""
        return self.rows.attend(q, k, v)


class Texts:
    """Q prompts and b responses to them as one flat list of N tokens: the prompts, then the responses.

    A prompt sees itself, a response its prompt and itself. A response's last token is left out of the list, because its
    state would predict nothing. The state that predicts a token is that of the one before it:

        place       0    1    2    3     4        the prompt "the sky" and the responses "is blue ." and "was red"
        token       the  sky  is   blue  was
        predicts         is   blue .     red
                         was

    As Rows, "is blue" has the own places 2 3 and sees 0 1 2 3; "was" has 4 and sees 0 1 4.
    """

    def __init__(self, model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor, mask: Tensor,
                 hide: Tensor | None = None):
        """prompt_of (b,): the index of each response's prompt; others are left out. tokens, mask (b, T): padded on the
        right. hide (b, T) bool: tokens that no later one of their response can see.
        """
        answered, prompt_of = prompt_of.unique(return_inverse=True)
        self.prompts = p = Prompts(model, [prompts[q] for q in answered.tolist()])
        order = mask.sum(1).argsort(descending=True)  # (b,) the longest first, so that a block has rows of like length
        prompt_of, tokens, mask, self.rank = prompt_of[order], tokens[order], mask[order], order.argsort()
        in_list = mask[:, 1:]  # (b, T - 1) a token is in the list if another one follows
        S = int(in_list.any(0).sum())  # columns of the responses that are in the list
        # Number the tokens of the responses row by row, from where the prompts end.
        places = (in_list.flatten().cumsum(0).view_as(in_list) - 1 + len(p.tokens)).where(in_list, 0)  # (b, T - 1)
        last = (p.first + p.length - 1)[prompt_of, None]  # (b, 1) the place of each response's prompt's last token
        # (b, T) the place of the token whose state predicts each one; in the order of the arguments
        self.predictor = torch.cat((last, places), dim=1)[self.rank]
        self.tokens = torch.cat((p.tokens, tokens[:, :-1][in_list]))  # (N,)
        position = p.length[prompt_of, None] + torch.arange(in_list.shape[1], device=mask.device)  # (b, T - 1)
        self.positions = torch.cat((p.positions, position[in_list]))  # (N,)

        itself = torch.eye(S, dtype=torch.bool, device=mask.device)  # (S, S) a hidden token still sees itself
        shown = torch.ones_like(mask[:, :S]) if hide is None else ~hide[order, :S]  # (b, S)
        prompt_seen = p.real[prompt_of, None].expand(-1, S, -1)  # (b, S, P)
        response_seen = shown[:, None].expand(-1, S, -1).tril() | itself  # (b, S, S)
        visible = torch.cat((prompt_seen, response_seen), dim=2)  # (b, S, P + S)
        own = places[:, :S]  # (b, S)
        self.responses = Rows(own, torch.cat((p.places[prompt_of], own), dim=1), in_list[:, :S], visible, model)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See Qwen2.hidden."""
        return torch.cat((self.prompts.attend(layer, q, k, v), self.responses.attend(q, k, v)))


def with_replies(tokens: Tensor, mask: Tensor, before: Replies) -> tuple[Tensor, Tensor, Tensor]:
    """Responses (b, T) with the replies that were read before their tokens, as one text each: tokens and mask (b, C),
    and the column (b, T) in these of each sampled token."""
    column = torch.arange(tokens.shape[1], device=mask.device).expand_as(tokens)  # (b, T)
    if not any(before):
        return tokens, mask, column
    read = [[len(replies.get(t, ())) for t in range(tokens.shape[1])] for replies in before]
    column = column + torch.tensor(read, device=mask.device).cumsum(1)  # (b, T)
    length = (column * mask).amax(1, keepdim=True) + 1  # (b, 1)
    whole = tokens.new_zeros(len(tokens), int(column.max()) + 1).scatter(1, column, tokens)  # (b, C)
    for row, replies in enumerate(before):
        for t, said in replies.items():
            whole[row, column[row, t] - len(said) : column[row, t]] = torch.tensor(said, dtype=torch.long)
    return whole, torch.arange(whole.shape[1], device=mask.device) < length, column


def whole_groups(group: Tensor, size: int) -> list[Tensor]:
    """The numbers 0 to M - 1 of M responses, in chunks of at most `size` neighbours; group (M,) is the group of each.

    A chunk has as many whole groups as fit, so that a prompt is read once. A larger group is cut.
    """
    chunks = []
    sizes = group.unique_consecutive(return_counts=True)[1].tolist()
    for one in torch.arange(len(group), device=group.device).split(sizes):
        if chunks and len(chunks[-1]) + len(one) <= size:
            chunks[-1] = torch.cat((chunks[-1], one))
        else:
            chunks += one.split(size)
    return chunks


def response_states(model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor, mask: Tensor,
                    before: Replies = ()) -> Tensor:
    """The last hidden state (b, T, D) before each token of b responses (b, T); before: replies, see Samples."""
    whole, real, column = with_replies(tokens, mask, before)  # (b, C), (b, C), (b, T)
    texts = Texts(model, prompts, prompt_of, whole, real)
    return pick(model.hidden(texts.tokens, texts.positions, texts.attend), texts.predictor.gather(1, column))


def response_logprobs(model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor, mask: Tensor,
                      hide: Tensor | None = None, before: Replies = ()) -> Tensor:
    """log pi (b, T) of the tokens of b responses, with gradient, 0 on padding; hide (b, T): see Texts."""
    whole, real, column = with_replies(tokens, mask, before)  # (b, C), (b, C), (b, T)
    hide = hide if hide is None else torch.zeros_like(real).scatter(1, column, hide)  # (b, C)
    texts = Texts(model, prompts, prompt_of, whole, real, hide)
    states = model.hidden(texts.tokens, texts.positions, texts.attend)  # (N, D)
    sampled = mask.flatten().nonzero()[:, 0]  # (n,)
    predictor = texts.predictor.gather(1, column).flatten()[sampled]  # (n,)
    logprob = token_logprobs(model, states.index_select(0, predictor), tokens.flatten()[sampled])
    return logprob.new_zeros(mask.numel()).index_copy(0, sampled, logprob).view_as(mask)


def response_attention(model: Qwen2, prompts: list[list[int]], prompt_of: Tensor, tokens: Tensor, mask: Tensor,
                       before: Replies = ()) -> Tensor:
    """Attention (b, T, T): [:, t, u] is how much the state that predicts token t attends to token u < t.

    Of the last layer, averaged over its heads. What is paid to replies is left out.
    """
    whole, real, column = with_replies(tokens, mask, before)  # (b, C), (b, C), (b, T)
    texts, last, found = Texts(model, prompts, prompt_of, whole, real), len(model.layers) - 1, []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == last:
            found.append(texts.responses.attention_paid(q, k))
        return texts.attend(layer, q, k, v)

    model.hidden(texts.tokens, texts.positions, attend)
    paid = wide(found[0])[texts.rank]  # (b, S, P + S) between the S columns in the list, at most C - 1
    S, C = paid.shape[1], whole.shape[1]
    # The state that predicts token 0 is the prompt's: a row of zeros before. F.pad: left, right, before, behind.
    square = F.pad(paid[:, :, paid.shape[2] - S :], (0, C - S, 1, C - S - 1))  # (b, C, C)
    rows = torch.arange(len(whole), device=mask.device)[:, None, None]  # (b, 1, 1)
    return square[rows, column[:, :, None], column[:, None]] if any(before) else square  # (b, T, T)
