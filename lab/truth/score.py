"""How close one credit function comes to the published truth. Nothing is sampled, so it takes seconds.

data/ground_truth.npz holds 256 responses of the bundled model, and A* of every token (see measure.py). The batch is
rebuilt from their tokens, and the function's credit is scored as in scoring.py; the other methods' scores are read from
scores.md. A function that runs the model takes longer: vineppo, which samples, about a minute.

Run it:  python -m lab.truth.score --mitigation entropy_weighted --entropy_temp 0.5
         python -m lab.truth.score --mitigation none --truth runs/truth      against what lab.truth.measure wrote
         python -m lab.truth.score --mitigation none --advantage dr_grpo        beside `none` with that advantage
"""
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from analyze import CONTROLS, method_name
from extras.turns import begun_with, decode_and_grade
from grpo import compare
from lab.picture import draw
from lab.statistics import by_response, cell, read_column
from lab.truth.scoring import ALL, ENTROPY, HALVES, RIGHT_SIZES, TAG, WITHIN, Score, credit_scores, share_of_tenth
from methods.registry import CREDIT_FUNCTIONS
from methods.heads import load_head
from methods.queries import Queries
from plumbing.checks import check_pure, required
from plumbing.files import read_arrays, require
from plumbing.flags import changed, functions_help, new_parser, parse_with
from plumbing.launch import with_model
from plumbing.terminal import one_sentence
from plumbing.report import Estimate, Table
from rollout import Policy, TokenBatch, token_batch
from sampler import Samples
from settings import Settings
from start import CHOICES, load_policy

TRUTH = Path(__file__).parent / "data"  # ground_truth.npz, and the critic of ppo
SCORES = TRUTH.parent / "scores.md"  # of every method
COLUMNS = {"rank, all tokens": ("spearman", ALL, "Spearman"), "cosine of update": ("cosine", ALL, "cosine of update"),
           "location": ("location", ALL, "location"), "rank in response": ("within_spearman", WITHIN, "Spearman"),
           "solver": ("solver", WITHIN, "solver")}  # its place in a Score, and in scores.md


@dataclass
class Options:
    """Every flag but the credit function's own, its default and its meaning."""

    mitigation: str = "none"  # the credit function to score, see the end of --help
    advantage: str = "grpo"  # how a reward is compared with the others of its group, the responses to the same puzzle
    normalize: str = "response"  # scale a reweighting's weights to mean 1 over each response, over the batch, or none
    truth: str = ""  # a folder that lab.truth.measure wrote, of a model in models/; empty: the published one
    out: str = "runs/truth"  # folder for the picture


def read_truth(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a ground_truth.npz: columns (N,) with one row per token, credits (M, N), and names. ValueError in
    one sentence when the file is missing, damaged or unfinished."""
    truth = read_arrays(file, ("complete",))
    require(truth["complete"], f"{file} lacks some rollouts: run the command that started it again")
    return truth


def recorded_samples(truth: dict, policy: Policy, puzzles: list) -> Samples:
    """The B responses of a ground_truth.npz as the sampler returned them; replies follow from them."""
    responses = by_response(truth)
    def grid(column: np.ndarray) -> Tensor:  # one value per token (N,), in rows by response (B, T), 0 on padding
        return pad_sequence([torch.from_numpy(column[rows]) for rows in responses], batch_first=True)
    before = tuple(begun_with(policy, puzzles[truth["group"][rows[0]]], truth["token"][rows[:-1]].tolist()).before
                   for rows in responses)
    last = truth["token"][[rows[-1] for rows in responses]]  # (B,)
    return Samples(
        tokens=grid(truth["token"].astype(np.int64)), mask=grid(np.ones(len(truth["token"]), bool)),
        **{name: grid(truth[name]) for name in ("logprob", "entropy", "logit_grad")},
        ended=torch.from_numpy(np.isin(last, policy.tokenizer.end_tokens)), before=before)


def recorded_puzzles(truth: dict, task: ModuleType) -> list:
    """The Q puzzles of a ground_truth.npz: the first of the task's held-out ones."""
    puzzles = task.load("heldout", json.loads(str(truth["settings"]))["questions"])
    _, first = np.unique(truth["group"][truth["position"] == 0], return_index=True)  # (Q,) responses
    require(truth["prompts"][first].tolist() == [task.show(puzzle) for puzzle in puzzles],
            "the task makes other puzzles than those of this truth: was it measured with --data?")
    return puzzles


def rebuild(truth: dict, policy: Policy, advantage: str = "grpo", normalize: str = "response") -> TokenBatch:
    """The batch that a ground_truth.npz was made of. Randomness and token limit are those it was made with."""
    settings = json.loads(str(truth["settings"]))
    s = Settings(seed=settings["seed"], max_new_tokens=settings["max_new_tokens"], normalize=normalize)
    puzzles = recorded_puzzles(truth, policy.task)
    samples = recorded_samples(truth, policy, puzzles)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]
    batch = token_batch(policy, puzzles, prompts, decode_and_grade(policy, puzzles, samples), s)
    batch.ask = Queries(policy._replace(reference=policy.model), batch, s, step=0)
    require(torch.allclose(batch.ask.reference_logprob, samples.logprob, atol=0.01),
            "the truth is about another model: this one gives its tokens other probabilities")
    batch.advantage = compare(batch, advantage)
    return batch


def best_method(ranks: dict[str, Estimate]) -> str:
    """The method with the largest of these scores, by name, without what is no method and the controls."""
    return max((name for name in ranks if name in CREDIT_FUNCTIONS and name not in CONTROLS),
               key=lambda name: np.nan_to_num(ranks[name].value, nan=-1.0))


def in_words(own: Score, location: Estimate, other: str) -> str:
    """What the scores say of places and of signs; location: that of another credit."""
    if own.location.low > location.high:
        places = "better than"
    else:
        places = "worse than" if own.location.high < location.low else "about as well as"
    rank = own.within_spearman
    if np.isnan(rank.value):
        signs = "no signs within a response: it is the same on all its tokens"
    elif rank.low <= 0 <= rank.high:
        signs = f"no signs within a response that differ from chance ({cell(rank)})"
    else:
        signs = f"signs within a response that {'agree with' if rank.value > 0 else 'oppose'} A*'s, by rank {cell(rank)}"
    return f"it finds places {places} {other} ({own.location.value:.2f} beside {location.value:.2f}), and {signs}"


def table_scores(name: str, own: dict[str, Score], entropy: Estimate, published: Path, advantage: str) -> Table:
    """A credit's scores, the first of `own`, and those of others scored with it; the location of entropy; then what
    `published` has: of credit only where it is of the same advantage."""
    others = {column: read_column(published, *place) for column, (_, *place) in COLUMNS.items()}
    best = best_method(others["rank in response"])
    names = {TAG: TAG, RIGHT_SIZES: f"{RIGHT_SIZES} (right sizes, one sign a response)", HALVES: HALVES}
    if advantage == Options.advantage:
        names = {"none": method_name("none"), "random": method_name("random"),
                 best: f"{best} (best rank in response)"} | names
    rows = [[shown, *(cell(getattr(score, field)) for field, *_ in COLUMNS.values())] for shown, score in own.items()]
    rows.insert(1, [ENTROPY, *(cell(entropy) if column == "location" else "" for column in COLUMNS)])
    rows += [[shown, *(cell(found[method]) for found in others.values())] for method, shown in names.items()
             if method in others["solver"]]
    return Table(f"Credit of {name} against A*", (
        "Rank: correlation of ranks with those of A*; in response: centred in each response, over tokens with "
        "rollouts, empty where credit is the same on all of them. Cosine: of the updates that credit and A* cause. "
        "Location: the share of A* squared on the tenth with the largest abs(credit), or with the highest entropy. "
        "Solver: rank in response, with the exact verdict instead of A*. Brackets: 95% intervals over puzzles. Half "
        f"against half: A* from one half of the rollouts against the other. Published "
        f"rows: {published.parent.name}/{published.name}."),
        ["method", *COLUMNS], rows)


def parse(arguments: list[str]) -> tuple[Options, dict]:
    """The options, and the credit function's hyper-parameters; exits where a flag is wrong."""
    parser = new_parser(usage="python -m lab.truth.score [--flag value ...]", description=__doc__,
                        epilog=functions_help(CREDIT_FUNCTIONS))
    return parse_with(parser, arguments, Options(), CREDIT_FUNCTIONS, CHOICES)[:2]


def load_batch(truth: dict, options: Options, needs: tuple[str, ...]) -> TokenBatch:
    """The batch of a truth, with the bundled model and what the credit function needs; heads lie with the truth."""
    settings, folder = json.loads(str(truth["settings"])), Path(options.truth or TRUTH)
    s = Settings(task=settings.get("task", Settings.task), mitigation=options.mitigation)
    s = replace(s, model=str(Path(with_model(s).model).with_name(settings["model"])))
    require(Path(s.model).is_dir(), f"{folder} is about the model {settings['model']}, and there is no {s.model}")
    policy = load_policy(s, needs=needs)
    for name in policy.heads:
        file = folder / f"{name}.safetensors"
        require(file.is_file(), f"{file} is missing, and --mitigation {options.mitigation} needs it")
        policy.heads[name] = load_head(name, folder, policy.model)
    return rebuild(truth, policy, options.advantage, options.normalize)


@one_sentence()
def main() -> None:
    """Score one credit function, print the table, and draw its credit."""
    torch.set_num_threads(1)  # the matrices are so small that threads wait for each other, for minutes on busy cores
    options, hyper_parameters = parse(sys.argv[1:])
    chosen, folder = options.mitigation, Path(options.truth or TRUTH)
    standard = Options(chosen, truth=options.truth, out=options.out)
    differences = changed(options, standard, hyper_parameters, CREDIT_FUNCTIONS[chosen])
    name = " ".join([chosen, *(f"{flag}={value}" for flag, value in differences.items())])
    truth = read_truth(folder / "ground_truth.npz")
    batch = load_batch(truth, options, required(CREDIT_FUNCTIONS[chosen], hyper_parameters))
    print(f"credit of {chosen}: seconds, or a minute if it samples continuations", file=sys.stderr)
    with torch.no_grad():
        assign = partial(CREDIT_FUNCTIONS[chosen], batch, **hyper_parameters)
        credit = check_pure(chosen, batch, assign)[batch.mask].numpy()  # (N,)
    file = Path(options.out, f"score-{chosen}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(truth, file, credit, f"credit of {name}")
    published = folder / "scores.md" if options.truth else SCORES
    credits, plain = {f"{name} (yours)": credit}, f"none --advantage {options.advantage}"
    if options.advantage != Options.advantage:
        credits[plain] = CREDIT_FUNCTIONS["none"](batch)[batch.mask].numpy()
    own = credit_scores(credits, batch, truth)
    table = table_scores(name, own, share_of_tenth(truth["entropy"], truth), published, options.advantage)
    grpo = own[plain].location if plain in own else read_column(published, *COLUMNS["location"][1:])["none"]
    said = in_words(own[f"{name} (yours)"], grpo, plain if plain in own else method_name("none"))
    print(f"{table}\nin words: {said}\nwrote {file}")


if __name__ == "__main__":
    main()
