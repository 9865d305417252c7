"""Limits of the options of the jax backend, and what they mean together."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

MAX_SHARDS = 256
NO_CACHE = "none"
"""`compilation_cache_dir` where compiled programs shall not be kept."""


def check_ladders(config: Any, sequences: int, tokens: int) -> None:
    """Raise ConfigError unless the ladders reach the largest step."""
    for name, last, limit in (
        ("decode_sizes", sequences, "max_num_seqs"),
        ("mixed_sizes", tokens, "max_num_batched_tokens"),
    ):
        sizes = getattr(config, name)
        if sizes is not None and sizes[-1] != last:
            raise ConfigError(f"{name}: got {sizes}, the last must be {limit}, {last}")
