"""The flags of prompts, sampling and the engine, those of options from their tables; and options
from the flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..shared.engine_config import EngineConfig
from ..shared.errors import ConfigError
from ..shared.generation_config import FIELDS, SOURCES
from ..shared.option_kinds import Switch
from ..shared.options import OWNERS, Option, options_of, say
from ..shared.sampling_params import SamplingParams
from .parser import argument, token_ids

ENGINE = options_of(EngineConfig)
SAMPLING = options_of(SamplingParams)
NAMED_APART = ("model", "backend")
"""What a command knows of an engine beside its options."""
NOTES = {"cache": "sizes may have a unit: 32k is 32000, 32K is 32768"}
"""What help says behind the title of a group."""


class _Switch(argparse.BooleanOptionalAction):
    """`--flag` and `--no-flag`, with the help as it is written: Python 3.11 adds the default a
    second time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.help = options["help"]


class _TypedPrompt(argparse.Action):
    """Appends (kind, value), so that prompts stay in the order in which they were typed,
    whatever their flags.
    """

    def __call__(
        self, parser: Any, arguments: Any, values: Any, option_string: str | None = None
    ) -> None:
        """As `argparse` has it."""
        kind = self.option_strings[0]
        arguments.prompts = [*arguments.prompts, (kind, values)]


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """What is completed."""
    g = parser.add_argument_group(
        "prompts", "each may be given several times; results count in the order given"
    )
    options: dict[str, Any] = {"action": _TypedPrompt, "dest": "prompts", "default": []}
    g.add_argument("--prompt", **options, metavar="TEXT", help="a text")
    g.add_argument(
        "--prompt-token-ids", **options, type=token_ids, metavar="1,2,3", help="token ids"
    )
    g.add_argument("--prompt-file", **options, metavar="FILE", help="a text a line, UTF-8")
    g.add_argument(
        "--chat",
        action="store_true",
        help="texts are what a user says: render them by the chat template",
    )
    add_chat_template(g)


def add_flag(group: Any, option: Option, default: Any, usual: str) -> None:
    """The flag of an option. `usual` says in words what holds where it is not given: `default`."""
    kind = option.kind
    settings: dict[str, Any] = {"default": default, "help": _help(option, usual)}
    if isinstance(kind, Switch):
        settings["action"] = _Switch
    else:
        settings["type"] = argument(kind.read)
        if kind.choices is not None:
            settings["choices"] = kind.choices
        else:
            settings["metavar"] = option.metavar or kind.metavar
        if kind.repeated:
            settings["action"] = "append"
    group.add_argument(*option.flags, **settings)


def destination(option: Option) -> str:
    """Where the value of an option's flag stands among the arguments: under the name of the
    flag.
    """
    return option.flags[0][2:].replace("-", "_")


def _help(option: Option, usual: str) -> str:
    """What an option does, what is allowed, its default, and whether it may be repeated; then
    what each value means.
    """
    says_range = option.limits is not None or (option.kind.in_help and option.range)
    text = f"{option.help}: {option.range}" if says_range else option.help
    repeated = "; may be repeated" if option.kind.repeated else ""
    text = f"{text} (default: {usual}{repeated})".replace("%", "%%")
    return "\n".join(
        [text, *(f"{value}: {meaning}" for value, meaning in (option.meanings or {}).items())]
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams. None stands for: not said."""
    g = parser.add_argument_group("sampling")
    for name, option in SAMPLING.items():
        where = "generation_config.json, else " if name in FIELDS.values() else ""
        add_flag(g, option, None, where + option.usually)
    add_generation_config(g)


def add_generation_config(group: Any) -> None:
    """Where defaults of sampling come from."""
    group.add_argument(
        "--generation-config",
        choices=SOURCES,
        default="auto",
        help="none: without the sampling defaults of the model's generation_config.json (default: "
        "%(default)s)",
    )


def add_chat_template(group: Any) -> None:
    """How chats become prompts."""
    group.add_argument(
        "--chat-template",
        metavar="FILE|TEXT",
        help="a Jinja template in a file, or its text, for chats (default: the model's)",
    )


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that have a flag on this command line."""
    values = {name: getattr(arguments, destination(option)) for name, option in SAMPLING.items()}
    return {name: value for name, value in values.items() if value is not None}


def add_output(parser: argparse.ArgumentParser) -> None:
    """What is printed."""
    g = parser.add_argument_group("output")
    g.add_argument(
        "--json", action="store_true", help="one JSON object a line, written when a completion ends"
    )
    g.add_argument(
        "--stream",
        action="store_true",
        help="text as it comes; with --json an object for each piece",
    )
    g.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="the start report: what was filled in, and why (stderr)",
    )


def add_engine(
    parser: argparse.ArgumentParser,
    without: Sequence[str] = (),
    usual: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """The options of an engine, a group for each owner.

    Those of the owners `without` keep their defaults and have no flag. What the command has set as
    the default of an option (`set_defaults`) is its default; `usual` says in words what it fills
    in later.
    """
    for owner, title in OWNERS.items():
        options = [option for option in ENGINE.values() if option.owner == owner and option.flags]
        if owner in without:
            parser.set_defaults(**{destination(option): option.default for option in options})
        elif options:
            group = parser.add_argument_group(title, NOTES.get(owner))
            for option in options:
                _add_engine_flag(parser, group, option, usual.get(option.name, option.usually))


def _add_engine_flag(
    parser: argparse.ArgumentParser, group: Any, option: Option, usual: str
) -> None:
    default = parser.get_default(destination(option))
    if default is None:
        default = option.default
    else:
        usual = say(default)
    # A list that a repeated flag adds to begins with nothing.
    add_flag(group, option, None if option.kind.repeated else default, usual)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `EngineConfig` but for model and backend."""
    options = {}
    for name, option in ENGINE.items():
        if name in NAMED_APART:
            continue
        value = getattr(arguments, destination(option))
        if option.kind.repeated:
            value = option.kind.gather(value or [])
        options[name] = value
    return options


def read_prompts(typed: Sequence[tuple[str, Any]]) -> list[Any]:
    """Texts and token ids, in the order in which they were typed. Raises ConfigError for a file
    that cannot be read.
    """
    prompts: list[Any] = []
    for kind, value in typed:
        if kind != "--prompt-file":
            prompts.append(value)
            continue
        try:
            with open(value, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt-file: cannot read {value}: {error}") from error
        # Not splitlines(): a form feed or a line separator belongs to a prompt.
        prompts += text.removesuffix("\n").split("\n") if text else []
    return prompts
