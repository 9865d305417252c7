"""Triton's functions are parsed by one thread after another, in Pythons that need it.

Before 3.11.8 and 3.12.2 Python counts the depth of a tree that it makes for all threads together
(github.com/python/cpython/issues/106905). Where a thread gives way meanwhile, to a callback of the
garbage collector as JAX has one, and another parses too, `ast.parse` raises a SystemError.
"""

from __future__ import annotations

import sys
from functools import wraps
from threading import Lock
from typing import Any

from triton.runtime import jit


def parse_in_turn() -> None:
    """Let one thread parse at a time, once for the process. It costs nothing: threads that parse
    wait for one another anyway.
    """
    if sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12):
        return
    functions: Any = getattr(jit, "JITCallable", jit.JITFunction)
    parse, lock = functions.parse, Lock()

    @wraps(parse)
    def in_turn(function: Any) -> Any:
        with lock:
            return parse(function)

    functions.parse = in_turn
