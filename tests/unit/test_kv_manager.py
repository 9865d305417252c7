"""Pages: references, the prefix cache, the order of eviction, and faults that check_integrity
must see.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from twinfer.shared.errors import ConfigError, InternalError
from twinfer.shared.kv_manager import KVManager, extend_digests, root_digest

PAGE = 4


def digests_of(tokens: list[int], salt: str = "") -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, np.array(tokens, np.int32), len(tokens) // PAGE, PAGE, salt)
    return digests


def filled(manager: KVManager, tokens: list[int], salt: str = "") -> tuple[np.ndarray, list[bytes]]:
    """Pages that hold `tokens`, registered."""
    digests = digests_of(tokens, salt)
    pages = manager.allocate(len(digests))
    manager.register(pages.tolist(), digests)
    return pages, digests


def test_every_page_is_handed_out_once() -> None:
    manager = KVManager(5, PAGE)
    pages = np.concatenate((manager.allocate(2), manager.allocate(0), manager.allocate(3)))
    assert sorted(pages.tolist()) == [0, 1, 2, 3, 4]
    assert (manager.available, manager.num_held) == (0, 5)
    manager.check_integrity([pages.tolist()])


def test_more_pages_than_available_are_refused_and_nothing_changes() -> None:
    manager = KVManager(3, PAGE)
    held = manager.allocate(1)
    with pytest.raises(InternalError, match="3 pages were asked for, 2 of 3 are available"):
        manager.allocate(3)
    assert manager.available == 2
    manager.check_integrity([held.tolist()])


def test_a_shared_page_is_held_until_its_last_holder_releases_it() -> None:
    manager = KVManager(4, PAGE)
    pages, digests = filled(manager, [1] * 8)
    manager.acquire(manager.match(digests, 2))
    manager.check_integrity([pages.tolist(), pages.tolist()])
    manager.release(pages)
    assert manager.num_held == 2
    manager.release(pages)
    assert manager.num_held == 0
    manager.check_integrity([])


def test_a_released_page_is_found_again_by_its_content() -> None:
    manager = KVManager(4, PAGE)
    pages, digests = filled(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.release(pages)
    assert manager.match(digests, 9) == pages.tolist()
    assert manager.num_idle(pages.tolist()) == 2
    assert manager.available == 4
    manager.acquire(pages.tolist())
    assert manager.num_idle(pages.tolist()) == 0
    assert manager.available == 2
    manager.check_integrity([pages.tolist()])


def test_a_match_stops_at_the_first_unknown_page_and_at_the_limit() -> None:
    manager = KVManager(8, PAGE)
    pages, digests = filled(manager, list(range(12)))
    assert manager.match(digests, 2) == pages[:2].tolist()
    assert manager.match(digests_of([*range(8), 0, 0, 0, 0]), 3) == pages[:2].tolist()
    # The same third page under another beginning is another page.
    assert manager.match(digests_of([9, *range(1, 12)]), 3) == []


def test_the_longest_idle_page_is_evicted_first_and_a_tail_before_its_root() -> None:
    manager = KVManager(4, PAGE)
    first, first_digests = filled(manager, [1] * 8)
    second, second_digests = filled(manager, [2] * 8)
    manager.release(second)
    manager.release(first)
    assert manager.allocate(1).tolist() == [second[1]]
    assert manager.match(second_digests, 2) == [second[0]]
    assert manager.allocate(2).tolist() == [second[0], first[1]]
    assert manager.match(second_digests, 2) == []
    assert manager.match(first_digests, 2) == [first[0]]
    assert manager.num_registered == 1


def test_use_makes_a_page_young_again() -> None:
    manager = KVManager(2, PAGE)
    (old, digest), (young, _) = filled(manager, [1] * 4), filled(manager, [2] * 4)
    manager.release(old)
    manager.release(young)
    manager.acquire(manager.match(digest, 1))
    manager.release(old)
    assert manager.allocate(1).tolist() == young.tolist()


def test_free_pages_are_taken_before_idle_ones_are_evicted() -> None:
    manager = KVManager(3, PAGE)
    pages, digests = filled(manager, [1] * 4)
    manager.release(pages)
    manager.allocate(2)
    assert manager.match(digests, 1) == pages.tolist()
    manager.allocate(1)
    assert manager.match(digests, 1) == []


def test_the_first_page_with_a_content_stays_the_one_that_is_found() -> None:
    manager = KVManager(4, PAGE)
    pages, digests = filled(manager, [1] * 4)
    twin = manager.allocate(1)
    manager.register(twin.tolist(), digests)
    assert manager.match(digests, 1) == pages.tolist()
    manager.release(twin)
    assert manager.num_idle(twin.tolist()) == 0
    manager.check_integrity([pages.tolist()])


def test_salts_separate_tenants() -> None:
    manager = KVManager(4, PAGE)
    pages, _ = filled(manager, [1] * 8, salt="a")
    assert manager.match(digests_of([1] * 8, "a"), 2) == pages.tolist()
    assert manager.match(digests_of([1] * 8, "b"), 2) == []
    assert manager.match(digests_of([1] * 8), 2) == []
    assert len({root_digest(salt) for salt in ("", "a", "b", "\udc80", "root:")}) == 5


def test_digests_can_be_extended_in_any_portions() -> None:
    tokens = np.arange(40, dtype=np.int32)
    digests: list[bytes] = []
    for count in (0, 1, 1, 4, 3, 10):
        extend_digests(digests, tokens, count, PAGE, "s")
    assert digests == digests_of(tokens.tolist(), "s")
    assert all(len(digest) == 16 for digest in digests)


def test_wrong_calls_raise_and_change_nothing() -> None:
    manager = KVManager(3, PAGE)
    pages, digests = filled(manager, [1] * 4)
    free = next(page for page in range(3) if page != pages[0])
    with pytest.raises(InternalError, match=f"page {free} was released but nobody holds it"):
        manager.release(np.array([pages[0], free]))
    with pytest.raises(InternalError, match=f"page {free} was acquired but is not registered"):
        manager.acquire([free])
    with pytest.raises(InternalError, match="cannot be registered"):
        manager.register([free], digests_of([2] * 4))
    with pytest.raises(InternalError, match="cannot be registered"):
        manager.register(pages.tolist(), digests_of([3] * 4))
    with pytest.raises(InternalError, match="cannot be reset while 1 pages are held"):
        manager.reset()
    assert manager.match(digests, 1) == pages.tolist()
    manager.check_integrity([pages.tolist()])


def test_reset_forgets_content_and_keeps_pages() -> None:
    manager = KVManager(3, PAGE)
    pages, digests = filled(manager, [1] * 8)
    manager.release(pages)
    manager.reset()
    assert manager.match(digests, 2) == []
    assert manager.available == 3
    manager.check_integrity([])
    assert sorted(manager.allocate(3).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        KVManager(num_pages, page_size)


FAULTS: dict[str, tuple[Callable[[KVManager, np.ndarray], object], str]] = {
    "a reference too many": (
        lambda m, p: m._references.__setitem__(p[0], 2),
        "reference count 2, but 1 requests",
    ),
    "a reference too few": (
        lambda m, p: m._references.__setitem__(p[0], 0),
        "reference count 0, but 1 requests",
    ),
    "a leaked page": (
        lambda m, p: setattr(m, "_num_free", m._num_free - 1),
        "is in 0 of the places",
    ),
    "a page that is free twice": (
        lambda m, p: m._free.__setitem__(0, m._free[1]),
        "places free, idle and held",
    ),
    "a held page that is idle": (
        lambda m, p: m._idle.__setitem__(int(p[0]), None),
        "is in 2 of the places",
    ),
    "a digest without a page": (
        lambda m, p: m._page_of[0].__setitem__(b"x", 3),
        "the maps from digest to page",
    ),
    "a page without a digest": (
        lambda m, p: m._page_of[0].pop(m._digest_of[int(p[0])]),
        "the maps from digest to page",
    ),
    "a flag without a digest": (
        lambda m, p: m._registered.__setitem__(slice(None), True),
        "flags of registered pages",
    ),
    "an idle page without content": (
        lambda m, p: m._digest_of.pop(next(iter(m._idle))),
        "an idle page is not reg",
    ),
    "a free page with content": (
        lambda m, p: m._digest_of.__setitem__(int(m._free[0]), b"x"),
        "a free page is reg",
    ),
    "content though caching is off": (
        lambda m, p: setattr(m, "enable_prefix_caching", False),
        "prefix cache is off",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_integrity_sees(fault: str) -> None:
    manager = KVManager(8, PAGE)
    pages, _ = filled(manager, [1] * 8)
    idle, _ = filled(manager, [2] * 8)
    manager.release(idle)
    manager.check_integrity([pages.tolist()])
    plant, message = FAULTS[fault]
    plant(manager, pages)
    with pytest.raises(InternalError, match=message):
        manager.check_integrity([pages.tolist()])


def test_check_integrity_sees_a_page_that_a_request_holds_twice() -> None:
    manager = KVManager(2, PAGE)
    page = int(manager.allocate(1)[0])
    with pytest.raises(InternalError, match="holds a page twice"):
        manager.check_integrity([[page, page]])


def test_check_content_sees_a_page_registered_for_other_tokens() -> None:
    manager = KVManager(4, PAGE)
    pages, _ = filled(manager, list(range(8)))
    manager.check_content(pages.tolist(), np.arange(8, dtype=np.int32), "")
    for tokens, salt in (
        (np.arange(1, 9, dtype=np.int32), ""),
        (np.arange(8, dtype=np.int32), "salt"),
    ):
        with pytest.raises(
            InternalError, match="number 0 of its sequence, is registered for other content"
        ):
            manager.check_content(pages.tolist(), tokens, salt)
    with pytest.raises(InternalError, match="number 1 of its sequence"):
        manager.check_content(pages.tolist(), np.arange(7, dtype=np.int32), "")
