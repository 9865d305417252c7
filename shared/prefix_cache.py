"""The prefix cache as requests use it: which pages a new one finds, and which pages running ones
offer to later ones.

`KVManager` knows a page by the digest of what it holds; this keeps the digests of each request, as
far as needed.
"""

from __future__ import annotations

import numpy as np

from .kv_manager import KVManager, append_digests, extend_digests
from .request import Request
from .request_table import Group, RequestTable


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
        self._offsets = np.arange(kv.page_size)

    def match(self, request: Request, tokens: np.ndarray) -> list[int]:
        """The cached pages that `request`, which waits and whose known tokens are `tokens`, can
        start behind.
        """
        if not self._serves(request):
            return []
        self._extend_hashes(request, tokens, len(tokens) // self._page_size)
        # One token at least is computed: its logits are sampled from.
        return self._kv.match(request.page_hashes, (len(tokens) - 1) // self._page_size)

    def record(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Count a request that starts: `num_cached` of its `num_tokens` tokens were found by
        `match`.
        """
        if self._serves(request):
            self.num_queries += num_tokens
            self.num_hits += num_cached

    def register(self, request: Request, row: int, count: int) -> None:
        """Offer the first `count` pages of the row to the prefix cache: all their tokens are
        known and computed.
        """
        table = self._table
        first = int(table.registered[row])
        if count <= first or not self.enabled:
            return
        hashes = request.page_hashes
        if len(hashes) < count:
            self._extend_hashes(request, table.tokens[row], count)
        self._kv.register(table.pages[row, first:count].tolist(), hashes[first:count])
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
        self._kv.register(
            table.pages_flat.take(group.first_page[indices] + columns).tolist(), digests
        )
        table.registered[rows] = counts

    def _serves(self, request: Request) -> bool:
        # Log-probabilities of the prompt need its logits, which a cached page does not have.
        return self.enabled and request.params.prompt_logprobs is None

    def _extend_hashes(self, request: Request, tokens: np.ndarray, count: int) -> None:
        extend_digests(request.page_hashes, tokens, count, self._page_size, request.cache_salt)
