"""Which token would complete a sequence that a request's output may not have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .step import mask_words


class BannedSequences:
    """Follows one request's tokens, those of its output alone. `sequences` have two tokens or more.
    `stop_ids` are banned too until there are `min_tokens` tokens.
    """

    def __init__(
        self, sequences: Sequence[tuple[int, ...]], stop_ids: Sequence[int], min_tokens: int
    ) -> None:
        self._endings: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for one in sequences:
            self._endings[one[:-1]].append(one[-1])
        self._lengths = sorted({len(before) for before in self._endings})
        self._stop_ids, self._min_tokens = stop_ids, min_tokens
        self._count = 0
        self._latest: list[int] = []

    def take(self, token: int) -> None:
        """The next token of the output."""
        self._count += 1
        self._latest = [*self._latest, token][-self._lengths[-1] :]

    def masked(self, words: np.ndarray) -> np.ndarray:
        """`words` [W] int32, a mask of tokens, without those that may not follow."""
        found = words.copy()
        if tokens := [token for token in self._banned() if token < 32 * len(words)]:
            listed = np.array(tokens, np.uint32)
            np.bitwise_and.at(found.view(np.uint32), listed // 32, ~(np.uint32(1) << listed % 32))
        return found

    def _banned(self) -> Iterator[int]:
        if self._count < self._min_tokens:
            yield from self._stop_ids
        for length in self._lengths:
            yield from self._endings.get(tuple(self._latest[-length:]), ())


def every_token(vocab_size: int) -> np.ndarray:
    """The mask [W] int32 of a whole vocabulary, with nothing behind it."""
    bits = np.arange(32 * mask_words(vocab_size)) < vocab_size
    return np.packbits(bits, bitorder="little").view(np.int32)
