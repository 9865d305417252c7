"""`twinfer numerics model`: equal backends pass, planted faults are found where they are."""

import json
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.faults.making import changed
from twinfer.numerics.judging.diff import Diff, layer_sigmas
from twinfer.numerics.questions.model import Comparison, compare_model
from twinfer.numerics.questions.selftest_model import open_model
from twinfer.numerics.showing.junit import suite_xml
from twinfer.numerics.showing.terminal import LINES, render
from twinfer.numerics.sides.fault import Fault
from twinfer.numerics.sides.side import WorkerSide
from twinfer.numerics.sides.steps import cache_shapes, default_prompts, make_steps, pages_of
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.ops.declare import Array
from twinfer.ops.implement import IMPLEMENTATIONS, implement
from twinfer.shared.errors import BackendUnavailable, ConfigError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 256, "dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = QWEN3 | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False,
    "head_dim": 16,
}  # fmt: skip


GRANITE = LLAMA | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "tie_word_embeddings": True,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
    "logits_scaling": 13.0,
}  # fmt: skip
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2, 3],
    "long_factor": [1.0, 2, 4, 8, 16, 32],
}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75,
    "rope_scaling": LONGROPE, "original_max_position_embeddings": 64,
}  # fmt: skip


GEMMA3 = QWEN3 | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 8,
    "sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 8,
    "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GLM4 = QWEN3 | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
OLMO3 = QWEN3 | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 8,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
MINISTRAL3 = QWEN3 | {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "default", "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip

SMALL = QWEN3 | {"num_hidden_layers": 2}
"""For planted faults, in layer 1: they need neither depth nor many steps."""


def subject(folder: Any, config: dict[str, Any] = QWEN3, seed: int = 0) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return open_subject(str(folder), load_format="dummy", seed=seed)


def compare(where: Any, backend: str, mode: str, fault: Fault | None = None) -> Diff:
    """All steps; with a fault the first one only, which is a ragged batch of prompts: one
    program less to compile.
    """
    run = where.with_dtype("float32") if mode == "S" else where
    steps = make_steps(run, default_prompts(run, seed=1))[: None if fault is None else 1]
    side = WorkerSide(run, parse_target(f"{backend}:cpu"), steps, fault)
    return Comparison(run, {backend: side}, mode).run(steps)  # type: ignore[arg-type]


def jax_slow(values: list[tuple[str, Any]]) -> list[Any]:
    """(backend, value) for all; compiling for JAX takes seconds, so those are not in every run."""
    return [
        pytest.param(backend, value, marks=[pytest.mark.slow] if backend == "jax" else [])
        for backend in ("jax", "torch")
        for _name, value in values
    ]


CORRECT = [
    ("qwen3", QWEN3),
    ("llama", LLAMA),
    ("granite", GRANITE),
    ("phi3", PHI3),
    ("gemma2", GEMMA2),
    ("gemma3", GEMMA3),
    ("glm4", GLM4),
    ("olmo3", OLMO3),
    ("ministral3", MINISTRAL3),
]


@pytest.mark.parametrize(("backend", "config"), jax_slow(CORRECT))
def test_a_correct_backend_passes(tmp_path, backend, config):
    diff = compare(subject(tmp_path, config), backend, "P")
    diff.assert_ok()
    sigmas = layer_sigmas(diff, backend)
    assert len(sigmas) == 3
    assert all(0.95 < sigma <= 1.05 for sigma in sigmas.values()), sigmas
    assert {f.layer for f in diff.findings if f.scope == "op"} == {-1, 0, 1, 2}


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param("jax", QWEN3, marks=pytest.mark.slow),
        ("torch", QWEN3),
        ("torch", GEMMA3),
        pytest.param("jax", GEMMA3, marks=pytest.mark.slow),
    ],
)
def test_a_correct_backend_passes_in_float32(tmp_path, backend, config):
    compare(subject(tmp_path, config), backend, "S").assert_ok()


def fused(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """`fused_add_rms_norm` of torch in one piece."""
    total = x + residual
    y = total.float()
    scale = (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y * scale * weight.float()).to(total.dtype), total


@pytest.mark.parametrize("config", [SMALL, GEMMA3], ids=["pre norms", "post norms too"])
def test_a_plan_that_lacks_what_is_inside_of_one_piece_is_compared(tmp_path, monkeypatch, config):
    """As with a kernel: nothing else calls `add`, so the plan has no choice for it."""
    known = IMPLEMENTATIONS.get(("fused_add_rms_norm", "torch"), {})
    monkeypatch.setitem(IMPLEMENTATIONS, ("fused_add_rms_norm", "torch"), dict(known))
    implement("fused_add_rms_norm", provider="whole", framework="torch")(fused)
    where = subject(tmp_path, config).with_dtype("float32")
    steps = make_steps(where, default_prompts(where, seed=1))[:1]
    side = WorkerSide(where, parse_target("torch:cpu:fused_add_rms_norm=whole"), steps)
    assert "add" not in side.plans["mixed"]
    diff = Comparison(where, {"torch": side}, "S").run(steps)
    diff.assert_ok()
    providers = {f.implementation for f in diff.findings if f.tap.startswith("fused_add_rms_norm")}
    assert providers == {"whole"}


ATTENTION = "paged_attention"
NORM = "fused_add_rms_norm"
FAULTS = {
    "attention scale off by 0.1 %": (
        "S", dict([changed(ATTENTION, scale=lambda xp, a: a["scale"] * 1.001)]), ATTENTION
    ),
    "window of 8": ("P", dict([changed(ATTENTION, window=lambda xp, a: 8)]), ATTENTION),
    "eps of 1e-5": ("S", dict([changed(NORM, eps=lambda xp, a: 1e-5)]), NORM),
    "page table rolled": (
        "P",
        dict([changed(ATTENTION, page_table=lambda xp, a: xp.roll(a["page_table"], 1, axis=0))]),
        ATTENTION,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "name"), jax_slow([(n, n) for n in FAULTS]))
def test_a_planted_fault_is_found_in_its_op_and_layer(tmp_path, backend, name):
    mode, ops, op = FAULTS[name]
    diff = compare(subject(tmp_path, SMALL), backend, mode, Fault(name, ops=ops, layer=1))
    assert diff.exit_code == 1
    first = diff.first_divergence()
    assert first.layer == 1
    assert op in first.tap
    assert {f.layer for f in diff.failures if f.scope in ("op", "layer")} == {1}
    with pytest.raises(AssertionError, match=r"layer\.1"):
        diff.assert_ok()


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param("jax", "page-table-row@1", marks=pytest.mark.slow),
        ("torch", "page-table-row@1"),
        ("torch", "kv-row-lost@0"),
        ("torch", "attention-scale-1e-3@0"),
        ("torch", "bias-forgotten@1"),
    ],
)
def test_what_a_worker_executed_shows_a_fault_without_its_ops(tmp_path, backend, name):
    """Its streams are those of the programs that serve, which have the fault too."""
    where = open_model(tmp_path, 1)
    steps = make_steps(where, default_prompts(where, 1))[: None if backend == "torch" else 1]
    fault = plant(name, where.model)
    ask = partial(compare_model, where, [parse_target(f"{backend}:cpu")], steps, modes=("S",))
    diff = ask(taps=(), faults={"a": fault})
    assert {f.layer for f in diff.failures if f.scope == "layer"} == {fault.layer}
    assert not [f for f in diff.findings if f.scope == "op"]


def test_a_token_that_is_not_that_of_the_logits_is_named(tmp_path, monkeypatch):
    """Everything up to the logits is right; rows are sampled one too late."""
    from twinfer.gpu.programs import Programs

    right = Programs.sample

    def sample(self, requests, sampler):
        self.rows[:requests] = self.rows[:requests].roll(1, 0)
        return right(self, requests, sampler)

    monkeypatch.setattr(Programs, "sample", sample)
    where = subject(tmp_path, SMALL)
    steps = make_steps(where, default_prompts(where, 0))
    diff = compare_model(where, [parse_target("torch:cpu")], steps, modes=("S",))
    assert diff.exit_code == 1
    assert not diff.failures
    assert "is that of the logits" in diff.problems[0]


def test_a_compiler_that_leaves_out_roundings_is_no_side(tmp_path, monkeypatch):
    from twinfer.tpu import compilation

    where = subject(tmp_path, SMALL)
    steps = make_steps(where, default_prompts(where, 1))[:1]
    monkeypatch.setitem(compilation.OPTIONS, "xla_allow_excess_precision", True)
    with pytest.raises(BackendUnavailable, match="leaves out roundings"):
        WorkerSide(where, parse_target("jax:cpu"), steps)


@pytest.mark.parametrize("phase", ["load", "allocate_kv", "warm_up"])
def test_a_worker_whose_start_fails_is_closed(tmp_path, phase, monkeypatch):
    """And what it failed of is told, whatever comes while it is closed."""
    from twinfer.gpu.worker import TorchWorker

    where, closed, close = subject(tmp_path, SMALL), [], TorchWorker.close

    def interrupted(*_):
        raise KeyboardInterrupt

    def close_badly(worker):
        close(worker)
        closed.append(worker)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(TorchWorker, phase, interrupted)
    monkeypatch.setattr(TorchWorker, "close", close_badly)
    steps = make_steps(where, default_prompts(where, 1))[:1]
    with pytest.raises(KeyboardInterrupt):
        WorkerSide(where, parse_target("torch:cpu"), steps)
    assert len(closed) == 1


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_worker_starts_on_the_cache_that_it_is_given(tmp_path, backend):
    where = subject(tmp_path, SMALL)
    steps = make_steps(where, default_prompts(where, 1))[:1]
    side = WorkerSide(where, parse_target(f"{backend}:cpu"), steps)
    rng = np.random.default_rng(1)
    shapes = cache_shapes(where, pages_of(steps))
    start = [rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in shapes]
    side.begin(start)
    ran = side.execute(steps[0])
    slots = steps[0].field("slots")
    written = np.unique(slots[slots >= 0])
    for before, after in zip(ran.before, ran.after, strict=True):
        differs = (before != after).reshape(-1, *before.shape[2:])[:-1].any((1, 2))
        assert np.flatnonzero(differs).tolist() == written.tolist()


def in_bfloat16(x: float) -> float:
    return float(np.float32(x).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("backend", "layer"),
    jax_slow([("inside", 1), ("outside", -1)]),
)
def test_a_multiplier_that_is_rounded_is_found(tmp_path, backend, layer):
    """In bfloat16 0.22 is off by 0.1 %, and 1 / 13, outside of the layers, by 0.3 %."""
    rounded = dict([changed("scale", factor=lambda xp, a: in_bfloat16(a["factor"]))])
    where = subject(tmp_path, GRANITE | {"num_hidden_layers": 2})
    diff = compare(where, backend, "S", Fault("rounded", ops=rounded, layer=layer))
    assert diff.exit_code == 1
    assert {f.layer for f in diff.failures if f.scope == "op"} == {layer}
    assert all("scale" in f.tap for f in diff.failures if f.scope == "op")


@pytest.mark.parametrize("name", ["gate-up-loaded-swapped", "mlp-skipped", "gelu-for-silu"])
def test_a_fault_of_the_mlp_is_found_whatever_its_activation(tmp_path, name):
    where = subject(tmp_path, GEMMA3)
    diff = compare(where, "torch", "S", plant(f"{name}@1", where.model))
    assert diff.first_divergence().name.startswith("layer.1.gelu_gated_mlp[gate_up]")


def swapped(weights: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    gate, up = np.split(weights["gate_up"], 2)
    return weights | {"gate_up": np.concatenate([up, gate])}


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_swapped_weights_are_named_and_found(tmp_path, backend):
    diff = compare(
        subject(tmp_path, SMALL),
        backend,
        "P",
        Fault("gate and up swapped", weights=swapped, layer=1),
    )
    assert [p for p in diff.problems if "weights layer.1.gate_up differ" in p]
    assert diff.first_divergence().name.startswith("layer.1.gated_mlp[gate_up]")


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_a_rope_table_in_bfloat16_is_found(tmp_path, backend):
    def narrow(*tables: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(table.astype(ml_dtypes.bfloat16).astype(np.float32) for table in tables)

    diff = compare(
        subject(tmp_path, SMALL), backend, "S", Fault("rope in bf16", tables=narrow, layer=0)
    )
    assert "norm_rope_write_kv" in diff.first_divergence().tap
    assert diff.first_divergence().layer == 0


def test_views_say_the_same(tmp_path):
    fault = Fault("window", ops=FAULTS["window of 8"][1], layer=1)
    diff = compare(subject(tmp_path, SMALL), "torch", "P", fault)
    text = render(diff)
    assert text.startswith("DIFFERENT")
    assert "layer.1.paged_attention" in text
    assert len(text.splitlines()) <= LINES
    record = json.loads(diff.dumps())
    assert record["exit_code"] == 1
    assert record["first_divergence"]["layer"] == 1
    assert "<failure" in suite_xml(diff)


def test_nothing_compared_is_not_a_pass():
    assert Diff(("a", "b")).exit_code == 3


@pytest.mark.parametrize(
    "text", ["cuda", "torch:disk", "torch:cpu:window=3", "jax:cpu:compile_level=x", "jax:cpu:a"]
)
def test_targets_are_checked(text):
    with pytest.raises(ConfigError, match="target"):
        parse_target(text)


def test_target_names_itself():
    text = "torch:cuda:compile_level=0,rms_norm=triton+native"
    assert str(parse_target(text)) == text


def test_layers_are_compiled_however_often_dynamo_would(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = parse_target("torch:cpu:compile_level=1")
    where = subject(tmp_path, SMALL)
    steps = make_steps(where, default_prompts(where, 0)[:2])
    assert len({step.descriptor for step in steps}) > 1
    with torch._dynamo.config.patch(recompile_limit=1):
        assert compare_model(where, [target], steps, modes=("S",)).exit_code == 0
