"""What a model's folder holds, as a few digits: answers name the model that gave them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

WEIGHTS = ".safetensors"
READ = (".jinja", ".json", WEIGHTS)
"""How the names of files end that are read of a model."""
PIECE = 1024
"""Bytes that are read from the middle of a tensor."""
MOST_PIECES = 64
"""Tensors of a file that are looked into, evenly among all: a file of experts has thousands, and a
disk that has not read them yet takes a while for each.
"""
CHUNK = 1 << 20
MAX_HEADER = 100_000_000
"""Bytes of a file's header; the library reads no larger one."""


def folder_digest(folder: str | Path) -> str:
    """Hex digits for what a model's folder holds: the names and sizes of the files that are read,
    config, tokenizer and templates whole, of weights the headers and some entries of some tensors.

    Weights that differ elsewhere have the same digits: nobody reads all of them for it.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in READ or not path.is_file():
            continue
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with suppress(OSError):  # a file that may not be read is none of the model's
            for piece in _weight_pieces(path) if path.suffix == WEIGHTS else _chunks(path):
                digest.update(piece)
    return digest.hexdigest()[:16]


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _weight_pieces(path: Path) -> Iterator[bytes]:
    """The header, and the middle of some tensors. A file that is damaged has fewer of them: if it
    is the model's, that is said where it is loaded.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER:
            return
        header = file.read(size)
        yield header
        places = _places(header, path.stat().st_size)
        step = max(1, -(-len(places) // MOST_PIECES))
        for begin, end in places[::step]:
            count = min(PIECE, end - begin)
            file.seek(8 + size + (begin + end - count) // 2)
            yield file.read(count)


def _places(header: bytes, size: int) -> list[tuple[int, int]]:
    """Where each tensor begins and ends, in bytes behind the header, in a file of so many."""
    try:
        entries = json.loads(header)
        places = [entries[name]["data_offsets"] for name in entries if name != "__metadata__"]
        return [(int(begin), int(end)) for begin, end in places if 0 <= begin <= end <= size]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
