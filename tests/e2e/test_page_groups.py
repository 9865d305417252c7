"""Layers with windows keep the tokens that they read and no more, and nobody can tell by the tokens.

The plain twin is `page_groups=False`: one page table, and every layer keeps everything.
"""

from dataclasses import replace

import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.caches import cache_layout
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.families import model_of
from twinfer.shared.ngrams import NgramFilter
from twinfer.shared.page_groups import pages_for
from twinfer.shared.sampling_params import SamplingParams

from .conftest import GREEDY_ONLY, build

COUNT, WINDOW, PAGE = 24, 21, 4
PERIOD = ["sliding_attention"] * 2 + ["full_attention"]
MODELS = {
    # 7 layers in groups of 2 or 3: two bodies in a loop, and one layer behind it.
    "period": {"layer_types": (3 * PERIOD)[:7], "num_hidden_layers": 7},
    # The sliding layers of a repeat are in different groups from one repeat to the next.
    "uneven": {"layer_types": ["sliding_attention"] * 5 + PERIOD[1:], "num_hidden_layers": 7},
    "only windows": {"layer_types": ["sliding_attention"] * 3, "num_hidden_layers": 3},
    # Pages of two lengths, and layers that read the cache of others.
    "two sizes": {"base": "gemma4"},
    "read": {"base": "gemma4-small"},
}


DEMAND = replace(GREEDY_ONLY, samplers=("greedy", "random"))


def make_engine(folder, backend, device, **options):
    settings = {"max_model_len": 160, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    settings |= {"page_size": PAGE, "load_format": "auto"} | options
    config = EngineConfig(model=folder, backend=backend, device=device, dtype="float32", **settings)
    return Engine(config, load_config(folder), folder, demand=DEMAND)


def workload(vocab):
    """Prompts on both sides of the window, many with a common start."""
    rng = np.random.default_rng(3)
    common = rng.integers(0, vocab, 70)
    for i in range(COUNT):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 60)))
        if i % 2 == 0:
            prompt = np.concatenate([common[: int(rng.integers(20, 71))], prompt[:20]])
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            seed=i,
            max_tokens=int(rng.integers(1, 60)),
            ignore_eos=True,
        )
        yield str(i), prompt, params


def run(engine):
    requests = [engine.add(*one) for one in workload(engine.model.vocab_size)]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    tokens = [request.output for request in requests]
    metrics = engine.metrics()
    engine.close()
    return tokens, metrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp("model") / "it")
            changes = {"sliding_window": WINDOW} | MODELS[name]
            base = changes.pop("base", "qwen2-windows")
            if base == "qwen2-windows":
                changes["use_sliding_window"] = True
            build(base, made[name], **changes)
        return made[name]

    return get


@pytest.fixture(scope="module")
def plain(folders, device):
    """Tokens of the plain twin on torch, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name], _ = run(make_engine(folders(name), "torch", device, page_groups=False))
        return made[name]

    return get


TINY = {"period": 5, "uneven": 4, "two sizes": 4}
"""Quarters of what the longest request takes, where that makes requests give way."""
VARIANTS = {
    "default": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "tiny cache": {"tiny": True, "watermark": 0.0},
    "loops": {"decode_steps": 5},
}
CASES = [
    *((model, variant, "torch") for model in MODELS for variant in VARIANTS),
    *((model, variant, "jax") for model in MODELS for variant in ("default", "tiny cache")),
    ("period", "loops", "jax"),
]
CASES = [case for case in CASES if case[1] != "tiny cache" or case[0] in TINY]
ON_A_GPU = [("period", "default", "torch"), ("uneven", "loops", "torch")]
IN_MAKE_TEST = [
    *((model, "default", "torch") for model in MODELS),
    *(("uneven", "tiny cache", backend) for backend in ("torch", "jax")),
    ("two sizes", "tiny cache", "torch"),
    ("only windows", "no prefix cache", "torch"),
    ("uneven", "loops", "torch"),
]
"""Each model, and each variant."""


def marks(case):
    if case in ON_A_GPU:
        return pytest.mark.gpu
    return () if case in IN_MAKE_TEST else pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "variant", "backend"), [pytest.param(*case, marks=marks(case)) for case in CASES]
)
def test_nobody_can_tell_by_the_tokens(folders, plain, model, variant, backend, device):
    options = dict(VARIANTS[variant])
    if options.pop("tiny", False):
        # Enough for the longest request and a little more.
        layout = cache_layout(model_of(load_config(folders(model))), PAGE, 160)
        options["num_pages"] = pages_for(layout.groups, 160, 32) * TINY[model] // 4
    if backend == "jax":
        # Programs take seconds to compile.
        options |= {"decode_sizes": (16,), "mixed_sizes": (32,)}
    engine = make_engine(folders(model), backend, device, **options)
    tokens, metrics = run(engine)
    differ = [i for i, (a, b) in enumerate(zip(tokens, plain(model), strict=True)) if a != b]
    assert not differ, f"requests {differ} of {COUNT}"
    if variant == "tiny cache":
        assert metrics.preemptions > 0, "the cache was not small enough to prove anything"
    if options.get("enable_prefix_caching", True):
        assert metrics.prefix_hits > 0


@pytest.mark.parametrize("model", ["uneven", "two sizes"])
def test_right_and_wrong_guesses_change_no_token(folders, plain, model, device, monkeypatch):
    guesses = {"num_speculative_tokens": 6}
    engine = make_engine(
        folders(model), "torch", device, max_num_seqs=32, num_pages=200, speculative_config=guesses
    )
    texts = [
        [*prompt.tolist(), *output]
        for (_, prompt, _), output in zip(
            workload(engine.model.vocab_size), plain(model), strict=True
        )
    ]

    def guess(tokens, _, most):
        size, known = len(tokens), tokens.tolist()
        found = next(text[size : size + max(0, most)] for text in texts if text[:size] == known)
        wrong = (np.arange(len(found)) + size) % 5 == 0
        return np.where(wrong, 7, found).astype(np.int32)

    monkeypatch.setattr("twinfer.shared.scheduler.look_up", guess)
    monkeypatch.setattr(NgramFilter, "may_repeat", lambda _, rows, __: rows >= 0)
    tokens, metrics = run(engine)
    differ = [i for i, (a, b) in enumerate(zip(tokens, plain(model), strict=True)) if a != b]
    assert not differ, f"requests {differ} of {COUNT}"
    assert metrics.prefix_hits > 0
    assert 100 < metrics.accepted_tokens < metrics.draft_tokens


def test_windows_let_the_same_bytes_hold_more(folders, device):
    held = {}
    for groups in (False, True):
        engine = make_engine(
            folders("period"),
            "torch",
            device,
            kv_cache_memory=1 << 20,
            page_groups=groups,
            max_num_batched_tokens=16,
        )
        held[groups] = engine.report.cached_tokens
        engine.close()
    assert held[True] > 1.5 * held[False], held
