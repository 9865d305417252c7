"""Which n-grams stood in the texts of running requests: where the last one of a text stood nowhere
before, there is nothing to guess from, and the text need not be looked through.
"""

from __future__ import annotations

import numpy as np

from .request_table import RequestTable

SLOTS_PER_TOKEN = 16
MOST_BITS = 18
FEW = 4
"""Fewer texts are looked through in less time than it takes to ask."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)


class NgramFilter:
    """A set of n-grams for each row of a table, kept as the row's tokens come: flags by hash.

    It never denies an n-gram that stood there. It may claim one that did not, whose hash another
    one has: for few of the texts that fill a sixteenth of their flags, for a third of those of
    100 000 tokens. A row has `SLOTS_PER_TOKEN` bytes for each token of the longest text, rounded up
    to a power of two, but no more than 2 ** MOST_BITS (256 KiB).
    """

    def __init__(self, table: RequestTable, size: int) -> None:
        """For n-grams of `size` tokens."""
        self._table, self._size = table, size
        wanted = (SLOTS_PER_TOKEN * table.max_model_len - 1).bit_length()
        self._bits = min(wanted, MOST_BITS)
        # Memory of zeros: what nobody writes to takes none.
        self._stood = np.zeros(table.max_rows << self._bits, np.bool_)
        self._epochs = np.full(table.max_rows, -1, np.int64)
        # The n-grams of a row that end before this position are in its set.
        self._ends = np.zeros(table.max_rows, np.int64)

    def may_repeat(self, rows: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Whether the n-grams that end at positions `lasts` of `rows`, all different, may have
        stood in these rows before. All tokens up to there are known.
        """
        is_long: np.ndarray = lasts >= self._size
        if len(rows) < FEW or not is_long.any():
            return is_long
        for index in np.flatnonzero(self._epochs[rows] != self._table.epoch[rows]).tolist():
            self._begin(int(rows[index]), int(lasts[index]))
        firsts = self._ends[rows]
        counts = np.maximum(lasts - firsts, 0)
        ends = firsts + counts
        # Those that are asked for, and before them those that have come since.
        owner = np.arange(len(rows)).repeat(counts)
        within = np.arange(len(owner)) - (np.cumsum(counts) - ends)[owner]
        slots = self._slots(
            np.concatenate((rows[owner], rows)),
            np.concatenate((within, np.maximum(lasts, self._size))),
        )
        self._stood[slots[: len(owner)]] = True
        self._ends[rows] = ends
        is_long &= self._stood[slots[len(owner) :]]
        return is_long

    def _begin(self, row: int, last: int) -> None:
        """Let a row have another request: one at a time, as texts may be long."""
        first = self._size - 1
        self._stood[row << self._bits : (row + 1) << self._bits] = False
        places = np.arange(first, last)
        self._stood[self._slots(np.full(len(places), row), places)] = True
        self._ends[row], self._epochs[row] = max(first, last), self._table.epoch[row]

    def _slots(self, rows: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Where the flags are of the n-grams that end at `lasts` of `rows`."""
        places = rows * self._table.max_model_len + lasts
        mixed = np.zeros(len(places), np.uint64)
        for back in range(self._size):
            mixed += self._table.tokens_flat.take(places - back).astype(np.uint64)
            mixed *= _PRIME
        mixed >>= np.uint64(64 - self._bits)
        return (rows << self._bits) + mixed.astype(np.int64)
