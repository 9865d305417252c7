"""The `flax.nnx.Module`: transformers' logits, and the tools that expect one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twinfer.shared.errors import ConfigError
from twinfer.tpu.module import load_module


@pytest.mark.slow
def test_the_module_is_the_model_and_an_nnx_module(checkpoints, oracle, prompts):
    folder, reference = checkpoints("qwen3")
    module = load_module(folder, dtype="float32")
    (prompt,) = prompts(module.config.vocab_size, 33)
    _, want = oracle(reference, prompt, 1)
    got = np.asarray(nnx.jit(lambda m, ids: m(ids))(module, jnp.asarray(prompt)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    graph, state = nnx.split(module)
    leaves = jax.tree.leaves(state)
    assert sum(x.size for x in leaves) == sum(p.numel() for p in reference.parameters())
    # The tools' own round trip, with every parameter changed on the way: the module computes from
    # its state.
    doubled = nnx.merge(graph, jax.tree.map(lambda x: x * 2, state))
    assert not np.allclose(np.asarray(doubled(jnp.asarray(prompt))), got)
    np.testing.assert_array_equal(
        np.asarray(nnx.merge(graph, state)(jnp.asarray(prompt))).argmax(-1), got.argmax(-1)
    )


def test_layers_may_keep_other_shapes_and_read_other_caches(checkpoints, oracle, prompts):
    folder, reference = checkpoints("gemma4-small")
    module = load_module(folder, dtype="float32")
    (prompt,) = prompts(module.config.vocab_size, 33)
    _, want = oracle(reference, prompt, 1)
    got = np.asarray(nnx.jit(lambda m, ids: m(ids))(module, jnp.asarray(prompt)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_a_shape_needs_dummy_weights_and_a_dtype_that_exists():
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b is a shape without weights"):
        load_module("qwen3-0.6b")
    with pytest.raises(ConfigError, match="dtype: got 'float12', allowed are auto, float32"):
        load_module("demo", dtype="float12")


def test_the_checkpoints_dtype_is_the_default():
    module = load_module("demo")
    assert module.config.dtype == "bfloat16"
    assert {x.dtype for x in jax.tree.leaves(nnx.state(module))} == {jnp.dtype("bfloat16")}
