"""What the pages say holds: links, commands, files, columns, the function that a reader adds."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
from transformers import MistralConfig, MistralForCausalLM

import start
import train
from methods.registry import CREDIT_FUNCTIONS
from methods.heads import Critic
from plumbing import launch, metrics
from plumbing.runs import read_metrics
from plumbing.tokenizer import Tokenizer
from settings import Settings
from tasks import math_task
from tests.fixtures import make_batch
from tests.random_checkpoints import SMALL, hf_model, randomize

ROOT = Path(train.__file__).parent
ROOMS = [*sorted((ROOT / "lab").glob("**/README.md")),
         *(ROOT / "lab" / page for page in ("study/collapse.md", "study/elsewhere.md", "original/claims.md"))]
PAGES = {path: path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *ROOMS)}
COMMANDS = sorted({line for text in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", text, re.S)
                   for line in block.splitlines()})
IDEA = re.search(r"```python\n(@reweighting\n.*?)```", PAGES[ROOT / "README.md"], re.S)[1]
NAME = re.search(r"def (\w+)", IDEA)[1]
RECIPES = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGES[ROOT / "docs" / "extend.md"], re.S)  # file, code
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_links_lead_to_a_file_or_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@EACH_PAGE
def test_a_linked_name_is_in_the_file_it_leads_to(page):
    """Guards against a function that moved: [`read_responses`](../sampler.py)."""
    for name, target in re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)", page.read_text(encoding="utf-8")):
        code = (page.parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b|^{name}\b[^\n]*=|\"{name}\":", code, re.M), (name, target)


def test_files_of_the_tree_and_of_commands_exist():
    """The lines that README counts are those of its rows' files: `python -m lab.pages` writes what is a tenth off."""
    table = re.search(r"## The files.*?\n\|--.*?\n(.*?)\n\n", PAGES[ROOT / "README.md"], re.S)[1]
    assert all((ROOT / name).exists() for name in re.findall(r"\[([\w./]+)\]", table))
    assert any(c.startswith("pip install -r tests/requirements.txt") for c in COMMANDS)
    for command in COMMANDS:
        for name in re.findall(r"[\w/]+\.(?:py|txt)\b", command.replace("path/to/my_task.py", "")):
            assert (ROOT / name).is_file(), command
        for module in re.findall(r"-m ((?:lab|tests)\.[\w.]+)", command):
            assert source_of(module).is_file(), command


def source_of(module):
    """The file that `python -m module` runs."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c and NAME not in c])
def test_commands_of_train_are_accepted(command, tmp_path, monkeypatch):
    arguments = shlex.split(re.search(r"train\.py([^;&|]*)", command)[1].replace("$seed", "3"))
    if "--config" in arguments:  # the other flags are right, but there is no such run
        (tmp_path / "config.json").write_text('{"settings": {}, "method": {}}')
        arguments[arguments.index("--config") + 1] = str(tmp_path / "config.json")
    if "--resume" in arguments:  # the flags are right, but in an empty folder there is no such run
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match="is not a run folder"):
            start.parse_flags(arguments)
    else:
        launch.check(replace(start.parse_flags(arguments)[0], device="cpu"))


def test_the_checks_of_the_course_exist():
    """Guards against a test of another name: pytest then finds nothing, which looks like an exercise left undone."""
    course = PAGES[ROOT / "docs" / "course.md"]
    found = re.findall(r"pytest (\S+\.py)(?: -k \"?([^\"\n]*))?", course)
    for file, chosen in found:
        names = {*re.findall(r"\w+", chosen)} - {"and", "or"}
        assert all(name in (ROOT / file).read_text(encoding="utf-8") for name in names), (file, chosen)
    assert found and len(found) == len(re.findall("-m pytest ", course))  # none is of a form that is not read here


def test_the_flags_beside_names_of_other_trainers_exist():
    known = {*vars(Settings()), *(x for m in CREDIT_FUNCTIONS.values() for x in m.parameters)}
    found = {*re.findall(r"`--(\w+)", PAGES[ROOT / "docs" / "trl.md"].partition("## Settings")[2])}
    assert found <= known and len(found) > 25


def test_every_column_is_explained():
    text = PAGES[ROOT / "docs" / "running.md"]
    table = re.search(r"\| column of metrics.csv.*?\n\n", text, re.S)[0]
    explained = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.strip().splitlines()))
    of_critic = Critic(1).learn(make_batch([1], [0.0], hidden=torch.ones(1, 1, 1)))
    assert set(explained) == {*metrics.COLUMNS, *of_critic}
    assert re.search(r"credit log has `([\w\s]+)`", text)[1].split() == [*metrics.CREDIT_LOG]


@pytest.mark.slow
def test_the_trackers_of_the_page_get_the_rows_of_the_run(run_program, tmp_path, monkeypatch):
    """With stand-ins for the libraries: guards against a row, a column or a step that they are not handed."""
    codes = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "docs" / "running.md"], re.S)
    board, seen = {}, {}
    add = lambda column, value, step: board.setdefault(step, {}).update({column: value})
    purged = []
    writer = lambda folder, purge_step: purged.append(purge_step) or mock.Mock(add_scalar=add)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=writer))
    run = mock.Mock(log=lambda row, step: seen.update({step: row}))
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=lambda project, id, resume: run))
    both = "def both(row):\n    tensorboard(row)\n    wandb_row(row)\n"
    (tmp_path / "tracking.py").write_text("\n".join([*(c for c in codes if "tensorboard" in c or "wandb" in c), both]))
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--steps 2 --questions 2 --responses 2 --max_new_tokens 9 --eval_problems 2 --pass_at 0"
    for words in (f"{flags} --out {tmp_path}/r", f"--resume {tmp_path}/r --steps 3"):
        monkeypatch.delitem(sys.modules, "tracking", raising=False)  # another process
        run_program(train, *words.split(), "--on_step", "tracking:both")
    written = read_metrics(tmp_path / "r")
    for i, step in enumerate((0, 1, 2, 3)):
        row = {column: x[i] for column, x in written.items() if not np.isnan(x[i])}
        for rows in (board, seen):
            assert {k: float(v) for k, v in rows[step].items() if v == v} == row
    assert purged == [0, 3] and len(seen) == len(board) == 4


# ------------------------------------------------------------------------------------------- what a reader adds

TINY = "--questions 3 --responses 4 --eval_problems 2 --pass_at 0 --steps 2"
README_COMMAND = next(c for c in COMMANDS if NAME in c and "train.py" in c)
BUILD, USE = ([c.replace("path/to/", "") for c in COMMANDS if "path/to/my_task.py" in c and word in c][0]
              for word in ("warm_start", "train.py"))
LATE = re.search(r"`--mitigation late (--.*?)`", PAGES[ROOT / "docs" / "extend.md"])[1]
FLAGS = {"late": LATE, "monte_carlo": LATE.replace("--advantage median", "")}
RUNS = [*zip(FLAGS, ("float32", "bfloat16"))]

CALL = r"""
from rollout import Policy
from plumbing.task_file import load_task
from plumbing.tokenizer import Tokenizer
from extras.turns import begun_with
task, tokenizer = load_task("tool"), Tokenizer("models/chat")
policy, puzzle = Policy(None, tokenizer, task), task.math_task.Problem("12 * 34 + 5?", 413)
turns = ["First calc 12 * 34", " calc 408 + 5", "413</think>\n<answer>413</answer>"]
tokens = [x for turn in turns for x in tokenizer.encode(turn) + tokenizer.end_tokens[:1]][:-1]
text = policy.prompt(puzzle) + begun_with(policy, puzzle, tokens).text
text = "".join(tokenizer.library.id_to_token(x) or "" for x in text)
print(text.replace("\u0120", " ").replace("\u010a", "\n"))
print(task.grade("", puzzle, turns), *(task.reply(said, puzzle, True) for said in (["calc 1 / 2"], ["calc 1 + 2"] * 4)))
"""
# A random model neither calls the tool nor earns anything: here each turn is a call, and lengths are rewarded.
TALKING = """
import tool_task
from tool_task import *

def reply(turns, puzzle, chat):
    return tool_task.reply(["calc 12 * 34"] * len(turns), puzzle, chat)

PARTS = {"size": 1}

def grade(text, puzzle, turns):
    return tool_task.grade(text, puzzle, turns) | {"size": len(text) % 7}
"""
COMMANDS_THERE = [
    "python train.py --help", f"{README_COMMAND} {TINY} --max_new_tokens 8 --out runs/r",
    f"{BUILD} --size small --steps 60",
    *(f"{USE} {TINY} --max_new_tokens 6 --mitigation {name} {FLAGS[name]} --dtype {dtype} --out runs/{name}-{dtype}"
      for name, dtype in RUNS),
    "python call.py",
    *(f"python train.py --task {task} --model models/chat {TINY} --max_new_tokens 150 --out runs/{task}"
      for task in ("tool", "talking")),
    "python compare.py", next(c for c in COMMANDS if f"lab.truth.score --mitigation {NAME}" in c)]
# Runs all of them in one process, since to import torch takes longer than most of them.
SESSION = """
import io, json, runpy, shlex, sys
from importlib import import_module
from models import warm_start
warm_start.report = lambda *_: None  # takes minutes
said, screen = {}, sys.stdout
for command in sys.argv[1:]:
    sys.argv = shlex.split(command.removeprefix("python ").removeprefix("-m "))
    sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
    try:
        program = sys.argv[0]
        runpy.run_path(program, run_name="__main__") if program.endswith(".py") else import_module(program).main()
    except SystemExit as stop:
        if stop.code:
            raise
    sys.stdout.flush()
    said[command] = sys.stdout.buffer.getvalue().decode()
print(json.dumps(said), file=screen)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository in which the README's function, and docs/extend.md's, were added as they say, and what
    each of COMMANDS_THERE printed in it."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    source = (folder / "mitigations.py").read_text(encoding="utf-8")
    assert source.count("# <- your idea here") == 1
    if f"def {NAME}(" not in source:  # a reader who did what the README says runs these tests, too
        source = re.sub(r"# <- your idea here.*\n", lambda mark: f"{IDEA}\n\n{mark[0]}", source)
    (folder / "mitigations.py").write_text(source, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "reverse_task.py", folder / "my_task.py")
    for name, code in [*RECIPES, ("call.py", CALL), ("talking_task.py", TALKING)]:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{code}")
    library = tokenizers.Tokenizer.from_file(str(ROOT / "models" / "math-tiny" / "tokenizer.json"))
    library.add_special_tokens(["<|im_start|>"])
    chat = hf_model("qwen2", vocab_size=library.get_vocab_size(), max_position_embeddings=512)
    mistral = MistralForCausalLM(MistralConfig.from_dict(SMALL | {"sliding_window": None}))
    for model, place in (chat, "models/chat"), (mistral, "path/to/model"):
        randomize(model)
        model.save_pretrained(folder / place)
    library.save(str(folder / "models" / "chat" / "tokenizer.json"))
    return folder, json.loads(in_copy(folder, "-c", SESSION, *COMMANDS_THERE))


def in_copy(folder, *arguments):
    """What a Python command in the copy prints; it must succeed."""
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_the_function_is_listed_trains_a_step_and_passes_the_tests(copy):
    folder, said = copy
    formula = re.search('"""(.*)"""', IDEA)[1]
    assert f"  {NAME} --power 1.0\n      {formula}\n" in said[COMMANDS_THERE[0]]
    assert "step    2/2" in said[COMMANDS_THERE[1]] and (folder / "runs/r/credit/step-000002.npz").is_file()
    in_copy(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_mitigations.py", "-k",
            f"{NAME} or registered")


@pytest.mark.slow
def test_the_function_is_scored(copy):
    assert f"| {NAME} power=0.5 (yours) " in copy[1][COMMANDS_THERE[-1]]
    assert (copy[0] / "runs" / "truth" / f"score-{NAME}.png").is_file()


@pytest.mark.slow
def test_every_recipe_trains_as_it_says(copy):
    """Guards against a page that nobody followed: all its code, in both precisions, and the log by hand."""
    tokenizer = Tokenizer(copy[0] / "models" / "mine")
    for name, dtype in RUNS:
        run, rounding = copy[0] / "runs" / f"{name}-{dtype}", 1e-5 if dtype == "float32" else 0.05
        metrics, log = read_metrics(run), np.load(run / "credit" / "step-000001.npz")
        place, L = log["position"], np.bincount(log["response"])[log["response"]]  # (N,) each, L the response's length
        texts = [tokenizer.decode(log["token"][log["response"] == i].tolist())[0].strip() for i in range(12)]
        assert metrics["letters"][1] == pytest.approx(np.mean([len(text) for text in texts]))
        assert ("linear_error" in metrics) == (name == "monte_carlo") and log["credit"].any()
        assert metrics["ratio"][1] == pytest.approx(1, abs=rounding)
        assert metrics["loss"][1] == pytest.approx(-(log["credit"] / 12 / np.sqrt(6 * L)).sum(), abs=rounding)
        if name == "late":
            low = np.sort(log["reward"][place == 0].reshape(3, 4))[:, 1]  # (3,) the lower of two medians
            weight = np.where(L == 1, 1, (place >= L - L // 2) * L / np.maximum(L // 2, 1))
            np.testing.assert_allclose(log["credit"], (log["reward"] - low[log["group"]]) * weight, rtol=1e-5)


@pytest.mark.slow
def test_the_tool_of_the_page_trains_a_chat_model_in_several_turns(copy):
    """Guards against a page that nobody followed: by hand, and for two steps."""
    folder, said = copy
    user = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    said = said["python call.py"]
    assert "user\nTo have a part computed, end your turn with `calc 12 * 34`. 12 * 34 + 5? Show" in said
    assert said.endswith(f"First calc 12 * 34{user.format(408)} calc 408 + 5{user.format(413)}413</think>\n"
                         "<answer>413</answer>\n{'answer': 1.0, 'format': 1.0, 'calls': 2} None None\n")
    log, metrics = np.load(folder / "runs/talking/credit/step-000002.npz"), read_metrics(folder / "runs/talking")
    assert log["credit"].any() and log["turn"].max() > 0 < metrics["calls"][-1]


@pytest.mark.slow
def test_an_architecture_and_a_question_as_the_page_has_them(copy, tmp_path):
    assert float(copy[1]["python compare.py"]) < 1e-4
    row = re.search(r"```json\n(.*?)```", PAGES[ROOT / "docs" / "extend.md"], re.S)[1]
    (tmp_path / "mine.jsonl").write_text(row)
    problem, = math_task.load("all", path=tmp_path / "mine.jsonl")
    assert math_task.grade("<answer>7</answer>", problem)["answer"] == 1
