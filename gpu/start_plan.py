"""How much memory the KV cache took when this start was last measured, kept beside the compiled
code.

A later start with the same fingerprint (model, configuration, plan, sources, versions, device, free
memory to within a class) takes what was measured then, so that it has the same number of pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..shared.cache_folder import write_atomically
from ..shared.config import DeviceInfo, ResolvedConfig
from ..shared.models.config import ModelConfig
from .backend import key_factors, open_cache

PLAN = "start.json"
ROOMS = ("bucketing", "gpu", "shared")
"""Whose sources decide what programs take; those of ops are in the plan."""
CLASS = 1 << 28
"""Starts whose free memory differs by less than this (bytes, both counted down to a multiple)
share a plan.
"""


def start_factors(
    model: ModelConfig, config: ResolvedConfig, plan_hash: str, device: DeviceInfo, free: int
) -> dict[str, Any]:
    """All that the memory left for the cache depends on. `free`: bytes free once the weights are
    loaded.
    """
    asked = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("compilation", "demand")
    }
    compilation = asdict(config.compilation) | {"debug_dump_path": None, "cache_dir": None}
    memory = {"total": device.memory, "free_class": free // CLASS, "class_bytes": CLASS}
    more = {
        "config": asked,
        "compilation": compilation,
        "memory": memory,
        "sources": _sources(Path(__file__).parents[1]),
    }
    factors = key_factors(plan_hash, config.compilation, asdict(model)) | more
    kept: dict[str, Any] = json.loads(json.dumps(factors, default=str, sort_keys=True))
    return kept


def _sources(package: Path) -> str:
    """Hex digest of the sources of ROOMS."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_start_plan(root: str | None, factors: Mapping[str, Any], free: int) -> int | None:
    """Bytes of the KV cache of a start with these factors, or None: not measured yet, or more
    than is free now.
    """
    folder = open_cache(root, factors)
    if folder is None or not (folder / PLAN).exists():
        return None
    try:
        size = json.loads((folder / PLAN).read_text(encoding="utf-8"))["kv_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    valid = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= free
    return size if valid else None


def write_start_plan(root: str | None, factors: Mapping[str, Any], kv_bytes: int) -> Path | None:
    """Keep what was measured; None where nothing can be kept."""
    folder = open_cache(root, factors)
    if folder is None:
        return None
    write_atomically(folder / PLAN, json.dumps({"kv_bytes": kv_bytes}))
    return folder / PLAN
