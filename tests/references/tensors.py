"""Weights of the references from a transformers model: its tensors by their names in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from twinfer.ops.declare import Array
from twinfer.shared.models.rope import RopeConfig, rope_inverse_frequencies

from .decoder import Angles, Weights
from .spec import Model

POSITIONS = 64
"""As many as tables of angles have: more than a test has tokens."""
ROPE_FIELDS = (
    "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale "
    "mscale_all_dim truncate"
).split()
Named = dict[str, Array]


class Built(NamedTuple):
    """A family's reference: what is computed, and with which weights."""

    model: Model
    weights: Weights


@dataclass(frozen=True)
class Tensors:
    """The tensors whose names begin with `prefix`."""

    tensors: Mapping[str, Array]
    prefix: str = ""

    @classmethod
    def of(cls, model: Any) -> Tensors:
        """All of a torch module, in float64."""
        state = model.state_dict().items()
        return cls({name: tensor.detach().double().numpy() for name, tensor in state})

    def within(self, name: str) -> Tensors:
        """Those of a part of the module."""
        return Tensors(self.tensors, f"{self.prefix}{name}.")

    def layer(self, index: int) -> Tensors:
        """Those of a layer."""
        return self.within("model.layers").within(str(index))

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def some(self, **names: str) -> Named:
        """Those that exist of tensors, by the references' names."""
        return {ours: self[name] for ours, name in names.items() if name in self}

    def projections(self, **names: str) -> Named:
        """Weights and biases of linear layers, by the references' names. Those that the layer has
        not are left out.
        """
        weights = self.some(**{ours: f"{name}.weight" for ours, name in names.items()})
        biases = self.some(**{f"{ours}_bias": f"{name}.bias" for ours, name in names.items()})
        return weights | biases

    def norms(self, **names: str) -> Named:
        """Weights of norms, by the references' names."""
        return {ours: self[f"{name}.weight"] for ours, name in names.items()}


def attention_weights(tensors: Tensors) -> Named:
    """Projections and norms of q, k and v. Sinks are called alike."""
    projections = tensors.projections(q="q_proj", k="k_proj", v="v_proj", o="o_proj")
    norms = tensors.some(q_norm="q_norm.weight", k_norm="k_norm.weight", sinks="sinks")
    return projections | norms


def mlp_weights(tensors: Tensors) -> Named:
    """Of a gated MLP, whose gate and up may be one tensor."""
    if "gate_up_proj.weight" in tensors:
        return tensors.projections(up="gate_up_proj", down="down_proj")
    gate_up = [tensors["gate_proj.weight"], tensors["up_proj.weight"]]
    return {"up": np.concatenate(gate_up), "down": tensors["down_proj.weight"]}


def shared_weights(tensors: Tensors) -> Named:
    """Of the MLP that every token goes through."""
    return {f"shared_{name}": weight for name, weight in mlp_weights(tensors).items()}


def expert_weights(tensors: Tensors) -> Named:
    """Of a router called `gate` and fused experts."""
    bias = "e_score_correction_bias"
    return tensors.some(
        router="gate.weight",
        experts_up="experts.gate_up_proj",
        experts_down="experts.down_proj",
    ) | (tensors.some(route_bias=bias) or tensors.some(route_bias=f"gate.{bias}"))


def finish(
    model: Model,
    tensors: Tensors,
    layers: Sequence[Sequence[Named]],
    angles: Sequence[Angles] = (),
    norm: str = "model.norm.weight",
    embedding: str = "model.embed_tokens.weight",
    **beside: Any,
) -> Built:
    """The reference of a model whose embedding, head and last norm have their usual names."""
    tied = "lm_head.weight" not in tensors
    head = None if tied else tensors["lm_head.weight"]
    weights = Weights(
        embedding=tensors[embedding],
        norm=tensors[norm],
        layers=layers,
        angles=angles,
        head=head,
        **beside,
    )
    return Built(model, weights)


def angle_table(rope: Mapping[str, Any], head_dim: int) -> Angles:
    """cos and sin [position rotated/2] of an object of `rope_parameters`."""
    kind, theta = rope.get("rope_type", "default"), rope["rope_theta"]
    part = rope.get("partial_rotary_factor", 1.0)
    scaling = 1.0
    if kind == "proportional":
        # Gemma 4: over the whole head, of which a part has angles that are not 0.
        rotated = int(part * head_dim // 2)
        frequencies = np.zeros(head_dim // 2)
        frequencies[:rotated] = theta ** -(np.arange(0, 2 * rotated, 2) / head_dim)
    else:
        config = RopeConfig(
            theta=theta,
            kind=kind,
            original_max_position=rope.get("original_max_position_embeddings", 0),
            partial_rotary_factor=part,
            **{name: rope[name] for name in ROPE_FIELDS if rope.get(name) is not None},
        )
        frequencies, scaling = rope_inverse_frequencies(config, head_dim, POSITIONS)
    angles = np.arange(POSITIONS)[:, None] * frequencies[None, :]
    return (
        (np.cos(angles) * scaling).astype(np.float32),
        (np.sin(angles) * scaling).astype(np.float32),
    )
