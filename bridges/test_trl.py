"""CreditTrainer beside TRL's own trainer, and beside ours on the same responses. Oracles: TRL, hand computation."""
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import trl
from packaging.version import Version
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import countdown_task
from bridges import rollouts
from bridges.foreign import FACTS, TASK, find_credit, identity, layout
from bridges.recorder import RolloutTrainer
from bridges.trl import CreditTrainer, distinct
from grpo import ADVANTAGES, assign_credit, compare, shape_reward, update
from methods.registry import CREDIT_FUNCTIONS, ORDER
from methods.queries import Queries
from mitigations import none
from plumbing.launch import BUNDLED, MODELS
from plumbing.runs import read_credit, read_metrics
from qwen2_model import save_model, to_checkpoint
from rollout import rollout
from start import load_policy, parse_flags
from tests.plain import plain_logprobs

ROOT = Path(__file__).parents[1]
Q, G, LIMIT = 6, 4, 60
PUZZLES = countdown_task.load("train", 40)


def grader(name):
    """A reward function: this part of the reward of rows n."""
    def part(completions, n, **_):
        return [countdown_task.grade(text, PUZZLES[i])[name] for text, i in zip(completions, n)]
    part.__name__ = name
    return part


def make(cls, folder, config=None, model=BUNDLED, dtype=torch.float32, tokenizer=BUNDLED,
         rewards=(grader("answer"), grader("format")), **options):
    """A trainer on the bundled model, with Countdown."""
    usual = dict(output_dir=str(folder), max_steps=3, per_device_train_batch_size=8, num_generations=G, use_cpu=True,
                 max_completion_length=40, bf16=False, learning_rate=2e-3, report_to=[], save_strategy="no", seed=3,
                 disable_tqdm=True, reward_weights=[1.0, 0.1], gradient_checkpointing=False, logging_steps=1)
    rows = [{"prompt": "".join(countdown_task.prompt(puzzle, False)), "n": i} for i, puzzle in enumerate(PUZZLES)]
    options = {"train_dataset": datasets.Dataset.from_list(rows)} | options
    return cls(Qwen2ForCausalLM.from_pretrained(model, dtype=dtype), [*rewards],
               trl.GRPOConfig(**usual | (config or {})), **options,
               processing_class=PreTrainedTokenizerFast.from_pretrained(tokenizer))


def trained(cls, folder, config=None, resume=None, **options):
    """The weights after at most three steps, and what was logged, but for times and our own columns."""
    trainer = make(cls, folder, config, **options)
    trainer.train(resume_from_checkpoint=resume)
    ours = lambda name: any(word in name for word in ("time", "per_second", "credit/"))
    logs = [{name: x for name, x in row.items() if not ours(name)} for row in trainer.state.log_history]
    return {name: weight.detach() for name, weight in trainer.model.named_parameters()}, logs


def reads(batch):
    """GRPO's credit, after a look at all that is found late."""
    assert batch.entropy.shape == batch.logit_grad.shape == batch.role.shape
    return none(batch)


@pytest.mark.slow
@pytest.mark.parametrize("credit, config", [
    ("none", {}), ("none", dict(loss_type="grpo", importance_sampling_level="sequence")), (reads, dict(beta=0.04)),
    *((reads, dict(num_iterations=2, **more)) for more in ({}, dict(mask_truncated_completions=True))),  # two batches
    *((reads, dict(gradient_accumulation_steps=2, **more)) for more in ({}, dict(steps_per_generation=4))),
    (reads, dict(loss_type="cispo", epsilon_high=1.2, max_steps=2)), (reads, dict(loss_type="grpo", max_steps=2)),
    (reads, dict(bf16=True, max_steps=1)), (reads, dict(top_entropy_quantile=0.2, max_steps=2)),
    ("none", dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, num_iterations=2)),
    (reads, {})], ids=str)
def test_none_is_trl_to_the_bit(credit, config, tmp_path):
    """Guards against anything that changes a run: a drawn number, a rounding, a mask, the order of rows; or an
    evaluation, and a run that is resumed after its first step."""
    rows = datasets.Dataset.from_list([{"prompt": f"Make {n} from 3, 4 and 5.", "n": n} for n in range(2)])
    start = Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).state_dict()
    for resume in (None, *(["checkpoint-1"] if "save_steps" in config else [])):
        (theirs, expected), (mine, logs) = [
            trained(cls, (folder := tmp_path / cls.__name__), config, resume and str(folder / resume), **options,
                    eval_dataset=rows)
            for cls, options in ((trl.GRPOTrainer, {}), (CreditTrainer, {"credit": credit}))]
        assert max((weight - start[name]).abs().max() for name, weight in theirs.items()) > 1e-3
        assert logs == expected and all(torch.equal(weight, mine[name]) for name, weight in theirs.items())
        assert any("eval_reward" in row for row in logs) == ("eval_steps" in config)
    if "eval_steps" in config:  # which asks for no credit
        make(CreditTrainer, tmp_path, credit=lambda batch: batch.mask / 0, eval_dataset=rows).evaluate()


# ------------------------------------------------------------------------------------------- the same responses


def sample(folder, words=""):
    """Our batch in float64, its policy, and the model that sampled it in a folder."""
    s = parse_flags(shlex.split(words))[0]
    policy, s = load_policy(s), replace(s, responses=G, questions=Q, max_new_tokens=LIMIT, seed=0, micro_batch=99)
    policy.model.double()
    generator = torch.Generator().manual_seed(2)
    reference = load_policy(s).model.double()
    for weight in reference.parameters():
        weight.data += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_model(policy.model, folder / "policy")
    save_model(reference, folder / "reference")
    policy = policy._replace(reference=reference)
    batch = rollout(policy, policy.task.load("train", Q), s, 1)
    batch.ask = Queries(policy, batch, s, 1)
    return batch, policy


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return (folder := tmp_path_factory.mktemp("sampled")), *sample(folder)


def given(batch, monkeypatch, unknown):
    """Let TRL have our responses instead of its own: the rows that are this process's. Returns the reward functions,
    which return None for the rows in `unknown`, by name."""
    whole = [[] for _ in batch.before]  # B, of pairs: a token, and whether it was sampled
    for pairs, row, mask, said in zip(whole, batch.tokens, batch.mask, batch.before):
        for t, token in enumerate(row[mask].tolist()):
            pairs += [(x, 0) for x in said.get(t, ())] + [(token, 1)]
    now = []

    def generate(self, prompts):
        now[:] = range(Q * G)[len(prompts) * self.accelerator.process_index :][: len(prompts)]
        masks = [[mine for _, mine in whole[i]] for i in now] if any(batch.before) else None
        ids, texts = [[token for token, _ in whole[i]] for i in now], [batch.text[i] for i in now]
        return [batch.prompts[i // G] for i in now], ids, masks, texts, None, {}, None, []
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", generate)

    def part(name):
        found = lambda completions, **_: [None if i in unknown.get(name, ()) else batch.grades[name][i].item() for i in now]
        found.__name__ = name
        return found
    return [part(name) for name in batch.parts]


def on_ours(folder, batch, monkeypatch, config=None, cls=CreditTrainer, unknown={}, **options):
    """A trainer on our batch, in float64, and TRL's batch with its credit."""
    parts = given(batch, monkeypatch, unknown)
    config = dict(per_device_train_batch_size=Q * G, max_completion_length=LIMIT, seed=0, shuffle_dataset=False,
                  reward_weights=[*batch.parts.values()]) | (config or {})
    rows = datasets.Dataset.from_dict({"prompt": [str(q) for q in range(Q)]})
    trainer = make(cls, folder / "out", config, folder / "policy", torch.float64, train_dataset=rows, **options)
    trainer.reward_funcs, trainer.reward_func_names = parts, [part.__name__ for part in parts]
    if trainer.ref_model:
        trainer.ref_model.load_state_dict(
            Qwen2ForCausalLM.from_pretrained(folder / "reference", dtype=torch.float64).state_dict())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    n, k = Q * G // trainer.accelerator.num_processes, trainer.accelerator.process_index
    mine = range(k * n, (k + 1) * n)
    return trainer, trainer._generate_and_score_completions([{"prompt": str(i // G)} for i in mine])


def countdown_of(batch):
    """What Countdown says of the texts of our batch in TRL, whose rows have a puzzle's number as their prompt."""
    puzzle = lambda row: batch.puzzles[int(row["prompt"])]
    return SimpleNamespace(**vars(TASK) | dict(
        calculations=lambda text, row: countdown_task.calculations(text, puzzle(row)), PARTS=countdown_task.PARTS,
        grade=lambda text, row, *_: countdown_task.grade(text, puzzle(row))))


def ours(batch, policy, words):
    """Credit and gradient of train.py's step, by a checkpoint's names."""
    s, hyper_parameters, *_ = parse_flags([*shlex.split(words), f"--max_new_tokens={LIMIT}", "--micro_batch=99",
                                        "--max_grad_norm=1e9"])
    batch = replace(batch, normalize=s.normalize, advantage=compare(batch, s.advantage, shape_reward(batch, s)))
    batch.ask = Queries(policy, batch, s, 1)
    credit = assign_credit(batch, partial(CREDIT_FUNCTIONS[s.mitigation], **hyper_parameters), s)
    moves_nothing = SimpleNamespace(zero_grad=policy.model.zero_grad, step=lambda: None,
                                    parameters=lambda: [*policy.model.parameters()])
    update(policy, moves_nothing, batch, credit, s)
    return credit, to_checkpoint({name: w.grad for name, w in policy.model.named_parameters()}, policy.model.config)


def cosine_and_norm(a, b):
    """The cosine of two gradients by name, and the ratio of their norms."""
    a, b = (torch.cat([x[name].flatten() for name in sorted(b)]).double() for x in (a, b))
    return (a @ b / a.norm() / b.norm()).item(), (a.norm() / b.norm()).item()


# What each of them looks at that must be read by the model: nothing, or one of foreign.FACTS.
METHODS = {
    "none": "", "curious --bonus 0.1": "entropy", "outcome_conditional": "", "token_type --filler 0.2": "",
    "inverse_logprob": "logprob", "advantage_reweighting": "logprob", "entropy_weighted": "entropy",
    "entropy_ratio": "entropy", "entropy_masking": "entropy", "prefix_tree": "", "tempo": "", "ktae": "",
    "optimal_baseline": "logit_grad", "reward_decomposition --weights 0.1,0.3,1": "", "first_error": "",
    "process_reward": "", "dpo": "logprob", "random": "", "inverted": "entropy", "shuffled": "entropy", "share": "",
    "positives": "", "expert_iteration": "", "regrade_ablation --tokens": ""}


@pytest.mark.slow
@pytest.mark.parametrize("words, advantage", [
    *((words, "grpo") for words in METHODS), ("entropy_ratio", "theirs"), ("positives", "theirs"),
    *[("none --advantage sample_std", "theirs")] * ("sample_std" in ADVANTAGES)])  # a reader's, by docs/course.md
def test_the_first_gradient_is_ours(words, advantage, sampled, monkeypatch):
    """Guards against another column, advantage, role or log-prob than train.py's, another weight in the loss, and a
    pass over the batch for nothing. TRL's deviation is the unbiased one: ours is larger by sqrt(G / (G - 1))."""
    folder, batch, policy = sampled
    _, hyper_parameters, *_ = parse_flags(["--mitigation", *words.split()])
    name = words.split()[0]
    trainer, inputs = on_ours(folder, batch, monkeypatch, {"beta": 1e-12} if name == "dpo" else {}, task=countdown_of(batch),
                              credit=partial(CREDIT_FUNCTIONS[name], **hyper_parameters), format="format",
                              advantage=advantage, success="answer" if advantage == "grpo" else 0.5)
    trainer.compute_loss(trainer.model, inputs).backward()
    credit, gradient = ours(batch, policy, f"--mitigation {words}")
    ratio, error = (1, 2e-5) if advantage == "grpo" or "sample_std" in words else (math.sqrt(G / (G - 1)), 3e-4)
    torch.testing.assert_close(inputs["advantages"][batch.mask] * ratio, credit[batch.mask].to(inputs["advantages"]),
                               atol=1e-4, rtol=max(1e-4, error))
    found = cosine_and_norm(gradient, {name: w.grad for name, w in trainer.model.named_parameters()})
    assert found == pytest.approx((1, ratio), abs=error)
    assert not {METHODS.get(words, "")} - {"", *vars(trainer.batch)} and torch.equal(trainer.batch.success, batch.success)
    assert bool(METHODS.get(words, "")) == any(fact in vars(trainer.batch) for fact in FACTS)


def test_every_credit_function_runs_or_is_refused_by_name(sampled):
    """Guards against one that fails after minutes of sampling; those of several turns are below."""
    run, found = {words.split()[0] for words in METHODS} | {"gtpo", "turn_mean", "turn_baseline"}, set()
    for name in ORDER:
        try:
            told = {"reference", "a reward for layout"} if name in run else {"reference"}
            found.add(find_credit(name, TASK, told, "TRL").name)
        except ValueError as refused:
            assert re.match(f"{name} needs .*, which TRL does not offer: .*train.py --mitigation", str(refused))
    assert found >= run - {"regrade_ablation"}  # which needs a task's grader
    assert found <= run, "a new credit function runs in TRL: give it a line in METHODS, which compares its gradient"


@pytest.mark.slow
@pytest.mark.parametrize("options, said", [
    (dict(credit="entropy_ratio", config=dict(importance_sampling_level="sequence")), "the mean of their credit"),
    (dict(credit="vineppo"), "vineppo needs continuations"), (dict(credit="dpo"), "set its beta"),
    (dict(credit="token_type filler=0.2"), r"partial\(token_type, name=value\)"),
    (dict(credit="entropyratio"), "there is no credit function 'entropyratio'"),
    (dict(success="zzz"), "'zzz', but answer"), (dict(advantage="z"), "'z' is"), (dict(normalize="z"), "'z' is"),
    (dict(credit="reward_decomposition"), "name its function in format="),
    (dict(credit=partial(CREDIT_FUNCTIONS["curious"], bonuss=1.0)), "curious takes no bonuss"),
    (dict(credit=lambda batch: batch.mask / 0), "step 1, credit function <lambda>: .*without NaN"),
    (dict(credit=lambda batch: batch.ask.hidden), "batch.ask.hidden is not told by this trainer")])
def test_what_cannot_work_is_one_sentence(options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        make(CreditTrainer, tmp_path, **options).train()


# ------------------------------------------------------------------------------------------- no reward

# Of groups of four: three, none, one, four, four and three with a reward.
UNSCORED = {3, 4, 5, 6, 7, 8, 9, 10, 21}
NO_REWARD = {"answer": UNSCORED, "format": UNSCORED | {12}}  # row 12 has one from the first function alone
THREES, FOURS = [0, 1, 2, 20, 22, 23], [*range(12, 20)]


def only(batch, rows, G):
    """Our batch as it were without the other responses, and without row 12's format."""
    B, of = len(batch.tokens), lambda x: x[rows] if isinstance(x, torch.Tensor) else tuple(x[i] for i in rows)
    found = {name: of(x) for name, x in vars(batch).items()
             if isinstance(x, torch.Tensor | tuple) and len(x) == B and name not in ("parts", "log")}
    asked = [int(batch.group[i]) for i in rows[::G]]
    known = torch.tensor([0.0 if i == 12 else 1.0 for i in rows], dtype=torch.float64)
    grades = {name: x[rows] for name, x in batch.grades.items()}
    grades["reward"] = grades["answer"] + 0.1 * grades["format"] * known
    small = replace(batch, **found | dict(
        grades=grades, reward=grades["reward"], group=torch.arange(len(asked)).repeat_interleave(G), ask=batch.ask,
        puzzles=tuple(batch.puzzles[q] for q in asked), prompts=tuple(batch.prompts[q] for q in asked)))
    return replace(small, advantage=compare(small))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "entropy_ratio", "ktae", "first_error", "turn_baseline", "tempo",
                                  "optimal_baseline", "prefix_tree", "positives", "expert_iteration"])
def test_a_response_without_a_reward_is_as_if_it_were_not_there(name, sampled, monkeypatch):
    """Against train.py's functions on the responses that have one, in groups of three and of four. One that is left
    alone is compared with nothing."""
    folder, batch, _ = sampled
    trainer, inputs = on_ours(folder, batch, monkeypatch, unknown=NO_REWARD, credit=name, advantage="grpo",
                              success="answer", task=countdown_of(batch))
    expected = torch.zeros(batch.mask.shape)
    for rows, G in ((THREES, 3), (FOURS, 4)):
        expected[rows] = CREDIT_FUNCTIONS[name](only(batch, rows, G)).float()
    credit = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, inputs["advantages"][batch.mask].float())
    torch.testing.assert_close(credit, expected, atol=1e-4, rtol=1e-3)
    assert expected.any() and trainer._metrics["train"]["credit/left_out"] == [len(UNSCORED) + 1]


@pytest.mark.slow
def test_what_trl_gives_such_groups_stays_to_the_bit(sampled, monkeypatch, capsys):
    """`none` with TRL's own advantage, also by the deviation of the whole step; RLOO by hand; GDPO by definition."""
    folder, batch, _ = sampled
    for config in ({}, dict(scale_rewards="none"), dict(multi_objective_aggregation="normalize_then_sum")):
        (_, theirs), (_, mine) = (on_ours(folder, batch, monkeypatch, config, cls, unknown=NO_REWARD)
                                  for cls in (trl.GRPOTrainer, CreditTrainer))
        assert torch.equal(mine["advantages"][batch.mask], theirs["advantages"][:, None].expand_as(batch.mask)[batch.mask])
        assert theirs["advantages"].any() and not mine["advantages"][[*UNSCORED]].any()
    assert capsys.readouterr().out.count("10 of 24 responses get no credit") == 0  # TRL's own say of a single one
    trainer, _ = on_ours(folder, batch, monkeypatch, unknown=NO_REWARD, advantage="rloo")
    r = [batch.grades["answer"][i].item() + 0.1 * batch.grades["format"][i].item() for i in range(3)]
    assert trainer.batch.advantage[:4].tolist() == pytest.approx(
        [r[0] - (r[1] + r[2]) / 2, r[1] - (r[0] + r[2]) / 2, r[2] - (r[0] + r[1]) / 2, 0])
    trainer, _ = on_ours(folder, batch, monkeypatch, unknown=NO_REWARD, advantage="gdpo")
    parts = torch.stack([torch.tensor([math.nan if i in NO_REWARD[name] else x for i, x in enumerate(
        batch.grades[name].tolist())]).view(Q, G) for name in ("answer", "format")])  # (2, Q, G)
    away = parts - parts.nanmean(2, keepdim=True)
    z = (away / (away.square().nanmean(2, keepdim=True).sqrt() + 1e-4)).nan_to_num()
    total = (z[0] + 0.1 * z[1]).flatten()
    rows = THREES + FOURS
    total = total[rows].double() / (total[rows].double().square().mean().sqrt() + 1e-4)
    torch.testing.assert_close(trainer.batch.advantage[rows].double(), total, atol=1e-4, rtol=1e-3)
    trainer, _ = on_ours(folder, batch, monkeypatch, unknown=NO_REWARD, advantage="step_mean")
    reward = trainer.batch.reward[rows]
    torch.testing.assert_close(trainer.batch.advantage[rows].double(), reward - reward.mean(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_success_that_is_not_told_is_missed_by_those_who_look_at_it(sampled, monkeypatch):
    """Here the function named by success= abstains, and others do not."""
    folder, batch, _ = sampled
    for name, advantage in (("none", "maxrl"), ("expert_iteration", "grpo"), ("share", "grpo"), ("ktae", "grpo"), ("gtpo", "grpo")):
        trainer, inputs = on_ours(folder, batch, monkeypatch, unknown={"answer": UNSCORED}, credit=name,
                                  advantage=advantage, success="answer")
        assert not inputs["advantages"][[*UNSCORED, 11]].any() and inputs["advantages"].any()
        assert trainer._metrics["train"]["credit/left_out"] == [10]
    trainer, inputs = on_ours(folder, batch, monkeypatch, unknown={"answer": UNSCORED}, success="answer", advantage="rloo")
    assert trainer._metrics["train"]["credit/left_out"] == [0] and inputs["advantages"][4:8].any()
    trainer, inputs = on_ours(folder, batch, monkeypatch, unknown={"format": UNSCORED}, format="format",
                              credit="reward_decomposition", success="answer")
    assert trainer._metrics["train"]["credit/left_out"] == [9] and not inputs["advantages"][[*UNSCORED]].any()


def test_no_reward_is_recorded_and_read_as_none(sampled, monkeypatch, run_program):
    """Guards against 0 in its place, in a recording and in the means that are made of it."""
    folder, batch, _ = sampled
    trainer, _ = on_ours(folder, batch, monkeypatch, unknown=NO_REWARD, cls=RolloutTrainer)
    rows = [json.loads(line) for line in (folder / "out" / "rollouts-0.jsonl").read_text().splitlines()]
    assert [i for i, row in enumerate(rows) if row["reward"] is None] == sorted(UNSCORED)
    assert rows[12]["reward"] == batch.grades["answer"][12] and rows[12]["rewards"]["format"] is None
    run_program(rollouts, folder / "out" / "rollouts-0.jsonl", "--model", BUNDLED, "--out", folder / "r")
    metrics, (log,) = read_metrics(folder / "r"), read_credit(folder / "r", read_metrics(folder / "r"))
    assert metrics["reward"][1] == pytest.approx(trainer._metrics["train"]["reward"][0], abs=1e-6)
    said = (folder / "r" / "rollouts.txt").read_text()
    assert "9 rollouts were left out: they have no reward" in said and "1 rollouts get no credit" in said
    assert len({*log["response"]}) == 15 and np.isfinite(log["reward"]).all()


# ------------------------------------------------------------------------------------------- other trainers' ways


def test_reward_functions_of_one_name(sampled, monkeypatch):
    """Guards against columns that move, and against a function called reward that is taken for the weighted sum."""
    assert distinct(["a", "reward", "a", "a"]) == ["a", "reward'", "a'", "a''"]
    folder, batch, _ = sampled
    trainer, _ = on_ours(folder, batch, monkeypatch)
    expected = trainer.batch.grades
    for names in (["reward", "format"], ["format", "format"], ["answer", "reward"]):
        trainer.reward_func_names = names
        trainer.success = "reward" if "reward" in names else 0.5
        own = layout(*trainer.generated[1:3], 1, trainer.accelerator.device)
        found = trainer.gathered([{}] * len(batch.reward), {"advantages": trainer.batch.advantage}, None, own)
        assert [*found.parts.values()] == [*trainer.batch.parts.values()]
        assert all(torch.equal(x, y) for x, y in zip(found.grades.values(), expected.values()))
        column = expected[("answer", "format")[names.index("reward")]] if "reward" in names else expected["reward"] > 0.5
        assert torch.equal(found.success, column.float())


@pytest.mark.slow
def test_a_patched_method_s_values_are_used(sampled, monkeypatch):
    """As faster trainers replace TRL's. Guards against an AttributeError, and values of another method."""
    folder, batch, _ = sampled

    def patched(self, model, ids, mask, C, batch_size=None, compute_entropy=False, **_):
        p = model.base_model(ids, mask).last_hidden_state @ model.lm_head.weight.T  # no output that has a name
        p = p[:, -C - 1 : -1].log_softmax(-1)
        return p.gather(2, ids[:, -C:, None])[..., 0], -(p.exp() * p).sum(-1) if compute_entropy else None
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", patched)
    trainer, _ = on_ours(folder, batch, monkeypatch, credit="entropy_ratio")
    for name in ("logprob", "entropy"):
        torch.testing.assert_close(getattr(trainer.batch, name)[batch.mask].double(),
                                   getattr(batch, name)[batch.mask].double(), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="this trainer does not tell batch.logit_grad"):
        on_ours(folder, batch, monkeypatch, credit="optimal_baseline")


@pytest.mark.slow
def test_what_is_logged_of_a_credit(sampled, monkeypatch, capsys):
    """By hand: the share of the largest tenth. The estimate of the gradient's length beside that of ours, to a third; and
    whether it was clipped."""
    folder, batch, policy = sampled
    for name in ("none", "entropy_ratio", "inverse_logprob", "advantage_reweighting", "token_type"):
        trainer, inputs = on_ours(folder, batch, monkeypatch, credit=name)
        log, size = trainer._metrics["train"], inputs["advantages"][batch.mask].abs()
        n = math.ceil(len(size) / 10)
        assert log["credit/top_tenth"] == pytest.approx([(size.sort().values[-n:].sum() / size.sum()).item()], abs=1e-5)
        assert ("credit/grad_ratio" in log) == (METHODS.get(name, "") != "")
        if "credit/grad_ratio" in log:
            ratio = cosine_and_norm(*(ours(batch, policy, f"--mitigation {words}")[1] for words in (name, "none")))[1]
            assert log["credit/grad_ratio"] == pytest.approx([ratio], rel=0.35)
            assert (f"the gradient is about {log['credit/grad_ratio'][0]:.2g} times as long" in capsys.readouterr().out) == (
                not 0.8 < log["credit/grad_ratio"][0] < 1.25)
    for norm, clipped in ((0.9, 0.0), ("1.5", 1.0)):
        trainer.log({"grad_norm": norm})
        assert trainer.state.log_history[-1]["credit/clipped"] == clipped


@pytest.mark.slow
def test_a_run_says_what_it_is_trained_with(tmp_path, capsys):
    """At the start, in trainer_state.json, in the recording; and at a resume with another function. Columns of the
    dataset are attributes, too."""
    def gentle(batch, slope=1.0):
        assert batch.puzzles[0].n == batch.puzzles[0]["n"] and not hasattr(batch.puzzles[0], "target")
        return slope * none(batch)

    config = dict(max_steps=1, save_strategy="steps", save_steps=1)
    first = make(RolloutTrainer, tmp_path, config, credit=partial(gentle, slope=0.5))
    first.train()
    begun, said = first.record | {}, capsys.readouterr().out
    saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["CreditRecord"]["attributes"]["record"] == begun
    assert "credit: " + json.dumps(begun) in said and "begun with another" not in said
    assert begun["name"] == "gentle" and begun["parameters"] == {"slope": 0.5} and len(begun["source"]) == 8
    again = make(RolloutTrainer, tmp_path, config | dict(max_steps=2), credit=gentle)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    told = capsys.readouterr().out
    assert again.record["run"] == begun["run"] != make(CreditTrainer, tmp_path / "o").record["run"]
    assert 'begun with another credit: {"parameters": {"slope": 0.5}}' in told
    rows = [json.loads(row) for row in (tmp_path / "rollouts-0.jsonl").read_text().splitlines()]
    assert {row["run"] for row in rows} == {begun["run"]} and {row["credit"] for row in rows} == {"gentle slope=0.5", "gentle"}
    kinds = [identity(partial(gentle, slope=np.float32(x)))["parameters"] for x in (0.25, 0.5)]
    assert kinds == [{"slope": 0.25}, {"slope": 0.5}] and {"success", "format"} <= begun.keys()
    with pytest.raises(ValueError, match="a GRPOConfig, not a DPOConfig"):
        CreditTrainer(str(BUNDLED), lambda **_: [], args=trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False))


# ------------------------------------------------------------------------------------------- TRL's loss


LUSPO = ["luspo"] * (Version(trl.__version__) >= Version("1.12"))  # TRL 1.9's mean ran over padding, too


def by_hand(kind, c, now, old, mask, sequence):
    """The gradient of minus TRL's loss at log p (B, T) `now`, from credit c (B, T); clips and caps by the settings."""
    L, change = mask.sum(1, keepdim=True), (now - old) * mask
    share = {"grpo": mask / (len(mask) * L), "sapo": mask / (len(mask) * L), "luspo": mask / len(mask),
             "dr_grpo": mask / (len(mask) * 40)}.get(kind, mask / mask.sum())
    if sequence:  # of the ratio of the whole response, which is the same for all its tokens: so is the gradient
        return (change.sum(1, keepdim=True) / L).exp() * (c * share).sum(1, keepdim=True) * mask / L
    ratio, total = (now - old).exp(), change.sum(1, keepdim=True)
    half = ((ratio - 1) * torch.where(c > 0, 1.0, 1.05)).sigmoid()
    k, scale = torch.where(c >= 0, 2.0, 3.0), torch.where(c >= 0, 3.0, 2.0)
    stopped = (c > 0) & (ratio > 1.2) | (c < 0) & (ratio < 0.8)
    return share * c * {"cispo": ratio.clamp(max=0.2), "sapo": 4 * half * (1 - half) * ratio,
                        "vespo": (scale + k * total - scale * total.exp()).exp()}.get(kind, ratio * ~stopped)


@pytest.mark.parametrize("kind, sequence", [
    *((kind, False) for kind in ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "vespo", *LUSPO)),
    *((kind, True) for kind in ("dapo", "bnpo", "grpo", "dr_grpo", *LUSPO))])
def test_what_trl_makes_of_a_credit(kind, sequence, tmp_path):
    """A random (B, T). With `sequence` its gradient is that of the mean credit, which is why that is refused: the day
    TRL gives each token its own, this fails."""
    level = "sequence" if sequence else "token"
    trainer = make(trl.GRPOTrainer, tmp_path, dict(loss_type=kind, importance_sampling_level=level))
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4, 12, generator=generator).double()
    mask = (torch.arange(12) < torch.tensor([[12], [5], [8], [3]])).double()  # (4, 12)
    c, old = draw() * mask, -draw().abs()
    now = (old + (0.05 if sequence else 0.25) * draw()).requires_grad_()  # 0.05: nothing is clipped
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (now, torch.ones_like(now), None)
    trainer.current_gradient_accumulation_steps, ones = 1, torch.ones(4, 12, dtype=torch.long)
    inputs = dict(prompt_ids=ones, prompt_mask=ones, completion_ids=ones, completion_mask=mask.long(), advantages=c,
                  num_items_in_batch=mask.sum(), old_per_token_logps=old)
    trainer._compute_loss(trainer.model, inputs).backward()
    torch.testing.assert_close(-now.grad, by_hand(kind, c, now.detach(), old, mask, sequence))


# ------------------------------------------------------------------------------------------- where it runs


@pytest.mark.slow
@pytest.mark.parametrize("config, own, asked", [
    ({}, 0, 1), (dict(num_iterations=2), 1, 1), (dict(mask_truncated_completions=True, num_iterations=2), 1, 2)])
def test_passes(config, own, asked, sampled, monkeypatch):
    """How often a batch is read: by TRL itself, and where a function looks at the entropy."""
    folder, batch, *_ = sampled
    for credit, expected in (("none", own), ("token_type", own), ("entropy_ratio", asked)):
        trainer, _ = on_ours(folder, batch, monkeypatch, config, credit=credit)
        passes, forward = [], trainer.model.model.forward
        trainer.model.model.forward = lambda *a, **k: (passes.append(1), forward(*a, **k))[1]
        trainer._generate_and_score_completions([{"prompt": str(i // G)} for i in range(Q * G)])
        assert len(passes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, dict(num_iterations=2), dict(beta=0.1),
                                    dict(beta=0.1, num_iterations=2)], ids=str)
def test_log_p_is_the_adapter_s(config, sampled, monkeypatch):
    """With LoRA the reference is the same model without its adapter. Against transformers."""
    folder, batch, *_ = sampled
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer, _ = on_ours(folder, batch, monkeypatch, config, credit="entropy_ratio", peft_config=adapter)
    whole = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        expected = plain_logprobs(lambda row: whole(row).logits, [batch.prompts[q] for q in batch.group], batch.tokens,
                                  batch.mask)
    assert (expected - batch.logprob).abs().max() > 0.1
    torch.testing.assert_close(trainer.batch.logprob, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "advantage_reweighting", "turn_mean", "turn_baseline"])
def test_what_tools_say_is_no_token(name, tmp_path, monkeypatch, run_program):
    """Our episodes of the guessing game, as TRL has tool results: in the batch, recorded, and read back."""
    normalize = "step" if name == "advantage_reweighting" else "response"
    batch, policy = sample(tmp_path, "--task guess")
    assert sum(map(len, batch.before)) > Q
    trainer, inputs = on_ours(tmp_path, batch, monkeypatch, cls=RolloutTrainer, credit=name, advantage="grpo",
                              success="answer", normalize=normalize, tokenizer=MODELS / "guess-tiny")
    for field in ("tokens", "mask", "role"):
        assert torch.equal(getattr(trainer.batch, field), getattr(batch, field))
    for field in ("before", "text", "spans"):
        assert getattr(trainer.batch, field) == getattr(batch, field)
    credit, _ = ours(batch, policy, f"--task guess --mitigation {name} --normalize {normalize}")
    paid = inputs["advantages"]
    mine = (inputs["completion_mask"] * inputs["tool_mask"]).bool()  # (B, C)
    assert not paid[~mine].any() and mine.sum() == batch.mask.sum() < mine.numel()
    torch.testing.assert_close(paid[mine], credit[batch.mask].float(), atol=1e-4, rtol=1e-4)
    run_program(rollouts, tmp_path / "out" / "rollouts-0.jsonl", "--model", MODELS / "guess-tiny",
                "--out", tmp_path / "r", "--mitigation", name, "--normalize", normalize)
    (log,) = read_credit(tmp_path / "r", read_metrics(tmp_path / "r"))
    assert log["reply_token"].tolist() == [x for said in batch.before for words in said.values() for x in words]
    torch.testing.assert_close(torch.from_numpy(log["credit"]), paid[mine], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_script_of_the_course_trains(tmp_path, monkeypatch):
    """docs/course.md's, made short: it is what a student starts."""
    page = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n# friday.py\n(.*?)```", page, re.S)[1]
    for long, short in (("steps=5", "steps=1"), ("size=96", "size=8"), ("=140", "=9"), ("runs/trl", str(tmp_path))):
        assert code.count(long) == 1
        code = code.replace(long, short)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["friday.py", "entropy_ratio"])
    exec(code, {})


@pytest.mark.slow
def test_several_processes_give_the_same_credit(tmp_path):
    """Groups span them. Two steps of entropy_ratio: its credit to the bit, and the weights, as far as sums agree."""
    for n in (1, 4):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
                 "-m", "bridges.test_trl", tmp_path / f"{n}.pt"]
        subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    (credit, weights), (other, moved) = (torch.load(tmp_path / f"{n}.pt") for n in (1, 4))
    assert torch.equal(credit, other) and credit.any()
    assert max((weight - moved[name]).abs().max() for name, weight in weights.items()) < 2e-6


def worker(file):
    """What one of the processes does."""
    folder = file.parent / os.environ["WORLD_SIZE"] / os.environ["RANK"]
    folder.mkdir(parents=True)
    batch, patch, size = sample(folder)[0], pytest.MonkeyPatch(), Q * G // int(os.environ["WORLD_SIZE"])
    trainer, _ = on_ours(folder, batch, patch, dict(per_device_train_batch_size=size, max_steps=2,
                         learning_rate=1e-3), credit="entropy_ratio")
    credit = CREDIT_FUNCTIONS["entropy_ratio"](trainer.batch)  # (B, T)
    trainer.train()
    if os.environ["RANK"] == "0":
        torch.save((credit, {name: w.detach() for name, w in trainer.model.named_parameters()}), file)
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # a thread of gloo aborts a process now and then that ends as usual


@pytest.mark.slow
def test_a_script_may_have_our_names(tmp_path):
    """A script grpo.py beside a rollout.py and a folder tasks, started elsewhere, with bridges installed by pip: each
    finds his own modules, and of ours no name but bridges is on anybody's path."""
    others = shutil.ignore_patterns(".*", "runs", "weights", "models", "lab", "findings", "docs", "tests", "build")
    clone = shutil.copytree(ROOT, tmp_path / "clone", ignore=others)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target",
                    tmp_path / "site", clone], check=True)
    assert {path.name for path in (tmp_path / "site").iterdir() if path.suffix != ".dist-info"} == {"bridges"}
    (tmp_path / "his" / "tasks").mkdir(parents=True)
    for name in ("rollout", "sampler"):
        (tmp_path / "his" / f"{name}.py").write_text("HIS = True")
    (tmp_path / "his" / "tasks" / "mine.py").write_text("HIS = True")
    script = tmp_path / "his" / "grpo.py"
    script.write_text(f"""import sys, rollout
from bridges.trl import CreditTrainer, TokenBatch, reweighting, token_type
from datasets import Dataset
from trl import GRPOConfig
import sampler, tasks.mine, mitigations
@reweighting
def early(batch: TokenBatch, power: float = 0.5):
    assert batch.text and token_type(batch).shape == batch.mask.shape
    return batch.mask.cumsum(1).clamp(min=1) ** -power
CreditTrainer({str(BUNDLED)!r}, lambda completions, **_: [float(len(text)) for text in completions], credit="early",
              args=GRPOConfig({str(tmp_path)!r}, max_steps=1, per_device_train_batch_size=4, num_generations=2,
                              max_completion_length=8, use_cpu=True, bf16=False, report_to=[], save_strategy="no"),
              train_dataset=Dataset.from_list([dict(prompt="Use 3 and 4.")] * 8)).train()
assert rollout.HIS and sampler.HIS and tasks.mine.HIS and mitigations.reweighting is reweighting
assert sys.modules['rollout'] is rollout
""")
    installed = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path, env=installed)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
