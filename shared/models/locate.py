"""Finds the folder of a model."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from ..errors import ModelNotFound

DEMO = "demo"
SHAPES_FOLDER = Path(__file__).parent / "shapes"
HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
"""The name of a model on the Hugging Face Hub; a path may look like one."""


@cache
def shape_names() -> tuple[str, ...]:
    """The sizes that are known by name: folders with a config.json and no weights."""
    return tuple(sorted(path.parent.name for path in SHAPES_FOLDER.glob("*/config.json")))


def model_folder(model: str) -> str:
    """The folder that `model` names: a path, the word demo (the bundled model), or the name of a
    shape.

    Raises ModelNotFound.
    """
    if model == DEMO:
        return str(Path(__file__).parent / DEMO)
    if model in shape_names():
        return str(SHAPES_FOLDER / model)
    # os.path answers False for names that no file can have; Path raises OSError.
    if not os.path.isdir(model):
        what = "is not a folder" if os.path.exists(model) else "no such folder"
        if HUB_ID.fullmatch(model):
            raise ModelNotFound(
                f"model: {what}: {model}; nothing is downloaded here: if that is a model of the "
                f"Hugging Face Hub, `hf download {model} --local-dir FOLDER` makes a folder of it"
            )
        raise ModelNotFound(
            f"model: {what}: {model[:200]} (a path to a Hugging Face checkpoint, or the word "
            "demo); "
            f"known by name: {', '.join(shape_names())}"
        )
    return model
