"""Finds the folder of a model."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelNotFound

DEMO = "demo"


def model_folder(model: str) -> str:
    """The folder that `model` names: a path, or the bundled model for the word demo. Raises ModelNotFound."""
    if model == DEMO:
        return str(Path(__file__).parent / DEMO)
    # os.path answers False for names that no file can have; Path raises OSError.
    if not os.path.isdir(model):
        what = "is not a folder" if os.path.exists(model) else "no such folder"
        raise ModelNotFound(f"model: {what}: {model[:200]} (a path to a Hugging Face checkpoint, or the word demo)")
    return model
