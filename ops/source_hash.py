"""The content hash of an implementation: its module, every module that is imported from there,
directly or not, the kernel sources that lie beside them, and the versions of what is installed
apart from it.

Sources are followed within the package of the implementation, into this package, into modules that
no distribution installed, and into those of the implementation's own distribution. What another
distribution installed counts by its version. A helper in another file that is imported changes the
hash; a file that is not imported does not.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import CodeType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

VERSIONS = {
    "numpy": ("numpy", "array-api-compat"),
    "jax": ("jax", "jaxlib"),
    "torch": ("torch", "triton", "array-api-compat"),
}
KERNEL_SUFFIXES = (".c", ".cu", ".cuh", ".h", ".json")
OURS = __package__.split(".")[0]


def source_hash(function: Callable[..., Any], framework: str) -> str:
    """Hex digest of all that `function` is made of, in `framework`: sources, bound and enclosed
    values, versions. It is the same in every process.
    """
    made = _Ingredients(_top(_module(function)))
    words = made.words(function)
    if any(_top(name) == OURS for name in made.modules):
        # A native implementation is its reference in a namespace.
        made.modules.add(f"{__package__}.namespaces.{framework}_")
    sources = _hash(frozenset(made.modules), frozenset(made.installed), framework)
    return hashlib.sha256(f"{sources}\n{words}".encode()).hexdigest()[:16]


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether a function stands in this package."""
    return _top(_module(function)) == OURS


PLAIN = (bool, int, float, complex, str, bytes, NoneType)


@dataclass(slots=True)
class _Ingredients:
    """What a function of the top-level module `own` is made of: modules, and distributions whose
    versions stand for theirs.
    """

    own: str
    modules: set[str] = field(default_factory=set)
    installed: set[str] = field(default_factory=set)
    _seen: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def words(self, item: Any) -> str:
        """An item in words that are the same in every process: there is no address in them. What
        is bound or enclosed counts, as two functions of the same source differ by it alone.
        """
        if isinstance(item, PLAIN):
            return repr(item)
        if id(item) in self._seen:
            return f"#{self._seen[id(item)][0]}"
        self._seen[id(item)] = len(self._seen), item  # which keeps it, and its address with it
        if isinstance(item, ModuleType):
            return self._add(item.__name__)
        if isinstance(item, dict):
            return self._all("dict", [part for pair in item.items() for part in pair])
        if isinstance(item, set | frozenset):
            return f"set({', '.join(sorted(map(self.words, item)))})"
        if isinstance(item, list | tuple):
            return self._all(type(item).__name__, item)
        if isinstance(item, partial):
            return self._all("partial", [item.func, *item.args, item.keywords])
        if isinstance(item, CodeType):
            return self._all(item.co_code.hex(), [*item.co_consts, *item.co_names])
        if isinstance(item, type):
            return f"{self._add(item.__module__)}.{item.__qualname__}"
        if hasattr(item, "tolist"):
            return f"{item.dtype} {item.tolist()}"
        return self._function(item) if callable(item) else self._object(item)

    def _all(self, kind: str, parts: Iterable[Any]) -> str:
        return f"{kind}({', '.join(map(self.words, parts))})"

    def _add(self, module: str) -> str:
        """Have a module count by its sources or by the version of what installed it; returns it."""
        apart = _installed_apart(_top(module), self.own)
        if apart or _top(module) in sys.stdlib_module_names:
            self.installed |= apart or set()
        else:
            self.modules.add(module)
        return module

    def _function(self, item: Any) -> str:
        module = self._add(_module(item))
        name = getattr(item, "__qualname__", None) or getattr(item, "__name__", type(item).__name__)
        code = getattr(item, "__code__", None)
        parts = [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
        parts += [getattr(item, "__defaults__", None), getattr(item, "__kwdefaults__", None)]
        parts += [item.__wrapped__] if hasattr(item, "__wrapped__") else []
        if code is None:
            return f"{module}.{name}({self._object(item)})"
        if isinstance(item, MethodType):
            parts.append(item.__self__)
        if _file(module) is None:
            # Of a notebook: no file says what it does, nor what the functions do that it calls.
            known = item.__globals__
            parts += [code, *(known[name] for name in code.co_names if name in known)]
        return self._all(f"{module}.{name}:{code.co_firstlineno}", parts)

    def _object(self, item: Any) -> str:
        """By what it holds if its class stands in the sources that count. Others may hold what
        changes while they run.
        """
        words = self.words(type(item))
        if type(item).__module__ in self.modules:
            slots = getattr(item, "__slots__", ())
            held = {name: getattr(item, name) for name in slots if hasattr(item, name)}
            return f"{words}{self.words(held | getattr(item, '__dict__', {}))}"
        told = repr(item)
        return words if " at 0x" in told else f"{words} {told}"


def _module(item: Any) -> str:
    """The module of what is called, or of the function that it wraps."""
    return getattr(inspect.unwrap(item), "__module__", None) or type(item).__module__


@cache
def _hash(modules: frozenset[str], installed: frozenset[str], framework: str) -> str:
    sources = closure(modules)
    digest = hashlib.sha256()
    for path in sources.files():
        digest.update(path.read_bytes())
    # A module may import each framework where it is asked for: the versions of the others say
    # nothing.
    others = {name for names in VERSIONS.values() for name in names} - {
        *VERSIONS.get(framework, ())
    }
    for name in sorted({*VERSIONS.get(framework, ()), *installed, *sources.installed} - others):
        digest.update(f"{name}={_version(name)}".encode())
    return digest.hexdigest()[:16]


@dataclass(slots=True)
class Sources:
    """The source files that modules are made of, and the distributions that they import from."""

    modules: dict[str, Path] = field(default_factory=dict)
    installed: set[str] = field(default_factory=set)

    def files(self) -> list[Path]:
        """The source files and the kernels that lie beside them, sorted."""
        folders = {path.parent for path in self.modules.values()}
        kernels = {
            file
            for folder in folders
            for file in folder.iterdir()
            if file.suffix in KERNEL_SUFFIXES
        }
        return sorted({*self.modules.values(), *kernels})


def closure(modules: frozenset[str]) -> Sources:
    """What `modules` are made of."""
    found = Sources()
    todo = sorted(modules)
    while todo:
        name = todo.pop()
        path = _file(name)
        if name in found.modules or path is None:
            continue
        found.modules[name] = path
        if path.suffix != ".py":
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for entry in _imports(path.read_bytes(), package):
            apart = _installed_apart(_top(entry.module), _top(name))
            if apart is None:
                todo.append(_source_of(entry.module, entry.name))
            else:
                found.installed |= apart
    return found


def _top(name: str) -> str:
    return name.partition(".")[0]


@cache
def _installed_apart(module: str, importer: str) -> set[str] | None:
    """The distributions whose versions stand for a top-level module, or None where its sources
    do.
    """
    if module in (importer, OURS):
        return None
    if module in sys.stdlib_module_names:
        return set()
    owners = _distributions(module)
    if importer == OURS:
        return set(owners)
    return set(owners) if owners and not owners & _distributions(importer) else None


@cache
def _distributions(module: str) -> frozenset[str]:
    """The installed distributions that a top-level module comes from, their names with `-`."""
    try:
        # Most have the module's name; to read what all of them hold takes a tenth of a second.
        distribution(module)
        names: Iterable[str] = [module]
    except PackageNotFoundError:
        names = packages_distributions().get(module, ()) if _spec(module) is not None else ()
    return frozenset(name.lower().replace("_", "-") for name in names)


class _Import(NamedTuple):
    """`from module import name as bound`, or `import module`."""

    module: str
    name: str | None
    bound: str | None


def _source_of(module: str, name: str | None) -> str:
    """The module that gives a name: a submodule, the one that a package has the name from, or the
    module itself.

    A package hands on what its modules define, and is followed for the name alone: who takes one op
    from it does not depend on all the others.
    """
    if name is None or name == "*":
        return module
    if _file(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    path = _file(module)
    if path is None or path.name != "__init__.py":
        return module
    for entry in _imports(path.read_bytes(), module):
        if (
            entry.bound == name
            and entry.name is not None
            and _top(entry.module) == _top(module) != entry.module
        ):
            return _source_of(entry.module, entry.name)
    return module


@cache
def _imports(source: bytes, package: str) -> list[_Import]:
    """What a file imports anywhere in it."""
    found = []
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [_Import(alias.name, None, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module or ""
            )
            found += [_Import(base, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def _statements(module: ast.Module) -> Iterator[ast.AST]:
    """All statements, those within others too. Nine of ten nodes are parts of expressions, where
    nothing is imported.
    """
    todo: deque[ast.AST] = deque([module])
    while todo:
        node = todo.popleft()
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo.extend(getattr(node, name, ()))


def _spec(module: str) -> Any:
    """Where a top-level module would be imported from, or None."""
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


@cache
def _roots(first: str) -> tuple[str, ...]:
    """The folders of a top-level package that is not imported yet."""
    return tuple(getattr(_spec(first), "submodule_search_locations", None) or ())


def _file(name: str) -> Path | None:
    """The file of a module, found without importing it or its packages: they may be those of
    another framework.
    """
    origin = getattr(sys.modules.get(name), "__file__", None)
    first, _, rest = name.partition(".")
    if origin is None and not rest and name not in sys.modules:
        origin = getattr(_spec(name), "origin", None)
    if origin is not None:
        return Path(origin) if Path(origin).is_file() else None
    for root in getattr(sys.modules.get(first), "__path__", None) or _roots(first):
        path = Path(root, *rest.split("."))
        for file in (path / "__init__.py", path.with_name(path.name + ".py")):
            if file.is_file():
                return file
    return None


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
