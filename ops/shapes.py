"""What ops give for what they get, in shapes and dtypes alone: to record the calls of a model
without computing it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from .choosing import named
from .declare import REGISTRY, Op, OpError
from .dimensions import ShapesError
from .recording import Recorder

Empty = Callable[..., Any]
"""(like, shape, dtype=None): an array of that shape without data, of the named dtype or of that
of `like`.
"""


def without_data(op: Op, empty: Empty, *, donated: bool = True) -> Callable[..., Any]:
    """A function of the op's parameters that makes its results without data; arguments of other
    shapes are refused.

    A result that is an argument is that argument, or new memory unless `donated`. Raises OpError,
    when it is called, for what the op does not take.
    """
    shapes, names = op.shapes, tuple(op.signature.parameters)
    if shapes is None:
        raise OpError(
            f"op {op.name!r} does not say its shapes, so that it cannot be recorded without data"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            sizes = shapes.check(given)
        except ShapesError as error:
            raise OpError(f"op {op.name!r}: {error}") from error
        like = next(given[name] for name in shapes.arrays)
        made = []
        for result, (shape, dtype) in zip(shapes.results, shapes.outputs(sizes), strict=True):
            if donated and result.same is not None:
                made.append(given[result.same])
            elif dtype in shapes.arrays:
                made.append(empty(given[dtype], shape))
            else:
                made.append(empty(like, shape, given.get(dtype, dtype)))
        return made[0] if op.gives_one else tuple(made)

    return call


def recording_ops(recorder: Recorder, empty: Empty) -> Any:
    """A namespace of the ops, the coarse ones as compositions of the others, whose calls are
    recorded.
    """
    space = SimpleNamespace()
    for op in REGISTRY:
        if op.level == "coarse":
            setattr(space, op.name, recorder.wrap(op, named(op, partial(op.reference, space))))
        elif op.shapes is not None:
            setattr(space, op.name, recorder.wrap(op, without_data(op, empty)))
    return space
