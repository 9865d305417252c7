"""How a command names a model: MODEL, or `--model MODEL`. The same for all commands that take
one.
"""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from ..errors import ConfigError
from .locate import shape_names

WORD = "model_word"


class _Arguments(Protocol):
    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As `argparse` has it."""
        ...


def add_model(parser: _Arguments) -> None:
    """Add the argument and the flag. `settle_model` makes one of them."""
    shapes = ", ".join(shape_names())
    what = (
        "a Hugging Face checkpoint folder, the word demo, or (with --load-format dummy) one "
        f"of {shapes}"
    )
    parser.add_argument(WORD, nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", metavar="MODEL", help="the same as a flag")


def settle_model(arguments: argparse.Namespace, words: list[str]) -> list[str]:
    """Put the model's name into `arguments.model`, and return what is left of `words`. Raises
    ConfigError.

    `words` are those that the parser could not place: it gives up on MODEL at the first flag.
    """
    names = [name for name in (getattr(arguments, WORD), arguments.model) if name is not None]
    if not names and words:
        names, words = words[:1], words[1:]
    if not names:
        raise ConfigError("model: none given; name it first, or with --model")
    if names[1:] and names[0] != names[1]:
        raise ConfigError(f"model: got {names[0]} and --model {names[1]}, one is allowed")
    # The word is not a second name for whoever writes the command down.
    arguments.model = names[0]
    setattr(arguments, WORD, None)
    return words
