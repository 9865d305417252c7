"""Quantised checkpoints of every format on both workers, and weights that are quantised when they
are loaded.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinfer.ops.namespaces import namespace
from twinfer.ops.reference.narrow import widened_weight
from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.quantization import WHEN_LOADED, Quantization
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.weights import pieces

from . import test_batching as batching
from .conftest import GREEDY_ONLY, build
from .quantized_checkpoints import SCHEMES, make, make_mxfp4, tokens_quantised
from .test_parity_transformers import logits_of, run, start

TOKENS = (
    "int8",
    "fp8-channel",
    "fp8-tensor-static",
    "fp8-block",
    "deepseek",
    "fp8-dynamic",
    "fp8-static",
)
"""Schemes whose activations are quantised too."""
ON_JAX = ("packed-zeros",)


def cases(schemes, on_jax=ON_JAX):
    slow = {
        (scheme, backend): [pytest.mark.slow] if backend == "jax" and scheme not in on_jax else []
        for scheme in schemes
        for backend in ("jax", "torch")
    }
    return [pytest.param(*case, marks=marks) for case, marks in slow.items()]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """quantized(scheme) -> (folder, transformers model with these weights), made once."""
    made = {}

    def get(scheme):
        if scheme not in made:
            folder = str(tmp_path_factory.mktemp("quantized") / scheme)
            made[scheme] = folder, make(folder, scheme)
        return made[scheme]

    return get


def with_plain_tokens(folder):
    """A checkpoint's model that multiplies the same narrow weights by tokens as they are."""
    model = load_config(folder)
    narrow = replace(model.quantization.narrow, activations=None, activation_group=0)
    return replace(model, quantization=replace(model.quantization, narrow=narrow))


def distance(ours, theirs):
    """Relative error of the logits at each position."""
    return np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)


@pytest.mark.parametrize(("scheme", "backend"), cases(SCHEMES))
def test_the_weights_are_those_of_the_twin(quantized, oracle, prompts, scheme, backend, device):
    """Logits and greedy tokens are those of the model whose weights the format's own library (see
    `quantized_checkpoints`) decompressed.
    """
    folder, twin = quantized(scheme)
    same_as_twin(folder, with_plain_tokens(folder), twin, oracle, prompts, backend, device)


EXPERTS = dict(moe_intermediate_size=64, num_experts=6)


@pytest.mark.parametrize(("scheme", "backend"), cases(["packed-zeros", "fp8-block"], ()))
def test_experts_are_those_of_the_twin(tmp_path, oracle, prompts, scheme, backend, device):
    folder = str(tmp_path / scheme)
    twin = make(folder, scheme, "qwen3-moe", **EXPERTS)
    same_as_twin(folder, with_plain_tokens(folder), twin, oracle, prompts, backend, device)


@pytest.mark.parametrize(("scheme", "backend"), cases(["mxfp4"], ()))
def test_gpt_oss_in_mxfp4(tmp_path, oracle, prompts, scheme, backend, device):
    """Experts as transformers unpacks them; all that is not an expert is as in the file."""
    folder = str(tmp_path / scheme)
    twin = make_mxfp4(folder)
    same_as_twin(folder, load_config(folder), twin, oracle, prompts, backend, device)


GEMMA4 = dict(intermediate_size=96, moe_intermediate_size=32)
NARROW_IN_GEMMA4 = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("scheme", "backend"), cases(["int8_weights", "fp8_weights", "int4_g32"], ())
)
def test_experts_and_the_mlp_beside_them_are_quantised_when_they_are_loaded(
    tmp_path, oracle, prompts, scheme, backend, device
):
    """Both, and attention; the router is as in the file."""
    folder, narrow = str(tmp_path / scheme), WHEN_LOADED[scheme]
    twin = build("gemma4-experts", folder, **GEMMA4)
    changed = 0
    for name, weight in twin.named_parameters():
        if name.endswith(NARROW_IN_GEMMA4):
            rows = weight.detach().numpy().reshape(-1, weight.shape[-1])
            found = pieces(namespace("numpy"), rows, narrow)
            wide = widened_weight(
                namespace("numpy"), found["values"], found["scale"], None, narrow.kind
            )
            weight.data.copy_(torch.from_numpy(np.array(wide)).reshape(weight.shape))
            changed += 1
    # Four projections of attention, of which layers without a window have no v; the others' five.
    assert changed == 6 * 9 - 2
    model = replace(load_config(folder), quantization=Quantization(narrow))
    same_as_twin(folder, model, twin, oracle, prompts, backend, device)


def same_as_twin(folder, model, twin, oracle, prompts, backend, device):
    """Logits at every position and greedy tokens."""
    few = dict(decode_sizes=(8,), mixed_sizes=(16, 128)) if backend == "jax" else {}
    config = EngineConfig(
        model=folder, backend=backend, device=device, dtype="float32", max_num_seqs=8,
        max_num_batched_tokens=128, **few,
    )  # fmt: skip
    engine = Engine(config, model, folder, demand=GREEDY_ONLY)
    try:
        texts = prompts(engine.model.vocab_size, 1, 17, 60)
        outputs = run(engine, texts, SamplingParams(temperature=0, max_tokens=24))
        assert engine.worker.compilations_after_ready() == 0
        for prompt, output in zip(texts, outputs, strict=True):
            # One of them is decoded by transformers in its own way.
            guess = () if len(prompt) == 17 else output
            tokens, logits = oracle(twin, prompt, 24, guess)
            ours = logits_of(engine, np.concatenate([prompt, tokens[:-1]]))
            assert distance(ours, logits).max() < 1e-4
            assert output == tokens
    finally:
        engine.close()


@pytest.mark.parametrize(("scheme", "backend"), cases(TOKENS))
def test_tokens_are_quantised_as_the_file_says(quantized, prompts, scheme, backend, device):
    """A value on the edge between two of 8 bits may fall to either side, which moves all that
    comes after by a part of a step. So most positions of many short prompts are equal, and none is
    far off. Of the twin with tokens as they are, none is equal.
    """
    folder, twin = quantized(scheme)
    engine = start(folder, backend, device)
    try:
        assert any(change.field == "quantization" for change in engine.report.changes)
        texts = prompts(engine.model.vocab_size, *[4] * 12)
        ours = [logits_of(engine, prompt) for prompt in texts]
        with tokens_quantised(twin, scheme) as model:
            error = np.concatenate(
                [distance(y, logits(model, p)) for y, p in zip(ours, texts, strict=True)]
            )
        plain = np.concatenate(
            [distance(y, logits(twin, p)) for y, p in zip(ours, texts, strict=True)]
        )
        assert (error < 1e-4).mean() > 0.75
        assert error.max() < 0.1
        assert (plain > 1e-4).all()
    finally:
        engine.close()


def logits(model, prompt):
    """Logits of a transformers model at every position."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0].numpy()


@pytest.mark.parametrize(
    ("scheme", "backend", "count"),
    [
        ("int8", "torch", 20),
        pytest.param("int8", "torch", batching.COUNT, marks=pytest.mark.slow),
        pytest.param("packed-zeros", "torch", batching.COUNT, marks=pytest.mark.slow),
        pytest.param("packed-zeros", "jax", batching.COUNT, marks=pytest.mark.slow),
        pytest.param("int8", "jax", batching.COUNT, marks=pytest.mark.slow),
    ],
)
def test_company_changes_nothing(quantized, scheme, backend, count, device):
    """Requests alone, and together in a cache that does not hold them."""
    folder, _ = quantized(scheme)
    # Where tokens are quantised, the last bit of a sum may move one across an edge.
    same_bits = dict(row_invariant=scheme in TOKENS)
    options = dict(async_scheduling=False, enable_prefix_caching=False) | same_bits
    subject = batching.engine(folder, backend, device, **options)
    requests = batching.workload(subject.model.vocab_size)[:count]
    alone = batching.run_alone(subject, requests)
    subject.close()
    subject = batching.engine(folder, backend, device, num_pages=24, **same_bits)
    together = batching.run_together(subject, requests)
    differ = [i for i in range(len(alone)) if together[i] != alone[i]]
    assert not differ, f"requests {differ} of {len(alone)}"
    assert subject.metrics().preemptions > 0
    assert subject.worker.compilations_after_ready() == 0
    subject.close()
