"""`pagemill bench throughput` as a script: the same options, the same rows.

    python benchmarks/throughput_benchmark.py --model MODEL --input-len 512 --output-len 256 --num-prompts 1000 \
        --batch-sizes 1 2 4 8 16 --csv output.csv

Other engines of the same run: `--backend offline,http,grpc --serve`, `--peer transformers`. `--help` lists all options,
docs/benchmarks.md says how each figure is taken.
"""

from __future__ import annotations

import sys

from pagemill.cli import main

if __name__ == "__main__":
    main(["bench", "throughput", *sys.argv[1:]])
