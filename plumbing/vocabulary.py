"""What a large vocabulary needs: few passes over its logits and its matrix. A first reading can skip it.

With 150,000 tokens, half of an update was not products but memory: logits copied to float32, and gradients (V, D)
filled with zeros, copied and added up for every piece of a response. So here the log-prob of a token and the embedding
are one autograd function each, and both add their gradient of the matrix to the sum that the optimizer keeps. An update
of Qwen2.5-0.5B on two cores was 1.49 times as fast (lab/log.md). And one pass over the logits gives a drawn token with
its log-prob, entropy and logit gradient.

The plain forms are `token_logprobs` of qwen2_model.py, nn.Embedding, and `draw` of sampler.py; small vocabularies keep
them. tests/test_vocabulary.py holds the two together.

Alphabet: N tokens in a flat list, B rows, V vocabulary (its real part), D hidden size.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 2**15  # a matrix with more rows is worth it
KEPT = 2**30  # bytes of logits that are kept for the backward pass; where there are more, all are computed again
# Rows of logits that are in float32 at once. Four rows of 150,000 stay in the cache of a CPU: a draw for 32 rows takes
# 7 ms and not 31. A GPU wants more.
ROWS_ON_CPU, ROWS_ON_GPU = 4, 512
SLAB = 2**12  # tokens of V whose gradients are in memory at once; 2**13 takes a fifth longer
BLOCK = 512  # tokens of V whose probabilities are added up first


def adds_in_place(weight: Tensor) -> bool:
    """Whether gradients of a matrix (V, D) go straight to the sum of its optimizer, weight.sum_into.grad."""
    return torch.is_grad_enabled() and hasattr(weight, "sum_into")


class Embedding(nn.Embedding):
    """nn.Embedding, whose gradient is added in place where an optimizer asks for that."""

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows (..., D) of the matrix (V, D) that tokens (...) name."""
        return EmbeddingRows.apply(self.weight, tokens) if adds_in_place(self.weight) else super().forward(tokens)


class EmbeddingRows(torch.autograd.Function):
    """The rows (..., D) of a matrix (V, D) that tokens (...) name."""

    @staticmethod
    def forward(ctx, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.weight, ctx.tokens = weight, tokens
        return F.embedding(tokens, weight)  # (..., D)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        total = ctx.weight.sum_into.grad  # (V, D)
        total.index_add_(0, ctx.tokens.flatten().to(total.device), gradient.flatten(0, -2).to(total))
        return None, None


class TokenLogprobs(torch.autograd.Function):
    """log pi (N,) of tokens (N,) after states (N, D): the log-softmax of states @ matrix.T / temperature."""

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, tokens: Tensor, V: int, temperature: float) -> Tensor:
        """Keeps the logits (N, V) where they fit into KEPT bytes."""
        ctx.weight, ctx.V, ctx.temperature, taken, total = weight, V, temperature, [], []
        at_once = max(1, KEPT // (V * states.itemsize))
        for part, its_tokens in zip(states.split(at_once), tokens.split(at_once)):
            logits = part @ weight[:V].T  # (n, V)
            size = rows_at_once(logits)
            for x, token in zip(logits.split(size), its_tokens.split(size)):
                x = widened(x, temperature)  # (size, V)
                taken.append(x.gather(1, token[:, None])[:, 0])
                total.append(x.logsumexp(1))
        total = torch.cat(total)  # (N,)
        ctx.save_for_backward(states, tokens, total, logits if len(states) <= at_once else None)
        return torch.cat(taken) - total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient (N, D) of the states; that of the matrix is added slab by slab to weight.sum_into.grad."""
        states, tokens, total, logits = ctx.saved_tensors
        summed, of_states = ctx.weight.sum_into.grad, torch.zeros_like(states, dtype=total.dtype)  # (V, D), (N, D)
        for first in range(0, ctx.V, SLAB):
            slab = slice(first, min(first + SLAB, ctx.V))
            matrix = ctx.weight[slab]  # (v, D)
            x = widened(states @ matrix.T if logits is None else logits[:, slab], ctx.temperature)  # (N, v)
            # d log pi(token) / d logits = (onehot - p) / temperature
            d = (x - total[:, None]).exp_().mul_(-gradient[:, None])  # (N, v)
            here = ((tokens >= first) & (tokens < slab.stop)).nonzero()[:, 0]
            d[here, tokens[here] - first] += gradient[here]
            d = d.div_(ctx.temperature).to(states.dtype)
            of_states += d @ matrix
            summed[slab] += (d.T @ states).to(summed.device)
        return of_states.to(states.dtype), None, None, None, None


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits to work on at once."""
    return ROWS_ON_CPU if logits.device.type == "cpu" else ROWS_ON_GPU


def widened(logits: Tensor, temperature: float) -> Tensor:
    """Logits in float32 or wider, over the temperature."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return x if temperature == 1 else x / temperature


def draw_with_facts(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token (B,) that `draw` finds for uniform (B,), and its log-prob, entropy and logit gradient (3, B)."""
    size = rows_at_once(logits)
    parts = [draw_rows(*part, temperature) for part in zip(logits.split(size), uniform.split(size))]
    return torch.cat([token for token, _ in parts]), torch.cat([facts for _, facts in parts], dim=1)


def draw_rows(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same for a few rows.

    Sums over BLOCK tokens each say in which block the token lies; then only that block is summed up token by token.
    """
    (B, V), rows = logits.shape, torch.arange(len(logits), device=logits.device)
    x = widened(logits, temperature)  # (B, V)
    x = x - x.amax(1, keepdim=True)  # (B, V)
    padded = x.new_empty(B, V + -V % BLOCK)
    padded[:, V:] = 0
    torch.exp(x, out=padded[:, :V])
    e = padded.unflatten(1, (-1, BLOCK))  # (B, V / BLOCK, BLOCK)
    sums = e.sum(2).double()  # (B, V / BLOCK)
    squares = torch.linalg.vector_norm(e, dim=2).double().square()  # (B, V / BLOCK)
    ends, total = sums.cumsum(1), sums.sum(1)  # (B, V / BLOCK), (B,)
    wanted = uniform[:, None] * ends[:, -1:]  # (B, 1)
    block = torch.searchsorted(ends, wanted, right=True)[:, 0].clamp(max=ends.shape[1] - 1)  # (B,)
    own = e[rows, block].double()  # (B, BLOCK)
    inside = own.cumsum(1) + (ends - sums)[rows, block, None]  # (B, BLOCK)
    # Rounding may leave the wanted sum just behind the block's own: then it is the last token that has a probability.
    last = BLOCK - 1 - (own > 0).flip(1).int().argmax(1)  # (B,)
    place = torch.searchsorted(inside, wanted, right=True)[:, 0].minimum(last)  # (B,)
    token = (block * BLOCK + place).clamp(max=V - 1)  # (B,) NaN would give an index past the end
    logprob = x[rows, token] - total.log()  # (B,)
    entropy = total.log() - torch.linalg.vecdot(padded[:, :V], x.clamp_(min=-1e4)) / total  # (B,)
    # ||onehot - p|| from the sums without the token: see entropy_and_logit_grad.
    own[rows, place] = 0
    sums[rows, block], squares[rows, block] = own.sum(1), own.square().sum(1)
    logit_grad = (sums.sum(1).square() + squares.sum(1)).sqrt() / total  # (B,)
    return token, torch.stack((logprob, entropy, logit_grad)).to(x.dtype)
