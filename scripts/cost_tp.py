"""What a step takes on several devices, from what it takes on one: a model, and how far it is off.

    python scripts/cost_tp.py --measured out.json            # of scripts/bench_tp.py
    python scripts/cost_tp.py --model llama3.1-70b --shards 2 --one 1:33.6,8:34.0 --link nvlink

A step of `one` ms becomes one / (shards * e) + (2 L + 1) s: every product and every head is dealt
out, and a device does its share at the efficiency e, since halved products of few rows do not take
half the time; s is what a sum takes beyond the add and norm that one device makes too. Of a link it
is latency + 2 (n - 1) / n * bytes / rate. Prompts have e = 1.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from twinfer.shared.models.config import load_config
from twinfer.shared.models.locate import model_folder

DECODE, PREFILL = 0.82, 1.0
"""Efficiencies: the first is fitted to four batch sizes of llama3-8b on two H200s."""


@dataclass(frozen=True, slots=True)
class Link:
    """Microseconds of the smallest sum, bytes per second and direction of a device, and those of
    sums of `BULK` bytes and more.
    """

    latency_us: float
    rate: float
    bulk_rate: float
    source: str


LINKS = {
    "nvlink": Link(7.0, 140e9, 257e9, "measured on two H200s: NCCL, no multicast"),
    "ici-v5e": Link(10.0, 45e9, 45e9, "not measured: 400 Gbit/s a link, as published"),
    "ici-v6e": Link(10.0, 90e9, 90e9, "not measured: 896 Gbit/s a link, as published"),
    "dcn": Link(60.0, 12.5e9, 12.5e9, "not measured: 100 Gbit/s a host"),
}
"""What sums go over."""
BULK = 16 << 20


def sum_us(link: Link, size: int, shards: int) -> float:
    """Microseconds of a sum of `size` bytes over `shards` devices."""
    rate = link.bulk_rate if size >= BULK else link.rate
    return link.latency_us + 2 * (shards - 1) / shards * size / rate * 1e6


def step_ms(one: float, sums: int, size: int, shards: int, link: Link, efficiency: float) -> float:
    """Milliseconds of a step on `shards` devices that takes `one` on one of them."""
    return one / (shards * efficiency) + sums * sum_us(link, size, shards) / 1e3


def compare(measured: dict[str, Any], link: Link) -> list[tuple[str, float, float]]:
    """(what, modelled, measured) of the runs that a file of scripts/bench_tp.py has."""
    model = load_config(model_folder(measured["model"]))
    sums, row = 2 * model.num_layers + 1, 2 * model.hidden_size
    engines = {name: found for name, found in measured["engines"].items() if "decode_ms" in found}
    one, rows = engines["tp 1"], []
    for name, found in engines.items():
        shards = found["options"].get("tensor_parallel_size", 1)
        if shards == 1:
            continue
        for batch, took in found["decode_ms"].items():
            size = int(batch) * row
            what = f"{name}, decode b = {batch}, ms"
            modelled = step_ms(one["decode_ms"][batch], sums, size, shards, link, DECODE)
            rows.append((what, modelled, took))
        step = 8192 / one["prefill_tok_s"] * 1e3
        modelled = 8192e3 / step_ms(step, sums, 8192 * row, shards, link, PREFILL)
        rows.append((f"{name}, prefill, tokens/s", modelled, found["prefill_tok_s"]))
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", help="a file that scripts/bench_tp.py wrote")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--one", default="", help="BATCH:MS of one device, with commas between")
    parser.add_argument("--link", choices=LINKS, default="nvlink")
    arguments = parser.parse_args()
    link = LINKS[arguments.link]
    print(f"{arguments.link}: {link.source}")
    if arguments.measured:
        with open(arguments.measured, encoding="utf-8") as file:
            for what, modelled, took in compare(json.load(file), link):
                print(f"{what:42} {modelled:10.2f} {took:10.2f}  {modelled / took - 1:+.1%}")
        return
    model = load_config(model_folder(arguments.model))
    sums = 2 * model.num_layers + 1
    for pair in filter(None, arguments.one.split(",")):
        batch, one = pair.split(":")
        size = int(batch) * 2 * model.hidden_size
        took = step_ms(float(one), sums, size, arguments.shards, link, DECODE)
        print(f"b = {batch}: {took:.2f} ms, {sums} sums of {size} bytes")


if __name__ == "__main__":
    main()
