"""Public model shapes on TPU slices at their defaults: what fits, by libtpu's compiler, on a
machine without a TPU.

Each row is one `twinfer aot MODEL --topology SLICE --tp N --programs steps`: its largest decode
step and its largest mixed step are compiled. What samplers take is not counted, which `twinfer aot`
without `--programs` does. A row that says `refused` gives the reason, which must be bytes. Exit
status 1 if a row fails in any other way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from twinfer.serving.parser import OneLineParser, some_of
from twinfer.serving.program import run_program

SMALL, MIDDLE, LARGE = ("v5e:1x1", 1), ("v5e:2x2", 4), ("v5e:4x4", 16)
CHIPS = ("v5e", "v6e", "tpu7x")
SLICES: dict[str, tuple[tuple[str, int], ...]] = {
    "qwen3-0.6b": (SMALL, ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "llama3.2-1b": (SMALL, ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "llama3.2-3b": (SMALL, ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "qwen3-4b": (SMALL, ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "mistral-7b": (MIDDLE, ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "qwen2.5-7b": (MIDDLE, ("v6e:1x1", 1), ("tpu7x:2x2x1", 2)),
    "llama3-8b": (MIDDLE, ("v6e:2x2", 4), ("tpu7x:2x2x1", 2)),
    "llama3.1-8b": (("v5e:1x1", 1), ("v6e:1x1", 1), ("tpu7x:2x2x1", 1)),
    "qwen3-14b": (("v5e:2x4", 8), ("v6e:2x2", 4), ("tpu7x:2x2x1", 2)),
    "qwen3-32b": (LARGE, ("v6e:2x4", 8), ("tpu7x:2x2x1", 4)),
    "llama3.1-70b": (LARGE, ("v6e:2x4", 8), ("tpu7x:2x2x1", 8)),
}
COLUMNS = ("model", "slice", "tp", "page", "requests", "weights", "temporaries", "KV tokens", "s")


def row(model: str, topology: str, shards: int) -> tuple[list[str], bool]:
    """(cells, whether it compiled or was refused because of bytes)."""
    command = [
        sys.executable,
        "-m",
        "twinfer",
        "aot",
        model,
        "--topology",
        topology,
        "--tp",
        str(shards),
    ]
    done = subprocess.run(
        [*command, "--programs", "steps", "--json"], capture_output=True, text=True, check=False
    )
    cells = [model, topology, str(shards)]
    if done.returncode not in (0, 3):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [*cells, f"failed with {done.returncode}: {last}"], False
    report: dict[str, Any] = json.loads(done.stdout)
    sizes = [str(report["page_size"]), changed(report, "max_num_seqs"), gib(report["weights"])]
    if done.returncode == 3:
        return [*cells, *sizes, f"refused: {reason(report)}"], True
    most = report["besides"]["temporaries of the largest program"]
    return [*cells, *sizes, gib(most), str(report["kv_tokens"]), f"{report['seconds']:.0f}"], True


def changed(report: dict[str, Any], field: str) -> str:
    """What an option became at last."""
    lines: list[str] = [line for line in report["changes"] if line.startswith(f"{field}: ")]
    return lines[-1].partition(" -> ")[2].split()[0]


def reason(report: dict[str, Any]) -> str:
    """What a device would hold, and what it may hold."""
    each = [line for line in report["too_large"] if line["what"].startswith("each device: ")]
    if not each:
        return str(report["too_large"][0]["why"])
    words = ((line["what"].removeprefix("each device: "), gib(line["bytes"])) for line in each)
    return "; ".join(f"{what} {size}" for what, size in words)


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB"


def main() -> int:
    """Print a row as soon as it is known."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=some_of(SLICES), default=",".join(SLICES))
    parser.add_argument("--chips", type=some_of(CHIPS), default=",".join(CHIPS))
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    failed = 0
    for model in arguments.models:
        for topology, shards in SLICES[model]:
            if topology.partition(":")[0] in arguments.chips:
                cells, good = row(model, topology, shards)
                failed += not good
                print("| " + " | ".join(cells) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
