"""Flags, files, the run folder and progress lines, without a model; and which file may import which."""
import ast
import itertools
import json
import math
import multiprocessing
import re
import shutil
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors import torch as safe

import start
import train
from grpo import instrument
from methods.registry import CREDIT_FUNCTIONS
from plumbing import flags, run_folder, terminal
from plumbing.files import read_json, read_tensors, replace_file, write_json
from plumbing.metrics import COLUMNS, heldout_text, standard_error, write_credit_log
from plumbing.model_folder import check_folder, weight_files
from plumbing.terminal import Progress
from plumbing.run_folder import Writer
from plumbing.runs import is_finished, read_config
from settings import Settings
from tasks import data
from tests.fixtures import make_batch, refused

ROOT = Path(train.__file__).parent


# The arrows of the house, from the top down: a file imports what stands below it. analyze.py imports of training the
# measures of a token alone, and no file imports a task, which train.py finds by its name.
LAYERS = ("train", "start", "methods", "mitigations", "methods.written", "methods.credit_function", "grpo",
          "extras.turns", "rollout", "extras.prefixes", "sampler", "extras.recorded", "extras.lora", "qwen2_model",
          "plumbing", "settings", "tasks")


def test_arrows_go_down_only():
    known = {"lab", "tests", "analyze", "countdown_task", "extras", *LAYERS}
    layer_of = lambda module: module if module in LAYERS else module.split(".")[0]
    of = lambda node, name: f"{node.module}.{name}" if f"{node.module}.{name}" in LAYERS else node.module
    for file in (file for name in (".", "methods", "extras", "plumbing", "tasks") for file in ROOT.glob(f"{name}/*.py")):
        nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [of(node, alias.name) if isinstance(node, ast.ImportFrom) else alias.name
                 for node in nodes for alias in node.names]
        imported = {layer_of(name) for name in names if name.split(".")[0] in known}
        folder = file.parent.relative_to(ROOT).parts
        layer = layer_of(".".join((*folder, file.stem)))
        apart = layer == "analyze" or file.stem.endswith("_task")
        below = {"plumbing", "tasks"} if apart else {*LAYERS[LAYERS.index(layer) + 1 :]}
        below |= {"grpo"} if layer == "analyze" else set()
        assert imported <= below | {*folder} - {"methods", "extras"} | {layer} & {"methods"}, (
            f"{file} imports {imported - below}")


def test_the_book_does_not_know_its_task():
    """The default of --task, the bundled model's folder and examples in docstrings are all that name Countdown."""
    files = [ROOT / f"{name}.py" for name in ("train", "rollout", "extras/turns", "methods/queries", "grpo", "sampler",
                                            "mitigations")]
    for file in [*files, *ROOT.glob("plumbing/*.py")]:
        code = re.sub(r'""".*?"""|#[^\n]*', "", file.read_text(), flags=re.S)
        assert not re.search("countdown", re.sub(r'"countdown(-tiny)?"', "", code), re.I), file


def test_a_projector_shows_every_line_of_the_trunk():
    trunk = ("docs/walkthrough", "train", "settings", "rollout", "grpo", "qwen2_model", "sampler", "countdown_task",
             "mitigations", "methods/queries")
    for file in [*(ROOT / f"{name}.py" for name in trunk), *ROOT.glob("extras/*.py")]:
        assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 100, file


# ------------------------------------------------------------------------------------------------------ flags


def parse(*arguments):
    """Parse a command line of train.py as its main does."""
    with terminal.one_sentence():
        return start.parse_flags(list(map(str, arguments)))


def test_values_have_the_type_of_their_default():
    s, hyper_parameters, *others = parse("--steps", 7, "--lr", "1e-3", "--model", "x", "--kl", 1, "--skip_unfinished",
                                        "--mitigation", "gtpo", "--a1", 2, "--joint", "True", "--advantage", "rloo")
    assert s == Settings(mitigation="gtpo", steps=7, lr=1e-3, model="x", kl=1.0, skip_unfinished=True, advantage="rloo")
    assert type(s.kl) is float and not parse("--skip_unfinished", "false").settings.skip_unfinished
    assert hyper_parameters == {"a1": 2.0, "a2": 0.1, "joint": True} and others == [None, None]
    assert parse() == (Settings(), {}, None, None)
    assert parse("--mitigation", "inverse_logprob", "--epsilon", "1e-3").hyper_parameters["epsilon"] == 1e-3


GTPO, A1_A2 = Settings(mitigation="gtpo", lr=0.5, steps=3, skip_unfinished=True), {"a1": 2.0, "a2": 0.1, "joint": False}


def configure(folder, method=A1_A2, **settings):
    """Write the config.json of a run; returns its folder."""
    config = {"settings": vars(GTPO) | {"out": "runs/a"} | settings, "method": method, "inputs": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_settings_of_a_run_are_those_of_its_continuation_and_defaults_of_another(tmp_path):
    """But not its folder, which exists; another method takes none of its hyper-parameters."""
    run = configure(tmp_path)
    assert parse("--resume", run) == (replace(GTPO, out="runs/a"), A1_A2, run, None)
    assert parse("--resume", run, "--on_step", "a:b").on_step == "a:b"
    assert parse("--resume", run, "--steps", 0).settings.steps == 0
    for file in (run, run / "config.json"):
        assert parse("--config", file) == (GTPO, A1_A2, None, None)
    assert parse("--a1", 3, "--config", run, "--steps=9")[:2] == (replace(GTPO, steps=9), A1_A2 | {"a1": 3.0})
    assert parse("--config", run, "--mitigation", "gtpo").hyper_parameters == A1_A2
    assert parse("--config", run, "--mitigation", "dpo")[:2] == (replace(GTPO, mitigation="dpo"), {"beta": 0.1})
    for model, kept in (("/clone/models/countdown-tiny", ""), ("/clone/models/countdown-small",) * 2):
        assert parse("--config", configure(run, model=model), "--task", "guess").settings.model == kept
    configure(run)
    (run / "metrics.csv").touch()
    with pytest.raises(ValueError, match="is a run folder: name the model in it, .*checkpoint"):
        check_folder(run)


def test_responses_were_called_answers(tmp_path):
    """In commands, and in the config.json of a run that is continued, or whose settings another one takes."""
    for words in (["--answers", 4], ["--answers=4"]):
        assert parse(*words).settings == Settings(responses=4)
    run = configure(tmp_path, responses=4)
    (run / "config.json").write_text((run / "config.json").read_text().replace('"responses"', '"answers"'))
    assert parse("--resume", run).settings == replace(GTPO, out="runs/a", responses=4)
    assert read_config(run)["settings"]["responses"] == 4  # for analyze.py
    for words, found in (([], 4), (["--answers", 5], 5), (["--responses=6"], 6)):
        assert parse("--config", run, *words).settings == replace(GTPO, responses=found)


@pytest.mark.parametrize("words, said", [
    (["--mitigation", "tempi"], "did you mean tempo"), (["--mitigation", "GRPO"], "none --advantage grpo?"),
    (["--steps", 1.5], "--steps"),
    (["--step", 1], "takes no --step: did you mean --steps?"),  # no abbreviations
    *(([word], said) for word, said in (
        ("--num_iterations=4", "docs/trl.md has `num_iterations`: `--updates_per_batch`"), ("--output_dir=x", "--out`"),
        ("--beta=0.1", "docs/trl.md has `beta`: `--kl` with"), ("--num-generations=8", "`num_generations`: `--responses`"),
        ("--epsilon=0.1", "`--clip_low 0.1 --clip_high 0.28`"), ("--local-rank=0", "`local_rank`: no equal"),
        ("--epsilon_high=0.28", "`--clip_low 0.1 --clip_high 0.28`"), ("--scale_rewards=none", "`--advantage dr_grpo"),
        ("actor_rollout_ref.rollout.n=8", "docs/trl.md has `--responses`, `--questions`"),
        ("--logging_steps=5", "takes no --logging_steps=5: --help lists"), ("--reponses=8", "mean --responses?"))),
    (["ppo"], "takes no ppo"), (["none"], "takes no none: --help lists"), (["--=3"], "takes no --=3: --help lists"),
    (["--max-new-tokens=9"], "mean --max_new_tokens?"),
    (["--skip_unfinished", "yes"], "true or false"), (["--loss_norm", "mean"], "token"),
    (["--mitigation", "vineppo", "--k", 10**26], "--k must be"), (["--mitigation", "gtpo", "--a1", "nan"], "--a1"),
    (["--mitigation", "gtpo", "--normalize", "none"], "takes no --normalize"),
    (["--mitigation", "ppo", "--advantage", "rloo"], "takes no --advantage"),
    (["--mitigation", "ppo", "--shaping", "kl"], "takes no --shaping"),
    (["--resume", "nowhere"], "nowhere is not a run folder"), (["--resume=x", "--lr", 1], "--lr"),
    (["--resume", ".", "--config", "x"], "takes no --config, only --on_step, --steps, --eval"),
    (["--config", "gone.json"], "gone.json"), (["--config", "torn.json"], "not valid JSON"),
    (["--config", "half.json"], "has no method"),
    *((changes, said) for changes, said in (
        ({"speed": 1}, "has a setting speed, which this version"), ({"seed": 1.0}, "seed"),
        ({"reward": "z"}, "--reward"), ({"mitigation": "gone"}, "no credit function gone"), ({"lr": None}, "--lr"),
        ({"method": A1_A2 | {"odd": 1}}, "takes no --odd"))),
    *((function, said) for function, said in (
        (lambda batch, seed=1: None, "seed"), (lambda batch, resume=1: None, "resume"),
        (lambda batch, shape=None: None, "shape")))], ids=str)
def test_flags_that_cannot_work_are_one_sentence(words, said, tmp_path, monkeypatch):
    """Also a config.json that this version can't read, and a credit function whose keyword has a flag's name, or a
    default of a type that no flag has."""
    monkeypatch.chdir(tmp_path)
    for name, content in (("torn.json", "{"), ("half.json", '{"settings": {}}')):
        Path(name).write_text(content)
    if callable(words):
        monkeypatch.setitem(CREDIT_FUNCTIONS, "odd", replace(CREDIT_FUNCTIONS["none"], name="odd", function=words))
        words = ["--mitigation", "odd"]
    if isinstance(words, dict):
        configure(tmp_path, **words)
        assert said in refused(parse, "--resume", ".")
        words = ["--config", "."]
    assert said in refused(parse, *words)


def test_help_lists_every_setting_and_every_method_with_its_formula(capsys):
    with pytest.raises(SystemExit):
        parse("--help", "--mitigation", "ppo")
    text = capsys.readouterr().out
    assert {f.name for f in fields(Settings)} == flags.comments(Settings).keys()
    for name, meaning in flags.comments(Settings).items():
        assert f"--{name} " in text and meaning.split()[0] in text
    assert all(method.summary in text for method in CREDIT_FUNCTIONS.values())
    assert "outcome_conditional --think_discount 0.5\n" in text and "of ppo (default 0.95)" in text


@pytest.mark.parametrize("words, name", [
    ("--think_discount 0.25 --advantage rloo --lr 1e-3 --task some/where/my_task.py --seed 3",
     "think_discount0.25-taskmy_task-advantagerloo-lr0.001-seed3"),
    ("--think_discount 0.5 --steps 3 --device cuda --model m --data d --eval_data e --out o", "seed0")])
def test_the_folder_is_named_after_every_flag_that_was_changed(words, name):
    s, hyper_parameters, *_ = parse("--mitigation", "outcome_conditional", *words.split())
    changed = flags.changed(s, Settings(), hyper_parameters, CREDIT_FUNCTIONS[s.mitigation])
    assert run_folder.default_folder(s.mitigation, s.seed, changed) == Path(f"runs/outcome_conditional-{name}")


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
    (read_tensors, safe.save({"a": torch.ones(9)})[:-1], "is not a complete safetensors file"),
    (read_tensors, safe.save({"a": torch.ones(9, dtype=torch.int8)}), "only floating-point weights"),
    (read_tensors, safe.save({"a": torch.ones(9).to(torch.float8_e4m3fn)}), "float8_e4m3fn; only floating-point weights"),
    (read_tensors, safe.save({"a": torch.ones(9).to(torch.float8_e5m2)}), "float8_e5m2; .*save_pretrained it in bfloat16")])
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


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A run that has only begun, and its settings: a state and a checkpoint every 3 steps."""
    (tmp_path / "model" / "additional_chat_templates").mkdir(parents=True)
    for name in (*BESIDE, "config.json", "model.safetensors", "optimizer.pt", "trainer_state.json", "README.md"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "r.part").mkdir()  # somebody's own
    (tmp_path / "r").mkdir()  # empty
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "my puzzles"])
    s = Settings(model=str(tmp_path / "model"), steps=5, state_every=3, checkpoint_every=3)
    assert Writer(tmp_path / "r", s, {"k": 2}, {}, None).open(SOURCE, ["x"], resume=False) == (0, {})
    return tmp_path / "r", s


def save(run, s, step):
    """Write what is due after a step."""
    write_weights = lambda folder: (folder / "weights").write_text(str(step))
    Writer(run, s, {"k": 2}, {"counter": counter(step)}, write_weights).save(step)


@pytest.fixture
def counted(new):
    """A run of four steps."""
    run, s = new
    batch = make_batch([2, 4], [1.0, -0.5])
    batch.log["mine"] = batch.entropy
    measured = instrument(batch, batch.logprob, Settings())
    run_folder.append_row(run, {"step": 0, "heldout_success": 0.5})
    for step in range(1, 5):
        checksum = write_credit_log(run / "credit" / f"step-{step:06d}.npz", step, batch, measured)
        run_folder.append_row(run, dict.fromkeys(COLUMNS, 0) | {"step": step, "credit_checksum": checksum})
        (run / "samples.txt").write_text("of steps 1 to 4")
        save(run, s, step)
    return run, s


def resume(run, s, learner=None, columns=("x",), logged=("mine",), **hyper_parameters):
    """Load a run to resume; how many steps are done."""
    learner = learner or counter()
    write_weights = lambda folder: (folder / "weights").write_text(str(learner.steps.item()))
    writer = Writer(run, s, {"k": 2} | hyper_parameters, {"counter": learner}, write_weights, logged=logged)
    done, row = writer.open(SOURCE, columns, resume=True)
    assert row.get("step", 0) == done
    return done


def refuses(said, run, action, *arguments, **hyper_parameters):
    """Fails unless an action is refused in one sentence and changes nothing in a folder."""
    contents = lambda: {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "lock"}
    before = contents()
    with pytest.raises(ValueError, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        action(*arguments, **hyper_parameters)
    assert contents() == before


def test_a_new_run_folder_holds_config_header_and_tokenizer(new):
    """Guards against a checkpoint without its chat template or end tokens, too."""
    run, s = new
    assert (run.parent / "r.part").is_dir()
    found = {str(p.relative_to(run)) for p in run.rglob("*")}
    assert found == {"config.json", "metrics.csv", "credit", "lock", "checkpoint",
                     "checkpoint/additional_chat_templates", *(f"checkpoint/{name}" for name in BESIDE)}
    config = read_json(run / "config.json")
    assert (config["settings"], config["method"]) == (vars(s), {"k": 2})
    assert config["versions"].keys() == {"python", "torch", "numpy"}
    assert config["command"] == "python train.py --data 'my puzzles'"
    assert (run / "metrics.csv").read_text().strip() == ",".join([*COLUMNS, "x"])
    refuses("exists", run, Writer(run, s, {}, {}, None).open, SOURCE, (), False)


def test_a_run_is_resumed_from_its_last_state_and_cut_back_to_it(counted):
    """That of step 4 of 5, before the evaluation at the end, which may be long: a kill in it costs one step."""
    run, s = counted
    assert (run / "checkpoint" / "weights").read_text() == "4"
    assert [file.parent.name for file in run.glob("checkpoints/*/tokenizer.json")] == ["step-000003"]
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
    (run / "checkpoint" / "weights").write_text("5")
    assert resume(run, replace(s, steps=4)) == 4 and (run / "checkpoint" / "weights").read_text() == "4"
    assert resume(run, replace(s, steps=9), learner) == learner.steps == 4
    assert len((run / "metrics.csv").read_text()) == length
    assert (run / "samples.txt").read_text() == "of steps 1 to 4"
    assert sorted(p.name for p in run.glob("credit/*"))[-1] == "step-000004.npz"
    assert {p.name for p in run.glob("checkpoints/*")} == {"step-000003", "step-best"}
    assert not [*run.rglob("*.part")] and read_json(run / "config.json")["settings"]["steps"] == 9
    assert resume(run, replace(s, steps=9), columns=()) == 4  # code that no longer measures x
    run_folder.append_row(run, {"step": 5, "reward": float("nan"), "x": 0.5})
    assert (run / "metrics.csv").read_text().splitlines()[-1] == "5" + "," * len(COLUMNS) + "0.5"
    for step, every, last in ((5, 3, 4), (6, 3, 6), (8, 0, 6), (9, 0, 9)):  # the last step always writes one
        save(run, replace(s, state_every=every, checkpoint_every=0, steps=9), step)
        assert run_folder.load_state(run)["step"] == last


def edit(**fields):
    """How to change fields of a state."""
    return lambda run: torch.save(torch.load(run / "state.pt") | fields, run / "state.pt")


FALLS = {"linear_decay": True}
REFUSED = {  # what is done to a run: what is said, settings, and what else a resumed run has
    "code in the state": (edit(x=Path("a")), "state.pt"),  # no tensor: only a pickle that runs code could make it
    "half a state": (lambda run: (run / "state.pt").write_bytes((run / "state.pt").read_bytes()[:300]), "state.pt"),
    "an older version": (edit(layout=1), "state.pt is broken or was not written by this version"),
    "another model": (edit(learners={"other": {}}), "state.pt does not fit"),
    "another size": (edit(learners={"counter": {"steps": torch.ones(3)}}), "state.pt does not fit"),
    "a log that is gone": (lambda run: (run / "samples.txt").unlink(), "samples.txt was changed since state.pt"),
    "a log without its last row": (lambda run: (run / "metrics.csv").write_text("".join(
        (run / "metrics.csv").read_text().splitlines(True)[:-2])), "metrics.csv was changed since state.pt"),
    "a new column": (None, "metrics.csv has no column y", {}, {"columns": ["x", "y"]}),
    "fewer steps": (None, "already has 4 steps, more than --steps 3", {"steps": 3}),
    "another tokenizer": (lambda run: (run.parent / "model" / "tokenizer.json").write_text("[]"),
                          "tokenizer.json is not what .* began with"),
    "another task": (lambda run: SOURCE.update({"the task": "def score"}), "the task is not what .* began with"),
    "no step left": (lambda run: (run / "final.json").write_text('{"step": 9}'), "has finished its 9 steps",
                     {"steps": 9}),
    "another end of --linear_decay": (None,
                                      "depends on its 5 steps: resume it without --steps", FALLS | {"steps": 9})}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_is_not_as_it_was_is_not_resumed(case, counted, monkeypatch):
    """Guards against a learning rate that jumps up where --linear_decay counts from the last step, too."""
    (run, s), (change, said, settings, others) = counted, (*REFUSED[case], {}, {})[:4]
    monkeypatch.setitem(SOURCE, "the task", SOURCE["the task"])
    if change:
        change(run)
    refuses(said, run, resume, run, replace(s, **settings), **others)
    if case == "no step left":
        assert resume(run, replace(s, steps=8)) == 4 and not (run / "final.json").exists()


def test_a_run_is_finished_without_the_pass_rate_that_it_was_not_asked_for(new):
    """Guards against a run with --pass_at 0 that is made again and again."""
    run, s = new
    assert not is_finished(run)
    for k, final, finished in ((16, {"step": 5}, False), (16, {"step": 4, "pass@16": 0.5}, False),
                               (3, {"step": 5, "pass@3": 0.5}, True), (0, {"step": 5}, True)):
        write_json(run / "config.json", {"settings": vars(s) | {"pass_at": k}, "method": {}, "inputs": {}})
        write_json(run / "final.json", final)
        assert is_finished(run) == finished


def test_a_second_process_does_not_write_a_run(counted, tmp_path):
    """It is told the number of the first one, until that one is dead."""
    run, s = shutil.copytree(counted[0], tmp_path / "copy"), counted[1]  # this process has locked the original
    (run / "lock").write_text("9" * 99)  # of a process that is dead
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()
    first = fork.Process(target=lambda: (run_folder.lock(run), locked.set(), time.sleep(60)))
    first.start()
    locked.wait()
    refuses(f"copy is being written by process {first.pid}: wait", tmp_path, resume, run, s)
    first.kill()
    first.join()
    assert resume(run, s) == 4


def test_samples_are_the_first_response_to_each_of_three_puzzles(tmp_path):
    task = SimpleNamespace(show=lambda puzzle: f"{puzzle} -> ?")
    batch = SimpleNamespace(text=list("abcdefgh"), task=task, puzzles=[4, 5, 6, 7],
                            reward=torch.arange(8) / 10, advantage=torch.arange(8) - 2.0)
    run_folder.write_samples(tmp_path, 5, batch)
    assert (tmp_path / "samples.txt").read_text() == "".join(
        f"=== step 5  {puzzle} -> ?  reward {reward}  advantage {advantage}\n{text}\n\n"
        for puzzle, reward, advantage, text in
        ((4, "0.00", "-2.00", "a"), (5, "0.20", "+0.00", "c"), (6, "0.40", "+2.00", "e")))


def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    now, line = [100.0], Progress("work", 4)
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    line.start = line.last = now[0]
    for done, seconds in ((1, 70), (2, 5), (4, 70)):
        now[0] += seconds
        line.show(done)
    assert capsys.readouterr().err == "work: 1/4  ETA 3:30\nwork: 4/4  ETA 0:00\n"
    now[0] += 10
    line.show(0.08)  # a fiftieth says nothing
    assert capsys.readouterr().err == "work: 0/4  ETA unknown yet\n"


def test_held_out_success_of_a_single_puzzle_has_no_interval():
    """Guards against a ± nan%, a ± 0.0% where no puzzle is solved or all are, and shares below 0% or above 100%.
    Wilson's interval of 0 of 5 ends at z^2 / (5 + z^2); with 10 of 20, there is z = 1.96 times the standard error."""
    for values, text in (([1.0], "100.0%"), ([0.0] * 5, "0.0% (0.0% to 43.4%)"), ([1.0] * 4, "100.0% (51.0% to 100.0%)"),
                         ([1.0, 0, 0, 0], "25.0% (4.6% to 69.9%)"), ([1.0, 0, 1, 0], "50.0% ± 35.0%"),
                         ([1.0] * 9 + [0] * 11, "45.0% (25.8% to 65.8%)"), ([1, 0.0] * 10, "50.0% ± 22.5%")):
        success, text = np.array(values), "  held-out " + text
        assert heldout_text({"heldout_success": success.mean(), "heldout_stderr": standard_error(success)}) == text
    assert heldout_text({"heldout_success": 0.0, "heldout_stderr": 0.0}) == "  held-out 0.0%"  # of an older run


def test_a_tracker_gets_no_nan():
    """A writer of strict JSON takes each row."""
    row = {"a": 1, "b": math.nan, "c": None, "d": np.float64("nan"), "e": 0.5}
    assert json.loads(json.dumps(run_folder.without_nan(row), allow_nan=False)) == {
        "a": 1, "b": None, "c": None, "d": None, "e": 0.5}


@pytest.mark.parametrize("text", ["-1e-4", "-2E+3", "-.5e1", "-3.", "-7"])
def test_a_negative_number_in_any_form_is_a_value(text):
    """Guards against one that is taken for a flag."""
    parser = flags.new_parser()
    parser.add_argument("--lr", type=float)
    assert parser.parse_args(["--lr", text]).lr == float(text)


def test_drawing_says_how_far_it_is_and_when_nothing_is_left(monkeypatch, capsys):
    """By a clock of ours, a second a draw: ten draws of which every second one is new."""
    seconds = itertools.count()
    monkeypatch.setattr(data.time, "monotonic", lambda: next(seconds))
    numbers = itertools.count()
    found = data.draw_distinct(5, lambda: SimpleNamespace(id=next(numbers) // 2), "things")
    assert [x.id for x in found] == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err.startswith("making things: 2/5  ETA 4 s\n")
    with pytest.raises(ValueError, match="found only 1 of 2 squares: ask for fewer"):
        data.draw_distinct(2, lambda: SimpleNamespace(id=1), "squares")
