"""Weights of 8 or 4 bits an entry: what they make of a model and its parameters.

A narrow weight is several parameters: its values under the name of the plain one, behind it its
scales and what else it has. Their keys are those of the module with the piece behind a colon, which
`shared/narrow_checkpoint.py` finds in any format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ..checkpoint import view_of
from ..errors import UnsupportedModel
from .spec import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Mixer,
    Mlp,
    MlpAndExperts,
    Model,
    Narrow,
)
from .table import Parameter, ParameterDtype, ParameterTable, Part, Piece, PieceOf, piece_name

FileForm = Literal["wide", "plain", "packed", "gptq", "awq", "nvfp4", "mxfp4"]
DTYPE_OF: dict[str, ParameterDtype] = {
    "int8": "int8", "fp8": "float8_e4m3fn", "int4": "uint8", "fp4": "uint8"
}  # fmt: skip
"""The dtype of the values of each kind."""
PACKED = ("int4", "fp4")
PROJECTIONS: Mapping[type[Mixer], tuple[str, ...]] = {
    Attention: ("qkv", "q", "o"),
    LatentAttention: ("qkv_a", "kv_a", "q", "o"),
    Mlp: ("gate_up", "up", "down"),
    LayerInput: ("input_gate", "input_up"),
    Experts: ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down"),
}
"""The parameters of each mixer that may be narrow. Embeddings, heads and routers never are."""
MAY_BE_NARROW = frozenset(name for names in PROJECTIONS.values() for name in names)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How projections are held, and in which form a checkpoint has them.

    `form` wide: the checkpoint is not quantised, weights are when they are loaded. plain: an array
    of values, and scales called `scale` for blocks of `block_rows` rows; 0: one for all rows, or
    with `scale_of_rows` one for each, as the file has it.
    `zero_offset` is added to the zeros of the file. `left` are regular expressions of modules that
    stay as they are.
    `by_activations`: groups need not be neighbours, so that the file has to say where each is.
    """

    narrow: Narrow
    form: FileForm = "wide"
    left: tuple[str, ...] = ()
    scale: str = "weight_scale"
    block_rows: int = 1
    scale_of_rows: bool = False
    zero_offset: int = 0
    by_activations: bool = False

    @property
    def title(self) -> str:
        """What it is, in words."""
        narrow = self.narrow
        group = f" by groups of {narrow.group}" if narrow.group else ""
        tokens = f", tokens in {narrow.activations}" if narrow.activations else ""
        return f"weights in {narrow.kind}{group}{tokens}"

    def leaves(self, module: str) -> bool:
        """Whether a module stays as it is."""
        return any(re.fullmatch(pattern, module) for pattern in self.left)


WHEN_LOADED: Mapping[str, Narrow] = {
    "fp8": Narrow("fp8", activations="fp8"),
    "fp8_block": Narrow("fp8", 128, activations="fp8", activation_group=128),
    "fp8_weights": Narrow("fp8"),
    "int8": Narrow("int8", activations="int8"),
    "int8_weights": Narrow("int8"),
    "int4": Narrow("int4", 128),
    "int4_g32": Narrow("int4", 32),
}
"""What weights can be quantised to when they are loaded, by the name of the option."""


def narrowed_table(table: ParameterTable, quantization: Quantization) -> ParameterTable:
    """The parameters of a model whose projections are narrow, but for those of modules that stay
    as they are. Raises UnsupportedModel where a row has no whole groups or bytes.
    """
    found: list[Parameter] = []
    for parameter in table:
        if parameter.name not in MAY_BE_NARROW or parameter.layers is None:
            found.append(parameter)
            continue
        narrow = [layer for layer in parameter.layers if _is_narrow(parameter, layer, quantization)]
        wide = [layer for layer in parameter.layers if layer not in narrow]
        if wide:
            found.append(replace(parameter, layers=wide))
        if narrow:
            _check_rows(parameter, narrow[0], quantization, table)
            found += pieces_of(replace(parameter, layers=narrow), quantization.narrow)
    return replace(table, parameters=tuple(found))


def narrowed_model(model: Model, table: ParameterTable, quantization: Quantization) -> Model:
    """The layers of a model whose projections are narrow. Raises UnsupportedModel where one of a
    mixer's projections is and another is not.
    """
    layers = []
    for index, layer in enumerate(model.layers):
        parameters = table.layer(index)
        changed: Layer = tuple(
            replace(sub, mixer=_narrowed(sub.mixer, parameters, index, quantization))
            for sub in layer
        )
        layers.append(changed)
    # Equal layers are one object: comparing them is then quick.
    same = {layer: layer for layer in layers}
    return replace(model, layers=tuple(same[layer] for layer in layers))


M = TypeVar("M", bound=Attention | LatentAttention | Mlp | Experts | LayerInput)


def _narrowed(
    mixer: Mixer, parameters: Mapping[str, Parameter], layer: int, quantization: Quantization
) -> Mixer:
    """A mixer whose projections are narrow, unless they are left as they are."""
    if not isinstance(mixer, MlpAndExperts):
        return _narrowed_part(mixer, parameters, layer, quantization)
    return replace(
        mixer,
        mlp=_narrowed_part(mixer.mlp, parameters, layer, quantization),
        experts=_narrowed_part(mixer.experts, parameters, layer, quantization),
    )


def _narrowed_part(
    mixer: M, parameters: Mapping[str, Parameter], layer: int, quantization: Quantization
) -> M:
    if not _all_narrow(mixer, parameters, layer, quantization):
        return mixer
    return replace(mixer, narrow=quantization.narrow)


def _all_narrow(
    mixer: Mixer, parameters: Mapping[str, Parameter], layer: int, quantization: Quantization
) -> bool:
    own = [parameters[name] for name in PROJECTIONS[type(mixer)] if name in parameters]
    are = {p.name: _is_narrow(p, layer, quantization) for p in own}
    if len(set(are.values())) > 1:
        raise UnsupportedModel(
            f"quantization_config: leaves some of the projections of layer {layer} as they are and "
            f"not others ({_said(are)}); allowed are all of attention, or all of an MLP"
        )
    return any(are.values())


def _said(narrow: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} {'narrow' if is_ else 'as it is'}" for name, is_ in narrow.items())


def _is_narrow(parameter: Parameter, layer: int, quantization: Quantization) -> bool:
    """Whether a parameter is held narrow in a layer. Raises UnsupportedModel if some of its parts
    are left and others are not.
    """
    modules = [module_of(part.key).format(layer=layer) for part in parameter.parts]
    left = {module: quantization.leaves(module) for module in modules}
    if len(set(left.values())) > 1:
        stay = ", ".join(module for module, is_ in left.items() if is_)
        raise UnsupportedModel(
            f"quantization_config: leaves {stay} as it is and not the others of {parameter.name}, "
            "which are one product here"
        )
    return not any(left.values())


def module_of(key: str) -> str:
    """The module whose weight is called `key`, or the tensor of all experts."""
    return view_of(key)[0].removesuffix(".weight")


def _unit(narrow: Narrow) -> int:
    """Of how many entries rows have a multiple: those of a group, and of a byte."""
    return math.lcm(2, narrow.group or 1)


def _check_rows(
    parameter: Parameter, layer: int, quantization: Quantization, table: ParameterTable
) -> None:
    """Raise UnsupportedModel unless rows of a parameter have whole groups, and whole bytes."""
    k, unit = parameter.shape[1], _unit(quantization.narrow)
    if k % unit == 0:
        return
    module = module_of(parameter.parts[0].key).format(layer=layer)
    why = (
        f"the rows of {parameter.name} ({module}) have {k} entries, allowed are multiples of {unit}"
    )
    if quantization.form != "wide":
        raise UnsupportedModel(f"quantization_config: {quantization.title}, and {why}")
    rows = {parameter.shape[1] for parameter in table if parameter.name in MAY_BE_NARROW}
    fits = [name for name, each in WHEN_LOADED.items() if not any(k % _unit(each) for k in rows)]
    others = f"; all rows of this model fit {', '.join(fits)}" if fits else ""
    named = next(name for name, each in WHEN_LOADED.items() if each == quantization.narrow)
    raise UnsupportedModel(f"quantization: got {named}, and {why}{others}")


def pieces_of(wide: Parameter, narrow: Narrow) -> Iterator[Parameter]:
    """The parameters that hold `wide`."""
    n, k = wide.shape
    groups, (rows, columns) = k // (narrow.group or k), wide.axes
    across = columns if groups > 1 else "one"
    kind = DTYPE_OF[narrow.kind]
    shape = (n, k // 2 if narrow.kind in PACKED else k)

    def piece(what: Piece, shape: tuple[int, int], dtype: ParameterDtype, axis: str) -> Parameter:
        def renamed(parts: Sequence[Part]) -> tuple[Part, ...]:
            return tuple(replace(p, key=f"{module_of(p.key)}:{what}") for p in parts)

        return replace(
            wide,
            name=piece_name(wide.name, what),
            shape=shape,
            axes=(rows, axis),
            dtype=dtype,
            parts=renamed(wide.parts),
            alternatives=tuple(map(renamed, wide.alternatives)),
            piece_of=PieceOf(what, wide, narrow),
        )

    yield piece("values", shape, kind, columns)
    yield piece("scale", (n, groups), narrow.scale_dtype, across)
    if narrow.zeros:
        yield piece("zero", (n, groups), "uint8", across)
    if narrow.static_activations:
        yield _input_scale(wide, narrow)


def _input_scale(wide: Parameter, narrow: Narrow) -> Parameter:
    """What is quantised before a product with `wide`: one number for each module."""

    def parts(every: Sequence[Part]) -> tuple[Part, ...]:
        keys = dict.fromkeys(f"{module_of(part.key)}:input_scale" for part in every)
        return tuple(Part(key, 1, "one") for key in keys)

    own = parts(wide.parts)
    return replace(
        wide,
        name=piece_name(wide.name, "input_scale"),
        shape=(len(own), 1),
        axes=("one", "one"),
        dtype="float32",
        parts=own,
        alternatives=tuple(map(parts, wide.alternatives)),
        piece_of=PieceOf("input_scale", wide, narrow),
    )
