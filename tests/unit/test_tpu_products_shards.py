"""Products with narrow weights on 2 and 4 virtual devices, by the Pallas kernel interpreted: what
shards give together is within the op's bounds. Devices are counted when JAX starts, so that the
cases run in a process of their own, which is this file run as a script.
"""

import json
import os
import subprocess
import sys

import pytest

KINDS = (("int8", False), ("fp8", False), ("int4", False), ("int4", True), ("fp4", False))
EXACT = "whole numbers"
ROWS = ("x", "weights", "experts")
DEALT = {"rows": 0, "entries": 1, "nothing": None}


def cases(op, dtype):
    """By name."""
    yield from CASES[op](dtype)


def fp8_cases(dtype):
    """Tokens that are quantised there, and those with scales of rows, of all, and of blocks."""
    from twinfer.ops.cases.families import normal
    from twinfer.ops.cases.quantized import _linear_case, _unquantised, quantized, rows

    yield "tokens as they come", _unquantised(dtype, 7, True)
    for per in ("row", "tensor"):
        yield f"x per {per}", _linear_case("fp8", dtype, per == "row", per, n=32, k=192)
    weight, of_blocks = quantized("fp8", normal(54, "float32", 32, 192), "block", 24)
    for per in ("row", "block"):
        x, x_scale = quantized("fp8", rows(53, "float32", 7, 192, scale=1.0), per, 24)
        yield f"x per {per}, the weight per block", {
            "x": x, "weight": weight, "x_scale": x_scale, "weight_scale": of_blocks,
            "bias": normal(55, dtype, 32), "dtype": dtype,
        }  # fmt: skip


def expert_cases(dtype):
    """Eight experts of each kind, by scales of rows with biases in turns, and of groups; choices of
    no expert.
    """
    import numpy as np

    from twinfer.ops.cases.families import normal
    from twinfer.ops.cases.moe import _chosen, _named, _narrow

    rng = np.random.default_rng(12)
    x, chosen = normal(57, dtype, 7, 96), _chosen(rng.normal(size=(7, 8)), 3, True)
    chosen["experts"][::2, 1] = -1
    for kind in ("plain", "int8", "fp8", "int4", "fp4"):
        for alpha, groups in ((1.702, 1), (0.0, 2)):
            given = {"x": x, **chosen, "kind": kind, "alpha": alpha, "limit": 0.9 if alpha else 0.0}
            for name, n, k in (("gate_up", 128, 96), ("down", 96, 64)):
                weight = _narrow(rng, kind, dtype, groups, 8, n, k)
                bias = rng.normal(size=(8, n)).astype(x.dtype) if alpha else None
                given |= _named(name, weight, bias)
            yield f"{kind}, {groups} groups", given


def grouped_cases(dtype):
    """Of each kind, with scales for rows, and with scales for groups and a bias."""
    from twinfer.ops.cases.families import normal
    from twinfer.ops.cases.quantized import _grouped_case, rows

    for kind, zeros in KINDS:
        for groups in (1, 4):
            made = _grouped_case(kind, dtype, groups, zeros, 192)
            # Of 33 rows 32 can be dealt out.
            made |= {n: x[:32] for n, x in made.items() if n != "kind" and x is not None}
            bias = normal(55, dtype, 32) if groups > 1 else None
            given = {"x": rows(56, dtype, 7, 192, scale=1.0), **made, "bias": bias}
            yield f"{kind}, {groups} groups" + ", zeros" * zeros, given
    yield EXACT, whole_numbers(dtype)


def whole_numbers(dtype):
    """A product whose parts and sums float32 holds exactly: what is rounded more than once shows."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(5)
    return {
        "x": np.asarray(jnp.asarray(rng.integers(-99, 99, (7, 192)), dtype)),
        "weight": rng.integers(-127, 128, (32, 192)).astype(np.int8),
        "scale": np.ones((32, 1), np.float32),
        "zero": None,
        "bias": np.asarray(jnp.asarray(rng.integers(-99, 99, 32), dtype)),
        "kind": "int8",
    }


CASES = {
    "linear_grouped": grouped_cases,
    "linear_fp8": fp8_cases,
    "moe_experts_narrow": expert_cases,
}
FINER = {"moe_experts_narrow": "grouped_linear"}
"""What runs by the kernel, where it is not the op itself."""


def right(op, name, given, out):
    """Whether a result is what it should be: within the bounds, or the very numbers."""
    import numpy as np

    from twinfer.ops.testing import Judge, oracle

    if name == EXACT:
        (want,) = oracle(op, given)
        return np.array_equal(want.astype(out.dtype), out)
    return Judge(op, given)([out]).passed


def failures(op, shards, dealt, dtype):
    """(how many cases there are, those whose results on a mesh the op's judge rejects)."""
    import jax
    import jax.numpy as jnp

    from twinfer.ops import Plan, resolve
    from twinfer.ops.cases import load_all
    from twinfer.ops.namespaces.jax_ import InStack
    from twinfer.tpu import kernels  # noqa: F401 - registers the providers
    from twinfer.tpu.binding import bind_on
    from twinfer.tpu.sharding import make_mesh

    load_all()
    plan = resolve("jax", {FINER.get(op, op): ("pallas_interpret",)})
    if op not in FINER:
        plan = Plan("jax", {op: plan[op]})
    ops = bind_on(plan, make_mesh(jax.devices(), shards))
    every, wrong = dict(cases(op, dtype)), []
    for name, given in every.items():
        arrays = {n: jnp.asarray(x) for n, x in given.items() if hasattr(x, "shape")}
        read = [n for n in arrays if n not in ROWS] if op in FINER else ["weight"]
        for name_of in read:
            stack = jnp.stack([jnp.zeros_like(arrays[name_of]), arrays[name_of]])
            arrays[name_of] = InStack(stack, jnp.int32(1), DEALT[dealt])
        out = getattr(ops, op)(**given | arrays)
        if not right(op, name, given, jax.device_get(out)):
            wrong.append(name)
    return len(every), wrong


def faults(op):
    """By name: a module, and what replaces one of its functions, which each shard calls."""
    import jax
    import jax.numpy as jnp

    from twinfer.tpu import binding
    from twinfer.tpu.kernels import experts, narrow

    multiply = narrow.multiply
    around = [(i, (i + 1) % 4) for i in range(4)]

    def of_neighbour(x, weight, layer, scale, *rest, **how):
        return multiply(x, weight, layer, jax.lax.ppermute(scale, "tp", around), *rest, **how)

    def rounded(x, *rest, **how):
        y = multiply(x, *rest, **how)
        return y.astype(jnp.bfloat16).astype(y.dtype)

    if op == "moe_experts_narrow":
        by_experts = experts.multiply

        def of_others(x, weight, layer, scale, *rest, **how):
            other = jax.lax.ppermute(scale, "tp", around)
            return by_experts(x, weight, layer, other, *rest, **how)

        return {
            "the scales of a neighbour": (experts, "multiply", of_others),
            "no sum": (jax.lax, "psum", lambda y, _: y),
            "experts counted from that of the first shard": (
                binding, "_with_own_experts", lambda _, arrays: arrays
            ),
        }  # fmt: skip
    if op == "linear_fp8":
        by_each = lambda xp, x, *_: (x, None)  # noqa: E731
        return {"scales of parts of rows": (binding, "quantize_fp8_dynamic", by_each)}
    return {
        "the scales of a neighbour": (narrow, "multiply", of_neighbour),
        "no sum": (jax.lax, "psum", lambda y, _: y),
        "parts rounded before they are added": (narrow, "multiply", rounded),
    }


def main(op, shards, planted):
    found, given = {}, (op, int(shards))
    if planted:
        for fault, (module, name, replaced) in faults(op).items():
            real = getattr(module, name)
            setattr(module, name, replaced)
            found[fault] = failures(*given, "rows" if op in FINER else "entries", "bfloat16")
            setattr(module, name, real)
    else:
        for dtype in ("float32", "bfloat16"):
            for dealt in ["rows"] if op in FINER else DEALT:
                found[f"{dealt}, {dtype}"] = failures(*given, dealt, dtype)
    print(json.dumps(found))


def results(op, shards, planted=""):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, __file__, op, str(shards), planted],
        env=os.environ | flags, capture_output=True, text=True, timeout=500, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(("op", "count"), [("linear_grouped", 11), ("linear_fp8", 5)])
def test_shards_give_the_product_together(op, count, shards):
    """Whichever dimension of the weight is dealt out."""
    found = results(op, shards)
    assert len(found) == 6
    assert {name: of for name, of in found.items() if of != [count, []]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_give_what_experts_do_together(shards):
    found = results("moe_experts_narrow", shards)
    assert found == {f"rows, {dtype}": [10, []] for dtype in ("float32", "bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "count"), [("linear_grouped", 3), ("linear_fp8", 1), ("moe_experts_narrow", 3)]
)
def test_shards_that_do_something_else_are_rejected(op, count):
    found = results(op, 4, "planted")
    assert len(found) == count
    assert {fault: of for fault, of in found.items() if not of[1]} == {}


if __name__ == "__main__":
    main(*sys.argv[1:])
