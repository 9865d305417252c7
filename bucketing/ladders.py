"""The sizes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def decode_ladder(max_requests: int, step: int = 8, small: Sequence[int] = ()) -> tuple[int, ...]:
    """Request counts of decode programs: `small`, then multiples of `step`, up to `max_requests`
    (always the last).

    Above 32 steps the distance grows eightfold: padding is a small share there, and each program
    costs time at start. TPUs take 8, 16, 24, ... (a sublane is 8 rows); GPUs add 1, 2, 4 where the
    batch-1 latency matters.
    """
    sizes = {size for size in small if size < max_requests}
    sizes.update(range(step, min(max_requests, 32 * step + 1), step))
    sizes.update(range(40 * step, max_requests, 8 * step))
    sizes.add(max_requests)
    return tuple(sorted(sizes))


def mixed_ladder(max_tokens: int, smallest: int = 16, per_octave: int = 1) -> tuple[int, ...]:
    """Token counts of mixed programs: powers of two from `smallest`, and `max_tokens` as the last.

    `per_octave` sizes at even distances lead from one power of two to the next, none closer than
    `smallest` to another.
    """
    sizes = []
    size = smallest
    while size < max_tokens:
        step = max(smallest, size // per_octave)
        sizes += [between for between in range(size, 2 * size, step) if between < max_tokens]
        size *= 2
    sizes.append(max_tokens)
    return tuple(sizes)


def smallest_at_least(ladder: Sequence[int], value: int) -> int | None:
    """The smallest entry of the sorted `ladder` that is not below `value`, or None if there is
    none.
    """
    index = bisect_left(ladder, value)
    return ladder[index] if index < len(ladder) else None
