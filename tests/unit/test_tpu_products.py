"""The Pallas kernels of products, tiers 1 and 2: interpreted, against the float64 oracle within the
ops' bounds, and in TPU interpret mode, where memory that nobody wrote is NaN, addresses outside of
arrays raise, and races are reported. The planted faults show that each is seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from twinfer.ops import resolve
from twinfer.ops.bindings.jax import bind
from twinfer.ops.cases import load_all
from twinfer.ops.namespaces.jax_ import InStack
from twinfer.ops.testing import TESTING, Judge, ci_cases
from twinfer.shared.models import spec
from twinfer.tests.interpreted import interpret, run
from twinfer.tpu.kernels import experts, grouped, narrow
from twinfer.tpu.kernels.tiles import columns_at_once

load_all()
OPS = ("grouped_matmul", "grouped_linear", "linear_grouped", "linear_fp8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_every_case(op, dtype):
    """A normal run has the same calls in test_ops_contracts.py: all cases of two ops, every third
    of those that are widened.
    """
    failures = {}
    for case in ci_cases(TESTING[op], dtype):
        verdict = Judge(op, case.arguments)(run(op, "jax", "pallas_interpret", case.arguments))
        failures |= {} if verdict.passed else {case.name: str(verdict)}
    assert not failures


# --- experts
# --------------------------------------------------------------------------------------------------

SIZES = [5, 0, 1, 9, 0, 4, 0]
"""Rows of experts: some without, one that is alone in a block of 8, one that is in three."""


def choices(dtype="float32", k=24, n=20):
    """23 rows, the last four of no expert, NaN where no result may come from."""
    rng = np.random.default_rng(8)
    x, weight = rng.normal(size=(23, k)), rng.normal(size=(len(SIZES), n, k))
    x[sum(SIZES) :] = np.nan
    weight[[size == 0 for size in SIZES]] = np.nan
    given = {"x": x, "weight": weight}
    arrays = {name: np.asarray(jnp.asarray(value, dtype)) for name, value in given.items()}
    return arrays | {"group_sizes": np.array(SIZES, np.int32)}


def by_experts(given, how=True):
    """The kernel in blocks of 8 rows, its weight the second of a stack whose first is NaN."""

    def multiply(x, weight, group_sizes):
        stack = jnp.stack([jnp.full_like(weight, jnp.nan), weight])
        return grouped.multiply(x, stack, 1, group_sizes, vmem=None, interpret=how, size=8)

    return interpret(multiply, given)


def right(op, given, out):
    return Judge(op, given)([np.asarray(out)]).passed


def test_the_work_is_what_experts_have_in_blocks_of_rows():
    items = grouped.items_of(jnp.array(SIZES, jnp.int32), 23, 8)
    count = int(items.count[0])
    assert count == 6
    pairs = list(zip(items.expert.tolist(), items.block.tolist(), strict=True))
    assert pairs[:count] == [(0, 0), (2, 0), (3, 0), (3, 1), (5, 1), (5, 2)]
    assert set(pairs[count:]) == {(5, 2)}  # nothing new is brought for what is no work
    nothing = grouped.items_of(jnp.zeros(7, jnp.int32), 23, 8)
    assert int(nothing.count[0]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_experts_share(dtype):
    given = choices(dtype)
    assert right("grouped_matmul", given, by_experts(given))


def test_columns_in_several_blocks(monkeypatch):
    monkeypatch.setattr(grouped, "columns_at_once", lambda n, size: 128)
    given = choices(n=300)
    assert right("grouped_matmul", given, by_experts(given))


class Altered:
    """A module with one function changed."""

    def __init__(self, module, name, function):
        self._module, self._changed = module, {name: function}

    def __getattr__(self, name):
        return self._changed.get(name) or getattr(self._module, name)


def test_wrong_kernels_of_experts_are_rejected(monkeypatch):
    given, real = choices(), grouped.items_of

    def judged(items):
        with monkeypatch.context() as planted:
            planted.setattr(grouped, "items_of", items)
            return right("grouped_matmul", given, by_experts(given))

    def one_late(sizes, rows, size):
        items = real(sizes, rows, size)
        return items._replace(begins=items.begins + 1)

    def neighbour(sizes, rows, size):
        items = real(sizes, rows, size)
        return items._replace(expert=jnp.maximum(items.expert - 1, 0))

    def last_lost(sizes, rows, size):
        items = real(sizes, rows, size)
        return items._replace(count=items.count - 1)

    assert judged(real)
    assert [judged(fault) for fault in (one_late, neighbour, last_lost)] == [False] * 3
    with monkeypatch.context() as planted:
        all_kept = Altered(jnp, "where", lambda mask, new, old: new)
        planted.setattr(grouped, "jnp", all_kept)
        assert not right("grouped_matmul", given, by_experts(given))


# --- narrow weights
# --------------------------------------------------------------------------------------------------


def projection(kind, group, *, k=96, zeros=False, bias=True, tokens=5, dtype="float32"):
    rng = np.random.default_rng(9)
    n, half = 40, 2 if kind in narrow.PACKED else 1
    if kind == "int8":
        weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    elif kind == "fp8":
        weight = np.asarray(jnp.asarray(rng.normal(size=(n, k)), jnp.float8_e4m3fn))
    else:
        weight = rng.integers(0, 256, (n, k // half)).astype(np.uint8)
    groups = k // group
    return {
        "x": np.asarray(jnp.asarray(rng.normal(size=(tokens, k)), dtype)),
        "weight": weight,
        "scale": (2.0 ** rng.uniform(-6, -3, (n, groups))).astype(np.float32),
        "zero": rng.integers(0, 16, (n, groups)).astype(np.uint8) if zeros else None,
        "bias": np.asarray(jnp.asarray(rng.normal(size=n), dtype)) if bias else None,
        "kind": kind,
    }


def by_groups(given, how=True):
    """The kernel in blocks of 8 rows, its weight the second of a stack."""

    def multiply(x, weight, **rest):
        stack = jnp.stack([jnp.zeros_like(weight), weight])
        sizes = {"vmem": None, "rows": 8, "columns": 128}
        return narrow.multiply(x, stack, 1, **rest, **sizes, interpret=how)

    return interpret(multiply, given)


FORMS = {
    "several groups in a span, of rows in several steps": ("int4", 32, 2048, True),
    "groups of spans": ("int8", 256, 512, False),
    "a group of several steps": ("fp8", 8192, 8192, False),
    "nibbles of two groups": ("fp4", 16, 768, False),
}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form == "nibbles of two groups" else pytest.mark.slow)
        for form in FORMS
    ],
)
def test_rows_that_are_cut_in_several_ways(form, monkeypatch):
    kind, group, k, zeros = FORMS[form]
    monkeypatch.setattr(narrow, "STEP", 512)
    given = projection(kind, group, k=k, zeros=zeros, tokens=11)
    assert right("linear_grouped", given, by_groups(given))


def test_how_rows_are_cut():
    assert narrow.cut_of(4096, 1) == narrow.Cut(4096, 4096, 512, 2048)
    assert narrow.cut_of(7168, 112) == narrow.Cut(7168, 64, 128, 1792)
    assert narrow.cut_of(2048, 128) == narrow.Cut(2048, 16, 128, 2048)
    assert narrow.cut_of(48, 3) == narrow.Cut(48, 16, 48, 48)
    assert narrow.cut_of(48, 3).groups_of_span == 3


def test_columns_of_a_block_are_whole_registers():
    assert columns_at_once(96, 1 << 20) == 96
    assert columns_at_once(1536, 4096) == 768
    assert columns_at_once(4096, 28672) == 128


NARROW_FAULTS = {
    "the second of a byte first": ("_entries", lambda real: lambda *a: real(*a)[::-1]),
    "int4 without its zero": ("_int4", lambda real: lambda nibble: nibble.astype(jnp.float32)),
    "all of x for each group": (
        "_of_groups",
        lambda real: lambda x, cut: jnp.concatenate([x] * cut.groups_of_span),
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if "zero" in fault else pytest.mark.slow)
        for fault in NARROW_FAULTS
    ],
)
def test_wrong_kernels_of_narrow_weights_are_rejected(fault, monkeypatch):
    given = projection("int4", 32)
    assert right("linear_grouped", given, by_groups(given))
    name, altered = NARROW_FAULTS[fault]
    monkeypatch.setattr(narrow, name, altered(getattr(narrow, name)))
    assert not right("linear_grouped", given, by_groups(given))


# --- narrow experts
# --------------------------------------------------------------------------------------------------


def narrow_choices(kind, group, k, n, *, zeros=False, dtype="float32"):
    """As `choices`, by narrow weights with biases; scales of experts without rows are NaN. Those of
    mxfp4 are powers of two in bfloat16.
    """
    rng = np.random.default_rng(11)
    given, count, groups = choices(dtype, k, 1), len(SIZES), k // group
    if kind in narrow.PACKED:
        weight = rng.integers(0, 256, (count, n, k // 2)).astype(np.uint8)
    elif kind == "int8":
        weight = rng.integers(-127, 128, (count, n, k)).astype(np.int8)
    else:
        weight = np.asarray(jnp.asarray(rng.normal(size=(count, n, k)), jnp.float8_e4m3fn))
    scale = (2.0 ** rng.uniform(-6, -3, (count, n, groups))).astype(np.float32)
    if spec.Narrow(kind, group).scale_dtype == "bfloat16":
        scale = (2.0 ** rng.integers(-6, -3, scale.shape)).astype(jnp.bfloat16)
    scale[[size == 0 for size in SIZES]] = np.nan
    zero = rng.integers(0, 16, scale.shape).astype(np.uint8) if zeros else None
    bias = np.asarray(jnp.asarray(rng.normal(size=(count, n)), dtype))
    return {
        "x": given["x"], "weight": weight, "scale": scale, "zero": zero, "bias": bias,
        "group_sizes": given["group_sizes"], "kind": kind,
    }  # fmt: skip


def by_narrow_experts(given, how=True):
    """The kernel in blocks of 8 rows, the layer the second of a stack."""

    def multiply(x, weight, scale, zero, bias, group_sizes, kind):
        weight, scale, zero = (
            None if piece is None else jnp.stack([jnp.zeros_like(piece), piece])
            for piece in (weight, scale, zero)
        )
        return experts.multiply(
            x, weight, 1, scale, zero, bias, group_sizes, kind, vmem=None, interpret=how, size=8
        )

    return interpret(multiply, given)


NARROW_EXPERTS = {
    "experts that are no registers": ("int4", 32, 96, 40, True),
    "columns in several blocks": ("fp8", 64, 64, 256, False),
    "experts that begin within a register": ("int4", 32, 64, 192, True),
    "rows in several steps": ("int8", 128, 512, 128, False),
    "a row in several steps": ("fp8", 512, 512, 128, False),
    "a step with a tail": ("fp4", 32, 320, 128, False),
    "a row with a tail": ("int8", 192, 192, 128, False),
}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("form", NARROW_EXPERTS)
def test_narrow_experts_that_are_cut_in_several_ways(form, dtype, monkeypatch):
    monkeypatch.setattr(narrow, "STEP", 256)
    monkeypatch.setattr(narrow, "COLUMNS", 128)
    kind, group, k, n, zeros = NARROW_EXPERTS[form]
    given = narrow_choices(kind, group, k, n, zeros=zeros, dtype=dtype)
    assert right("grouped_linear", given, by_narrow_experts(given))


def test_how_rows_with_a_tail_are_cut():
    """1440 stored numbers are those of gpt-oss, 704 those of Gemma 4."""
    assert narrow.cut_of(1440, 90) == narrow.Cut(1440, 16, 128, 1440)
    assert narrow.cut_of(1440, 90).tail == 32
    assert narrow.cut_of(704, 1) == narrow.Cut(704, 704, 128, 704)
    assert narrow.cut_of(2048, 16).tail == 0


def test_how_many_rows_and_columns_a_block_of_narrow_experts_has():
    """Twice the rows that an expert has on average, in whole tiles; columns that divide all."""
    rows = [experts.rows_at_once(rows, 128, jnp.bfloat16) for rows in (8, 512, 4096, 16384)]
    assert rows == [16, 16, 64, 128]
    assert experts.rows_at_once(8, 128, jnp.float32) == 8
    assert [experts.columns_of(n) for n in (96, 192, 1408, 1536, 2880, 5760)] == [
        96, 128, 128, 512, 512, 384,
    ]  # fmt: skip


NARROW_EXPERT_FAULTS = {
    "scales of a neighbour": (
        experts,
        "_own",
        lambda real: lambda v, b, c: jnp.roll(real(v, b, c), 1, 1),
    ),
    "zeros off by one": (
        experts,
        "_own",
        lambda real: lambda v, b, c: real(v, b, c) + float(v.dtype == jnp.uint8),
    ),
    "the second half of a register first": (
        experts,
        "_own",
        lambda real: lambda v, b, c: real(v, b + 64, c),
    ),
    "a tail left out": (narrow.Cut, "tail", lambda real: 0),
    "biases left out": (
        experts,
        "multiply",
        lambda real: lambda *a, **k: real(*a[:5], None, *a[6:], **k),
    ),
    "the weights of the expert before": (
        grouped,
        "items_of",
        lambda real: lambda *a: real(*a)._replace(expert=jnp.maximum(real(*a).expert - 1, 0)),
    ),
    "all of x for each group": (
        narrow,
        "_of_groups",
        lambda real: lambda x, cut: jnp.concatenate([x] * cut.groups_of_span),
    ),
}


@pytest.mark.parametrize("fault", NARROW_EXPERT_FAULTS)
def test_wrong_kernels_of_narrow_experts_are_rejected(fault, monkeypatch):
    given = narrow_choices("int4", 32, 320, 192, zeros=True)
    module, name, altered = NARROW_EXPERT_FAULTS[fault]
    monkeypatch.setattr(module, name, altered(getattr(module, name)))
    assert not right("grouped_linear", given, by_narrow_experts(given))


def test_the_right_kernel_of_narrow_experts_is_not():
    given = narrow_choices("int4", 32, 320, 192, zeros=True)
    assert right("grouped_linear", given, by_narrow_experts(given))


# --- TPU interpret mode
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_tpu(capfd):
    """on_a_tpu(function) -> (output, what it printed about races). Raises what the interpreter
    raises.
    """

    def interpreted(function):
        np.random.seed(0)
        params = pltpu.InterpretParams(
            dma_execution_mode="on_wait", detect_races=True, out_of_bounds_reads="raise",
            uninitialized_memory="nan", vector_clock_size=64,
        )  # fmt: skip
        capfd.readouterr()
        try:
            out = jax.block_until_ready(function(params))
        finally:
            pltpu.reset_tpu_interpret_mode_state()
        return out, capfd.readouterr().out

    return interpreted


def test_the_kernel_of_experts_is_clean(on_a_tpu):
    given = choices()
    out, printed = on_a_tpu(lambda how: by_experts(given, how))
    assert "RACE" not in printed
    assert right("grouped_matmul", given, out)


def test_an_expert_that_is_not_there_is_seen(on_a_tpu, monkeypatch):
    real = grouped.items_of

    def beyond(sizes, rows, size):
        items = real(sizes, rows, size)
        return items._replace(expert=items.expert + len(SIZES))

    monkeypatch.setattr(grouped, "items_of", beyond)
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        on_a_tpu(lambda how: by_experts(choices(), how))


def test_results_that_nobody_wrote_are_seen(on_a_tpu, monkeypatch):
    real = grouped.items_of

    def nothing(sizes, rows, size):
        items = real(sizes, rows, size)
        return items._replace(count=items.count * 0)

    monkeypatch.setattr(grouped, "items_of", nothing)
    out, _ = on_a_tpu(lambda how: by_experts(choices(), how))
    assert np.isnan(np.asarray(out)[: sum(SIZES)]).any()


@pytest.mark.parametrize(("kind", "zeros"), [("int8", False), ("int4", True)])
def test_the_kernel_of_narrow_weights_is_clean(on_a_tpu, kind, zeros, monkeypatch):
    monkeypatch.setattr(narrow, "STEP", 128)
    given = projection(kind, 64, k=512, zeros=zeros)
    out, printed = on_a_tpu(lambda how: by_groups(given, how))
    assert "RACE" not in printed
    assert right("linear_grouped", given, out)


@pytest.mark.parametrize("form", ["experts that begin within a register", "rows in several steps"])
def test_the_kernel_of_narrow_experts_is_clean(on_a_tpu, form, monkeypatch):
    monkeypatch.setattr(narrow, "STEP", 256)
    monkeypatch.setattr(narrow, "COLUMNS", 128)
    kind, group, k, n, zeros = NARROW_EXPERTS[form]
    given = narrow_choices(kind, group, k, n, zeros=zeros)
    out, printed = on_a_tpu(lambda how: by_narrow_experts(given, how))
    assert "RACE" not in printed
    assert right("grouped_linear", given, out)


def test_sums_that_begin_with_what_was_there_are_seen(on_a_tpu, monkeypatch):
    monkeypatch.setattr(
        narrow.jnp, "zeros_like", lambda ref: ref[...] if hasattr(ref, "at") else ref
    )
    given = projection("int8", 64)
    out, _ = on_a_tpu(lambda how: by_groups(given, how))
    assert np.isnan(np.asarray(out)).any()


# --- stacks
# --------------------------------------------------------------------------------------------------


def test_an_array_of_a_stack_is_taken_out_for_what_does_not_read_stacks():
    """And handed on to what does, which a composition calls."""
    plan = {
        name: resolve("jax", {"grouped_matmul": (name,)}) for name in ("native", "pallas_interpret")
    }
    rng = np.random.default_rng(4)
    gate_up, down = rng.normal(size=(3, 5, 12, 8)), rng.normal(size=(3, 5, 8, 6))
    x, weights = rng.normal(size=(4, 8)), rng.random((4, 2))
    rest = [jnp.asarray(a, jnp.float32) for a in (x, weights)]
    experts = jnp.asarray(rng.integers(0, 5, (4, 2)), jnp.int32)
    alone = [jnp.asarray(a, jnp.float32) for a in (gate_up[2], down[2])]
    stacked = [
        InStack(jnp.asarray(a, jnp.float32), jnp.int32(2)).reshape(*a.shape[1:])
        for a in (gate_up, down)
    ]
    want = bind(plan["native"]).moe_experts(*rest, experts, *alone)
    for provider, chosen in plan.items():
        ops = bind(chosen)
        for given in (alone, stacked):
            got = ops.moe_experts(*rest, experts, *given)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=provider)
        text = str(jax.make_jaxpr(ops.moe_experts)(*rest, experts, *stacked))
        # A slice of a stack of experts is what a kernel would have to wait for.
        assert ("dynamic_slice" in text) == (provider == "native")
