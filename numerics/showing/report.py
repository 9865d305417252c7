"""A result as one static HTML file: no scripts, nothing loaded from elsewhere, dark and light.

`page(record)` takes what `--json` wrote. Numbers are put together here; `report.html` only lays
them out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from ..errors import EQUAL, NOT_COMPARED, NotComparable
from ..judging.diff import Finding, load, pool
from ..judging.record import check_header

MODES = {
    "S": "semantics, in float32: is it the same mathematics?",
    "P": "precision, in the run dtype: is the error that of rounding alone?",
}
METRICS = (
    "sigma",
    "relative error",
    "worst token",
    "largest error",
    "|bias|",
    "|slope|",
    "overlap",
    "contract",
)
Record = Mapping[str, Any]


def read_record(path: str) -> dict[str, Any]:
    """A result that `--json` wrote. Raises NotComparable if it is none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NotComparable(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise NotComparable(f"{path}: is not JSON: {str(error)[:120]}") from None
    return check_header(record, path)


def page(record: Record) -> str:
    """The HTML text. Raises NotComparable for a record that lacks what a result has."""
    try:
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
        )
        environment.filters |= {"brief": _brief, "share": _share}
        template = environment.from_string(
            resources.files(__package__).joinpath("report.html").read_text("utf-8")
        )
        return template.render(_context(record))
    except (KeyError, TypeError, ValueError, AttributeError, jinja2.UndefinedError) as error:
        raise NotComparable(
            f"report: the result is damaged: {type(error).__name__} {str(error)[:120]}"
        ) from error


def _context(record: Record) -> dict[str, Any]:
    kind = check_header(record, "report")["kind"]
    findings = load(record).findings if kind == "diff" else []
    sides = list(record["sides"])
    modes = [mode for mode in ("X", "S", "P") if any(f.mode == mode for f in findings)]
    return {
        "record": {"first_divergence": None, "logits": [], "served": [], **record},
        "triage": _triage(record),
        "sides": [{"name": name, "letter": "abc"[min(i, 2)]} for i, name in enumerate(sides)],
        "facts": _facts(record, findings),
        "environment": _environment(record, sides),
        "modes": [_mode([f for f in findings if f.mode == mode], sides, mode) for mode in modes],
        "worst": _worst(findings),
        "ops": _ops(record["results"]) if kind == "ops" else [],
        "facts_of_rollout": rollout_facts(record) if kind == "rollout" else [],
        "notes": [*record.get("notes", []), *record.get("absent", [])],
    }


def _shares(f: Finding) -> Mapping[str, float]:
    """The shares of a finding, the contract's among them."""
    return f.shares if f.contract is None else {**f.shares, "contract": f.contract}


def _share(f: Finding) -> float:
    """The largest of them."""
    return max(_shares(f).values(), default=0.0)


def _mode(findings: Sequence[Finding], sides: Sequence[str], mode: str) -> dict[str, Any]:
    """What the page shows of the findings of one mode."""
    return {
        "name": mode,
        "what": MODES.get(mode, "exact probes: equal bits"),
        "heat": [_heat(findings, side) for side in sides],
        "chart": _chart(findings, sides, mode),
        "layers": _tables(findings, sides),
    }


CAUSES = {
    "S": "wrong mathematics or wrong indexing, since it shows in float32",
    "X": "wrong bits in an exact computation",
}
"""What a fault that a mode shows first most likely is."""
OTHER_CAUSE = "too little precision, or a fault that this mode alone was asked about"


def _triage(record: Record) -> str:
    """What to make of it, in a sentence."""
    first = record.get("first_divergence")
    if record["kind"] == "quantization":
        return "What the scheme costs stands below; whether that is too much is not judged."
    if record["exit_code"] == EQUAL and record["kind"] != "diff":
        return "Everything that was asked holds."
    if record["exit_code"] == EQUAL:
        ends = [*record.get("logits", []), *record.get("served", [])]
        ties = sum(entry["ties"] for entry in ends)
        tail = f" {ties} best tokens differ where rounding alone decides." if ties else ""
        return f"What differs between the sides is rounding.{tail}"
    if record["exit_code"] == NOT_COMPARED:
        return "Something that had to be compared was not, so this is no statement about it."
    if record["kind"] not in ("diff", "ops"):
        return "What is wrong is marked below."
    if first is None:
        return "No single op is at fault; see the problems below."
    local = first["scope"] in ("op", "layer")
    where = "by itself, on inputs that are right" if local else "but only in the run as a whole"
    return (
        f"The first op that goes wrong does so {where}: {CAUSES.get(first['mode'], OTHER_CAUSE)}."
    )


def _facts(record: Record, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    e = record.get("environment", {})
    count = len(findings) or record.get("compared")
    if isinstance(count, bool):  # a search only says whether something was compared
        count = None
    names = "model", "architecture", "dtype", "layers", "tokens", "steps", "weights", "seed"
    facts = {name: e.get("load_format" if name == "weights" else name) for name in names}
    facts |= {"comparisons": count, "definition": e.get("definition")}
    facts["seconds"] = f"{record.get('seconds', 0.0):.1f}"
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _environment(record: Record, sides: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of what the sides ran on, and whether it differs."""
    e = record.get("environment", {})
    infos = [e.get("sides", {}).get(side, {}) for side in sides]
    rows: list[tuple[str, list[str]]] = []
    for key in ("target", "device", "plan", "model_hash", "steps_hash", "machine"):
        values = [str(info.get(key, e.get(key, ""))) for info in infos]
        rows.append((key.replace("_", " "), values))
    kinds = sorted({kind for info in infos for kind in info.get("implementations", {})})
    for kind in kinds:
        chosen = [info.get("implementations", {}).get(kind, {}) for info in infos]
        for op in sorted({op for choice in chosen for op in choice}):
            values = [choice.get(op, "–") for choice in chosen]
            if len(set(values)) > 1:
                rows.append((f"{op} ({kind})", values))
    for name, found in (e.get("versions") or record.get("versions") or {}).items():
        # Results that were put together from two runs have versions by side.
        own = [str(info.get("versions", {}).get(name, found)) for info in infos]
        rows.append((name, own))
    return [{"name": n, "values": v, "differs": len(set(v)) > 1} for n, v in rows if any(v)]


# --- heat map
# --------------------------------------------------------------------------------------------------


def _heat(findings: Sequence[Finding], side: str) -> dict[str, Any]:
    """Rows of layers, columns of metrics and of ops: the largest share of a gate over all steps."""
    mine = [f for f in findings if f.side == side]
    local = [f for f in mine if f.scope in ("op", "layer")]
    metrics = [name for name in METRICS if any(name in _shares(f) for f in local)]
    taps = list(dict.fromkeys(f.tap for f in local if f.scope == "op" and f.layer >= 0))
    rows = []
    for row in sorted({f.row for f in local}):
        here = [f for f in local if f.row == row]
        cells = [_cell((_shares(f).get(name) for f in here), here, name) for name in metrics]
        cells = cells or [_cell((_share(f) for f in here), here)]
        ops = [
            _cell((_share(f) for f in here if f.tap == tap), [f for f in here if f.tap == tap])
            for tap in taps
        ]
        whole = [f for f in mine if f.row == row and f.scope in ("inherited", "logits")]
        inherited = _cell((_share(f) for f in whole), whole)
        rows.append({"name": _row_name(row), "cells": [*cells, inherited], "ops": ops})
    return {
        "side": side,
        "metrics": [*(metrics or ["equal bits"]), "inherited"],
        "taps": [_short(tap) for tap in taps],
        "rows": rows,
    }


def _row_name(row: float) -> str:
    if row < 0:
        return "embed"
    return "end" if row == math.inf else str(int(row))


def _short(tap: str) -> str:
    """The op of a tap, with its weight: what it is part of says its place."""
    head, _, tail = tap.rpartition("/")
    return f"· {tail}" if head else tail


def _cell(
    values: Iterable[float | None], findings: Sequence[Finding], metric: str = ""
) -> dict[str, Any] | None:
    """A share for the map; None where nothing was compared."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    value = max(known)
    failing = [f for f in findings if f.complaints]
    failed = not value <= 1.0 or (not metric and bool(failing))
    text = "" if failed and value <= 1.0 else _brief(value)
    return {"share": value, "text": text, "heat": round(100 * min(value, 1.0)), "failed": failed}


def _brief(value: float) -> str:
    if value > 99:
        return ">99"
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.3g}"


# --- lines
# --------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1100, 250, 52, 140, 14, 34


def _chart(findings: Sequence[Finding], sides: Sequence[str], mode: str) -> dict[str, Any] | None:
    """Local and inherited error by layer: sigma with its band in mode P, relative error in mode
    S.
    """
    lines = _lines(findings, sides, mode)
    if not lines:
        return None
    layers = sorted({layer for line in lines for layer, _ in line["points"]})
    low, high, band, log = _limits(findings, [y for line in lines for _, y in line["points"]], mode)
    y = _scale(max(low, 1e-12) if log else low, high, log)
    first, last = layers[0], layers[-1]

    def x(layer: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (layer - first) / max(last - first, 1), 1)

    for line in lines:
        line["places"] = [(x(layer), y(value), layer, value) for layer, value in line["points"]]
        line["path"] = " ".join(f"{a},{b}" for a, b, *_ in line["places"])
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "lines": lines, "labels": _labels(lines),
        "band": (y(band[1]), y(max(band[0], low)) - y(band[1])),
        "title": "sigma by layer: 1 is what rounding alone does"
        if mode == "P" else "relative error by layer",
        "band_name": "sigma 0.95 to 1.05" if mode == "P" else "up to the gate of one layer",
        "y": [(y(tick), f"{tick:g}") for tick in _ticks(low, high, log)],
        "x": [(x(layer), _row_name(layer)) for layer in layers[:: max(1, len(layers) // 16)]],
    }  # fmt: skip


def _lines(findings: Sequence[Finding], sides: Sequence[str], mode: str) -> list[dict[str, Any]]:
    """The lines of a chart: the local and the inherited error of each side, where there are any."""
    lines: list[dict[str, Any]] = []
    for index, side in enumerate(sides):
        for scope, word in (("layer", "local"), ("inherited", "inherited")):
            points = _by_layer([f for f in findings if (f.side, f.scope) == (side, scope)], mode)
            if points:
                lines.append(
                    {"side": index, "scope": word, "name": f"{side[:1]} {word}", "points": points}
                )
    return lines


def _limits(
    findings: Sequence[Finding], values: Sequence[float], mode: str
) -> tuple[float, float, tuple[float, float], bool]:
    """(lowest y, highest y, band of what is right, whether the scale is logarithmic) of a chart
    of `values`.
    """
    if mode == "P":
        return min(0.9, *values) - 0.02, max(1.1, *values) + 0.02, (0.95, 1.05), max(values) > 4
    noise = [f.metrics.rel_noise for f in findings if f.scope in ("layer", "inherited")]
    gates = [f.metrics.rel_l2 / _shares(f)["relative error"] for f in findings
             if f.scope == "layer" and _shares(f).get("relative error")]  # fmt: skip
    band = (min(noise, default=0.0), min(gates, default=max(noise, default=1.0)))
    return 0.5 * min(v for v in (*values, *band) if v > 0), 2.0 * max(*values, band[1]), band, True


def _by_layer(findings: Sequence[Finding], mode: str) -> list[tuple[int, float]]:
    """(layer, sigma over all steps, or the largest relative error)."""
    found = []
    for layer in sorted({f.layer for f in findings}):
        here = [f.metrics for f in findings if f.layer == layer]
        value = pool(here).sigma if mode == "P" else max(m.rel_l2 for m in here)
        if math.isfinite(value):
            found.append((layer, value))
    return found


def _scale(low: float, high: float, log: bool) -> Any:
    f = math.log10 if log else float

    def place(value: float) -> float:
        share = (f(min(max(value, low), high)) - f(low)) / ((f(high) - f(low)) or 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    return place


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        powers = range(math.ceil(math.log10(max(low, 1e-12))), math.floor(math.log10(high)) + 1)
        return [10.0**p for p in powers][:: max(1, len(powers) // 5)] or [high]
    step = next(s for s in (0.05, 0.1, 0.25, 0.5, 1.0, math.inf) if (high - low) / s <= 7)
    return [round(i * step, 2) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _labels(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names at the lines' ends, pushed apart where they would lie on each other."""
    labels = sorted(
        ({"y": line["places"][-1][1], **line} for line in lines), key=lambda label: label["y"]
    )
    for before, label in pairwise(labels):
        label["y"] = max(label["y"], before["y"] + 15)
    below = max((label["y"] for label in labels), default=0) - (HEIGHT - BOTTOM)
    for label in labels:
        label["y"] = round(label["y"] - max(below, 0) + 4, 1)
    return labels


# --- tables
# --------------------------------------------------------------------------------------------------


def _tables(findings: Sequence[Finding], sides: Sequence[str]) -> list[dict[str, Any]]:
    """The op table by layer: for each tap the implementation and the errors on each side."""
    tables = []
    for row in sorted({f.row for f in findings}):
        here = [f for f in findings if f.row == row]
        taps = []
        for scope, tap in dict.fromkeys((f.scope, f.tap) for f in here):
            both = [
                [f for f in here if (f.scope, f.tap, f.side) == (scope, tap, side)]
                for side in sides
            ]
            taps.append(
                {
                    "name": tap if scope == "op" else f"{tap} ({scope})",
                    "sides": [_summary(fs) for fs in both],
                }
            )
        failed = sum(bool(f.complaints) for f in here)
        tables.append({"name": _row_name(row), "taps": taps, "failed": failed})
    return tables


def _sigma(error: float, noise: float) -> str:
    """An error in units of the rounding noise, as text; without noise only no error is right."""
    if noise:
        return f"{math.sqrt(error / noise):.3f}"
    return "off" if error else "exact"


def _summary(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """A tap of a side over all steps."""
    if not findings:
        return None
    metrics = [f.metrics for f in findings]
    noise, error = (sum(getattr(m, key) for m in metrics) for key in ("noise_power", "error_power"))
    contracts = [_shares(f)["contract"] for f in findings if "contract" in _shares(f)]
    return {
        "implementation": findings[0].implementation,
        "sigma": _sigma(error, noise),
        "rel": f"{max(m.rel_l2 for m in metrics):.1e}",
        "contract": f"{max(contracts):.2f}" if contracts else "",
        "complaint": next((f.complaints[0] for f in findings if f.complaints), ""),
    }


def _worst(findings: Sequence[Finding]) -> list[Finding]:
    """Where errors are largest, one row for each side, mode and tap: failing ones first, as the
    model computes them.
    """
    best: dict[Any, Finding] = {}
    for f in sorted(findings, key=lambda f: (not f.complaints, -_share(f))):
        best.setdefault((f.side, f.mode, f.scope, f.tap), f)
    return list(best.values())[:12]


def _ops(results: Sequence[Record]) -> list[Record]:
    """Rows of `twinfer numerics ops`, worst first, with numbers instead of names of infinities."""
    rows = [{**r, "error": float(r["error"]), "gain": float(r["gain"])} for r in results]
    return sorted(rows, key=lambda r: (not r["complaints"], -max(r["error"], r["gain"])))


def rollout_facts(record: Record) -> list[tuple[str, str]]:
    """What `twinfer numerics rollout` found, as names and figures: in a terminal and on a page."""
    r, text = record["ratios"], record["perplexity"]
    facts = [
        ("difference over that of two roundings", f"sigma {record['sigma']:.3g} (limit "
         f"{record['limit']:.3g})"),
        ("importance ratios", f"mean {r['mean']:.5f} within {r['mean_error']:.1g}, "
         f"{r['smallest']:.4f} to {r['largest']:.4f}, {100 * r['clipped']:.2g} % clipped, worth "
         f"{100 * r['effective']:.2f} % of the tokens, KL {r['kl']:.2g} nats"),
        ("  by share of tokens",
         ", ".join(f"{share} {value:.4f}" for share, value in r["quantiles"].items())),
        ("drift", f"{record['growth']:+.3f} of the noise a doubling of the position (limit "
         f"{record['growth_limit']:.3f})"),
    ]  # fmt: skip
    facts += [
        (f"  positions {x['first']} to {x['last']}", f"rms {x['rms']:.3g} nats, mean "
         f"{x['mean']:+.1g}, largest {x['largest']:.3g}, {x['tokens']} tokens")
        for x in record["drift"]
    ]  # fmt: skip
    if text is not None:
        facts.append(
            (f"perplexity of {text['tokens']} tokens", f"a {text['a']:.5g}, b {text['b']:.5g}; "
             f"{text['difference']:+.2g} nats a token within {text['error']:.1g}")
        )  # fmt: skip
    return facts
