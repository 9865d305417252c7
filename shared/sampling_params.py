"""What a request asks of the sampler. Validated once, here; nothing behind this file checks again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOKEN_IDS = 1 << 18
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
LOGIT_BIAS_RANGE = 100.0
MAX_TEMPERATURE = 10.0
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, with the names and defaults that users of vLLM know.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` None lets the engine draw one.
    Penalties follow the usual order: repetition on the raw logits, then frequency and presence, then the bias, then
    masks (`allowed_token_ids`, `banned_token_ids`, `min_tokens`), then the temperature.
    `logprobs` N returns the N best tokens and the sampled one, from the raw logits.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            # numpy's numbers stand for Python's.
            value = getattr(self, item.name)
            if isinstance(value, np.generic) and not isinstance(value, np.bool_):
                object.__setattr__(self, item.name, value.item())
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "banned_token_ids", _ids("banned_token_ids", self.banned_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids", "is empty: at least one token must be allowed, or omit it")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _integer("n", self.n, 1, MAX_N)
        _integer("max_tokens", self.max_tokens, 1, INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"got {self.min_tokens}, must not exceed max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < 0.01:
            # Below this, logits over temperature leave the fixed-point range; every such draw would be greedy anyway.
            raise RequestError(
                "temperature", f"got {self.temperature}, allowed are 0 (greedy) or 0.01 to {MAX_TEMPERATURE:g}"
            )
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "got 0, allowed is more than 0 and at most 1")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"got {_show(getattr(self, name))}, allowed are true and false")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a token id named here does not exist in a vocabulary of `vocab_size`."""
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise RequestError(name, f"token id {token} is out of range: the vocabulary has {vocab_size}")
        for token in self.logit_bias:
            if token >= vocab_size:
                raise RequestError("logit_bias", f"token id {token} is out of range: the vocabulary has {vocab_size}")
        if len(set(self.banned_token_ids)) >= vocab_size:
            raise RequestError("banned_token_ids", "bans the whole vocabulary")
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise RequestError("allowed_token_ids", "every allowed token is also banned")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @property
    def needs_processors(self) -> bool:
        """Whether logits are changed before sampling (penalties, bias, masks): the `full` sampler."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.min_tokens
        )

    def with_seed(self, seed: int) -> SamplingParams:
        """The same settings with `seed`."""
        return replace(self, seed=seed)


def _show(value: Any) -> str:
    """A value for an error message, cut: a request may hold megabytes, or an integer too long for Python to print."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"got {_show(value)}, must be an integer")
    if not low <= value <= high:
        allowed = f"at least {low}" if high >= INT32_MAX and value < low else f"{low} to {high}"
        raise RequestError(name, f"got {_show(value)}, allowed is {allowed}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(name, f"got {_show(value)}, must be a number")
    if not low <= value <= high:  # as it is written, NaN is refused too
        raise RequestError(name, f"got {_show(value)}, allowed is {low:g} to {high:g}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(name, f"got {_show(value)}, must be a list of token ids")
    limit = MAX_STOP_TOKEN_IDS if name == "stop_token_ids" else MAX_TOKEN_IDS
    if len(value) > limit:
        raise RequestError(name, f"has {len(value)} entries, at most {limit} are allowed")
    for token in value:
        _integer(name, token, 0, INT32_MAX)
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise RequestError(name, f"got {_show(value)}, must be a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise RequestError(name, f"has {len(value)} entries, at most {MAX_STOP_STRINGS} are allowed")
    for item in value:
        if not 1 <= len(item) <= MAX_STOP_STRING_LENGTH:
            raise RequestError(
                name, f"has an entry of {len(item)} characters, allowed is 1 to {MAX_STOP_STRING_LENGTH}"
            )
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", f"got {_show(value)}, must map token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError("logit_bias", f"has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON has only string keys, so "42" stands for the token id 42.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        _integer("logit_bias", token, 0, INT32_MAX)
        _number("logit_bias", number, -LOGIT_BIAS_RANGE, LOGIT_BIAS_RANGE)
        bias[token] = float(number)
    return bias
