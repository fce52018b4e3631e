import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from worker import kernels
from worker.kernels.quantization import BLOCK_BYTES


@pytest.mark.parametrize("block_type", BLOCK_BYTES)
def test_every_byte_pattern_gives_the_weights_of_the_gguf_package(block_type: int) -> None:
    # More blocks than one thread takes at a time. Scales are any finite float16.
    blocks = np.random.default_rng(block_type).integers(0, 256, (20000, BLOCK_BYTES[block_type]), dtype=np.uint8)
    blocks[:, [1, 3]] &= 0xBB
    expected = dequantize(blocks, gguf.GGMLQuantizationType(block_type))
    out = torch.empty(20000, 32)
    kernels.dequantize(out, torch.from_numpy(blocks), block_type)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_what_does_not_fit_is_refused() -> None:
    out, blocks = torch.empty(2, 32), torch.zeros(2, 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block_type 12 is not supported"):
        kernels.dequantize(out, blocks, 12)
    with pytest.raises(ValueError, match="40 bytes of blocks of 20 bytes do not fill 32 weights"):
        kernels.dequantize(out[:1], blocks, 3)
    with pytest.raises(TypeError, match="out must be float32"):
        kernels.dequantize(out.double(), blocks, 3)
    with pytest.raises(ValueError, match="must be contiguous"):
        kernels.dequantize(out.T, blocks, 3)
