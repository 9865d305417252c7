"""Dumps: named tensors that another engine computed for some prompts, in a folder.

manifest.json        {"format": "twinfer-dump", "version": 1, "engine": "vLLM 0.11 bfloat16",
                     "prompts": ["prompt-0.safetensors", ...]}
prompt-0.safetensors ...  `token_ids` [tok], and of what the engine computed for them any of
                     `embed` [tok dim] (what enters the first layer), `layer.3` [tok dim] (the
                     stream behind layer 3, hidden and residual added), `logits` [tok vocab]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import NotComparable
from ..sides.subject import Subject
from .bundle import FILE, MANIFEST, arrays_of, read_manifest, read_tensors

FORMAT, VERSION = "twinfer-dump", 1
TOKENS = "token_ids"


@dataclass(frozen=True, slots=True)
class Dump:
    """What `engine` computed: `tensors` by prompt and name, float, a row for each token of
    `prompts` [tok] int32. All prompts have tensors of the same names.
    """

    engine: str
    prompts: tuple[np.ndarray, ...]
    tensors: tuple[Mapping[str, np.ndarray], ...]

    @property
    def names(self) -> set[str]:
        return set(self.tensors[0])

    def rows(self, name: str, places: list[tuple[int, int]]) -> np.ndarray:
        """The rows of a tensor at some (prompt, position)."""
        return np.stack([self.tensors[prompt][name][position] for prompt, position in places])


def read_dump(folder: str, subject: Subject) -> Dump:
    """Read a dump of the subject's model. Raises NotComparable, naming what is wrong."""
    path = Path(folder)
    manifest = read_manifest(path / MANIFEST, FORMAT, VERSION)
    files = manifest.get("prompts")
    if not isinstance(files, list) or not files:
        raise NotComparable(
            f"dump {folder}: prompts must be a list of files, got {str(files)[:60]!r}"
        )
    model = subject.model
    widths = {f"layer.{i}": model.hidden_size for i in range(model.num_layers)}
    widths |= {"embed": model.hidden_size, "logits": model.vocab_size}
    found = [_prompt(path, str(name), widths) for name in files]
    names = set(found[0][1])
    for name, (_, tensors) in zip(files, found, strict=True):
        if set(tensors) != names:
            other = arrays_of(names ^ set(tensors))
            raise NotComparable(f"dump {folder}: {name} and {files[0]} differ in {other}")
    ids, tensors = zip(*found, strict=True)
    return Dump(str(manifest.get("engine", "?"))[:120], ids, tensors)


def _prompt(
    path: Path, name: str, widths: Mapping[str, int]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The token ids and tensors of one file."""
    where = f"dump {path}: {name[:80]}"
    file = path / name
    if not FILE.fullmatch(name) or file.is_symlink():
        raise NotComparable(f"{where} is no plain name of a file in this folder")
    try:
        tensors = read_tensors(file.read_bytes(), where)
    except OSError as error:
        raise NotComparable(f"{where} cannot be read: {error.strerror}") from None
    ids = tensors.pop(TOKENS, None)
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise NotComparable(f"{where} must have {TOKENS}, integers [tok]")
    for tensor, x in tensors.items():
        if tensor not in widths:
            raise NotComparable(
                f"{where} has {tensor[:60]!r}, allowed are {TOKENS}, embed, logits and layer.0 to "
                f"layer.{len(widths) - 3}"
            )
        wanted = len(ids), widths[tensor]
        if x.shape != wanted or x.dtype.kind in "iub":
            raise NotComparable(
                f"{where} has {tensor} {list(x.shape)} in {x.dtype}, must be floats {list(wanted)}"
            )
    if not tensors:
        raise NotComparable(f"{where} has no tensor beside {TOKENS}")
    largest = int(np.abs(ids.astype(np.int64)).max(initial=0))
    if largest >= widths["logits"] or (ids.astype(np.int64) < 0).any():
        raise NotComparable(f"{where} has a token outside of the vocabulary of {widths['logits']}")
    return ids.astype(np.int32), tensors
