"""Matrix products cut over a tensor-parallel group, on weights held as the device multiplies them."""

from __future__ import annotations

import torch

from worker.kernels.execution import AnyProgram
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
        def stack(suffix: str, shape: tuple[int, ...]) -> torch.Tensor:
            shapes = {f"{prefix}.{name}.{suffix}": (count, *shape) for name, count in self._whole.items()}
            return weights.stack(shapes, shard_dim=0, rank=self._context.rank, size=self._context.size)

        return stack("weight", (self._in_features,)), stack("bias", ()) if self._has_bias else None

    def load(self, weights: WeightReader, prefix: str) -> None:
        """Take this rank's weights."""
        self._weight = self._context.execution.linear(*self._take(weights, prefix))

    @property
    def num_bytes(self) -> int:
        return int(self._weight.num_bytes)

    def add_to(self, program: AnyProgram, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product of x [T, in_features] into out, [T, out_features] of this rank."""
        program.linear(self._weight, x, out)


class GateUpLinear(ColumnParallelLinear):
    """silu(x Wgate) * (x Wup): both products and the activation in one call."""

    def load(self, weights: WeightReader, prefix: str) -> None:
        """Take this rank's weights."""
        self._gate_up = self._context.execution.gate_up(*self._take(weights, prefix))

    @property
    def num_bytes(self) -> int:
        return int(self._gate_up.num_bytes)

    def add_to(self, program: AnyProgram, x: torch.Tensor, out: torch.Tensor) -> None:
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
        """Take this rank's weights."""
        rank, size = self._context.rank, self._context.size
        key = f"{prefix}.{self._name}"
        weight = weights.take(
            f"{key}.weight", (self._out_features, self._in_features), shard_dim=1, rank=rank, size=size
        )
        bias = weights.take(f"{key}.bias", (self._out_features,)) if self._has_bias else None
        self._weight = self._context.execution.linear(weight, bias if rank == 0 else None)

    @property
    def num_bytes(self) -> int:
        return int(self._weight.num_bytes)

    def add_to(
        self,
        program: AnyProgram,
        x: torch.Tensor,
        residual: torch.Tensor,
        partial: torch.Tensor,
        normed: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
    ) -> None:
        """Add the product of this rank's x [T, in_features / size], summed over the group, on top of `residual`.

        Args:
            residual: [T, out_features] float32.
            partial: likewise, this rank's summand; not used by a group of one.
            normed: [T, out_features], receives the residual normed with weight `norm`.
        """
        if self._context.size == 1:
            program.accumulate_and_norm(self._weight, x, residual, normed, norm, epsilon)
            return
        program.linear(self._weight, x, partial)
        program.call(self._context.all_reduce, partial)
        program.fused_add_rms_norm(normed, partial, residual, norm, epsilon)
