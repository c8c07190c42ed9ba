"""Credit functions against hand computations and plain loops, and the mechanism by which they become flags.

What every method must do is asked of all of MITIGATIONS, so that a new one is covered by being named there.
Run it:  python -m pytest tests/test_mitigations.py
"""

import itertools
import math
import statistics
from collections import Counter
from copy import deepcopy
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
import mitigations
from conftest import make_batch, make_written
from countdown_task import Problem
from critic import Critic
from mitigations import MITIGATIONS, none, outcome_conditional, reweight
from qwen2_model import Answers, Prompts, load_model
from train import BUNDLED

# The methods of the specification; one that is in neither set is new.
REWEIGHTINGS = {"outcome_conditional", "inverse_logprob", "advantage_reweighting", "entropy_weighted", "random",
                "entropy_masking", "attention_credit", "causal_ablation", "learned_importance", "inverted"}  # fmt: skip
OTHERS = {"none", "prefix_tree", "optimal_baseline", "gtpo", "ktae", "reward_decomposition", "vineppo", "dpo", "ppo"}
ASKS = {"attention_credit": {"attention"}, "causal_ablation": {"logprob_without"}, "vineppo": {"rollouts"},
        "dpo": {"reference_logprob"}, "ppo": {"values"}, "learned_importance": {"values"},
        "random": {"generator"}}  # fmt: skip
CALLABLES = {"generator", "hidden", "attention", "values", "reference_logprob", "logprob_without", "rollouts"}
STEP_WIDE = {"entropy_masking", "random"}  # a threshold over the step; one stream of chance
OWN_ADVANTAGE = {"ppo", "vineppo", "reward_decomposition"}  # credit although all rewards of a group are equal
METHODS = pytest.mark.parametrize("name", MITIGATIONS)
MOVES = pytest.mark.parametrize("name", [name for name in MITIGATIONS if mitigations.is_reweighting(name)])
ANSWER = torch.tensor([[False, False, True, True, False], [False, False, False, False, False]])
GARBAGE = 1e9  # what stands on padding, where nobody may look


def grid(rows, padding=GARBAGE):
    """Lists of unequal length as a tensor (B, T)."""
    return torch.tensor([row + [padding] * (max(map(len, rows)) - len(row)) for row in rows])


def check(credit, expected, tolerance=1e-5):
    """Each response's credit is the list expected of it, and 0 on padding."""
    for got, want in zip(credit.tolist(), expected, strict=True):
        assert got == pytest.approx(want + [0.0] * (len(got) - len(want)), rel=tolerance, abs=tolerance)


def scaled(advantage, weights):
    """The credit of a response whose tokens have these weights, once their mean is 1."""
    return [advantage * w * len(weights) / sum(weights) for w in weights]


def made_up():
    """Random responses in 4 groups of 4: the first and the last mixed, one all right, one all wrong; tokens 0..3."""
    torch.manual_seed(0)
    lengths = [5, 3, 7, 1, 4, 4, 6, 2, 3, 8, 2, 5, 6, 1, 4, 3]
    batch = make_batch(lengths, torch.randn(16).tolist(), [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    batch.tokens = torch.randint(4, (16, 8))  # on padding, too
    for name, low, high in (("logprob", -3, 0), ("entropy", 0.01, 2), ("logit_grad", 0, 1.4)):
        setattr(batch, name, torch.empty(16, 8).uniform_(low, high).where(batch.mask, GARBAGE))
    batch.success = torch.tensor([1.0, 0, 1, 0] + [1] * 4 + [0] * 4 + [0, 0, 1, 0])
    batch.reward = batch.success + 0.1 * torch.rand(16)
    batch.ended = torch.tensor([True, True, False, True] * 4)
    return batch


def ragged(batch, values):
    """A tensor (B, T) as Python lists without padding, in groups: [question][answer][token]."""
    rows = [row[:length] for row, length in zip(values.tolist(), batch.mask.sum(1).tolist())]
    size = len(rows) // len(batch.numbers)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# ----------------------------------------------------------------------------- what every method has to do


@pytest.fixture(scope="module")
def real(codec):
    """Responses of the bundled model; everything that a method may ask of the model is there and not trivial."""
    model = load_model(BUNDLED)
    model.real_vocab = codec.size
    reference, critic = deepcopy(model), Critic(model.config.hidden_size)
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.outer.weight)
    torch.nn.init.normal_(reference.model["norm"].weight, 1.0, 0.1)
    problems = [Problem((4, 3, 5), 8), Problem((12, 7, 20), 39), Problem((1, 2, 3), 6)]
    batch = grpo.rollout(model, codec, problems, grpo.draw_uniforms(0, 1, 3, 4, 60), reference=reference, critic=critic)
    rollouts, known = batch.rollouts, {}

    def remembered(cuts, k):  # they take a second
        key = cuts.numpy().tobytes(), k
        if key not in known:
            known[key] = rollouts(cuts, k)
        return known[key].clone()

    return replace(batch, rollouts=remembered)


def with_advantages(batch):
    """The batch with an advantage other than 0 for every response."""
    return replace(batch, advantage=torch.linspace(-1.3, 2, len(batch.text)))


def extremes(batch):
    """The batch with log-probs, entropies and gradients as they are at the ends of what fp32 can say."""
    torch.manual_seed(0)
    at = torch.randint(3, batch.mask.shape)  # (B, T)
    for case in (at, 0 * at, 0 * at + 2):
        kinds = {"logprob": [0.0, -1e-30, -1e4], "entropy": [0.0, 1e-30, 1e30], "logit_grad": [0.0, 1e-20, 2**0.5]}
        yield with_advantages(replace(batch, **{k: torch.tensor(v)[case] * batch.mask for k, v in kinds.items()}))


def test_the_real_batch_has_all_kinds_of_responses(real):
    """Guards against generic checks that have nothing to bite on, after the bundled model was changed."""
    right = real.success.view(3, 4).sum(1)
    assert ((right > 0) & (right < 4)).any() and (right == 0).any() | (right == 4).any()
    assert 0 < real.ended.sum() < 12 and 0 < real.in_answer.any(1).sum() < 12 and real.mask.sum(1).unique().numel() > 4
    assert any(real.steps) and MITIGATIONS["vineppo"](real).unique().numel() > 12


@METHODS
def test_credit_has_a_formula_a_shape_no_gradient_and_zero_on_padding(name, real):
    """Guards against an undocumented method, one that forgets the mask, and a weight that carries a gradient."""
    credit = MITIGATIONS[name](real)
    assert mitigations.summary(name).startswith("credit = ")
    assert credit.shape == real.mask.shape and credit.dtype == torch.float32 and not credit.requires_grad
    assert not credit[~real.mask].any() and credit[real.mask].any() and credit.isfinite().all()


@METHODS
def test_padding_does_not_matter(name, real):
    """Guards against a sum, a softmax or a threshold that includes what stands on padding, however large."""
    garbage = {"tokens": 7, "logprob": -GARBAGE, "entropy": GARBAGE, "logit_grad": GARBAGE, "role": 2}
    noisy = replace(real, **{k: torch.where(real.mask, getattr(real, k), v) for k, v in garbage.items()})
    assert torch.equal(MITIGATIONS[name](noisy), MITIGATIONS[name](real))
    noisy.in_answer = real.in_answer | ~real.mask
    credit = MITIGATIONS[name](noisy)
    assert not credit[~real.mask].any() and credit.isfinite().all()


@METHODS
def test_extreme_inputs_give_finite_credit(name, real):
    """Guards against 1 / 0, exp of a large number and 0 * inf: certain tokens have log-prob and entropy 0 in fp32."""
    for batch in extremes(real):
        credit = MITIGATIONS[name](batch)
        assert credit.isfinite().all() and not credit[~batch.mask].any()


@METHODS
def test_a_method_changes_nothing_and_gives_the_same_again(name, real):
    """Guards against an in-place operation on the batch, or on what the model answered, and chance without a seed."""
    before = {f.name: deepcopy(getattr(real, f.name)) for f in fields(real) if f.name not in CALLABLES}
    answers = {k: getattr(real, k)() for k in ("hidden", "attention", "values", "reference_logprob")}
    copies = {k: v.clone() for k, v in answers.items()}
    assert torch.equal(MITIGATIONS[name](real), MITIGATIONS[name](real))
    for was, now in [(v, getattr(real, k)) for k, v in before.items()] + [(copies[k], answers[k]) for k in copies]:
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


@METHODS
def test_a_method_asks_the_model_for_what_it_needs_only(name, real):
    """Guards against a method that pays for a forward, or for rollouts, that it does not use."""
    asked = set()

    def spy(which):
        return lambda *about: asked.add(which) or getattr(real, which)(*about)

    MITIGATIONS[name](replace(real, **{which: spy(which) for which in CALLABLES}))
    mentioned = {which for which in CALLABLES if mitigations.mentions(name, which)}
    assert asked == (ASKS.get(name, set()) if name in REWEIGHTINGS | OTHERS else mentioned)


def alone(batch, question):
    """The batch of one question, no wider than its responses, with the same answers of the model."""
    rows = (batch.group == question).nonzero()[:, 0]
    (B, T), short = batch.mask.shape, int(batch.mask[rows].sum(1).max())
    part = {k: v for k, v in vars(batch).items() if k not in CALLABLES}
    for k, v in part.items():
        if isinstance(v, torch.Tensor):
            part[k] = v[rows, :short] if v.dim() > 1 else v[rows]
        elif len(v) == B and isinstance(v, list):
            part[k] = [v[i] for i in rows]

    def wide(x, at, height):  # (n, short) -> (height, T)
        full = torch.zeros(height, T, dtype=x.dtype)
        full[at, :short] = x
        return full

    return type(batch)(
        **part | {"numbers": [batch.numbers[question]], "target": [batch.target[question]], "group": 0 * rows},
        generator=batch.generator,
        hidden=lambda: batch.hidden()[rows, :short],
        attention=lambda: batch.attention()[rows, :short, :short],
        values=lambda: batch.values()[rows, :short],
        reference_logprob=lambda: batch.reference_logprob()[rows, :short],
        logprob_without=lambda r, hide: batch.logprob_without(rows[r], wide(hide, slice(None), len(r)))[:, :short],
        rollouts=lambda cuts, k: batch.rollouts(wide(cuts, rows, B), k)[rows, :short],
    )


@pytest.mark.parametrize("name", [name for name in MITIGATIONS if name not in STEP_WIDE])
def test_credit_does_not_depend_on_other_questions(name, real):
    """Guards against a sum over the batch where one over the response or the group is meant, so that results would
    depend on what shares a micro-batch, and against a dependence on how far the batch is padded."""
    torch.manual_seed(0)
    table = torch.rand(2, *real.mask.shape)  # what rollouts and ablations find, the same in both batches
    batch = replace(
        with_advantages(real),
        rollouts=lambda cuts, k: table[0] * cuts,
        logprob_without=lambda rows, hide: real.logprob[rows] - table[1][rows] * hide.sum(1, keepdim=True),
    )
    credit = MITIGATIONS[name](batch)
    for question in range(3):
        part = alone(batch, question)
        got = MITIGATIONS[name](part)
        torch.testing.assert_close(got, credit[real.group == question][:, : got.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MITIGATIONS if name not in OWN_ADVANTAGE])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(name, real):
    """Guards against rounding noise as credit, which Adam would make as large as any other."""
    batch, same = with_advantages(real), real.group == 0  # the other groups go on teaching
    for success in (0.0, 1.0):
        values = {"success": success, "reward": success + 0.1, "advantage": 0.0}
        equal = {k: getattr(batch, k).masked_fill(same, v) for k, v in values.items()}
        assert not MITIGATIONS[name](replace(batch, **equal))[same].any()


# ------------------------------------------------------------------------------------------ reweightings


def test_reweightings_are_those_of_the_specification():
    """Guards against a method that takes --normalize and ignores it, or refuses it and should not."""
    for name in REWEIGHTINGS | OTHERS:
        assert mitigations.is_reweighting(name) == (name in REWEIGHTINGS), name


@MOVES
def test_the_total_credit_of_a_response_is_conserved(name, real):
    """Guards against a method that changes how responses compare: sum of credit = advantage * length. Only masking
    may leave out a response, one without any token above its threshold."""
    for batch in [with_advantages(real), *extremes(real)]:
        credit, plain = MITIGATIONS[name](batch), none(batch).sum(1)
        kept = credit.any(1) if name == "entropy_masking" else torch.ones(len(credit), dtype=torch.bool)
        torch.testing.assert_close(credit.sum(1)[kept], plain[kept], rtol=1e-4, atol=1e-4)
        assert (credit * batch.advantage[:, None] >= 0).all() and kept.any()


@MOVES
def test_normalizations_differ_by_factors_only(name, real):
    """Guards against a method that normalizes on its own, or twice: `none` rescaled by hand gives the other two."""
    batch = with_advantages(real)
    credit = {how: MITIGATIONS[name](replace(batch, normalize=how)) for how in mitigations.NORMALIZATIONS}
    weight = {how: ragged(batch, c / batch.advantage[:, None]) for how, c in credit.items()}
    rows = {how: [row for group in w for row in group] for how, w in weight.items()}
    mean = statistics.fmean([w for row in rows["none"] for w in row])
    for none_, response, step in zip(rows["none"], rows["response"], rows["batch"]):
        assert step == pytest.approx([w / mean for w in none_], rel=1e-3, abs=1e-6)
        assert response == pytest.approx(scaled(1, none_) if any(none_) else none_, rel=1e-3, abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.just(0.0) | st.floats(0.0625, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=5)
)
def test_reweight_has_the_promised_mean(rows):
    """Guards against a normalization over padding, over the wrong axis, or of zero weights."""
    lengths = [len(row) for row in rows]
    weight = torch.tensor([row + [7.0] * (max(lengths) - len(row)) for row in rows])  # 7 on padding must not count
    batch = make_batch(lengths, [1.0] * len(rows))
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        expected = [w * len(row) / sum(row) if sum(row) else 0.0 for w in row]
        assert credit[: len(row)] == pytest.approx(expected, rel=1e-4, abs=1e-6) and not any(credit[len(row) :])
    total = sum(map(sum, rows))
    batch.normalize = "batch"
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        assert credit[: len(row)] == pytest.approx(
            [w * sum(lengths) / total if total else 0.0 for w in row], rel=1e-4, abs=1e-6
        )
    batch.normalize = "none"
    for row, credit in zip(rows, reweight(batch, weight).tolist()):
        assert credit[: len(row)] == row


@pytest.mark.parametrize("bad", [-1e-6, math.inf, -math.inf, math.nan])
def test_reweight_refuses_negative_and_infinite_weights(bad):
    """Guards against credit of the wrong sign, and NaN in the model; but on padding any number may stand."""
    batch = make_batch([3, 2], [1.0, 1.0])
    weight = torch.ones(2, 3)
    weight[1, 2] = bad
    assert reweight(batch, weight).tolist() == [[1, 1, 1], [1, 1, 0]]
    weight[0, 1] = bad
    with pytest.raises(ValueError, match="negative or not finite"):
        reweight(batch, weight)


@pytest.mark.parametrize(
    "name, own",
    [
        ("outcome_conditional", {"think_discount": -1.0}),
        ("outcome_conditional", {"think_discount": math.nan}),
        ("inverse_logprob", {"epsilon": 0.0}),
        ("inverse_logprob", {"epsilon": 0.0, "detach": False}),
        ("advantage_reweighting", {"alpha": 2.0}),
        ("advantage_reweighting", {"alpha": -0.1}),
        ("entropy_weighted", {"entropy_temp": 0.0}),
        ("entropy_weighted", {"entropy_temp": -1.0}),
        ("dpo", {"beta": 0.0}),
        ("ppo", {"gae_lambda": 1.5}),
        ("entropy_masking", {"mask_percentile": 101.0}),
        ("entropy_masking", {"mask_percentile": -1.0}),
        ("entropy_masking", {"mask_percentile": math.nan}),
        ("attention_credit", {"credit_scale": -0.1}),
        ("vineppo", {"k": 0}),
        ("inverted", {"of": "none"}),
        ("inverted", {"of": "dpo"}),
        ("inverted", {"of": "inverted"}),
        ("inverted", {"of": "no such method"}),
    ],
)
def test_hyper_parameters_that_can_not_work_are_refused(name, own, real):
    """Guards against NaN or a traceback in the middle of a run: one sentence, before it."""
    certain = torch.where(real.mask.cumsum(1) == 2, 0.0, real.logprob)  # one token of log-prob 0 in each response
    with pytest.raises(ValueError) as error:
        MITIGATIONS[name](replace(real, logprob=certain), **own)
    assert 10 < len(str(error.value)) < 400 and "\n" not in str(error.value)


# ------------------------------------------------------------------------- the baseline, and the sampler's facts


def test_none_is_the_advantage_on_tokens_and_zero_on_padding():
    """Guards against credit that leaks onto padding."""
    credit = none(make_batch([2, 4], [1.5, -0.5]))
    assert credit.tolist() == [[1.5, 1.5, 0, 0], [-0.5, -0.5, -0.5, -0.5]]


def test_outcome_conditional_by_hand():
    """Guards against the answer's weight landing on the wrong tokens: 4 tokens, weights .5 .5 1 1, mean .75."""
    credit = outcome_conditional(make_batch([4, 5], [3.0, -2.0], in_answer=ANSWER), think_discount=0.5)
    torch.testing.assert_close(credit, torch.tensor([[2.0, 2, 4, 4, 0], [-2, -2, -2, -2, -2]]))


def test_a_discount_of_one_is_plain_grpo_bit_for_bit():
    """Guards against any difference between methods that is not their weights."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 90, (64,)).tolist()
    batch = make_batch(lengths, torch.randn(64).tolist(), in_answer=torch.rand(64, max(lengths)) < 0.3)
    assert torch.equal(outcome_conditional(batch, think_discount=1.0), none(batch))


@pytest.mark.parametrize("think_discount", [0.0, 0.1])
def test_a_response_without_an_answer_keeps_the_weight_of_plain_grpo(think_discount):
    """Guards against the original's confusion of credit with format (such responses got half the weight)."""
    batch = make_batch([5, 5], [1.0, 1.0], in_answer=ANSWER)
    assert torch.equal(outcome_conditional(batch, think_discount)[1], none(batch)[1])


@pytest.mark.parametrize("think_discount", [0.0, 0.5])
def test_a_response_without_an_answer_is_plain_grpo_without_rescaling_too(think_discount):
    """Guards against the same confusion under --normalize none: 1 for a discount of 0, so not 0.5 for one of 0.5."""
    batch = make_batch([5, 5], [1.0, 1.0], in_answer=ANSWER, normalize="none")
    assert outcome_conditional(batch, think_discount)[1].tolist() == [1, 1, 1, 1, 1]


def test_inverse_logprob_by_hand():
    """Guards against |l| without the sign, and epsilon outside: at -1 and -3, 1 / 1.1 and 1 / 3.1; the original's bug
    is 0.1 / 0.6^2 = 0.28 at -0.5 and 0.1 / 3.1^2 = 0.0104 at -3."""
    batch = make_batch([4, 2], [2.0, -1.0], logprob=grid([[0.0, -0.5, -1, -3], [-1.0, -3]]))
    weights = [[10, 1 / 0.6, 1 / 1.1, 1 / 3.1], [1 / 1.1, 1 / 3.1]]
    broken = [[10, 0.1 / 0.36, 0.1 / 1.21, 0.1 / 9.61], [0.1 / 1.21, 0.1 / 9.61]]
    for detach, ws in ((True, weights), (False, broken)):
        check(mitigations.inverse_logprob(batch, 0.1, detach), [scaled(2, ws[0]), scaled(-1, ws[1])])
        raw = mitigations.inverse_logprob(replace(batch, normalize="none"), 0.1, detach)
        check(raw, [[2 * w for w in ws[0]], [-w for w in ws[1]]])


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
    check(mitigations.advantage_reweighting(replace(batch, normalize="none"), alpha=0.8),
          [[2, 1.2, 0.8], [-0.8 * math.exp(-1) - 0.2]])  # fmt: skip
    check(mitigations.advantage_reweighting(batch, alpha=0.0), [[2, 2, 2], [-1]])


def test_entropy_weighted_by_hand():
    """Guards against a softmax over padding or over the batch, and the temperature upside down: H = 0, log 2, log 4
    are 1, 2, 4 of 7 at temperature 1, and 1, 4, 16 of 21 at 1/2; whatever --normalize, since their mean is 1."""
    batch = make_batch([3, 2], [7.0, -3.0], entropy=grid([[0.0, math.log(2), math.log(4)], [math.log(2), 0.0]]))
    for normalize in mitigations.NORMALIZATIONS:
        batch.normalize = normalize
        check(mitigations.entropy_weighted(batch), [[3, 6, 12], [-4, -2]])
        check(mitigations.entropy_weighted(batch, 0.5), [[1, 4, 16], [-4.8, -1.2]])


@pytest.mark.parametrize(
    "normalize, expected", [("none", [2, -3]), ("batch", [10, -15]), ("response", [2 * 6 / 1, -3 * 4 / 1])]
)
def test_entropy_masking_by_hand(normalize, expected):
    """Guards against a threshold per response, over padding, or from below. Of the entropies 1..10 the 80th percentile
    lies between 8 and 9, so 9 and 10 are kept: two of ten, hence the factor 5 between the paper and its code."""
    entropy = grid([[1.0, 4, 10, 2, 3, 5], [6.0, 9, 7, 8]])
    credit = mitigations.entropy_masking(make_batch([6, 4], [2.0, -3.0], entropy=entropy, normalize=normalize))
    check(credit, [[0, 0, expected[0], 0, 0, 0], [0, expected[1], 0, 0]])


def test_entropy_masking_keeps_the_threshold_itself_and_drops_whole_responses():
    """Guards against > for >=, which keeps nothing where all are equal, and plain credit where none was meant. The 75th
    percentile of 0, 1, 2, 3, 4 is 3; a response below it gets no credit."""
    batch = make_batch([3, 2], [1.0, 1.0], entropy=grid([[3.0, 0.0, 4.0], [2.0, 1.0]]))
    check(mitigations.entropy_masking(batch, 75.0), [[1.5, 0, 1.5], [0, 0]])
    check(mitigations.entropy_masking(batch, 0.0), [[1, 1, 1], [1, 1]])
    check(mitigations.entropy_masking(batch, 100.0), [[0, 0, 3], [0, 0]])
    batch.entropy = torch.full((2, 3), 0.1)
    check(mitigations.entropy_masking(batch), [[1, 1, 1], [1, 1]])


# -------------------------------------------------------------------------------- against the rest of the group


def test_prefix_tree_compares_prefixes():
    """Guards against tokens compared one by one, with another group, beyond the end, or without oneself."""
    batch = made_up()
    batch.tokens[:, :2] = torch.tensor([[1, 2], [1, 2], [1, 3], [2, 2]] * 4)  # some are shared, in every group
    batch.tokens[0] = batch.tokens[2]  # two that differ in length only
    expected = []
    for q, group in enumerate(ragged(batch, batch.tokens)):
        for i, row in enumerate(group):
            shared = [sum(row[: t + 1] == other[: t + 1] for other in group) for t in range(len(row))]
            expected.append([float(batch.advantage[4 * q + i]) / n for n in shared])
    check(mitigations.prefix_tree(batch), expected)
    assert {1, 2, 3} <= {round(a / c) for a, row in zip(batch.advantage.tolist(), expected) for c in row}


def test_prefix_tree_by_hand():
    """Guards against a prefix that a later difference undoes: `5 6 7`, `5 6 8 7`, `5 9 7` share 3, 2, 1 tokens."""
    tokens = grid([[5, 6, 7], [5, 6, 8, 7], [5, 9, 7]], padding=5)
    credit = mitigations.prefix_tree(make_batch([3, 4, 3], [6.0, -6.0, 3.0], tokens=tokens))
    check(credit, [[2, 3, 6], [-2, -3, -6, -6], [1, 3, 3]])


def baseline_by_loops(reward, gradient):
    """optimal_baseline's credit for one group, from the rewards and each answer's logit_grad, as specified."""
    credit = [[] for _ in reward]
    for i, row in enumerate(gradient):
        for t in range(len(row)):
            running = [k for k in range(len(reward)) if t < len(gradient[k])]
            energy = {k: sum(g * g for g in gradient[k][: t + 1]) for k in running}
            total = sum(energy.values())
            usable = len(running) > 1 and total > 0
            baseline = sum(reward[k] * energy[k] for k in running) / total if usable else statistics.fmean(reward)
            credit[i].append(reward[i] - baseline)
    return credit


def test_optimal_baseline_by_loops():
    """Guards against energies of one token, of finished answers or of other groups; and r - r where one runs alone."""
    batch = made_up()
    expected = []
    for reward, gradient in zip(batch.reward.view(4, 4).tolist(), ragged(batch, batch.logit_grad)):
        expected += baseline_by_loops(reward, gradient)
    check(mitigations.optimal_baseline(batch), expected)
    assert all(abs(expected[i][-1]) > 0.01 for i in (2, 12))  # the longest of their groups, alone at the end


def test_optimal_baseline_by_hand():
    """Guards against the same mistake twice. Energies 1, 3 at first, then 2, 7: baselines 1/4 and 2/9; alone: 1/2."""
    gradient, reward = grid([[1.0, 1.0], [3**0.5, 2.0, 5.0]]), torch.tensor([1.0, 0])
    credit = mitigations.optimal_baseline(make_batch([2, 3], [0.0, 0.0], reward=reward, logit_grad=gradient))
    check(credit, [[3 / 4, 7 / 9], [-1 / 4, -2 / 9, -1 / 2]])


def test_optimal_baseline_without_any_energy_is_the_mean():
    """Guards against 0 / 0 where all answers begin with tokens of probability 1: then the group mean, 1/4."""
    batch = make_batch([2] * 4, [0.0] * 4, reward=torch.tensor([1.0, 0, 0, 0]), logit_grad=torch.tensor([[0.0, 1]] * 4))
    check(mitigations.optimal_baseline(batch), [[3 / 4, 3 / 4]] + [[-1 / 4, -1 / 4]] * 3)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-16])
def test_optimal_baseline_has_no_unit(scale):
    """Guards against a floor under the energies: gradients of nearly certain tokens are tiny, and all of them alike."""
    gradient = torch.tensor([[1.0], [3.0**0.5]]) * scale
    batch = make_batch([1, 1], [0.0, 0.0], reward=torch.tensor([1.0, 0]), logit_grad=gradient)
    check(mitigations.optimal_baseline(batch), [[3 / 4], [-1 / 4]])


def gtpo_by_loops(entropy, right, a1, a2, joint):
    """gtpo's credit for one mixed group, from each answer's entropies and whether it is right, as specified."""
    shaped = [[] for _ in entropy]
    for i, row in enumerate(entropy):
        for t, h in enumerate(row):
            side = [entropy[k][t] for k in range(len(entropy)) if right[k] == right[i] and t < len(entropy[k])]
            if right[i]:
                shaped[i].append(a1 + a2 * h / sum(side) * len(side))
            else:
                shaped[i].append(-a1 - a2 * (1 / (h + 1e-6)) / sum(1 / (x + 1e-6) for x in side) * len(side))
    sides = [[x for k, r in enumerate(right) if joint or r == which for x in shaped[k]] for which in right]
    means, stds = [statistics.fmean(side) for side in sides], [statistics.pstdev(side) + 1e-4 for side in sides]
    return [[(x - mean) / std for x in row] for row, mean, std in zip(shaped, means, stds)]


@pytest.mark.parametrize("joint", [False, True])
def test_gtpo_by_loops(joint):
    """Guards against shares over time instead of over answers, d and h swapped, H for 1 / H, and z-scores over padding
    or groups; all right, and all wrong: plain GRPO."""
    batch = made_up()
    for a1, a2 in ((1.0, 0.1), (0.3, 0.7)):
        expected = ragged(batch, none(batch))
        for q, right in ((0, [True, False, True, False]), (3, [False, False, True, False])):
            expected[q] = gtpo_by_loops(ragged(batch, batch.entropy)[q], right, a1, a2, joint)
        check(mitigations.gtpo(batch, a1, a2, joint), itertools.chain(*expected), 2e-3)  # rounding noise over 1e-4


def test_gtpo_by_hand():
    """Guards against the same mistake twice. Right answers have H 1, 3 at token 0: shares 1/4, 3/4 of 2 are rewards
    1.05, 1.15; alone at token 1: 1.1. Mean 1.1, so z is -k, 0, k with k = 0.05 / (0.05 (2/3)^0.5 + 1e-4)."""
    entropy = grid([[1.0], [3.0, 0.2], [1.0]])
    credit = mitigations.gtpo(make_batch([1, 2, 1], [0.0] * 3, success=torch.tensor([1.0, 1, 0]), entropy=entropy))
    k = 0.05 / (0.05 * (2 / 3) ** 0.5 + 1e-4)
    check(credit, [[-k], [k, 0], [0]], 3e-3)  # rounding noise of 1.1 is divided by 1e-4


def test_gtpo_as_published_loses_the_outcome():
    """Guards against a claim in its docstring that is not so: credit averages 0 on the right answers of a mixed group,
    and on the wrong ones, unless both are standardized together."""
    batch = made_up()
    published, joint = mitigations.gtpo(batch), mitigations.gtpo(batch, joint=True)
    for right, wrong in (([0, 2], [1, 3]), ([14], [12, 13, 15])):
        sums = [published[right].sum().item(), published[wrong].sum().item()]
        assert sums == pytest.approx([0, 0], abs=0.01) and published[right + wrong].abs().sum() > 3
        assert joint[right].sum() > 3 and joint[wrong].sum() < -3


def test_gtpo_divides_small_entropies_too():
    """Guards against a floor under the sum of entropies: the only right answer has all of it at every token, however
    certain (1% of the bundled model's tokens are below 1e-6), so that its tokens get the same: z-scored, 0."""
    entropy = grid([[1e-7, 0.5, 1e-8, 1e-3, 0.1], [0.5, 0.1], [0.2, 0.3, 0.4]])
    batch = make_batch([5, 2, 3], [0.0] * 3, success=torch.tensor([1.0, 0, 0]), entropy=entropy)
    assert mitigations.gtpo(batch)[0].tolist() == pytest.approx([0] * 5, abs=0.01)


def fisher_by_enumeration(R, W, a, b):
    """The share of all ways to deal a + b tokens to R + W answers that are no likelier than a to right, b to wrong."""
    ways = Counter(sum(i < R for i in holders) for holders in itertools.combinations(range(R + W), a + b))
    return Fraction(sum(n for n in ways.values() if n <= ways[a]), sum(ways.values()))


def gain_by_definition(R, W, a, b):
    """Mutual information in bits of `holds the token` and `is right`."""
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
    got = mitigations.fisher_p(R, W)
    gain = mitigations.information_gain(*torch.tensor(tables).T, R, W)
    for (a, b), bits in zip(tables, gain.tolist()):
        assert got[a, b].item() == pytest.approx(float(fisher_by_enumeration(R, W, a, b)), rel=1e-12)
        assert bits == pytest.approx(gain_by_definition(R, W, a, b), abs=1e-12)
    assert mitigations.fisher_p(4, 4)[4, 0].item() == pytest.approx(2 / 70)  # two of the 70 ways are that extreme


def ktae_by_loops(tokens, right):
    """The score of each token id of one group."""
    R, W = right.count(True), right.count(False)
    pools = [[t for row, r in zip(tokens, right) if r == side for t in row] for side in (True, False)]
    average, score = (len(pools[0]) + len(pools[1])) / 2, {}
    for token in set(pools[0] + pools[1]):
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


@pytest.mark.parametrize("size", [4, 8])
def test_ktae_by_loops(size):
    """Guards against counts of tokens for counts of answers, lengths of answers for those of sides, a score for the end
    token (the last of an answer that ended, no other), a group's score given to another, and groups all alike."""
    batch = made_up()
    batch.tokens[:, 5:] = 9
    if size == 8:  # large enough for a p other than 1 of a token that both sides hold
        batch = replace(batch, group=batch.group // 2, numbers=batch.numbers[:2])
        batch.success = torch.tensor([0.0, 0, 1, 0, 1, 0, 1, 1] + [1] * 8)
    expected, tokens, scores = ragged(batch, none(batch)), ragged(batch, batch.tokens), []
    for q, right in enumerate(batch.success.view(-1, size).bool().tolist()):
        score = ktae_by_loops(tokens[q], right) if any(right) and not all(right) else Counter()
        scores += score.values()
        for i, row in enumerate(tokens[q]):
            for t, token in enumerate(row):
                expected[q][i][t] += score[token] if t < len(row) - 1 or not batch.ended[size * q + i] else 0.0
    check(mitigations.ktae(batch), itertools.chain(*expected))
    assert sum(0.01 < abs(x) < 0.99 for x in scores) > 1


def test_ktae_says_nothing_about_a_token_that_all_have():
    """Guards against F = exp(-2) for a token whose presence says nothing, whatever its frequency."""
    tokens = grid([[7, 7, 7, 1, 9], [7, 2, 9]], padding=1)
    batch = make_batch([5, 3], [1.0, -1.0], tokens=tokens, success=torch.tensor([1.0, 0]))
    credit = mitigations.ktae(batch)
    assert credit[0, :3].tolist() == [1, 1, 1] and credit[1, 0] == -1  # with two answers p is always 1


# ------------------------------------------------------------------------------------- what is written, checked

TRUE_TRUE = ["1+2=3", ", ", "3*3=9", ".", "</think>\n", "<answer>", "x", "</answer>", ""]
FALSE = ["1+2=4", "</think>\n", "<answer>", "x", "</answer>", ""]
TRUE_FALSE = ["1+2=3", ",", " 3+3=7", "</think>\n", "<answer>", "x", "</answer>", ""]
NO_STEP = ["hm", "</think>\n", "<answer>", "x", "</answer>", ""]
CUT_OFF = ["1+2=3", ",", "3", "*", "3=9"]  # of several tokens, and no answer


def normalized(values):
    """Minus the mean, over the standard deviation."""
    return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-4) for v in values]


def decomposed_batch():
    """Two groups; format and success are made up, so that the three rewards disagree."""
    pieces = [NO_STEP, TRUE_TRUE, FALSE, TRUE_FALSE, CUT_OFF, TRUE_TRUE, TRUE_TRUE, TRUE_TRUE]
    return make_written(
        pieces, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0] * 4 + [1] * 4,
        format=torch.tensor([1.0, 1, 1, 0.5] + [0.6, 1, 1, 1]), success=torch.tensor([0.0, 1, 0, 0] + [0.0, 0, 1, 1]),
        reward=torch.full((8,), 9.0),
    )  # fmt: skip


def test_reward_decomposition_by_hand():
    """Guards against weights or sections swapped, tags left out of a section, one normalization over the sum, shares of
    true steps counted over the group, and credit for a response without an answer or a calculation."""
    F, R, S = (normalized(x) for x in ([1, 1, 1, 0.5], [0, 1, 0, 0.5], [0, 1, 0, 0]))  # no step: a share of 0
    tail = [[0.3 * r + 0.1 * f, s + 0.1 * f, s, s + 0.1 * f, s + 0.1 * f] for f, r, s in zip(F, R, S)]
    expected = [[0.1] * 6, [0.3 * R[1]] * 4 + tail[1], [0.3 * R[2]] + tail[2], [0.3 * R[3]] * 3 + tail[3]]
    F, S = normalized([0.6, 1, 1, 1]), normalized([0, 0, 1, 1])  # every calculation is true: R is 0
    tail = [[0.1 * f, s + 0.1 * f, s, s + 0.1 * f, s + 0.1 * f] for f, s in zip(F, S)]
    expected += [[0.5] * 5] + [[0.0] * 4 + tail[i] for i in (1, 2, 3)]
    check(mitigations.reward_decomposition(decomposed_batch()), expected)


def test_reward_decomposition_stepwise_by_hand():
    """Guards against a verdict on a neighbour's tokens, and a mean over responses instead of over calculations: of the
    group's five, three are true; of the other's eight, all."""
    F, V, S = normalized([1, 1, 1, 0.5]), normalized([1, 1, 0, 1, 0]), normalized([0, 1, 0, 0])
    tail = [[0.1 * f, s + 0.1 * f, s, s + 0.1 * f, s + 0.1 * f] for f, s in zip(F, S)]
    expected = [[0.1] * 6, [0.3 * V[0], 0, 0.3 * V[1], 0] + tail[1], [0.3 * V[2]] + tail[2]]
    expected += [[0.3 * V[3], 0, 0.3 * V[4]] + tail[3]]
    credit = mitigations.reward_decomposition(decomposed_batch(), stepwise=True)
    check(credit[:4], expected)
    assert not credit[5:, :4].any() and credit[4].tolist() == [0.5] * 5 + [0] * 4


def test_reward_decomposition_without_any_calculation_is_plain(recwarn):
    """Guards against the mean of nothing: NaN, or a warning."""
    batch = make_written([NO_STEP, ["hm"]], [1.0, -1.0])
    for stepwise in (False, True):
        assert torch.equal(mitigations.reward_decomposition(batch, stepwise), none(batch))
    assert not list(recwarn)


# --------------------------------------------------------------------------------------- asking the model again


@pytest.mark.parametrize("credit_scale", [2.0, 0.5])
def test_attention_credit_by_loops(credit_scale):
    """Guards against queries and keys swapped, the off-by-one of the original, later tokens punished because fewer
    states could see them, and a mean over the answer or padding. No answer, or none that anybody reads: plain."""
    torch.manual_seed(0)
    lengths, begins = [6, 4, 5, 3, 1], [3, 4, 0, 2, 0]  # where each answer begins; the second has none
    attention = torch.rand(5, 6, 6).tril(-1)  # the state before token t sees the tokens before t
    in_answer = torch.zeros(5, 6, dtype=torch.bool)
    expected = []
    for i, (L, begin) in enumerate(zip(lengths, begins)):
        in_answer[i, begin:L] = True
        looks = []
        for u in range(L):
            readers = [t for t in range(begin, L) if t > u]
            looks.append(sum(attention[i, t, u].item() for t in readers) / len(readers) if readers else 0.0)
        mean = sum(looks) / L
        expected.append(scaled(i - 1.5, [1 + credit_scale * (a / mean if mean else 0) for a in looks]))
    batch = make_batch(lengths, [i - 1.5 for i in range(5)], in_answer=in_answer, attention=lambda: attention)
    check(mitigations.attention_credit(batch, credit_scale), expected)
    assert expected[1] == [-0.5] * 4 and expected[4] == [2.5]


ABLATED = [
    ["1+2", "=3", ".", " 3*3=9", " ok", "</think>\n", "<answer>", "3*3", "</answer>", ""],  # two calculations
    ["1+2=3", " and"],  # no answer
    ["hm", "</think>\n", "<answer>", "1+2=3", "</answer>", ""],  # a calculation in the answer only
    [" 2+2=4", "</think>\n", "<answer>", "4", "</answer>", ""],  # one that the answer does not need
]


def test_causal_ablation_by_hand():
    """Guards against a drop summed over more than the answer, a rise counted as a drop, tokens of the wrong calculation
    hidden, shares of another response's drop, and a second forward. The answer's log-prob falls by 1 without the
    first calculation of response 0, by 2 without the second; that of response 3 rises."""
    calls = []

    def logprob_without(rows, hide):
        calls.append((rows.tolist(), [h.nonzero()[:, 0].tolist() for h in hide]))
        after = batch.logprob[rows].clone()
        after[0, 6:8] -= 0.5
        after[1, 9] -= 2
        after[2, 3] += 1
        after[:, 0] -= 100  # what hiding does elsewhere
        return after

    batch = make_written(ABLATED, [1.0, 2.0, 3.0, 4.0], logprob_without=logprob_without)
    first = [0.75, 0.75, 0.5, 1, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5]  # their mean is 1 already
    last = [0.5, 0.5, 1.5, 1.5, 1.5, 1.5]
    check(mitigations.causal_ablation(batch), [first, [2, 2], [3] * 6, scaled(4, last)])
    assert calls == [([0, 0, 3], [[0, 1], [3], [0]])]
    batch.normalize = "none"
    check(mitigations.causal_ablation(batch), [first, [2, 2], [3] * 6, [4 * w for w in last]])


def test_causal_ablation_without_anything_to_hide_asks_nobody():
    """Guards against a forward of zero rows."""
    batch = make_written(ABLATED[1:3], [1.0, 2.0])
    assert torch.equal(mitigations.causal_ablation(batch), none(batch))


VINES = [["1", " yes.", " 0", " ok", ".", " 1", ""], ["0.", " 1.", " 1", ""], ["0", " no", ""], ["1.", " 0.", " 0", ""]]
SEGMENTS = [[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2], [0, 0, 0], [0, 1, 2, 2]]  # the sentence of each token


def tree_value(bits):
    """The exact chance of at least two ones among three bits of which some are known; a one follows a one with
    probability 0.8, anything else with 0.3."""
    value = 0.0
    for rest in itertools.product((0, 1), repeat=3 - len(bits)):
        whole, chance = bits + rest, 1.0
        for i in range(len(bits), 3):
            one = 0.8 if i and whole[i - 1] else 0.3
            chance *= one if whole[i] else 1 - one
        value += chance * (sum(whole) >= 2)
    return value


def test_vineppo_converges_to_exact_values():
    """Guards against segments off by one, the value of the wrong end, and a reward that is not the end's. The process
    is small enough to enumerate; 8000 rollouts simulate it."""
    rng = np.random.default_rng(0)

    def bits_before(i, t):
        return tuple(int(c) for c in "".join(VINES[i][:t]) if c in "01")

    def rollouts(cuts, k):
        value = torch.zeros(cuts.shape)
        for i, t in cuts.nonzero().tolist():
            known = bits_before(i, t)
            last, ones = np.full(k, known[-1] if known else 0), np.full(k, sum(known))
            for _ in range(3 - len(known)):
                last = (rng.random(k) < np.where(last == 1, 0.8, 0.3)).astype(int)
                ones += last
            value[i, t] = (ones >= 2).mean()
        return value

    batch = make_written(VINES, [0.0] * 4, reward=torch.tensor([1.0, 1, 0.5, 0]), rollouts=rollouts)
    expected = []
    for i, where in enumerate(SEGMENTS):
        values = [tree_value(bits_before(i, where.index(s))) for s in range(max(where) + 1)] + [batch.reward[i].item()]
        expected.append([values[s + 1] - values[s] for s in where])
    check(mitigations.vineppo(batch, k=8000, fresh_start=True), expected, 0.03)
    assert min(abs(c) for row in expected for c in row) > 0.05


@pytest.mark.parametrize("fresh_start", [False, True])
def test_vineppo_by_hand(fresh_start):
    """Guards against a start that is sampled although it is free, k that gets lost, a mean that includes oneself, and
    credit that does not add up: over *segments*, to r - V(start)."""
    values, calls = torch.arange(28.0).view(4, 7) / 28 + 0.5, []

    def rollouts(cuts, k):
        calls.append((cuts.clone(), k))
        return values * cuts

    rewards = [1.0, 0.25, 0.5, 0.0, 3.0, 1.0, 0.0, 0.0]  # the second group has only its start and its end
    pieces = VINES + [["no", ""]] * 4
    values = torch.cat((values, torch.full((4, 7), 0.125)))
    batch = make_written(pieces, [9.0] * 8, [0] * 4 + [1] * 4, reward=torch.tensor(rewards), rollouts=rollouts)
    credit = mitigations.vineppo(batch, k=5, fresh_start=fresh_start)
    cuts, starts = {0: [2, 5], 1: [1, 2], 3: [1, 2]}, values[:, 0].tolist()
    if not fresh_start:
        starts = [(1.75 - r) / 3 for r in rewards[:4]] + [(4 - r) / 3 for r in rewards[4:]]
    expected = []
    for i, where in enumerate(SEGMENTS + [[0, 0]] * 4):
        v = [starts[i]] + [values[i, t].item() for t in cuts.get(i, [])] + [rewards[i]]
        expected.append([v[s + 1] - v[s] for s in where])
        once = [credit[i, where.index(s)].item() for s in range(max(where) + 1)]
        assert sum(once) == pytest.approx(rewards[i] - starts[i], abs=1e-6)
    check(credit, expected)
    ((asked, k),) = calls
    asked_for = {(i, t) for i, ts in cuts.items() for t in ts} | {(i, 0) for i in range(8) if fresh_start}
    assert k == 5 and set(map(tuple, asked.nonzero().tolist())) == asked_for


@pytest.mark.parametrize("loss_norm", ["token", "constant"])
def test_dpo_is_the_gradient_of_its_loss(loss_norm, random_model):
    """Guards against a sign, a missing beta, the margin upside down, mean for summed log-probs, and a wrong pair:
    credit through our loss gives DPO's gradient, over the tokens of the step or over B * max_new_tokens."""
    torch.manual_seed(0)
    lengths, beta, longest = [3, 2, 4, 1, 3, 2, 2, 2, 2], 0.3, 7
    rewards = torch.tensor([0.1, 1.1, 1.1] + [0.3, 0.1, 0.1] + [0.1, 0.1, 0.1]).double()  # pairs 1 over 0, 3 over 4
    prompts = [[2, 7], [5, 2, 7, 1], [3]]
    batch = make_batch(lengths, [9.0] * 9, [0] * 3 + [1] * 3 + [2] * 3, reward=rewards)
    batch.tokens = torch.randint(10, (9, 4))
    reference = deepcopy(random_model)
    for p in reference.parameters():
        p.data += 0.05 * torch.randn_like(p)

    def logprobs(model):
        return grpo.response_logprobs(model, Answers(Prompts(model, prompts), batch.group), batch.tokens, batch.mask)

    now, ref = logprobs(random_model), logprobs(reference).detach()
    batch.logprob, batch.reference_logprob = now.detach(), lambda: ref
    ratio = (now - ref).sum(1)  # (B,)
    loss = sum(-torch.nn.functional.logsigmoid(beta * (ratio[best] - ratio[worst])) for best, worst in ((1, 0), (3, 4)))
    wanted = torch.autograd.grad(loss, list(random_model.parameters()))
    weight = grpo.token_weights(batch.mask, loss_norm, longest)
    ours = grpo.policy_loss(logprobs(random_model), batch.logprob, mitigations.dpo(batch, beta), weight)
    got = torch.autograd.grad(ours, list(random_model.parameters()))
    total = sum(lengths) if loss_norm == "token" else 9 * longest
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a * total, b, rtol=1e-3, atol=1e-5 * b.abs().max().item())


def test_dpo_by_hand():
    """Guards against the same mistake twice, credit on padding, and ties: the lowest index. log ratios 1 and -2 make
    the margin 0.5 * 3; sigmoid(-1.5) = 0.182426."""
    batch = make_batch(
        [2, 1, 3, 1, 1, 1], [9.0] * 6, [0] * 3 + [1] * 3, reward=torch.tensor([0.1, 1, 1] + [0.5] * 3),
        logprob=grid([[-1.0, -2], [-1.0], [-3.0, 0, 0], [-1.0], [-1.0], [-1.0]]),
        reference_logprob=lambda: torch.tensor([[-0.5, -0.5, 0], [-2, 0, 0], [-1.0, -1, -1]] * 2),
    )  # fmt: skip
    credit = 0.5 * 0.182426
    check(mitigations.dpo(batch, beta=0.5), [[-credit] * 2, [credit], [0] * 3, [0], [0], [0]])


# ---------------------------------------------------------------------------------------- with a trained critic

VALUES = [[0.2, 0.5, 0.4, 0.4], [0.7], [0.1, -0.3, 0.6]]
REWARDS = [1.1, 0.0, 0.1]


def valued_batch():
    """Three responses, the last of them cut off, and what a critic says about them."""
    batch = make_batch([4, 1, 3], [2.0, 3.0, -1.0], reward=torch.tensor(REWARDS), values=lambda: grid(VALUES, 0.0))
    return replace(batch, ended=torch.tensor([True, True, False]))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_ppo_by_the_double_sum(gae_lambda):
    """Guards against the reward at the wrong token or only at an end token, a value behind the last one, lambda applied
    once, and a recursion that runs across padding. At 0: V(next) - V(this), the reward last; at 1: r - V."""
    expected = []
    for r, v in zip(REWARDS, VALUES):
        delta = [after - this for this, after in zip(v, v[1:] + [r])]  # the reward takes the place of a last value
        sums = [sum(gae_lambda**j * d for j, d in enumerate(delta[t:])) for t in range(len(v))]
        expected.append(sums)
        if gae_lambda == 0:
            assert sums == delta
        if gae_lambda == 1:
            assert sums == pytest.approx([r - x for x in v])
    check(mitigations.ppo(valued_batch(), gae_lambda), expected)


def test_ppo_whitened_has_mean_zero_and_deviation_one():
    """Guards against padding in the mean, and whitening unasked: the eight tokens of the step, by statistics."""
    plain, white = mitigations.ppo(valued_batch()), mitigations.ppo(valued_batch(), whiten=True)
    flat = normalized([x for row, v in zip(plain.tolist(), VALUES) for x in row[: len(v)]])
    check(white, [flat[:4], flat[4:5], flat[5:]])


def test_learned_importance_by_hand():
    """Guards against the end of a response as the largest change of all, and the sign: |dV| is .3 .1 0 and nothing for
    the last token, mean .1. One token, or a critic that says the same of all: plain GRPO."""
    credit = mitigations.learned_importance(valued_batch())
    check(credit, [[6, 2, 0, 0], [3], scaled(-1, [0.4, 0.9, 0])])
    constant = replace(valued_batch(), values=lambda: grid([[0.3] * 4, [0.3], [0.3] * 3], 0.0))
    assert torch.equal(mitigations.learned_importance(constant), none(constant))


# ------------------------------------------------------------------------------------------------- the controls


def test_random_weights_are_exponential():
    """Guards against chance that is the same for all tokens, changes when asked again, or is another distribution: an
    exponential of mean 1 has variance 1, and exceeds 2 with probability exp(-2)."""
    names = []

    def generator(name):
        names.append(name)
        return torch.Generator().manual_seed(5)

    batch = make_batch([200] * 100 + [30], [1.0] * 101, normalize="none", generator=generator)
    weight = mitigations.random(batch)[batch.mask]
    assert torch.equal(weight, mitigations.random(batch)[batch.mask]) and set(names) == {"random"}
    assert weight.unique().numel() > 0.99 * len(weight)
    assert weight.mean() == pytest.approx(1, abs=0.03) and weight.var() == pytest.approx(1, abs=0.1)
    assert (weight > 2).float().mean() == pytest.approx(math.exp(-2), abs=0.01)
    assert torch.equal(mitigations.random(replace(batch, advantage=-2 * batch.advantage))[batch.mask], -2 * weight)


@MOVES
def test_inverted_turns_each_method_around(name, real):
    """Guards against the advantage inverted with the weights, and a maximum over padding or the batch."""
    if name == "inverted":
        return  # refused, see above
    batch, expected = with_advantages(real), []
    for A, row in zip(batch.advantage.tolist(), itertools.chain(*ragged(batch, MITIGATIONS[name](batch)))):
        w = [c / A for c in row]
        flipped = [max(w) + min(w) - x for x in w]
        expected.append(scaled(A, flipped) if any(w) else row)
    check(mitigations.inverted(batch, name), expected, 1e-3)


def test_inverted_by_hand():
    """Guards against the same mistake twice: weights 2/3 2/3 4/3 4/3 become 4/3 4/3 2/3 2/3, equal ones stay."""
    batch = make_batch([4, 5], [3.0, -2.0], in_answer=ANSWER)
    check(mitigations.inverted(batch, "outcome_conditional"), [[4, 4, 2, 2], [-2] * 5])
    batch.normalize = "none"
    assert mitigations.inverted(batch, "outcome_conditional")[0].tolist() == [3, 3, 1.5, 1.5, 0]


# ---------------------------------------------------------------------------------------------- what they take


def test_hyper_parameters_are_found_by_introspection():
    """Guards against a flag that must be declared in a second place."""
    assert mitigations.parameters("outcome_conditional") == {"think_discount": 0.5}
    assert mitigations.parameters("gtpo") == {"a1": 1.0, "a2": 0.1, "joint": False}
    assert mitigations.parameters("none") == {}


def test_defaults_are_those_of_the_specification():
    """Guards against a default changed by accident: it is what a published number was measured with."""
    defaults = {
        "outcome_conditional": [0.5], "inverse_logprob": [0.1, True], "attention_credit": [2.0], "dpo": [0.1],
        "entropy_weighted": [1.0], "entropy_masking": [80.0], "gtpo": [1.0, 0.1, False], "ppo": [0.95, False],
        "reward_decomposition": [False], "vineppo": [9, False], "advantage_reweighting": [0.2],
    }  # fmt: skip
    for name, values in defaults.items():
        assert list(mitigations.parameters(name).values()) == values, name
