"""The playground's JavaScript against the Python that it repeats: log-probs, grades, roles, steps of training.

Run it:  python -m pytest lab/playground          needs Node; without it the tests are skipped
"""
import copy
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
from lab.playground.check import choose_tokens
from lab.statistics import within
from lab.truth.file import read_truth
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from rollout import rollout
from tests.test_grader import PIECES
from train import Settings, load_policy

SMALL = str(MODEL)
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


@pytest.fixture(scope="module")
def policy():
    return load_policy(Settings(model=SMALL))


@pytest.fixture(scope="module")
def batch(policy):
    batch = rollout(policy, countdown_task.load("heldout", 25), Settings(), 1)
    batch.advantage = compare(batch)
    return batch


def given_model(policy, folder):
    """Write the weights where a script finds them."""
    flat_weights(policy.model).numpy().tofile(folder / "weights")
    return {"config": policy.model.config.source}


def sequences(batch):
    """Prompt and tokens of each response."""
    return [(batch.ask.prompts[int(q)], row[: int(n)].tolist())
            for q, row, n in zip(batch.group, batch.tokens, batch.mask.sum(1))]


@torch.no_grad()
def test_log_probs_of_200_texts(policy, batch, tmp_path):
    """Guards against another norm, angle, head or order of weights; both when read at once and token by token."""
    texts = sequences(batch)
    given = given_model(policy, tmp_path) | {"texts": texts}
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
""", tmp_path, given)
    V = policy.model.config.vocab_size
    exact = copy.deepcopy(policy.model).double()
    whole, first = ([exact(torch.tensor([prompt + tokens[:count]]))[0, -1].log_softmax(-1)
                     for prompt, tokens in texts] for count in (None, 8))
    for name, expected in (("read", whole), ("stepped", first)):
        found = torch.from_numpy(np.fromfile(tmp_path / name, np.float32)).view(-1, V)
        assert len(found) == 200 and (found - torch.stack(expected)).abs().max() < 1e-4


def test_grades_and_roles(policy, batch, tmp_path):
    """Guards against another layout, a number used twice, inexact division, and a tag that is split."""
    rng = random.Random(0)
    layouts = ["".join(rng.choices(PIECES, k=rng.randrange(10))) for _ in range(5000)]
    sums = ["<answer>" + "".join(rng.choices(list("3453450+-*/() 8"), k=rng.randrange(1, 14))) + "</answer>"
            for _ in range(4800)]
    fuzz = layouts + sums + [f"<answer>{text}</answer>" for text in ODD]
    texts = fuzz + list(batch.text)
    puzzles = [countdown_task.Puzzle((3, 4, 5), 8)] * len(fuzz) + [batch.puzzles[q] for q in batch.group]
    pieces = [piece.decode("latin-1") for piece in policy.tokenizer.bytes]
    found = run("""
const graded = given.texts.map((text, i) => grade(text, ...given.puzzles[i]));
const told = given.tokens.map(tokens => {
  const {text, spans} = decode(given.pieces, tokens);
  return [text, roles(text, spans).map(t => [t.role, t.inAnswer])];
});
console.log(JSON.stringify({graded, told}));
""", tmp_path, {"texts": texts, "puzzles": puzzles, "pieces": pieces, "tokens": [t for _, t in sequences(batch)]})
    for text, puzzle, grade in zip(texts, puzzles, found["graded"]):
        assert grade == pytest.approx(countdown_task.grade(text, puzzle)), (text[:80], puzzle)
    for i, (text, told) in enumerate(found["told"]):
        L = int(batch.mask[i].sum())
        assert text == batch.text[i]
        assert told == [[r, a] for r, a in zip(batch.role[i, :L].tolist(), batch.in_answer[i, :L].tolist())]


def test_prompts(policy, tmp_path):
    """Guards against a number whose token depends on the space before it."""
    puzzles = countdown_task.load("train", 200)
    packed = pack_prompt(policy.tokenizer)
    found = run("console.log(JSON.stringify(given.puzzles.map(p => promptTokens(given.packed, ...p))))", tmp_path,
                {"packed": packed, "puzzles": puzzles})
    assert found == [policy.prompt(puzzle) for puzzle in puzzles]


@pytest.mark.parametrize("method, options", [("none", {}), ("outcome_conditional", {"think_discount": 0.3}),
                                             ("entropy_ratio", {}), ("token_type", {"filler": 0.25})])
def test_a_step_of_training(method, options, batch, tmp_path):
    """Guards against another credit, loss, gradient, clip or Adam: a step on the same tokens as grpo.update."""
    policy = load_policy(Settings(model=SMALL))
    given = given_model(policy, tmp_path)
    start, s = flat_weights(policy.model).clone(), Settings(max_grad_norm=0.05)
    credit = MITIGATIONS[method](batch, **options)  # (B, T)
    expected = update(policy, Optimizer(policy.model, s.lr), batch, credit, s)
    rows = [[i, *pair] for i, pair in enumerate(sequences(batch))]
    facts = [[{"entropy": batch.entropy[i, t].item(), "role": batch.role[i, t].item(),
               "inAnswer": batch.in_answer[i, t].item()} for t in range(len(tokens))] for i, _, tokens in rows]
    loss, norm = run("""
const model = new Model(given.config, read("weights")), adam = new Adam(model);
const responses = given.rows.map(([i, prompt, tokens]) => ({prompt, tokens,
  credit: unitMean(RULES[given.rule](given.facts[i], given.amount)).map(w => w * given.advantage[i])}));
const loss = addGradient(model, responses);
write("gradient", model.gradient);
console.log(JSON.stringify([loss, adam.step(0.05)]));
write("after", model.weights);
""", tmp_path, given | {"rows": rows, "facts": facts, "rule": method, "amount": next(iter(options.values()), 0),
                        "advantage": batch.advantage.tolist()})
    assert [loss, norm] == pytest.approx([expected["loss"], expected["grad_norm"]], abs=1e-4)
    gradient, after = (torch.from_numpy(np.fromfile(tmp_path / name, np.float32)) for name in ("gradient", "after"))
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
    names = ["none", "outcome_conditional", "entropy_ratio", "token_type", *RECORDED]
    found = run("""
const playground = new Playground(given.data, answer => console.log(JSON.stringify(answer.scores)));
playground.score({method: {advantage: "grpo", rule: given.names.pop(), amount: 0.5}, others: given.names});
""", tmp_path, {"data": data, "names": names})
    tried, kinds = truth["packets"] > 0, np.array(truth["kinds"].tolist())[truth["kind"]]
    credits = dict(zip(truth["methods"].tolist(), truth["credits"].astype(float)))
    assert [name for name, _ in found] == names
    for name, score in found:
        expected = within(credits[name], truth["a_star"], truth, tried, by_rank=True)
        if np.isnan(expected.value):
            assert score["value"] is None
        else:
            assert score["value"] == pytest.approx(expected.value, abs=1e-3), name
            assert [score["low"], score["high"]] == pytest.approx([expected.low, expected.high], abs=0.01), name
        size = np.abs(credits[name]) / np.abs(credits[name]).mean()
        parts = {"choices": ("operand", "operator"), "results": ("result",), "tags": ("tag",),
                 "words": ("opening", "verdict", "unfinished")}
        for part, share in score["lies"]:
            assert share == pytest.approx(size[np.isin(kinds, parts[part])].mean(), abs=1e-3), (name, part)


def test_live_truth_agrees_with_the_recorded_one(data, truth, tmp_path):
    """Guards against continuations of another token, of the same one excluded, or graded by another puzzle."""
    tokens = choose_tokens(truth, 6)
    found = run("""
const playground = new Playground(given.data, () => {});
console.log(JSON.stringify(given.tokens.map(([r, t], i) => {
  const row = playground.recorded[r];
  Object.assign(playground, {rows: [row], puzzle: given.data.truth.puzzles[row.puzzle]});
  const live = playground.liveTruth(0, t, generator(i));
  while (live.n < 96) live.add();
  return live.estimate();
})));
""", tmp_path, {"data": data, "tokens": [place for place, _ in tokens]})
    for (place, row), live in zip(tokens, found):
        error = np.hypot(live["error"], truth["a_star_error"][row])
        assert abs(live["value"] - truth["a_star"][row]) < 3.5 * error, place
        assert live["n"] == 96 and live["after"] - live["before"] == pytest.approx(live["value"])


@pytest.mark.parametrize("line, expected", [
    ("H * (p < 0.9)", lambda p, H, A, L, position, role: H * (p < 0.9)), ("1", lambda **_: 1), ("- -1", lambda **_: 1),
    ("max(1 - p, 0.1) ^ 2", lambda p, **_: max(1 - p, 0.1) ** 2), ("2 ^ 3 ^ 2", lambda **_: 512),
    ("10 - 4 - 3 * 2 / 6", lambda **_: 5), ("if(A > 0, reasoning, filler)", lambda A, role, **_: role == (A > 0)),
    ("(position == 3) + role / L", lambda position, role, L, **_: (position == 3) + role / L),
    ("2 - -p ^ 2 <= 2.5", lambda p, **_: 2 + p**2 <= 2.5), ("sqrt(exp(log(abs(-4))))", lambda **_: 2)])
def test_rules(line, expected, tmp_path):
    """Guards against operators that bind in another order than in Python, and names that mean something else."""
    tokens = [{"p": p, "entropy": H, "role": role}
              for p, H, role in [(0.95, 0.2, 0), (0.5, 1, 1), (0.1, 2, 2), (0.7, 0, 1)]]
    found = run("console.log(JSON.stringify([1, -1].map(A => ruleWeights(parseRule(given.line), given.tokens, A))))",
                tmp_path, {"line": line, "tokens": tokens})
    assert found == [pytest.approx([float(expected(p=t["p"], H=t["entropy"], A=A, L=4, position=i, role=t["role"]))
                                    for i, t in enumerate(tokens)]) for A in (1, -1)]


def test_weights_that_are_all_0_give_plain_grpo(tmp_path):
    """Guards against a response that drops out: see reweight of mitigations.py."""
    found = run("console.log(JSON.stringify([unitMean([0, 0]), unitMean([1, 0, 2])]))", tmp_path, {})
    assert found == [[1, 1], [1, 0, 2]]


BAD_RULES = {"": "ends too early", "p +": "ends too early", "(p": r"a \) is missing", "p)": "not expected here",
             "eval(1)": "eval is not known", "constructor": "not known", "p.constructor": "not expected here",
             "<img src=x onerror=a()>": "< is not known", "0 / 0": "weight of token 0 is NaN", "1 / 0": "Infinity",
             "-1": "is -1, not 0 or more", "log(0 * p)": "-Infinity", "max(1)": "a , is missing", "😀": "😀 is not known",
             "(" * 90 + "p" + ")" * 90: "at most 30 deep", "-" * 190 + "p": "at most 30 deep", "“p”": "“ is not known",
             "1 2": "2 is not expected here", "p = 1": "= is not expected here",
             "p" * 10_000: "at most 200 characters; this one has 10000"}


def test_bad_rules_and_puzzles_are_refused_in_a_sentence(data, tmp_path):
    """Guards against a rule that runs as JavaScript, hangs or overflows the stack, and an unknown kind of prompt."""
    puzzles = [[" ".join(["1"] * 40), "5"], ["3, 4, x", "5"], ["3, 4, 5", ""], ["3, 4, 5", "101"], ["3, 4, 21", "5"],
               ["3, 4, 5", "2.5"], ["<b>3</b>, 4, 5", "5"], ["", "5"]]
    rules, asked = run("""
const told = act => { try { return act(); } catch (error) { return error.constructor.name + ": " + error.message; } };
const tokens = [{p: 0.5, entropy: 1, role: 0}];
console.log(JSON.stringify([given.rules.map(line => told(() => ruleWeights(parseRule(line), tokens, 1))),
                            given.puzzles.map(pair => told(() => readPuzzle(...pair)))]));
""", tmp_path, {"rules": list(BAD_RULES), "puzzles": [*puzzles, ["[3, 4,5]", " 8 "]]})
    for line, answer in zip(BAD_RULES, rules):
        assert re.fullmatch(f"Error: [^\n]*{BAD_RULES[line]}[^\n]*", str(answer)), line[:40]
    assert asked.pop() == {"numbers": [3, 4, 5], "target": 8}
    assert "this one has 40" in asked[0] and all(re.match("Error: [^\n]*$", answer) for answer in asked)


def test_training_by_the_page_is_the_same_each_time(data, tmp_path):
    """Guards against a link that leads to other weights: the seed and the number of steps decide them."""
    first, second, other = run("""
const method = {advantage: "rloo", rule: "own", amount: 0, line: "H + 0.1"}, steps = [];
for (const seed of [3, 3, 4]) {
  const playground = new Playground(given.data, answer => steps.push(answer.norm));
  playground.sample({numbers: "3, 4, 5", target: "8", method});
  playground.reset({seed});
  playground.trainStep(method);
}
console.log(JSON.stringify(steps.filter(norm => norm > 0)));
""", tmp_path, {"data": data})
    assert first == second != other
