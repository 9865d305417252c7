"""The mixture of experts against transformers, its parts against literal code, experts on
several processes.
"""

import numpy as np
import pytest

from twinfer.ops import REGISTRY, resolve
from twinfer.ops.namespaces.torch_ import from_numpy

ROADS = ["numpy", "torch", "torch compiled", "jax compiled"]


def run(road, op, *arguments):
    """Outputs of the planned op as numpy arrays."""
    framework, _, compiled = road.partition(" ")
    function = getattr(resolve(framework).bind(), op)
    if framework == "torch":
        import torch

        if compiled:
            torch.compiler.reset()
            function = torch.compile(function, fullgraph=True, backend="eager")
        arguments = [
            from_numpy(value) if isinstance(value, np.ndarray) else value for value in arguments
        ]
    elif framework == "jax":
        import jax
        import jax.numpy as jnp

        if compiled:
            function = jax.jit(function, static_argnames=REGISTRY[op].static_parameters)
        arguments = [
            jnp.asarray(value) if isinstance(value, np.ndarray) else value for value in arguments
        ]
    out = function(*arguments)
    return [np.asarray(part) for part in (out if isinstance(out, tuple) else (out,))]


def published(renormalize):
    """A sparse block of transformers with 6 experts, 2 chosen, in float64."""
    import torch
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    common = {"hidden_size": 20, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    if renormalize:
        block = MixtralSparseMoeBlock(
            MixtralConfig(intermediate_size=14, num_local_experts=6, **common)
        )
    else:
        config = Qwen3MoeConfig(
            moe_intermediate_size=14, num_experts=6, norm_topk_prob=False, **common
        )
        block = Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block.double().eval()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("renormalize", [True, False], ids=["mixtral", "qwen3-moe"])
def test_the_block_is_that_of_transformers(road, renormalize):
    import torch

    block = published(renormalize)
    x = np.random.default_rng(0).normal(size=(9, 20)).astype(np.float32)
    with torch.no_grad():
        want = block(torch.from_numpy(x).double()[None])[0].numpy()
        router, gate_up, down = (
            p.float().numpy()
            for p in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
        )
    routed = run(road, "moe_route", x @ router.T, np.arange(9, dtype=np.int32), 2, renormalize)
    (got,) = run(road, "moe_experts", x, *routed, gate_up, down)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("road", ROADS)
def test_experts_are_chosen_by_comparisons_alone(road):
    """Logits that differ by one unit in the last place, ties, NaN: the same integers on every
    road.
    """
    one = np.float32(1.0)
    logits = np.array(
        [
            [one, np.nextafter(one, np.float32(2)), one, 0.5],
            [-200.0, -200.0, 0.0, -150.0],  # probabilities of all but one underflow
            [np.nan, 3.0, 1.0, 2.0],
            [-np.inf, -np.inf, -np.inf, 4.0],
            [-0.0, 0.0, -0.0, 0.0],
        ],
        np.float32,
    )
    weights, experts = run(road, "moe_route", logits, np.arange(5, dtype=np.int32), 3, True)
    assert experts.tolist() == [[1, 0, 2], [2, 3, 0], [1, 3, 2], [3, 0, 1], [0, 1, 2]]
    assert weights.dtype == np.float32
    assert experts.dtype == np.int32
    assert np.isnan(weights[2]).all()
    np.testing.assert_allclose(weights[[0, 1, 3, 4]].sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        run(road, "moe_route", logits[:1], np.arange(1, dtype=np.int32), 3, False)[0].sum(),
        1 - 0.1682,
        atol=1e-4,
    )


@pytest.mark.parametrize("road", ROADS)
def test_rows_go_out_and_come_back(road):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 5)).astype(np.float32)
    experts = np.array([[2, 0], [0, 2], [2, 3], [-1, 2], [0, 9], [3, 0]], np.int32)
    rows, place, sizes = run(road, "moe_permute", x, experts, 4)
    assert sizes.tolist() == [4, 0, 4, 2]
    assert rows.tolist() == x[[0, 1, 4, 5, 0, 1, 2, 3, 2, 5, 3, 4]].tolist()
    assert sorted(place.ravel().tolist()) == list(range(12))
    (back,) = run(road, "moe_unpermute", rows, place, np.full((6, 2), 0.5, np.float32))
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("road", ["torch", pytest.param("jax compiled", marks=pytest.mark.slow)])
def test_processes_with_a_part_of_the_experts_add_up_to_the_block(road):
    rng = np.random.default_rng(2)
    x, logits = (
        rng.normal(size=(7, 12)).astype(np.float32),
        rng.normal(size=(7, 6)).astype(np.float32),
    )
    gate_up, down = (rng.normal(size=s).astype(np.float32) for s in ((6, 16, 12), (6, 12, 8)))
    weights, experts = run(road, "moe_route", logits, np.arange(7, dtype=np.int32), 3, True)
    (whole,) = run(road, "moe_experts", x, weights, experts, gate_up, down)
    parts = []
    for start in (0, 2, 4):
        rows, place, sizes = run(road, "moe_permute", x, experts - start, 2)
        (hidden,) = run(road, "grouped_matmul", rows, gate_up[start : start + 2], sizes)
        (hidden,) = run(road, "silu_and_mul", hidden)
        (out,) = run(road, "grouped_matmul", hidden, down[start : start + 2], sizes)
        parts += run(road, "moe_unpermute", out, place, weights)
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)
