"""The protos are commented, the generated code is current, and no change breaks a peer of the last release."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_protos  # noqa: E402

Edit = Callable[[FileDescriptorSet], None]


@pytest.fixture(scope="module")
def present() -> FileDescriptorSet:
    return check_protos.compile_protos(ROOT / "protos")


def compiled(tmp_path: Path, text: str) -> FileDescriptorSet:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "a.proto").write_text('syntax = "proto3";\npackage t;\n' + text)
    return check_protos.compile_protos(tmp_path)


def changes(tmp_path: Path, old: str, new: str) -> str:
    return "\n".join(check_protos.breaking_changes(compiled(tmp_path / "old", old), compiled(tmp_path / "new", new)))


def test_generated_stubs_are_current() -> None:
    assert check_protos.stale_stubs() == []


def test_everything_is_commented(present: FileDescriptorSet) -> None:
    assert check_protos.uncommented(present) == []


def test_a_missing_comment_is_found(tmp_path: Path) -> None:
    text = (
        "// A message.\nmessage M {\n  // A field.\n  int32 a = 1;\n  int32 b = 2;\n}\nenum E { E_UNSPECIFIED = 0; }\n"
    )
    assert check_protos.uncommented(compiled(tmp_path, text)) == ["M.b", "E", "E.E_UNSPECIFIED"]


def test_peers_of_the_last_release_understand_the_present_protos(present: FileDescriptorSet) -> None:
    baseline = FileDescriptorSet.FromString(check_protos.BASELINE.read_bytes())
    assert check_protos.breaking_changes(baseline, present) == []


MESSAGE = "message M { int32 a = 1; string b = 2; oneof o { int32 c = 3; } }"


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("message M { int32 a = 1; oneof o { int32 c = 3; } }", "M.b was removed without reserving number 2"),
        ("message M { int64 a = 1; string b = 2; oneof o { int32 c = 3; } }", "field 1: type changed"),
        ("message M { int32 z = 1; string b = 2; oneof o { int32 c = 3; } }", "field 1: name changed"),
        ("message M { repeated int32 a = 1; string b = 2; oneof o { int32 c = 3; } }", "field 1: cardinality changed"),
        ("message M { optional int32 a = 1; string b = 2; oneof o { int32 c = 3; } }", "explicit presence changed"),
        ("message M { int32 a = 1; string b = 2; int32 c = 3; }", "field 3: oneof changed"),
        ("message M { int32 a = 4; string b = 2; oneof o { int32 c = 3; } }", "M.a was removed without reserving"),
        ("message N { int32 a = 1; }", "message t.M was removed"),
    ],
)
def test_a_breaking_edit_of_a_message_is_found(tmp_path: Path, new: str, complaint: str) -> None:
    assert complaint in changes(tmp_path, MESSAGE, new)


def test_fields_may_be_added_and_removed_with_reservation(tmp_path: Path) -> None:
    new = 'message M { reserved 2; reserved "b"; int32 a = 1; oneof o { int32 c = 3; int32 d = 4; } string e = 5; }'
    assert changes(tmp_path, MESSAGE, new) == ""


def test_reserved_numbers_and_names_are_never_used_again(tmp_path: Path) -> None:
    old = 'message M { reserved 2, 5 to 7; reserved "b"; int32 a = 1; }'
    assert "uses number 6, which was reserved" in changes(tmp_path, old, "message M { int32 a = 1; int32 d = 6; }")
    assert "uses a reserved name" in changes(tmp_path, old, "message M { int32 a = 1; int32 b = 9; }")
    assert "no longer reserved" in changes(tmp_path, old, "message M { int32 a = 1; }")


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("enum E { E_UNSPECIFIED = 0; }", "E.E_ONE was removed without reserving 1"),
        ("enum E { E_UNSPECIFIED = 0; E_UNO = 1; }", "value 1 was renamed"),
        ("enum E { E_ZERO = 0; E_ONE = 1; }", "must end with _UNSPECIFIED"),
    ],
)
def test_a_breaking_edit_of_an_enum_is_found(tmp_path: Path, new: str, complaint: str) -> None:
    assert complaint in changes(tmp_path, "enum E { E_UNSPECIFIED = 0; E_ONE = 1; }", new)


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("service S { rpc A(M) returns (M); }", "server_streaming changed"),
        ("message N {} service S { rpc A(N) returns (stream M); }", "input_type changed"),
        ("service S {}", "method t.S.A was removed"),
        ("", "service t.S was removed"),
    ],
)
def test_a_breaking_edit_of_a_service_is_found(tmp_path: Path, new: str, complaint: str) -> None:
    old = "message M {} service S { rpc A(M) returns (stream M); }"
    assert complaint in changes(tmp_path, old, "message M {} " + new)


def test_every_single_change_of_a_field_number_in_the_real_protos_is_found(present: FileDescriptorSet) -> None:
    count = 0
    for file_index, file in enumerate(present.file):
        for message_index, message in enumerate(file.message_type):
            for field_index in range(len(message.field)):
                edited = FileDescriptorSet()
                edited.CopyFrom(present)
                field: FieldDescriptorProto = edited.file[file_index].message_type[message_index].field[field_index]
                field.number += 500
                assert check_protos.breaking_changes(present, edited), f"{message.name}.{field.name}"
                count += 1
    assert count > 100
