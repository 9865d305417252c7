"""The Pallas kernels, tier 1: the generic interpreter against the float64 oracle, within the ops'
bounds.

A normal run samples attention: one decode and one mixed case in bfloat16, and one with K and V in a
row. `-m slow` runs every case in both dtypes, and in every form in which a slot may be held.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh

from twinfer.ops import OpError
from twinfer.ops.cases import load_all
from twinfer.ops.testing import TESTING, Judge, ci_cases
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.quantized import with_quantization
from twinfer.tests.interpreted import interpret, run
from twinfer.tpu import plans
from twinfer.tpu.kernels import attention, cache, target, write

load_all()
DTYPES = ("float32", "bfloat16")
SAMPLED = (
    "decode, window, released pages",
    "mixed, chunk, soft cap and sinks",
    "decode, padded, int8 cache",
    "mixed, window and soft cap, fp8 cache",
)
FORMS = {
    "K and V in a row": lambda kv_heads, hdim, dtype: (kv_heads, 2 * hdim),
    "a head in two rows": lambda kv_heads, hdim, dtype: (4 * kv_heads, hdim // 2),
}


def cases(op, dtype):
    return ci_cases(TESTING[op], dtype)


def failures(op, dtype):
    found = {}
    for case in cases(op, dtype):
        verdict = Judge(op, case.arguments)(run(op, "jax", "pallas_interpret", case.arguments))
        found |= {} if verdict.passed else {case.name: str(verdict)}
    return found


def attend(arguments):
    """The kernels without the op's binding, which would keep what it traced."""
    given = {"k_scale": None, "v_scale": None} | arguments
    return Judge("paged_attention", arguments)([interpret(attention.attend, given, interpret=True)])


def attention_case(dtype, name):
    return next(case.arguments for case in cases("paged_attention", dtype) if case.name == name)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_the_cases(name):
    verdict = attend(attention_case("bfloat16", name))
    assert verdict.passed, verdict


def test_a_case_with_k_and_v_in_a_row(monkeypatch):
    """As heads of 64 lanes are held. Queries that are not 0 where V lies are seen."""
    monkeypatch.setattr(attention, "slot_form", FORMS["K and V in a row"])
    arguments = attention_case("bfloat16", "decode, padded")
    assert attend(arguments).passed
    pad = jnp.pad
    monkeypatch.setattr(attention.jnp, "pad", lambda x, widths: pad(x, widths, constant_values=0.1))
    assert not attend(arguments).passed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case(dtype):
    assert not failures("paged_attention", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_case_in_another_form(form, dtype, monkeypatch):
    monkeypatch.setattr(attention, "slot_form", FORMS[form])
    even = [
        case for case in cases("paged_attention", dtype) if case.arguments["q"].shape[2] % 2 == 0
    ]
    results = {case.name: attend(case.arguments) for case in even}
    assert len(results) > 10
    assert not {name: str(verdict) for name, verdict in results.items() if not verdict.passed}


def test_a_wrong_kernel_is_rejected(monkeypatch):
    """The judge sees a kernel whose buffer is not cleared of what lies outside a request."""
    monkeypatch.setattr(cache.Pages, "clear", lambda *_: None)
    assert not attend(attention_case("bfloat16", "decode, padded")).passed


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_case_of_the_write(dtype):
    assert not failures("write_kv", dtype)


# Prompts that begin and end within runs and blocks, decodes, and padding. Among them are 16 tokens
# whose slots only begin and end as a run does, and 17 before slot 0 of which -1 is the first.
PROMPTS = [77, *range(100, 200), *[-1] * 5, 3, 90, *range(202, 300), *[-1] * 90, 95, 96]
SWAPPED = [20, 22, 21, *range(23, 36), 60, *range(-1, 16)]
SLOTS = {
    "prompts": PROMPTS,
    "swapped": SWAPPED,
    "one token": [5],
    "one token that is not written": [-1],
    "padding alone": [-1] * 40,
    "decodes over three blocks": list(range(0, 1200, 2)),
    "runs of all lengths": [s for n in range(1, 34) for s in range(40 * n, 41 * n)],
    "a run behind a swapped one": [*SWAPPED[:16], *range(40, 72)],
}


def written(slots=(*PROMPTS, *SWAPPED)):
    """Whether the write is right for these slots."""
    slots = np.array(slots, np.int32)
    rng = np.random.default_rng(3)
    k, v = (rng.normal(size=(len(slots), 2, 8)).astype(np.float32) for _ in range(2))
    given = {
        "kv": rng.normal(size=(90, 16, 4, 8)).astype(np.float32),
        "k": k,
        "v": v,
        "slots": slots,
    }
    out = interpret(write.write, given, k_scale=1.0, v_scale=1.0, interpret=True)
    return Judge("write_kv", given)([np.asarray(out)]).passed


def test_a_wrong_write_is_rejected(monkeypatch):
    assert written()
    place = write.pl.ds
    with monkeypatch.context() as planted:
        planted.setattr(write.pl, "ds", lambda start, size: place(start + int(size > 1), size))
        assert not written()  # runs begin one token too late
    with monkeypatch.context() as planted:
        planted.setattr(write.pl, "program_id", lambda axis: 0)
        assert not written()  # the second block is the first again
    with monkeypatch.context() as planted:
        planted.setattr(write, "is_run", lambda slots, token, run: slots[token] >= 0)
        assert not written()  # what begins and ends as a run does is taken for one
    with monkeypatch.context() as planted:
        planted.setattr(write, "is_written", lambda slot: slot >= -1)
        assert not written()  # padding is written


def test_words_of_the_wrong_halves_are_rejected(monkeypatch):
    """K is in the lower half of a word."""
    given = cases("write_kv", "bfloat16")[0].arguments
    more = {"k_scale": None, "v_scale": None, "interpret": True}

    def right():
        out = interpret(write.write, given | more)
        return Judge("write_kv", given)([np.asarray(out)]).passed

    assert right()
    real = write.k_and_v_in_words
    monkeypatch.setattr(write, "k_and_v_in_words", lambda k, v: real(v, k))
    assert not right()


@pytest.mark.parametrize("name", SLOTS)
def test_slots_of_every_kind_are_written(name):
    assert written(SLOTS[name])


def test_what_does_not_fit_is_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(attention, "target_kind", lambda: "TPU v4")

    def attends(pages=512, requests=256, page=16, heads=2, hdim=128, dtype=jnp.bfloat16):
        q = jax.ShapeDtypeStruct((256, 8 * heads, hdim), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((1024, page, 2 * heads, hdim), dtype)
        table = jax.ShapeDtypeStruct((requests, pages), jnp.int32)
        return attention.compiles(q, kv, table, None, None, None, 1.0, 0, 0.0, 1)

    def writes(heads, dtype):
        kv = jax.ShapeDtypeStruct((1024, 16, 2 * heads, 128), dtype)
        rows = jax.ShapeDtypeStruct((64, heads, 128), jnp.bfloat16)
        return write.compiles(kv, rows, rows, jax.ShapeDtypeStruct((64,), jnp.int32))

    assert attends()
    assert "256 * 513 * 4 B = 525312 B of scalar memory, allowed are 524288 B" in attends(pages=513)
    assert "heads of 48" in attends(hdim=48)
    assert "pages of 8" in attends(page=8)
    assert "cache is float16" in attends(dtype=jnp.float16)
    assert "16777216 B (two blocks of pages)" in attends(heads=16, hdim=256)
    assert "> 16777216 B" in attends(heads=16, hdim=256)
    assert writes(1, jnp.bfloat16)
    assert writes(2, jnp.int8)
    assert "a slot is 2 rows of 1 B (1 KV heads of 128), no whole number of 4 B words" in writes(
        1, jnp.int8
    )
    assert not any([attends(pages=513), writes(1, jnp.int8)])


@pytest.mark.parametrize(
    ("kv_heads", "hdim", "dtype", "form"),
    [
        (8, 128, "bfloat16", (16, 128)),
        (1, 256, "bfloat16", (4, 128)),
        (8, 64, "bfloat16", (8, 128)),
        (1, 64, "bfloat16", (2, 64)),  # a slot of one row would be half a word
        (1, 64, "float32", (1, 128)),
        (2, 64, "int8", (4, 64)),
        (3, 64, "bfloat16", (6, 64)),
        (10, 128, "bfloat16", (20, 128)),
        (8, 96, "bfloat16", (16, 96)),
    ],
)
def test_how_slots_are_held(kv_heads, hdim, dtype, form):
    assert cache.slot_form(kv_heads, hdim, dtype) == form
    words, rows, lanes = cache.slot_dims(kv_heads, hdim, dtype)
    assert (words * rows, lanes) == form
    assert rows * jnp.dtype(dtype).itemsize == 4
    assert (
        target.refused_words(jax.ShapeDtypeStruct((1, 16, 2 * kv_heads, hdim), dtype), 1, "a slot")
        is None
    )


def plans_on(platform, kind, shape=SHAPES["llama3-8b"], **options):
    """The plans of a shape on 4 devices of a kind that is only named."""
    model = parse_config(shape)
    model, _ = with_quantization(model, options.get("quantization"))
    sizes = {
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "max_num_batched_tokens": 512,
        "tensor_parallel_size": 4,
    }
    config, _ = resolve(
        EngineConfig(model="x", backend="jax", **sizes | options),
        model,
        DeviceInfo(platform, kind, 1 << 36),
    )
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return plans.make_plans(model, config)


def test_kernels_are_what_a_tpu_runs_and_a_cpu_does_not():
    for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        chosen = plans_on("tpu", kind, page_size=128)
        assert {
            chosen[k][op].provider
            for k in ("decode", "mixed")
            for op in ("paged_attention", "write_kv")
        } == {"pallas"}
    chosen = plans_on("cpu", "cpu", page_size=128)
    assert {chosen["mixed"][op].provider for op in ("paged_attention", "write_kv")} == {"native"}


def test_a_config_that_the_kernels_refuse_is_an_error_with_the_arithmetic():
    table = (
        r"paged_attention.*pallas.*refuses decode\[512\]: the page table takes 512 \* 512 \* "
        r"4 B = 1048576 B"
    )
    with pytest.raises(OpError, match=table):
        plans_on("tpu", "TPU v6 lite", page_size=16, max_num_seqs=512)
    chosen = plans_on(
        "tpu",
        "TPU v6 lite",
        page_size=8,
        op_priority={"paged_attention": ("native",), "write_kv": ("native",)},
    )
    assert chosen["decode"]["paged_attention"].provider == "native"
    chosen = plans_on(
        "tpu", "TPU v6 lite", page_size=8, enable_ops=("-paged_attention", "-write_kv")
    )
    assert chosen["decode"]["paged_attention"].provider == "native"


def test_narrow_weights_have_kernels_on_several_devices_if_their_parts_are_whole():
    """What is asked for is what one shard has: an MLP of 16 640 can be read whole, not its
    fourth.
    """
    for scheme in ("int4", "int4_g32", "int8_weights"):
        chosen = plans_on("tpu", "TPU v6 lite", quantization=scheme)
        assert chosen["decode"]["linear_grouped"].provider == "pallas", scheme
    wide = SHAPES["llama3-8b"] | {"intermediate_size": 16640}
    how = {"shape": wide, "quantization": "int4_g32"}
    one = plans_on("tpu", "TPU v6 lite", tensor_parallel_size=1, **how)["decode"]["linear_grouped"]
    assert (one.provider, one.passed_over) == ("pallas", ())
    four = plans_on("tpu", "TPU v6 lite", **how)["decode"]["linear_grouped"]
    assert four.provider == "native"
    ((provider, why),) = four.passed_over
    assert provider == "pallas"
    assert "rows of 2080 stored numbers in 130 groups" in why
    with pytest.raises(ConfigError, match="got 4, which splits groups of 128 entries"):
        plans_on("tpu", "TPU v6 lite", shape=wide, quantization="int4")


def test_narrow_experts_have_kernels_where_their_rows_are_whole():
    """Those of gpt-oss have 1440 stored numbers, a fourth of a register more than whole ones."""
    for shape, scheme in (("gpt-oss-20b", None), ("qwen3-30b-a3b", "fp8")):
        chosen = plans_on("tpu", "TPU v6 lite", shape=SHAPES[shape], quantization=scheme)
        for kind in ("decode", "mixed"):
            assert chosen[kind]["grouped_linear"].provider == "pallas", (shape, kind)
    wide = SHAPES["qwen3-30b-a3b"] | {"moe_intermediate_size": 4160}
    chosen = plans_on("tpu", "TPU v6 lite", shape=wide, quantization="int4_g32")
    choice = chosen["decode"]["grouped_linear"]
    assert choice.provider == "native"
    ((_, why),) = choice.passed_over
    assert "rows of 2080 stored numbers in 130 groups" in why


def test_a_chip_that_is_not_known_has_no_kernels():
    refusal = target.refused_memory("TPU v9", {"pages": 1})
    assert "vector memory of TPU v9 is not known: known are TPU v4, TPU v5 lite," in str(refusal)
    assert target.refused_memory("TPU v4", {"pages": 16 << 20}) is None
    assert "16777217 B (pages) > 16777216 B" in str(
        target.refused_memory("TPU v4", {"pages": (16 << 20) + 1})
    )
    with pytest.raises(ConfigError, match="TPU v9 is not known"):
        plans_on("tpu", "TPU v9", page_size=128)


@pytest.mark.parametrize("window", [0, 40])
def test_costs_are_those_of_an_eighth_of_the_table_or_of_the_window(window):
    """XLA schedules by them: with full tables, any transfer between devices fits behind
    attention.
    """
    requests, pages, page, heads, hdim = 4, 64, 16, 8, 128
    seen = window or pages * page // 8
    kv = jax.ShapeDtypeStruct((8, page, 4, hdim), jnp.bfloat16)
    table, start = (
        jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((requests, pages), (requests + 1,))
    )
    lengths, counts = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (requests, 2))

    def costs(tokens, most):
        q = jax.ShapeDtypeStruct((tokens, heads, hdim), jnp.bfloat16)

        def call(*arrays):
            return attention.attend(*arrays, 0.1, window, 0.0, most, None, None, True)

        text = str(jax.make_jaxpr(call)(q, kv, table, start, lengths, counts))
        return [int(flops) for flops in re.findall(r"CostEstimate\(flops=(\d+)", text)]

    assert costs(requests, 1) == [4 * requests * seen * heads * hdim]
    assert costs(32, 32) == [4 * n * seen * heads * hdim for n in (requests, 32)]


def test_no_loop_stands_before_the_kernels():
    """It would be one in each layer, of launches that wait for one another."""
    kv = jax.ShapeDtypeStruct((8, 16, 4, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    shapes = [(40, 4), (41,), (40,), (2,)]
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def call(*arrays):
        return attention.attend(*arrays, 0.1, 0, 0.0, 32, None, None, True)

    def loops(jaxpr):
        found = []
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in ("while", "scan"):
                found.append(name)
            elif name != "pallas_call":
                for inner in jaxprs_in_params(equation.params):
                    found += loops(inner)
        return found

    assert loops(jax.make_jaxpr(call)(q, kv, *numbers).jaxpr) == []


def test_a_kind_is_known_by_its_other_names():
    for name, kind in (("TPU v6e", "TPU v6 lite"), ("TPU v5p", "TPU v5"), ("TPU v4", "TPU v4")):
        device = AbstractDevice(device_kind=name, num_cores=1, platform="tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            assert target.target_kind() == kind
