"""Flags, files, the run folder and progress lines, without a model; and which file may import which."""
import ast
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

import start
import train
from methods import MITIGATIONS
from plumbing import flags, progress, run_folder
from plumbing.files import read_json, read_tensors, replace_file, write_json
from plumbing.metrics import COLUMNS, heldout_text, standard_error, write_credit_log
from plumbing.model_folder import check_folder, weight_files
from plumbing.progress import Progress
from plumbing.runs import is_finished
from tests.fixtures import make_batch, refused
from settings import Settings

ROOT = Path(train.__file__).parent


# The arrows of the house, from the top down: a file imports what stands below it. analyze.py imports no part of
# training, and no file imports a task, which train.py finds by its name.
LAYERS = ("train", "start", "methods", "grpo", "mitigations", "queries", "rollout", "turns", "sampler", "lora",
          "qwen2_model", "plumbing", "settings", "tasks")


def imports(file):
    """The modules of the book that a file imports, as their layers."""
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or alias.name for node in nodes for alias in node.names]
    known = {"lab", "tests", "analyze", "countdown_task", *LAYERS}
    return {layer_of(name) for name in names if name.split(".")[0] in known}


def layer_of(module):
    return module if module in LAYERS else module.split(".")[0]


def test_arrows_go_down_only():
    for file in (file for name in (".", "methods", "plumbing", "tasks") for file in ROOT.glob(f"{name}/*.py")):
        folder = file.parent.relative_to(ROOT).parts
        layer = layer_of(".".join((*folder, file.stem)))
        apart = layer == "analyze" or file.stem.endswith("_task")
        below = {"plumbing", "tasks"} if apart else {*LAYERS[LAYERS.index(layer) + 1 :]}
        assert imports(file) <= below | {*folder}, f"{file} imports {imports(file) - below}"


def test_training_does_not_load_what_draws():
    """matplotlib takes as long to import as a step of training."""
    code = "import sys, train; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_book_does_not_know_its_task():
    """The default of --task, the bundled model's folder and examples in docstrings are all that name Countdown."""
    files = [ROOT / f"{name}.py" for name in ("train", "rollout", "turns", "queries", "grpo", "sampler", "mitigations")]
    for file in [*files, *ROOT.glob("plumbing/*.py")]:
        code = re.sub(r'""".*?"""|#[^\n]*', "", file.read_text(), flags=re.S)
        assert not re.search("countdown", re.sub(r'"countdown(-tiny)?"', "", code), re.I), file


# ------------------------------------------------------------------------------------------------------ flags


def parse(*arguments):
    """Parse a command line of train.py as its main does."""
    with progress.one_sentence():
        return start.parse_flags(list(map(str, arguments)))


def test_values_have_the_type_of_their_default():
    s, hyper_parameters, *others = parse("--steps", 7, "--lr", "1e-3", "--model", "x", "--kl", 1, "--skip_unfinished",
                                        "--mitigation", "gtpo", "--a1", 2, "--joint", "True", "--advantage", "rloo")
    assert s == Settings(mitigation="gtpo", steps=7, lr=1e-3, model="x", kl=1.0, skip_unfinished=True, advantage="rloo")
    assert type(s.kl) is float and parse("--steps", "2", "--lr", "-1e-3").settings.lr == -1e-3
    assert hyper_parameters == {"a1": 2.0, "a2": 0.1, "joint": True}
    assert others == [None, None]
    assert parse() == (Settings(), {}, None, None)
    assert parse("--mitigation", "inverse_logprob", "--epsilon", "1e-3").hyper_parameters["epsilon"] == 1e-3


@pytest.mark.parametrize(["arguments", "named"], [
    (["--mitigation", "tempi"], "did you mean tempo"), (["--mitigation", "GRPO"], "none --advantage grpo?"),
    (["--steps", 1.5], "--steps"),
    (["--step", 1], "takes no --step: did you mean --steps?"),  # no abbreviations
    (["--num-generations=8"], "that is --answers here"), (["--beta", 0.1], "is --kl with --kl_gradient unbiased here"),
    (["ppo"], "takes no ppo: did you mean --mitigation ppo?"), (["--max-new-tokens=9"], "mean --max_new_tokens?"),
    (["--skip_unfinished", "yes"], "true or false"), (["--loss_norm", "mean"], "token"),
    (["--mitigation", "vineppo", "--k", 10**26], "--k must be"), (["--mitigation", "gtpo", "--a1", "nan"], "--a1"),
    (["--mitigation", "gtpo", "--normalize", "none"], "takes no --normalize"),
    (["--mitigation", "ppo", "--advantage", "rloo"], "takes no --advantage"),
    (["--mitigation", "ppo", "--shaping", "kl"], "takes no --shaping"),
    (["--resume", "nowhere"], "nowhere is not a run folder"), (["--resume=x", "--lr", 1], "--lr"),
    (lambda batch, seed=1: None, "seed"), (lambda batch, resume=1: None, "resume"),
    (lambda batch, shape=None: None, "shape"),
], ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else "")
def test_flags_that_cannot_work_are_one_sentence(arguments, named, monkeypatch):
    """Also those of a credit function whose keyword has a flag's name, or a default of a type that no flag has."""
    if callable(arguments):
        monkeypatch.setitem(MITIGATIONS, "odd", replace(MITIGATIONS["none"], name="odd", function=arguments))
        arguments = ["--mitigation", "odd"]
    assert named in refused(parse, *arguments)


def test_help_lists_every_setting_and_every_method_with_its_formula(capsys):
    with pytest.raises(SystemExit):
        parse("--help", "--mitigation", "ppo")
    text = capsys.readouterr().out
    assert {f.name for f in fields(Settings)} == flags.comments(Settings).keys()
    for name, meaning in flags.comments(Settings).items():
        assert f"--{name} " in text and meaning.split()[0] in text
    assert all(method.summary in text for method in MITIGATIONS.values())
    assert "outcome_conditional --think_discount 0.5\n" in text and "of ppo (default 0.95)" in text


GTPO, A1_A2 = Settings(mitigation="gtpo", lr=0.5, steps=3), {"a1": 2.0, "a2": 0.1, "joint": False}


def test_a_resumed_run_keeps_its_settings_except_the_steps(tmp_path):
    """And is refused where they can't be flags of this version."""
    def write(settings, method):
        config = {"settings": vars(GTPO) | settings, "method": A1_A2 | method, "inputs": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))

    write({}, {})
    assert parse("--resume", tmp_path) == (GTPO, A1_A2, tmp_path, None)
    assert parse("--resume", tmp_path, "--on_step", "a:b").on_step == "a:b"
    assert parse("--resume", tmp_path, "--steps", 0).settings == replace(GTPO, steps=0)
    for settings, method, named in (
            ({"speed": 1}, {}, "has a setting speed, which this version"), ({"seed": 1.0}, {}, "seed"), ({"reward": "zzz"}, {}, "--reward"),
            ({"mitigation": "gone"}, {}, "no credit function gone"), ({"lr": None}, {}, "--lr"),
            ({}, {"odd": 1}, "takes no --odd")):
        write(settings, method)
        assert named in refused(parse, "--resume", tmp_path)
    assert "takes --steps, --on_step and no --config" in refused(parse, "--resume", tmp_path, "--config", "x")


def test_the_settings_of_another_run_are_defaults(tmp_path):
    """But not its folder, which exists; another method takes none of its hyper-parameters."""
    def write(**settings):
        config = {"settings": vars(GTPO) | {"out": "runs/a", "skip_unfinished": True} | settings, "method": A1_A2}
        (file := tmp_path / "mine.json").write_text(json.dumps(config))
        return file

    same = replace(GTPO, skip_unfinished=True)
    assert parse("--config", write()) == (same, A1_A2, None, None)
    assert parse("--a1", 3, "--config", write(), "--steps=9")[:2] == (replace(same, steps=9), A1_A2 | {"a1": 3.0})
    assert parse("--config", write(), "--mitigation", "gtpo").hyper_parameters == A1_A2
    assert parse("--config", write(), "--mitigation", "dpo")[:2] == (replace(same, mitigation="dpo"), {"beta": 0.1})
    assert "has a setting speed, which this version" in refused(parse, "--config", write(speed=1))
    assert "--lr" in refused(parse, "--config", write(lr="fast"))
    for content, named in (("{", "not valid JSON"), ('{"settings": {}}', "has no method")):
        (tmp_path / "torn.json").write_text(content)
        assert named in refused(parse, "--config", tmp_path / "torn.json")
    assert "gone.json" in refused(parse, "--config", "gone.json")
    write()
    (tmp_path / "mine.json").rename(tmp_path / "config.json")
    assert parse("--config", tmp_path).settings.lr == GTPO.lr
    (tmp_path / "metrics.csv").touch()
    with pytest.raises(ValueError, match="is a run folder: name the model in it, .*checkpoint"):
        check_folder(tmp_path)


@pytest.mark.parametrize("name, said", [("gone:log", "gone"), ("json", "module:function"), ("json:log", "log"),
                                        (":log", "module:function"), ("json:__doc__", "is no function"),
                                        ("tracking:log", "tracking needs gone: No module named 'gone'")])
def test_a_function_that_is_not_there_is_one_sentence(name, said, tmp_path, monkeypatch):
    (tmp_path / "tracking.py").write_text("import gone")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tracking", raising=False)
    """And of several processes only the first one looks for it."""
    with pytest.raises(ValueError, match=re.escape(f"--on_step {name}: ")) as error:
        flags.load_function(name)
    assert said in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setattr(flags, "leads", lambda: False)
    assert flags.load_function(name)({"step": 0}) is None


def test_the_folder_is_named_after_every_flag_that_was_changed():
    def name(*arguments):
        s, hyper_parameters, *_ = parse(*arguments)
        changed = flags.changed(s, Settings(), hyper_parameters, MITIGATIONS[s.mitigation])
        return str(run_folder.default_folder(s.mitigation, s.seed, changed))

    method = ["--mitigation", "outcome_conditional"]
    assert name(*method, "--think_discount", 0.25) == "runs/outcome_conditional-think_discount0.25-seed0"
    assert name(*method, "--think_discount", 0.5, "--seed", 3) == "runs/outcome_conditional-seed3"
    assert name("--advantage", "rloo", "--lr", 1e-3) == "runs/none-advantagerloo-lr0.001-seed0"
    assert name("--task", "some/where/my_task.py") == "runs/none-taskmy_task-seed0"
    unnamed = ("--steps", 3, "--device", "cuda", "--model", "m", "--data", "d", "--eval_data", "e", "--out", "o")
    assert name(*unnamed) == "runs/none-seed0"


# ------------------------------------------------------------------------------------------------------ files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """A full disk is an error of the system, though torch and safetensors have exceptions of their own for it."""
    file = tmp_path / "x.pt"
    replace_file(file, lambda part: part.write_text("old"))
    for error in (RuntimeError("unexpected pos 64 vs 0"), SafetensorError("IoError code 28")):
        def half(part):
            part.write_text("ne")
            raise error

        with pytest.raises(OSError, match="x.pt can't be written, is the disk full"):
            replace_file(file, half)
        assert file.read_text() == "old"
    replace_file(file, lambda part: part.write_text("new"))  # what the failed ones left behind does not matter
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("x.pt", "new")]


def test_json_is_what_others_read_and_write(tmp_path):
    write_json(tmp_path / "x.json", {"a": [math.nan, 1e308, {"b": -math.inf}], "Infinity": "NaN"})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "a": [None, 1e308, {"b": None}], "Infinity": "NaN"}
    (tmp_path / "x.json").write_text("\ufeff{}", encoding="utf-8")  # a byte-order mark, as some editors write it
    assert read_json(tmp_path / "x.json") == {}


@pytest.mark.parametrize("read, content, said", [
    (read_json, b"{", "is not valid JSON"), (read_json, b"[1]", "does not hold a JSON object"),
    (read_tensors, save({"a": torch.ones(9)})[:-1], "is not a complete safetensors file"),
    (read_tensors, save({"a": torch.ones(9, dtype=torch.int8)}), "only floating-point weights")])
def test_a_broken_file_is_named(read, content, said, tmp_path):
    """Guards against quantized weights without their scales, which mean nothing."""
    (tmp_path / "x.y").write_bytes(content)
    with pytest.raises(ValueError, match=f"x.y .*{said}"):
        read(tmp_path / "x.y")


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
TWO = '{"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}'


@pytest.mark.parametrize("files, index, found", [
    (["model.safetensors", *SHARDS], TWO, ["model.safetensors"]),  # which transformers reads first, too
    (["b.safetensors", "a.safetensors"], TWO, ["a.safetensors", "b.safetensors"]), (SHARDS, "", SHARDS),
    ([], "", "model.safetensors is missing"), (["a.safetensors"], TWO, "b.safetensors is missing")])
def test_weight_files_are_one_file_or_all_shards(files, index, found, tmp_path):
    """Guards against a model that lacks a shard, and shards of an older checkpoint beside its index."""
    for name in files:
        (tmp_path / name).touch()
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}')
    if isinstance(found, list):
        assert weight_files(tmp_path) == [tmp_path / name for name in found]
    else:
        with pytest.raises(FileNotFoundError, match=found):
            weight_files(tmp_path)


# ------------------------------------------------------------------------------------------------- run folder


SOURCE = {"the task": "def grade"}
BESIDE = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "chat_template.json",
          "additional_chat_templates/rag.jinja"}


def counter(steps=0):
    """A module that learns to count."""
    module = torch.nn.Module()
    module.register_buffer("steps", torch.tensor(steps))
    return module


def begin(run, s, columns=()):
    """Create the folder of a run."""
    return run_folder.Writer(run, s, {"k": 2}, {}, None).open(SOURCE, columns, resume=False)


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A run that has only begun, and its settings: a state every 2 steps and a checkpoint every 3."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    for name in (*BESIDE, "config.json", "model.safetensors", "optimizer.pt", "trainer_state.json", "README.md"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "r.part").mkdir()  # somebody's own
    (tmp_path / ".r.starting" / "old").mkdir(parents=True)  # of a run that was killed while it created its folder
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "my puzzles"])
    s = Settings(model=str(tmp_path / "model"), steps=5, state_every=2, checkpoint_every=3)
    assert begin(tmp_path / "r", s, ["x"]) == (0, {})
    return tmp_path / "r", s


@pytest.fixture
def counted(new):
    """A run of four steps."""
    run, s = new
    batch = make_batch([2, 4], [1.0, -0.5])
    batch.log["mine"] = batch.entropy
    run_folder.append_row(run, {"step": 0, "heldout_success": 0.5})
    for step in range(1, 5):
        checksum = write_credit_log(run / "credit" / f"step-{step:06d}.npz", step, batch, batch.logprob)
        run_folder.append_row(run, dict.fromkeys(COLUMNS, 0) | {"step": step, "credit_checksum": checksum})
        (run / "samples.txt").write_text("of steps 1 to 4")
        write_weights = lambda folder: (folder / "weights").write_text(str(step))
        run_folder.Writer(run, s, {"k": 2}, {"counter": counter(step)}, write_weights).save(step)
    return run, s


def resume(run, s, learner=None, columns=("x",), logged=("mine",), **hyper_parameters):
    """Load a run to resume; how many steps are done."""
    writer = run_folder.Writer(run, s, {"k": 2} | hyper_parameters, {"counter": learner or counter()}, None,
                               logged=logged)
    done, row = writer.open(SOURCE, columns, resume=True)
    assert row.get("step", 0) == done
    return done


def bytes_of(run):
    """All files of a run but the lock."""
    files = [file for file in run.rglob("*") if file.is_file() and file.name != "lock"]
    return {file: file.read_bytes() for file in files}


def refuses(said, run, action, *arguments, **hyper_parameters):
    """Fails unless an action is refused in one sentence and changes nothing in a folder."""
    before = bytes_of(run)
    with pytest.raises(ValueError, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        action(*arguments, **hyper_parameters)
    assert bytes_of(run) == before


def test_a_new_run_folder_holds_config_header_and_tokenizer(new):
    """Guards against a checkpoint without its chat template or end tokens, too."""
    run, s = new
    assert (run.parent / "r.part").is_dir() and not (run.parent / ".r.starting").exists()
    found = {str(p.relative_to(run)) for p in run.rglob("*")}
    assert found == {"config.json", "metrics.csv", "credit", "lock", "checkpoint",
                     "checkpoint/additional_chat_templates", *(f"checkpoint/{name}" for name in BESIDE)}
    config = read_json(run / "config.json")
    assert (config["settings"], config["method"]) == (vars(s), {"k": 2})
    assert config["versions"].keys() == {"python", "torch", "numpy"}
    assert config["command"] == "python train.py --data 'my puzzles'"
    assert (run / "metrics.csv").read_text().strip() == ",".join([*COLUMNS, "x"])
    refuses("exists", run, begin, run, s)


def test_checkpoints_and_state_are_written_when_they_are_due(counted):
    run, s = counted
    assert run_folder.load_state(run)["step"] == 4
    assert (run / "checkpoint" / "weights").read_text() == "4"
    assert [file.parent.name for file in run.glob("checkpoints/*/tokenizer.json")] == ["step-000003"]
    never = replace(s, state_every=0, checkpoint_every=0, steps=6)
    for step in (5, 6):
        run_folder.Writer(run, never, {}, {"counter": counter(step)}, lambda folder: None).save(step)
        assert run_folder.load_state(run)["step"] == (4 if step == 5 else 6)  # the last step always writes one


def test_a_resumed_run_is_cut_back_to_its_state(counted):
    run, s = counted
    length, learner = len((run / "metrics.csv").read_text()), counter()
    (run / "credit" / "step-000002 (1).npz").touch()  # somebody's copy
    (run / "checkpoints" / "step-best").mkdir()
    for step in (5, 6):  # written, but lost with the kill
        run_folder.append_row(run, {"step": step})
        (run / "credit" / f"step-{step:06d}.npz").touch()
        (run / "checkpoints" / f"step-{step:06d}" / "deep").mkdir(parents=True)
    (run / "samples.txt").write_text("of steps 1 to 4, and of 5")
    for half in ("state.pt.part", "credit/step-000005.npz.part", "checkpoint/model.safetensors.part"):
        (run / half).mkdir()  # killed between the renaming and the removal of the folder, or before
    (run / "credit" / "step-000005.npz.part" / "step-000005.npz").touch()
    assert resume(run, replace(s, steps=9), learner) == learner.steps == 4
    assert len((run / "metrics.csv").read_text()) == length
    assert (run / "samples.txt").read_text() == "of steps 1 to 4"
    assert sorted(p.name for p in run.glob("credit/*"))[-1] == "step-000004.npz"
    assert {p.name for p in run.glob("checkpoints/*")} == {"step-000003", "step-best"}
    assert not [*run.rglob("*.part")]
    assert read_json(run / "config.json")["settings"]["steps"] == 9
    assert resume(run, replace(s, steps=9), columns=()) == 4  # code that no longer measures x
    run_folder.append_row(run, {"step": 5, "reward": float("nan"), "x": 0.5})
    assert (run / "metrics.csv").read_text().splitlines()[-1] == "5" + "," * len(COLUMNS) + "0.5"


def edit(**fields):
    """How to change fields of a state."""
    return lambda file: torch.save(torch.load(file) | fields, file)


STATES = {
    "with code in it": edit(x=Path("a")),  # which is no tensor: only a pickle that runs code could make it
    "half": lambda file: file.write_bytes(file.read_bytes()[:300]),
    "of an older version": edit(layout=1),
    "of another model": edit(learners={"other": {}}),
    "of another size": edit(learners={"counter": {"steps": torch.ones(3)}}),
    "a log that is gone": lambda file: (file.parent / "samples.txt").unlink(),
    "a credit file of another run": lambda file: write_credit_log(
        file.parent / "credit" / "step-000002.npz", 2, make_batch([2], [1.0]), torch.ones(1, 2)),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_cannot_be_loaded_is_refused(case, counted):
    run, s = counted
    STATES[case](run / "state.pt")
    refuses("state.pt", run, resume, run, s)


def test_a_run_with_other_settings_or_inputs_than_it_began_with_is_not_resumed(counted, monkeypatch):
    """Guards against a learning rate that jumps up where --linear_decay counts from the last step, too."""
    run, s = counted
    refuses("state.pt was written with seed=0, but config.json says 1", run, resume, run, replace(s, seed=1))
    refuses("state.pt was written with k=2, but config.json says 3", run, resume, run, s, k=3)
    refuses("metrics.csv has no column y", run, resume, run, s, columns=["x", "y"])
    refuses("metrics.csv has no column y", run, run_folder.append_row, run, {"step": 5, "y": 1})
    refuses("credit has mine of batch.log, but the trial step nothing", run, resume, run, s, logged=())
    refuses("has mine of batch.log, but the trial step mine, new: log", run, resume, run, s, logged=("mine", "new"))
    for logged, said in (("mine",), "lacks mine"), ((), "has new"):
        batch, writer = make_batch([2], [1.0]), run_folder.Writer(run, s, {}, {}, None, logged=logged)
        batch.log |= {} if logged else {"new": batch.entropy}
        refuses(f"batch.log {said} in step 5, unlike", run, writer.step, 5, batch, batch.entropy, {"step": 5})
    refuses("already has 4 steps, more than --steps 3", run, resume, run, replace(s, steps=3))
    tokenizer = Path(s.model) / "tokenizer.json"
    tokenizer.write_text("[]")
    refuses("tokenizer.json is not what .* began with", run, resume, run, s)
    tokenizer.write_text("{}")
    with monkeypatch.context() as patch:
        patch.setitem(SOURCE, "the task", "def score")
        refuses("the task is not what .* began with", run, resume, run, s)
    (run / "final.json").write_text('{"step": 9}')
    refuses("has finished its 9 steps", run, resume, run, replace(s, steps=9))
    assert resume(run, replace(s, steps=8)) == 4 and not (run / "final.json").exists()
    falls = replace(s, linear_decay=True)
    edit(settings=vars(falls) | {"k": 2})(run / "state.pt")
    refuses("depends on its 5 steps: resume it without --steps", run, resume, run, replace(falls, steps=9))
    assert resume(run, falls) == 4


def test_a_run_is_finished_without_the_pass_rate_that_it_was_not_asked_for(new):
    """Guards against a run with --pass_at 0 that is made again and again."""
    run, s = new
    assert not is_finished(run)
    for k, final, finished in ((16, {"step": 5}, False), (16, {"step": 4, "pass@16": 0.5}, False),
                               (3, {"step": 5, "pass@3": 0.5}, True), (0, {"step": 5}, True)):
        config = {"settings": vars(s) | {"pass_at": k}, "method": {}, "inputs": {}}
        (run / "config.json").write_text(json.dumps(config))
        (run / "final.json").write_text(json.dumps(final))
        assert is_finished(run) == finished


def test_a_second_process_does_not_write_a_run(counted, tmp_path):
    """It is told the number of the first one, until that one is dead."""
    run, s = shutil.copytree(counted[0], tmp_path / "copy"), counted[1]  # this process has locked the original
    code = "import sys; from pathlib import Path; from plumbing import run_folder; " \
           "run_folder.lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, run]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        refuses(f"copy is being written by process {first.pid}: wait", tmp_path, resume, run, s)
        first.kill()
    assert resume(run, s) == 4


def test_samples_are_the_first_response_to_each_of_three_puzzles(tmp_path):
    task = SimpleNamespace(show=lambda puzzle: f"{puzzle} -> ?")
    batch = SimpleNamespace(text=list("abcdefgh"), task=task, puzzles=[4, 5, 6, 7],
                            reward=torch.arange(8) / 10, advantage=torch.arange(8) - 2.0)
    run_folder.write_samples(tmp_path, 5, batch)
    heads = (tmp_path / "samples.txt").read_text().split("\n")
    assert heads[:2] == ["=== step 5  4 -> ?  reward 0.00  advantage -2.00", "a"]
    assert heads[3:5] == ["=== step 5  5 -> ?  reward 0.20  advantage +0.00", "c"]
    assert heads[6:] == ["=== step 5  6 -> ?  reward 0.40  advantage +2.00", "e", "", ""]


def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    """Of several processes only the first one speaks."""
    now, line = [100.0], Progress("work", 4)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    line.start = line.last = now[0]
    for done, seconds in ((1, 70), (2, 5), (4, 70)):
        now[0] += seconds
        line.show(done)
    assert capsys.readouterr().err == "work: 1/4  ETA 3:30\nwork: 4/4  ETA 0:00\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    now[0] += 70
    line.show(4)
    assert capsys.readouterr().err == ""


def test_held_out_success_of_a_single_puzzle_has_no_interval():
    """Guards against a ± nan%."""
    for values, text in ([1.0], "  held-out 100.0%"), ([1.0, 0, 1, 0], "  held-out 50.0% ± 56.6%"):
        success = np.array(values)
        assert heldout_text({"heldout_success": success.mean(), "heldout_stderr": standard_error(success)}) == text
