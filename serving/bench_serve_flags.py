"""The flags of `twinfer bench serve`. Imports nothing that only the benchmark needs."""

from __future__ import annotations

import argparse
from typing import Any

from .parser import http_url, output_file, whole_number

METRICS = ("ttft", "tpot", "itl", "e2el")
DATASETS = ("random", "prefix-repetition", "custom")


def add_bench_serve(kinds: Any) -> None:
    """`bench serve`: which server, what load, what is told."""
    parser = kinds.add_parser("serve", help="load on a running server, and what its clients see")
    g = parser.add_argument_group("server")
    g.add_argument(
        "--base-url",
        type=http_url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="default: %(default)s",
    )
    g.add_argument("--api-key", metavar="KEY", help="sent with each request (default: none)")
    g.add_argument(
        "--served-model-name", metavar="NAME", help="what the server calls it (default: its first)"
    )
    g.add_argument(
        "--ready-check-timeout-sec",
        type=_positive,
        default=600.0,
        metavar="S",
        help="how long to wait for it, more than 0 (default: %(default)s)",
    )
    g = parser.add_argument_group("load")
    g.add_argument(
        "--model", help="whose vocabulary random prompts have (default: the server's name for it)"
    )
    g.add_argument(
        "--dataset-name", choices=DATASETS, default="random", help="default: %(default)s"
    )
    g.add_argument(
        "--dataset-path", metavar="FILE", help="custom: a JSON object with prompt in each line"
    )
    for name, least, value, text in (
        ("num-prompts", 1, 100, "requests"),
        ("input-len", 1, 1024, "tokens in"),
        ("output-len", 1, 128, "tokens out"),
        ("prefix-len", 0, 256, "prefix-repetition: tokens that prompts share"),
        ("num-prefixes", 1, 10, "prefix-repetition: different prefixes"),
        ("num-warmups", 0, 1, "requests before the clock starts"),
        ("seed", 0, 0, "of prompts, lengths and times"),
    ):
        g.add_argument(
            f"--{name}",
            type=whole_number(least),
            default=value,
            metavar="N",
            help=f"{text}, from {least} (default: %(default)s)",
        )
    g.add_argument(
        "--range-ratio",
        type=_share,
        default=0.0,
        metavar="R",
        help="random: lengths within a factor of 1 - R to 1 + R (default: %(default)s)",
    )
    g.add_argument(
        "--request-rate",
        type=_positive,
        default=float("inf"),
        metavar="R",
        help="requests a second, more than 0; inf sends all at once (default: %(default)s)",
    )
    g.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="more than 0: 1 is a Poisson process, less comes in bursts (default: %(default)s)",
    )
    g.add_argument(
        "--max-concurrency",
        type=whole_number(1),
        metavar="N",
        help="requests at a time, from 1 (default: all)",
    )
    g.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0 or more: 0 is greedy (default: %(default)s)",
    )
    g.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="all of the tokens out, whatever they are",
    )
    g.add_argument(
        "--extra-body",
        action="append",
        metavar="NAME=JSON",
        help="a field more of each request; may be repeated (default: none)",
    )
    g = parser.add_argument_group("results")
    g.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=METRICS,
        metavar="M,...",
        help=f"of {', '.join(METRICS)} (default: all)",
    )
    g.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="P,...",
        help="from 0 to 100 (default: 99)",
    )
    g.add_argument(
        "--goodput",
        action="append",
        metavar="NAME:MS",
        help="count requests within ttft, tpot or e2el; may be repeated (default: none)",
    )
    g.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write the result there as well (default: nowhere)",
    )
    g.add_argument(
        "--append-result", action="store_true", help="behind what a file has (default: instead)"
    )
    g.add_argument(
        "--save-detailed", action="store_true", help="with each request's times (default: without)"
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number") from None


def _positive(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"got {text}, must be more than 0")
    return number


def _temperature(text: str) -> float:
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 0 or more")
    return number


def _share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 0 to 1, without 1")
    return number


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"got {name}, allowed are {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    numbers = tuple(_number(part) for part in text.split(","))
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 0 to 100")
    return numbers
