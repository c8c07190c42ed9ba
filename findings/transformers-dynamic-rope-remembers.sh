#!/usr/bin/env bash
# in short (rollouts): With rope_type "dynamic" a text's log-probs depend on longer texts read before, in eval mode
# too, until one within the original length is read.
# guessed: the frequencies follow the longest text of a batch, so beside a longer text the log-probs of another one
# change, and read by itself it has its own again
# seen: they change beside a longer text, and stay changed in later calls by itself: the frequencies only grow, until a
# text that fits into the original length puts them back. A policy's second reading, for pi_old or a reference, differs
# from its first by what was read between them
# with: transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ORIGINAL = 64  # tokens that the frequencies were made for
draw = torch.Generator().manual_seed(1)
text, longer = (torch.randint(97, (1, n), generator=draw) for n in (100, 400))


def model_of(kind):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 10000.0} | ({"factor": 4.0} if kind != "default" else {})
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=ORIGINAL, rope_parameters=rope, initializer_range=0.2)).eval()


@torch.no_grad()
def logprob(model, ids, last=None, **arguments):
    """Of the tokens of the first row but the first, or of its last ones."""
    p = model(ids, **arguments).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]
    return p if last is None else p[-last:]


def beside(model):
    """Of the text, in a batch with the longer one, padded on the left, with right mask and positions."""
    pad = longer.shape[1] - text.shape[1]
    both = torch.cat((torch.cat((torch.zeros(1, pad, dtype=int), text), 1), longer))
    mask = (torch.arange(both.shape[1]) >= torch.tensor([[pad], [0]])).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return logprob(model, both, text.shape[1] - 1, attention_mask=mask, position_ids=places)


for kind in ("default", "linear", "dynamic"):
    model, off = model_of(kind), {}
    first = logprob(model, text)
    off["again"] = logprob(model, text) - first
    off["beside a longer one"] = beside(model) - first
    off["afterwards, by itself"] = logprob(model, text) - first
    logprob(model, text[:, : ORIGINAL // 2])
    off["after a short one"] = logprob(model, text) - first
    off = {name: x.abs().max().item() for name, x in off.items()}
    print(kind, {name: round(x, 4) for name, x in off.items()})
    changed = {name for name, x in off.items() if x > 0.1}
    assert all(x < 1e-3 for name, x in off.items() if name not in changed)
    assert changed == ({"beside a longer one", "afterwards, by itself"} if kind == "dynamic" else set())
EOF
