"""The contrasts of designs.md, on made-up rows."""
import csv
import shlex

import numpy as np
import pytest
import torch

import start
from lab.turns import checks, credit, noise, run
from lab.turns.run import ARMS, LINE, MIXED, RLOO, SEEDS, WITH, WITHOUT, Experiment
from lab.updates import credit_gradients
from methods import MITIGATIONS
from plumbing.report import Table
from queries import Queries
from rollout import rollout
from settings import Settings
from tasks import guess_task
from tests.fixtures import check_texts
from turns import context

QUIET = {RLOO: 1.0, LINE[1]: 2.0, LINE[2]: 6.0, LINE[3]: 18.0, WITH: 1.5, WITHOUT: 18.0, MIXED: 1.5}
LEAD = {WITH: 0.03, WITHOUT: 0.01, MIXED: 0.05}  # over RLOO as noisy


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Files of results in which RLOO's area rises by 4 points whenever its noise is halved; an eleventh seed has no arm
    but that, and learned nothing."""
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "runs.csv")
    noise = [[name, f"{1 / x:.9f}"] for name, x in QUIET.items() if name not in LINE[1:]]
    (tmp_path / "noise.md").write_text(str(Table("Noise of a step", "", ["arm", "all"], noise)))
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow("run version part level method setting seed command steps area end tokens_sampled tokens_read "
                     "tokens_updated seconds curve spent".split())
        for e in [*(Experiment(label, seed) for seed in SEEDS for label in ARMS), Experiment(RLOO, 10)]:
            area = 0.0 if e.seed == 10 else 0.4 + 0.04 * np.log2(QUIET.get(e.label, 1)) + LEAD.get(e.label, 0) + 1e-3 * (e.seed % 2)
            method, _, setting = e.label.partition(" ")
            out.writerow([e.name, 1, "turns", "guess", method, setting, e.seed, "", 100, area, area, 5, 5, 5, 60,
                          f"0:0.3 100:{area}", "0:0 100:25"])


def test_contrasts_and_picture(rows, tmp_path, figures):
    """Guards against a line read at the wrong noise, a contrast of the wrong sign, a seed that lacks arms, and
    unreadable texts."""
    run.write_tables()
    table = {cells[1].strip(): cells[2].split()[0] for line in (tmp_path / "tables.md").read_text().splitlines()
             if len(cells := line.split("|")) == 5}
    assert table["A1 - RLOO"] == "5.3" and table["A2 - GRPO"] == "17.7"  # 3 + 4 log2(1.5), 1 + 4 log2(18)
    assert table["A1 - RLOO as noisy"] == "3.0" and table["A2 - RLOO as noisy"] == "1.0"
    assert table["A2 as noisy as A1 - A1"] == "2.0"
    check_texts(figures[0])


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


def test_the_row_of_a_run(monkeypatch):
    """Area by hand: half of 0.2 + 0.4, then half of 0.4 + 0.5. A token costs 1, 1 and 3; step 0 has none."""
    monkeypatch.setattr(run, "exact_success", lambda _: {0: 0.2, 10: 0.4, 20: 0.5})
    step = np.append(np.nan, np.ones(20))
    monkeypatch.setattr(run, "read_metrics", lambda _: {
        "tokens_sampled": 10 * step, "tokens_read": 20 * step, "tokens_updated": 2 * step, "seconds": step})
    row = run.make_row(Experiment(MIXED, 4))
    assert (row["method"], row["setting"]) == ("exact_turns", "luck=false mix=0.74")
    assert (row["start"], row["end"]) == ("0.2", "0.5")
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
        for label in ARMS:
            settings, method, *_ = start.parse_flags(shlex.split(Experiment(label, 3).command)[3:])
            assert settings.seed == 3 and settings.task == "guess" and (settings.answers == 8 or "answers" in label)
            assert method.get("luck", True) == ("luck" not in label)
    finally:
        MITIGATIONS.pop("exact_turns")
