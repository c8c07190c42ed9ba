"""LoRA (2106.09685): train small adapters beside a frozen model, in less memory.

Each matrix W of the layers gets two of rank r, A (r, inputs) and B (outputs, r), and only these are
trained:

    y = x W^T + (alpha / r) (x A^T) B^T

B is 0 at first, so the model begins as it was. What is frozen needs no gradient, float32 master or
moments. Why a low rank is enough for RL: a response's reward is one number, which holds a few bits.
In a real model even rank 1 has thousands of numbers in each matrix. ("LoRA Without Regret",
Schulman et al. 2025. Its best learning rate is about 10 times that of full training;
lab/real/README.md tries four.)

How this differs from the paper:
1. All matrices of a layer have an adapter, not only those of q and v. A is uniform within 1 /
   sqrt(inputs), not normal.
2. Our q, k and v are one matrix, and so are gate and up. But each of these five parts has its own A
   and B, as in PEFT.
3. The model that is trained keeps its adapters apart; only a checkpoint is merged. So the sampler
   multiplies as the update does, and the first ratio is 1 as without LoRA.

Run it:  python train.py --lora_rank 8 --lr 1e-3
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plumbing.files import check_tensors, replace_file, write_json
from plumbing.model_folder import MERGE, UNTIE, read_adapter
from qwen2_model import Qwen2, at_least_float32, parts_of


class Adapter(nn.Module):
    """A and B for one of our matrices W. In it 1, 2 or 3 matrices of a checkpoint are stacked, its
    parts.

    A (parts * r, inputs) has the parts' A stacked, B (outputs, r) their B.
    """

    def __init__(
        self, w: Tensor, parts: dict[str, int], rank: int, alpha: float,
        generator: torch.Generator, dtype: torch.dtype
    ):
        """w (outputs, inputs). parts: the rows of each part by its name, in order."""
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self.parts, self.sizes = list(parts), list(parts.values())
        bound = w.shape[1] ** -0.5
        A = torch.empty(len(parts) * rank, w.shape[1]).uniform_(-bound, bound, generator=generator)
        self.A = nn.Parameter(A.to(w.device, dtype))
        self.B = nn.Parameter(w.new_zeros(len(w), rank, dtype=dtype))

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Add (alpha / r) (x A^T) B^T, of x (..., inputs), to y (..., outputs), in place."""
        x_A = F.linear(x, self.A).split(self.rank, dim=-1)  # (..., r) of each part
        B = self.B.split(self.sizes)  # (rows, r) of each part
        x_A_B = torch.cat([F.linear(z, b) for z, b in zip(x_A, B)], dim=-1)  # (..., outputs)
        return y.add_(x_A_B, alpha=self.alpha / self.rank)

    def change(self) -> Tensor:
        """(alpha / r) B A, what is added to W (outputs, inputs), in float32 or wider."""
        pairs = zip(at_least_float32(self.B).split(self.sizes),
                    at_least_float32(self.A).split(self.rank))
        return self.alpha / self.rank * torch.cat([B @ A for B, A in pairs])


def add_adapters(model: Qwen2, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model, and give each matrix of its layers an adapter."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, w in list(model.named_parameters()):
        layer, _, short_name = name.rpartition(".")  # such as layers.0, qkv
        if layer and w.dim() == 2:  # a matrix of a layer
            parts = parts_of(name, len(w), model.config)
            adapter = Adapter(w, parts, rank, alpha, generator, model.dtype)
            setattr(model.get_submodule(layer), short_name + "_adapter", adapter)


def adapters(model: Qwen2) -> dict[str, Adapter]:
    """The adapters of a model, by the names of their matrices, such as layers.0.qkv."""
    return {name.removesuffix("_adapter"): x for name, x in model.named_modules()
            if isinstance(x, Adapter)}


@torch.no_grad()
def merged(model: Qwen2) -> Qwen2:
    """The same model without adapters: W + (alpha / r) B A, added in float32 and rounded once."""
    weights = {name: w for name, w in model.state_dict().items() if "_adapter." not in name}
    for name, adapter in adapters(model).items():
        weights[name] = adapter.change().add_(weights[name]).to(weights[name])
    with torch.device("meta"):
        whole = Qwen2(model.config)
    whole.load_state_dict(weights, assign=True)
    return whole


def peft_tensors(model: Qwen2) -> dict[str, Tensor]:
    """All A and B by their names in PEFT, as views: what is copied into one, the model has."""
    return {f"base_model.model.{part.removesuffix('weight')}lora_{letter}.weight": x.detach()
            for adapter in adapters(model).values()
            for letter, stack in (("A", adapter.A.split(adapter.rank)),
                                  ("B", adapter.B.split(adapter.sizes)))
            for part, x in zip(adapter.parts, stack)}


def save_adapters(model: Qwen2, folder: Path, base: str) -> None:
    """Write a folder that PEFT and transformers read. base: the folder of the frozen model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.float() for name, x in peft_tensors(model).items()}
    one = next(iter(adapters(model).values()))
    write_json(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "r": one.rank, "lora_alpha": one.alpha,
        # From ...self_attn.q_proj.lora_A.weight the q_proj.
        "target_modules": sorted({name.split(".")[-3] for name in tensors})})
    replace_file(folder / "adapter_model.safetensors",
                 lambda part: save_file(tensors, part, metadata={"format": "pt"}))


def load_adapters(model: Qwen2, folder: str, rank: int, alpha: float, base: str) -> None:
    """Take over A and B from PEFT's folder; ValueError where they don't fit the model in base."""
    mine = peft_tensors(model)
    found = read_adapter(Path(folder), rank, alpha, model.dtype, Path(base))
    try:
        check_tensors(f"the adapter in {folder}", mine, found)
    except ValueError as error:  # it must have all matrices of the layers, and no others
        untie = model.config.tie_word_embeddings and any(".layers." not in name for name in found)
        advice = UNTIE + MERGE if untie else MERGE
        raise ValueError(f"{error}: {advice}") from None
    for name, x in mine.items():
        x.copy_(found[name])
