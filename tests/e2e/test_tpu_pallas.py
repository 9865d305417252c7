"""Whole engines with the Pallas kernels interpreted give the greedy tokens of native attention, in
float32.

The demo model's heads of 64 lanes are held two to a row, as on a TPU (`tpu/kv_buffer.py`), so that
this runs the layout too.
"""

import numpy as np
import pytest

from twinfer import LLM, SamplingParams
from twinfer.tpu import kv_buffer

from .conftest import GREEDY_ONLY

INTERPRETED = {"paged_attention": ("pallas_interpret",), "write_kv": ("pallas_interpret",)}


@pytest.fixture(autouse=True)
def layout_of_a_tpu(monkeypatch):
    monkeypatch.setattr(kv_buffer, "in_words", lambda platform: True)


def tokens(priority, prompts, count, **options):
    sizes = {"dtype": "float32", "page_size": 8, "device": "cpu", "progress": False} | options
    with LLM("demo", backend="jax", op_priority=priority, demand=GREEDY_ONLY, **sizes) as llm:
        plan = llm.engine.worker.plans()["mixed"]
        assert [plan[op].provider for op in INTERPRETED] == [
            "pallas_interpret" if priority else "native"
        ] * 2
        made = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=count), progress=False
        )
        return [request.outputs[0].token_ids for request in made]


def same(lengths, count, **options):
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, 2000, n).tolist() for n in lengths]
    native = tokens({}, prompts, count, **options)
    assert tokens(INTERPRETED, prompts, count, **options) == native
    assert len({tuple(row) for row in native}) > 1


@pytest.mark.slow
def test_a_few_requests():
    """A prompt longer than a step, and steps that hold prompts and decodes."""
    ladder = {
        "decode_sizes": (4,),
        "mixed_sizes": (16,),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    same((3, 23, 9), 5, max_model_len=48, num_pages=24, **ladder)


@pytest.mark.slow
def test_many_requests_in_little_memory():
    """Requests of up to 150 tokens that are preempted and taken up again, in programs of several
    sizes.
    """
    ladder = {
        "decode_sizes": (4, 8),
        "mixed_sizes": (16, 64),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    same((3, 120, 9, 64, 31, 17, 80, 1, 50, 7), 30, max_model_len=192, num_pages=40, **ladder)
