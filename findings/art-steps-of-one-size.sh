#!/usr/bin/env bash
# in short (trainers): A step's advantages are divided by their mean size even with scale_rewards=False, so rewards of
# 0 and 0.001 train as 0 and 1 do.
# guessed: with scale_rewards=False an advantage in OpenPipe's ART is the reward minus the group's mean, so a step whose
# rewards hardly differ moves the policy little
# seen: packing divides the advantages of a step by their mean size over its tokens, whatever scale_rewards is: where all
# rewards are 0 or 0.001 the loss is the same as with 0 and 1
# with: openpipe-art 0.5.18, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q openpipe-art==0.5.18 transformers==5.23.0 torch==2.13.0
LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python -W ignore - <<'EOF'
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import TokenizedResult


def response(advantage):
    """A prompt of two tokens and a response of four, as tokenize_trajectory_groups hands it on."""
    return TokenizedResult(
        advantage=advantage, chat="", token_ids=[1, 2, 3, 3, 3, 3], input_pos=[*range(6)],
        assistant_mask=[0, 0, 1, 1, 1, 1], logprobs=[float("nan")] * 2 + [-1.0] * 4, pixel_values=None,
        image_grid_thw=None, trajectory=None, choice_offsets=[2], extra_logprobs={}, _tokenizer=None, weight=1 / 4)


def packed(*rewards):
    """The sizes of the advantages that the loss gets, from groups of two with these rewards, less their mean."""
    responses = [response(x - sum(group) / 2) for group in rewards for x in group]
    found = packed_tensors_from_tokenized_results(responses, seq_len=6, verbosity=0)
    sizes = {round(x.item(), 6) for x in found["advantages"][found["assistant_mask"]].abs()}
    return sorted(sizes)


for rewards in ([(0.0, 1.0)], [(0.0, 0.001)], [(0.0, 1.0), (0.0, 0.001)]):
    print(f"rewards {rewards}: sizes {packed(*rewards)}")
assert packed((0.0, 1.0)) == packed((0.0, 0.001)) == [1.0]
assert packed((0.0, 1.0), (0.0, 0.001))[1] > 1.99
EOF
