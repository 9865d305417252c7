"""What an engine asks of a request before it takes it. Each check raises RequestError with the
field, what came and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import RequestError
from .models.config import ModelConfig
from .models.fields import show
from .sampling_params import SamplingParams

MAX_PRIORITY = 1000
MAX_SALT_LENGTH = 256


def token_array(prompt: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int64 [n], n > 0. Raises RequestError for anything else: booleans, floats,
    text, bytes, nesting.
    """
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                "prompt", f"got an array of {prompt.dtype} {prompt.shape}, must be integers [n]"
            )
        if prompt.dtype.kind == "u":
            prompt = prompt.tolist()
    elif isinstance(prompt, (str, bytes, bytearray, memoryview)) or not isinstance(
        prompt, Sequence
    ):
        raise RequestError(
            "prompt", f"got {type(prompt).__name__}, must be a list of integer token ids"
        )
    # one pass that does not leave C, where all is as it mostly is
    elif set(map(type, prompt)) != {int}:
        for item in prompt:
            if isinstance(item, (bool, np.timedelta64)) or not isinstance(item, (int, np.integer)):
                raise RequestError(
                    "prompt", f"got {type(item).__name__} {show(item)}, token ids must be integers"
                )
        # As Python's own: numpy turns an unsigned integer of 2**63 and more into a negative one
        # without a word.
        prompt = [int(item) for item in prompt]
    if len(prompt) == 0:
        raise RequestError("prompt", "is empty: at least one token is needed")
    try:
        return np.asarray(prompt, np.int64)
    except OverflowError as error:
        token = next(item for item in prompt if not -(2**63) <= item < 2**63)
        raise RequestError("prompt", f"token id {show(token)} is out of range") from error


def check_tokens(tokens: np.ndarray, model: ModelConfig) -> None:
    """Token ids [n] must be words of the model's vocabulary that stand for text."""
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        raise out_of_range(int(tokens[outside.argmax()]), model.vocab_size)
    images = np.isin(tokens, model.image_token_ids)
    if images.any():
        token = int(tokens[images.argmax()])
        raise RequestError(
            "prompt",
            f"token id {token} stands for an image or a video, and prompts are text for this "
            "engine",
        )


def out_of_range(token: int, vocab_size: int) -> RequestError:
    """The error for a token id of a prompt that the vocabulary has not."""
    return RequestError(
        "prompt", f"token id {show(token)} is out of range: the vocabulary has {vocab_size}"
    )


def check_priority(priority: Any, scheduling_policy: str) -> None:
    """A priority must be a small integer, and 0 where the engine does not look at it."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            "priority", f"got {show(priority)}, must be an integer within {MAX_PRIORITY} of 0"
        )
    if priority and scheduling_policy != "priority":
        raise RequestError(
            "priority", f"got {priority}, needs an engine with scheduling_policy='priority'"
        )


def check_cache_salt(cache_salt: Any) -> None:
    """A cache salt must be a short text."""
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_LENGTH:
        # a secret: of a text, its length alone
        text = isinstance(cache_salt, str)
        got = f"{len(cache_salt)} characters" if text else show(cache_salt)
        raise RequestError(
            "cache_salt", f"got {got}, must be a string of at most {MAX_SALT_LENGTH} characters"
        )


def stop_tokens(params: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a request, ascending. With `min_tokens` others must be left."""
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
    if params.min_tokens and not _is_any_left(params, stop, model.vocab_size):
        raise RequestError(
            "min_tokens", "every allowed token would end the request, so none is left before"
        )
    return tuple(sorted(stop))


def _is_any_left(params: SamplingParams, stop: set[int], vocab_size: int) -> bool:
    """Whether a token may be sampled while those that end the request are masked."""
    masked = stop | set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        return not set(params.allowed_token_ids) <= masked
    return len(masked) < vocab_size
