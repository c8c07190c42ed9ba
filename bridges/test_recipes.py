"""bridges.credit by hand and beside TokenBatch; the recipes of docs/trl.md on other packages' own types, where they are:

    pip install torch==2.13.0 -r requirements.txt pytest hypothesis tinker==0.38.0 verifiers==0.4.0
    python -m pytest bridges/test_recipes.py
"""
import json
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bridges import credit
from grpo import compare
from methods.registry import CREDIT_FUNCTIONS
from mitigations import reweighting
from plumbing.launch import BUNDLED
from rollout import rollout
from settings import Settings
from start import load_policy

PAGE = (Path(__file__).parents[1] / "docs" / "trl.md").read_text(encoding="utf-8")
# Two responses to a prompt 7 8, whose second token a tool wrote; and what RLOO gives their tokens.
TOKENS, MASK, LOGPROB = [[7, 8, 1, 2, 3], [7, 8, 4, 5]], [[0, 0, 1, 0, 1], [0, 0, 1, 1]], [[0, 0, -1.0, 0, -2.0], [0, 0, -0.5, -0.25]]
PAID = [[0, 0, 1, 0, 1], [0, 0, -1, -1]]


@reweighting
def half(batch, share: float = 0.5):
    """A function of somebody's own."""
    return batch.mask * share


@reweighting
def named(batch, seed: float = 1.0):
    """One with a hyper-parameter that bridges.credit has, too."""
    return batch.mask * seed


for own in ("half", "named"):
    CREDIT_FUNCTIONS.pop(own)  # other tests count them


def recipe(name):
    """What a recipe of the page defines."""
    found = {}
    exec(re.search(rf"```python\n# {name}.py\n(.*?)```", PAGE, re.S)[1], found)
    return found["with_credit"]


@pytest.fixture(scope="module")
def batch():
    """Ours, and its arrays."""
    s = Settings(responses=4, max_new_tokens=50, seed=1)
    policy = load_policy(s)
    found = rollout(policy, policy.task.load("train", 3), s, 1)
    found.advantage = compare(found)
    return found


@pytest.mark.parametrize("name", ["none", "entropy_ratio", "advantage_reweighting", "prefix_tree", "ktae", "positives", "turn_mean"])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list], ids=["numpy", "torch", "lists"])
def test_credit_of_arrays_is_that_of_a_batch(name, kind, batch):
    """Guards against another order, padding that counts, a reply at the end, and another type than that of the tokens."""
    order = [5, 0, 9, 1, 2, 11, 3, 4, 6, 10, 7, 8]
    wide = lambda x: torch.cat((x[order], torch.zeros(12, 2).to(x)), 1)
    tokens, mask, logprob, entropy = map(wide, (batch.tokens, batch.mask.int(), batch.logprob, batch.entropy))
    n = batch.mask.sum(1)[order]
    rows = lambda x: [row[:k].numpy() for row, k in zip(x, n)] if kind is list else kind(x)
    found = credit(*map(rows, (tokens, mask, logprob, entropy)), batch.reward[order].numpy(), batch.group[order].tolist(),
                   name, success=batch.success[order].numpy(), tokenizer=BUNDLED)
    expected = CREDIT_FUNCTIONS[name](batch)[order]  # (B, T)
    for row, want, k in zip(found, expected, n):
        assert type(row) is (torch.Tensor if kind is torch.as_tensor else np.ndarray) and not row[k:].any()
        torch.testing.assert_close(torch.as_tensor(row)[:k], want[:k], atol=1e-5, rtol=1e-4)


def test_credit_by_hand():
    """A prompt and a tool between; a reward that nobody gave; the trainer's own advantage; a length that tells a reply."""
    assert [row.tolist() for row in credit(TOKENS, MASK, None, None, [1, 0], "aa", advantage="rloo")] == PAID
    assert credit([[1, 2]] * 4, [[1, 1]] * 4, None, None, [1, 0, 0, np.nan], "aaaa", advantage="rloo")[3].tolist() == [0, 0]
    assert [row[0] for row in credit([[1, 2]] * 4, [[1, 1]] * 4, None, None, [1, 0, 0, np.nan], "aaaa",
                                     advantage="rloo")] == [1, -0.5, -0.5, 0]
    assert credit([[1]] * 2, [[1]] * 2, None, None, [1, 0], "aa", advantage=[0.25, 7])[1].tolist() == [7]
    assert credit([[1]], [[1]], None, None, [1], "a", advantage=[0.25])[0].tolist() == [0.25]
    for reward, group in (([1, np.nan, 0, np.nan], "aabb"), ([1], "a")):  # none has another one to be compared with
        n = len(reward)
        assert not np.any(credit([[1]] * n, [[1]] * n, None, None, reward, group, "turn_baseline", advantage="rloo"))
    kept = np.array([[1, 2, 3, 0]] * 2), np.array([[1, 0, 0, 0]] * 2)
    assert credit(*kept, None, None, [1, 0], "aa", lengths=[3, 3], advantage="rloo").tolist() == [[1, 0, 0, 0], [-1, 0, 0, 0]]


@pytest.mark.parametrize("options, said", [
    (dict(name="entropy_ratio"), "looks at entropy: give entropy to"), (dict(name="token_type"), "give tokenizer to"),
    (dict(name="optimal_baseline"), "looks at logit_grad, which bridges.credit can't be given"),
    (dict(name="vineppo"), "needs continuations"), (dict(name="zzz"), "no credit function 'zzz'"),
    (dict(group="a"), "must have 2 entries"), (dict(advantage="x"), "'x' is none of"), (dict(normalize="x"), "'x' is none"),
    (dict(reward=[1, 2, 3]), r"reward must be of shape \(2,\)"), (dict(mask=[[1], [1]]), "mask must have B rows"),
    (dict(lengths=[2, 2]), "behind the end"), (dict(power=2), "none takes no power"),
    (dict(mask=[[0, 0, 1, 0, 1], [0, 0, 1]]), "mask must have B rows"), (dict(logprob=[LOGPROB[0], [-1.0]]), "logprob must have"),
    (dict(name=half, power=2), "half takes no power"), (dict(name="named"), "hyper-parameter seed, which bridges.credit"),
    (dict(mask=[[0] * 5, [0] * 4]), "no token was sampled"), (dict(reward=[1, float("inf")]), "reward must be a finite"),
    (dict(advantage=[1, None]), "advantage must be a finite"), (dict(tokens=[], mask=[]), "no response"),
    (dict(tokens=[[7, 8, 1, 2, 3], [7, 9, 4, 5]]), "prompts of group")])
def test_what_is_lacking_is_one_sentence(options, said, monkeypatch):
    monkeypatch.setitem(CREDIT_FUNCTIONS, "named", named)
    usual = dict(tokens=TOKENS, mask=MASK, logprob=LOGPROB, entropy=None, reward=[1, 0], group="aa")
    with pytest.raises(ValueError, match=said):
        credit(**usual | options)


def test_a_function_of_your_own():
    """By name and by object, decorated or not, with its hyper-parameters; and entropies that rounding took below 0."""
    plain = lambda batch, share=0.5: share * CREDIT_FUNCTIONS["none"](batch)
    for function in (half, plain, partial(half, share=1.0), partial(plain, share=1.0)):
        found = credit(TOKENS, MASK, None, None, [1, 0], "aa", function, share=2.0, normalize="none", advantage="rloo")
        assert [row.tolist() for row in found] == [[2 * x for x in row] for row in PAID]
    entropy = [[0, 0, 1.0, 0, -1e-7], [0, 0, 0.5, 0.5]]
    found = credit(TOKENS, MASK, None, entropy, [1, 0], "aa", "entropy_ratio", advantage="rloo")
    assert [row.tolist() for row in found] == [[0, 0, 2, 0, 0], [0, 0, -1, -1]]
    others = credit([[9, 1, 2], [8, 1, 3]], [[0, 1, 1]] * 2, None, None, [1, 0], "aa", "prefix_tree", advantage="rloo",
                    prompts=[[5], [5]])
    assert [row.tolist() for row in others] == [[0, 0.5, 1], [0, -0.5, -1]] or others[0][1] == others[1][1]


def test_tinker():
    """Its own Datums: each target gets the credit of the token that it is."""
    tinker = pytest.importorskip("tinker")
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs={
        "target_tokens": row[1:], "logprobs": log_p[1:], "advantages": [0.0] * (len(row) - 1)}) for row, log_p in zip(TOKENS, LOGPROB)]
    found = recipe("tinker_credit")(data, [row[1:] for row in MASK], [1, 0], "aa", "none", advantage="rloo")
    assert [datum.loss_fn_inputs["advantages"].to_numpy().tolist() for datum in found] == [row[1:] for row in PAID]
    assert all(datum.loss_fn_inputs["advantages"].dtype == "float32" for datum in found)
    assert [datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() for datum in found] == [row[1:] for row in TOKENS]


def test_verifiers():
    """Nodes as its graph has them: a prompt, a reply, a tool, and what the model wrote; and through its JSON."""
    pytest.importorskip("verifiers")
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch
    branches = []
    for row, mask, log_p in zip(TOKENS, MASK, LOGPROB):
        node = lambda i, j: MessageNode(message={"role": "user", "content": "x"}, token_ids=row[i:j], mask=map(bool, mask[i:j]),
                                        logprobs=[x for x, mine in zip(log_p[i:j], mask[i:j]) if mine])
        branches.append(Branch(index=0, nodes=[node(0, 2), node(2, 3), node(3, None)]))
    recipe("verifiers_credit")(branches, [1 / 3, 0], "aa", "none", advantage="rloo")
    third = np.float32(1 / 3).item()
    assert [[node.advantages for node in branch.nodes] for branch in branches] == [
        [[], [third], [third]], [[], [-third], [-third]]]
    exact = [json.loads(branches[0].nodes[1].model_dump_json(context={"float_decimals": n}))["advantages"] for n in (None, 4)]
    assert exact == [[third], [0.3333]]


def test_slime():
    """The fields and the call of its loss.py, by its source."""
    rows, masks = [torch.tensor(row) for row in TOKENS], [torch.tensor(row[2:]) for row in MASK]
    empty = torch.tensor([7, 8]), 0, torch.tensor([]), 0.0, 0.0, torch.tensor([])  # nothing was sampled
    data = {"tokens": [*rows, empty[0]], "response_lengths": [3, 2, 0], "loss_masks": [*masks, empty[2]],
            "raw_reward": [9.0] * 8, "local_raw_reward": [1.0, 0.0, 0.0], "rewards": [0.5, -0.5, 0.0],
            "rollout_log_probs": [*(torch.tensor(row[2:]) for row in LOGPROB), empty[2]]}  # no log_probs: on policy
    recipe("slime_credit")(Namespace(use_rollout_logprobs=False), data)
    assert data["advantages"] is data["returns"] and [len(x) for x in data["advantages"]] == [3, 2, 0]
    first = data["advantages"][0]
    assert first[1] == 0 and first[[0, 2]].mean() == pytest.approx(0.5) and first[0] > first[2]  # more on the surer one
