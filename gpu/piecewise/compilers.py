"""Compiles pieces: by Inductor or not at all, each different piece once for a size or a range, kept
between starts.

What is kept are Inductor's artifacts, which are pickles and code: a cache folder that others may
write to is refused, and what was stored is checked against digests before it is loaded. Neither
protects from the user's own account.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ...ops.source_hash import closure
from ...shared.cache_folder import write_atomically
from ...shared.errors import InternalError
from ..backend import open_cache
from .decorate import guard_violations
from .split import VALUE, Piece, copy_graph

Compiled = Callable[..., Any]
RECORD = "artifact.json"


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers of tokens that one compilation serves; one number is a constant of the code."""

    first: int
    last: int

    @property
    def static(self) -> bool:
        """Whether the number of tokens is fixed."""
        return self.first == self.last

    def __str__(self) -> str:
        return str(self.first) if self.static else f"{self.first}-{self.last}"


class Adaptor(Protocol):
    """A compiler of graphs over fake inputs. `save` and `load` keep what it made in a folder."""

    name: str

    def compile(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Compiled:
        """A function of the graph's inputs that returns a tuple or list."""
        ...

    def save(self, compiled: Compiled, folder: Path) -> bool:
        """Write what `load` needs; False if this cannot be kept."""
        ...

    def load(self, folder: Path) -> Compiled:
        """What was saved."""
        ...


class EagerAdaptor:
    """The graph as it is: shows what splitting alone does, and runs where Inductor does not."""

    name = "eager"

    def compile(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Compiled:
        """The graph's own code."""
        return graph.forward

    def save(self, compiled: Compiled, folder: Path) -> bool:
        """Nothing was made."""
        return False

    def load(self, folder: Path) -> Compiled:
        """Nothing was kept, so nothing can be asked for."""
        raise InternalError(f"{folder}: graphs that run as they are leave nothing to load")


class InductorStandaloneAdaptor:
    """Inductor's standalone compiler (torch 2.8 and later), whose artifacts can be kept."""

    name = "inductor_standalone"

    def compile(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Compiled:
        """Compile for the shapes that the graph's values have; open ones stay open."""
        from torch._inductor import standalone_compile

        patches = {"config_patches": dict(options)} if options else None
        return standalone_compile(graph, list(inputs), dynamic_shapes="from_graph", options=patches)

    def save(self, compiled: Any, folder: Path) -> bool:
        """Generated code and Inductor's own records, as files."""
        try:
            compiled.save(path=str(folder), format="unpacked")
        except (RuntimeError, AssertionError):  # Inductor had no artifact to give, and says so thus
            return False
        return True

    def load(self, folder: Path) -> Compiled:
        """Unpickles: only from a folder that was checked."""
        return torch._inductor.CompiledArtifact.load(path=str(folder), format="unpacked")


@dataclass(slots=True)
class Entry:
    """A compiled piece, and how it was had: compiled or loaded."""

    function: Compiled
    origin: str
    refused: frozenset[int] = frozenset()
    """Numbers of tokens for which a guard of the compiled code does not hold."""


@dataclass(slots=True)
class CompilerManager:
    """Pieces that are alike share one compilation. `factors`: what generated code depends on
    besides the graph.
    """

    adaptor: Adaptor
    factors: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    root: str | None = None
    keep: bool = True
    dump: str | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: {"compiled": 0, "loaded": 0, "reused": 0}
    )
    notes: list[str] = field(default_factory=list)
    _known: dict[tuple[str, Range], Entry] = field(default_factory=dict)

    def compile(
        self,
        piece: Piece,
        served: Range,
        sizes: Sequence[int],
        token: Any,
        hints: Mapping[Any, int],
    ) -> Entry:
        """A piece for a range. `sizes` are the numbers of tokens that will be run, `token` is the
        symbol that counts them, `hints` the sizes of all other symbols.
        """
        key = (piece.key, served)
        if key in self._known:
            self.counts["reused"] += 1
            return self._known[key]
        others = {str(symbol): hints[symbol] for symbol in piece.symbols if symbol != token}
        factors = dict(self.factors) | {
            "adaptor": self.adaptor.name,
            "graph": piece.text.splitlines(),
            "range": str(served),
            "sizes": [n for n in sizes if served.first <= n <= served.last],
            "others": sorted(others.values()),
            "options": {name: str(value) for name, value in sorted(self.options.items())},
            "compiler": _sources(),
        }
        folder = (
            open_cache(self.root, factors) if self.keep and self.adaptor.name != "eager" else None
        )
        entry = self._load(folder)
        if entry is None:
            entry = self._compile(piece, served, factors["sizes"], token, hints, folder)
        self.counts[entry.origin] += 1
        self._known[key] = entry
        if self.dump:
            self._write(piece, served, folder)
        return entry

    def _compile(
        self,
        piece: Piece,
        served: Range,
        sizes: Sequence[int],
        token: Any,
        hints: Mapping[Any, int],
        folder: Path | None,
    ) -> Entry:
        graph, inputs, shape_env, symbols = _specialise(piece, served, token, hints)
        function = self.adaptor.compile(graph, inputs, self.options)
        refused = set()
        for size in sizes:
            values = {new: size if old == token else hints[old] for old, new in symbols.items()}
            if guard_violations(shape_env, values):
                refused.add(size)
        entry = Entry(function, "compiled", frozenset(refused))
        if folder is not None:
            self._save(entry, folder)
        return entry

    def _save(self, entry: Entry, folder: Path) -> None:
        made = Path(tempfile.mkdtemp(dir=folder))
        if not self.adaptor.save(entry.function, made / "code"):
            shutil.rmtree(made)
            self.notes.append(f"{folder.name}: the compiler gave nothing that can be kept")
            return
        name = f"artifact_{made.name}"
        made.rename(folder / name)
        record = {
            "folder": name,
            "refused": sorted(entry.refused),
            "digests": _digests(folder / name),
        }
        write_atomically(folder / RECORD, json.dumps(record, indent=1))

    def _load(self, folder: Path | None) -> Entry | None:
        if folder is None or not (folder / RECORD).exists():
            return None
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        stored = folder / Path(record["folder"]).name
        if not record["digests"] or not record["digests"].items() <= _digests(stored).items():
            self.notes.append(f"{folder.name}: does not hold what was stored there; compiled again")
            return None
        return Entry(self.adaptor.load(stored / "code"), "loaded", frozenset(record["refused"]))

    def _write(self, piece: Piece, served: Range, folder: Path | None) -> None:
        target = Path(str(self.dump))
        name = f"piece_{piece.key[:12]}_{served}"
        (target / f"{name}.py").write_text(
            piece.graph.print_readable(print_output=False), encoding="utf-8"
        )
        if folder is not None:
            files = sorted(folder.glob("artifact_*/code/**/*.py"))
            for number, file in enumerate(files):
                shutil.copy(file, target / f"{name}.generated_{number}.py")


def _digests(folder: Path) -> dict[str, str]:
    """Of the code and the records below a folder, by name. Loading may add files, so only these
    are checked later.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def _sources() -> dict[str, str]:
    """Digests of the files that turn a model into pieces."""
    files = closure(
        frozenset({__name__, f"{__package__}.split", f"{__package__}.decorate"})
    ).files()
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in files
        if path.parent.name == "piecewise"
    }


def _specialise(
    piece: Piece, served: Range, token: Any, hints: Mapping[Any, int]
) -> tuple[Any, Any, Any, Any]:
    """The graph and its inputs as fakes of their own shape environment, sizes open within the
    range or fixed.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    sizes: dict[Any, Any] = {}
    symbols: dict[Any, Any] = {}
    for number, symbol in enumerate(piece.symbols):
        if symbol == token and served.static:
            sizes[symbol] = served.first
            continue
        hint = served.last if symbol == token else hints[symbol]
        bounds = (
            ValueRanges(max(2, served.first), served.last)
            if symbol == token
            else ValueRanges(2, max(hint, 1 << 31))
        )
        source = torch._dynamo.source.ConstantSource(f"__size_{number}")
        limit = StrictMinMaxConstraint(vr=bounds, warn_only=False)
        made = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, limit)
        symbols[symbol] = made
        sizes[symbol] = shape_env.create_symintnode(made, hint=hint, source=source)
    module = copy_graph(piece.graph)
    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta[VALUE]
            shape, stride = (
                [_size(n, sizes) for n in part] for part in (value.shape, value.stride())
            )
            with mode:
                inputs.append(
                    torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
                )
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
    for node in module.graph.nodes:
        node.meta.pop(VALUE, None)
        if "val" in node.meta:
            node.meta[VALUE] = node.meta["val"]
    return module, inputs, shape_env, symbols


def _size(value: Any, sizes: Mapping[Any, Any]) -> Any:
    """An int, an open size, or a product of open sizes and numbers (as strides are)."""
    if not isinstance(value, torch.SymInt):
        return value
    result: Any = 1
    for factor in value.node.expr.as_ordered_factors():
        result = result * (int(factor) if factor.is_Integer else sizes[factor])
    return result
