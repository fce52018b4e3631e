"""Weights from files: safetensors, pytorch_model.bin (sharded or not), GGUF, or random ones.

A source answers by Hugging Face tensor name. `WeightReader` stands between a source and a model: it checks shapes, cuts
the shard of a tensor-parallel rank, casts, puts it on the device, and knows at the end which tensors nobody asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from pagemill.errors import ModelLoadError
from pagemill.model_source import ModelSource
from worker.device import dtype_name
from worker.weight_placement import WeightPart, placement_for

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_SHARD_FILE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
# Tensors that checkpoints carry but models compute.
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")


class WeightSource(Protocol):
    """Where tensors come from."""

    @property
    def files(self) -> list[Path]:
        """The files that are read."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of `read` lie."""

    def names(self) -> set[str]:
        """Names of all tensors."""

    def location(self, name: str) -> str:
        """The file that holds a tensor, or would, for messages."""

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """The part at `index` of a tensor whose whole shape is `shape`; from any thread. Raises ModelLoadError."""


def _check_shape(file: Path, name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if actual != expected:
        raise ModelLoadError(f"{file}: tensor {name} has shape {list(actual)}, expected {list(expected)}")


class SafetensorsSource:
    """Tensors of safetensors files, mapped into memory; `assignment` maps each tensor to its file."""

    device = _CPU

    def __init__(self, files: list[Path], assignment: dict[str, Path] | None) -> None:
        self.files = files
        self._handles = {file: self._open(file) for file in files}
        held = {file: set(handle.keys()) for file, handle in self._handles.items()}
        if assignment is None:
            assignment = _merge({file: held[file] for file in files})
        for name, file in assignment.items():
            if name not in held[file]:
                raise ModelLoadError(f"{file}: tensor {name} is missing, but the index assigns it to this file")
        _warn_stale_tensors(held, assignment)
        self._assignment = assignment

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safetensors.safe_open(file, framework="pt")
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{file}: not a complete safetensors file ({error})") from error

    def names(self) -> set[str]:
        return set(self._assignment)

    def location(self, name: str) -> str:
        return str(self._assignment.get(name, self.files[0]))

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        file = self._assignment[name]
        try:
            part = self._handles[file].get_slice(name)
            _check_shape(file, name, tuple(part.get_shape()), shape)
            tensor: torch.Tensor = part[index]
        except safetensors.SafetensorError as error:
            raise ModelLoadError(f"{file}: tensor {name} cannot be read ({error})") from error
        return tensor


class TorchFileSource:
    """Tensors of pytorch_model.bin files, mapped into memory and read with the weights-only unpickler."""

    device = _CPU

    def __init__(self, files: list[Path], assignment: dict[str, Path] | None) -> None:
        self.files = files
        self._states = {file: self._load(file) for file in files}
        held = {file: set(state) for file, state in self._states.items()}
        if assignment is None:
            assignment = _merge({file: held[file] for file in files})
        for name, file in assignment.items():
            if name not in held[file]:
                raise ModelLoadError(f"{file}: tensor {name} is missing, but the index assigns it to this file")
        _warn_stale_tensors(held, assignment)
        self._assignment = assignment

    @staticmethod
    def _load(file: Path) -> dict[str, torch.Tensor]:
        try:
            try:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler raises many kinds for a broken file
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelLoadError(f"{file}: not a complete PyTorch weight file ({first_line})") from error
        if not isinstance(state, dict):
            raise ModelLoadError(f"{file}: holds a {type(state).__name__}, expected a dictionary of tensors")
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}

    def names(self) -> set[str]:
        return set(self._assignment)

    def location(self, name: str) -> str:
        return str(self._assignment.get(name, self.files[0]))

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        file = self._assignment[name]
        tensor = self._states[file][name]
        _check_shape(file, name, tuple(tensor.shape), shape)
        return tensor[index]


class DummySource:
    """Random weights: each tensor drawn from (seed, its name) and the kind of device, whatever is read before it.

    Norm weights are 1. It holds every name that a model asks for, except a separate head of a model whose config ties
    it. Tensors are drawn on `device`, whose generator has numbers of its own.
    """

    def __init__(self, seed: int, absent: frozenset[str], device: torch.device) -> None:
        self.files: list[Path] = []
        self.device = device
        self._seed = seed
        self._absent = absent

    def names(self) -> set[str]:
        return set()

    def holds(self, name: str) -> bool:
        return name not in self._absent

    def location(self, name: str) -> str:
        return "random weights"

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=self.device)[index]
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        return torch.empty(shape, device=self.device).normal_(0.0, 0.02, generator=generator)[index]


class WeightReader:
    """What a model loads from: checked, cut to a rank's shard, cast to the worker's dtype, on the worker's device.

    Tensors on a CUDA device are filled by threads: their content, and errors of reading, come with `finish`.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device = _CPU) -> None:
        self._source = source
        self._names = source.names()
        self._taken: set[str] = set()
        self._placement = placement_for(dtype, device)
        self.dtype = dtype
        # Checkpoints of the bare decoder lack the leading "model."
        bare = "embed_tokens.weight" in self._names and "model.embed_tokens.weight" not in self._names
        self._strip = "model." if bare else ""

    def _stored_name(self, name: str) -> str:
        return name.removeprefix(self._strip)

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        if isinstance(self._source, DummySource):
            return self._source.holds(name)
        return self._stored_name(name) in self._names

    def take(
        self, name: str, shape: tuple[int, ...], *, shard_dim: int | None = None, rank: int = 0, size: int = 1
    ) -> torch.Tensor:
        """Part `rank` of a tensor of whole shape `shape`, cut into `size` equal parts along shard_dim.

        Raises:
            ModelLoadError: missing, wrong shape, or not divisible.
        """
        return self.stack({name: shape}, shard_dim=shard_dim, rank=rank, size=size)

    def stack(
        self, shapes: dict[str, tuple[int, ...]], *, shard_dim: int | None = None, rank: int = 0, size: int = 1
    ) -> torch.Tensor:
        """Parts `rank` of several tensors, given by name and whole shape, one below the other in one tensor.

        Raises:
            ModelLoadError: as for `take`.
        """
        parts = [self._part(name, shape, shard_dim, rank, size) for name, shape in shapes.items()]
        return self._placement.place(self._source, parts)

    def _part(self, name: str, shape: tuple[int, ...], shard_dim: int | None, rank: int, size: int) -> WeightPart:
        stored = self._stored_name(name)
        if not self.holds(name):
            raise ModelLoadError(f"{self._source.location(stored)}: tensor {stored} is missing from the checkpoint")
        self._taken.add(stored)
        index, part_shape = [slice(None)] * len(shape), list(shape)
        if shard_dim is not None and size > 1:
            if shape[shard_dim] % size:
                raise ModelLoadError(f"tensor {stored}: dimension {shape[shard_dim]} does not divide into {size} ranks")
            part = part_shape[shard_dim] = shape[shard_dim] // size
            index[shard_dim] = slice(rank * part, (rank + 1) * part)
        return WeightPart(stored, shape, tuple(index), tuple(part_shape))

    def finish(self) -> None:
        """Wait until every tensor that was taken has its content.

        Raises:
            ModelLoadError: one cannot be read; names it.
        """
        self._placement.finish()

    def warn_unused(self) -> None:
        """Log the tensors that no layer asked for."""
        unused = sorted(n for n in self._names - self._taken if not _COMPUTED.fullmatch(n))
        if unused:
            shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            logger.warning("%d tensors of the checkpoint are not used: %s", len(unused), shown)


def _merge(held: dict[Path, set[str]]) -> dict[str, Path]:
    assignment: dict[str, Path] = {}
    for file, names in held.items():
        for name in names:
            if name in assignment:
                raise ModelLoadError(f"{file}: tensor {name} is also in {assignment[name].name}, and no index decides")
            assignment[name] = file
    return assignment


def _warn_stale_tensors(held: dict[Path, set[str]], assignment: dict[str, Path]) -> None:
    for file, names in held.items():
        stale = sorted(name for name in names if assignment.get(name) != file)
        if stale:
            logger.warning("%s: %d tensors ignored, the index assigns them elsewhere: %s", file, len(stale), stale[0])


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if result.setdefault(key, value) != value:
            raise ValueError(f"{key} is listed twice, for {result[key]} and {value}")
    return result


def read_index(index_file: Path) -> dict[str, Path]:
    """Tensor name to file of a `*.index.json`.

    Raises:
        ModelLoadError: malformed, contradicts itself, leaves the directory, or a file it names is missing; names it.
    """
    try:
        weight_map = json.loads(index_file.read_text(), object_pairs_hook=_unique_pairs)["weight_map"]
        items = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index_file}: not a weight index ({error})") from error
    assignment: dict[str, Path] = {}
    for name, file_name in items:
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelLoadError(f"{index_file}: {name} is assigned to {file_name!r}, which is no file name")
        assignment[name] = index_file.with_name(file_name)
    for file in sorted(set(assignment.values())):
        if not file.is_file():
            raise ModelLoadError(f"{file}: weight file is missing, but {index_file.name} names it")
    return assignment


def _find_files(directory: Path, stem: str, suffix: str) -> tuple[list[Path], dict[str, Path] | None]:
    """The weight files of one format in a directory: by index, else the single file, else a full numbered set."""
    candidates = sorted(directory.glob(f"*.{suffix}"))
    index_file = directory / f"{stem}.{suffix}.index.json"
    assignment: dict[str, Path] | None = None
    if index_file.is_file():
        assignment = read_index(index_file)
        files = sorted(set(assignment.values()))
    elif (directory / f"{stem}.{suffix}").is_file():
        files = [directory / f"{stem}.{suffix}"]
    else:
        numbered = [file for file in candidates if (m := _SHARD_FILE.fullmatch(file.name)) and m[1] == stem]
        files = _complete_set(numbered) if numbered else candidates[:1]
        if not numbered and len(candidates) > 1:
            names = ", ".join(file.name for file in candidates[:4])
            raise ModelLoadError(f"{directory}: {names}: several weight files and no {index_file.name}")
    ignored = [file.name for file in candidates if files and file not in files]
    if ignored:
        logger.warning("%s: weight files ignored, not part of the checkpoint: %s", directory, ", ".join(ignored))
    return files, assignment


def _complete_set(numbered: list[Path]) -> list[Path]:
    match = _SHARD_FILE.fullmatch(numbered[0].name)
    assert match is not None
    total = int(match[3])
    files = [numbered[0].with_name(f"{match[1]}-{i:05d}-of-{match[3]}.{match[4]}") for i in range(1, total + 1)]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file}: weight file is missing from the set of {total}")
    return files


def open_source(
    source: ModelSource,
    load_format: str,
    *,
    seed: int,
    absent_if_random: frozenset[str],
    device: torch.device = _CPU,
) -> WeightSource:
    """The weights of a model by the `load_format` setting.

    Args:
        seed: of random weights, for load_format dummy.
        absent_if_random: names that random weights do not hold.
        device: where random weights are drawn; files are read into host memory.

    Raises:
        ModelLoadError: no weights of that format, or broken ones; names the file.
    """
    if load_format == "dummy":
        return DummySource(seed, absent_if_random, device)
    if source.kind == "gguf":
        if load_format not in ("auto", "gguf"):
            raise ModelLoadError(f"{source.path} is a GGUF file, but load_format is {load_format}", field="load_format")
        from worker.quantization.gguf import GgufSource

        return GgufSource(source.path)
    if load_format == "gguf":
        raise ModelLoadError(f"{source.path} is no GGUF file, but load_format is gguf", field="load_format")
    if load_format in ("auto", "hf", "safetensors"):
        files, assignment = _find_files(source.path, "model", "safetensors")
        if files:
            return SafetensorsSource(files, assignment)
    if load_format in ("auto", "hf", "pt"):
        files, assignment = _find_files(source.path, "pytorch_model", "bin")
        if files:
            return TorchFileSource(files, assignment)
    raise ModelLoadError(f"{source.path}: no weight files for load_format {load_format}", field="load_format")


def model_fingerprint(
    config: dict[str, Any],
    source: WeightSource,
    dtype: torch.dtype,
    seed: int,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Hex digest that is equal for workers which compute the same.

    It covers config, dtype, that of the KV cache where it is another (None is dtype), names and sizes of the weight
    files, and samples of their content. Modification times are left out, so that copies of a model on several machines
    agree.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(dtype_name(dtype).encode())
    if kv_dtype not in (None, dtype):
        digest.update(f"kv {kv_dtype}".encode())
    if not source.files:
        digest.update(f"random {seed} {source.device.type}".encode())
    sample_bytes = 1 << 16
    for file in source.files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for offset in (0, size // 3, 2 * size // 3, max(0, size - sample_bytes)):
                stream.seek(offset)
                digest.update(stream.read(sample_bytes))
    return digest.hexdigest()
