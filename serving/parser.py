"""The parser of the command line: complains in one line, suggests the nearest flag, and reads the values of flags."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

UNITS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
MINUS_VALUES = ("--enable-ops", "--prompt", "--stop")
"""Flags whose value may begin with a minus sign, which argparse takes for a flag."""
SHORT_FLAGS = ("-h", "-v", "-tp")
OTHER_NAMES = {
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--attention-backend": "--op-priority",
    "--max-new-tokens": "--max-tokens",
}
"""What other engines call our flags."""


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a help text, and says each flag's default where the text does not."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = text.splitlines()
        return [part for line in lines for part in argparse.HelpFormatter._split_lines(self, line, width)]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_flag, takes_value = bool(action.option_strings), action.nargs != 0
        if not is_flag or not takes_value or action.required or "default" in text or "same as a flag" in text:
            return text
        return text + " (default: %(default)s)" if action.default not in (None, []) else f"{text} (default: none)"


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave with exit code 2."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    @property
    def flags(self) -> list[str]:
        """All long flags."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def refuse(self, unknown: str) -> NoReturn:
        """Complain about an argument that this command does not know, naming the nearest flag."""
        near = nearest(unknown.split("=")[0], self.flags)
        self.error(f"unknown argument {unknown}" + (f"; did you mean {near}?" if near else ""))

    def leaf(self, arguments: argparse.Namespace) -> OneLineParser:
        """The parser of the command that `arguments` name: of `bench offline`, that of `offline`."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                command = action.choices.get(getattr(arguments, action.dest, None))
                if isinstance(command, OneLineParser):
                    return command.leaf(arguments)
        return self


def nearest(unknown: str, flags: Sequence[str]) -> str | None:
    """The flag that somebody may have meant: by another engine's name, by how it begins, by its letters."""
    if OTHER_NAMES.get(unknown) in flags:
        return OTHER_NAMES[unknown]
    longer = [flag for flag in flags if len(unknown) > 3 and flag.startswith(unknown)]
    close = longer or difflib.get_close_matches(unknown, flags, 1)
    return close[0] if close else None


def join_values(words: Sequence[str]) -> list[str]:
    """`--enable-ops -rms_norm` as `--enable-ops=-rms_norm`. Long flags, and the short ones, stay flags."""
    joined: list[str] = []
    for word in words:
        is_value = word.startswith("-") and not word.startswith("--") and word not in SHORT_FLAGS
        if is_value and joined and joined[-1] in MINUS_VALUES:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def size(text: str) -> int:
    """A whole number, with a unit if one likes: 4096, 32k (thousands), 32K (1024)."""
    unit = UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(float(digits) * unit) if unit > 1 else int(digits)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096 or 32K") from None


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def sizes(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(size(part) for part in words(text))


def scales(text: str) -> tuple[float, ...]:
    """Numbers with fractions, separated by commas."""
    try:
        return tuple(float(part) for part in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 0.05,0.02") from None


def biases(text: str) -> dict[int, float]:
    """Token ids, and what is added to the logit of each."""
    pairs = [part.partition(":") for part in words(text)]
    try:
        return {int(token): float(bias) for token, _, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 42:5,7:-100") from None


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def op_priority(text: str) -> tuple[str, tuple[str, ...]]:
    """An op and the providers to try for it."""
    op, sign, providers = text.partition("=")
    if not sign or not words(providers):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form rms_norm=triton,native")
    return op.strip(), words(providers)
