"""Every op: every implementation keeps the contract, and the bounds that say so see every
mutant.
"""

import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path

import numpy as np
import pytest

from twinfer.ops import REGISTRY, OpError, testing
from twinfer.ops import reference as references
from twinfer.ops.cases import load_all
from twinfer.ops.cases.attention import BELOW_ONE, equal_values
from twinfer.ops.choosing import last_implementation
from twinfer.ops.implement import IMPLEMENTATIONS
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import narrow, sampling
from twinfer.ops.testing import (
    DTYPES,
    TESTING,
    Bound,
    Case,
    Judge,
    ci_cases,
    detect,
    oracle,
    providers,
    run_mutant,
    undetected,
)
from twinfer.tests.interpreted import run

import_module("twinfer.gpu.cpu_kernels")  # registers the kernels for CPUs
import_module("twinfer.tpu.kernels")  # and those for TPUs, with their interpreter
load_all()
OPS = sorted(op.name for op in REGISTRY if op.reference.__module__.startswith("twinfer."))
FRAMEWORKS = ("numpy", "torch", "jax")

ON_A_GPU = ("triton", "pallas_triton")
"""Providers whose kernels are for GPUs."""
ON_A_CPU = ("c",)
"""Providers whose kernels are for CPUs."""


LONG = {
    ("paged_attention", "jax", "pallas_interpret"),  # test_tpu_kernels.py has a sample of its cases
    ("paged_attention", "jax", "rows"),  # test_row_invariant.py runs it in an engine
}
"""Take minutes."""
ONE_IN = {
    ("paged_attention", "native"): 24,
    ("moe_experts_narrow", "composition"): 10,
    ("linear_grouped", "native"): 8,
    ("linear_grouped", "rows"): 8,
    ("linear_grouped", "pallas_interpret"): 8,
    ("norm_rope_write_kv", "composition"): 8,
    ("moe_route", "native"): 6,
    ("moe_route", "rows"): 6,
    ("grouped_linear", "native"): 6,
    ("grouped_linear", "rows"): 6,
    ("grouped_linear", "pallas_interpret"): 6,
    ("linear_fp8", "native"): 6,
    ("linear_fp8", "rows"): 6,
    ("linear_fp8", "pallas_interpret"): 6,
    ("write_kv", "native"): 6,
    ("write_kv", "pallas_interpret"): 6,
}
ONE_IN_OTHERS = 4
"""XLA compiles each case for up to a second: one in so many of each dtype has its turn here, compiled
quickly (`interpreted.py`); all in the slow test, as XLA compiles them for users.
"""


def one_in(op, framework, provider, device="cpu"):
    """Of so many cases of an implementation one is judged by what is not slow."""
    if framework != "jax" or device != "cpu" or (op, framework, provider) in LONG:
        return 1
    return ONE_IN.get((op, provider), ONE_IN_OTHERS)


ALL_IMPLEMENTATIONS = [
    (op, framework, provider)
    for op in OPS
    for framework in FRAMEWORKS
    for provider in providers(op, framework)
]


def judged(on_a_gpu, slow=frozenset()):
    """(op, framework, provider) of every implementation; those that `on_a_gpu` takes are judged
    there too.
    """

    def marks(op, framework, provider):
        if on_a_gpu(framework, provider):
            return pytest.mark.gpu
        return pytest.mark.slow if (op, framework, provider) in slow else ()

    return [
        pytest.param(*names, id="-".join(names), marks=marks(*names))
        for names in ALL_IMPLEMENTATIONS
    ]


JUDGED = judged(lambda framework, provider: provider in ON_A_GPU)
BOUNDED_ON_A_GPU = judged(
    lambda framework, provider: (
        (framework == "torch" and provider not in ON_A_CPU) or provider in ON_A_GPU
    ),
    LONG,
)
"""What torch makes of the references on a GPU, by cuBLAS among others, is judged by the bound
alone.
"""


def of_each(implementations):
    """Run a test for each of all implementations. What several tests ask of one comes one after the
    other, which is what the scope is for: with a function of JAX stay the programs that it was
    compiled to, and few functions are kept.
    """
    return pytest.mark.parametrize(("op", "framework", "provider"), implementations, scope="module")


HALF = "float16"
"""Judged by tests of its own: XLA compiles for minutes what takes every op once more."""
QUICK = (
    "embedding linear logits rms_norm add fused_add_rms_norm rotary_embedding gated_mlp "
    "silu_and_mul"
).split()


def in_half(parameter):
    """A parameter of the tests in float16: slow on JAX, but for what is in every layer and
    compiles quickly.
    """
    op, framework, _ = parameter.values
    slow = framework == "jax" and op not in QUICK
    return pytest.param(
        *parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else []
    )


IN_HALF = [
    in_half(parameter) for parameter in JUDGED if HALF in TESTING[parameter.values[0]].dtypes
]


def wide_dtypes(op):
    """The dtypes of an op but for float16."""
    return tuple(dtype for dtype in TESTING[op].dtypes if dtype != HALF)


@cache
def judged_cases(op, dtype, dot=""):
    """(case, judge, dtypes of the outputs) of an op; `dot` is an implementation's own."""
    made = []
    for case in ci_cases(TESTING[op], dtype):
        like = tuple(out.dtype for out in run(op, "numpy", None, case.arguments))
        made.append((case, Judge(op, case.arguments, dot=dot), like))
    return made


@cache
def reachable(framework, device):
    """Whether a framework has a device (`--device`); numpy runs where it is."""
    if framework == "torch":
        import torch

        return device == "cpu" or (device == "cuda" and torch.cuda.is_available())
    if framework == "jax":
        import jax

        try:
            return bool(jax.devices({"cuda": "gpu"}.get(device, device)))
        except RuntimeError:
            return False
    return True


def implementation(op, framework, provider, device):
    if not reachable(framework, device):
        pytest.skip(f"{framework} has no {device} here")
    found = providers(op, framework)[provider]
    if found is not None and not found.supported():
        pytest.skip(f"{provider!r} of {op!r} is not supported on this machine")
    return found


def accepts(found, case):
    return found is None or found.supports_args is None or found.supports_args(**case.arguments)


KNOWN: dict[tuple[str, str, str], tuple[str, str]] = {}
"""Faults that these tests found and nobody has put right: all cases that contain the words fail,
and no others.
"""


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_cases_and_mutants(op):
    assert op in TESTING, f"{op} is judged by nothing: give it a Testing in ops/cases"
    for dtype in TESTING[op].dtypes:
        assert ci_cases(TESTING[op], dtype)
    assert len(TESTING[op].mutants) >= 3
    bound = TESTING[op].bound
    assert bound.reason or (bound.roundings <= 1 and not bound.inner)


@of_each(BOUNDED_ON_A_GPU)
def test_implementation_keeps_the_bound_in_every_case(op, framework, provider, device):
    found = implementation(op, framework, provider, device)
    every = one_in(op, framework, provider, device)
    assert keeps_the_bound(
        op, framework, provider, device, found, wide_dtypes(op), every, quickly=True
    ), "no case is accepted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "framework", "provider"),
    [p for p in JUDGED if one_in(*p.values) > 1 and p.values[2] not in ON_A_GPU],
)
def test_cases_that_compile_for_long_keep_the_bound_too(op, framework, provider, device):
    found = implementation(op, framework, provider, device)
    assert keeps_the_bound(op, framework, provider, device, found, wide_dtypes(op)), (
        "no case is accepted"
    )


def test_attention_keeps_the_bound_without_the_kernel_for_cpus(monkeypatch):
    """The plain products that a GPU runs, and a CPU in half precision or where there is a cap."""
    pytest.importorskip("torch")
    from twinfer.ops.native import torch_attention

    monkeypatch.setattr(torch_attention, "_attend_on_cpu", torch_attention._attend)
    found = implementation("paged_attention", "torch", "native", "cpu")
    assert keeps_the_bound(
        "paged_attention", "torch", "native", "cpu", found, wide_dtypes("paged_attention")
    ), "no case is accepted"


@pytest.mark.parametrize(("op", "framework", "provider"), IN_HALF)
def test_implementation_keeps_the_bound_in_float16(op, framework, provider, device):
    found = implementation(op, framework, provider, device)
    if not keeps_the_bound(op, framework, provider, device, found, (HALF,), quickly=True):
        assert found.supports_args is not None, "what takes everything takes float16"
        pytest.skip(f"{provider!r} of {op!r} does not take float16")


def keeps_the_bound(op, framework, provider, device, found, dtypes, every=1, quickly=False):
    """How many cases were judged: of those of a dtype that it accepts every so many, from another
    one on in each dtype. All of them must keep the bound, but for what is known.

    Of the last dtype the first case is judged, which is compiled for other tests as well.
    """
    failures, known, judged = [], [], 0
    reason, words = KNOWN.get((op, framework, provider), ("", None))
    for number, dtype in zip(reversed(range(len(dtypes))), dtypes, strict=True):
        cases = judged_cases(op, dtype, found.dot if found else "")
        cases = [each for each in cases if accepts(found, each[0])]
        for case, judge, like in cases[min(number, len(cases) - 1) % every :: every]:
            judged += 1
            outputs = run(op, framework, provider, case.arguments, device, quickly)
            verdict, dtypes = judge(outputs), tuple(out.dtype for out in outputs)
            name = f"{dtype}, {case.name}"
            passed = verdict.passed and dtypes == like
            if words is not None and words in name:
                known.append(name)
                passed = not passed
            if not passed:
                failures.append(f"{name}: {verdict}, dtypes {dtypes}, wanted {like}")
    assert not failures, "\n".join([*failures, *(["or no longer: " + reason] if known else [])])
    if known:
        pytest.xfail(f"{reason}: {'; '.join(known)}")
    return judged


@of_each(JUDGED)
def test_calling_twice_gives_the_same_bits(op, framework, provider, device):
    found = implementation(op, framework, provider, device)
    if found is not None and not found.deterministic:
        pytest.skip(f"{provider!r} of {op!r} does not claim it")
    dtype = TESTING[op].dtypes[-1]
    case = next(case for case, _, _ in judged_cases(op, dtype) if accepts(found, case))
    first, second = (run(op, framework, provider, case.arguments, device, True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes()


@of_each(JUDGED)
def test_rows_depend_on_their_own_row_only(op, framework, provider, device):
    """Whatever the other rows hold, NaN too, a row has the same bits; and its own NaN reaches
    it.
    """
    judged_by = TESTING[op]
    if not judged_by.rows:
        pytest.skip("the op has no rows of its own")
    found = implementation(op, framework, provider, device)
    dtype = judged_by.dtypes[-1]
    case = next(case for case, _, _ in judged_cases(op, dtype) if accepts(found, case))
    other = dict(case.arguments)
    has_nan = False
    for name in judged_by.rows:
        value = other[name].copy()
        is_float = value.dtype.kind not in "iub"
        value[2] = np.nan if is_float else value[3]
        other[name], has_nan = value, has_nan or is_float
    before = run(op, framework, provider, case.arguments, device, True)
    after = run(op, framework, provider, other, device, True)
    for a, b in zip(before, after, strict=True):
        kept = np.arange(len(a)) != 2
        assert a[kept].tobytes() == b[kept].tobytes()
        promised = REGISTRY[op].contract.nan.startswith("NaN in, NaN out")
        if has_nan and promised and b.dtype.kind not in "iub":
            assert np.isnan(b[2].astype(np.float32)).all()


@of_each(
    judged(lambda framework, provider: provider in ON_A_GPU, {("paged_attention", "jax", "rows")})
)
def test_claimed_row_invariance(op, framework, provider, device):
    """A row has the same bits in a smaller batch and alone, for the implementations that claim
    it. XLA compiles each size: where it does, one dtype has its turn here, compiled quickly, all in
    the slow test, as for users.
    """
    every = one_in(op, framework, provider, device)
    dtypes = wide_dtypes(op)[-1:] if every > 1 else wide_dtypes(op)
    keeps_its_rows(op, framework, provider, device, dtypes, quickly=every > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "framework", "provider"),
    [p for p in JUDGED if one_in(*p.values) > 1 and p.values[2] not in ON_A_GPU],
)
def test_claimed_row_invariance_in_all_dtypes(op, framework, provider, device):
    keeps_its_rows(op, framework, provider, device, wide_dtypes(op))


def keeps_its_rows(op, framework, provider, device, dtypes, quickly=False):
    """Skips what does not claim that its rows are alone."""
    found = implementation(op, framework, provider, device)
    if found is None:  # the reference itself
        known = IMPLEMENTATIONS.get((op, framework), {})
        found = last_implementation(REGISTRY[op], framework, known)
    if not found.row_invariant or not TESTING[op].rows:
        pytest.skip("not claimed")
    if op in ATTENTIONS:
        return each_request_alone(op, framework, provider, device, dtypes, quickly)
    takes = [
        next((case for case, _, _ in judged_cases(op, dtype) if accepts(found, case)), None)
        for dtype in dtypes
    ]
    assert any(takes)
    for case in filter(None, takes):
        whole = run(op, framework, provider, case.arguments, device, quickly)
        for first, last in ((3, None), (1, 2)):
            some = slice(first, last)
            fewer = these_rows(op, case.arguments, some)
            part = run(op, framework, provider, fewer, device, quickly)
            for a, b in zip(whole, part, strict=True):
                assert a[some].tobytes() == b.tobytes()


def these_rows(op, arguments, some):
    """The arguments of some rows: scales of rows and the sizes of groups go with them."""
    count, judged_by = len(arguments[TESTING[op].rows[0]]), TESTING[op].rows
    scales = {"x_scale"} if np.shape(arguments.get("x_scale"))[:1] == (count,) else set()
    fewer = {n: v[some] if n in {*judged_by, *scales} else v for n, v in arguments.items()}
    if "group_sizes" in arguments:
        sizes = arguments["group_sizes"]
        groups = np.full(count, len(sizes))
        groups[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        fewer["group_sizes"] = np.bincount(groups[some], minlength=len(sizes) + 1)[:-1].astype(
            np.int32
        )
    return fewer


ATTENTIONS = ("paged_attention", "latent_attention")


def each_request_alone(op, framework, provider, device, dtypes, quickly):
    """A request of attention has the same bits alone."""
    found = implementation(op, framework, provider, device)
    for dtype in dtypes:
        cases = [case for case, _, _ in judged_cases(op, dtype) if accepts(found, case)]
        several = [case for case in cases if case.arguments["counts"][1] > 1]
        for case in several[:4]:
            given = case.arguments
            (whole,) = run(op, framework, provider, given, device, quickly)
            for i in range(int(given["counts"][1])):
                first, last = given["query_start"][i : i + 2]
                alone = {name: given[name][first:last] for name in TESTING[op].rows} | {
                    "page_table": given["page_table"][i : i + 1],
                    "query_start": np.array([0, last - first], np.int32),
                    "kv_lens": given["kv_lens"][i : i + 1],
                    "counts": np.array([int(last - first == 1), 1], np.int32),
                }
                (part,) = run(op, framework, provider, given | alone, device, quickly)
                assert part.tobytes() == whole[first:last].tobytes(), (case.name, i)


@pytest.mark.parametrize(
    "framework", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("op", ATTENTIONS)
def test_rows_of_no_request_are_zero(op, framework, device):
    implementation(op, framework, "native", device)
    for dtype in wide_dtypes(op):
        for case, _, _ in judged_cases(op, dtype):
            (out,) = run(op, framework, "native", case.arguments, device)
            assert not out[int(case.arguments["query_start"][-1]) :].any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_of_no_slot_change_nothing_but_scratch(framework, device):
    implementation("write_kv", framework, "native", device)
    case = next(
        c for c in ci_cases(TESTING["write_kv"], "float32") if c.name == "no row has a slot"
    )
    (out,) = run("write_kv", framework, "native", case.arguments, device)
    flat = [x.reshape(-1, *x.shape[2:])[:-1] for x in (out, case.arguments["kv"])]
    np.testing.assert_array_equal(*flat)


@pytest.mark.parametrize(
    ("op", "framework", "provider"),
    [p for p in BOUNDED_ON_A_GPU if p.values[0] == "paged_attention"],
)
def test_attention_rounds_its_weights_where_the_contract_says(op, framework, provider, device):
    """The bound allows for roundings here and there, so it cannot say where they are; equal
    values can.
    """
    if framework == "numpy":
        pytest.skip("the oracle rounds nothing")
    found = implementation(op, framework, provider, device)
    for queries in (1, 17):
        arguments = equal_values(queries)
        assert found.supports_args is None or found.supports_args(**arguments)
        (out,) = run(op, framework, provider, arguments, device, True)
        assert set(out[-16:].astype(np.float64).ravel()) == {BELOW_ONE}


@pytest.mark.parametrize("op", OPS)
def test_every_mutant_is_rejected(op, record_property):
    """What saw each of them is printed after the run: a line an op, or a line a mutant with -v
    (`conftest.py`).
    """
    check_mutants(op, wide_dtypes(op), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if HALF in TESTING[op].dtypes])
def test_every_mutant_is_rejected_in_float16_too(op, record_property):
    """But for those that float16 cannot show."""
    check_mutants(op, (HALF,), record_property, UNSEEN_IN_HALF.get(op, frozenset()))


UNSEEN_IN_HALF = {
    "linear": frozenset({"tf32 product"}),  # which has as many bits
    "logits": frozenset({"tf32 product"}),
    "to_latents": frozenset({"tf32 product"}),
    "from_latents": frozenset({"tf32 product"}),
    # less than its other roundings may be off by
    "moe_experts": frozenset({"weights rounded to bfloat16"}),
    "gated_mlp_grouped": frozenset({"scale 1.005"}),
    "norm_add_rms_norm": frozenset(
        {
            "eps ignored",
            "eps outside the root",
            "squares rounded to bfloat16",
            "first norm: squares rounded to bfloat16",
        }
    ),
}


def check_mutants(op, dtypes, record_property, unseen=frozenset()):
    missed, rows = set(TESTING[op].mutants) - unseen, []
    for mutant, dtype, found in detect(op, replace(TESTING[op], dtypes=dtypes)):
        seen = (found.by, float(found.factor), found.case) if found else None
        rows.append((op, mutant, dtype, seen))
        if found is not None:
            missed.discard(mutant)
    record_property("mutants", rows)
    assert not missed, f"no case sees {sorted(missed)}"


@pytest.mark.parametrize(
    "op", [op for op in OPS if op in TESTING and TESTING[op].truth is not None]
)
def test_what_mutants_are_made_of_passes(op):
    """A mutant must be rejected for its fault and for nothing else."""
    for dtype in wide_dtypes(op):
        for case, judge, like in judged_cases(op, dtype):
            verdict = judge(run_mutant(op, TESTING[op].truth, case.arguments, like))
            assert verdict.passed, f"{dtype}, {case.name}: {verdict}"


PART = "a part that is an op of its own, with a truth that calls no reference"
CODES = "how numbers of few bits are read: linear_grouped has no truth of its own yet"
STORED = "how a cache stores numbers: judged through write_kv, whose truth calls no reference"
TRUTHS_THAT_CALL_REFERENCES = {
    "gated_mlp": {"dense.linear": PART},
    "gelu_gated_mlp": {"dense.linear": PART},
    "grouped_linear": {
        f"narrow.{name}": CODES for name in ("_scaled", "entries", "widened_weight")
    },
    "moe_experts_narrow": {
        f"narrow.{name}": CODES for name in ("_scaled", "entries", "widened_weight")
    },
    "norm_rope": {
        f"dense.{name}": PART for name in ("_rotate", "along", "rms_norm", "rotary_embedding")
    },
    "norm_rope_write_latents": {
        **{f"dense.{name}": PART for name in ("_rotate", "along", "rms_norm", "rotary_embedding")},
        "latents.write_latents": PART,
    },
    "norm_rope_write_kv": {
        **{f"dense.{name}": PART for name in ("_rotate", "along", "rms_norm", "rotary_embedding")},
        **{f"norms.{name}": PART for name in ("_rms", "unit_rms_norm")},
        "paged.write_kv": PART,
        **{
            f"quantization.{name}": STORED
            for name in (
                *("_saturated", "_to_fp8", "_to_int8", "exact_quotient", "reciprocal", "stored"),
            )
        },
    },
}
"""By op: functions of `ops.reference` that its truth calls all the same, and why. What is wrong in
them the truth cannot see.
"""


def called_of_the_references(op, function):
    """Functions of `ops.reference` that run while `function` computes the cases of an op in its
    first dtype.
    """
    found = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == Path(references.__file__).parent:
            found.add(f"{path.stem}.{frame.f_code.co_name}")

    for case in ci_cases(TESTING[op], TESTING[op].dtypes[0]):
        given = case.arguments
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            oracle(op, given, function)
        finally:
            sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    "op", [op for op in OPS if op in TESTING and TESTING[op].truth is not None]
)
def test_a_truth_calls_no_reference(op):
    """It would agree with whatever is wrong there."""
    found = called_of_the_references(op, TESTING[op].truth)
    assert found == set(TRUTHS_THAT_CALL_REFERENCES.get(op, {}))


def test_a_truth_that_calls_a_reference_is_found():
    found = called_of_the_references("sample", lambda xp, **a: sampling.sample(xp, **a))
    assert {"sampling.sample", "sampling._top_k_limit", "sampling._mix"} <= found


BOUNDED = [
    op
    for op in OPS
    if op in TESTING and not TESTING[op].bitwise and TESTING[op].bound.roundings > 0
]


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.slow if op == "paged_attention" else ()) for op in BOUNDED],
)
def test_a_blind_bound_is_found(op):
    """It lets a mutant pass: the first that does will do."""
    blind = replace(TESTING[op], bound=Bound(roundings=inf))
    assert any(
        undetected(op, replace(blind, mutants={name: mutant}))
        for name, mutant in blind.mutants.items()
    )


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in ci_cases(TESTING["linear_grouped"], "float32")]
)
def test_a_product_in_the_plainest_order_keeps_the_bound(case):
    """One sum in float32, entry by entry, as XLA adds up small products on a CPU: the contract
    leaves the order open, also for many entries.
    """
    a = case.arguments
    wide = narrow.widened_weight(
        namespace("numpy"), a["weight"], a["scale"].astype(np.float32), a["zero"], a["kind"]
    ).astype(np.float32)
    total = np.zeros((len(a["x"]), len(wide)), np.float32)
    for column, entry in zip(a["x"].T, wide.T, strict=True):
        total += column[:, None] * entry
    if a["bias"] is not None:
        total += a["bias"]
    verdict = Judge("linear_grouped", a)([total])
    assert verdict.passed, verdict


def in_parts(x, parts):
    """x as a sum of so many numbers of bfloat16, each in float32."""
    found = []
    for _ in range(parts):
        found.append(x.astype(DTYPES["bfloat16"]).astype(np.float32))
        x = x - found[-1]
    return found


@pytest.mark.parametrize("op", ["linear", "logits"])
def test_a_product_of_parts_in_bfloat16_keeps_the_bound(op):
    """What a TPU does with float32 (`jax_.ALGORITHMS`): six products of three parts. Three products
    of two parts do not keep it.
    """

    def judged_products(case, parts):
        a = case.arguments
        x, w = (in_parts(a[name], parts) for name in ("x", "weight"))
        pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j < parts]
        total = sum(x[i] @ w[j].T for i, j in sorted(pairs, key=sum, reverse=True))
        bias = a.get("bias")
        return Judge(op, a)([total if bias is None else total + bias])

    cases = list(ci_cases(TESTING[op], "float32"))
    six = {case.name: judged_products(case, 3) for case in cases}
    assert {name: str(verdict) for name, verdict in six.items() if not verdict.passed} == {}
    assert not all(judged_products(case, 2).passed for case in cases)


def test_blind_cases_are_found():
    """Cases in which nothing happens let mutants pass, of a bitwise op too."""
    x = np.zeros((2, 80), np.float32)

    def nothing(dtype):
        yield Case("zeros", {"x": x, "residual": x})

    assert undetected("add", testing.Testing(nothing, bitwise=True, mutants=TESTING["add"].mutants))


def test_infinite_bounds_do_not_excuse_nan():
    case = ci_cases(TESTING["rms_norm"], "float32")[0]
    blind = Judge(
        "rms_norm", case.arguments, replace(TESTING["rms_norm"], bound=Bound(roundings=inf))
    )
    out = run("rms_norm", "numpy", None, case.arguments)[0]
    assert blind([out]).passed
    assert not blind([np.where(np.arange(200) == 3, np.nan, out).astype(out.dtype)]).passed
    assert not blind([out[:-1]]).passed


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window": 4, "chunk": 8}, "chunk: got 8 beside window 4, allowed is one of them"),
        ({"window": -1}, "window: got -1, allowed are 0"),
        ({"chunk": -8}, "chunk: got -8, allowed are 0"),
    ],
)
def test_a_reach_that_is_none_is_refused(framework, given, words, device):
    implementation("paged_attention", framework, "native", device)
    case = judged_cases("paged_attention", "float32")[0][0]
    with pytest.raises(OpError, match=words):
        run("paged_attention", framework, "native", case.arguments | given, device)
