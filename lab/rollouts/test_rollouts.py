"""Other programs' rollouts: TRL's own trainer, verl's form, plain jsonl, and what is none."""
import json
import re
import runpy
import shutil
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import analyze
from grpo import compare
from lab.rollouts import __main__ as program
from lab.rollouts import trl as beside
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


@pytest.fixture
def read(tmp_path):
    """What `convert` makes of rows, in the runs tmp_path/0, tmp_path/1, ..."""
    runs = (tmp_path / str(n) for n in count())
    def made(rows, *flags, model=BUNDLED):
        run = next(runs)
        return convert(write(run.with_suffix(".jsonl"), rows), "--model", model, "--out", run, *flags)
    return made


def small_model(tokenizer):
    """A random model, of whose responses some end."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    randomize(model)
    model.lm_head.weight.data[tokenizer.eos_token_id] *= 12
    return model


def recording(trainer, seen):
    """A trainer's class that keeps the log-probs and entropies (n,) of the tokens that it samples."""
    class Recorder(trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            both = [torch.cat((batch[f"prompt_{x}"], batch[f"completion_{x}"]), 1) for x in ("ids", "mask")]
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(self.model, *both, batch["completion_ids"].shape[1],
                                                                compute_entropy=True)
            seen.append([x[batch["completion_mask"] > 0].numpy() for x in found[:2]])
            assert (batch["prompt_mask"] == 0).any()
            return batch
    return Recorder


def length(completions, completion_ids, log_extra, **_):
    """A reward that logs columns, too."""
    log_extra("completion_ids", completion_ids)
    log_extra("vowels", [c.count("e") / 7 for c in completions])
    return [len(c) / 50 for c in completions]


def rare(completions, **_):
    return [None if i % 3 else float("a" in c) for i, c in enumerate(completions)]


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory):
    """Four steps of GRPOTrainer with a random model, two of them with new rollouts, prompts of several lengths and
    columns of log_extra, recorded; and log-prob and entropy (n,) of the tokens by the trainer."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    path, seen = tmp_path_factory.mktemp("trl"), []
    (path / "rollouts-0.jsonl").write_text("of an earlier run in this folder")
    from lab.rollouts.recorder import RolloutTrainer  # which needs TRL
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED)
    model = small_model(tokenizer)
    config = trl.GRPOConfig(
        str(path), max_steps=4, per_device_train_batch_size=8, num_generations=4, max_completion_length=30, bf16=False,
        logging_steps=1, log_completions=True, num_completions_to_print=0, learning_rate=0.002, use_cpu=True,
        report_to=[], save_steps=1, temperature=0.9, disable_tqdm=True, reward_weights=[1.0, 0.5], num_iterations=2)
    prompts = [f"Make {i}{' now' * (i - 20)} from 3, 4 and 5." for i in range(20, 40)]
    trainer = recording(RolloutTrainer, seen)(
        model, [length, rare], config, datasets.Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer)
    trainer.save_model(path / "checkpoint-0")
    trainer.train()
    return path, seen


def test_log_p_is_that_of_trl(trl_run, tmp_path):
    """Guards against another checkpoint, a temperature that is not applied, an off-by-one, and rows out of order."""
    path, seen = trl_run
    rows = [json.loads(line) for line in (path / "rollouts-0.jsonl").read_text().splitlines()]
    logs, metrics, said = convert(path / "rollouts-0.jsonl", "--model", path, "--temperature", 0.9, "--out",
                                  tmp_path / "r")
    assert metrics["their_step"][1:].tolist() == [1, 3] and "1 by checkpoint-0, 3 by checkpoint-2" in said
    assert abs(metrics["log_p_plus_entropy"][1:]).max() < 0.3 and 0 < metrics["truncated"][1:].mean() < 1
    for log, expected, step in zip(logs, seen, (1, 3)):
        for name, values in zip(("logprob", "entropy"), expected):
            np.testing.assert_allclose(log[name], values, atol=1e-5, rtol=0)
        first = log["position"] == 0
        for name in ("advantage", "reward"):
            assert log[name][first] == pytest.approx([row[name] for row in rows if row["step"] == step])
        assert np.ptp(log["advantage"]) > 1 and np.array_equal(log["credit"], log["advantage"])


def test_the_recorder_by_hand(tmp_path, monkeypatch):
    """Without TRL: the second of two processes. Guards against the other's rewards, rows of an evaluation, padding, a
    response that TRL masks and is lost or paid, and rows of an earlier run, which stay where a run is resumed."""
    batch = {"prompt_ids": torch.tensor([[0, 7], [8, 9]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
             "completion_ids": torch.tensor([[5, 1, 0], [6, 6, 6]]), "advantages": torch.tensor([0.5, -1.0]),
             "completion_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}
    trl = SimpleNamespace(GRPOTrainer=type("", (), {"_generate_and_score_completions": lambda self, inputs: inputs}))
    monkeypatch.setitem(sys.modules, "trl", trl)
    recorder, file = runpy.run_path(ROOT / "lab" / "rollouts" / "recorder.py"), tmp_path / "rollouts-1.jsonl"
    rows = [{"step": 1, "reward": 4.5, "prompt_ids": [7], "completion_ids": [5, 1], "advantage": 0.5},
            {"step": 1, "reward": 2.0, "prompt_ids": [8, 9], "completion_ids": [6, 6, 6], "advantage": 0.0}]
    file.write_text("of an earlier run")
    for step, training, found in ((0, True, 2), (3, True, 4), (3, False, 4), (0, True, 2)):
        trainer = recorder["RolloutTrainer"]()
        vars(trainer).update(
            args=SimpleNamespace(output_dir=tmp_path), state=SimpleNamespace(global_step=step),
            accelerator=SimpleNamespace(process_index=1, num_processes=2), model=SimpleNamespace(training=training),
            _logs={"rewards": {"a": [9, 9, 4, 4], "b": [9, 9, 0.25, -1.0], "c": [9, 9, float("nan"), 0.0]}},
            reward_func_names=["a", "b", "c"], reward_weights=torch.tensor([1.0, 2.0, 1.0]))
        assert trainer._generate_and_score_completions(batch) is batch
        written = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(written) == found and written[:2] == rows and written[-1]["step"] == step + 1
    trainer._generate_and_score_completions(batch)
    assert len(file.read_text().splitlines()) == 4  # of a run's later steps, too


def test_trl_from_parquet_alone(trl_run, tmp_path, refusal):
    """Against the recorder. Guards against another prompt or reward, and silence on what was assumed or left out."""
    parquet, (path, _) = pytest.importorskip("pyarrow.parquet"), trl_run
    exact, _, _ = convert(path / "rollouts-0.jsonl", "--model", path, "--out", tmp_path / "exact")
    shutil.copytree(path / "completions", tmp_path / "output" / "completions")
    words = tmp_path / "output", "--model", path, "--out", tmp_path / "r"
    assert "which columns are the reward? Name them, such as --rewards length rare vowels, " in refusal(program, *words)
    logs, _, said = convert(*words, "--rewards", "length", "rare=0.5")
    assert said.startswith(f"read {tmp_path}/output/completions/completions_00001.parquet, ")
    assert "1 x length + 0.5 x rare; no part of it: vowels" in said and "made from text" not in said
    assert "16 rollouts were left out: they repeat a step" in said and "16 prompts were tokenized as they stand" in said
    for log, other in zip(logs, exact):
        for name in ("token", "logprob", "entropy", "advantage", "reward", "credit"):
            np.testing.assert_allclose(log[name], other[name], atol=1e-6, rtol=0, err_msg=name)
    rows = parquet.read_table(path / "completions" / "completions_00001.parquet").to_pylist()
    texts = write(tmp_path / "texts.jsonl", [row | {"completion_ids": None} for row in rows])
    _, _, said = convert(texts, *words[1:4], tmp_path / "t", "--rewards", "length", "rare=0.5")
    assert " tokens of 8 responses were made from text" in said
    assert re.search("behind 8 responses, but for [1-8] where its p is below 0.01", said)
    assert "U+FFFD, bytes that were lost" in said and "this model did NOT write these tokens" in said


def test_gradients_are_those_of_trl_up_to_the_derived_factor():
    """Guards against a norm, clip, ratio or KL gradient that is another one than TRL's, which is found to differ where
    the flags are those of another row."""
    pytest.importorskip("trl"), pytest.importorskip("datasets")
    k3 = next(pair for pair in beside.PAIRS if "use_bias_correction_kl" in pair.theirs)
    wrong = k3._replace(flags=k3.flags + " --kl_gradient unbiased", equal=0)
    for pair, derived, measured in beside.measure([*beside.PAIRS, wrong]):
        equal = [cosine > 1 - 1e-6 and ratio == pytest.approx(derived, rel=1e-4) for cosine, ratio in measured]
        assert equal == [pair.equal > 0, pair.equal > 1], (pair.name, derived, measured)


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


def test_ids_give_what_the_sampler_recorded(sampled, tmp_path, read, capsys):
    """Guards against a credit of rows in another order, and another advantage than the one asked for."""
    batch, rows = sampled
    shuffled = [rows[i] for i in (0, 5, 4, 1, 9, 8, 2, 3, 6, 7, 11, 10)]
    (log,), _, said = read(shuffled, "--mitigation", "prefix_tree", "--advantage", "rloo")
    order = [0, 1, 2, 3, 5, 4, 6, 7, 9, 8, 11, 10]  # by group, each in the order of the file
    rows_of = lambda x: torch.cat([x[i][batch.mask[i]] for i in order]).numpy()
    for name in ("tokens", "logprob", "entropy", "logit_grad", "role"):
        np.testing.assert_allclose(log[name.removesuffix("s")], rows_of(getattr(batch, name)), atol=2e-5, rtol=0)
    capsys.readouterr()
    analyze.main([str(tmp_path / "0")])
    text = capsys.readouterr().out
    assert f"| {len(log['token'])} | 100.0% |" in re.sub(" +", " ", text) and "nan" not in text
    assert (tmp_path / "0" / "analysis" / "tokens.html").stat().st_size > 9999
    batch.advantage = compare(batch, "rloo")
    np.testing.assert_allclose(log["credit"], rows_of(MITIGATIONS["prefix_tree"](batch)), atol=1e-6)
    assert "so it may have written them" in said and "made from" not in said


def test_roles_without_special_tokens_become_chatml_again(tmp_path):
    """Against transformers' template and its decoder, which verl's dumps come from."""
    hf, ours = folder(tmp_path, CHATML)
    for system in ([], [{"role": "system", "content": "Be brief.\n"}]):
        messages = [*system, {"role": "user", "content": "2 + 3"}]
        ids = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        bare = hf.decode(ids, skip_special_tokens=True)
        for prompt in (bare, hf.decode(ids), messages):
            assert prompt_tokens(prompt, prompt is bare, ours, Counter()) == ids


def test_groups_of_another_size_are_left_out_aloud(sampled, read):
    _, rows = sampled
    (log,), _, said = read(rows[:11])
    assert log["group"].max() == 1 and "3 rollouts were left out: their groups are not of 4, " in said
    (log,), _, said = read([row | {"advantage": 1.0, "step": i // 3} for i, row in enumerate(rows[::4] + rows[:2])])
    assert (log["position"] == 0).sum() == 3 and "2 rollouts were left out: their groups are not of 1, " in said


END, PAD = 1, 0  # of the bundled tokenizer: <|im_end|>, which ends its responses, and <|endoftext|>, its padding


def without(row, *names):
    return {name: x for name, x in row.items() if name not in names}


def verls(row, i):
    """As verl dumps it: text alone, numbers as text, a uid that differs within a group."""
    return {"input": row["prompt"], "output": row["completion"], "score": str(row["reward"]), "step": "5", "gts": None,
            "uid": f"{row['group']}-x_{i}_0", "other": float("nan")}


def padded(row, masks=False):
    """As a trainer's tensors have them: prompts filled up on the left, responses on the right."""
    prompt, tokens = row["prompt_ids"], row["completion_ids"]
    rest = {"prompt_mask": [0] * 3 + [1] * len(prompt), "completion_mask": [1] * len(tokens) + [0] * 2} if masks else {}
    return row | rest | {"prompt_ids": [PAD] * 3 + prompt, "completion_ids": tokens + [PAD] * 2}


def as_text(row, ends):
    """A response decoded with its end token, if it has one."""
    return row | {"completion_ids": None, "completion": row["completion"] + ends * (row["completion_ids"][-1] == END)}


ASSUMED, SINGLE = "behind 12 responses, but for 5 where its p is below 0.01", "no group or uid occurs twice in a step"


@pytest.fixture(scope="module")
def plain(sampled, tmp_path_factory):
    """The log of the rows as they are, and what is said of them."""
    path = tmp_path_factory.mktemp("plain")
    (log,), _, said = convert(write(path / "a.jsonl", sampled[1]), "--model", BUNDLED, "--out", path / "r")
    assert read_config(path / "r")["settings"]["advantage"] == "grpo"
    return log, said


@pytest.mark.parametrize("change, said", [  # other ways to write the same rollouts, and what is said of one
    (lambda rows: [without(row, "prompt_ids", "completion_ids", "group") for row in rows], ASSUMED),
    (lambda rows: [verls(row, i) for i, row in enumerate(rows)], ASSUMED),
    (lambda rows: [padded(row) for row in rows], "55 tokens of padding were cut off"),
    (lambda rows: [padded(row, masks=True) for row in rows], ""),
    (lambda rows: [as_text(row, "<|im_end|>\n") for row in rows], "behind 5 responses"),
    (lambda rows: [as_text(row, "<|im_end|><|endoftext|>") for row in rows], "but for 5 where"),
    (lambda rows: [row | {"step": n} for n in (1, 2) for row in rows[:: 3 - 2 * n]],
     "12 rollouts were left out: they repeat a step"),
    (lambda rows: [row | {"split": part} for row in rows for part in ("eval_countdown", "train")],
     "12 rollouts were left out: they are of an evaluation"),
    (lambda rows: [row | {"is_eval": flag} for row in rows for flag in (True, False)], "they are of an evaluation"),
    (lambda rows: [row | {"group": f"u_{row['group']}_{i}"} for i, row in enumerate(rows)], SINGLE),
    (lambda rows: [row | {"group": f"u{row['group']}_{i}_0"} for i, row in enumerate(rows)], SINGLE),
    (lambda rows: [row | {"group": f"gsm8k_{row['group']}_0"} for row in rows], ""),
    (lambda rows: [row | {"group": 0} for row in rows], "1 groups have several prompts"),
    (lambda rows: [row | {"score": row["reward"], "uid": row["group"]} for row in rows], ""),
    (lambda rows: [row | {"step": "1.0"} for row in rows], "")],
    ids=lambda x: x if isinstance(x, str) else "rows")
def test_other_forms_are_the_same_rollouts(change, said, sampled, plain, read):
    """Guards against prompts split otherwise, numbers as text, padding read as text, a group cut to one, rollouts that
    count twice, and silence about it."""
    (batch, rows), (expected, words) = sampled, plain
    assert not said or said not in words
    (log,), metrics, words = read(change(rows))
    assert said in words and metrics["truncated"][1] == pytest.approx(1 - batch.ended.float().mean())
    for field in log:
        np.testing.assert_array_equal(log[field], expected[field], err_msg=field)
    first = np.flatnonzero(log["position"] == 0)
    assert [x.tolist() for x in np.split(log["token"], first[1:])] == [row["completion_ids"] for row in rows]
    assert log["advantage"][first] == pytest.approx(compare(batch).tolist(), abs=1e-6)


def hf_logprobs(model, rows):
    """log p (n,) of the responses' tokens by transformers."""
    found = []
    for row in rows:
        ids, P = torch.tensor([row["prompt_ids"] + row["completion_ids"]]), len(row["prompt_ids"])
        with torch.no_grad():
            log_p = model(ids).logits[0].log_softmax(-1)
        found.append(log_p[P - 1 : -1].gather(1, ids[0, P:, None])[:, 0])
    return torch.cat(found).numpy()


def test_each_row_follows_its_own_prompt(sampled, read):
    """Against transformers, where a group has the same prompt with its last words in another order each time."""
    rows = [row | {"prompt_ids": row["prompt_ids"][:i] + row["prompt_ids"][i:][::-1], "group": 0, "advantage": float(i)}
            for i, row in enumerate(sampled[1][:4], 1)]
    (log,), _, said = read(rows)
    expected = hf_logprobs(Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32), rows)
    np.testing.assert_allclose(log["logprob"], expected, atol=2e-4, rtol=0)
    assert "1 groups have several prompts" in said and log["group"].max() == 3


def test_columns_that_agree_with_the_advantages_are_the_reward(sampled, read):
    """TRL's columns: rewards first, then what was logged; its formula, with and without division."""
    rows = [without(row, "reward", "group") for row in sampled[1]]
    a, b = np.random.default_rng(0).random((2, 12)).round(3)
    b[5] = np.nan  # that reward function gave None
    for divided, weight in ((True, 1.0), (False, 1.0), (True, 3.0)):
        total = (a + weight * np.nan_to_num(b)).reshape(3, 4)
        advantage = (total - total.mean(1, keepdims=True)) / (total.std(1, ddof=1, keepdims=True) + 1e-4) ** divided
        columns = zip(a.tolist(), b.tolist(), advantage.flatten().tolist())
        flags = ["--rewards", "accuracy", f"reward={weight}"] if weight != 1 else []
        (log,), _, said = read([row | {"accuracy": x, "reward": y, "hardness": x * y, "advantage": z}
                                for row, (x, y, z) in zip(rows, columns)], *flags)
        assert log["reward"][log["position"] == 0] == pytest.approx(total.flatten())
        assert f"1 x accuracy + {weight:g} x reward; no part of it: hardness" in said


def test_each_step_is_read_by_its_checkpoint(sampled, tmp_path, read, refusal):
    """Against transformers and PEFT: another model or adapter for some steps. Guards against the step's own weights,
    which it has trained, and against the last ones."""
    from peft import LoraConfig, get_peft_model
    rows, output, models = [sampled[1][i : i + 4] for i in (0, 4, 8)], tmp_path / "output", {}
    for step in (0, 2, 10):
        models[step] = model = Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        if step == 2:
            torch.nn.init.normal_(model.lm_head.weight, std=0.1)
        if step == 10:
            config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
            models[step] = model = get_peft_model(model, config)
            model.peft_config["default"].init_lora_weights = True
            model.peft_config["default"].base_model_name_or_path = str(BUNDLED)
        model.save_pretrained(output / f"checkpoint-{step}")
        for file in BUNDLED.glob("tokenizer*"):
            shutil.copy(file, output / f"checkpoint-{step}")
    given = dict(zip((2, 3, 11), rows))
    dated = [row | {"step": step} for step, rows in given.items() for row in rows]
    logs, metrics, said = read(dated, model=output)
    assert "2 by checkpoint-0, 3 by checkpoint-2, 11 by checkpoint-10" in said
    for log, step, model in zip(logs, given, models.values()):
        np.testing.assert_allclose(log["logprob"], hf_logprobs(model, given[step]), atol=2e-4, rtol=0)
    shutil.rmtree(output / "checkpoint-0")
    _, metrics, said = read(dated, model=output)
    assert metrics["their_step"][1:].tolist() == [3, 11] and "4 rollouts were left out: there is no checkpoint" in said
    shutil.rmtree(output / "checkpoint-2")
    (output / "checkpoint-10").rename(output / "checkpoint-11")
    assert "has no checkpoint before step 11: save the start model as" in refusal(
        program, tmp_path / "0.jsonl", "--model", output, "--out", tmp_path / "t")


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
    found = read_responses(program.facts, policy.model, [[1, 8]], torch.tensor([0, 0]), tokens, tokens > 0)  # (2, 4, 4)
    log_p = policy.model(torch.tensor([[1, 8, 5, 9, 7]]))[0, 1:].log_softmax(-1)
    expected = torch.stack([torch.cov(x, aweights=x.exp(), correction=0) for x in log_p])
    torch.testing.assert_close(found[0, :, 3], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("content, said", [
    ("", "holds no rollout"), ('{"prompt": "a"', "line 1: "), ("[1, 2]", "row 1: it is no object"),
    ("\x00\x01", "line 1"), ({"reward": None}, "it has no reward; its fields: 'prompt', 'completion'"),
    ({"reward": float("nan")}, "its reward must be a finite number"), ({"reward": [1]}, "its reward must be a number"),
    ({"completion": None}, "it has no completion"), ({"completion_ids": [5, 99999]}, "a list of tokens from 0 to"),
    ({"completion_ids": "12"}, "must be a list of tokens"), ({"completion_ids": []}, "has no token"),
    ({"prompt": None, "prompt_ids": []}, "has no token"), ({"prompt": 5}, "its prompt is neither"),
    ({"completion": [{"role": "assistant", "content": "x"}] * 3}, "has 3 messages"),
    ({"completion": [{"role": "assistant"}]}, "its completion is neither"), ({"prompt": [{"content": "x"}]}, "role"),
    ({"completion": "b" * 99999}, "the model takes"), ({"step": "first"}, "its step must be a number"),
    ({}, "nothing to compare a reward with"), ({"step": "10.45"}, "its step must be a whole number, not 10.45"),
    ({"score": 2}, "reward and score"), ({"output": "c"}, "its completion and its output differ"),
    ({"input": "b"}, "prompt and its input"), ({"group": 1, "uid": 2}, "its group and its uid differ"),
    ({"mode": "eval"}, "no rollout of training"), ({"completion_ids": [5, 1, 6]}, "tokens stand behind the end token"),
    ({"completion": "5<|im_end|>6"}, "text stands behind <|im_end|>"),
    ({"completion_ids": [5], "completion_mask": [0, 1]}, "its completion_mask must be as long as"),
    ({"completion_ids": [5, 6], "completion_mask": [0, 1]}, "its completion_mask must be"),
    ({"completion_ids": [5, 6]}, "its completion is not the text of its completion_ids"),
    ({"completion": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]}, "has reasoning_content"),
    ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "its prompt has tool_calls"),
    ({"reward": None, "x": 0.5, "y": 0.5}, "which columns are the reward? Name them")], ids=lambda x: str(x)[:40])
def test_a_damaged_or_unlikely_file_is_one_sentence(content, said, tmp_path, refusal):
    """A file's text, or what is other in a row; None for a field that it lacks."""
    file, good = tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "reward": 1}
    file.write_text(content if isinstance(content, str) else json.dumps(
        {name: x for name, x in (good | content).items() if x is not None}))
    assert said in refusal(program, file, "--model", BUNDLED, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("flags, said", [
    ("--mitigation ppo", "needs critic"), ("--mitigation dpo", "needs reference"), ("--dtype int8", "bfloat16"),
    ("--mitigation vineppo", "have no grader"), ("--mitigation regrade_ablation", "have no grader"),
    ("--temperature 0", "--temperature"), ("--advantage zzz", "theirs"), ("--model=", "name the folder of the model"),
    ("--rewards c", "--rewards names 'c'; the columns"), ("--out {}/empty", "empty exists: remove it, or choose"),
    ("{}/mixed.jsonl", "some rows have an advantage"), ("{}/gone", "there is no file"), ("", "name the files"),
    ("{}/empty", "there is no .jsonl or .parquet in"),
    ("{}/two.jsonl", "line 25: step 1 comes after step 2: two runs in one file?")])
def test_what_cannot_work_is_one_sentence(flags, said, sampled, tmp_path, refusal):
    """Flags behind the name of a good file, or other files."""
    rows, words = sampled[1], flags.format(tmp_path).split()
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "mixed.jsonl", [rows[0] | {"advantage": 1.0}, *rows[1:]])
    write(tmp_path / "two.jsonl", [row | {"step": n} for n in (1, 2, 1) for row in rows])
    (tmp_path / "empty").mkdir()
    good, usual = tmp_path / "a.jsonl", ("--model", BUNDLED, "--out", tmp_path / "r")
    assert said in refusal(program, *((good, *usual, *words) if flags[:2] == "--" else (*words, *usual)))
    assert not (tmp_path / "r").exists()
