"""How large a KV page is where nobody says: by what holds the page table while attention runs.

On a TPU the kernels read the table of all requests from a core's scalar memory, so pages are as
large as that asks for.
"""

from __future__ import annotations

SCALAR_MEMORY_FOR_TABLES = 512 << 10
"""Bytes: half of a TPU core's scalar memory, which the compiler also needs."""
ENTRY = 4
"""Bytes of an entry of the table."""
TPU_PAGES = (128, 256)
"""Tokens of a page on a TPU. Smaller ones have kernels too, which do more work for each token;
larger ones have none.
"""
GPU_PAGE = 64
"""Tokens of a page on a GPU: prompts ask the copy engine for a page at a time (docs/adr/0021)."""
CPU_PAGE = 16
"""Tokens of a page on a CPU, where small pages cost nothing and share shorter beginnings."""


def table_bytes(requests: int, length: int, page: int) -> int:
    """Bytes of the page table of `requests` requests of `length` tokens."""
    return requests * pages_of(length, page) * ENTRY


def pages_of(length: int, page: int) -> int:
    """Pages of `page` tokens that `length` tokens need."""
    return -(-length // page)


def default_page_size(
    platform: str, length: int, requests: int, longest: int = 1
) -> tuple[int, int, str]:
    """(tokens of a page, requests whose table fits: at most `requests`, why). Layers that keep
    less of a token have pages of up to `longest` times the tokens.
    """
    if platform != "tpu":
        page = CPU_PAGE if platform == "cpu" else GPU_PAGE
        return page, requests, f"default on {platform}"
    allowed = [page for page in TPU_PAGES if page * longest <= TPU_PAGES[-1]] or TPU_PAGES[:1]
    fitting = (
        page for page in allowed if table_bytes(requests, length, page) <= SCALAR_MEMORY_FOR_TABLES
    )
    page = next(fitting, allowed[-1])
    fits = max(1, SCALAR_MEMORY_FOR_TABLES // table_bytes(1, length, page))
    requests = min(requests, fits)
    return page, requests, _arithmetic(requests, length, page)


def _arithmetic(requests: int, length: int, page: int) -> str:
    need = table_bytes(requests, length, page)
    return (
        f"the page table of {requests} requests takes {requests} * {pages_of(length, page)} pages "
        f"* {ENTRY} B = {need} "
        f"B of {SCALAR_MEMORY_FOR_TABLES} B of scalar memory"
    )
