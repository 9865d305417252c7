"""Reads the tokens that a step sampled: how many of them each request takes, and which requests
end with them.
"""

from __future__ import annotations

import numpy as np

from .errors import InternalError
from .request import FinishReason, Request
from .request_table import Group, Loop


def find_finished(
    group: Group, lengths: np.ndarray, tokens: np.ndarray
) -> list[tuple[Request, FinishReason]]:
    """The requests that end with `tokens`, their last ones, which make them so long."""
    is_done = lengths >= group.max_total
    is_stop = group.stop_ids == tokens[:, None]
    if not (np.count_nonzero(is_done) or np.count_nonzero(is_stop)):
        return []
    # A stop id at a masked position cannot have been sampled; it is no end even if a worker says
    # so.
    stopped = is_stop.any(axis=1) & (lengths > group.min_total)
    return [
        (group.requests[index], FinishReason.STOP if stopped[index] else FinishReason.LENGTH)
        for index in np.flatnonzero(is_done | stopped).tolist()
    ]


def count_iterations(tokens: np.ndarray, requests: int, loop: Loop, is_void: bool) -> int:
    """How many decode steps a loop did that brought `tokens`. Raises InternalError if it cannot
    have.
    """
    if tokens.ndim == 2 and tokens.shape[1] >= requests:
        done = int(tokens.shape[0])
        if is_void and done == 0:
            return 0
        if not is_void and 1 <= done <= loop.steps:
            return done
    raise InternalError(
        f"a loop of {loop.steps} steps came back with tokens of shape {tokens.shape}"
    )


def count_taken(
    stop_ids: np.ndarray, tokens: np.ndarray, most: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How many of the tokens [m, n] of a loop each request takes, and the last that it looks at.

    All up to the first of its `stop_ids` [n, any], without that one if it is no token; no more than
    `most` [n], at least 1, if that is given.
    """
    done, width = tokens.shape
    if not done or not width:
        return np.zeros(width, np.int64), np.zeros(width, np.int64)
    is_end = (stop_ids == tokens[:, :, None]).any(axis=2) | (tokens < 0)
    if most is not None:
        is_end |= np.arange(1, done + 1)[:, None] == most
    looked_at = np.where(is_end.any(axis=0), is_end.argmax(axis=0) + 1, done)
    last = tokens[looked_at - 1, np.arange(width)]
    return looked_at - (last < 0), last


def flatten(taken: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `counts[i]` tokens of each column i of `taken` [m, n], one request's after
    another's.

    Returns (owner, iteration, token) of each: of [[5, 6], [7, 8]] and counts 2, 1: (0, 0, 5), (0,
    1, 7), (1, 0, 6).
    """
    owner = np.arange(len(counts)).repeat(counts)
    first = np.cumsum(counts) - counts
    iteration = np.arange(len(owner)) - first.repeat(counts)
    return owner, iteration, taken[iteration, owner]
