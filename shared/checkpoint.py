"""Weights on disk: one safetensors file, or several with an index, read tensor by tensor.
Pickles are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError
from .models.fields import nearest, need_folder, read_json, show

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_),
}
WEIGHT_DTYPES = ("F32", "BF16", "F16")

STACKED, TRANSPOSED = ":stacked", ":transposed"
"""Behind the name of a tensor [expert n ...] or [expert k n]: read as [expert * n, ...], [expert *
n, k]. The number of experts may stand behind them, which a tensor then has to have.
"""
VIEWED = re.compile(f"(.+)({STACKED}|{TRANSPOSED})([0-9]*)")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN = 5
"""Tensors that an error names."""
ROWS = 4096
"""Rows that are compared at a time."""
COLUMNS = 64
"""Columns that are put in their places at a time where a matrix is transposed."""


def view_of(name: str) -> tuple[str, str]:
    """The tensor, and the view that a name asks for, or "" for the tensor as it is."""
    found = VIEWED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def matrix_shape(shape: Sequence[int], view: str) -> tuple[int, ...]:
    """The shape of a view; of a tensor that has too few axes, its own."""
    if view == TRANSPOSED and len(shape) == 3:
        return shape[0] * shape[2], shape[1]
    if view == STACKED and len(shape) > 1:
        return shape[0] * shape[1], *shape[2:]
    return tuple(shape)


def has_weights(folder: str | Path) -> bool:
    """Whether a model folder has weights that can be read."""
    return any(os.path.exists(Path(folder) / name) for name in (SINGLE, INDEX))


class Checkpoint:
    """The tensors of a model folder. Opens each file when a tensor of it is first asked for.

    Raises ModelNotFound if there is no such folder. Everything else that is wrong with the weights
    is a CheckpointError of one line, when it is first noticed: a missing file here, a corrupt one
    when it is opened.
    """

    holds_pieces = False
    """Whether quantised weights are read by their pieces (`narrow_checkpoint.py`)."""
    run_dtype: np.dtype[Any] | None = None
    """What such weights are widened to, if that is known."""

    def __init__(self, folder: str | Path) -> None:
        """Tensors of all experts of a layer are read as one matrix below the name with `STACKED` or
        `TRANSPOSED` behind it.
        """
        self._folder = need_folder(folder)
        self._open: dict[str, tuple[Any, np.ndarray]] = {}
        self._bytes: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        if os.path.exists(self._folder / SINGLE):
            self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        elif os.path.exists(self._folder / INDEX):
            self._files = self._read_index()
        else:
            self._refuse_folder()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. They open again if needed; arrays that were read stay valid."""
        self._open.clear()
        self._bytes.clear()

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; reads the file's header only."""
        tensor, view = view_of(name)
        if view:
            return matrix_shape(self.shape(tensor), view)
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a tensor (bfloat16 is that of ml_dtypes); reads the file's header only."""
        name, _ = view_of(name)
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            self._fail(f"{self.where(name)} has dtype {stored}, allowed are {', '.join(DTYPES)}")
        return DTYPES[stored]

    def usual_dtype(self) -> str | None:
        """The dtype that most entries have of those that weights may have, None without such;
        reads the files' headers only.
        """
        entries: Counter[str] = Counter()
        for name in self._files:
            tensor = self._slice(name)
            if tensor.get_dtype() in WEIGHT_DTYPES:
                entries[DTYPES[tensor.get_dtype()].name] += prod(tensor.get_shape())
        return max(entries, key=lambda dtype: entries[dtype], default=None)

    def read(self, name: str) -> np.ndarray:
        """A whole tensor, where it lies in its file: the caller's to keep, not to write to."""
        if view_of(name)[1]:
            return self.read_slice(name, 0, 0, self.shape(name)[0])
        return self._mapped(name)

    def read_slice(self, name: str, axis: int, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` (exclusive) of one axis, as in `read`; only what is looked at
        is read from disk.
        """
        tensor, view = view_of(name)
        if view:
            return self._read_matrix(tensor, view, axis, start, stop)
        shape = self.shape(name)
        if not 0 <= axis < len(shape) or not 0 <= start <= stop <= shape[axis]:
            self._fail(
                f"{self.where(name)} has shape {list(shape)}, which has no {start}:{stop} on "
                "axis "
                f"{axis}"
            )
        part = (slice(None),) * axis + (slice(start, stop),)
        return self._mapped(name)[part]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return view_of(name)[0] in self._files

    def check(
        self,
        expected: Mapping[str, Sequence[int]],
        ignored: Sequence[str] = (),
        copies: Mapping[str, str] | None = None,
        dtypes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Raise CheckpointError unless the tensors are those of `expected`, with these shapes and a
        float dtype, or one of `dtypes`.

        Tensors whose names fit one of the patterns `ignored` may be there too, and so may those
        that `copies` maps to the tensor that they must equal. One message reports everything:
        missing, unexpected and mismatched tensors, and those that lie in a file for which the index
        does not name them.
        """
        copies, dtypes = copies or {}, dtypes or {}
        expected = dict(self._on_disk(name, shape) for name, shape in expected.items())
        extra = [name for name in self._files if name not in expected]
        unexpected = [
            name for name in extra if not any(fnmatchcase(name, pattern) for pattern in ignored)
        ]
        for name in [name for name in unexpected if copies.get(name) in self._files]:
            unexpected.remove(name)
            self._check_copy(name, copies[name])
        wrong = []
        for name, shape in expected.items():
            if name not in self._files:
                continue
            found, stored = self.shape(name), self._slice(name).get_dtype()
            allowed = dtypes.get(name, WEIGHT_DTYPES)
            if found != tuple(shape):
                wrong.append(f"{self.where(name)} has shape {list(found)}, expected {list(shape)}")
            elif stored not in allowed:
                wrong.append(
                    f"{self.where(name)} has dtype {stored}, expected {' or '.join(allowed)}"
                )
        missing = [name for name in expected if name not in self._files]
        strangers = [name + nearest(name, expected) for name in sorted(unexpected)[:SHOWN]]
        strangers += sorted(unexpected)[SHOWN:]
        lists = (
            ("missing", sorted(missing)),
            ("unexpected", strangers),
            ("mismatched", sorted(wrong)),
            ("not of the index", self._outside_index(ignored)),
        )
        problems = [f"{len(found)} {what}: {_first(found)}" for what, found in lists if found]
        if problems:
            self._fail(f"{self._folder}: tensors do not fit the model: {'; '.join(problems)}")

    def _outside_index(self, ignored: Sequence[str]) -> list[str]:
        """The tensors of each file that the index does not say are there."""
        return [
            f"{self._folder / file}: {show(name)}"
            for file in sorted(set(self._files.values()))
            for name in sorted(self._handle(file).keys())
            if self._files.get(name) != file
            and not any(fnmatchcase(name, pattern) for pattern in ignored)
        ]

    def _on_disk(self, name: str, shape: Sequence[int]) -> tuple[str, Sequence[int]]:
        """The tensor that a matrix of all experts is read from, and the shape that it must have."""
        found = VIEWED.fullmatch(name)
        if found is None:
            return name, shape
        (rows, *rest), experts = shape, int(found[3])
        inner = (rows // experts, *rest)
        return found[1], (experts, *(reversed(inner) if found[2] == TRANSPOSED else inner))

    def _read_matrix(self, tensor: str, view: str, axis: int, start: int, stop: int) -> np.ndarray:
        """Rows or columns of a matrix, of the experts that have them."""
        experts, *_ = shape = self.shape(tensor)
        if axis == 1:
            whole = self._read_matrix(tensor, view, 0, 0, matrix_shape(shape, view)[0])
            return np.ascontiguousarray(whole[:, start:stop])
        rows = matrix_shape(shape, view)[0] // experts
        first, last = start // rows, -(-stop // rows)
        some = self.read_slice(tensor, 0, first, last)
        if view == TRANSPOSED:
            some = _transpose(some)
        every = some.reshape(len(some) * rows, *some.shape[2:])
        return np.ascontiguousarray(every[start - first * rows :][: stop - start])

    def check_scales(self, name: str, size: int, low: float, high: float) -> None:
        """Raise CheckpointError unless a tensor has one value or `size` of them, each a number from
        `low` to `high`.
        """
        shape = self.shape(name)
        if shape not in ((), (1,), (size,)):
            self._fail(
                f"{self.where(name)} has shape {list(shape)}, a scale has [], [1] or [{size}]"
            )
        values = self.read(name).astype(np.float64).reshape(-1)
        wrong = ~((values >= low) & (values <= high))
        if wrong.any():
            self._fail(
                f"{self.where(name)} holds {float(values[wrong.argmax()])}, a scale is from "
                f"{low:.4g} to {high:.4g}"
            )

    def _check_copy(self, name: str, original: str) -> None:
        """A head beside tied embeddings is a copy, or config.json is wrong; transformers 5 would
        use both then.
        """
        both, copy = (name, original), self.shape(name)
        equal, wide = copy == self.shape(original), len({self.dtype(one) for one in both}) > 1
        for start in range(0, sum(copy[:1]) if equal else 0, ROWS):
            stop = min(start + ROWS, copy[0])
            rows = [self.read_slice(one, 0, start, stop) for one in both]
            one, other = (x.astype(np.float32) if wide else x for x in rows)
            equal = equal and np.array_equal(bits_of(one), bits_of(other))
        if not equal:
            self._fail(
                f"{self.where(name)} differs from {original}, though config.json ties them: set "
                "tie_word_embeddings "
                "to false there to use both"
            )

    def _read_index(self) -> dict[str, str]:
        path = self._folder / INDEX
        files = read_json(path, CheckpointError).get("weight_map")
        if not isinstance(files, dict) or not files:
            self._fail(f"{path}: weight_map is {show(files)}, must map tensors to files")
        for name, file in files.items():
            # A plain name of this folder: the index comes with the download and must not reach any
            # other file.
            if (
                not isinstance(file, str)
                or not re.fullmatch(r"[\w][\w.+-]*\.safetensors", file)
                or ".." in file
            ):
                self._fail(
                    f"{path}: {show(name)} is in {show(file)}, must be a .safetensors file in the "
                    "same folder"
                )
        for file in sorted(set(files.values())):
            if not os.path.isfile(self._folder / file):
                self._refuse_dangling(file)
                self._fail(f"{path}: names {file}, which is not in {self._folder}")
        return files

    def _refuse_dangling(self, file: str) -> None:
        """Raise CheckpointError about a link to nowhere: caches of downloads consist of links."""
        path = self._folder / file
        if os.path.islink(path) and not os.path.exists(path):
            self._fail(f"{path}: is a link to {os.readlink(path)}, which is not there")

    def _refuse_folder(self) -> NoReturn:
        for name in (SINGLE, INDEX):
            self._refuse_dangling(name)
        pickles = sorted(path.name for pattern in PICKLES for path in self._folder.glob(pattern))
        if pickles:
            self._fail(
                f"{self._folder}: has only pickled weights ({_first(pickles)}), which can run "
                "code "
                "when they are read; "
                f"only safetensors are read: convert them to {SINGLE}"
            )
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        hint = f" (it has {_first(others)}, which no index names)" if others else ""
        self._fail(f"{self._folder}: no weights: neither {SINGLE} nor {INDEX}{hint}")

    def _handle(self, file: str) -> Any:
        """The library's view of a file. The file is mapped then too: one that is put in its place
        later, or none, changes nothing.
        """
        if file not in self._open:
            path = self._folder / file
            try:
                opened = safe_open(path, framework="numpy")
                self._open[file] = opened, np.asarray(np.memmap(path, np.uint8, "r"))
            except SafetensorError as why:
                self._fail(f"{path}: is truncated or corrupt: {show(str(why), 160)}")
            except OSError as why:
                self._fail(f"{path}: cannot be read: {why.strerror or show(str(why), 160)}")
        return self._open[file][0]

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            self._fail(f"{self._folder}: no tensor {show(name)}")
        return self._get(name, lambda: self._handle(self._files[name]).get_slice(name))

    def _mapped(self, name: str) -> np.ndarray:
        """A tensor in the memory that its file is mapped to. The library's own arrays are copies,
        which it makes one at a time.
        """
        shape, dtype = self.shape(name), self.dtype(name)
        if 0 in shape:
            return np.empty(shape, dtype)

        def bytes_of() -> np.ndarray:
            data, header = self._bytes_of(self._files[name])
            begin, end = header[name]["data_offsets"]
            return data[begin:end].view(dtype).reshape(shape)

        found: np.ndarray = self._get(name, bytes_of)
        return found

    def _bytes_of(self, file: str) -> tuple[np.ndarray, dict[str, Any]]:
        """The bytes of a file's tensors, mapped, and its header. Headers of many experts take tens
        of milliseconds to read: each is read once.
        """
        if file not in self._bytes:
            _, raw = self._open[file]
            start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
            self._bytes[file] = raw[start:], json.loads(raw[8:start].tobytes())
        return self._bytes[file]

    def _get(self, name: str, read: Any) -> Any:
        try:
            return read()
        except (SafetensorError, OSError, ValueError) as why:
            self._fail(f"{self.where(name)} cannot be read: {show(str(why), 160)}")

    def where(self, name: str) -> str:
        """The file and the name of a tensor, for messages."""
        name, _ = view_of(name)
        return f"{self._folder / self._files[name]}: {show(name)}"

    def _fail(self, message: str) -> NoReturn:
        raise CheckpointError(message)


def bits_of(values: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which numpy moves and compares many at a time."""
    return values.view(f"u{values.dtype.itemsize}")


def take(values: np.ndarray, places: np.ndarray, axis: int = 0) -> np.ndarray:
    """`values.take(places, axis)`. numpy takes entries of bfloat16 and float8 one by one, but for
    their bits.
    """
    return bits_of(values).take(places, axis).view(values.dtype)


def _transpose(values: np.ndarray) -> np.ndarray:
    """[a b c] as [a c b], in new memory, by as many columns at a time as share what is read of the
    memory.
    """
    bits = bits_of(values)
    found = np.empty(bits.swapaxes(1, 2).shape, bits.dtype)
    for start in range(0, bits.shape[1], COLUMNS):
        stop = start + COLUMNS
        found[:, :, start:stop] = bits[:, start:stop].swapaxes(1, 2)
    return found.view(values.dtype)


def _first(items: Sequence[str]) -> str:
    rest = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(show(item, 240) for item in items[:SHOWN]) + rest
