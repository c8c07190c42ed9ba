#!/usr/bin/env bash
# in short (rollouts): A tokenizer read from a GGUF ignores how the model splits digits: "12" becomes a token that
# SmolLM2 hardly knows.
# guessed: AutoTokenizer.from_pretrained(gguf_file=...) cuts texts as the file's tokenizer.ggml.pre says
# seen: it never reads that field. "smollm" and "llama-bpe" give one tokenizer, so digits, which SmolLM2 and other
# models were trained to see one by one, are merged: "12" becomes a token that the model hardly knows, in silence
# with: transformers 5.23.0, gguf 0.19.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 gguf==0.19.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import gguf
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

TOKENS = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "12"]
SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
         "attention.head_count": 1, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5}
TEXTS = {"model": "gpt2", "tokens": TOKENS, "merges": ["1 2"], "token_type": [3] + [1] * (len(TOKENS) - 1),
         "bos_token_id": 0, "eos_token_id": 0}


def pieces(pre):
    """What AutoTokenizer makes of 12 + 121, from a file whose text is to be split as `pre` says."""
    writer = gguf.GGUFWriter(f"{pre}.gguf", "llama")
    fields = {f"llama.{name}": value for name, value in SIZES.items()}
    fields |= {f"tokenizer.ggml.{name}": value for name, value in (TEXTS | {"pre": pre}).items()}
    for name, value in fields.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    tokenizer = AutoTokenizer.from_pretrained(".", gguf_file=f"{pre}.gguf")
    return tokenizer.convert_ids_to_tokens(tokenizer("12+121", add_special_tokens=False).input_ids)


found = {pre: pieces(pre) for pre in ("llama-bpe", "smollm")}
print(found)
assert found["smollm"] == found["llama-bpe"] == ["12", "+", "12", "1"]
EOF
