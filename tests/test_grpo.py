"""Advantage, loss, update and log, each against an independent computation."""
import copy
import math
import random
import statistics
from fractions import Fraction

import pytest
import torch

import grpo
import methods.registry  # noqa: F401  completes ADVANTAGES, LOSSES, ...
from plumbing import compute
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, parse_config
from rollout import Policy
from settings import Settings
from tests.fixtures import make_batch
from tests.plain import plain_logprobs, plain_update


def over_deviation(group, i):
    """(r - mean) / (std + 1e-4) of response i of a group of Fractions."""
    return (group[i] - statistics.mean(group)) / Fraction(math.sqrt(statistics.pvariance(group)) + 1e-4)


def textbook(estimator, group, i, success, step):
    """The advantage of response i of a group; its arguments are lists of Fractions, exactly what float64 holds."""
    deviation, solved = group[i] - statistics.mean(group), statistics.mean(success)
    return float({"grpo": lambda: over_deviation(group, i),
                  "dr_grpo": lambda: deviation,
                  "rloo": lambda: group[i] - statistics.mean(group[:i] + group[i + 1 :]),
                  "maxrl": lambda: (success[i] - solved) / solved if solved else 0,
                  "step_mean": lambda: group[i] - statistics.mean(step)}[estimator]())


def check_advantages(estimator, reward, G):
    """Advantages of rewards (B,) in groups of G: within 1e-6 of the group's largest, and so exactly 0 where that is."""
    success = reward.flip(0)  # in other groups
    batch = make_batch([1] * len(reward), [0.0] * len(reward), [i // G for i in range(len(reward))], reward=reward,
                       success=success, grades={"a": reward, "b": success}, parts={"a": 2.0, "b": -0.5})
    r, s = ([Fraction(x) for x in values.tolist()] for values in (reward, success))
    found, groups = grpo.compare(batch, estimator), [slice(q, q + G) for q in range(0, len(r), G)]
    assert found.dtype == batch.logprob.dtype == torch.float32
    if estimator == "gdpo":  # the sum of the parts, as if the step were one group
        total = [2 * over_deviation(r[own], i) - over_deviation(s[own], i) / 2 for own in groups for i in range(G)]
        expected = [float(over_deviation(total, i)) for i in range(len(r))]
    else:
        expected = [textbook(estimator, r[own], i, s[own], r) for own in groups for i in range(G)]
    for own in groups:
        assert found[own].tolist() == pytest.approx(expected[own], rel=0, abs=1e-6 * max(map(abs, expected[own])))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", grpo.ADVANTAGES)
def test_advantage_by_the_textbook(estimator):
    """Guards against the unbiased std, a mean over the wrong axis, rloo's factor, and rounding."""
    rows = [[1.1, 0.1, 0.1, 0, 0, 0, 0], [0.1, 1.1, 1.1, 1.1, 1.1, 0, 0.1], [0.1] * 7, [0.35] * 6 + [0.35000002]]
    check_advantages(estimator, torch.tensor([*rows, [100] * 6 + [100.001]]).flatten(), 7)
    for offset, unit in ((16777216, 0.5), (1e7, 0.1), (1.7e9, 20)):  # which float32 makes equal
        check_advantages(estimator, torch.tensor([offset + unit * x for x in range(14)], dtype=torch.float64), 7)
    rng = random.Random(0)
    for _ in range(30):
        levels, size = rng.randint(2, 40), 10 ** rng.uniform(-6, 1)
        Q, G, offset = rng.randint(1, 4), rng.randint(2, 16), rng.choice((0, 1, 1e3)) * rng.random()
        check_advantages(estimator, torch.tensor([offset + size * rng.randrange(levels) for _ in range(Q * G)]), G)
        check_advantages(estimator, torch.full((Q * G,), offset), G)


def test_shaped_rewards_by_hand_leave_the_graded_one():
    """Guards against a punishment that begins elsewhere, a KL of the wrong sign, padding or response, and a reward that
    is shaped in the logs, or not where it is compared."""
    rewards = torch.tensor([1, 1, 0.1, 1.1], dtype=torch.float64)
    batch = make_batch([10, 16, 18, 20], [0.0] * 4, [0, 0, 1, 1], reward=rewards)  # log pi is -1
    batch.ask.reference_logprob = torch.tensor([-0.75, -1, -1.5, -2])[:, None] * batch.mask
    for shaping, expected in (("none", [1, 1, 0.1, 1.1]), ("overlong", [1, 1, 0.1 - 0.2, 1.1 - 0.4]),
                              ("kl", [1 + 0.4 * 2.5, 1, 0.1 - 0.4 * 9, 1.1 - 0.4 * 20])):
        shaped = grpo.shape_reward(batch, Settings(shaping=shaping, shaping_beta=0.4, max_new_tokens=20))  # (4,)
        assert shaped.dtype == torch.float64 and shaped.tolist() == pytest.approx(expected, abs=1e-12)
        found = grpo.compare(batch, "dr_grpo", shaped).tolist()
        a, b = (expected[0] - expected[1]) / 2, (expected[2] - expected[3]) / 2
        assert found == pytest.approx([a, -a, b, -b], abs=1e-6)
    assert batch.reward.tolist() == [1, 1, 0.1, 1.1]


def test_noise_of_credit_by_the_tree_of_all_responses():
    """docs/algorithm.md on noise and length, by all 27 responses of three tokens, and by RLOO's groups of three of
    them: guards against a wrong or a missing term."""
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(13, 3, 5, dtype=torch.float64, generator=draw) / 3  # of 3 tokens behind 1 + 3 + 9 prefixes
    table = (features @ torch.randn(5, dtype=torch.float64, generator=draw)).softmax(1)  # (13, 3)
    score = features - (table[..., None] * features).sum(1, keepdim=True)  # (13, 3, 5) in five parameters
    y = torch.cartesian_prod(*[torch.arange(3)] * 3)  # (27, 3)
    at = torch.stack((0 * y[:, 0], 1 + y[:, 0], 4 + 3 * y[:, 0] + y[:, 1]), dim=1)  # (27, 3) each token's prefix
    pi, s, r = table[at, y].prod(1), score[at, y], torch.randint(2, (27,), generator=draw).double()

    def mean(x, t=0):
        """Of x (27, ...), over the responses that begin with the same t tokens: (27, ...)."""
        alike = pi * (y[:, None, :t] == y[:, :t]).all(2)  # (27, 27)
        return torch.tensordot(alike / alike.sum(1, keepdim=True), x, 1)

    square = lambda x: (x**2).sum(-1)
    A = torch.stack([mean(r, t + 1) - mean(r, t) for t in range(3)], dim=1)  # (27, 3)
    V, E, whole, terms = mean(r), mean(square(s).sum(1)), square(s.sum(1)), A[..., None] * s  # terms: (27, 3, 5)
    uniform, kappa = (r - V)[:, None] * s.sum(1), mean((A**2 * square(s)).sum(1)) / mean(square(A))
    mu = mean(uniform)
    later = sum(mean((terms[:, t] * mean(terms[:, u], u)).sum(1)) for t, u in ((0, 1), (0, 2), (1, 2)))
    related = mean((r - V) ** 2 * whole) - V * (1 - V) * mean(whole)
    trios = torch.cartesian_prod(*[torch.arange(27)] * 3)  # (n, 3)
    rloo = (grpo.ADVANTAGES["rloo"](r[trios], None)[..., None] * s.sum(1)[trios]).mean(1)  # (n, 5)
    noise = pi[trios].prod(1) @ square(rloo) - square(mu[0])
    for found, expected in (
            (mean(whole), E), (mean(square(A)), V * (1 - V)), (mean(terms.sum(1)), mu),
            (mean(square(torch.eye(3)[y] - table[at]).sum(1)), mean((1 - square(table[at])).sum(1))),
            (mean(square(uniform)), V * (1 - V) * E + related),
            (mean(square(terms.sum(1))), kappa * V * (1 - V) + 2 * later),
            (noise, (V * (1 - V) * E / 2 + square(mu) / 6 - square(mu) / 3 + related / 3)[0])):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrong", [lambda r, s: r / r.std(1, keepdim=True), lambda r, s: r.mean(1),
                                   lambda r, s: 1e99 * r])
def test_a_wrong_advantage_is_named(wrong, monkeypatch):
    """Guards against NaN, infinity in float32, or one number for each group, that the credit function is accused of,
    and against rounding as advantage in a function that takes the plain mean of a group: it gets float64."""
    monkeypatch.setitem(grpo.ADVANTAGES, "mine", lambda r, s: r - r.mean(1, keepdim=True))
    assert not grpo.compare(make_batch([1] * 7, [0.0] * 7), "mine", torch.full((7,), 0.1)).any()
    monkeypatch.setitem(grpo.ADVANTAGES, "mine", wrong)
    with pytest.raises(ValueError, match="--advantage mine must give each response"):
        grpo.compare(make_batch([1] * 4, [0.0] * 4, [0, 0, 1, 1], reward=torch.tensor([0.0, 1, 0, 0])), "mine")


ON_POLICY = {"ppo": [2, -2, 0.5], "gspo": [2, -2, 0.5], "cispo": [-2, 2, -0.5]}  # gains


@pytest.mark.parametrize("loss, ratio, credit, gain, slope", [
    # On-policy, credit is the gradient, also of a reader's own loss, whose gain may be anything.
    *((loss, [1.0] * 3, [2, -2, 0.5], ON_POLICY.get(loss), [2, -2, 0.5]) for loss in grpo.LOSSES),
    ("ppo", [1.2, 0.95], [2, -2], [2.4, -1.9], [2.4, -1.9]),  # within the limits 0.9 and 1.3
    ("ppo", [1.5, 0.5], [2, -2], [2.6, -1.8], [0, 0]),  # moved far in the direction of the credit: no more gradient
    ("ppo", [0.5, 1.5], [2, -2], [1.0, -3.0], [1.0, -3.0]),  # moved far against it: the gradient pulls back
    ("cispo", [1.5, 0.5, 1.1], [2, -3, 1], [-2.6, 2.7, -1.1], [2.6, -2.7, 1.1]),  # log pi is -1
    ("gspo", [2.4, 0.6, 1.2], [2, 2, -1], [2.4, 2.4, -1.2], [2.4, 2.4, -1.2]),  # the geometric mean is 1.2
    ("gspo", [4.0, 0.5, 1.7], [2, 2, -1], [2.6, 2.6, -3.4 ** (1 / 3)], [0, 0, -3.4 ** (1 / 3)]),  # and here 1.5
])
def test_losses_by_hand(loss, ratio, credit, gain, slope):
    """Guards against a clip on the wrong side, max for min, swapped limits, a mean over padding, and gradient through
    CISPO's weight or through the ratio of a response."""
    mask = torch.tensor([[True] * len(ratio) + [False]])
    logprob = torch.full(mask.shape, -1.0, requires_grad=True)
    old = -1 - torch.tensor([[*ratio, 9.0]]).log()
    found, stopped = grpo.LOSSES[loss](logprob, old, torch.tensor([[*credit, 7.0]]), mask,
                                       Settings(clip_low=0.1, clip_high=0.3))
    found[mask].sum().backward()
    assert gain is None or found[mask].tolist() == pytest.approx(gain, abs=1e-6)
    assert logprob.grad[mask].tolist() == pytest.approx(slope, abs=1e-6)
    assert stopped[mask].tolist() == [x == 0 for x in slope] and not logprob.grad[~mask].any()


@pytest.mark.parametrize("name, later", [("k3", False), ("unbiased", False), ("unbiased", True)])
def test_kl_penalties_average_to_a_kl_and_to_its_gradient(name, later):
    """Summed over the nine tokens that an older policy (`later`), or this one, may sample. Guards against the other
    direction of the KL, a ratio without gradient, and one that is upside down."""
    logits, *others = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    now, reference, old = (x.log_softmax(0) for x in (logits.requires_grad_(), *others))
    old = old if later else now.detach()
    penalty = grpo.KL_GRADIENTS[name](now, reference, old)  # (9,)
    kl, reverse = (now.exp() * (now - reference)).sum(), (reference.exp() * (reference - now)).sum()
    mean = (old.exp() * penalty).sum()
    assert mean.item() == pytest.approx(kl.item(), abs=1e-12) and (penalty >= 0).all()
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in
                       (mean, kl if name == "unbiased" else reverse))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", grpo.LOSS_NORMS)
def test_shares_of_the_loss_by_hand(name):
    """Guards against a share that padding or another group changes, and one with another sum than its formula's."""
    groups, expected = [[5, 1, 3], [4, 2, 2]], []
    for lengths in groups:
        deviation = statistics.pstdev(lengths)
        f = [math.exp(1 + (L - statistics.mean(lengths)) / deviation / 9) for L in lengths]
        expected += {"token": [1 / 17] * 3, "sequence": [1 / (6 * L) for L in lengths], "constant": [1 / (6 * 9)] * 3,
                     "lambda": [3 * x / sum(f) / 17 for x in f]}[name]
    mask = make_batch(sum(groups, []), [0.0] * 6).mask
    share = grpo.LOSS_NORMS[name](mask, Settings(responses=3, max_new_tokens=9))  # (6, 5)
    torch.testing.assert_close(share, torch.tensor(expected)[:, None] * mask)


PROMPTS = [[5, 1, 8, 2, 2, 9, 4], [7], [3, 12, 6], [1, 1]]  # of unequal length
LENGTHS, GROUPS = [5, 1, 3, 4, 2, 2, 1, 1, 6, 3, 3, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def tiny(architecture="qwen2", tied=True, seed=0):
    """A two-layer model of 19 tokens (its embedding has 23 rows) whose every weight, norms too, is random and large."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, head_dim=6)
    model = Qwen2(parse_config({"model_type": architecture, "vocab_size": 23, "num_key_value_heads": 2,
                               "tie_word_embeddings": tied, **sizes}))
    for name, p in model.named_parameters():
        torch.nn.init.uniform_(p, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(p, std=0.4)
    model.real_vocab = 19
    return model


def step_by_hand(model):
    """Twelve off-policy responses to PROMPTS with random credit, which is 0 on rows 3, 4, 5 (puzzle 1) and 8."""
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(LENGTHS, [0.0] * 12, GROUPS)
    batch.tokens = torch.randint(19, batch.mask.shape, generator=generator) * batch.mask
    noise, credit = (torch.randn(batch.mask.shape, generator=generator) * batch.mask for _ in range(2))
    credit[3:6] = credit[8] = 0
    batch.logprob = plainly(model, batch) + 0.2 * noise
    return batch, credit


@torch.no_grad()
def plainly(model, batch):
    """Log-probs (B, T) of a batch's responses in the plain layout."""
    return plain_logprobs(model, [PROMPTS[puzzle] for puzzle in GROUPS], batch.tokens, batch.mask)


def take_update(model, batch, credit, **options):
    """Update by plain SGD with rate 1."""
    optimizer = Optimizer(model, 1.0)
    optimizer.adamw = torch.optim.SGD(optimizer.master.values(), 1.0)
    batch.prompts = PROMPTS
    return grpo.update(Policy(model, None, None), optimizer, batch, credit, Settings(max_new_tokens=9, **options))


@pytest.mark.slow
@pytest.mark.parametrize("architecture, tied, checkpointed, temperature, kl, unbiased, micro_batch", [
    ("qwen2", True, False, 1.0, 0.0, False, 3), ("qwen2", True, False, 1.0, 0.3, True, 1),
    ("qwen3", False, True, 0.7, 0.5, False, 3), ("qwen3", False, True, 0.7, 0.0, False, 99),
    ("llama", False, False, 0.7, 0.3, True, 99), ("llama", False, False, 0.7, 0.5, False, 1)])
def test_two_updates_equal_plain_autograd(architecture, tied, checkpointed, temperature, kl, unbiased, micro_batch,
                                          exact, monkeypatch):
    """Guards against a gradient lost, doubled or not clipped, across prompts, micro-batches, layers and updates, the
    share of another response, a prompt that is read for nobody, and a temperature that the update does not know."""
    ours = tiny(architecture, tied)
    ours.temperature = temperature
    theirs, reference, (batch, credit) = copy.deepcopy(ours), copy.deepcopy(ours), step_by_hand(ours)
    for p in reference.parameters():
        p.data += 0.02 * torch.randn_like(p)
    batch.ask.reference_logprob = plainly(reference, batch)
    batch.role = batch.tokens % 2
    used = batch.mask & ((credit != 0).any(1, keepdim=True) | (kl > 0))  # (B, T)
    prompts_read = {g for g, row in zip(GROUPS, used) if row.any()}
    found, norms = [], []
    for _ in range(2):
        theirs.zero_grad()
        found.append(plain_update(theirs, [PROMPTS[g] for g in GROUPS], batch, credit, kl, (0.1, 0.3), unbiased))
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).item())
        for p in theirs.parameters():
            p.data -= p.grad
    assert min(norms) > 0.05
    loss, *by_token = map(torch.stack, zip(*found))  # (2,); (2, B, T) each
    ratio, divergence = (x[:, used] for x in by_token)  # (2, N)
    ours.checkpoint_activations = checkpointed
    if micro_batch == 3:  # attention of a row at a time, none of it kept
        monkeypatch.setattr(compute, "SCORES_AT_ONCE", 1)
        monkeypatch.setattr(compute, "SCORES_KEPT", 0)
    monkeypatch.setitem(grpo.LOSSES, "ppo", lambda *given: (*grpo.ppo_clip(*given), {"own": given[0] - given[1]}))
    row = take_update(ours, batch, credit, kl=kl, kl_gradient="unbiased" if unbiased else "k3", clip_low=0.1,
                      clip_high=0.3, updates_per_batch=2, max_grad_norm=0.05, micro_batch=micro_batch,
                      loss_norm="sequence")
    for (name, got), expected in zip(ours.named_parameters(), theirs.parameters()):
        assert expected.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-10, rtol=0, msg=name)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, msg=name)
    bound = ((ratio > 1.3) & (credit[used] > 0) | (ratio < 0.9) & (credit[used] < 0)).double()  # (2, N)
    filler, reasoning = (bound[:, batch.role[used] == i].mean().item() for i in (0, 1))
    assert row == pytest.approx({
        "loss": loss.mean().item(), "grad_norm": statistics.mean(norms), "clip_fraction": bound.mean().item(),
        "clip_filler": filler, "clip_reasoning": reasoning, "clip_structure": None,
        "ratio_error": ratio[0].log().abs().mean().item(), "own": ratio.log().mean().item(),
        "ratio_spread": ratio[1].log().square().mean().sqrt().item(),
        "kl": divergence.mean().item() if kl else None,
        "tokens_updated": 2 * (used.sum().item() + sum(len(PROMPTS[g]) for g in prompts_read))}, abs=1e-10)
    assert 0 < row["clip_fraction"] < 1 and filler != reasoning


@pytest.mark.parametrize("micro_batch, read", [
    # Rows 0 to 2, 6 and 7, 9 to 11 have credit, those of prompts 0, 2 and 3, of 7, 3 and 2 tokens. A row begins with its
    # prompt's last token, and rows of like length go together. First the prompts of a pass, padded, then its rows.
    (3, [6, 5, 3, 1, 2, 2, 1, 5, 3 + 3]), (2, [6, 5, 1, 6, 3, 2, 1 + 1, 1, 5, 3, 1, 3]),
    (99, [3 * 6, 5 + 5, 3 + 3 + 3, 1 + 1 + 1])])
def test_an_update_reads_no_row_without_credit_and_each_prompt_once_a_pass(micro_batch, read, passes, exact):
    """Guards against prompts that are read again for every row, rows that can't change the gradient, and a group that
    is torn where it fits. A group larger than the micro-batch is read in parts, and counts as one."""
    model = tiny()
    batch, credit = step_by_hand(model)
    passes.clear()
    row = take_update(model, batch, credit, updates_per_batch=2, micro_batch=micro_batch)
    assert sum(tokens for _, tokens in passes) == 2 * sum(read), passes
    used = batch.mask[[0, 1, 2, 6, 7, 9, 10, 11]].sum().item()
    assert row["tokens_updated"] == 2 * (used + 7 + 3 + 2)


def test_old_log_probs_of_the_first_update_make_its_ratio_1(exact):
    """Guards against tokens that the clip removes because sampler and update round differently (here: wildly), and
    against a second update whose ratio begins anew."""
    ours, theirs = tiny(), tiny()
    batch, credit = step_by_hand(ours)
    own = plainly(ours, batch)
    row = take_update(ours, batch, credit, old_logprob="update", updates_per_batch=2, micro_batch=3)
    batch.logprob = own
    expected = take_update(theirs, batch, credit, updates_per_batch=2, micro_batch=3)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, atol=1e-10, rtol=0)
    assert row["clip_fraction"] == expected["clip_fraction"] > 0  # all of it in the second update
    assert row["ratio_error"] > 0.1 > 0.01 > expected["ratio_error"]  # what both disagree by stays a column


def test_a_step_without_credit_has_no_gradient_and_says_so():
    """Guards against a crash, or an invented number, when every group has equal rewards."""
    model = tiny()
    batch, credit = step_by_hand(model)
    before = copy.deepcopy(model)
    row = take_update(model, batch, 0 * credit)
    assert row == dict.fromkeys(row) | {"loss": 0, "grad_norm": 0, "tokens_updated": 0}  # the others are None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
