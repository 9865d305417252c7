"""Layers as data: the blocks that cover them, what a sublayer does, and the plan of each kind of
layer.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.ops import Recorder, resolve
from twinfer.ops.cases.quantized import quantized
from twinfer.ops.implement import Refusal, implement
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.config import resolve as resolve_config
from twinfer.shared.models import decoder, stages
from twinfer.shared.models.blocks import MAX_PERIOD, Block, cover, single_blocks
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Attention, Mlp, Model, Narrow, Norm, Sublayer
from twinfer.shared.models.stages import begins_with_norm
from twinfer.shared.worker import backend_module

MODEL = parse_config(SHAPES["qwen3-0.6b"])
ALTERNATING = replace(MODEL, num_layers=6, layer_windows=(0, 8) * 3)


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        ("aaaa", [Block(0, 1, 4)]),
        ("a", [Block(0, 1, 1)]),
        ("ab" * 12, [Block(0, 2, 12)]),
        ("aaaaab" * 4, [Block(0, 6, 4)]),
        ("aaaaab" * 4 + "aa", [Block(0, 1, 2), Block(2, 6, 4)]),
        ("abbbbb", [Block(0, 1, 1), Block(1, 1, 5)]),
        ("abc", [Block(0, 1, 1), Block(1, 1, 1), Block(2, 1, 1)]),
    ],
)
def test_layers_are_covered_by_the_fewest_bodies(layers, blocks):
    assert list(cover(layers)) == blocks


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_blocks_are_the_layers_in_order(layers):
    blocks = cover(layers)
    assert [blocks[0].first, *(block.stop for block in blocks)] == [
        *(block.first for block in blocks),
        len(layers),
    ]
    found = [
        index
        for block in blocks
        for position in range(block.period)
        for index in block.layers_at(position)
    ]
    assert sorted(found) == list(range(len(layers)))
    for block in blocks:
        assert 1 <= block.period <= MAX_PERIOD
        for position in range(block.period):
            assert len({layers[index] for index in block.layers_at(position)}) == 1
            assert len(block.layers_at(position)) == block.repeats
    runs = 1 + sum(a != b for a, b in pairwise(layers))
    assert sum(block.period for block in blocks) <= runs


def test_single_blocks_are_one_for_each_layer():
    assert single_blocks(3) == (Block(0, 1, 1), Block(1, 1, 1), Block(2, 1, 1))


def rows_of(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def rms(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("pre", [Norm("pre", 1e-5), None], ids=["pre-norm", "none"])
@pytest.mark.parametrize("post", [Norm("post", 1e-3), None], ids=["post-norm", "none"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_sublayer_is_norm_mixer_norm_scale_and_added_to_the_stream(pre, post, scale):
    rng = np.random.default_rng(0)
    weights = {"gate_up": rows_of(rng, 24, 8) / 3, "down": rows_of(rng, 8, 12) / 3}
    weights |= {"pre": rows_of(rng, 8), "post": rows_of(rng, 8)}
    hidden, residual = rows_of(rng, 5, 8), rows_of(rng, 5, 8)
    layer = (Sublayer(Mlp(), pre, post, scale), Sublayer(Mlp(), pre, post, scale))
    none = np.zeros(0, np.int32)
    batch = decoder.Batch(none, none, none, none, none, none, none, 1)
    ops = resolve("numpy").bind()
    stream, cache = decoder.layer(
        ops, layer, weights, decoder.Stream(hidden, residual), "the cache", batch
    )

    total = hidden + residual
    for _ in layer:
        x = rms(total, weights["pre"], 1e-5) if pre else total
        gate, up = np.split(x @ weights["gate_up"].T, 2, axis=1)
        y = (silu(gate) * up) @ weights["down"].T
        y = rms(y, weights["post"], 1e-3) if post else y
        total = total + y * scale
    np.testing.assert_allclose(stream.hidden + stream.residual, total, rtol=1e-4, atol=1e-5)
    assert cache == "the cache"


@pytest.mark.parametrize("factor", [None, "factor"], ids=["plain", "with a factor"])
def test_a_walk_that_joins_layers_gives_what_layers_by_themselves_give(factor):
    """Bit for bit, and it calls no norm by itself between layers, if the norm behind a layer is all
    that is there.
    """
    rng = np.random.default_rng(1)
    sub = Sublayer(Mlp(), Norm("pre", 1e-5), Norm("post", 1e-3), factor=factor)
    model = Model(((replace(sub, factor=None), sub),) * 3, Norm("last", 1e-6))
    layers = [
        {
            "gate_up": rows_of(rng, 24, 8) / 3,
            "down": rows_of(rng, 8, 12) / 3,
            "factor": rows_of(rng, 1),
        }
        | {"pre": rows_of(rng, 8), "post": rows_of(rng, 8)}
        for _ in model.layers
    ]
    top = {"embed": rows_of(rng, 9, 8), "last": rows_of(rng, 8)}
    ids, none = np.arange(5, dtype=np.int32), np.zeros(0, np.int32)
    batch = decoder.Batch(none, none, none, none, none, none, none, 1)
    recorder = Recorder()
    ops = resolve("numpy").bind(recorder.wrap)

    def walk(top, layers, joins):
        recorder.calls.clear()
        calls = decoder.PlainCalls(ops, model, top, layers, ids, batch, np.zeros_like, joins=joins)
        finished, _ = decoder.forward(calls, [None] * 3)
        return finished, [call.op for call in recorder.calls if not call.parents]

    apart, called_apart = walk(top, layers, False)
    joined, called = walk(*decoder.with_joints(model, top, layers), True)
    np.testing.assert_array_equal(joined, apart)
    if factor is None:
        assert called.count("norm_add_rms_norm") == 6
        assert "rms_norm" not in called
        assert called_apart.count("norm_add_rms_norm") == called_apart.count("rms_norm") == 3
    else:
        assert called == called_apart
        assert decoder.joints(model) == (None,) * 4


FP8 = Narrow("fp8", activations="fp8")
APART = {
    "dealt out": Mlp(narrow=replace(FP8, dealt=True)),
    "gelu": Mlp("gelu_tanh", narrow=FP8),
    "scales of blocks": Mlp(narrow=replace(FP8, activation_group=4)),
    "scales of the weights": Mlp(narrow=replace(FP8, static_activations=True)),
    "tokens as they are": Mlp(narrow=replace(FP8, activations=None)),
    "int8": Mlp(narrow=Narrow("int8", activations="int8")),
    "not narrow": Mlp(),
    "keys of another layer": Attention(2, 1, 4, 1.0, reads=0, narrow=FP8),
}
"""Mixers that no op covers together with the norm in front of them."""


def calls_of(sub, weights, hidden, residual):
    """(The stream behind a sublayer, the ops that it calls itself)."""
    none = np.zeros(0, np.int32)
    batch = decoder.Batch(none, none, none, none, none, none, none, 1)
    recorder = Recorder()
    ops = resolve("numpy").bind(recorder.wrap)
    stream = decoder.Stream(hidden, residual)
    stream, _ = decoder.layer(ops, (sub,), weights, stream, None, batch)
    return stream, [call.op for call in recorder.calls if not call.parents]


def test_a_norm_in_front_of_quantised_rows_is_one_op_with_what_is_behind_it(monkeypatch):
    """Bit for bit what the two are by themselves."""
    rng = np.random.default_rng(2)
    weights = {"pre": rows_of(rng, 8)}
    for name, rows, entries in (("gate_up", 24, 8), ("down", 8, 12)):
        values, scale = quantized("fp8", rows_of(rng, rows, entries), "row")
        weights |= {name: values, f"{name}_scale": scale}
    hidden, residual = rows_of(rng, 3, 8), rows_of(rng, 3, 8)
    sub = Sublayer(Mlp(narrow=FP8), Norm("pre", 1e-5))
    joined, called = calls_of(sub, weights, hidden, residual)
    assert called == ["add_norm_gated_mlp_fp8"]
    of_shards = replace(sub, reduces_before=True)
    assert calls_of(of_shards, weights, hidden, residual)[1] == [
        "reduce_add_rms_norm",
        "gated_mlp_fp8",
    ]
    monkeypatch.setattr(decoder, "begins_with_norm", lambda mixer: False)
    apart, called = calls_of(sub, weights, hidden, residual)
    assert called == ["fused_add_rms_norm", "gated_mlp_fp8"]
    for one, other in zip(joined, apart, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("what", APART)
def test_other_mixers_get_normed_rows(what):
    assert not begins_with_norm(APART[what])


def test_a_stage_from_outside_gets_normed_rows(monkeypatch):
    assert begins_with_norm(Mlp(narrow=FP8))
    assert begins_with_norm(Attention(2, 1, 4, 1.0, narrow=FP8))
    monkeypatch.setitem(stages._replaced, Mlp, stages.mlp_stage)
    assert not begins_with_norm(Mlp(narrow=FP8))


def test_kinds_are_the_different_layers_in_order():
    spec = decoder.model_of(ALTERNATING)
    assert [layer[0].mixer.window for layer in spec.layers] == [0, 8] * 3
    assert spec.kinds == spec.layers[:2]
    assert len({*spec.layers}) == 2
    assert isinstance(spec.kinds[0][0].mixer, Attention)


@pytest.fixture
def whole_only(registries):
    """A provider of attention that refuses windows, on torch."""

    def no_window(
        q: "Array", kv: "Array", page_table: "Array", query_start: "Array", kv_lens: "Array",
        counts: "Array",
        scale: float, window: int, soft_cap: float, max_query_len: int, k_scale: "Array | None" = None,
        v_scale: "Array | None" = None, sinks: "Array | None" = None, chunk: int = 0,
    ):  # fmt: skip
        return True if window == 0 else Refusal("it knows no windows")

    def attention(
        q: "Array", kv: "Array", page_table: "Array", query_start: "Array", kv_lens: "Array",
        counts: "Array",
        scale: float, window: int, soft_cap: float, max_query_len: int, k_scale: "Array | None" = None,
        v_scale: "Array | None" = None, sinks: "Array | None" = None, chunk: int = 0,
    ) -> "Array":  # fmt: skip
        raise AssertionError("plans run nothing")

    implement("paged_attention", provider="whole", framework="torch", supports_args=no_window)(
        attention
    )


def plans_of(model, **options):
    config = EngineConfig(model="m", backend="torch", max_num_seqs=4, max_model_len=64, **options)
    resolved, _ = resolve_config(config, model, DeviceInfo("cpu", "cpu", 1 << 34))
    return backend_module("torch", "plans").make_plans(model, resolved)


def test_a_kind_of_layer_that_is_refused_takes_nothing_from_the_others(whole_only):
    asked = {"op_priority": {"paged_attention": ("whole", "native")}}
    plans, (full, sliding) = plans_of(ALTERNATING, **asked), decoder.model_of(ALTERNATING).kinds
    for kind in ("decode", "mixed"):
        assert plans.of(kind, full)["paged_attention"].provider == "whole"
        assert plans.of(kind, sliding)["paged_attention"].provider == "native"
        assert "it knows no windows" in plans.of(kind, sliding)["paged_attention"].passed_over[0][1]
        assert [title for title, _ in plans.titled() if title.startswith(kind)] == [
            kind,
            f"{kind}.1",
        ]
    assert plans.layer_titles() == {"decode": ["decode", "decode.1"], "mixed": ["mixed", "mixed.1"]}
    assert (
        plans.hash != plans_of(replace(MODEL, num_layers=6, layer_windows=(0,) * 6), **asked).hash
    )


def test_kinds_of_layers_with_the_same_choices_share_the_plan():
    """The hash is then that of a model with one kind of layer."""
    plans, (full, sliding) = plans_of(ALTERNATING), decoder.model_of(ALTERNATING).kinds
    assert plans.of("decode", full) is plans.of("decode", sliding) is plans["decode"]
    assert plans.hash == plans_of(replace(MODEL, num_layers=6, layer_windows=(0,) * 6)).hash
