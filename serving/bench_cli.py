"""`twinfer bench offline | latency | serve`: flags and tables, and figures as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..shared.backends import first_installed
from ..shared.config import EngineConfig
from ..shared.limits import Limits
from ..shared.models.arguments import add_model
from ..shared.models.config_json import load_config
from ..shared.models.locate import model_folder
from ..shared.models.shapes import check_weights
from ..shared.option_text import sizes as read_sizes
from ..shared.worker import backend_module
from .bench import (
    LONG_PARTS,
    PARTS,
    SAMPLINGS,
    Workload,
    describe,
    measure_start,
    run_latency,
    run_workload,
)
from .bench_serve_flags import add_bench_serve
from .flags import add_engine, engine_options
from .parser import output_file

if TYPE_CHECKING:
    from rich.table import Table

FILE_WIDTH = 120
"""Characters of a table that does not go to a terminal."""
USUAL_LENGTH = 4096
"""`max_model_len` where none is given and the model reaches so far."""
ENGINE_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
}


def add_parsers(bench: argparse.ArgumentParser) -> None:
    """The flags of all benchmarks."""
    kinds = bench.add_subparsers(
        dest="bench", metavar="WORKLOAD", required=True, parser_class=type(bench)
    )
    default = Workload()
    usage = "%(prog)s MODEL [options]"
    what = "decode, prefill, first token, mixed load, cold and warm start"
    offline = kinds.add_parser("offline", help=what, usage=usage)
    what = "one batch: percentiles per token, to the first token, per request"
    latency = kinds.add_parser("latency", help=what, usage=usage)
    for parser in (offline, latency):
        parser.set_defaults(**ENGINE_DEFAULTS)
        add_model(parser)
        parser.add_argument(
            "--json",
            type=output_file,
            metavar="FILE",
            help="write the result there as well (default: nowhere)",
        )
    w = offline.add_argument_group(
        "workload (the defaults are the one that figures are compared on)"
    )
    w.add_argument(
        "--only",
        type=_words,
        default=PARTS,
        metavar="PART,...",
        help=f"of {', '.join(PARTS)} (default: all of these), {', '.join(LONG_PARTS)}",
    )
    sizes = ",".join(map(str, default.batch_sizes))
    w.add_argument(
        "--batch-sizes", type=_numbers, default=default.batch_sizes, metavar="1,8,...",
        help="decode: requests of a step, 1 to max-num-seqs, left out where the KV cache does not "
        f"hold them at once (default: {sizes})",
    )  # fmt: skip
    for name, text in {
        "input-len": "decode: tokens in",
        "output-len": "decode: tokens out",
        "prefill-prompts": "prefill: prompts",
        "prefill-len": "prefill and ttft: tokens in",
        "mixed-requests": "mixed: requests",
        "repeats": "runs of decode and prefill; the median counts",
        "ttft-repeats": "runs of ttft",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        w.add_argument(
            f"--{name}",
            type=int,
            default=value,
            metavar="N",
            help=f"{text}, from {2 if name == 'output-len' else 1} (default: %(default)s)",
        )
    w.add_argument(
        "--contexts", type=_sizes, default=(), metavar="1K,8K,...",
        help="decode: tokens in, one after the other, instead of input-len (default: none)",
    )  # fmt: skip
    w.add_argument(
        "--sampling",
        choices=SAMPLINGS,
        default=default.sampling,
        help="model: what generation_config.json says, else temperature 0.6, top-p 0.95, top-k 20 "
        "(default: %(default)s)",
    )
    for name in ("mixed-input", "mixed-output"):
        value = getattr(default, name.replace("-", "_"))
        what = f"tokens, from 1, HIGH excluded (default: {value[0]},{value[1]})"
        w.add_argument(f"--{name}", type=_numbers, default=value, metavar="LOW,HIGH", help=what)
    for name, text in {
        "skewed": "tokens in of one request, of the others, and how many these are",
        "turns": "tokens of a chat's first message, turns, and new tokens of each",
    }.items():
        value = getattr(default, name)
        what = f"{text} (default: {','.join(map(str, value))})"
        w.add_argument(f"--{name}", type=_sizes, default=value, metavar="N,N,N", help=what)
    b = latency.add_argument_group("workload")
    for name, value, text in (
        ("batch-size", 1, "requests, from 1"),
        ("input-len", default.input_len, "tokens in, from 1"),
        ("output-len", default.output_len, "tokens out, from 2"),
        ("iterations", 10, "batches, from 1"),
    ):
        b.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: %(default)s)"
        )
    for parser in (offline, latency):
        add_engine(
            parser, usual={"max_model_len": f"what the model allows, {USUAL_LENGTH} at most"}
        )
    add_bench_serve(kinds)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of integers such as 1,8,64"
        ) from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return read_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark; prints a table and writes the JSON. Returns the exit code."""
    options = engine_options(arguments)
    if arguments.backend == "auto":
        # Named before anything starts: a figure is of one backend, and the processes of `start`
        # must take the same.
        arguments.backend = first_installed(arguments.device)
    model, backend = arguments.model, arguments.backend
    # a wrong option shows before a minute of work
    EngineConfig(**options, model=model, backend=backend)
    check_weights(model, options["load_format"])
    if options["max_model_len"] is None:
        limit = load_config(model_folder(model)).max_position_embeddings
        options["max_model_len"] = min(USUAL_LENGTH, limit)
    result = (_latency if arguments.bench == "latency" else _offline)(
        arguments, model_folder(model), options
    )
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(make_table(result))
    if note := result.get("limits", {}).get("note"):
        console.print(f"limit: {note}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=_plain)
    late = result["compilations_after_ready"]
    if late:
        console.print(
            f"{late} compilations after ready: the figures are not those of a warm engine"
        )
    return 1 if late else 0


def _offline(arguments: argparse.Namespace, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    workload = Workload(
        **{name: getattr(arguments, name) for name in Workload.__dataclass_fields__}
    )
    checked = ("max_model_len", "max_num_seqs", "enable_prefix_caching")
    workload.check(*(options[name] for name in checked))
    result: dict[str, Any] = {
        "benchmark": "offline",
        "model": arguments.model,
        "backend": arguments.backend,
    }
    result |= {
        "workload": asdict(workload) | {"standard": workload.standard},
        "compilations_after_ready": 0,
    }
    figures: dict[str, Any] = {}
    if "start" in workload.only:
        # First: its processes need the device to themselves.
        figures["start"] = measure_start(
            folder, arguments.backend, json.loads(json.dumps(options, default=_plain))
        )
    if set(workload.only) != {"start"}:
        from .llm import LLM

        limits = _limits(folder, arguments.backend, options)
        start = time.perf_counter()
        with LLM(folder, backend=arguments.backend, **options) as llm:
            result |= describe(llm, arguments.model) | {"limits": asdict(limits)}
            result["init_s"] = time.perf_counter() - start
            figures |= run_workload(llm, workload, limits)
            result["compilations_after_ready"] = llm.engine.worker.compilations_after_ready()
    return result | {"figures": figures}


def _limits(folder: str, backend: str, options: dict[str, Any]) -> Limits:
    """Measured before the engine takes the device's memory."""
    model = load_config(model_folder(folder))
    device = backend_module(backend).find_device(options["device"])
    dtype = model.dtype if options["dtype"] == "auto" else options["dtype"]
    limits: Limits = backend_module(backend, "limits").measure_limits(device, dtype)
    return limits


def _latency(arguments: argparse.Namespace, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from .llm import LLM

    sizes = {
        name: getattr(arguments, name)
        for name in ("batch_size", "input_len", "output_len", "iterations")
    }
    with LLM(folder, backend=arguments.backend, **options) as llm:
        figures = run_latency(llm, *sizes.values())
        result = {
            "benchmark": "latency",
            **describe(llm, arguments.model),
            "workload": sizes,
            "figures": figures,
        }
        return result | {"compilations_after_ready": llm.engine.worker.compilations_after_ready()}


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def make_table(result: dict[str, Any]) -> Table:
    """The figures with their units; the last column is the share of what the device was measured
    to do.
    """
    from rich.table import Table

    where = result["device"]["name"] if "device" in result else "-"
    title = (
        f"{result['model']}, {result['backend']} on {where}, plan {result.get('plan_hash', '-')}"
    )
    if not result["workload"].get("standard", True):
        title += " (not the standard sizes)"
    table = Table(title=title)
    for name in ("what", "figure", "also", "share of the limit"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in _latency_rows(result) if result["benchmark"] == "latency" else _offline_rows(result):
        table.add_row(*row)
    return table


def _offline_rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    figures, sizes = result["figures"], result["workload"]
    for name, start in figures.get("start", {}).items():
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in start["phases"].items())
        also = f"interpreter and imports {start['interpreter_s'] + start['import_s']:.1f}, {phases}"
        yield f"{name} start", f"{start['ready_s']:.1f} s", also, "-"
    for batch, row in figures.get("decode", {}).items():
        if "left_out" in row:
            lacking = "{tokens} tokens each: {pages_needed} pages, there are {pages}".format(**row)
            yield f"decode b={batch}", "left out", lacking, "-"
            continue
        step, rate = _pace(row), f"{row['tok_s']:.0f} tok/s"
        rate += _together(row.get("tokens_per_step"))
        yield f"decode b={batch}", step, rate, _percent(row, "a copy")
        if "share_of_limit_full" in row:
            yield _full_row(f"decode b={batch}, all prompts read", row)
    if row := figures.get("prefill"):
        what = f"prefill {sizes['prefill_prompts']} x {sizes['prefill_len']}"
        yield what, f"{row['tok_s']:.0f} tok/s", "", _percent(row, "a product")
    if row := figures.get("ttft"):
        yield f"ttft {sizes['prefill_len']}", f"{row['ms']:.1f} ms", "", _percent(row, "a product")
    if row := figures.get("mixed"):
        what = f"mixed, {sizes['mixed_requests']} requests"
        yield what, f"{row['requests_s']:.2f} requests/s", f"out {row['out_tok_s']:.0f} tok/s", "-"
    if row := figures.get("skewed"):
        long, short, others = sizes["skewed"]
        yield _full_row(f"decode, one of {long} among {others} of {short}", row)
    if row := figures.get("turns"):
        first, turns, turn = sizes["turns"]
        what = f"ttft, {turns} turns of {turn} after {first}"
        yield what, f"{row['ms']:.1f} ms", "", _percent(row, "a copy")


def _full_row(what: str, row: dict[str, Any]) -> tuple[str, str, str, str]:
    share = row["share_of_limit_full"]
    of = "-" if share is None else f"{share:.1%} of a copy"
    count = f"{row['full_tokens']} tokens" if "full_tokens" in row else f"{row['full_steps']} steps"
    count += _together(row.get("tokens_per_full_step"))
    return what, _pace(row, "full_"), count, of


def _pace(row: dict[str, Any], full: str = "") -> str:
    """Milliseconds of a step, or of a token where some are guessed."""
    unit = "step" if f"ms_per_{full}step" in row else "token"
    return f"{row[f'ms_per_{full}{unit}']:.3f} ms a {unit}"


def _together(tokens: float | None) -> str:
    """How many tokens a request keeps of a step, where some are guessed."""
    return "" if tokens is None else f", {tokens:.2f} tokens a step"


def _latency_rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    sizes, figures = result["workload"], result["figures"]
    names = {"ttft_ms": "first token", "per_token_ms": "per token", "request_ms": "request"}
    if "tokens_per_step" in figures:
        names["per_token_ms"] = "mean per token"
    for key, name in names.items():
        row = figures[key]
        what = (
            f"{name}, b={sizes['batch_size']}, {sizes['input_len']} in, {sizes['output_len']} out"
        )
        yield (
            what,
            f"p50 {row['p50']:.3f} ms",
            f"p90 {row['p90']:.3f}, p99 {row['p99']:.3f} ms",
            "-",
        )
    if "tokens_per_step" in figures:
        yield "tokens that a request keeps of a step", f"{figures['tokens_per_step']:.2f}", "", "-"


def _percent(row: dict[str, Any], of: str) -> str:
    value = row["share_of_limit"]
    return "-" if value is None else f"{value:.1%} of {of}"
