"""The playground's JavaScript against the Python that it repeats. Node runs it; without Node the tests are skipped."""
import json
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

import countdown_task
from grpo import compare, update
from lab.playground.__main__ import ENGINE, MODEL, RECORDED, TRUTH, join
from lab.playground.pack import flat_weights, pack, pack_prompt
from lab.statistics import within
from lab.truth.file import read_truth
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from queries import Queries
from rollout import rollout
from tests.test_grader import PIECES
from settings import Settings
from start import load_policy

SMALL = Settings(model=str(MODEL), max_grad_norm=0.05)
RULES = dict(none={}, outcome_conditional={"think_discount": 0.3}, entropy_ratio={}, token_type={"filler": 0.25})
ODD = ["4 * (5 - 3)", "(5-3)*4", "3+4+5/5", "4*(5-3)/1", "3 - -5", "04*(5-3)", "(4)(5-3)", "4**2", "5//3", "3 4 5",
       "(" * 33 + "8" + ")" * 33, "4*(5-3)" + " " * 250, "5/(3-3)", "4*(5-3", "4*5-3)", "1/3*3*8", "4 * ( 5 - 3 ) ",
       "8", "()", ""]
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node runs the JavaScript, and is not here")


def run(script, folder, given):
    """Run a script behind the engine, with `given`, `read` and `write`, in Node; returns what it printed as JSON."""
    (folder / "given.json").write_text(json.dumps(given))
    head = f"""
const fs = require("fs"), folder = {str(folder)!r}, given = JSON.parse(fs.readFileSync(folder + "/given.json"));
const read = name => new Float32Array(new Uint8Array(fs.readFileSync(folder + "/" + name)).buffer);
const write = (name, array) => fs.writeFileSync(folder + "/" + name, Buffer.from(array.buffer));
"""
    (folder / "script.js").write_text(join(ENGINE) + head + script)
    done = subprocess.run(["node", str(folder / "script.js")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


def written(folder, *names):
    """What a script wrote under these names."""
    return [torch.from_numpy(np.fromfile(folder / name, np.float32)) for name in names]


@pytest.fixture(scope="module")
def policy():
    return load_policy(SMALL)


@pytest.fixture(scope="module")
def batch(policy):
    batch = rollout(policy, countdown_task.load("heldout", 25), SMALL, 1)
    batch.ask = Queries(policy, batch, SMALL, 1)
    batch.advantage = compare(batch)
    return batch


def given_model(policy, folder):
    """Write the weights where a script finds them."""
    flat_weights(policy.model).numpy().tofile(folder / "weights")
    return {"config": policy.model.config.source}


def sequences(batch):
    """Prompt and tokens of each response."""
    return [(batch.prompts[int(q)], row[: int(n)].tolist())
            for q, row, n in zip(batch.group, batch.tokens, batch.mask.sum(1))]


@torch.no_grad()
def test_log_probs_of_200_texts(policy, batch, tmp_path):
    """Guards against another norm, angle, head or order of weights; both when read at once and token by token."""
    texts = sequences(batch)
    run("""
const model = new Model(given.config, read("weights")), all = [];
for (const [prompt, tokens] of given.texts) {
  const pass = model.read([...prompt, ...tokens]);
  all.push(...model.logProbs(pass.hidden.subarray((pass.S - 1) * model.D), 1));
}
write("read", Float32Array.from(all));
const caches = given.texts.map(([prompt]) => model.cacheOf(model.read(prompt), 140));
let hidden = [];
for (let t = 0; t < 8; t++) hidden = model.step(given.texts.map(([, tokens]) => tokens[t]), caches);
write("stepped", model.logProbs(hidden, caches.length));
""", tmp_path, given_model(policy, tmp_path) | {"texts": texts})
    exact = load_policy(SMALL).model.double()
    for found, count in zip(written(tmp_path, "read", "stepped"), (None, 8)):
        expected = torch.stack([exact(torch.tensor([prompt + tokens[:count]]))[0, -1].log_softmax(-1)
                                for prompt, tokens in texts])  # (200, V)
        assert len(expected) == 200 and (found.view_as(expected) - expected).abs().max() < 1e-4


def test_prompts_grades_and_roles(policy, batch, tmp_path):
    """Guards against a number whose token depends on the space before it, another layout, a number used twice, inexact
    division, and a tag that is split."""
    rng = random.Random(0)
    layouts = ["".join(rng.choices(PIECES, k=rng.randrange(10))) for _ in range(5000)]
    sums = ["".join(rng.choices(list("3453450+-*/() 8"), k=rng.randrange(1, 14))) for _ in range(4800)]
    fuzz = layouts + [f"<answer>{text}</answer>" for text in sums + ODD]
    texts, asked = fuzz + list(batch.text), countdown_task.load("train", 200)
    puzzles = [countdown_task.Puzzle((3, 4, 5), 8)] * len(fuzz) + [batch.puzzles[q] for q in batch.group]
    prompts, graded, told = run("""
const prompts = given.asked.map(puzzle => promptTokens(given.packed, ...puzzle));
const graded = given.texts.map((text, i) => grade(text, ...given.puzzles[i]));
const decoded = given.tokens.map(tokens => decode(given.pieces, tokens));
const told = decoded.map(({text, spans}) => [text, roles(text, spans).map(t => [t.role, t.inAnswer])]);
console.log(JSON.stringify([prompts, graded, told]));
""", tmp_path, {"texts": texts, "puzzles": puzzles, "pieces": [p.decode("latin-1") for p in policy.tokenizer.bytes],
                "tokens": [t for _, t in sequences(batch)], "packed": pack_prompt(policy.tokenizer), "asked": asked})
    assert prompts == [policy.prompt(puzzle) for puzzle in asked]
    for text, puzzle, grade in zip(texts, puzzles, graded):
        assert grade == pytest.approx(countdown_task.grade(text, puzzle)), (text[:80], puzzle)
    facts = torch.stack((batch.role, batch.in_answer), 2)  # (B, T, 2)
    assert told == [[text, some[mask].tolist()] for text, some, mask in zip(batch.text, facts, batch.mask)]


def test_a_step_of_training(batch, tmp_path):
    """Guards against another credit, loss, gradient, clip or Adam: a step on the same tokens as grpo.update."""
    policy = load_policy(SMALL)
    start, given = flat_weights(policy.model).clone(), given_model(policy, tmp_path)
    credits = [MITIGATIONS[name](batch, **options) for name, options in RULES.items()]  # (B, T) each
    expected = update(policy, Optimizer(policy.model, SMALL.lr), batch, credits[-1], SMALL)
    facts = [[{"entropy": batch.entropy[i, t].item(), "role": batch.role[i, t].item(),
               "inAnswer": batch.in_answer[i, t].item()} for t in range(n)] for i, n in enumerate(batch.mask.sum(1))]
    loss, norm = run("""
const model = new Model(given.config, read("weights")), adam = new Adam(model);
const credits = given.rules.map(([rule, amount]) => given.facts.map((facts, i) =>
  unitMean(RULES[rule](facts, amount)).map(w => w * given.advantage[i])));
write("credits", Float32Array.from(credits.flat(2)));
const loss = addGradient(model, given.rows.map(([prompt, tokens], i) => ({prompt, tokens, credit: credits.at(-1)[i]})));
write("gradient", model.gradient);
console.log(JSON.stringify([loss, adam.step(0.05)]));
write("after", model.weights);
""", tmp_path, given | {"rows": sequences(batch), "facts": facts, "advantage": batch.advantage.tolist(),
                        "rules": [[name, *options.values()] for name, options in RULES.items()]})
    found, gradient, after = written(tmp_path, "credits", "gradient", "after")
    assert torch.allclose(found, torch.cat([credit[batch.mask] for credit in credits]), atol=1e-5)
    assert [loss, norm] == pytest.approx([expected["loss"], expected["grad_norm"]], abs=1e-4)
    change = flat_weights(policy.model) - start
    assert (after - start - change).norm() < 0.01 * change.norm()
    for weight in policy.model.parameters():
        weight.data = weight.grad  # which was clipped
    assert (gradient * 0.05 / (norm + 1e-6) - flat_weights(policy.model)).abs().max() < 1e-4 * 0.05


@pytest.fixture(scope="module")
def truth():
    return read_truth(TRUTH / "ground_truth.npz")


@pytest.fixture(scope="module")
def data(policy, truth):
    """What the published page holds."""
    return pack(policy, truth, RECORDED)[0]


def test_scores_are_those_of_lab_truth(data, truth, tmp_path):
    """Guards against other ranks, tokens, groups or parts than lab/truth has, for rules and recorded credit."""
    names = [*RULES, *RECORDED]
    found = run("""
const playground = new Playground(given.data, answer => console.log(JSON.stringify(answer.scores)));
playground.score({method: {advantage: "grpo", rule: given.names.pop(), amount: 0.5}, others: given.names});
""", tmp_path, {"data": data, "names": names})
    tried, kinds = truth["packets"] > 0, truth["kinds"][truth["kind"]]
    credits = dict(zip(truth["methods"].tolist(), truth["credits"].astype(float)))
    parts = {"choices": ("operand", "operator"), "results": ("result",), "tags": ("tag",),
             "words": ("opening", "verdict", "unfinished")}
    assert [name for name, _ in found] == names
    for name, score in found:
        expected = within(credits[name], truth["a_star"], truth, tried, by_rank=True)
        value, *ends = (np.nan if score[key] is None else score[key] for key in ("value", "low", "high"))
        assert value == pytest.approx(expected.value, abs=1e-3, nan_ok=True), name
        assert ends == pytest.approx([expected.low, expected.high], abs=0.01, nan_ok=True), name
        size = np.abs(credits[name]) / np.abs(credits[name]).mean()
        for part, share in score["lies"]:
            assert share == pytest.approx(size[np.isin(kinds, parts[part])].mean(), abs=1e-3), (name, part)


def test_live_truth_agrees_with_the_recorded_one(data, truth, tmp_path):
    """Guards against continuations of another token, of the same one excluded, or graded by another puzzle."""
    large = np.abs(truth["a_star"]) > 0.1
    rows = [row for group in (large, ~large & (truth["packets"] > 0)) for row in np.flatnonzero(group)[7::40][:3]]
    found = run("""
const playground = new Playground(given.data, () => {});
console.log(JSON.stringify(given.tokens.map(([r, t], i) => {
  const row = playground.recorded[r];
  Object.assign(playground, {rows: [row], puzzle: given.data.truth.puzzles[row.puzzle]});
  const live = playground.liveTruth(0, t, generator(i));
  while (live.n < 96) live.add();
  return live.estimate();
})));
""", tmp_path, {"data": data, "tokens": [[int(truth[key][row]) for key in ("response", "position")] for row in rows]})
    for row, live in zip(rows, found):
        assert abs(live["value"] - truth["a_star"][row]) < 3.5 * np.hypot(live["error"], truth["a_star_error"][row])
        assert live["n"] == 96 and live["after"] - live["before"] == pytest.approx(live["value"])


GOOD = {"H * (p < 0.9)": lambda p, H, **_: H * (p < 0.9), "1": lambda **_: 1, "- -1": lambda **_: 1,
        "max(1 - p, 0.1) ^ 2": lambda p, **_: max(1 - p, 0.1) ** 2, "2 ^ 3 ^ 2": lambda **_: 512,
        "10 - 4 - 3 * 2 / 6": lambda **_: 5, "if(A > 0, reasoning, filler)": lambda A, role, **_: role == (A > 0),
        "(position == 3) + role / L": lambda position, role, L, **_: (position == 3) + role / L,
        "2 - -p ^ 2 <= 2.5": lambda p, **_: 2 + p**2 <= 2.5, "sqrt(exp(log(abs(-4))))": lambda **_: 2}
BAD = {"": "ends too early", "p +": "ends too early", "(p": r"a \) is missing", "p)": "not expected here",
       "eval(1)": "eval is not known", "constructor": "not known", "p.constructor": "not expected here",
       "<img src=x onerror=a()>": "< is not known", "0 / 0": "weight of token 0 is NaN", "1 / 0": "Infinity",
       "-1": "is -1, not 0 or more", "log(0 * p)": "-Infinity", "max(1)": "a , is missing", "😀": "😀 is not known",
       "(" * 90 + "p" + ")" * 90: "at most 30 deep", "-" * 190 + "p": "at most 30 deep",
       "p" * 10_000: "at most 200 characters; this one has 10000", "p = 1": "= is not expected here"}
PUZZLES = {"[3, 4,5]": " 8 ", "1 " * 40: "5", "3, 4, x": "5", "3, 4, 5": "", "3,4,5": "101", "3, 4, 21": "5",
           "3, 4,5": "2.5", "<b>3</b>, 4, 5": "5", "": "5"}  # all but the first are refused


def test_rules_and_puzzles_of_a_reader(tmp_path):
    """Guards against operators that bind in another order than in Python, a rule that runs as JavaScript, hangs or
    overflows the stack, a response that drops out where all its weights are 0, and an unknown kind of prompt."""
    tokens = [{"p": p, "entropy": H, "role": r} for p, H, r in [(0.95, 0.2, 0), (0.5, 1, 1), (0.1, 2, 2), (0.7, 0, 1)]]
    good, bad, zero, (read, *refused) = run("""
const told = act => { try { return act(); } catch (error) { return `${error.constructor.name}: ${error.message}`; } };
const weights = (line, A) => told(() => ruleWeights(parseRule(line), given.tokens, A));
console.log(JSON.stringify([given.good.map(line => [1, -1].map(A => weights(line, A))),
  given.bad.map(line => weights(line, 1)), [unitMean([0, 0]), unitMean([1, 0, 2])],
  given.puzzles.map(pair => told(() => readPuzzle(...pair)))]));
""", tmp_path, {"good": list(GOOD), "bad": list(BAD), "tokens": tokens, "puzzles": list(PUZZLES.items())})
    for (line, expected), answers in zip(GOOD.items(), good):
        for A, found in zip((1, -1), answers):
            weights = [expected(A=A, p=t["p"], H=t["entropy"], role=t["role"], position=i, L=4)
                       for i, t in enumerate(tokens)]
            assert found == pytest.approx(list(map(float, weights))), line
    for (line, expected), answer in zip(BAD.items(), bad):
        assert re.fullmatch(f"Error: [^\n]*{expected}[^\n]*", str(answer)), line[:40]
    assert zero == [[1, 1], [1, 0, 2]] and read == {"numbers": [3, 4, 5], "target": 8}
    assert "this one has 40" in refused[0] and all(re.fullmatch("Error: [^\n]*", answer) for answer in refused)
