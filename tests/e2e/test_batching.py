"""A request's tokens do not depend on its company: alone or among 64, whatever is cached,
chunked or preempted.
"""

import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.demand import ANYTHING
from twinfer.shared.engine import Engine
from twinfer.shared.models.config_json import load_config
from twinfer.shared.sampling_params import SamplingParams

from .conftest import GREEDY_ONLY, small

COUNT = 64
BACKENDS = ["jax", "torch"]


def workload(vocab):
    """64 prompts, a third of them with a common start, and all kinds of sampling settings."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, vocab, 40)
    requests = []
    for i in range(COUNT):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 90)))
        if i % 3 == 0:
            prompt = np.concatenate([common[: int(rng.integers(16, 41))], prompt[:40]])
        choice = {
            "temperature": float(rng.choice([0.0, 0.0, 0.7, 1.0, 1.5])),
            "seed": int(rng.integers(0, 2**62)),
            "max_tokens": int(rng.integers(1, 30)),
        }
        if rng.random() < 0.4:
            choice |= {
                "top_k": int(rng.integers(1, 60)),
                "top_p": float(rng.uniform(0.5, 1)),
                "min_p": 0.01,
            }
        if rng.random() < 0.3:
            choice |= {
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "repetition_penalty": 1.1,
            }
        if rng.random() < 0.2:
            choice |= {
                "logit_bias": {int(rng.integers(vocab)): 3.0},
                "banned_token_ids": (int(rng.integers(vocab)),),
            }
        if rng.random() < 0.2:
            allowed = tuple(int(t) for t in rng.integers(0, vocab, 50))
            choice |= {"allowed_token_ids": allowed, "banned_token_ids": ()}
        if rng.random() < 0.2:
            pool = choice.get("allowed_token_ids", range(0, vocab, 20))
            pairs = tuple((int(a), int(b)) for a, b in rng.choice(pool, (400, 2)))
            choice |= {"banned_sequences": pairs}
        if rng.random() < 0.3:
            stop = tuple(int(t) for t in rng.integers(0, vocab, 60))
            choice |= {"stop_token_ids": stop, "min_tokens": min(4, choice["max_tokens"])}
        requests.append((prompt, SamplingParams(**choice)))
    return requests


def engine(folder, backend, device, demand=ANYTHING, **options):
    settings = {"max_model_len": 160, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    settings |= {"page_size": 16} | options  # so that few pages are few tokens on a GPU too
    settings = {"dtype": "float32"} | settings
    config = EngineConfig(model=folder, backend=backend, device=device, **settings)
    return Engine(config, load_config(folder), folder, demand=demand)


def run_alone(engine, requests):
    outputs = []
    for i, (prompt, params) in enumerate(requests):
        request = engine.add(str(i), prompt, params)
        while engine.has_work:
            engine.step()
        outputs.append((request.output, request.finish_reason))
    return outputs


def run_together(engine, requests):
    """Requests arrive in bursts while others run."""
    rng = np.random.default_rng(6)
    added, queue = [], list(enumerate(requests))
    while queue or engine.has_work:
        for _ in range(int(rng.choice([0, 0, 1, 2, 9]))):
            if queue:
                i, (prompt, params) = queue.pop(0)
                added.append(engine.add(str(i), prompt, params))
        engine.step()
        engine.scheduler.check_integrity()
    return [(request.output, request.finish_reason) for request in added]


@pytest.fixture(scope="module")
def alone(checkpoints, device):
    """Each backend's tokens for each request run alone, made once."""
    folder, _ = checkpoints("qwen3")
    made = {}

    def get(backend):
        if backend not in made:
            plain = {"async_scheduling": False, "enable_prefix_caching": False}
            one = {"max_num_seqs": 1, "mixed_sizes": (64,)} if backend == "jax" else {}
            subject = engine(folder, backend, device, **plain, **one)
            made[backend] = run_alone(subject, workload(subject.model.vocab_size))
            subject.close()
        return made[backend]

    return get


# The JAX worker compiles all samplers for this one model. test_llm.py has some of the requests on
# the one that it has compiled them for.
@pytest.mark.slow
def test_both_backends_give_the_same_tokens(alone):
    assert alone("jax") == alone("torch")


GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
VARIANTS = {
    "plain": {},
    "no chunks": {"enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "neither": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "one step at a time": {"async_scheduling": False},
    "small pages": {"page_size": 4},
    "tiny cache": {"num_pages": 24},
    "tiny cache, no prefix cache": {"num_pages": 24, "enable_prefix_caching": False},
    "priorities": {"scheduling_policy": "priority", "num_pages": 30},
    "guesses": {"speculative_config": GUESSES},
    "guesses in a tiny cache": {"speculative_config": GUESSES, "num_pages": 24},
}


# The JAX worker, whose programs take half a minute of compiling for each, is given all of them in
# `make test-slow`.
ON_A_GPU = ["plain", "tiny cache", "guesses"]
IN_OTHERS = ["no prefix cache", "neither", "guesses in a tiny cache"]
"""Of which there is one more that has their options beside others."""
MARKS = dict.fromkeys(ON_A_GPU, pytest.mark.gpu) | dict.fromkeys(IN_OTHERS, pytest.mark.slow)
CASES = [
    *(pytest.param(name, "jax", marks=pytest.mark.slow) for name in VARIANTS),
    *(pytest.param(name, "torch", marks=MARKS.get(name, ())) for name in VARIANTS),
]


@pytest.mark.parametrize(("variant", "backend"), CASES)
def test_company_changes_nothing(checkpoints, alone, backend, variant, device):
    folder, _ = checkpoints("qwen3")
    want = alone(backend)
    subject = engine(folder, backend, device, **VARIANTS[variant])
    got = run_together(subject, workload(subject.model.vocab_size))
    differ = [i for i in range(COUNT) if got[i] != want[i]]
    assert not differ, f"requests {differ} of {COUNT}"
    metrics = subject.metrics()
    if "tiny" in variant:
        assert metrics.preemptions > 0, "the cache was not small enough to prove anything"
    if "prefix" not in variant and variant != "neither":
        assert metrics.prefix_hits > 0
    assert subject.worker.compilations_after_ready() == 0
    assert metrics.running == metrics.waiting == 0
    subject.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scan_layers": True}, {"scan_layers": False}], ids=str)
def test_scanned_and_unrolled_layers_agree(checkpoints, alone, options, device):
    folder, _ = checkpoints("qwen3")
    subject = engine(folder, "jax", device, **options)
    got = run_together(subject, workload(subject.model.vocab_size)[:16])
    assert got == alone("jax")[:16]
    subject.close()


@pytest.mark.slow
@pytest.mark.gpu
def test_compiled_layers_agree_with_eager_ones(checkpoints, alone, device):
    """torch level 2: every shape of a small table compiled by Inductor, then nothing more."""
    folder, _ = checkpoints("qwen3")
    want = alone("torch")[:12]
    subject = engine(
        folder, "torch", device, compile_level=2, max_num_seqs=2, max_num_batched_tokens=16
    )
    got = run_together(subject, workload(subject.model.vocab_size)[:12])
    assert got == want
    assert subject.worker.compilations_after_ready() == 0
    subject.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_late_compilation_is_counted(checkpoints, backend, device):
    """The counter that the tests above trust must see a program that was not in the table."""
    folder, _ = checkpoints("qwen3")
    subject = engine(folder, backend, device, GREEDY_ONLY, **small(backend))
    assert subject.worker.compilations_after_ready() == 0
    compile_something(backend, 7)
    assert subject.worker.compilations_after_ready() == 0, "that was somebody else"
    plant_compilation(subject.worker, backend)
    subject.add("late", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    subject.step()
    assert subject.worker.compilations_after_ready() > 0
    subject.close()


def compile_something(backend, length):
    if backend == "jax":
        import jax

        jax.jit(lambda x: x * 3 + 1)(np.arange(length, dtype=np.int32))
    else:
        import torch

        torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.arange(length))


def plant_compilation(worker, backend):
    """Let the worker's next step compile."""
    owner, name = (worker, "_backbone") if backend == "jax" else (worker._programs, "backbone")
    backbone = getattr(owner, name)

    def compiling(*arguments):
        compile_something(backend, 5)
        return backbone(*arguments)

    setattr(owner, name, compiling)


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_another_engine_that_starts_is_not_counted(checkpoints, backend, device):
    folder, _ = checkpoints("qwen3")
    # At level 0 torch compiles nothing at all on a CPU.
    sizes = small(backend) | {"compile_level": 1 if backend == "torch" else None}
    first = engine(folder, backend, device, GREEDY_ONLY, **sizes)
    sizes |= {"max_num_seqs": 3} | ({"decode_sizes": (3,)} if backend == "jax" else {})
    second = engine(folder, backend, device, GREEDY_ONLY, **sizes)
    second.add("late", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    second.step()
    assert first.worker.compilations_after_ready() == second.worker.compilations_after_ready() == 0
    first.close()
    second.close()


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe",
        pytest.param("gemma4-experts", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "backend",
    [pytest.param("torch", marks=pytest.mark.gpu), pytest.param("jax", marks=pytest.mark.slow)],
)
def test_company_changes_nothing_where_there_are_experts(checkpoints, name, backend, device):
    """Which rows share a block of an expert depends on the company, and padding chooses nobody."""
    folder, _ = checkpoints(name)
    subject = engine(folder, backend, device, async_scheduling=False, enable_prefix_caching=False)
    requests = workload(subject.model.vocab_size)[: COUNT // 2]
    want = run_alone(subject, requests)
    subject.close()
    subject = engine(folder, backend, device, num_pages=16)  # of which layers with windows take few
    got = run_together(subject, requests)
    assert subject.metrics().preemptions > 0
    subject.close()
    differ = [i for i, tokens in enumerate(got) if tokens != want[i]]
    assert not differ, f"requests {differ} of {len(requests)}"
