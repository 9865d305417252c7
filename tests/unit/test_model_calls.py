"""The calls of all programs of a model, recorded from shapes alone, are those that the
frameworks trace.
"""

from dataclasses import replace

import pytest

from twinfer.ops import REGISTRY, resolve
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.config import resolve as resolve_config
from twinfer.shared.models import stages
from twinfer.shared.models.calls import KINDS
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Mlp
from twinfer.shared.worker import backend_module

MODEL = parse_config(SHAPES["qwen3-0.6b"])
WINDOWS = replace(MODEL, num_layers=3, layer_windows=(0, 8, 0))
OPTIONS = dict(max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32, dtype="bfloat16")
BACKENDS = ("torch", "jax")


def rooms(backend, **options):
    """A backend's module of plans, and a configuration for it."""
    config = EngineConfig(model="m", backend=backend, **(OPTIONS | options))
    resolved, _ = resolve_config(config, MODEL, DeviceInfo("cpu", "cpu", 1 << 34))
    return backend_module(backend, "plans"), resolved


def shape(value):
    return (
        (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if hasattr(value, "shape")
        else value
    )


def shapes(call):
    return (
        call.program,
        call.op,
        call.parents,
        tuple((name, shape(x)) for name, x in call.arguments.items()),
    )


def results(backend, op, arguments):
    """The results of the native op, from a framework's own rules of shapes."""
    function = getattr(resolve(backend, enable=("none",)).bind(), op)
    if backend == "torch":
        out = function(**arguments)
    else:
        import jax

        arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
        static = {name: x for name, x in arguments.items() if name not in arrays}
        out = jax.eval_shape(lambda given: function(**given, **static), arrays)
    return tuple(map(shape, out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_without_data_are_those_of_the_ops(backend):
    plans, config = rooms(backend)
    per_framework = [op.name for op in REGISTRY if op.native == "per framework"]
    checked = set()
    for kind in KINDS:
        for call in plans.record(WINDOWS, config, kind):
            # On torch these two read the host, so nothing runs them without data.
            if call.op in checked or (
                backend == "torch"
                and ({call.op, *REGISTRY[call.op].composition} & {*per_framework})
            ):
                continue
            checked.add(call.op)
            assert tuple(map(shape, call.outputs)) == results(
                backend, call.op, dict(call.arguments)
            ), call.op
    assert len(checked) >= 14


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_calls_of_every_program_are_those_of_a_traced_layer(backend, kind, monkeypatch):
    """A stage from outside is traced in its framework; one that does what the usual one does
    makes the same calls.
    """
    plans, config = rooms(backend)
    monkeypatch.setattr(plans, "drops_rows", lambda *_: False, raising=False)
    recorded = list(map(shapes, plans.record(WINDOWS, config, kind)))
    programs = [str(d) for d in sorted(config.table(), key=lambda d: -d.tokens) if d.kind == kind]
    assert list(dict.fromkeys(program for program, *_ in recorded)) == programs
    monkeypatch.setattr(stages, "_replaced", {})
    stages.replace_stage(Mlp, lambda *args: stages.mlp_stage(*args))
    traced = list(map(shapes, plans.record(WINDOWS, config, kind)))
    assert traced == recorded


def test_the_last_layer_that_drops_tokens_is_recorded_for_the_rows_that_stay():
    plans, config = rooms("torch")
    calls = [call for call in plans.record(MODEL, config, "mixed") if call.program == "mixed[32x4]"]
    tokens = {call.arguments["x"].shape[0] for call in calls if call.op == "gated_mlp"}
    assert tokens == {32, 4}
    queries = {
        (call.arguments["q"].shape[0], call.arguments["max_query_len"])
        for call in calls
        if call.op == "paged_attention"
    }
    assert queries == {(32, 32), (4, 1)}


def test_log_probabilities_of_prompts_are_recorded_in_the_parts_that_are_made():
    plans, config = rooms("torch", max_num_batched_tokens=96, max_model_len=96)
    rows = {
        call.arguments["logits"].shape[0]
        for call in plans.record(MODEL, config, "sample")
        if call.op == "top_logprobs"
    }
    parts = {
        n
        for d in config.table()
        if d.kind == "mixed"
        for n in (min(64, d.tokens), d.tokens % 64)
        if n
    }
    assert rows == parts | {d.requests for d in config.table()}
    assert 64 in rows
