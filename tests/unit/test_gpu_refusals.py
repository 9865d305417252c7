"""What a GPU start refuses, or leaves to another implementation, before anything wrong can run."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from twinfer.gpu.backend import check_options
from twinfer.gpu.compilation import compiled_kinds
from twinfer.gpu.fit import fit_mode
from twinfer.gpu.plans import make_plans
from twinfer.ops import Plans
from twinfer.ops import resolve as resolve_plan
from twinfer.shared.compilation_config import ResolvedCompilation
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.families import model_of
from twinfer.shared.models.shapes import SHAPES

MODEL = parse_config(SHAPES["qwen3-0.6b"])
GPU = DeviceInfo("cuda", "a GPU", 80 << 30)
EVERY = resolve_plan("torch", enable=("none",))
# A model calls one kind of attention.
CALLED = {op: choice for op, choice in EVERY.choices.items() if op != "latent_attention"}
NATIVE = dataclasses.replace(EVERY, choices=CALLED)
YOUTU = {
    "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 131072, "rope_theta": 1_600_000, "tie_word_embeddings": True,
    "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Latent attention and an MLP in each layer."""


def replaced(plan, op, **properties):
    """The plan with another implementation of an op."""
    implementation = dataclasses.replace(plan[op].implementation, **properties)
    choice = dataclasses.replace(plan[op], implementation=implementation)
    return dataclasses.replace(plan, choices={**plan.choices, op: choice})


def compilation(**options):
    config, _ = resolve(
        EngineConfig(model="m", backend="torch", compilation_config=options), MODEL, GPU
    )
    return config.compilation


@pytest.mark.parametrize("road", ["regional", "piecewise"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE", None])
def test_no_piece_of_a_graph_holds_what_reads_the_host(road, mode):
    """Without a split there, a graph would keep the lengths of its capture: those of padding,
    all of them 0.
    """
    decode = replaced(NATIVE, "paged_attention", host_metadata=mode != "FULL_AND_PIECEWISE")
    plans = Plans({"decode": decode, "mixed": NATIVE})
    asked = {"road": road} | ({"cudagraph_mode": mode} if mode else {})
    wrong = [[]] if road == "regional" else [[], ["rms_norm"]]
    for ops in wrong:
        with pytest.raises(ConfigError) as raised:
            fit_mode(compilation(**asked, splitting_ops=ops), plans)
        kind = "mixed" if mode == "FULL_AND_PIECEWISE" else "decode"
        for part in (
            f"splitting_ops: got {ops}",
            f"must name paged_attention: in {kind} steps",
            "'native'",
            "leave",
        ):
            assert part in str(raised.value)
    for ops in ({}, {"splitting_ops": ["paged_attention"]}):
        fitted, _ = fit_mode(compilation(**asked, **ops), plans)
        assert fitted.cudagraph_mode.name == (mode or "PIECEWISE")


def test_what_reads_nothing_on_the_host_may_be_in_a_piece():
    kernels = replaced(NATIVE, "paged_attention", host_metadata=False)
    asked = compilation(cudagraph_mode="PIECEWISE", splitting_ops=[])
    assert fit_mode(asked, Plans({"decode": kernels, "mixed": kernels}))[0].splitting_ops == ()
    other = replaced(kernels, "write_kv", host_metadata=True)
    with pytest.raises(ConfigError, match="must name write_kv: in mixed steps"):
        fit_mode(asked, Plans({"decode": kernels, "mixed": other}))
    with pytest.raises(
        ConfigError, match="in decode steps write_kv is 'native', which reads lengths on the host"
    ):
        fit_mode(compilation(cudagraph_mode="FULL"), Plans({"decode": other, "mixed": kernels}))


def test_where_there_are_no_graphs_nothing_must_be_split():
    asked = compilation(cudagraph_mode="NONE")
    assert fit_mode(asked, Plans({"decode": NATIVE, "mixed": NATIVE})) == (asked, [])


@pytest.fixture
def chip(monkeypatch):
    """chip(capability, KiB of shared memory): the GPU that the kernels find."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed here")
    from twinfer.gpu.kernels import attention, launch

    def play(capability, shared):
        monkeypatch.setattr(launch, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(attention, "shared_memory", lambda: shared << 10)

    return play


CACHE_OPS = ("paged_attention", "norm_rope_write_kv", "write_kv")
A100, RTX_3090, RTX_4090, H100 = ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227)


def plans_of(model=MODEL, **options):
    config, _ = resolve(EngineConfig(model="m", backend="torch", **options), model, GPU)
    return config, make_plans(model, config)


@pytest.mark.parametrize("gpu", [A100, RTX_3090, RTX_4090, H100])
def test_caches_of_fp8_are_left_to_native_ops_on_chips_without_it(chip, gpu):
    chip(*gpu)
    has_fp8 = gpu in (RTX_4090, H100)
    for cache in ("auto", "int8", "fp8_e4m3"):
        config, plans = plans_of(
            kv_cache_dtype=cache, kv_cache_scales=None if cache == "auto" else (0.1, 0.1)
        )
        for kind in ("decode", "mixed"):
            # A coarse op that is a kernel calls no finer one.
            for op in [op for op in CACHE_OPS if op in plans[kind]]:
                choice = plans[kind][op]
                if cache != "fp8_e4m3" or has_fp8:
                    assert choice.provider == "triton", (cache, op)
                else:
                    capability = ".".join(map(str, gpu[0]))
                    why = (
                        "a cache of float8_e4m3fn needs compute capability 8.9, this GPU has "
                        f"{capability}"
                    )
                    assert choice.provider in ("native", "composition"), op
                    ((provider, reason),) = choice.passed_over
                    assert (provider, why in reason) == ("triton", True)
        assert ("write_kv" in plans["mixed"]) == (cache == "fp8_e4m3" and not has_fp8)
        compilation, _ = fit_mode(config.compilation, plans)
        assert compilation.cudagraph_mode.name == (
            "FULL" if cache != "fp8_e4m3" or has_fp8 else "PIECEWISE"
        )


@pytest.mark.parametrize("gpu", [A100, RTX_3090, RTX_4090, H100])
def test_latents_have_kernels_on_each_chip(chip, gpu):
    """All ops of a layer, so that nothing is left to the compiler; each step is one graph."""
    chip(*gpu)
    model = parse_config(YOUTU)
    config, plans = plans_of(model)
    called = {op for layer in plans.layers["decode"].values() for op in layer.called}
    assert {"latent_attention", "norm_rope_write_latents", "to_latents", "from_latents"} < called
    assert compiled_kinds(model_of(model), plans, config.compilation) == frozenset()
    assert fit_mode(config.compilation, plans)[0].cudagraph_mode.name == "FULL"


@pytest.mark.parametrize("gpu", [A100, RTX_3090, RTX_4090, H100])
def test_prompts_of_wide_heads_are_left_to_native_ops_on_chips_without_room(chip, gpu):
    chip(*gpu)
    _, plans = plans_of(dataclasses.replace(MODEL, head_dim=256))
    assert plans["decode"]["paged_attention"].provider == "triton"
    mixed = plans["mixed"]["paged_attention"]
    if gpu in (A100, H100):
        assert mixed.provider == "triton"
    else:
        why = "prompts with heads of 256 need 160 KiB of shared memory, this GPU has 99"
        ((provider, reason),) = mixed.passed_over
        assert (mixed.provider, provider, why in reason) == ("native", "triton", True)
    _, plans = plans_of()
    assert plans["mixed"]["paged_attention"].provider == "triton"


@pytest.mark.parametrize("gpu", [A100, RTX_4090, H100])
def test_heads_of_512_run_where_there_is_room(chip, gpu):
    chip(*gpu)
    _, plans = plans_of(dataclasses.replace(MODEL, head_dim=512))
    found = {kind: plans[kind]["paged_attention"].provider for kind in ("decode", "mixed")}
    assert found == {
        "decode": "native" if gpu == RTX_4090 else "triton",
        "mixed": "triton" if gpu == H100 else "native",
    }
    if gpu == A100:
        ((_, reason),) = plans["mixed"]["paged_attention"].passed_over
        assert "prompts with heads of 512 need 200 KiB of shared memory, this GPU has 163" in reason


def test_chips_before_ampere_run_native_ops(chip):
    chip((7, 5), 64)
    _, plans = plans_of()
    assert all(
        plans["decode"][op].provider in ("native", "composition")
        for op in CACHE_OPS
        if op in plans["decode"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"debug_dump_path": "/dev/null/dump"}, "debug_dump_path: cannot make the folder /dev/nul"),
        ({"inductor_compile_config": {"nosuch": 1}}, "has no option 'nosuch'"),
    ],
)
def test_options_of_compilation_are_checked_before_the_work(options, words):
    with pytest.raises(ConfigError, match=words):
        check_options(ResolvedCompilation(**options))
