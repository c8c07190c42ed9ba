"""Other programs' rollouts: TRL's own trainer, rows by hand, and what is none."""
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM

import analyze
import countdown_task
from bridges import rollouts as program
from bridges.recorder import RolloutTrainer
from bridges.test_trl import make
from grpo import compare
from methods.registry import CREDIT_FUNCTIONS
from methods.queries import Queries
from plumbing.runs import read_credit, read_metrics
from rollout import rollout
from settings import Settings
from start import load_policy
from tests.fixtures import BUNDLED
from tests.plain import plain_logprobs


def write(file, rows):
    """A file with an object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(run, rows, *words, model=BUNDLED):
    """What the command makes of rows, or of a file: the credit log of each step, metrics.csv and what it said. words:
    more files, then flags."""
    file = rows if isinstance(rows, Path) else write(run.with_suffix(".jsonl"), rows)
    sys.argv = ["bridges.rollouts", *map(str, (file, *words, "--model", model, "--out", run))]
    program.main()
    metrics = read_metrics(run)
    return read_credit(run, metrics), metrics, (run / "rollouts.txt").read_text()


@pytest.mark.slow
def test_log_p_is_that_of_trl(tmp_path):
    """Four steps of TRL's trainer, two of them with new rollouts. Guards against another checkpoint, a temperature that
    is not applied, an off-by-one, rows out of order, and other rows from parquet."""
    file, parquet, seen = tmp_path / "rollouts-0.jsonl", tmp_path / "a.parquet", []
    file.write_text("of an earlier run in this folder")

    class Trainer(RolloutTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            seen.append(batch["old_per_token_logps"][batch["completion_mask"] > 0])  # (n,)
            assert (batch["prompt_mask"] == 0).any()
            return batch

    def length(completions, **_):
        return [len(c) / 50 for c in completions]

    def rare(completions, **_):
        return [None if i % 3 else float("a" in c) for i, c in enumerate(completions)]

    prompts = [{"prompt": f"Make {i}{' now' * (i - 20)} from 3, 4 and 5."} for i in range(20, 40)]
    config = dict(max_steps=4, max_completion_length=30, save_strategy="steps", save_steps=1, temperature=0.9,
                  num_iterations=2, reward_weights=[1.0, 0.5])
    trainer = make(Trainer, tmp_path, config, rewards=(length, rare), train_dataset=Dataset.from_list(prompts))
    weight, tokenizer = trainer.model.lm_head.weight.data, trainer.processing_class
    weight[tokenizer.eos_token_id] = weight[tokenizer.convert_tokens_to_ids(".")]  # so that some responses end
    trainer.save_model(tmp_path / "checkpoint-0")
    trainer.train()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    Dataset.from_list(rows).to_parquet(parquet)
    logs, metrics, said = read(tmp_path / "r", file, "--temperature", 0.9, model=tmp_path)
    others, _, _ = read(tmp_path / "p", parquet, "--temperature", 0.9, model=tmp_path)
    for given in (row["rewards"] | {"reward": row["reward"]} for row in rows):
        assert given["reward"] == pytest.approx(given["length"] + 0.5 * (given["rare"] or 0))
    assert metrics["their_step"][1:].tolist() == [1, 3] and "1 by checkpoint-0, 3 by checkpoint-2" in said
    assert abs(metrics["log_p_plus_entropy"][1:]).max() < 0.3 and 0 < metrics["truncated"][1:].mean() < 1
    for log, other, expected, step in zip(logs, others, seen, (1, 3), strict=True):
        np.testing.assert_allclose(log["logprob"], expected, atol=2e-5, rtol=0)
        first = log["position"] == 0
        for name in ("advantage", "reward"):
            assert log[name][first] == pytest.approx([row[name] for row in rows if row["step"] == step])
        assert np.ptp(log["advantage"]) > 1 and np.array_equal(log["credit"], log["advantage"])
        assert all(np.array_equal(log[name], other[name]) for name in log)


def test_a_recording_holds_one_run(tmp_path):
    """Resumed after step 2 of 3, by fewer processes: guards against a step twice, rows cut by a kill, another run's."""
    row = '{{"step": {}}}\n'.format
    (tmp_path / "rollouts-0.jsonl").write_text(row(1) + row(2) + row(3) + row(3)[:5])
    (tmp_path / "rollouts-1.jsonl").write_text(row(3))
    (tmp_path / "other.jsonl").write_text(row(3))
    process = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    RolloutTrainer.begin(SimpleNamespace(accelerator=process, state=SimpleNamespace(global_step=2)), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "rollouts-0.jsonl": row(1) + row(2), "other.jsonl": row(3)}


@pytest.fixture(scope="module")
def sampled():
    """A batch of the bundled model: log-probs and the rest as its sampler recorded them; and its rows."""
    policy, s = load_policy(Settings()), Settings(responses=4, max_new_tokens=70)
    batch = rollout(policy, countdown_task.load("train", 3), s, step=1)
    batch.ask = Queries(policy, batch, s, 1)
    return batch, [{"prompt_ids": batch.prompts[q], "completion_ids": tokens[mask].tolist(), "reward": reward,
                    "rewards": {"half": reward / 2, "gone": None}, "group": int(q)}
                   for q, tokens, mask, reward in zip(batch.group, batch.tokens, batch.mask, batch.reward.tolist())]


@pytest.mark.slow
def test_ids_give_what_the_sampler_recorded(sampled, tmp_path, run_program, capsys, monkeypatch):
    """Guards against a credit of rows in another order, and another advantage than the one asked for. The
    variance of log p, which the verdict is told, against transformers."""
    (batch, rows), judged, verdict = sampled, [], program.verdict
    monkeypatch.setattr(program, "verdict", lambda *known: (judged.append(known), verdict(*known))[1])
    shuffled = [rows[i] for i in (0, 5, 4, 1, 9, 8, 2, 3, 6, 7, 11, 10)]
    more = write(tmp_path / "more", shuffled[5:])  # of another process
    flags = "--mitigation", "prefix_tree", "--advantage", "rloo"
    (log,), metrics, said = read(tmp_path / "r", shuffled[:5], more, *flags)
    order = [0, 1, 2, 3, 5, 4, 6, 7, 9, 8, 11, 10]  # by group, each in the order of the file
    rows_of = lambda x: torch.cat([x[i][batch.mask[i]] for i in order]).numpy()
    for name in ("tokens", "logprob", "entropy", "logit_grad", "role"):
        np.testing.assert_allclose(log[name.removesuffix("s")], rows_of(getattr(batch, name)), atol=2e-5, rtol=0)
    capsys.readouterr()
    run_program(analyze, tmp_path / "r")
    text = capsys.readouterr().out
    assert f"| {len(log['token'])} | 100.0% |" in re.sub(" +", " ", text) and "nan" not in text
    assert (tmp_path / "r" / "analysis" / "tokens.html").stat().st_size > 9999
    batch.advantage = compare(batch, "rloo")
    np.testing.assert_allclose(log["credit"], rows_of(CREDIT_FUNCTIONS["prefix_tree"](batch)), atol=1e-6)
    assert metrics["truncated"][1] == pytest.approx(1 - batch.ended.float().mean())
    assert metrics["success"][1] == pytest.approx((batch.reward > batch.reward.max() / 2).double().mean())
    assert metrics["rewards/half"][1] == pytest.approx(batch.reward.mean() / 2) and np.isnan(metrics["rewards/gone"][1])
    assert "so it may have written them" in said and "ours, rloo; credit: prefix_tree; " in said
    model, expected = Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32), []
    for row in (rows[i] for i in order):
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt_ids"] + row["completion_ids"]])).logits[0].double()  # (S, V)
        log_p = logits[len(row["prompt_ids"]) - 1 : -1].log_softmax(1)
        expected += [torch.cov(x, aweights=x.exp(), correction=0) for x in log_p]
    (_, _, variance), = judged
    torch.testing.assert_close(variance, torch.stack(expected), atol=1e-4, rtol=1e-4)


def padded(rows):
    """The same rollouts as verl's tensors have them, with other names, null for what is not known, and its padding."""
    P, C = (max(len(row[name]) for row in rows) for name in ("prompt_ids", "completion_ids"))
    for i, row in enumerate(rows):
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        yield {"prompts": [0] * (P - len(prompt)) + prompt, "responses": completion + [0] * (C - len(completion)),
               "response_mask": [1] * len(completion) + [0] * (C - len(completion)), "uid": str(row["group"]),
               "global_step": 7, "reward": row["reward"], "advantages": [float(i)] * C, "step": None, "surplus": i}


@pytest.mark.slow
def test_other_programs_names_and_padding(sampled, tmp_path):
    """Guards against columns that are dropped in silence, padding that is read as text, and a mask of one kind alone."""
    batch, rows = sampled
    named = [row | {"advantage": float(i), "step": 7} for i, row in enumerate(rows)]
    expected, metrics, _ = read(tmp_path / "a", named)
    Dataset.from_list([*padded(rows)]).to_parquet(tmp_path / "verl.parquet")
    as_trl = [{name: x for name, x in row.items() if name != "rewards"} | {
        "completion_ids": row["completion_ids"] + [5, 6], "loss_mask": [1] * len(row["completion_ids"]) + [1, 0],
        "completion_mask": [True] * len(row["completion_ids"]) + [False, True]} for row in named]
    inside = [row | {"prompt_ids": row["prompt_ids"] + [0], "completion_ids": [0] + row["completion_ids"],
                     "response_mask": [0] + [1] * len(row["completion_ids"])} for row in named]
    ended = [row | {"completion_ids": row["completion_ids"] + [0, 0] * (row["completion_ids"][-1] == 1)} for row in named]
    for name, theirs in (("verl", tmp_path / "verl.parquet"), ("trl", as_trl), ("ended", ended), ("inside", inside)):
        found, columns, said = read(tmp_path / name, theirs)
        for column in expected[0]:
            np.testing.assert_array_equal(found[0][column], expected[0][column], err_msg=f"{name} {column}")
        for column in ("truncated", "entropy", "their_step", "success"):
            assert columns[column][1] == metrics[column][1], (name, column)
        assert "padding, or a reply at the end, was taken off" in said and "so it may have written them" in said
    assert "not read: the column surplus (12 rows)" in read(tmp_path / "b", tmp_path / "verl.parquet")[2]


@pytest.mark.slow
def test_what_is_odd_in_rows_is_told(sampled, tmp_path):
    """A null group is no name; a part of the reward that the first row lacks; no sampled token; a sign turned round;
    advantages by token; and another credit than the recorded one."""
    rows = [row | {"advantage": row["reward"], "credit": "ktae"} for row in sampled[1]]
    rows[5] = rows[5] | {"rewards": {"late": 2.0}, "advantage": [rows[5]["reward"]] * len(rows[5]["completion_ids"])}
    empty = rows[0] | {"completion_ids": [], "group": "empty"}
    _, metrics, said = read(tmp_path / "a", [*rows, empty])
    assert metrics["rewards/late"][1] == 2 and "left out: no token of theirs was sampled (1 rows)" in said
    assert "the higher reward has the LOWER advantage" not in said
    assert "recorded with credit ktae; read with none" in said
    turned = [row | {"advantage": -row["reward"]} for row in rows]
    assert "the higher reward has the LOWER advantage" in read(tmp_path / "b", turned)[2]
    by_token = [row | {"advantage": [*map(float, range(len(row["completion_ids"])))]} for row in rows]
    by_token[3]["advantage"] = 1.0  # as a response of one token has it
    said = read(tmp_path / "c", by_token)[2]
    assert "advantages that differ between the tokens" in said and "advantage: ours, grpo" in said
    lost = [row | {"group": float("nan") if i == 3 else 1.0} for i, row in enumerate(rows)]
    with pytest.raises(SystemExit):
        read(tmp_path / "d", lost)
    rows[3] |= {"reward": None, "advantage": None, "uid": 9}  # nobody scored it
    said = read(tmp_path / "f", rows)[2]
    assert "1 rollouts were left out: they have no reward" in said and "not read: the column uid (1 rows)" in said


def test_a_checkpoint_of_another_run_is_not_read(sampled, tmp_path):
    """One that stands in the same folder from before says so; one that says nothing is read."""
    rows = [row | {"run": "new", "step": step} for step in (1, 4) for row in sampled[1]]
    for n, run in ((0, None), (2, "old"), (3, "new")):
        shutil.copytree(BUNDLED, folder := tmp_path / "out" / f"checkpoint-{n}")
        state = {"stateful_callbacks": {"CreditRecord": {"attributes": {"record": {"run": run}}}}} if run else {}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    said = read(tmp_path / "r", rows, model=tmp_path / "out")[2]
    assert "1 by checkpoint-0, 4 by checkpoint-3" in said and "checkpoint-2 of" in said


def test_groups_of_another_size_are_compared_within_themselves_aloud(sampled, tmp_path):
    """A group is of one step, name and prompt; one by itself gets nothing. And only every second step is read."""
    rows = sampled[1][:11] + [sampled[1][11] | {"group": "alone"}]
    (log,), _, said = read(tmp_path / "a", rows, "--advantage", "rloo")
    assert "3 rollouts are in groups that are not of 4" in said and "1 rollouts get no credit: nothing else" in said
    assert log["group"].max() == 3 and "advantage: ours, rloo" in said
    r = [row["reward"] for row in rows]
    expected = [x - (sum(r[a:b]) - x) / (b - a - 1) for a, b in ((0, 4), (4, 8), (8, 11)) for x in r[a:b]]
    assert log["credit"][log["position"] == 0].tolist() == pytest.approx([*expected, 0], abs=1e-6)
    named = [row | {"group": i % 2, "advantage": float(i)} for i, row in enumerate(sampled[1][:8])]
    (log,), _, said = read(tmp_path / "b", named)
    assert log["advantage"][log["position"] == 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7] and log["group"].max() == 3
    rows = [row | {"step": step} for step in (2, 3, 5) for row in sampled[1]]
    assert read(tmp_path / "e", rows, "--every", 2)[1]["their_step"][1:].tolist() == [2, 5]


@pytest.mark.slow
def test_each_step_is_read_by_its_checkpoint(sampled, tmp_path, refusal):
    """Against transformers and PEFT: another model or adapter for some steps. Guards against the step's own weights,
    which it has trained, and against the last ones."""
    from peft import LoraConfig, get_peft_model
    (batch, rows), output, models = sampled, tmp_path / "output", []
    for step in (1, 3, 10):  # the first is an adapter, whose folder has no config.json
        model = Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        if step == 3:
            torch.nn.init.normal_(model.lm_head.weight, std=0.1)
        if step == 1:
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
            model.peft_config["default"].init_lora_weights = True
        models.append(model)
        model.save_pretrained(output / f"checkpoint-{step}")
        for file in BUNDLED.glob("tokenizer*"):
            shutil.copy(file, output / f"checkpoint-{step}")
    rows = [row | {"step": (1, 3, 4, 11)[i // 4]} for i, row in enumerate(rows[8:] + rows)]
    more = write(tmp_path / "more", rows[4:8] + rows[12:])
    logs, metrics, said = read(tmp_path / "r", rows[:4] + rows[8:12], more, model=output)
    assert metrics["their_step"][1:].tolist() == [3, 4, 11]
    assert "4 rollouts were left out: there is no checkpoint" in said
    assert "3 by checkpoint-1, 4 by checkpoint-3, 11 by checkpoint-10" in said
    for i, (log, model) in enumerate(zip(logs, models, strict=True)):
        asked, (tokens, mask) = [batch.prompts[i]] * 4, (x[4 * i :][:4] for x in (batch.tokens, batch.mask))
        with torch.no_grad():
            expected = plain_logprobs(lambda row: model(row).logits, asked, tokens, mask)  # (4, T)
        np.testing.assert_allclose(log["logprob"], expected[mask], atol=2e-4, rtol=0)
    words = write(tmp_path / "early", rows[:4]), "--model", output, "--out", tmp_path / "t"
    assert "has no checkpoint before step 1: save the start model as" in refusal(program, *words)
    (output / "checkpoint-1" / "adapter_config.json").write_text('{"r": 2}')
    assert "adapter_config.json has no base_model_name_or_path" in refusal(program, *words)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("sharper, tokens, said", [
    (1.0, 4000, "it may have written them"), (1.3, 4000, "too probable"), (0.7, 4000, "did NOT"),
    (0.7, 4, "too few tokens to tell")])
def test_log_p_tells_who_wrote(sharper, tokens, said):
    """Tokens drawn from p^sharper, normalized: by definition, only with 1 is the mean of log p minus the entropy."""
    logits = torch.randn(1, tokens, 50, generator=torch.Generator().manual_seed(0)).double()
    token = torch.multinomial((sharper * logits[0]).softmax(1), 1, generator=torch.Generator().manual_seed(1))
    model = SimpleNamespace(hidden=lambda inputs, cache: inputs, logits=lambda states: states)
    piece = SimpleNamespace(sampled=torch.ones(1, tokens) > 0, text=token[None, :, 0])
    log_p, entropy, _, variance = program.measured_by(model, logits, None, piece).T
    assert said in program.verdict(log_p, entropy, variance)


@pytest.mark.parametrize("wrong, said", [
    ({"completion_ids": None}, "it has no completion_ids, and texts don't tell which tokens were sampled: record "
                               "tokens with bridges/recorder.py, see docs/trl.md"),
    ({"completion_ids": [5, 1, 6]}, "stand behind the end token"), ({"completion_ids": [5, 99999]}, "tokens from 0 to"),
    ({"completion_ids": [True]}, "must be a list of tokens"), ({"completion_ids": [-1]}, "must be a list of tokens"),
    ({"prompt_ids": []}, "its prompt_ids must be"), ({"rewards": [1]}, "its rewards must be numbers by name"),
    ({"prompt_ids": [5] * 99999}, "it has 100000 tokens, and the model takes"), ({}, "nothing to compare"),
    ({"group": None}, "it has no group; its fields: 'prompt_ids', 'completion_ids', 'reward'"),
    ({"reward": None}, "it has no reward; its fields: 'prompt_ids', 'completion_ids', 'group'"),
    ({"advantage": "1"}, "its advantage must be a number"), ({"step": 10.45}, "must be a whole number, not 10.45"),
    ({"advantage": 1e39}, "its advantage must be a finite number"), ("\n", "holds no rollout"),
    ('{"prompt": "a"', "line 1: "), ("[1, 2]", "row 1: it is no object"), ("--out {0}", "exists: remove it, or choose"),
    ("{0}/gone", "there is no file"), ("{0}/good {0}/good", "twice"), ("{0}/mixed", "some rows have an advantage"),
    ("{0}/two", "line 25: step 1 comes after 2: two runs in one file?"), ("--temperature 0", "--temperature"),
    ("--model=", "name the folder of the model"), ("--advantage zzz", "theirs"), ("--micro_batch 0", "--micro_batch"),
    ("--mitigation ppo", "needs critic"), ("--device foo", "--device foo"),
    ("--mitigation vineppo", "needs continuations"), ("--every 0", "--every"),
    ({"rewards": {"a": "x"}}, "its a must be a number"), ("", "name the files"),
    ({"tool_mask": [0]}, "holds no rollout"), ({"prompt_ids": [9] * 3, "reward": float("nan")}, "no rollout has a reward"),
    ({"advantage": [1.0, 2.0]}, "one for each of completion_ids"), ({"tool_mask": [1, 1]}, "its tool_mask must have")],
    ids=lambda x: str(x)[:40])
def test_what_cannot_work_is_one_sentence(wrong, said, sampled, tmp_path, refusal):
    """wrong: what is other in a row, None for a field that it lacks; or a file's text; or words of the command."""
    rows, usual, good = sampled[1], ("--model", BUNDLED, "--out", tmp_path / "r"), write(tmp_path / "good", sampled[1])
    write(tmp_path / "mixed", [rows[0] | {"advantage": 1.0}, *rows[1:]])
    write(tmp_path / "two", [row | {"step": n} for n in (1, 2, 1) for row in rows])
    if isinstance(wrong, dict):
        fields = {"prompt_ids": [7], "completion_ids": [5], "reward": 1, "group": 0} | wrong
        wrong = json.dumps({name: x for name, x in fields.items() if x is not None})
    if wrong[:2] in ("", "--", "{0"):
        words = wrong.format(tmp_path).split()
    else:
        words = [tmp_path / "bad"]
        words[0].write_text(wrong)
    assert said in refusal(program, *((good, *usual, *words) if wrong[:2] == "--" else (*words, *usual)))
    assert not (tmp_path / "r").exists()
