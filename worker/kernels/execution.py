"""How a device holds weights and runs passes: packed weights and native calls on a CPU, launches elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.kernels.device_linear import DeviceGateUp, DeviceLinear
from worker.kernels.launch_program import LaunchProgram
from worker.kernels.linear import PackedGateUp, PackedLinear
from worker.kernels.program import Program

AnyLinear = PackedLinear | DeviceLinear
AnyGateUp = PackedGateUp | DeviceGateUp
AnyProgram = Program | LaunchProgram


class Execution(Protocol):
    """Makes holders of weights, and programs that take them."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> AnyLinear:
        """Hold [out_features, in_features] and a bias [out_features]. Raises ValueError."""

    def gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> AnyGateUp:
        """Hold [2 * out_features, in_features], gate above up, and a bias likewise. Raises ValueError."""

    def program(self, max_tokens: int, rot_dim: int) -> AnyProgram:
        """An empty program for steps of up to max_tokens, whose cos_sin has rot_dim columns."""


class NativeExecution:
    """Weights packed for the CPU's instruction set, and passes that are one native call."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, bias)

    def gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedGateUp:
        return PackedGateUp(weight, bias)

    def program(self, max_tokens: int, rot_dim: int) -> Program:
        return Program(max_tokens, rot_dim)


class LaunchExecution:
    """Weights as they lie on a device, and passes that are launches from Python. Works on a CPU too, slowly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            # Its own choice of kernels was 2 % faster in steps of 64 rows; elsewhere nothing stood out of the noise.
            torch.backends.cuda.preferred_blas_library("cublaslt")

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceLinear:
        return DeviceLinear(weight, bias)

    def gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceGateUp:
        return DeviceGateUp(weight, bias)

    def program(self, max_tokens: int, rot_dim: int) -> LaunchProgram:
        return LaunchProgram(max_tokens, rot_dim, self._device)


def execution_for(device: torch.device) -> Execution:
    """What suits a device."""
    return NativeExecution() if device.type == "cpu" else LaunchExecution(device)
