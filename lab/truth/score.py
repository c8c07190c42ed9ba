"""How close one credit function comes to the published truth. Nothing is sampled, so it takes seconds.

lab/truth/data/ground_truth.npz holds 256 responses of the bundled model to 32 held-out puzzles, and A* of every token
(see lab/truth/measure.py). The batch is rebuilt from their tokens, the function gives its credit, and the credit
is scored as in lab/truth/scoring.py. The other methods' scores are read from lab/truth/scores.md; only
RLOO's are computed anew. A function that runs the model takes longer: vineppo, which samples, about a minute.

Run it:  python -m lab.truth.score --mitigation entropy_weighted --entropy_temp 0.5
         python -m lab.truth.score --mitigation none --truth runs/truth      against what lab.truth.measure wrote
         python -m lab.truth.score --mitigation none --advantage dr_grpo
"""
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from analyze import RLOO, is_control, method_name
from grpo import compare, group_advantage
from lab.estimates import read_cell, read_table
from lab.truth.file import COLUMNS, read_truth
from lab.truth.page import CAPTIONS, draw, rank_responses
from lab.truth.scoring import HALVES, credit_scores, table_pooled, table_within
from methods import MITIGATIONS
from methods.heads import HEADS, load_head
from mitigations import CreditFunction, required
from plumbing.flags import changed, methods_help, new_parser, own_flags, parse_with
from plumbing.progress import one_sentence
from plumbing.report import Table
from rollout import Policy, Queries, TokenBatch, by_group, token_batch
from sampler import Samples
from train import CHOICES, Settings, load_policy, with_model

TRUTH = Path(__file__).parent / "data"  # ground_truth.npz, and the critic of ppo
SCORES = TRUTH.parent / "scores.md"  # of every method
READ = (*COLUMNS, "response", "token", "reachable_before")  # from ground_truth.npz
# Columns of the two tables in SCORES, and what they are called here.
POOLED = {"Spearman": "rank, all tokens", "sign": "sign", "cosine of update": "cosine of update"}
WITHIN = {"Spearman": "rank in response", "solver": "solver", "effective sample size": "effective sample size"}


@dataclass
class Options:
    """Every flag but the credit function's own, its default and its meaning."""

    mitigation: str = "none"  # the credit function to score, see the end of --help
    advantage: str = "grpo"  # how a reward is compared with the others of its group, the responses to the same puzzle
    normalize: str = "response"  # scale a reweighting's weights to mean 1 over each response, over the batch, or none
    truth: str = ""  # a folder that lab.truth.measure wrote, on any task; empty: the published one
    out: str = "runs/truth"  # folder for the picture


# ---------------------------------------------------------------------------------------------- the published batch


def recorded_samples(truth: dict, end_tokens: list[int]) -> Samples:
    """The B responses of a ground_truth.npz as the sampler returned them."""
    where = truth["response"].astype(int), truth["position"].astype(int)  # (N,) each
    shape = where[0].max() + 1, where[1].max() + 1  # B, T

    def grid(column: np.ndarray) -> Tensor:
        """One value per token (N,), in rows by response, 0 on padding."""
        padded = np.zeros(shape, column.dtype)
        padded[where] = column
        return torch.from_numpy(padded)  # (B, T)

    last = truth["token"][np.append(where[1][1:] == 0, True)]  # (B,) a response ends where the next position is 0
    return Samples(
        tokens=grid(truth["token"].astype(np.int64)), mask=grid(np.ones(len(where[0]), bool)),
        logprob=grid(truth["logprob"]), entropy=grid(truth["entropy"]), logit_grad=grid(truth["logit_grad"]),
        ended=torch.from_numpy(np.isin(last, end_tokens)))


def recorded_puzzles(truth: dict, task: ModuleType) -> list:
    """The Q puzzles of a ground_truth.npz, found by what the task shows of its held-out ones."""
    _, first = np.unique(truth["group"][truth["position"] == 0], return_index=True)  # (Q,) responses
    heldout = task.load("heldout", json.loads(str(truth["settings"]))["questions"])
    by_name, names = {task.show(puzzle): puzzle for puzzle in heldout}, truth["prompts"][first].tolist()
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"the task does not make the puzzle {unknown[0]} of this truth: was it measured with --data?")
    return [by_name[name] for name in names]


def rebuild(truth: dict, policy: Policy, advantage: str = "grpo", normalize: str = "response") -> TokenBatch:
    """The batch that a ground_truth.npz was made of. Randomness and token limit are those it was made with."""
    settings = json.loads(str(truth["settings"]))
    s = Settings(seed=settings["seed"], max_new_tokens=settings["max_new_tokens"], normalize=normalize)
    samples, puzzles = recorded_samples(truth, policy.tokenizer.end_tokens), recorded_puzzles(truth, policy.task)
    if not 0 <= samples.tokens.min() <= samples.tokens.max() < policy.tokenizer.size:
        raise ValueError("the truth has tokens that the model's tokenizer lacks")
    batch = token_batch(Queries(policy._replace(reference=policy.model), puzzles, samples, s, step=0))
    reward = torch.from_numpy(truth["reward"][truth["position"] == 0])  # (B,)
    if not torch.allclose(batch.reward, reward):
        raise ValueError("the truth is damaged: its responses to its puzzles do not earn its rewards")
    if not torch.allclose(batch.ask.reference_logprob, samples.logprob, atol=0.01):
        raise ValueError("the truth is about another model: this one gives its tokens other probabilities")
    batch.advantage = compare(batch, advantage)
    return batch


# --------------------------------------------------------------------------------------------------------- scores


def by_method(pooled: tuple[list, list], within: tuple[list, list]) -> dict[str, list[str]]:
    """By method, the cells of the columns POOLED and WITHIN of two tables, each a header and rows."""
    cells = {}
    for (header, rows), columns in ((pooled, POOLED), (within, WITHIN)):
        for name, *values in rows:
            named = dict(zip(header[1:], values))
            cells[name] = cells.get(name, []) + [named[column] for column in columns]
    return cells


def best_method(published: dict[str, list[str]]) -> str:
    """The method whose ranks within a response agree best with those of A*."""
    def rank(name: str) -> float:
        return np.nan_to_num(read_cell(published[name][len(POOLED)]).value, nan=-1.0)
    return max((name for name in published if name in MITIGATIONS and not is_control(name)), key=rank)


def table_scores(title: str, credits: dict[str, np.ndarray], batch: TokenBatch, truth: dict, published: Path) -> Table:
    """The scores of some credits (N,); then those of GRPO, a control and the best method, read from `published`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are so small that threads wait for each other, for minutes on busy cores
    scores = credit_scores(credits, batch, truth)
    torch.set_num_threads(threads)
    listed = {"methods": np.array(list(credits)), "credits": np.stack(list(credits.values()))}
    tables = table_pooled(scores), table_within(scores, truth | listed)
    own = by_method(*((table.header, table.rows) for table in tables))
    others = by_method(*(read_table(published, table.title) for table in tables))
    best = best_method(others)
    names = {"none": method_name("none"), "random": method_name("random"), best: f"{best} (best rank in response)",
             HALVES: HALVES}
    rows = [[name, *own[name]] for name in credits] + [[shown, *others[name]] for name, shown in names.items()]
    return Table(title, (
        "Rank: correlation of ranks with those of A*; in response: centred in each response, over tokens with "
        "rollouts, empty where credit is the same on all of them. Sign: share of the tokens with rollouts where credit "
        "has the sign of A*. Cosine: of the updates that credit and A* cause. Solver: rank in response, with the exact "
        "verdict instead of A*. In brackets, 95% intervals over puzzles. Half against half: A* from one half of the "
        f"rollouts against the other. The first {len(credits)} rows are computed, the others are those of "
        f"{published.name}."),
        ["method", *POOLED.values(), *WITHIN.values()], rows)


# ---------------------------------------------------------------------------------------------------- the command


def parse(arguments: list[str]) -> tuple[Options, dict]:
    """The options, and the credit function's hyper-parameters; exits where a flag is wrong."""
    parser = new_parser(usage="python -m lab.truth.score [--flag value ...]", description=__doc__,
                        epilog=methods_help(MITIGATIONS))
    found = parse_with(parser, arguments, Options(), MITIGATIONS, CHOICES)
    own_flags(MITIGATIONS[found.settings.mitigation], {*asdict(Settings())})  # what train.py refuses is refused here
    return found.settings, found.hyper_parameters


def load_batch(truth: dict, options: Options, required: tuple[str, ...]) -> TokenBatch:
    """The batch of the published truth, with the bundled model and, where they are required, the heads beside it."""
    settings, folder, heads = json.loads(str(truth["settings"])), Path(options.truth or TRUTH), {}
    s = with_model(Settings(task=settings.get("task", Settings.task), mitigation=options.mitigation))
    if Path(s.model).name != settings["model"]:
        raise ValueError(f"{folder} is about the model {settings['model']}, but only {s.model} can be scored")
    policy = load_policy(s, needs=tuple(need for need in required if need not in HEADS))
    for name in (name for name in HEADS if name in required):
        if not (file := folder / HEADS[name].file).is_file():
            raise ValueError(f"{file} is missing, and --mitigation {options.mitigation} needs it")
        heads[name] = load_head(name, folder, policy.model)
    return rebuild(truth, policy._replace(heads=heads), options.advantage, options.normalize)


def assign_credit(batch: TokenBatch, method: CreditFunction, hyper_parameters: dict) -> np.ndarray:
    """The credit (N,) of the method."""
    print(f"credit of {method.name}: seconds, or a minute if it samples continuations", file=sys.stderr)
    with torch.no_grad():
        return method(batch, **hyper_parameters)[batch.mask].numpy()


def rloo(batch: TokenBatch) -> np.ndarray:
    """RLOO's credit (N,): the reward minus the mean of the group's others, on every token."""
    advantage = group_advantage(by_group(batch, batch.reward), "rloo").view(-1, 1)  # (B, 1)
    return (advantage * batch.mask)[batch.mask].numpy()


def draw_credit(name: str, credit: np.ndarray, truth: dict, file: Path) -> None:
    """A right and a wrong response, coloured by A* above and by the method's credit (N,) below."""
    captions = {"a_star": CAPTIONS["a_star"], "credit": f"Credit of {name}"}
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(truth | {"credit": credit}, rank_responses(truth), file, captions)


@one_sentence()
def main() -> None:
    """Score one credit function, print the table, and draw its credit."""
    options, hyper_parameters = parse(sys.argv[1:])
    chosen = options.mitigation
    method, file = MITIGATIONS[chosen], Path(options.out) / f"score-{chosen}.png"
    standard = Options(out=options.out, truth=options.truth, mitigation=chosen)
    differences = changed(options, standard, hyper_parameters, method)
    name = " ".join([chosen, *(f"{flag}={value}" for flag, value in differences.items())])
    truth = read_truth(Path(options.truth or TRUTH) / "ground_truth.npz", READ)
    published = Path(options.truth) / "scores.md" if options.truth else SCORES
    batch = load_batch(truth, options, required(chosen, hyper_parameters))
    credit = assign_credit(batch, method, hyper_parameters)
    draw_credit(name, credit, truth, file)
    credits = {f"{chosen} (yours)": credit, method_name(RLOO): rloo(batch)}
    print(f"{table_scores(f'Credit of {name} against A*', credits, batch, truth, published)}\nwrote {file}")


if __name__ == "__main__":
    main()
