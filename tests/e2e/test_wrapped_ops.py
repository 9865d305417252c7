"""The road of wrapped ops (`compilation_config={"ops": "wrapped"}`): passes over each layer's
graph, the same bits.
"""

import dataclasses

import numpy as np
import pytest

import twinfer.gpu.passes
from twinfer.serving.llm import LLM
from twinfer.shared.compilation_config import (
    CompilationConfig,
    CUDAGraphMode,
    check_wrapping,
    resolve_compilation,
)
from twinfer.shared.errors import ConfigError
from twinfer.shared.models import stages
from twinfer.shared.models.spec import Mlp
from twinfer.shared.sampling_params import SamplingParams

PROMPTS = ["Once upon a time", "The cat sat on the mat and then", "A"]
PAGES = 24
SMALL = dict(
    backend="torch", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_pages=PAGES
)
LAYER = {
    "fused_add_rms_norm": 2,
    "linear": 2,
    "norm_rope_write_kv": 1,
    "paged_attention": 1,
    "gated_mlp": 1,
}


@pytest.fixture
def backends(monkeypatch):
    """All backends of passes that engines make."""
    built = []

    def keep(*arguments):
        built.append(build(*arguments))
        return built[-1]

    build = twinfer.gpu.passes.passes_backend
    monkeypatch.setattr(twinfer.gpu.passes, "passes_backend", keep)
    return built


@pytest.fixture
def spelled_out(registries):
    """A stage that spells out a sum and a norm, which the passes know as one op, before what the
    model does.
    """

    def stage(ops, spec, weights, x, cache, batch):
        total = ops.add(x, x)
        return stages.mlp_stage(
            ops, spec, weights, ops.rms_norm(total, weights["post_norm"], 1e-6), cache, batch
        )

    stages.replace_stage(Mlp, stage)


def run(device, ops, folder, max_num_seqs=2, **config):
    """Tokens, greedy and drawn, and what the KV cache holds."""
    if config.get("level", 0) > 1:
        config["cache_dir"] = str(folder)
    config["ops"] = ops
    options = SMALL | {"max_num_seqs": max_num_seqs, "compilation_config": config}
    with LLM("demo", **options, device=device, progress=False) as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_tokens=8), progress=False
        )
        outputs += llm.generate(
            PROMPTS, SamplingParams(temperature=0.8, seed=5, max_tokens=8), progress=False
        )
        worker = llm.engine.worker
        assert worker.compilations_after_ready() == 0
        layers = range(llm.engine.model.num_layers)
        cache = np.stack([worker.read_pages(layer, range(PAGES)) for layer in layers])
        return [output.outputs[0].token_ids for output in outputs], cache


def assert_equal(got, want):
    assert got[0] == want[0]
    assert got[1].any()
    assert np.array_equal(got[1].view(np.uint8), want[1].view(np.uint8))


@pytest.mark.gpu
def test_an_engine_fuses_functionalises_and_lowers(device, backends, spelled_out, tmp_path):
    got = run(device, "wrapped", tmp_path / "a", level=1)
    layers = [backend for backend in backends if "paged_attention" in backend.before]
    assert layers
    for backend in layers:
        assert backend.before == LAYER | {"add": 1, "rms_norm": 1}
        assert backend.fused == LAYER | {"fused_add_rms_norm": 3}
    assert all(backend.before and not backend.after for backend in backends)
    count = len(backends)
    assert_equal(got, run(device, "plain", tmp_path / "b", level=1))
    assert len(backends) == count, "the plain road went through the passes"


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_layers_have_the_same_bits(device, backends, tmp_path):
    # On a GPU level 3 leaves layers of kernels as they are, unless it is told to compile them.
    config = {"level": 3 if device == "cuda" else 2}
    got = run(device, "wrapped", tmp_path / "a", max_num_seqs=1, **config)
    layers = [backend for backend in backends if "paged_attention" in backend.before]
    assert layers
    assert all(backend.before == LAYER and not backend.after for backend in layers)
    assert_equal(
        got, run(device, "plain", tmp_path / "b", max_num_seqs=1, use_inductor=True, **config)
    )


@pytest.mark.parametrize(
    ("platform", "options", "message"),
    [
        ("cpu", {}, "ops: got 'wrapped', allowed is none: level 0 compiles nothing"),
        (
            "cpu",
            {"level": 2, "road": "piecewise"},
            "ops: got 'wrapped', allowed is plain: the road is piecewise",
        ),
        (
            "cuda",
            {"cudagraph_mode": "PIECEWISE"},
            "ops: got 'wrapped', .* cudagraph_mode is PIECEWISE",
        ),
        (
            "cuda",
            {"cudagraph_mode": "FULL_AND_PIECEWISE"},
            "ops: got 'wrapped', .* is FULL_AND_PIECEWISE",
        ),
    ],
)
def test_where_it_cannot_run_it_is_refused(platform, options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_compilation(
            CompilationConfig.from_options({"ops": "wrapped"} | options), platform, (1, 2), 2
        )


def test_it_is_refused_where_the_plan_makes_graphs_piecewise():
    resolved, _ = resolve_compilation(CompilationConfig(ops="wrapped"), "cuda", (1, 2), 2)
    assert resolved.wraps
    assert not resolved.skip_kernels
    with pytest.raises(ConfigError, match="cudagraph_mode is PIECEWISE"):
        check_wrapping(dataclasses.replace(resolved, cudagraph_mode=CUDAGraphMode.PIECEWISE))
