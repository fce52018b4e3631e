#!/usr/bin/env python3
"""Keeps protos/ compatible, commented and in step with the generated code.

    check_protos.py                    compare protos/ with protos/baseline.binpb, comments and generated stubs
    check_protos.py --write-baseline   make the present protos the baseline; done once per release

Routers, schedulers and workers of neighbouring versions talk with each other during a rolling update, so a change must
be readable by a peer that knows the baseline alone.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "protos" / "baseline.binpb"

# Field numbers of descriptor.proto, which make up the paths of source comments.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_NESTED, _MESSAGE_ENUM = 2, 3, 4
_ENUM_VALUE, _SERVICE_METHOD = 2, 2


def compile_protos(proto_root: Path) -> FileDescriptorSet:
    """Descriptors of all files below `proto_root`, with their comments."""
    files = sorted(str(path.relative_to(proto_root)) for path in proto_root.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(proto_root), "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True)
        return FileDescriptorSet.FromString(out.read_bytes())


def uncommented(descriptors: FileDescriptorSet) -> list[str]:
    """Names of messages, fields, enums, values, services and methods without a comment."""
    missing: list[str] = []
    for file in descriptors.file:
        commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
        missing += [name for path, name in _commentable(file) if path not in commented]
    return missing


def _commentable(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for i, message in enumerate(file.message_type):
        yield from _commentable_message((_FILE_MESSAGE, i), message, message.name)
    for i, enum in enumerate(file.enum_type):
        yield from _commentable_enum((_FILE_ENUM, i), enum, enum.name)
    for i, service in enumerate(file.service):
        yield (_FILE_SERVICE, i), service.name
        for j, method in enumerate(service.method):
            yield (_FILE_SERVICE, i, _SERVICE_METHOD, j), f"{service.name}.{method.name}"


def _commentable_message(
    path: tuple[int, ...], message: DescriptorProto, name: str
) -> Iterator[tuple[tuple[int, ...], str]]:
    if message.options.map_entry:
        return
    yield path, name
    for i, field in enumerate(message.field):
        yield (*path, _MESSAGE_FIELD, i), f"{name}.{field.name}"
    for i, nested in enumerate(message.nested_type):
        yield from _commentable_message((*path, _MESSAGE_NESTED, i), nested, f"{name}.{nested.name}")
    for i, enum in enumerate(message.enum_type):
        yield from _commentable_enum((*path, _MESSAGE_ENUM, i), enum, f"{name}.{enum.name}")


def _commentable_enum(
    path: tuple[int, ...], enum: EnumDescriptorProto, name: str
) -> Iterator[tuple[tuple[int, ...], str]]:
    yield path, name
    for i, value in enumerate(enum.value):
        yield (*path, _ENUM_VALUE, i), f"{name}.{value.name}"


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """What a peer that speaks `old` cannot understand in `new`, one line each."""
    problems: list[str] = []
    new_messages, new_enums, new_services = _messages(new), _enums(new), _services(new)
    for name, message in _messages(old).items():
        if name not in new_messages:
            problems.append(f"message {name} was removed")
        else:
            problems += _message_changes(name, message, new_messages[name])
    for name, enum in _enums(old).items():
        if name not in new_enums:
            problems.append(f"enum {name} was removed")
        else:
            problems += _enum_changes(name, enum, new_enums[name])
    for name, service in _services(old).items():
        if name not in new_services:
            problems.append(f"service {name} was removed")
        else:
            problems += _service_changes(name, service, new_services[name])
    problems += [
        f"enum {name}: value 0 is {enum.value[0].name}, must end with _UNSPECIFIED"
        for name, enum in new_enums.items()
        if not enum.value[0].name.endswith("_UNSPECIFIED")
    ]
    return problems


def _messages(descriptors: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}

    def visit(prefix: str, message: DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        found[name] = message
        for nested in message.nested_type:
            visit(name, nested)

    for file in descriptors.file:
        for message in file.message_type:
            visit(file.package, message)
    return found


def _enums(descriptors: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    found = {f"{file.package}.{enum.name}": enum for file in descriptors.file for enum in file.enum_type}
    for name, message in _messages(descriptors).items():
        found |= {f"{name}.{enum.name}": enum for enum in message.enum_type}
    return found


def _services(descriptors: FileDescriptorSet) -> dict[str, ServiceDescriptorProto]:
    return {f"{file.package}.{service.name}": service for file in descriptors.file for service in file.service}


def _reserved(message: DescriptorProto, number: int) -> bool:
    return any(span.start <= number < span.end for span in message.reserved_range)


def _enum_reserved(enum: EnumDescriptorProto, number: int) -> bool:
    return any(span.start <= number <= span.end for span in enum.reserved_range)


def _field_shape(message: DescriptorProto, field: FieldDescriptorProto) -> dict[str, object]:
    """What two peers must agree on about a field. A move into or out of a oneof changes what is set together."""
    in_oneof = field.HasField("oneof_index") and not field.proto3_optional
    return {
        "name": field.name,
        "type": field.type_name or FieldDescriptorProto.Type.Name(field.type),
        "cardinality": FieldDescriptorProto.Label.Name(field.label),
        "explicit presence": field.proto3_optional,
        "oneof": message.oneof_decl[field.oneof_index].name if in_oneof else "",
    }


def _message_changes(name: str, old: DescriptorProto, new: DescriptorProto) -> list[str]:
    problems: list[str] = []
    new_fields = {field.number: field for field in new.field}
    for field in old.field:
        if field.number in new_fields:
            before, after = _field_shape(old, field), _field_shape(new, new_fields[field.number])
            problems += [
                f"{name} field {field.number}: {what} changed from {before[what]!r} to {after[what]!r}"
                for what in before
                if before[what] != after[what]
            ]
        elif not (_reserved(new, field.number) and field.name in new.reserved_name):
            problems.append(f"{name}.{field.name} was removed without reserving number {field.number} and its name")
    problems += [
        f"{name}.{field.name} uses number {field.number}, which was reserved"
        for field in new.field
        if _reserved(old, field.number)
    ]
    problems += [f"{name}.{field.name} uses a reserved name" for field in new.field if field.name in old.reserved_name]
    for span in old.reserved_range:
        if not all(_reserved(new, number) for number in (span.start, span.end - 1)):
            problems.append(f"{name}: numbers {span.start} to {span.end - 1} are no longer reserved")
    return problems


def _enum_changes(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> list[str]:
    problems: list[str] = []
    new_values = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number in new_values:
            if new_values[value.number] != value.name:
                problems.append(f"{name} value {value.number} was renamed: {value.name}, {new_values[value.number]}")
        elif not _enum_reserved(new, value.number):
            problems.append(f"{name}.{value.name} was removed without reserving {value.number}")
    problems += [
        f"{name}.{value.name} uses {value.number}, which was reserved"
        for value in new.value
        if _enum_reserved(old, value.number)
    ]
    return problems


def _service_changes(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> list[str]:
    problems: list[str] = []
    new_methods = {method.name: method for method in new.method}
    for method in old.method:
        if method.name not in new_methods:
            problems.append(f"method {name}.{method.name} was removed")
            continue
        now = new_methods[method.name]
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            if getattr(method, what) != getattr(now, what):
                problems.append(f"method {name}.{method.name}: {what} changed")
    return problems


def stale_stubs() -> list[str]:
    """Generated files that differ from what the protos give now."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"PYTHON": sys.executable}
        subprocess.run(["bash", str(ROOT / "tools" / "gen_protos.sh"), directory], check=True, env=environment)
        fresh, present = Path(directory) / "pagemill" / "v1", ROOT / "pagemill" / "v1"
        names = {path.name for place in (fresh, present) for path in place.glob("*_pb2*.py*")}
        _, mismatch, errors = filecmp.cmpfiles(fresh, present, sorted(names), shallow=False)
        return sorted(mismatch + errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-baseline", action="store_true", help="make the present protos the baseline")
    arguments = parser.parse_args()
    descriptors = compile_protos(ROOT / "protos")
    if arguments.write_baseline:
        for file in descriptors.file:
            file.ClearField("source_code_info")
        BASELINE.write_bytes(descriptors.SerializeToString(deterministic=True))
        print(f"wrote {BASELINE.relative_to(ROOT)}")
        return 0
    problems = [f"no comment: {name}" for name in uncommented(descriptors)]
    problems += breaking_changes(FileDescriptorSet.FromString(BASELINE.read_bytes()), descriptors)
    problems += [f"stale: pagemill/v1/{name}, run `make protos`" for name in stale_stubs()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
