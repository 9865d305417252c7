"""The parser of the command line: complains in one line, and suggests the nearest flag."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ..shared import option_text
from ..shared.engine_config import EngineConfig
from ..shared.options import near_flags, options_of
from ..shared.sampling_params import SamplingParams
from . import other_flags

MINUS_VALUES = ("--bad-words", "--enable-ops", "--prompt", "--stop")
"""Flags whose value may begin with a minus sign, which argparse takes for a flag."""
TABLE = (*options_of(EngineConfig).values(), *options_of(SamplingParams).values())
SHORT_FLAGS = (
    "-h",
    "-v",
    *(flag for entry in TABLE for flag in entry.short if not flag.startswith("--")),
)
OTHER_NAMES = near_flags(TABLE) | other_flags.OTHER_NAMES
"""What other engines call our flags."""
CLOSE = 0.72
"""How alike a flag and an unknown one must be by their letters. At 0.6, which is difflib's own,
--block-size is one that somebody may have meant by --tokenizer.
"""


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a help text, and says each flag's default where the text does not."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = text.splitlines()
        return [
            part
            for line in lines
            for part in argparse.HelpFormatter._split_lines(self, line, width)
        ]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_flag, takes_value = bool(action.option_strings), action.nargs != 0
        if (
            not is_flag
            or not takes_value
            or action.required
            or "default" in text
            or "same as a flag" in text
        ):
            return text
        return (
            text + " (default: %(default)s)"
            if action.default not in (None, [])
            else f"{text} (default: none)"
        )


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options, allow_abbrev=False)

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
        flag = other_flags.name_of(unknown)
        answer = other_flags.answer_to(flag)
        # An answer that names flags of ours is one where this command has them.
        ours = re.findall("--[a-z-]+", answer) if answer.startswith(("see ", "say ")) else []
        if answer and set(ours) <= set(self.flags):
            self.error(f"unknown argument {flag}: {answer}")
        near = nearest(flag, self.flags)
        self.error(f"unknown argument {unknown}" + (f"; did you mean {near}?" if near else ""))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        for flag in action.option_strings:
            if (words := other_flags.OTHER_VALUES.get((flag, arg_string))) is not None:
                raise argparse.ArgumentError(action, f"got {arg_string}; {words}")
        return super()._get_value(action, arg_string)

    def find_help(self, words: Sequence[str]) -> int | None:
        """Print the flags that `--help=WORD` among `words` asks for, of the command that they name:
        those whose name, group or help has it. Exit code, or None if nobody asks. Exits with 2
        where there is none.
        """
        asked = [word.partition("=")[2] for word in words if word.startswith("--help=")]
        if not asked:
            return None
        parser = self._named(words)
        formatter, found = parser._get_formatter(), 0
        for group in parser._action_groups:
            title = group.title or ""
            listed = [a for a in group._group_actions if _speaks_of(a, title, asked[0].lower())]
            formatter.start_section(title)
            formatter.add_arguments(listed)
            formatter.end_section()
            found += len(listed)
        if not found:
            parser.error(f"no flag speaks of {asked[0]}; --help lists all")
        print(formatter.format_help(), end="")
        return 0

    def _named(self, words: Sequence[str]) -> OneLineParser:
        parser = self
        for word in words:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    parser = action.choices[word]
        return parser

    def leaf(self, arguments: argparse.Namespace) -> OneLineParser:
        """The parser of the command that `arguments` name: of `bench offline`, that of
        `offline`.
        """
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                command = action.choices.get(str(getattr(arguments, action.dest, None)))
                if isinstance(command, OneLineParser):
                    return command.leaf(arguments)
        return self


def _speaks_of(action: argparse.Action, title: str, word: str) -> bool:
    texts = (*action.option_strings, action.dest, title, action.help or "")
    return bool(word) and any(word in text.lower() for text in texts)


def nearest(unknown: str, flags: Sequence[str]) -> str | None:
    """The flag that somebody may have meant: by another engine's name, by how it begins, by its
    letters.
    """
    if OTHER_NAMES.get(unknown) in flags:
        return OTHER_NAMES[unknown]
    longer = [flag for flag in flags if len(unknown) > 3 and flag.startswith(unknown)]
    close = longer or difflib.get_close_matches(unknown, flags, 1, CLOSE)
    return close[0] if close else None


def join_values(words: Sequence[str]) -> list[str]:
    """`--enable-ops -rms_norm` as `--enable-ops=-rms_norm`, and a list that begins with a negative
    number likewise. Long flags, and the short ones, stay flags.
    """
    joined: list[str] = []
    for word in words:
        is_value = word.startswith("-") and not word.startswith("--") and word not in SHORT_FLAGS
        before = joined[-1] if joined else ""
        is_list = before.startswith("--") and "," in word and word[1:2].isdigit()
        if is_value and (before in MINUS_VALUES or is_list):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of values for argparse: what it raises is told to the user as it stands."""

    def type_of(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return type_of


def whole_number(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A reader of whole numbers from `least` to `most`, which may have a unit, for argparse."""

    def read(text: str) -> int:
        number = size(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"got {text}, allowed is {least} to {most}")
        return int(number)

    return read


def whole_numbers(least: int) -> Callable[[str], list[int]]:
    """A reader of one whole number or more from `least`, with commas between, for argparse."""

    def read(text: str) -> list[int]:
        numbers = list(option_text.sizes(text))
        if not numbers or min(numbers) < least:
            raise argparse.ArgumentTypeError(
                f"got {text}, allowed are whole numbers from {least} with commas between"
            )
        return numbers

    return argument(read)


def not_empty(text: str) -> str:
    """A reader of texts, for argparse: a variable of a shell that is not set gives an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("got '', allowed is a text that is not empty")
    return text


def http_url(text: str) -> str:
    """A reader of addresses of servers, for argparse."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        known = False
    if not known:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed is a URL such as http://127.0.0.1:8000"
        )
    return text


def some_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """A reader of words with commas between, each of them allowed, for argparse."""
    known = list(allowed)

    def read(text: str) -> list[str]:
        words = list(option_text.words(text))
        if not words or not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"got {text}, allowed are {', '.join(known)}")
        return words

    return read


size = argument(option_text.size)
output_file = argument(option_text.output_file)
json_object = argument(option_text.json_object)
token_ids = argument(option_text.token_ids)
