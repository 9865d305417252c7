"""The shapes of an op in words, as `x [tok k], weight [n k], bias [n] -> [tok n] x`.

A dimension is a name, a number, or a sum and product of these without blanks:
`(head+2*kvhead)*hdim`. `...` stands, in front, for any further ones. What a name stands for is
found from the arguments: in an expression all names but one have to be known from elsewhere. Names
of `int` parameters are their values. A result is a shape with a dtype, which is a dtype's name, or
the name of the array or of the `str` parameter that has it. A result that is the name of an array
is that array.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add, itemgetter, mul
from typing import Any

__all__ = ["Dimension", "Result", "Shapes", "ShapesError"]

Sizes = dict[str, Any]
"""What the names of dimensions stand for. Sizes that a compiler left open are symbols."""
Choose = Callable[..., Mapping[str, int]]
LEADING = "..."
ARRAY = re.compile(r"\s*(\w+)?\s*(?:\[([^\]]*)\]\s*(\w+)?)?\s*")


class ShapesError(ValueError):
    """Shapes that are not written as they should be, or arguments that do not have them."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """The size of an axis: `text` as it is written, the `names` in it, and its `size`, all of
    its names known.
    """

    text: str
    names: tuple[str, ...]
    size: Callable[[Mapping[str, Any]], Any]

    def solve(self, size: Any, sizes: Sizes, name: str) -> Any:
        """What `name` is where the size is known, and all other names are. Raises ShapesError."""
        nothing, one = (self.size({**sizes, name: value}) for value in (0, 1))
        if one == nothing or (isinstance(size, int) and (size - nothing) % (one - nothing)):
            raise ShapesError(f"{self.text} cannot be {size} where {_said(sizes, self.names)}")
        return (size - nothing) // (one - nothing)


@dataclass(frozen=True, slots=True)
class Axes:
    """The dimensions of an array, after any others if it is `leading`."""

    dimensions: tuple[Dimension, ...]
    leading: bool = False

    def __str__(self) -> str:
        return f"[{' '.join([LEADING] * self.leading + [d.text for d in self.dimensions])}]"


@dataclass(frozen=True, slots=True)
class Result:
    """One array that an op gives: its axes and whose dtype it has, or the array that it is
    (`same`).
    """

    axes: Axes
    dtype: str
    same: str | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an op takes and gives. `choose(name=size, ...)` gives sizes that no expression does."""

    arrays: Mapping[str, Axes]
    results: tuple[Result, ...]
    choose: Choose | None = None

    def sizes(self, arguments: Mapping[str, Any]) -> Sizes:
        """What the names stand for, all arguments given; what is None is passed over. Raises
        ShapesError.
        """
        sizes: Sizes = {}
        open_ones: list[tuple[Dimension, Any]] = []
        for name, value in arguments.items():
            axes = self.arrays.get(name)
            if axes is None:
                if isinstance(value, int | str | float):
                    sizes[name] = value
            elif value is not None:
                self._take(name, axes, tuple(value.shape), sizes, open_ones)
        while open_ones:
            left = []
            for dimension, size in open_ones:
                unknown = [name for name in dimension.names if name not in sizes]
                if len(unknown) == 1:
                    sizes[unknown[0]] = dimension.solve(size, sizes, unknown[0])
                elif unknown:
                    left.append((dimension, size))
            if len(left) == len(open_ones):
                break
            open_ones = left
        if self.choose is not None:
            sizes.update(self.choose(**sizes))
        return sizes

    @staticmethod
    def _take(
        name: str, axes: Axes, shape: tuple[Any, ...], sizes: Sizes, open_ones: list[Any]
    ) -> None:
        rank = len(axes.dimensions)
        if len(shape) < rank or (len(shape) > rank and not axes.leading):
            raise ShapesError(f"{name} is {axes}, got {list(shape)}")
        if axes.leading:
            lead = shape[: len(shape) - rank]
            if LEADING not in sizes or len(lead) > len(sizes[LEADING]):
                sizes[LEADING] = lead
        for dimension, size in zip(axes.dimensions, shape[len(shape) - rank :], strict=True):
            if dimension.text in sizes:
                continue
            if dimension.names and dimension.names[0] == dimension.text:
                sizes[dimension.text] = size
            else:
                open_ones.append((dimension, size))

    def check(self, arguments: Mapping[str, Any]) -> Sizes:
        """What the names stand for. Raises ShapesError unless all arguments have the shapes that
        are declared.
        """
        sizes = self.sizes(arguments)
        whole = sizes.get(LEADING, ())
        for name, axes in self.arrays.items():
            value = arguments.get(name)
            if value is None:
                continue
            rank, shape = len(axes.dimensions), tuple(value.shape)
            lead = shape[:-rank]
            wanted = tuple([d.size(sizes) for d in axes.dimensions])
            if shape != lead + wanted or (lead and lead != whole[len(whole) - len(lead) :]):
                names = [part for d in axes.dimensions for part in d.names]
                raise ShapesError(
                    f"{name} is {axes}, where {_said(sizes, names)}; got {list(value.shape)}"
                )
        return sizes

    def outputs(self, sizes: Sizes) -> list[tuple[tuple[Any, ...], str]]:
        """The shape of each result, and whose dtype it has, for these `sizes`."""
        return [(self._shape(result.axes, sizes), result.dtype) for result in self.results]

    @staticmethod
    def _shape(axes: Axes, sizes: Sizes) -> tuple[Any, ...]:
        return (
            *(sizes[LEADING] if axes.leading else ()),
            *(d.size(sizes) for d in axes.dimensions),
        )


def _said(sizes: Mapping[str, Any], names: Any) -> str:
    known = {name: sizes[name] for name in dict.fromkeys(names) if name in sizes}
    return ", ".join(f"{name} is {size}" for name, size in known.items()) or "nothing is known"


def parse(
    text: str, arrays: tuple[str, ...], words: tuple[str, ...], choose: Choose | None = None
) -> Shapes:
    """Shapes as they are written, for an op with these `arrays` and, as `words`, its other
    parameters.

    Raises ShapesError for what cannot be read, an array that is missing, and a name that nothing
    gives a size to.
    """
    before, arrow, after = text.partition("->")
    if not arrow:
        raise ShapesError(f"shapes {text!r} have no ->")
    taken: dict[str, Axes] = {}
    for part in _split(before):
        name, inside, dtype = _match(part)
        if not name or inside is None or dtype:
            raise ShapesError(f"shapes: {part!r} is no argument, such as x [tok dim]")
        taken[name] = _axes(inside)
    if set(taken) != set(arrays):
        raise ShapesError(
            f"shapes: got those of {', '.join(taken)}, the arrays are {', '.join(arrays)}"
        )
    results = tuple(_result(part, taken) for part in _split(after))
    made = Shapes({name: taken[name] for name in arrays}, results, choose)
    if choose is None:
        known = {
            name for axes in taken.values() for d in axes.dimensions for name in d.names
        } | set(words)
        for result in results:
            unknown = [n for d in result.axes.dimensions for n in d.names if n not in known]
            if unknown or result.dtype not in (*taken, *words, *DTYPES):
                raise ShapesError(
                    f"shapes: nothing gives {', '.join(unknown) or result.dtype} of a result"
                )
    return made


DTYPES = ("float32", "int32", "int8", "float8_e4m3fn")
"""Dtypes that results may have by name. float32 is float64 where an argument is: it is what ops
accumulate in.
"""


def _result(part: str, taken: Mapping[str, Axes]) -> Result:
    name, inside, dtype = _match(part)
    if name is not None and name in taken and inside is None:
        return Result(taken[name], name, name)
    if inside is None or name or not dtype:
        raise ShapesError(
            f"shapes: {part!r} is no result, such as [tok dim] x, with x an array that has its "
            "dtype"
        )
    return Result(_axes(inside), dtype)


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _match(part: str) -> tuple[str | None, str | None, str | None]:
    match = ARRAY.fullmatch(part)
    if match is None:
        raise ShapesError(f"shapes: {part!r} cannot be read")
    return match[1], match[2], match[3]


def _axes(inside: str) -> Axes:
    words = inside.split()
    leading = words[:1] == [LEADING]
    return Axes(tuple(map(_dimension, words[leading:])), leading)


def _dimension(text: str) -> Dimension:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ShapesError(f"shapes: {text!r} is no dimension") from error
    names: dict[str, None] = {}
    for node in ast.walk(tree.body):
        match node:
            case ast.Name(id=name):
                names[name] = None
            case (
                ast.Constant(value=int())
                | ast.BinOp(op=ast.Add() | ast.Mult())
                | ast.Add()
                | ast.Mult()
                | ast.Load()
            ):
                pass
            case _:
                raise ShapesError(
                    f"shapes: {text!r} is no dimension: names, numbers, + and * without blanks"
                )
    return Dimension(
        text, tuple(names), itemgetter(text) if text in names else _evaluator(tree.body)
    )


def _evaluator(node: ast.expr) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the sizes of an expression's names."""
    match node:
        case ast.Name(id=name):
            return itemgetter(name)
        case ast.Constant(value=value):
            return lambda sizes: value
        case ast.BinOp(left=left, op=operator, right=right):
            combine = add if isinstance(operator, ast.Add) else mul
            one, other = _evaluator(left), _evaluator(right)
            return lambda sizes: combine(one(sizes), other(sizes))
    raise ShapesError(f"shapes: {ast.unparse(node)!r} is no dimension")
