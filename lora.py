"""LoRA: train small adapters beside a frozen model, which takes a third of the memory.

Each matrix W of the layers gets two small ones, A (r, inputs) and B (outputs, r), and

    y = x W^T + (alpha / r) (x A^T) B^T

Only A and B are trained. W needs no gradient, no master weight and no moments of Adam, and neither does the embedding
or the output matrix. B begins at 0, so the model begins as it was. Why a low rank is enough for RL: a response's reward
is a single number, so a step learns far less than the thousands of numbers that even rank 1 has in each matrix ("LoRA
Without Regret", Schulman et al. 2025). The learning rate should be 3 to 10 times that of full training.

How this differs from the paper (2106.09685):
1. All matrices of a layer have an adapter, not only those of q and v.
2. Our q, k and v are one matrix, and gate and up another. Each of the five has its own A and B, as in PEFT.
3. Nothing is merged while training. The sampler multiplies as the update does, so the first ratio stays 1.
4. A is uniform within 1 / sqrt(inputs), as in PEFT, instead of normal.

Run it:  python train.py --lora_rank 8 --lr 1e-3
"""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plumbing.files import check_fields, check_tensors, read_json, read_tensors, replace_file, write_json
from qwen2_model import Qwen2, merge, split


# Fields of adapter_config.json that don't change what A and B do to a loaded model.
INERT = {"base_model_name_or_path", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha",
         "lora_dropout", "megatron_core", "exclude_modules", "peft_version", "qalora_group_size", "r", "revision",
         "target_modules", "task_type", "auto_mapping"}


class Adapter(nn.Module):
    """A and B of one of our matrices, which holds 1, 2 or 3 of a checkpoint's: A is stacked, (parts r, inputs).

    B (outputs, r) has the order of the matrix's rows.
    """

    def __init__(self, w: Tensor, part: Tensor, rank: int, alpha: float, generator: torch.Generator):
        """w (outputs, inputs); part (outputs,): which of a checkpoint's matrices each row is from, 0, 1 or 2."""
        super().__init__()
        self.parts, self.rank, self.alpha, bound = int(part.max()) + 1, rank, alpha, w.shape[1] ** -0.5
        A = torch.empty(self.parts * rank, w.shape[1]).uniform_(-bound, bound, generator=generator)
        self.A, self.B = nn.Parameter(A.to(w)), nn.Parameter(w.new_zeros(len(w), rank))
        self.register_buffer("place", (torch.arange(len(w)) * self.parts + part).to(w.device), persistent=False)

    def blocks(self) -> Tensor:
        """B (outputs, parts r), which in each row is 0 but for the r columns of its own part."""
        outputs, rank = self.B.shape
        return self.B.new_zeros(outputs * self.parts, rank).index_copy(0, self.place, self.B).view(outputs, -1)

    def add(self, x: Tensor, y: Tensor, transposed: bool = False) -> Tensor:
        """y (N, outputs), or (outputs, N), plus what the adapter makes of x (N, inputs)."""
        small, blocks = F.linear(x, self.A), self.blocks()  # (N, parts r), (outputs, parts r)
        pair = (blocks, small.mT) if transposed else (small, blocks.mT)
        return y.addmm_(*pair, alpha=self.alpha / self.rank)  # in place: a sum of its own takes 5 to 20 times as long


def add_adapters(model: Qwen2, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model, and give each matrix of its layers an adapter."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        parts = {"qkv": torch.tensor([0] * layer.group + [1, 2]).repeat(layer.K), "gate_up": torch.arange(2)}
        for name in ("qkv", "o", "gate_up", "down"):
            w, part = getattr(layer, name), parts.get(name, torch.zeros(1, dtype=torch.long))
            part = part.repeat_interleave(len(w) // len(part))  # (outputs,)
            setattr(layer, f"{name}_adapter", Adapter(w, part, rank, alpha, generator))


def adapters(model: Qwen2) -> dict[str, Adapter]:
    """The adapters of a model, by the name of their matrix, such as layers.0.qkv."""
    return {name.removesuffix("_adapter"): m for name, m in model.named_modules() if isinstance(m, Adapter)}


@torch.no_grad()
def merged(model: Qwen2) -> Qwen2:
    """The model without adapters that computes the same: W + (alpha / r) B A, in float32, then rounded as W is."""
    with torch.device("meta"):
        whole = Qwen2(model.config)
    weights = {name: w for name, w in model.state_dict().items() if "_adapter." not in name}
    for name, a in adapters(model).items():
        change = a.alpha / a.rank * a.blocks().float() @ a.A.float()  # (outputs, inputs)
        weights[name] = change.add_(weights[name]).to(weights[name])
    whole.load_state_dict(weights, assign=True)
    return whole


def peft_names(name: str, adapter: Adapter, letter: str, model: Qwen2) -> dict[str, str]:
    """PEFT's names of an adapter's A or B, by those that a checkpoint gives to the matrices."""
    theirs = split({name: adapter.B}, model.config)
    return {matrix: f"base_model.model.{matrix.removesuffix('weight')}lora_{letter}.weight" for matrix in theirs}


def peft_tensors(model: Qwen2) -> dict[str, Tensor]:
    """The adapters as PEFT writes them: an A and a B for each matrix of a checkpoint, with its order of rows."""
    found = {}
    for name, adapter in adapters(model).items():
        parts = {"A": adapter.A.chunk(adapter.parts), "B": split({name: adapter.B}, model.config).values()}
        for letter, tensors in parts.items():
            found |= zip(peft_names(name, adapter, letter, model).values(), tensors)
    return {name: x.detach().contiguous() for name, x in found.items()}


def save_adapters(model: Qwen2, folder: Path, base: str) -> None:
    """Write a folder that PEFT reads, and transformers, too. base: the folder of the model without adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    one = next(iter(adapters(model).values()))
    targets = sorted({name.split(".")[-3] for name in peft_tensors(model)})  # q_proj, ...
    write_json(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(Path(base).absolute()),
        "r": one.rank, "lora_alpha": one.alpha, "target_modules": targets})
    tensors = {name: x.float() for name, x in peft_tensors(model).items()}
    replace_file(folder / "adapter_model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))


@torch.no_grad()
def load_adapters(model: Qwen2, folder: Path, rank: int, alpha: float) -> None:
    """Take A and B from a folder that PEFT or save_adapters wrote; ValueError where they are not such as these."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is no folder of an adapter: it has no adapter_config.json")
    config = read_json(file)
    check_fields(config, {"peft_type": str, "r": int, "lora_alpha": float}, file)
    other = {"peft_type": config["peft_type"] != "LORA", "bias": config.get("bias", "none") != "none",
             "init_lora_weights": config.get("init_lora_weights", True) not in (True, False, "gaussian")}
    if asked := [name for name, value in (config | other).items() if value and name not in INERT]:
        raise ValueError(f"{file} sets {', '.join(asked)}, which is not supported: merge it into its model with "
                         "merge_and_unload of peft, and start from that with --model")
    if (config["r"], config["lora_alpha"]) != (rank, alpha):
        raise ValueError(f"{folder} has another rank or alpha: pass --lora_rank {config['r']} "
                         f"--lora_alpha {config['lora_alpha']}")
    expected = peft_tensors(model)
    found = read_tensors(folder / "adapter_model.safetensors", model.norm.device, model.norm.dtype)
    check_tensors(f"the adapter in {folder}", expected, found)
    for name, adapter in adapters(model).items():
        A, B = ({matrix: found[peft] for matrix, peft in peft_names(name, adapter, letter, model).items()}
                for letter in "AB")
        adapter.A.copy_(torch.cat(list(A.values())))
        adapter.B.copy_(merge(B, [name], model.config)[name])
