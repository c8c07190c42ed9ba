"""GRPO: how responses are compared, the loss, and the update.

Sample several responses to each puzzle and grade them. A response's *advantage* says how much better its reward is
than those of the other responses to the same puzzle, its group. *Credit* says what each token gets of it: in plain GRPO
all of it, the same for every token. The update makes tokens with positive credit more likely and those with negative
credit less likely. It ascends

    gradient = (1 / N) sum_t credit_t * grad log pi(token_t)        over the N tokens of the step

where pi is the model's distribution over tokens. If credit were the response's reward, this sum would on average be
proportional to the gradient of the expected reward (the policy gradient theorem). Subtracting the mean reward of the
*other* responses removes noise and leaves the average as it is: that mean does not depend on this response, and grad
log pi averages to 0. Subtracting the whole group's mean does the same up to a factor: r_i - mean = (G - 1) / G * (r_i -
mean of the others). Dividing by the group's standard deviation, as GRPO does, changes how much each puzzle counts:
those whose rewards hardly differ count for more.

A function of mitigations.py computes `credit` (B, T); the code here is the same for all of them. `s` is the Settings of
train.py. How it differs from the paper (DeepSeekMath, arXiv 2402.03300):
1. The loss is an average over all tokens of the step, as in DAPO's code (2503.14476). The paper averages within each
   response first: --loss_norm sequence. Dr. GRPO (2503.20783) divides by a constant: --loss_norm constant.
2. By default there is no KL penalty (--kl), and one update per batch (--updates_per_batch). Then the ratio pi / pi_old,
   of a token's probability now to that when it was sampled, is 1, and nothing is clipped.
3. The log-probs of the sampling policy are recorded while sampling, not recomputed by a second forward pass. In
   bfloat16 the two differ by rounding, and PPO's clip may take that for a moved policy: --old_logprob update takes
   those of the first update's own pass instead, so that its ratio is 1.
4. A group whose rewards are all equal has advantage exactly 0, whatever the rounding of its mean.

Run it:  python train.py --mitigation none
"""
import torch
from torch import Tensor

from plumbing.metrics import UpdateLog
from plumbing.optimizer import Optimizer
from plumbing.processes import my_share, world
from rollout import Policy, TokenBatch, by_group, has_variance
from sampler import PromptCache, ResponseCache, by_length, response_logprobs

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "batch")
LOSS_NORMS = ("token", "sequence", "constant")


# ----------------------------------------------------------------------------------------------- advantage


def compare(batch: TokenBatch, estimator: str = "grpo") -> Tensor:
    """The advantage (B,) of each response: how its reward compares with those of its group."""
    rewards, success = by_group(batch, batch.reward), by_group(batch, batch.success)  # (Q, G) each
    return group_advantage(rewards, estimator, success).flatten()


def group_advantage(rewards: Tensor, estimator: str = "grpo", success: Tensor | None = None) -> Tensor:
    """Advantage (Q, G) of G responses to each of Q puzzles, from their rewards (Q, G).

    grpo: (r - mean) / std (2402.03300); the population std, plus 1e-4, is our choice. dr_grpo: r - mean (2503.20783).
    rloo: r - mean of the others = G / (G - 1) * (r - mean) (2402.14740).
    maxrl: (s - mean) / mean of the success s (Q, G), 0 where none succeeds (2602.02710): the mean estimates p(success),
    and grad p / p = grad log p, so it ascends log p(success). batch: r - mean of the whole step.
    A group whose rewards are all equal has advantage exactly 0, but for `batch`.
    """
    if estimator == "maxrl":
        mean = success.mean(1, keepdim=True)  # (Q, 1)
        return (success - mean) / torch.where(mean > 0, mean, 1.0)
    if estimator == "batch":
        return group_advantage(rewards.view(1, -1), "dr_grpo").view_as(rewards)  # the step as one group
    deviation = rewards - rewards.mean(1, keepdim=True)  # (Q, G)
    deviation = deviation.where(has_variance(rewards)[:, None], 0.0)  # exactly 0, whatever the rounding of the mean
    if estimator == "dr_grpo":
        return deviation
    if estimator == "rloo":
        G = rewards.shape[1]
        return deviation * G / (G - 1)
    return deviation / (rewards.std(1, correction=0, keepdim=True) + 1e-4)


# ---------------------------------------------------------------------------------------------------- loss


def policy_loss(logprob: Tensor, old: Tensor, credit: Tensor, weight: Tensor, s,
                reference_logprob: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loss of each token (b, t), to be summed, and whether the clip removes its gradient (b, t) bool.

    logprob (b, t): log-probs of b responses' tokens under the model; old (b, t): when they were sampled;
    reference_logprob (b, t): under the reference model. weight (b, t): each token's share of the step's loss, 0 on
    padding. The clip is PPO's (1707.06347); DAPO's has clip_high 0.28. A loss of your own, such as CISPO's, goes here.
    (For GSPO: average logprob - old over each row where weight > 0.)
    """
    ratio = (logprob - old).exp()  # (b, t) pi / pi_old; at the first update 1, and its gradient is grad log pi
    clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)  # (b, t)
    # The minimum: for credit > 0 there is no gradient above 1 + clip_high, but still one below 1 - clip_low, where the
    # ratio has gone the wrong way. For credit < 0 it is the mirror image.
    gain = torch.minimum(ratio * credit, clipped * credit)  # (b, t)
    removed = ratio * credit > clipped * credit  # (b, t) then the minimum is the clipped term, which is a constant
    if reference_logprob is not None:
        gain = gain - s.kl * k3(logprob, reference_logprob)  # (b, t) stay near the reference
    return -(gain * weight), removed


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Estimate (B, T) of KL(pi || reference) from samples of pi: exp(d) - d - 1, d = log ref - log pi.

    Its value: -d averages to the KL and exp(d) - 1 to 0, while the samples are pi's own, as at the first update. So it
    is unbiased, but never negative and less noisy than -d. It is Schulman's third estimator, hence the name.
    Its gradient, as the loss uses it, is (1 - ref / pi) grad log pi: on average that of KL(reference || pi).
    """
    d = reference_logprob - logprob  # (B, T)
    return d.exp() - d - 1


def token_weights(mask: Tensor, s) -> Tensor:
    """Each token's share (B, T) of a step's loss, 0 on padding.

    token: 1 / N (DAPO's code). sequence: 1 / (B * L_i) (GRPO). constant: 1 / (B * max_new_tokens) (Dr. GRPO). L_i is
    the length of response i, N the sum of all lengths.
    """
    B, lengths = len(mask), mask.sum(1, keepdim=True)  # (B, 1)
    if s.loss_norm == "token":
        return mask / lengths.sum()
    if s.loss_norm == "sequence":
        return mask / (B * lengths)
    return mask / (B * s.max_new_tokens)


# -------------------------------------------------------------------------------------------------- update


def update(policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor, s) -> dict[str, float | None]:
    """Take --updates_per_batch optimizer steps on one batch; returns columns of metrics.csv.

    Micro-batches save memory and don't change the result, because each token's share of the loss is fixed for the whole
    step. Each prompt is read once an update: the gradients of its responses add up in `leaf`, a detached copy of its
    keys and values, and go back through the prompt together.
    """
    for head in policy.heads.values():  # only now: a critic that knew these rewards would bias the credit
        head.learn(batch)
    _, processes = world()
    rows = rows_to_update(batch, credit, skip_zero_credit=s.kl == 0)  # (M,) of this process
    prompts = my_share(batch.ask.prompts) if len(rows) else []
    weight = token_weights(batch.mask, s)  # (B, T)
    reference = batch.ask.reference_logprob if s.kl > 0 else None  # (B, T)
    old = batch.logprob.clone()  # (B, T)
    log = UpdateLog(batch, rows, prompts, reference, divergence=k3)  # handed over: metrics.py can't import this file
    for i in range(s.updates_per_batch):
        optimizer.zero_grad()
        if len(rows):
            cache = PromptCache(policy.model, prompts)
            leaf = cache.detach()  # backward() of a micro-batch stops here and adds to its .grad
            for chunk, t in by_length(batch.mask.sum(1)[rows], s.micro_batch):
                own = rows[chunk]  # (b,) responses of up to t tokens
                # Of n processes, each has every n-th prompt, so prompt q is its number q // n.
                responses = ResponseCache(leaf, batch.group[own] // processes)
                tokens, mask = batch.tokens[own, :t], batch.mask[own, :t]  # (b, t) each
                logprob = response_logprobs(policy.model, responses, tokens, mask)  # (b, t)
                if i == 0 and s.old_logprob == "update":
                    old[own, :t] = logprob.detach()
                loss, removed = policy_loss(logprob, old[own, :t], credit[own, :t], weight[own, :t], s,
                                            None if reference is None else reference[own, :t])  # (b, t) each
                loss.sum().backward()
                log.add(own, logprob, loss, removed)
            cache.backward(leaf)  # once, from the sums through the prompts to the weights
        # Sums the gradients over the processes, clips, steps; also without rows, since other processes may have some.
        log.end(optimizer.step(s.max_grad_norm))
    return log.metrics()


def rows_to_update(batch: TokenBatch, credit: Tensor, skip_zero_credit: bool) -> Tensor:
    """The responses (M,) that this process updates on: of n processes, each takes every n-th puzzle.

    skip_zero_credit leaves out those whose credit is 0 on every token: they have no gradient.
    """
    rank, processes = world()
    own = batch.group % processes == rank  # (B,)
    if skip_zero_credit:
        own = own & (credit != 0).any(1)
    return own.nonzero()[:, 0]
