#!/usr/bin/env bash
# in short (rollouts): A Llama 3.1 or 3.2 read from a GGUF loses its RoPE scaling. The original's config.json brings
# it back.
# guessed: from_pretrained(gguf_file=...) gives a Llama 3.1 or 3.2 that was stored as llama.cpp stores it, unquantized,
# the log-probs of the original
# seen: llama.cpp writes the scaling of RoPE's type llama3 as a tensor, rope_freqs.weight: the factor of each frequency.
# transformers skips it and makes rope_type default, silently, so from the second token on it is another model. Metadata
# of scaling, as YaRN's, is read for gpt-oss alone. The weights are right: with the rope_parameters of the original's
# config.json the log-probs are its own
# with: transformers 5.23.0, gguf 0.19.0, accelerate 1.15.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HEADS = {"q_proj": 4, "k_proj": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}
SIZES = {"block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
         "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
         "rope.freq_base": 500000.0, "rope.dimension_count": 16, "vocab_size": 256}
TEXTS = {"model": "gpt2", "tokens": [f"t{i}" for i in range(256)]}


def llama(rope):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope_parameters=rope)).eval()


def write(model, file):
    """A GGUF of a model, as llama.cpp's converter makes it: rows of q and k interleaved, and RoPE's factors."""
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), gguf.GGUFWriter(file, "llama")
    fields = {f"llama.{name}": value for name, value in SIZES.items()}
    fields |= {f"tokenizer.ggml.{name}": value for name, value in TEXTS.items()}
    for name, value in fields.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.state_dict().items():
        for part, heads in HEADS.items():
            if part in name:
                tensor = tensor.reshape(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.contiguous().numpy())
    plain = ROPE["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)
    writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


@torch.no_grad()
def log_probs(model):
    return model.eval()(torch.arange(200)[None] * 7 % 256).logits[0].log_softmax(-1)


original = llama(ROPE)
write(original, "llama.gguf")
read = AutoModelForCausalLM.from_pretrained(".", gguf_file="llama.gguf")
mended = llama(ROPE)
mended.load_state_dict(read.state_dict())
off = (log_probs(read) - log_probs(original)).abs().mean(-1)
print("as read:", read.config.rope_parameters)
print("mean error of log p at tokens 1, 2, 11 and 200:", [round(off[t].item(), 4) for t in (0, 1, 10, 199)])
print("with the original's rope_parameters, the largest:", (log_probs(mended) - log_probs(original)).abs().max().item())
assert read.config.rope_parameters["rope_type"] == "default"
assert off[0] < 1e-4 and off[1] > 1e-3 and off[199] > 0.5
assert torch.allclose(log_probs(mended), log_probs(original), atol=1e-4)
EOF
