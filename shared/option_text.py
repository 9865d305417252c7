"""How the command line spells values: functions from a text to a value, which raise ValueError
with what was meant.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .models.fields import show

UNITS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def size(text: str) -> int:
    """A whole number, with a unit if one likes: 4096, 32k (thousands), 32K (1024)."""
    unit = UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(float(digits) * unit) if unit > 1 else int(digits)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number such as 4096 or 32K") from None


def number(text: str) -> float:
    """A number with a fraction."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number such as 0.5") from None


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    return tuple(size(part) for part in words(text))


def written(value: object) -> str:
    """A value as its flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def scales(text: str) -> tuple[float, ...]:
    """Numbers with fractions, separated by commas."""
    try:
        return tuple(float(part) for part in words(text))
    except ValueError:
        raise ValueError(f"{text!r} is not numbers such as 0.05,0.02") from None


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def biases(text: str) -> dict[int, float]:
    """Token ids, and what is added to the logit of each."""
    pairs = [part.partition(":") for part in words(text)]
    try:
        return {int(token): float(bias) for token, _, bias in pairs}
    except ValueError:
        raise ValueError(f"{text!r} is not a list such as 42:5,7:-100") from None


def json_value(text: str) -> Any:
    """Any JSON value."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{show(text)} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{show(text)} is not JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise ValueError(f"{show(text)} is not a JSON object")
    return value


def output_file(text: str) -> str:
    """A file for results, tried before the work, not after. What was not there is not there after
    this either.
    """
    known = os.path.exists(text)
    try:
        open(text, "a", encoding="utf-8").close()
        if not known:
            os.unlink(os.path.realpath(text))  # a link to a file that is not there stays
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot write {show(text)}: {why}") from None
    return text


def op_priority(text: str) -> tuple[str, tuple[str, ...]]:
    """An op and the providers to try for it."""
    op, sign, providers = text.partition("=")
    if not sign or not words(providers):
        raise ValueError(f"{text!r} is not of the form rms_norm=triton,native")
    return op.strip(), words(providers)
