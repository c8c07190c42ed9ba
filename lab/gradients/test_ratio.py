"""What the ratio adds: gradients against plain autograd, facts by hand, updates against train.py's, the command.

Run it:  python -m pytest lab/gradients/test_ratio.py
"""
import copy
import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import countdown_task
import grpo
import rollout
from countdown_task import Puzzle
from lab.estimates import read_table
from lab.gradients import ratio
from plumbing.optimizer import Optimizer
from plumbing.report import plt
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
    assert found["size"] == pytest.approx((gradients[0].norm() / gradients[-1].norm()).item())
    use = credit != 0
    assert 0 < found["clipped"] < 1
    assert found["clipped"] == pytest.approx(bound[use].double().mean().item())
    assert found["clipped, reasoning"] == pytest.approx(bound[use & (batch.role == 1)].double().mean().item())
    assert found["deviation"] == pytest.approx(r[use].log().std(correction=0).item())


def test_the_facts_of_a_factor_by_hand():
    """Guards against factors that forget the clip, signs of credit that are mixed up, and between for within."""
    columns = {"log_ratio": np.log([1.0, 1.5, 1.1, 0.9, 0.5, 1.2]), "clipped": np.array([0, 1, 0, 0, 1, 0], bool),
               "credit": np.array([2.0, 2.0, 2.0, -1.0, -1.0, -1.0]), "entropy": np.array([0.0, 1, 1, 0, 2, 1]),
               "role": np.array([0, 1, 1, 0, 1, 0]), "response": np.array([0, 0, 0, 2, 2, 2])}
    found = ratio.factor_facts(columns)
    assert (found["clipped"], found["clipped, filler"], found["clipped, reasoning"]) == pytest.approx((2 / 6, 0, 2 / 3))
    assert math.isnan(found["clipped, structure"])
    assert found["deviation"] == pytest.approx(np.std(columns["log_ratio"]))
    factor = [1.0, 0.0, 1.1, 0.9, 0.0, 1.2]
    assert found["entropy +"] == pytest.approx(np.corrcoef(factor[:3], [0, 1, 1])[0, 1])
    assert found["entropy -"] == pytest.approx(np.corrcoef(factor[3:], [0, 2, 1])[0, 1])
    assert [found[f"{role} +"] for role in ("filler", "reasoning")] == pytest.approx([1.0, 0.55])
    assert [found[f"{role} -"] for role in ("filler", "reasoning")] == pytest.approx([1.05, 0.0])


@pytest.fixture
def small(monkeypatch):
    """Settings and policy of small batches."""
    monkeypatch.setattr(ratio, "Settings", Small)
    return Small(), load_policy(Small())


def test_updates_are_those_of_train(small):
    """Guards against facts before the wrong update, and updates other than those of --updates_per_batch 4."""
    s, policy = small
    training = countdown_task.load("train")
    batch, credit = ratio.sampled(policy, training, s, 3)
    twin = copy.deepcopy(policy.model)
    metrics = grpo.update(policy._replace(model=twin), Optimizer(twin, s.lr), batch, credit,
                          replace(s, updates_per_batch=4))
    optimizer = Optimizer(policy.model, s.lr)
    found = list(ratio.observed_updates(policy, optimizer, batch, credit, s))
    assert [row["update"] for row in found] == [2, 3, 4]
    assert metrics["clip_fraction"] == pytest.approx(sum(row["clipped"] for row in found) / 4, abs=1e-6)
    assert metrics["clip_fraction"] > 0
    assert found[0]["deviation"] < found[2]["deviation"] < 2 * metrics["ratio_spread"]
    ratio.update(policy, optimizer, batch, credit, s)  # the fourth
    for p, q in zip(policy.model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q)


def test_every_batch_and_clip_starts_from_the_same_state(small, monkeypatch):
    """Guards against Adam's moments, or weights, that carry over from one clip or batch to the next."""
    s, policy = small
    monkeypatch.setattr(ratio, "CLIPS", (0.2, 0.2))
    monkeypatch.setattr(ratio, "UPDATES", 3)
    monkeypatch.setattr(ratio, "draw_puzzles", lambda training, s, step: ASKED)
    draw = rollout.draw_uniforms
    monkeypatch.setattr(rollout, "draw_uniforms", lambda seed, step, *shape: draw(seed, min(step, 2), *shape))
    rows = list(ratio.observations(policy, s, 2, 1))
    assert [row["batch"] for row in rows] == [2] * 4 + [3] * 4
    facts = [{k: v for k, v in row.items() if k != "batch"} for row in rows]
    for i in range(2):
        for other in facts[i + 2 :: 2]:
            assert other == pytest.approx(facts[i], nan_ok=True)


def made_up():
    """Facts of two batches, two clips and two updates."""
    names = [*ratio.GRADIENTS, "size", "clipped", "deviation", "within"]
    names += [f"clipped, {role}" for role in ratio.ROLES]
    names += [f"{name} {sign}" for sign in "+-" for name in ("entropy", *ratio.ROLES)]
    return [{"method": "none", "clip": clip, "update": update, "batch": batch}
            | {name: clip + update + 0.01 * i + 0.1 * batch for i, name in enumerate(names)}
            for batch in (1, 2) for clip in ratio.CLIPS for update in (3, 4)]


def test_the_tables_by_hand():
    """Guards against a mean over updates or clips, columns under the wrong name, and conclusions that are constants."""
    found = made_up()
    found[0]["clipped, structure"] = math.nan
    spread, gradient, places = ratio.tables_ratio(found, "Note.")
    assert [row[:3] for row in gradient.rows] == [["none", c, u] for c in ("0.2", "0.28") for u in ("3", "4")]
    # Two batches, 0.1 apart: the interval is 12.706 * 0.1 / 2.
    assert gradient.rows[0][3:] == ["3.35 ± 0.64", "3.36 ± 0.64", "3.37 ± 0.64", "3.38 ± 0.64"]
    assert dict(zip(spread.header, spread.rows[1]))["deviation of log ratio"] == "4.400 ± 0.635"
    assert spread.rows[0][spread.header.index("clipped, structure")] == "349.00"  # of one batch
    assert dict(zip(places.header, places.rows[0]))["structure, credit < 0"] == "3.520 ± 0.635"


def test_the_picture_shows_the_tables(tmp_path, monkeypatch):
    """Guards against bars beside the wrong method, and intervals of another width."""
    (tmp_path / "r.md").write_text("\n".join(map(str, ratio.tables_ratio(made_up(), ""))), encoding="utf-8")
    monkeypatch.setattr(ratio, "save_figure", lambda figure, file: None)
    ratio.draw_ratio(tmp_path / "r.md", tmp_path / "r.png")
    left, right = plt.gcf().axes
    heights = [bars[0].get_ydata().tolist() for bars in left.containers]  # percent, at update 4
    assert heights[0] == pytest.approx([100 * (c + 4.22) for c in ratio.CLIPS])
    assert [bars[0].get_ydata().tolist() for bars in right.containers] == [
        pytest.approx([c + u + 0.15 for u in (3, 4)]) for c in ratio.CLIPS]
    plt.close()


def test_the_command(small, monkeypatch, tmp_path):
    """Guards against a file that lacks a method, a clip or the picture."""
    monkeypatch.setattr(ratio, "UPDATES", 2)
    monkeypatch.setattr(sys, "argv", ["ratio.py", "--batches", "2", "--warm_up", "1", "--out", str(tmp_path / "out")])
    ratio.main()
    for title in ratio.TITLES:
        _, rows = read_table(tmp_path / "out" / "ratio.md", title)
        assert [row[:3] for row in rows] == [[m, c, "2"] for m in ratio.METHODS for c in ("0.2", "0.28")]
    assert (tmp_path / "out" / "ratio.png").stat().st_size > 10_000
