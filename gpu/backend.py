"""What compiles a traced graph: Inductor with our options, or nothing; and the folders that keep and show it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..shared.compilation_config import ResolvedCompilation
from ..shared.errors import ConfigError

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
FACTORS = "factors.json"


def make_backend(compilation: ResolvedCompilation, name: str) -> Backend:
    """A backend for `torch.compile`: Inductor, or (level 1, `use_inductor` off) the graph as it was traced."""
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
    (Path(folder) / f"{name}.graph.py").write_text(module.print_readable(print_output=False), encoding="utf-8")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that this Inductor does not have."""
    if not options:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            raise ConfigError(f"inductor_compile_config: torch {torch.__version__} has no option {name!r}")


def key_factors(plan_hash: str, compilation: ResolvedCompilation, model: Mapping[str, Any]) -> dict[str, Any]:
    """All that the generated code depends on, as JSON values. The plan hash covers the sources of the kernels."""
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


def fingerprint(factors: Mapping[str, Any]) -> str:
    """A digest of factors."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:24]


def default_cache_dir() -> str:
    """Where compiled code is kept unless the user says otherwise."""
    return str(Path.home() / ".cache" / "twinfer" / "torch")


def open_cache(root: str | None, factors: Mapping[str, Any]) -> Path | None:
    """The folder of these factors below `root` (None: the default one, if it can be had), made if it is not there.

    The factors are stored beside what is kept, and a folder whose factors differ is emptied. What lies there is loaded
    as code, so a folder that others may write to is refused. Raises ConfigError.
    """
    folder = Path(root or default_cache_dir()) / fingerprint(factors)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        stored = folder / FACTORS
        if stored.exists() and json.loads(stored.read_text(encoding="utf-8")) != factors:
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        if not stored.exists():
            write_atomically(stored, json.dumps(factors, indent=1, sort_keys=True))
    except (OSError, ValueError) as error:
        if root is None:
            return None
        raise ConfigError(f"cache_dir: got {root}: {error}") from error
    return folder


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"cache_dir: got {folder}, which others may write to; code is loaded from there")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or none."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


@contextmanager
def code_kept_in(folder: Path | None) -> Iterator[None]:
    """Within the block, Inductor and Triton keep what they compile in `folder`."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    if folder is None:
        yield
        return
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(folder / part) for name, part in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
