"""The critic: what it may know, its loss, its file, and the numbers that critic.py prints.

Run it:  python -m pytest tests/test_critic.py
"""

import math
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import critic as module
import grpo
from conftest import make_batch
from countdown_task import Problem, split
from critic import FILE, Critic, load_critic
from qwen2_model import load_model
from train import BUNDLED

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
REWARD = torch.tensor([1.1, 0.0, 0.1, 1.0])


def states(seed=0, rows=4, size=8):
    """Random hidden states (rows, 4, size)."""
    return torch.randn(rows, 4, size, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def grown(size=8):
    """A critic that does not say 0 of everything."""
    torch.manual_seed(0)
    critic = Critic(size)
    torch.nn.init.normal_(critic.outer.weight, std=0.5)
    torch.nn.init.normal_(critic.outer.bias)
    return critic


def weights(critic):
    """All parameters in one row."""
    return torch.nn.utils.parameters_to_vector(critic.parameters()).detach().clone()


# ------------------------------------------------------------------------------------- scoring and learning


def value_by_hand(critic, x):
    """The value () of one hidden state (D,), in plain formulas."""
    x = (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt()
    y = critic.inner.weight @ x + critic.inner.bias
    return critic.outer.weight[0] @ (y / (1 + (-y).exp())) + critic.outer.bias[0]


def test_values_by_hand_and_zero_on_padding():
    """Guards against another network than the documented one, and values that padding has."""
    critic, hidden = grown(), states()
    value = critic.score(hidden, MASK)
    for i, t in MASK.nonzero().tolist():
        assert value[i, t].item() == pytest.approx(value_by_hand(critic, hidden[i, t]).item(), abs=1e-5)
    assert value.std() > 0.1 and not value[~MASK].any() and not value.requires_grad
    assert not Critic(8).score(hidden, MASK).any()  # before it has learned anything


def test_values_keep_their_digits_where_states_have_few():
    """Guards against values in bfloat16: the differences between neighbours, which methods use, would be rounding."""
    critic, hidden = grown(), states().bfloat16()
    value = critic.score(hidden, MASK)
    assert value.dtype == torch.float32 and torch.equal(value, grown().score(hidden.float(), MASK))
    assert not torch.equal(value, value.bfloat16().float())
    critic.learn(REWARD)
    learned = weights(critic)
    assert learned.dtype == torch.float32 and not torch.equal(learned, weights(grown()))


def test_a_score_never_knows_its_own_reward(codec):
    """Guards against values that change once the rewards are known, for a batch that asks before and after."""
    model, critic = load_model(BUNDLED), grown(128)
    model.real_vocab, start = codec.size, weights(critic)
    after = []
    for reward in (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])):
        torch.nn.utils.vector_to_parameters(start.clone(), critic.parameters())
        batch = grpo.rollout(model, codec, [Problem((4, 3, 5), 8)], grpo.draw_uniforms(0, 1, 1, 2, 20), critic=critic)
        before = batch.values().clone()
        critic.learn(reward)
        assert torch.equal(batch.values(), before) and not torch.equal(weights(critic), start)
        after.append(before)
    assert torch.equal(*after) and after[0].any()


def test_it_learns_from_a_batch_once_and_only_from_one_that_it_scored():
    """Guards against a method without values that trains a critic, and against learning twice from one batch."""
    critic = grown()
    start = weights(critic)
    critic.learn(REWARD)
    assert torch.equal(weights(critic), start) and not critic.optimizer.state and critic.scored is None
    critic.score(states(), MASK)
    critic.learn(REWARD)
    once = weights(critic)
    critic.learn(REWARD)
    assert torch.equal(weights(critic), once) and not torch.equal(once, start) and critic.scored is None


def learn_by_hand(hidden, make, clip):
    """Weights after four steps on PPO's value loss, token by token, and on how many tokens the clip took hold."""
    critic, tokens, active = grown(), MASK.nonzero().tolist(), 0
    optimizer = make(critic.parameters())
    old = {(i, t): value_by_hand(critic, hidden[i, t]).item() for i, t in tokens}
    for _ in range(4):
        loss = 0.0
        for i, t in tokens:
            value, r = value_by_hand(critic, hidden[i, t]), REWARD[i].item()
            move = value.item() - old[i, t]
            near = value if abs(move) <= clip else torch.tensor(old[i, t] + math.copysign(clip, move))
            active += bool((near - r) ** 2 > (value - r) ** 2)
            loss = loss + 0.5 * max((value - r) ** 2, (near - r) ** 2) / len(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(critic), active


@pytest.mark.parametrize("make", [None, lambda p: torch.optim.SGD(p, 0.3), lambda p: torch.optim.AdamW(p, 0.03)],
                         ids=["its own", "SGD", "fast"])  # fmt: skip
def test_the_loss_by_hand(make):
    """Guards against min for max, a clip around the target, padding in the mean, another scale, rate or decay."""
    critic, hidden = grown(), states()
    if make:  # so large steps that the clip takes hold
        critic.optimizer = make(critic.parameters())
    own = make or (lambda p: torch.optim.AdamW(p, module.LR, weight_decay=0.0))
    (expected, active), (unclipped, _) = (learn_by_hand(hidden, own, clip) for clip in (0.2, 9.0))
    critic.score(hidden, MASK)
    critic.learn(REWARD)
    torch.testing.assert_close(weights(critic), expected, rtol=0, atol=1e-3 if make else 1e-4)
    assert bool(active) == bool(make) == bool((expected - unclipped).abs().max() > 0.02)


def test_padding_has_no_influence():
    """Guards against learning from what stands on padding."""
    results = []
    for size in (0, 100):
        critic, hidden = grown(), states()
        hidden[~MASK] += size * states(1)[~MASK]
        value = critic.score(hidden, MASK)
        critic.learn(REWARD)
        results.append(torch.cat((value.flatten(), weights(critic))))
    assert torch.equal(*results)


def test_it_converges_to_the_mean_reward():
    """Guards against a target that its own estimates go into, a discount, and a clip that never lets go."""
    torch.manual_seed(0)
    critic, hidden = Critic(128), states(0, 1, 128)[:, :1].expand(4, 4, 128)
    for _ in range(100):
        critic.score(hidden, MASK)
        critic.learn(REWARD)
    expected = (MASK * REWARD[:, None])[MASK].mean().item()
    assert critic.score(hidden, MASK)[MASK].tolist() == pytest.approx([expected] * 10, abs=0.02)


def test_it_finds_a_feature_that_success_depends_on():
    """Guards against a critic that learns the base rate only: half of what can be known, on responses never seen."""
    torch.manual_seed(0)
    critic, generator, direction = Critic(32), torch.Generator().manual_seed(0), torch.randn(32)
    mask = torch.ones(64, 4, dtype=torch.bool)

    def draw(rows):
        hidden = torch.randn(rows, 1, 32, generator=generator).expand(rows, 4, 32)
        p = (0.5 + 0.4 * hidden[:, 0] @ direction / direction.norm()).clamp(0.02, 0.98)
        return hidden, p, (torch.rand(rows, generator=generator) < p).float()

    for _ in range(60):
        hidden, _, success = draw(64)
        critic.score(hidden, mask)
        critic.learn(success)
    hidden, p, success = draw(4000)
    with torch.no_grad():
        brier = (critic(hidden)[:, 0] - success).square().mean().item()
    possible, base = (p * (1 - p)).mean().item(), success.var(correction=0).item()
    assert base - possible > 0.08 and brier < base - 0.5 * (base - possible)


def test_no_gradient_reaches_the_model(codec):
    """Guards against a critic that trains the policy, also where nobody switched gradients off."""
    model, critic = load_model(BUNDLED), grown(128)
    model.real_vocab, start, before = codec.size, weights(model), weights(critic)
    batch = grpo.rollout(model, codec, [Problem((4, 3, 5), 8)], grpo.draw_uniforms(0, 1, 1, 2, 20), critic=critic)
    assert not batch.values().requires_grad
    critic.learn(torch.tensor([1.0, 0.0]))
    assert not torch.equal(weights(critic), before) and torch.equal(weights(model), start)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# ---------------------------------------------------------------------------------------------------- its file


@pytest.fixture
def saved(tmp_path):
    """A folder with the file of a critic for the bundled model, and that critic."""
    critic = grown(128)
    critic.save(tmp_path)
    return tmp_path, critic


def test_a_saved_critic_comes_back(saved):
    """Guards against a tensor that is not saved, and a file that is not read."""
    folder, critic = saved
    model, hidden = load_model(BUNDLED), states(0, 4, 128)
    again = load_critic(folder, model)
    assert torch.equal(again.score(hidden, MASK), critic.score(hidden, MASK)) and not again.optimizer.state
    assert [p.name for p in folder.iterdir()] == [FILE]
    assert not load_critic(BUNDLED, model).score(hidden, MASK).any()  # where there is none, a new one


def cut_tensors(file, change):
    """Rewrite the file of a critic."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


DAMAGES = {
    "empty": lambda f: f.write_bytes(b""),
    "text": lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "cut short": lambda f: f.write_bytes(f.read_bytes()[:-1000]),
    "of another size": lambda f: Critic(64).save(f.parent),
    "a tensor missing": lambda f: cut_tensors(f, lambda t: t.pop("inner.bias")),
    "a tensor too many": lambda f: cut_tensors(f, lambda t: t.update(extra=torch.ones(1))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_named(damage, saved):
    """Guards against a traceback, and against a critic that silently begins anew."""
    DAMAGES[damage](saved[0] / FILE)
    with pytest.raises(ValueError) as caught:
        load_critic(saved[0], load_model(BUNDLED))
    assert str(saved[0] / FILE) in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- how good it is


def scored_batch():
    """Four responses with values: ten tokens before the answer, three, none, and one that has no answer."""
    in_answer = torch.zeros(4, 12, dtype=torch.bool)
    for i, n in enumerate((10, 3, 0, 7)):
        in_answer[i, n:] = i < 3
    batch = make_batch([12, 5, 4, 7], [0.0] * 4, in_answer=in_answer, success=torch.tensor([1.0, 0, 1, 0]))
    value = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)) * batch.mask
    batch.values = lambda: value
    return batch


def errors_by_hand(batch, rate):
    """Per response, per fifth before the answer: the mean squared errors of values and rate, or None."""
    table = []
    for i in range(4):
        places = [t for t in range(12) if batch.mask[i, t] and not batch.in_answer[i, t]]
        fifths = [[] for _ in range(5)]
        for t in places:
            fifths[math.floor(5 * t / len(places))].append((batch.values()[i, t].item() - batch.success[i].item()) ** 2)
        base = (rate - batch.success[i].item()) ** 2
        table.append([(sum(f) / len(f), base) if f else None for f in fifths])
    return table


def test_squared_errors_by_hand():
    """Guards against answer tokens or padding that count, fifths off by one, and zeros where there is no token."""
    got, expected = module.squared_errors(scored_batch(), 0.3), errors_by_hand(scored_batch(), 0.3)
    assert got.shape == (4, 5, 2) and expected[2] == [None] * 5 and expected[1].count(None) == 2
    for i in range(4):
        for fifth in range(5):
            want = expected[i][fifth] or (math.nan, math.nan)
            assert got[i, fifth].tolist() == pytest.approx(want, abs=1e-6, nan_ok=True)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_the_report_by_hand(capsys):
    """Guards against a gain of the wrong sign, a wrong interval, and responses without a token counted as 0."""
    module.report([scored_batch(), scored_batch()], rate=0.3)
    out = capsys.readouterr().out
    assert "30.0% of the responses it learned from, 50.0% of the 8 held-out ones" in out
    table = [[f for f in fifths if f] for fifths in zip(*errors_by_hand(scored_batch(), 0.3) * 2)]
    means = [[sum(x) / len(x) for x in zip(*[f for f in row if f])] for row in errors_by_hand(scored_batch(), 0.3) * 2]
    lines = [re.findall(r"[+-]?\d+\.\d+", line.partition("|")[2].partition("|")[2]) for line in out.splitlines()[4:]]
    assert len(lines) == 6
    for numbers, pairs in zip(lines, [*table, [tuple(m) for m in means if m]]):
        critic, base = np.array(pairs).T
        gain = base - critic
        expected = [critic.mean(), base.mean(), gain.mean(), 1.96 * gain.std(ddof=1) / len(gain) ** 0.5]
        assert [float(x) for x in numbers] == pytest.approx(expected, abs=6e-5)


def test_the_command_line(monkeypatch, capsys):
    """Guards against a critic measured on puzzles that it learned from, or that learns from those it is measured on."""
    seen, keys, learned = {}, [], []
    generate, uniforms, learn = module.generate_problems, grpo.draw_uniforms, Critic.learn
    monkeypatch.setattr(module, "SIZE", 4)
    monkeypatch.setattr(module, "PUZZLES", 2)
    monkeypatch.setattr(module, "generate_problems", lambda n, part: seen.setdefault(part, generate(n, part)))
    monkeypatch.setattr(grpo, "draw_uniforms", lambda *a: (keys.append(a[:2]), uniforms(*a[:4], 25))[1])
    monkeypatch.setattr(Critic, "learn", lambda c, reward: (learned.append(len(keys)), learn(c, reward))[1])
    monkeypatch.setattr(sys, "argv", ["critic.py", "--batches", "3"])
    module.main()
    out = capsys.readouterr().out
    assert "of the 56 held-out ones" in out and len(re.findall(r"^\| \d+-\d+% \|", out, re.M)) == 5
    assert learned == [1, 2, 3] and len(set(keys)) == len(keys) == 17
    assert seen.keys() == {"train", "heldout"}
    assert all({split(p) for p in problems} == {part} for part, problems in seen.items())


@pytest.mark.parametrize("flags, named", [(["--batches", "0"], "--batches"), (["--model", "nowhere"], "nowhere")])
def test_the_command_line_refuses_in_one_sentence(flags, named, monkeypatch):
    """Guards against a traceback for what the user got wrong."""
    monkeypatch.setattr(sys, "argv", ["critic.py", *flags])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert str(stop.value.code).startswith("error: ") and named in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
