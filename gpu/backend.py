"""What compiles a traced graph: Inductor with our options, or nothing; and the folders that keep
and show it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from ..shared.cache_folder import default_root, open_private
from ..shared.compilation_config import ResolvedCompilation
from ..shared.errors import ConfigError
from ..shared.folders import make_folder

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def make_backend(compilation: ResolvedCompilation, name: str) -> Backend:
    """A backend for `torch.compile`: Inductor, or (level 1, `use_inductor` off) the graph as it
    was traced.
    """
    options = dict(compilation.inductor_compile_config)
    dump = compilation.debug_dump_path

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if dump:
            write_graph(dump, name, module)
        if not compilation.use_inductor:
            return module.forward
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.compile_fx import compile_fx

        known = set(map(id, PyCodeCache.modules))
        compiled = compile_fx(module, inputs, config_patches=options)
        if dump:
            for number, made in enumerate(m for m in PyCodeCache.modules if id(m) not in known):
                if getattr(made, "__file__", None):
                    shutil.copy(made.__file__, Path(dump) / f"{name}.generated_{number}.py")
        return compiled

    return backend


def write_graph(folder: str, name: str, module: torch.fx.GraphModule) -> None:
    """Write a traced graph as readable code."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.graph.py").write_text(
        module.print_readable(print_output=False), encoding="utf-8"
    )


def check_options(compilation: ResolvedCompilation) -> None:
    """Raise ConfigError for an option that this Inductor does not have, and for a folder that
    cannot be made.
    """
    dump, options = compilation.debug_dump_path, compilation.inductor_compile_config
    if dump:
        make_folder("debug_dump_path", dump)
    if not options:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            raise ConfigError(
                f"inductor_compile_config: torch {torch.__version__} has no option {name!r}"
            )


def key_factors(
    plan_hash: str, compilation: ResolvedCompilation, model: Mapping[str, Any]
) -> dict[str, Any]:
    """All that the generated code depends on, as JSON values. The plan hash covers the sources
    of the kernels.
    """
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = None
    device = "cpu"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{properties.name} {properties.major}.{properties.minor}"
        versions["cuda"] = torch.version.cuda
    factors = {"plan": plan_hash, "model": dict(model), "versions": versions, "device": device}
    return json.loads(json.dumps(factors | compilation.factors(), default=str))


def open_cache(root: str | None, factors: Mapping[str, Any]) -> Path | None:
    """The folder of these factors below `root`. None: the default one; if it cannot be had, a
    warning says so. Raises ConfigError.
    """
    try:
        return open_private(
            "cache_dir", default_root("torch") if root is None else Path(root), factors
        )
    except (OSError, ValueError) as error:
        if root is not None:
            raise ConfigError(f"cache_dir: got {root}: {error}") from error
        why = f"cache_dir: compiled code is not kept: {error}; each start compiles it again"
        warnings.warn(why, stacklevel=1)  # one place: who asks again tells it no second time
        return None


_folder_lock = RLock()
"""The folders are the whole process': another thread would take them away, or leave its own."""


@contextmanager
def code_kept_in(folder: Path | None) -> Iterator[None]:
    """Within the block, Inductor and Triton keep what they compile in `folder`, or where they do
    without one. Threads are in such blocks one after another.
    """
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    with _folder_lock:
        before = {name: os.environ.get(name) for name in names}
        if folder is not None:
            os.environ.update({name: str(folder / part) for name, part in names.items()})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
