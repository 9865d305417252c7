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
    """The folder that `model` names: a path, the word demo (the bundled model), the name of a
    shape, or that of a model of the Hugging Face Hub that was downloaded before.

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
            return _hub_folder(model, what)
        raise ModelNotFound(
            f"model: {what}: {model[:200]} (a path to a Hugging Face checkpoint, or the word "
            "demo); "
            f"known by name: {', '.join(shape_names())}"
        )
    return model


def _hub_folder(model: str, what: str) -> str:
    """The folder of a model of the Hub in the cache of the library that downloads them, as its
    branch `main` was last. Raises ModelNotFound, which says `what` a folder of this name is.
    """
    # Takes half a second to import, for those who name a model so.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ModelNotFound(
            f"model: {what}: {model}, and no such model among those in {constants.HF_HUB_CACHE}; "
            f"nothing is downloaded here: if it is one of the Hugging Face Hub, `hf download "
            f"{model}` puts it there"
        ) from None
