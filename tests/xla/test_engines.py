"""Engines on torch-xla: the tokens of the other workers and of transformers, in any company, from
programs that are all compiled before they are ready.
"""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from twinfer import LLM
from twinfer.serving.demo import PROMPTS
from twinfer.shared.errors import BackendUnavailable, ConfigError, InternalError
from twinfer.shared.sampling_params import SamplingParams
from twinfer.xla import device
from twinfer.xla.device import place_of

NAMES = ["qwen3", "gemma3", "phi4-mini-long"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints, oracle, prompts, parity, name
):
    folder, model = checkpoints(name)
    engine = parity.start(folder, "torch-xla", "cpu", **parity.LONGROPE.get(name, {}))
    try:
        vocabulary = engine.model.vocab_size
        texts = prompts(vocabulary, *parity.LONG_ONLY.get(name, (1, 15, 17, 100)))
        got = parity.run(engine, texts, SamplingParams(temperature=0, max_tokens=32))
        assert engine.worker.compilations_after_ready() == 0
        for prompt, tokens in zip(texts, got, strict=True):
            want, want_logits = oracle(model, prompt, 32)
            assert tokens == want, f"prompt of {len(prompt)} tokens"
            ours = parity.logits_of(engine, np.concatenate([prompt, want[:-1]]))
            error = np.linalg.norm(ours - want_logits, axis=-1) / np.linalg.norm(
                want_logits, axis=-1
            )
            assert error.max() < 1e-4
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone(checkpoints, batching):
    """Each request of the workload by itself, on the torch worker."""
    folder, _ = checkpoints("qwen3")
    engine = batching.engine(folder, "torch", "cpu", enable_prefix_caching=False)
    requests = batching.workload(engine.model.vocab_size)
    try:
        return requests, batching.run_alone(engine, requests)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 24, "enable_prefix_caching": False},
        {"async_scheduling": False, "max_num_batched_tokens": 16},
    ],
    ids=["preempted", "one at a time"],
)
def test_company_changes_nothing_and_the_torch_worker_agrees(checkpoints, batching, alone, options):
    """Also behind an engine of the torch worker in the same process."""
    requests, want = alone
    folder, _ = checkpoints("qwen3")
    engine = batching.engine(folder, "torch-xla", "cpu", **options)
    try:
        got = batching.run_together(engine, requests)
        preempted = engine.metrics().preemptions
        assert engine.worker.compilations_after_ready() == 0
    finally:
        engine.close()
    assert got == want
    assert preempted > 0 or "num_pages" not in options


def test_engines_of_several_backends_in_one_process_do_not_disturb_each_other():
    """In either order, and again: nothing global is left behind."""
    params = SamplingParams(temperature=0, max_tokens=12)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}

    def tokens(backend):
        with LLM("demo", backend=backend, **options) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(list(PROMPTS[:3]), params)]

    runs = [tokens(backend) for backend in ("torch", "torch-xla", "torch", "torch-xla", "jax")]
    assert all(run == runs[0] for run in runs)


def test_two_engines_side_by_side_keep_their_caches_apart():
    options = {"backend": "torch-xla", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM("demo", **options) as one, LLM("demo", **options) as other:
        alone = [one.generate(p, params)[0].outputs[0].token_ids for p in PROMPTS[:3]]
        first = [
            one.engine.add(str(i), one.tokenizer.encode(p), params)
            for i, p in enumerate(PROMPTS[:3])
        ]
        second = [
            other.engine.add(str(i), other.tokenizer.encode(p), params)
            for i, p in enumerate(reversed(PROMPTS[:3]))
        ]
        while one.engine.has_work or other.engine.has_work:
            for llm in (one, other):
                if llm.engine.has_work:
                    llm.engine.step()
        assert [request.output for request in first] == alone
        assert [request.output for request in reversed(second)] == alone


def test_a_late_compilation_is_counted():
    options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1}
    with LLM("demo", backend="torch-xla", **options) as llm:
        worker = llm.engine.worker
        backbone, params = worker._backbone, SamplingParams(temperature=0, max_tokens=4)

        def compiles(step):
            (torch.ones(7, 11).to(place_of(None)) * 3.0).cpu()
            return backbone(step)

        llm.generate("x", params)
        assert worker.compilations_after_ready() == 0
        worker._backbone = compiles
        llm.generate("x", params)
        assert worker.compilations_after_ready() > 0


def test_masks_that_no_step_waits_for_are_refused():
    options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1}
    with (
        LLM("demo", backend="torch-xla", **options) as llm,
        pytest.raises(InternalError, match="waits for masks"),
    ):
        llm.engine.worker.sample(np.zeros((1, 1), np.int32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2"),
        ({"decode_steps": 4}, "decode_steps: got 4"),
        ({"row_invariant": True}, "row_invariant: got True"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: got fp8_e4m3"),
        ({"compile_level": 1}, "compile_level: got 1"),
        ({"cudagraph_mode": "NONE"}, "cudagraph_mode: got"),
        ({"enforce_eager": True}, "enforce_eager: got"),
        ({"scan_layers": True}, "scan_layers: got"),
        ({"decode_sizes": (1, 2)}, "decode_sizes: got"),
        ({"aot_folder": "somewhere"}, "aot_folder: got"),
        (
            {"enable_ops": ("all", "-paged_attention")},
            "paged_attention is 'native', which reads lengths on the host",
        ),
        ({"op_priority": {"paged_attention": ("rows",)}}, "paged_attention is 'rows'"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        LLM("demo", backend="torch-xla", **({"device": "cpu"} | options))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("cuda", "torch-xla has no cuda device"),
        ("tpu", "torch-xla has no tpu device"),
        ("cpu:9", "the numbers here go from 0"),
    ],
)
def test_a_device_that_is_not_there_is_refused(where, words):
    with pytest.raises(BackendUnavailable, match=words):
        LLM("demo", backend="torch-xla", device=where)


def test_a_release_that_does_not_fit_is_refused():
    device.check_release("2.9.1+cu128", "2.9.0")
    with pytest.raises(BackendUnavailable, match=r"torch is 2\.11\.0, allowed is 2\.9"):
        device.check_release("2.11.0", "2.9.0")


GIVEN = """
from twinfer.xla.device import find_device
find_device("cpu")
"""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("XLA_FLAGS", "--xla_allow_excess_precision=true", "leaves out roundings between ops"),
        ("PJRT_DEVICE", "CUDA", "PJRT_DEVICE is CUDA in this process"),
    ],
)
def test_a_process_that_is_set_up_otherwise_is_refused(monkeypatch, name, value, words):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", GIVEN], capture_output=True, text=True, check=False
    )
    assert words in done.stderr


ALIASED = """
from twinfer import LLM
LLM("demo", backend="torch-xla", device="cpu", max_model_len=64, max_num_seqs=1).close()
"""


CACHE = "bf16[5,4096]"
"""A buffer of it: four pages and the scratch page."""


def test_the_cache_is_written_where_it_lies(monkeypatch, tmp_path):
    """By the compiler's own word."""
    flags = f"--xla_allow_excess_precision=false --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    subprocess.run([sys.executable, "-c", ALIASED], capture_output=True, check=True)
    found = {}
    for path in tmp_path.glob("*after_optimizations.txt"):
        head = path.read_text().partition("\n")[0]
        caches = head.partition("entry_computation_layout=")[2].partition(")->")[0].count(CACHE)
        if caches:
            found[path.name] = caches, head.partition("entry_comp")[0].count("may-alias")
    # The cache of each of the five layers, page tables and sampling parameters.
    assert found
    assert set(found.values()) == {(5, 7)}
