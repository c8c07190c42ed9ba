"""Advantage, loss, update and log, each against an independent computation."""
import copy
import itertools
import math
import statistics

import pytest
import torch

import grpo
import plumbing.optimizer
from plumbing import shared_prompts
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, read_config
from rollout import Policy
from tests.fixtures import make_batch
from tests.plain import plain_logprobs, plain_update
from train import Settings


@pytest.mark.parametrize("estimator", grpo.ADVANTAGES)
def test_advantage_by_the_textbook(estimator):
    """Guards against the unbiased std, a mean over the wrong axis, rloo's factor, and rounding noise over 1e-4."""
    rewards = [[1.1, 0.1, 0.1, 0, 0, 0, 0], [0.1, 1.1, 1.1, 1.1, 1.1, 0, 0.1], [0.1] * 7]
    success = [[float(r > 1) for r in group] for group in rewards]
    batch = make_batch([1] * 21, [0.0] * 21, [i // 7 for i in range(21)], reward=torch.tensor(rewards).flatten(),
                       success=torch.tensor(success).flatten())
    advantage = grpo.compare(batch, estimator).view(3, 7)
    for i, g in itertools.product(range(2), range(7)):
        group, r, solved = rewards[i], rewards[i][g], statistics.mean(success[i])
        expected = {"grpo": (r - statistics.mean(group)) / (statistics.pstdev(group) + 1e-4),
                    "dr_grpo": r - statistics.mean(group),
                    "rloo": r - statistics.mean(group[:g] + group[g + 1 :]),
                    "maxrl": (success[i][g] - solved) / solved,
                    "step_mean": r - statistics.mean(sum(rewards, []))}
        expected["batch"] = expected["step_mean"]  # its early name
        assert advantage[i, g].item() == pytest.approx(expected[estimator], abs=1e-6)
    assert torch.tensor(rewards[2]).mean() != 0.1  # in float32, and yet
    equal = torch.full((2, 7), 0.1)
    assert not grpo.ADVANTAGES[estimator](equal, 0 * equal).any()
    assert not grpo.ADVANTAGES[estimator](equal + 1, equal * 0 + 1).any()
    assert advantage[2].any() == (estimator in ("step_mean", "batch"))


@pytest.mark.parametrize("ratio, credit, gain, slope", [
    (1.0, 2.0, 2.0, 2.0), (1.0, -2.0, -2.0, -2.0),  # on-policy: plain policy gradient
    (1.2, 2.0, 2.4, 2.4), (0.95, -2.0, -1.9, -1.9),  # within the limits 0.9 and 1.3
    (1.5, 2.0, 2.6, 0.0), (0.5, -2.0, -1.8, 0.0),  # moved far in the direction of the credit: no more gradient
    (0.5, 2.0, 1.0, 1.0), (1.5, -2.0, -3.0, -3.0),  # moved far against it: the gradient pulls back
])
def test_the_clip_by_hand(ratio, credit, gain, slope):
    """Guards against a clip on the wrong side, max for min, and limits that are swapped, for both signs of credit."""
    logprob, old = torch.tensor([[math.log(ratio) - 1]], requires_grad=True), torch.tensor([[-1.0]])
    found, removed = grpo.ppo_loss(logprob, old, torch.tensor([[credit]]), torch.tensor([[True]]),
                              Settings(clip_low=0.1, clip_high=0.3))
    found.sum().backward()
    assert found.item() == pytest.approx(gain, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(slope, abs=1e-6)
    assert removed.item() == (slope == 0)


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy(loss):
    """Guards against a loss that is another one in the first update on a batch: credit is the gradient there."""
    logprob = -torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logprob, old = logprob.clone().requires_grad_(), logprob
    mask, credit = torch.tensor([[True] * 4, [True, True, False, False]]), torch.randn(2, 4, dtype=torch.float64)
    gain, removed = grpo.LOSSES[loss](logprob, old, credit, mask, Settings())
    (gain * mask).sum().backward()
    torch.testing.assert_close(logprob.grad, credit * mask)
    assert not removed.any()


def test_cispo_by_hand():
    """Guards against a weight that carries gradient, and a token that loses its gradient to the clip."""
    logprob, old = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True), torch.tensor([[-2.0, -1.0, -0.6]])
    credit = torch.tensor([[2.0, -3.0, 1.0]])
    gain, removed = grpo.cispo_loss(logprob, old, credit, torch.ones(1, 3, dtype=torch.bool),
                               Settings(clip_low=0.1, clip_high=0.3))
    gain.sum().backward()
    weights = [1.3, 0.9, math.exp(0.1)]  # the ratios e, 1 / e and e^0.1 within 0.9 and 1.3
    assert logprob.grad.tolist()[0] == pytest.approx([2 * weights[0], -3 * weights[1], weights[2]])
    assert gain.tolist()[0] == pytest.approx([-2 * weights[0], 6 * weights[1], -0.5 * weights[2]])
    assert not removed.any()


@pytest.mark.parametrize("shift, clipped", [(0.2, False), (0.4, True)])
def test_gspo_by_hand(shift, clipped):
    """Guards against a mean over padding, a ratio of single tokens, and gradient through the response's ratio."""
    mask, old = torch.tensor([[True, True, True, False]]), torch.tensor([[-1.0, -2.0, -1.5, -9.0]])
    logprob = (old + torch.tensor([[3 * shift, -shift, shift, 5.0]])).requires_grad_()  # their mean is `shift`
    credit = torch.tensor([[2.0, 2.0, -1.0, 7.0]])
    gain, removed = grpo.gspo_loss(logprob, old, credit, mask, Settings(clip_low=0.3, clip_high=0.3))
    (gain * mask).sum().backward()
    ratio = math.exp(shift)  # e^0.2 = 1.22 is within 1.3, e^0.4 = 1.49 is not
    first = 0.0 if clipped else 2 * ratio
    assert logprob.grad.tolist()[0] == pytest.approx([first, first, -ratio, 0.0])
    assert gain.tolist()[0][:3] == pytest.approx([2 * min(ratio, 1.3)] * 2 + [-ratio])
    assert removed.tolist()[0][:3] == [clipped, clipped, False]


def test_k3_is_an_unbiased_estimate_of_the_kl():
    """Guards against the other direction of the KL: the mean of k3 under pi is KL(pi || reference), summed exactly."""
    pi, reference = torch.randn(2, 9, generator=torch.Generator().manual_seed(2)).double().log_softmax(-1)
    kl = (pi.exp() * (pi - reference)).sum().item()
    assert (pi.exp() * grpo.k3(pi, reference)).sum().item() == pytest.approx(kl, abs=1e-12)
    assert (grpo.k3(pi, reference) >= 0).all()


PROMPTS = [[5, 1, 8, 2, 2, 9, 4], [7], [3, 12, 6], [1, 1]]  # of unequal length
LENGTHS, GROUPS = [5, 1, 3, 4, 2, 2, 1, 1, 6, 3, 3, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def tiny(architecture="qwen2", tied=True):
    """A two-layer model of 19 tokens (its embedding has 23 rows) whose every weight, norms too, is random and large."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, head_dim=6)
    model = Qwen2(read_config({"model_type": architecture, "vocab_size": 23, "num_key_value_heads": 2,
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


def take_update(model, batch, credit, plain=False, **options):
    """Update by plain SGD with rate 1."""
    optimizer = Optimizer(model, 1.0)
    optimizer.adamw = torch.optim.SGD(optimizer.master.values(), 1.0)
    batch.ask.prompts = PROMPTS
    policy = Policy(model, None, None, plain=plain)
    return grpo.update(policy, optimizer, batch, credit, Settings(max_new_tokens=9, **options))


@pytest.mark.parametrize("micro_batch", [1, 3, 99])
@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("architecture, tied, checkpointed, large", [
    ("qwen2", True, False, False), ("qwen3", False, True, False), ("qwen2", True, True, True),
    ("llama", False, False, True)])
def test_two_updates_equal_plain_autograd(architecture, tied, checkpointed, large, kl, micro_batch, exact, monkeypatch):
    """Guards against a gradient lost, doubled or not clipped, across prompts, micro-batches, layers and updates.

    large: gradients of the vocabulary's matrices are added in place (plumbing/vocabulary.py).
    """
    monkeypatch.setattr(plumbing.optimizer, "LARGE", 0 if large else 2**15)
    ours = tiny(architecture, tied)
    theirs, reference, (batch, credit) = copy.deepcopy(ours), copy.deepcopy(ours), step_by_hand(ours)
    for p in reference.parameters():
        p.data += 0.02 * torch.randn_like(p)
    batch.ask.reference_logprob = plainly(reference, batch)
    batch.role = (torch.arange(12)[:, None] + torch.arange(batch.mask.shape[1])) % 2
    used = batch.mask & ((credit != 0).any(1, keepdim=True) | (kl > 0))  # (B, T)
    losses, norms, ratios, divergences = [], [], [], []
    for _ in range(2):
        theirs.zero_grad()
        now = plainly(theirs, batch)[used]
        ratios.append((now - batch.logprob[used]).exp())
        d = batch.ask.reference_logprob[used] - now
        divergences.append((d.exp() - d - 1).mean().item())
        losses.append(plain_update(theirs, PROMPTS, batch, credit, reference if kl else None, kl, (0.1, 0.3)).item())
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).item())
        for p in theirs.parameters():
            p.data -= p.grad
    assert min(norms) > 0.05
    ours.checkpoint_activations = checkpointed
    row = take_update(ours, batch, credit, kl=kl, clip_low=0.1, clip_high=0.3, updates_per_batch=2,
                      max_grad_norm=0.05, micro_batch=micro_batch)
    for (name, got), expected in zip(ours.named_parameters(), theirs.parameters()):
        assert expected.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-10, rtol=0, msg=name)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, msg=name)
    bound = [(r > 1.3) & (credit[used] > 0) | (r < 0.9) & (credit[used] < 0) for r in ratios]
    assert row == pytest.approx({
        "loss": statistics.mean(losses), "grad_norm": statistics.mean(norms),
        "clip_fraction": torch.cat(bound).double().mean().item(),
        "clip_filler": torch.cat([b[batch.role[used] == 0] for b in bound]).double().mean().item(),
        "clip_reasoning": torch.cat([b[batch.role[used] == 1] for b in bound]).double().mean().item(),
        "clip_structure": None,
        "ratio_error": ratios[0].log().abs().mean().item(),
        "ratio_spread": ratios[1].log().square().mean().sqrt().item(),
        "kl": statistics.mean(divergences) if kl else None,
        "tokens_updated": 2 * (used.sum().item() + sum(map(len, PROMPTS)))}, abs=1e-10)
    assert 0 < row["clip_fraction"] < 1
    assert row["clip_filler"] != row["clip_reasoning"]


@pytest.mark.parametrize("loss_norm, temperature", [*((name, 1.0) for name in grpo.LOSS_NORMS), ("token", 0.7)])
def test_the_gradient_by_finite_differences(loss_norm, temperature, exact):
    """Guards against another gradient than that of sum_t share_t credit_t log pi(token_t), another norm's share, and a
    temperature that the update doesn't know."""
    model = tiny()
    model.temperature = temperature
    batch, credit = step_by_hand(model)
    batch.logprob = plainly(model, batch)  # on-policy
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    power = -2.0 if loss_norm == "lambda" else 1.0
    take_update(model, batch, credit, loss_norm=loss_norm, length_power=power, answers=3, max_grad_norm=1e9,
                micro_batch=5)
    gradient = start - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    divisor = {"token": lambda L: sum(LENGTHS), "sequence": lambda L: 12 * L, "constant": lambda L: 12 * 9,
               "lambda": lambda L: sum(LENGTHS)}[loss_norm]
    weight = torch.tensor([1 / divisor(L) for L in LENGTHS])[:, None]
    if loss_norm == "lambda":
        weight *= torch.tensor([factor for i in range(0, 12, 3) for factor in preferences(LENGTHS[i : i + 3], power)]
                               )[:, None]
    noise = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0))
    direction = gradient / gradient.norm() + noise / noise.norm()  # where the loss rises, and where it might

    def loss(shift):
        torch.nn.utils.vector_to_parameters(start + shift * direction, model.parameters())
        return -(plainly(model, batch) * credit * weight).sum().item()

    assert (gradient @ direction).item() == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-6)


def preferences(lengths, power):
    """The factors of lambda-GRPO for the responses of one group, by its formula."""
    mean, deviation = statistics.mean(lengths), statistics.pstdev(lengths) or 1.0
    raised = [math.exp((1 + (L - mean) / deviation / 9) ** power) for L in lengths]
    return [len(lengths) * x / sum(raised) for x in raised]


def test_an_update_reads_each_prompt_once_and_no_row_without_credit(passes, exact):
    """Guards against prompts that are read again for every micro-batch, and rows that can't change the gradient."""
    model = tiny()
    batch, credit = step_by_hand(model)
    passes.clear()
    take_update(model, batch, credit, updates_per_batch=2, micro_batch=3)
    # Eight rows have credit, three at a time. The shortest three have one token, so no column of theirs is read.
    assert passes == [(model, "prompts", 4), (model, "hidden", 3), (model, "hidden", 3), (model, "hidden", 2)] * 2


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_the_plain_reader_and_the_shared_one_make_the_same_update(kl, exact):
    """Guards against twins that grow apart: rows of prompt and response, and prompts that are read once."""
    rows, models = [], [tiny(), tiny()]
    for model, plain in zip(models, (True, False)):
        batch, credit = step_by_hand(model)
        batch.ask.reference_logprob = batch.logprob
        rows.append(take_update(model, batch, credit, plain, kl=kl, updates_per_batch=2, micro_batch=5))
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q, atol=1e-10, rtol=0)
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], abs=1e-10)


@pytest.mark.parametrize("rank, processes, skip, expected", [
    (0, 1, True, [0, 2, 3]), (0, 1, False, [0, 1, 2, 3, 4, 5]),  # rows 1, 4 and 5 have no credit
    (0, 2, False, [0, 1, 4, 5]), (1, 2, False, [2, 3]),  # puzzles 0 and 2, puzzle 1
    (2, 3, True, []), (3, 4, False, []),  # puzzle 2 has no credit, and there is no puzzle 3
])
def test_rows_to_update_by_hand(rank, processes, skip, expected, monkeypatch):
    """Guards against rows without credit, and a row that two processes, or none, take."""
    monkeypatch.setattr(shared_prompts, "world", lambda: (rank, processes))
    batch = make_batch([3, 1, 2, 5, 4, 2], [0.0] * 6, [0, 0, 1, 1, 2, 2])
    credit = batch.mask * torch.tensor([1.0, 0, 1, -1, 0, 0])[:, None]
    credit[0, :2] = 0  # one token with credit is enough
    assert shared_prompts.rows_to_update(batch, credit, skip).tolist() == expected


def test_old_log_probs_of_the_first_update_make_its_ratio_1(exact):
    """Guards against tokens that the clip removes because sampler and update round differently, and against a second
    update whose ratio begins anew."""
    models = [tiny() for _ in range(2)]
    batch, credit = step_by_hand(models[0])
    recorded, own = batch.logprob, plainly(models[0], batch)
    assert (recorded - own)[batch.mask].abs().max() > 0.3  # as if the sampler had rounded wildly
    row = take_update(models[0], batch, credit, old_logprob="update", updates_per_batch=2, micro_batch=3)
    batch.logprob = own
    expected = take_update(models[1], batch, credit, updates_per_batch=2, micro_batch=3)
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q, atol=1e-10, rtol=0)
    assert row["clip_fraction"] == expected["clip_fraction"] > 0  # all of it in the second update
    assert row["ratio_error"] > 0.01 > expected["ratio_error"]  # what sampler and update disagree by stays a column


def test_a_step_without_credit_has_no_gradient_and_says_so():
    """Guards against a crash, or an invented number, when every group has equal rewards."""
    model = tiny()
    batch, credit = step_by_hand(model)
    before = copy.deepcopy(model)
    row = take_update(model, batch, 0 * credit)
    empty = dict.fromkeys(("clip_fraction", "clip_filler", "clip_reasoning", "clip_structure", "ratio_error",
                           "ratio_spread", "kl"))
    assert row == empty | {"loss": 0, "grad_norm": 0, "tokens_updated": 0}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
