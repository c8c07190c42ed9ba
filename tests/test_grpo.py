"""Rollout, advantage, loss, update, log and queries, each against an independent computation.

Run it:  python -m pytest tests/test_grpo.py
"""
import copy
import inspect
import itertools
import math
import statistics

import numpy as np
import pytest
import torch

import grpo
from conftest import make_batch
from countdown_task import Puzzle, annotate, coin_toss, fingerprint, format_reward
from critic import Critic
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, load_model, read_config
from sampler import (PromptCache, ResponseCache, generate, response_attention, response_logprobs,
                     response_states)
from tests.plain import exact_moments, plain_logprobs, plain_update
from train import BUNDLED, Settings

PUZZLES = [Puzzle((4, 3, 5), 8), Puzzle((12, 7, 20, 1), 40), Puzzle((6, 2), 8)]  # prompts of unequal length


def bundled(codec):
    """The model that comes with the repository."""
    model = load_model(BUNDLED)
    model.real_vocab = codec.size
    return model


def step_batch(codec, puzzles=3, responses=4, length=60, **options):
    """A real batch of the bundled model, and that model."""
    model, uniforms = bundled(codec), grpo.draw_uniforms(0, 1, puzzles, responses, length)
    return grpo.rollout(model, codec, PUZZLES[:puzzles], uniforms, **options), model


def close(got, expected, atol=1e-4):
    """Equal up to rounding."""
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def graded_by_hash(text, numbers, target):
    """Grades that change with every text and every puzzle."""
    r = fingerprint(f"{text} {numbers} {target}") / 2**64
    return {"reward": r, "answer": r / 2, "format": r / 3}


@pytest.fixture
def passes(monkeypatch):
    """A list to which every forward pass adds its model, what it reads and how many rows."""
    found = []
    for name in ("hidden", "attention"):
        def spy(model, tokens, positions, bias, cache=None, name=name, run=getattr(Qwen2, name)):
            found.append((model, "prompts" if isinstance(cache, PromptCache) else name, len(tokens)))
            return run(model, tokens, positions, bias, cache)

        monkeypatch.setattr(Qwen2, name, spy)
    return found


# ------------------------------------------------------------------------------------------------- rollout


def test_random_numbers_of_a_puzzle_depend_on_nothing_else():
    """Guards against a generator shared by puzzles: a response would change with its neighbours."""
    few, many = grpo.draw_uniforms(3, 5, 2, 4, 10), grpo.draw_uniforms(3, 5, 6, 4, 10)
    assert torch.equal(few, many[:8])
    assert many.unique().numel() == many.numel()
    assert 0 <= many.min() and many.max() < 1
    for seed, step in ((3, 6), (4, 5), (5, 3)):
        assert not torch.equal(few, grpo.draw_uniforms(seed, step, 2, 4, 10))


def test_a_batch_describes_its_own_responses(codec, monkeypatch):
    """Guards against rows, columns or groups that are out of step, and an advantage from success or across puzzles."""
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    batch, model = step_batch(codec, advantage="dr_grpo", normalize="none")
    prompts, uniforms = [codec.prompt(puzzle) for puzzle in PUZZLES], grpo.draw_uniforms(0, 1, 3, 4, 60)
    assert torch.equal(batch.tokens, generate(model, prompts, uniforms, codec.end_tokens).tokens)
    assert batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [Puzzle(*puzzle) for puzzle in zip(batch.numbers, batch.target)] == PUZZLES
    assert batch.normalize == "none"
    for i, text in enumerate(batch.text):
        tokens = batch.tokens[i][batch.mask[i]].tolist()
        before_end = tokens[:-1] if batch.ended[i] else tokens
        assert text == codec.tokenizer.decode(before_end, skip_special_tokens=False)
        assert len(batch.spans[i]) == len(tokens)
        grades = graded_by_hash(text, *PUZZLES[i // 4])
        assert [batch.reward[i], batch.success[i], batch.format[i]] == pytest.approx([*grades.values()])
        group = batch.reward[i // 4 * 4 :][:4]
        assert batch.advantage[i].item() == pytest.approx(grades["reward"] - group.mean().item(), abs=1e-6)
        role, in_answer = annotate(text, batch.spans[i])
        padding = batch.mask.shape[1] - len(tokens)
        assert batch.role[i].tolist() == [*role, *[0] * padding]
        assert batch.in_answer[i].tolist() == [*in_answer, *[False] * padding]


def test_a_response_cut_anywhere_continues_with_the_same_tokens(codec):
    """Guards against a prefix of another puzzle, one that is not graded, and limits of other rows."""
    model, uniforms = bundled(codec), grpo.draw_uniforms(0, 1, 3, 1, 40)
    whole, decoded, grades = grpo.respond(model, codec, PUZZLES, uniforms)
    cuts = [3, 12, 7]
    prefixes = [whole.tokens[i, :cut].tolist() for i, cut in enumerate(cuts)]
    rolled = torch.stack([row.roll(-cut) for row, cut in zip(uniforms, cuts)])  # the random numbers of the other tokens
    rest, *described = grpo.respond(model, codec, PUZZLES, rolled, prefixes, 40 - torch.tensor(cuts))
    assert described == [decoded, grades]
    for i, prefix in enumerate(prefixes):
        assert prefix + rest.tokens[i][rest.mask[i]].tolist() == whole.tokens[i][whole.mask[i]].tolist()
    first = rest.tokens[:, 0]
    assert (grpo.respond(model, codec, PUZZLES, rolled, prefixes, excluded=first)[0].tokens[:, 0] != first).all()


def test_broken_weights_are_one_sentence(codec, monkeypatch):
    """Guards against a step of NaN, whose cause shows many steps later. One broken response of three is enough."""
    def broken(*arguments):
        samples = generate(*arguments)
        samples.logprob[1, 0] = float("nan")
        return samples

    monkeypatch.setattr(grpo, "generate", broken)
    with pytest.raises(FloatingPointError, match="not finite.*--lr"):
        grpo.respond(bundled(codec), codec, PUZZLES, grpo.draw_uniforms(0, 1, 3, 1, 2))


@pytest.mark.parametrize("function", [grpo.rollout, grpo.policy_loss, grpo.update])
def test_defaults_are_those_of_the_command_line(function):
    """Guards against an experiment that leaves out an argument and so trains otherwise than train.py."""
    parameters = inspect.signature(function).parameters.values()
    shared = [p for p in parameters if hasattr(Settings, p.name) and p.default is not p.empty]
    assert len(shared) >= 3
    for p in shared:
        assert p.default == getattr(Settings, p.name), p.name


# ----------------------------------------------------------------------------------------------- advantage


@pytest.mark.parametrize("estimator", grpo.ADVANTAGES)
def test_advantage_by_the_textbook(estimator):
    """Guards against the unbiased std, a mean over the wrong axis, rloo's factor, and rounding noise over 1e-4."""
    rewards = [[1.1, 0.1, 0.1, 0, 0, 0, 0], [0.1, 1.1, 1.1, 1.1, 1.1, 0, 0.1], [0.1] * 7]
    success = [[float(r > 1) for r in group] for group in rewards]
    advantage = grpo.group_advantage(torch.tensor(rewards), estimator, torch.tensor(success))
    for i, g in itertools.product(range(2), range(7)):
        group, r, solved = rewards[i], rewards[i][g], statistics.mean(success[i])
        expected = {"grpo": (r - statistics.mean(group)) / (statistics.pstdev(group) + 1e-4),
                    "dr_grpo": r - statistics.mean(group),
                    "rloo": r - statistics.mean(group[:g] + group[g + 1 :]),
                    "maxrl": (success[i][g] - solved) / solved,
                    "batch": r - statistics.mean(sum(rewards, []))}[estimator]
        assert advantage[i, g].item() == pytest.approx(expected, abs=1e-6)
    assert torch.tensor(rewards[2]).mean() != 0.1  # in float32, and yet
    equal = torch.full((2, 7), 0.1)
    assert not grpo.group_advantage(equal, estimator, 0 * equal).any()
    assert not grpo.group_advantage(equal + 1, estimator, equal * 0 + 1).any()
    assert advantage[2].any() == (estimator == "batch")


# ---------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("ratio, credit, gain, slope", [
    (1.0, 2.0, 2.0, 2.0), (1.0, -2.0, -2.0, -2.0),  # on-policy: plain policy gradient
    (1.2, 2.0, 2.4, 2.4), (0.95, -2.0, -1.9, -1.9),  # within the limits 0.9 and 1.3
    (1.5, 2.0, 2.6, 0.0), (0.5, -2.0, -1.8, 0.0),  # moved far in the direction of the credit: no more gradient
    (0.5, 2.0, 1.0, 1.0), (1.5, -2.0, -3.0, -3.0),  # moved far against it: the gradient pulls back
])  # fmt: skip
def test_the_clip_by_hand(ratio, credit, gain, slope):
    """Guards against a clip on the wrong side, max for min, and limits that are swapped, for both signs of credit."""
    logprob, old = torch.tensor([[math.log(ratio) - 1]], requires_grad=True), torch.tensor([[-1.0]])
    loss = grpo.policy_loss(logprob, old, torch.tensor([[credit]]), torch.tensor([[0.5]]), clip_low=0.1, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * gain, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(-0.5 * slope, abs=1e-6)


def test_k3_is_an_unbiased_estimate_of_the_kl():
    """Guards against the other direction of the KL: the mean of k3 under pi is KL(pi || reference), summed exactly."""
    pi, reference = torch.randn(2, 9, generator=torch.Generator().manual_seed(2)).double().log_softmax(-1)
    close((pi.exp() * grpo.k3(pi, reference)).sum(), (pi.exp() * (pi - reference)).sum(), 1e-12)
    assert (grpo.k3(pi, reference) >= 0).all()


# -------------------------------------------------------------------------------------------------- update


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


def take_update(model, batch, credit, **options):
    """Update by plain SGD with rate 1."""
    optimizer = Optimizer(model, 1.0)
    optimizer.adamw = torch.optim.SGD(optimizer.master.values(), 1.0)
    return grpo.update(model, optimizer, PROMPTS, batch, credit, max_new_tokens=9, **options)


@pytest.mark.parametrize("micro_batch", [1, 3, 99])
@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("architecture, tied, checkpointed", [("qwen2", True, False), ("qwen3", False, True)])
def test_two_updates_equal_plain_autograd(architecture, tied, checkpointed, kl, micro_batch, exact):
    """Guards against a gradient lost, doubled or not clipped, across prompts, micro-batches, layers and updates."""
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
    metrics = take_update(ours, batch, credit, kl=kl, clip_low=0.1, clip_high=0.3, updates_per_batch=2,
                          max_grad_norm=0.05, micro_batch=micro_batch)
    for (name, got), expected in zip(ours.named_parameters(), theirs.parameters()):
        assert expected.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-10, rtol=0, msg=name)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, msg=name)
    bound = [(r > 1.3) & (credit[used] > 0) | (r < 0.9) & (credit[used] < 0) for r in ratios]
    assert metrics == pytest.approx({
        "loss": statistics.mean(losses), "grad_norm": statistics.mean(norms),
        "clip_fraction": torch.cat(bound).double().mean().item(),
        "clip_filler": torch.cat([b[batch.role[used] == 0] for b in bound]).double().mean().item(),
        "clip_reasoning": torch.cat([b[batch.role[used] == 1] for b in bound]).double().mean().item(),
        "clip_structure": None,
        "ratio_error": ratios[0].log().abs().mean().item(),
        "ratio_spread": ratios[1].log().square().mean().sqrt().item(),
        "kl": statistics.mean(divergences) if kl else None,
        "tokens_updated": 2 * (used.sum().item() + sum(map(len, PROMPTS)))}, abs=1e-10)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["clip_filler"] != metrics["clip_reasoning"]


@pytest.mark.parametrize("loss_norm", grpo.LOSS_NORMS)
def test_the_gradient_by_finite_differences(loss_norm, exact):
    """Guards against another gradient than that of sum_t share_t credit_t log pi(token_t), and another norm's share."""
    model = tiny()
    batch, credit = step_by_hand(model)
    batch.logprob = plainly(model, batch)  # on-policy
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    take_update(model, batch, credit, loss_norm=loss_norm, max_grad_norm=1e9, micro_batch=5)
    gradient = start - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    divisor = {"token": lambda L: sum(LENGTHS), "sequence": lambda L: 12 * L, "constant": lambda L: 12 * 9}[loss_norm]
    weight = torch.tensor([1 / divisor(L) for L in LENGTHS])[:, None]
    noise = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0))
    direction = gradient / gradient.norm() + noise / noise.norm()  # where the loss rises, and where it might

    def loss(shift):
        torch.nn.utils.vector_to_parameters(start + shift * direction, model.parameters())
        return -(plainly(model, batch) * credit * weight).sum().item()

    assert (gradient @ direction).item() == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-6)


def test_an_update_reads_each_prompt_once_and_no_row_without_credit(passes, exact):
    """Guards against prompts that are read again for every micro-batch, and rows that can't change the gradient."""
    model = tiny()
    batch, credit = step_by_hand(model)
    passes.clear()
    take_update(model, batch, credit, updates_per_batch=2, micro_batch=3)
    # Eight rows have credit, three at a time. The shortest three have one token, so no column of theirs is read.
    assert passes == [(model, "prompts", 4), (model, "hidden", 3), (model, "hidden", 3), (model, "hidden", 2)] * 2


@pytest.mark.parametrize("rank, processes, size, skip, expected", [
    (0, 1, 2, True, [([2, 0], 3), ([3], 5)]),  # rows 1, 4 and 5 have no credit
    (0, 1, 4, False, [([1, 2, 5, 0], 3), ([4, 3], 5)]),
    (0, 2, 2, False, [([1, 5], 2), ([0, 4], 4)]), (1, 2, 2, False, [([2, 3], 5)]),  # puzzles 0 and 2, puzzle 1
    (2, 3, 2, True, []), (3, 4, 2, False, []),  # puzzle 2 has no credit, and there is no puzzle 3
])  # fmt: skip
def test_micro_batches_by_hand(rank, processes, size, skip, expected, monkeypatch):
    """Guards against rows without credit, a long row among short ones, and a row that two processes, or none, take."""
    monkeypatch.setattr(grpo, "world", lambda: (rank, processes))
    batch = make_batch([3, 1, 2, 5, 4, 2], [0.0] * 6, [0, 0, 1, 1, 2, 2])
    credit = batch.mask * torch.tensor([1.0, 0, 1, -1, 0, 0])[:, None]
    credit[0, :2] = 0  # one token with credit is enough
    chunks = grpo.micro_batches(batch, credit, size, skip)
    assert [(rows.tolist(), T) for rows, T in chunks] == expected


def test_a_step_without_credit_has_no_gradient_and_says_so():
    """Guards against a crash, or an invented number, when every group has equal rewards."""
    model = tiny()
    batch, credit = step_by_hand(model)
    before = copy.deepcopy(model)
    metrics = take_update(model, batch, 0 * credit)
    empty = dict.fromkeys(("clip_fraction", "clip_filler", "clip_reasoning", "clip_structure", "ratio_error",
                           "ratio_spread", "kl"))
    assert metrics == empty | {"loss": 0, "grad_norm": 0, "tokens_updated": 0}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))


# ---------------------------------------------------------------------------------------------- credit log


def test_the_credit_log_holds_every_token_in_forty_bytes(tmp_path):
    """Guards against a log that mixes reward and advantage, counts wrongly, or holds padding."""
    by_ten = torch.arange(6.0).view(2, 3)
    batch = make_batch([2, 3], [0.5, -0.25], [0, 1], reward=torch.tensor([1.1, 0.1]), logprob=-by_ten,
                       entropy=by_ten + 10, logit_grad=by_ten + 20, tokens=torch.tensor([[5, 6, 0], [7, 8, 9]]),
                       role=torch.tensor([[0, 1, 0], [2, 1, 0]], dtype=torch.int8),
                       in_answer=torch.tensor([[False, False, False], [False, False, True]]))
    grpo.write_credit_log(tmp_path / "step-000007.npz", 7, batch, torch.tensor([[0.1, 0.2, 0], [0.3, 0.4, 0.5]]))
    expected = {
        "step": ("int32", [7] * 5), "response": ("uint16", [0, 0, 1, 1, 1]), "group": ("uint16", [0, 0, 1, 1, 1]),
        "position": ("uint16", [0, 1, 0, 1, 2]), "token": ("int32", [5, 6, 7, 8, 9]),
        "logprob": ("float32", [0, -1, -3, -4, -5]), "entropy": ("float32", [10, 11, 13, 14, 15]),
        "logit_grad": ("float32", [20, 21, 23, 24, 25]), "advantage": ("float32", [0.5, 0.5, -0.25, -0.25, -0.25]),
        "credit": ("float32", [0.1, 0.2, 0.3, 0.4, 0.5]), "reward": ("float32", [1.1, 1.1, 0.1, 0.1, 0.1]),
        "role": ("int8", [0, 1, 2, 1, 0]), "in_answer": ("int8", [0, 0, 0, 0, 1])}
    with np.load(tmp_path / "step-000007.npz") as log:
        assert set(log.files) == set(expected)
        for name, (dtype, values) in expected.items():
            assert log[name].dtype == dtype, name
            assert log[name].tolist() == pytest.approx(values), name
        assert sum(log[name].dtype.itemsize for name in log.files) == 40
    assert [file.name for file in tmp_path.iterdir()] == ["step-000007.npz"]


# --------------------------------------------------------------------- what a credit function may ask the model


@torch.no_grad()
def alone(reader, model, codec, batch, i, *further):
    """What a function of sampler.py reads from the model about response i, in a batch of its own."""
    cache = PromptCache(model, [codec.prompt(PUZZLES[batch.group[i]])])
    return reader(model, ResponseCache(cache, torch.tensor([0])), batch.tokens[[i]], batch.mask[[i]], *further)[0]


def test_queries_read_each_response_as_if_it_were_alone(codec, random_model):
    """Guards against another row's prompt, rows that are lost or out of order, and the wrong model."""
    start_model = random_model.float()
    batch, model = step_batch(codec, reference=start_model, micro_batch=5)
    assert len(set(batch.mask.sum(1).tolist())) > 4  # responses, like prompts, are of unequal length
    rows = torch.tensor([3, 0, 3, 5, 1, 11, 0])
    hide = torch.rand(7, batch.mask.shape[1], generator=torch.Generator().manual_seed(0)) < 0.2
    without = batch.ask.logprob_without(rows, hide)
    for i in range(12):
        L = batch.mask[i].sum()
        close(batch.ask.hidden[i, :L], alone(response_states, model, codec, batch, i)[:L])
        close(batch.ask.attention[i, :L], alone(response_attention, model, codec, batch, i, batch.mask.shape[1])[:L])
        close(batch.ask.reference_logprob[i], alone(response_logprobs, start_model, codec, batch, i))
    for n, i in enumerate(rows.tolist()):
        close(without[n], alone(response_logprobs, model, codec, batch, i, hide[[n]]))
    assert batch.ask.logprob_without(rows[:0], hide[:0]).shape == hide[:0].shape
    for found in (batch.ask.hidden, batch.ask.attention, batch.ask.reference_logprob, without):
        assert not found.requires_grad


def test_the_model_runs_once_and_only_when_asked(codec, random_model, passes):
    """Guards against a forward pass that nobody asked for, or that each of several callers repeats."""
    batch, model = step_batch(codec, 2, 3, 8, reference=random_model, critic=Critic(128), micro_batch=4)
    assert passes == [(model, "prompts", 2)]  # by the sampler
    once = lambda kind, of: [(of, "prompts", 2), (of, kind, 4), (of, kind, 2)]  # two prompts, six responses
    for name, expected in (("attention", once("attention", model)), ("values", once("hidden", model)), ("hidden", []),
                           ("reference_logprob", once("hidden", random_model))):  # fmt: skip
        passes.clear()
        first = getattr(batch.ask, name)
        assert getattr(batch.ask, name) is first
        assert passes == expected


def test_the_tokens_that_go_through_the_model_are_counted(codec):
    """Guards against prompts or continuations left out, and a second count of what is computed once."""
    batch, _ = step_batch(codec, 2, 3, 8, critic=Critic(128))
    ask, responses = batch.ask, batch.mask.sum().item()
    prompts = [len(codec.prompt(puzzle)) for puzzle in PUZZLES[:2]]
    assert (ask.tokens_sampled, ask.tokens_read) == (responses, sum(prompts))
    assert ask.values is not None and ask.hidden is ask.hidden
    assert ask.tokens_read == 2 * sum(prompts) + responses  # once for both
    cuts = torch.zeros_like(batch.mask)
    cuts[0, 2] = cuts[5, 1] = True
    ask.rollout_values(cuts, 2)
    assert ask.tokens_read == 3 * sum(prompts) + responses + 2 + 1  # each prefix once for its two continuations
    assert responses + 4 <= ask.tokens_sampled <= responses + 2 * 6 + 2 * 7


@pytest.mark.parametrize("name, needed", [
    ("values", "critic"), ("importance_weights", "importance"), ("reference_logprob", "reference")])  # fmt: skip
def test_a_missing_model_is_one_sentence(name, needed, codec):
    """Guards against an AttributeError of None for whoever forgot to tell the decorator."""
    batch, _ = step_batch(codec, 1, 2, 1)
    with pytest.raises(ValueError, match=f'add needs=."{needed}",.'):
        getattr(batch.ask, name)


def test_rollouts_do_not_depend_on_how_many_are_sampled_together(codec, monkeypatch):
    """Guards against values that are mixed up between chunks, and randomness that depends on a memory setting."""
    batch, _ = step_batch(codec, 2, 2, 30)
    cuts = torch.zeros_like(batch.mask)
    cuts[[0, 0, 0, 1, 3, 3, 3], [1, 7, 20, 3, 0, 12, batch.mask[3].sum() - 1]] = True
    assert batch.mask[cuts].all()
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    results, calls, generate = [], [], grpo.generate
    monkeypatch.setattr(grpo, "generate", lambda *arguments: (calls.append(1), generate(*arguments))[1])
    for rows, chunks in ((768, 1), (9, 3), (2, 7)):  # seven cuts, three continuations each; at least one cut at a time
        monkeypatch.setattr(grpo, "ROWS_AT_ONCE", rows)
        calls.clear()
        results.append(batch.ask.rollout_values(cuts, 3))
        assert len(calls) == chunks
        assert torch.equal(results[0], results[-1])
    assert not batch.ask.rollout_values(torch.zeros_like(cuts), 3).any()


class Digits:
    """A codec of five tokens: the prompt is the puzzle's numbers, the text is the tokens, and 0 is the end token."""

    end_tokens, size = [0], 5

    def prompt(self, puzzle):
        return list(puzzle.numbers)

    def decode(self, tokens):
        return "".join(map(str, tokens)), [(i, i + 1) for i in range(len(tokens))]


def test_a_grader_given_to_the_rollout_grades_responses_and_continuations(codec):
    """Guards against a placebo that sees the real grades of continuations, and coins shared by steps or seeds."""
    batch, _ = step_batch(codec, 3, 8, 30, grade=coin_toss(0, 1))
    assert set(batch.reward.tolist()) == {0, 1} and torch.equal(batch.reward, batch.success)
    assert batch.format.tolist() == pytest.approx([format_reward(text) for text in batch.text])
    assert set((4 * batch.ask.rollout_values(batch.mask.cumsum(1) == 3, 4)).unique().tolist()) == {0, 1, 2, 3, 4}
    tosses = [[coin_toss(*key)("", (), 0)["reward"] for key in itertools.product(range(30), range(30))]
              for _ in range(2)]
    assert tosses[0] == tosses[1]
    assert 0.45 < statistics.mean(tosses[0]) < 0.55
    many = coin_toss(0, 0)
    assert 0.45 < statistics.mean(many("", (), 0)["answer"] for _ in range(1000)) < 0.55


@torch.no_grad()
def test_rollouts_converge_to_the_exact_value(monkeypatch):
    """Guards against any bias: with five tokens and a limit of three, all continuations can be counted."""
    monkeypatch.setattr(grpo, "reward", graded_by_hash)
    model = tiny().double()
    model.real_vocab = 5
    puzzles, k = [Puzzle((1, 2, 3), 6), Puzzle((4, 3), 1)], 4000
    # No response of the batch uses all three: a continuation may be longer than each of them.
    batches = (grpo.rollout(model, Digits(), puzzles, grpo.draw_uniforms(i, 1, 2, 2, 3)) for i in itertools.count())
    batch = next(batch for batch in batches if batch.tokens.shape[1] == 2)
    value = batch.ask.rollout_values(batch.mask, k)
    for i, t in batch.mask.nonzero().tolist():
        mean, square = exact_moments(model, Digits(), puzzles[i // 2], tuple(batch.tokens[i, :t].tolist()), 3,
                                     lambda *graded: graded_by_hash(*graded)["reward"])
        deviation = (square - mean**2) ** 0.5
        assert deviation > 0.1
        assert abs(value[i, t].item() - mean) < 5 * deviation / k**0.5
    assert value[0, 0] != value[1, 0]  # the same prefix, but other random numbers
