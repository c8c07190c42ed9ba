"""GRPO: how responses are compared, the loss, the update, and what is measured of every token.

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
average a little. And GRPO also divides by the group's standard deviation, which depends on this
response, too, and makes puzzles whose rewards hardly differ count for more.

`credit` (B, T) comes from a function of mitigations.py; the code here is the same for all of them.
To add an advantage, a loss or a norm, write a function and name it in ADVANTAGES, LOSSES or
LOSS_NORMS: the flag's values are their names. methods/variants.py adds those of other papers. Q
puzzles, G responses to each, B = Q G responses of T tokens at most. `s` is the Settings.

How this file differs from the paper (DeepSeekMath, arXiv 2402.03300):
1. The loss is an average over all tokens of the step, as in DAPO's code (2503.14476). The paper
   averages within each response first: --loss_norm sequence. Dr. GRPO (2503.20783) divides by a
   constant: --loss_norm constant.
2. By default there is no KL penalty (--kl), and one update per batch (--updates_per_batch). Then
   the ratio pi / pi_old, of a token's probability now to that when it was sampled, is 1 but for
   rounding (see point 3), and in float32 no token is clipped. A further update on the same batch
   learns from samples of an older policy. The ratio corrects for that token by token, which is not
   exact: the older policy also wrote the text before and after a token. The clip takes away what
   would be gained by moving a token's probability far from where it was sampled.
3. The log-probs of the sampling policy are recorded while sampling, not recomputed by a second
   forward pass. In bfloat16 rounding makes the two differ, so PPO's clip can act although the
   policy has not moved. --old_logprob update takes the log-probs of the first update's own pass as
   pi_old, so its ratio is 1.
4. Advantages are computed in float64. In a group whose rewards are all equal they are exactly 0,
   and the update leaves its responses out: they have no gradient.

Run it:  python train.py --mitigation none
"""
from typing import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from plumbing.checks import check_finite, check_gradient, check_loss
from plumbing.metrics import UpdateColumns
from plumbing.optimizer import Optimizer
from rollout import Policy, TokenBatch, by_group
from sampler import read_responses
from settings import Settings

# --------------------------------------------------------------------------------------- advantage
# By --shaping: the reward (B,) that is compared. methods/variants.py adds overlong and kl.
SHAPINGS = {"none": lambda batch, s: batch.reward}


def shape_reward(batch: TokenBatch, s: Settings) -> Tensor:
    """The reward (B,) that is compared. batch.reward stays the graded one, as in the logs."""
    shaped = SHAPINGS[s.shaping](batch, s)
    return check_finite(shaped, batch.reward, f"--shaping {s.shaping} must give each response")


def group_mean(values: Tensor) -> Tensor:
    """The mean (Q, 1, ...) of values (Q, G, ...) over each group, in float64; where all are equal,
    exactly their value, so that values - mean is exactly 0."""
    first = values[:, :1].double()
    return first + (values - first).mean(1, keepdim=True)


# Advantages are functions of the rewards (Q, G), in float64, and the batch. They return (Q, G).


def over_deviation(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """GRPO: (r - mean) / std (2402.03300). The population std, plus 1e-4, is our choice."""
    deviation = rewards - group_mean(rewards)  # (Q, G)
    return deviation / (deviation.square().mean(1, keepdim=True).sqrt() + 1e-4)


def minus_mean(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """Dr. GRPO: r - mean (2503.20783)."""
    return rewards - group_mean(rewards)


def minus_others_mean(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """RLOO: r - mean of the others = G / (G - 1) * (r - mean) (2402.14740)."""
    G = rewards.shape[1]
    return (rewards - group_mean(rewards)) * G / (G - 1)


# methods/variants.py adds maxrl, gdpo and step_mean.
ADVANTAGES = {"grpo": over_deviation, "dr_grpo": minus_mean, "rloo": minus_others_mean}


def compare(batch: TokenBatch, name: str = "grpo", reward: Tensor | None = None) -> Tensor:
    """The advantage (B,) of each response: how its reward (B,), else the graded one, compares with
    its group's."""
    rewards = by_group(batch, batch.reward if reward is None else reward).double()  # (Q, G)
    advantage = ADVANTAGES[name](rewards, batch)  # (Q, G)
    check_finite(advantage, rewards, f"--advantage {name} must give each response")
    return advantage.flatten().to(batch.logprob.dtype)


@torch.no_grad()
def assign_credit(batch: TokenBatch, credit_function: Callable, s: Settings) -> Tensor:
    """The credit (B, T) that a function of mitigations.py gives to each token. Tokens that
    --skip_unfinished leaves without credit still count in N."""
    credit = credit_function(batch)  # (B, T)
    return credit * batch.ended[:, None] if s.skip_unfinished else credit


# -------------------------------------------------------------------------------------------- loss


def ppo_clip(
    logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings
) -> tuple[Tensor, Tensor]:
    """min(ratio c, clip(ratio) c) of credit c: PPO's (1707.06347); DAPO's has --clip_high 0.28
    (2503.14476).

    All losses have these arguments, (b, T) each: log pi now; log pi_old; credit; mask. They return,
    (b, T) each, the gain, whose weighted sum is minus the loss, and where the clip stops a token's
    gradient. They may add a dict of further (b, T), which become columns of metrics.csv.
    """
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


def k3(logprob: Tensor, reference_logprob: Tensor, old: Tensor) -> Tensor:
    """Estimate (b, T) of KL(pi || reference) from samples of pi: exp(d) - d - 1, d = log ref - log
    pi. (Other penalties use `old`, which is log pi_old.)

    At the first update its value is unbiased: over pi's own samples -d averages to the KL, and
    exp(d) - 1 to 0. It is never negative, unlike -d, and usually less noisy. (Schulman's third
    estimator.) Its gradient, (1 - ref / pi) grad log pi, averages to that of KL(reference || pi) of
    this token's distribution, given the text before. That is not a KL between whole responses. In
    later updates, whose samples are an older policy's, it is the gradient of neither KL.
    """
    d = reference_logprob - logprob  # (b, T)
    return d.exp() - d - 1


LOSSES = {"ppo": ppo_clip}  # methods/variants.py adds cispo and gspo
KL_GRADIENTS = {"k3": k3}  # and unbiased
# Each token's share (B, T) of a step's loss, from mask (B, T): 0 on padding. L_i is the length of
# response i. methods/groups.py adds `lambda`, by length.
LOSS_NORMS = {
    "token": lambda mask, s: mask / mask.sum(),  # 1 / N, N the sum of all lengths: DAPO's code
    "sequence": lambda mask, s: mask / (len(mask) * mask.sum(1, keepdim=True)),  # 1 / (B L_i): GRPO
    "constant": lambda mask, s: mask / (len(mask) * s.max_new_tokens)}  # 1 / (B limit): Dr. GRPO


def loss_shares(batch: TokenBatch, s: Settings) -> Tensor:
    """Each token's share (B, T) of the step's loss, by --loss_norm."""
    share = LOSS_NORMS[s.loss_norm](batch.mask, s)
    return check_finite(share, batch.mask, f"--loss_norm {s.loss_norm} must give each token")


# ------------------------------------------------------------------------------------------ update


def whole_groups(group: Tensor, rows: Tensor, at_once: int) -> list[Tensor]:
    """Rows (m,) in parts (b,) of at most at_once: of whole groups, as many as fit; or of a group
    that is larger. group (B,): that of each row."""
    parts = []
    for q in group[rows].unique():
        members = rows[group[rows] == q]
        if parts and len(parts[-1]) + len(members) <= at_once:
            parts[-1] = torch.cat((parts[-1], members))
        else:
            parts += members.split(at_once)
    return parts


def update(
    policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor, s: Settings
) -> dict:
    """Take --updates_per_batch optimizer steps on one batch, given its credit (B, T). Returns
    columns of metrics.csv.

    A micro-batch is whole groups, or a part of one that is larger: `read_responses` reads a prompt
    once for all its responses in it. Micro-batches save memory and change the result by rounding at
    most, because each token's share of the loss is fixed for the whole step.
    """
    share = loss_shares(batch, s)  # (B, T)
    reference = batch.ask.reference_logprob if s.kl > 0 else None  # (B, T) of the start model
    old = batch.logprob.clone()  # (B, T) log pi_old, in the ratio's denominator
    # Heads, such as PPO's critic, learn now: after they gave credit, since a critic that has seen
    # this step's rewards would give biased credit; and before the model moves.
    learned = {name: head.learn(batch) for name, head in policy.heads.items()}
    # The losses multiply by credit, so a response without any has no gradient, unless --kl gives it
    # one. (A bonus that you add to the gain gives it one, too: then use all rows.)
    used = (credit != 0).any(1) | (s.kl > 0)  # (B,) bool
    rows_used = used.nonzero()[:, 0]  # (m,)
    columns = UpdateColumns(batch, rows_used)  # sums up what metrics.csv is told
    for k in range(s.updates_per_batch):
        optimizer.zero_grad()
        for rows in whole_groups(batch.group, rows_used, s.micro_batch):  # (b,)
            logprob = read_responses(policy.model, batch, rows, at_once=s.micro_batch)  # (b, T)
            if k == 0 and s.old_logprob == "update":  # see point 3 above
                old[rows] = logprob.detach()
            mask = batch.mask[rows]  # (b, T)
            found = LOSSES[s.loss](logprob, old[rows], credit[rows], mask, s)
            gain, stopped, own_columns = check_loss(found, mask, s)  # (b, T) each
            penalty = None
            if reference is not None:
                penalty = KL_GRADIENTS[s.kl_gradient](logprob, reference[rows], old[rows])  # (b, T)
                gain = gain - s.kl * penalty
            loss = -gain * share[rows]  # (b, T)
            loss.sum().backward()  # through the responses and their prompts
            columns.add(rows, logprob, loss, stopped, penalty, own_columns)
        # Shortens the gradient to --max_grad_norm, if it is longer; returns the norm before that.
        grad_norm = clip_grad_norm_(optimizer.parameters(), s.max_grad_norm).item()
        check_gradient(grad_norm)  # stops before NaN gets into the weights
        optimizer.step()  # AdamW
        columns.end_update(grad_norm)
    return columns.means(learned)


# ------------------------------------------------------------------------ what every token received


def contribution(credit: Tensor, logprob: Tensor) -> Tensor:
    """credit * log p, the original work's measure of a token. It is a value and no gradient: it is
    negative where a token is reinforced, and has no bound. (Also of numpy arrays.)"""
    return credit * logprob


def gradient(credit: Tensor, logit_grad: Tensor) -> Tensor:
    """credit * ||onehot - p||: the size of d(credit * log p) / d(logits / temperature), with the
    sign of the credit. (Also of numpy arrays.)"""
    return credit * logit_grad


def instrument(batch: TokenBatch, credit: Tensor, s: Settings) -> dict[str, Tensor]:
    """What is measured of every token of a step, by name, (B, T) each.

    plumbing/metrics.py logs the first five, by the names in its CREDIT_LOG; contribution and
    gradient follow from them. metrics.csv gets what part of abs(gradient) * share each role has.
    """
    return {
        "logprob": batch.logprob,  # log pi(token), nats: 0 where the policy was certain
        "entropy": batch.entropy,  # of the distribution that the token was drawn from, nats
        "logit_grad": batch.logit_grad,  # ||onehot - p||, the size of log pi's gradient
        "advantage": batch.advantage[:, None] * batch.mask,  # its response's
        "credit": credit,  # its own; GRPO's is the advantage
        "contribution": contribution(credit, batch.logprob),
        "gradient": gradient(credit, batch.logit_grad),
        "share": loss_shares(batch, s),  # of the step's loss: 1 / N by default
    }
