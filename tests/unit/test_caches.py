"""Where layers keep keys and values: groups, places, bytes."""

import pytest

from twinfer.shared.errors import ConfigError
from twinfer.shared.models.caches import CacheSpec, Place, cache_layout, cached_tokens
from twinfer.shared.models.spec import Attention, Mlp, Model, Norm, Sublayer
from twinfer.shared.page_groups import PageGroup, check_groups, longest, pages_for


def model(*layers):
    """A model whose layers are (kv heads, head size, window)."""
    norm = Norm("norm", 1e-6)
    made = {
        kind: (
            Sublayer(Attention(2 * kind[0], kind[0], kind[1], 1.0, window=kind[2]), norm),
            Sublayer(Mlp(), norm),
        )
        for kind in layers
    }
    return Model(tuple(made[kind] for kind in layers), norm)


FULL, SLIDING = (4, 128, 0), (4, 128, 1024)


def test_layers_that_are_alike_are_one_group_with_today_s_layout():
    layout = cache_layout(model(*[FULL] * 32), 16, 8192)
    assert layout.groups == (PageGroup(16),)
    assert layout.stripe == 32
    assert layout.places == tuple(Place(0, layer) for layer in range(32))
    assert layout.page_shape(3) == (16, 8, 128)
    assert layout.page_entries == 16 * 8 * 128
    assert cached_tokens(layout, 10, 8192) == 160


def test_a_window_that_no_request_reaches_is_none():
    layers = [SLIDING, FULL] * 8
    assert cache_layout(model(*layers), 16, 1024).groups == (PageGroup(16),)
    assert cache_layout(model(*layers), 16, 4096, windows=False).groups == (PageGroup(16),)
    assert cache_layout(model(*layers), 16, 4096).groups == (PageGroup(16), PageGroup(16, 1024))


def test_a_chunk_is_kept_as_the_window_of_its_size():
    """A chunk begins at most its size minus 1 before any of its positions."""
    norm = Norm("norm", 1e-6)
    chunked = (Sublayer(Attention(8, 4, 128, 1.0, chunk=1024), norm), Sublayer(Mlp(), norm))
    full = (Sublayer(Attention(8, 4, 128, 1.0), norm), Sublayer(Mlp(), norm))
    mixed = Model((chunked, full) * 8, norm)
    assert cache_layout(mixed, 16, 4096).groups == (PageGroup(16), PageGroup(16, 1024))
    assert cache_layout(mixed, 16, 1024).groups == (PageGroup(16),)
    group = PageGroup(16, 24)
    for position in range(200):
        assert group.first_column(position) <= position // 24 * 24 // 16


def test_a_group_is_a_position_in_the_period():
    """As gemma-3-27b without its last two layers: 5 layers with windows, then one without."""
    layout = cache_layout(model(*([SLIDING] * 5 + [FULL]) * 10), 16, 131072)
    assert layout.stripe == 10
    assert layout.groups == (PageGroup(16), *[PageGroup(16, 1024)] * 5)
    for layer, place in enumerate(layout.places):
        repeat, position = divmod(layer, 6)
        assert place == Place((position + 1) % 6, repeat)


def test_smaller_entries_have_longer_pages_of_the_same_bytes():
    """As gemma-4-31b: 16 heads of 256 with windows, 4 heads of 512 that keep everything."""
    sliding, full = (16, 256, 1024), (4, 512, 0)
    layout = cache_layout(model(*([sliding] * 5 + [full]) * 10), 16, 32768)
    assert layout.stripe == 10
    assert layout.groups == (PageGroup(32), *[PageGroup(16, 1024)] * 5)
    assert layout.page_shape(5) == (32, 8, 512)
    assert layout.page_shape(0) == (16, 32, 256)
    assert len({layout.groups[g].page_size * layout.specs[g].entries for g in range(6)}) == 1
    # Every layer keeping everything would take this much for each token; one request of 32K takes
    # an eighth.
    whole = 50 * CacheSpec(16, 256).entries + 10 * CacheSpec(4, 512).entries
    pages = pages_for(layout.groups, 32768, 1)
    assert 8 * pages * layout.stripe * layout.page_entries < 32768 * whole


def test_no_two_layers_share_a_place():
    for layers in ([SLIDING] * 29 + [FULL] * 5, [FULL, SLIDING, SLIDING] * 7 + [FULL]):
        layout = cache_layout(model(*layers), 16, 65536)
        assert len(set(layout.places)) == len(layers)
        assert max(place.index for place in layout.places) < layout.stripe
        assert len(layout.groups) <= 8


def test_caches_whose_bytes_cannot_be_equal_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match=r"4 rows \* 96 = 384 or 8 rows \* 128 = 1024"):
        cache_layout(model(FULL, (2, 96, 1024)), 16, 8192)


def test_what_a_group_keeps():
    group = PageGroup(4, 9)
    # Position 12 reads 4 to 12: column 1 on.
    assert [group.first_column(p) for p in (0, 8, 11, 12, 15, 16)] == [0, 0, 0, 1, 1, 2]
    assert PageGroup(4).first_column(99) == 0
    assert group.most_columns(1000, 1) == 4
    assert group.most_columns(6, 1) == 2
    assert pages_for((group, PageGroup(4)), 100, 1) == 29
    assert longest((group, PageGroup(4)), 29, 1, 10_000) == 100
    assert longest((group,), 4, 1, 10_000) == 10_000


@pytest.mark.parametrize("groups", [(), (PageGroup(4), PageGroup(6)), (PageGroup(4, -1),)])
def test_groups_that_go_together(groups):
    with pytest.raises(ConfigError, match="groups: got"):
        check_groups(groups)
