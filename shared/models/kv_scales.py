"""The scales of a narrow KV cache as parameters of the layers, and their names in checkpoints.

vLLM's own names come first, then those that ModelOpt and older tools of vLLM write; `kv_scale` is
that of K and of V.
"""

from __future__ import annotations

from collections.abc import Iterator

from .config import ModelConfig
from .table import Parameter, Part

LAYER = "model.layers.{layer}.self_attn."
NAMES = {
    "k_scale": ("k_scale", "k_proj.k_scale", "attn.k_scale", "kv_scale"),
    "v_scale": ("v_scale", "v_proj.v_scale", "attn.v_scale", "kv_scale"),
}


def scale_parameters(config: ModelConfig) -> Iterator[Parameter]:
    """k_scale and v_scale [kvhead] of each layer, if the engine has chosen to have them."""
    if config.kv_scales is None:
        return
    given = (None, None) if config.kv_scales == "checkpoint" else config.kv_scales
    for where, heads, axis, layers in _sorts(config):
        for (name, keys), value in zip(NAMES.items(), given, strict=True):
            parts, *others = [(Part(where + key, heads, axis),) for key in keys]
            yield Parameter(
                name, (heads,), (axis,), parts, layers, init="ones", dtype="float32",
                alternatives=tuple(others), is_scale=True, value=value,
            )  # fmt: skip


def _sorts(config: ModelConfig) -> Iterator[tuple[str, int, str, list[int]]]:
    """Where the scales of layers lie, their heads and the axis of these, and the layers: those that
    read another one's cache have its scales.
    """
    found: dict[tuple[str, int, str], list[int]] = {}
    for layer, window in enumerate(config.layer_windows):
        source = config.source_of(layer)
        where = LAYER if source == layer else LAYER.replace("{layer}", str(source))
        is_full = not window and config.full_heads is not None
        axis = "full_kv_heads" if is_full else "kv_heads"
        found.setdefault((where, config.heads(window).kv, axis), []).append(layer)
    for (where, heads, axis), layers in found.items():
        yield where, heads, axis, layers


def ignored_scales(config: ModelConfig) -> list[str]:
    """Patterns of the checkpoint's scales, where they are not read."""
    if config.kv_scales == "checkpoint":
        return []
    return sorted({f"*.self_attn.{key}" for keys in NAMES.values() for key in keys})
