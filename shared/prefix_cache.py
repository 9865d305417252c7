"""The prefix cache as requests use it: which pages a new one finds, and which pages running ones
offer to later ones.

`KVManager` knows a page by the digest of what it holds; this keeps the digests of each request, as
far as needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .kv_manager import KVManager, append_digests, extend_digests
from .page_groups import PageGroup, common_page
from .request import Request
from .request_table import Group, RequestTable


@dataclass(frozen=True, slots=True)
class Hit:
    """Cached pages that a request can start behind: `num_tokens` tokens. Of each group, `pages`
    from `columns` on; what is before them no query of the request reads.
    """

    num_tokens: int
    columns: tuple[int, ...]
    pages: tuple[list[int], ...]


class PrefixCache:
    """Looks up and registers the pages of the requests in `table`. Owned by the scheduler, as
    `table` and `kv` are.
    """

    def __init__(self, table: RequestTable, kv: KVManager) -> None:
        self.enabled = kv.enable_prefix_caching
        self.num_queries = 0
        """Tokens of started requests that were looked up."""
        self.num_hits = 0
        """Tokens of them that were found."""
        self._table, self._kv, self._page_size = table, kv, kv.page_size
        self._groups = table.groups
        # Digests that a page of each group is long.
        self._multiples = tuple(group.page_size // kv.page_size for group in table.groups)
        self._common = common_page(table.groups) // kv.page_size
        # One group that keeps all tokens.
        self._is_plain = len(table.groups) == 1 and not table.groups[0].window
        self._offsets = np.arange(kv.page_size)
        none = len(table.groups)
        self._no_hit = Hit(0, (0,) * none, tuple([] for _ in range(none)))

    def match(self, request: Request, tokens: np.ndarray) -> Hit:
        """The cached pages that `request`, which waits and whose known tokens are `tokens`, can
        start behind.

        A prefix counts if all its pages are there in groups that keep all tokens, and in the others
        those that the first query behind it reads.
        """
        if not self._serves(request):
            return self._no_hit
        self._extend_hashes(request, tokens, len(tokens) // self._page_size)
        # One token at least is computed: its logits are sampled from.
        count, hashes = (len(tokens) - 1) // self._page_size, request.page_hashes
        found: dict[int, list[int]] = {}
        for number, (group, multiple) in enumerate(zip(self._groups, self._multiples, strict=True)):
            if not group.window:
                of_pages = hashes if multiple == 1 else hashes[multiple - 1 :: multiple]
                found[number] = self._kv.match(of_pages, count // multiple, number)
                count = min(count, len(found[number]) * multiple)
        count -= count % self._common
        if len(found) < len(self._groups):
            count = self._shorten(hashes, count)
        return self._hit(hashes, count, found)

    def _shorten(self, hashes: Sequence[bytes], count: int) -> int:
        """The longest prefix of up to `count` digests behind which a query finds all that it reads
        in groups with windows.
        """
        while count:
            missing = [
                column * multiple
                for number, (group, multiple) in enumerate(
                    zip(self._groups, self._multiples, strict=True)
                )
                if group.window
                and (column := self._last_missing(hashes, count, number, group, multiple)) >= 0
            ]
            if not missing:
                break
            # No prefix behind a missing page and within its reach will do.
            count = min(missing)
            count -= count % self._common
        return count

    def _last_missing(
        self, hashes: Sequence[bytes], count: int, number: int, group: PageGroup, multiple: int
    ) -> int:
        """The last column that a query behind `count` digests reads and that is not cached, -1 if
        all are.
        """
        first = group.first_column(count * self._page_size)
        for column in range(count // multiple - 1, first - 1, -1):
            if self._kv.find(hashes[(column + 1) * multiple - 1], number) is None:
                return column
        return -1

    def _hit(self, hashes: Sequence[bytes], count: int, found: dict[int, list[int]]) -> Hit:
        columns, pages = [], []
        for number, (group, multiple) in enumerate(zip(self._groups, self._multiples, strict=True)):
            first, last = group.first_column(count * self._page_size), count // multiple
            columns.append(first)
            if number in found:
                pages.append(found[number][:last])
            else:
                digests = hashes[multiple - 1 :: multiple][first:last]
                cached = [self._kv.find(digest, number) for digest in digests]
                pages.append([page for page in cached if page is not None])
        return Hit(count * self._page_size, tuple(columns), tuple(pages))

    def record(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Count a request that starts: `num_cached` of its `num_tokens` tokens were found by
        `match`.
        """
        if self._serves(request):
            self.num_queries += num_tokens
            self.num_hits += num_cached

    def register(self, request: Request, row: int, count: int) -> None:
        """Offer the pages of the first `count` digests of the row to the prefix cache: all their
        tokens are known and computed.
        """
        table = self._table
        first = int(table.registered[row])
        if count <= first or not self.enabled:
            return
        hashes = request.page_hashes
        if len(hashes) < count:
            self._extend_hashes(request, table.tokens[row], count)
        for number, multiple in enumerate(self._multiples):
            # What was dropped before its tokens were known is not there any more.
            start = max(first // multiple, int(table.dropped[number, row]))
            stop = count // multiple
            if start < stop:
                pages = table.pages[table.table_row(number, row), start:stop].tolist()
                digests = hashes[(start + 1) * multiple - 1 : stop * multiple : multiple]
                self._kv.register(pages, digests, number)
        table.registered[row] = count

    def register_each(self, group: Group, indices: np.ndarray, counts: np.ndarray) -> None:
        """`register` for some requests of `group`; mostly one page of each is new, which they do
        together.
        """
        table, size = self._table, self._page_size
        rows = group.rows[indices]
        columns = counts - 1
        is_single = table.registered[rows] == columns
        if np.count_nonzero(is_single) < len(rows):
            for index in (~is_single).nonzero()[0].tolist():
                self.register(group.requests[indices[index]], int(rows[index]), int(counts[index]))
            indices, rows, counts, columns = (
                x[is_single] for x in (indices, rows, counts, columns)
            )
            if not len(rows):
                return
        first = group.first_token[indices] + columns * size
        tokens = table.tokens_flat.take(first[:, None] + self._offsets)
        requests = [group.requests[index] for index in indices.tolist()]
        digests = append_digests(requests, columns.tolist(), tokens)
        first_page = group.first_page[indices]
        if self._is_plain:
            self._kv.register(table.pages_flat.take(first_page + columns).tolist(), digests)
            table.registered[rows] = counts
            return
        for number, multiple in enumerate(self._multiples):
            column, left = counts // multiple - 1, counts % multiple
            self._register_column(number, left == 0, rows, first_page, column, digests)
        table.registered[rows] = counts

    def _register_column(
        self,
        number: int,
        is_whole: np.ndarray,
        rows: np.ndarray,
        first_page: np.ndarray,
        columns: np.ndarray,
        digests: Sequence[bytes],
    ) -> None:
        """Register one page of each row in a group, where the page is whole and still there."""
        table = self._table
        places = first_page + columns
        if number:
            places += number * table.pages_per_group
        kept = is_whole & (columns >= table.dropped[number, rows])
        if np.count_nonzero(kept) < len(rows):
            places = places[kept]
            digests = [digests[index] for index in np.flatnonzero(kept).tolist()]
        self._kv.register(table.pages_flat.take(places).tolist(), digests, number)

    def forget(self, request: Request, row: int) -> None:
        """Let nobody find what the request has computed: its content is doubtful."""
        self._kv.forget(self._table.pages_of(row))
        # Pages that it has left behind may still be found by their content.
        for number, multiple in enumerate(self._multiples):
            digests = request.page_hashes[multiple - 1 :: multiple]
            dropped = digests[: int(self._table.dropped[number, row])]
            found = [self._kv.find(digest, number) for digest in dropped]
            self._kv.forget(page for page in found if page is not None)

    def _serves(self, request: Request) -> bool:
        # Log-probabilities of the prompt need its logits, which a cached page does not have.
        return self.enabled and request.params.prompt_logprobs is None

    def _extend_hashes(self, request: Request, tokens: np.ndarray, count: int) -> None:
        extend_digests(request.page_hashes, tokens, count, self._page_size, request.cache_salt)
