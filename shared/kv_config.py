"""Checks of the options that say what the KV cache holds: its dtype, and the scales of a narrow
one.
"""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

NARROW = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn"}
"""Caches that hold x / scale in a byte an entry, and numpy's names of their dtypes."""
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", *NARROW)


def resolve_cache(config: Any, dtype: str) -> tuple[str, tuple[float, float] | None]:
    """(numpy's name of the cache's dtype, scales of K and V that are given) for a model that runs
    in `dtype`. Raises ConfigError.
    """
    kind, scales = config.kv_cache_dtype, config.kv_cache_scales
    if kind in NARROW:
        return NARROW[kind], None if scales is None else (float(scales[0]), float(scales[1]))
    if kind not in ("auto", dtype):
        allowed = ", ".join(("auto", dtype, *NARROW))
        raise ConfigError(
            f"kv_cache_dtype: got {kind}, allowed are {allowed} for a model that runs in {dtype}"
        )
    if scales is not None:
        raise ConfigError(f"kv_cache_scales: got {scales}, a cache of {dtype} has none")
    return dtype, None
