"""A projection of int8 by int8 without a bias has the same bits on every backend: tokens are
quantised bitwise alike, sums are integers, and two products in float32 follow in a fixed order.
"""

import numpy as np
import pytest

from twinfer.ops.cases import load_all
from twinfer.ops.cases.generators import normal
from twinfer.ops.cases.quantized import quantized
from twinfer.ops.testing import run

load_all()


def projected(framework, dtype, rows, device="cpu", bias=None):
    """Rows of tokens quantised and multiplied, in the run dtype."""
    rng = np.random.default_rng(7)
    x = normal(rng, dtype, rows, 1000)
    weight, scale = quantized("int8", normal(rng, "float32", 300, 1000), "row")
    values, x_scale = run(
        "quantize_int8_dynamic", framework, None, {"x": x, "per": "row", "block": 0}, device
    )
    arguments = {"x": values, "x_scale": x_scale, "weight": weight, "weight_scale": scale}
    arguments |= {"bias": bias, "dtype": dtype}
    return run("linear_int8", framework, None, arguments, device)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_same_bits_on_all_backends(dtype, rows, device):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    numpy = projected("numpy", dtype, rows)
    assert numpy.tobytes() == projected("torch", dtype, rows, device).tobytes()
    assert numpy.tobytes() == projected("jax", dtype, rows).tobytes()


def test_other_products_have_not():
    """What makes it so: the same product in float32 differs, by the order of its sums."""
    rng = np.random.default_rng(7)
    x, weight = normal(rng, "float32", 5, 1000), normal(rng, "float32", 300, 1000)
    given = {"x": x, "weight": weight, "bias": None}
    numpy, torch, jax = (
        run("linear", framework, None, given, "cpu")[0] for framework in ("numpy", "torch", "jax")
    )
    assert len({numpy.tobytes(), torch.tobytes(), jax.tobytes()}) > 1
