"""Each op as a `torch.library` operator: schema, fake, functional and donating overloads,
several plans at once.
"""

import dataclasses

import numpy as np
import pytest
import torch

from twinfer.ops import REGISTRY, OpError, implement, resolve
from twinfer.ops.bindings.torch import bind, front, register
from twinfer.ops.cases import load_all
from twinfer.ops.namespaces.torch_ import from_numpy
from twinfer.ops.testing import TESTING, ci_cases

load_all()

UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# Torch has no functionalisation of custom operators whose results alias their arguments, and says
# so: the pass `functionalize` takes its place.
INPLACE_UTILS = UTILS[:3]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged():
    return ints(0, 1, 4), ints(1, 3), ints(1, 2)


def arguments(name):
    """Small arguments of an op on the CPU."""
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(shape, generator=g)

    def table(low, high, *shape):
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    angles = r(5, 4)
    makers = {
        "embedding": lambda: (ints(3, 0, 3), r(7, 4)),
        "linear": lambda: (r(5, 6), r(4, 6), r(4)),
        "logits": lambda: (r(5, 6), r(9, 6)),
        "rms_norm": lambda: (r(5, 6), r(6), 1e-6),
        "add": lambda: (r(5, 6), r(5, 6)),
        "fused_add_rms_norm": lambda: (r(5, 6), r(5, 6), r(6), 1e-6),
        "rotary_embedding": lambda: (r(5, 4, 8), r(5, 2, 8), angles.cos(), angles.sin()),
        "silu_and_mul": lambda: (r(5, 6),),
        "gated_mlp": lambda: (r(5, 6), r(8, 6), r(8), r(6, 4), None),
        "write_kv": lambda: (r(4, 4, 4, 8), r(5, 2, 8), r(5, 2, 8), ints(0, 4, 5, 6, -1)),
        "paged_attention": lambda: (
            *(r(5, 4, 8), r(4, 4, 4, 8), torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)),
            *(*paged(), 0.35, 0, 0.0, 3),
        ),
        "greedy_sample": lambda: (r(3, 40),),
        "quantize_logits": lambda: (r(3, 40),),
        "penalties": lambda: (
            *(r(3, 40), table(-1, 40, 3, 8), ints(1, -1, 0), ints(-1, -1, 5)),
            *(ints(2, 2, 2), ints(9, 9, 9), ints(9, 9, 9)),
            *(
                torch.full((3,), 1.5),
                torch.full((3,), 1 / 1.5),
                table(-1, 40, 3, 2),
                table(0, 99, 3, 2),
            ),
            torch.full((3, 2), -1, dtype=torch.int32),
        ),
        "sample": lambda: (
            *(
                r(3, 40),
                table(-(2**16), 2**16, 3, 40),
                ints(1, 2, 3),
                ints(4, 5, 6),
                ints(7, 8, 9),
                ints(0, 1, 0),
            ),
            *(
                torch.full((3,), 1.44),
                ints(0, 5, 9),
                ints(65536, 60000, 30000),
                ints(2**22, 2**22, 99999),
                True,
            ),
        ),
        "top_logprobs": lambda: (r(3, 40), ints(1, 2, 3)),
    }
    if name in makers:
        return makers[name]()
    if name not in TESTING:
        pytest.skip("no cases")
    case = min(
        ci_cases(TESTING[name], "float32"),
        key=lambda c: sum(np.size(v) for v in c.arguments.values()),
    )
    given = REGISTRY[name].signature.bind(**case.arguments)
    given.apply_defaults()
    values = map(finite, given.arguments.values())
    return tuple(from_numpy(v) if isinstance(v, np.ndarray) else v for v in values)


def finite(value):
    """An argument without NaN and infinity: `equal` and opcheck take NaN for a difference."""
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind in "iub"
        or np.isfinite(value.astype(np.float64)).all()
    ):
        return value
    return np.nan_to_num(value, nan=0.5, posinf=2.0, neginf=-2.0)


def copies(values):
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def equal(a, b):
    return len(as_tuple(a)) == len(as_tuple(b)) and all(
        torch.equal(x, y) for x, y in zip(as_tuple(a), as_tuple(b), strict=True)
    )


def clones(function):
    """How many tensors a call copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::clone")


@pytest.fixture
def in_place(registries):
    """A plan that has chosen implementations that write in place."""

    @implement("rms_norm", provider="overwriting", framework="torch", inplace=True)
    def rms_norm(x: "Array", weight: "Array", eps: "float") -> "Array":
        return x.copy_(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight)

    @implement("fused_add_rms_norm", provider="overwriting", framework="torch", inplace=True)
    def fused(
        x: "Array", residual: "Array", weight: "Array", eps: "float"
    ) -> "tuple[Array, Array]":
        residual.add_(x)
        scale = torch.rsqrt((residual * residual).mean(-1, keepdim=True) + eps)
        return x.copy_(residual * scale * weight), residual

    return resolve("torch", {"rms_norm": ("overwriting",), "fused_add_rms_norm": ("overwriting",)})


LONG = (
    "gated_mlp", "gated_mlp_fp8", "gated_mlp_grouped", "gelu_gated_mlp", "grouped_linear",
    "moe_experts", "moe_experts_narrow", "norm_rope", "norm_rope_write_kv", "penalised_sample",
    "penalties", "quantize_int4_dynamic", "rotary_embedding_gptj", "sample",
)  # fmt: skip
"""Many calls inside, which opcheck traces for seconds; others like them are short."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(op.name, marks=pytest.mark.slow if op.name in LONG else ()) for op in REGISTRY],
)
def test_opcheck(name):
    key = register(resolve("torch"))
    with torch.inference_mode(False), torch.no_grad():
        made, inputs = front(name), arguments(name)
        # `test_schema` sums its inputs to see whether they changed, and torch has no sum of float8
        # on a CPU.
        float8 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in inputs)
        skip = 1 if float8 else 0
        torch.library.opcheck(made.functional, inputs, {"plan": key}, test_utils=UTILS[skip:])
        if made.inplace is not None:
            torch.library.opcheck(
                made.inplace, inputs, {"plan": key}, test_utils=INPLACE_UTILS[skip:]
            )


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_opcheck_of_what_writes_in_place(in_place, name):
    key, made = register(in_place), front(name)
    torch.library.opcheck(made.functional, arguments(name), {"plan": key}, test_utils=UTILS)
    torch.library.opcheck(made.inplace, arguments(name), {"plan": key}, test_utils=INPLACE_UTILS)
    bind(in_place, compiling=True)
    hidden = getattr(torch.ops.twinfer_impl, f"{name}_overwriting").default
    torch.library.opcheck(hidden, arguments(name), test_utils=UTILS)


@pytest.mark.parametrize("name", [op.name for op in REGISTRY])
def test_wrapped_is_what_was_planned(name):
    plan = resolve("torch")
    values = arguments(name)
    want = getattr(plan.bind(), name)(*copies(values))
    assert equal(getattr(bind(plan, wrap=True), name)(*copies(values)), want)
    assert equal(front(name).functional(*copies(values)), want), "an empty plan means native"


def test_schemas():
    assert str(front("linear").functional._schema) == (
        'twinfer::linear(Tensor x, Tensor weight, Tensor? bias, *, str plan="") -> Tensor'
    )
    assert str(front("fused_add_rms_norm").inplace._schema) == (
        "twinfer::fused_add_rms_norm.maybe_inplace(Tensor(a!) x, Tensor(b!) residual, Tensor "
        "weight, float eps, *, "
        'str plan="") -> (Tensor(a!), Tensor(b!))'
    )
    assert front("linear").inplace is None
    assert front("rms_norm") is front("rms_norm")


def test_calls_by_keyword():
    x, weight, bias = arguments("linear")
    wrapped = bind(resolve("torch"), wrap=True)
    assert equal(wrapped.linear(x, bias=bias, weight=weight), wrapped.linear(x, weight, bias))


@pytest.mark.parametrize("options", [{}, {"compiling": True}, {"wrap": True}], ids=str)
def test_a_composition_may_call_by_keyword_what_writes_in_place(in_place, options, monkeypatch):
    def by_keyword(ops, x, residual, weight, eps):
        total = ops.add(x, residual)
        return ops.rms_norm(x=total, eps=eps, weight=weight), total

    op = REGISTRY["fused_add_rms_norm"]
    monkeypatch.setitem(REGISTRY.ops, op.name, dataclasses.replace(op, reference=by_keyword))
    plan, values = resolve("torch", {"rms_norm": ("overwriting",)}), arguments(op.name)
    want = resolve("torch").bind().fused_add_rms_norm(*copies(values))
    torch.testing.assert_close(bind(plan, **options).fused_add_rms_norm(*values), want)


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "write_kv"])
def test_functional_copies_and_maybe_inplace_does_not(in_place, name):
    key, made, op = register(in_place), front(name), REGISTRY[name]
    want = getattr(resolve("torch").bind(), name)(*copies(arguments(name)))
    values = arguments(name)
    before = copies(values)
    results = as_tuple(made.functional(*values, plan=key))
    for got, wanted in zip(results, as_tuple(want), strict=True):
        torch.testing.assert_close(got, wanted)
    assert all(
        equal(a, b) for a, b in zip(values, before, strict=True) if isinstance(a, torch.Tensor)
    )
    assert clones(lambda: made.functional(*values, plan=key)) == len(op.activations)

    donated = arguments(name)
    assert clones(lambda: made.inplace(*donated, plan=key)) == 0
    donated = arguments(name)
    again = as_tuple(made.inplace(*donated, plan=key))
    for result, position in zip(again, range(len(op.activations)), strict=True):
        assert result.data_ptr() == donated[position].data_ptr()
    assert equal(again, results)


def test_functional_copies_nothing_for_what_does_not_write():
    key, values = register(resolve("torch")), arguments("rms_norm")
    assert clones(lambda: front("rms_norm").functional(*values, plan=key)) == 0


def test_two_plans_in_one_process(in_place):
    native = resolve("torch")
    one, other = bind(native, wrap=True), bind(in_place, wrap=True)
    values, given = arguments("rms_norm"), arguments("rms_norm")
    result = other.rms_norm(*given)
    assert result.data_ptr() == given[0].data_ptr(), "the plan's own implementation ran"
    kept = copies(values)
    assert equal(one.rms_norm(*values), resolve("torch").bind().rms_norm(*kept))
    assert equal(tuple(values[:2]), tuple(kept[:2]))


@pytest.mark.parametrize("options", [{}, {"compiling": True}, {"wrap": True}], ids=str)
def test_a_composition_survives_what_writes_in_place(in_place, options):
    """`fused_add_rms_norm` returns the sum that it has given to `rms_norm`."""
    plan = resolve("torch", {"rms_norm": ("overwriting",)})
    values, op = arguments("fused_add_rms_norm"), "fused_add_rms_norm"
    before = copies(values)
    want = getattr(resolve("torch").bind(), op)(*before)
    got = getattr(bind(plan, **options), op)(*values)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[1], want[1])
    assert all(torch.equal(a, b) for a, b in zip(values[:3], before[:3], strict=True))


def test_an_unknown_plan_is_refused():
    with pytest.raises(OpError, match="not bound"):
        front("rms_norm").functional(*arguments("rms_norm"), plan="0123")
    with pytest.raises(OpError, match="numpy"):
        bind(resolve("numpy"), wrap=True)


def test_in_place_implementations_return_their_activations(registries):
    @implement("add", provider="dishonest", framework="torch", inplace=True)
    def add(x: "Array", residual: "Array") -> "Array":
        return x + residual

    ops = bind(resolve("torch", {"add": ("dishonest",)}), compiling=True)
    with pytest.raises(OpError, match="returns other tensors"):
        ops.add(torch.ones(2, 2), torch.ones(2, 2))
