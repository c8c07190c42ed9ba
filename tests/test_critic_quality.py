"""How well the critic predicts: Brier scores by hand, and the command that measures them.

Run it:  python -m pytest tests/test_critic_quality.py
"""

import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import make_batch

import grpo
from countdown_task import split
from critic import Critic
from experiments import critic_quality


def predicted():
    """Four responses with values: ten tokens before the answer, three, none, and one without an answer."""
    in_answer = torch.zeros(4, 12, dtype=torch.bool)
    for i, n in enumerate((10, 3, 0)):
        in_answer[i, n:] = True
    values = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    success = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return make_batch([12, 5, 4, 7], [0.0] * 4, in_answer=in_answer, success=success, values=values)


def errors_by_hand(batch, rate):
    """(4, 5, 2), by loops; NaN where there is no token."""
    errors = np.full((4, 5, 2), math.nan)
    for i in range(4):
        places = [t for t in range(12) if batch.mask[i, t] and not batch.in_answer[i, t]]
        for fifth in range(5):
            inside = [t for t in places if 5 * t // len(places) == fifth]
            if inside:
                target, values = batch.success[i].item(), batch.ask.values[i, inside].numpy()
                errors[i, fifth] = ((values - target) ** 2).mean(), (rate - target) ** 2
    return errors


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_the_report_by_hand(capsys):
    """Guards against tokens of the answer or of padding that count, fifths off by one, and a gain of the wrong sign."""
    expected = errors_by_hand(predicted(), 0.3)
    assert np.isnan(expected).any(2).sum(1).tolist() == [0, 2, 5, 0]
    assert critic_quality.squared_errors(predicted(), 0.3) == pytest.approx(expected, abs=1e-6, nan_ok=True)
    critic_quality.report([predicted(), predicted()], rate=0.3)
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
    seen, keys, batches, learned = {}, [], [], []
    generate, rollout, learn = critic_quality.generate_puzzles, grpo.rollout, Critic.learn

    def recorded(*arguments, key, **named):
        keys.append(key)
        batches.append(rollout(*arguments, key=key, **named))
        return batches[-1]

    monkeypatch.setattr(critic_quality, "SIZE", 4)
    monkeypatch.setattr(critic_quality, "PUZZLES", 2)
    monkeypatch.setattr(critic_quality, "LIMIT", 25)
    monkeypatch.setattr(critic_quality, "generate_puzzles", lambda n, part: seen.setdefault(part, generate(n, part)))
    monkeypatch.setattr(grpo, "rollout", recorded)
    monkeypatch.setattr(Critic, "learn", lambda *a: (learned.append((len(keys), a[-1])), learn(*a))[1])
    monkeypatch.setattr(sys, "argv", ["critic_quality.py", "--batches", "3"])
    critic_quality.main()
    assert "of the 56 held-out ones" in capsys.readouterr().out
    assert [count for count, _ in learned] == [1, 2, 3]
    assert len(set(keys)) == len(keys) == 3 + 14
    assert {part: {split(p) for p in puzzles} for part, puzzles in seen.items()} == {
        "train": {"train"}, "heldout": {"heldout"}}  # fmt: skip
    assert all(target is batch.success for (_, target), batch in zip(learned, batches))


def test_a_critic_is_fitted_once(codec, random_model, monkeypatch, tmp_path):
    """Guards against a second call that fits again, and against one beside the model that is ignored."""
    fitted, model = [], random_model.float()
    monkeypatch.setattr(critic_quality, "fit", lambda *a: (fitted.append(a[2:]), (Critic(32), 0.0))[1])
    (tmp_path / "model").mkdir()
    for folder in ("model", "model", "elsewhere"):
        critic_quality.find_critic(tmp_path / folder, str(tmp_path / "model"), model, codec, 7)
    assert fitted == [(7, "reward")]


@pytest.mark.parametrize("flags, named", [(["--batches", "0"], "--batches"), (["--model", "nowhere"], "nowhere")])
def test_the_command_line_refuses_in_one_sentence(flags, named, monkeypatch):
    """Guards against a traceback for what the user got wrong."""
    monkeypatch.setattr(sys, "argv", ["critic_quality.py", *flags])
    with pytest.raises(SystemExit) as stop:
        critic_quality.main()
    assert re.fullmatch("error: [^\n]+", str(stop.value.code))
    assert named in stop.value.code
