"""`twinfer plan`: which implementation of each op a backend runs, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..ops import REGISTRY, OpError
from ..shared.backends import find_backend
from ..shared.config import EngineConfig, resolve
from ..shared.errors import ConfigError
from ..shared.models.config_json import load_config
from ..shared.models.families import model_of
from ..shared.models.locate import model_folder
from ..shared.models.spec import Attention, LatentAttention, Layer
from ..shared.quantized import with_quantization
from ..shared.worker import backend_module
from .flags import engine_options


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; loads no weights and compiles nothing. Exit code 0. Raises ConfigError."""
    model = load_config(model_folder(arguments.model))
    backend, device, _ = find_backend(arguments.backend, arguments.device)
    config = EngineConfig(**engine_options(arguments), model=arguments.model, backend=backend)
    model, _ = with_quantization(model, config.quantization)
    resolved, _ = resolve(config, model, device)
    try:
        plans = backend_module(backend).make_plans(model, resolved)
    except OpError as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{error.options.replace('_', '-')}: {why}") from error
    rows = _plan_rows(plans)
    if arguments.all:
        called = {row["op"] for row in rows}
        every_op = backend_module(backend, "plans").plan_all(resolved)
        rows += [
            _plan_row(choice, "-")
            for name, choice in every_op.choices.items()
            if name not in called
        ]
    record = {
        "backend": backend,
        "ops": rows,
        "layers": _layers_by_plan(model, plans),
        "layer_kinds": _layer_kinds(model, plans),
        "cache_key": plans.cache_key,
        "plan_hash": plans.hash,
    }
    if arguments.json:
        print(json.dumps(record))
    else:
        _print(record, model.num_layers)
    return 0


def _print(record: dict[str, Any], num_layers: int) -> None:
    for row in record["ops"]:
        print(_line(row))
    for title, count in record["layers"].items():
        if "." in title:
            print(f"{title}: what differs in {count} of {num_layers} layers")
    kinds = record["layer_kinds"]
    for kind in kinds if len(kinds) > 1 else ():
        chosen = ", ".join(f"{program} {provider}" for program, provider in kind["chosen"].items())
        print(f"{kind['layers']} layers, {kind['attention']}: {kind['op']} {chosen}")
    print(f"plan hash {record['plan_hash']}")


def _line(row: dict[str, Any]) -> str:
    what = (
        f"{row['op']:<24} {row['kind']:<8} {row['provider']:<12} {row['chosen_by']:<9} "
        f"{row['uuid']}"
    )
    same = "deterministic" if row["deterministic"] else "not deterministic"
    if row["row_invariant"]:
        same += ", row-invariant"
    line = f"{what}  {same:<28} rounds {row['rounds']}"
    if row["passed_over"]:
        line += f"  passed over: {'; '.join(row['passed_over'])}"
    return line


def _layer_kinds(model: Any, plans: Any) -> list[dict[str, Any]]:
    """The kinds of layers: how many there are, what their attention is, and what computes it in
    each kind of program.
    """
    spec, found = model_of(model), []
    for number, kind in enumerate(spec.kinds):
        what, op = _attention(kind)
        # By their place: shards may be given heads of zeros, and then plan layers that have more.
        chosen = {
            program: list(layers.values())[number].plan[op].provider
            for program, layers in plans.layers.items()
        }
        found.append(
            {"layers": spec.layers.count(kind), "attention": what, "op": op, "chosen": chosen}
        )
    return found


def _attention(kind: Layer) -> tuple[str, str]:
    """What the attention of a layer is, in words, and the op that computes it."""
    mixers = [sub.mixer for sub in kind if isinstance(sub.mixer, Attention | LatentAttention)]
    attention = mixers[0]
    if isinstance(attention, LatentAttention):
        sizes = f"{attention.rank} + {attention.rotated}"
        return (
            f"{attention.num_heads} heads over latents of {sizes}, all tokens",
            "latent_attention",
        )
    seen = f"window {attention.window}" if attention.window else "all tokens"
    seen = f"chunks of {attention.chunk}" if attention.chunk else seen
    what = f"{attention.num_heads} heads of {attention.head_dim}, {seen}"
    if attention.reads is not None:
        what += f", reads the cache of layer {attention.reads}"
    return what, "paged_attention"


def _plan_rows(plans: Any) -> list[dict[str, Any]]:
    """The choices of each kind of program, and those that differ in some kinds of layers."""
    rows = [
        _plan_row(plan[name], kind) for kind, plan in plans.by_kind.items() for name in plan.choices
    ]
    for title, plan in plans.titled():
        usual = plans[title.partition(".")[0]]
        rows += [
            _plan_row(choice, title)
            for name, choice in plan.choices.items()
            if choice.provider != usual[name].provider
        ]
    return rows


def _layers_by_plan(model: Any, plans: Any) -> dict[str, int]:
    """How many layers run under each plan: `decode`, `decode.1`, ..."""
    spec, counts = model_of(model), dict[str, int]()
    for titles in plans.layer_titles().values():
        for layer in spec.layers:
            title = titles[spec.kinds.index(layer)]
            counts[title] = counts.get(title, 0) + 1
    return counts


def _plan_row(choice: Any, kind: str) -> dict[str, Any]:
    """What `twinfer plan` says of an op in a kind of program ("-": in none)."""
    op, implementation = REGISTRY[choice.op], choice.implementation
    return {
        "op": op.name,
        "kind": kind,
        "provider": choice.provider,
        "chosen_by": choice.chosen_by,
        "passed_over": [f"{provider}: {why}" for provider, why in choice.passed_over],
        "rounds": op.contract.rounds,
        "contract": dataclasses.asdict(op.contract),
        "deterministic": implementation.deterministic,
        "row_invariant": implementation.row_invariant,
        "uuid": choice.uuid,
    }
