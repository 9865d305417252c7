#!/usr/bin/env python3
r"""Whether anything became slower: `twinfer bench offline` of several checkouts, which take turns
on one machine.

Each run is a process of its own. Of each figure the median of a checkout's rounds counts; the last
column is how much longer this checkout takes than the other. Exits with 1 where that is more than
`--limit` percent. A figure that a run left out is named and not judged. What follows -- goes to the
benchmark as it is.

    git worktree add ../before COMMIT
    scripts/compare_commits.py --against before=../before --models qwen3-0.6b,llama3-8b -- \
        --load-format dummy --backend torch --device cuda --only decode,prefill
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_host import HERE, name_and_folder

BENCH = (sys.executable, "-P", "-m", "twinfer", "bench", "offline")
TIMES = ("ms_per_step", "ms_per_token", "ms")
RATES = ("tok_s", "requests_s")


def seconds_of(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The name of each figure, and what is proportional to its time. Of a part that has a time and
    a rate, the time.
    """
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            continue
        part = f"{above} {name}".strip()
        if time := next((key for key in TIMES if key in value), None):
            yield part, value[time]
        elif rate := next((key for key in RATES if key in value), None):
            yield part, 1e3 / value[rate]
        else:
            yield from seconds_of(value, part)


def run(folder: str, model: str, rest: list[str]) -> dict[str, float]:
    """One run of the benchmark by the code in `folder`, whatever is installed."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "twinfer").symlink_to(Path(folder).resolve())
        path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
        out = Path(place, "out.json")
        done = subprocess.run(
            [*BENCH, model, *rest, "--json", str(out)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=sys.stderr,
        )
        if done.returncode:  # it has said why
            raise SystemExit(done.returncode)
        return dict(seconds_of(json.loads(out.read_text(encoding="utf-8"))["figures"]))


def main() -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=name_and_folder, required=True, metavar="NAME=DIR")
    parser.add_argument("--models", type=lambda text: text.split(","), required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.0, help="percent")
    parser.add_argument("rest", nargs="*", metavar="-- OPTION", help="of `twinfer bench offline`")
    args = parser.parse_args()
    before, folder = args.against
    slower = 0
    print(f"{'model':16}{'figure':24}{before:>12}{'here':>12}{'longer':>10}")
    for model in args.models:
        rounds: tuple[list[dict[str, float]], ...] = ([], [])
        for _ in range(args.rounds):
            for place, found in zip((folder, str(HERE)), rounds, strict=True):
                found.append(run(place, model, args.rest))
        if not all(found[0] for found in rounds):
            raise SystemExit(f"{model}: no figures of steps among what was measured")
        every = [figures for found in rounds for figures in found]
        for name in dict.fromkeys(name for figures in every for name in figures):
            if any(name not in figures for figures in every):
                print(f"{model:16}{name:24}not in every run: a cache was too small", flush=True)
                continue
            old, new = (statistics.median(figures[name] for figures in found) for found in rounds)
            longer = 100 * (new / old - 1)
            slower += longer > args.limit
            print(f"{model:16}{name:24}{old:12.4f}{new:12.4f}{longer:+9.2f}%", flush=True)
    print(f"{slower} of the figures above {args.limit} %")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
