"""Rotary position embedding: frequencies of each scaling rule and the cos/sin table that the kernel reads."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.batch import StepBatch
from worker.layers.row_upload import make_upload
from worker.rope_config import RopeConfig
from worker.slots import IntArray


def _frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return 1.0 / (theta**exponents)


def _yarn(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Interpolates low frequencies, keeps high ones, ramps between, and scales attention up a little."""

    def rotations_to_dim(rotations: float) -> float:
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    low, high = rotations_to_dim(rope.beta_fast), rotations_to_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _frequencies(rope.theta, rope.rotary_dim)
    inverse = (plain / rope.factor) * ramp + plain * (1 - ramp)
    if rope.attention_factor is not None:
        return inverse, float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return inverse, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return inverse, magnitude(1.0)


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Divides frequencies with long wavelengths by the factor and blends between two wavelength bounds."""
    plain = _frequencies(rope.theta, rope.rotary_dim)
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, smooth)
    return torch.where(wavelength < original / rope.high_freq_factor, plain, scaled)


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Frequencies [rotary_dim / 2] in float32 and the factor on cos and sin. For dynamic: those of short sequences."""
    if rope.rope_type == "yarn":
        return _yarn(rope)
    if rope.rope_type == "llama3":
        return _llama3(rope), 1.0
    plain = _frequencies(rope.theta, rope.rotary_dim)
    return (plain / rope.factor if rope.rope_type == "linear" else plain), 1.0


def cos_sin_table(rope: RopeConfig, num_positions: int, divisors: torch.Tensor | None = None) -> torch.Tensor:
    """cos then sin of every position, float32 [num_positions, rotary_dim]; `divisors` divide the frequencies."""
    inverse, scale = inverse_frequencies(rope)
    if divisors is not None:
        inverse = inverse / divisors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).contiguous()


class Rope(Protocol):
    """Where a step's tokens find their cosines and sines."""

    def select(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each token, int32 [T], and the table with these rows, float32 [rows, rotary_dim], on the device."""


class TableRope:
    """One table for all sequences: a token's row is its position."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def select(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.positions, self._table


class DynamicRope:
    """Table rows per token for `dynamic` scaling, whose base depends on the length of the sequence.

    A prompt longer than max_position_embeddings is rotated with the base of its own length, and each later token with
    the base of the length at which it came; shorter ones are not scaled. The length of the prompt, not the chunk,
    decides, so chunking, batching and resumption change nothing. Keys of such prompts depend on the prompt's length,
    hence blocks of one must not be shared with a prompt of another length.

    All but the tokens of such prompts have a row in one table by position. So a step that computes none of them, as
    decode steps, reads that table at the positions in the device's memory, also when a CUDA graph replays it.

    Args:
        num_positions: rows of that table.
        max_tokens: most tokens of a step.
    """

    def __init__(self, rope: RopeConfig, num_positions: int, max_tokens: int, device: torch.device) -> None:
        self._rope = rope
        self._dim_exponent = rope.rotary_dim / (rope.rotary_dim - 2) if rope.rotary_dim > 2 else 1.0
        self._exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
        self._order = torch.arange(max_tokens, dtype=torch.int32, device=device)
        positions = np.arange(num_positions, dtype=np.int32)
        self._by_position = torch.from_numpy(self.rows(positions, np.zeros_like(positions))).to(device)
        self._upload = make_upload(max_tokens, rope.rotary_dim, device)

    def select(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        is_prompt = batch.starts < batch.prompt_lens - 1  # the last token of a prompt is at its length, as later ones
        if not (is_prompt & (batch.prompt_lens > self._rope.max_position_embeddings)).any():
            return batch.positions, self._by_position
        first_tokens = np.cumsum(batch.counts) - batch.counts
        positions = np.arange(batch.counts.sum()) + np.repeat(batch.starts - first_tokens, batch.counts)
        rows = self.rows(positions.astype(np.int32), np.repeat(batch.prompt_lens, batch.counts))
        return self._order[: len(batch.token_ids)], self._upload(rows, len(batch.token_ids))

    def rows(self, positions: IntArray, num_prompt_tokens: IntArray) -> npt.NDArray[np.float32]:
        """cos then sin per token, float32 [T, rotary_dim], from position and prompt length of each token, int32 [T]."""
        limit = self._rope.max_position_embeddings
        lengths = np.where(positions < num_prompt_tokens, num_prompt_tokens, positions + 1)
        lengths = np.maximum(lengths, limit).astype(np.float64)
        factor = self._rope.factor
        bases = self._rope.theta * (factor * lengths / limit - (factor - 1)) ** self._dim_exponent
        inverse = (1.0 / bases[:, None] ** self._exponents[None, :]).astype(np.float32)
        angles = positions[:, None].astype(np.float32) * inverse
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=1, dtype=np.float32)


def make_rope(
    rope: RopeConfig, num_positions: int, max_tokens: int, divisors: torch.Tensor | None, device: torch.device
) -> Rope:
    """The rotary tables of a model for sequences of up to num_positions and steps of up to max_tokens."""
    if rope.rope_type == "dynamic":
        return DynamicRope(rope, num_positions, max_tokens, device)
    return TableRope(cos_sin_table(rope, num_positions, divisors).to(device))
