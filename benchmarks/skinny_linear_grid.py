"""Products of few rows on CUDA beside torch's, over a grid of weight shapes: the figures behind skinny_linear_wins.

    python benchmarks/skinny_linear_grid.py [--rows 1,4,16] [--csv skinny_linear.csv] [--budget-s 60]

Each product is a CUDA graph over so many copies of the weight that they come from memory as in a model; both sides run
in the same way. `floor_share` is the time to read the weight at 4.44 TB/s over the time of ours.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from worker import kernels

OUTPUTS = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 20480, 28672)
INPUTS = (1024, 2048, 3072, 4096, 5120, 6144, 8192, 11008, 14336, 28672)
# Of Llama models: gate and up, heads.
MORE_SHAPES = ((22016, 4096), (32000, 4096), (57344, 8192), (128256, 4096), (128256, 2048))
READ_BYTES_PER_US = 4.44e6
POOL_WEIGHTS = 830_000_000
REPLAYS = 7
MAX_COPIES = 160


def graph_us(products: list[Callable[[], object]], weight_bytes: int) -> float:
    """Median µs of one product, over replays of a graph that takes a third of a millisecond or more."""
    count = max(len(products), int(350 * READ_BYTES_PER_US / weight_bytes))
    products[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in itertools.islice(itertools.cycle(products), count):
            product()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def measure(pool: torch.Tensor, num_rows: int, num_outputs: int, num_inputs: int) -> dict[str, float | int]:
    size = num_outputs * num_inputs
    copies = min(len(pool) // size, MAX_COPIES)
    weights = list(pool[: copies * size].view(copies, num_outputs, num_inputs))
    x = torch.randn(num_rows, num_inputs, device="cuda", dtype=pool.dtype)
    out = torch.empty(num_rows, num_outputs, device="cuda", dtype=pool.dtype)
    ours = [kernels.SkinnyLinear(weight) for weight in weights]
    torch_us = graph_us([lambda w=weight: functional.linear(x, w) for weight in weights], 2 * size)
    ours_us = graph_us([lambda linear=linear: linear(out, x) for linear in ours], 2 * size)
    return {
        "num_rows": num_rows,
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "ours_us": round(ours_us, 2),
        "torch_us": round(torch_us, 2),
        "torch_over_ours": round(torch_us / ours_us, 3),
        "floor_share": round(2 * size / READ_BYTES_PER_US / ours_us, 3),
        "wins": int(ours[0].wins(num_rows)),
    }


def shapes() -> Iterator[tuple[int, int]]:
    yield from itertools.product(OUTPUTS, INPUTS)
    yield from MORE_SHAPES


def show(rows: list[dict[str, float | int]]) -> None:
    """torch's time over ours, a table for each number of rows; * where the rule chooses ours."""
    for num_rows, group in itertools.groupby(rows, lambda row: row["num_rows"]):
        cells = {(row["num_outputs"], row["num_inputs"]): row for row in group}
        print(f"torch over ours, {num_rows} rows\n{'':7}" + "".join(f"{size:>7}" for size in INPUTS))
        for num_outputs in sorted({outputs for outputs, _ in cells}):
            line = [cells.get((num_outputs, num_inputs)) for num_inputs in INPUTS]
            texts = [f"{row['torch_over_ours']:.2f}{'*' if row['wins'] else ' '}" if row else "" for row in line]
            print(f"{num_outputs:7}" + "".join(f"{text:>7}" for text in texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16", help="numbers of rows")
    parser.add_argument("--csv", help="write every cell here")
    parser.add_argument("--budget-s", type=float, default=60, help="stop after so many seconds")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s
    pool = torch.empty(POOL_WEIGHTS, device="cuda", dtype=torch.bfloat16).normal_()
    rows = []
    for num_rows in map(int, args.rows.split(",")):
        for num_outputs, num_inputs in shapes():
            if time.monotonic() < deadline:
                rows.append(measure(pool, num_rows, num_outputs, num_inputs))
    show(rows)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(
                file, [name for name in rows[0] if name != "wins"], extrasaction="ignore", lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
