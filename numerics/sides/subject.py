"""What is compared, and where it runs: a model with its sizes (`Subject`), and a backend on a
device (`Target`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...ops import REGISTRY
from ...ops.namespaces import namespace
from ...ops.plugins import load_plugins
from ...shared import option_text
from ...shared.config import BACKENDS, DEVICES, LOAD_FORMATS, EngineConfig, ResolvedConfig, resolve
from ...shared.config import DTYPES as RUN_DTYPES
from ...shared.demand import ANYTHING, Demand
from ...shared.errors import ConfigError
from ...shared.kv_config import NARROW
from ...shared.kv_scales import scaled_model
from ...shared.models import decoder
from ...shared.models.caches import CacheLayout, cache_layout
from ...shared.models.calls import DTYPES
from ...shared.models.config import ModelConfig
from ...shared.models.config_json import load_config
from ...shared.models.locate import model_folder
from ...shared.models.shapes import check_weights
from ...shared.models.table import TOP, Parameter, ParameterTable, keys, piece_name
from ...shared.narrow_checkpoint import open_checkpoint
from ...shared.quantized import with_quantization
from ...shared.step import StepInput
from ...shared.weights import (
    check_checkpoint,
    dummy_parameter,
    dummy_size,
    is_made,
    pieces,
    read_parameter,
)
from ...shared.worker import backend_module


@dataclass(frozen=True, slots=True)
class Target:
    """A backend on a device. `options` are options of its engine, `providers` the first choice
    for some ops.
    """

    backend: str
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    providers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.options.items()]
        parts += [f"{op}={'+'.join(names)}" for op, names in self.providers.items()]
        return ":".join([self.backend, self.device, *([",".join(parts)] if parts else [])])


def name_sides(sides: Iterable[Any]) -> dict[str, Any]:
    """Sides by name: `a jax:cpu`, `b torch:cpu`, ..."""
    return {f"{chr(ord('a') + index)} {side}": side for index, side in enumerate(sides)}


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "compile_level": (int, "a number"),
    "scan_layers": (_switch, "true or false"),
    "row_invariant": (_switch, "true or false"),
}
"""What reads the value of an engine option of a target, and what is allowed."""


def parse_target(text: str) -> Target:
    """`backend:device[:key=value,...]`; a key is an engine option or an op, whose value is
    providers joined by +.

    Raises ConfigError.
    """
    backend, _, rest = text.partition(":")
    device, _, tail = rest.partition(":")
    if backend not in BACKENDS or (device or "auto") not in DEVICES:
        raise ConfigError(
            f"target: got {text!r}, allowed is BACKEND:DEVICE[:KEY=VALUE,...] with "
            f"{', '.join(BACKENDS)} and "
            f"{', '.join(DEVICES)}, such as torch:cuda or jax:cpu:rms_norm=native"
        )
    options: dict[str, Any] = {}
    providers: dict[str, tuple[str, ...]] = {}
    load_plugins()
    for pair in filter(None, tail.split(",")):
        key, sign, value = pair.partition("=")
        if not sign or not value:
            raise ConfigError(f"target: got {pair!r} in {text!r}, allowed is KEY=VALUE")
        if key in OPTIONS:
            read, allowed = OPTIONS[key]
            try:
                options[key] = read(value)
            except ValueError:
                raise ConfigError(f"target: {key} in {text!r} must be {allowed}") from None
        elif key in {op.name for op in REGISTRY}:
            providers[key] = tuple(value.split("+"))
        else:
            raise ConfigError(
                f"target: {key!r} in {text!r} is neither an op nor one of {', '.join(OPTIONS)}"
            )
    return Target(backend, device or "auto", options, providers)


MAX_MODEL_LEN = 256
"""Tokens of a sequence at most, unless more are asked for: the references run on the host."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the sizes of the steps that are compared. `folder` holds config.json, and
    weights unless `dummy`.
    """

    name: str
    folder: str
    model: ModelConfig
    dtype: str
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = 8
    tokens: int = 64
    page_size: int = 16
    num_pages: int = 64
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_scales: tuple[float, float] | None = None

    @property
    def plain(self) -> Subject:
        """The same with the checkpoint's weights, and a cache that holds keys and values
        themselves.
        """
        wide = self.plain_cache
        if self.quantization is None:
            return wide  # narrow weights of the checkpoint's own are its weights
        return replace(wide, model=replace(wide.model, quantization=None), quantization=None)

    @property
    def plain_cache(self) -> Subject:
        """The same with a cache that holds keys and values themselves."""
        model = replace(self.model, kv_scales=None)
        return replace(self, model=model, kv_cache_dtype="auto", kv_cache_scales=None)

    @property
    def weights_alone(self) -> Subject:
        """The same with narrow weights as they are, but tokens and a cache that are not narrow."""
        plain, quantization = self.plain, self.model.quantization
        if self.quantization is None or quantization is None:
            return plain
        narrow = replace(quantization.narrow, activations=None, activation_group=0)
        model = replace(plain.model, quantization=replace(quantization, narrow=narrow))
        return replace(plain, model=model, quantization=self.quantization)

    @property
    def cache_dtype(self) -> str:
        """numpy's name of what the cache holds."""
        return NARROW.get(self.kv_cache_dtype, self.dtype)

    def with_dtype(self, dtype: str) -> Subject:
        """The same in another run dtype."""
        return replace(self, dtype=dtype)

    def rotary_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [position r], by the model's definition."""
        return decoder.rotary_tables(self.model, self.max_model_len)

    def flags(self) -> list[str]:
        """The flags of a command of `twinfer numerics` that name it, besides the model's, where
        they are not the defaults.
        """
        usual = {
            "dtype": self.model.dtype, "load_format": "auto", "seed": 0, "tokens": 64,
            "max_model_len": min(MAX_MODEL_LEN, self.model.max_position_embeddings),
            "quantization": None, "kv_cache_dtype": "auto", "kv_cache_scales": None,
        }  # fmt: skip
        words = []
        for name, value in usual.items():
            own = getattr(self, name)
            if own != value:
                words += [f"--{name.replace('_', '-')}", option_text.written(own)]
        return words

    def for_mode(self, mode: str) -> Subject:
        """As a mode looks at it: S in float32."""
        return self.with_dtype("float32") if mode == "S" else self

    @property
    def most_tokens(self) -> int:
        """Tokens that a step of an engine may have."""
        return max(self.tokens, self.max_num_seqs)

    def engine_config(self, target: Target, **options: Any) -> EngineConfig:
        """What an engine of `target` is started with. `options` go before those of the target."""
        names = (
            "dtype", "load_format", "seed", "max_model_len", "max_num_seqs", "page_size",
            "quantization", "kv_cache_dtype", "kv_cache_scales",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names} | {
            "model": self.name, "backend": target.backend, "device": target.device,
            "max_num_batched_tokens": self.most_tokens, "op_priority": dict(target.providers),
        }  # fmt: skip
        return EngineConfig(**values | dict(target.options) | options)

    def resolved(
        self, target: Target, steps: Sequence[StepInput] = (), demand: Demand = ANYTHING
    ) -> ResolvedConfig:
        """The engine configuration on `target`, with the programs of `steps`, or of any. Raises
        ConfigError, BackendUnavailable.
        """
        config = self.engine_config(target, num_pages=self.num_pages)
        device = backend_module(target.backend).find_device(target.device)
        resolved = resolve(config, self.model, device, demand)[0]
        if not steps:
            return resolved
        shapes = {step.descriptor for step in steps}
        decode = {self.max_num_seqs} | {d.tokens for d in shapes if d.kind == "decode"}
        mixed = {self.most_tokens} | {d.tokens for d in shapes if d.kind == "mixed"}
        return replace(
            resolved, decode_sizes=tuple(sorted(decode)), mixed_sizes=tuple(sorted(mixed))
        )

    @property
    def layout(self) -> CacheLayout:
        """Where the layers keep keys and values in the steps that are compared."""
        return cache_layout(decoder.model_of(self.model), self.page_size, self.max_model_len)

    @property
    def identity(self) -> str:
        """Hex digest of what must be equal for two captures to be of the same model: config,
        weights' source, seed.
        """
        weights = f"dummy {self.seed}" if self.load_format == "dummy" else "checkpoint"
        narrow = self.quantization, self.kv_cache_dtype, self.kv_cache_scales
        options = "" if narrow == (None, "auto", None) else f"/{narrow}"
        text = f"{self.model.raw_hash}/{weights}{options}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_subject(
    name: str,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    tokens: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = MAX_MODEL_LEN,
    page_size: int = 16,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_scales: tuple[float, float] | None = None,
) -> Subject:
    """The subject for a model folder, or the word demo. The last three are engine options that say
    what weights and cache hold: of all sides, as other numbers are another model.

    Raises ModelError, ConfigError.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format: got {load_format!r}, allowed are {', '.join(LOAD_FORMATS)}"
        )
    if dtype not in RUN_DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}, allowed are {', '.join(RUN_DTYPES)}")
    # For what an engine refuses of these.
    EngineConfig(
        model=name, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        kv_cache_scales=kv_cache_scales,
    )  # fmt: skip
    if kv_cache_dtype not in ("auto", *NARROW):
        raise ConfigError(
            f"kv_cache_dtype: got {kv_cache_dtype}, allowed are auto, {', '.join(NARROW)}: a "
            "comparison takes several run dtypes, and a wide cache is of each"
        )
    if kv_cache_scales is not None and kv_cache_dtype == "auto":
        raise ConfigError(
            f"kv_cache_scales: got {kv_cache_scales} and kv_cache_dtype auto, allowed with "
            f"{' and '.join(NARROW)}: a cache of the run dtype has none"
        )
    check_weights(name, load_format)
    folder = model_folder(name)
    model, _ = with_quantization(load_config(folder), quantization)
    if kv_cache_dtype in NARROW:
        weights = None if load_format == "dummy" else folder
        model, _ = scaled_model(model, NARROW[kv_cache_dtype], kv_cache_scales, weights)
    # Here, where the option has a name: a model whose products it cannot take.
    decoder.parameters_of(model)
    length = min(max_model_len, model.max_position_embeddings)
    pages = max_num_seqs * -(-length // page_size)
    return Subject(
        name,
        folder,
        model,
        model.dtype if dtype == "auto" else dtype,
        load_format,
        seed,
        length,
        max_num_seqs,
        tokens,
        page_size,
        pages,
        quantization,
        kv_cache_dtype,
        kv_cache_scales,
    )


def check_recordable(subject: Subject, what: str) -> None:
    """Raise ConfigError for a model that bundles and searches do not know: they give each layer a
    cache of one shape, which is its own, and nothing besides the stream.
    """
    model = subject.model
    why = {
        "caches of two shapes": model.full_heads is not None,
        "caches of other layers": model.num_reading_layers > 0,
        "inputs of their own": model.layer_input_size > 0,
    }
    found = [title for title, is_so in why.items() if is_so]
    if found:
        raise ConfigError(
            f"model: got {subject.name} ({model.architecture}), whose layers have "
            f"{', '.join(found)}; {what} takes models whose layers all keep keys and values of one "
            "shape, each its own"
        )


KEPT_BYTES = 4 << 30
"""Of layers' weights that are kept on the host between steps: making dummy ones anew takes
longer than using them.
"""


class HostWeights:
    """A model's weights as numpy arrays in the run dtype, read on demand: what every side's
    weights must equal.
    """

    def __init__(self, subject: Subject) -> None:
        """Raises CheckpointError if the checkpoint is not that of the model."""
        self.subject = subject
        self._table = decoder.parameters_of(subject.model)
        self._checkpoint = None
        if subject.load_format != "dummy":
            self._checkpoint = open_checkpoint(subject.folder, subject.model)
            check_checkpoint(self._checkpoint, self._table)
        self._top = {name: self._read(p, TOP) for name, p in self._table.top.items()}
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._left = KEPT_BYTES

    @property
    def table(self) -> ParameterTable:
        """What the names stand for."""
        return self._table

    def top(self) -> dict[str, np.ndarray]:
        """Weights outside of layers, by name."""
        return self._top

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """Weights of one layer, by name."""
        if index in self._kept:
            return self._kept[index]
        found = {name: self._read(p, index) for name, p in self._table.layer(index).items()}
        size = sum(x.nbytes for x in found.values())
        if size <= self._left:
            self._kept[index] = found
            self._left -= size
        return found

    def _read(self, parameter: Parameter, layer: int) -> np.ndarray:
        if is_made(self._checkpoint, parameter) and parameter.piece_of is not None:
            wide = self._read(parameter.piece_of.wide, layer)
            made = pieces(namespace("numpy"), wide, parameter.piece_of.narrow)
            return np.asarray(made[parameter.piece_of.piece])
        dtype = DTYPES[parameter.dtype_in(self.subject.dtype)]
        if self._checkpoint is not None:
            return read_parameter(self._checkpoint, parameter, layer, dtype).astype(dtype)
        index = np.arange(dummy_size(parameter), dtype=np.int32)
        values = dummy_parameter(
            namespace("numpy"), parameter, max(layer, 0), self.subject.seed, index
        )
        return np.asarray(values).astype(dtype).reshape(parameter.shape)


def widened_layer(weights: HostWeights, index: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the narrow weights of a layer stand for [n k] float64, by the name of the plain ones,
    and the step of each: made apart from the ops.
    """
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    of_layer = weights.layer(index)
    for name, parameter in weights.table.layer(index).items():
        of = parameter.piece_of
        if of is None or of.piece != "values":
            continue
        entries, kind = of_layer[name], of.narrow.kind
        if kind == "int4":
            pairs = np.stack([entries & 15, entries >> 4], -1).astype(np.float64)
            entries = pairs.reshape(len(entries), -1) - 8.0
        values = entries.astype(np.float64)
        scale = of_layer[piece_name(name, "scale")].astype(np.float64)
        step = scale.repeat(values.shape[1] // scale.shape[1], axis=1)
        wide = values * step
        if kind == "fp8":  # of 3 bits behind the first
            step = np.maximum(np.abs(wide) * 2.0**-3, step * 2.0**-9)
        found[of.wide.name] = wide, step
    return found


def checkpoint_of(
    weights: HostWeights, layer_weights: Callable[[int], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Weights under their names in a checkpoint; `layer_weights` are those of each layer."""
    found: dict[str, np.ndarray] = {}
    for parameter, layer in weights.table.placed():
        array = (weights.top() if layer == TOP else layer_weights(layer))[parameter.name]
        array = array / array.dtype.type(parameter.factor) - array.dtype.type(parameter.offset)
        start = 0
        for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
            tensor = found.setdefault(key, np.empty(parameter.part_shape(part), array.dtype))
            rows = part.rows_in_tensor(np.arange(part.rows))
            tensor[rows] = array[start : start + part.rows]
            start += part.rows
    return found
