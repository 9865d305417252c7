"""What the fp8 units of a GPU may do to a sum (`narrow.FP8_UNITS`), played in numpy and on a GPU:
sums that go to float32 after every 128 entries keep the bound, sums that stay in the units do not.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from twinfer.ops.cases import load_all
from twinfer.ops.cases.quantized import _mlp_case, quantized
from twinfer.ops.reference.narrow import FP8_UNITS
from twinfer.ops.testing import TESTING, Judge, oracle

load_all()
BITS = 13


def products(k, dtype, seed=0):
    """Arguments of `linear_fp8` whose sums grow along k: what a cut takes adds up."""
    rng = np.random.default_rng(seed)
    x, x_scale = quantized("fp8", 1.0 + 0.3 * rng.normal(size=(17, k)).astype(np.float32), "row")
    w, w_scale = quantized("fp8", 1.0 + 0.3 * rng.normal(size=(16, k)).astype(np.float32), "row")
    arguments = {"x": x, "weight": w, "x_scale": x_scale, "weight_scale": w_scale}
    return arguments | {"bias": None, "dtype": dtype}


def cut(values, largest):
    """Values without what is below 13 bits of the largest one."""
    unit = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-300))) - BITS)
    return np.trunc(values / unit) * unit


def units(arguments, step):
    """Products by units that add up 32 entries at a time and give their sum to float32 after each
    `step` of k.
    """
    x, weight = (arguments[name].astype(np.float64) for name in ("x", "weight"))
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], step):
        inner = np.zeros(total.shape)
        for at in range(first, min(first + step, x.shape[1]), 32):
            addends = x[:, None, at : at + 32] * weight[None, :, at : at + 32]
            addends = np.concatenate([inner[:, :, None], addends], -1)
            inner = cut(addends, np.abs(addends).max(-1, keepdims=True)).sum(-1)
        total += inner.astype(np.float32)
    scale = arguments["x_scale"] * arguments["weight_scale"].T
    return total * scale.astype(np.float32)


@pytest.mark.parametrize("k", [512, 4096])
def test_sums_per_128_keep_the_bound_and_longer_ones_do_not(k):
    arguments = products(k, "float32")
    judge, strict = Judge("linear_fp8", arguments, dot=FP8_UNITS), Judge("linear_fp8", arguments)
    assert judge([units(arguments, 128)]).passed
    assert not judge([units(arguments, k)]).passed
    assert not strict([units(arguments, 128)]).passed, "the op's own contract is not this one"


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 14336])
def test_the_units_of_this_gpu(device, k):
    """What is planned keeps the bound; with fast accumulation it does not."""
    import torch

    if device != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with fp8 units, from Hopper on")
    from twinfer.gpu.kernels import narrow
    from twinfer.ops.namespaces.torch_ import from_numpy

    arguments = products(k, "bfloat16")
    judge = Judge("linear_fp8", arguments, dot=FP8_UNITS)
    on_gpu = {
        name: from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    planned = narrow.linear_fp8_units(**on_gpu).float().cpu().numpy()
    verdict = judge([planned.astype(narrow_dtype())])
    assert verdict.passed, verdict
    fast = torch._scaled_mm(
        on_gpu["x"], on_gpu["weight"].t(), on_gpu["x_scale"], on_gpu["weight_scale"].t(),
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    assert not judge([fast.float().cpu().numpy().astype(narrow_dtype())]).passed


def narrow_dtype():
    import ml_dtypes

    return ml_dtypes.bfloat16


def verdicts(off, testing):
    """Whether a gated MLP passes whose first sums are `off`, for each of the numbers between its
    products by itself.
    """

    def summed(ops, **a):
        both = ops.linear_fp8(a["x"], a["gate_up"], None, a["gate_up_scale"], None, "float64")
        hidden = ops.rounded(ops.silu_and_mul(ops.rounded(both * (1.0 - off))))
        return ops.linear_fp8(hidden, a["down"], None, a["down_scale"], None, "float64")

    whole = _mlp_case("bfloat16", 1000, 64, 48, False)
    for column in range(48):
        down = np.zeros_like(whole["down"])
        down[:, column] = whole["down"][:, column]
        arguments = {**whole, "x": whole["x"][331:332], "down": down}
        got = [x.astype(ml_dtypes.bfloat16) for x in oracle("gated_mlp_fp8", arguments, summed)]
        yield Judge("gated_mlp_fp8", arguments, testing)(got).passed


def test_an_entry_between_products_may_be_either_of_two_where_sums_decide():
    """Sums that are 2^-21 off round one of this token's numbers to the next one of bfloat16, and
    that to the next entry of fp8: 9 % of what it makes. Sums that are wrong may not.
    """
    judged = TESTING["gated_mlp_fp8"]
    assert all(verdicts(2.0**-21, judged))
    assert [*verdicts(2.0**-21, replace(judged, flips=None))].count(False) == 1
    assert not all(verdicts(2.0**-8, judged))
