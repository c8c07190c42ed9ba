"""AdamW with float32 master weights, for models in bfloat16 and for optimizer state on another device."""
from functools import partial

import torch
from torch import Tensor, nn

from plumbing.files import check_tensors


class Optimizer:
    """AdamW (1711.05101) on a model's weights, or on separate master weights in float32. Weights in bfloat16 need
    masters: rounding would swallow a step of 1e-6. Masters and Adam's moments may also live on another device than the
    model, to save its memory: each gradient moves there as soon as it is computed."""

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 weight_decay: float = 0.0, device: str | None = None):
        self.weights = {name: w for name, w in model.named_parameters() if w.requires_grad}  # with LoRA, the adapters'
        first = next(iter(self.weights.values()))
        self.separate = first.dtype.itemsize < 4 or device is not None and torch.device(device) != first.device
        self.master = {name: nn.Parameter(w.detach().to(device or w.device, torch.float32)) if self.separate else w
                       for name, w in self.weights.items()}
        for w, master in zip(self.weights.values(), self.master.values()) if self.separate else ():
            w.register_post_accumulate_grad_hook(partial(self.take_gradient, master))
        self.adamw = torch.optim.AdamW(self.master.values(), lr, betas, weight_decay=weight_decay, fused=True)

    @staticmethod
    def take_gradient(master: Tensor, weight: Tensor) -> None:
        """Add a gradient that was just computed to those of earlier micro-batches, in float32, and free it."""
        master.grad.add_(weight.grad.to(master.device))
        weight.grad = None

    def zero_grad(self) -> None:
        """Set gradients to 0, not None: Adam skips weights whose gradient is None, but its momentum must act and decay
        also in a step in which no response has credit."""
        for w in self.master.values():
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad.zero_()

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from now on."""
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def parameters(self) -> list[Tensor]:
        """What AdamW moves, and what has the gradients: the model's weights or their masters."""
        return list(self.master.values())

    def step(self) -> None:
        """Take a step of AdamW."""
        self.adamw.step()
        self.round_into_model()

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Copy the master weights, rounded, into the model."""
        if self.separate:
            for name, w in self.weights.items():
                w.copy_(self.master[name])

    def state_dict(self) -> dict:
        """Everything the next step depends on: master weights and Adam's moments."""
        return {"weights": {name: w.detach() for name, w in self.master.items()}, "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restore a `state_dict`; ValueError or KeyError when it is that of another model."""
        check_tensors("the state", self.master, state["weights"])
        for name, w in self.master.items():
            w.copy_(state["weights"][name])
        self.adamw.load_state_dict(state["adamw"])
        self.round_into_model()
