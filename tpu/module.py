"""The model as a `flax.nnx.Module`, so that the JAX ecosystem's tools work on it: `nnx.state`,
`nnx.split`, `nnx.jit`.

For a model in a JAX program of one's own: `load_module` reads it (docs/cli.md has an example). It
computes whole prompts, on the same ops and weights as the worker; serving does not go through it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..ops import resolve
from ..ops.bindings.jax import bind
from ..shared.engine_config import EngineConfig
from ..shared.errors import BackendUnavailable
from ..shared.models import decoder
from ..shared.models.blocks import single_blocks
from ..shared.models.caches import cache_of
from ..shared.models.config import ModelConfig
from ..shared.models.config_json import load_config
from ..shared.models.locate import model_folder
from ..shared.models.shapes import check_weights
from ..shared.progress import Progress, silent
from .sharding import make_mesh
from .weights import load_weights

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise BackendUnavailable(f"flax: {error}: pip install 'twinfer[flax]'") from error

PAGE = 128


def load_module(
    model: str,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> Decoder:
    """A model as a module, on JAX's first device.

    The arguments are options of an engine (docs/options.md). Raises ConfigError, ModelError.
    """
    options = EngineConfig(
        model=model, backend="jax", dtype=dtype, load_format=load_format, seed=seed
    )
    check_weights(model, options.load_format)
    folder = model_folder(model)
    config = load_config(folder)
    weights = load_weights(
        folder,
        options.load_format,
        config,
        decoder.parameters_of(config),
        single_blocks(config.num_layers),
        jnp.dtype(config.dtype if options.dtype == "auto" else options.dtype),
        options.seed,
        make_mesh(jax.devices(), 1),
        progress,
    )
    return Decoder(config, weights)


class Decoder(nnx.Module):
    """A dense decoder. `weights` are those of `load_weights` on one device with a block for each
    layer (unrolled).

    Parameters are `nnx.Param`s under the names of the parameter table, those of layer i in
    `layers[i]`.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Any]) -> None:
        self.config = config
        for name, value in weights.items():
            if name != "blocks":
                setattr(self, name, nnx.Param(value))
        self.layers = nnx.List([Layer(of_layer) for (of_layer,) in weights["blocks"]])

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Logits [tok vocab] float32 of one sequence of token ids [tok] int32."""
        ops, config, tokens = bind(resolve("jax")), self.config, token_ids.shape[0]
        top = {name: getattr(self, name)[...] for name in decoder.parameters_of(config).top}
        cos, sin = decoder.rotary_tables(config, tokens)
        pages = -(-tokens // PAGE)
        place = jnp.arange(tokens, dtype=jnp.int32)
        length = jnp.full(1, tokens, jnp.int32)
        batch = decoder.Batch(
            jnp.asarray(cos),
            jnp.asarray(sin),
            place,
            jnp.arange(pages, dtype=jnp.int32)[None],
            jnp.array([0, tokens], jnp.int32),
            length,
            jnp.array([1 if tokens == 1 else 0, 1], jnp.int32),
            tokens,
        )
        weights = [
            {name: getattr(layer, name)[...] for name in layer.names} for layer in self.layers
        ]
        model = decoder.model_of(config)
        kept = [cache_of(layer) for layer in model.layers]
        kv = [
            jnp.zeros((pages + 1, PAGE, 2 * one.kv_heads, one.head_dim), top["embed"].dtype)
            for one in kept
        ]
        calls = decoder.PlainCalls(ops, model, top, weights, token_ids, batch, jnp.zeros_like)
        finished, _ = decoder.forward(calls, kv)
        return decoder.head(ops, model, top, finished)


class Layer(nnx.Module):
    """The parameters of one layer, of stacked arrays with one entry."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.names = tuple(weights)
        for name, value in weights.items():
            setattr(self, name, nnx.Param(value[0]))
