"""Twinfer: one LLM inference engine for TPUs (JAX) and GPUs (PyTorch), and the proof that both
compute the same thing.

Importing this package imports neither JAX nor torch; building an `LLM` imports the framework of its
backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .serving.llm import LLM
    from .serving.outputs import CompletionOutput, RequestOutput
    from .shared.errors import TwinferError
    from .shared.sampling_params import SamplingParams

_WHERE = {
    "LLM": ".serving.llm",
    "CompletionOutput": ".serving.outputs",
    "RequestOutput": ".serving.outputs",
    "SamplingParams": ".shared.sampling_params",
    "TwinferError": ".shared.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "TwinferError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name], __name__), name)
