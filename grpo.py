"""GRPO: rollout, advantage, credit, loss, update, and the log of every token's credit.

Sample several responses to each puzzle and grade them. A response's *advantage* says how much better its reward is
than those of the other responses to the same puzzle, its group. *Credit* says what each token gets of it: in plain GRPO
all of it, the same for every token. The update makes tokens with positive credit more likely and those with negative
credit less likely. It ascends

    gradient = (1 / N) sum_t credit_t * grad log pi(token_t)        over the N tokens of the step

where pi is the model's distribution over tokens. If credit were the response's reward, the average of the sum over many
steps would be proportional to the gradient of the expected reward (the policy gradient theorem). Subtracting the
group's mean removes noise and leaves the direction of that average as it is: grad log pi averages to 0, so the others'
rewards cancel, and the response's own share of the mean only scales it by (G - 1) / G. Dividing by the group's standard
deviation, as GRPO does, changes how much each puzzle counts: those whose rewards hardly differ count for more.

A function of mitigations.py computes `credit` (B, T); the code here is the same for all of them. How it differs from
the paper (DeepSeekMath, arXiv 2402.03300):
1. The loss is an average over all tokens of the step, as in DAPO's code (2503.14476). The paper averages within each
   response first: --loss_norm sequence. Dr. GRPO (2503.20783) divides by a constant: --loss_norm constant.
2. By default there is no KL penalty (--kl), and one update per batch (--updates_per_batch). Then the ratio pi / pi_old,
   of a token's probability now to that when it was sampled, is 1, and nothing is clipped.
3. The log-probs of the sampling policy are recorded while sampling, not recomputed by a second forward pass.
4. A group whose rewards are all equal has advantage exactly 0, whatever the rounding of its mean.

Run it:  python train.py --mitigation none
"""
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from countdown_task import ROLES, Codec, Puzzle, annotate, find_calculations
from critic import Critic, Importance
from mitigations import TokenBatch, has_variance, quotient
from plumbing.files import replace_file
from plumbing.optimizer import Optimizer
from plumbing.processes import my_share, sum_over_processes, world
from queries import Queries, decode_and_grade, sample
from qwen2_model import Qwen2
from sampler import PromptCache, ResponseCache, by_length, response_logprobs

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "batch")
LOSS_NORMS = ("token", "sequence", "constant")
EVALUATION = 2**32 - 1  # the step number for the random numbers of evaluation; no training step reaches it


# ------------------------------------------------------------------------------------------------- rollout


def rollout(model: Qwen2, codec: Codec, puzzles: list[Puzzle], uniforms: Tensor, *, advantage: str = "grpo",
            normalize: str = "response", key: tuple[int, int] = (0, 0), reference: Qwen2 | None = None,
            critic: Critic | None = None, importance: Importance | None = None, micro_batch: int = 16,
            grade: Callable | None = None) -> TokenBatch:
    """Sample and grade the B responses of one step, G = B / Q to each of Q puzzles.

    The batch holds everything a credit function may look at. uniforms (B, max_new_tokens): see draw_uniforms; T below
    is the longest response. advantage: see group_advantage. normalize: see mitigations.reweight. key: seed and step,
    from which credit functions get their randomness. reference (a frozen copy of the start model), critic and
    importance: for the functions that ask for them. grade: replaces countdown_task.reward.
    """
    samples = sample(model, [codec.prompt(puzzle) for puzzle in puzzles], uniforms, codec.end_tokens)
    ask = Queries(model, codec, puzzles, samples, uniforms.shape[1], key, reference, critic, importance, micro_batch,
                  grade)
    return token_batch(ask, advantage, normalize)


def token_batch(ask: Queries, advantage: str, normalize: str) -> TokenBatch:
    """The batch made of the responses in `ask`, B / Q to each of Q puzzles: decoded, graded and compared."""
    samples, puzzles = ask.samples, ask.puzzles
    decoded, grades = decode_and_grade(ask.codec, puzzles, samples, [[]] * len(puzzles), ask.grade)
    (B, T), Q, device = samples.tokens.shape, len(puzzles), samples.tokens.device
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = annotate(text, spans)
    graded = torch.tensor([[g["reward"], g["answer"], g["format"]] for g in grades], device=device)  # (B, 3)
    rewards, success, format_score = graded.T  # (B,) each
    return TokenBatch(
        **samples._asdict(), reward=rewards, success=success, format=format_score,
        group=torch.arange(Q, device=device).repeat_interleave(B // Q),  # (B,)
        numbers=[p.numbers for p in puzzles], target=[p.target for p in puzzles],
        advantage=group_advantage(rewards.view(Q, -1), advantage, success.view(Q, -1)).flatten(),  # (B,)
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=[text for text, _ in decoded], spans=[spans for _, spans in decoded],
        calculations=[find_calculations(text) for text, _ in decoded], normalize=normalize, ask=ask)


def draw_uniforms(seed: int, step: int, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so a response depends neither on the other puzzles nor on how many
    processes share the step.
    """
    rows = [np.random.default_rng([seed, step, q]).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


# ----------------------------------------------------------------------------------------------- advantage


def group_advantage(rewards: Tensor, estimator: str = "grpo", success: Tensor | None = None) -> Tensor:
    """Advantage (Q, G) of G responses to each of Q puzzles, from their rewards (Q, G).

    grpo: (r - mean) / std (2402.03300); the population std, plus 1e-4, is our choice. dr_grpo: r - mean (2503.20783).
    rloo: r - mean of the others = G / (G - 1) * (r - mean) (2402.14740).
    maxrl: (s - mean) / mean of the success s (Q, G), 0 where none succeeds (2602.02710): the more responses, the nearer
    it comes to ascending log p(success) instead of p(success). batch: r - mean of the whole step.
    A group whose rewards are all equal has advantage exactly 0, but for `batch`.
    """
    if estimator == "maxrl":
        mean = success.mean(1, keepdim=True)  # (Q, 1)
        return quotient(success - mean, mean)
    if estimator == "batch":
        return group_advantage(rewards.view(1, -1), "dr_grpo").view_as(rewards)  # the step as one group
    deviation = rewards - rewards.mean(1, keepdim=True)  # (Q, G)
    deviation = deviation.where(has_variance(rewards)[:, None], 0.0)  # exactly 0, whatever the rounding of the mean
    std, G = rewards.std(1, correction=0, keepdim=True), rewards.shape[1]  # (Q, 1)
    return {"grpo": deviation / (std + 1e-4), "dr_grpo": deviation, "rloo": deviation * G / (G - 1)}[estimator]


# ---------------------------------------------------------------------------------------------------- loss


def policy_loss(logprob: Tensor, old: Tensor, credit: Tensor, weight: Tensor, reference_logprob: Tensor | None = None,
                kl: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The loss, a scalar, of tokens (B, T), from their log-probs under the model and when they were sampled (old).

    weight (B, T): each token's share of the loss, 0 on padding. reference_logprob (B, T): that of the reference
    model. The clip is PPO's (1707.06347); DAPO's has clip_high 0.28.
    """
    ratio = (logprob - old).exp()  # (B, T) pi / pi_old; at the first update 1, and its gradient is grad log pi
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)  # (B, T)
    # The minimum: for credit > 0 there is no gradient above 1 + clip_high, but still one below 1 - clip_low, where the
    # ratio has gone the wrong way. For credit < 0 it is the mirror image.
    gain = torch.minimum(ratio * credit, clipped * credit)  # (B, T)
    if reference_logprob is not None:
        gain = gain - kl * k3(logprob, reference_logprob)  # (B, T) stay near the reference
    return -(gain * weight).sum()


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Estimate (B, T) of KL(pi || reference) from samples of pi: exp(d) - d - 1, d = log ref - log pi.

    -d averages to the KL, and exp(d) - 1 to 0, so the sum is unbiased too (at the first update on a batch, while the
    samples are pi's own). But it is never negative, and less noisy: Schulman's third estimator, hence its name. That is
    its value; its gradient, as the loss uses it, averages to that of KL(reference || pi).
    """
    d = reference_logprob - logprob  # (B, T)
    return d.exp() - d - 1


def token_weights(mask: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """Each token's share (B, T) of a step's loss, 0 on padding.

    token: 1 / N (DAPO's code). sequence: 1 / (B * L_i) (GRPO). constant: 1 / (B * max_new_tokens) (Dr. GRPO). L_i is
    the length of response i, N the sum of all lengths.
    """
    B, lengths = len(mask), mask.sum(1, keepdim=True)  # (B, 1)
    return mask / {"token": lengths.sum(), "sequence": B * lengths, "constant": B * max_new_tokens}[loss_norm]


# -------------------------------------------------------------------------------------------------- update


def update(model: Qwen2, optimizer: Optimizer, prompts: list[list[int]], batch: TokenBatch, credit: Tensor, *,
           max_new_tokens: int, loss_norm: str = "token", kl: float = 0.0, clip_low: float = 0.2,
           clip_high: float = 0.2, updates_per_batch: int = 1, max_grad_norm: float = 1.0,
           micro_batch: int = 16) -> dict[str, float | None]:
    """Take `updates_per_batch` optimizer steps on one batch; returns columns of metrics.csv. prompts: one per puzzle.

    Micro-batches save memory and don't change the result, because each token's share of the loss is fixed for the whole
    step.
    """
    reference_logprob = batch.ask.reference_logprob if kl > 0 else None  # (B, T)
    used = rows_to_update(batch, credit, skip_zero_credit=kl == 0)  # (B,)
    used_tokens = batch.mask & used[:, None]  # (B, T)
    weight = token_weights(batch.mask, loss_norm, max_new_tokens) * used_tokens  # (B, T)
    own_prompts = my_share(prompts) if used.any() else []

    def loss(logprob: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """The loss of some responses, by default all, from the log-probs (b, t) of their tokens under the model."""
        t = logprob.shape[1]
        reference = None if reference_logprob is None else reference_logprob[rows, :t]  # (b, t)
        return policy_loss(logprob, batch.logprob[rows, :t], credit[rows, :t], weight[rows, :t], reference,
                           kl, clip_low, clip_high)

    sums, norms = [], []
    for _ in range(updates_per_batch):
        optimizer.zero_grad()
        logprob = backpropagate(model, own_prompts, batch, used, loss, micro_batch)  # (B, T)
        # Sums gradients over the processes, clips and steps; also where no row is used, since others may use some.
        norms.append(optimizer.step(max_grad_norm))
        clipped = clipped_tokens(logprob - batch.logprob, credit, clip_low, clip_high) & used_tokens  # (B, T)
        sums.append(update_sums(loss(logprob), logprob, batch, used_tokens, clipped, reference_logprob)
                    | {"prompts": sum(map(len, own_prompts))})
    return update_metrics(sums, with_kl=kl > 0) | {"grad_norm": sum(norms) / len(norms)}


def rows_to_update(batch: TokenBatch, credit: Tensor, skip_zero_credit: bool) -> Tensor:
    """The responses (B,) bool that this process updates on: of n processes, each takes every n-th puzzle.

    skip_zero_credit leaves out those whose credit is 0 on every token: they have no gradient.
    """
    rank, processes = world()
    own = batch.group % processes == rank  # (B,)
    return own & (credit != 0).any(1) if skip_zero_credit else own


def backpropagate(model: Qwen2, prompts: list[list[int]], batch: TokenBatch, used: Tensor, loss: Callable,
                  micro_batch: int) -> Tensor:
    """Add the gradient of the loss on the responses used (B,) to the parameters' gradients.

    Returns the log-probs (B, T) of their tokens under the model, and of all others as they were sampled. Each prompt is
    read once: the gradients of its responses accumulate in a detached copy of its keys and values, and go back through
    the prompt together. (Backpropagating each micro-batch through the prompts would repeat that work.)
    """
    logprob, rows = batch.logprob.clone(), used.nonzero()[:, 0]  # (B, T), (M,)
    if not len(rows):
        return logprob
    cache = PromptCache(model, prompts)
    leaf = cache.detach()  # where backward() of a micro-batch stops, and adds up the gradients of the prompts
    _, processes = world()
    for chunk, longest in by_length(batch.mask.sum(1)[rows], micro_batch):
        own = rows[chunk]  # (b,)
        tokens, mask = batch.tokens[own, :longest], batch.mask[own, :longest]  # (b, t) each
        # Of n processes, each has every n-th prompt, so prompt q is its number q // n.
        new = response_logprobs(model, ResponseCache(leaf, batch.group[own] // processes), tokens, mask)  # (b, t)
        loss(new, own).backward()
        logprob[own, :longest] = new.detach()
    cache.backward(leaf)  # once, from the sums through the prompts to the weights
    return logprob


def clipped_tokens(log_ratio: Tensor, credit: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The tokens (B, T) bool whose gradient the clip removes: policy_loss takes the clipped term, a constant."""
    ratio = log_ratio.exp()  # (B, T)
    return ratio * credit > ratio.clamp(1 - clip_low, 1 + clip_high) * credit


def update_sums(loss: Tensor, logprob: Tensor, batch: TokenBatch, used_tokens: Tensor, clipped: Tensor,
                reference_logprob: Tensor | None) -> dict[str, float]:
    """What an update sums over the tokens where used_tokens (B, T) is True, in all and by role."""
    log_ratio = (logprob - batch.logprob)[used_tokens]  # (N,)
    divergence = 0.0 if reference_logprob is None else k3(logprob, reference_logprob)[used_tokens].sum()
    sums = {"loss": loss, "abs_log_ratio": log_ratio.abs().sum(), "squared_log_ratio": log_ratio.square().sum(),
            "kl": divergence}
    for i, role in enumerate(ROLES):
        of_role = used_tokens & (batch.role == i)  # (B, T)
        sums |= {f"tokens_{role}": of_role.sum(), f"clipped_{role}": (of_role & clipped).sum()}
    return {name: float(value) for name, value in sums.items()}


def update_metrics(sums: list[dict[str, float]], with_kl: bool) -> dict[str, float | None]:
    """Columns of metrics.csv from this process's sums in each update; None where no token was updated.

    They are means over the updates, with three exceptions. tokens_updated is a sum. ratio_error is the mean |log ratio|
    of the first update: there the model has not changed since it sampled, so anything but rounding means that sampler
    and update disagree. ratio_spread is the root mean square of the log ratio at the last update, None if that is the
    first.
    """
    names = list(sums[0])  # n
    table = torch.tensor([[row[name] for name in names] for row in sums], dtype=torch.float64)  # (updates, n)
    sum_over_processes([table])
    first, mean, last = (dict(zip(names, row.tolist())) for row in (table[0], table.mean(0), table[-1]))
    N = sum(mean[f"tokens_{role}"] for role in ROLES)  # the same in every update
    clipped = sum(mean[f"clipped_{role}"] for role in ROLES)
    by_role = {f"clip_{role}": share(mean[f"clipped_{role}"], mean[f"tokens_{role}"]) for role in ROLES}
    return {"loss": mean["loss"],  # of the whole step already, while the others are sums over its tokens
            "clip_fraction": share(clipped, N), **by_role, "ratio_error": share(first["abs_log_ratio"], N),
            "ratio_spread": share(last["squared_log_ratio"], N) ** 0.5 if N and len(sums) > 1 else None,
            "kl": share(mean["kl"], N) if with_kl else None,
            "tokens_updated": round(len(sums) * (N + mean["prompts"]))}


def share(part: float, whole: float) -> float | None:
    """part / whole, None where whole is 0."""
    return part / whole if whole else None


# ---------------------------------------------------------------------------------------------- credit log


def write_credit_log(file: Path, step: int, batch: TokenBatch, credit: Tensor) -> None:
    """Write the columns of a step to an .npz file: one row of 40 bytes per token."""
    replace_file(file, lambda part: np.savez(part, **log_columns(step, batch, credit)))


def log_columns(step: int, batch: TokenBatch, credit: Tensor) -> dict[str, np.ndarray]:
    """The columns (N,) of the credit log: one row for each of the N tokens of a step."""
    mask = batch.mask
    response, position = mask.nonzero(as_tuple=True)  # (N,) each
    columns = {
        "step": (torch.full_like(response, step), np.int32), "response": (response, np.uint16),
        "group": (batch.group[response], np.uint16), "position": (position, np.uint16),
        "token": (batch.tokens[mask], np.int32),
        "logprob": (batch.logprob[mask], np.float32), "entropy": (batch.entropy[mask], np.float32),
        "logit_grad": (batch.logit_grad[mask], np.float32), "advantage": (batch.advantage[response], np.float32),
        "credit": (credit[mask], np.float32), "reward": (batch.reward[response], np.float32),
        "role": (batch.role[mask], np.int8), "in_answer": (batch.in_answer[mask], np.int8),
    }
    return {name: values.cpu().numpy().astype(dtype) for name, (values, dtype) in columns.items()}
