"""How well the critic predicts: Brier scores by hand, and the command that measures them."""
import math
import re
import sys

import numpy as np
import pytest
import torch
from tests.fixtures import make_batch

import countdown_task
from countdown_task import split
from lab.truth import critic as critic_quality
from methods import MITIGATIONS
from methods.heads import Critic, Importance
from rollout import Policy
from tasks import latin_task


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_the_report_by_hand(capsys):
    """Guards against tokens of the answer or of padding that count, fifths off by one, and a gain of the wrong sign."""
    lengths, before = [12, 5, 4, 7], [10, 3, 0, 7]  # tokens of each response, and those before its answer
    values, success = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)), [1.0, 0.0, 1.0, 0.0]
    in_answer = torch.arange(12) >= torch.tensor([10, 3, 0, 12])[:, None]
    batch = make_batch(lengths, [0.0] * 4, in_answer=in_answer, success=torch.tensor(success), critic=values)
    expected = np.full((4, 5, 2), math.nan)
    for i, n in enumerate(before):
        for fifth in range(5):
            inside = [t for t in range(n) if 5 * t // n == fifth]
            if inside:
                expected[i, fifth] = ((values[i, inside].numpy() - success[i]) ** 2).mean(), (0.3 - success[i]) ** 2
    assert critic_quality.squared_errors(batch, 0.3) == pytest.approx(expected, abs=1e-6, nan_ok=True)
    critic_quality.report([batch, batch], rate=0.3)
    out = capsys.readouterr().out
    assert "30.0% of the responses it learned from, 50.0% of the 8 held-out ones" in out
    columns = [*np.concatenate((expected, expected)).transpose(1, 0, 2), np.nanmean([*expected, *expected], axis=1)]
    for line, column in zip(out.splitlines()[4:], columns, strict=True):
        critic, base = column[~np.isnan(column[:, 0])].T
        error = 1.96 * (base - critic).std(ddof=1) / len(critic) ** 0.5
        shown = [float(x) for x in re.findall(r"[+-]?\d+\.\d+", line.split("|", 2)[2])]
        assert shown == pytest.approx([critic.mean(), base.mean(), (base - critic).mean(), error], abs=6e-5)


def test_the_command(monkeypatch, capsys):
    """Guards against a critic that is measured on puzzles it learned from, or learns from what it is measured on."""
    batches, keys, asked, learned, rollout, learn = [], [], [], [], critic_quality.rollout, Critic.learn

    def recorded_rollout(policy, puzzles, s, step):
        keys.append((s.seed, step))
        asked.append({split(p) for p in puzzles})
        batches.append(rollout(policy, puzzles, s, step))
        return batches[-1]

    def recorded_learn(critic, batch):
        learned.append((len(batches), batch.reward is batches[-1].success))
        return learn(critic, batch)

    for name, small in {"SIZE": 4, "PUZZLES": 2, "LIMIT": 25}.items():
        monkeypatch.setattr(critic_quality, name, small)
    monkeypatch.setattr(critic_quality, "rollout", recorded_rollout)
    monkeypatch.setattr(Critic, "learn", recorded_learn)
    monkeypatch.setattr(sys, "argv", ["critic_quality.py", "--batches", "3"])
    critic_quality.main()
    assert "of the 56 held-out ones" in capsys.readouterr().out
    assert learned == [(1, True), (2, True), (3, True)]
    assert asked == [{"train"}] * 3 + [{"heldout"}] * 14
    assert len(set(keys)) == len(keys)


def test_a_critic_is_fitted_once(tokenizer, random_model, monkeypatch, tmp_path):
    """Guards against a second call that fits again, and against one beside the model that is ignored."""
    fitted, policy = [], Policy(random_model.float(), tokenizer, countdown_task)
    monkeypatch.setattr(critic_quality, "fit", lambda *a: (fitted.append(a[1:]), (Critic(32), Importance(32), 0.0))[1])
    (tmp_path / "model").mkdir()
    for folder in ("model", "model", "elsewhere"):
        critic_quality.find_heads(tmp_path / folder, str(tmp_path / "model"), policy, 7)
    assert fitted == [(7, "reward")]


def test_methods_that_need_other_heads_are_not_scored():
    """Guards against a head that nobody fits, and the truth as a method beside itself."""
    missing = set(MITIGATIONS) - critic_quality.fitted_methods(countdown_task).keys()
    assert missing == {"oracle", "ppo_process"}
    assert "causal_ablation" not in critic_quality.fitted_methods(latin_task)
