"""Shapes in words: what is read, what is refused, and that every op's cases have the shapes that
the op says.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.ops import REGISTRY, OpError, define
from twinfer.ops.cases import load_all
from twinfer.ops.declare import Array, Registry
from twinfer.ops.dimensions import ShapesError, parse
from twinfer.ops.shapes import without_data
from twinfer.ops.testing import TESTING, ci_cases, oracle
from twinfer.shared.step import HOST_LENGTHS

load_all()


def zeros(*shape):
    return np.zeros(shape, np.float32)


def empty(like, shape, dtype=None):
    return np.zeros(shape, dtype or like.dtype)


@pytest.mark.parametrize("op", list(REGISTRY), ids=lambda op: op.name)
def test_every_op_says_the_shapes_that_its_cases_have(op):
    """Ranks and sizes of all arguments and results; the dtypes of results where the oracle keeps
    them.
    """
    assert op.shapes is not None
    make = without_data(op, empty)
    for case in ci_cases(TESTING[op.name], TESTING[op.name].dtypes[0]):
        bound = op.signature.bind(**case.arguments)
        bound.apply_defaults()
        want = oracle(op.name, case.arguments)
        got = make(**bound.arguments)
        got = (got,) if op.gives_one else got
        assert [x.shape for x in got] == [x.shape for x in want], case.name
        for x, y in zip(got, want, strict=True):
            assert x.dtype == y.dtype or (y.dtype == np.float64 and x.dtype.kind not in "iub"), (
                case.name
            )


@pytest.mark.parametrize("op", list(REGISTRY), ids=lambda op: op.name)
def test_an_array_of_another_rank_is_refused(op):
    case = next(iter(ci_cases(TESTING[op.name], TESTING[op.name].dtypes[0])))
    for name, axes in op.shapes.arrays.items():
        if case.arguments.get(name) is not None:
            wrong = np.zeros(()) if axes.leading else case.arguments[name][None]
            with pytest.raises(OpError, match=rf"op '{op.name}': {name} is "):
                without_data(op, empty)(**case.arguments | {name: wrong})


def test_the_worker_keeps_on_the_host_what_ops_read_there():
    assert {name for op in REGISTRY for name in op.host} == set(HOST_LENGTHS)


@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        (
            "linear",
            {"x": zeros(3, 4), "weight": zeros(5, 6), "bias": None},
            r"weight is \[n k\], where n is 5, k is 4",
        ),
        (
            "linear",
            {"x": zeros(3, 4), "weight": zeros(5, 4), "bias": zeros(4)},
            r"bias is \[n\], where n is 5; got \[4\]",
        ),
        ("silu_and_mul", {"x": zeros(3, 5)}, r"2\*inter cannot be 5"),
        (
            "rms_norm",
            {"x": zeros(2, 3, 4), "weight": zeros(3), "eps": 1e-6},
            r"weight is \[n\], where n is 4; got \[3\]",
        ),
        (
            "gated_rms_norm",
            {"x": zeros(2, 3, 4), "gate": zeros(3, 3, 4), "weight": zeros(4)},
            r"gate is \[\.\.\. n\]",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(op, arguments, words):
    with pytest.raises(OpError, match=words):
        without_data(REGISTRY[op], empty)(**arguments)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 8)
)
def test_what_an_expression_lacks_is_solved_for(tokens, pages, heads, kv_heads, size):
    """The heads of queries stand in the fused projection alone."""
    qkv, kv = zeros(tokens, (heads + 2 * kv_heads) * size), zeros(pages, 2, 2 * kv_heads, size)
    sizes = REGISTRY["norm_rope_write_kv"].shapes.sizes({"qkv": qkv, "kv": kv})
    assert (sizes["head"], sizes["kvhead"], sizes["hdim"], sizes["tok"]) == (
        heads,
        kv_heads,
        size,
        tokens,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x [tok dim]", "no ->"),
        ("x tok -> [tok] x", "cannot be read"),
        ("x [tok dim], y [dim] -> [tok] x", "the arrays are x"),
        ("-> [tok] x", "the arrays are x"),
        ("x [tok dim] -> [row] x", "nothing gives row"),
        ("x [tok dim] -> [tok] z", "nothing gives z"),
        ("x [tok dim] -> [tok]", "is no result"),
        ("x [tok-1] -> [tok] x", "names, numbers"),
        ("x [tok().a] -> x", "names, numbers"),
        ("x [2* n] -> x", "is no dimension"),
    ],
)
def test_what_cannot_be_read_is_refused(text, words):
    with pytest.raises(ShapesError, match=words):
        parse(text, ("x",), ())


def test_a_declaration_that_contradicts_itself_is_refused():
    def double(xp: object, x: Array) -> Array:
        return x + x

    def both(xp: object, x: Array) -> tuple[Array, Array]:
        return x, x

    for function, properties, words in (
        (double, {"shapes": "x [n] -> [n] x, [n] x"}, "2 results"),
        (both, {"shapes": "x [n] -> [n] x"}, "1 results"),
        (double, {"shapes": "x [n] -> [m] x"}, "nothing gives m"),
        (double, {"shapes": "x [n] -> x", "shards": ("head",)}, "head"),
        (double, {"shapes": "x [n] -> x", "host": ("y",)}, "host metadata"),
    ):
        with pytest.raises(OpError, match=words):
            define(registry=Registry(), **properties)(function)
