"""The decorators, what every credit function must do, and each function against a hand computation or plain loops.

The tests of "what every method has to do" run for all of MITIGATIONS, so they cover a new method at once.
Run it:  python -m pytest tests/test_mitigations.py
"""

import functools
import itertools
import math
import re
import statistics
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mitigations
from conftest import make_batch, make_written
from mitigations import MITIGATIONS, NORMALIZATIONS, Method, none, reweighting, token_credit

REWEIGHTINGS = ("outcome_conditional inverse_logprob advantage_reweighting entropy_weighted entropy_masking "
                "attention_credit causal_ablation learned_importance random inverted").split()  # fmt: skip
TOKEN_CREDITS = "none prefix_tree optimal_baseline gtpo ktae reward_decomposition vineppo dpo ppo".split()
BUILT_IN = REWEIGHTINGS + TOKEN_CREDITS  # a new method passes the whole suite without being listed here
STEP_WIDE = {"entropy_masking", "random"}  # a threshold over the step; one stream of random numbers
OWN_ADVANTAGE = {"ppo", "vineppo", "reward_decomposition"}  # give credit even if all rewards of a group are equal
GARBAGE = 1e9  # put on padding, which must not matter


def grid(rows, padding=GARBAGE):
    """Lists of unequal length as a tensor (B, T)."""
    return torch.tensor([row + [padding] * (max(map(len, rows)) - len(row)) for row in rows])


def check(credit, expected, tolerance=1e-5):
    """Assert that each response has the expected list of credit, and 0 on padding."""
    for got, want in zip(credit.tolist(), expected, strict=True):
        assert got == pytest.approx(want + [0.0] * (len(got) - len(want)), rel=tolerance, abs=tolerance)


def scaled(advantage, weights):
    """The credit of a response whose tokens have these weights, rescaled to mean 1."""
    return [advantage * w * len(weights) / sum(weights) for w in weights]


def normalized(values):
    """Deviations from the mean over the standard deviation."""
    return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-4) for v in values]


def ragged(batch, values):
    """A tensor (B, T) as lists without padding, [puzzle][response][token]."""
    rows = [row[:length] for row, length in zip(values.tolist(), batch.mask.sum(1).tolist())]
    G = len(rows) // len(batch.numbers)
    return [rows[i : i + G] for i in range(0, len(rows), G)]


# ------------------------------------------------------------------------------------------- the decorators


@pytest.fixture
def registry(monkeypatch):
    """A copy of MITIGATIONS, so that a test may register functions."""
    monkeypatch.setattr(mitigations, "MITIGATIONS", dict(MITIGATIONS))
    return mitigations.MITIGATIONS


def early(batch, power: float = 1.0):
    """credit = A / position^power: reward what comes early."""
    return batch.mask.cumsum(1).clamp(min=1) ** -power


def test_a_decorated_function_is_registered_with_its_signature_and_docstring(registry):
    """Guards against an idea that must be declared in a second place: 1, 1/2, 1/4 rescaled to mean 1."""
    method = reweighting(early)
    assert registry["early"] is method
    assert (method.name, method.function, method.is_reweighting, method.needs) == ("early", early, True, ())
    assert method.parameters == {"power": 1.0}
    assert method.summary == "credit = A / position^power: reward what comes early."
    batch = make_batch([3, 2], [11.0, -3.0])
    check(method(batch), [[18, 9, 6], [-4, -2]])
    check(method(batch, power=0.0), [[11, 11, 11], [-3, -3]])
    check(method(batch, 0.0), [[11, 11, 11], [-3, -3]])


def test_decorators_take_arguments(registry):
    """Guards against a decorator that loses the function, or an argument, when it is called with arguments."""

    @token_credit(name="half", from_advantage=True, needs=("critic", "reference"))
    def half_of_it(batch, share=0.5):
        return share * none(batch) + helper(batch)

    def helper(batch):
        return torch.zeros_like(batch.logprob)

    assert registry["half"] == Method("half", half_of_it.function, False, True, ("critic", "reference"))
    assert half_of_it.summary == "no docstring yet"
    check(half_of_it(make_batch([2, 1], [4.0, -2.0])), [[2, 2], [-1]])
    assert reweighting(needs=("critic",))(early) == Method("early", early, True, True, ("critic",))
    assert token_credit(early, name="late") == Method("late", early, False, False, ())


def test_a_partial_works_like_any_other_function(registry):
    """Guards against the docstring of functools.partial as help."""
    method = reweighting(functools.partial(early, power=2.0), name="earlier")
    assert method.parameters == {"power": 2.0}
    assert method.summary.startswith("credit = A / position^power")
    method.check_parameters()
    check(method(make_batch([2], [5.0])), [[8, 2]])


UNNAMED = 'write reweighting(function, name="...")'


@pytest.mark.parametrize("decorate, message", [
    (lambda: reweighting(functools.partial(early, power=2.0)), UNNAMED),
    (lambda: token_credit(lambda batch: batch.logprob), UNNAMED),
    (lambda: reweighting(early, name="ppo"), "two credit functions named ppo"),
    (lambda: reweighting(none, name="plain"), "pass its .function"),
    (lambda: token_credit(functools.partial(MITIGATIONS["dpo"], beta=1.0), name="dpo1"), "pass its .function"),
    (lambda: reweighting(early, needs="critic"), "not 'critic'"),
    (lambda: reweighting(early, needs=("start model",)), "not ('start model',)"),
])  # fmt: skip
def test_a_function_that_can_not_be_registered_is_refused_in_one_sentence(decorate, message, registry):
    """Guards against a method that replaces another, multiplies by the advantage twice, or silently gets no critic."""
    with pytest.raises(ValueError, match=re.escape(message)):
        decorate()
    assert registry == MITIGATIONS


SHAPE = "must return {} of shape (B, T) = (2, 3), not "
NOT_FINITE = "returned {} with NaN or infinity in it"


@pytest.mark.parametrize("decorator, result", [(reweighting, "weights"), (token_credit, "credit")])
@pytest.mark.parametrize("returned, problem", [
    (torch.ones(2), SHAPE + "(2,)"),
    (torch.ones(2, 1), SHAPE + "(2, 1)"),
    (None, SHAPE + "NoneType"),
    (torch.tensor([[1.0, math.nan, 1]] * 2), NOT_FINITE),
    (torch.tensor([[1.0, 1, -math.inf]] * 2), NOT_FINITE),
])  # fmt: skip
def test_a_wrong_result_is_one_sentence(decorator, result, returned, problem, registry):
    """Guards against (B,) broadcast over tokens, a forgotten return, and NaN that reaches the model."""
    method = decorator(lambda batch: returned, name="wrong")
    with pytest.raises(ValueError, match=re.escape("wrong " + problem.format(result))):
        method(make_batch([3, 2], [1.0, 1.0]))


def test_negative_weights_are_refused_and_negative_credit_is_not(registry):
    """Guards against a reweighting that turns the sign of an advantage."""
    values, batch = torch.tensor([[1.0, -1e-6, 1]]), make_batch([3], [1.0])
    with pytest.raises(ValueError, match="steep returned a negative weight"):
        reweighting(lambda batch: values, name="steep")(batch)
    assert torch.equal(token_credit(lambda batch: values, name="credit")(batch), values)


@pytest.mark.parametrize("decorator", [reweighting, token_credit])
@pytest.mark.parametrize("row", [[1.0, 1.0, -5.0], [1.0, 1.0, math.nan], [True, True, True], [1, 1, 7]])
def test_values_of_any_type_become_float32_and_zero_on_padding(decorator, row, registry):
    """Guards against methods that must remember the mask, and a comparison or a count that changes the loss's type."""
    first = torch.tensor(row)
    method = decorator(lambda batch: torch.stack((first, torch.ones_like(first))), name="plain")
    credit = method(make_batch([2, 3], [1.0, 1.0]))
    assert credit.dtype == torch.float32
    assert credit.tolist() == [[1, 1, 0], [1, 1, 1]]


def takes_any_number(batch, *scales): ...
def takes_any_name(batch, **options): ...
def takes_by_position(batch, scale=1.0, /): ...


@pytest.mark.parametrize("function, parameter", [
    (lambda batch, scale: None, "scale"),
    (lambda batch, scale=None: None, "scale=None"),
    (lambda batch, scale=(1, 2): None, "scale=(1, 2)"),
    (takes_any_number, "*scales"),
    (takes_any_name, "**options"),
    (takes_by_position, "scale=1.0"),
])  # fmt: skip
def test_a_parameter_that_can_not_become_a_flag_is_one_sentence(function, parameter, registry):
    """Guards against "invalid NoneType value" from argparse, and a tuple that is split into characters."""
    with pytest.raises(ValueError, match=re.escape(f"f: the parameter {parameter} can't become a flag")):
        token_credit(function, name="f").check_parameters()


def test_parameters_of_every_flag_type_are_accepted(registry):
    """Guards against a check that refuses too much, the batch included."""
    method = token_credit(lambda batch, a=True, b=1, *, c=0.5, d="x": None, name="f")
    method.check_parameters()
    assert method.parameters == {"a": True, "b": 1, "c": 0.5, "d": "x"}


def test_methods_say_what_they_are():
    """Guards against --normalize, --advantage or --of accepted where it has no effect, or refused where it has."""
    assert all(MITIGATIONS[name].is_reweighting for name in REWEIGHTINGS)
    assert not any(MITIGATIONS[name].is_reweighting for name in TOKEN_CREDITS)
    without = {name for name in BUILT_IN if not MITIGATIONS[name].from_advantage}
    assert without == {"optimal_baseline", "vineppo", "dpo", "ppo"}
    assert mitigations.needs("dpo", {"beta": 0.5}) == {"reference"}
    assert mitigations.needs("inverted", {"of": "learned_importance"}) == {"critic"}
    assert mitigations.needs("inverted", {}) == set()


WEIGHT = st.just(0.0) | st.floats(0.0625, 100, width=32)


@settings(deadline=None)
@given(st.lists(st.lists(WEIGHT, min_size=1, max_size=9), min_size=1, max_size=5))
def test_weights_are_rescaled_as_normalize_says(rows):
    """Guards against a mean over padding or the wrong axis. Weights that are all 0 in a response become 1 first."""
    batch, weight = make_batch([len(row) for row in rows], [2.0] * len(rows)), grid(rows)
    method = Method("given", lambda batch: weight, True, True, ())
    filled = [row if any(row) else [1.0] * len(row) for row in rows]
    step_mean = statistics.fmean(itertools.chain(*filled))
    means = {"response": map(statistics.fmean, filled), "batch": [step_mean] * len(rows), "none": [1] * len(rows)}
    for batch.normalize, row_means in means.items():
        check(method(batch), [[2 * w / mean for w in row] for row, mean in zip(filled, row_means)], 1e-4)


# ------------------------------------------------------------------------------------ what every method has to do

RESPONSES = [
    " 4 + 3 = 7. 7 * 5 = 35. No. 4 - 3 = 1, 1 * 5 = 5.</think>\n<answer>(4 + 5) - 3</answer>$",
    " 5 - 3 = 2, 4 * 2 = 8.</think>\n<answer>4 * (5 - 3)</answer>$",
    " 4 * 5 = 20. 20 - 3 = 17. 3 * 4 = 12, 12 - 5 =",
    "</think>\n<answer>4 + 5 - 3</answer>$",
    " 12 + 7 = 19, 19 + 20 = 39.</think>\n<answer>12 + 7 + 20</answer>$",
    " 12 + 7 = 18, 18 + 20 = 38. So\n20 + 7 = 27, 27 + 12 = 39.</think>\n<answer>20 + 7 + 12</answer>$",
    " 20 * 12 = 240",
    " No idea.</think>\n$",
    " 1 + 2 = 3, 3 + 3 = 6.</think>\n<answer>1 + 2 + 4</answer>$",
    " 3 + 3 = 6. 1 * 2 = 2. 2 * 3 = 6.</think>\n<answer>1 * 2 + 3</answer> hm",
    " 1 - 2 = 1</think>\n<answer>$",
    ".$",
]


@pytest.fixture(scope="module")
def written():
    """Four responses to each of three puzzles ($ is the end token), with random facts and answers of the model."""
    torch.manual_seed(0)
    pieces = [["" if p == "$" else p for p in re.findall(r"</?\w+>|\d|\w+| ?[^\w]", text)] for text in RESPONSES]
    mask = torch.arange(max(map(len, pieces))) < torch.tensor([len(row) for row in pieces])[:, None]  # (B, T)
    (B, T), random_numbers = mask.shape, torch.rand(2, *mask.shape)
    success = torch.tensor([0.0, 1, 0, 0] + [1, 1, 0, 0] + [0] * 4)
    format = torch.tensor([1, 1, 0, 1] + [1, 1, 0, 0.1] + [1, 0.6, 0.1, 0])
    return make_written(
        pieces, torch.linspace(-1.3, 2, B).tolist(), [0] * 4 + [1] * 4 + [2] * 4,
        numbers=[(4, 3, 5), (12, 7, 20), (1, 2, 3)], target=[8, 39, 6],
        reward=0.1 * format + success, success=success, format=format, tokens=torch.randint(12, (B, T)) * mask,
        logprob=-5 * torch.rand(B, T) ** 8 * mask, entropy=2 * torch.rand(B, T) ** 6 * mask,
        logit_grad=torch.rand(B, T) * mask, values=torch.rand(B, T) * mask, reference_logprob=-torch.rand(B, T) * mask,
        attention=torch.rand(B, T, T).tril(-1) * mask[:, None] * mask[:, :, None], hidden=torch.randn(B, T, 5),
        logprob_without=lambda rows, hide: -random_numbers[0][rows] * hide.sum(1, keepdim=True),
        rollouts=lambda cuts, k: random_numbers[1] * cuts,
    )  # fmt: skip


METHODS = pytest.mark.parametrize("method", MITIGATIONS.values(), ids=MITIGATIONS)


def extremes(batch):
    """The batch with log-probs, entropies and gradients at the limits of float32: mixed, all certain, all unlikely."""
    torch.manual_seed(0)
    mixed = torch.randint(3, batch.mask.shape)  # (B, T)
    for case in (mixed, 0 * mixed, 0 * mixed + 2):
        facts = {"logprob": [0.0, -1e-30, -1e4], "entropy": [0.0, 1e-30, 1e30], "logit_grad": [0.0, 1e-20, 2**0.5]}
        yield replace(batch, **{name: torch.tensor(values)[case] * batch.mask for name, values in facts.items()})


@METHODS
def test_credit_has_a_formula_a_shape_no_gradient_and_zero_on_padding(method, written):
    """Guards against an undocumented method, a forgotten mask, and 0 / 0 where a token is certain."""
    assert re.fullmatch(r"credit = [^:]+: [^:]+\.", method.summary) or method.name not in BUILT_IN
    method.check_parameters()
    for batch in (written, *extremes(written)):
        credit = method(batch)
        assert credit.dtype == torch.float32
        assert credit.shape == batch.mask.shape
        assert credit.isfinite().all()
        assert not credit.requires_grad
        assert not credit[~batch.mask].any()
    assert method(written).any()


@METHODS
def test_padding_does_not_matter(method, written):
    """Guards against a sum, a softmax or a threshold that includes padding."""
    garbage = {"tokens": 7, "logprob": -GARBAGE, "entropy": GARBAGE, "logit_grad": GARBAGE, "role": 2}
    noisy = {name: torch.where(written.mask, getattr(written, name), value) for name, value in garbage.items()}
    assert torch.equal(method(replace(written, **noisy)), method(written))


@METHODS
def test_a_method_changes_nothing_and_is_reproducible(method, written):
    """Guards against an in-place operation on the batch or on the model's answers, and an unseeded random number."""
    facts = vars(written) | vars(written.ask)
    tensors = {name: value for name, value in facts.items() if isinstance(value, torch.Tensor)}
    before = deepcopy(tensors)
    assert torch.equal(method(written), method(written))
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


ASKED = {"attention_credit": {"attention"}, "causal_ablation": {"logprob_without"}, "vineppo": {"rollouts"},
         "dpo": {"reference_logprob"}, "ppo": {"values"}, "learned_importance": {"values"},
         "random": {"generator"}}  # fmt: skip


@METHODS
def test_a_method_asks_the_model_for_what_it_needs_only(method, written):
    """Guards against a method that pays for a forward pass that it does not use, or uses a critic without saying so."""
    asked = set()

    class Spy:
        def __getattr__(self, query):
            asked.add(query)
            return getattr(written.ask, query)

    method(replace(written, ask=Spy()))
    assert asked == ASKED.get(method.name, set()) or method.name not in BUILT_IN
    providers = {"values": "critic", "reference_logprob": "reference"}
    assert set(method.needs) == {providers[query] for query in asked & providers.keys()}


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in STEP_WIDE])
def test_credit_does_not_depend_on_other_questions(name, written):
    """Guards against a sum over the batch where one over the response or the group is meant."""
    first = written.group == 0  # (B,)
    facts = ("tokens", "logprob", "entropy", "logit_grad", "reward", "success", "format", "advantage", "in_answer")
    changed = {fact: getattr(written, fact).clone() for fact in facts}
    for value in changed.values():
        value[~first] = value[~first].flip(0)
    changed["in_answer"] &= written.mask
    other = MITIGATIONS[name](replace(written, **changed))
    torch.testing.assert_close(other[first], MITIGATIONS[name](written)[first], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in OWN_ADVANTAGE])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(name, written):
    """Guards against rounding noise as credit, which Adam would make as large as any other."""
    first = written.group == 0
    for success in (0.0, 1.0):
        values = {"success": success, "reward": success + 0.1, "advantage": 0.0}
        equal = {key: getattr(written, key).masked_fill(first, value) for key, value in values.items()}
        assert not MITIGATIONS[name](replace(written, **equal))[first].any()


@pytest.mark.parametrize("name", REWEIGHTINGS)
def test_a_reweighting_conserves_the_total_credit_of_a_response(name, written):
    """Guards against a method that changes how responses compare: their credit sums to advantage * length."""
    for batch in (written, *extremes(written)):
        credit = MITIGATIONS[name](batch)
        torch.testing.assert_close(credit.sum(1), none(batch).sum(1), rtol=1e-4, atol=1e-4)
        assert (credit * batch.advantage[:, None] >= 0).all()


@pytest.mark.parametrize("name, key, refused, accepted", [
    ("outcome_conditional", "think_discount", [-1.0, math.nan], [0.0]),
    ("inverse_logprob", "epsilon", [0.0], [0.1]),
    ("advantage_reweighting", "alpha", [-0.1, 1.1], [0.0, 1.0]),
    ("entropy_weighted", "entropy_temp", [0.0], [0.1]),
    ("entropy_masking", "mask_percentile", [-1.0, 101.0], [0.0, 100.0]),
    ("attention_credit", "credit_scale", [-0.1], [0.0]),
    ("vineppo", "k", [0], [1]),
    ("dpo", "beta", [0.0], [0.1]),
    ("ppo", "gae_lambda", [-0.1, 1.1], [0.0, 1.0]),
    ("inverted", "of", ["none", "inverted", "no such method"], ["random"]),
])  # fmt: skip
def test_hyper_parameters_that_can_not_work_are_refused_by_name(name, key, refused, accepted, written):
    """Guards against NaN or a traceback in the middle of a run, and a check that refuses a limit that has a meaning."""
    for value in refused:
        with pytest.raises(ValueError, match=f"^--{key} "):
            MITIGATIONS[name](written, **{key: value})
    for value in accepted:
        assert MITIGATIONS[name](written, **{key: value}).any()


def test_defaults_are_those_of_the_published_results():
    """Guards against a default that is changed by accident."""
    defaults = {
        "outcome_conditional": [0.5], "inverse_logprob": [0.1, True], "attention_credit": [2.0], "dpo": [0.1],
        "entropy_weighted": [1.0], "entropy_masking": [80.0], "gtpo": [1.0, 0.1, False], "ppo": [0.95, False],
        "reward_decomposition": [False], "vineppo": [9, False], "advantage_reweighting": [0.2],
        "inverted": ["entropy_weighted"],
    }  # fmt: skip
    for name, values in defaults.items():
        assert list(MITIGATIONS[name].parameters.values()) == values, name


# ------------------------------------------------------------ the baseline, and weights from what the sampler recorded

IN_ANSWER = torch.tensor([[False, False, True, True, False], [False, False, False, False, False]])


def test_outcome_conditional_by_hand():
    """Guards against the weight of the answer on other tokens, and a discount for a response without an answer."""
    batch = make_batch([4, 5], [3.0, -2.0], in_answer=IN_ANSWER)
    check(mitigations.outcome_conditional(batch, think_discount=0.5), [[2, 2, 4, 4], [-2] * 5])
    check(mitigations.outcome_conditional(batch, think_discount=0.0), [[0, 0, 6, 6], [-2] * 5])
    assert torch.equal(mitigations.outcome_conditional(batch, think_discount=1.0), none(batch))
    batch.normalize = "none"
    check(mitigations.outcome_conditional(batch, think_discount=0.5), [[1.5, 1.5, 3, 3], [-2] * 5])


def test_inverse_logprob_by_hand():
    """Guards against |l| without the sign, and epsilon in the wrong place."""
    batch = make_batch([4, 2], [2.0, -1.0], logprob=grid([[0.0, -0.5, -1, -3], [-1.0, -3]]))
    weights = [[10, 1 / 0.6, 1 / 1.1, 1 / 3.1], [1 / 1.1, 1 / 3.1]]
    check(mitigations.inverse_logprob(batch), [scaled(2, weights[0]), scaled(-1, weights[1])])
    batch.normalize = "none"
    check(mitigations.inverse_logprob(batch), [[2 * w for w in weights[0]], [-w for w in weights[1]]])


@pytest.mark.parametrize("epsilon", [0.1, 0.7])
def test_the_undetached_weight_is_what_autograd_finds(epsilon):
    """Guards against a bug reproduced wrongly: the original differentiated l / (|l| + epsilon) as a whole."""
    logprob = (-3 * torch.rand(1, 50)).requires_grad_()
    (logprob / (logprob.abs() + epsilon)).sum().backward()
    batch = make_batch([50], [1.0], logprob=logprob.detach(), normalize="none")
    torch.testing.assert_close(mitigations.inverse_logprob(batch, epsilon, detach=False), logprob.grad)


def test_advantage_reweighting_by_hand():
    """Guards against alpha and 1 - alpha swapped, and log p for p: p = 1, 1/2, 1/4 weigh 1, 0.9, 0.85 at alpha 0.2."""
    batch = make_batch([3, 1], [2.0, -1.0], logprob=grid([[0.0, math.log(0.5), math.log(0.25)], [-1.0]]))
    check(mitigations.advantage_reweighting(batch), [scaled(2, [1, 0.9, 0.85]), [-1]])
    batch.normalize = "none"
    check(mitigations.advantage_reweighting(batch, alpha=0.8), [[2, 1.2, 0.8], [-0.8 * math.exp(-1) - 0.2]])


def test_entropy_weighted_by_hand():
    """Guards against a softmax over padding or over the batch, and the temperature upside down: exp(H) is 1, 2, 4."""
    batch = make_batch([3, 2], [7.0, -3.0], entropy=grid([[0.0, math.log(2), math.log(4)], [math.log(2), 0.0]]))
    for batch.normalize in NORMALIZATIONS:
        check(mitigations.entropy_weighted(batch), [[3, 6, 12], [-4, -2]])
        check(mitigations.entropy_weighted(batch, 0.5), [[1, 4, 16], [-4.8, -1.2]])


@pytest.mark.parametrize("normalize, kept", [("none", [2, -3]), ("batch", [10, -15]), ("response", [12, -12])])
def test_entropy_masking_by_hand(normalize, kept):
    """Guards against a threshold per response, over padding, or from below: 9 and 10 are kept of 1..10."""
    entropy = grid([[1.0, 4, 10, 2, 3, 5], [6.0, 9, 7, 8]])
    credit = mitigations.entropy_masking(make_batch([6, 4], [2.0, -3.0], entropy=entropy, normalize=normalize))
    check(credit, [[0, 0, kept[0], 0, 0, 0], [0, kept[1], 0, 0]])


def test_entropy_masking_keeps_the_threshold_itself():
    """Guards against > for >=, which keeps nothing where all are equal. The 75th percentile of 0, 1, 2, 3, 4 is 3."""
    batch = make_batch([3, 2], [1.0, 1.0], entropy=grid([[3.0, 0.0, 4.0], [2.0, 1.0]]))
    check(mitigations.entropy_masking(batch, 75.0), [[1.5, 0, 1.5], [1, 1]])
    batch.entropy = torch.full((2, 3), 0.1)
    check(mitigations.entropy_masking(batch), [[1, 1, 1], [1, 1]])
    long = make_batch([300], [1.0], entropy=torch.arange(300.0)[None])
    assert mitigations.entropy_masking(long).count_nonzero() == 60


# ----------------------------------------------------------------------------- comparison with the rest of the group


def test_z_scores_in_a_group_by_statistics():
    """Guards against the unbiased deviation, a mean over all groups, and rounding noise where all rewards are equal."""
    rewards = [[0.0, 1.0, 1.1, 0.1], [0.1, 0.1, 0.1, 0.1], [1.0, 1.0, 1.0, 0.9]]
    got = mitigations.z_score_in_group(torch.tensor(rewards))
    check(got, [normalized(group) for group in rewards])
    assert got[1].tolist() == [0] * 4
    assert mitigations.has_variance(torch.tensor(rewards)).tolist() == [True, False, True]


def test_prefix_tree_by_hand():
    """Guards against tokens compared one by one, with another group, beyond the end, or without the response itself."""
    tokens = grid([[5, 6, 7], [5, 6, 8, 7], [5, 9, 7], [5, 6]] * 2, padding=5)  # 4, 3 or 1 share a prefix
    batch = make_batch([3, 4, 3, 2] * 2, [12.0, -12.0, 4.0, 6.0] * 2, [0] * 4 + [1] * 4, tokens=tokens)
    check(mitigations.prefix_tree(batch), [[3, 4, 12], [-3, -4, -12, -12], [1, 4, 4], [1.5, 2]] * 2)


@pytest.mark.parametrize("scale", [1.0, 1e-16])
def test_optimal_baseline_by_hand(scale):
    """Guards against energies of one token or of finished responses, and a floor under them: they have no unit.
    Energies 1, 3 and then 2, 7 give baselines 1/4 and 2/9. Where one response is left, it is the mean, 1/2."""
    gradient = torch.cat((grid([[1.0, 1.0], [3**0.5, 2.0, 5.0]]) * scale, torch.tensor([[0.0, 1, 2], [0, 1, 2]])))
    batch = make_batch([2, 3, 2, 3], [0.0] * 4, [0, 0, 1, 1], reward=torch.tensor([1.0, 0, 1, 0]), logit_grad=gradient)
    without_energy = [[1 / 2] * 2, [-1 / 2] * 3]  # both responses of the second group begin with a certain token
    check(mitigations.optimal_baseline(batch), [[3 / 4, 7 / 9], [-1 / 4, -2 / 9, -1 / 2], *without_energy])


@pytest.mark.parametrize("a1, a2", [(1.0, 0.1), (0.3, 0.7)])
@pytest.mark.parametrize("joint", [False, True])
def test_gtpo_by_hand(a1, a2, joint):
    """Guards against shares over time instead of over responses, d and h swapped, H for 1 / H, and z-scores over
    padding or groups. On both sides H is 1, 3 at first, then one response is left. A group all right: plain GRPO."""
    entropy = grid([[1.0], [3.0, 0.2], [1.0, 0.5], [3.0]] * 2)
    batch = make_batch([1, 2, 2, 1] * 2, [0.7] * 8, [0] * 4 + [1] * 4, entropy=entropy, success=torch.ones(8))
    batch.success[2:4] = 0
    gains = [a1 + 2 * a2 * 1 / 4, a1 + 2 * a2 * 3 / 4, a1 + a2]
    losses = [-a1 - 2 * a2 * 3 / 4, -a1 - a2, -a1 - 2 * a2 * 1 / 4]
    z = normalized(gains + losses) if joint else normalized(gains) + normalized(losses)
    plain = [[0.7], [0.7] * 2, [0.7] * 2, [0.7]]
    check(mitigations.gtpo(batch, a1, a2, joint), [z[:1], z[1:3], z[3:5], z[5:], *plain], 2e-3)
    assert joint or sum(z[:3]) == pytest.approx(0)  # as published, the outcome is lost


@pytest.mark.parametrize("success", [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
def test_gtpo_has_no_floor_under_small_entropies(success):
    """Guards against a share other than 1 for the only response of its side, whose tokens get the same: z-scored, 0."""
    entropy = grid([[1e-7, 0.5, 1e-8, 1e-3, 0.1, 0.0], [0.5, 0.1], [0.2, 0.3, 0.4]])
    batch = make_batch([6, 2, 3], [0.0] * 3, success=torch.tensor(success), entropy=entropy)
    assert mitigations.gtpo(batch)[0].tolist() == pytest.approx([0] * 6, abs=0.01)
    one_token = make_batch([1, 2], [0.0] * 2, success=torch.tensor(success[:2]))
    assert mitigations.gtpo(one_token)[0, 0] == 0


def fisher_by_enumeration(R, W, a, b):
    """The share of ways to deal a + b tokens to R + W responses that are no likelier than a to right, b to wrong."""
    ways = Counter(sum(i < R for i in holders) for holders in itertools.combinations(range(R + W), a + b))
    return Fraction(sum(n for n in ways.values() if n <= ways[a]), sum(ways.values()))


def gain_by_definition(R, W, a, b):
    """Mutual information in bits of "contains the token" and "is right"."""
    table = {(True, True): a, (True, False): b, (False, True): R - a, (False, False): W - b}
    N, bits = R + W, 0.0
    for (holds, right), n in table.items():
        if n:
            row = sum(m for (h, _), m in table.items() if h == holds)
            column = sum(m for (_, r), m in table.items() if r == right)
            bits += n / N * math.log2(n * N / (row * column))
    return bits


@pytest.mark.parametrize("R, W", [(1, 1), (1, 7), (3, 2), (4, 4), (6, 3)])
def test_fisher_and_information_gain_by_brute_force(R, W):
    """Guards against a one-sided test, ties lost to rounding, nats for bits, and right and wrong swapped."""
    tables = list(itertools.product(range(R + 1), range(W + 1)))
    p, gain = mitigations.fisher_p(R, W), mitigations.information_gain(*torch.tensor(tables).T, R, W)
    for (a, b), bits in zip(tables, gain.tolist()):
        assert p[a, b].item() == pytest.approx(float(fisher_by_enumeration(R, W, a, b)), rel=1e-12)
        assert bits == pytest.approx(gain_by_definition(R, W, a, b), abs=1e-12)


def ktae_by_loops(tokens, right):
    """The score of each token id of one group."""
    R, W = right.count(True), right.count(False)
    pools = [[t for row, r in zip(tokens, right) if r == side for t in row] for side in (True, False)]
    average, score = (len(pools[0]) + len(pools[1])) / 2, Counter()
    for token in set(pools[0] + pools[1]) if R and W else ():
        a, b = (sum(token in row for row, r in zip(tokens, right) if r == side) for side in (True, False))
        p = fisher_by_enumeration(R, W, a, b)
        F = math.exp(-2 * p) if p < 1 else 0.0
        f = []
        for pool in pools:
            x = pool.count(token) / len(pool)
            f.append(x * (2 + 1) / (x + 2 * (1 - 0.5 + 0.5 * len(pool) / average)))
        h = 2 * math.asin(math.sqrt(a / R)) - 2 * math.asin(math.sqrt(b / W))
        x = h + f[0] / (f[1] + 1e-5) - f[1] / (f[0] + 1e-5)
        score[token] = math.tanh((F + gain_by_definition(R, W, a, b)) / 2 * x / 2)  # = 2 sigmoid(k) - 1
    return score


@pytest.mark.parametrize("G, right", [(4, "1010" + "1111" + "0000" + "0010"), (8, "00101011" + "1" * 8)])
def test_ktae_by_loops(G, right):
    """Guards against counts of tokens for counts of responses, lengths of responses for those of sides, a score for the
    end token (the last of a response that ended, and no other), and a group's score given to another."""
    torch.manual_seed(0)
    success, groups = torch.tensor([float(digit) for digit in right]), [i // G for i in range(16)]
    lengths, ended = [5, 3, 7, 1, 4, 4, 6, 2, 3, 8, 2, 5, 6, 1, 4, 3], torch.tensor([True, True, False, True] * 4)
    batch = make_batch(lengths, torch.randn(16).tolist(), groups, success=success, ended=ended)
    batch.tokens = torch.randint(4, (16, 8))
    batch.tokens[:, 5:] = 9
    expected, tokens = ragged(batch, none(batch)), ragged(batch, batch.tokens)
    for q, group_success in enumerate(success.view(-1, G).bool().tolist()):
        score = ktae_by_loops(tokens[q], group_success)
        for i, row in enumerate(tokens[q]):
            for t, token in enumerate(row):
                expected[q][i][t] += 0.0 if t == len(row) - 1 and batch.ended[G * q + i] else score[token]
    check(mitigations.ktae(batch), itertools.chain(*expected))


# ------------------------------------------------------------------------------------- checking what was written

TRUE_TRUE = ["1+2=3", ", ", "3*3=9", ".", "</think>\n", "<answer>", "x", "</answer>", ""]
FALSE = ["1+2=4", "</think>\n", "<answer>", "x", "</answer>", ""]
TRUE_FALSE = ["1+2=3", ",", " 3+3=7", "</think>\n", "<answer>", "x", "</answer>", ""]
NO_STEP = ["hm", "</think>\n", "<answer>", "x", "</answer>", ""]
CUT_OFF = ["1+2=3", ",", "3", "*", "3=9"]  # no answer, and a calculation of several tokens


@pytest.mark.parametrize("stepwise", [False, True])
def test_reward_decomposition_by_hand(stepwise):
    """Guards against weights or sections swapped, tags left out of a section, one normalization of the sum, verdicts on
    other tokens, means over responses instead of calculations (stepwise), and credit for an undefined response."""
    pieces = [NO_STEP, TRUE_TRUE, FALSE, TRUE_FALSE, CUT_OFF, TRUE_TRUE, TRUE_TRUE, TRUE_TRUE]
    format, success = [1, 1, 1, 0.5] + [0.6, 1, 1, 1], [0, 1, 0, 0] + [0, 0, 1, 1]
    batch = make_written(pieces, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0] * 4 + [1] * 4,
                         format=torch.tensor(format), success=torch.tensor(success).float())  # fmt: skip
    F, S = (normalized(x[:4]) + normalized(x[4:]) for x in (format, success))
    answer = [[s + 0.1 * f, s, s + 0.1 * f, s + 0.1 * f] for f, s in zip(F, S)]  # tag, x, tag, end token
    R = normalized([0, 1, 0, 0.5])  # the share of true calculations
    expected = [[0.1] * 6, [0.3 * R[1]] * 4 + [0.3 * R[1] + 0.1 * F[1]] + answer[1],
                [0.3 * R[2], 0.3 * R[2] + 0.1 * F[2]] + answer[2],
                [0.3 * R[3]] * 3 + [0.3 * R[3] + 0.1 * F[3]] + answer[3]]  # fmt: skip
    if stepwise:
        V = normalized([1, 1, 0, 1, 0])  # the verdict on each calculation
        expected[1:] = [[0.3 * V[0], 0, 0.3 * V[1], 0, 0.1 * F[1]] + answer[1], [0.3 * V[2], 0.1 * F[2]] + answer[2],
                        [0.3 * V[3], 0, 0.3 * V[4], 0.1 * F[3]] + answer[3]]  # fmt: skip
    expected += [[0.5] * 5] + [[0.0] * 4 + [0.1 * F[i]] + answer[i] for i in (5, 6, 7)]  # all calculations are true
    check(mitigations.reward_decomposition(batch, stepwise), expected)


@pytest.mark.parametrize("stepwise", [False, True])
def test_reward_decomposition_without_any_calculation_is_plain(stepwise, recwarn):
    """Guards against the mean of nothing: NaN, or a warning."""
    batch = make_written([NO_STEP, ["hm"]], [1.0, -1.0])
    assert torch.equal(mitigations.reward_decomposition(batch, stepwise), none(batch))
    assert not list(recwarn)


# ----------------------------------------------------------------------------------- running the model again


@pytest.mark.parametrize("credit_scale", [2.0, 0.5])
def test_attention_credit_by_loops(credit_scale):
    """Guards against queries and keys swapped, an off-by-one, later tokens punished because fewer states see them, and
    a mean over the answer or padding. Without an answer, or if it attends to nothing: plain GRPO."""
    torch.manual_seed(0)
    lengths, starts = [6, 4, 5, 3, 1], [3, 4, 0, 2, 0]  # where each answer starts; the second response has none
    attention = torch.rand(5, 6, 6).tril(-1)  # the state before token t sees the tokens before t
    in_answer, expected = torch.zeros(5, 6, dtype=torch.bool), []
    for i, (length, start) in enumerate(zip(lengths, starts)):
        in_answer[i, start:length] = True
        received = []
        for u in range(length):
            readers = [t for t in range(start, length) if t > u]
            received.append(sum(attention[i, t, u].item() for t in readers) / len(readers) if readers else 0.0)
        mean = statistics.fmean(received)
        expected.append(scaled(i - 1.5, [1 + credit_scale * (a / mean if mean else 0) for a in received]))
    batch = make_batch(lengths, [i - 1.5 for i in range(5)], in_answer=in_answer, attention=attention)
    check(mitigations.attention_credit(batch, credit_scale), expected)


ABLATED = [
    ["1+2", "=3", ".", " 3*3=9", " ok", "</think>\n", "<answer>", "3*3", "</answer>", ""],  # two calculations
    ["1+2=3", " and"],  # no answer
    ["hm", "</think>\n", "<answer>", "1+2=3", "</answer>", ""],  # a calculation in the answer only
    [" 2+2=", "4", "</think>\n", "<answer>", "4", "</answer>", ""],  # one that the answer does not need
]


def test_causal_ablation_by_hand():
    """Guards against a drop summed over more than the answer, a rise counted as a drop, tokens of the wrong calculation
    hidden, a share of another response's drop, and a second forward pass. The answer's log-prob falls by 1 without the
    first calculation of response 0 and by 2 without the second; that of response 3 rises."""
    calls = []

    def logprob_without(rows, hide):
        calls.append((rows.tolist(), [h.nonzero()[:, 0].tolist() for h in hide]))
        after = batch.logprob[rows].clone()
        after[0, 6:8] -= 0.5
        after[1, 9] -= 2
        after[2, 4] += 1
        after[:, 0] -= 100  # what hiding does outside the answer
        return after

    batch = make_written(ABLATED, [1.0, 2.0, 3.0, 4.0], logprob_without=logprob_without)
    first = [0.75, 0.75, 0.5, 1, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5]  # their mean is 1 already
    last = [0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5]
    check(mitigations.causal_ablation(batch), [first, [2, 2], [3] * 6, scaled(4, last)])
    assert calls == [([0, 0, 3], [[0, 1], [3], [0, 1]])]
    batch.normalize = "none"
    check(mitigations.causal_ablation(batch), [first, [2, 2], [3] * 6, [4 * w for w in last]])


def test_causal_ablation_with_nothing_to_hide_does_not_ask_the_model():
    """Guards against a forward pass of zero rows."""
    batch = make_written(ABLATED[1:3], [1.0, 2.0])
    assert torch.equal(mitigations.causal_ablation(batch), none(batch))


SENTENCES = [["1", " yes.", " 0", " ok", ".", " 1", ""], ["0.", " 1.", " 1", ""], ["0", " no", ""]] + [["no", ""]] * 3
SEGMENTS = [[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2], [0, 0, 0]] + [[0, 0]] * 3  # the sentence of each token


@pytest.mark.parametrize("fresh_start", [False, True])
def test_vineppo_by_hand(fresh_start):
    """Guards against a start that is sampled although it is free, k that gets lost, a mean that includes the response
    itself, and segments off by one."""
    values, rewards, calls = torch.rand(6, 7), [1.0, 0.25, 0.5, 0.0, 3.0, 1.0], []
    batch = make_written(SENTENCES, [9.0] * 6, [0] * 3 + [1] * 3, reward=torch.tensor(rewards),
                         rollouts=lambda cuts, k: calls.append((cuts, k)) or values * cuts)  # fmt: skip
    credit = mitigations.vineppo(batch, k=5, fresh_start=fresh_start)
    others = [0.75 / 2, 1.5 / 2, 1.25 / 2, 4 / 2, 1 / 2, 3 / 2]  # mean reward of the other two
    expected, asked = [], set()
    for i, segments in enumerate(SEGMENTS):
        cuts = [segments.index(s) for s in range(1, max(segments) + 1)]
        V = [values[i, 0].item() if fresh_start else others[i], *values[i, cuts].tolist(), rewards[i]]
        expected.append([V[s + 1] - V[s] for s in segments])
        asked |= {(i, t) for t in cuts + [0] * fresh_start}
    check(credit, expected)
    ((cuts, k),) = calls
    assert k == 5
    assert set(map(tuple, cuts.nonzero().tolist())) == asked


def test_dpo_is_the_gradient_of_its_loss():
    """Guards against a sign, a missing beta, the margin upside down, a mean of log-probs, and a wrong pair: credit is
    minus the gradient of DPO's loss with respect to each log-prob. Ties go to the lowest index."""
    torch.manual_seed(0)
    rewards = torch.tensor([0.1, 1.1, 1.1] + [0.3, 0.1, 0.1] + [0.1, 0.1, 0.1])  # pairs: 1 over 0, 3 over 4, none
    logprob, reference = (-torch.rand(9, 4)).requires_grad_(), -torch.rand(9, 4)
    batch = make_batch([3, 2, 4, 1, 3, 2, 2, 2, 2], [9.0] * 9, [0] * 3 + [1] * 3 + [2] * 3, reward=rewards,
                       logprob=logprob.detach(), reference_logprob=reference)  # fmt: skip
    ratio = ((logprob - reference) * batch.mask).sum(1)  # (B,)
    for best, worst in ((1, 0), (3, 4)):
        (-torch.nn.functional.logsigmoid(0.3 * (ratio[best] - ratio[worst]))).backward(retain_graph=True)
    torch.testing.assert_close(mitigations.dpo(batch, beta=0.3), -logprob.grad)


# --------------------------------------------------------------------------------------- with a trained critic

VALUES = [[0.2, 0.5, 0.4, 0.4], [0.7], [0.1, -0.3, 0.6]]
REWARDS = [1.1, 0.0, 0.1]


def valued_batch(values=VALUES):
    """Three responses, the last of them cut off, and the critic's values."""
    return make_batch([4, 1, 3], [2.0, 3.0, -1.0], reward=torch.tensor(REWARDS), values=grid(values, 0.0),
                      ended=torch.tensor([True, True, False]))  # fmt: skip


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_ppo_by_the_double_sum(gae_lambda):
    """Guards against the reward at the wrong token or at end tokens only, a value after the last one, lambda applied
    once, and a recursion across padding. At lambda 1 it is r - V."""
    expected = []
    for r, v in zip(REWARDS, VALUES):
        delta = [after - before for before, after in zip(v, v[1:] + [r])]  # the reward takes the place of a last value
        expected.append([sum(gae_lambda**j * d for j, d in enumerate(delta[t:])) for t in range(len(v))])
        if gae_lambda == 1:
            assert expected[-1] == pytest.approx([r - x for x in v])
    check(mitigations.ppo(valued_batch(), gae_lambda), expected)


def test_whitened_ppo_by_statistics():
    """Guards against padding in the mean: the eight tokens of the step have mean 0 and deviation 1."""
    credit, lengths = mitigations.ppo(valued_batch()).tolist(), [4, 1, 3]
    flat = normalized([x for row, length in zip(credit, lengths) for x in row[:length]])
    check(mitigations.ppo(valued_batch(), whiten=True), [flat[:4], flat[4:5], flat[5:]])


def test_learned_importance_by_hand():
    """Guards against the end of a response as the largest change of all: |dV| is .3 .1 0, and 0 for the last token.
    Where the values are all the same: plain GRPO."""
    check(mitigations.learned_importance(valued_batch()), [[6, 2, 0, 0], [3], scaled(-1, [0.4, 0.9, 0])])
    constant = valued_batch([[0.3] * 4, [0.3], [0.3] * 3])
    assert torch.equal(mitigations.learned_importance(constant), none(constant))


# ------------------------------------------------------------------------------------------------- the controls


def test_random_weights_are_exponential():
    """Guards against one number for all tokens, and another distribution: an exponential of mean 1 has variance 1, and
    exceeds 2 with probability exp(-2)."""
    names = []

    def generator(name):
        names.append(name)
        return torch.Generator().manual_seed(5)

    batch = make_batch([200] * 100, [1.0] * 100, normalize="none", generator=generator)
    weight = mitigations.random(batch)
    assert names == ["random"]
    assert weight.mean() == pytest.approx(1, abs=0.03)
    assert weight.var() == pytest.approx(1, abs=0.1)
    assert (weight > 2).float().mean() == pytest.approx(math.exp(-2), abs=0.01)


@pytest.mark.parametrize("name", [name for name in REWEIGHTINGS if name != "inverted"])
def test_inverted_reverses_each_reweighting(name, written):
    """Guards against an inverted advantage, and a maximum over padding or over the batch."""
    expected = []
    for A, credit in zip(written.advantage.tolist(), itertools.chain(*ragged(written, MITIGATIONS[name](written)))):
        weights = [c / A for c in credit]
        expected.append(scaled(A, [max(weights) + min(weights) - w for w in weights]))
    check(mitigations.inverted(written, name), expected, 1e-3)
