"""The Pallas kernels, tier 3: libtpu compiles them for five chips that nobody has to own; none runs
here.

What is compiled is a loop over two layers, which writes its buffer and attends over it: so it is
also seen that nothing lays the cache out anew.

This is what sees tiling, VMEM, SMEM and the instructions that a generation lacks; races and bounds
it does not see (`test_tpu_kernels_interpret.py` does). Each chip's programs are compiled in a
process of its own, which is this file run as a script: libtpu is configured by its process's
environment, and must not stay in that of other tests.

A normal run samples: one shape for two chips, and what is rejected. `-m slow` compiles every shape
for every chip.
"""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

PAGES = 1024
CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


@dataclass(frozen=True)
class Shape:
    """A step. `queries`: 1 compiles write and decode, more compiles the mixed kernel too. Caches of
    a byte an entry have a scale for each head.

    `blocks`: fields of BlockSizes. `halves`: of the buffer of pages, of which the kernels use two.
    """

    heads: int = 32
    kv_heads: int = 8
    hdim: int = 128
    page: int = 128
    tokens: int = 64
    requests: int = 64
    queries: int = 1
    cache: str = "bfloat16"
    dtype: str = "bfloat16"
    window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0
    sinks: bool = False
    blocks: tuple[tuple[str, int], ...] = ()
    halves: int = 2


MIXED = Shape(tokens=512, queries=512)
SHAPES = {
    "8b": Shape(),
    "8b, largest batch": Shape(tokens=256, requests=256),
    "8b, pages of 16": Shape(page=16),
    "8b, a shard of 8": Shape(heads=4, kv_heads=1),
    "no groups": Shape(heads=8, kv_heads=8),
    "groups of 7": Shape(heads=28, kv_heads=4),
    "groups of 7, 64 lanes": Shape(heads=14, kv_heads=2, hdim=64),
    "10 KV heads": Shape(heads=40, kv_heads=10),
    "3 KV heads, 64 lanes": Shape(heads=9, kv_heads=3, hdim=64),
    "12 KV heads": Shape(heads=12, kv_heads=12),
    "float32": Shape(cache="float32", dtype="float32"),
    "int8": Shape(cache="int8"),
    "fp8": Shape(cache="float8_e4m3fn"),
    "64 lanes": Shape(hdim=64),
    "64 lanes, a shard of 8": Shape(hdim=64, heads=4, kv_heads=1),
    "64 lanes, int8": Shape(hdim=64, cache="int8"),
    "80 lanes": Shape(hdim=80),
    "96 lanes": Shape(hdim=96),
    "256 lanes, window, soft cap": Shape(heads=16, hdim=256, window=4096, soft_cap=50.0),
    "64 lanes, window, sinks": Shape(heads=64, hdim=64, window=128, sinks=True),
    "chunk": Shape(heads=40, chunk=1024),
    "512 lanes": Shape(heads=32, kv_heads=4, hdim=512),
    "512 lanes, one KV head": Shape(heads=8, kv_heads=1, hdim=512),
    "mixed, 8b": MIXED,
    "mixed, 8b, smallest": Shape(tokens=16, requests=16, queries=16),
    "mixed, 8b, pages of 16": replace(MIXED, page=16),
    "mixed, 8b, a shard of 8": replace(MIXED, heads=4, kv_heads=1),
    "mixed, groups of 7": replace(MIXED, heads=28, kv_heads=4),
    "mixed, float32": replace(MIXED, cache="float32", dtype="float32"),
    "mixed, int8": replace(MIXED, cache="int8"),
    "mixed, int8, a shard of 4": replace(MIXED, heads=8, kv_heads=2, cache="int8"),
    "mixed, fp8": replace(MIXED, cache="float8_e4m3fn"),
    "mixed, 64 lanes": replace(MIXED, hdim=64),
    "mixed, 80 lanes, a shard of 4": replace(MIXED, hdim=80, heads=8, kv_heads=2),
    "mixed, 96 lanes": replace(MIXED, hdim=96),
    "mixed, 256 lanes, window, soft cap": replace(
        MIXED, heads=16, hdim=256, window=4096, soft_cap=50.0
    ),
    "mixed, 256 lanes, a shard of 8": replace(MIXED, heads=2, kv_heads=1, hdim=256),
    "mixed, 64 lanes, window, sinks": replace(MIXED, heads=64, hdim=64, window=128, sinks=True),
    "mixed, chunk": replace(MIXED, heads=40, chunk=1024),
    "mixed, 512 lanes": replace(MIXED, heads=32, kv_heads=4, hdim=512),
    "mixed, 512 lanes, one KV head": replace(MIXED, heads=8, kv_heads=1, hdim=512),
}
SAMPLED = "mixed, 8b, smallest"  # which has all kernels in it

# 128 x 512 tokens x 16 heads x 128 lanes x 2 bytes = 256 MiB, more than any chip's VMEM.
OVERFLOW = Shape(halves=128)
# 3 tokens x 4 queries of a group: blocks of 12 rows, which are no whole tiles.
UNTILED = replace(MIXED, blocks=(("mixed_tokens", 3),))
REJECTED = {
    "planted VMEM overflow": (OVERFLOW, "vmem"),
    "planted bad tiling": (UNTILED, "divisible by 8"),
}


def compile_shape(shape, device):
    """Compile two layers for a device of a topology -> {seconds, temporaries, kernels}, or
    {error} as it is worded.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.layout import Format
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from twinfer.tpu.kernels import attention, cache, write
    from twinfer.tpu.kernels.blocks import block_sizes
    from twinfer.tpu.kv_buffer import ROW_MAJOR

    mesh = Mesh(np.array([device]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *dims, where=place):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=where)

    form = cache.slot_dims(shape.kv_heads, shape.hdim, shape.cache)
    kv = array(shape.cache, PAGES, shape.page, *form, where=Format(ROW_MAJOR, place))
    rows = array(shape.dtype, shape.tokens, shape.kv_heads, shape.hdim)
    arguments = (
        array(shape.dtype, shape.tokens, shape.heads, shape.hdim),
        array(shape.cache, PAGES, shape.page, 2 * shape.kv_heads, shape.hdim),
        array("int32", shape.requests, 4096 // shape.page),
        array("int32", shape.requests + 1),
        array("int32", shape.requests),
        array("int32", 2),
    )
    by_head = {}
    if shape.cache in ("int8", "float8_e4m3fn"):
        by_head = {name: array("float32", shape.kv_heads) for name in ("k_scale", "v_scale")}
    if shape.sinks:
        by_head["sinks"] = array("float32", shape.heads)
    rest = (shape.hdim**-0.5, shape.window, shape.soft_cap, shape.queries)

    def layers(kv, k, v, slots, q, table, start, lens, counts, by_head):
        scales = by_head.get("k_scale"), by_head.get("v_scale")

        def layer(state, index):
            kv, q = state
            kv = kv.reshape(arguments[1].shape)
            kv = write.write(kv, k, v, slots + index, *scales, False)
            given = q, kv, table + index, start, lens, counts, *rest, *scales, False, blocks
            out = attention.attend(*given, sinks=by_head.get("sinks"), chunk=shape.chunk)
            return (kv.reshape(PAGES, shape.page, *form), out), None

        return jax.lax.scan(layer, (kv, q), jnp.arange(2, dtype=jnp.int32))[0]

    start = time.perf_counter()
    slots = array("int32", shape.tokens)
    # The kernels' lowering asks the abstract mesh for the generation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        taken = (
            attention.compiles(*arguments, *rest, **by_head, chunk=shape.chunk),
            write.compiles(arguments[1], rows, rows, slots),
        )
        if not attention.on_tpu() or not all(taken):
            return {"error": f"the providers do not take this: {taken}"}
        blocks = replace(block_sizes(attention.target_kind()), **dict(shape.blocks))
        try:
            with planted(cache.CacheShape, shape.halves):
                program = jax.jit(layers, donate_argnums=0, out_shardings=(kv.format, place))
                given = kv, rows, rows, slots, arguments[0], *arguments[2:], by_head
                lowered = program.lower(*given)
            compiled = lowered.compile()
        except Exception as error:  # the compiler raises several kinds
            return {"error": f"{type(error).__name__}: {error}"[:4000]}
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    memory = compiled.memory_analysis()
    return {
        "seconds": time.perf_counter() - start, "kernels": kernels,
        "temporaries": memory.temp_size_in_bytes,
        "cache": memory.alias_size_in_bytes,
    }  # fmt: skip


@contextmanager
def planted(cache, halves):
    """Buffers of `halves` halves."""
    real = cache.scratch

    def scratch(self):
        from jax.experimental.pallas import tpu as pltpu

        buffer, *others = real(self)
        return pltpu.VMEM((halves, *buffer.shape[1:]), buffer.dtype), *others

    cache.scratch = scratch
    try:
        yield
    finally:
        cache.scratch = real


def compile_all(chip, names):
    """As a script: the results of shapes by name, as JSON."""
    from twinfer.tpu.chips import CHIPS as table
    from twinfer.tpu.platforms import leave_out_libtpu, topology

    leave_out_libtpu()
    device = topology(CHIPS[chip]).devices[0]
    assert device.device_kind == table[chip].kind  # the names of tpu/chips.py are JAX's
    known = SHAPES | {name: shape for name, (shape, _) in REJECTED.items()}
    print(
        json.dumps(
            {"kind": device.device_kind}
            | {name: compile_shape(known[name], device) for name in names}
        )
    )


def results(chip, *names):
    command = [sys.executable, __file__, chip, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, names):
    assert {name: found[name]["error"] for name in names if "error" in found[name]} == {}
    for name in names:
        shape = SHAPES[name]
        assert found[name]["kernels"] == (2 if shape.queries == 1 else 3), name
        # Queries and results may be copied, to bring heads together, as may the step's own K and V,
        # to be laid out as slots; but not the cache, which is written in place.
        queries = (
            shape.tokens
            * shape.heads
            * max(128, shape.hdim)
            * (4 if shape.dtype == "float32" else 2)
        )
        bytes_each = {"float32": 4, "bfloat16": 2}.get(shape.cache, 1)
        slots = shape.tokens * 2 * shape.kv_heads * max(128, shape.hdim) * bytes_each
        assert found[name]["temporaries"] < 4 * queries + slots + (1 << 20), (
            f"{name}: {found[name]}"
        )
        joint = shape.hdim == 64 and shape.kv_heads * bytes_each % 4 == 0
        lanes = 64 if joint else -(-shape.hdim // 128) * 128
        assert (
            found[name]["cache"] == PAGES * shape.page * 2 * shape.kv_heads * lanes * bytes_each
        ), name


pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
def test_one_shape_for_the_oldest_chip():
    check(results("v4", SAMPLED), [SAMPLED])


def test_one_shape_and_what_is_rejected():
    """A buffer that no chip holds and a block of broken tiles do not compile, where their sound
    twin does.
    """
    found = results("v6e", SAMPLED, *REJECTED)
    check(found, [SAMPLED])
    for name, (_, why) in REJECTED.items():
        assert why in found[name].get("error", "accepted").lower(), f"{name}: {found[name]}"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shape(chip):
    check(results(chip, *SHAPES), SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(set(CHIPS) - {"v6e"}))
def test_what_every_chip_rejects(chip):
    found = results(chip, *REJECTED)
    for name, (_, why) in REJECTED.items():
        assert why in found[name].get("error", "accepted").lower(), f"{name}: {found[name]}"


if __name__ == "__main__":
    compile_all(sys.argv[1], sys.argv[2:])
