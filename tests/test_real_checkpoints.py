"""Folders of checkpoints as transformers writes them, and what it reads of ours: settings, ends, templates, shards."""
import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MistralConfig, MistralForCausalLM,
                          PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM)

import qwen2_model
import start
import train
from countdown_task import generate_puzzles
from plumbing.launch import BUNDLED
from qwen2_model import load_model
from rollout import respond
from sampler import Rules
from settings import Settings
from tests.random_checkpoints import (FAMILIES, HF, SMALL, assert_same_logits, hf_model, random_tokens,
                                      randomize)
from tests.test_tokenizer import ENDOFTEXT, IM_END, build

NULLS = {"rope_type": "default", "factor": None, "partial_rotary_factor": None}


@torch.no_grad()
@pytest.mark.parametrize("family, settings, refused", [
    *((family, {"rope_parameters": {"rope_theta": 50.0} | NULLS}, False) for family in HF),
    ("llama", {"rope_parameters": NULLS | {"rope_theta": 50.0, "factor": 1.0}}, False),
    ("llama", {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": NULLS}, False),  # as version 4 has it
    *((family, {"is_causal": False}, True) for family in HF), ("mistral", {"sliding_window": 4}, True)], ids=str)
def test_settings_that_would_change_the_logits_are_refused(family, settings, refused, tmp_path, monkeypatch):
    """Guards against a wrong model in silence, also of a family that a reader adds, and a refusal because of a null."""
    monkeypatch.setitem(HF, "mistral", (MistralConfig, MistralForCausalLM))  # a Llama but for its window
    monkeypatch.setitem(qwen2_model.ARCHITECTURES, "mistral", qwen2_model.Family("MistralForCausalLM"))
    hf, tokens = hf_model(family, sliding_window=None, rope_theta=50.0), random_tokens(2, 20)
    hf.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert_same_logits(hf, load_model(tmp_path), tokens)
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    change = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits - hf(tokens).logits
    assert (change.abs().max() > 1) == refused
    if refused:
        with pytest.raises(ValueError, match=f"config.json sets {min(settings)} to a value that is not supported"):
            load_model(tmp_path)
    else:
        assert_same_logits(hf, load_model(tmp_path), tokens)


@torch.no_grad()
def test_a_family_with_a_rule_of_its_own(tmp_path, monkeypatch):
    """SmolLM3 by the lines of docs/extend.md, and they are needed: some of its layers don't turn q and k."""
    page = (Path(train.__file__).parent / "docs" / "extend.md").read_text(encoding="utf-8")
    entry, rule = re.findall(r"```python\n(ARCHITECTURES\[\"smollm3.*?|            turned = .*?)```", page, re.S)
    source = Path(qwen2_model.__file__).read_text(encoding="utf-8")
    old = "            x = compute(x, rotation, mask, partial(cache.extend, i))  # (R, S, D)\n"
    assert source.count(old) == 1
    hf = SmolLM3ForCausalLM(SmolLM3Config.from_dict(SMALL | {
        "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "rope_theta": 50.0, "pad_token_id": 0})).eval()
    randomize(hf)
    hf.save_pretrained(tmp_path)
    for text in (source.replace(old, rule), source):
        (tmp_path / "ours.py").write_text(f"{text}\n\n{entry}", encoding="utf-8")
        ours = importlib.util.module_from_spec(importlib.util.spec_from_file_location("ours", tmp_path / "ours.py"))
        monkeypatch.setitem(sys.modules, "ours", ours)
        ours.__spec__.loader.exec_module(ours)
        difference = (ours.load_model(tmp_path)(tokens := random_tokens(2, 20)) - hf(tokens).logits).abs().max()
        assert (difference < 1e-3) == (text is not source)


TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MESSAGES = [{"role": "user", "content": "How many?"}]


@pytest.mark.slow
@FAMILIES
def test_a_trained_checkpoint_is_whole(family, run_program, tmp_path):
    """transformers reads it as the same model, and what it saves again, in shards, is read here as the same.

    Guards against a lost chat template, generation_config.json or tokenizer file, weights that were not trained, and
    samples of tokens that do not exist: the embedding has five rows more.
    """
    given, run, again = tmp_path / "given", tmp_path / "run", tmp_path / "again"
    given.mkdir()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(build(given) / "tokenizer.json"), eos_token="<|im_end|>",
                                        chat_template={"default": TEMPLATE, "rag": TEMPLATE * 2})
    tokenizer.save_pretrained(given)
    sizes = dict(vocab_size=len(tokenizer) + 5, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id)
    hf_model(family, **sizes).save_pretrained(given)
    settings = GenerationConfig(eos_token_id=[tokenizer.eos_token_id], temperature=0.7, do_sample=True)
    settings.save_pretrained(given)
    words = ("--task math --questions 1 --responses 8 --max_new_tokens 4 --steps 1 --eval_problems 1 --reward random "
             f"--lr 0.01 --checkpoint_every 1 --model {given} --out {run}")
    run_program(train, *words.split())
    model = start.load_policy(train.Settings(model=str(run / "checkpoint"), task="math")).model
    assert model.real_vocab == len(tokenizer) == len(model.output_weight) - 5
    assert not torch.equal(model.output_weight, load_model(given).output_weight)
    for folder in (run / "checkpoint", run / "checkpoints" / "step-000001"):
        assert {f.name for f in folder.rglob("*")} == {f.name for f in given.rglob("*")}
        hf, reread = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert_same_logits(hf, model, random_tokens(2, 20))
        assert reread.chat_template == tokenizer.chat_template
        assert reread.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)
        assert hf.generation_config.to_diff_dict() == settings.to_diff_dict() | {"eos_token_id": [IM_END, ENDOFTEXT]}
    hf.save_pretrained(again, max_shard_size="10KB")
    assert_same_logits(hf, load_model(again), random_tokens(2, 20))
    (again / "model.safetensors.index.json").unlink()
    assert_same_logits(hf, load_model(again), random_tokens(2, 20))


def assert_same_ends(folder, task="countdown", T=64):
    """transformers, by what a folder says, ends greedy responses to eight puzzles where we end them, nearly all."""
    policy = start.load_policy(Settings(model=str(folder), task=task))
    hf, puzzles = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), policy.task.load("heldout", 8)
    ours, *_ = respond(policy, puzzles, [*map(policy.prompt, puzzles)], torch.zeros(8, T), Rules(greedy=True))
    ends = []
    for prompt, row, mask in zip(map(policy.prompt, puzzles), ours.tokens, ours.mask):
        row = row[mask].tolist()
        ends.append(next((t for t, x in enumerate(row, 1) if x in policy.tokenizer.end_tokens), T))  # of a turn
        theirs = hf.generate(torch.tensor([prompt]), max_new_tokens=T, do_sample=False, repetition_penalty=1.0)
        assert theirs[0, len(prompt) :].tolist() == row[: ends[-1]]
    assert sum(end < T for end in ends) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [folder.name for folder in BUNDLED.parent.glob("*-*")])
def test_transformers_ends_the_responses_of_a_bundled_model(name):
    assert_same_ends(BUNDLED.with_name(name), name.partition("-")[0])


@pytest.mark.slow
@pytest.mark.parametrize("swapped, config, generation", [
    (False, {}, None), (True, {"eos_token_id": 1, "pad_token_id": 0, "repetition_penalty": 1.1}, None),
    (False, {}, {"eos_token_id": 0, "temperature": 0.7, "do_sample": True}),
    (True, {"eos_token_id": 1, "top_p": 0.5}, {"_from_model_config": True, "eos_token_id": 1, "top_p": 0.5})], ids=str)
def test_transformers_ends_responses_where_they_ended_in_training(swapped, config, generation, run_program, tmp_path):
    """Whatever the folder said before, which stays. Guards against a trained checkpoint that talks on to the limit.

    swapped: the model ends its responses in <|endoftext|> instead of <|im_end|>.
    """
    given, run = shutil.copytree(BUNDLED, tmp_path / "given"), tmp_path / "run"
    (given / "config.json").write_text(json.dumps(json.loads((given / "config.json").read_text()) | config))
    (given / "generation_config.json").write_text(json.dumps(generation))
    if generation is None:
        (given / "generation_config.json").unlink()
    tensors = load_file(given / "model.safetensors")
    tensors["model.embed_tokens.weight"][:2] = tensors["model.embed_tokens.weight"][:2].flip([0] * swapped)
    save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
    run_program(train, *f"--model {given} --out {run} --steps 1 --questions 2 --responses 3 --max_new_tokens 9 --lr 1e-6 "
                        "--eval_problems 2 --pass_at 0 --checkpoint_every 1".split())
    said = lambda folder: AutoModelForCausalLM.from_pretrained(folder).generation_config.to_diff_dict()
    beside = {"eos_token_id": None, "_from_model_config": True}
    for folder in (run / "checkpoint", run / "checkpoints" / "step-000001"):
        assert_same_ends(folder)
        assert {*said(folder)["eos_token_id"]} == {0, 1} and said(folder) | beside == said(given) | beside


@pytest.mark.parametrize("family, named, right", [
    ("qwen2", "PreTrainedTokenizerFast", False), ("llama", "Qwen2Tokenizer", False), ("qwen3", None, False),
    ("llama", "PreTrainedTokenizerFast", True), ("qwen3", "PreTrainedTokenizerFast", True)])
def test_the_lines_of_the_page_read_a_bundled_model(family, named, right, policy, tmp_path, monkeypatch):
    """transformers, as docs/running.md uses it, has our tokens and logits, and AutoTokenizer where the page says so.

    Guards against a reader who evaluates a checkpoint of ours on tokens that it never saw.
    """
    root = Path(train.__file__).parent
    lines = re.search(r"```python\n(.*?)```", (root / "docs" / "running.md").read_text(encoding="utf-8"), re.S)[1]
    (tmp_path / "lines.py").write_text(lines)
    shutil.copytree(root / "models/countdown-tiny", tmp_path / "models/countdown-tiny")
    monkeypatch.chdir(tmp_path)
    made, folder = runpy.run_path("lines.py"), Path("models/countdown-tiny")
    for name, change in ("config.json", {"model_type": family}), ("tokenizer_config.json", {"tokenizer_class": named}):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    other = AutoTokenizer.from_pretrained(folder)
    for puzzle in generate_puzzles(8, "heldout"):
        tokens = policy.prompt(puzzle)
        assert made["tokenizer"](policy.task.prompt(puzzle, chat=False)).input_ids == tokens
        assert (other(policy.task.prompt(puzzle, chat=False)).input_ids == tokens) == right
    assert_same_logits(made["model"].float(), policy.model, torch.tensor([tokens]))
