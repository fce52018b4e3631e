"""The head of a GGUF file: its metadata and where its tensors lie.

The `gguf` package's reader makes an array view of every string, seconds for a vocabulary of 50 thousand tokens; this
one reads the same head in a fraction of one, and maps no tensor data.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagemill.errors import ModelLoadError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# A damaged length must not make the reader allocate without bound.
_MAX_ITEMS = 1 << 26
_MAX_STRING_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first, as in torch (GGUF itself stores the reverse).
        ggml_type: number of the storage type in ggml's enumeration.
        offset_bytes: from the file's start.
    """

    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Metadata by key (numbers, strings, lists) and tensors by name, in file order; readers share it."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_head(path: Path) -> GgufHead:
    """Read the head of a GGUF file, version 2 or 3, little-endian.

    The last two heads are kept, until their files change: one start asks for config, tokenizer and tensors one by one.

    Raises:
        ModelLoadError: not a GGUF file, damaged, or of another version.
    """
    try:
        status = path.stat()
        return _read_version(path.absolute(), status.st_mtime_ns, status.st_size)
    except (OSError, struct.error, UnicodeDecodeError, ValueError, KeyError) as err:
        raise ModelLoadError(f"{str(path)!r} is not a readable GGUF file: {err}", field="model") from err


@functools.lru_cache(maxsize=2)
def _read_version(path: Path, mtime_ns: int, size_bytes: int) -> GgufHead:
    """The head of one version of a file, which its time and size tell from others."""
    with path.open("rb") as file:
        return _read_head(file)


def _read_head(file: BinaryIO) -> GgufHead:
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with the letters GGUF")
    version = _scalar(file, "I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported, 2 and 3 are")
    num_tensors, num_keys = _count(file), _count(file)
    metadata = {_string(file): _value(file, _scalar(file, "I")) for _ in range(num_keys)}
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, num_dims = _string(file), _scalar(file, "I")
        if num_dims > 8:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        shape = struct.unpack(f"<{num_dims}Q", _read(file, 8 * num_dims))[::-1]
        entries.append((name, shape, _scalar(file, "I"), _scalar(file, "Q")))
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    data_start = -(-file.tell() // alignment) * alignment
    return GgufHead(metadata, {name: GgufTensor(s, kind, data_start + offset) for name, s, kind, offset in entries})


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise ValueError("the file ends early")
    return data


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, _read(file, struct.calcsize("<" + code)))[0]


def _count(file: BinaryIO) -> int:
    count = int(_scalar(file, "Q"))
    if count > _MAX_ITEMS:
        raise ValueError(f"a count of {count} is beyond reason")
    return count


def _string(file: BinaryIO) -> str:
    num_bytes = int(_scalar(file, "Q"))
    if num_bytes > _MAX_STRING_BYTES:
        raise ValueError(f"a string of {num_bytes} bytes is beyond reason")
    # Vocabularies of byte-level tokenizers may hold bytes that are no UTF-8.
    return _read(file, num_bytes).decode("utf-8", "surrogateescape")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item_kind, count = _scalar(file, "I"), _count(file)
        if item_kind in (_STRING, _ARRAY):
            read: Callable[[], Any] = (
                (lambda: _string(file)) if item_kind == _STRING else (lambda: _value(file, _ARRAY))
            )
            return [read() for _ in range(count)]
        code = f"<{count}{_SCALARS[item_kind]}"
        return list(struct.unpack(code, _read(file, struct.calcsize(code))))
    return _scalar(file, _SCALARS[kind])
