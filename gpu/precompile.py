"""Compiles Triton kernels side by side: a first pass over all programs notes them, and before they
are launched all are compiled into the cache and loaded.

Launched one after the other, the kernels of a model take half a minute of one core. Triton's front
end is Python, in which threads wait for one another: processes compile (`compile_pool.py`), threads
load that, and compile what is left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..ops import Plans
from ..ops.choosing import COMPOSITION
from ..shared.config import ResolvedConfig
from ..shared.models.calls import KINDS
from ..shared.models.config import ModelConfig
from .compile_pool import CompilePool, Key
from .kernels.counters import counters_of_capture, make_counters
from .plans import record

LOG = logging.getLogger("twinfer.gpu")
Noted = dict[Key, Any]
"""Kernels by their keys."""
THREADS = 16
_note_lock = Lock()
"""What keeps kernels from being launched holds for the whole process: were it taken back in another
order than it was put in place, it would stay.
"""


@contextmanager
def kernels_noted(tell: Callable[[Any, str], None] | None = None) -> Iterator[Noted]:
    """Within the block this thread launches nothing, so all results are undefined; kernels that are
    not compiled yet are noted, and `tell` gets each. Those that are, by an engine before, must not
    run either: what they are given may stand for places in memory.

    Without Triton, or with one older than 3.4, nothing is noted. One thread after another notes.
    """
    noted: Noted = {}
    try:
        from triton import knobs
        from triton.language import dtype
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield noted
        return

    own = get_ident()

    def note(**given: Any) -> Any:
        if get_ident() != own:
            return None if before is None else before(**given)
        kernel, compile = given["fn"].jit_function, given["compile"]
        # A constant that is text and a dtype's name would be read as that dtype: such a kernel is
        # compiled by its launch.
        if not any(isinstance(x, str) and dtype.is_dtype(x) for x in compile["constants"].values()):
            data = compile["specialization_data"]
            noted[id(kernel), data] = kernel
            if tell is not None:
                tell(kernel, data)
        return True

    def find(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=warmup or get_ident() == own, **named)

    with _note_lock:
        launch, before = JITFunction.run, knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook, JITFunction.run = note, find
        try:
            yield noted
        finally:
            knobs.runtime.jit_cache_hook, JITFunction.run = before, launch


class _Products(TorchFunctionMode):
    """Products of arrays without data: torch's own would import sympy, which takes two seconds."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What torch asks for a call."""
        named = kwargs or {}
        if function is F.linear:
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[0])
        if function is torch.mm:
            shape = args[0].shape[0], args[1].shape[1]
            return args[0].new_empty(shape, dtype=named.get("out_dtype"))
        return function(*args, **named)


def call_kernels(model: ModelConfig, config: ResolvedConfig, plans: Plans) -> None:
    """Call what the programs call of Triton, on arrays without data, so that it can be noted before
    there are weights. Where an implementation needs the data, what it launches is noted later.
    """
    zeros, calls = make_counters(torch.device("meta")), set()
    for kind in KINDS:
        plan = plans[kind]
        for call in record(model, config, kind):
            inside = any(plan[op].provider != COMPOSITION for op in call.parents)
            if inside or call.op not in plan or plan[call.op].provider != "triton":
                continue
            function = plan[call.op].implementation.function
            # Not by the arrays' ids: those of a stage from outside are gone by the next kind.
            key = (
                function,
                *(
                    (name, (x.shape, x.stride(), x.dtype) if torch.is_tensor(x) else repr(x))
                    for name, x in call.arguments.items()
                ),
            )
            if key in calls:
                continue
            calls.add(key)
            try:
                with _Products(), counters_of_capture(zeros):
                    function(**call.arguments)
            except Exception as error:
                LOG.debug("%s without data: %r", call.op, error)


def compile_together(
    noted: Noted, progress: Callable[[int], None], pool: CompilePool | None = None
) -> None:
    """Compile what was noted on all cores, and load it; the first launch of each then finds it.
    What `pool` was told of it compiles.

    What fails is tried once more by itself: a kernel that compiles was seen to fail beside others.
    What fails again is compiled at its first launch, or fails for good there, where its error
    belongs.
    """

    compiled = {} if pool is None else pool.wait(noted, progress)

    def make(kernel: Any, data: str) -> None:
        made = kernel.preload(data)
        # What launches it, C code for each signature, is compiled when it is first asked for: a
        # quarter of a second.
        made.run  # noqa: B018
        key = compiled.get((id(kernel), data))
        if key is not None and key != made.hash:
            LOG.info("%s was compiled twice: a process has another key for it", kernel)

    # Threads begin on the first GPU: what they loaded there the launches of another would not find.
    stay: Callable[[], None] | None = None
    if torch.cuda.is_available():
        stay = partial(torch.cuda.set_device, torch.cuda.current_device())
    failed = []
    # A long source takes long: what began last would be waited for alone.
    order = sorted(noted.items(), key=lambda item: len(item[1].src), reverse=True)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), initializer=stay) as threads:
        work = {threads.submit(make, k, data): (k, data) for (_, data), k in order}
        for done, made in enumerate(as_completed(work)):
            if (error := made.exception()) is not None:
                failed.append(work[made])
                LOG.debug("%s, beside others: %r, from %r", work[made][0], error, error.__cause__)
            progress(max(done + 1, len(compiled)))
    for kernel, data in failed:
        try:
            make(kernel, data)
        except Exception as error:
            LOG.info("%s is not compiled yet: %r, from %r", kernel, error, error.__cause__)
