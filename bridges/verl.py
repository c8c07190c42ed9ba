"""verl's trainer, whose tokens get the credit of a function of mitigations.py or methods/.

    VERL_USE_EXTERNAL_MODULES=bridges.verl python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
        +credit.name=curious +credit.bonus=0.1 ...

verl samples, grades and compares; the function starts from its advantage. (A registered estimator would be told neither
log-probs nor tokens, so the credit goes in behind it, where the trainer's queue has both.) This module replaces two
methods of verl's trainer, PPOTrainer.__init__, for its checks, and _compute_advantage. It was written for verl==0.9.1.
"""
import json
from functools import partial, wraps
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.v1 import trainer_base

from bridges import own_modules
from bridges.foreign import (TASK, Asked, ForeignBatch, assign_credit, at_least_0, find_credit, identity, layout,
                             read_tokenizer)

with own_modules():
    from methods.registry import CREDIT_FUNCTIONS
    from mitigations import NORMALIZATIONS
    from plumbing.files import require
    from plumbing.tokenizer import Tokenizer

# The loss mask has 1 on what was sampled; the response mask, by now, only on those of them that rollout correction kept.
FIELDS = ["uid", "prompts", "responses", "loss_mask", "response_mask", "advantages", "rm_scores", "old_log_probs", "entropy"]
TAKEN = {"name", "success", "normalize", "seed"}  # of +credit.
OURS = {"old_log_probs": "logprob", "entropy": "entropy", "ref_log_prob": "reference_logprob"}


def credited(compute: Callable) -> Callable:
    """PPOTrainer._compute_advantage, and then credit in place of the advantages."""
    @wraps(compute)
    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        batch, chosen = compute(self, batch, metrics), self.config.get("credit")
        if not chosen:
            return batch
        names, queue = FIELDS + ["ref_log_prob"] * bool(self.use_reference_policy), trainer_base.tq
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        found, left_out = credit_of({name: rows_of(data[name]) for name in names if name in data}, self.credit_reader,
                                    self.global_steps, **chosen)  # n
        paid = torch.cat(found)
        metrics |= {"credit/mean": paid.mean().item(), "credit/std": paid.std().item(), "credit/left_out": left_out}
        fields = {"advantages": torch.nested.as_nested_tensor(found, layout=torch.jagged)}
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id,
                                  fields=trainer_base.TensorDict(fields, batch_size=len(found)))
    return _compute_advantage


def checked(init: Callable) -> Callable:
    """PPOTrainer.__init__, which refuses before a model is loaded what would not train on the credit."""
    @wraps(init)
    def __init__(self: Any, config: Any, *arguments: Any, **options: Any):
        if "credit" in config:
            check(config, **config.credit if hasattr(config.credit, "keys") else {})
        init(self, config, *arguments, **options)  # which finds the tokenizer, and loads no model
        if "credit" in config:
            self.credit_reader = read_tokenizer(self.tokenizer)
    return __init__


def check(config: Any, name: str = "", normalize: str = "response", success: float = 0.5, seed: int = 0,
          **hyper_parameters: Any) -> None:
    """ValueError where the credit of a run can't be that of the function `name`."""
    mode = config.actor_rollout_ref.get("actor", {}).get("policy_loss", {}).get("loss_mode")
    require(mode != "geo_mean", "loss_mode=geo_mean gives all tokens of a response the mean of their credit: take "
            "another one")
    require(name, "give the credit function as +credit.name=NAME, and its hyper-parameters beside it")
    require(normalize in NORMALIZATIONS, f"credit.normalize={normalize} is none of {', '.join(NORMALIZATIONS)}")
    credit = function_of(name, hyper_parameters, trainer_base.need_reference_policy(config))
    print("credit: " + json.dumps(identity(credit) | {"normalize": normalize}), flush=True)


def function_of(name: str, hyper_parameters: dict, reference: bool) -> Callable:
    """The credit function of this name; ValueError where it needs more than verl tells. reference: whether it has a
    reference model."""
    found = partial(CREDIT_FUNCTIONS[name], **hyper_parameters) if name in CREDIT_FUNCTIONS else name
    return find_credit(found, TASK, {"reference"} if reference else set(), "verl's trainer", TAKEN)


def rows_of(field: Any) -> list:
    """The rows of a nested tensor, or of a list."""
    return list(field.unbind()) if isinstance(field, Tensor) else [getattr(x, "data", x) for x in field]


def credit_of(data: dict[str, list], reader: Tokenizer, step: int, name: str, success: float = 0.5,
              normalize: str = "response", seed: int = 0, **hyper_parameters: Any) -> tuple[list[Tensor], int]:
    """The credit of each of n responses, over all tokens of its field `responses`, and how many have nothing to be
    compared with. data: fields of verl, a row for each response. What rollout correction rejected was sampled, and is
    compared, but gets 0, as do rows without a sampled token, with which verl fills a batch. Rows are compared that
    answer the same prompt: an agent loop may give several of a rollout, with others."""
    kept, prompts = [row.bool() for row in data["response_mask"]], [row.tolist() for row in data["prompts"]]
    given = [row[mask] for row, mask in zip(data["advantages"], kept)]
    require(all((row == row[:1]).all() for row in given),
            "this algorithm.adv_estimator gives the tokens of a response several advantages: take grpo or rloo")
    own = layout([row.tolist() for row in data["responses"]],
                 [row.bool().tolist() for row in data.get("loss_mask", kept)])
    told = {ours: own.compact(pad_sequence([row.float() for row in data[field]], batch_first=True))
            for field, ours in OURS.items() if field in data}  # (B, T) each
    told |= {"entropy": at_least_0(told["entropy"])} if "entropy" in told else {}
    reference = {"reference_logprob": lambda: told["reference_logprob"]} if "reference_logprob" in told else {}
    credit = function_of(name, hyper_parameters, bool(reference))
    last = own.tokens.gather(1, (own.mask.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]  # (B,)
    reward = torch.stack([row.double().sum() for row in data["rm_scores"]])  # (B,)
    batch = ForeignBatch(
        own, lambda field: told | {"tokenizer": reader}, {"reward": reward}, reward > success,
        [(str(uid), *prompt) for uid, prompt in zip(data["uid"], prompts)], puzzles=data["uid"], prompts=prompts,
        asks=lambda part, rows: Asked(seed, step, rows, **reference),
        ended=torch.isin(last, torch.tensor(reader.end_tokens)), normalize=normalize)
    batch.advantage = torch.tensor([row[0].item() if len(row) else 0.0 for row in given])  # (B,)
    paid = own.spread(assign_credit(batch, credit, step))  # (B, C)
    return [row[: len(mask)] * mask for row, mask in zip(paid, kept)], batch.left_out


trainer_base.PPOTrainer._compute_advantage = credited(trainer_base.PPOTrainer._compute_advantage)
trainer_base.PPOTrainer.__init__ = checked(trainer_base.PPOTrainer.__init__)
