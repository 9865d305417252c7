"""Checkpoints with quantised weights, read as what `ops/reference/narrow.py` computes with: values,
scales and zeros of a module, whatever its tensors are.

A key that has a colon, as `model.layers.0.mlp.up_proj:scale`, is a piece of a module's weight. All
others are those of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import STACKED, WEIGHT_DTYPES, Checkpoint
from .errors import CheckpointError
from .models.config import ModelConfig
from .models.quantization import Quantization

PIECES = ("values", "scale", "zero", "input_scale")
INTEGERS = ("I32",)
AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The nibble of a word that holds each of its eight neighbours."""
EVEN_NIBBLES = np.uint32(0x0F0F0F0F)
GPTQ_WRAPPED = 15
NO_NUMBER = 255
MXFP4_SCALES = np.ldexp(np.ones(NO_NUMBER, np.float32), np.arange(NO_NUMBER) - 127)
"""The power of two that each byte stands for."""
MXFP4_LARGEST = 127 + 62
"""The byte of the largest scale that kernels take: they keep entries within the range of bfloat16
as what they stand for times 2^-62. No model has weights of 2^62.
"""


def open_checkpoint(
    folder: str | Path, model: ModelConfig, run_dtype: np.dtype[Any] | None = None
) -> Checkpoint:
    """The weights of a model folder, the quantised ones by their pieces: read to be widened to
    `run_dtype`, if that is known. Raises CheckpointError.
    """
    quantization = model.quantization
    if quantization is None or quantization.form == "wide":
        return Checkpoint(folder)
    return NarrowCheckpoint(folder, quantization, model.num_experts, run_dtype)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a module has: the shapes that it may have, and the dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    optional: bool = False


class NarrowCheckpoint(Checkpoint):
    """A checkpoint whose projections are quantised. See `Checkpoint`."""

    holds_pieces = True

    def __init__(
        self,
        folder: str | Path,
        quantization: Quantization,
        experts: int = 0,
        run_dtype: np.dtype[Any] | None = None,
    ) -> None:
        """`experts`: how many a layer has, for formats that have all of them in one tensor."""
        super().__init__(folder)
        self.run_dtype = run_dtype
        self._quantization = quantization
        self._form: Form = FORMS[quantization.form](self, quantization, experts)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, or the module whose piece this is."""
        module, piece = piece_in(name)
        if not piece:
            return super().has(name)
        if piece == "input_scale":
            return super().has(f"{module}.input_scale")
        return super().has(self._form.tensor(module, self._form.values_name))

    def read(self, name: str) -> np.ndarray:
        """A whole tensor, or a piece of all rows of a module."""
        module, piece = piece_in(name)
        if not piece:
            return super().read(name)
        return self._piece(module, piece, 0, self._form.sizes(module)[0])

    def read_slice(self, name: str, axis: int, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` (exclusive) of one axis of a tensor or a piece."""
        module, piece = piece_in(name)
        if not piece:
            return super().read_slice(name, axis, start, stop)
        if axis == 0:
            return self._piece(module, piece, start, stop)
        return self.read(name)[:, start:stop]

    def check(
        self,
        expected: Mapping[str, Sequence[int]],
        ignored: Sequence[str] = (),
        copies: Mapping[str, str] | None = None,
        dtypes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """As of `Checkpoint`: every tensor of a quantised module is there, with its shape and
        dtype.
        """
        found: dict[str, Sequence[int]] = {}
        spare = []
        kinds: dict[str, Sequence[str]] = dict(dtypes or {})
        for key, shape in expected.items():
            module, piece = piece_in(key)
            if not piece:
                found[key] = shape
            elif piece == "values":
                n, k = shape[0], shape[1] * (2 if self._form.packs else 1)
                for name, tensor in self._form.tensors(module, n, k).items():
                    self._expect(self._form.tensor(module, name), tensor, found, kinds)
                bias = f"{module}.bias"
                if self._form.spare_biases and bias not in expected and super().has(bias):
                    spare.append(bias)
                    self._expect(bias, Tensor(((n,),)), found, kinds)
            elif piece == "input_scale":
                self._expect(f"{module}.input_scale", Tensor(((), (1,), (1, 1))), found, kinds)
        super().check(found, ignored, copies, kinds)
        for bias in spare:
            if super().read(bias).any():
                raise CheckpointError(
                    f"{self.where(bias)} holds numbers but 0, and the model has no such bias"
                )

    def where(self, name: str) -> str:
        """As of `Checkpoint`; for values of a module, the tensor that has them."""
        module, piece = piece_in(name)
        return super().where(self._form.tensor(module, self._form.values_name) if piece else name)

    def _expect(
        self, name: str, tensor: Tensor, found: dict[str, Sequence[int]], kinds: dict[str, Any]
    ) -> None:
        here = super().has(name)
        if tensor.optional and not here:
            return
        shape = self.shape(name) if here else tensor.shapes[0]
        found[name] = shape if shape in tensor.shapes else tensor.shapes[0]
        kinds[name] = tensor.dtypes

    def _piece(self, module: str, piece: str, start: int, stop: int) -> np.ndarray:
        """Rows of one piece of a module: values [row m], scale or zero [row group], input_scale
        [1 1].
        """
        if piece == "values":
            return np.ascontiguousarray(self._form.values(module, start, stop))
        if piece == "zero":
            return self._form.zero(module, start, stop).astype(np.uint8)
        if piece == "input_scale":
            scale = super().read(f"{module}.input_scale").astype(np.float32).reshape(1, 1)
        else:
            scale = self._form.scale(module, start, stop).astype(np.float32)
        divides = piece == "input_scale"
        if not (np.isfinite(scale) & ((scale > 0) if divides else (scale >= 0))).all():
            name = "input_scale" if divides else self._form.scale_name
            where = self.where(self._form.tensor(module, name))
            allowed = "above 0" if divides else "from 0 on"
            raise CheckpointError(f"{where} holds a scale that is no number {allowed}")
        return scale


def piece_in(name: str) -> tuple[str, str]:
    """The module and the piece that a key asks for, or "" for a tensor."""
    module, _, piece = name.rpartition(":")
    return (module, piece) if piece in PIECES else (name, "")


class Form(ABC):
    """How a format keeps a module. `packs`: two entries of k lie in one byte of its values.
    `spare_biases`: files may have biases of zeros for modules without any.
    """

    packs = True
    spare_biases = False
    values_name = "weight"
    scale_name = "weight_scale"

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, experts: int) -> None:
        self.checkpoint, self.quantization, self.experts = checkpoint, quantization, experts

    def tensor(self, module: str, name: str) -> str:
        """What a tensor of a module is called."""
        return f"{module}.{name}"

    @abstractmethod
    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """What a module with a weight [n k] has, by its name within the module."""

    @abstractmethod
    def sizes(self, module: str) -> tuple[int, int]:
        """The sizes [n k] of a module's weight."""

    @abstractmethod
    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """Values of rows `start` to `stop`."""

    @abstractmethod
    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """Their scales [row group]."""

    def zero(self, module: str, start: int, stop: int) -> np.ndarray:
        """Their zeros [row group]."""
        raise CheckpointError(f"{module}: this format has no zeros")

    def groups(self, k: int) -> int:
        """Groups of a row."""
        return k // (self.quantization.narrow.group or k)

    def rows(self, name: str, start: int, stop: int, axis: int = 0) -> np.ndarray:
        """Entries of a tensor."""
        return Checkpoint.read_slice(self.checkpoint, name, axis, start, stop)

    def fail(self, name: str, message: str) -> Any:
        """Raise CheckpointError about a tensor."""
        raise CheckpointError(f"{self.checkpoint.where(name)} {message}")


class Plain(Form):
    """An array of values as they are, scales for blocks of rows or for all (compressed-tensors,
    fp8 of transformers and DeepSeek).
    """

    packs = False

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, experts: int) -> None:
        super().__init__(checkpoint, quantization, experts)
        self.scale_name = quantization.scale

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        groups, step = self.groups(k), self.quantization.block_rows
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
        if not step and self.quantization.scale_of_rows:
            shapes += (n, 1), (n,)
        if step:
            shapes = ((-(-n // step), groups), *(((n,),) if groups == step == 1 else ()))
        values = "I8" if self.quantization.narrow.kind == "int8" else "F8_E4M3"
        return {
            "weight": Tensor(((n, k),), (values,)),
            self.scale_name: Tensor(shapes, (*WEIGHT_DTYPES, "F8_E8M0")),
        }

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        n, k = self.checkpoint.shape(f"{module}.weight")
        return n, k

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self.rows(f"{module}.weight", start, stop)

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        name, step = f"{module}.{self.scale_name}", self.quantization.block_rows
        if not step and np.prod(self.checkpoint.shape(name)) == 1:
            whole = Checkpoint.read(self.checkpoint, name).reshape(1, 1)
            return np.repeat(whole, stop - start, 0)
        if step <= 1:
            return self.rows(name, start, stop).reshape(stop - start, -1)
        blocks = self.rows(name, start // step, -(-stop // step)).astype(np.float32)
        return blocks[np.arange(start, stop) // step - start // step]


class Packed(Form):
    """pack-quantized of compressed-tensors: words of eight neighbours in k, the first lowest.

    Values and zeros are stored with 8 added, which is the zero that they have here.
    """

    values_name = "weight_packed"

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        groups = self.groups(k)
        scales = ((n, groups),) if groups > 1 else ((n, 1), (n,))
        found = {
            "weight_packed": Tensor(((n, -(-k // 8)),), INTEGERS),
            "weight_scale": Tensor(scales),
            "weight_shape": Tensor(((2,),), ("I64", "I32")),
            "weight_g_idx": Tensor(((k,),), ("I64", "I32"), optional=True),
        }
        if self.quantization.narrow.zeros:
            found["weight_zero_point"] = Tensor(((-(-n // 8), groups),), INTEGERS)
        return found

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        n, k = (int(x) for x in Checkpoint.read(self.checkpoint, f"{module}.weight_shape"))
        if (n, -(-k // 8)) != self.checkpoint.shape(f"{module}.weight_packed"):
            self.fail(f"{module}.weight_shape", f"says [{n}, {k}], which weight_packed is not")
        return n, k

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        _, k = self.sizes(module)
        check_order(self, f"{module}.weight_g_idx", k)
        words = self.rows(f"{module}.weight_packed", start, stop)
        return words.view(np.uint8)[:, : k // 2]

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self.rows(f"{module}.weight_scale", start, stop).reshape(stop - start, -1)

    def zero(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        words = self.rows(f"{module}.weight_zero_point", start // 8, -(-stop // 8))
        every = nibbles(words.T).T
        return every[start - 8 * (start // 8) :][: stop - start]


class Gptq(Form):
    """GPTQ: words of eight neighbours in k, lying as [k/8 n]; the zeros of eight rows in a word.
    AutoGPTQ wrote a bias for each module.
    """

    spare_biases = True
    values_name = "qweight"
    scale_name = "scales"

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        groups = self.groups(k)
        return {
            "qweight": Tensor(((k // 8, n),), INTEGERS),
            "qzeros": Tensor(((groups, n // 8),), INTEGERS),
            "scales": Tensor(((groups, n),)),
            "g_idx": Tensor(((k,),), ("I32", "I64"), optional=not self.quantization.by_activations),
        }

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        words, n = self.checkpoint.shape(f"{module}.qweight")
        return n, 8 * words

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        check_order(self, f"{module}.g_idx", self.sizes(module)[1])
        words = self.rows(f"{module}.qweight", start, stop, 1)
        return np.ascontiguousarray(words.T).view(np.uint8)

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self.rows(f"{module}.scales", start, stop, 1).T

    def zero(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        name = f"{module}.qzeros"
        every = nibbles(self.rows(name, start // 8, -(-stop // 8), 1)).T
        found = every[start - 8 * (start // 8) :][: stop - start]
        offset = self.quantization.zero_offset
        if offset and (found == GPTQ_WRAPPED).any():
            self.fail(name, f"holds {GPTQ_WRAPPED}, which some read as the zero 16 and others as 0")
        return found + offset


class Awq(Form):
    """AWQ: words of eight rows, in an order of their own, lying as [k n/8]."""

    values_name = "qweight"
    scale_name = "scales"

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        groups = self.groups(k)
        return {
            "qweight": Tensor(((k, n // 8),), INTEGERS),
            "qzeros": Tensor(((groups, n // 8),), INTEGERS),
            "scales": Tensor(((groups, n),)),
        }

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        k, words = self.checkpoint.shape(f"{module}.qweight")
        return 8 * words, k

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        words = self.rows(f"{module}.qweight", start // 8, -(-stop // 8), 1)
        # Eight nibbles at a time: four of one word of k beside those of the next, as bytes.
        lying = np.ascontiguousarray(words.T).view(np.uint32)
        even, odd = lying[:, 0::2], lying[:, 1::2]
        low = (even & EVEN_NIBBLES) | (odd & EVEN_NIBBLES) << 4
        high = (even & ~EVEN_NIBBLES) >> 4 | (odd & ~EVEN_NIBBLES)
        found = np.empty((len(low), 8, low.shape[1]), np.uint8)
        for row, nibble in enumerate(AWQ_PLACES):
            pairs = (high if nibble % 2 else low).view(np.uint8).reshape(*low.shape, 4)
            found[:, row] = pairs[:, :, nibble // 2]
        first = start - 8 * (start // 8)
        return found.reshape(-1, low.shape[1])[first:][: stop - start]

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self.rows(f"{module}.scales", start, stop, 1).T

    def zero(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self._rows(f"{module}.qzeros", start, stop)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [row x] of what lies as [x n/8]."""
        words = self.rows(name, start // 8, -(-stop // 8), 1)
        every = nibbles(words).reshape(len(words), -1, 8)[:, :, AWQ_PLACES]
        first = start - 8 * (start // 8)
        return np.ascontiguousarray(every.reshape(len(words), -1)[:, first:][:, : stop - start].T)


class Nvfp4(Form):
    """nvfp4-pack-quantized of compressed-tensors: e2m1 by groups of 16, whose e4m3 scales are
    divided by one of the tensor.
    """

    values_name = "weight_packed"

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        return {
            "weight_packed": Tensor(((n, k // 2),), ("U8",)),
            "weight_scale": Tensor(((n, self.groups(k)),), ("F8_E4M3",)),
            "weight_global_scale": Tensor(((1,), ()), ("F32",)),
        }

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        n, half = self.checkpoint.shape(f"{module}.weight_packed")
        return n, 2 * half

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        return self.rows(f"{module}.weight_packed", start, stop)

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        name = f"{module}.weight_global_scale"
        whole = Checkpoint.read(self.checkpoint, name).reshape(1, 1)
        if not (whole > 0 and np.isfinite(whole)):
            self.fail(name, f"holds {float(whole[0, 0])}, scales are divided by a positive number")
        scale = self.rows(f"{module}.weight_scale", start, stop).astype(np.float32)
        found: np.ndarray = scale / whole
        return found


class Mxfp4(Form):
    """mxfp4 of gpt-oss: e2m1 by groups of 32 with powers of two as scales, of all experts of a
    layer: [expert n k/32 16] and [expert n k/32].
    """

    values_name = "blocks"
    scale_name = "scales"

    def tensor(self, module: str, name: str) -> str:
        """See `Form`."""
        return f"{module}_{name}"

    def tensors(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """See `Form`."""
        shape = (self.experts, n // self.experts, k // 32)
        return {"blocks": Tensor(((*shape, 16),), ("U8",)), "scales": Tensor((shape,), ("U8",))}

    def sizes(self, module: str) -> tuple[int, int]:
        """See `Form`."""
        experts, n, groups, _ = self.checkpoint.shape(self.tensor(module, "blocks"))
        return experts * n, 32 * groups

    def values(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        name = self.tensor(module, "blocks") + STACKED
        return self.rows(name, start, stop).reshape(stop - start, -1)

    def scale(self, module: str, start: int, stop: int) -> np.ndarray:
        """See `Form`."""
        exponents = self.rows(self.tensor(module, "scales") + STACKED, start, stop)
        largest = int(exponents.max(initial=0))
        if largest > MXFP4_LARGEST:
            allowed = f"or 2^{largest - 127}; allowed are up to 2^{MXFP4_LARGEST - 127}"
            what = "which stands for no number" if largest == NO_NUMBER else allowed
            self.fail(self.tensor(module, "scales"), f"holds {largest}, {what}")
        found: np.ndarray = MXFP4_SCALES[exponents]
        return found


FORMS: Mapping[str, type[Form]] = {
    "plain": Plain,
    "packed": Packed,
    "gptq": Gptq,
    "awq": Awq,
    "nvfp4": Nvfp4,
    "mxfp4": Mxfp4,
}


def check_order(form: Form, name: str, k: int) -> None:
    """Raise CheckpointError unless groups are neighbours in k: `name` says the group of each."""
    if not form.checkpoint.has(name):
        return
    group = form.quantization.narrow.group or k
    order = Checkpoint.read(form.checkpoint, name)
    if not np.array_equal(order, np.arange(k) // group):
        form.fail(
            name,
            f"is not 0 for the first {group} entries, 1 for the next and so on: weights in an "
            "order by activations (desc_act, actorder) are not read",
        )


def nibbles(words: np.ndarray) -> np.ndarray:
    """The eight values in each word, lowest first: [x 8y] uint8 of [x y] int32."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    found: np.ndarray = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(words), -1)
    return found
