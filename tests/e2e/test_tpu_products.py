"""Engines whose products are the Pallas kernels for TPUs, interpreted: the tokens of those whose
products are XLA's, in a loop over layers that reads weights in their stacks.
"""

import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.config_json import load_config
from twinfer.shared.sampling_params import SamplingParams
from twinfer.tpu import ladder, weights

from .conftest import GREEDY_ONLY

KERNELS = {op: ("pallas_interpret",) for op in ("grouped_matmul", "linear_grouped")}


def tokens(folder, **options):
    """(what requests of several lengths get, the providers of products)."""
    sizes = {
        "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8,
        "num_pages": 30, "decode_sizes": (4,), "mixed_sizes": (16, 32),
    }  # fmt: skip
    config = EngineConfig(
        model=folder, backend="jax", device="cpu", dtype="float32", scan_layers=True,
        **sizes, **options,
    )  # fmt: skip
    engine = Engine(config, load_config(folder), folder, demand=GREEDY_ONLY)
    rng = np.random.default_rng(3)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    try:
        made = [engine.add(str(n), rng.integers(1, 900, n), greedy) for n in (5, 23, 3, 9)]
        while engine.has_work:
            engine.step()
        assert engine.worker.compilations_after_ready() == 0
        plan = engine.worker.plans()["mixed"]
        used = {plan[op].provider for op in KERNELS if op in plan}
        return [request.output for request in made], used
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen3-moe", None), ("gemma4-experts", None), ("llama-mha", "int8_weights")],
)
def test_the_tokens_of_xla_s_products(checkpoints, name, quantization):
    folder, _ = checkpoints(name)
    want, natively = tokens(folder, quantization=quantization)
    got, by_kernels = tokens(folder, quantization=quantization, op_priority=KERNELS)
    assert (natively, by_kernels) == ({"native"}, {"pallas_interpret"})
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_programs_take_experts_that_lie_otherwise(checkpoints, monkeypatch, load_format):
    """On TPUs some weights lie in an order that is asked for (`sharding.as_read`). Here it is one
    that no CPU would choose: what is loaded lies so, and the programs are compiled for that.
    """
    folder, _ = checkpoints("gemma4-experts")
    want, _ = tokens(folder, load_format=load_format)
    moved = []

    def in_columns(parameter, placement, sharding):
        if not parameter.name.startswith("experts_"):
            return sharding
        moved.append(parameter.name)
        return Format(Layout(major_to_minor=(0, 2, 1)), sharding)

    for module in (ladder, weights):
        monkeypatch.setattr(module, "as_read", in_columns)
    got, _ = tokens(folder, load_format=load_format)
    assert set(moved) == {"experts_gate_up", "experts_down"}
    assert got == want
