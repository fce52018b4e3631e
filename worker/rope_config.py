"""Rotary position embedding parameters, read from either spelling that model configs use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.errors import ModelLoadError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become rotations.

    Attributes:
        rope_type: one of SUPPORTED_ROPE_TYPES.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated.
        factor: context extension; 1 where there is none.
        max_position_embeddings: the config's own value.
        original_max_position_embeddings: positions seen in pre-training.
        max_positions: longest sequence that the scaling allows, see `derived_max_positions`.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    factor: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    max_positions: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def derived_max_positions(rope_type: str, max_position_embeddings: int, original: int | None, factor: float) -> int:
    """The longest sequence, in tokens.

    - default and llama3: max_position_embeddings; for llama3 it already counts the extension.
    - linear, dynamic, yarn: original_max_position_embeddings x factor, where a config without the original length means
      max_position_embeddings by it. A config whose max_position_embeddings already is the extended length therefore has
      to name the original one, as yarn configs do; then the length is not multiplied twice.
    """
    if rope_type in ("linear", "dynamic", "yarn"):
        return int((original or max_position_embeddings) * factor)
    return max_position_embeddings


def parse_rope(config: Mapping[str, Any], head_size: int, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`, with `rope_type` or `type` in either.

    Raises:
        ModelLoadError: unsupported type, or a parameter that is missing or no number.
    """
    section: dict[str, Any] = {}
    where = "rope_parameters"
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"config.json: {key} must be an object, got {value!r}", field=key)
        section.update(value)
        where = key
    if any(isinstance(v, Mapping) for v in section.values()):
        raise ModelLoadError(f"config.json: {where} per layer type is not supported", field=where)
    rope_type = section.get("rope_type") or section.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise ModelLoadError(
            f"config.json: rope type {rope_type!r} is not supported; supported: {supported}", field=where
        )

    def number(name: str, default: float | None = None) -> float:
        value = section.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelLoadError(f"config.json: {where}.{name} must be a positive number, got {value!r}", field=where)
        return float(value)

    theta = number("rope_theta", float(config.get("rope_theta") or 10000.0))
    partial = number("partial_rotary_factor", float(config.get("partial_rotary_factor") or 1.0))
    original = section.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original is not None:
        original = int(original)
    if rope_type == "default":
        factor = 1.0
    elif rope_type == "yarn" and section.get("factor") is None and original:
        factor = max_position_embeddings / original
    else:
        factor = number("factor")
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        rotary_dim=int(head_size * partial),
        factor=factor,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original or max_position_embeddings,
        max_positions=derived_max_positions(rope_type, max_position_embeddings, original, factor),
        attention_factor=section.get("attention_factor"),
        mscale=section.get("mscale"),
        mscale_all_dim=section.get("mscale_all_dim"),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(section.get("truncate", True)),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
    )
