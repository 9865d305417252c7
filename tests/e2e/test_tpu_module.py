"""The `flax.nnx.Module`: transformers' logits, and the tools that expect one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twinfer.shared.models import decoder
from twinfer.shared.models.blocks import single_blocks
from twinfer.shared.models.config import load_config
from twinfer.tpu.module import Decoder
from twinfer.tpu.sharding import make_mesh
from twinfer.tpu.weights import load_weights


def test_the_module_is_the_model_and_an_nnx_module(checkpoints, oracle, prompts):
    folder, reference = checkpoints("qwen3")
    config = load_config(folder)
    table = decoder.parameters_of(config)
    mesh = make_mesh(jax.devices("cpu"), 1)
    weights = load_weights(
        folder,
        "auto",
        config,
        table,
        single_blocks(config.num_layers),
        jnp.dtype("float32"),
        0,
        mesh,
        lambda *progress: None,
    )
    module = Decoder(config, weights)
    (prompt,) = prompts(config.vocab_size, 33)
    _, want = oracle(reference, prompt, 1)
    got = np.asarray(nnx.jit(lambda m, ids: m(ids))(module, jnp.asarray(prompt)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    graph, state = nnx.split(module)
    leaves = jax.tree.leaves(state)
    assert sum(x.size for x in leaves) == sum(x.size for x in jax.tree.leaves(weights))
    # The tools' own round trip, with every parameter changed on the way: the module computes from its state.
    doubled = nnx.merge(graph, jax.tree.map(lambda x: x * 2, state))
    assert not np.allclose(np.asarray(doubled(jnp.asarray(prompt))), got)
    np.testing.assert_array_equal(np.asarray(nnx.merge(graph, state)(jnp.asarray(prompt))).argmax(-1), got.argmax(-1))
