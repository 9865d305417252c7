"""Tests of the worker on torch-xla, in its own environment: `make test-xla`. Elsewhere none of them
is collected.
"""

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before anything starts the runtime, which reads it once.
    os.environ.setdefault("PJRT_DEVICE", "CPU")


def sibling(name):
    """A module of the other tests, by its path below tests/. Its folder is a package of its own
    name here, so that the module may import its neighbours.
    """
    path = Path(__file__).parents[1] / name
    package = f"of_{path.parent.name}"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(path.parent)]
    return importlib.import_module(f"{package}.{path.stem}")


if "collect_ignore_glob" not in globals():
    end_to_end = sibling("e2e/conftest.py")
    checkpoints, oracle, prompts = (
        end_to_end.checkpoints,
        end_to_end.oracle,
        end_to_end.prompts,
    )


@pytest.fixture(scope="session")
def batching():
    """The workload of tests/e2e/test_batching.py, and what runs it."""
    return sibling("e2e/test_batching.py")


@pytest.fixture(scope="session")
def parity():
    """What compares engines with transformers in tests/e2e."""
    return sibling("e2e/test_parity_transformers.py")
