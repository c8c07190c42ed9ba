"""Gradients of single tokens against plain autograd, tables by hand, the command."""
import json
import math
import re
import sys

import numpy as np
import pytest
import torch

import countdown_task
import train
from countdown_task import Puzzle
from lab import statistics
from lab.estimates import cell, read_cell, read_table
from lab.gradients import measure as gradients
from lab.gradients import noise as gradient_noise
from lab.gradients import rank as gradient_rank
from lab.gradients import ratio, size
from lab.gradients.test_ratio import Small
from lab.statistics import ranks
from lab.truth import critic as critic_quality
from lab.truth.solver import KINDS
from methods import MITIGATIONS
from plumbing.report import interval, t_statistics
from plumbing.run_folder import copy_tokenizer
from qwen2_model import save_model
from rollout import Policy
from tasks.text import FILLER, REASONING, STRUCTURE
from tests.fixtures import BUNDLED, FakeQueries, make_batch
from tests.plain import flat_gradient, plain_logprobs

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7, 9), 30)]  # prompts of unequal length


def test_a_token_s_gradients_are_plain_autograd_s(random_model, policy, exact):
    """Guards against another token's log-prob, tokens that do not exist, the embedding of the token itself, gradients
    that add up over tokens, and a hook that stays."""
    random_model.real_vocab = 700
    embedding, prompt = random_model.model["embed_tokens"], policy.prompt(ASKED[0])
    tokens, every = torch.tensor([5, 17, 333, 5, 690]), torch.ones(1, 5, dtype=torch.bool)
    whole, before, phase1 = size.token_gradients(random_model, prompt, tokens, [0, 2, 4])
    assert not embedding._forward_hooks

    def logprobs(nudge):
        """log pi (L,) when `nudge` is added to the input embeddings of the row."""
        hook = embedding.register_forward_hook(lambda module, args, out: out + nudge)
        logprob = plain_logprobs(random_model, [prompt], tokens[None], every)[0]
        hook.remove()
        return logprob

    norms = [flat_gradient(random_model, logprobs(0)[t]).norm().item() for t in (0, 2, 4)]
    assert whole == pytest.approx(norms)
    J = torch.autograd.functional.jacobian(logprobs, torch.zeros(len(prompt) + 5, random_model.config.hidden_size))
    J = J[:, len(prompt) :]  # (L, L, D): how log pi of token t changes with the embedding of token u
    assert before == pytest.approx([math.nan, J[2, 1].norm().item(), J[4, 3].norm().item()], nan_ok=True)
    assert phase1 == pytest.approx(J.sum(0).norm(dim=1).numpy())


def test_each_number_stands_on_its_token(policy, monkeypatch):
    """Guards against numbers that slip by a token or into the next response, and another puzzle's prompt."""
    lengths = [3, 4, 25, 8]
    batch = make_batch(lengths, [1.0] * 4, [0, 0, 1, 1], puzzles=ASKED)
    batch.tokens = torch.arange(100).view(4, 25) * batch.mask
    batch.ask = FakeQueries(policy=policy, prompts=[policy.prompt(puzzle) for puzzle in ASKED])

    def labelled(model, prompt, tokens, chosen):
        """Numbers that say which prompt and token they belong to."""
        each = np.array([10 * int(tokens[t]) + len(prompt) / 1000 for t in chosen])
        return each, each + 1, tokens.numpy() * 10 + 2.0

    monkeypatch.setattr(size, "token_gradients", labelled)
    monkeypatch.setattr(size, "EACH", 5)
    prompts = np.array([len(policy.prompt(p)) / 1000 for p in ASKED])
    c = size.token_columns(batch, 0)
    measured, expected = np.isfinite(c["whole"]), 10 * c["token"] + prompts[c["group"]]
    assert measured.sum() == 5 * 4  # five for each response on average
    assert c["whole"][measured] == pytest.approx(expected[measured])
    later = np.flatnonzero(measured & (c["position"] > 0))
    assert np.flatnonzero(np.isfinite(c["before"])).tolist() == (later - 1).tolist()
    assert c["before"][later - 1] == pytest.approx(expected[later] + 1)
    last = np.cumsum(lengths) - 1
    assert np.isnan(c["phase1"][last]).all()  # there is no loss behind the last token
    assert np.delete(c["phase1"], last) == pytest.approx(np.delete(10 * c["token"] + 2, last))
    assert c["relative"] == pytest.approx(np.concatenate([np.arange(n) / n for n in lengths]))


def test_ratios_by_hand():
    """Guards against weights of the wrong type, tokens outside `use`, and tenths in which a type is missing.

    The bootstrap over two puzzles draws one of them alone half of the time: its interval goes from one to the other.
    """
    tokens = [(1000, 0, 0.05, FILLER), (1000, 0, 0.05, STRUCTURE)]  # the first is not used
    for puzzle, place, filler, reasoning in ((0, 0.05, [1, 3], [2]), (0, 0.5, [10], [4, 6, 8]), (0, 0.95, [100], []),
                                             (1, 0.09, [2, 6], [2]), (1, 0.59, [5], [3, 3, 3])):
        tokens += [(x, puzzle, place, FILLER) for x in filler] + [(x, puzzle, place, REASONING) for x in reasoning]
    x, group, relative, role = map(np.array, zip(*tokens))
    over, under = ((np.arange(len(x)) > 0) & (role == r) for r in (FILLER, REASONING))
    plain = (127 / 7) / (31 / 8), (13 / 3) / (11 / 4), (114 / 4) / (20 / 4)  # both puzzles; the lower; the higher
    assert size.mean_ratio(x, over, under, group)[:3] == pytest.approx(plain)
    matched = (2 * 3 + 6 * 7.5) / 31, (1 * 2 + 3 * 10) / 20, (1 * 4 + 3 * 5) / 11  # 2 reasoning tokens early, 6 late
    assert size.mean_ratio(x, over, under, group, (relative * 10).astype(int))[:3] == pytest.approx(matched)


def made_columns():
    """Columns of made-up tokens of 5 puzzles, 16 responses to each; one in five responses has no advantage."""
    rng, B, L = np.random.default_rng(3), 80, 20
    N = B * L
    c = {"response": np.repeat(np.arange(B), L), "position": np.tile(np.arange(L), B)}
    c |= {"group": c["response"] // 16, "relative": c["position"] / L, "role": rng.choice(3, N, p=(0.4, 0.4, 0.2)),
          "kind": rng.integers(0, len(KINDS), N), "logprob": -rng.exponential(size=N),
          "logit_grad": rng.uniform(0, 1.4, N), "phase1": rng.lognormal(size=N) * (L - c["position"]),
          "advantage": np.where(np.arange(B) % 5, rng.normal(size=B), 0.0)[c["response"]]}
    spread = np.where(c["position"] % 2, 4.0, 0.5)  # so that some t-statistics exceed 3, and some do not
    c["whole"] = np.where(rng.random(N) < 0.4, rng.lognormal(size=N), np.nan)
    c["before"] = np.where(rng.random(N) < 0.4, np.exp(spread * rng.normal(size=N)) * (1 + c["role"]), np.nan)
    return c


def test_the_tables_of_tokens_by_hand():
    """Guards against responses without advantage or tokens without an exact gradient, columns in each other's place,
    and ranks over all tokens where they should be within responses."""
    c = made_columns()
    use, A = np.isfinite(c["whole"]) & (c["advantage"] != 0), np.abs(c["advantage"])
    sizes = [A * -c["logprob"], A * c["logit_grad"], A * c["whole"]]
    within = np.zeros((3, len(A)))
    for r in np.unique(c["response"][use]):
        inside = use & (c["response"] == r)
        for x, out in zip(sizes, within):
            out[inside] = (ranks(x[inside]) - ranks(x[inside]).mean()) / inside.sum()
    correlations, types = size.tables_tokens(c)
    for row, (a, b) in zip(correlations.rows, ((0, 1), (0, 2), (1, 2)), strict=True):
        assert row[:2] == [size.MEASURES[a], size.MEASURES[b]]
        by_rank = np.corrcoef(ranks(sizes[a][use]), ranks(sizes[b][use]))[0, 1]
        by_rank_within = np.corrcoef(within[a][use], within[b][use])[0, 1]
        assert [float(text.split()[0]) for text in row[2:]] == pytest.approx([by_rank, by_rank_within], abs=6e-4)
    opening, operand, operator = (use & (c["kind"] == KINDS.index(kind)) for kind in ("opening", "operand", "operator"))
    for i, (name, x) in enumerate(zip(size.MEASURES, sizes)):
        decides = size.mean_ratio(x, opening, operand | operator, c["group"])
        assert types.rows[i] == [name, *filler_to_reasoning(x, c, use), cell(decides)]
    assert f"{use.sum():,} tokens" in types.note


def filler_to_reasoning(x, c, use):
    """The cells of the ratio of both types, plain and matched for the tenth of the response."""
    over, under, tenth = use & (c["role"] == FILLER), use & (c["role"] == REASONING), (c["relative"] * 10).astype(int)
    return [cell(size.mean_ratio(x, over, under, c["group"])), cell(size.mean_ratio(x, over, under, c["group"], tenth))]


def test_phase_1_by_hand():
    """Guards against fifths, types, shares or t-statistics of another row, and tokens that were not measured."""
    assert size.explained(np.array([1.0, 3, 5, 7]), np.array([0, 0, 2, 2])) == 4 / 5  # of a variance of 5
    c = made_columns()
    for row, name in zip(size.table_phase1(c).rows, ("phase1", "before"), strict=True):
        x, use = c[name], np.isfinite(c[name])
        fifth, tenth, role = c["relative"] * 5 // 1, (c["relative"] * 10).astype(int)[use], c["role"][use]
        early = size.mean_ratio(x, use & (fifth == 0), use & (fifth == 4), c["group"])
        assert row[1:4] == [cell(early), *filler_to_reasoning(x, c, use)]
        place, both = (size.explained(np.log(x[use]), label) for label in (tenth, tenth * 3 + role))
        above = (t_statistics(x[use], c["position"][use]) > 3).mean()
        assert row[4:] == [f"{share:.0%}" for share in (place, both - place, above)]


@pytest.mark.parametrize("values, hoyer, gini", [
    ([2, -2, 2, 2], 0, 0),
    ([0, 0, 5, 0], 1, 3 / 4),
    ([3, 0, -4, 0], 2 - 7 / 5, (4 * 3 + 4 * 4 + 2 * 1) / 4**2 / (2 * 7 / 4))])  # Gini: all differences, twice
def test_sparsity_by_hand(values, hoyer, gini):
    """Guards against a Gini coefficient of values not sorted or with sign, and against Hoyer's of squares."""
    assert gradients.sparsity(np.array(values)) == pytest.approx((hoyer, gini), abs=1e-9)


@pytest.fixture
def brief(monkeypatch):
    """Everything that takes long made small, and rewards that responses of 12 tokens can earn."""
    def some_rewards(text, puzzle):
        answer = float(sum(map(ord, text)) % 3 == 0)
        return {"reward": answer + 0.05 * (len(text) % 3), "answer": answer, "format": 0.5 * (len(text) % 3)}

    for name, value in {"SIZES": (2, 4), "CONTROLS_AT": 4, "LIMIT": 12, "EACH": 2, "SIZE": 4}.items():
        for module in (gradients, gradient_noise, gradient_rank, size, critic_quality):
            monkeypatch.setattr(module, name, value, raising=False)
    for name, value in {"METHODS": ("none",), "UPDATES": 2, "WARM_UP": 1, "BATCHES": 2, "Settings": Small}.items():
        monkeypatch.setattr(ratio, name, value)
    monkeypatch.setattr(statistics, "RESAMPLES", 40)
    monkeypatch.setattr(gradient_noise, "METHODS", {name: MITIGATIONS[name] for name in ("none", "ppo")})
    monkeypatch.setattr(countdown_task, "grade", some_rewards)


@pytest.fixture
def tiny(random_model, tokenizer, tmp_path, monkeypatch):
    """A model of two layers and random weights, whose responses end anywhere; its folder; a run with it as step 5."""
    folder, run, model = tmp_path / "tiny", tmp_path / "run", random_model.float()
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(0.5)
    for place in (folder, run / "checkpoints" / "step-000005"):
        copy_tokenizer(BUNDLED, place)
        save_model(model, place)
    settings = {"mitigation": "none", "seed": 0, "steps": 5, "model": str(folder)}
    (run / "config.json").write_text(json.dumps({"settings": settings, "method": {}}))
    monkeypatch.setattr(tokenizer, "end_tokens", list(range(0, tokenizer.size, 8)))
    monkeypatch.setattr(train, "Tokenizer", lambda folder: tokenizer)
    return model, folder, run


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_over_training_by_hand(tokenizer, brief, tiny, monkeypatch):
    """Guards against other puzzles or random numbers at each checkpoint, a gradient of the whole batch where it is a
    puzzle's, and a traceback for a run that collapsed, whose groups are all alike."""
    model, _, run = tiny
    puzzles = gradients.generate_puzzles(3, "train", seed=7)
    table = gradients.table_training(run, puzzles, 4, 0)
    assert [row[0] for row in table.rows] == ["0", "5"]
    assert table.rows[0][1:] == table.rows[1][1:]
    policy = Policy(model, tokenizer, countdown_task)
    batch = gradient_rank.by_success(gradients.sample(policy, puzzles, 4, (0, 0)))
    prompts = [policy.prompt(puzzles[g]) for g in batch.group.tolist()]
    logprob = plain_logprobs(model, prompts, batch.tokens, batch.mask)
    each = torch.stack([flat_gradient(model, total) for total in (batch.advantage[:, None] * logprob).sum(1)])
    groups = [g.numpy() for g in each.view(3, 4, -1) if g.any()]
    assert len(groups) >= 2
    row = dict(zip(table.header, table.rows[0]))
    assert row["success"] == f"{batch.success.mean():.2f}"
    for name, values in zip(("Hoyer", "Gini"), zip(*(gradients.sparsity(g.sum(0)) for g in groups))):
        assert [float(v) for v in row[name].split(" ± ")] == pytest.approx(interval(values), abs=2e-3)
    monkeypatch.setattr(countdown_task, "grade", lambda *_: {"reward": 0.0, "answer": 0.0, "format": 0.0})
    assert gradients.table_training(run, puzzles, 4, 0).rows == [["0", "0.00", "", ""], ["5", "0.00", "", ""]]


def test_the_whole_command(brief, tiny, figures, monkeypatch, tmp_path):
    """Guards against a table that is not written or is drawn otherwise, batches that share puzzles or random numbers,
    and a second call that gives other numbers."""
    calls, texts, sample = [], [], gradients.sample

    def recorded(policy, puzzles, answers, key):
        calls.append((key, puzzles))
        return sample(policy, puzzles, answers, key)

    monkeypatch.setattr(gradients, "sample", recorded)
    _, folder, run = tiny
    monkeypatch.setattr(sys, "argv", f"gradients.py --model {folder} --questions 4 --batches 4 --critic_batches 1 "
                        f"--seed 2 --run {run} --out {tmp_path / 'out'}".split())
    for _ in range(2):
        gradients.main()
        texts.append((tmp_path / "out" / "tables.md").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert len(re.findall(r"^## ", texts[0], re.M)) == 11
    assert not re.search(r"\b(nan|inf)\b", texts[0])
    assert [key for key, _ in calls[:8]] == [(2, 0), *((2, 1000 + i) for i in range(4)), (2, 1), (2, 0), (2, 0)]
    assert len({puzzle for _, puzzles in calls[1:5] for puzzle in puzzles}) == 4 * 6
    _, ranked = read_table(tmp_path / "out" / "tables.md", "Effective rank by group size")
    ranked = {name: [read_cell(text).value for text in row] for name, *row, _ in ranked}
    for name, bars in zip(gradient_rank.SHOWN, figures[-2].axes[0].containers, strict=True):
        assert bars.lines[0].get_ydata() == pytest.approx(ranked[name])


def test_a_model_that_solves_nothing_is_refused_in_one_sentence(refusal, monkeypatch, tmp_path):
    """Guards against a traceback where no group has a gradient."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gradients, "find_heads", lambda *_: {})
    monkeypatch.setattr(gradients, "sample", lambda *_, **__: make_batch([1] * 64, [0.0] * 64, [0] * 64))
    assert "--model that solves some" in refusal(gradients, "--questions", 4, "--out", "out")
