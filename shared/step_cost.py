"""What a step takes on several devices: a model of the bytes that it reads and sends, checked
against two GPUs in docs/measurements/two-gpus.md.

Two questions. From a step that was measured on one device: what will it take on `shards` of them
(`step_ms`)? And by published rates alone (`estimate`)? Both add the
sums between devices, 2 L + 1 of the hidden states of all tokens of the step
(`shared/models/sharding.py`), or 3 L + 1 where experts stand beside an MLP. Norms of q and k over
all heads are L more, of two numbers a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .limits import decode_bytes, prefill_flops
from .models.config import ModelConfig

LAYER_US = 27.0
"""What a layer takes that does not become less on more devices: its kernels begin and end. Fitted
to the decode steps of llama3-8b on one and two H200s, by both ways to sum.
"""
BULK = 16 << 20
"""Sums of so many bytes and more go at a link's `bulk_rate`."""


@dataclass(frozen=True, slots=True)
class Link:
    """What sums go over: microseconds of the smallest sum, and bytes per second that a device sends
    in one direction. A sum takes what it takes beyond the add and norm that one device makes too.
    """

    latency_us: float
    rate: float
    bulk_rate: float
    source: str


LINKS = {
    "peers": Link(4.0, 200e9, 325e9, "NVLink of two H200s, read by one kernel; measured"),
    "nccl": Link(7.5, 90e9, 257e9, "NVLink of two H200s by NCCL, no multicast; measured"),
    "dcn": Link(60.0, 12.5e9, 12.5e9, "100 Gbit/s a host; as published, not measured"),
}
"""By what makes the sums."""
ICI_LATENCY_US = 10.0
"""Of the smallest sum on a TPU slice: a guess, not measured."""


def ici(rate: float) -> Link:
    """The link of a TPU slice whose links carry `rate` bytes per second in one direction."""
    return Link(ICI_LATENCY_US, rate, rate, "one ring over ICI; as published, not measured")


def sum_us(link: Link, size: int, shards: int) -> float:
    """Microseconds of a sum of `size` bytes over `shards` devices; 0 on one."""
    if shards == 1:
        return 0.0
    rate = link.bulk_rate if size >= BULK else link.rate
    return link.latency_us + 2 * (shards - 1) / shards * size / rate * 1e6


def number_of_sums(model: ModelConfig) -> int:
    """Sums of hidden states of a step. What stands beside experts is summed apart from them, as
    each is normed.
    """
    return (3 if model.experts_beside_mlp else 2) * model.num_layers + 1


def sums_ms(model: ModelConfig, tokens: int, itemsize: int, shards: int, link: Link) -> float:
    """Milliseconds of all sums of a step of so many tokens."""
    us = number_of_sums(model) * sum_us(link, tokens * model.hidden_size * itemsize, shards)
    if model.wide_qk_norm:
        us += model.num_layers * sum_us(link, tokens * 2 * 4, shards)
    return us / 1e3


def step_ms(
    model: ModelConfig, one_ms: float, tokens: int, itemsize: int, shards: int, link: Link
) -> float:
    """Milliseconds on `shards` devices of a step that takes `one_ms` on one: all products and heads
    are dealt out.
    """
    fixed = min(one_ms, model.num_layers * LAYER_US / 1e3)
    return (one_ms - fixed) / shards + fixed + sums_ms(model, tokens, itemsize, shards, link)


@dataclass(frozen=True, slots=True)
class Devices:
    """So many of one kind and what is between them. Published rates of each: bytes read per second,
    operations per second in the model's dtype.
    """

    count: int
    read_rate: float
    flops_rate: float
    link: Link


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step of `requests` with up to `length` tokens each, by published rates: what kernels take
    beside them is not in it. Bytes and operations are those of each device, `sum_bytes` are those
    of one sum.
    """

    what: str
    requests: int
    length: int
    bytes: float
    flops: float
    sums: int
    sum_bytes: int
    bytes_ms: float
    flops_ms: float
    sums_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds: reading and computing overlap, sums wait for both."""
        return max(self.bytes_ms, self.flops_ms) + self.sums_ms


def estimate(
    what: str,
    model: ModelConfig,
    lengths: Sequence[int],
    itemsizes: tuple[int, int],
    devices: Devices,
) -> Estimate:
    """Of a `decode` step of requests of these lengths, or of a `prefill` step of whole prompts.
    `itemsizes`: bytes of an entry of the weights and of the cache.
    """
    decodes, shards = what == "decode", devices.count
    tokens = len(lengths) if decodes else sum(lengths)
    read = decode_bytes(model, lengths if decodes else [0] * len(lengths), *itemsizes) / shards
    flops = prefill_flops(model, [1] * len(lengths) if decodes else lengths) / shards
    return Estimate(
        what,
        len(lengths),
        max(lengths),
        read,
        flops,
        number_of_sums(model) if shards > 1 else 0,
        tokens * model.hidden_size * itemsizes[0],
        read / devices.read_rate * 1e3,
        flops / devices.flops_rate * 1e3,
        sums_ms(model, tokens, itemsizes[0], shards, devices.link),
    )
