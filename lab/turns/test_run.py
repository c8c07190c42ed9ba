"""The contrasts of lab/archive/turns-designs.md, on made-up rows."""
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import start
from lab import arms
from lab.turns import checks, credit, noise, run
from lab.turns.run import LINE, MIXED, ROOM
from lab.updates import credit_gradients
from methods import MITIGATIONS
from plumbing.comparison import Group
from plumbing.report import Estimate, Table
from queries import Queries
from rollout import rollout
from settings import Settings
from tasks import guess_task
from turns import context

QUIET = {"RLOO": 1.0, LINE[1]: 2.0, LINE[2]: 6.0, LINE[3]: 18.0, "A1": 1.5, "A2": 18.0, MIXED: 1.5}
LEAD = {"A1": 0.03, "A2": 0.01, MIXED: 0.05}  # over RLOO as noisy
NAMES = {"RLOO": "none advantage=rloo", "A1": "exact_turns", "A2": "exact_turns luck=false",
         MIXED: "exact_turns luck=false mix=0.74"}  # in noise.md


@pytest.fixture
def room(tmp_path):
    """A room in which RLOO's area rises by 4 points whenever its noise is halved; an eleventh seed has no arm but that,
    and learned nothing."""
    rows = [[label, f"{1 / QUIET[arm]:.9f}"] for arm, label in NAMES.items()]
    (tmp_path / "noise.md").write_text(str(Table("Noise of a step", "", ["arm", "all"], rows)))
    room, rows = ROOM._replace(folder=tmp_path, seeds=range(11)), []
    for e in room.runs()[:102]:
        lead = 0.04 * np.log2(QUIET.get(e.arm, 1)) + LEAD.get(e.arm, 0) + 1e-3 * (e.seed % 2)
        area = 0.0 if e.seed == 10 else 0.4 + lead
        rows.append({"run": e.folder.name, "version": 1, "arm": e.arm, "area": area, "end": area,
                     "curve": f"0:0.3 100:{area}", "spent": "0:0 100:25"})
    arms.write_rows(rows, tmp_path / "runs.csv")
    return room


def test_contrasts(room):
    """Guards against a line read at the wrong noise, a contrast of the wrong sign, and a seed that lacks arms."""
    run.write_tables(room)
    table = {cells[1].strip(): cells[2].split()[0] for line in (room.folder / "tables.md").read_text().splitlines()
             if len(cells := line.split("|")) == 5}
    assert table["A1 - RLOO"] == "5.3" and table["A2 - GRPO"] == "17.7"  # 3 + 4 log2(1.5), 1 + 4 log2(18)
    assert table["A1 - RLOO as noisy"] == "3.0" and table["A2 - RLOO as noisy"] == "1.0"
    assert table["A2 as noisy as A1 - A1"] == "2.0"


def test_the_line_is_linear_in_the_logarithm_and_ends():
    """Guards against a line by signal itself, weights of other arms, extrapolation, and an order that noise changed."""
    line = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert run.on_line(2**1.25, line) == pytest.approx([0, 0.75, 0.25, 0, 0])
    assert run.on_line(99.0, line) == pytest.approx([0, 0, 0, 0, 1])
    assert run.on_line(0.5, line) == pytest.approx([1, 0, 0, 0, 0])
    assert run.on_line(2**1.5, [1.0, 4.0, 2.0, 8.0, 16.0]) == pytest.approx([0, 0.5, 0.5, 0, 0])


def test_what_is_above_the_line_and_its_interval_by_hand():
    """Guards against an interval without the line's own error, and another share of it: halfway by logarithm between
    two arms of the line the weights are 1, 1/2 and 1/2."""
    around = np.linspace(-1, 1, 5) * 0.01
    groups = {arm: Group("", {i: {"area": mean + x} for i, x in enumerate(around)})
              for arm, mean in zip((*LINE, "A1"), (0.1, 0.2, 0.3, 0.4, 0.28))}
    places = {arm: Estimate(x) for arm, x in zip((*LINE, "A1"), (1.0, 2.0, 4.0, 8.0, 2**1.5))}
    found = run.above_line(groups, places, "A1")
    v = np.var(around, ddof=1) / 5 * np.array([1, 1 / 4, 1 / 4])
    beyond = np.quantile(np.abs(np.random.default_rng(0).standard_t(v.sum() ** 2 / (v**2 / 4).sum(), 400_000)), 0.95)
    assert found.value == pytest.approx(0.28 - 0.25)
    assert found.high - found.value == pytest.approx(beyond * v.sum() ** 0.5, rel=0.01)
    assert run.above_line(groups, places, "A1", 4.0).value == pytest.approx(0.28 - 0.3)


def test_one_over_the_noise_turns_its_interval_around(tmp_path):
    """Guards against the noise itself, ends that are left where they were, and games that count as responses."""
    (tmp_path / "noise.md").write_text(str(Table("Noise of a step", "", ["arm", "all"], [
        ["none advantage=rloo", "1.000"], ["exact_turns luck=false", "0.500 (0.400 to 0.800)"]])))
    found = run.read_noise(tmp_path / "noise.md")
    assert found["A2"] == pytest.approx((2.0, 1.25, 2.5, np.nan), nan_ok=True) and found["RLOO"].value == 1
    assert found[LINE[3]].value == 18 and "A1" not in found


def test_the_noise_of_a_step_by_its_moments():
    """Guards against signal in the noise, a step of one game, and noise that is not per response."""
    rng, mean, spread = np.random.default_rng(0), 3.0, np.linspace(5, 9, 30)
    found = []
    for _ in range(40):
        g = mean + spread * rng.normal(size=(60, 30))  # 60 games of 8 responses
        found.append(noise.noise(g @ g.T, 12, 8))
    expected = 12 * spread @ spread / (12 * 8) ** 2
    assert np.mean([e.value for e in found]) == pytest.approx(expected, rel=0.03)
    assert 0.8 < np.mean([e.low < expected < e.high for e in found])


def test_the_geometric_mean_by_hand():
    """Guards against an arithmetic mean, and errors that add up instead of averaging out."""
    found = noise.combined([Estimate(1.0, 0.9, 1.1), Estimate(4.0, 3.6, 4.4)])
    assert found.value == pytest.approx(2) and found.high / found.value == pytest.approx(np.exp(0.1 / 2**0.5))


def test_gradients_are_of_texts_with_their_replies():
    """Against log-probs of each token from its whole context. Guards against a reply that is not read."""
    s = Settings(task="guess", max_new_tokens=24, questions=1, answers=3)
    policy = start.load_policy(s)
    batch = rollout(policy, policy.task.load("train", 1), s, 1)
    batch.ask = Queries(policy, batch, s, 1)
    assert any(batch.before)
    credit = torch.arange(1.0, 1 + batch.mask.numel()).view_as(batch.mask)[None] * batch.mask  # (1, 3, T)
    (found,), total = next(credit_gradients(batch, credit, 3)), 0
    for i, t in batch.mask.nonzero().tolist():
        text = context(policy, batch.puzzles[0], batch.tokens[i, :t].tolist())
        logprob = policy.model(torch.tensor([text]))[0, -1, : policy.model.real_vocab].log_softmax(-1)  # (V,)
        total = total + credit[0, i, t] * logprob[batch.tokens[i, t]]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(policy.model.parameters()))])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_noise_is_of_the_credit_that_is_trained_with(monkeypatch):
    """Guards against another row of `credits_of` in a mix."""
    monkeypatch.setattr(guess_task, "GUESSES", 2)
    monkeypatch.setattr(noise, "GAMES", 4)
    s = Settings(task="guess", max_new_tokens=24, answers=8)
    batch, (_, *exact, uniform) = noise.credits(start.load_policy(s), s)
    for luck, own in zip((True, False), exact):
        mixed = credit.exact_turns(batch, luck, 0.3) * batch.mask
        torch.testing.assert_close(mixed, (0.7 * own + 0.3 * uniform).double())


def test_success_is_that_of_the_start_and_of_each_checkpoint(monkeypatch, tmp_path):
    """Guards against a checkpoint under another step, and the last one taken from the folder of the others."""
    monkeypatch.setattr(run, "read_config", lambda _: {"settings": {"steps": 30, "model": "start"}})
    monkeypatch.setattr(run, "load_policy", lambda s: s.model)
    models = {"start": 0.1, f"{tmp_path}/checkpoints/step-000010": 0.2, f"{tmp_path}/checkpoints/step-000020": 0.3,
              f"{tmp_path}/checkpoint": 0.4}
    monkeypatch.setattr(run, "grow", lambda model: SimpleNamespace(V=[np.array([models[model]])]))
    assert run.exact_success(tmp_path) == {0: 0.1, 10: 0.2, 20: 0.3, 30: 0.4}


def test_the_row_of_a_run(monkeypatch):
    """Area by hand: half of 0.2 + 0.4, then half of 0.4 + 0.5. A token costs 1, 1 and 3; step 0 has none."""
    e, step = arms.Experiment(ROOM._replace(measure=lambda _: {0: 0.2, 10: 0.4, 20: 0.5}), MIXED, 4), np.ones(20)
    monkeypatch.setattr(arms, "read_config", lambda _: {"command": e.command})
    monkeypatch.setattr(arms, "read_metrics", lambda _: {name: np.append(np.nan, x * step) for name, x in (
        ("tokens_sampled", 10), ("tokens_read", 20), ("tokens_updated", 2), ("seconds", 1))})
    row = arms.make_row(e)
    assert (row["arm"], row["start"], row["end"]) == (MIXED, "0.2", "0.5")
    assert float(row["area"]) == pytest.approx(0.375) and row["tokens_read"] == "400"
    assert row["spent"] == "0:0 10:360 20:720" and row["curve"].endswith(" 20:0.500000")


def test_sums_over_turns():
    truth = {"response": np.array([0, 0, 0, 1, 1], np.uint16), "turn": np.array([0, 0, 1, 0, 1], np.uint16),
             "group": np.array([0, 0, 0, 5, 5])}
    assert checks.by_turn(np.array([1.0, 2, 4, 8, 16]), truth).tolist() == [3, 4, 8, 16]
    assert checks.columns_of(truth, True)["group"].tolist() == [0, 0, 5, 5]


def test_commands_are_accepted():
    """Guards against a flag that train.py does not know; `exact_turns` is registered for this test alone."""
    try:
        credit.token_credit(credit.exact_turns)
        for e in ROOM._replace(seeds=(3,)).runs():
            settings, method, *_ = start.parse_flags(shlex.split(e.command)[3:])
            assert settings.seed == 3 and settings.task == "guess" and settings.answers == 8
            assert method.get("luck", True) == (e.arm not in ("A2", MIXED))
    finally:
        MITIGATIONS.pop("exact_turns")


def test_the_published_rows_are_of_these_arms():
    """Guards against a row that no command here makes."""
    known, rows = {e.folder.name: e.command for e in ROOM.runs()}, ROOM.rows()
    assert rows and all(known[name] == row["command"] for name, row in rows.items())
