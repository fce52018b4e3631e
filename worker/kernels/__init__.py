"""The Python face of the native kernels.

Every function takes its outputs preallocated and writes in place. Tensors are torch tensors on the CPU or on one CUDA
device, where a kernel is launched on the current stream; activations are float32, bfloat16 or float16 and sums are
float32. A combination of shapes, strides, dtypes and devices is validated when it is first seen (TypeError or
ValueError, listing what is supported) and remembered. Indices that address memory (slots, blocks, token ids, positions)
are checked by the CPU kernels in every call (ValueError) and by debug builds of the CUDA kernels.

Importing this package raises pagemill.errors.NativeLibraryError where the compiled library is missing.
"""

from worker.kernels._native import load_native

_C = load_native()

from worker.kernels.attention import (  # noqa: E402
    merge_attention,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
)
from worker.kernels.attention_plan import AttentionGeometry, AttentionPlan, plan_attention  # noqa: E402
from worker.kernels.elementwise import (  # noqa: E402
    embedding,
    fused_add_rms_norm,
    gather_rows,
    gelu_and_mul,
    rms_norm,
    silu_and_mul,
)
from worker.kernels.kv_cache import (  # noqa: E402
    copy_blocks,
    rope_and_store,
    rotary_embedding,
    store_kv,
    swap_blocks,
)
from worker.kernels.platform import (  # noqa: E402
    best_cpu_isa,
    cpu_isa,
    cuda_devices,
    num_threads,
    set_cpu_isa,
    set_num_threads,
)
from worker.kernels.quantization import dequantize  # noqa: E402
from worker.kernels.sampling import SamplingBatch, sample, sampling_workspace, token_logprobs  # noqa: E402
from worker.kernels.skinny_linear import SkinnyLinear, skinny_linear  # noqa: E402
from worker.kernels.step import prepare_step, scatter  # noqa: E402

__all__ = [
    "AttentionGeometry",
    "AttentionPlan",
    "SamplingBatch",
    "SkinnyLinear",
    "best_cpu_isa",
    "copy_blocks",
    "cpu_isa",
    "cuda_devices",
    "dequantize",
    "embedding",
    "fused_add_rms_norm",
    "gather_rows",
    "gelu_and_mul",
    "merge_attention",
    "num_threads",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "plan_attention",
    "prepare_step",
    "rms_norm",
    "rope_and_store",
    "rotary_embedding",
    "sample",
    "sampling_workspace",
    "scatter",
    "set_cpu_isa",
    "set_num_threads",
    "silu_and_mul",
    "skinny_linear",
    "store_kv",
    "swap_blocks",
    "token_logprobs",
]
