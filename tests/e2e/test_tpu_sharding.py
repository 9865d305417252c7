"""Tensor parallelism on virtual CPU devices, in a process of its own: XLA's device count is
fixed when it starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import build
from .quantized_checkpoints import make, make_mxfp4
from .test_ranks import WIDE_NORMS

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
import jax
import numpy as np
from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.config_json import load_config
from twinfer.shared.sampling_params import SamplingParams

folder, load_format, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = load_config(folder)
rng = np.random.default_rng(3)
prompts = [rng.integers(1, 900, n) for n in (5, 23, 40, 3, 17, 9)]
kinds = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=9, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=7, seed=6),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, max_tokens=6, seed=7),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1),
]
for shards in sizes:
    config = EngineConfig(
        model=folder, backend="jax", device="cpu", dtype="float32", load_format=load_format, max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=32, page_size=8, num_pages=30, tensor_parallel_size=shards,
        decode_sizes=(8,), mixed_sizes=(16, 32), decode_steps=int(sys.argv[4]),
        quantization=sys.argv[5] or None, op_priority=json.loads(sys.argv[6]),
    )
    engine = Engine(config, model, folder)
    made = [engine.add(str(i), p, kinds[i % len(kinds)]) for i, p in enumerate(prompts)]
    for step in range(3):
        engine.step()
    # Late ones, so that prompts and decodes of every kind share steps; a cached prefix among them.
    made += [engine.add(f"late{i}", prompts[i], kinds[(i + 2) % len(kinds)]) for i in range(3)]
    while engine.has_work:
        engine.step()
    # Two that need the host for nothing.
    made += [engine.add(f"last{i}", prompts[i], kinds[i]) for i in range(2)]
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    print(json.dumps({
        "shards": shards, "steps": engine._step_id, "outputs": [r.output for r in made],
        "compilations": engine.worker.compilations_after_ready(),
        "kv": [list(s.data.shape) for s in engine.worker._kv.addressable_shards],
        "products": sorted({
            plan[op].provider for plan in engine.worker.plans().by_kind.values()
            for op in ("linear_grouped", "linear_fp8", "grouped_linear") if op in plan
        }),
        "weights": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(engine.worker._weights)),
    }), flush=True)
    engine.close()
"""


def run(folder, sizes, load_format="auto", decode_steps=1, quantization="", priority=None):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT, folder, load_format, json.dumps(sizes)),
            *(str(decode_steps), quantization, json.dumps(priority or {})),
        ],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_same_tokens_on_1_2_4_and_8_shards(checkpoints):
    """8 heads in 2 groups: on 4 and 8 shards, groups are split; the cache of a shard never holds
    more than its own.
    """
    folder, _ = checkpoints("qwen3")
    runs = run(folder, [1, 2, 4, 8])
    assert [r["outputs"] for r in runs] == [runs[0]["outputs"]] * 4
    assert all(r["compilations"] == 0 for r in runs)
    assert [r["kv"][0][2] for r in runs] == [4, 2, 2, 2]
    assert all(len(r["kv"]) == r["shards"] for r in runs)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "decode_steps"), [([2, 8], 1), ([4], 4)])
def test_words_that_shards_deal_out(tmp_path, sizes, decode_steps):
    """997 words, as the other checkpoints have, are whole on each shard. Of 1024 each has a part,
    and samples some of the 8 rows; in loops of decode steps too.
    """
    build("qwen3", folder := str(tmp_path), vocab_size=1024)
    (one,) = run(folder, [1])
    runs = run(folder, sizes, decode_steps=decode_steps)
    assert [r["outputs"] for r in runs] == [one["outputs"]] * len(sizes)
    assert all(r["compilations"] == 0 for r in runs)


@pytest.mark.slow
def test_the_same_tokens_on_1_and_4_shards_and_nothing_compiles_after_ready(checkpoints):
    """4 heads in 2 groups, biases, a vocabulary and an MLP that 4 does not divide (997, 112
    does).
    """
    folder, _ = checkpoints("llama-biases-head96")
    one, four = run(folder, [1, 4])
    assert one["outputs"] == four["outputs"]
    assert one["compilations"] == four["compilations"] == 0
    assert four["weights"] < one["weights"]


@pytest.mark.slow
def test_dummy_weights_do_not_depend_on_the_shards(checkpoints):
    folder, _ = checkpoints("mistral-mqa")
    one, two, four = run(folder, [1, 2, 4], "dummy")
    assert one["outputs"] == two["outputs"] == four["outputs"]


@pytest.mark.slow
def test_loops_of_decode_steps_on_shards(checkpoints):
    folder, _ = checkpoints("llama-biases-head96")
    (single,), (several,) = run(folder, [1]), run(folder, [4], decode_steps=4)
    assert several["outputs"] == single["outputs"]
    assert several["steps"] < single["steps"]
    assert several["compilations"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "granite"])
def test_fused_tensors_and_scaled_streams_on_shards(checkpoints, name):
    """Phi-3's q, k and v lie in one tensor, of which each shard reads rows of its own."""
    folder, _ = checkpoints(name)
    one, two, four = run(folder, [1, 2, 4])
    assert one["outputs"] == two["outputs"] == four["outputs"]


@pytest.mark.slow
def test_parameters_of_any_kind_on_shards():
    """Those of `tests/unit/test_families.py`, which one device cannot run."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_families.py",
    ]
    done = subprocess.run(
        [*command, "-k", "jax_loads or another_order or an_offset_is"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "16 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*("gemma3", "gemma4", "gemma4-small", "glm4", "ministral3"), *("arcee", "hunyuan", "llama4")],
)
def test_dense_families_of_2026_on_two_shards(checkpoints, name):
    """Norms of 1 + weight, rows of q and k in another order, columns of a table: the same tokens."""
    folder, _ = checkpoints(name)
    one, two = run(folder, [1, 2])
    assert one["outputs"] == two["outputs"]
    assert two["weights"] < one["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["packed-zeros", "int8", "deepseek"])
def test_narrow_checkpoints_on_shards(tmp_path, scheme):
    """Groups along k lie on one shard; where tokens are quantised, a row that is dealt out has one
    scale all the same.
    """
    folder = str(tmp_path / scheme)
    make(folder, scheme)
    runs = run(folder, [1, 2, 4])
    assert [r["outputs"] for r in runs] == [runs[0]["outputs"]] * 3
    assert all(r["compilations"] == 0 for r in runs)
    assert runs[2]["weights"] < runs[1]["weights"] < runs[0]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int8_weights", "fp8_weights"])
def test_narrow_weights_on_shards(checkpoints, scheme):
    """Quantised row by row before they are dealt out."""
    folder, _ = checkpoints("qwen3")
    one, two, four = run(folder, [1, 2, 4], quantization=scheme)
    assert one["outputs"] == two["outputs"] == four["outputs"]
    assert one["compilations"] == two["compilations"] == four["compilations"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "quantization"),
    [("packed-zeros", ""), ("wide", "int8_weights"), ("wide", "fp8"), ("deepseek", "")],
)
def test_the_kernel_of_narrow_weights_on_shards(checkpoints, tmp_path, scheme, quantization):
    """Interpreted: each shard multiplies its rows, or its entries of all rows."""
    if scheme == "wide":
        folder, _ = checkpoints("llama-biases-head96")
    else:
        make(folder := str(tmp_path / scheme), scheme)
    (natively,) = run(folder, [1], quantization=quantization)
    kernel = {op: ["pallas_interpret"] for op in ("linear_grouped", "linear_fp8")}
    runs = run(folder, [1, 2, 4], quantization=quantization, priority=kernel)
    assert natively["products"] == ["native"]
    assert [r["products"] for r in runs] == [["pallas_interpret"]] * 3
    assert [r["outputs"] for r in runs] == [natively["outputs"]] * 3
    assert all(r["compilations"] == 0 for r in runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "gemma4-experts", "deepseek-v3"])
def test_experts_on_shards(checkpoints, name):
    """Each shard has some of the experts whole, and a part of the one, or of the MLP, that all
    tokens go through.
    """
    folder, _ = checkpoints(name)
    one, two, four = run(folder, [1, 2, 4])
    assert one["outputs"] == two["outputs"] == four["outputs"]
    assert four["weights"] < two["weights"] < one["weights"]
    assert one["compilations"] == two["compilations"] == four["compilations"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name, shards, fields in WIDE_NORMS if shards == 4]
)
def test_norms_over_all_heads_on_shards(tmp_path, name, fields):
    """Heads that 4 shards do not divide, and fewer KV heads: all shards norm by the same squares."""
    build(name, folder := str(tmp_path), **fields)
    one, two, four = run(folder, [1, 2, 4])
    assert one["outputs"] == two["outputs"] == four["outputs"]
    assert one["compilations"] == two["compilations"] == four["compilations"] == 0


OWN_SQUARES = """
from twinfer.tpu import binding

is_sum = binding._is_sum
binding._is_sum = lambda op, axes: op.name != "qk_mean_squares" and is_sum(op, axes)
"""


@pytest.mark.slow
def test_tokens_tell_whose_squares_the_norms_over_all_heads_are_of(tmp_path, monkeypatch):
    """Those of one shard are not enough."""
    build("olmo2", folder := str(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", OWN_SQUARES + SCRIPT)
    one, four = run(folder, [1, 4])
    assert one["outputs"] != four["outputs"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", "packed-zeros", "fp8-block"])
def test_narrow_experts_on_shards(tmp_path, scheme):
    """Whole experts with their scales, zeros and biases, by XLA's products and by the kernel
    interpreted.
    """
    folder = str(tmp_path / scheme)
    if scheme == "mxfp4":
        make_mxfp4(folder, num_local_experts=8)
    else:
        make(folder, scheme, "qwen3-moe", moe_intermediate_size=64, num_experts=8)
    kernel = {"grouped_linear": ["pallas_interpret"]}
    runs = run(folder, [1, 2, 4]) + run(folder, [1, 2, 4], priority=kernel)
    assert ["pallas_interpret" in r["products"] for r in runs] == [False] * 3 + [True] * 3
    assert [r["outputs"] for r in runs] == [runs[0]["outputs"]] * 6
    assert all(r["compilations"] == 0 for r in runs)
    assert runs[2]["weights"] < runs[1]["weights"] < runs[0]["weights"]


@pytest.mark.slow
def test_experts_that_are_quantised_when_they_are_loaded_on_shards(tmp_path):
    """And the expert that all tokens go through, of which each shard has a part."""
    build("glm4-moe", folder := str(tmp_path), moe_intermediate_size=32)
    runs = run(folder, [1, 2, 4], quantization="int8_weights")
    assert [r["outputs"] for r in runs] == [runs[0]["outputs"]] * 3
    assert all(r["compilations"] == 0 for r in runs)
    assert runs[2]["weights"] < runs[1]["weights"] < runs[0]["weights"]
