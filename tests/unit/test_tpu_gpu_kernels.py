"""The JAX worker's kernels for NVIDIA GPUs, interpreted. On a GPU the contract tests run them."""

import numpy as np
import pytest

from twinfer.ops import resolve
from twinfer.ops.cases import load_all
from twinfer.ops.cases.attention import BELOW_ONE, equal_values
from twinfer.ops.implement import preferred
from twinfer.ops.testing import TESTING, Judge, ci_cases
from twinfer.tests.interpreted import interpret
from twinfer.tpu.gpu_kernels import attention, decode, write

load_all()
QUICK = (
    *("decode, padded", "mixed, window and soft cap", "norms", "no norms"),
    *("decode, padded, int8 cache", "mixed, window and soft cap, fp8 cache"),
)


def cases(op, takes, quick):
    """The cases of an op that a kernel takes: interpreting one takes seconds, so those of QUICK
    in bfloat16, or all.
    """
    for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
        for case in ci_cases(TESTING[op], dtype):
            if takes(**case.arguments) and (not quick or case.name in QUICK):
                yield f"{dtype}, {case.name}", case.arguments


def failures(op, function, takes, quick):
    failed, judged = [], 0
    for name, arguments in cases(op, takes, quick):
        outputs = function(arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        verdict = Judge(op, arguments)(tuple(map(np.asarray, outputs)))
        judged += 1
        if not verdict.passed:
            failed.append(f"{name}: {verdict}")
    assert judged >= 2
    return failed


def attend(arguments):
    given = {"k_scale": None, "v_scale": None} | arguments
    return interpret(attention.attend, given, interpret=True)


def norm_rope_write(arguments):
    given = {name: x for name, x in arguments.items() if name not in ("k_scale", "v_scale")}
    return interpret(write.write, given, interpret=True)


@pytest.mark.slow
def test_interpreted_attention_keeps_the_bound():
    assert failures("paged_attention", attend, attention.takes, quick=False) == []


@pytest.mark.parametrize("queries", [1, 17])
def test_interpreted_attention_rounds_its_weights_where_the_contract_says(queries):
    out = np.asarray(attend(equal_values(queries)))
    assert set(out[-16:].astype(np.float64).ravel()) == {BELOW_ONE}


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_interpreted_write_keeps_the_bound(quick):
    assert failures("norm_rope_write_kv", norm_rope_write, write.takes, quick) == []


@pytest.mark.slow
def test_the_bound_sees_a_part_that_is_not_added(monkeypatch):
    """The requests of the cases are short: parts of 16 slots make several of them."""
    setting = decode.config("decode", "bfloat16") | {"chunk": 16, "block_n": 16}
    monkeypatch.setattr(decode, "config", lambda *_: setting)
    case = dict(cases("paged_attention", attention.takes, True))["bfloat16, decode, padded"]
    judge = Judge("paged_attention", case)
    assert judge((np.asarray(attend(case)),)).passed
    call = decode.call

    def without_the_second(kernel, *rest, **more):
        run = call(kernel, *rest, **more)
        if kernel.__name__ != "decode_attention_merge":
            return run
        return lambda sums, *others: run(sums.at[:, :, 1].set(0), *others)

    monkeypatch.setattr(decode, "call", without_the_second)
    assert not judge((np.asarray(attend(case)),)).passed


def test_gpus_prefer_the_kernels_and_others_pass_them_over():
    plan = resolve("jax", platform="cuda")
    wanted = preferred("jax", "cuda")
    assert set(wanted) == {"paged_attention", "norm_rope_write_kv"}
    for op, (provider,) in wanted.items():
        assert provider == "pallas_triton"
        assert plan[op].passed_over == ((provider, "not supported on this machine"),)
