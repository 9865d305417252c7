"""One model on several ranks of the torch worker, processes that gloo joins: the tokens of one
process.
"""

import json

import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.config import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams

KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=9, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=7, seed=6),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, max_tokens=6, seed=7
    ),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, min_p=0.1, presence_penalty=0.5, max_tokens=8, seed=8),
]
SIX_HEADS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 90,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 333,
    "max_position_embeddings": 128, "attention_bias": True, "tie_word_embeddings": True,
}  # fmt: skip


def engine_of(folder, shards, demand=None, **options):
    settings = dict(
        model=str(folder), backend="torch", device="cpu", dtype="float32", max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=32, page_size=8, num_pages=20,
        tensor_parallel_size=shards,
    )  # fmt: skip
    config = EngineConfig(**(settings | options))
    more = {} if demand is None else {"demand": demand}
    return Engine(config, load_config(folder), str(folder), **more)


def tokens_of(folder, shards, kinds=KINDS, **options):
    """What requests of all kinds get: some in chunks, some preempted, some behind a cached
    prefix.
    """
    engine = engine_of(folder, shards, **options)
    try:
        words = engine.model.vocab_size
        rng = np.random.default_rng(3)
        prompts = [rng.integers(1, words - 7, n) for n in (5, 23, 40, 3, 17, 9)]
        made = [engine.add(str(i), p, kinds[i % len(kinds)]) for i, p in enumerate(prompts * 2)]
        for _ in range(3):
            engine.step()
        made += [engine.add(f"late{i}", prompts[i], kinds[(i + 2) % len(kinds)]) for i in range(3)]
        while engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()
        assert engine.worker.compilations_after_ready() == 0
        return [request.output for request in made], engine.metrics()
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("demo", 4),
        ("llama-biases-head96", 4),
        ("mistral-mqa", 2),
        ("qwen3", 2),
        ("gemma4-small", 2),
        ("granite", 2),
        ("phi3", 4),
        ("six-heads", 4),
    ],
)
def test_the_tokens_of_one_process(name, shards, request, tmp_path):
    """Biases, one KV head, vocabularies that do not divide, post-norms, tied embeddings; 6 query
    and 3 KV heads on 4 ranks.
    """
    options = {}
    if name == "demo":
        folder = model_folder("demo")
    elif name == "six-heads":
        folder, options = tmp_path, {"load_format": "dummy"}
        (tmp_path / "config.json").write_text(json.dumps(SIX_HEADS))
    else:
        folder, _ = request.getfixturevalue("checkpoints")(name)
    alone, metrics = tokens_of(folder, 1, **options)
    together, _ = tokens_of(folder, shards, **options)
    assert together == alone
    assert metrics.preemptions > 0
    assert metrics.prefix_hits > 0
