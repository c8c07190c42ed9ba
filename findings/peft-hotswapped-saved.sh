#!/usr/bin/env bash
# in short (adapters): After hotswap_adapter, save_pretrained writes the new weights beside the first adapter's
# lora_alpha and rank, so what is loaded again is another model.
# guessed: hotswap_adapter puts a second adapter in the first one's place, so what save_pretrained then writes is the
# second adapter, and the config in memory is its own
# seen: the model in memory is right, but its config stays that of the first. So an adapter of another lora_alpha, or
# of a lower rank (filled up with zeros), is saved with the first one's: loaded again, its part is too small or too
# large by the ratio of the two scales, silently. Where both agree it is right. Known as PEFT's issue 3581
# with: peft 0.21.2, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q peft==0.21.2 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import Qwen2Config, Qwen2ForCausalLM


def base():
    """The same small model each time."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2))


def adapted(seed, **config):
    """The model with an adapter that is not zero."""
    model = get_peft_model(base(), LoraConfig(target_modules=["q_proj", "v_proj"], **config))
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


@torch.no_grad()
def added(model):
    """What the adapter adds to the base's log-probs."""
    ids = torch.arange(2, 12)[None]
    return model(ids).logits.log_softmax(-1) - base()(ids).logits.log_softmax(-1)


for rank, alpha in (4, 8), (4, 64), (2, 8):
    second = adapted(2, r=rank, lora_alpha=alpha)
    second.save_pretrained("second")
    model = adapted(1, r=4, lora_alpha=8)
    hotswap_adapter(model, "second", adapter_name="default")
    torch.testing.assert_close(added(model), added(second), atol=1e-5, rtol=0)
    model.save_pretrained("saved")
    again = PeftModel.from_pretrained(base(), "saved").eval()
    off, size = (added(again) - added(second)).abs().max().item(), added(second).abs().max().item()
    config = model.peft_config["default"]
    print(f"rank {rank}, lora_alpha {alpha}: saved as {config.r}, {config.lora_alpha}; log-probs moved by {size:.2f}, "
          f"loaded again off by {off:.2f}")
    assert (config.r, config.lora_alpha) == (4, 8) and (off < 1e-5) == ((rank, alpha) == (4, 8))
    module = again.base_model.model.model.layers[0].self_attn.q_proj
    theirs = second.base_model.model.model.layers[0].self_attn.q_proj
    torch.testing.assert_close(module.get_delta_weight("default") * (alpha / rank),
                               theirs.get_delta_weight("default") * (8 / 4))
EOF
