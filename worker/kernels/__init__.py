"""The Python face of the native kernels.

Every function takes its outputs preallocated and writes in place. Tensors are torch tensors on the CPU; activations are
float32, bfloat16 or float16 and sums are float32. A combination of shapes, strides and dtypes is validated when it is
first seen (TypeError or ValueError, listing what is supported) and remembered; indices that address memory (slots,
blocks, token ids, positions) are checked by the kernels in every call (ValueError).

Importing this package raises pagemill.errors.NativeLibraryError where the compiled library is missing.
"""

from worker.kernels._native import load_native

_C = load_native()

from worker.kernels.attention import (  # noqa: E402
    copy_blocks,
    paged_attention,
    rope_and_store,
    rotary_embedding,
    store_kv,
)
from worker.kernels.elementwise import (  # noqa: E402
    embedding,
    fused_add_rms_norm,
    gather_rows,
    gelu_and_mul,
    rms_norm,
    silu_and_mul,
)
from worker.kernels.platform import (  # noqa: E402
    best_cpu_isa,
    cpu_isa,
    num_threads,
    set_cpu_isa,
    set_num_threads,
)
from worker.kernels.quantization import dequantize  # noqa: E402
from worker.kernels.sampling import SamplingBatch, sample, token_logprobs  # noqa: E402

__all__ = [
    "SamplingBatch",
    "best_cpu_isa",
    "copy_blocks",
    "cpu_isa",
    "dequantize",
    "embedding",
    "fused_add_rms_norm",
    "gather_rows",
    "gelu_and_mul",
    "num_threads",
    "paged_attention",
    "rms_norm",
    "rope_and_store",
    "rotary_embedding",
    "sample",
    "set_cpu_isa",
    "set_num_threads",
    "silu_and_mul",
    "store_kv",
    "token_logprobs",
]
