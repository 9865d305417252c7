"""What the torch-xla backend does not do: options that would have no effect there are refused."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

ALLOWED: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "it drives one device"),
    "decode_steps": (1, "no program of it is a loop of steps"),
    "row_invariant": (False, "XLA sums in another order for another number of rows"),
}
"""By option, the only value that there is, and why."""


def check_torch_xla(config: Any, cache_dtype: str) -> None:
    """Raise ConfigError for an option that the backend cannot follow."""
    for name, (allowed, why) in ALLOWED.items():
        value = getattr(config, name)
        if value != allowed:
            raise ConfigError(
                f"{name}: got {value}, the torch-xla backend allows {str(allowed).lower()}: {why}"
            )
    if cache_dtype == "float8_e4m3fn":
        raise ConfigError(
            f"kv_cache_dtype: got {config.kv_cache_dtype}, the torch-xla backend allows int8 and "
            "the floats of models: torch-xla cannot move fp8 by its bits"
        )
