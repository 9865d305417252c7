"""From logits to tokens: which op runs in which case, told once for all backends and for what
they record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InternalError
from ..step import PENDING, PROCESSING, Sampler

Array = Any
SETTINGS = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")
"""Fields of `sampling_layout` that the op `sample` takes, in its order."""
NOT_OF_THE_OP = ("rows", "mask_row", "masks")
"""Fields of `processor_layout` that the op `penalties` does not take as they are."""


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
    if variant not in PROCESSING:
        scores = ops.quantize_logits(logits)
    elif processors is None:
        raise InternalError(f"the sampler {variant!r} got no processors")
    else:
        scores = ops.penalties(logits, **processors)
    return ops.sample(logits, scores, *(settings[name] for name in SETTINGS), variant != "random")


def known_processors(
    where: Callable[[Array, Array, Array], Array], fields: Mapping[str, Array], last_tokens: Array
) -> dict[str, Array]:
    """The arguments of the op `penalties` from the fields of `processor_layout`.

    A token of the history that only the device has is the last one of its row in `last_tokens`
    [rows + 1]. `where` is that of the framework.
    """
    history, last = fields["history"], last_tokens[fields["rows"]][:, None]
    known = {name: value for name, value in fields.items() if name not in NOT_OF_THE_OP}
    row = fields["mask_row"]
    return known | {
        "history": where(history == PENDING, last, history),
        "mask": where(row[:, None] < 0, -1, fields["masks"][where(row < 0, 0, row)]),
    }
