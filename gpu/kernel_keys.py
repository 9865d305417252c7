"""Keys of Triton's kernels in its cache on disk that are the same in every process.

Triton takes a digest of a function when it first needs one. Constants that a function reads by what
it calls belong to it, but those of a callee without a digest yet are left out: the key of a kernel
would depend on which kernel of the process came first. So what is called comes first here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def hash_compiler() -> None:
    """Have Triton take a digest of its own files, which it does before its first kernel: a third of
    a second. An older one does so later.
    """
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def settle_keys(*kernels: Any) -> None:
    """Take the digests of kernels, each behind those of all that it calls."""
    settled: set[int] = set()

    def settle(function: Any) -> None:
        if id(function) not in settled:
            settled.add(id(function))
            for callee in _callees(function):
                settle(callee)
            try:
                function.cache_key  # noqa: B018 - kept with the function
            except Exception:
                function.hash = None  # its launch says why

    for kernel in kernels:
        settle(kernel)


def import_kernels() -> None:
    """Import all modules of kernels that this Triton has the language for."""
    package = import_module(f"{__package__}.kernels")
    for module in iter_modules(package.__path__):
        if "kernel" in module.name:
            with suppress(ImportError, AttributeError):
                import_module(f"{package.__name__}.{module.name}")


def settle_own_keys() -> None:
    """`settle_keys` of all kernels of the torch worker. Some are not imported before they are
    launched, which is late.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    import_kernels()
    kernels = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            # Another thread may be importing it.
            values = [*vars(module).values()]
            kernels += [each for each in values if isinstance(each, JITFunction)]
    settle_keys(*kernels)


def _callees(function: Any) -> Iterator[Any]:
    """The functions of Triton that one names, by themselves or as part of a module."""
    from triton.runtime import jit

    kinds = getattr(jit, "JITCallable", jit.JITFunction)
    names = function.fn.__code__.co_names
    for name in names:
        value = function.fn.__globals__.get(name)
        parts = [value]
        if isinstance(value, ModuleType):
            parts = [vars(value).get(part) for part in names]
        yield from (part for part in parts if isinstance(part, kinds))
