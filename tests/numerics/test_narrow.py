"""Comparisons of what users serve with 8-bit caches and weights that are quantised at load."""

import numpy as np
import pytest

from twinfer.numerics.questions.definition import SharedDefinition, exact_logits
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.questions.served import check_served
from twinfer.numerics.sides import subject as sides_subject
from twinfer.numerics.sides.narrow_cache import (
    UNWRITTEN,
    ApartEntries,
    HeldEntries,
    OtherNeighbours,
    empty,
)
from twinfer.numerics.sides.narrow_inputs import (
    HeldInputs,
    OtherInputs,
    TriedInputs,
    off_by,
    settle,
)
from twinfer.numerics.sides.reference import bound
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import (
    HostWeights,
    open_subject,
    parse_target,
    widened_layer,
)
from twinfer.ops.native import torch_attention
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError, UnsupportedModel
from twinfer.shared.models import stages

INT8 = {"kv_cache_dtype": "int8", "kv_cache_scales": (0.05, 0.02)}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
WEIGHTS = {"quantization": "int8_weights"}


def opened(folder, **options):
    return open_subject(folder, load_format="dummy", **options)


def compared(folder, options, modes):
    subject = opened(folder, **options)
    steps = make_steps(subject, default_prompts(subject, 1)[:2])
    return compare_model(subject, [parse_target("torch:cpu")], steps, modes=modes)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float32"}, "kv_cache_dtype: got float32, allowed are auto, int8"),
        ({"kv_cache_scales": (0.1, 0.1)}, "kv_cache_scales: got .* allowed with int8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_scales: int8 holds"),
        ({"kv_cache_dtype": "int8", "kv_cache_scales": (0.1, -1.0)}, "kv_cache_scales"),
        (
            {"kv_cache_dtype": "int8", "kv_cache_scales": (0.1,)},
            r"kv_cache_scales: got \(0.1,\), allowed is two positive numbers",
        ),
        ({"quantization": "int3"}, "quantization: got 'int3'"),
        ({"quantization": "int4"}, "int4"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(small_model, options, wrong):
    with pytest.raises((ConfigError, UnsupportedModel), match=wrong):
        opened(small_model, **options)


def test_the_options_are_of_the_subject(small_model):
    subject = opened(small_model, quantization="fp8", **INT8)
    config = subject.engine_config(parse_target("torch:cpu"))
    assert config.kv_cache_dtype == "int8"
    assert config.kv_cache_scales == (0.05, 0.02)
    assert config.quantization == "fp8"
    assert subject.cache_dtype == subject.with_dtype("float32").cache_dtype == "int8"
    assert subject.flags()[-6:] == [
        "--quantization", "fp8", "--kv-cache-dtype", "int8", "--kv-cache-scales", "0.05,0.02"
    ]  # fmt: skip
    plain = opened(small_model)
    assert subject.plain == plain
    assert subject.identity != plain.identity


def test_the_commands_take_them(small_model, capsys):
    words = ["numerics", "check", small_model, "--load-format", "dummy", "--a", "torch:cpu"]
    words += ["--b", "torch:cpu", "--kv-cache-dtype", "int8"]
    assert main(words) == 2
    assert "kv_cache_scales: int8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--kv-cache-scales", "a,b"])
    assert "kv-cache-scales" in capsys.readouterr().err


def written(x, *choices):
    """The entries [tok kvhead hdim] of keys `x` in an int8 cache."""
    ops = bound(exact=True, choices=choices)
    kv = empty((2, 4, 2, x.shape[-1]), "int8")
    out = ops.write_kv(kv, x, x, np.arange(len(x)), None, None)
    assert (out.reshape(8, 2, -1)[len(x) :] == UNWRITTEN).all()
    return out


def test_ties_alone_may_go_either_way():
    x = np.full((1, 1, 4), 3.0)
    x[0, 0] = [3.0, 2.5 + 1e-6, -1.5 - 1e-6, 4.4]
    assert written(x)[0, 0, 0].tolist() == [3, 3, -2, 4]
    assert written(x, OtherNeighbours(1e-6))[0, 0, 0].tolist() == [3, 2, -1, 4]
    held = written(x)
    held[0, 0, 0] = [3, 2, -1, 5]
    assert written(x, HeldEntries(1e-6, held))[0, 0, 0].tolist() == [3, 2, -1, 4]
    assert written(x, HeldEntries(1e-9, held))[0, 0, 0].tolist() == [3, 3, -2, 4]


def test_entries_made_apart_are_those_of_the_op():
    x = np.random.default_rng(0).normal(size=(4, 1, 8)) * 3
    scales = {"k_scale": np.float32([0.05]), "v_scale": np.float32([0.02])}
    kv = np.zeros((2, 4, 2, 8))
    for dtype in ("int8", "float8_e4m3fn"):
        wide = bound(exact=True, choices=[ApartEntries(dtype, lambda layer: scales)]).write_kv(
            kv, x, x, np.arange(4)
        )
        held = bound(exact=True).write_kv(
            empty(kv.shape, dtype), x, x, np.arange(4), *scales.values()
        )
        by_head = np.float64([0.05, 0.02]).astype(np.float32)[:, None]
        np.testing.assert_allclose(wide[0], held[0].astype(np.float64) * by_head, rtol=1e-12)


@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "fp8"])
def test_narrow_weights_are_within_half_a_step(small_model, scheme):
    narrow = opened(small_model, quantization=scheme)
    weights = sides_subject.HostWeights(narrow)
    plain = sides_subject.HostWeights(narrow.plain)
    found = widened_layer(weights, 1)
    assert set(found) == {"qkv", "o", "gate_up", "down"}
    for name, (wide, step) in found.items():
        off = np.abs(wide - plain.layer(1)[name].astype(np.float64))
        assert (off <= 0.51 * step).all()
        assert off.max() > 0.3 * step[np.unravel_index(off.argmax(), off.shape)]


def value_by_scale_of_k(monkeypatch):
    """One side stores V with the scale of K."""
    stored = torch_attention.stored
    first = []

    def wrong(xp, x, kv, scale):
        first.append(scale)
        return stored(xp, x, kv, first[-1] if len(first) % 2 else first[-2])

    monkeypatch.setattr(torch_attention, "stored", wrong)


def scale_of_k_off(monkeypatch):
    """One side's K is a hundredth too small."""
    stored = torch_attention.stored
    count = iter(range(10**6))
    monkeypatch.setattr(
        torch_attention,
        "stored",
        lambda xp, x, kv, scale: stored(xp, x if next(count) % 2 else x * 0.99, kv, scale),
    )


@pytest.mark.parametrize("fault", [None, value_by_scale_of_k, scale_of_k_off])
@pytest.mark.parametrize("options", [INT8, FP8])
def test_a_narrow_cache_is_judged_layer_by_layer(small_model, monkeypatch, options, fault):
    if fault is value_by_scale_of_k and options is FP8:
        pytest.skip("without scales both are 1")
    if fault is not None:
        fault(monkeypatch)
    diff = compared(small_model, options, ("S", "P") if fault is None else ("S",))
    if fault is None:
        diff.assert_ok()
        assert diff.exit_code == 0
    else:
        assert diff.exit_code == 1
        first = diff.first_divergence()
        assert "write_kv" in first.name
        assert first.layer == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("options", [INT8, FP8, WEIGHTS, {"quantization": "int4_g32"}])
def test_right_engines_are_equal(small_model, backend, options):
    subject, targets = opened(small_model, **options), [parse_target(f"{backend}:cpu")]
    steps = make_steps(subject, default_prompts(subject, 1))
    compare_model(subject, targets, steps).assert_ok()
    diff = check_served(subject, targets)
    diff.assert_ok()
    assert diff.exit_code == 0


def shared_problems(subject):
    """Of what is shared by all, without what engines serve."""
    sequences = [ids[:24] for ids in default_prompts(subject, 1)[:2]]
    wide = subject.with_dtype("float32")
    shared = SharedDefinition(wide, HostWeights(wide), sequences, exact_logits(wide, sequences))
    shared.check_narrow()
    return shared.problems


def scales_swapped(monkeypatch):
    """The model's own definition gives V the scale of K."""
    attended = stages.attended

    def wrong(ops, spec, weights, q, cache, batch):
        swapped = {"v_scale": weights["k_scale"]} if "k_scale" in weights else {}
        return attended(ops, spec, {**weights, **swapped}, q, cache, batch)

    monkeypatch.setattr(stages, "attended", wrong)


def zero_off_by_one(monkeypatch):
    """Narrow weights are made with another zero."""
    made = sides_subject.pieces

    def wrong(xp, wide, narrow):
        found = made(xp, wide, narrow)
        return found | {"values": found["values"] + np.uint8(0x11)}

    monkeypatch.setattr(sides_subject, "pieces", wrong)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (INT8, None),
        (FP8, None),
        ({"quantization": "int4_g32"}, None),
        (INT8, scales_swapped),
        ({"quantization": "int4_g32"}, zero_off_by_one),
    ],
)
def test_what_all_sides_share_is_looked_at_apart(small_model, monkeypatch, options, fault):
    if fault is not None:
        fault(monkeypatch)
    problems = shared_problems(opened(small_model, **options))
    assert bool(problems) == (fault is not None)
    assert all(text.startswith("our definition") for text in problems)


QUANTISED = {
    "fp8": ("quantize_fp8_dynamic", 448.0),
    "int8": ("quantize_int8_dynamic", 127.0),
}


def quantised(x, scheme, *choices):
    """The entries of x [tok k] as they go into a product."""
    op, _ = QUANTISED[scheme]
    return getattr(bound(exact=True, choices=choices), op)(x, "row", 0)[0]


@pytest.mark.parametrize(("scheme", "middle", "other"), [("int8", 2.5, 3.0), ("fp8", 17.0, 18.0)])
def test_inputs_of_products_may_go_either_way_at_ties_alone(scheme, middle, other):
    """2.5 lies between the entries 2 and 3 of int8, 17 between 16 and 18 of fp8: ties to even."""
    _, largest = QUANTISED[scheme]
    x = np.array([[largest, middle, 5.0, middle * (1 - 1e-3)]])
    own, share = quantised(x, scheme)[0].tolist(), 1e-6
    assert own[1] != other
    assert quantised(x, scheme, OtherInputs(share))[0].tolist() == [own[0], other, *own[2:]]
    tried = TriedInputs(share)
    assert quantised(x, scheme, tried)[0].tolist() == own
    assert tried.ties == [(0, 0, 1, other)]
    taken = TriedInputs(share, tried.ties)
    assert quantised(x, scheme, taken)[0].tolist() == [own[0], other, *own[2:]]
    again = HeldInputs(taken.entries)
    assert quantised(x * 1.01, scheme, again)[0].tolist() == [own[0], other, *own[2:]]


def products(wrong=0.0):
    """Two products of quantised rows, as a layer has them, in one request of three rows and one of
    a row; each row beside ties in both products. `wrong` is added to the second row.
    """
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=(4, 4)) for _ in range(2))
    x = np.array([[127.0, 2.5, 3.5, 1.0], [127.0, 4.5, 2.0, 7.5], [127.0, 1.0, 9.0, 3.0]])
    x = np.concatenate([x, x[:1]])

    def run(tried):
        ops = bound(exact=True, choices=(tried,))
        values, _ = ops.quantize_int8_dynamic(x, "row", 0)
        y = values @ first
        y[1] += wrong
        # Of these, too, one entry of each row is in the middle of two.
        y[:, 0], y[:, 1] = 127.0 * 16, 6.5 * 16
        values, _ = ops.quantize_int8_dynamic(y, "row", 0)
        return [y, values @ second]

    return run


def test_a_side_is_judged_by_the_entries_that_it_took():
    run, share = products(), 1e-6
    state = TriedInputs(share)
    run(state)
    at = {(tie.call, tie.row, tie.column): tie for tie in state.ties}
    assert {(0, 0, 1), (0, 0, 2), (1, 0, 1), (0, 1, 1), (1, 3, 1)} <= at.keys()
    took = [at[0, 0, 1], at[0, 0, 2], at[1, 0, 1], at[0, 1, 1], at[1, 3, 1]]
    side = TriedInputs(share, took)
    got = run(side)
    requests = [range(3), range(3, 4)]
    entries, wasted = settle(run, share, got, requests, 1e-9, 100)
    assert wasted == 0
    for own, right in zip(entries, side.entries, strict=True):
        assert np.array_equal(own, right)


def test_what_no_tie_explains_stays_off():
    """The second row is wrong by itself: nothing is taken for it, and the others are explained."""
    right, wrong, share = products(), products(wrong=0.01), 1e-6
    state = TriedInputs(share)
    right(state)
    took = [tie for tie in state.ties if tie[:3] == (0, 0, 1)]
    got = wrong(TriedInputs(share, took))
    entries, wasted = settle(right, share, got, [range(3), range(3, 4)], 1e-9, 100)
    assert 0 < wasted <= 32
    off = off_by(got[0], right(HeldInputs(entries))[0])
    assert off[0] == off[3] == 0.0
    assert off[1] > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "fp8", **FP8}])
def test_quantised_activations_of_the_demo_model_raise_no_alarm(backend, options):
    """Its texts have rows at several ties, in several products."""
    subject = open_subject("demo", **options)
    steps = make_steps(subject, default_prompts(subject, 0))
    compare_model(subject, [parse_target(f"{backend}:cpu")], steps, modes="S", taps=()).assert_ok()


def test_a_scale_of_quantised_weights_that_is_off_is_seen(small_model, monkeypatch):
    """By a thousandth, in one layer: no tie explains that."""
    options = {"quantization": "fp8"}
    assert compared(small_model, options, "S").exit_code == 0
    project = stages.project

    def wrong(ops, weights, name, x, *rest):
        if name == "o" and type(x).__module__ == "torch":
            weights = {**weights, "o_scale": weights["o_scale"] * 1.001}
        return project(ops, weights, name, x, *rest)

    monkeypatch.setattr(stages, "project", wrong)
    diff = compared(small_model, options, "S")
    assert diff.exit_code == 1
    assert diff.first_divergence().layer == 0
