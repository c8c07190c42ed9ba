"""Attention, by the kernel that suits the device. A first reading can skip it."""
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v: (B, H, S, d), each of K key heads shared by H / K query heads.

    q (B, H, S, d), k and v (B, K, C, d), bias (B, 1, S, C).
    """
    if q.is_cuda:
        return attend_on_gpu(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same on a GPU.

    torch would choose cuDNN, whose backward pass gave NaN on an H100 for Qwen2.5 wherever C was 64 more than a multiple
    of 128 (torch 2.11 and 2.13, https://github.com/pytorch/pytorch/issues/196678). The next kernel wants one key head
    for each query head.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, C, d) each
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
