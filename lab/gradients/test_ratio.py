"""What the ratio adds: gradients against plain autograd, updates against train.py's, tables by hand."""
import copy
from dataclasses import dataclass, replace

import pytest
import torch

import countdown_task
import grpo
import rollout
from countdown_task import Puzzle
from lab.gradients import ratio
from plumbing.optimizer import Optimizer
from rollout import Policy
from tests.plain import flat_gradient, plain_logprobs
from train import Settings, load_policy

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7), 30)]  # prompts of unequal length


@dataclass(frozen=True)
class Small(Settings):
    """A step of eight short responses."""

    questions: int = 2
    answers: int = 4
    max_new_tokens: int = 50
    lr: float = 2e-3  # so that something is clipped


def test_an_update_s_facts_are_plain_autograd_s(random_model, tokenizer, exact):
    """Guards against another factor, loss weight or credit, tokens of padding, and the old policy for the new one."""
    random_model.real_vocab = tokenizer.size
    s = Small(answers=3, max_new_tokens=9)
    policy = Policy(random_model, tokenizer, countdown_task)
    batch = rollout.rollout(policy, ASKED, s, step=1)
    generator = torch.Generator().manual_seed(1)
    credit = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    credit[1], credit[2, ::2] = 0, 0
    batch.role = torch.randint(3, batch.mask.shape, generator=generator)
    for p in random_model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    found = ratio.observe(batch, credit, s)

    prompts = [policy.prompt(ASKED[q]) for q in batch.group.tolist()]
    logprob = plain_logprobs(random_model, prompts, batch.tokens, batch.mask)
    r = ((logprob - batch.logprob) * batch.mask).exp()
    bound = (r > 1.2) & (credit > 0) | (r < 0.8) & (credit < 0)
    losses = [torch.minimum(r * credit, r.clamp(0.8, 1.2) * credit), r * credit, logprob * credit * ~bound,
              logprob * credit]
    gradients = [flat_gradient(random_model, x.sum()) for x in losses]
    for name, g in zip(ratio.GRADIENTS, gradients):
        assert found[name] == pytest.approx(torch.cosine_similarity(g, gradients[-1], dim=0).item(), abs=1e-9)
        assert found[name] < 0.999
    assert found["relative size"] == pytest.approx((gradients[0].norm() / gradients[-1].norm()).item())
    use, log = credit != 0, r.log()
    assert 0 < found["clipped"] < 100
    assert found["clipped"] == pytest.approx(100 * bound[use].double().mean().item())
    assert found["clipped, reasoning"] == pytest.approx(100 * bound[use & (batch.role == 1)].double().mean().item())
    assert found["deviation of log ratio"] == pytest.approx(log[use].std(correction=0).item())
    left = torch.cat([x[u] - x[u].mean() for x, u in zip(log, use) if u.any()])  # without the mean of its response
    assert found["within responses"] == pytest.approx((left.square().mean() / log[use].var(correction=0)).item())


def test_updates_are_those_of_train():
    """Guards against facts before the wrong update, and updates other than those of --updates_per_batch 4."""
    s, policy = Small(), load_policy(Small())
    training = countdown_task.load("train")
    batch, credit = ratio.sampled(policy, training, s, 3)
    twin = copy.deepcopy(policy.model)
    metrics = grpo.update(policy._replace(model=twin), Optimizer(twin, s.lr), batch, credit,
                          replace(s, updates_per_batch=4))
    optimizer = Optimizer(policy.model, s.lr)
    found = list(ratio.observed_updates(policy, optimizer, batch, credit, s))
    assert [row["update"] for row in found] == [2, 3, 4]
    assert metrics["clip_fraction"] == pytest.approx(sum(row["clipped"] for row in found) / 400, abs=1e-6)
    assert metrics["clip_fraction"] > 0
    ratio.update(policy, optimizer, batch, credit, s)  # the fourth
    for p, q in zip(policy.model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q)


def test_every_batch_and_clip_starts_from_the_same_state(monkeypatch):
    """Guards against Adam's moments, or weights, that carry over from one clip or batch to the next."""
    for name, value in {"CLIPS": (0.2, 0.2), "UPDATES": 3, "WARM_UP": 1, "BATCHES": 2}.items():
        monkeypatch.setattr(ratio, name, value)
    monkeypatch.setattr(ratio, "draw_puzzles", lambda training, s, step: ASKED)
    draw = rollout.draw_uniforms
    monkeypatch.setattr(rollout, "draw_uniforms", lambda seed, step, *shape: draw(seed, min(step, 2), *shape))
    rows = list(ratio.observations(Small()))
    assert [row["update"] for row in rows] == [2, 3] * 4
    for i in range(2):
        for other in rows[i + 2 :: 2]:
            assert other == pytest.approx(rows[i], nan_ok=True)


def test_table_and_picture_by_hand(tmp_path, figures):
    """Guards against a mean over updates or clips, columns under the wrong name, and intervals of another width."""
    table = ratio.table_ratio([{"method": "none", "clip_high": clip, "update": update}
                               | {name: clip + update + 0.01 * i + 0.1 * batch for i, name in enumerate(ratio.COLUMNS)}
                               for batch in (1, 2) for clip in ratio.CLIPS for update in (3, 4)])
    assert [row[:3] for row in table.rows] == [["none", c, u] for c in ("0.2", "0.28") for u in ("3", "4")]
    # Two batches, 0.1 apart: the interval is 12.706 * 0.1 / 2.
    assert table.rows[0][3:6] == ["3.35 ± 0.64", "3.36 ± 0.64", "3.37 ± 0.64"]
    assert dict(zip(table.header, table.rows[1]))["deviation of log ratio"] == "4.390 ± 0.635"
    (tmp_path / "r.md").write_text(str(table), encoding="utf-8")
    ratio.draw_ratio(tmp_path / "r.md", tmp_path / "r.png")
    for axis, columns in zip(figures[0].axes, ((1, 2, 3), (6, 7, 8))):
        assert [bars[0].get_ydata().tolist() for bars in axis.containers] == [
            pytest.approx([0.2 + u + 0.15 + 0.01 * i for u in (3, 4)], abs=0.006) for i in columns]
