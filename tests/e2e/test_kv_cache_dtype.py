"""A narrow KV cache: a quarter of the memory in float32, nearly the same logits, on both
backends.
"""

import numpy as np
import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.engine import Engine
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams

NARROW = {"fp8_e4m3": None, "int8": (0.05, 0.02)}


def run(backend, device, kind, scales):
    """(bytes of a page, tokens, log-probabilities of the prompt's tokens) of the demo model."""
    folder = str(model_folder("demo"))
    config = EngineConfig(
        model=folder, backend=backend, device=device, dtype="float32", max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32, kv_cache_dtype=kind, kv_cache_scales=scales,
    )  # fmt: skip
    engine = Engine(config, load_config(folder), folder)
    prompt = list(range(40, 64))
    request = engine.add(
        "r", prompt, SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, ignore_eos=True)
    )
    rows = []
    while engine.has_work:
        for update in engine.step():
            rows += update.prompt_logprobs or []
    page = engine.report.page_bytes
    engine.close()
    return (
        page,
        request.output,
        np.array([row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)]),
    )


@pytest.mark.parametrize(
    "backend",
    [pytest.param("jax", marks=pytest.mark.slow), pytest.param("torch", marks=pytest.mark.gpu)],
)
def test_a_narrow_cache_is_smaller_and_nearly_as_good(backend, device):
    page, _, want = run(backend, device, "auto", None)
    for kind, scales in NARROW.items():
        small, _, found = run(backend, device, kind, scales)
        assert small * 4 == page
        error = np.abs(found - want).mean()
        # it is narrow, and its scales are those
        assert 1e-4 < error < 0.05 * np.abs(want).mean(), kind


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"kv_cache_scales": (1.0, 1.0)}, "kv_cache_scales"),
        ({"kv_cache_dtype": "int8", "kv_cache_scales": (1.0, 0.0)}, "kv_cache_scales"),
        ({"kv_cache_dtype": "int8", "kv_cache_scales": 0.1}, "kv_cache_scales"),
    ],
)
def test_options_are_checked(options, field):
    folder = str(model_folder("demo"))
    device, model = DeviceInfo("cpu", "cpu", 1 << 34), load_config(folder)
    with pytest.raises(ConfigError, match=field):
        resolve(EngineConfig(model=folder, dtype="float32", **options), model, device)
