"""Samplers of the JAX worker come in powers of two: fewer programs, the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinfer import LLM, SamplingParams
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.step import PROCESSING, SAMPLERS, StepShape, processor_layout
from twinfer.shared.step_difference import sampler_size, wider_processors
from twinfer.tpu import ladder
from twinfer.tpu.plans import make_plans
from twinfer.tpu.sharding import make_mesh

LIMITS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 16}
PROMPTS = [list(range(30 * n + 40, 31 * n + 43)) for n in range(6)]
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4},
    {
        "temperature": 0.9,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "logit_bias": {7: 2.0},
        "seed": 5,
    },
]


def answers(llm, count):
    """Tokens and log-probabilities of requests of all kinds, which end one after the other: the one
    of row 0 last.

    That one draws: what stands behind the rows of a step is greedy, and must not become its token.
    """
    settings = [
        SamplingParams(
            **KINDS[(n + 1) % len(KINDS)],
            max_tokens=19 - 3 * n,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
        )
        for n in range(count)
    ]
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS[:count], settings, progress=False)]
    chosen = [
        [best[t].logprob for t, best in zip(out.token_ids, out.logprobs, strict=True)]
        for out in outputs
    ]
    return [out.token_ids for out in outputs], chosen


def test_padded_samplers_give_the_tokens_of_the_other_backend(device):
    """Steps of 5 and 3 requests are sampled by programs of 6 and 4 rows."""
    with LLM("demo", backend="torch", device="cpu", progress=False, **LIMITS) as llm:
        want, probabilities = answers(llm, 6)
    with LLM(
        "demo", backend="jax", device=device, progress=False, decode_sizes=(3, 5, 6), **LIMITS
    ) as llm:
        worker = llm.engine.worker
        names = {report.name for report in llm.engine.report.programs}
        assert {name for name in names if name.startswith("sample")} == {
            f"sample_{v}_{s}" for v in SAMPLERS for s in (4, 6)
        }
        tokens, chosen = answers(llm, 6)
        assert worker.compilations_after_ready() == 0
    assert tokens == want
    for got, expected in zip(chosen, probabilities, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_the_programs_of_a_tpu_at_its_defaults():
    """Counted, not compiled. Each backbone has a sampler that serves it."""
    model = parse_config(SHAPES["qwen3-0.6b"])
    config, _ = resolve(
        EngineConfig(model="x", backend="jax"), model, DeviceInfo("tpu", "TPU v6 lite", 31 << 30)
    )
    cpu, _ = resolve(
        EngineConfig(model="x", backend="jax"), model, DeviceInfo("cpu", "cpu", 31 << 30)
    )
    mesh = make_mesh(jax.devices("cpu"), 1)
    tools = ladder.program_model(model, config, make_plans(model, cpu), mesh)
    shapes = ladder.describe(model, config, tools.blocks, 64, mesh)
    found = ladder.jobs(tools, config.table(), shapes, jnp.bfloat16, mesh)
    assert len(config.table()) == 42
    assert len(found) == 42 + 10 + 2 + 6 * (len(SAMPLERS) + 1)
    for descriptor in config.table():
        size = sampler_size(descriptor.requests, config.max_num_seqs)
        assert descriptor.requests <= size <= 256
        assert {(variant, size) for variant in (*SAMPLERS, "logprobs")} <= set(found)


def test_sizes_are_powers_of_two_or_all_rows():
    assert [sampler_size(n, 24) for n in (1, 2, 3, 8, 9, 16, 17, 24)] == [
        1,
        2,
        4,
        8,
        16,
        16,
        24,
        24,
    ]


@pytest.mark.parametrize("sampler", PROCESSING)
def test_rows_behind_have_no_processors(sampler):
    shape = StepShape(pages_per_request=4, max_rows=9, max_model_len=12, vocab_size=70)
    layout = processor_layout(3, shape, sampler)
    given = np.random.default_rng(0).integers(0, 60, layout.size).astype(np.int32)
    wider = wider_processors(given, 3, 4, shape, sampler)
    fields = processor_layout(4, shape, sampler).views(wider)
    for name, values in layout.views(given).items():
        np.testing.assert_array_equal(fields[name][:3].view(np.int32), values.view(np.int32))
    last = {name: values[3] for name, values in fields.items()}
    assert last["rows"] == 9
    assert (last["bias_ids"] == -1).all()
    assert [last[row] for row in ("history_row", "bias_row", "mask_row")] == [-1] * 3
    assert wider_processors(given, 3, 3, shape, sampler) is given
    # A buffer brings the entries that are needed; the program takes them all.
    short = given[: layout.fields["bias_ids"].offset + 3].copy()
    for row in ("history_row", "bias_row", "mask_row"):
        layout.view(short, row)[:] = -1
    layout.view(short, "mask_row")[1] = 0
    whole = layout.views(wider_processors(short, 3, 3, shape, sampler))
    assert (whole["masks"][0] == short[-3:]).all()
    assert (whole["masks"][1:] == -1).all()
