"""`twinfer numerics bisect`: a fault planted anywhere is found: its layer, its op, in as many
runs as halving takes.
"""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from twinfer.numerics.errors import NotComparable
from twinfer.numerics.faults.catalogue import CATALOGUE, plant
from twinfer.numerics.faults.making import changed
from twinfer.numerics.questions.bisect import bisect_model, render
from twinfer.numerics.questions.bisect_knobs import bisect_knobs, smallest
from twinfer.numerics.showing.terminal import LINES
from twinfer.numerics.sides.fault import Fault
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import open_subject, parse_target

LAYERS = 6
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip
TORCH = parse_target("torch:cpu")
OPS = {  # fault -> the call that it is in
    "attention-scale-1e-3": "paged_attention",
    "page-table-row": "paged_attention",
    "kv-row-lost": "norm_rope_write_kv[q_norm]",
    "rope-sign": "norm_rope_write_kv[q_norm]",
    "gelu-for-silu": "gated_mlp[gate_up]",
    "gate-up-swapped": "gated_mlp[gate_up]",
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return open_subject(str(folder), load_format="dummy")


def search(subject, target, fault=None, modes=("S",), count=1):
    steps = make_steps(subject, default_prompts(subject, seed=1))[:count]
    return bisect_model(subject, target, steps, modes=modes, fault=fault)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 37])
def test_halving_finds_smallest_sets(size):
    rng = random.Random(size)
    for _ in range(50):
        guilty = set(rng.sample(range(size), rng.randint(1, min(3, size))))
        runs = []

        def fails(part, guilty=guilty, runs=runs):
            runs.append(part)
            return guilty <= set(part)

        assert set(smallest(range(size), fails)) == guilty
        assert len(runs) <= len(guilty) * (math.ceil(math.log2(max(size, 2))) + 1)


def places(seed, count):
    rng = random.Random(seed)
    return [(name, rng.randrange(LAYERS)) for name in rng.sample(sorted(OPS), count)]


@pytest.mark.parametrize(
    ("backend", "name", "layer"),
    [("torch", *place) for place in places(1, len(OPS))]
    + [pytest.param("jax", *place, marks=pytest.mark.slow) for place in places(3, len(OPS))],
)
def test_a_fault_is_found_wherever_it_is(subject, backend, name, layer):
    report = search(
        subject, parse_target(f"{backend}:cpu"), plant(f"{name}@{layer}", subject.model)
    )
    assert report.exit_code == 1
    assert [(c.layer, c.tap) for c in report.culprits] == [(layer, OPS[name])]
    assert report.culprits[0].implementation in ("native", "composition", "c")
    assert report.runs == 1
    assert f"--layers {layer}" in report.commands[0]


def test_an_op_within_a_composition_is_found(subject):
    """The down projection of one layer: a call in a call."""

    def wrong(xp, function):
        def call(x, weight, bias=None):
            down = weight.shape[1] == CONFIG["intermediate_size"]
            return function(x, weight, bias) * (1.01 if down else 1.0)

        return call

    report = search(subject, TORCH, Fault("down", ops={"linear": wrong}, layer=4))
    assert [c.name for c in report.culprits] == ["layer.4.gated_mlp[gate_up]/linear[down]"]


def test_too_little_precision_is_told_from_wrong_mathematics(subject):
    def narrow(xp, function):
        """float32 in a float32 run stays as it is: only the run dtype loses."""

        def call(x, weight, eps):
            if str(x.dtype).endswith("float32"):
                return function(x, weight, eps)
            return (function(x, weight, eps) * 1.0) * 1.0 + 0.01 * x

        return call

    composed = parse_target("torch:cpu:fused_add_rms_norm=composition,rms_norm=native")
    fault = Fault("narrow", ops={"rms_norm": narrow}, layer=2)
    report = search(subject, composed, fault, modes=("S", "P"))
    assert report.mode == "P"
    assert report.culprits[0].layer == 2
    assert "rms_norm" in report.culprits[0].tap
    assert "passes in float32" in render(report)


@pytest.mark.parametrize("name", ["rope-base", "gate-up-loaded-swapped"])
def test_what_is_no_op_is_named(subject, name):
    report = search(
        subject, TORCH, plant(f"{name}@3" if CATALOGUE[name].weights else name, subject.model)
    )
    text = render(report)
    assert report.exit_code == 1
    assert "layer.3.gate_up" in text if CATALOGUE[name].weights else "cos, sin" in text
    assert report.culprits[0].layer == (3 if CATALOGUE[name].weights else -1)
    assert len(text.splitlines()) <= LINES


@pytest.mark.parametrize(
    ("name", "place"), [("embedding-off-by-one", "embed.embedding"), ("vocab-tail-lost", "head.")]
)
def test_places_outside_of_layers(subject, name, place):
    report = search(subject, TORCH, plant(name, subject.model))
    assert report.culprits[0].name.startswith(place)


def test_an_op_within_a_composition_is_found_whatever_implements_it(subject):
    """`rms_norm` is a kernel in C here, and only the composition calls it."""
    eps = dict([changed("rms_norm", eps=lambda xp, a: a["eps"] * 1000)])
    composed = parse_target("torch:cpu:fused_add_rms_norm=composition,rms_norm=c")
    report = search(subject, composed, Fault("eps", ops=eps, layer=2))
    assert {(c.layer, c.op) for c in report.culprits} == {(2, "rms_norm")}


def test_an_op_that_fails_in_several_layers_is_named_once(subject):
    report = search(subject, TORCH, plant("attention-scale-1e-2", subject.model))
    assert [(c.layer, c.op) for c in report.culprits] == [(0, "paged_attention")]
    assert f"in {LAYERS} layers" in report.culprits[0].what


def test_a_layer_that_is_wrong_only_as_it_is_compiled(subject, monkeypatch):
    from twinfer.gpu.regional import RegionalPass

    right = RegionalPass.layers

    def compiled(self, block, stream, cache, rows):
        stream, cache = right(self, block, stream, cache, rows)
        if block.first == 4:
            stream = stream._replace(hidden=stream.hidden * 1.01)
            self._keep(5, stream)
        return stream, cache

    monkeypatch.setattr(RegionalPass, "layers", compiled)
    report = search(subject, TORCH)
    assert [(c.layer, c.op) for c in report.culprits] == [(4, "")]
    assert "compiled together" in render(report)


def test_tokens_that_read_anothers_pages_fail_where_they_are_read(subject, monkeypatch):
    """A worker that gets wrong page tables runs every op rightly, on what is not the step's."""
    from twinfer.gpu.inputs import StepInputs

    right = StepInputs.fill

    def fill(self, step, *stream, **options):
        table = np.roll(step.page_table, 1, axis=0)
        return right(self, replace(step, page_table=table), *stream, **options)

    monkeypatch.setattr(StepInputs, "fill", fill)
    report = search(subject, TORCH)
    assert report.exit_code == 1
    assert report.culprits[0].layer == 0
    assert "read of the step" in report.culprits[0].what


def test_a_correct_backend_has_nothing_to_find(subject):
    report = search(subject, TORCH, modes=("S", "P"), count=2)
    assert (report.exit_code, report.culprits, report.runs) == (0, [], 2)
    assert json.loads(report.dumps())["exit_code"] == 0
    assert render(report).startswith("NOTHING FAILS")


def test_no_steps_is_no_pass(subject):
    with pytest.raises(NotComparable, match="no steps"):
        bisect_model(subject, TORCH, [])


# --- switches of an engine
# -------------------------------------------------------------------------------------------


@pytest.fixture
def rotten():
    """An implementation of rms_norm, and one of linear, that are registered for a test and right
    or wrong by `bad`.
    """
    from twinfer.ops import REGISTRY, Implementation
    from twinfer.ops.implement import IMPLEMENTATIONS
    from twinfer.ops.namespaces import namespace

    bad = set()

    def make(op):
        right = REGISTRY[op].reference

        def call(*args):
            return right(namespace("torch"), *args) * (1.01 if op in bad else 1.0)

        return Implementation(op, "rotten", "torch", call)

    for op in ("rms_norm", "linear"):
        IMPLEMENTATIONS.setdefault((op, "torch"), {})["rotten"] = make(op)
    yield bad
    for op in ("rms_norm", "linear"):
        del IMPLEMENTATIONS[op, "torch"]["rotten"]


@pytest.mark.parametrize("op", ["rms_norm", "linear"])
def test_the_switch_that_it_hangs_on_is_found(subject, rotten, op):
    rotten.add(op)
    target = parse_target("torch:cpu:rms_norm=rotten,linear=rotten")
    report = bisect_knobs(subject, target, default_prompts(subject, seed=1), modes=("S",))
    assert report.exit_code == 1
    assert [(c.op, c.implementation) for c in report.culprits] == [(op, "rotten")]
    assert report.runs <= report.bound
    assert f"{op}=rotten" in render(report)


def test_switches_of_a_correct_engine(subject, rotten):
    target = parse_target("torch:cpu:rms_norm=rotten")
    report = bisect_knobs(subject, target, default_prompts(subject, seed=1), modes=("S", "P"))
    assert (report.exit_code, report.runs) == (0, 2)


def test_what_is_in_no_switch_is_said(subject):
    fault = plant("attention-scale-1e-2", subject.model)
    report = bisect_knobs(
        subject, TORCH, default_prompts(subject, seed=1), modes=("S",), fault=fault
    )
    assert report.exit_code == 1
    assert "without --over" in render(report)


def test_other_implementations_are_tried_in_its_place(subject, rotten):
    rotten.add("rms_norm")
    report = search(subject, parse_target("torch:cpu:rms_norm=rotten"))
    assert {(c.op, c.implementation) for c in report.culprits} == {("rms_norm", "rotten")}
    assert "rms_norm=native passes in its place" in report.notes
