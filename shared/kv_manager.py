"""Pages of the KV cache: who holds them, and which may be found again by their content. Pure
integers.

A page holds the keys and values of consecutive tokens of a sequence, in every layer of a page group
(`page_groups.py`); all groups take their pages from this one pool. What a page holds is a function
of its group and of all tokens from the start of the sequence to the page's end; so a full page is
named by its group and a chained digest, for each `page_size` tokens:

    digest(page i) = blake2b(digest(page i - 1) + token ids of page i),  digest(page -1) =
                                                                         blake2b(salt)

Requests with different salts never share a page. A page is in exactly one of three places:

- *held*: some requests refer to it (its reference count says how many);
- *idle*: nobody refers to it, but its content is registered and may be found again; the longest
  idle is evicted first;
- *free*: nobody refers to it, and its content is worthless.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Protocol

import numpy as np

from .errors import ConfigError, InternalError

DIGEST_BYTES = 16
"""128 bits: by the birthday bound 2**40 different pages collide with a probability below 2**-48."""


_EMPTY = blake2b(digest_size=DIGEST_BYTES)


def _digest(data: bytes) -> bytes:
    state = _EMPTY.copy()  # sooner made than a new one
    state.update(data)
    return state.digest()


def root_digest(salt: str) -> bytes:
    """The digest before the first page of every sequence under `salt`."""
    # The prefix makes a root differ from the digest of a page, whatever a client writes into its
    # salt.
    return _digest(b"root:" + salt.encode("utf-8", "surrogatepass"))


def extend_digests(
    digests: list[bytes], tokens: np.ndarray, count: int, page_size: int, salt: str
) -> None:
    """Extend `digests` in place to the first `count` pages of `tokens` (`int32`, contiguous, at
    least those pages).
    """
    first = len(digests)
    if count <= first:
        return
    data = tokens[first * page_size : count * page_size].tobytes()
    width = 4 * page_size
    digest = digests[-1] if digests else root_digest(salt)
    for offset in range(0, len(data), width):
        digest = _digest(digest + data[offset : offset + width])
        digests.append(digest)


class Hashed(Protocol):
    """A sequence whose pages have digests: a request."""

    page_hashes: list[bytes]
    cache_salt: str


def append_digests(
    sequences: Sequence[Hashed], columns: Sequence[int], tokens: np.ndarray
) -> list[bytes]:
    """The digests of one page of each sequence, page `columns[i]` with the tokens `tokens[i]`
    (`int32`).

    They are appended to `page_hashes`, unless they stand there. Raises InternalError where more
    than one is missing.
    """
    data, width = tokens.tobytes(), 4 * tokens.shape[1]
    digests, offset = [], 0
    for sequence, column in zip(sequences, columns, strict=True):
        chained = sequence.page_hashes
        if len(chained) == column:
            before = chained[-1] if chained else root_digest(sequence.cache_salt)
            chained.append(_digest(before + data[offset : offset + width]))
        elif len(chained) < column:
            raise InternalError(f"page {column} of a sequence has {len(chained)} digests before it")
        digests.append(chained[column])
        offset += width
    return digests


class KVManager:
    """Hands out pages, counts references, remembers content.

    `page_size` is that of digests: pages of a group may hold a multiple of it.

    Not thread-safe. Arrays that go out are the caller's own; nothing here aliases them. Steps run
    in order on the device, so a released page may be handed out at once: whatever is in flight
    reads and writes it earlier.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        num_groups: int = 1,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_releases = 0
        """Grows with each `release`: the only event after which more pages are available."""
        self._references = np.zeros(num_pages, np.int32)
        # A stack, so that the page that was released last, whose table entries are warm, is taken
        # first.
        self._free = np.arange(num_pages, dtype=np.int64)[::-1].copy()
        self._num_free = num_pages
        # OrderedDict, as a plain dict takes longer and longer to find its first key after many
        # removals in front.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._registered = np.zeros(num_pages, np.bool_)
        # By group.
        self._page_of: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._digest_of: dict[int, bytes] = {}
        self._group_of = np.zeros(num_pages, np.int32)

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now: free and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages that some request refers to."""
        return self.num_pages - self.available

    @property
    def num_registered(self) -> int:
        """Pages, held or idle, that can be found by content."""
        return len(self._digest_of)

    def find(self, digest: bytes, group: int) -> int | None:
        """The registered page of a group with this content. Changes nothing; see `match`."""
        return self._page_of[group].get(digest)

    def match(self, digests: Sequence[bytes], limit: int, group: int = 0) -> list[int]:
        """The registered pages of the longest known prefix of `digests`, at most `limit`. Changes
        nothing.

        Valid until the next `allocate`, which may evict them: call `acquire` before.
        """
        page_of = self._page_of[group]
        pages = []
        for digest in digests[:limit]:
            page = page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` are idle, so that acquiring them makes fewer pages available.
        Changes nothing.
        """
        return sum(page in self._idle for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Refer to pages that `match` found once more. Raises InternalError if one is not
        registered any more.
        """
        for page in pages:
            if page not in self._digest_of:
                raise InternalError(f"page {page} was acquired but is not registered")
            self._idle.pop(page, None)
            self._references[page] += 1

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages `[count] int64` of unknown content, each referred to once.

        Free ones go first; then idle ones are evicted, least recently released first.
        Raises InternalError, and changes nothing, if fewer are available.
        """
        if count > self.available:
            raise InternalError(
                f"{count} pages were asked for, {self.available} of {self.num_pages} are available"
            )
        pages = np.empty(count, np.int64)
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        pages[:from_free] = self._free[self._num_free : self._num_free + from_free]
        for index in range(from_free, count):
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            pages[index] = page
        self._references[pages] = 1
        return pages

    def release(self, pages: np.ndarray) -> None:
        """Give up one reference to each of `pages` (different pages, in the order of the sequence).

        Raises InternalError, and changes nothing, if one is not held.
        """
        left = self._references[pages] - 1
        if left.size and left.min() < 0:
            raise InternalError(f"page {pages[left < 0][0]} was released but nobody holds it")
        self._references[pages] = left
        self._put_back(pages[left == 0])

    def release_shared(self, pages: np.ndarray) -> None:
        """Give up one reference for each entry of `pages`, in which a page may stand more than
        once: several requests leave it behind in the same step.

        Raises InternalError, and changes nothing, if one is not held so often.
        """
        different, counts = np.unique(pages, return_counts=True)
        left = self._references[different] - counts
        if left.size and left.min() < 0:
            page = different[left < 0][0]
            raise InternalError(f"page {page} was released more often than it is held")
        self._references[different] = left
        self._put_back(different[left == 0])

    def _put_back(self, pages: np.ndarray) -> None:
        """Make `pages`, which nobody holds any more, idle if they are registered, else free."""
        # Tail first: a tail is worthless without its root, which therefore has to be evicted last.
        ended = pages[::-1]
        registered = self._registered[ended]
        worthless = ended[~registered]
        self._free[self._num_free : self._num_free + worthless.size] = worthless
        self._num_free += worthless.size
        for page in ended[registered].tolist():
            self._idle[page] = None
        self.num_releases += 1

    def register(self, pages: Sequence[int], digests: Sequence[bytes], group: int = 0) -> None:
        """Let the held `pages` of a group be found by `digests`. Where another page has that
        content already, that one stays.

        The caller vouches that all their tokens are known, and computed by the steps scheduled so
        far, the one being built included: a reader is in that step or a later one, steps run in
        order, and in a mixed step every layer writes all keys and values before it attends to any.
        In a step of single tokens it may read all but a request's last slot before: what such a
        step computes counts from the next one on. Raises InternalError if a page is not held or has
        a digest already.
        """
        page_of, digest_of = self._page_of[group], self._digest_of
        held, new = self._references[pages].tolist(), []
        for page, digest, references in zip(pages, digests, held, strict=True):
            if digest in page_of:
                continue
            if page in digest_of or not references:
                raise InternalError(
                    f"page {page} cannot be registered: it is not held, or registered already"
                )
            page_of[digest] = page
            digest_of[page] = digest
            new.append(page)
        self._registered[new] = True
        self._group_of[new] = group

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find `pages` any more: their content is doubtful. Whoever holds one keeps
        it; an idle one becomes free.
        """
        for page in pages:
            if page in self._digest_of:
                self._forget(page)
                if page in self._idle:
                    del self._idle[page]
                    self._free[self._num_free] = page
                    self._num_free += 1

    def reset(self) -> None:
        """Forget all content, e.g. because the weights changed. Raises InternalError if a page
        is held.
        """
        if self.num_held:
            raise InternalError(
                f"the prefix cache cannot be reset while {self.num_held} pages are held"
            )
        self._free[self._num_free :] = list(self._idle)
        self._num_free = self.num_pages
        self._idle.clear()
        for page_of in self._page_of:
            page_of.clear()
        self._digest_of.clear()
        self._registered[:] = False

    def _forget(self, page: int) -> None:
        del self._page_of[self._group_of[page]][self._digest_of.pop(page)]
        self._registered[page] = False

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise InternalError, naming the fault, unless the books are right. `holders`: each
        request's pages.
        """
        counts: Counter[int] = Counter()
        for pages in holders:
            if len(set(pages)) != len(pages):
                raise InternalError(f"a request holds a page twice: {pages}")
            counts.update(pages)
        for page in range(self.num_pages):
            if self._references[page] != counts[page]:
                raise InternalError(
                    f"page {page} has the reference count {self._references[page]}, but "
                    f"{counts[page]} requests hold it"
                )
        free = self._free[: self._num_free].tolist()
        places = Counter(chain(free, self._idle, counts))
        for page in range(self.num_pages):
            if places[page] != 1:
                raise InternalError(
                    f"page {page} is in {places[page]} of the places free, idle and held, not "
                    "in one"
                )
        if any(page in self._digest_of for page in free):
            raise InternalError("a free page is registered")
        if any(page not in self._digest_of for page in self._idle):
            raise InternalError("an idle page is not registered")
        found = {
            page: (number, digest)
            for number, page_of in enumerate(self._page_of)
            for digest, page in page_of.items()
        }
        known = {page: (self._group_of[page], d) for page, d in self._digest_of.items()}
        if found != known or len(found) != sum(map(len, self._page_of)):
            raise InternalError("the maps from digest to page and from page to digest differ")
        if set(np.flatnonzero(self._registered).tolist()) != set(self._digest_of):
            raise InternalError(
                "the flags of registered pages differ from the map of their digests"
            )
        if self._digest_of and not self.enable_prefix_caching:
            raise InternalError("pages are registered although the prefix cache is off")

    def check_content(
        self,
        pages: Sequence[int],
        tokens: np.ndarray,
        salt: str,
        group: int = 0,
        first: int = 0,
        multiple: int = 1,
    ) -> None:
        """Raise InternalError if a page of the sequence `tokens` is registered for other content
        than it has. `pages` stand from column `first` on, each `multiple` digests long.
        """
        digests: list[bytes] = []
        extend_digests(digests, tokens, len(tokens) // self.page_size, self.page_size, salt)
        of_pages = digests[multiple - 1 :: multiple]
        for index, page in enumerate(pages, first):
            digest = self._digest_of.get(page)
            if digest is None:
                continue
            if [digest] != of_pages[index : index + 1] or self._group_of[page] != group:
                raise InternalError(
                    f"page {page}, number {index} of its sequence, is registered for other content"
                )
