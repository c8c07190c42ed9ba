"""GRPO: how responses are compared, the loss, and the update.

Sample several responses to each puzzle, a *group*, and grade them. A response's *advantage* says
how much better its reward is than those of its group. *Credit*, which papers call the advantage of
a token, is the token's own number: plain GRPO gives every token its response's advantage. The
update makes tokens with positive credit more likely and those with negative credit less likely. It
ascends

    gradient = (1 / N) sum_t credit_t * grad log pi(token_t)        over the N tokens of the step

where pi is the model's distribution over tokens. Why this works: if credit were the response's
reward, the sum would on average be the gradient of the expected reward, times the number of
responses (the policy gradient theorem). Subtracting the mean reward of the *other* responses
usually removes noise. It leaves that average as it is, because their rewards do not depend on this
response, and grad log pi averages to 0. Subtracting the whole group's mean is the same up to a
factor: r_i - mean = (G - 1) / G * (r_i - mean of the others).

Two things are not exact. N depends on the responses themselves, so dividing by it biases the
average a little. And GRPO also divides by the group's standard deviation, so that puzzles whose
rewards hardly differ count for more.

A function of mitigations.py computes `credit` (B, T); the code here is the same for all of them. To
add an advantage, a loss or a norm, write a function and name it in ADVANTAGES, LOSSES or
LOSS_NORMS: the flag is made of these. `s` is the Settings.

How this file differs from the paper (DeepSeekMath, arXiv 2402.03300):
1. The loss is an average over all tokens of the step, as in DAPO's code (2503.14476). The paper
   averages within each response first: --loss_norm sequence. Dr. GRPO (2503.20783) divides by a
   constant: --loss_norm constant.
2. By default there is no KL penalty (--kl), and one update per batch (--updates_per_batch). Then
   the ratio pi / pi_old, of a token's probability now to that when it was sampled, is 1 but for
   rounding (see point 3), and hardly a token is clipped, in float32 none. A further update on the
   same batch learns from samples of an older policy. The ratio corrects for that token by token,
   which is not exact: the older policy also wrote the text before and after a token. The clip takes
   away what would be gained by moving a token's probability far from where it was sampled.
3. The log-probs of the sampling policy are recorded while sampling, not recomputed by a second
   forward pass. In bfloat16 rounding makes the two differ, so PPO's clip can act although the
   policy has not moved. --old_logprob update takes the log-probs of the first update's own pass as
   pi_old, so its ratio is 1.
4. Advantages are computed in float64, and are exactly 0 in a group whose rewards are all equal, so
   that the update leaves it out. A rounded mean would leave each response a little. (With
   --advantage step_mean the whole step is the group; maxrl compares successes, and gdpo each part
   of the reward, which may differ where rewards are equal.)

Run it:  python train.py --mitigation none
"""
from typing import Iterator

import torch
from torch import Tensor

from plumbing.checks import check_finite, check_loss
from plumbing.metrics import UpdateColumns
from plumbing.optimizer import Optimizer
from plumbing.shared_prompts import shared
from qwen2_model import Cache, Qwen2
from rollout import Policy, TokenBatch, by_group, group_mean, whole_texts
from settings import Settings

# ------------------------------------------------------------------------------- shaping, advantage
# Shapings, of the batch and the settings: the reward (B,) to compare, instead of the graded one.


def overlong(batch: TokenBatch, s: Settings) -> Tensor:
    """r - beta * x, x from 0 to 1 over the last fifth of --max_new_tokens: DAPO's soft punishment
    (2503.14476).

    There beta is 1 and r is 1 or -1. x counts what the limit counts: sampled tokens, and the
    replies between turns. A response that is cut off loses all of beta, also one whose next reply
    would not have fit.
    """
    replied = [sum(map(len, said.values())) for said in batch.before]  # B
    length = batch.mask.sum(1).double() + batch.reward.new_tensor(replied)  # (B,)
    x = (5 * length / s.max_new_tokens - 4).clamp(min=0)
    return batch.reward - s.shaping_beta * x.where(batch.ended, 1.0)


def minus_divergence(batch: TokenBatch, s: Settings) -> Tensor:
    """r - beta * log(pi / ref) of the whole response: the KL to the start model in the reward
    (RLOO, 2402.14740).

    With --advantage rloo (and, but for a factor, dr_grpo) and --loss_norm constant its gradient is
    on average that of E[r] - beta KL(pi || ref), a KL of whole responses. Compare --kl.
    """
    log_ratio = batch.logprob - batch.ask.reference_logprob  # (B, T)
    return batch.reward - s.shaping_beta * log_ratio.double().sum(1)


SHAPINGS = {"none": lambda batch, s: batch.reward, "overlong": overlong, "kl": minus_divergence}


def shape_reward(batch: TokenBatch, s: Settings) -> Tensor:
    """The reward (B,) that is compared. batch.reward stays the graded one, as in the logs."""
    shaped = SHAPINGS[s.shaping](batch, s)
    return check_finite(shaped, batch.reward, f"--shaping {s.shaping} must give each response")


# Advantages (Q, G), of the rewards (Q, G), in float64 (see point 4), and of the batch, which most
# of them don't need.


def centred(rewards: Tensor) -> Tensor:
    """r - mean of the group; exactly 0 where all rewards of a group are equal."""
    return rewards - group_mean(rewards)


def over_deviation(rewards: Tensor, _: TokenBatch) -> Tensor:
    """GRPO: (r - mean) / std (2402.03300). The population std, plus 1e-4, is our choice."""
    deviation = centred(rewards)  # (Q, G)
    return deviation / (deviation.square().mean(1, keepdim=True).sqrt() + 1e-4)


def leave_one_out(rewards: Tensor, _: TokenBatch) -> Tensor:
    """RLOO: r - mean of the others = G / (G - 1) * (r - mean) (2402.14740)."""
    G = rewards.shape[1]
    return centred(rewards) * G / (G - 1)


def over_success(_: Tensor, batch: TokenBatch) -> Tensor:
    """MaxRL: (success - mean) / mean, 0 where none succeeds (2602.02710).

    In a large group the mean is p(success), and grad p / p = grad log p, so it ascends log
    p(success). In a small group the gradient is smaller, because a rare success often does not
    occur there.
    """
    success = by_group(batch, batch.success).double()  # (Q, G)
    mean = group_mean(success)  # (Q, 1)
    return (success - mean) / torch.where(mean > 0, mean, 1.0)


def over_own_deviations(_: Tensor, batch: TokenBatch) -> Tensor:
    """GDPO: the sum of weight * (part - mean) / std, over its std in the step (2601.05242).

    So a part counts by its weight, however little it varies in the group. (Each group's sums have
    mean 0.)
    """
    total = sum(weight * over_deviation(by_group(batch, batch.grades[part]), batch)
                for part, weight in batch.parts.items())  # (Q, G)
    return total / (total.square().mean().sqrt() + 1e-4)


def minus_step_mean(rewards: Tensor, _: TokenBatch) -> Tensor:
    """r - mean of the whole step, as if it were one group."""
    return centred(rewards.view(1, -1)).view_as(rewards)


ADVANTAGES = {"grpo": over_deviation,
              "dr_grpo": lambda rewards, _: centred(rewards),  # Dr. GRPO: no division (2503.20783)
              "rloo": leave_one_out, "maxrl": over_success, "gdpo": over_own_deviations,
              "step_mean": minus_step_mean}


def compare(batch: TokenBatch, name: str = "grpo", reward: Tensor | None = None) -> Tensor:
    """The advantage (B,) of each response: how its reward (B,), else the graded one, compares with
    its group's."""
    rewards = by_group(batch, batch.reward if reward is None else reward).double()  # (Q, G)
    advantage = ADVANTAGES[name](rewards, batch)  # (Q, G)
    check_finite(advantage, rewards, f"--advantage {name} must give each response")
    return advantage.to(batch.logprob).flatten()


# ------------------------------------------------------------------------------------------- losses
# A loss is a function of (b, T) each: log pi now; `old`, log pi in the ratio's denominator; credit;
# mask; and of the settings. It returns (b, T) each: the gain, whose weighted sum is minus the loss;
# and where the clip stops a token's gradient. A dict of further (b, T) may follow: columns of
# metrics.csv, averaged over the tokens updated on. In the first update on a batch, if pi_old is pi
# exactly, the gradient of the gain is credit * grad log pi.


def ppo_objective(
    logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings
) -> tuple[Tensor, Tensor]:
    """min(ratio c, clip(ratio) c) of credit c: PPO's (1707.06347); DAPO's has --clip_high 0.28
    (2503.14476)."""
    ratio = (logprob - old).exp()  # (b, T) at first 1, and its gradient is grad log pi
    return clipped_minimum(ratio, credit, s)


def clipped_minimum(ratio: Tensor, credit: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """The smaller of ratio * credit and clip(ratio) * credit.

    For credit > 0 there is no gradient above 1 + clip_high, but still one below 1 - clip_low, where
    the ratio has gone the wrong way. For credit < 0 it is the mirror image.
    """
    clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)  # (b, T)
    stopped = ratio * credit > clipped * credit  # (b, T) then the minimum is clipped, a constant
    return torch.minimum(ratio * credit, clipped * credit), stopped


def cispo_objective(
    logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings
) -> tuple[Tensor, Tensor]:
    """clip(ratio) c log pi, with a constant clip(ratio): no token loses its gradient (CISPO,
    2506.13585).

    The paper tunes the upper bound alone: --clip_low 0.999 leaves hardly any lower one.
    """
    weight = (logprob.detach() - old).exp().clamp(1 - s.clip_low, 1 + s.clip_high)  # (b, T)
    return weight * credit * logprob, torch.zeros_like(mask)


def gspo_objective(
    logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings
) -> tuple[Tensor, Tensor]:
    """PPO's minimum with one ratio for a whole response, the geometric mean of its tokens' (GSPO,
    2507.18071).

    This is the paper's form for credit per token: the value is the response's ratio, the gradient
    that of the token. The paper has --loss_norm sequence, --clip_low 3e-4 and --clip_high 4e-4. In
    bfloat16 add --old_logprob update: rounding alone can exceed such narrow bounds. In one first
    update it clipped 48% of the bundled model's tokens, measured again later none.
    """
    change = (logprob - old).detach() * mask  # (b, T)
    mean = change.sum(1, keepdim=True) / mask.sum(1, keepdim=True)  # (b, 1)
    # (b, T) exp(mean), with the gradient of the token's log pi:
    ratio = (mean + (logprob - logprob.detach())).exp()
    return clipped_minimum(ratio, credit, s)


LOSSES = {"ppo": ppo_objective, "cispo": cispo_objective, "gspo": gspo_objective}


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Estimate (b, T) of KL(pi || reference) from samples of pi: exp(d) - d - 1, d = log ref - log
    pi.

    Value, at the first update: unbiased, because over pi's own samples -d averages to the KL and
    exp(d) - 1 to 0. Unlike -d it is never negative, and usually less noisy. (Schulman's third
    estimator.) Gradient, at the first update: (1 - ref / pi) grad log pi. Given the text before the
    token, and with that held fixed, it averages to the gradient of KL(reference || pi) of this
    token's distribution. It is not that of a KL between whole responses. In later updates, whose
    samples are an older policy's, it is that of neither KL.
    """
    d = reference_logprob - logprob  # (b, T)
    return d.exp() - d - 1


def weighted_k3(logprob: Tensor, reference_logprob: Tensor, old: Tensor) -> Tensor:
    """ratio * k3 (b, T), whose gradient is that of KL(pi || reference) itself: DeepSeek-V3.2
    (2512.02556), TRL.

    Given the text before the token, and with that held fixed, the mean over samples of pi_old is
    that of k3 over pi, which is the KL, for every pi. So the mean gradients are equal, too, in
    every update, if the ratio has a gradient: log(pi / ref) grad log pi where the ratio is 1.
    """
    return (logprob - old).exp() * k3(logprob, reference_logprob)


KL_GRADIENTS = {"k3": lambda logprob, reference, _: k3(logprob, reference), "unbiased": weighted_k3}


# Functions of mask (B, T) and the settings: each token's share (B, T) of a step's loss, 0 on
# padding. L_i is the length of response i. (methods/groups.py adds another one.)
LOSS_NORMS = {
    "token": lambda mask, s: mask / mask.sum(),  # 1 / N, N the sum of all lengths: DAPO's code
    "sequence": lambda mask, s: mask / (len(mask) * mask.sum(1, keepdim=True)),  # 1 / (B L_i): GRPO
    "constant": lambda mask, s: mask / (len(mask) * s.max_new_tokens)}  # 1 / (B limit): Dr. GRPO


# ------------------------------------------------------------------------------------------ update


def plain(
    model: Qwen2, batch: TokenBatch, rows: Tensor, at_once: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The responses rows (m,), b of like length at a time: their rows in the batch (b,), and log pi
    of their tokens (b, T), with gradient. Each stands behind its own prompt.

    By default `shared` of plumbing/shared_prompts.py does the same faster: it reads a prompt for
    all its responses together.
    """
    for some, texts, sampled in whole_texts(batch, rows, at_once):  # (b,), (b, S), (b, S)
        states = model.hidden(texts[:, :-1], Cache(model, len(texts)))  # (b, S - 1, D)
        # The state of column s predicts the token of column s + 1.
        logprob = model.logprob(states[sampled[:, 1:]], texts[sampled])  # (n,)
        mask = batch.mask[some]  # (b, T) has the same n tokens in the same order
        yield some, logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)


READINGS = {"shared": shared, "plain": plain}


def objective(
    logprob: Tensor,
    old: Tensor,
    credit: Tensor,
    mask: Tensor,
    reference: Tensor | None,
    s: Settings,
) -> tuple[Tensor, Tensor, dict]:
    """The gain of each token, minus its KL penalty; where the clip stops a gradient; and columns of
    metrics.csv. All (b, T)."""
    found = LOSSES[s.loss](logprob, old, credit, mask, s)
    gain, stopped, columns = check_loss(found, mask, s)
    if reference is not None:
        columns["kl"] = KL_GRADIENTS[s.kl_gradient](logprob, reference, old)
        gain = gain - s.kl * columns["kl"]
    return gain, stopped, columns


def update(
    policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor, s: Settings
) -> dict:
    """Take --updates_per_batch optimizer steps on one batch, given its credit (B, T). Returns
    columns of metrics.csv. Heads, such as PPO's critic, learn first, if the method has any.

    Micro-batches save memory and change the result by rounding at most, because each token's share
    of the loss is fixed for the whole step.
    """
    share = LOSS_NORMS[s.loss_norm](batch.mask, s)  # (B, T) of each token in the loss
    check_finite(share, batch.mask, f"--loss_norm {s.loss_norm} must give each token")
    reference = batch.ask.reference_logprob if s.kl > 0 else None  # (B, T)
    old = batch.logprob.clone()  # (B, T) log pi in the ratio's denominator
    # Heads learn after the credit, which a critic that knew these rewards would bias, and before
    # the model moves.
    learned = {name: head.learn(batch) for name, head in policy.heads.items()}
    # Responses without credit have no gradient, since the losses multiply by it. They are left out
    # unless there is a KL penalty, which they have, too. (A bonus that you add to the gain needs
    # them, too: change this line.)
    used = ((credit != 0).any(1) | (s.kl > 0)).nonzero()[:, 0]  # (m,)
    measured = UpdateColumns(batch, used, s)
    for k in range(s.updates_per_batch):
        optimizer.zero_grad()
        # The responses rows (b,), with log pi (b, T), as all that follows. (After the last of them
        # `shared` adds the gradient that goes through the prompts.)
        for rows, logprob in READINGS[s.reading](policy.model, batch, used, s.micro_batch):
            if k == 0 and s.old_logprob == "update":  # see point 3 above
                old[rows] = logprob.detach()
            start = None if reference is None else reference[rows]
            gain, stopped, columns = objective(
                logprob, old[rows], credit[rows], batch.mask[rows], start, s)
            loss = -(gain * share[rows])
            loss.sum().backward()
            measured.add(rows, logprob, loss, stopped, columns)
        norm = optimizer.step(s.max_grad_norm)  # clips the gradient, which had this norm; AdamW
        measured.step(norm)
    return measured.columns(learned)
