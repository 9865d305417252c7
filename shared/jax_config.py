"""Checks of the options that only the jax backend has: shards, the ladder of programs, and where they are kept."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

MAX_SHARDS = 256
NO_CACHE = "none"
"""`compilation_cache_dir` where compiled programs shall not be kept."""
FIELDS = ("decode_sizes", "mixed_sizes", "compilation_cache_dir", "aot_folder")


def check_fields(config: Any) -> None:
    """Raise ConfigError unless the fields of this module are well formed; what they mean together is checked later."""
    shards = config.tensor_parallel_size
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"tensor_parallel_size: got {shards!r}, allowed is 1 to {MAX_SHARDS}")
    for name in ("decode_sizes", "mixed_sizes"):
        sizes = getattr(config, name)
        if sizes is None:
            continue
        if isinstance(sizes, str) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(f"{name}: got {sizes!r}, must be a list of positive integers")
        if list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"{name}: got {sizes!r}, must rise")
    for name in ("compilation_cache_dir", "aot_folder"):
        folder = getattr(config, name)
        if folder is not None and (not isinstance(folder, str) or not folder):
            raise ConfigError(f"{name}: got {folder!r}, must be the path of a folder")


def check_backend(config: Any) -> None:
    """Raise ConfigError if a field of this module is set for another backend."""
    for name in FIELDS:
        if getattr(config, name) is not None:
            raise ConfigError(f"{name}: got {getattr(config, name)}, which is for the jax backend")


def check_ladders(config: Any, sequences: int, tokens: int) -> None:
    """Raise ConfigError unless the ladders reach the largest step."""
    for name, last, limit in (
        ("decode_sizes", sequences, "max_num_seqs"),
        ("mixed_sizes", tokens, "max_num_batched_tokens"),
    ):
        sizes = getattr(config, name)
        if sizes is not None and sizes[-1] != last:
            raise ConfigError(f"{name}: got {sizes}, the last must be {limit}, {last}")
