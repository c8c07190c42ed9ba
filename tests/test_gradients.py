"""Gradients of single tokens against finite differences and plain autograd, tables by hand, checkpoints, the command.

Run it:  python -m pytest tests/test_gradients.py
"""

import itertools
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import BUNDLED, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plain import plain_logprobs

import grpo
from plumbing.report import interval
from plumbing.run_folder import copy_tokenizer
import train
from countdown_task import Puzzle
from experiments import critic_quality, gradient_noise, gradient_rank, gradients, truth_scores
from experiments.ground_truth import PACKET, packets_wanted
from experiments.solver import KINDS
from mitigations import MITIGATIONS
from qwen2_model import save_model

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7, 9), 30)]  # prompts of unequal length
FILLER, REASONING, STRUCTURE = range(3)


def flat_gradient(model, total):
    """d total / d all parameters (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()), retain_graph=True)])


def number(text):
    """The figure at the beginning of a table's cell."""
    return float(re.match(r"-?[\d.]+", text)[0])


def rank(x):
    """Ranks from 1 by counting, ties sharing their mean."""
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


# ------------------------------------------------------------------------------------------ a token's gradient


def jacobian_by_differences(model, prompt, tokens, step=1e-5):
    """(L, L, D): how log pi of token t changes with the input embedding of token u, by central differences."""
    L, D, P = len(tokens), model.config.hidden_size, len(prompt)
    nudge = torch.zeros(2, L, D, P + L, D)
    for sign, u, d in itertools.product((0, 1), range(L), range(D)):
        nudge[sign, u, d, P + u, d] = (step, -step)[sign]
    hook = model.model["embed_tokens"].register_forward_hook(lambda module, args, out: out + nudge.flatten(0, 2))
    row = torch.cat((torch.tensor(prompt), tokens)).expand(2 * L * D, -1)
    with torch.no_grad():
        logits = model(row)[:, P - 1 : -1, : model.real_vocab]
    hook.remove()
    up, down = logits.log_softmax(-1).gather(-1, row[:, P:, None])[..., 0].view(2, L, D, L)
    return ((up - down) / (2 * step)).permute(2, 0, 1)


def test_a_token_s_gradients_are_autograd_s_and_finite_differences(random_model, codec, exact):
    """Guards against another token's log-prob, tokens that do not exist, the embedding of the token itself, gradients
    that add up over tokens, and a hook that stays."""
    random_model.real_vocab = 700
    prompt, tokens = codec.prompt(ASKED[0]), torch.tensor([5, 17, 333, 5, 690])
    whole, before, phase1 = gradients.token_gradients(random_model, prompt, tokens, [0, 2, 4])
    for t, found in zip((0, 2, 4), whole, strict=True):
        alone = plain_logprobs(random_model, [prompt], tokens[None], (torch.arange(5) == t)[None]).sum()
        assert found == pytest.approx(flat_gradient(random_model, alone).norm().item())
    J = jacobian_by_differences(random_model, prompt, tokens)
    assert math.isnan(before[0])
    assert before[1:] == pytest.approx([J[t, t - 1].norm().item() for t in (2, 4)], rel=1e-5)
    assert phase1 == pytest.approx(J.sum(0).norm(dim=1).numpy(), rel=1e-5)
    assert not random_model.model["embed_tokens"]._forward_hooks


def test_each_number_stands_on_its_token(codec, monkeypatch):
    """Guards against numbers that slip by a token or into the next response, another puzzle's prompt, and tokens of
    short responses that are measured more often than those of long ones."""
    lengths, counts = [3, 4, 25, 8], np.zeros(40)
    puzzles = dict(numbers=[p.numbers for p in ASKED], target=[p.target for p in ASKED])
    batch = make_batch(lengths, [1.0] * 4, [0, 0, 1, 1], **puzzles)
    batch.tokens = torch.arange(100).view(4, 25) * batch.mask

    def labelled(model, prompt, tokens, chosen):
        """Numbers that say which prompt and token they belong to."""
        each = np.array([10 * int(tokens[t]) + len(prompt) / 1000 for t in chosen])
        return each, each + 1, tokens.numpy() * 10 + 2.0

    monkeypatch.setattr(gradients, "token_gradients", labelled)
    monkeypatch.setattr(gradients, "EACH", 2)
    prompts = [len(codec.prompt(p)) / 1000 for p in ASKED]
    for seed in range(200):
        c = gradients.token_columns(None, codec, ASKED, batch, seed)
        measured = np.isfinite(c["whole"])
        counts += measured
        expected = 10 * c["token"] + np.array(prompts)[c["group"]]
        assert c["whole"][measured] == pytest.approx(expected[measured])
        later = np.flatnonzero(measured & (c["position"] > 0))
        assert np.flatnonzero(np.isfinite(c["before"])).tolist() == (later - 1).tolist()
        assert c["before"][later - 1] == pytest.approx(expected[later] + 1)
    assert counts.sum() == 200 * 2 * 4  # two for each response on average
    assert 18 < counts.min() and counts.max() < 70  # 40 expected of each token
    last = np.cumsum(lengths) - 1
    assert np.isnan(c["phase1"][last]).all()  # there is no loss behind the last token
    assert np.delete(c["phase1"], last) == pytest.approx(np.delete(10 * c["token"] + 2, last))
    assert c["relative"] == pytest.approx(np.concatenate([np.arange(n) / n for n in lengths]))


def made_columns(rng, puzzles=5, answers=4, length=30):
    """Columns of made-up tokens; one in five responses has no advantage."""
    B, N = puzzles * answers, puzzles * answers * length
    c = {"response": np.repeat(np.arange(B), length).astype(np.uint16), "position": np.tile(np.arange(length), B)}
    c["group"] = (c["response"] // answers).astype(np.uint16)
    c["relative"] = c["position"] / length
    c["role"] = rng.choice(3, N, p=(0.4, 0.4, 0.2)).astype(np.int8)
    c["kind"] = rng.integers(0, len(KINDS), N).astype(np.int8)
    c["advantage"] = np.where(np.arange(B) % 5, rng.normal(size=B), 0.0)[c["response"]].astype(np.float32)
    c["logprob"] = -rng.exponential(size=N).astype(np.float32)
    c["logit_grad"] = rng.uniform(0, 1.4, N).astype(np.float32)
    c["whole"] = np.where(rng.random(N) < 0.4, rng.lognormal(size=N), np.nan)
    spread = np.where(c["position"] % 2, 4.0, 0.5)  # so that some t-statistics exceed 3, and some do not
    c["before"] = np.where(rng.random(N) < 0.4, np.exp(spread * rng.normal(size=N)) * (1 + c["role"]), np.nan)
    c["phase1"] = rng.lognormal(size=N) * (length - c["position"])
    return c


def ratio_by_loops(x, c, use, matched, puzzles):
    """Filler over reasoning, of the tokens of these puzzles, each as often as it is named."""
    tokens = [i for q in puzzles for i in np.flatnonzero(c["group"] == q) if use[i]]
    total = {FILLER: 0.0, REASONING: 0.0}
    for tenth in range(10) if matched else [None]:
        inside = [i for i in tokens if tenth in (None, int(c["relative"][i] * 10))]
        values = {role: [x[i] for i in inside if c["role"][i] == role] for role in total}
        if all(values.values()):
            for role in total:
                total[role] += len(values[REASONING]) * np.mean(values[role])
    return total[FILLER] / total[REASONING] if total[REASONING] else np.nan


@pytest.mark.parametrize("matched", [False, True])
def test_type_ratio_is_what_loops_find(matched, monkeypatch):
    """Guards against weights of the wrong type, tokens outside `use`, and tenths in which a type is missing."""
    monkeypatch.setattr(truth_scores, "RESAMPLES", 40)
    rng = np.random.default_rng(1)
    c = made_columns(rng, puzzles=4, answers=2, length=25)
    c["role"][(c["relative"] < 0.2) & (c["role"] == REASONING)] = STRUCTURE  # no reasoning there
    use = rng.random(len(c["role"])) < 0.6
    x = np.where(use, rng.lognormal(size=len(use)) * (1 + c["group"]), np.nan)
    draws = [ratio_by_loops(x, c, use, matched, np.repeat(range(4), n)) for n in truth_scores.resampled(4)]
    expected = ratio_by_loops(x, c, use, matched, range(4)), *np.percentile(draws, (2.5, 97.5))
    assert list(gradients.type_ratio(x, c, use, matched)) == pytest.approx(expected)


def test_the_tables_of_tokens_by_hand():
    """Guards against responses without advantage or tokens without an exact gradient, columns in each other's place,
    and ranks over all tokens where they should be within responses."""
    c = made_columns(np.random.default_rng(3))
    use = np.isfinite(c["whole"]) & (c["advantage"] != 0)
    A, role, kind, response = np.abs(c["advantage"])[use], c["role"][use], c["kind"][use], c["response"][use]
    sizes = [A * -c["logprob"][use], A * c["logit_grad"][use], A * c["whole"][use]]
    correlations, types, kinds = gradients.tables_tokens(c)
    within = [np.zeros(use.sum()) for _ in sizes]
    for r, (x, out) in itertools.product(np.unique(response), zip(sizes, within)):
        out[response == r] = (rank(x[response == r]) - rank(x[response == r]).mean()) / (response == r).sum()
    for row, (a, b) in zip(correlations.rows, ((0, 1), (0, 2), (1, 2)), strict=True):
        assert row[:2] == [gradients.MEASURES[a], gradients.MEASURES[b]]
        assert number(row[2]) == pytest.approx(np.corrcoef(rank(sizes[a]), rank(sizes[b]))[0, 1], abs=6e-4)
        assert number(row[3]) == pytest.approx(np.corrcoef(within[a], within[b])[0, 1], abs=6e-4)
    decides = np.isin(kind, [KINDS.index("operand"), KINDS.index("operator")])
    for name, x, (label, plain, matched, opening), row in zip(gradients.MEASURES, sizes, types.rows, kinds.rows):
        assert name == label == row[0]
        assert number(plain) == pytest.approx(x[role == FILLER].mean() / x[role == REASONING].mean(), abs=6e-3)
        everywhere = np.full(len(use), np.nan)
        everywhere[use] = x
        assert number(matched) == pytest.approx(ratio_by_loops(everywhere, c, use, True, range(5)), abs=6e-3)
        assert number(opening) == pytest.approx(x[kind == KINDS.index("opening")].mean() / x[decides].mean(), abs=6e-3)
        for k, shown in enumerate(row[1:]):
            assert float(shown) == pytest.approx(x[kind == k].mean() / x.mean(), abs=6e-3)
    assert f"{use.sum():,} tokens" in kinds.note


def between_share(x, label):
    """1 - (variance that is left within labels) / (all of it), by loops."""
    left = sum(((x[label == k] - x[label == k].mean()) ** 2).sum() for k in set(label.tolist()))
    return 1 - left / ((x - x.mean()) ** 2).sum()


def test_phase_1_by_hand():
    """Guards against fifths, types, shares or t-statistics of another row, and tokens that were not measured."""
    c = made_columns(np.random.default_rng(4), puzzles=5, answers=16, length=20)
    table = gradients.table_phase1(c)
    for row, name in zip(table.rows, ("phase1", "before", "whole"), strict=True):
        use = np.isfinite(c[name])
        x, role, relative, position = c[name][use], c["role"][use], c["relative"][use], c["position"][use]
        fifth, tenth = relative * 5 // 1, relative * 10 // 1
        by_type = x[role == FILLER].mean() / x[role == REASONING].mean()
        expected = [x[fifth == 0].mean() / x[fifth == 4].mean(), by_type,
                    ratio_by_loops(c[name], c, use, True, range(5))]  # fmt: skip
        assert [number(cell) for cell in row[1:4]] == pytest.approx(expected, rel=6e-3, abs=6e-3)
        of_place, of_type, of_both = (between_share(np.log(x), k) for k in (tenth, role, tenth * 3 + role))
        at = [x[position == p] for p in range(20)]
        t = np.array([v.mean() / (v.std(ddof=1) / len(v) ** 0.5) for v in at if len(v) >= 30])
        expected = [of_place, of_type, of_both - of_place, (t > 3).mean()]
        assert [number(cell) for cell in row[4:]] == pytest.approx(np.multiply(expected, 100), abs=0.51)


# -------------------------------------------------------------------------------------------- over training


@given(st.lists(st.floats(-100, 100).filter(lambda v: v == 0 or abs(v) > 1e-3), min_size=2, max_size=30).filter(any))
@settings(max_examples=100, deadline=None)
def test_sparsity_by_its_definitions(values):
    """Guards against a Gini coefficient of values not sorted or with sign, and against Hoyer's of squares."""
    size, n = [abs(v) for v in values], len(values)
    gini = sum(abs(a - b) for a in size for b in size) / n**2 / (2 * sum(size) / n)
    rms = (sum(v * v for v in size) / n) ** 0.5
    hoyer = (n**0.5 - sum(size) / sum(v * v for v in size) ** 0.5) / (n**0.5 - 1)
    small = sum(v < 0.01 * rms for v in size) / n
    found = gradients.sparsity(np.array(values))
    assert [found[name] for name in gradients.SPARSITY] == pytest.approx([hoyer, gini, small], abs=1e-9)


def some_rewards(text, *puzzle):
    """A reward that varies whatever the model has learned."""
    answer = float(sum(map(ord, text)) % 3 == 0)
    return {"reward": answer + 0.05 * (len(text) % 3), "answer": answer, "format": 0.5 * (len(text) % 3)}


@pytest.fixture
def brief(monkeypatch):
    """Everything that takes long made small, and rewards that responses of 12 tokens can earn."""
    for name, value in {"LIMIT": 12, "EACH": 2, "TRUTH_ROLLOUTS": 8, "TRUTH_PUZZLES": 2}.items():
        monkeypatch.setattr(gradients, name, value)
    for name, value in {"SIZES": (2, 4), "CONTROLS_AT": 4, "TRUTH_PUZZLES": 2}.items():
        monkeypatch.setattr(gradient_rank, name, value)
    monkeypatch.setattr(gradients, "SIZES", (2, 4))
    monkeypatch.setattr(gradients, "CONTROLS_AT", 4)
    monkeypatch.setattr(critic_quality, "SIZE", 4)
    monkeypatch.setattr(truth_scores, "RESAMPLES", 40)
    monkeypatch.setattr(gradient_noise, "MITIGATIONS", {name: MITIGATIONS[name] for name in ("none", "ppo")})
    monkeypatch.setattr(grpo, "reward", some_rewards)


@pytest.fixture
def tiny(random_model, codec, tmp_path, monkeypatch):
    """The folder of a model of two layers and random weights, whose responses end anywhere."""
    folder, model = tmp_path / "tiny", random_model.float()
    copy_tokenizer(BUNDLED, folder)
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(0.5)
    save_model(model, folder)
    monkeypatch.setattr(codec, "end_tokens", list(range(0, codec.size, 8)))
    monkeypatch.setattr(train, "Codec", lambda folder: codec)
    return folder, model


def run_of(folder, start, models):
    """A run folder that began with the model of another folder and has these as checkpoints, by step."""
    for step, model in models.items():
        place = folder / "checkpoints" / f"step-{step:06d}"
        copy_tokenizer(BUNDLED, place)
        save_model(model, place)
    (folder / "config.json").write_text(json.dumps({"settings": {"model": str(start)}}))
    return folder


def test_over_training_by_hand(codec, brief, tiny, tmp_path):
    """Guards against other puzzles or random numbers at each checkpoint, checkpoints in the order of their names, and a
    gradient of the whole batch where it is a puzzle's."""
    folder, model = tiny
    run = run_of(tmp_path / "run", folder, {100: model, 5: model})
    (run / "checkpoints" / "step-000050.part").mkdir()  # left by a run that was killed
    puzzles = gradients.generate_puzzles(3, "train", seed=7)
    table = gradients.table_training(run, puzzles, 4, 0)
    assert [row[0] for row in table.rows] == ["0", "5", "100"]
    assert table.rows[0][1:] == table.rows[1][1:] == table.rows[2][1:]
    batch = gradient_rank.by_success(gradients.sample_groups(model, codec, puzzles, 4, (0, 0)))
    prompts = [codec.prompt(puzzles[g]) for g in batch.group.tolist()]
    logprob = plain_logprobs(model, prompts, batch.tokens, batch.mask)
    each = torch.stack([flat_gradient(model, total) for total in (batch.advantage[:, None] * logprob).sum(1)])
    groups = [g.numpy() for g in each.view(3, 4, -1) if g.any()]
    assert len(groups) >= 2
    row = dict(zip(table.header, table.rows[0]))
    assert float(row["success"]) == pytest.approx(batch.success.mean().item(), abs=6e-3)
    sparse = [gradients.sparsity(g.sum(0)) for g in groups]
    for name in gradients.SPARSITY:
        found = [float(v) for v in row[name].split(" ± ")]
        assert found == pytest.approx(interval([s[name] for s in sparse]), abs=2e-3)
    shares = [s / s.sum() for s in (np.linalg.svd(g, compute_uv=False) for g in groups)]
    assert number(row["effective rank"]) == pytest.approx(np.mean([np.prod(s**-s) for s in shares]), abs=0.06)
    c = gradients.token_columns(model, codec, puzzles, batch, 0)
    use = np.isfinite(c["whole"]) & (c["advantage"] != 0)
    A = np.abs(c["advantage"])
    for name, x in zip(gradients.MEASURES, (A * -c["logprob"], A * c["logit_grad"], A * c["whole"])):
        expected = ratio_by_loops(x, c, use, False, range(3))
        assert row[name] == "" and math.isnan(expected) or number(row[name]) == pytest.approx(expected, abs=6e-3)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_checkpoint_that_solves_nothing_has_a_row(brief, tiny, monkeypatch, tmp_path):
    """Guards against a traceback for a run that collapsed, whose groups are all alike."""
    monkeypatch.setattr(grpo, "reward", lambda *_: {"reward": 0.0, "answer": 0.0, "format": 0.0})
    run = run_of(tmp_path / "run", tiny[0], {5: tiny[1]})
    table = gradients.table_training(run, gradients.generate_puzzles(3, "train", seed=7), 4, 3)
    assert [row[:2] for row in table.rows] == [["0", "0.00"], ["5", "0.00"]]
    assert "nan" not in str(table)


# ------------------------------------------------------------------------------------------------- the command


def test_a_star_of_the_first_answers(codec, brief, tiny, monkeypatch):
    """Guards against values on the wrong response, and rollouts for responses that nobody asked about."""
    puzzles, model, asked = gradients.generate_puzzles(3, "train", seed=0), tiny[1], {}
    batch = gradient_rank.by_success(gradients.sample_groups(model, codec, puzzles, 5, (0, 0)))

    def sampled(model, codec, puzzles, truth, rollouts, seed, limit, save):
        asked.update(rollouts=rollouts, limit=limit, truth=truth)
        truth["packets"] = packets_wanted(truth["logprob"], rollouts)
        truth["solved"] = np.random.default_rng(0).binomial(truth["packets"][:, None] * PACKET // 2, [0.3, 0.3])

    monkeypatch.setattr(gradients, "sample_truth", sampled)
    found, truth = gradients.sampled_truth(model, codec, puzzles, batch, 0), asked["truth"]
    assert (asked["rollouts"], asked["limit"]) == (8, 12)
    chosen = (truth["response"] % 5 < 4) & (truth["response"] // 5 < 2)  # 4 of 5 answers to 2 of 3 puzzles
    p = np.exp(batch.logprob[batch.mask].double().numpy())
    assert ((truth["packets"] > 0) == (chosen & (1 - p > 0.005))).all()
    assert found[batch.mask].numpy() == pytest.approx(truth["a_star"], abs=1e-6)
    assert np.count_nonzero(truth["a_star"]) > 20
    assert not found[~batch.mask].any()


TITLES = ["Three sizes of a token's gradient: rank correlation", "Filler against reasoning", "By kind of token",
          "Phase 1 of the original work: gradients at the input embeddings", "Effective rank by group size",
          "Measures of rank, R = 4", "Effective rank under other credit, R = 4", "Which baseline is best?",
          "Noise and bias of each method's gradient", "Over training"]  # fmt: skip


def test_the_whole_command(brief, tiny, monkeypatch, tmp_path):
    """Guards against a table that is not written, batches that share puzzles or random numbers, an empty picture, and a
    second call that gives other numbers."""
    keys, asked, sample = [], [], gradients.sample_groups

    def recorded(model, codec, puzzles, answers, key, critic=None):
        keys.append(key)
        asked.append(puzzles)
        return sample(model, codec, puzzles, answers, key, critic)

    monkeypatch.setattr(gradients, "sample_groups", recorded)
    run, texts = run_of(tmp_path / "run", tiny[0], {5: tiny[1]}), []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", f"gradients.py --model {tiny[0]} --questions 4 --batches 4 --critic_batches 1 "
                            f"--seed 2 --run {run} --out {tmp_path / 'out'}".split())  # fmt: skip
        gradients.main()
        texts.append((tmp_path / "out" / "gradients.md").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert re.findall(r"^## (.*)", texts[0], re.M) == TITLES
    assert not re.search(r"\b(nan|inf)\b", texts[0])
    assert keys[:7] == [(2, 0), (2, 1000), (2, 1001), (2, 1002), (2, 1003), (2, 0), (2, 0)]
    assert len({puzzle for puzzles in asked[1:5] for puzzle in puzzles}) == 4 * 6
    picture = gradients.plt.imread(tmp_path / "out" / "gradients.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100  # colours


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--run", "RUN"], "has no checkpoints"),
        (["--run", "UNKNOWN"], "config.json"),
        (["--model", "nowhere"], "nowhere"),
        (["--quest", "12"], "--quest"),
        (["--questions", "3"], "--questions"),
        (["--batches", "3"], "--batches"),
        (["--critic_batches", "0"], "--critic_batches"),
        (["--questions", "4"], "--model that solves some"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(flags, named, monkeypatch, tmp_path):
    """Guards against a traceback, or minutes of work, before the user learns what is wrong."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unknown" / "checkpoints" / "step-000001").mkdir(parents=True)  # no config.json
    monkeypatch.setattr(gradients, "find_critic", lambda *_: None)
    monkeypatch.setattr(gradients, "sample_groups", lambda *_: make_batch([1] * 64, [0.0] * 64, [0] * 64))
    flags = [{"RUN": tmp_path / "run", "UNKNOWN": tmp_path / "unknown"}.get(flag, flag) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["gradients.py", *map(str, flags), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        gradients.main()
    assert re.fullmatch("error: [^\n]+", str(stop.value.code))
    assert named in stop.value.code
