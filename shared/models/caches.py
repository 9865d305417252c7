"""Where the layers of a model keep keys and values: page groups over one pool of pages.

Layers with the same window and the same entries are of one sort. Each sort is dealt out to groups
of `stripe` layers: layer number n of a sort is layer `n // groups` of group `n % groups`. So in a
model whose layers repeat, a group is a position in the period. A worker has `stripe` buffers, each
with room for all pages; layer i of every group lies in buffer i, and the groups' page tables say
which pages of it are whose. Pages of sorts with smaller entries hold more tokens, so that all pages
have the same bytes.

A model with one sort of layers is one group, whose stripe is all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..config import ResolvedConfig
from ..errors import ConfigError
from ..page_groups import PageGroup, pages_for
from ..step import StepShape
from .config import ModelConfig
from .families import model_of
from .placement import local_config
from .spec import Attention, LatentAttention, Layer, Model, source_of

MAX_GROUPS = 8
"""Each group costs the host time in every step, and the device a page table."""
SLACK = 1.02
"""Of two ways to deal out layers whose bytes differ by less, the one with fewer groups is taken."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of each token it sees: K and V of `kv_heads` heads, or a `latent` of
    all heads, which is both. `window` w > 0: of the last w tokens.
    """

    kv_heads: int
    head_dim: int
    window: int = 0
    latent: bool = False

    @property
    def rows(self) -> int:
        """Rows of `head_dim` entries that it keeps of a token."""
        return 1 if self.latent else 2 * self.kv_heads

    @property
    def entries(self) -> int:
        """Numbers that it keeps of a token."""
        return self.rows * self.head_dim


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer keeps its cache: in buffer `index`, at the pages of `group`."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups, what a layer of each keeps, the place of each layer, and how many buffers there
    are.
    """

    groups: tuple[PageGroup, ...]
    specs: tuple[CacheSpec, ...]
    places: tuple[Place, ...]
    stripe: int

    @property
    def page_entries(self) -> int:
        """Numbers of a page in one buffer: the same in all groups."""
        return self.groups[0].page_size * self.specs[0].entries

    def page_shape(self, layer: int) -> tuple[int, int, int]:
        """[slot row hdim] of a page as a layer sees it: 2*kvhead rows, or one of a latent."""
        group = self.places[layer].group
        spec = self.specs[group]
        return self.groups[group].page_size, spec.rows, spec.head_dim


def layout_of(model: ModelConfig, config: ResolvedConfig) -> CacheLayout:
    """The layout on each shard of an engine. Raises ConfigError."""
    return layout_of_shard(local_config(model, config.tensor_parallel_size), config)


def layout_of_shard(model: ModelConfig, config: ResolvedConfig) -> CacheLayout:
    """The same from what one shard computes."""
    return cache_layout(model_of(model), config.page_size, config.max_model_len, config.page_groups)


def step_shape(model: ModelConfig, config: ResolvedConfig) -> StepShape:
    """The sizes that all steps of an engine share."""
    return StepShape(
        config.pages_per_request,
        config.max_num_seqs,
        config.max_model_len,
        model.vocab_size,
        len(layout_of(model, config).groups),
    )


def request_pages(model: ModelConfig, config: ResolvedConfig) -> int:
    """The most pages that one request holds at a time."""
    groups = layout_of(model, config).groups
    return pages_for(groups, config.max_model_len, config.max_num_batched_tokens)


def cache_of(layer: Layer) -> CacheSpec:
    """What a layer keeps. Raises ConfigError for one that keeps nothing or several caches."""
    found = [sub.mixer for sub in layer if isinstance(sub.mixer, Attention | LatentAttention)]
    if len(found) != 1:
        raise ConfigError(f"caches: a layer has {len(found)} attentions, allowed is one")
    attention = found[0]
    if isinstance(attention, LatentAttention):
        return CacheSpec(1, attention.rank + attention.rotated, latent=True)
    # A chunk begins within the window of its size.
    window = attention.window or attention.chunk
    return CacheSpec(attention.num_kv_heads, attention.head_dim, window)


@cache
def cache_layout(
    model: Model, page_size: int, max_model_len: int, windows: bool = True
) -> CacheLayout:
    """How the layers of a model keep requests of up to `max_model_len` tokens, in pages of
    `page_size` tokens or more. Without `windows` every layer keeps all tokens.

    Layers are dealt out so that such a request takes the fewest bytes. Raises ConfigError where
    pages of different sorts cannot have the same bytes.
    """
    reach = max_model_len if windows else 0
    kept = [_within(cache_of(layer), reach) for layer in model.layers]
    sources = [source_of(layer, index) for index, layer in enumerate(model.layers)]
    owners = [index for index, source in enumerate(sources) if source == index]
    sorts: dict[CacheSpec, list[int]] = {}
    for index in owners:
        sorts.setdefault(kept[index], []).append(index)
    # Those that keep everything first: their pages are evicted last.
    specs = sorted(sorts, key=lambda spec: (spec.window > 0, sorts[spec][0]))
    pages = _page_sizes(specs, page_size)
    counts = [len(sorts[spec]) for spec in specs]
    sizes = [PageGroup(page, spec.window) for page, spec in zip(pages, specs, strict=True)]
    stripe = _best_stripe(sizes, counts, max_model_len)
    groups: list[PageGroup] = []
    of_groups: list[CacheSpec] = []
    places: dict[int, Place] = {}
    for group, spec in zip(sizes, specs, strict=True):
        layers, number = sorts[spec], -(-len(sorts[spec]) // stripe)
        for order, layer in enumerate(layers):
            places[layer] = Place(len(groups) + order % number, order // number)
        groups += [group] * number
        of_groups += [spec] * number
    return CacheLayout(
        tuple(groups), tuple(of_groups), tuple(places[source] for source in sources), stripe
    )


def _within(spec: CacheSpec, reach: int) -> CacheSpec:
    """A window of at least `reach` tokens is none."""
    if spec.window < reach:
        return spec
    return replace(spec, window=0)


def _page_sizes(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Tokens of a page of each sort: `page_size` for the largest entries."""
    most = max(spec.entries for spec in specs)
    for spec in specs:
        if most % spec.entries:
            raise ConfigError(
                f"caches: pages of all layers must have the same bytes; {_text(spec, specs)}, "
                f"and {most} is no multiple of {spec.entries}"
            )
    return [page_size * (most // spec.entries) for spec in specs]


def _text(spec: CacheSpec, specs: Sequence[CacheSpec]) -> str:
    largest = max(specs, key=lambda other: other.entries)
    parts = (f"{one.rows} rows * {one.head_dim} = {one.entries}" for one in (spec, largest))
    return "layers keep " + " or ".join(parts) + " numbers of a token"


def _best_stripe(sorts: Sequence[PageGroup], counts: Sequence[int], max_model_len: int) -> int:
    """Layers of a group: with the fewest bytes for one request, and of these with the fewest
    groups.
    """
    options = []
    for stripe in range(1, max(counts) + 1):
        groups = [-(-count // stripe) for count in counts]
        pages = sum(
            number * pages_for((sort,), max_model_len, 1)
            for number, sort in zip(groups, sorts, strict=True)
        )
        options.append((stripe * pages, sum(groups), stripe))
    # The largest stripe has one group of each sort.
    few = [option for option in options if option[1] <= max(MAX_GROUPS, len(sorts))]
    least = min(few)[0]
    near = [option for option in few if option[0] <= SLACK * least]
    return min(near, key=lambda option: (option[1], option[0]))[2]


def cached_tokens(layout: CacheLayout, num_pages: int, max_model_len: int) -> int:
    """Tokens that `num_pages` pages hold of requests of `max_model_len` tokens."""
    first = layout.groups[0]
    if len(layout.groups) == 1 and not first.window:
        return num_pages * first.page_size
    return num_pages * max_model_len // pages_for(layout.groups, max_model_len, 1)
