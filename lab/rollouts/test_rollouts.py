"""Other programs' rollouts: TRL's own trainer, verl's form, plain jsonl, and files that are none."""
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo import compare
from lab.rollouts import __main__ as program
from lab.rollouts.rows import prompt_tokens
from methods import MITIGATIONS
from plumbing.runs import read_config, read_credit, read_metrics
from plumbing.tokenizer import Tokenizer
from queries import Queries
from rollout import rollout
from sampler import read_responses
from settings import Settings
from tests.fixtures import BUNDLED
from tests.random_checkpoints import randomize
from tests.test_chat import CHATML, folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trl.md"


def convert(*words):
    """Run the command, and read what it wrote: the credit log of each step, metrics.csv and what it said."""
    sys.argv = ["lab.rollouts", *map(str, words)]
    program.main()
    run = Path(words[words.index("--out") + 1])
    metrics = read_metrics(run)
    return read_credit(run, metrics), metrics, (run / "rollouts.txt").read_text()


def write(file, rows):
    """A file with an object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# --------------------------------------------------------------------------------------------------------- TRL


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory):
    """Three steps of GRPOTrainer with a random model, written as docs/trl.md says; the weights that sampled each, and
    log-prob and entropy (n,) of each step's tokens as the trainer has them."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    path, own = tmp_path_factory.mktemp("trl"), {}
    (path / "rollouts-0.jsonl").write_text("of an earlier run in this folder")
    exec(re.search(r"```python\n(import json.*?)```", PAGE.read_text(), re.S)[1], own)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED)

    class Recorder(own["RolloutTrainer"]):
        def _generate_and_score_completions(self, inputs):
            start = path / f"weights-{self.state.global_step + 1}"
            self.model.save_pretrained(start)
            for file in BUNDLED.glob("tokenizer*"):
                shutil.copy(file, start)
            batch = super()._generate_and_score_completions(inputs)
            both = [torch.cat((batch[f"prompt_{x}"], batch[f"completion_{x}"]), 1) for x in ("ids", "mask")]
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(self.model, *both, batch["completion_ids"].shape[1],
                                                                compute_entropy=True)
            seen.append([x[batch["completion_mask"] > 0].numpy() for x in found[:2]])
            return batch

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    randomize(model)
    model.lm_head.weight.data[tokenizer.eos_token_id] *= 4  # so that some responses end
    seen, rare = [], lambda completions, **_: [None if i % 3 else float("a" in c) for i, c in enumerate(completions)]
    rare.__name__ = "rare"
    config = trl.GRPOConfig(
        str(path), max_steps=3, per_device_train_batch_size=8, num_generations=4, max_completion_length=30, bf16=False,
        logging_steps=1, log_completions=True, num_completions_to_print=0, learning_rate=0.002, use_cpu=True,
        report_to=[], save_strategy="no", temperature=0.9, disable_tqdm=True, reward_weights=[1.0, 0.5])
    def length(completions, **_):
        return [len(c) / 50 for c in completions]
    prompts = [f"Make {i} from 3, 4 and 5." for i in range(20, 40)]
    Recorder(model, [length, rare], config, datasets.Dataset.from_dict({"prompt": prompts}),
             processing_class=tokenizer).train()
    return path, seen


def test_log_p_is_that_of_trl(trl_run, tmp_path):
    """Guards against a temperature that is not applied, an off-by-one, and rows out of order."""
    path, seen = trl_run
    written = [json.loads(line) for line in (path / "rollouts-0.jsonl").read_text().splitlines()]
    for step in (1, 2, 3):
        logs, metrics, said = convert(path / "rollouts-0.jsonl", "--model", path / f"weights-{step}", "--temperature",
                                      0.9, "--out", tmp_path / f"r{step}")
        log, rows = logs[step - 1], [row for row in written if row["step"] == step]
        for name, expected in zip(("logprob", "entropy"), seen[step - 1]):
            np.testing.assert_allclose(log[name], expected, atol=1e-5, rtol=0)
        first = log["position"] == 0
        assert log["advantage"][first] == pytest.approx([row["advantage"] for row in rows])
        assert log["reward"][first] == pytest.approx([row["reward"] for row in rows])
        assert np.ptp(log["advantage"]) > 1 and np.array_equal(log["credit"], log["advantage"])
        assert metrics["their_step"][1:].tolist() == [1, 2, 3]
        assert abs(metrics["log_p_plus_entropy"][step]) < 0.3
    assert 0 < metrics["truncated"][1:].mean() < 1
    assert np.abs(logs[0]["logprob"] - seen[0][0]).max() > 1e-3  # by the weights of step 3


def test_trl_from_parquet_alone(trl_run, tmp_path):
    """Guards against another prompt, a reward left out, and silence on what was assumed."""
    pytest.importorskip("pyarrow")
    path, _ = trl_run
    exact, _, _ = convert(path / "rollouts-0.jsonl", "--model", path / "weights-1", "--out", tmp_path / "exact")
    shutil.copytree(path / "completions", tmp_path / "output" / "completions")
    logs, metrics, said = convert(tmp_path / "output", "--model", path / "weights-1", "--out", tmp_path / "r")
    assert said.startswith(f"read {tmp_path}/output/completions/completions_00001.parquet, ")
    first = [log["position"] == 0 for log in exact]
    assert metrics["tokens_read"].tolist()[1:] == read_metrics(tmp_path / "exact")["tokens_read"].tolist()[1:]
    for log, other, start in zip(logs, exact, first):
        again = log["position"] == 0
        assert log["advantage"][again] == pytest.approx(other["advantage"][start])
    tokens = 24 + sum(len(log["token"]) for log in logs)
    assert f"sum of length and rare, with weights of 1\n{tokens:,} tokens of 24 responses were made from text" in said
    assert "each of these responses but 24, where its p is below 0.01" in said  # a random model's
    assert "24 prompts were tokenized as they stand" in said
    assert "U+FFFD, bytes that were lost" in said and "this model did NOT write these tokens" in said


# -------------------------------------------------------------------------------------------- plain rows, verl's


@pytest.fixture(scope="module")
def sampled():
    """A batch of the bundled model: log-probs and the rest as its sampler recorded them; and its rows as jsonl."""
    from tests.fixtures import load_model, Policy, countdown_task
    policy = Policy(load_model(BUNDLED), Tokenizer(BUNDLED), countdown_task)
    batch = rollout(policy, countdown_task.load("train", 3), Settings(answers=4, max_new_tokens=70), step=1)
    batch.ask = Queries(policy, batch, Settings(answers=4, max_new_tokens=70), 1)
    prompts = [batch.prompts[q] for q in batch.group.tolist()]
    rows = [{"prompt": policy.tokenizer.decode(prompt)[0], "prompt_ids": prompt, "completion": text, "reward": reward,
             "completion_ids": tokens[mask].tolist(), "group": group} for prompt, text, reward, tokens, mask, group in
            zip(prompts, batch.text, batch.reward.tolist(), batch.tokens, batch.mask, batch.group.tolist())]
    return batch, rows


def test_ids_give_what_the_sampler_recorded(sampled, tmp_path):
    """Guards against a credit of rows in another order, and another advantage than the one asked for."""
    batch, rows = sampled
    shuffled = write(tmp_path / "a.jsonl", [rows[i] for i in (0, 5, 4, 1, 9, 8, 2, 3, 6, 7, 11, 10)])
    (log,), _, said = convert(shuffled, "--model", BUNDLED, "--mitigation", "prefix_tree", "--advantage", "rloo",
                              "--out", tmp_path / "r")
    order = [0, 1, 2, 3, 5, 4, 6, 7, 9, 8, 11, 10]  # by group, each in the order of the file
    rows_of = lambda x: torch.cat([x[i][batch.mask[i]] for i in order]).numpy()
    for name in ("tokens", "logprob", "entropy", "logit_grad", "role"):
        np.testing.assert_allclose(log[name.removesuffix("s")], rows_of(getattr(batch, name)), atol=2e-5, rtol=0)
    analyze_run = [sys.executable, ROOT / "analyze.py", tmp_path / "r"]
    text = subprocess.run(analyze_run, check=True, capture_output=True, text=True).stdout
    assert f"| {len(log['token'])} | 100.0% |" in re.sub(" +", " ", text) and "nan" not in text
    assert (tmp_path / "r" / "analysis" / "tokens.html").stat().st_size > 9999
    batch.advantage = compare(batch, "rloo")
    np.testing.assert_allclose(log["credit"], rows_of(MITIGATIONS["prefix_tree"](batch)), atol=1e-6)
    assert "so it may have written them" in said and "made from" not in said


def test_text_alone_and_verls_form_are_the_same_rollouts(sampled, tmp_path):
    """Guards against prompts split otherwise, numbers as text, and verl's uid, which differs within a group."""
    batch, rows = sampled
    plain = [{name: row[name] for name in ("prompt", "completion", "reward")} for row in rows]
    verl = [{"input": row["prompt"], "output": row["completion"], "score": str(row["reward"]), "step": "5",
             "gts": None, "uid": f"{row['group']}-x_{i}_0", "other": float("nan")} for i, row in enumerate(rows)]
    logs = [convert(write(tmp_path / f"{i}.jsonl", x), "--model", BUNDLED, "--out", tmp_path / f"r{i}")[0][0]
            for i, x in enumerate((plain, verl))]
    assert all(np.array_equal(logs[0][name], logs[1][name]) for name in logs[0])
    cut_off = batch.ended.tolist().count(False)
    tokens = np.split(logs[0]["token"], np.flatnonzero(logs[0]["position"] == 0)[1:])
    said = (tmp_path / "r0" / "rollouts.txt").read_text()
    assert f"behind each of these responses but {cut_off}, where its p is below 0.01" in said and cut_off > 2
    assert [x.tolist() for x in tokens] == [row["completion_ids"] for row in rows]
    assert read_metrics(tmp_path / "r0")["truncated"][1] == pytest.approx(cut_off / 12)
    assert logs[0]["advantage"][logs[0]["position"] == 0] == pytest.approx(compare(batch).tolist(), abs=1e-6)
    assert read_config(tmp_path / "r0")["settings"]["advantage"] == "grpo"


def test_roles_without_special_tokens_become_chatml_again(tmp_path):
    """Against transformers' template and its decoder, which verl's dumps come from."""
    hf, ours = folder(tmp_path, CHATML)
    for system in ([], [{"role": "system", "content": "Be brief.\n"}]):
        messages = [*system, {"role": "user", "content": "2 + 3"}]
        ids = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        bare = hf.decode(ids, skip_special_tokens=True)
        for prompt in (bare, hf.decode(ids), messages):
            assert prompt_tokens(prompt, prompt is bare, ours, Counter()) == ids


def test_groups_of_another_size_are_left_out_aloud(sampled, tmp_path):
    _, rows = sampled
    (log,), _, said = convert(write(tmp_path / "a.jsonl", rows[:11]), "--model", BUNDLED, "--out", tmp_path / "r")
    assert log["group"].max() == 1 and "3 rollouts were left out: their groups are not of 4, " in said


@pytest.mark.parametrize("sharper, tokens, said", [
    (1.0, 4000, "it may have written them"), (1.3, 4000, "too probable"), (0.7, 4000, "did NOT"),
    (0.7, 4, "too few tokens to tell")])
def test_log_p_tells_who_wrote(sharper, tokens, said):
    """Tokens drawn from p^sharper, normalized: by definition, only with 1 is the mean of log p minus the entropy."""
    logits = torch.randn(tokens, 50, generator=torch.Generator().manual_seed(0)).double()
    log_p = logits.log_softmax(1)
    token = torch.multinomial((sharper * logits).softmax(1), 1, generator=torch.Generator().manual_seed(1))
    entropy = -(log_p.exp() * log_p).sum(1)
    variance = torch.stack([torch.cov(x, aweights=x.exp(), correction=0) for x in log_p])
    assert said in program.verdict(log_p.gather(1, token)[:, 0], entropy, variance)


def test_the_variance_of_log_p(policy):
    """Against a weighted covariance of the bundled model's log-probs."""
    tokens = torch.tensor([[5, 9, 7, 3], [2, 4, 0, 0]])
    asked = policy.model, [[1, 8]], torch.tensor([0, 0]), tokens, tokens > 0
    found = read_responses(program.facts, *asked)  # (2, 4, 4)
    log_p = policy.model(torch.tensor([[1, 8, 5, 9, 7]]))[0, 1:].log_softmax(-1)
    expected = torch.stack([torch.cov(x, aweights=x.exp(), correction=0) for x in log_p])
    torch.testing.assert_close(found[0, :, 3], expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------- what is refused

GOOD = {"prompt": "a", "completion": "b", "reward": 1}


@pytest.mark.parametrize("content, said", [
    ("", "holds no rollout"), ('{"prompt": "a"', "line 1: "), ("[1, 2]", "row 1: it is no object"),
    ("\x00\x01", "line 1"),
    (GOOD | {"reward": None}, "it has no reward; its fields: 'prompt', 'completion'"),
    (GOOD | {"reward": float("nan")}, "its reward must be a finite number"),
    (GOOD | {"reward": [1]}, "its reward must be a number"), ({"prompt": "a", "reward": 1}, "it has no completion"),
    (GOOD | {"completion_ids": [5, 99999]}, "must be a list of tokens from 0 to"),
    (GOOD | {"completion_ids": "12"}, "must be a list of tokens"), (GOOD | {"completion_ids": []}, "has no token"),
    ({"prompt_ids": [], "completion": "b", "reward": 1}, "has no token"),
    (GOOD | {"completion": [{"role": "assistant", "content": "x"}] * 3}, "has 3 messages"),
    (GOOD | {"completion": [{"role": "assistant"}]}, "its completion is neither"), (GOOD | {"prompt": 5}, "neither"),
    (GOOD | {"prompt": [{"content": "x"}]}, "role"), (GOOD | {"completion": "b" * 99999}, "the model takes"),
    (GOOD | {"step": "first"}, "its step must be a number"), (GOOD, "nothing to compare a reward with"),
], ids=lambda x: str(x)[:40])
def test_a_damaged_or_unlikely_file_is_one_sentence(content, said, tmp_path, refusal):
    file = tmp_path / "a.jsonl"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert said in refusal(program, file, "--model", BUNDLED, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("flags, said", [
    (["--mitigation", "ppo"], "needs critic"), (["--mitigation", "dpo"], "needs reference"),
    (["--mitigation", "vineppo"], "have no grader"), (["--mitigation", "regrade_ablation"], "have no grader"),
    (["--model", ""], "name the folder of the model"), (["--temperature", 0], "--temperature"),
    (["--advantage", "zzz"], "theirs"), (["--dtype", "int8"], "bfloat16")], ids=str)
def test_flags_that_cannot_work_are_one_sentence(flags, said, sampled, tmp_path, refusal):
    file = write(tmp_path / "a.jsonl", sampled[1])
    assert said in refusal(program, file, "--model", BUNDLED, "--out", tmp_path / "r", *flags)
    assert not (tmp_path / "r").exists()


def test_a_mixture_and_no_file_are_one_sentence(sampled, tmp_path, refusal):
    rows = sampled[1]
    mixed = write(tmp_path / "a.jsonl", [rows[0] | {"advantage": 1.0}, *rows[1:]])
    (tmp_path / "empty").mkdir()
    for words, said in (([mixed], "some rows have an advantage"), ([tmp_path / "gone"], "there is no file"),
                        ([], "name the files"), ([tmp_path / "empty"], "there is no .jsonl or .parquet in"),
                        ([write(tmp_path / "two.jsonl", [row | {"step": n} for n in (1, 2, 1) for row in rows])],
                         "line 25: step 1 comes after step 2: two runs in one file?")):
        assert said in refusal(program, *words, "--model", BUNDLED, "--out", tmp_path / "r")
    assert "empty exists: remove it, or choose another --out" in refusal(
        program, mixed, "--model", BUNDLED, "--out", tmp_path / "empty")
