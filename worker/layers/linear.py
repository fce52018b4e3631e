"""Matrix products cut over a tensor-parallel group, on weights packed for the native kernels."""

from __future__ import annotations

import torch

from worker.kernels.linear import PackedGateUp, PackedLinear
from worker.kernels.program import Program
from worker.layers.context import LayerContext
from worker.loader import WeightReader


class ColumnParallelLinear:
    """Products of one input with several weights side by side; each rank computes its part of every output.

    Args:
        out_features: name of each weight below the layer's prefix, to its whole number of output features.
        has_bias: whether each weight has a bias.
    """

    def __init__(
        self, out_features: dict[str, int], in_features: int, context: LayerContext, *, has_bias: bool = False
    ) -> None:
        self._whole = out_features
        self._in_features = in_features
        self._context = context
        self._has_bias = has_bias
        self.out_features = sum(context.share(count, f"output features of {n}") for n, count in out_features.items())

    def _take(self, weights: WeightReader, prefix: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank, size = self._context.rank, self._context.size
        parts, biases = [], []
        for name, count in self._whole.items():
            key = f"{prefix}.{name}"
            shape = (count, self._in_features)
            parts.append(weights.take(f"{key}.weight", shape, shard_dim=0, rank=rank, size=size))
            if self._has_bias:
                biases.append(weights.take(f"{key}.bias", (count,), shard_dim=0, rank=rank, size=size))
        return torch.cat(parts), torch.cat(biases) if biases else None

    def load(self, weights: WeightReader, prefix: str) -> None:
        """Take and pack this rank's weights."""
        self._packed = PackedLinear(*self._take(weights, prefix))

    @property
    def num_bytes(self) -> int:
        return int(self._packed.num_bytes)

    def add_to(self, program: Program, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product of x [T, in_features] into out, [T, out_features] of this rank."""
        program.linear(self._packed, x, out)


class GateUpLinear(ColumnParallelLinear):
    """silu(x Wgate) * (x Wup): both products and the activation in one call."""

    def load(self, weights: WeightReader, prefix: str) -> None:
        """Take and pack this rank's weights."""
        self._gate_up = PackedGateUp(*self._take(weights, prefix))

    @property
    def num_bytes(self) -> int:
        return int(self._gate_up.num_bytes)

    def add_to(self, program: Program, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add both products of x [T, in_features] into out [T, intermediate_size / size]."""
        program.linear(self._gate_up, x, out)


class RowParallelLinear:
    """A product whose input is cut over the ranks; the outputs are summed over the group. Rank 0 adds the bias."""

    def __init__(
        self, name: str, in_features: int, out_features: int, context: LayerContext, *, has_bias: bool = False
    ) -> None:
        self._name = name
        self._in_features = in_features
        self._out_features = out_features
        self._context = context
        self._has_bias = has_bias
        context.share(in_features, f"input features of {name}")

    def load(self, weights: WeightReader, prefix: str) -> None:
        """Take and pack this rank's weights."""
        rank, size = self._context.rank, self._context.size
        key = f"{prefix}.{self._name}"
        weight = weights.take(
            f"{key}.weight", (self._out_features, self._in_features), shard_dim=1, rank=rank, size=size
        )
        bias = weights.take(f"{key}.bias", (self._out_features,)) if self._has_bias else None
        self._packed = PackedLinear(weight, bias if rank == 0 else None)

    @property
    def num_bytes(self) -> int:
        return int(self._packed.num_bytes)

    def add_to(self, program: Program, x: torch.Tensor, residual: torch.Tensor, partial: torch.Tensor) -> None:
        """Add the product of this rank's x [T, in_features / size], summed over the group, on top of `residual`.

        Args:
            residual: [T, out_features] float32.
            partial: likewise, this rank's summand; not used by a group of one.
        """
        if self._context.size == 1:
            program.accumulate(self._packed, x, residual)
            return
        program.linear(self._packed, x, partial)
        program.call(self._context.all_reduce, partial)
        program.call(torch.Tensor.add_, residual, partial)
