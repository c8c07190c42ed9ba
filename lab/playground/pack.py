"""What the playground's page holds: a model's weights in the order of model.js, its tokenizer, puzzles, and truth.

Run it:  python -m lab.playground
"""
import base64
import json

import numpy as np
import torch

import countdown_task
from countdown_task import PLAIN
from lab.statistics import by_response
from lab.truth.score import recorded_puzzles
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, to_checkpoint
from rollout import Policy

SHORT = {"input_layernorm.weight": "norm1", "self_attn.q_proj.weight": "q", "self_attn.q_proj.bias": "qb",
         "self_attn.k_proj.weight": "k", "self_attn.k_proj.bias": "kb", "self_attn.v_proj.weight": "v",
         "self_attn.v_proj.bias": "vb", "self_attn.o_proj.weight": "o", "post_attention_layernorm.weight": "norm2",
         "mlp.gate_proj.weight": "gate", "mlp.up_proj.weight": "up", "mlp.down_proj.weight": "down"}  # as in model.js
COLUMNS = {"token": "token", "logprob": "logprob", "entropy": "entropy", "logitGrad": "logit_grad", "kind": "kind",
           "value": "value", "aStar": "a_star", "error": "a_star_error"}  # names of a row's facts in the page
SHORT_RESPONSE = 70  # tokens


def encode(array: np.ndarray) -> str:
    """The bytes of an array as base64."""
    return base64.b64encode(array.tobytes()).decode()


def flat_weights(model: Qwen2) -> torch.Tensor:
    """All weights as one vector, in the order of model.js. ValueError for a model that the page can't run."""
    state = to_checkpoint(model.state_dict(), model.config)
    layers = [f"model.layers.{i}.{name}" for i in range(model.config.num_hidden_layers) for name in SHORT]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight"]
    if set(names) != set(state):
        raise ValueError("the page runs a Qwen2 with tied embeddings, and this model is none")
    return torch.cat([state[name].flatten() for name in names]).detach()


def pack_prompt(tokenizer: Tokenizer) -> dict:
    """The tokens of a prompt's parts, and of each number: up to 20 alone, up to 100 behind a space."""
    head, rest = PLAIN.split("{numbers}")
    middle, tail = rest.split(" {target}")
    texts = [str(n) for n in range(21)] + [f" {n}" for n in range(101)]
    numbers = {text: tokenizer.encode(text) for text in texts}
    if several := [text for text, tokens in numbers.items() if len(tokens) != 1]:
        raise ValueError(f"the tokenizer has no token for the number {several[0]!r}")
    return {"before": tokenizer.encode(head + "["), "comma": tokenizer.encode(","),
            "between": tokenizer.encode("]" + middle), "after": tokenizer.encode(tail),
            "numbers": {text: tokens[0] for text, tokens in numbers.items()}}


def pack_truth(truth: dict, recorded: list[str]) -> dict:
    """The responses of a ground_truth.npz, what was measured of each token, and the credit of some methods."""
    settings, responses = json.loads(str(truth["settings"])), by_response(truth)
    columns = {ours: truth[theirs] for ours, theirs in COLUMNS.items()} | {"tried": truth["packets"] > 0}
    credits = dict(zip(truth["methods"].tolist(), truth["credits"]))
    return {"columns": {name: encode(column.astype(np.float32)) for name, column in columns.items()},
            "recorded": {name: encode(credits[name].astype(np.float32)) for name in recorded},
            "lengths": list(map(len, responses)), "answers": settings["answers"],
            "puzzles": [puzzle._asdict() for puzzle in recorded_puzzles(truth, countdown_task)]}


def most_at_stake(truth: dict) -> int:
    """The puzzle with the largest |A*| in both its first right and its first wrong response, of those that are short
    enough for a small screen: the page shows it first."""
    largest = np.zeros((2, int(truth["group"].max()) + 1))  # by success and puzzle
    for rows in reversed(by_response(truth)):  # so that the first one stays
        place = int(truth["success"][rows[0]]), int(truth["group"][rows[0]])
        largest[place] = np.abs(truth["a_star"][rows]).max() * (len(rows) <= SHORT_RESPONSE)
    return int(largest.min(0).argmax())


def to_json(data: dict) -> str:
    """JSON in which no text can close the script element that it is in."""
    return json.dumps(data).replace("<", "\\u003c")


def pack(policy: Policy, truth: dict, recorded: list[str]) -> tuple[dict, dict]:
    """What the worker needs, and what the page itself does. Weights are the upper halves of float32: bfloat16."""
    weights, tokenizer = flat_weights(policy.model), policy.tokenizer
    data = {"pieces": [piece.decode("latin-1") for piece in tokenizer.bytes], "ends": tokenizer.end_tokens,
            "weights": encode(weights.bfloat16().view(torch.int16).numpy()), "config": policy.model.config.source,
            "prompt": pack_prompt(tokenizer),
            "training": [puzzle._asdict() for puzzle in countdown_task.load("train", 1024)],
            "heldout": [puzzle._asdict() for puzzle in countdown_task.load("heldout", 256)[128:]],
            "truth": pack_truth(truth, recorded)}
    return data, {"puzzles": data["truth"]["puzzles"], "recorded": recorded, "heldout": len(data["heldout"]),
                  "shown": most_at_stake(truth)}
