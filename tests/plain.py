"""The policy-gradient update in its plainest form: the oracle for sampler.py and grpo.py, and the benchmark's baseline.

A row holds a prompt, padded on the left, and one response to it, padded on the right. So a prompt is read again for
each of its responses, and the logits of all rows are in memory at once; sampler.py avoids both. The logits of a column
predict the token of the next column. With P = 3 prompt columns and T = 2 response columns:

    column          0    1    2   | 3    4
    row             pad  2    +   | 3    end
    predicts                  3     end             columns P-1 .. P+T-2, which is the slice P-1:-1

tests/test_sampler.py and tests/test_grpo.py compare with it.
"""
import torch
from torch import Tensor


def plain_rows(prompts: list[list[int]], tokens: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows (B, P + T) of B prompts and responses (B, T), the number of padding columns on their left (B,), and P."""
    P = max(map(len, prompts))
    padded = [[0] * (P - len(prompt)) + prompt for prompt in prompts]
    pad = torch.tensor([P - len(prompt) for prompt in prompts], device=tokens.device)  # (B,)
    return torch.cat((torch.tensor(padded, device=tokens.device), tokens), dim=1), pad, P


def plain_logprobs(model, prompts: list[list[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) of the tokens (B, T) of B responses to B prompts, with gradient; 0 where mask (B, T) is False.

    model(rows, pad) returns logits (B, P + T, V). If it has a real_vocab, tokens from there on do not exist.
    """
    rows, pad, P = plain_rows(prompts, tokens)
    logits = model(rows, pad)[:, P - 1 : -1, : getattr(model, "real_vocab", None)]  # (B, T, V)
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] * mask


def plain_update(model, prompts: list[list[int]], batch, credit: Tensor, reference=None, kl: float = 0.0,
                 clip: tuple[float, float] = (0.2, 0.2)) -> Tensor:
    """The loss of a step, a scalar; adds its gradient to the parameters'. prompts: one per puzzle.

    PPO's clipped objective minus kl times the k3 estimate of the KL divergence, averaged over the tokens of the step.
    """
    repeated = [prompts[puzzle] for puzzle in batch.group.tolist()]  # one per response
    logprob = plain_logprobs(model, repeated, batch.tokens, batch.mask)  # (B, T)
    ratio = (logprob - batch.logprob).exp()  # (B, T)
    gain = torch.minimum(ratio * credit, ratio.clamp(1 - clip[0], 1 + clip[1]) * credit)  # (B, T)
    if reference is not None:
        with torch.no_grad():
            reference_logprob = plain_logprobs(reference, repeated, batch.tokens, batch.mask)  # (B, T)
        d = reference_logprob - logprob  # (B, T)
        gain = gain - kl * (d.exp() - d - 1)
    loss = -gain[batch.mask].sum() / batch.mask.sum()
    loss.backward()
    return loss.detach()
