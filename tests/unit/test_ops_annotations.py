"""Annotations mean the same as texts and as objects, and one that means nothing is refused where
it stands.
"""

import numpy as np
import pytest

from twinfer.ops import REGISTRY, OpError, implement
from twinfer.ops.annotations import PARAMETERS
from twinfer.ops.declare import Registry
from twinfer.ops.implement import IMPLEMENTATIONS

FUTURE = "from __future__ import annotations\n"
IMPORTS = {"objects": "", "texts": FUTURE}
OP = """
from typing import Any, Optional, Union
from twinfer.ops import define
from twinfer.ops.declare import Array

@define(registry=registry, level="coarse")
def outside(
    ops: Any, x: Array, y: Array | None, z: Optional[Array], n: int, eps: float, on: bool, mode: str = "a"
) -> tuple[Array, Array]:
    return x, x
"""
ONLY_FOR_TYPE_CHECKERS = """
from typing import TYPE_CHECKING
from twinfer.ops import define
if TYPE_CHECKING:
    from twinfer.ops.declare import Array

@define(registry=registry)
def outside(xp, x: "Array", y: "Array | None", n: "int") -> "Array":
    return x
"""
IMPLEMENTATION = """
from twinfer.ops import implement
from twinfer.ops.declare import Array

def few(x: Array, weight: Array, eps: float) -> bool:
    return True

@implement("rms_norm", provider="outside", framework="torch", supports_args=few)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x
"""


def run(text, **names):
    exec(compile(text, "<outside>", "exec", dont_inherit=True), names)


def define_outside(text):
    registry = Registry()
    run(text, registry=registry)
    return registry["outside"]


@pytest.mark.parametrize("future", IMPORTS.values(), ids=IMPORTS)
def test_an_op_is_the_same_with_texts_and_with_objects(future):
    op = define_outside(future + OP)
    kinds = {name: p.annotation for name, p in op.signature.parameters.items()}
    assert kinds == {
        "x": "Array", "y": "Array | None", "z": "Array | None", "n": "int", "eps": "float",
        "on": "bool", "mode": "str"
    }  # fmt: skip
    assert op.static_parameters == ("n", "eps", "on", "mode")
    assert op.signature.return_annotation == "tuple[Array, Array]"


@pytest.mark.parametrize("future", IMPORTS.values(), ids=IMPORTS)
def test_what_is_imported_for_type_checkers_only_is_known(future):
    op = define_outside(future + ONLY_FOR_TYPE_CHECKERS)
    assert [p.annotation for p in op.signature.parameters.values()] == [
        "Array",
        "Array | None",
        "int",
    ]


@pytest.mark.parametrize("future", IMPORTS.values(), ids=IMPORTS)
def test_an_implementation_is_the_same_with_texts_and_with_objects(future, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, ("rms_norm", "torch"), {})
    run(future + IMPLEMENTATION)
    assert "outside" in IMPLEMENTATIONS["rms_norm", "torch"]
    for wrong in ("eps: int", "eps: Array | None", "eps"):
        with pytest.raises(OpError, match="another schema"):
            run(future + IMPLEMENTATION.replace("eps: float", wrong))


@pytest.mark.parametrize("future", IMPORTS.values(), ids=IMPORTS)
@pytest.mark.parametrize(
    "wrong",
    [
        "",
        ": Any",
        ": list[int]",
        ": Array | int",
        ": 'no type'",
        ": tuple[int, ...]",
        ": Optional[int]",
    ],
)
def test_an_annotation_that_means_nothing_is_refused_with_the_known_ones(future, wrong):
    with pytest.raises(OpError) as error:
        define_outside(future + OP.replace("n: int", f"n{wrong}"))
    said = str(error.value)
    assert "'outside': n has" in said
    assert all(word in said for word in PARAMETERS)


def test_all_ops_of_ours_are_in_words():
    for op in REGISTRY:
        assert {p.annotation for p in op.signature.parameters.values()} <= {*PARAMETERS}, op.name


def test_an_implementation_bound_to_values_keeps_its_annotations(monkeypatch):
    from functools import partial

    from twinfer.ops.declare import Array

    def general(block: int, x: Array) -> Array:
        return np.asarray(x) * block

    monkeypatch.setitem(IMPLEMENTATIONS, ("silu_and_mul", "numpy"), {})
    implement("silu_and_mul", provider="outside", framework="numpy")(partial(general, 64))
