"""The view of a comparison in a terminal: at most 28 lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..judging.diff import Diff, layer_sigmas
from ..judging.power import told

LINES = 25
POWER = 3
"""Lines more, for the smallest faults that would have been seen."""


def render(diff: Diff) -> str:
    """The verdict, sigma by layer, the ends, and what is wrong."""
    lines = list(_lines(diff))
    most = LINES + POWER
    if len(lines) > most:
        lines = [
            *lines[: most - 1],
            f"... and {len(lines) - most + 1} lines more (--json has everything)",
        ]
    return "\n".join(lines)


def _by_layer(sigmas: Mapping[int, float]) -> str:
    """Sigma of each layer, or of the first and last 8. Layers that are not all from 0 on have their
    numbers: a dump may have some only, and others are asked for by `--layers`.
    """
    layers = list(sigmas)
    shown = layers if len(layers) <= 16 else [*layers[:8], *layers[-8:]]
    named = layers != list(range(len(layers)))
    values = " ".join(
        f"{layer}: {sigmas[layer]:.2f}" if named else f"{sigmas[layer]:.2f}" for layer in shown
    )
    return f"sigma by layer: {values}  ({min(sigmas.values()):.3f} to {max(sigmas.values()):.3f})"


def _lines(diff: Diff) -> Iterator[str]:
    e = diff.environment
    yield f"{diff.word}: {e.get('model')} in {e.get('dtype')}"
    what = f"{len(diff.findings)} comparisons" if diff.findings else "what engines served"
    yield f"{what}, {e.get('tokens')} tokens in {e.get('steps')} steps, {diff.seconds:.1f} s"
    for side in diff.sides:
        info = e.get("sides", {}).get(side, {})
        plan = "" if info.get("plan") is None else f", plan {info['plan']}"
        yield f"{side} on {info.get('device')}{plan}"
        for scope, word in (("layer", "local"), ("inherited", "inherited")):
            sigmas = layer_sigmas(diff, side, scope)  # type: ignore[arg-type]
            if sigmas:
                yield f"  {word:<9} {_by_layer(sigmas)}"
        yield from _served(diff, side)
    if "definition" in e:
        yield f"definition: {e['definition']}"
    rows = sum(entry.rows for entry in diff.logits)
    if rows:
        equal, ties, real = (
            sum(getattr(x, n) for x in diff.logits) for n in ("argmax_equal", "ties", "real")
        )
        yield f"best tokens equal: {equal}/{rows}, ties {ties}, real differences {real}"
        for mode in dict.fromkeys(entry.mode for entry in diff.logits):
            here = [entry for entry in diff.logits if entry.mode == mode]
            count = sum(entry.rows for entry in here)
            a, b, noise, between = (
                sum(getattr(entry, name) * entry.rows for entry in here) / count
                for name in ("kl_a", "kl_b", "kl_noise", "kl_ab")
            )
            yield (
                f"KL in nats, mode {mode}: a {a:.2g}, b {b:.2g}, noise {noise:.2g}; between a "
                f"and b {between:.2g}"
            )
    yield from told(e.get("power", {}))
    yield from diff.notes
    first = diff.first_divergence()
    if first is not None:
        yield (
            f"first wrong: {first.side}, mode {first.mode}, {first.name} "
            f"[{first.implementation or first.scope}]"
        )
        yield (
            f"  step {first.step}, {first.place or 'place unknown'}: {'; '.join(first.complaints)}"
        )
        yield f"{len(diff.failures)} findings fail"
    yield from diff.problems
    yield from (f"not compared: {name}" for name in diff.missing)
    yield from (f"logits: {c}" for entry in diff.logits for c in entry.complaints)
    yield from (f"{x.side}, {x.run}, mode {x.mode}: {c}" for x in diff.served for c in x.complaints)


def _served(diff: Diff, side: str) -> Iterator[str]:
    """What an engine did, and how far off it is."""
    for run in diff.served:
        if run.side != side:
            continue
        steps = ", ".join(f"{count} {kind}" for kind, count in run.steps.items())
        yield (
            f"  {run.run}, mode {run.mode}: {run.requests} requests, steps: {steps}; "
            f"{run.preemptions} preempted, {run.cached} tokens from the prefix cache"
        )
        if run.positions:
            yield (
                f"    log-probabilities at {run.positions} positions: sigma {run.sigma:.3f} "
                f"(limit {run.limit:.2f}), worst position {run.worst:.2f} of its limit"
            )
        yield (
            f"    {run.tokens} tokens: {run.ties} ties, {len(run.flips)} not those of their logits"
        )
