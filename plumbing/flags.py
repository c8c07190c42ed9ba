"""Command-line flags from a dataclass of settings, whose comments are the help texts, and from the signature of the
chosen credit function. A flag that can't work ends the program with one sentence.
"""
import difflib
import inspect
import os
import pkgutil
import re
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from plumbing.checks import check_parameters
from plumbing.files import check_fields, read_json, require
from plumbing.terminal import fail
from plumbing.runs import FREE, OLD_NAMES, PATHS, read_config, renamed
from settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "trl.md"  # what other trainers call our flags
OTHERS = {"resume": Path, "config": Path, "on_step": str}  # flags that are no settings of a run, see train.py

class Arguments(NamedTuple):
    """What the command line asks for."""

    settings: Settings
    hyper_parameters: dict  # of the chosen credit function
    resume: Path | None = None  # the run folder to resume
    on_step: str | None = None  # module:function that is handed each row of metrics.csv


def parse(arguments: list[str], defaults: Settings, functions: dict, choices: dict[str, tuple], usage: str) -> Arguments:
    """Parse the command line of train.py. usage: its own help, above that of the flags; the others: see parse_with."""
    parser = new_parser(usage="python train.py [--flag value ...]", description=usage, epilog=functions_help(functions))
    others = new_parser(add_help=False)  # flags that are no settings of a run
    for name, kind in OTHERS.items():
        others.add_argument(f"--{name}", type=kind)
    given, words = others.parse_known_args(arguments)
    if given.resume is not None:
        named = [word.partition("=")[0] for word in words if word.startswith("--")] + ["--config"] * bool(given.config)
        if other := [name for name in named if name[2:] not in (*FREE, *PATHS)]:
            fail(f"--resume keeps what results depend on: it takes no {other[0]}, only --on_step, "
                 f"--{', --'.join(FREE)} and, of what moved, --{', --'.join(PATHS)}")
        words = words_of(given.resume, read_config(given.resume), words, defaults) + words
        parser.error = lambda message: fail(f"--resume {given.resume}: {message}")
    elif (file := given.config) is not None:
        config = read_json(file / "config.json" if file.is_dir() else file)  # a run folder, or a file
        check_fields(config, {"settings": dict, "method": dict}, file)
        settings = config["settings"]
        bundled = str(settings.get("model")).endswith(f"models/{settings.get('task')}-tiny")  # that of another task?
        for name in ("out", "arithmetic", *["model"] * bundled):  # a folder that may exist; another processor's
            settings.pop(name, None)
        words = words_of(file, config, words, defaults) + words
    found = parse_with(parser, words, defaults, functions, choices)
    return found._replace(resume=given.resume, on_step=given.on_step)


def words_of(file: Path, config: dict, words: list[str], defaults: Settings) -> list[str]:
    """The flags that a config.json stands for. words: flags given beside it, which go before it; another --mitigation
    among them takes none of its hyper-parameters."""
    values, mitigation = config["settings"], config["settings"].get("mitigation", defaults.mitigation)
    values = renamed(values)
    if unknown := sorted(values.keys() - vars(defaults).keys()):
        fail(f"{file} has a setting {unknown[0]}, which this version of train.py does not have: take the one that "
             "wrote it or, for a new run, remove it")
    if chosen_function(words, mitigation) == mitigation:
        values |= config["method"]
    return [f"--{name}={value}" for name, value in values.items()]


def chosen_function(words: list[str], default: str) -> str:
    """The value of --mitigation, which decides what other flags there are."""
    first = new_parser(add_help=False)
    first.add_argument("--mitigation", default=default)
    return first.parse_known_args(words)[0].mitigation


def load_function(name: str | None) -> Callable[[dict], object]:
    """The function module:function of --on_step; one that does nothing where there is none."""
    if not name:
        return lambda row: None
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--on_step {name}: {error}; name module:function, such as tracking:log for `log` in a file "
                         "tracking.py beside train.py") from error
    require(callable(found), f"--on_step {name}: {found!r:.50} is no function; name module:function")
    return found


def parse_with(parser: ArgumentParser, arguments: list[str], defaults: Settings, functions: dict,
               choices: dict[str, tuple]) -> Arguments:
    """Add the flags of `defaults`, a dataclass instance, and of the credit function that --mitigation names, and parse.
    functions: the credit functions by name. choices: the legal values of some flags."""
    chosen, arguments = chosen_function(arguments, defaults.mitigation), [*map(present_name, arguments)]
    if chosen not in functions:
        near = ", ".join(difflib.get_close_matches(chosen, functions, cutoff=0.0))
        if chosen.lower() in choices.get("advantage", ()):  # GRPO, RLOO
            near = f"--mitigation none --advantage {chosen.lower()}"
        fail(f"there is no credit function {chosen}: did you mean {near}? --help lists them all")
    function, helps = functions[chosen], comments(type(defaults))
    check_parameters(function)
    if taken := function.parameters.keys() & {"help", *OTHERS, *OLD_NAMES, *helps}:
        fail(f"{chosen} has a keyword argument named {min(taken)}, but there is a flag of that name: rename it")
    helps |= dict.fromkeys(function.parameters, f"of {chosen}")
    for name, default in (vars(defaults) | function.parameters).items():
        typed = {"type": to_bool, "nargs": "?", "const": True} if type(default) is bool else {"type": type(default)}
        shown = "empty" if default == "" else str(default).replace("%", "%%")  # argparse formats the help by %
        parser.add_argument(f"--{name}", default=default, choices=choices.get(name),
                            help=f"{helps[name]} (default {shown})", **typed)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        fail(f"--mitigation {chosen} takes no {unknown[0]}: {hint_of(unknown[0], [f'--{name}' for name in helps])}")
    found = Arguments(type(defaults)(**{name: getattr(known, name) for name in vars(defaults)}),
                      {name: getattr(known, name) for name in function.parameters})
    check_taken(function, found, defaults)
    return found


def present_name(word: str) -> str:
    """A word of the command line, whose flag has its present name."""
    flag, equals, value = word.partition("=")
    return f"--{OLD_NAMES[flag[2:]]}{equals}{value}" if flag[2:] in OLD_NAMES else word


def hint_of(word: str, flags: list[str]) -> str:
    """What to write instead of a word that is none of these flags: another trainer's, or a slip."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_").rpartition(".")[2]  # verl: actor_rollout_ref.rollout.n
    tables = PAGE.read_text(encoding="utf-8").partition("## Settings")[2]
    named = re.findall(rf"^\|.*[`. ]{re.escape(name)}[`=].*", tables, re.M)
    if named and name and re.search("^-|=", word):  # no value without its flag: `none` stands in the tables, too
        # First a row about the name, and of these one without a value.
        row = min(named, key=lambda row: (name not in row.split("|")[1], f"{name}`" not in row))
        return "docs/trl.md has {}: {}".format(*(cell.strip() for cell in row.split("|")[1:3]))
    near = difflib.get_close_matches(f"--{name}", flags, n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else "--help lists all flags, docs/trl.md those of other trainers"


def new_parser(**options) -> ArgumentParser:
    """A parser that reports an error in one sentence and takes no abbreviated flags."""
    parser = ArgumentParser(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)
    parser.error = fail
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # -1e-4 is a value, too
    parser.register("type", str, os.path.expanduser)  # no shell expands the ~ of --out=~/runs
    parser.register("type", Path, lambda text: Path(text).expanduser())
    return parser


def check_taken(function: Any, found: Arguments, defaults: Settings) -> None:
    """Exit where a flag has no effect on the chosen credit function, or where a hyper-parameter is NaN or too large."""
    takes = {"normalize": function.is_reweighting, "advantage": function.from_advantage, "shaping": function.from_advantage}
    for name, taken in takes.items():
        if not taken and getattr(found.settings, name, "") != getattr(defaults, name, ""):
            fail(f"--mitigation {function.name} takes no --{name}: that is for "
                 + ("a @reweighting" if name == "normalize" else "@token_credit(from_advantage=True)"))
    for name, value in found.hyper_parameters.items():
        if isinstance(value, (int, float)) and not abs(value) < 1e12:
            fail(f"--{name} must be a number between -1e12 and 1e12")


def to_bool(text: str) -> bool:
    """The value of a flag that is true or false."""
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() == "true"


def comments(settings_class: type) -> dict[str, str]:
    """The comment at the end of each field's line, by the field's name."""
    lines = [line.split("  # ") for line in inspect.getsource(settings_class).splitlines()]
    return {line[0].split(":")[0].strip(): line[1] for line in lines if len(line) == 2 and ":" in line[0]}


def functions_help(functions: dict) -> str:
    """The credit functions with their flags and formulas, for --help."""
    lines = ["credit functions (A advantage, L length, r reward of a response; p probability, H entropy, V expected",
             "reward at a token; z z-score):"]
    for function in functions.values():
        flags = "".join(f" --{name} {default}" for name, default in function.parameters.items())
        lines.append(f"  {function.name}{flags}\n      {function.summary}")
    return "\n".join(lines)


def changed(settings: Settings, defaults: Settings, hyper_parameters: dict, function: Any) -> dict:
    """The hyper-parameters and settings that differ from their defaults, by name."""
    standard = function.parameters | vars(defaults)
    return {name: value for name, value in (hyper_parameters | vars(settings)).items() if value != standard[name]}


def check_range(settings: Settings, names: tuple[str, ...], lowest: float, below: float = 1e12) -> None:
    """ValueError unless lowest <= value < below, where float32 does not overflow yet, for each named setting."""
    for name in names:
        require(lowest <= getattr(settings, name) < below, f"--{name} must be at least {lowest:g} and below {below:g}")


def check_device(device: str) -> None:
    """ValueError for a device that torch doesn't know, that this computer doesn't have, or that has no float64."""
    try:
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # torch raises one of them, by device
        said = str(error).split("\n")[0].split(". ")[0]  # without torch's advice for its own developers
        raise ValueError(f"--device {device} can't be used here: {said}") from None
