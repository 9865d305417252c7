"""Bounds that were too tight or too loose once: a correct result passes, and a wrong one still
does not.
"""

import ml_dtypes
import numpy as np
import pytest

from twinfer.numerics.judging.gates import accumulated, semantics
from twinfer.numerics.judging.metrics import measure
from twinfer.numerics.sides.reference import evaluate
from twinfer.ops.cases import load_all
from twinfer.ops.testing import TESTING, Judge, ci_cases, oracle, run

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_attention_is_as_noisy_as_its_reference(framework):
    load_all()
    errors = noises = 0.0
    for case in ci_cases(TESTING["paged_attention"], "bfloat16")[:2]:
        arguments = case.arguments
        got = run("paged_attention", framework, None, arguments)[0]
        right, noisy = (
            evaluate("paged_attention", arguments, exact=exact)[0] for exact in (True, False)
        )
        m = measure(got, right, noisy)
        errors, noises = errors + m.error_power, noises + m.noise_power
    assert (errors / noises) ** 0.5 == pytest.approx(1.0, abs=0.02)


def test_a_row_that_is_scaled_by_almost_one_may_be_rounded_one_way():
    """x * 1.0015 in bfloat16 is x again for each x: no roundings that are independent, and none
    that is wrong.
    """
    load_all()
    x = (np.random.default_rng(0).standard_normal((4, 1024)) * 0.9).astype(BF16)
    power = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    x = (x.astype(np.float64) * 0.9 / power**0.5).astype(BF16)
    eps = 1 / 1.0015**2 - float((x[0].astype(np.float64) ** 2).mean())
    arguments = {"x": x[:1], "weight": np.ones(1024, BF16), "eps": eps}
    judge, want = Judge("rms_norm", arguments), oracle("rms_norm", arguments)[0]
    rounded = want.astype(BF16)
    assert np.array_equal(rounded, x[:1])
    assert judge([rounded]).passed
    assert not judge([(1.005 * want).astype(BF16)]).passed


def test_float32_sums_on_tensor_cores_pass_and_a_wrong_scale_does_not():
    right = np.random.default_rng(0).standard_normal((8, 64))
    noisy = right.astype(np.float32)
    for scale, passes in ((1 - 0.8e-6, True), (1 - 3e-6, True), (1 - 1e-4, False)):
        m = measure((right * scale).astype(np.float32), right, noisy)
        assert (not list(accumulated(1024).complaints(m))) == passes, scale
    m = measure((right * (1 - 3e-6)).astype(np.float32), right, noisy)
    assert list(semantics("op", 1024).complaints(m))
