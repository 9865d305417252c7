"""Implementations whose rows do not depend on the batch, where no case of the contracts has looked:
at every place of a block, at odd widths, in another layout, and with no rows at all.
"""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from twinfer.ops import REGISTRY, resolve
from twinfer.ops.declare import OpError
from twinfer.ops.implement import ROWS
from twinfer.ops.testing import run

FRAMEWORKS = ["torch", "jax"]
ODD = [17, 66]
"""Entries of a row that begins elsewhere than at a whole number of 16 bytes."""


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def all_equal(rows):
    return len({row.tobytes() for row in rows}) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("k", ODD)
def test_a_product_is_the_same_at_every_place(framework, k):
    x, weight = np.repeat(normal(0, 1, k), 40, axis=0), normal(1, 6, k)
    (found,) = run("linear", framework, ROWS, {"x": x, "weight": weight, "bias": None})
    assert all_equal(found)
    (found,) = run("logits", framework, ROWS, {"x": x, "weight": weight})
    assert all_equal(found)
    sizes = {"weight": np.stack([weight, weight]), "group_sizes": np.array([19, 21], np.int32)}
    (found,) = run("grouped_matmul", framework, ROWS, {"x": x} | sizes)
    assert all_equal(found)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("k", ODD)
def test_attention_is_the_same_at_every_place(framework, k):
    """A request twenty times: its last tokens see the same pages."""
    count, heads, tokens = 20, 3, 7
    arguments = {
        "q": np.repeat(normal(2, 1, heads, k), count, axis=0),
        "kv": normal(3, 4, 4, 2, k),
        "page_table": np.repeat(np.array([[2, 1]], np.int32), count, axis=0),
        "query_start": np.arange(count + 1, dtype=np.int32),
        "kv_lens": np.full(count, tokens, np.int32),
        "counts": np.array([count, count], np.int32),
        "scale": k**-0.5, "window": 0, "soft_cap": 0.0, "max_query_len": 1,
    }  # fmt: skip
    (found,) = run("paged_attention", framework, ROWS, arguments)
    assert all_equal(found)


def test_the_layout_of_rows_changes_no_bit():
    x, weight = normal(4, 16, 64), normal(5, 64)
    found = [
        run("rms_norm", "torch", ROWS, {"x": rows, "weight": weight, "eps": 1e-5})[0].tobytes()
        for rows in (x, np.asfortranarray(x))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_rows_have_no_products(framework):
    sizes = {"weight": normal(6, 3, 5, 8), "group_sizes": np.zeros(3, np.int32)}
    (found,) = run("grouped_matmul", framework, ROWS, {"x": normal(7, 0, 8)} | sizes)
    assert found.shape == (0, 5)


def test_a_refusal_says_what_the_user_took_away():
    plan = resolve("torch", enable=("all", "-linear"), row_invariant=True)
    with pytest.raises(OpError, match=r"rows \(the op is disabled\)"):
        plan["linear"].implementation.function()


class Places(TorchFunctionMode):
    """Counts sums over the last axis, and those whose rows do not all begin as the first one."""

    def __init__(self):
        super().__init__()
        self.sums, self.uneven = 0, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.sum, torch.mean) and args[0].is_floating_point():
            x, axis = args
            if axis in (-1, x.ndim - 1):
                self.sums += 1
                self.uneven += any(n * x.itemsize % 16 for n in x.stride()[:-1])
        return function(*args, **kwargs)


@pytest.mark.parametrize("width", [131, 1022])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("top_logprobs", {"chosen": np.arange(40, dtype=np.int32)}),
        ("unit_rms_norm", {"eps": 1e-6}),
        ("layer_norm", {"weight": None, "bias": None, "eps": 1e-6}),
        ("moe_route", {"slots": np.zeros(40, np.int32), "top_k": 2, "renormalize": False}),
    ],
)
def test_a_sum_reads_all_rows_alike(op, arguments, width):
    """On GPUs torch reads what it sums up by 16 bytes, and what lies before the first such place of
    a row by itself: the last bit of a log-probability depended on which row it was.
    """
    name = next(iter(REGISTRY[op].signature.parameters))
    given = {name: normal(0, 40, width), **arguments}
    with Places() as places:
        found = run(op, "torch", ROWS, given)
    assert places.sums > 0
    assert places.uneven == 0
    for a, b in zip(found, run(op, "torch", "native", given), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
