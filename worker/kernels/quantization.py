"""Quantised weights to float32."""

from __future__ import annotations

import torch

from worker.kernels._native import load_native

_C = load_native()

# Bytes of a block of 32 weights, by GGUF's number of the type: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
BLOCK_BYTES = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34}
_BLOCK_WEIGHTS = 32


def dequantize(out: torch.Tensor, blocks: torch.Tensor, block_type: int) -> None:
    """out = scale * number + minimum of each weight, in float32.

    Args:
        out: float32, contiguous; its shape is free.
        blocks: uint8 of any shape, contiguous; 32 weights a block.
        block_type: GGUF's number, a key of BLOCK_BYTES.

    Raises:
        TypeError, ValueError: a dtype, size or type that does not fit.
    """
    block_bytes = BLOCK_BYTES.get(block_type)
    if block_bytes is None:
        raise ValueError(f"dequantize: block_type {block_type} is not supported; supported: {list(BLOCK_BYTES)}")
    if out.dtype is not torch.float32 or blocks.dtype is not torch.uint8:
        raise TypeError(f"dequantize: out must be float32 and blocks uint8, not {out.dtype} and {blocks.dtype}")
    num_blocks = blocks.numel() // block_bytes
    if num_blocks * block_bytes != blocks.numel() or num_blocks * _BLOCK_WEIGHTS != out.numel():
        raise ValueError(
            f"dequantize: {blocks.numel()} bytes of blocks of {block_bytes} bytes do not fill {out.numel()} weights"
        )
    if not (out.is_contiguous() and blocks.is_contiguous()):
        raise ValueError("dequantize: out and blocks must be contiguous")
    _C.dequantize(out.data_ptr(), blocks.data_ptr(), num_blocks, block_type)
