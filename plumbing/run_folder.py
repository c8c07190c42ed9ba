"""The run folder: what a run writes, and what it resumes from.

    config.json metrics.csv credit/ samples.txt checkpoint/ checkpoints/ final.json state.pt lock

checkpoint/ and state.pt are written every --state_every steps, before a step that ends with an evaluation, after the
last one, and when a signal stops the run. A run that was stopped or killed resumes from the step of its state.pt: the
logs are cut back to it, and the rest of the run is the same as without the interruption.
One process writes a run at a time. Everybody may read it meanwhile.
"""
import csv
import io
import math
import os
import platform
import shlex
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from plumbing.files import check_fields, checksum, read_json, replace_file, require, write_json
from plumbing.metrics import COLUMNS, write_credit_log
from plumbing.model_folder import files_beside
from plumbing.terminal import command_line
from plumbing.runs import FREE, PATHS, read_config, read_metrics
from plumbing.terminal import Stop
from settings import Settings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

STATE, LOGS = "state.pt", ("metrics.csv", "samples.txt")
LAYOUT = 2  # how weights are stored in a state; since 2 with the rows of q, k and v in a checkpoint's order
SAMPLE_EVERY = 10  # steps between writing whole responses to samples.txt
# Settings that are not among the flags in a folder's name.
UNNAMED = {"mitigation", "model", "adapter", "data", "eval_data", "out", "seed", "steps", "device"}


def without_nan(row: dict) -> dict:
    """A row of metrics.csv with None where a cell is empty, or infinite: neither is JSON."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def default_folder(mitigation: str, seed: int, changed: dict) -> Path:
    """runs/<mitigation>[-<flag><value> for each flag that was changed]-seed<seed>."""
    shown = changed | ({"task": Path(changed["task"]).stem} if "task" in changed else {})  # it may be a path
    flags = [f"{name}{value}" for name, value in shown.items() if name not in UNNAMED]
    return Path("runs") / "-".join([mitigation, *flags, f"seed{seed}"]).replace("/", "_")


@dataclass
class Writer:
    """Writes a run."""

    run: Path
    settings: Settings
    hyper_parameters: dict
    learners: dict  # by name, what changes from step to step; each has state_dict() and load_state_dict()
    write_weights: Callable[[Path], object]  # fills a model folder
    on_step: Callable[[dict], object] = lambda row: None  # is handed each row of metrics.csv
    logged: Iterable[str] = ()  # the names in batch.log, as the trial step has them
    stop: Stop = field(default_factory=Stop)  # what signals do: see `stoppable`

    def open(self, fixed: dict[str, str], columns: Iterable[str], resume: bool) -> tuple[int, dict]:
        """Create the run folder, or load the state of a run to resume: how many steps are done, and what the last row
        of metrics.csv has.
        fixed: texts, by name, that must be the same when the run is resumed: program text, and the puzzles' names.
        columns: of metrics.csv, as the trial step has them. ValueError when the folder of a new run exists, when
        another process writes it, and when no step is left."""
        run, asked = self.run, asdict(self.settings)
        if not resume:
            start_run(run, asked, self.hyper_parameters, fixed, columns)
            return 0, {}
        lock(run)
        state = load_state(run)
        check_same(run, state["step"], asked, checksums(asked, fixed))
        metrics = {}
        if state["step"] > 0:
            for log, length in state["lengths"].items():  # to cut a shorter file would fill it with zeros
                require((run / log).is_file() and (run / log).stat().st_size >= length, f"{run / log} was changed since "
                        f"{STATE} was written: put it back, or remove {STATE} to resume from the start of the run")
            metrics = read_metrics(run, state["lengths"]["metrics.csv"])
            check_columns(run, [name for name in columns if name not in COLUMNS])
            try:
                for name, learner in self.learners.items():
                    learner.load_state_dict(state["learners"][name])
            except (KeyError, TypeError, AttributeError, RuntimeError, ValueError):
                raise ValueError(f"{run / STATE} does not fit this run's model: put back the one that it "
                                 "wrote") from None
        reopen_run(run, state, asked, columns)
        if state["step"] == self.settings.steps:
            self.write_weights(run / "checkpoint")  # which may be of a later step, lost with a kill
        return state["step"], {name: float(x[-1]) for name, x in metrics.items() if not np.isnan(x[-1])}

    def start(self, row: dict) -> None:
        """Write row 0 of metrics.csv: the start model."""
        append_row(self.run, row)
        self.on_step(without_nan(row))

    def hold_signals(self) -> None:
        """From here on a signal waits until the step's row is written, for half a step can't be resumed."""
        self.stop.held = True

    def step(self, step: int, batch: Any, measured: dict[str, Tensor], row: dict) -> None:
        """Write a row of metrics.csv, a row per token, and the samples, checkpoints and state that are due. measured:
        by `instrument` of grpo.py."""
        if other := sorted({*self.logged} ^ {*batch.log}):
            raise ValueError(f"batch.log {'has' if other[0] in batch.log else 'lacks'} {other[0]} in step {step}, "
                             "unlike in the trial step: log the same names in every step")
        # The checksum ties the two logs together: analyze.py refuses a step that was changed or is another run's.
        file = self.run / "credit" / f"step-{step:06d}.npz"
        row = row | {"credit_checksum": write_credit_log(file, step, batch, measured)}
        append_row(self.run, row)
        if step == 1 or step % SAMPLE_EVERY == 0:
            write_samples(self.run, step, batch)
        self.save(step)
        self.on_step(without_nan(row))  # after `save`: if it fails, the run can be resumed
        self.stop.whole(step)

    def save(self, step: int) -> None:
        """Write the checkpoints and the state that are due."""
        run, s = self.run, self.settings
        if s.checkpoint_every and step % s.checkpoint_every == 0:
            folder = run / "checkpoints" / f"step-{step:06d}"
            copy_tokenizer(run / "checkpoint", folder)
            self.write_weights(folder)
        # Also before a step that waits for an evaluation, which may be long: killed there, that step alone is lost.
        evaluates = step + 1 == s.steps or s.eval_every and (step + 1) % s.eval_every == 0
        if step == s.steps or s.state_every and (step % s.state_every == 0 or evaluates):
            self.save_state(step)

    def save_state(self, step: int) -> None:
        """Write the model, and state.pt: what the learners know, and the logs' lengths."""
        run = self.run
        self.write_weights(run / "checkpoint")
        state = {"step": step, "layout": LAYOUT, "lengths": {name: (run / name).stat().st_size for name in LOGS},
                 "learners": {name: learner.state_dict() for name, learner in self.learners.items()}}
        replace_file(run / STATE, lambda part: torch.save(state, part))

    def finish(self, final: dict) -> None:
        """Write final.json."""
        write_json(self.run / "final.json", final)


def lock(folder: Path) -> None:
    """Make this process the only one that writes a run, until it ends; ValueError where another does. The file `lock`
    has its number. Where there are no locks, as on Windows and on some network drives, it says so and goes on."""
    # Never closed, nor opened again: either would unlock it. The system does so when the process ends.
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which one depends on the system
        number = (folder / "lock").read_text()
        raise ValueError(f"{folder} is being written by process {number}: wait until it ends, or stop it" if number else
                         f"another process locks {folder}, or its drive refuses locks: name another folder") from None
    except (OSError, AttributeError):
        print(f"there are no locks for {folder}: see to it that no second process writes there")
    os.truncate(file, 0)
    os.write(file, str(os.getpid()).encode())


def start_run(run: Path, settings: dict, hyper_parameters: dict, fixed: dict[str, str], columns: Iterable) -> None:
    """Create the folder with an empty metrics.csv, the checkpoint's tokenizer and, last, config.json, which marks it as
    whole. No folder is renamed: some drives refuse that while a file in it is open, others always."""
    require(not run.exists() or run.is_dir() and not any(run.iterdir()),
            f"{run} exists: continue it with --resume {run}, remove it, or choose another --out or --seed")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    config = {"settings": settings, "method": hyper_parameters, "versions": versions,
              "inputs": checksums(settings, fixed), "command": shlex.join(["python", *command_line()])}
    (run / "credit").mkdir(parents=True, exist_ok=True)
    try:
        lock(run)
        write_header(run, columns)
        copy_tokenizer(Path(settings["model"]), run / "checkpoint")
        write_json(run / "config.json", config)
    except OSError:
        shutil.rmtree(run, ignore_errors=True)
        raise


def checksums(settings: dict, fixed: dict[str, str]) -> dict[str, list[int]]:
    """Size and CRC-32 of what a run reads: the fixed texts, the data and the model's files."""
    model, data = Path(settings["model"]), [Path(settings["data"]), Path(settings["eval_data"])]
    files = [model / "config.json", *files_beside(model), *model.glob("*.safetensors"),
             *model.glob("heads/*.safetensors"),
             *(Path(settings["adapter"]).glob("adapter_*") if settings["adapter"] else ()),
             *(file for file in data if file.is_file())]
    sums = {name: [len(text), zlib.crc32(text.encode())] for name, text in fixed.items()}
    # The files first: who has put another one in a file's place is told its name.
    return {str(path): [path.stat().st_size, checksum(path)] for path in files} | sums


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer and what else lies beside the weights, so that a checkpoint is a complete model folder."""
    for file in files_beside(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)  # also that of additional chat templates
        shutil.copyfile(file, copy)


def write_header(run: Path, columns: Iterable[str]) -> None:
    """Begin metrics.csv: our columns, then the others."""
    with (run / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(dict.fromkeys([*COLUMNS, *columns]))


def extend_header(run: Path) -> None:
    """Give metrics.csv of an older run our columns that it lacks, empty so far."""
    rows = [*csv.DictReader((run / "metrics.csv").read_text(encoding="utf-8").splitlines())]
    header = dict.fromkeys([*rows[0], *COLUMNS])
    if len(header) > len(rows[0]):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, header)
        writer.writeheader()
        writer.writerows(rows)
        replace_file(run / "metrics.csv", lambda part: part.write_bytes(text.getvalue().encode()))


def check_columns(run: Path, columns: Iterable[str]) -> list[str]:
    """The header of metrics.csv; ValueError where it lacks one of the columns."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), [])
    for name in columns:
        require(name in header, f"{run / 'metrics.csv'} has no column {name}, for the trial step had none: return it "
                "in every step, None where nothing was measured")
    return header


def append_row(run: Path, row: dict) -> None:
    """Add a row to metrics.csv; what is missing, None or NaN stays empty."""
    header = check_columns(run, row)
    with (run / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, header).writerow({name: x for name, x in row.items() if x == x})


def write_samples(run: Path, step: int, batch: Any) -> None:
    """Append the first response to each of three puzzles, and its reward, to samples.txt."""
    G = len(batch.text) // len(batch.puzzles)
    with (run / "samples.txt").open("a", encoding="utf-8") as file:
        for i, puzzle in zip(range(0, len(batch.text), G), batch.puzzles[:3]):
            file.write(f"=== step {step}  {batch.task.show(puzzle)}  "
                       f"reward {batch.reward[i]:.2f}  advantage {batch.advantage[i]:+.2f}\n{batch.text[i]}\n\n")


def load_state(run: Path) -> dict:
    """Read what `save` wrote. Step 0 where the run has no state yet; ValueError for a broken or foreign file."""
    file = run / STATE
    if not file.exists():
        return {"step": 0, "lengths": dict.fromkeys(LOGS, 0)}
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        check_fields(state, {"step": int, "layout": int, "lengths": dict, "learners": dict}, file)
        require(state["layout"] == LAYOUT, "")
    except Exception:  # a torn, foreign or unsafe file shows itself in many ways
        raise ValueError(f"{file} is broken or was not written by this version of train.py: remove it to resume from "
                         "the start of the run") from None
    return state


def check_same(run: Path, done: int, asked: dict, inputs: dict) -> None:
    """ValueError when a run has nothing left to do, and unless it reads what it read when it began, wherever that is.
    asked: its settings."""
    steps, falls, config = asked["steps"], asked["linear_decay"], read_config(run)
    require(done <= steps, f"{run} already has {done} steps, more than --steps {steps}")
    require(read_json(run / "final.json", missing={}).get("step") != steps, f"{run} has finished its {steps} steps: "
            + ("start a new run" if falls else "pass a larger --steps to continue it"))
    before = config["settings"]["steps"]
    require(not falls or steps == before, f"with --linear_decay the learning rate of {run} depends on its {before} "
            "steps: resume it without --steps, or start a new run")
    for name in inputs:
        require(inputs[name] in config["inputs"].values(),
                f"{name} is not what {run} began with: put that back, say where it is "
                f"with --{', --'.join(PATHS)}, or start a new run")


def reopen_run(run: Path, state: dict, settings: dict, columns: Iterable[str]) -> None:
    """Cut the logs of a run back to its state, and record what is asked for now. Of other settings than --steps also
    what they were, and after which step they changed."""
    config = read_config(run)
    before, now = config["settings"], {name: settings[name] for name in (*FREE, *PATHS)}
    changed = {name: [before.get(name), now[name]] for name in now if now[name] != before.get(name)}
    if {*changed} - {"steps"}:
        config.setdefault("resumed", []).append({"after_step": state["step"], **changed})
        print("from now on:", ", ".join(f"{name}={new} (it was {old})" for name, (old, new) in changed.items()))
    before |= now
    write_json(run / "config.json", config)
    (run / "final.json").unlink(missing_ok=True)
    for half in [file for file in run.rglob("*.part") if file.is_dir()]:  # of a process killed in `replace_file`
        shutil.rmtree(half)
    for path in (*(run / "credit").glob("step-*.npz"), *(run / "checkpoints").glob("step-*")):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > state["step"]:  # others are not ours
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in LOGS:
        if (run / name).is_file():  # samples.txt begins with the first step
            os.truncate(run / name, state["lengths"][name])
    if state["step"] == 0:
        write_header(run, columns)
    else:
        extend_header(run)
