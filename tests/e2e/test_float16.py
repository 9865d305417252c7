"""Engines in float16: XLA's CPU backend has no product of it with float32 sums, and runs it all
the same.
"""

import pytest

from twinfer import LLM, SamplingParams

from .conftest import GREEDY_ONLY

OPTIONS = dict(
    max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, num_pages=8, progress=False
)


def tokens(backend, device, dtype):
    few = {"decode_sizes": (2,)} if backend == "jax" else {}
    options = OPTIONS | few | dict(backend=backend, device=device, dtype=dtype, demand=GREEDY_ONLY)
    with LLM("demo", **options) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=6)
        return [
            o.outputs[0].token_ids
            for o in llm.generate(["def find(", "x = "], greedy, progress=False)
        ]


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_model_runs_in_float16(backend, device):
    """Where the best token is clear, as it is here, ten bits are enough for that of float32."""
    if device == "tpu" and backend == "torch":
        pytest.skip("torch has no tpu device here")
    assert tokens(backend, device, "float16") == tokens(backend, device, "float32")
