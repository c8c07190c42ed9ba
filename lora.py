"""LoRA: train small adapters beside a frozen model, in a third of the memory.

Each matrix W of the layers gets an adapter, two matrices of rank r, A (r, inputs) and B (outputs, r):

    y = x W^T + (alpha / r) (x A^T) B^T

Only A and B are trained. W, the embedding and the output matrix need no gradient, no float32 master and no moments of
Adam. B is 0 at first, so the model begins as it was. Why a low rank is enough for RL: a response's reward is one
number, so a step can't teach more than a few bits per response, and even rank 1 has thousands of numbers in each
matrix to hold them (Schulman et al. 2025, "LoRA Without Regret", who advise a learning rate 10 times as high).

How this differs from the paper (2106.09685):
1. All matrices of a layer have an adapter, not only those of q and v. A is uniform within 1 / sqrt(inputs), not normal.
2. Our q, k and v are one matrix, and so are gate and up. But each of the five has its own A and B, as in PEFT.
3. Nothing is merged before the end: the sampler multiplies as the update does, so the first ratio is 1 as without LoRA.

Run it:  python train.py --lora_rank 8 --lr 1e-3
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plumbing.files import replace_file, write_json
from plumbing.model_folder import read_adapter
from qwen2_model import Qwen2, merge, split


class Adapter(nn.Module):
    """A and B of one of our matrices, which consists of 1, 2 or 3 parts, each of them a matrix of a checkpoint.

    A (parts r, inputs) has the parts' A below each other. The rows of B (outputs, r) are in the order of our matrix.
    """

    def __init__(self, w: Tensor, part: Tensor, rank: int, alpha: float, generator: torch.Generator):
        """w (outputs, inputs): the matrix. part (outputs,): which part each row is of, counted from 0."""
        super().__init__()
        self.rank, self.alpha, self.parts, bound = rank, alpha, int(part.max()) + 1, w.shape[1] ** -0.5
        A = torch.empty(self.parts * rank, w.shape[1]).uniform_(-bound, bound, generator=generator)
        self.A, self.B = nn.Parameter(A.to(w)), nn.Parameter(w.new_zeros(len(w), rank))
        place = torch.arange(len(w)) * self.parts + part  # (outputs,) see `blocks`
        self.register_buffer("place", place.to(w.device), persistent=False)

    def blocks(self) -> Tensor:
        """B as (outputs, parts r): each row has its r numbers in the columns of its own part, and 0 in the others."""
        zeros = self.B.new_zeros(len(self.B) * self.parts, self.rank)
        return zeros.index_copy_(0, self.place, self.B).view(len(self.B), -1)

    def add(self, x: Tensor, y: Tensor, transposed: bool = False) -> Tensor:
        """Add to y (N, outputs), or transposed (outputs, N), what the adapter makes of x (N, inputs).

        In place: on a CPU `y + ...` takes 5 to 20 times as long, since y is large and its change a product of thin ones.
        """
        narrow, blocks = F.linear(x, self.A), self.blocks()  # (N, parts r), (outputs, parts r)
        factors = (blocks, narrow.mT) if transposed else (narrow, blocks.mT)
        return y.addmm_(*factors, alpha=self.alpha / self.rank)


def add_adapters(model: Qwen2, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model, and give each matrix of its layers an adapter."""
    c, generator = model.config, torch.Generator().manual_seed(seed)
    for name, w in list(model.requires_grad_(False).layers.named_parameters(prefix="layers")):
        if w.dim() == 2:
            numbered = {matrix: torch.full((len(x),), i) for i, (matrix, x) in enumerate(split({name: w}, c).items())}
            layer, _, own = name.rpartition(".")
            adapter = Adapter(w, merge(numbered, [name], c)[name], rank, alpha, generator)
            setattr(model.get_submodule(layer), f"{own}_adapter", adapter)


def adapters(model: Qwen2) -> dict[str, Adapter]:
    """The adapters of a model, by the names of their matrices, such as layers.0.qkv."""
    return {name.removesuffix("_adapter"): x for name, x in model.named_modules() if isinstance(x, Adapter)}


@torch.no_grad()
def merged(model: Qwen2) -> Qwen2:
    """A model without adapters that computes the same: W + (alpha / r) B A in float32, rounded once. The rest of its
    weights it shares."""
    weights = {name: w for name, w in model.state_dict().items() if "_adapter." not in name}
    for name, adapter in adapters(model).items():
        change = adapter.alpha / adapter.rank * adapter.blocks().float() @ adapter.A.float()  # (outputs, inputs)
        weights[name] = change.add_(weights[name]).to(weights[name])
    with torch.device("meta"):
        whole = Qwen2(model.config)
    whole.load_state_dict(weights, assign=True)
    return whole


# ------------------------------------------------------------------------------------------ PEFT's adapter folder


def peft_name(matrix: str, letter: str) -> str:
    """PEFT's name of A or B for a checkpoint's matrix, such as model.layers.0.mlp.up_proj.weight."""
    return f"base_model.model.{matrix.removesuffix('weight')}lora_{letter}.weight"


def peft_tensors(model: Qwen2) -> dict[str, Tensor]:
    """All A and B as PEFT has them, one of each for every matrix of a checkpoint, with the checkpoint's rows."""
    found = {}
    for name, adapter in adapters(model).items():
        for A, (matrix, B) in zip(adapter.A.chunk(adapter.parts), split({name: adapter.B}, model.config).items()):
            found |= {peft_name(matrix, "A"): A.detach(), peft_name(matrix, "B"): B.detach()}
    return found


def save_adapters(model: Qwen2, folder: Path, base: str) -> None:
    """Write a folder that PEFT and transformers read. base: the folder of the model that was frozen."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.float().contiguous() for name, x in peft_tensors(model).items()}
    one = next(iter(adapters(model).values()))
    write_json(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(Path(base).absolute()),
        "r": one.rank, "lora_alpha": one.alpha, "target_modules": sorted({name.split(".")[-3] for name in tensors})})
    replace_file(folder / "adapter_model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))


@torch.no_grad()
def load_adapters(model: Qwen2, folder: str, rank: int, alpha: float) -> None:
    """Take over A and B from a folder that PEFT wrote; ValueError where they have another form than the model's."""
    found = read_adapter(Path(folder), rank, alpha, peft_tensors(model))
    for name, adapter in adapters(model).items():
        matrices = list(split({name: adapter.B}, model.config))
        adapter.A.copy_(torch.cat([found[peft_name(matrix, "A")] for matrix in matrices]))
        parts = {matrix: found[peft_name(matrix, "B")] for matrix in matrices}
        adapter.B.copy_(merge(parts, [name], model.config)[name])
