"""The content hash of an implementation: its module, every module of its package that is imported from there, directly
or not, the kernel sources that lie beside them, and the versions of the frameworks.

A helper in another file that is imported changes it; a file that is not imported does not.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path
from types import NoneType
from typing import Any

VERSIONS = {"numpy": ("numpy",), "jax": ("jax", "jaxlib"), "torch": ("torch", "triton")}
KERNEL_SUFFIXES = (".cu", ".cuh", ".json")


def source_hash(function: Callable[..., Any], framework: str) -> str:
    """Hex digest of all that `function` is made of, in `framework`: sources, bound and enclosed values, versions."""
    modules, values = _made_of(function)
    if any(name.split(".")[0] == __package__.split(".")[0] for name in modules):
        # A native implementation is its reference in a namespace.
        modules.add(f"{__package__}.namespaces.{framework}_")
    sources = _hash(frozenset(modules), framework)
    return hashlib.sha256("\n".join([sources, *values]).encode()).hexdigest()[:16] if values else sources


def _made_of(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Modules of a function and of those that it wraps, binds or encloses, and the plain values that it does."""
    modules: set[str] = set()
    values: list[str] = []
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, partial):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, (bool, int, float, str, bytes, tuple, list, dict, NoneType)):
            values.append(repr(item))
        elif callable(item):
            modules.add(inspect.unwrap(item).__module__)
            todo += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
            todo += [item.__wrapped__] if hasattr(item, "__wrapped__") else []
    return modules, sorted(values)


@cache
def _hash(modules: frozenset[str], framework: str) -> str:
    digest = hashlib.sha256()
    for path in closure(modules):
        digest.update(path.read_bytes())
    for name in VERSIONS.get(framework, ()):
        digest.update(f"{name}={_version(name)}".encode())
    return digest.hexdigest()[:16]


def closure(modules: frozenset[str]) -> list[Path]:
    """The source files of `modules` and of what they import from their own packages, sorted."""
    found: dict[str, Path] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        todo += [other for other in _imports(path.read_bytes(), package) if other.split(".")[0] == name.split(".")[0]]
    kernels = {file for path in found.values() for file in path.parent.iterdir() if file.suffix in KERNEL_SUFFIXES}
    return sorted({*found.values(), *kernels})


@cache
def _imports(source: bytes, package: str) -> list[str]:
    """Names of modules that a file imports anywhere in it; `from x import y` names both x and x.y."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _file(name: str) -> Path | None:
    """The source of a module, found without importing it or its packages: they may be those of another framework."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin is not None:
        return Path(origin) if origin.endswith(".py") else None
    first, _, rest = name.partition(".")
    for root in getattr(sys.modules.get(first), "__path__", ()):
        path = Path(root, *rest.split("."))
        for file in (path / "__init__.py", path.with_name(path.name + ".py")):
            if file.is_file():
                return file
    return None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
