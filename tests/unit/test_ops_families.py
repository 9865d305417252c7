"""The op families against published code and literal formulas, in all frameworks, eager and
compiled.
"""

import types

import ml_dtypes
import numpy as np
import pytest

from twinfer.ops import REGISTRY, OpError, resolve
from twinfer.ops.cases import families, load_all, quantized
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import (
    activations,
    lora,
    moe,
    narrow,
    norms,
    parallel,
    quantization,
    rotary,
)
from twinfer.ops.testing import TESTING, ci_cases, judge

load_all()

MODULES = [
    m.__name__ for m in (activations, lora, moe, narrow, norms, parallel, quantization, rotary)
]
OPS = [op.name for op in REGISTRY if op.reference.__module__ in MODULES]
NUMPY = namespace("numpy")
ORACLE = resolve("numpy").bind()
ROADS = ["torch", "torch compiled", "jax", "jax compiled"]
FP8 = ml_dtypes.float8_e4m3fn
BFLOAT16 = ml_dtypes.bfloat16


def to_framework(framework, value):
    if not isinstance(value, np.ndarray):
        return value
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(value)
    from twinfer.ops.namespaces.torch_ import from_numpy

    return from_numpy(value)


def to_numpy(array):
    import torch

    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    if array.dtype == torch.bfloat16:
        return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if array.dtype == torch.float8_e4m3fn:
        return array.view(torch.uint8).numpy().view(FP8)
    return array.numpy()


def run(road, op, arguments):
    """The outputs of the planned op, as numpy arrays of their own dtypes."""
    framework, _, compiled = road.partition(" ")
    function = getattr(resolve(framework).bind(), op)
    if compiled and framework == "jax":
        import jax

        function = jax.jit(function, static_argnames=REGISTRY[op].static_parameters)
    elif compiled:
        import torch

        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="eager")
    out = function(**{name: to_framework(framework, value) for name, value in arguments.items()})
    return [to_numpy(y) for y in (out if isinstance(out, tuple) else (out,))]


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, marks=() if op in quick else pytest.mark.slow)
        for dtype, quick in {"float32": OPS[::8], "bfloat16": OPS[1::8]}.items()
        for op in OPS
    ],
)
def test_compiled_torch_and_eager_jax_keep_the_contract(op, dtype):
    """The first case on the roads that `test_ops_contracts.py` does not take."""
    arguments = ci_cases(TESTING[op], dtype)[0].arguments
    eager = run("torch", op, arguments)
    assert all(
        same_bits(a, b) for a, b in zip(run("torch compiled", op, arguments), eager, strict=True)
    )
    assert judge(op, arguments, run("jax", op, arguments)).passed


# The float64 reference is the published formula


def transformers_oracles():
    import torch
    import torch.nn.functional as F
    from transformers import activations as hf
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    def halves(x, f):
        gate, up = x.chunk(2, -1)
        return f(gate) * up

    xielu = hf.XIELUActivation(dtype=torch.float64)

    def norm(x, eps=1e-5):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    return {
        "silu_and_mul": lambda x: halves(x, F.silu),
        "mul_and_silu": lambda x: halves(torch.cat(x.chunk(2, -1)[::-1], -1), F.silu),
        "gelu_new": hf.NewGELUActivation(),
        "gelu_fast": hf.FastGELUActivation(),
        "quick_gelu": hf.QuickGELUActivation(),
        "gelu_and_mul": lambda x, approximate: halves(
            x, lambda g: F.gelu(g, approximate=approximate)
        ),
        "swigluoai_and_mul": lambda x, alpha, limit: GptOssExperts._apply_gate(
            types.SimpleNamespace(alpha=alpha, limit=limit), x
        ),
        "relu2": hf.ReLUSquaredActivation(),
        "fatrelu_and_mul": lambda x, threshold: halves(x, lambda g: F.threshold(g, threshold, 0.0)),
        "xielu": lambda x, alpha_p, alpha_n, beta, eps: xielu._xielu_python(x),
        "gemma_rms_norm": lambda x, weight, eps: norm(x, eps) * (1.0 + weight),
        "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        "gated_rms_norm": lambda x, gate, weight, eps, norm_before_gate: (
            norm(x, eps) * weight * F.silu(gate)
            if norm_before_gate
            else norm(x * F.silu(gate), eps) * weight
        ),
        "logits_processor": lambda logits, scale, soft_cap: (
            scale * (torch.tanh(logits / soft_cap) * soft_cap if soft_cap else logits)
        ),
    }


PUBLISHED = """silu_and_mul mul_and_silu
gelu_new gelu_fast quick_gelu gelu_and_mul swigluoai_and_mul relu2 fatrelu_and_mul xielu
gemma_rms_norm layer_norm gated_rms_norm logits_processor""".split()


@pytest.mark.parametrize("op", PUBLISHED)
def test_the_reference_is_the_published_formula(op):
    import torch

    oracle = transformers_oracles()[op]
    for case in ci_cases(TESTING[op], "float32"):
        wide = {
            k: v.astype(np.float64) if isinstance(v, np.ndarray) else v
            for k, v in case.arguments.items()
        }
        if op == "xielu":  # transformers starts at softplus(a) = 0.8 and beta + softplus(b) = 0.8
            wide["alpha_p"] = wide["alpha_n"] = np.array([0.8])
        with torch.no_grad():
            tensors = {
                k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in wide.items()
            }
            want = oracle(*(tensors[name] for name in REGISTRY[op].signature.parameters)).numpy()
        got = getattr(ORACLE, op)(**wide)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=case.name)


@pytest.mark.parametrize("op", [op for op in PUBLISHED if op not in ("logits_processor",)])
@pytest.mark.parametrize("road", ["torch", "jax compiled"])
def test_nan_stays_in_its_row_and_reaches_its_element(op, road):
    arguments = dict(next(iter(TESTING[op].cases("float32"))).arguments)
    clean = run(road, op, arguments)[0]
    arguments["x"] = arguments["x"].copy()
    arguments["x"][0, 6] = np.nan
    got = run(road, op, arguments)[0]
    assert np.isnan(got[0]).sum() == (got.shape[1] if op.endswith("norm") else 1)
    np.testing.assert_array_equal(got[1:], clean[1:])


def test_interleaved_rotary_is_gptjs():
    import torch
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    arguments = next(
        c for c in TESTING["rotary_embedding_gptj"].cases("float32") if c.name == "part"
    ).arguments
    wide = {k: v.astype(np.float64) for k, v in arguments.items()}
    n = 2 * wide["cos"].shape[-1]
    sin, cos = (torch.from_numpy(wide[name])[None] for name in ("sin", "cos"))
    for got, name in zip(ORACLE.rotary_embedding_gptj(**wide), "qk", strict=True):
        want = apply_rotary_pos_emb(torch.from_numpy(wide[name])[None, ..., :n], sin, cos)[
            0
        ].numpy()
        np.testing.assert_allclose(got[..., :n], want, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(got[..., n:], wide[name][..., n:])


@pytest.mark.parametrize("length", [1, 64, 65, 200, 1000])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_dynamic_ntk_frequencies_are_transformers(length, fraction):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 5e4,
        "partial_rotary_factor": fraction,
    }
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope
    )
    want, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    got = rotary.dynamic_ntk_inverse_frequencies(int(64 * fraction), 5e4, 4.0, 64, length)
    np.testing.assert_allclose(got, want.numpy(), rtol=3e-6)  # theirs is float32
    assert factor == 1.0


def test_sizes_without_a_value_are_refused():
    with pytest.raises(OpError, match="rotated=2"):
        rotary.dynamic_ntk_inverse_frequencies(2, 1e4, 2.0, 64, 128)
    with pytest.raises(OpError, match="erf"):
        ORACLE.gelu_and_mul(np.ones((1, 2)), "erf")
    for per, block in (("rows", 0), ("block", 5), ("block", 0)):
        with pytest.raises(OpError, match="divides 8"):
            ORACLE.quantize_int8_dynamic(np.ones((2, 8)), per, block)


# Coarse and parallel forms


@pytest.mark.parametrize("op", ["fused_add_gemma_rms_norm", "fused_add_layer_norm"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_fused_adds_are_their_parts_bitwise(op, framework):
    arguments = dict(next(iter(TESTING[op].cases("bfloat16"))).arguments)
    # the sum rounds
    arguments["residual"] = families.normal(1, "bfloat16", *arguments["x"].shape, scale=3.7)
    normed, total = run(framework, op, arguments)
    residual = {"x": arguments.pop("x"), "residual": arguments.pop("residual")}
    (want_total,) = run(framework, "add", residual)
    (want,) = run(framework, op.removeprefix("fused_add_"), {"x": want_total, **arguments})
    assert same_bits(total, want_total)
    assert same_bits(normed, want)


@pytest.mark.parametrize("framework", ["torch", "jax"])
class TestShards:
    def test_words_of_all_shards_add_up_to_the_embedding(self, framework):
        table = families.normal(2, "bfloat16", 64, 16)
        ids = np.array([0, 15, 16, 63, 31, 48], np.int32)
        parts = [
            run(
                framework,
                "vocab_parallel_embedding",
                {"ids": ids, "table_shard": table[s : s + 16], "start": s},
            )[0]
            for s in range(0, 64, 16)
        ]
        total = parts[0] + parts[1] + parts[2] + parts[3]
        np.testing.assert_array_equal(total.astype(np.float32), table[ids].astype(np.float32))

    def test_a_nan_row_does_not_reach_ids_of_other_shards(self, framework):
        table = np.full((4, 3), np.nan, np.float32)
        arguments = {"ids": np.array([0, -1, 9], np.int32), "table_shard": table, "start": 4}
        assert not run(framework, "vocab_parallel_embedding", arguments)[0].any()

    def test_columns_side_by_side_and_rows_added_up_are_the_whole(self, framework):
        x, w, b = (
            families.normal(3 + i, "float32", *s) for i, s in enumerate([(5, 32), (12, 32), (12,)])
        )
        whole = run(framework, "linear", {"x": x, "weight": w, "bias": b})[0]
        columns = [
            run(framework, "column_linear", {"x": x, "weight_shard": w[s], "bias_shard": b[s]})[0]
            for s in (slice(0, 6), slice(6, 12))
        ]
        rows = [
            run(
                framework,
                "row_linear",
                {"x_shard": x[:, s], "weight_shard": w[:, s], "bias": b, "shard": i},
            )[0]
            for i, s in enumerate((slice(0, 16), slice(16, 32)))
        ]
        np.testing.assert_allclose(np.concatenate(columns, 1), whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rows[0] + rows[1], whole, rtol=1e-5, atol=1e-5)
        alike = run(framework, "replicated_linear", {"x": x, "weight": w, "bias": b})[0]
        assert same_bits(alike, whole)


# Quantisation


def awkward(dtype):
    """Ties, every exponent, values at the limits, infinities, NaN, subnormal and zero rows: [12
    96].
    """
    rng = np.random.default_rng(5)
    x = rng.normal(size=(12, 96)) * np.exp2(rng.integers(-12, 12, (12, 1)))
    x[0] = (np.arange(96) - 40) * 0.5
    x[0, 0] = 127.0
    x[1] = 0.0
    x[2] *= 2.0**-130
    x[3, 4] = np.nan
    x[4, 5] = np.inf
    x[5] *= 1e36
    x[6] = np.exp2(np.arange(96) - 88.0)
    x[7, :7] = -448.0
    x[8] = np.where(np.arange(96) % 2, 1.0, -1.0) * 2.0**-100
    x[9] = np.repeat(np.arange(12) + 0.5, 8) / 448.0
    return x.astype(dtype)


def literal_quantize(x, per, block, limit, dtype):
    """The definition with numpy's IEEE division, element by element in float32."""
    y = x.astype(np.float32)
    size = np.minimum(np.nan_to_num(np.abs(y), nan=0.0, posinf=np.inf), np.finfo(np.float32).max)
    axes = {"tensor": (0, 1), "row": (1,), "column": (0,)}
    if per == "block":
        amax = size.reshape(len(y), -1, block).max(-1)
    else:
        amax = size.max(axis=axes[per], keepdims=True)
    scale = np.where(amax < 2.0**-100, np.float32(1.0), amax * np.float32(1.0 / limit))
    inverse = np.repeat(np.float32(1.0) / scale, y.shape[1] // scale.shape[1], axis=1)
    cut = np.clip(y * inverse, -limit, limit)
    if dtype == np.int8:
        return np.rint(np.nan_to_num(cut)).astype(np.int8), scale
    return cut.astype(FP8), scale


# What is compiled has a turn in each dtype here: by PyTorch in one, by XLA in the other.
@pytest.mark.parametrize(
    ("road", "dtype"),
    [
        pytest.param("torch", np.float32, id="float32-torch"),
        pytest.param("torch", BFLOAT16, id="bfloat16-torch"),
        pytest.param("torch compiled", BFLOAT16, id="bfloat16-torch compiled"),
        pytest.param("jax compiled", np.float32, id="float32-jax compiled"),
        pytest.param(
            "torch compiled", np.float32, id="float32-torch compiled", marks=pytest.mark.slow
        ),
        pytest.param("jax compiled", BFLOAT16, id="bfloat16-jax compiled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("per", ["tensor", "row", "column", "block"])
@pytest.mark.parametrize(("kind", "limit"), [("int8", 127.0), ("fp8", 448.0)])
def test_quantised_values_and_scales_are_bitwise_the_definition(road, per, dtype, kind, limit):
    x = awkward(dtype)
    want, scale = literal_quantize(x, per, 16, limit, np.int8 if kind == "int8" else FP8)
    for op, arguments in [
        (f"quantize_{kind}_dynamic", {"x": x, "per": per, "block": 16}),
        (f"quantize_{kind}", {"x": x, "scale": scale}),
    ]:
        values, *scales = run(road, op, arguments)
        assert all(same_bits(got, scale) for got in scales)
        # The sign of a NaN is not defined.
        where = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(values.astype(np.float32)), where)
        np.testing.assert_array_equal(values[~where].view(np.uint8), want[~where].view(np.uint8))


@pytest.mark.parametrize("road", ["torch", "jax compiled"])
def test_every_fp8_value_and_every_tie_between_two_rounds_to_even(road):
    points = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    points = np.unique(points[np.isfinite(points)])
    ties = (points[1:] + points[:-1]) / 2
    x = np.concatenate(
        [points, ties, np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(-1e9))]
    )[None]
    (got,) = run(road, "quantize_fp8", {"x": x, "scale": np.ones((1, 1), np.float32)})
    # Of the two neighbours of a tie, the one with an even last bit.
    below, above = points[:-1], points[1:]
    even = np.where(below.astype(FP8).view(np.uint8) % 2 == 0, below, above)
    want = np.concatenate([points, even, above, below])
    np.testing.assert_array_equal(got[0].astype(np.float32), want)


def test_reciprocals_are_rounded_correctly_from_any_near_guess():
    rng = np.random.default_rng(6)
    x = (rng.uniform(1, 2, 20000) * np.exp2(rng.integers(-120, 120, 20000))).astype(np.float32)
    x = np.concatenate([x, np.exp2(np.arange(-120, 122)).astype(np.float32)])
    np.testing.assert_array_equal(quantization.reciprocal(NUMPY, x), np.float32(1.0) / x)
    mantissa = np.concatenate(
        [rng.integers(1 << 23, 1 << 24, 20000), [1 << 23, (1 << 23) + 1, (1 << 24) - 1]]
    )
    want = np.array([(2**48 // int(m) + 1) // 2 for m in mantissa])
    for off in (-40, -3, -1, 0, 1, 2, 40):
        got = quantization.exact_quotient(
            mantissa.astype(np.int32), (want + off).astype(np.int32), NUMPY
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("road", ROADS)
def test_int8_products_are_exact_and_the_same_bits_everywhere(road):
    rng = np.random.default_rng(7)
    x, w = (
        rng.integers(-127, 128, (5, 4099)).astype(np.int8),
        rng.integers(-127, 128, (9, 4099)).astype(np.int8),
    )
    x[0], w[0] = 127, 127  # a sum past 2^24
    x_scale, w_scale = (rng.uniform(1e-3, 1, (n, 1)).astype(np.float32) for n in (5, 9))
    total = x.astype(np.int64) @ w.astype(np.int64).T
    want = total.astype(np.float32) * x_scale * w_scale.T
    arguments = {
        "x": x,
        "weight": w,
        "x_scale": x_scale,
        "weight_scale": w_scale,
        "bias": None,
        "dtype": "float32",
    }
    assert same_bits(run(road, "linear_int8", arguments)[0], want)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantised_layer_is_near_the_layer(kind):
    x, w = families.normal(8, "float32", 16, 256), families.normal(9, "float32", 32, 256)
    (xq, xs), (wq, ws) = quantized.quantized(kind, x, "row"), quantized.quantized(kind, w, "row")
    arguments = {
        "x": xq,
        "weight": wq,
        "x_scale": xs,
        "weight_scale": ws,
        "bias": None,
        "dtype": "float32",
    }
    (got,) = run("torch", f"linear_{kind}", arguments)
    error = np.linalg.norm(got - x @ w.T) / np.linalg.norm(x @ w.T)
    assert error < (0.02 if kind == "int8" else 0.06)
    back = ORACLE.dequantize(wq, ws.astype(np.float64), "float32")
    assert (
        np.abs(back - w) <= np.where(kind == "int8", ws * 0.501, np.abs(w) * 2.0**-4 + ws * 2.0**-9)
    ).all()


# Adapters


@pytest.mark.parametrize("road", ROADS)
def test_rows_without_an_adapter_are_left_alone(road):
    case = next(iter(TESTING["lora_expand"].cases("bfloat16"))).arguments
    (got,) = run(road, "lora_expand", case)
    none = case["index"] < 0
    assert same_bits(got[none], case["y"][none])
    assert np.isfinite(got.astype(np.float32)).all()
    (low,) = run(
        road, "lora_shrink", next(iter(TESTING["lora_shrink"].cases("bfloat16"))).arguments
    )
    assert not low[none].any()


def test_shrink_and_expand_are_the_update_of_each_row():
    rng = np.random.default_rng(10)
    x, y, a, b = (rng.normal(size=s) for s in ((6, 20), (6, 12), (3, 4, 20), (3, 12, 4)))
    index, scale = np.array([0, 2, -1, 1, 1, 0], np.int32), np.array([1.0, 0.5, 2.0])
    got = ORACLE.lora_expand(y, ORACLE.lora_shrink(x, a, index), b, index, scale)
    for i, adapter in enumerate(index):
        want = y[i] + (0.0 if adapter < 0 else scale[adapter] * (b[adapter] @ a[adapter] @ x[i]))
        np.testing.assert_allclose(got[i], want, rtol=1e-12)
