"""`twinfer aot`: what a model needs on a TPU slice, and its programs compiled for it, on a
machine without a TPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ..shared.models.config_json import load_config
from ..shared.models.locate import model_folder
from ..shared.progress import Progress
from .aot import build
from .aot_report import AotReport
from .platforms import leave_out_libtpu

DOES_NOT_FIT = 3


def run(
    model: str,
    topology: str,
    options: dict[str, Any],
    out: str | None,
    which: str,
    as_json: bool,
    progress: Progress,
) -> int:
    """Compile, print, and return the exit code: 0, or 3 if the model does not fit."""
    leave_out_libtpu()
    folder = str(model_folder(model))
    report = build(model, folder, load_config(folder), topology, options, out, progress, which)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console = Console()
        show(report, console if console.is_terminal else Console(width=160))
    return 0 if report.fits else DOES_NOT_FIT


def show(report: AotReport, console: Console) -> None:
    """Print a report as text. Compiler figures, and it says so."""
    console.print(
        f"{report.model} on {report.topology} ({report.devices} devices, {report.hosts} hosts), "
        f"tensor parallel {report.tensor_parallel_size}, plan {report.plan_hash}. By the "
        "compiler's word: nothing ran on a TPU."
    )
    for change in report.changes:
        console.print(change, markup=False)
    if report.too_large:
        console.print(_too_large(report))
    if report.programs:
        console.print(_programs(report))
        if len(report.programs) < report.ladder:
            console.print(
                f"{len(report.programs)} of {report.ladder} programs: the largest of each kind "
                "(--programs)"
            )
    if report.estimates:
        console.print(_estimates(report))
        if report.hosts > 1:
            console.print(
                f"each other host gets {_kib(report.step_message)} a decode step, over the hosts' "
                "own network"
            )
    if report.besides:
        parts = ", ".join(f"{what} {_size(size)}" for what, size in report.besides.items())
        console.print(f"each device, besides the cache: {parts}")
    console.print(
        f"each device: memory {_size(report.memory)}, weights {_size(report.weights)}; KV cache "
        f"for {report.kv_tokens} tokens ({report.num_pages} pages of {_size(report.page_bytes)}); "
        f"{report.seconds:.0f} s"
    )
    if report.written_to:
        print(f"executables in {report.written_to}", file=sys.stderr)


def _too_large(report: AotReport) -> Table:
    table = Table("too large", "size", title="does not fit")
    for row in report.too_large:
        table.add_row(row["what"], row.get("why") or _size(row["bytes"]))
    return table


def _programs(report: AotReport) -> Table:
    table = Table(
        "program", "s", "temporaries", "results", "code", "arguments", "per layer", "per step"
    )
    for p in report.programs:
        table.add_row(
            p.name, f"{p.seconds:.1f}", _size(p.temporaries), _size(p.results), _size(p.code),
            _size(p.arguments), _counts(p.collectives_per_layer), _counts(p.collectives_per_step),
        )  # fmt: skip
    return table


def _estimates(report: AotReport) -> Table:
    table = Table(
        "step", "bytes", "memory", "arithmetic", "sums between devices", "together",
        title="an estimate by published rates and one ring over ICI; nothing ran on a TPU",
    )  # fmt: skip
    for one in report.estimates:
        table.add_row(
            f"{one.what}, {one.requests} of {one.length} tokens",
            _size(int(one.bytes)),
            _ms(one.bytes_ms),
            _ms(one.flops_ms),
            f"{_ms(one.sums_ms)}: {one.sums} of {_kib(one.sum_bytes)}" if one.sums else "-",
            _ms(one.ms),
        )
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f} ms"


def _kib(count: int) -> str:
    return f"{count / 2**10:.0f} KiB"


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:g} {kind}" for kind, count in kinds.items()) or "-"
