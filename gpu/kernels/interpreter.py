"""Triton's interpreter (TRITON_INTERPRET=1), put right where it does not compute what a GPU does.

In triton 3.5 to 3.7 it cuts instead of rounding when it narrows a float, takes bit patterns of
bfloat16 for numbers in `tl.dot` and in differences, and lets numpy warn where IEEE arithmetic gives
an infinity or NaN. The kernels' tests on a CPU rest on this.

What it does again and again with the same result took most of the tests' time: to put its functions
in the place of the language's, to look up numpy's dtypes, and to check shapes. It is done once. And
it computes whether sums overflow, which it then tells nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NARROW = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
}


def repair() -> None:
    """Replace the faulty parts, once for the process."""
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = _converting(interpreter._convert_float)
    builder.create_dot = _widening(builder.create_dot)
    builder.cast_impl = _rounding(builder.cast_impl)
    builder.create_fsub = _subtracting(builder.create_fsub)
    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.block_type.__init__ = _checking_once(tl.block_type.__init__)
    tl.tensor.__init__ = _wrapping_once(tl.tensor.__init__)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # else an overflow ends the kernel
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in NARROW or target not in NARROW:
            return np.asarray(original(values, source, target, rounding))
        bits = np.dtype(f"uint{target.primitive_bitwidth}")
        return np.ascontiguousarray(values).view(NARROW[source]).astype(NARROW[target]).view(bits)

    return convert


def _rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Integers to bfloat16 and back; numpy would take the bits for a number."""

    def cast(self: Any, src: Any, target: Any) -> Any:
        scalar = target.scalar
        if scalar is tl.bfloat16 and src.dtype.scalar is not tl.float32:
            values = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return interpreter.TensorHandle(values, scalar)
        return original(self, src, target)

    return cast


def _widening(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _wide(a), _wide(b), *rest)

    return dot


def _subtracting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Differences of bfloat16, rounded once; numpy would subtract their bits."""

    def subtract(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar is not tl.bfloat16:
            return original(self, a, b)
        values = (_wide(a).data - _wide(b).data).astype(ml_dtypes.bfloat16)
        return interpreter.TensorHandle(values.view(np.uint16), tl.bfloat16)

    return subtract


def _wide(x: Any) -> Any:
    if x.dtype.scalar is not tl.bfloat16:
        return x
    values = np.ascontiguousarray(x.data).view(ml_dtypes.bfloat16).astype(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def _silent(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return original(self, *args, **kwargs)

    return call


def _patching_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch the language at the first launch, for the rest of the process.

    Triton does it at each launch, and again at each call of a function in it, which walks through
    all members of the language and finds its own patches. It reads the modules to patch from the
    globals of the function; here they are both that it knows.
    """

    @cache
    def patch() -> None:
        original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patched(fn: Any) -> Any:
        patch()
        return SimpleNamespace(restore=lambda: None)

    return patched


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """numpy's dtypes of Triton's: the original makes a table of all of them at each call."""
    found: dict[str, np.dtype[Any]] = {}

    def dtype_of(type_: Any) -> np.dtype[Any]:
        scalar = type_.scalar
        if scalar.name not in found:
            found[scalar.name] = original(scalar)
        return found[scalar.name]

    return dtype_of


def _checking_once(original: Callable[..., None]) -> Callable[..., None]:
    """A block's type is made for each operation. Few shapes are, and each is checked and written
    once.
    """
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = _numbers(shape)
        if numbers not in known:
            original(self, element_ty, shape)
            known[numbers] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, written = known[numbers]
        self.name = f"<{written}, {element_ty}>"

    return init


def _wrapping_once(original: Callable[..., None]) -> Callable[..., None]:
    """What a tensor says of its shape is made of several objects, which nobody changes."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type_: Any) -> None:
        numbers = _numbers(type_.shape) if type_.is_block() else ()
        if numbers not in known:
            original(self, handle, type_)
            known[numbers] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.shape, self.numel = known[numbers]

    return init


def _numbers(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of Python's, of numbers: comparing those of the language takes long."""
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    return tuple([x.value if isinstance(x, tl.constexpr) else x for x in sizes])
