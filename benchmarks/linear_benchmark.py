"""Matrix products on packed weights beside torch's, and beside what the machine can do.

    python benchmarks/linear_benchmark.py [--threads 2] [--dtype bfloat16] [--rows 1,4,16,64,256] [--shapes 3072x576]
    python benchmarks/linear_benchmark.py --contention

For each shape enough copies of the weight are cycled through that they come from memory as in a model. Ours and torch's
calls alternate, so that other work on the machine meets both. `peak` is the bf16 product instruction alone, measured in
the same run, times the threads; `bandwidth` is a plain read of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from worker import kernels
from worker.kernels import _C
from worker.kernels.linear import PackedGateUp, PackedLinear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 4096))
ROW_COUNTS = (1, 4, 16, 64, 256, 1024)
WEIGHT_BYTES = 192 << 20
SECONDS_PER_CELL = 0.4


def timed(product: Callable[[int], None], count: int) -> float:
    """Seconds of one product, averaged over `count` weights in turn."""
    begin = time.perf_counter()
    for index in range(count):
        product(index)
    return (time.perf_counter() - begin) / count


def alternate(first: Callable[[int], None], second: Callable[[int], None], count: int) -> tuple[float, float]:
    """Median seconds of one product of each, taken in turns."""
    first_s, second_s = [], []
    deadline = time.perf_counter() + SECONDS_PER_CELL
    while len(first_s) < 3 or time.perf_counter() < deadline:
        first_s.append(timed(first, count))
        second_s.append(timed(second, count))
    return sorted(first_s)[len(first_s) // 2], sorted(second_s)[len(second_s) // 2]


def measure_shape(out_features: int, in_features: int, dtype: torch.dtype, row_counts: list[int]) -> None:
    weight_bytes = out_features * in_features * dtype.itemsize
    copies = max(2, WEIGHT_BYTES // weight_bytes)
    weight = torch.randn(out_features, in_features).to(dtype)
    packed = [PackedLinear(weight) for _ in range(copies)]
    plain = [weight.clone() for _ in range(copies)]
    bandwidth = _C.probe_read_bandwidth(min(copies * weight_bytes, WEIGHT_BYTES), 5)
    peak = _C.probe_bf16_peak() * kernels.num_threads() if dtype == torch.bfloat16 else 0.0
    for num_rows in row_counts:
        x = torch.randn(num_rows, in_features).to(dtype)
        out, torch_out = torch.empty(2, num_rows, out_features, dtype=dtype)
        ours_s, torch_s = alternate(
            lambda index, x=x, out=out: packed[index](x, out),
            lambda index, x=x, out=torch_out: torch.mm(x, plain[index].T, out=out),
            copies if num_rows <= 64 else max(2, copies // 8),
        )
        operations = 2 * num_rows * out_features * in_features
        share = f"{operations / ours_s / peak:6.0%}" if peak else "     -"
        print(
            f"{out_features:6}x{in_features:<5} {num_rows:5} {ours_s * 1e6:10.1f} {operations / ours_s / 1e9:9.0f} "
            f"{share} {weight_bytes / ours_s / 1e9:7.1f} {weight_bytes / ours_s / bandwidth:9.0%} "
            f"{torch_s * 1e6:10.1f} {torch_s / ours_s:7.1f}x",
            flush=True,
        )


def measure_gate_up(dtype: torch.dtype, row_counts: list[int]) -> None:
    """The gated MLP's first half as one call, beside the product and the activation as two."""
    print("\nsilu(gate) * up, 2 x 1536 x 576: one call beside two")
    weight = torch.randn(3072, 576).to(dtype)
    copies = WEIGHT_BYTES // weight.nbytes
    fused = [PackedGateUp(weight) for _ in range(copies)]
    plain = [PackedLinear(weight) for _ in range(copies)]
    for num_rows in row_counts:
        x = torch.randn(num_rows, 576).to(dtype)
        gate_up, out = torch.empty(num_rows, 3072, dtype=dtype), torch.empty(num_rows, 1536, dtype=dtype)

        def two_calls(
            index: int, x: torch.Tensor = x, gate_up: torch.Tensor = gate_up, out: torch.Tensor = out
        ) -> None:
            plain[index](x, gate_up)
            kernels.silu_and_mul(out, gate_up)

        one_s, two_s = alternate(lambda index, x=x, out=out: fused[index](x, out), two_calls, copies)
        print(
            f"rows {num_rows:5}  one {one_s * 1e6:8.1f} us  two {two_s * 1e6:8.1f} us  {two_s / one_s:5.2f}x",
            flush=True,
        )


def repeated_ms(step: Callable[[], None]) -> list[float]:
    """Milliseconds of each of up to 200 runs within four seconds, ascending."""
    times_ms: list[float] = []
    deadline = time.perf_counter() + 4
    while len(times_ms) < 200 and (time.perf_counter() < deadline or len(times_ms) < 3):
        times_ms.append(timed(lambda _: step(), 1) * 1e3)
    return sorted(times_ms)


def measure_contention(dtype: torch.dtype) -> None:
    """The products of one decode step of a 30-layer model, with and without a busy process on the last core."""
    print("\none decode step of 30 layers (hidden 576), ms: median and 99th percentile")
    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    packed = [PackedLinear(weight) for weight in weights]
    inputs = [torch.randn(1, in_features).to(dtype) for _, in_features in shapes]
    outs = [torch.empty(1, out_features, dtype=dtype) for out_features, _ in shapes]

    def ours() -> None:
        for product, x, out in zip(packed, inputs, outs, strict=True):
            product(x, out)

    def of_torch() -> None:
        for weight, x, out in zip(weights, inputs, outs, strict=True):
            torch.mm(x, weight.T, out=out)

    last_core = max(os.sched_getaffinity(0))
    for situation in ("quiet", "competitor"):
        busy = f"import os\nos.sched_setaffinity(0, {{{last_core}}})\nwhile True: pass"
        competitor = subprocess.Popen([sys.executable, "-c", busy]) if situation == "competitor" else None
        try:
            for num_threads in range(1, len(os.sched_getaffinity(0)) + 1):
                kernels.set_num_threads(num_threads)
                torch.set_num_threads(num_threads)
                for name, step in (("pagemill", ours), ("torch", of_torch)):
                    times_ms = repeated_ms(step)
                    median, late = times_ms[len(times_ms) // 2], times_ms[len(times_ms) * 99 // 100]
                    print(f"{situation:10} {num_threads} threads {name:8} {median:8.2f} {late:8.2f}", flush=True)
        finally:
            if competitor is not None:
                competitor.kill()
                competitor.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rows", default=",".join(map(str, ROW_COUNTS)), help="rows of x, comma-separated")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="out x in, comma-separated")
    parser.add_argument("--contention", action="store_true", help="only measure beside a busy process")
    arguments = parser.parse_args()
    kernels.set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    if arguments.contention:
        measure_contention(dtype)
        return
    row_counts = [int(rows) for rows in arguments.rows.split(",")]

    print(f"{kernels.cpu_isa()}, {arguments.threads} threads, {arguments.dtype}, torch {torch.__version__}")
    print(
        f"{'out x in':>12} {'rows':>5} {'us':>10} {'GFLOP/s':>9} {'peak':>6} {'GB/s':>7} bandwidth   torch us   faster"
    )
    for shape in arguments.shapes.split(","):
        out_features, in_features = map(int, shape.split("x"))
        measure_shape(out_features, in_features, dtype, row_counts)
    measure_gate_up(dtype, row_counts)


if __name__ == "__main__":
    main()
