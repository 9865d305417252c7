"""The Pallas kernels of products, tier 3: libtpu compiles them for five chips that nobody has to
own; none runs here.

What is compiled is a loop over two layers whose weights lie in one stack: so it is also seen that
nothing takes a layer's weights out of it, nor lays them out anew. Each chip's programs are compiled
in a process of its own, which is this file run as a script.

A normal run samples: one shape of each kernel, and what is rejected. `-m slow` compiles every shape
for every chip.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

import pytest

CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


@dataclass(frozen=True)
class Mixture:
    """Rows, their length and columns, and how many experts."""

    rows: int
    experts: int
    n: int
    k: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Narrow:
    """A projection of `tokens` tokens, k to n; `group` entries share a scale, 0: all of a row."""

    tokens: int
    n: int
    k: int
    kind: str
    group: int = 0
    zeros: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class NarrowMixture:
    """As `Mixture`, of weights as `Narrow` has them; biases where `biases` says so."""

    rows: int
    experts: int
    n: int
    k: int
    kind: str
    group: int = 0
    zeros: bool = False
    biases: bool = False
    dtype: str = "bfloat16"


SHAPES = {
    "qwen3-30b gate and up, 64 requests": Mixture(512, 128, 1536, 2048),
    "qwen3-30b down, 64 requests": Mixture(512, 128, 2048, 768),
    "qwen3-30b, 1 request": Mixture(8, 128, 1536, 2048),
    "qwen3-30b, 2048 tokens": Mixture(16384, 128, 1536, 2048),
    "qwen3-30b, a shard of 8": Mixture(512, 16, 1536, 2048),
    "gemma4-26b gate and up, 64 requests": Mixture(512, 128, 1408, 2816),
    "gemma4-26b down, 64 requests": Mixture(512, 128, 2816, 704),
    "gemma4-26b down, a shard of 8": Mixture(512, 16, 2816, 704),
    "mixtral gate and up": Mixture(128, 8, 28672, 4096),
    "mixtral down": Mixture(128, 8, 4096, 14336),
    "float32": Mixture(40, 8, 256, 512, "float32"),
    "8b int8 gate and up": Narrow(64, 28672, 4096, "int8"),
    "8b int8 down": Narrow(64, 4096, 14336, "int8"),
    "8b int8, 2048 tokens": Narrow(2048, 6144, 4096, "int8"),
    "8b int8, 1 token": Narrow(1, 6144, 4096, "int8"),
    "fp8 in groups of 128": Narrow(64, 6144, 4096, "fp8", 128),
    "int4 in groups of 128": Narrow(64, 6144, 4096, "int4", 128),
    "int4 in groups of 128, zeros": Narrow(512, 4096, 14336, "int4", 128, True),
    "int4 in groups of 32": Narrow(64, 4096, 4096, "int4", 32),
    "fp4 in groups of 32": Narrow(8, 4096, 4096, "fp4", 32),
    "fp4 in groups of 16": Narrow(64, 4096, 4096, "fp4", 16),
    "int8, float32": Narrow(16, 1024, 1024, "int8", 0, False, "float32"),
    "qwen3-30b fp8 gate and up, 64 requests": NarrowMixture(512, 128, 1536, 2048, "fp8"),
    "qwen3-30b fp8 down, 64 requests": NarrowMixture(512, 128, 2048, 768, "fp8"),
    "qwen3-30b fp8 in blocks, 512 tokens": NarrowMixture(4096, 128, 1536, 2048, "fp8", 128),
    "qwen3-30b int4 gate and up, 64 requests": NarrowMixture(512, 128, 1536, 2048, "int4", 128),
    "qwen3-30b int4 down, a shard of 4": NarrowMixture(512, 32, 2048, 768, "int4", 128),
    "int4 experts in groups of 32, zeros": NarrowMixture(512, 128, 1536, 2048, "int4", 32, True),
    "gpt-oss-20b gate and up": NarrowMixture(256, 32, 5760, 2880, "fp4", 32, biases=True),
    "gpt-oss-20b down": NarrowMixture(256, 32, 2880, 2880, "fp4", 32, biases=True),
    "gpt-oss-20b down, 512 tokens": NarrowMixture(2048, 32, 2880, 2880, "fp4", 32, biases=True),
    "gpt-oss-20b down, 1 request": NarrowMixture(4, 32, 2880, 2880, "fp4", 32, biases=True),
    "gpt-oss-20b plain down": NarrowMixture(256, 32, 2880, 2880, "plain", biases=True),
    "gemma4-26b int8 down": NarrowMixture(512, 128, 2816, 704, "int8"),
    "mixtral int4 down": NarrowMixture(128, 8, 4096, 14336, "int4", 128),
    "int8 experts, float32": NarrowMixture(40, 8, 256, 512, "int8", dtype="float32"),
    "int4 rows of 1440 stored numbers": Narrow(64, 2880, 2880, "int4", 32),
    "8b fp8, tokens quantised": Narrow(64, 28672, 4096, "fp8 by fp8"),
    "fp8 in blocks, tokens too": Narrow(512, 4096, 14336, "fp8 by fp8", 128),
}
SAMPLED = (
    "qwen3-30b gate and up, 64 requests",
    "gemma4-26b down, a shard of 8",
    "int4 in groups of 128",
    "qwen3-30b int4 down, a shard of 4",
)
# Why, and how many columns of a weight are in a block.
REJECTED = {
    "whole experts at once": ("memory", Mixture(64, 8, 16384, 8192), 16384),
    "columns that are no registers": ("divisible", Mixture(64, 8, 512, 512), 72),
}
STORED = {
    "plain": "bfloat16",
    "fp8 by fp8": "float8_e4m3fn",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "int4": "uint8",
    "fp4": "uint8",
}


def programs(shape, array):
    """(a loop over two layers, its arguments, whether the provider takes them)."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout

    from twinfer.ops.namespaces import namespace
    from twinfer.ops.namespaces.jax_ import InStack
    from twinfer.ops.reference.quantization import quantize_fp8_dynamic
    from twinfer.shared.models import spec
    from twinfer.tpu.kernels import experts, grouped, narrow

    def layers(x, stacks):
        def layer(x, index):
            of_layer = [None if s is None else InStack(s, index) for s in stacks]
            if isinstance(shape, Mixture):
                y = grouped.run(x, of_layer[0], of_layer[1].taken(), False)
            elif isinstance(shape, NarrowMixture):
                *pieces, sizes = [
                    s and s.reshape(shape.experts, shape.n, *s.shape[1:]) for s in of_layer[:-1]
                ] + [of_layer[-1].taken()]
                y = experts.grouped_linear(x, *pieces, sizes, shape.kind)
            elif shape.kind == "fp8 by fp8":
                weight, scale, _ = of_layer
                per = ("block", shape.group) if shape.group else ("row", 0)
                tokens = quantize_fp8_dynamic(namespace("jax"), x, *per)
                y = narrow.linear_fp8(
                    tokens[0], weight, tokens[1], scale.taken(), None, shape.dtype
                )
            else:
                y = narrow._run(x, *of_layer, None, shape.kind, False)
            return x + jnp.sum(y, axis=1, keepdims=True).astype(x.dtype), None

        return jax.lax.scan(layer, x, jnp.arange(2, dtype=jnp.int32))[0]

    if isinstance(shape, Mixture):
        x = array(shape.dtype, shape.rows, shape.k)
        weight = array(shape.dtype, 2, shape.experts, shape.n, shape.k)
        if shape.k % 128:  # as `sharding.as_read` has it
            lies = Format(Layout(major_to_minor=(0, 1, 2, 3)), weight.sharding)
            weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=lies)
        sizes = array("int32", 2, shape.experts)
        given = x, jax.ShapeDtypeStruct(weight.shape[1:], weight.dtype), sizes
        return layers, (x, [weight, sizes]), grouped.compiles(*given)
    packed = shape.kind in narrow.PACKED
    if isinstance(shape, NarrowMixture):
        rows, lanes = shape.experts * shape.n, shape.k // (2 if packed else 1)
        x, groups = array(shape.dtype, shape.rows, shape.k), shape.k // (shape.group or shape.k)
        weight = array(STORED[shape.kind], 2, rows, lanes)
        lies = Format(Layout(major_to_minor=(0, 1, 2)), weight.sharding)
        weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=lies)

        scales = spec.Narrow(shape.kind, shape.group).scale_dtype

        def of_groups(dtype):
            turned = Format(Layout(major_to_minor=(0, 2, 1)), weight.sharding)
            dims = 2, rows, groups
            return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=turned)

        pieces = [
            None if shape.kind == "plain" else of_groups(scales),
            of_groups("uint8") if shape.zeros else None,
            array(shape.dtype, 2, rows) if shape.biases else None,
        ]
        one = [
            p and jax.ShapeDtypeStruct((shape.experts, shape.n, *p.shape[2:]), p.dtype)
            for p in (weight, *pieces)
        ]
        sizes = array("int32", 2, shape.experts)
        taken = experts.compiles(x, *one, sizes, shape.kind)
        return layers, (x, [weight, *pieces, sizes]), taken
    x = array(shape.dtype, shape.tokens, shape.k)
    weight = array(STORED[shape.kind], 2, shape.n, shape.k // (2 if packed else 1))
    groups = shape.k // shape.group if shape.group else 1
    scale = array("float32", 2, shape.n, groups)
    zero = array("uint8", 2, shape.n, groups) if shape.zeros else None
    one = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in (weight, scale)]
    if shape.kind == "fp8 by fp8":
        per = jax.ShapeDtypeStruct((shape.tokens, groups), "float32")
        taken = narrow.fp8_compiles(x, one[0], per, one[1], None, shape.dtype)
    else:
        taken = narrow.compiles(x, *one, None, None, shape.kind)
    return layers, (x, [weight, scale, zero]), taken


def compile_shape(shape, device):
    """What the compiler says of a shape on a device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([device], object), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, jax.numpy.dtype(dtype), sharding=place)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        layers, given, taken = programs(shape, array)
        if not taken:
            return {"error": f"the provider does not take this: {taken}"}
        try:
            compiled = jax.jit(layers).lower(*given).compile()
        except Exception as error:  # the compiler raises several kinds
            return {"error": f"{type(error).__name__}: {error}"[:4000]}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    stacks = [stack for stack in given[1] if stack is not None]
    # Of a projection, scales are turned first; XLA sees to those.
    read = stacks[:1] if isinstance(shape, Narrow) else [s for s in stacks if s.ndim > 2]
    in_vector_memory = re.findall(r"\[(2,[0-9,]+)\]{[^}]*S\(1\)}", text)
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "brought": [
            dims
            for dims in in_vector_memory
            if prod(map(int, dims.split(","))) in [prod(stack.shape) for stack in read]
        ],
        "temporaries": memory.temp_size_in_bytes,
        "stored": sum(stack.size * stack.dtype.itemsize for stack in stacks),
        "weights": memory.argument_size_in_bytes,
    }


def compile_all(chip, names):
    """As a script: the results of shapes by name, as JSON."""
    from twinfer.tpu.kernels import grouped
    from twinfer.tpu.platforms import leave_out_libtpu, topology

    leave_out_libtpu()
    device, found = topology(CHIPS[chip]).devices[0], {}
    real = grouped.columns_at_once
    for name in names:
        if name in SHAPES:
            found[name] = compile_shape(SHAPES[name], device)
            continue
        _, shape, columns = REJECTED[name]
        grouped.columns_at_once = lambda n, _, columns=columns: columns
        grouped.refused_memory = lambda *_: None
        found[name] = compile_shape(shape, device)
        grouped.columns_at_once = real
    print(json.dumps(found))


def results(chip, *names):
    command = [sys.executable, __file__, chip, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, names):
    assert {name: found[name]["error"] for name in names if "error" in found[name]} == {}
    for name in names:
        assert found[name]["kernels"] == 1, name
        assert found[name]["brought"] == [], f"{name}: all layers are brought in each of them"
        shape, stored = SHAPES[name], found[name]["stored"]
        # A layer's weights would be more than all that a step has besides.
        rows = shape.tokens if isinstance(shape, Narrow) else shape.rows
        step = 4 * rows * (shape.n + 2 * shape.k) * 4
        if isinstance(shape, Narrow) and shape.group:
            # Scales and zeros are turned first.
            step += (2 + 2 * shape.zeros) * shape.n * (shape.k // shape.group) * 4
        if isinstance(shape, NarrowMixture) and shape.biases:
            step += shape.experts * shape.n * 32  # rows by themselves, of which each has a tile
        assert found[name]["temporaries"] < step + (1 << 20), f"{name}: {found[name]}"
        assert found[name]["weights"] < 1.3 * stored + step + (1 << 20), f"{name}: {found[name]}"


def check_rejected(found):
    for name, (why, *_) in REJECTED.items():
        assert why in found[name].get("error", "accepted").lower(), f"{name}: {found[name]}"


pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
def test_a_shape_of_each_kernel_and_what_is_rejected():
    """Blocks that no chip holds and blocks of broken registers do not compile."""
    found = results("v5e", *SAMPLED, *REJECTED)
    check(found, SAMPLED)
    check_rejected(found)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shape(chip):
    found = results(chip, *SHAPES, *REJECTED)
    check(found, SHAPES)
    check_rejected(found)


if __name__ == "__main__":
    compile_all(sys.argv[1], sys.argv[2:])
