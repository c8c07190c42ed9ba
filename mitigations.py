"""Ways to assign credit: each one function, TokenBatch -> credit (B, T), the number that multiplies grad log pi(token).

The loss never knows which of them its credit came from. To try an idea, write a function and name it in MITIGATIONS
below. Its keyword arguments become command-line flags, the first line of its docstring becomes its help; the README
has an example. How this differs from the original work, and from most published code:
1. Weights carry no gradient, see the whole step and not a micro-batch, and keep a mean of 1 in each response, so that
   a reweighting moves credit and nothing else.
2. A method that is undefined for a response (no answer, no calculation) gives it plain GRPO.
3. Where a paper and its code differ, the paper is followed, and the line says so.

In the formulas: A advantage and L length of the response, r its reward; p probability of the token, H entropy of the
distribution it came from, V reward expected before it; z z-score.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from countdown_task import StepSpan, anchors, check_steps, sentence_starts

NORMALIZATIONS = ("response", "batch", "none")
ADVANTAGES = ("grpo", "dr_grpo", "rloo")


@dataclass
class TokenBatch:
    """All that a credit function may look at: the B responses of one step, padded to T on the right, no gradient.

    Column t is the t-th token of the response; on padding all is 0 or False. Built once a step, before micro-batching.
    The responses to one question lie together, as many to each. The callables ask the model again: a method pays for
    what it calls, and no other.
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    reward: Tensor  # (B,) 0.1 * format + success
    success: Tensor  # (B,) 1 where the answer is right, else 0
    format: Tensor  # (B,) 0..1
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    group: Tensor  # (B,) int64, which question the response answers
    numbers: list[tuple[int, ...]]  # per question
    target: list[int]  # per question
    advantage: Tensor  # (B,) one number a response, normalized within its group
    role: Tensor  # (B, T) int8: 0 filler, 1 reasoning, 2 structure
    in_answer: Tensor  # (B, T) bool, from the graded <answer> on
    text: list[str]  # per response, decoded, end token removed
    spans: list[list[tuple[int, int]]]  # per response, each token's character span in its text
    steps: list[list[StepSpan]]  # per response, the character spans of the calculations written in its text
    normalize: str  # how `reweight` rescales
    generator: Callable[[str], torch.Generator]  # chance for a method of that name, the same whenever it is asked for
    hidden: Callable[[], Tensor]  # (B, T, D) last hidden state of the model *before* it emits each token
    attention: Callable[[], Tensor]  # (B, T, T) [:, t, u]: how much the state before token t looks at token u < t
    values: Callable[[], Tensor]  # (B, T) the critic's estimate of the reward before each token, 0 on padding
    reference_logprob: Callable[[], Tensor]  # (B, T) log-prob of each token under the start model
    logprob_without: Callable[[Tensor, Tensor], Tensor]  # rows (N,), hide (N, T) bool -> (N, T) log-probs unseeing
    rollouts: Callable[[Tensor, int], Tensor]  # cuts (B, T) bool, k -> (B, T) mean reward of k fresh ends from there


# -------------------------------------------------------------------------------------- response -> one number


def group_advantage(rewards: Tensor, kind: str = "grpo") -> Tensor:
    """Advantage (Q, G) of G answers to each of Q questions from their rewards (Q, G).

    grpo: (r - mean) / (std + 1e-4), population std (2402.03300). dr_grpo: r - mean (2503.20783). rloo: r - mean of
    the others (2402.14740). A group whose rewards are all equal has advantage 0.
    """
    G = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)  # (Q, G)
    if kind == "grpo":
        centred = centred / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    if kind == "rloo":
        centred = centred * (G / (G - 1))
    return torch.where(has_variance(rewards)[:, None], centred, 0.0)


def has_variance(rewards: Tensor) -> Tensor:
    """Which questions (Q,) have answers of unequal reward (Q, G): the others teach nothing."""
    return rewards.amax(1) > rewards.amin(1)


# ------------------------------------------------------------------------------------------------------- tools


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """The response's advantage times weight (B, T) >= 0, rescaled as batch.normalize says; credit (B, T).

    response: the weights of each response average 1, so a method moves credit within a response and can't change how
    responses compare. batch: they average 1 over the step's tokens. none: as they are. A response whose weights
    are all 0 gets no credit. ValueError for a weight that is negative or not finite.
    """
    weight = torch.where(batch.mask, weight, 0.0)  # (B, T)
    if not ((weight >= 0) & (weight < math.inf)).all():
        raise ValueError("a token's weight is negative or not finite: choose other hyper-parameters")
    if batch.normalize == "response":
        weight = mean_one(weight, batch.mask)
    if batch.normalize == "batch":
        weight = mean_one(weight.view(1, -1), batch.mask.view(1, -1)).view_as(weight)
    return batch.advantage[:, None] * weight


def require(condition: bool, message: str) -> None:
    """ValueError for a hyper-parameter that can't work, whatever the batch."""
    if not condition:
        raise ValueError(message)


def mean_one(weight: Tensor, mask: Tensor) -> Tensor:
    """Weights (B, T) rescaled so that each row's average 1 over its mask (B, T); a row of zeros stays as it is."""
    return weight * over(mask.sum(1, keepdim=True), weight.sum(1, keepdim=True))


def over(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where the whole is 0."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 0.0)


def or_plain(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Weights (B, T), 1 throughout a response where they are all 0 because the method is undefined for it."""
    defined = (weight * batch.mask).any(1, keepdim=True)  # (B, 1)
    return torch.where(defined, weight, 1.0)


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G answers to each of Q questions."""
    return values.view(len(batch.numbers), -1, *values.shape[1:])


def z_score(values: Tensor, where: Tensor) -> Tensor:
    """Values (Q, G, T) minus their mean, over their standard deviation, both over the tokens `where` of a question;
    0 elsewhere."""
    count = where.sum((1, 2), keepdim=True).clamp(min=1)  # (Q, 1, 1)
    centred = torch.where(where, values - (values * where).sum((1, 2), keepdim=True) / count, 0.0)
    return centred / ((centred**2).sum((1, 2), keepdim=True) / count).sqrt().add(1e-4)


def last_token(batch: TokenBatch) -> Tensor:
    """True (B, T) at the last token of each response."""
    return batch.mask & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))


def next_value(batch: TokenBatch, value: Tensor) -> Tensor:
    """V_{t+1} from V_t (B, T): the value after each token, 0 after the last one."""
    return value.roll(-1, dims=1) * (batch.mask & ~last_token(batch))


def step_tokens(batch: TokenBatch, i: int) -> Tensor:
    """Which tokens belong to each of the S calculations written in response i (S, T) bool."""
    where = torch.from_numpy(anchors(batch.text[i], batch.spans[i]))  # (L,) the character that decides
    tokens = torch.zeros(len(batch.steps[i]), batch.mask.shape[1], dtype=torch.bool)  # (S, T)
    for row, step in zip(tokens, batch.steps[i]):
        row[: len(where)] = (where >= step.a[0]) & (where < step.result[1])
    return tokens.to(batch.mask.device)


# --------------------------------------------------------------------- the baseline, and weights from the sampler


def none(batch: TokenBatch) -> Tensor:
    """credit = A: GRPO, the same number on every token of a response (2402.03300)."""
    return batch.advantage[:, None] * batch.mask


def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = A * (1 in <answer>, think_discount before it): reward the conclusion more (the original work).

    No answer: plain GRPO. (The original discounted such a response as a whole: credit then depends on the format.)
    """
    require(think_discount >= 0, "--think_discount must be 0 or more")
    concluding = batch.in_answer | ~batch.in_answer.any(1, keepdim=True)  # (B, T) all of it where there is no answer
    return reweight(batch, torch.where(concluding, 1.0, think_discount))


def inverse_logprob(batch: TokenBatch, epsilon: float = 0.1, detach: bool = True) -> Tensor:
    """credit = A / (|log p| + epsilon): level out |credit * log p| (the original work; detach=False is its bug).

    The original let the gradient flow through its weight: d/dl of l / (|l| + epsilon) is epsilon / (|l| + epsilon)^2,
    so that nearly all of it went to tokens already certain. With --normalize none --detach false that is what you get.
    """
    require(epsilon > 0, "--epsilon must be above 0")
    size = batch.logprob.abs() + epsilon  # (B, T)
    return reweight(batch, 1 / size if detach else epsilon / size**2)


def advantage_reweighting(batch: TokenBatch, alpha: float = 0.2) -> Tensor:
    """credit = A * (alpha * p + 1 - alpha): damp rare tokens, whose gradients are large (2505.12929)."""
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    return reweight(batch, alpha * batch.logprob.exp() + 1 - alpha)


def entropy_weighted(batch: TokenBatch, entropy_temp: float = 1.0) -> Tensor:
    """credit = A * L * softmax(H / entropy_temp): more on uncertain tokens, within the response (the original work).

    The original took the softmax over a micro-batch, so that its results depended on a memory setting.
    """
    require(entropy_temp > 0, "--entropy_temp must be above 0")
    score = (batch.entropy / entropy_temp).masked_fill(~batch.mask, -math.inf)  # (B, T)
    return reweight(batch, score.softmax(1) * batch.mask.sum(1, keepdim=True))


def entropy_masking(batch: TokenBatch, mask_percentile: float = 80.0) -> Tensor:
    """credit = A where H >= the mask_percentile-th percentile of the step, else 0: forking tokens only (2506.01939).

    --normalize none is the paper's equation, which divides by all tokens; batch is its code, which divides by those
    kept: five times as much. A response without a single one gets no credit.
    """
    require(0 <= mask_percentile <= 100, "--mask_percentile must be between 0 and 100")
    threshold = batch.entropy[batch.mask].double().quantile(mask_percentile / 100)  # ()
    return reweight(batch, (batch.entropy >= threshold).float())


# -------------------------------------------------------------------------------- against the rest of the group


def prefix_tree(batch: TokenBatch) -> Tensor:
    """credit = A / (group members that share the prefix up to here): GRPO as a process reward (2509.21154)."""
    tokens, mask = by_group(batch, batch.tokens), by_group(batch, batch.mask)  # (Q, G, T)
    same = (tokens[:, :, None] == tokens[:, None]) & mask[:, :, None] & mask[:, None]  # (Q, G, G, T)
    sharing = same.int().cumprod(-1).sum(2).view_as(batch.mask)  # (B, T)
    return batch.advantage[:, None] * batch.mask / sharing.clamp(min=1)


def optimal_baseline(batch: TokenBatch) -> Tensor:
    """credit = r - sum_i r_i W_it / sum_i W_it, W_it = sum_{j<=t} logit_grad_ij^2: least variance (2602.07078).

    Sums over the group's answers i that still run at t. Where one runs alone, its own reward would be the baseline:
    there, the group mean (verl's code: credit 0).
    """
    reward, mask = by_group(batch, batch.reward)[..., None], by_group(batch, batch.mask)  # (Q, G, 1), (Q, G, T)
    energy = by_group(batch, batch.logit_grad.square().cumsum(1)) * mask  # (Q, G, T) W
    total = energy.sum(1, keepdim=True)  # (Q, 1, T)
    usable = (mask.sum(1, keepdim=True) > 1) & (total > 0)  # (Q, 1, T)
    baseline = torch.where(usable, over((reward * energy).sum(1, keepdim=True), total), reward.mean(1, keepdim=True))
    taught = mask & has_variance(reward)[..., None]  # (Q, G, T) else rounding noise, which Adam makes large
    return torch.where(taught, reward - baseline, 0.0).view_as(batch.logprob)


def gtpo(batch: TokenBatch, a1: float = 1.0, a2: float = 0.1, joint: bool = False) -> Tensor:
    """credit = z(a1 + a2 d H / sum H) if right, z(-a1 - a2 h (1/H) / sum 1/H) if wrong: pay for entropy (2508.04349).

    Sums go over the d right, or the h wrong, answers of the group that still run at t. As published, right and wrong
    tokens are z-scored each on their own, so the credit of either side averages 0: *the outcome is gone*, and only
    which token was more uncertain is left. joint=True z-scores both together. All right, or all wrong: plain GRPO.
    """
    H, mask = by_group(batch, batch.entropy) + 1e-12, by_group(batch, batch.mask)  # (Q, G, T) all 0 are all alike
    right = by_group(batch, batch.success)[..., None] > 0  # (Q, G, 1)
    up, down = mask & right, mask & ~right  # (Q, G, T)
    sure = down / (H + 1e-6)  # (Q, G, T) 1 / H, so that a wrong token is punished for being certain
    share_up = over(H * up, (H * up).sum(1, keepdim=True))  # (Q, G, T)
    share_down = over(sure, sure.sum(1, keepdim=True))  # (Q, G, T)
    gain = a1 + a2 * share_up * up.sum(1, keepdim=True)  # (Q, G, T)
    loss = -a1 - a2 * share_down * down.sum(1, keepdim=True)  # (Q, G, T)
    reward = torch.where(up, gain, loss)  # (Q, G, T)
    credit = z_score(reward, mask) if joint else z_score(reward, up) + z_score(reward, down)  # (Q, G, T)
    mixed = (right.any(1) & ~right.all(1))[..., None]  # (Q, 1, 1)
    return torch.where(mixed, credit, by_group(batch, none(batch))).view_as(batch.logprob)


def ktae(batch: TokenBatch) -> Tensor:
    """credit = A + score of the token's id: does holding it go with being right in this group (2505.16826).

    0 for the end token, and where the group's answers are all right or all wrong.
    """
    credit, is_end = none(batch), last_token(batch) & batch.ended[:, None]  # (B, T)
    for group in batch.group.unique():
        rows = batch.group == group  # (B,)
        right, mask = batch.success[rows] > 0, batch.mask[rows]  # (G,), (G, T)
        if right.any() and not right.all():
            score = torch.zeros_like(credit[rows])  # (G, T)
            score[mask] = key_token_scores(batch.tokens[rows], mask, right)
            credit[rows] += score.masked_fill(is_end[rows], 0.0)
    return credit


def key_token_scores(tokens: Tensor, mask: Tensor, right: Tensor) -> Tensor:
    """KTAE's score in [-1, 1] of each of the N masked tokens of a group, tokens (G, T), right (G,): (N,).

    With U token ids, of which a right and b wrong answers hold each: score = 2 sigmoid((F + IG) / 2 * x) - 1,
    F = exp(-2 p) of Fisher's exact test (0 where p is 1), IG the information gain in bits, and the direction x =
    Cohen's h + (f_right / f_wrong - f_wrong / f_right), f the frequency of the id on each side, saturated as in BM25.
    """
    ids, index = tokens[mask].unique(return_inverse=True)  # (U,), (N,)
    counts = torch.zeros(len(tokens), len(ids), dtype=torch.float64, device=tokens.device)  # (G, U)
    counts.index_put_((mask.nonzero()[:, 0], index), counts.new_ones(()), accumulate=True)
    a, b = ((counts[side] > 0).sum(0) for side in (right, ~right))  # (U,), (U,)
    R, W = int(right.sum()), int((~right).sum())
    p = fisher_p(R, W).to(tokens.device)[a, b]  # (U,)
    strength = torch.where(p < 1 - 1e-9, (-2 * p).exp(), 0.0) + information_gain(a, b, R, W)  # (U,) F + IG
    lengths = torch.stack([counts[side].sum() for side in (right, ~right)])  # (2,) tokens of each side
    f = torch.stack([counts[side].sum(0) for side in (right, ~right)]) / lengths[:, None]  # (2, U)
    k1, half = 2.0, 0.5  # BM25's constants, as in the authors' code
    f = f * (k1 + 1) / (f + k1 * (1 - half + half * lengths / lengths.mean())[:, None])  # (2, U) saturated
    h = 2 * (a / R).sqrt().asin() - 2 * (b / W).sqrt().asin()  # (U,) Cohen's h; the authors' code leaves out both 2s
    x = h + f[0] / (f[1] + 1e-5) - f[1] / (f[0] + 1e-5)  # (U,)
    return (2 * (strength / 2 * x).sigmoid() - 1)[index].float()


def fisher_p(R: int, W: int) -> Tensor:
    """Two-sided p (R + 1, W + 1) of Fisher's exact test: a of R right and b of W wrong answers hold a token."""
    p = torch.zeros(R + 1, W + 1, dtype=torch.float64)
    for n in range(R + W + 1):  # how many hold it: the margin that the test holds fixed
        a = range(max(0, n - W), min(R, n) + 1)
        chance = [math.comb(R, i) * math.comb(W, n - i) / math.comb(R + W, n) for i in a]
        chance = torch.tensor(chance, dtype=torch.float64)  # (len(a),)
        as_rare = chance <= chance[:, None] * (1 + 1e-9)  # up to rounding
        p[list(a), [n - i for i in a]] = (chance * as_rare).sum(1)
    return p


def information_gain(a: Tensor, b: Tensor, R: int, W: int) -> Tensor:
    """Bits (U,) that a token's presence, in a of R right and b of W wrong answers (U,), says about being right."""
    def entropy(x: Tensor, y: Tensor) -> Tensor:  # of the shares of x and y, times how many they are
        total = (x + y).clamp(min=1)
        return -(torch.xlogy(x, x / total) + torch.xlogy(y, y / total)) / math.log(2)
    a, b = a.double(), b.double()
    whole = entropy(a.new_tensor(R), a.new_tensor(W))  # ()
    return (whole - entropy(a, b) - entropy(R - a, W - b)) / (R + W)


# ------------------------------------------------------------------------------------- what is written, checked


def reward_decomposition(batch: TokenBatch, stepwise: bool = False) -> Tensor:
    """credit = 0.1 A_format on tags + 0.3 A_steps before <answer> + A_success in it: normalize, then add (2601.05242).

    A_steps: the share of written calculations that are true and use values at hand, a process reward. stepwise=True:
    each calculation's own verdict on its own tokens instead. No answer, or no calculation: plain GRPO, and a share of 0
    where others of the group are compared with it. (The paper then normalizes the sum again, over the batch.)
    """
    verdicts = [torch.tensor(check_steps(text, steps, batch.numbers[group]), dtype=torch.float32)
                for text, steps, group in zip(batch.text, batch.steps, batch.group.tolist())]  # B of (S,)
    share = torch.stack([v.mean() if len(v) else torch.tensor(0.0) for v in verdicts]).to(batch.reward.device)  # (B,)
    process, format, answer = (group_advantage(by_group(batch, r)).view(-1, 1)
                               for r in (share, batch.format, batch.success))  # (B, 1) each
    if stepwise:
        process = step_advantage(batch, verdicts)  # (B, T)
    credit = 0.1 * format * (batch.role == 2) + torch.where(batch.in_answer, answer, 0.3 * process)  # (B, T)
    written = torch.tensor([len(v) > 0 for v in verdicts], device=share.device) & batch.in_answer.any(1)  # (B,)
    return torch.where(written[:, None], credit * batch.mask, none(batch))


def step_advantage(batch: TokenBatch, verdicts: list[Tensor]) -> Tensor:
    """Each calculation's verdict (0 or 1), normalized over all of its group, on its own tokens (B, T); 0 elsewhere."""
    advantage, G = torch.zeros_like(batch.logprob), len(batch.text) // len(batch.numbers)
    for i, verdict in enumerate(verdicts):
        if not len(verdict):
            continue
        peers = torch.cat(verdicts[i // G * G : i // G * G + G])  # of all calculations in the group
        normalized = ((verdict - peers.mean()) / (peers.std(correction=0) + 1e-4)).to(advantage.device)  # (S,)
        for tokens, value in zip(step_tokens(batch, i), normalized):
            advantage[i, tokens] = value
    return advantage


# --------------------------------------------------------------------------------------- asking the model again


def attention_credit(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * (1 + credit_scale * a): a, how much the answer looks at the token (the original work).

    Last layer, mean over heads, each token's sum divided by how many of those states could see it, a's mean over the
    response 1. The first position of the row, an attention sink, is part of the prompt and so never counted. No
    answer: a = 0, plain GRPO. (The original took the attention to one token for the credit of the next.)
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    looks = (batch.attention() * batch.in_answer[:, :, None]).sum(1)  # (B, T)
    able = batch.in_answer.sum(1, keepdim=True) - batch.in_answer.cumsum(1)  # (B, T) answer tokens behind this one
    return reweight(batch, 1 + credit_scale * mean_one(over(looks, able) * batch.mask, batch.mask))


def causal_ablation(batch: TokenBatch) -> Tensor:
    """credit = A * (0.5 + 0.5 drop / max drop on a step, 0.5 elsewhere, 1.5 in <answer>): what it needs (2602.09331).

    step: a written calculation. drop: by how much the answer's log-prob falls, at least 0, when no later token may
    look at the step (its keys are masked, positions stay). No answer, or no step before it: plain GRPO.
    """
    hide = [step_tokens(batch, i) & ~batch.in_answer[i] for i in range(len(batch.text))]  # B of (S, T)
    hide = [steps[steps.any(1)] if batch.in_answer[i].any() else steps[:0] for i, steps in enumerate(hide)]
    rows = torch.repeat_interleave(torch.tensor([len(steps) for steps in hide])).to(batch.mask.device)  # (N,)
    if not len(rows):
        return none(batch)
    weight = torch.where(batch.in_answer, 1.5, 0.5)  # (B, T)
    fall = batch.logprob[rows] - batch.logprob_without(rows, torch.cat(hide))  # (N, T)
    drop = (fall * batch.in_answer[rows]).sum(1).clamp(min=0)  # (N,)
    largest = torch.zeros_like(batch.advantage).scatter_reduce(0, rows, drop, "amax")[rows]  # (N,) of the response
    for i, tokens, share in zip(rows, torch.cat(hide), over(drop, largest)):
        weight[i, tokens] = 0.5 + 0.5 * share
    defined = torch.zeros_like(batch.ended).index_fill(0, rows, True)  # (B,)
    return reweight(batch, torch.where(defined[:, None], weight, 1.0))


def vineppo(batch: TokenBatch, k: int = 9, fresh_start: bool = False) -> Tensor:
    """credit = V(next cut) - V(this cut): V the mean reward of k fresh ends, a cut where a sentence ends (2410.01679).

    The same on all tokens between two cuts; V(end) is the reward. V(start) costs nothing: it is the mean reward of the
    others in the group, unless fresh_start=True samples it, too.
    """
    require(k >= 1, "--k must be at least 1: that many fresh ends are sampled at each cut")
    B, T = batch.mask.shape
    cuts = torch.zeros(B, T, dtype=torch.bool)
    for i, (text, spans) in enumerate(zip(batch.text, batch.spans)):
        cuts[i, : len(spans)] = torch.from_numpy(sentence_starts(text, spans))
    cuts = cuts.to(batch.mask.device)
    cuts[:, 0] = fresh_start
    value, rewards = batch.rollouts(cuts, k), by_group(batch, batch.reward)  # (B, T), (Q, G)
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)  # (Q, G) mean reward
    start = value[:, :1] if fresh_start else others.view(B, 1)  # (B, 1)
    place = torch.arange(T, device=cuts.device)  # (T,)
    this = torch.where(cuts, place, 0).cummax(1).values  # (B, T) the last cut at or before t
    later = torch.where(cuts, place, T).flip(1).cummin(1).values.flip(1)  # (B, T) the first cut at or behind t
    following = torch.cat((later[:, 1:], later.new_full((B, 1), T)), dim=1)  # (B, T) the first cut behind t
    value = torch.cat((start, value[:, 1:], batch.reward[:, None]), dim=1)  # (B, T + 1)
    return (value.gather(1, following) - value.gather(1, this)) * batch.mask


def dpo(batch: TokenBatch, beta: float = 0.1) -> Tensor:
    """credit = beta sigmoid(-margin) on the best answer of a group, minus that on the worst: online DPO (2305.18290).

    margin = beta * (log ratio of the best to the start model - that of the worst). Through the loss this is DPO's
    gradient, summed over groups and divided by the tokens of the step (--loss_norm token) or by B * max_new_tokens
    (constant), at the first update on a batch. Ties go to the lowest index; a group of equal rewards has no pair.
    """
    require(beta > 0, "--beta must be above 0")
    ratio = ((batch.logprob - batch.reference_logprob()) * batch.mask).sum(1)  # (B,) of the whole response
    rewards, ratios = by_group(batch, batch.reward), by_group(batch, ratio)  # (Q, G)
    best, worst = rewards.argmax(1, keepdim=True), rewards.argmin(1, keepdim=True)  # (Q, 1)
    margin = beta * (ratios.gather(1, best) - ratios.gather(1, worst))  # (Q, 1)
    push = beta * (-margin).sigmoid()  # (Q, 1)
    credit = torch.zeros_like(rewards).scatter(1, best, push).scatter_add(1, worst, -push)  # (Q, G) 0 if best is worst
    return credit.view(-1, 1) * batch.mask


# --------------------------------------------------------------------------------------- with a trained critic


def ppo(batch: TokenBatch, gae_lambda: float = 0.95, whiten: bool = False) -> Tensor:
    """credit = sum_l gae_lambda^l delta_{t+l}, delta_t = r_t + V_{t+1} - V_t: PPO (1707.06347) with GAE (1506.02438).

    The reward comes at the last token, the value behind it is 0, also where the token limit cut the response off.
    whiten=True rescales credit to mean 0 and standard deviation 1 over the step.
    """
    require(0 <= gae_lambda <= 1, "--gae_lambda must be between 0 and 1")
    value = batch.values()  # (B, T)
    delta = last_token(batch) * batch.reward[:, None] + next_value(batch, value) - value  # (B, T)
    credit = torch.zeros_like(delta)
    running = torch.zeros_like(batch.reward)  # (B,)
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + gae_lambda * running
        credit[:, t] = running
    if whiten:
        inside = credit[batch.mask]
        credit = (credit - inside.mean()) / (inside.std(correction=0) + 1e-4)
    return credit * batch.mask


def learned_importance(batch: TokenBatch) -> Tensor:
    """credit = A * |V_{t+1} - V_t|, V the critic's: more on tokens that change the expected reward (the original work).

    The last token, behind which there is nothing left to value, gets none. A critic that says the same of all tokens,
    as on the first step: plain GRPO. The original work calls this "lambda-GRPO"; three papers of that name do other
    things: a learned exponent on a response's length (2510.06870), `prefix_tree` (2509.21154), eligibility traces
    (2510.00194).
    """
    value = batch.values()  # (B, T)
    change = (next_value(batch, value) - value).abs()  # (B, T)
    return reweight(batch, or_plain(batch, change.masked_fill(last_token(batch), 0.0)))


# ----------------------------------------------------------------------------------------------- the controls


def random(batch: TokenBatch) -> Tensor:
    """credit = A * w, w ~ Exponential(1): the control that any weighting has to beat."""
    weight = torch.empty(batch.mask.shape).exponential_(generator=batch.generator("random"))  # (B, T)
    return reweight(batch, or_plain(batch, weight.to(batch.mask.device)))


def inverted(batch: TokenBatch, of: str = "entropy_weighted") -> Tensor:
    """credit = A * (max w + min w - w), w the weights of --of: the control that turns a method around (2602.09331).

    `of` has its own hyper-parameters at their defaults.
    """
    if of not in MITIGATIONS or not is_reweighting(of) or of == "inverted":
        names = [name for name in MITIGATIONS if is_reweighting(name) and name != "inverted"]
        raise ValueError(f"--of {of}: only a reweighting can be inverted; choose one of {', '.join(names)}")
    weight = MITIGATIONS[of](dataclasses.replace(batch, advantage=torch.ones_like(batch.advantage)))  # (B, T)
    largest = weight.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)  # (B, 1)
    smallest = weight.masked_fill(~batch.mask, math.inf).amin(1, keepdim=True)  # (B, 1)
    return reweight(batch, (largest + smallest - weight).clamp(min=0))  # below 0 by rounding only


MITIGATIONS: dict[str, Callable[..., Tensor]] = {
    "none": none,
    "outcome_conditional": outcome_conditional,
    "inverse_logprob": inverse_logprob,
    "advantage_reweighting": advantage_reweighting,
    "entropy_weighted": entropy_weighted,
    "entropy_masking": entropy_masking,
    "prefix_tree": prefix_tree,
    "optimal_baseline": optimal_baseline,
    "gtpo": gtpo,
    "ktae": ktae,
    "reward_decomposition": reward_decomposition,
    "attention_credit": attention_credit,
    "causal_ablation": causal_ablation,
    "vineppo": vineppo,
    "dpo": dpo,
    "ppo": ppo,
    "learned_importance": learned_importance,
    "random": random,
    "inverted": inverted,
    # <- your idea here
}


# ------------------------------------------------------------------------------------------ what they take


def parameters(name: str) -> dict[str, bool | int | float | str]:
    """The keyword arguments of a credit function and their defaults: its hyper-parameters."""
    signature = inspect.signature(MITIGATIONS[name])
    return {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}


def mentions(name: str, what: str) -> bool:
    """Whether the code of a credit function itself names something, such as a callable of the TokenBatch."""
    return what in MITIGATIONS[name].__code__.co_names


def is_reweighting(name: str) -> bool:
    """Whether a credit function calls `reweight` itself, and so obeys --normalize."""
    return mentions(name, "reweight")


def summary(name: str) -> str:
    """The first line of a credit function's docstring."""
    return (inspect.getdoc(MITIGATIONS[name]) or "no docstring yet").splitlines()[0]
