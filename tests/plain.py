"""Policy gradient as plainly as can be: the oracle of what grpo.py computes in pieces, and the benchmark's baseline.

A row holds a prompt, padded on the left, and one response to it, padded on the right. So a prompt is read again for
each of its answers, and all logits of all rows are there at once. With P = 3 prompt columns and T = 2 of the response:

    column          0    1    2   | 3    4
    row             pad  2    +   | 3    end
    predicts                   3    end             columns P-1 .. P+T-2, the slice P-1:-1
"""

import torch
from torch import Tensor


def plain_rows(prompts: list[list[int]], tokens: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows (B, P + T) of prompts, one for each of the responses (B, T), how many columns are padding (B,), and P."""
    P = max(map(len, prompts))
    left = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in prompts], device=tokens.device)
    return torch.cat((left, tokens), dim=1), torch.tensor([P - len(p) for p in prompts], device=tokens.device), P


def plain_logprobs(model, prompts: list[list[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) of responses (B, T), one to each of B prompts, with gradient; 0 where mask (B, T) is False.

    model(rows, pad) gives all logits (B, P + T, V); where it has a real_vocab, the tokens behind that do not exist.
    """
    rows, pad, P = plain_rows(prompts, tokens)
    logits = model(rows, pad)[:, P - 1 : -1, : getattr(model, "real_vocab", None)]  # (B, T, V)
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] * mask


def plain_update(model, prompts: list[list[int]], batch, credit: Tensor, reference=None, kl: float = 0.0,
                 clip: tuple[float, float] = (0.2, 0.2)) -> Tensor:
    """The loss of a step, a scalar, whose gradient is added to the parameters'; prompts: one a question.

    PPO's objective and the k3 penalty, averaged over the step's tokens.
    """
    repeated = [prompts[question] for question in batch.group.tolist()]
    logprob = plain_logprobs(model, repeated, batch.tokens, batch.mask)  # (B, T)
    ratio = (logprob - batch.logprob).exp()
    gain = torch.minimum(ratio * credit, ratio.clamp(1 - clip[0], 1 + clip[1]) * credit)  # (B, T)
    if reference is not None:
        with torch.no_grad():
            shift = plain_logprobs(reference, repeated, batch.tokens, batch.mask)
        gain = gain - kl * ((shift - logprob).exp() - (shift - logprob) - 1)
    loss = -gain[batch.mask].sum() / batch.mask.sum()
    loss.backward()
    return loss.detach()
