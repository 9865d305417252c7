"""The Pallas attention kernels, tier 1: the generic interpreter against the float64 oracle, within the op's bounds.

A normal run samples: one decode and one mixed case in bfloat16. `-m slow` runs every case in both dtypes.
"""

import pytest

from twinfer.ops.cases import load_all
from twinfer.ops.testing import TESTING, Judge, ci_cases, run

load_all()
DTYPES = ("float32", "bfloat16")
SAMPLED = ("decode, window", "mixed, window and soft cap")


def judged(dtype, case):
    import twinfer.tpu.kernels  # noqa: F401

    return Judge("paged_attention", case.arguments)(
        run("paged_attention", "jax", "pallas_interpret", case.arguments)
    ), f"{dtype}, {case.name}"


def cases(dtype):
    return ci_cases(TESTING["paged_attention"], dtype)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_the_cases(name):
    (case,) = (case for case in cases("bfloat16") if case.name == name)
    verdict, where = judged("bfloat16", case)
    assert verdict.passed, f"{where}: {verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case(dtype):
    results = [judged(dtype, case) for case in cases(dtype)]
    assert results
    assert not [f"{where}: {verdict}" for verdict, where in results if not verdict.passed]


def test_a_wrong_kernel_is_rejected(monkeypatch):
    """The judge sees a kernel whose buffer is not cleared of what lies outside a request."""
    from twinfer.tpu.kernels import attention, cache

    monkeypatch.setattr(cache.Pages, "clear", lambda *_: None)
    case = next(case for case in cases("bfloat16") if case.name == "decode, padded")
    given = {name: value for name, value in case.arguments.items() if name not in ("k_scale", "v_scale")}
    import jax.numpy as jnp

    arrays = {n: jnp.asarray(v) if hasattr(v, "shape") else v for n, v in given.items()}
    out = attention.attend(**arrays, k_scale=1.0, v_scale=1.0, interpret=True)
    assert not Judge("paged_attention", case.arguments)([out]).passed


def test_what_does_not_fit_is_refused():
    import jax
    import jax.numpy as jnp

    from twinfer.tpu.kernels import attention

    def takes(pages=512, requests=256, page=16, hdim=128, dtype=jnp.bfloat16):
        q = jax.ShapeDtypeStruct((256, 8, hdim), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((1024, page, 4, hdim), dtype)
        return attention.compiles(
            q, kv, jax.ShapeDtypeStruct((requests, pages), jnp.int32), None, None, None, 1.0, 0, 0.0, 1
        )

    assert takes()
    assert not takes(pages=513)  # the page table's 512 KiB of scalar memory
    assert not takes(hdim=48)
    assert not takes(page=8)
    assert not takes(dtype=jnp.float16)
