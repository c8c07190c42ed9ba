#!/usr/bin/env bash
# in short (trainers): mask_no_eos_with_zero takes the reward from the batch's longest response, ended or not, and
# leaves it to a shorter one that was cut off.
# guessed: with mask_no_eos_with_zero AReaL takes the reward from responses that were cut off, and with a critic the
# value behind the last token counts for those alone
# seen: nobody looks for an end token: cut off is what is as long as the batch is wide. So in every batch the longest
# text, ended or not, loses its reward, and with a critic, at the defaults, its returns are too high by the value of
# its last position; a shorter one that was cut off keeps its reward. The batch decides: with a longer text beside it
# the same response has its reward back
# with: areal 1.0.4, torch 2.10.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.10.0 torchdata==0.11.0 transformers==5.3.0 datasets==5.2.0 ray==2.60.0 \
    hydra-core==1.3.8 omegaconf==2.3.1 lark==1.3.1 aiofiles==25.1.0 aiohttp==3.14.5 colorlog==6.12.0 einops==0.8.2 \
    flask==3.1.3 httpx==0.28.1 msgpack==1.2.4 numba==0.68.1 nvidia-ml-py==13.615.71 openai==3.57.0 orjson==3.13.0 \
    pandas==3.1.1 prettytable==3.18.0 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.4 swanlab==0.10.3 \
    tabulate==0.10.0 tensorboardX==2.6.5 tenacity==9.2.1 trackio==0.43.0 uvicorn==0.54.0 uvloop==0.23.0 \
    wandb==0.31.0
PIP_NO_DEPS=1 venv/bin/pip install -q areal==1.0.4 torch==2.10.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import logging

import torch
from areal.api.cli_args import PPOActorConfig
from areal.trainer.ppo.actor import PPOActor

logging.disable()

PROMPT, END, WORD = 2, 2, 7  # tokens of each prompt; the end token, and any other


def run(lengths, values=False, **settings):
    """Advantage of each text's first response token. All earned 1; the second is cut off, the others end."""
    config = PPOActorConfig(adv_norm=None, reward_norm=None, reward_scaling=1.0, kl_ctl=0.0, use_decoupled_loss=False,
                            recompute_logprob=False, **settings)
    data = []
    for at, size in enumerate(lengths):
        text = torch.tensor([[WORD] * (size - 1) + [WORD if at == 1 else END]])
        data.append(dict(
            input_ids=text, attention_mask=torch.ones_like(text, dtype=torch.bool), rewards=torch.ones(1),
            loss_mask=(torch.arange(size) >= PROMPT)[None].int(), logprobs=torch.zeros(1, size)))
        if values:
            data[-1]["values"] = torch.full((1, size), 0.25)
    return [found["advantages"][0, PROMPT - 1].item() for found in PPOActor(config, None).compute_advantages(data)]


for lengths in ([6, 5], [6, 5, 8], [6, 6]):
    masked, critic = run(lengths, mask_no_eos_with_zero=True), run(lengths, values=True)
    print(f"texts of {lengths} tokens, the second cut off: advantages {masked} with mask_no_eos_with_zero, "
          f"{critic} at the defaults with a critic that says 0.25")
    for size, one, other in zip(lengths, masked, critic):
        longest = size == max(lengths)
        assert one == (0 if longest else 1) and other == (1 if longest else 0.75)
EOF
