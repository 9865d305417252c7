"""Finds the folder of a model."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelNotFound

DEMO = "demo"


def model_folder(model: str) -> str:
    """The folder that `model` names: a path, or the bundled model for the word demo. Raises ModelNotFound."""
    if model == DEMO:
        return str(Path(__file__).parent / DEMO)
    folder = Path(model)
    if not folder.exists():
        raise ModelNotFound(f"model: no such folder: {model} (a path to a Hugging Face checkpoint, or the word demo)")
    if not folder.is_dir():
        raise ModelNotFound(f"model: {model} is not a folder")
    return str(folder)
