"""train.py with strategy 3 as the document writes it: credit = A * the sum of attention that the answer pays a token.

    python -m lab.original.attention_sum --mitigation attention_sum
"""
from torch import Tensor

import train
from mitigations import reweighting
from rollout import TokenBatch


@reweighting
def attention_sum(batch: TokenBatch) -> Tensor:
    """credit = A * sum of a: what the states that predict the answer's tokens pay to the token (the original work)."""
    return (batch.ask.attention * batch.in_answer[:, :, None]).sum(1) * batch.mask  # (B, T)


if __name__ == "__main__":
    train.main()
