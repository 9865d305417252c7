"""`row_invariant`: a request gets the same bits alone and in any company."""

import numpy as np
import pytest

from twinfer.ops import resolve as choose
from twinfer.ops.declare import OpError
from twinfer.ops.implement import IMPLEMENTATIONS, ROWS
from twinfer.serving.cli import main
from twinfer.serving.llm import LLM
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.demand import Demand
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.sampling_params import SamplingParams

from .conftest import build
from .quantized_checkpoints import make, make_mxfp4

COUNT = 64
FEW = 24
"""Enough for chunks, more requests than rows, and some that give way."""
SIZES = {
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "page_size": 4,
    "num_pages": 150,
}
"""Chunks shorter than prompts, more requests than rows, and a cache that makes some give way."""
DEMAND = Demand(samplers=("greedy", "random"))
"""What the workload asks for: each program compiles for seconds on JAX."""


def workload(vocab):
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            seed=i,
            max_tokens=int(rng.integers(4, 24)),
            logprobs=2,
            prompt_logprobs=1 if i % 4 == 0 else None,
            ignore_eos=True,
        )
        yield {"prompt_token_ids": prompt}, params


def served(llm, groups, requests):
    """Tokens and log-probabilities, in digits that tell all floats apart, by request."""
    found = {}
    for group in groups:
        prompts, params = zip(*(requests[i] for i in group), strict=True)
        for i, output in zip(group, llm.generate(list(prompts), list(params)), strict=True):
            (one,) = output.outputs
            found[i] = one.token_ids, repr(one.logprobs), repr(output.prompt_logprobs)
    return found


def company(folder, device, count=COUNT, **options):
    """How many of so many requests change their bits by company, and how often one gave way."""
    options = SIZES | {"dtype": "bfloat16", "demand": DEMAND} | options
    with LLM(folder, device=device, **options) as llm:
        requests = list(workload(llm.engine.model.vocab_size))
        alone = served(llm, [[i] for i in range(count)], requests)
        together = served(llm, [range(count)], requests)
        preempted = llm.engine.metrics().preemptions
    return sum(alone[i] != together[i] for i in range(count)), preempted


FAMILIES = (
    *("qwen3", "gemma3", "gemma4-small", "olmo2", "mixtral", "minimax-m2", "gemma4-experts"),
    "deepseek-v3",
)
FORMATS = (
    "int8", "fp8-channel", "fp8-tensor-static", "deepseek", "packed-zeros", "fp8-experts", "mxfp4",
)  # fmt: skip
"""Of weights: tokens quantised by row, by one scale and by blocks, and as they are; and experts."""
QUICK = [("torch", "qwen3"), ("torch", "mixtral"), ("torch", "fp8-channel")]
IN_MAKE_TEST = QUICK[:2]
"""Narrow weights take the longest; `test_ops_contracts.py` has rows of their ops."""
FEW_PAGES = {"gemma4-experts": 90, "mxfp4": 75}
"""Layers with windows hold few pages: fewer must be there for some request to give way."""
ALL = [(backend, model) for backend in ("torch", "jax") for model in FAMILIES + FORMATS]
CASES = [
    *(
        pytest.param(*case, FEW, marks=() if case in IN_MAKE_TEST else pytest.mark.slow)
        for case in QUICK
    ),
    *(pytest.param(*case, COUNT, marks=[pytest.mark.slow, pytest.mark.gpu]) for case in QUICK),
    *(pytest.param(*case, COUNT, marks=pytest.mark.slow) for case in ALL if case not in QUICK),
]


def make_model(name, folder):
    if name in FAMILIES:
        build(name, folder)
    elif name == "mxfp4":
        make_mxfp4(folder)
    elif name == "fp8-experts":
        make(folder, "fp8-block", "qwen3-moe", moe_intermediate_size=64, num_experts=6)
    else:
        make(folder, name)


@pytest.mark.parametrize(("backend", "model", "count"), CASES)
def test_company_changes_no_bit(backend, model, count, device, tmp_path):
    make_model(model, str(tmp_path / "it"))
    pages = {"num_pages": FEW_PAGES.get(model, SIZES["num_pages"])}
    options = {"backend": backend, "row_invariant": True} | pages
    changed, preempted = company(str(tmp_path / "it"), device, count, **options)
    assert preempted > 0
    assert changed == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "mixtral", "int8", "packed-zeros"])
def test_plain_implementations_change_no_bit(model, device, tmp_path):
    """On a CPU the test above has C kernels where there are some."""
    make_model(model, str(tmp_path / "it"))
    choose("torch")  # registers them
    plain = {
        op: (ROWS,)
        for (op, framework), known in IMPLEMENTATIONS.items()
        if framework == "torch" and ROWS in known
    }
    changed, _ = company(
        str(tmp_path / "it"), device, backend="torch", row_invariant=True, op_priority=plain
    )
    assert changed == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_without_it_company_changes_bits(backend, device, tmp_path):
    """Else the test above could not fail. The C kernels of CPUs change none anyway."""
    build("qwen3", str(tmp_path / "it"))
    natives = {"enable_ops": ("none",)} if (backend, device) == ("torch", "cpu") else {}
    changed, _ = company(str(tmp_path / "it"), device, backend=backend, **natives)
    assert changed > COUNT // 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_loops_prefix_hits_and_narrow_caches_change_no_bit(backend, device, tmp_path):
    build("qwen3", str(tmp_path / "it"))
    options = {"backend": backend, "row_invariant": True}
    for more in (
        {"decode_steps": 4},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8", "kv_cache_scales": (0.05, 0.05)},
    ):
        changed, _ = company(str(tmp_path / "it"), device, **options, **more)
        assert changed == 0, more


def test_traced_layers_have_its_bits(device, tmp_path):
    build("qwen3", str(tmp_path / "it"))
    found = []
    for level in (0, 1):
        options = SIZES | {"dtype": "bfloat16", "demand": DEMAND, "compile_level": level}
        options |= {"backend": "torch", "device": device, "row_invariant": True}
        with LLM(str(tmp_path / "it"), **options) as llm:
            requests = list(workload(llm.engine.model.vocab_size))
            found.append(served(llm, [range(8)], requests))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"backend": "torch", "compile_level": 2},
            "row_invariant: got compile_level 2, allowed are 0 and 1",
        ),
        (
            {"backend": "jax", "tensor_parallel_size": 2},
            "row_invariant: got tensor_parallel_size 2, allowed is 1",
        ),
    ],
)
def test_what_cannot_promise_it_is_refused(options, says, tmp_path):
    build("qwen3", str(tmp_path / "it"))
    config = EngineConfig(model=str(tmp_path / "it"), row_invariant=True, **options)
    with pytest.raises(ConfigError, match=says):
        resolve(config, load_config(str(tmp_path / "it")), DeviceInfo("cpu", "any", 1 << 34))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_where_jax_does_not_keep_it_it_is_refused(platform, tmp_path):
    build("qwen3", str(tmp_path / "it"))
    config = EngineConfig(model=str(tmp_path / "it"), row_invariant=True, backend="jax")
    with pytest.raises(ConfigError, match=f"row_invariant: got the jax backend on {platform}"):
        resolve(config, load_config(str(tmp_path / "it")), DeviceInfo(platform, "any", 1 << 36))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_model_without_such_implementations_is_refused(backend, tmp_path, capsys, monkeypatch):
    build("mixtral", str(tmp_path))
    choose(backend)  # registers them
    monkeypatch.delitem(IMPLEMENTATIONS["grouped_matmul", backend], ROWS)
    options = {"device": "cpu", "backend": backend, "row_invariant": True}
    says = r"row_invariant: got True, allowed is False: op '\w+': no implementation"
    with pytest.raises(ConfigError, match=says):
        LLM(str(tmp_path), **SIZES | options)
    words = ["--device", "cpu", "--backend", backend, "--row-invariant"]
    assert main(["plan", str(tmp_path), *words]) == 2
    assert "row-invariant: got True, allowed is False: op" in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_all_ops_but_those_of_several_devices_have_such_an_implementation(framework):
    plan = choose(framework, row_invariant=True)
    assert set(plan.unavailable) == {"all_reduce", "token_scales"}
    assert plan["linear"].provider == ROWS
    with pytest.raises(OpError, match=r"'all_reduce'.* promises rows that do not depend"):
        plan["all_reduce"].implementation.function()
