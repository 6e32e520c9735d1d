"""The names of TVM that the code uses: the TVM that is installed has them."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lib import ROOT

TVM = ("tvm", "tvm_ffi")
FILES = sorted(
    path
    for folder in ("tunerd", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if any(f"{how} {name}" in path.read_text() for how in ("import", "from") for name in TVM)
)


def imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a file takes from TVM, by the name that it gives it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in TVM:
                    module = importlib.import_module(alias.name)
                    first = alias.name.split(".")[0]
                    yield alias.asname or first, module if alias.asname else sys.modules[first]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TVM:
            for alias in node.names:
                yield alias.asname or alias.name, _taken(str(node.module), alias.name)


def used(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the line, the name and the attributes of each `name.a.b`."""
    for node in ast.walk(tree):
        attributes: list[str] = []
        each: ast.AST = node
        while isinstance(each, ast.Attribute):
            attributes.insert(0, each.attr)
            each = each.value
        if attributes and isinstance(each, ast.Name):
            yield node.lineno, each.id, attributes  # type: ignore[attr-defined]


def _taken(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    is_there = hasattr(found, name)
    return getattr(found, name) if is_there else importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tvm_has_what_a_file_takes_from_it(path: Path) -> None:
    tree = ast.parse(path.read_text())
    known = dict(imported(tree))
    for line, name, attributes in used(tree):
        found = known.get(name)
        for attribute in attributes:
            if not isinstance(found, ModuleType):  # a class makes attributes as it likes
                break
            assert hasattr(found, attribute), f"line {line}: {found.__name__} has no {attribute}"
            found = getattr(found, attribute)
