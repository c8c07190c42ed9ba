"""The decorators, what every credit function must do, and each function against a hand computation or plain loops.

The tests of "what every method has to do" run for all of CREDIT_FUNCTIONS, so they cover a new method at once.
"""
import functools
import inspect
import itertools
import math
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from countdown_task import Puzzle
from grpo import ADVANTAGES, compare
from methods import calculations, controls, groups
from methods.credit_function import CreditFunction, token_credit, z_score
from methods.heads import HEADS
from methods.ktae import ktae
from methods.oracle import oracle
from methods.queries import Queries
from methods.registry import CREDIT_FUNCTIONS, ORDER
from methods.tokens import curious
from methods.values import ppo, vineppo
from mitigations import attention_credit, none, regrade_ablation, reward_decomposition, reweight, reweighting
from plumbing.checks import check_parameters, check_pure, required
from plumbing.launch import lacking
from rollout import rollout
from settings import Settings
from start import load_policy
from tasks import guess_task
from tasks.text import FILLER, REASONING, STRUCTURE
from tests.fixtures import make_batch, make_written

BUILT_IN = {*ORDER}  # a new method passes the whole suite without being listed here
OWN_ADVANTAGE = {"ppo", "ppo_process", "process_reward", "vineppo", "reward_decomposition", "first_error",
                 "expert_iteration", "oracle", "curious"}  # give credit also where rewards are equal
GARBAGE = 1e9  # put on padding, which must not matter


def grid(rows, padding=GARBAGE):
    """Lists of unequal length as a tensor (B, T)."""
    return torch.tensor([row + [padding] * (max(map(len, rows)) - len(row)) for row in rows])


def check(credit, expected, tolerance=1e-5):
    """Assert that each response has the expected list of credit, and 0 on padding."""
    for got, want in zip(credit.tolist(), expected, strict=True):
        assert got == pytest.approx(want + [0.0] * (len(got) - len(want)), rel=tolerance, abs=tolerance)


def normalized(values):
    """Deviations from the mean over the standard deviation."""
    return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-4) for v in values]


@pytest.fixture
def registry(monkeypatch):
    """A copy of CREDIT_FUNCTIONS, so that a test may register functions."""
    copy = dict(CREDIT_FUNCTIONS)
    monkeypatch.setattr("methods.credit_function.CREDIT_FUNCTIONS", copy)
    return copy


def early(batch, power: float = 1.0):
    """credit = A / position^power: reward what comes early."""
    return batch.mask.cumsum(1).clamp(min=1) ** -power


def test_a_decorated_function_is_registered_with_its_signature_and_docstring(registry):
    """Guards against an argument of the decorator that is lost, and a method that replaces another or multiplies by the
    advantage twice."""

    @token_credit(from_advantage=True, needs=("critic", "reference"))
    def half(batch, *, share=0.5):
        return share * none(batch)

    method, batch = reweighting(early), make_batch([3, 2], [11.0, -3.0])
    assert method == CreditFunction("early", early, reweight, from_advantage=True, needs=())
    assert method.parameters == {"power": 1.0}
    assert method.summary == "credit = A / position^power: reward what comes early."
    check(method(batch), [[18, 9, 6], [-4, -2]])  # 1, 1/2, 1/3 rescaled to mean 1
    check(method(batch, power=0.0), [[11, 11, 11], [-3, -3]])
    assert half == CreditFunction("half", half.function, None, True, ("critic", "reference"))
    assert half.summary == "no docstring yet"
    check(half(batch), [[5.5] * 3, [-1.5] * 2])
    for function, message in ((CREDIT_FUNCTIONS["ppo"].function, "two credit functions named ppo"),
                              (none, "decorate a function made by def, once")):
        with pytest.raises(ValueError, match=message):
            reweighting(function)
    assert registry == CREDIT_FUNCTIONS | {"early": method, "half": half}
    for cell in ({"__name__": "__main__"}, {"__name__": "__main__"}):  # of a notebook, which runs again
        exec("def mine(batch):\n    return batch.mask", cell)
        assert reweighting(cell["mine"]) is registry["mine"]


def logs(name, values):
    """A credit function that puts something into batch.log."""
    return lambda batch: batch.log.update({name: values}) or batch.logprob


def integer_power(batch, power: float = 2):
    return batch.mask


@pytest.mark.parametrize("problem, decorator, function", [
    ("must return weights of shape (B, T) = (2, 3), not (2, 1)", reweighting, lambda batch: torch.ones(2, 1)),
    ("must return credit of shape (B, T) = (2, 3), not NoneType", token_credit, lambda batch: None),
    ("must return credit without NaN or infinity", token_credit, lambda batch: torch.tensor([[1.0, math.nan, 1]] * 2)),
    ("returned a negative weight", reweighting, lambda batch: torch.tensor([[1.0, -1e-6, 1]] * 2)),
    ("changes a field of the batch", token_credit, lambda batch: batch.logprob.data.mul_(2.0)),
    *((f"logs {name!r}: a name in batch.log has letters, digits and _, and is not taken", token_credit,
       logs(name, torch.ones(2, 3))) for name in ("reward", "gradient", "turn", "file", "my value", "", 1)),
    ("must log mine of shape (B, T) = (2, 3), not float", reweighting, logs("mine", 0.5)),
    ("must log mine without NaN or infinity", token_credit, logs("mine", torch.full((2, 3), 1e39, dtype=torch.double))),
    ("replaces batch.log", token_credit, lambda batch: setattr(batch, "log", None) or batch.logprob),
    ("the default of power: float = 2 is of another type", token_credit, integer_power),  # the flag would refuse 0.5
    ("needs must be a tuple of names", functools.partial(reweighting, needs="critic"), early),
])
def test_a_wrong_function_is_one_sentence(problem, decorator, function, registry):
    """Guards against (B, 1) broadcast over tokens, NaN that reaches the model, a write to what others read, a column of
    the log that replaces another or is not finite in float32, and a method that silently gets no critic."""
    method, batch = decorator(function), make_batch([3, 3], [1.0, 1.0])
    with pytest.raises(ValueError, match=rf"^{function.__name__}:? {re.escape(problem)}"):
        check_parameters(method)
        required(method, {})
        check_pure(method.name, batch, lambda: method(batch))


@pytest.mark.parametrize("normalize, weights, credit", [
    ("response", [[1.0, 2, 3], [0, 0, math.nan], [4, math.nan, math.nan]], [[1, 2, 3], [2, 2], [2]]),  # means 2, 1, 4
    ("step", [[1, 2, 3], [0, 0, -7], [4, -7, -7]], [[1, 2, 3], [1, 1], [4]]),  # the mean of all six is 2
    ("none", [[1, 2, 3], [0, 0, -7], [4, -7, -7]], [[2, 4, 6], [2, 2], [8]]),
    ("none", [[True, False, True], [True, True, True], [False, True, True]], [[2, 0, 2], [2, 2], [2]]),
])
def test_weights_of_any_type_are_rescaled_as_normalize_says(normalize, weights, credit):
    """Guards against a mean over padding or the wrong axis, and a comparison or a count that changes the loss's type.
    Weights that are all 0 in a response become 1 first. A copy of the batch begins without what was logged."""
    batch, rows = make_batch([3, 2, 1], [2.0] * 3, normalize=normalize), torch.tensor(weights)
    found = CreditFunction("given", lambda batch: batch.log.update(mine=rows) or rows, reweight, True, ())(batch)
    check(found, credit)
    assert found.dtype == batch.log["mine"].dtype == torch.float32 and not batch.log["mine"][~batch.mask].any()
    assert replace(batch).log == {}


# ------------------------------------------------------------------------------------ what every method has to do

RESPONSES = [
    " 4 + 3 = 7. 7 * 5 = 35. No. 4 - 3 = 1, 1 * 5 = 5.</think>\n<answer>(4 + 5) - 3</answer>$",
    " 5 - 3 = 2, 4 * 2 = 8.</think>\n<answer>4 * (5 - 3)</answer>$",
    " 4 * 5 = 20. 20 - 3 = 17. 3 * 4 = 12, 12 - 5 =",
    "</think>\n<answer>4 + 5 - 3</answer>$",
    " 12 + 7 = 18, 18 + 20 = 38. So\n20 + 7 = 27, 27 + 12 = 39.</think>\n<answer>20 + 7 + 12</answer> hm",
    " 20 * 12 = 240",
    " 20 - 7 = 12</think>\n<answer>$",
    ".$",
]


@pytest.fixture(scope="module")
def written():
    """Four responses to each of two puzzles ($ is the end token), with random facts and answers of the model."""
    torch.manual_seed(0)
    pieces = [["" if p == "$" else p for p in re.findall(r"</?\w+>|\d|\w+| ?[^\w]", text)] for text in RESPONSES]
    mask = torch.arange(max(map(len, pieces))) < torch.tensor([len(row) for row in pieces])[:, None]  # (B, T)
    (B, T), random_numbers = mask.shape, torch.rand(2, *mask.shape)
    success, format = torch.tensor([0.0, 1, 0, 0] + [1, 0, 0, 0]), torch.tensor([1, 1, 0, 1] + [0.6, 0, 0.1, 0])
    return make_written(
        pieces, torch.linspace(-1.3, 2, B).tolist(), [0] * 4 + [1] * 4,
        puzzles=[Puzzle((4, 3, 5), 8), Puzzle((12, 7, 20), 39)],
        reward=0.1 * format + success, success=success, format=format, tokens=torch.randint(12, (B, T)) * mask,
        logprob=-5 * torch.rand(B, T) ** 8 * mask, entropy=2 * torch.rand(B, T) ** 6 * mask,
        logit_grad=torch.rand(B, T) * mask, critic=torch.rand(B, T) * mask, reference_logprob=-torch.rand(B, T) * mask,
        process_critic=torch.rand(B, T) * mask,
        attention=torch.rand(B, T, T).tril(-1) * mask[:, None] * mask[:, :, None], hidden=torch.randn(B, T, 5),
        importance=torch.randn(B, T).masked_fill(~mask, -math.inf).softmax(1),
        logprob_without=lambda rows, hide: -random_numbers[0][rows] * hide.sum(1, keepdim=True),
        rollout_values=lambda counts, other=False: random_numbers[1] * (counts > 0),
    )


def extremes(batch):
    """The batch with log-probs, entropies and gradients at the limits of float32: mixed, all certain, all unlikely."""
    torch.manual_seed(0)
    mixed = torch.randint(3, batch.mask.shape)  # (B, T)
    for case in (mixed, 0 * mixed, 0 * mixed + 2):
        facts = {"logprob": [0.0, -1e-30, -1e4], "entropy": [0.0, 1e-30, 1e30], "logit_grad": [0.0, 1e-20, 2**0.5]}
        yield replace(batch, **{name: torch.tensor(values)[case] * batch.mask for name, values in facts.items()})


GAME = SimpleNamespace(**vars(guess_task) | {  # of one, two and five turns
    "reply": lambda turns, puzzle, chat: ("\nhigher\n", "", ("\n", "<|im_end|>", "\n"))[len(turns) % 3]
    if len(turns) < (5 if turns[0] < "2" else 2 if turns[0] < "7" else 1) else None,
    "calculations": lambda text, puzzle: [], "reachable": lambda text, puzzle: np.zeros((0, 5), bool)})


@pytest.fixture(scope="module")
def sampled():
    """A step of sampled responses for each task, with what every credit function may ask the model about them."""
    found = {}
    for name, task, games, length in (("latin", None, 2, 20), ("math", None, 2, 20), ("guess", GAME, 4, 40)):
        s = Settings(task="guess" if task else name, responses=4, max_new_tokens=length)
        policy = load_policy(s, task, (*HEADS, "reference"))
        batch = rollout(policy, policy.task.load("train", games), s, step=1)
        batch.ask, batch.advantage = Queries(policy, batch, s, 1), compare(batch, "rloo")
        found[name] = batch
    assert {len(replies) for replies in found["guess"].before} == {0, 1, 4}
    return found


METHODS = pytest.mark.parametrize("method", CREDIT_FUNCTIONS.values(), ids=CREDIT_FUNCTIONS)
WITHOUT_CALCULATIONS = {"first_error", "reward_decomposition", "causal_ablation", "regrade_ablation",
                        "process_reward", "ppo_process"}


@pytest.mark.slow
@METHODS
def test_credit_is_finite_and_ignores_padding_in_every_task(method, written, sampled):
    """Guards against an undocumented method, 0 / 0 where a token is certain, padding that counts, an unseeded random
    number, Countdown or a single turn in a credit function, and one that is refused where nothing lacks."""
    assert re.fullmatch(r"credit = [^:]+: [^:]+\.", method.summary) or method.name not in BUILT_IN
    check_parameters(method)
    for batch in (written, *extremes(written), *sampled.values()):
        needs = required(method, {})
        if lacking(needs, batch.task, HEADS):
            assert batch is sampled["latin"] and method.name not in BUILT_IN - WITHOUT_CALCULATIONS
            said = f"--mitigation {method.name} needs .*, which is neither a function of the task latin nor a head"
            with pytest.raises(ValueError, match=said):
                load_policy(Settings(task="latin", mitigation=method.name), needs=needs)
            continue
        for options in ({}, {"tokens": True}) if method.name == "regrade_ablation" else ({},):
            credit = check_pure(method.name, batch, lambda: method(batch, **options))
            assert credit.isfinite().all() and not credit[~batch.mask].any()
    garbage = {"tokens": 7, "logprob": -GARBAGE, "entropy": GARBAGE, "logit_grad": GARBAGE, "role": 2}
    noisy = {name: torch.where(written.mask, getattr(written, name), value) for name, value in garbage.items()}
    assert method(written).any() and torch.equal(method(replace(written, **noisy)), method(written))




@METHODS
def test_a_method_depends_on_the_advantage_where_it_says_so(method, written):
    """Guards against --advantage accepted where it has no effect, or refused where it has one. And where a group has
    equal rewards, against rounding noise as credit, which Adam would make as large as any other."""
    ignored, first = [], written.group == 0
    for success in (0 * written.success, written.success):  # 0: then gtpo is plain GRPO, but share keeps nothing
        before = replace(written, success=success)
        ignored.append(torch.equal(method(replace(before, advantage=-before.advantage)), method(before)))
    assert all(ignored) != method.from_advantage
    for success in (0.0, 1.0):
        values = {"success": success, "reward": success + 0.1, "advantage": 0.0}
        equal = {key: getattr(written, key).masked_fill(first, value) for key, value in values.items()}
        if method.name in BUILT_IN - OWN_ADVANTAGE:
            assert not method(replace(written, **equal))[first].any()


@pytest.mark.parametrize("flags, refused, accepted", [
    ("advantage_reweighting alpha, first_error alpha, ppo gamma, ppo gae_lambda, ppo_process gae_lambda, oracle mix",
     [-0.1, 1.1, math.nan], [0.0, 1.0]),
    ("inverse_logprob epsilon, entropy_weighted entropy_temp, dpo beta", [0.0], [0.1]),
    ("outcome_conditional think_discount, attention_credit credit_scale, token_type filler, token_type structure, "
     "process_reward process, ppo_process process", [-0.1, math.nan], [0.0]),
    ("vineppo k, oracle k, turn_vine k", [0], [1]),
    ("entropy_masking mask_percentile", [-1.0, 101.0], [0.0, 100.0]),
    ("vineppo cuts", ["line"], ["sentence", "uncertain"]),
    ("reward_decomposition weights", ["1,2", "1,2,x", "1,2,3,4", ""], ["0,0,1"]),
    ("inverted of", ["none", "inverted", "no such method"], ["random"]),
    ("shuffled of", ["shuffled", "no such method"], ["random"]),
    ("turn_mean of", ["turn_mean", "no such method"], ["random"]),
])
def test_hyper_parameters_that_can_not_work_are_refused_by_name(flags, refused, accepted, written):
    """Guards against NaN or a traceback in the middle of a run, and a check that refuses a limit that has a meaning."""
    for name, key in map(str.split, flags.split(",")):
        for value in refused:
            with pytest.raises(ValueError, match=f"^--{key} "):
                CREDIT_FUNCTIONS[name](written, **{key: value})
        for value in accepted:
            assert CREDIT_FUNCTIONS[name](written, **{key: value}).any()


# -------------------------------------------------------------------------------------- strategies of the original work


def test_each_strategy_stands_in_its_place_and_the_page_says_what_became_of_it():
    """Guards against another order than the original work's, and a figure that its file gives to another method."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "methods.md").read_text(encoding="utf-8")
    became = dict(re.findall(r"^\| `(\w+)` \| (.* \| \[lab/\S+\])", page, re.M))
    assert [*became] == [*ORDER[1:11]]
    lines = [inspect.getsourcelines(CREDIT_FUNCTIONS[name].function)[1] for name in ORDER[:11]]
    assert lines == sorted(lines) and {CREDIT_FUNCTIONS[name].function.__module__ for name in ORDER[:11]} == {"mitigations"}
    for number, name in enumerate(ORDER[1:11], 1):
        text = CREDIT_FUNCTIONS[name].function.__doc__
        here, file = re.fullmatch(r"(.*) \| \[(lab/\S+)\]", became[name]).groups()
        rows = re.findall(rf"^\| `{name}\b.*", (root / file).read_text(encoding="utf-8"), re.M)
        figures = re.findall(r"-?\d+\.\d+(?: ± \d+\.\d+)?", here)
        assert figures and all(any(f" {figure} " in row for row in rows) for figure in figures), name
        assert (f"Strategy {number}" in text) == (number <= 7)


LN2 = math.log(2)


@pytest.mark.parametrize("name, options, weights", [
    ("outcome_conditional", {}, [[0.5, 0.5, 1], [1, 1]]),  # without an answer: plain GRPO
    ("inverse_logprob", {}, [[1 / 0.1, 1 / (LN2 + 0.1), 1 / (2 * LN2 + 0.1)], [1 / (LN2 + 0.1), 1 / 0.1]]),
    ("advantage_reweighting", {}, [[1, 0.9, 0.85], [0.9, 1]]),
    ("advantage_reweighting", {"alpha": 0.8}, [[1, 0.6, 0.4], [0.6, 1]]),
    ("entropy_weighted", {}, [[3 / 7, 6 / 7, 12 / 7], [4 / 3, 2 / 3]]),  # exp(H) is 1, 2, 4 and 2, 1
    ("entropy_weighted", {"entropy_temp": 0.5}, [[3 / 21, 12 / 21, 48 / 21], [8 / 5, 2 / 5]]),
    ("entropy_masking", {}, [[0, 0, 1], [0, 0]]),  # the step's entropies are 0, 0, log 2, log 2, log 4
    ("entropy_masking", {"mask_percentile": 75.0}, [[0, 1, 1], [1, 0]]),  # the percentile is log 2, which is kept
    ("entropy_ratio", {}, [[0, 1, 2], [2, 0]]),
    ("token_type", {}, [[0.5, 1, 1], [1, 0.5]]),
    ("token_type", {"filler": 2.0, "structure": 0.0}, [[2, 1, 0], [0, 2]]),
    *[("unsure", {"above": limit}, weights) for limit, weights in (  # a reader's, by docs/course.md
        (0.1, [[0, 1, 0], [1, 0]]), (0.6, [[0, 0, 0], [0, 0]])) if "unsure" in CREDIT_FUNCTIONS],
    ("value_change", {}, [[0.3, 0.1, 0], [0, 0]]),  # the reward that follows the last token is no change
    ("learned_importance", {}, [[0.6, 2.1, 0.3], [1.8, 0.2]]),  # times the length
])
def test_weights_by_hand(name, options, weights):
    """Guards against log p for p, a temperature upside down, and sums and thresholds over padding or the wrong axis."""
    batch = make_batch(
        [3, 2], [1.0, 1.0],
        logprob=-grid([[0, LN2, 2 * LN2], [LN2, 0]]),  # p is 1, 1/2, 1/4 and 1/2, 1
        entropy=grid([[0, LN2, 2 * LN2], [LN2, 0]]),
        in_answer=torch.tensor([[False, False, True], [False, False, False]]),
        role=torch.tensor([[FILLER, REASONING, STRUCTURE], [STRUCTURE, FILLER, FILLER]], dtype=torch.int8),
        importance=grid([[0.2, 0.7, 0.1], [0.9, 0.1]], padding=0.0),
        critic=grid([[0.2, 0.5, 0.4], [0.7, 0.7]], padding=0.0),
        reward=torch.ones(2),
    )
    check(CREDIT_FUNCTIONS[name].raw(batch, **options), weights)


def test_attention_credit_by_hand():
    """Guards against queries and keys swapped, and later tokens punished because fewer states see them."""
    attention = torch.full((3, 5, 5), 9.0).tril(-1)  # the state before token t sees the tokens before t
    attention[0, 2] = torch.tensor([0.2, 0.4, 0, 0, 0])
    attention[0, 3] = torch.tensor([0.6, 0.0, 0.2, 0, 0])
    in_answer = torch.tensor([[0, 0, 1, 1, 0], [0] * 5, [1, 0, 0, 0, 0]]).bool()
    batch = make_batch([4, 5, 1], [1.0] * 3, in_answer=in_answer, attention=attention)
    # The means are 0.4 = (0.2 + 0.6) / 2, 0.2 = (0.4 + 0) / 2, 0.2 and 0; scaled to mean 1 they are 2, 1, 1, 0. The
    # second response has no answer, and the answer of the third has nothing to attend to: plain GRPO.
    check(attention_credit.raw(batch), [[5, 3, 3, 1], [1] * 5, [1]])
    check(attention_credit.raw(batch, credit_scale=0.5), [[2, 1.5, 1.5, 1], [1] * 5, [1]])


TRUE_TRUE = ["1+2=3", ", ", "3*3=9", ".", "</think>\n", "<answer>", "x", "</answer>", ""]
TRUE_FALSE = ["1+2=3", ",", " 3+3=7", "</think>\n", "<answer>", "x", "</answer>", ""]
FALSE = ["1+2=4", "</think>\n", "<answer>", "x", "</answer>", ""]
NO_STEP = ["hm", "</think>\n", "<answer>", "x", "</answer>", ""]
CUT_OFF = ["1+2=3", ",", "3", "*", "3=9"]  # no answer, and a calculation of several tokens


@pytest.mark.parametrize("weights, stepwise", [("0.1,0.3,1", False), ("0.7,-2,0.4", True)])
def test_reward_decomposition_by_hand(weights, stepwise):
    """Guards against sections swapped, one normalization of the sum, and means over responses for calculations."""
    format, success = [1, 0.5, 1] + [0.6, 1, 1], [0, 0, 1] + [0, 0, 1]
    batch = make_written([NO_STEP, TRUE_FALSE, FALSE] + [CUT_OFF, TRUE_TRUE, TRUE_TRUE],
                         [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0] * 3 + [1] * 3,
                         format=torch.tensor(format), success=torch.tensor(success).float())
    F, S = (normalized(x[:3]) + normalized(x[3:]) for x in (format, success))
    V, R = normalized([1, 0, 0]), normalized([0, 0.5, 0])  # verdicts on calculations, shares of true ones
    thinking = {1: [V[0], 0, V[1], 0], 2: [V[2], 0]} if stepwise else {1: [R[1]] * 4, 2: [R[2]] * 2}
    thinking |= {4: [0] * 5, 5: [0] * 5}  # all calculations of the second group are true
    a, b, c = map(float, weights.split(","))
    expected = [[0.1] * 6, [], [], [0.4] * 5, [], []]  # plain GRPO without a calculation or without an answer
    for i, advantages in thinking.items():
        tags = [0] * (len(advantages) - 1) + [1] + [1, 0, 1, 1]  # </think>, <answer>, x, </answer>, the end token
        section = [b * x for x in advantages] + [c * S[i]] * 4
        expected[i] = [a * F[i] * tag + x for tag, x in zip(tags, section, strict=True)]
    check(reward_decomposition(batch, weights, stepwise), expected)


def test_removing_a_part_changes_the_reward_where_the_grader_looks():
    """Guards against a text cut in the wrong place, without all tokens but one, or without a calculation."""
    odd = ["1+2=3</think>\n<answer>1+2=3</answer>", "<answer>1+2</answer> 1+2=3", "<answer>(1+2=3) 1+2</answer>"]
    assert not regrade_ablation.raw(make_written([[text, ""] for text in odd], [1.0] * 3)).any()
    # Outside the thoughts it may: without this one the format is 1 instead of 0.6, and a tenth of that counts.
    between = make_written([["hm</think>", "1+2=3", "\n<answer>", "1+2", "</answer>", ""]], [1.0])
    check(regrade_ablation.raw(between), [[0, 0.04, 0, 0, 0, 0]])
    pieces = ["1+2=3", "</think>\n", "<answer>", "(1+2)", " * 3", "-3", "</answer>", ""]
    batch = make_written([pieces], [1.0], puzzles=[Puzzle((1, 2, 3, 3), 6)])
    # The format is 1, or less without a tag; a tenth of it counts. Only without a part of the answer it is wrong.
    weight = regrade_ablation.raw(batch, True)[0].tolist()
    assert weight[0] == weight[7] == 0 and weight[3:6] == pytest.approx([1.0] * 3)
    assert 0 < weight[1] < 0.1 and weight[2] >= 1 and weight[6] >= 1


# --------------------------------------------------------------------------------------------- methods/: tokens, values


def test_an_entropy_bonus_has_the_gradient_of_the_entropy():
    """Summed over all tokens that may be drawn. Guards against a missing baseline, and another number in the log. In a
    later update it is the gradient of the cross entropy with the policy that sampled."""
    logits = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(1)  # (1, 9) of each token that may be drawn
    p, entropy = logprob.exp().detach(), -(logprob.exp() * logprob).sum(1)  # (1, 9), (1,)
    batch = make_batch([9], [2.0], logprob=logprob.detach(), entropy=entropy.detach()[:, None].expand(1, 9))
    credit = curious(batch, 0.5)
    found, = torch.autograd.grad((p * credit * logprob).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, 0.5 * torch.autograd.grad(entropy.sum(), logits)[0])
    assert (p * credit).sum() == pytest.approx(2)  # the mean credit stays the advantage
    torch.testing.assert_close(batch.log["bonus"], credit - 2)
    moved = (2 * logits).log_softmax(1)  # (1, 9) in a later update, whose ratio is exp(moved - logprob)
    found, = torch.autograd.grad((p * (moved - logprob.detach()).exp() * credit).sum(), logits, retain_graph=True)
    crossed = -(moved.exp() * logprob.detach()).sum(1)  # (1,)
    torch.testing.assert_close(found, 0.5 * torch.autograd.grad(crossed.sum(), logits)[0])


def double_sum(rewards, values, gae_lambda, gamma=1.0):
    """PPO's credit of each token, from the reward at it and the value before it."""
    delta = [r + gamma * after - before for r, before, after in zip(rewards, values, values[1:] + [0.0])]
    return [sum((gamma * gae_lambda) ** j * d for j, d in enumerate(delta[t:])) for t in range(len(delta))]


@pytest.mark.parametrize("gae_lambda, gamma", [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.5, 0.7)])
def test_ppo_by_the_double_sum(gae_lambda, gamma):
    """Guards against the reward at end tokens only, a value after the last one, padding in the mean (whiten), and a
    process reward at other tokens, or a critic for the wrong part."""
    rewards, values = [1.1, 0.0, 0.1], [[0.2, 0.5, 0.4, 0.4], [0.7], [0.1, -0.3, 0.6]]
    batch = make_batch([4, 1, 3], [9.0] * 3, reward=torch.tensor(rewards), critic=grid(values, padding=0.0),
                       ended=torch.tensor([True, True, False]))
    expected = [double_sum([0] * (len(v) - 1) + [r], v, gae_lambda, gamma) for r, v in zip(rewards, values)]
    check(ppo(batch, gae_lambda, gamma=gamma), expected)
    flat = normalized(sum(expected, []))
    check(ppo(batch, gae_lambda, True, gamma), [flat[:4], flat[4:5], flat[5:]])

    value, ahead = [0.1, 0.5, 0.3, 0.2, 0.4, 0.6], [1.5, 0.7, 0.9, 1.1, 0.8, -0.3]
    batch = make_written([[*CUT_OFF, " 3+3=7"]], [9.0], reward=torch.tensor([0.7]), critic=torch.tensor([value]),
                         process_critic=torch.tensor([ahead]))
    both = [v + 0.25 * a for v, a in zip(value, ahead)]
    expected = double_sum([0.25, 0, 0, 0, 0.25, 0.7], both, gae_lambda)
    check(calculations.ppo_process(batch, 0.25, gae_lambda), [expected])


def rollouts_from(values, asked):
    """rollout_values that come from a table (B, T). Notes what was asked for: the numbers (B, T), and `other`."""
    return lambda counts, other=False: asked.append((counts.tolist(), other)) or values * (counts > 0)


def test_vineppo_by_hand():
    """Guards against a start that is sampled although the mean reward of the other two is free, and cuts off by one."""
    values, asked = torch.full((3, 7), 9.0), []
    values[0, [2, 5]] = torch.tensor([0.6, 0.9])  # a sentence of the first response starts at tokens 2 and 5
    batch = make_written([["1", " yes.", " 0", " ok", ".", " 1", ""], ["no", ""], ["0", " no", ""]], [9.0] * 3,
                         reward=torch.tensor([1.0, 0.2, 0.4]), rollout_values=rollouts_from(values, asked))
    first = [0.6 - 0.3] * 2 + [0.9 - 0.6] * 3 + [1 - 0.9] * 2
    check(vineppo(batch, 5), [first, [0.2 - 0.7] * 2, [0.4 - 0.6] * 3])
    assert asked == [([[0, 0, 5, 0, 0, 5, 0], [0] * 7, [0] * 7], False)]


def test_vineppo_cuts_before_every_fifth_uncertain_token():
    """Guards against a cut at the fifth instead of before the sixth, and p for log p."""
    p = grid([[0.95] + [0.89, 0.91] * 6, [0.8] * 4 + [0.99] * 3], padding=1.0)  # cutpoints 1, 3, 5, 7, 9, 11 and 0 to 3
    asked, before, after = [], 0.6 - 0.2, 1 - 0.6  # the cut at token 11, where the value is 0.6
    batch = make_batch([13, 7], [9.0] * 2, logprob=p.log(), reward=torch.tensor([1.0, 0.2]),
                       rollout_values=rollouts_from(torch.full((2, 13), 0.6), asked))
    check(vineppo(batch, cuts="uncertain"), [[before] * 11 + [after] * 2, [0.2 - 1] * 7])
    assert asked == [([[0] * 11 + [3, 0], [0] * 13], False)]


# ----------------------------------------------------------------------------------------------- methods/: groups, ktae


@pytest.mark.parametrize("G, drawn", [(2, False), (5, False), (8, True)])
def test_prefix_tree_and_tempo_by_loops(G, drawn):
    """Guards against tokens compared one by one, with another group, beyond an end, or without the response itself, and
    against drawn replies that are taken for the same. An empty one is none."""
    torch.manual_seed(G)
    rewards, lengths, shared, moved = torch.rand(2, G), torch.randint(1, 7, (2 * G,)).tolist(), [], []
    rows, r = [torch.randint(2, (n,)).tolist() for n in lengths], rewards.flatten().tolist()
    before = tuple({t: [[], [7], [8]][torch.randint(3, ())] for t in range(1, n, 2) if drawn} for n in lengths)
    read = [[(said.get(t, []), token) for t, token in enumerate(row)] for said, row in zip(before, rows)]
    A, std = ADVANTAGES["grpo"](rewards, rewards).flatten().tolist(), (rewards.std(1, correction=0) + 1e-4).tolist()
    for i, row in enumerate(rows):
        group = range(i // G * G, i // G * G + G)
        behind = [[r[j] for j in group if read[j][:t] == read[i][:t]] for t in range(len(row) + 1)]
        V = [statistics.fmean(x) for x in behind]  # tempo in the paper's form is (r - mean + V(s') - V(s)) / std
        shared.append([A[i] / len(x) for x in behind[1:]])
        moved.append([(r[i] - V[0] + b - a) / std[i // G] for a, b in zip(V, V[1:])])
    batch = make_batch(lengths, A, [i // G for i in range(2 * G)], tokens=grid(rows, padding=1),  # 1 is a token, too
                       before=before)
    check(groups.prefix_tree(batch), shared)
    check(groups.tempo(batch), moved, 1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e-16])
def test_optimal_baseline_by_hand(scale):
    """Guards against energies of one token or of finished responses, and a floor under them: they have no unit."""
    # Energies 1, 3 and then 2, 7 give baselines 1/4 and 2/9. Where one response is left, it is the mean, 1/2.
    gradient = torch.cat((grid([[1.0, 1.0], [3**0.5, 2.0, 5.0]]) * scale, torch.tensor([[0.0, 1, 2], [0, 1, 2]])))
    batch = make_batch([2, 3, 2, 3], [0.0] * 4, [0, 0, 1, 1], reward=torch.tensor([1.0, 0, 1, 0]), logit_grad=gradient)
    without_energy = [[1 / 2] * 2, [-1 / 2] * 3]  # both responses of the second group begin with a certain token
    check(groups.optimal_baseline(batch), [[3 / 4, 7 / 9], [-1 / 4, -2 / 9, -1 / 2], *without_energy])


@pytest.mark.parametrize("reward, G", [(0.1, 3), (0.35, 6), (100.1, 7)])
def test_credit_is_exactly_0_where_one_response_alone_is_better(reward, G):
    """Guards against rounding as credit: after the better one has ended, in all others, and before its last cut."""
    batch = make_batch([7] + [10] * G, [0.0] * (G + 1), reward=torch.tensor([reward + 1] + [reward] * G),
                       logit_grad=torch.rand(G + 1, 10),
                       rollout_values=lambda counts, other=False: reward * (counts > 0))
    assert not groups.optimal_baseline(batch)[:, 7:].any()
    assert not oracle(batch)[1:].any() and not z_score(torch.full((G, 1), reward)).any()
    credit = vineppo(batch, cuts="uncertain")  # all are, so the cut is at token 5
    assert not credit[0, :5].any() and credit[0, 5:7].all()


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("options", [{"a1": 0.3, "a2": 0.7}, {"joint": True}], ids=str)
def test_gtpo_by_hand(options, scale):
    """Guards against shares over time, H for 1 / H, a floor under H, and z-scores over padding or several groups."""
    # In the first group H is 1, 3 on both sides, then one response of each side is left. The second is all right.
    a1, a2 = options.get("a1", 1.0), options.get("a2", 0.1)
    entropy = grid([[1.0], [3.0, 0.2], [1.0, 0.5], [3.0]] * 2) * scale
    batch = make_batch([1, 2, 2, 1] * 2, [0.9] * 8, [0] * 4 + [1] * 4, entropy=entropy, success=torch.ones(8))
    batch.success[2:4] = 0
    gains = [a1 + 2 * a2 * 1 / 4, a1 + 2 * a2 * 3 / 4, a1 + a2]
    losses = [-a1 - 2 * a2 * 3 / 4, -a1 - a2, -a1 - 2 * a2 * 1 / 4]
    z = normalized(gains + losses) if "joint" in options else normalized(gains) + normalized(losses)
    plain = [[0.9], [0.9] * 2, [0.9] * 2, [0.9]]
    check(groups.gtpo(batch, **options), [z[:1], z[1:3], z[3:5], z[5:], *plain], 2e-3)


def test_dpo_is_the_gradient_of_its_loss():
    """Guards against a sign, a missing beta, a mean of log-probs, and a wrong pair. Ties go to the lowest index."""
    torch.manual_seed(0)
    rewards = torch.tensor([0.1, 1.1, 1.1] + [0.3, 0.1, 0.1] + [0.1, 0.1, 0.1])  # pairs: 1 over 0, 3 over 4, none
    logprob, reference = (-torch.rand(9, 4)).requires_grad_(), -torch.rand(9, 4)
    batch = make_batch([3, 2, 4, 1, 3, 2, 2, 2, 2], [9.0] * 9, [0] * 3 + [1] * 3 + [2] * 3, reward=rewards,
                       logprob=logprob.detach(), reference_logprob=reference)
    ratio = ((logprob - reference) * batch.mask).sum(1)  # (B,)
    for best, worst in ((1, 0), (3, 4)):
        (-torch.nn.functional.logsigmoid(0.3 * (ratio[best] - ratio[worst]))).backward(retain_graph=True)
    torch.testing.assert_close(groups.dpo(batch, beta=0.3), -logprob.grad)


def ktae_by_loops(rows, right):
    """The score of each token id of one group that is neither all right nor all wrong."""
    score, N, R = {}, len(rows), sum(right)
    pools = [sum((row for row, r in zip(rows, right) if r == side), []) for side in (True, False)]
    for token in {*pools[0], *pools[1]}:
        has = [token in row for row in rows]
        a, n, both = sum(h and r for h, r in zip(has, right)), sum(has), Counter(zip(has, right))
        ways = Counter(map(sum, itertools.combinations(right, n)))  # ways to deal it, by right ones
        p = sum(w for w in ways.values() if w <= ways[a]) / ways.total()
        bits = sum(c / N * math.log2(c * N / (has.count(h) * right.count(r))) for (h, r), c in both.items())
        frequency = [pool.count(token) / len(pool) for pool in pools]
        f = [3 * x / (x + 1 + 2 * len(pool) / len(pools[0] + pools[1])) for x, pool in zip(frequency, pools)]
        h = 2 * math.asin(math.sqrt(a / R)) - 2 * math.asin(math.sqrt((n - a) / (N - R)))
        x = h + f[0] / (f[1] + 1e-5) - f[1] / (f[0] + 1e-5)
        score[token] = math.tanh(((math.exp(-2 * p) if p < 1 else 0) + bits) / 2 * x / 2)  # = 2 sigmoid(k) - 1
    return score


@pytest.mark.parametrize("G, right", [(4, "1010" + "1111" + "0000" + "0010"), (8, "00111011" + "11111111")])
def test_ktae_by_loops(G, right):
    """Guards against counts of tokens for responses, lengths of responses for sides, and the score of another group."""
    torch.manual_seed(0)
    lengths, ended, right = [5, 3, 7, 1, 4, 4, 6, 2] * 2, [True, True, False, True] * 4, [d == "1" for d in right]
    A = torch.randn(16).tolist()
    batch = make_batch(lengths, A, [i // G for i in range(16)], ended=torch.tensor(ended),
                       success=torch.tensor(right).float(), tokens=torch.randint(4, (16, 7)))
    expected, rows = [], [row[:length] for row, length in zip(batch.tokens.tolist(), lengths)]
    for i, row in enumerate(rows):
        group = slice(i // G * G, i // G * G + G)
        score = ktae_by_loops(rows[group], right[group]) if len(set(right[group])) == 2 else Counter()
        expected.append([A[i] + score[token] * (t < lengths[i] - ended[i]) for t, token in enumerate(row)])
    check(ktae(batch), expected)
    batch.advantage = batch.advantage.double()  # in a model of float64
    check(ktae(batch).float(), expected)


# ----------------------------------------------------------------------------------------------- methods/: calculations


def test_process_rewards_by_hand():
    """Guards against a reward for false calculations or for tokens after one, and a mean of the responses' means."""
    batch = make_written([NO_STEP, TRUE_FALSE, FALSE, CUT_OFF], [0.1, 0.2, 0.3, 0.4])
    right = [{}, {0: 1, 2: 0}, {0: 0}, {0: 1, 4: 1}]  # the last token of each calculation, and its verdict
    expected = [[A + 0.5 * sum(v - 3 / 5 for end, v in row.items() if end >= t) for t in range(L)]
                for A, L, row in zip([0.1, 0.2, 0.3, 0.4], batch.mask.sum(1).tolist(), right)]
    check(calculations.process_reward(batch, 0.5), expected)
    ahead = [[float(sum(v for end, v in row.items() if end >= t)) for t in range(len(e))]
             for row, e in zip(right, expected)]
    check(HEADS["process_critic"](8).target(batch), ahead)  # it learns what is still to come


ERRORS = [  # numbers 3, 4, 5, target 8
    (" 5 - 3 = 2 , 4 * 2 = 8 </think> <answer> 4 * ( 5 - 3 ) </answer>", None, None),  # right
    (" 4 + 3 = 7 , 7 - 5 = 3 </think> <answer> 7 </answer>", 6, 0),  # 4 + 3 leaves 7 and 5; 7 - 5 is not 3
    (" 5 + 3 = 9 , 9 - 4 = 5", 0, 1),  # no solution begins with 5 + 3
    (" 5 - 3 = 2 , 4 + 2 = 6 </think> <answer> 4 + 2 </answer>", 12, 7),  # true, and uses what is there
    (" hm </think> <answer> 9 </answer>", 2, 2),
    (" hm so", 1, 1),  # neither a calculation nor an answer: the last token
]


@pytest.mark.parametrize("solver", [False, True])
def test_first_error_by_hand(solver):
    """Guards against the error itself rewarded, a mean over tokens of the group, and an error after the answer."""
    pieces = [re.findall(r" ?\S+", text) for text, *_ in ERRORS]
    success = torch.tensor([1.0, 0, 0, 0, 0, 0])
    batch = make_written(pieces * 2, [0.0] * 12, [0] * 6 + [1] * 6, puzzles=[Puzzle((3, 4, 5), 8)] * 2,
                         success=torch.cat((success, torch.ones(6))))
    rows = []
    for row, (_, calculation, by_solver) in zip(pieces, ERRORS):
        start = by_solver if solver else calculation
        rows.append([1.0] * len(row) if start is None else [0.4] * start + [0.0] * (len(row) - start))
    mean = statistics.fmean(statistics.fmean(row) for row in rows)
    expected = [[s - mean for s in row] for row in rows] + [[0.0] * len(row) for row in rows]
    check(calculations.first_error(batch, 0.4, solver), expected)


def test_causal_ablation_by_hand():
    """Guards against a drop summed over more than the answer, a share of another response's drop, a rise as a drop."""
    calls = []

    def logprob_without(rows, hide):
        calls.append((rows.tolist(), [h.nonzero()[:, 0].tolist() for h in hide]))
        after = batch.logprob[rows].clone()
        after[0, 6:8] -= 0.5  # without its first calculation the answer of response 0 falls by 1,
        after[1, 9] -= 2  # without its second by 2;
        after[2, 4] += 1  # that of response 3 rises
        after[:, 0] -= 100  # what hiding does outside the answer
        return after

    batch = make_written([
        ["1+2", "=3", ".", " 3*3=9", " ok", "</think>\n", "<answer>", "3*3", "</answer>", ""],  # two calculations
        ["1+2=3", ", 3*3=9"],  # no answer
        ["hm", "</think>\n", "<answer>", "1+2=3", "</answer>", ""],  # a calculation in the answer only
        [" 2+2=", "4", "</think>\n", "<answer>", "4", "</answer>", ""],  # one that the answer does not need
    ], [1.0] * 4, logprob_without=logprob_without)
    first, last = [0.75] * 2 + [0.5, 1] + [0.5] * 2 + [1.5] * 4, [0.5] * 3 + [1.5] * 4
    check(calculations.causal_ablation.raw(batch), [first, [1, 1], [1] * 6, last])
    assert calls == [([0, 0, 3], [[0, 1], [3], [0, 1]])]


# ------------------------------------------------------------------------------------------- methods/: oracle, controls


def test_the_truth_as_credit_by_hand():
    """Guards against a value on the wrong side of its token, rollouts for a certain token, and another mixture."""
    p, U, asked = [0.5, 0.999, 0.2], [0.3, 9.0, 0.8], []
    V = [0.5 * 0.84 + 0.5 * 0.3, 0.84, 0.2 * 1.0 + 0.8 * 0.8, 1.0]  # the second token is certain: it changes nothing
    batch = make_batch([3], [9.0], logprob=grid([p]).log(), reward=torch.tensor([1.0]),
                       rollout_values=rollouts_from(grid([U]), asked))
    truth = [after - before for before, after in zip(V, V[1:])]
    check(oracle(batch, k=4), [truth])
    check(oracle(batch, k=4, mix=0.25), [[0.75 * x + 0.25 * (1 - V[0]) for x in truth]])
    assert asked[0] == ([[2, 0, 4]], True)


@pytest.mark.parametrize("name", [m.name for m in CREDIT_FUNCTIONS.values() if m.is_reweighting and m.name != "inverted"])
def test_inverted_reverses_the_weights_of_each_reweighting(name, written):
    """Guards against an inverted advantage, and a maximum over padding or over the batch."""
    weights, found = CREDIT_FUNCTIONS[name].raw(written), controls.inverted.raw(written, name)  # (B, T) each
    for row, w, mask in zip(found, weights, written.mask):
        torch.testing.assert_close(row[mask], w[mask].max() + w[mask].min() - w[mask])


@pytest.mark.parametrize("name", ["entropy_ratio", "vineppo"])
def test_shuffled_moves_credit_within_each_response(name, written):
    """Guards against credit that moves to padding or to another response, and an order that all responses share."""
    before, after = CREDIT_FUNCTIONS[name](written), controls.shuffled(written, name)  # (B, T) each
    assert (after[~written.mask] == 0).all() and not torch.equal(before, after)
    assert torch.equal(before.sort(1).values, after.sort(1).values)
    order = [[a.tolist().index(x) for x in b.tolist()] for a, b in zip(before, after)]
    assert len({tuple(places[:5]) for places in order}) > 1
    assert torch.equal(controls.shuffled(written, name), after)  # the same for a resumed run


def test_a_control_takes_the_hyper_parameters_of_its_method(written):
    """Guards against a control of the defaults while the method has others, and values of another type."""
    before = CREDIT_FUNCTIONS["entropy_masking"](written, mask_percentile=50.0)  # (B, T)
    after = controls.shuffled(written, "entropy_masking:mask_percentile=50")  # (B, T)
    assert torch.equal(before.sort(1).values, after.sort(1).values)
    assert not torch.equal(after, controls.shuffled(written, "entropy_masking"))
    half = CREDIT_FUNCTIONS["outcome_conditional"].raw(written, think_discount=0.25)
    assert controls.inverted.raw(written, "outcome_conditional:think_discount=0.25").max() == half.max()
    assert controls.needs_of("regrade_ablation:tokens=True") == ()
    assert controls.needs_of("regrade_ablation") == ("calculations",)
    assert controls.hyper_parameters("ppo:gae_lambda=1") == {"gae_lambda": 1.0}
    for of, said in (("ppo:lam=1", "ppo has no lam, only "), ("ppo:gae_lambda=x", "gae_lambda must be float, not 'x'"),
                     ("shuffled", "choose one of "), ("regrade_ablation:tokens=1", "tokens must be bool, not '1'")):
        with pytest.raises(ValueError, match=f"^--of {re.escape(of)}: {said}"):
            controls.shuffled(written, of)


def test_share_keeps_as_many_responses_as_are_right():
    """Guards against a part of the wrong size, credit that loses RLOO's expectation, and the same part every time."""
    advantage, success = torch.tensor([2.0, -1, -1, 0, 0, 1, -1, 0]), torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0])
    batch, found = make_batch([3] * 8, advantage.tolist(), success=success), []
    for seed in range(300):
        batch.ask.generator = lambda name: torch.Generator().manual_seed(seed)
        found.append(controls.share(batch))  # (8, 3)
    found = torch.stack(found)  # (300, 8, 3)
    kept = found[..., 0] != 0  # (300, 8)
    assert (kept.sum(1) == 4).all()  # 5 may be kept, 4 are right
    assert torch.equal(found, (5 / 4 * advantage * kept)[..., None].expand(300, 8, 3))
    more_right_than_can_teach = make_batch([1, 2], [1.0, 0.0], success=torch.ones(2))
    check(controls.share(more_right_than_can_teach), [[1], [0, 0]])
    error = 6 * advantage.abs() * (1 / 4 / 300) ** 0.5  # a response counts 5 / 4 times or not at all: variance 1 / 4
    assert ((found[..., 0].mean(0) - advantage).abs() <= error).all()


def test_credit_of_the_controls_by_hand():
    """Guards against credit for a wrong response or below 0, what depends on the group, and another distribution."""
    batch = make_written([["1", ""], ["0"], ["1", " yes", ""]], [9.0, -1.0, 0.5], success=torch.tensor([1.0, 0, 1]))
    check(controls.expert_iteration(batch), [[1, 1], [0], [1, 1, 1]])
    check(controls.positives(batch), [[9, 9], [0], [0.5] * 3])
    weight = controls.random.raw(make_batch([200] * 100, [1.0] * 100))
    moments = [weight.mean(), weight.var(), (weight > 2).float().mean()]
    assert moments == pytest.approx([1, 1, math.exp(-2)], abs=0.05)
