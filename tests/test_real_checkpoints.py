"""Tests with the shapes of published checkpoints: Qwen2.5-0.5B, Qwen3-0.6B and SmolLM2-135M, without a download.

transformers writes random checkpoints with the published config.json, or with fewer layers and a smaller hidden size,
but always with all 151,936 rows of the embedding. The tokenizer is laid out like Qwen's: it has fewer tokens than that,
splits tags in three, and knows `<think>` as one token only in Qwen3. The oracles are transformers and hand computation.
"""
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import countdown_task
import train
from countdown_task import Puzzle
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model
from rollout import generate_shared, token_batch
from tests.random_checkpoints import (FAMILIES, HF, assert_close, assert_same_logits, hf_model, random_tokens,
                                      randomize)
from tests.test_tokenizer import build

V = 151_936  # rows of the embedding
REAL = {"qwen2": 151_665, "qwen3": 151_669, "llama": 49_152}  # tokens
COMMON = dict(attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, hidden_act="silu", vocab_size=V,
              initializer_range=0.02, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True,
              torch_dtype="bfloat16", use_cache=True, use_sliding_window=False)
CONFIG = {  # the published config.json
    "qwen2": COMMON | dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
        max_window_layers=21, sliding_window=32768, transformers_version="4.43.1"),
    "qwen3": COMMON | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, max_window_layers=28, sliding_window=None, rope_scaling=None,
        attention_bias=False, transformers_version="4.51.0"),
    "llama": COMMON | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=576, intermediate_size=1536,
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        vocab_size=49_152, rms_norm_eps=1e-5, rope_theta=100000.0, rope_interleaved=False, rope_scaling=None,
        attention_bias=False, mlp_bias=False, pretraining_tp=1, bos_token_id=1, eos_token_id=2,
        transformers_version="4.42.3")}
PUZZLE = Puzzle((3, 4, 5), 8)


@torch.no_grad()
@FAMILIES
def test_two_layers_of_published_size_equal_transformers(family, tmp_path):
    """Guards against an error that only shows at the published sizes, and bfloat16 further off than transformers'."""
    config = CONFIG[family] | {"num_hidden_layers": 2, "max_window_layers": 2}
    make_config, make_model = HF[family]
    torch.manual_seed(0)
    hf = make_model(make_config.from_dict(config)).to(torch.bfloat16)
    randomize(hf)
    hf.save_pretrained(tmp_path, max_shard_size="200MB")
    (tmp_path / "config.json").write_text(json.dumps(config))
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, rounded = load_model(tmp_path), load_model(tmp_path, dtype=torch.bfloat16)
    shutil.rmtree(tmp_path)  # 0.4 GB, which pytest would keep for three runs
    tokens = random_tokens(2, 12, REAL[family])
    assert_same_logits(exact, model, tokens)
    expected = exact(tokens).logits
    ours, theirs = rounded(tokens) - expected, hf(tokens).logits - expected
    assert ours.square().mean() < 1.5**2 * theirs.square().mean()


# ------------------------------------------------------------------------------------------- a tokenizer like Qwen's

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|special_{i}|>" for i in range(11)]
ADDED = {"qwen2": SPECIAL + ["<tool_call>", "</tool_call>"] + [f"<|added_{i}|>" for i in range(6)]}  # from 151,643 on
ADDED["qwen3"] = ADDED["qwen2"] + ["<tool_response>", "</tool_response>", "<think>", "</think>"]
MERGES = ["t h", "i n", "< th", "in k", "th ink", "< /", "> Ċ", ") </", "a n", "an s", "ans w", "answ e", "answe r",
          "Ġ -", "Ġ =", "Ġ *", "Ġ ("]


def write_tokenizer(folder: Path, family: str) -> None:
    """tokenizer.json as Qwen writes it: 151,643 byte-pair tokens, then the added ones."""
    letters, rng = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    vocab = {name: i for i, name in enumerate(letters + [merge.replace(" ", "") for merge in MERGES])}
    while len(vocab) < 151_643:
        vocab.setdefault("".join(rng.choices(letters, k=rng.randint(3, 6))), len(vocab))
    options = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [dict(id=151_643 + i, content=x, special=x in SPECIAL, **options) for i, x in enumerate(ADDED[family])]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": PATTERN}, behavior="Isolated", invert=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
               fuse_unk=False, byte_fallback=False, vocab=vocab, merges=MERGES)
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]), post_processor=byte_level,
        decoder=byte_level, model=bpe)))


@pytest.fixture(scope="module", params=ADDED)
def folder(request, tmp_path_factory):
    """A folder like Qwen's, small but for the vocabulary. Rows above the tokenizer's would have nearly all probability.

    Every token adds 3 to the first channel of the residual stream, and those rows 1,000: it is most of a logit.
    """
    family, path = request.param, tmp_path_factory.mktemp(request.param)
    config = CONFIG[family] | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2, max_window_layers=2, head_dim=16)
    make_config, make_model = HF[family]
    torch.manual_seed(0)
    hf = make_model(make_config.from_dict(config))
    write_tokenizer(path, family)
    tokenizer, pieces = Tokenizer(path), [x for x, _ in START + ANSWER] + ["</think>"]
    spoken = sorted({i for piece in [*pieces, "</", ">\n", *ADDED[family]] for i in tokenizer.encode(piece)})
    with torch.no_grad():
        for name, p in hf.named_parameters():
            size = (0.6 if "embed" in name else 0.3) / p.shape[-1] ** 0.5
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=size)
        rows = hf.get_input_embeddings().weight
        rows[:, 0], rows[spoken, 0], rows[REAL[family]:, 0] = 3, 12, 1000
        hf.model.norm.weight[0] = 1
    hf.to(torch.bfloat16).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    yield family, path
    shutil.rmtree(path)


# --------------------------------------------------------------------------------------------- from prompt to reward

START = [*zip([" ", "5", " -", " ", "3", " =", " ", "2", "\n"], "FRRFRRFRF")]  # tokens and their roles
CLOSE = {"qwen2": [*zip(["</", "think", ">\n"], "SSS")], "qwen3": [("</think>", "S"), ("\n", "F")]}
ANSWER = [*zip(["<", "answer", ">", "4", " *", " (", "5", " -", " ", "3", ")</", "answer", ">"], "SSSRRRRRFRRSS")]
TEXT = " 5 - 3 = 2\n</think>\n<answer>4 * (5 - 3)</answer>"


@torch.no_grad()
def test_right_responses_from_model_to_reward(folder):
    """Guards against an end token that does not end, and tags that count only in three tokens or only in one."""
    (family, path), pieces = folder, START + CLOSE[folder[0]] + ANSWER
    s, hf = train.Settings(model=str(path)), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy = train.load_policy(s, countdown_task)
    tokenizer, prompt = policy.tokenizer, policy.prompt(PUZZLE)
    assert tokenizer.size == REAL[family]
    ids = [i for piece, _ in pieces for i in tokenizer.encode(piece)]
    assert tokenizer.encode(TEXT) == ids
    scripts = [ids + [151645], ids + [151643], ids + ids[:1], [151645]]  # both end tokens, cut off, empty
    uniforms = torch.full((len(scripts), len(ids) + 1), 0.5, dtype=torch.float64)
    for row, script in zip(uniforms, scripts):  # the middle of a token's share of the probability draws that token
        L = len(script)
        logits = hf(torch.tensor([prompt + script]), logits_to_keep=L + 1).logits[0, :-1, : REAL[family]]
        p = logits.double().softmax(-1)  # (L, real)
        taken = p[range(L), script]
        assert taken.min() > 1e-4  # so that rounding can't reach a neighbour
        row[:L] = p.cumsum(-1)[range(L), script] - taken / 2
    batch = token_batch(policy, [PUZZLE], generate_shared(policy, [prompt], uniforms), s, step=1)
    assert [row[m].tolist() for row, m in zip(batch.tokens, batch.mask)] == scripts
    assert batch.text == (TEXT, TEXT, TEXT + " ", "")
    assert batch.ended.tolist() == [True, True, False, True]
    assert_close(batch.reward, torch.tensor([1.1, 1.1, 1.06, 0.0]), 1e-6)
    for i in range(2):
        assert "".join("FRS"[role] for role in batch.role[i]) == "".join(role for _, role in pieces) + "S"
        assert batch.in_answer[i].tolist() == [t >= len(ids) - len(ANSWER) for t in range(len(ids) + 1)]
        assert [TEXT[slice(*span)] for span in batch.spans[i]] == [piece for piece, _ in pieces] + [""]


# ------------------------------------------------------------------------------- a checkpoint goes in and comes out

TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MESSAGES = [{"role": "user", "content": "How many?"}]


@FAMILIES
def test_a_trained_checkpoint_is_whole(family, tmp_path, monkeypatch):
    """transformers reads it as the same model, and what it saves again, in shards, is read here as the same.

    Guards against a lost chat template, generation_config.json or tokenizer file, and weights that were not trained.
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
    monkeypatch.setattr("sys.argv", ["train.py", *"--task math --questions 1 --answers 2 --max_new_tokens 4 --steps 1 "
                                     "--eval_problems 1 --reward random --lr 0.01 --checkpoint_every 1".split(),
                                     "--model", str(given), "--out", str(run)])
    train.main()
    model = load_model(run / "checkpoint")
    assert not torch.equal(model.output_weight, load_model(given).output_weight)
    for folder in (run / "checkpoint", run / "checkpoints" / "step-000001"):
        assert {f.name for f in folder.rglob("*")} == {f.name for f in given.rglob("*")}
        hf, reread = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert_same_logits(hf, model, random_tokens(2, 20))
        assert reread.chat_template == tokenizer.chat_template
        assert reread.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)
        assert hf.generation_config.to_diff_dict() == settings.to_diff_dict()
    hf.save_pretrained(again, max_shard_size="10KB")
    assert_same_logits(hf, load_model(again), random_tokens(2, 20))
    (again / "model.safetensors.index.json").unlink()
    assert_same_logits(hf, load_model(again), random_tokens(2, 20))
