"""Implementations whose rows do not depend on the batch, where no case of the contracts has looked:
at every place of a block, at odd widths, in another layout, and with no rows at all.
"""

import numpy as np
import pytest

from twinfer.ops import resolve
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
