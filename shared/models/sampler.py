"""From logits to tokens: which op runs in which case, told once for all backends and for what
they record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InternalError
from ..step import PROCESSING, Sampler

Array = Any
SETTINGS = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")
"""Fields of `sampling_layout` that the op `sample` takes, in its order."""
OF_THE_OP = (
    "history_row", "prompt_len", "presence", "frequency", "repetition", "repetition_inverse",
)  # fmt: skip
"""Fields of `processor_layout` that the op `penalties` takes as they are."""


def sample(
    ops: Any,
    variant: Sampler,
    logits: Array,
    settings: Mapping[str, Array],
    processors: Mapping[str, Array] | None = None,
) -> Array:
    """Tokens [row] int32 of `logits` [row vocab] float32, -1 where one is not finite.

    `settings` are fields of `sampling_layout`. Variants of PROCESSING need `processors`, see
    `known_processors`.
    """
    if variant == "greedy":
        return ops.greedy_sample(logits)
    own = {name: settings[name] for name in SETTINGS}
    if variant not in PROCESSING:
        scores = ops.quantize_logits(logits)
        return ops.sample(logits, scores, **own, filtered=variant != "random")
    if processors is None:
        raise InternalError(f"the sampler {variant!r} got no processors")
    return ops.penalised_sample(logits, **processors, **own, filtered=True)


def known_processors(
    where: Callable[[Array, Array, Array], Array], fields: Mapping[str, Array], last_tokens: Array
) -> dict[str, Array]:
    """The arguments of the op `penalties` from the fields of `processor_layout` and `histories`.

    A token of the history that only the device has is the last one of its row in `last_tokens`
    [rows + 1]. `where` is that of the framework.
    """
    known = {name: fields[name] for name in OF_THE_OP}
    entries = {"bias_ids": "bias_row", "bias": "bias_row", "mask": "mask_row"}
    for name, of in entries.items():
        row, table = fields[of], fields["masks" if name == "mask" else name]
        known[name] = where(row[:, None] < 0, -1, table[where(row < 0, 0, row)])
    pending = (fields["pending"] > 0) & (fields["history_row"] >= 0)
    last = where(pending, last_tokens[fields["rows"]], -1)
    return known | {"history": fields["histories"], "last": last}
