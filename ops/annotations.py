"""The annotations of ops as words, however they were written.

With `from __future__ import annotations` Python keeps the text of an annotation, without it the
object that the text names. Both become one of `PARAMETERS`, by which bindings tell arrays from
Python values.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Optional, Union, get_args, get_origin

if TYPE_CHECKING:
    Array = Any
else:

    class Array:
        """An array of whichever framework runs the op: a word for annotations, which nothing is
        an instance of.
        """


PARAMETERS = ("Array", "Array | None", "float", "int", "bool", "str")
"""What a parameter of an op may be."""
NAMES: dict[str, Any] = {"Array": Array, "Optional": Optional, "Union": Union}
"""What a text may name that its module has not imported, or has imported for type checkers only."""


def signature_in_words(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, its annotations as words where they have one, else as they
    stand.
    """
    names = NAMES | _globals(function)
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=_word(p.annotation, names)) for p in signature.parameters.values()
    ]
    return signature.replace(
        parameters=parameters, return_annotation=_word(signature.return_annotation, names)
    )


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    return dict(getattr(function, "__globals__", {}))


def _word(annotation: Any, names: dict[str, Any]) -> Any:
    """The word for an annotation, or the annotation."""
    if annotation is inspect.Parameter.empty:
        return annotation
    value = annotation
    if isinstance(value, str):
        try:
            value = _named_by(ast.parse(value, mode="eval").body, names)
        except (SyntaxError, LookupError, AttributeError, TypeError):  # it may be any text
            return annotation
    word = _name(value)
    return word if word is not None else annotation


def _named_by(node: ast.expr, names: dict[str, Any]) -> Any:
    """The type that an expression names. Raises LookupError for what annotations of ops have no
    use for.
    """
    match node:
        case ast.Name(id=name):
            return names[name] if name in names else getattr(builtins, name)
        case ast.Attribute(value=owner, attr=name):
            return getattr(_named_by(owner, names), name)
        case ast.Constant(value=str() as text):
            return _named_by(ast.parse(text, mode="eval").body, names)
        case ast.Constant(value=None):
            return None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _named_by(left, names) | _named_by(right, names)
        case ast.Subscript(value=owner, slice=ast.Tuple(elts=parts)):
            return _named_by(owner, names)[tuple(_named_by(part, names) for part in parts)]
        case ast.Subscript(value=owner, slice=part):
            return _named_by(owner, names)[_named_by(part, names)]
    raise LookupError(ast.unparse(node))


def _name(value: Any) -> str | None:
    """The word for a type: one of PARAMETERS, or tuple[Array, ...] for results."""
    if get_origin(value) in (Union, types.UnionType):
        names = [_name(part) for part in get_args(value) if part is not types.NoneType]
        optional = types.NoneType in get_args(value)
        return "Array | None" if names == ["Array"] and optional else None
    if get_origin(value) is tuple:
        parts = [_name(part) for part in get_args(value)]
        return f"tuple[{', '.join(parts)}]" if parts and set(parts) == {"Array"} else None  # type: ignore[arg-type]
    name = getattr(value, "__name__", None)
    return name if isinstance(value, type) and name in PARAMETERS else None
