"""The Pallas attention kernels, tier 3: libtpu compiles them for five chips that nobody has to own; none runs here.

This is what sees tiling, VMEM, SMEM and the instructions that a generation lacks; races and bounds it does not see
(`test_tpu_kernels_interpret.py` does). Each chip's programs are compiled in a process of its own, which is this file
run as a script: libtpu is configured by its process's environment, and must not stay in that of other tests.

A normal run samples: one shape for two chips, and what is rejected. `-m slow` compiles every shape for every chip.
"""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclass(frozen=True)
class Shape:
    """A call of the op. `queries`: 1 compiles the decode kernel, more compiles both.

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
    blocks: tuple[tuple[str, int], ...] = ()
    halves: int = 2


MIXED = Shape(tokens=512, queries=512)
SHAPES = {
    "8b": Shape(),
    "8b, largest batch": Shape(tokens=256, requests=256),
    "8b, pages of 16": Shape(page=16),
    "8b, a shard of 8": Shape(heads=4, kv_heads=1),
    "no groups": Shape(heads=8, kv_heads=8),
    "float32": Shape(cache="float32", dtype="float32"),
    "int8": Shape(cache="int8"),
    "fp8": Shape(cache="float8_e4m3fn"),
    "64 lanes": Shape(hdim=64),
    "80 lanes": Shape(hdim=80),
    "96 lanes": Shape(hdim=96),
    "256 lanes, window, soft cap": Shape(heads=16, hdim=256, window=4096, soft_cap=50.0),
    "mixed, 8b": MIXED,
    "mixed, 8b, smallest": Shape(tokens=16, requests=16, queries=16),
    "mixed, 8b, pages of 16": replace(MIXED, page=16),
    "mixed, 8b, a shard of 8": replace(MIXED, heads=4, kv_heads=1),
    "mixed, float32": replace(MIXED, cache="float32", dtype="float32"),
    "mixed, int8": replace(MIXED, cache="int8"),
    "mixed, fp8": replace(MIXED, cache="float8_e4m3fn"),
    "mixed, 64 lanes": replace(MIXED, hdim=64),
    "mixed, 96 lanes": replace(MIXED, hdim=96),
    "mixed, 256 lanes, window, soft cap": replace(MIXED, heads=16, hdim=256, window=4096, soft_cap=50.0),
}
SAMPLED = "mixed, 8b, smallest"  # which has both kernels in it

# 128 x 512 tokens x 16 heads x 128 lanes x 2 bytes = 256 MiB, more than any chip's VMEM.
OVERFLOW = Shape(halves=128)
# 3 tokens x 4 queries of a group: blocks of 12 rows, which are no whole tiles.
UNTILED = replace(MIXED, blocks=(("mixed_tokens", 3),))
REJECTED = {"planted VMEM overflow": (OVERFLOW, "vmem"), "planted bad tiling": (UNTILED, "divisible by 8")}


def compile_shape(shape, device):
    """Compile the op for a device of a topology -> {seconds, temporaries}, or {error} as the compiler words it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from twinfer.tpu.kernels import attention, cache
    from twinfer.tpu.kernels.blocks import block_sizes

    mesh = Mesh(np.array([device]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=place)

    width = 4096 // shape.page
    arguments = (
        array(shape.dtype, shape.tokens, shape.heads, shape.hdim),
        array(shape.cache, 1024, shape.page, 2 * shape.kv_heads, shape.hdim),
        array("int32", shape.requests, width),
        array("int32", shape.requests + 1),
        array("int32", shape.requests),
        array("int32", 2),
    )
    rest = (shape.hdim**-0.5, shape.window, shape.soft_cap, shape.queries, 0.5, 0.25)
    start = time.perf_counter()
    # The kernels' lowering asks the abstract mesh for the generation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if not attention.on_tpu() or not attention.compiles(*arguments, *rest):
            return {"error": "the provider does not take this"}
        blocks = replace(block_sizes(attention.target_kind()), **dict(shape.blocks))
        try:
            with planted(cache.CacheShape, shape.halves):
                lowered = jax.jit(lambda *given: attention.attend(*given, *rest, False, blocks)).lower(*arguments)
            compiled = lowered.compile()
        except Exception as error:  # the compiler raises several kinds
            return {"error": f"{type(error).__name__}: {error}"[:4000]}
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    seconds = time.perf_counter() - start
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {"seconds": seconds, "temporaries": temporaries, "kernels": kernels}


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
    from twinfer.tpu.platforms import leave_out_libtpu, topology

    leave_out_libtpu()
    device = topology(CHIPS[chip]).devices[0]
    known = SHAPES | {name: shape for name, (shape, _) in REJECTED.items()}
    print(json.dumps({"kind": device.device_kind} | {name: compile_shape(known[name], device) for name in names}))


def results(chip, *names):
    command = [sys.executable, __file__, chip, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, names):
    assert {name: found[name]["error"] for name in names if "error" in found[name]} == {}
    for name in names:
        shape = SHAPES[name]
        assert found[name]["kernels"] == (1 if shape.queries == 1 else 2), name
        # The queries may be copied, to bring heads together, but not the cache. Heads of less than 128
        # lanes are left out: they have temporaries as large as the cache (docs/measurements.md).
        if shape.hdim % 128 == 0:
            queries = shape.tokens * shape.heads * shape.hdim * (4 if shape.dtype == "float32" else 2)
            assert found[name]["temporaries"] < queries + (1 << 20), f"{name}: {found[name]}"


pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


def test_one_shape_for_the_oldest_chip():
    check(results("v4", SAMPLED), [SAMPLED])


def test_one_shape_and_what_is_rejected():
    """A buffer that no chip holds and a block of broken tiles do not compile, where their sound twin does."""
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
