"""Who may import what: the rules of docs/architecture.md, by reading the sources and by importing them for real."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("router", "scheduler", "worker")
FORBIDDEN = {
    "router": {"torch", "scheduler", "worker"},
    "scheduler": {"torch", "transformers", "redis", "router", "worker"},
    "worker": {"redis", "router", "scheduler"},
}
# Of the shared package, these alone may import services, and only inside functions.
MAY_IMPORT_SERVICES = {"llm", "local_engine", "async_engine", "cli", "commands"}


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts)


def imported_names(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Top-level package of each import statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0], node


def type_checking_imports(tree: ast.AST) -> set[ast.stmt]:
    """Imports that a type checker alone sees."""
    return {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in ast.walk(node)
        if isinstance(statement, ast.Import | ast.ImportFrom)
    }


def modules_after_importing(*names: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter that imported `names`."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.split())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("service", SERVICES)
def test_no_source_of_a_service_names_what_it_must_not_import(service: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{statement.lineno} imports {name}"
        for path in sources(service)
        for name, statement in imported_names(ast.parse(path.read_text()))
        if name in FORBIDDEN[service]
    ]
    assert not found


@pytest.mark.parametrize("service", SERVICES)
def test_importing_all_of_a_service_loads_nothing_that_is_forbidden(service: str) -> None:
    loaded = modules_after_importing(*map(module_name, sources(service)))
    assert not loaded & FORBIDDEN[service]


def test_the_shared_package_imports_services_in_few_places_and_lazily() -> None:
    found: list[str] = []
    for path in sources("pagemill"):
        tree = ast.parse(path.read_text())
        place = path.relative_to(ROOT / "pagemill").parts[0].removesuffix(".py")
        eager = set(tree.body)
        for name, statement in imported_names(tree):
            if name not in SERVICES or statement in type_checking_imports(tree):
                continue
            if place not in MAY_IMPORT_SERVICES or statement in eager:
                found.append(f"{path.relative_to(ROOT)}:{statement.lineno} imports {name}")
    assert not found


def test_importing_the_shared_package_loads_no_service_and_no_torch() -> None:
    names = [module_name(path) for path in sources("pagemill") if path.name != "cli.py"]
    loaded = modules_after_importing(*names)
    assert not loaded & {"torch", "transformers", "redis", *SERVICES}


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    loaded = modules_after_importing("pagemill.cli")
    assert not loaded & {"torch", "grpc", "pydantic", "opentelemetry", "rich", "yaml", *SERVICES}


def test_public_names_are_there_and_nothing_else_is() -> None:
    import pagemill

    for name in pagemill.__all__:
        assert getattr(pagemill, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = pagemill.Nonsense
