"""Attention on the CPU beside what the machine can do: decode beside its read bandwidth, prefill beside its products.

    python benchmarks/cpu_attention.py [--threads 2] [--repeats 10] [--kv-dtype bfloat16] [--only decode]
        [--out rows.jsonl]

Decode reads more keys and values than the caches hold, from KV pages in random order; beside it a plain read of as
many bytes. The KV pool is made as the worker makes it, in memory pages of 2 MB where the system has them, and once more
in pages of 4 KB to show what these cost. Prefill stands beside torch's bfloat16 product of 2048 x 2048 x 2048 and
beside Pagemill's own. Runs alternate, so that other work on the machine meets all; a figure is the best of its runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from worker import kernels
from worker.device import pick_device
from worker.kernels import _C
from worker.kernels.linear import PackedLinear
from worker.kv_cache import KVSpec, allocate_cache

BLOCK_SIZE = 16
KV_DTYPES = {"bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PRODUCT_SIZE = 2048

Pool = Callable[["Case", int, torch.dtype], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    name: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    num_seqs: int
    context: int
    num_new: int

    @property
    def kv_numbers(self) -> int:
        return 2 * self.num_seqs * self.context * self.num_kv_heads * self.head_size

    @property
    def operations(self) -> int:
        pairs = sum(range(self.context - self.num_new + 1, self.context + 1)) * self.num_seqs
        return 4 * pairs * self.num_query_heads * self.head_size


DECODE = (Case("decode 32/8 x 128", 32, 8, 128, 64, 4096, 1), Case("decode 9/3 x 64", 9, 3, 64, 64, 16384, 1))
PREFILL = tuple(
    Case(f"prefill {heads[0]}/{heads[1]} x {heads[2]}", *heads, 1, tokens, tokens)
    for heads in ((32, 8, 128), (9, 3, 64))
    for tokens in (2048, 8192)
)


def worker_pool(case: Case, num_blocks: int, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    spec = KVSpec(num_layers=1, num_kv_heads=case.num_kv_heads, head_size=case.head_size)
    cache = allocate_cache(spec, kv_dtype, BLOCK_SIZE, num_blocks, pick_device("cpu"))
    return [cache.keys[0], cache.values[0]]


def small_page_pool(case: Case, num_blocks: int, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """Torch asks for no huge pages, which the system gives by default to those who ask."""
    return [torch.empty(num_blocks, case.num_kv_heads, BLOCK_SIZE, case.head_size, dtype=kv_dtype) for _ in range(2)]


def attention_call(case: Case, kv_dtype: torch.dtype, make_pool: Pool = worker_pool) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    blocks_per_seq = -(-case.context // BLOCK_SIZE)
    num_blocks = case.num_seqs * blocks_per_seq
    page = torch.randn(64, case.num_kv_heads, BLOCK_SIZE, case.head_size, generator=generator).to(kv_dtype)
    caches = make_pool(case, num_blocks, kv_dtype)
    # Copied as bytes: torch's CPU operations know few 8-bit types.
    for cache in caches:
        for first in range(0, num_blocks, len(page)):
            part = cache[first : first + len(page)].view(torch.uint8)
            part.copy_(page[: len(part)].view(torch.uint8))
    tables = torch.randperm(num_blocks, generator=generator).int().view(case.num_seqs, blocks_per_seq)
    num_tokens = case.num_seqs * case.num_new
    query = torch.randn(num_tokens, case.num_query_heads, case.head_size, generator=generator).bfloat16()
    out = torch.empty_like(query)
    query_start = torch.arange(0, num_tokens + 1, case.num_new, dtype=torch.int32)
    lens = torch.full((case.num_seqs,), case.context, dtype=torch.int32)
    return lambda: kernels.paged_attention(
        out, query, *caches, tables, None, query_start, lens, 1 / math.sqrt(case.head_size)
    )


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def decode_row(case: Case, kv_dtype: torch.dtype, repeats: int) -> dict[str, object]:
    calls = [attention_call(case, kv_dtype, make_pool) for make_pool in (worker_pool, small_page_pool)]
    num_bytes = case.kv_numbers * kv_dtype.itemsize
    for call in calls:
        call()
    rates: list[list[float]] = [[], []]
    reads = []
    for _ in range(repeats):
        reads.append(_C.probe_read_bandwidth(num_bytes, 2))
        for call, call_rates in zip(calls, rates, strict=True):
            call_rates.extend(num_bytes / seconds(call) for _ in range(2))
    return {
        "case": case.name,
        "kv_bytes": num_bytes,
        "gb_per_s": round(max(rates[0]) / 1e9, 2),
        "small_pages_gb_per_s": round(max(rates[1]) / 1e9, 2),
        "read_gb_per_s": round(max(reads) / 1e9, 2),
        "share_of_read": round(max(rates[0]) / max(reads), 3),
    }


def prefill_row(case: Case, kv_dtype: torch.dtype, repeats: int) -> dict[str, object]:
    call = attention_call(case, kv_dtype)
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).bfloat16() for _ in range(2))
    packed, product = PackedLinear(b), torch.empty_like(a)
    candidates = {"torch": lambda: torch.mm(a, b), "linear": lambda: packed(a, product)}
    call()
    best = dict.fromkeys(candidates, 0.0)
    rate = 0.0
    for _ in range(repeats):
        for name, candidate in candidates.items():
            best[name] = max(best[name], *(2 * PRODUCT_SIZE**3 / seconds(candidate) for _ in range(3)))
        rate = max(rate, *(case.operations / seconds(call) for _ in range(3)))
    return {
        "case": case.name,
        "tokens": case.context,
        "gflop_per_s": round(rate / 1e9),
        "torch_product_gflop_per_s": round(best["torch"] / 1e9),
        "own_product_gflop_per_s": round(best["linear"] / 1e9),
        "share_of_torch_product": round(rate / best["torch"], 3),
        "share_of_own_product": round(rate / best["linear"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--out", type=Path, help="file that rows are appended to, one JSON object a line")
    arguments = parser.parse_args()
    kernels.set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    kv_dtype = KV_DTYPES[arguments.kv_dtype]
    common = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{kernels.cpu_isa()}, {arguments.threads} threads",
        "command": shlex.join(["python", "benchmarks/cpu_attention.py", *sys.argv[1:]]),
        "kv_dtype": arguments.kv_dtype,
    }
    for kind, cases, make_row in (("decode", DECODE, decode_row), ("prefill", PREFILL, prefill_row)):
        if arguments.only not in (None, kind):
            continue
        for case in cases:
            row = common | make_row(case, kv_dtype, arguments.repeats)
            print(json.dumps({key: row[key] for key in row if key not in common}), flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
