"""One table of options: a field of a dataclass and, beside its default, all that else is said about
it.

`option()` writes an entry where the field stands. What checks values, adds flags to the command
line, suggests names and writes docs/options.md reads the entries from the class (`options_of`).
Nothing here imports a framework.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .errors import ConfigError
from .option_kinds import Kind, Refusal, Switch, as_python

METADATA = "option"
OWNERS = {
    "engine": "engine",
    "scheduler": "scheduler",
    "cache": "KV cache",
    "ops": "kernels",
    "torch": "torch backend",
    "jax": "JAX backend",
    "sampling": "sampling",
}
"""Which part of the engine an option is for, and the title of its group.

An option of a backend is refused where the other one runs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a dataclass.

    kind      what values it takes; None too where that is the default
    help      what it does, in a line
    owner     one of OWNERS
    usual     what the default is in words, where the engine chooses it
    limits    what is allowed in words, where another option sets the limit
    flag      its flag, if that is not its name
    short     more flags, for typing
    aliases   names elsewhere that mean the same: they are taken too, as names and as flags
    near      names elsewhere for something like it: whoever types one is told of this option
    meanings  what each value does, a line each
    no_flag   why the command line has no flag for it
    required  whether there is no default
    copy_of   the field of `CompilationConfig` that it says too
    shapes    whether programs that were compiled with another value are other programs
    """

    kind: Kind
    help: str
    owner: str
    usual: str | None = None
    limits: str | None = None
    flag: str | None = None
    short: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    metavar: str | None = None
    meanings: Mapping[Any, str] | None = None
    no_flag: str | None = None
    required: bool = False
    copy_of: str | None = None
    shapes: bool = True
    name: str = ""
    default: Any = None

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags, its own first; none where it has no flag."""
        if self.no_flag is not None:
            return ()
        first = self.flag or _flag_of(self.name)
        return first, *self.short, *map(_flag_of, self.aliases)

    @property
    def range(self) -> str:
        """What is allowed, in words for help and documents."""
        return self.kind.words if self.limits is None else self.limits

    @property
    def usually(self) -> str:
        """The default in words."""
        return self.usual or say(self.default)

    def check(self, value: Any) -> Any:
        """The value as it is kept. Raises Refusal with a text."""
        try:
            return self.kind.check(value)
        except Refusal as refusal:
            raise Refusal(
                str(refusal) or f"got {show(value)}, allowed {self.kind.allowed}"
            ) from None


def option(
    default: Any,
    kind: Kind,
    owner: str,
    help: str,
    *,
    factory: Callable[[], Any] | None = None,
    hash: bool | None = None,
    **more: Any,
) -> Any:
    """A field of a dataclass that is an option; `more` are fields of `Option`.

    `factory` makes the default afresh, `hash` is that of `dataclasses.field`.
    """
    metadata = {METADATA: Option(kind=kind, help=help, owner=owner, **more)}
    if factory is not None:
        return field(default_factory=factory, hash=hash, metadata=metadata)
    return field(default=default, hash=hash, metadata=metadata)


def required(kind: Kind, owner: str, help: str, **more: Any) -> Any:
    """An option without a default."""
    return field(
        metadata={METADATA: Option(kind=kind, help=help, owner=owner, required=True, **more)}
    )


def same_option(cls: type, name: str, **more: Any) -> Any:
    """A field that says what the field `name` of `cls` says too: the same entry but for `more`."""
    entry = options_of(cls)[name]
    return field(
        default=entry.default, metadata={METADATA: dataclasses.replace(entry, copy_of=name, **more)}
    )


_tables: dict[type, Mapping[str, Option]] = {}


def options_of(cls: type) -> Mapping[str, Option]:
    """The options of a dataclass by name, in the order of its fields."""
    if cls not in _tables:
        _tables[cls] = _read(cls)
    return _tables[cls]


def _read(cls: type) -> Mapping[str, Option]:
    table = {}
    for item in dataclasses.fields(cls):
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        elif default is dataclasses.MISSING:
            default = None
        table[item.name] = dataclasses.replace(
            item.metadata[METADATA], name=item.name, default=default
        )
    return table


def check_fields(instance: Any, error: Callable[[str, str], Exception]) -> None:
    """Check all options of a frozen dataclass, and put them into the form in which they are kept.

    Raises what `error(name, text)` gives.
    """
    for name, entry in options_of(type(instance)).items():
        value = getattr(instance, name)
        if value is entry.default and not entry.required:
            continue
        try:
            checked_value = entry.check(as_python(value))
        except Refusal as refusal:
            raise error(name, str(refusal)) from None
        if checked_value is not getattr(instance, name):
            object.__setattr__(instance, name, checked_value)


def asks_for_nothing(value: Any, *nothing: Any) -> bool:
    """Whether another engine's option has a value with which it asks for nothing: None, or one of
    `nothing` by type and value, as True is no 1, and an array is equal to no number.
    """
    value = as_python(value)
    return value is None or any(type(value) is type(one) and value == one for one in nothing)


def config_error(name: str, text: str) -> ConfigError:
    """The error for an option of an engine."""
    return ConfigError(f"{name}: {text}")


def by_name(cls: type, options: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Options by their names here, from a mapping that may use aliases.

    Raises ConfigError for an unknown name, with the nearest known one, and for an option that was
    given twice.
    """
    table = options_of(cls)
    names = {alias: name for name, entry in table.items() for alias in (name, *entry.aliases)}
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for word, value in options.items():
        if word not in names:
            near = nearest_name(str(word), table.values())
            hint = f"did you mean {near!r}?" if near else "docs/options.md lists what there is"
            raise ConfigError(f"{where}unknown option {show(word)}, got {show(value)}; {hint}")
        name = names[word]
        if name in values:
            raise ConfigError(
                f"{where}{name}: got it as {spelling[name]} and as {word}, one is allowed"
            )
        values[name], spelling[name] = value, word
    return values


def nearest_name(unknown: str, options: Iterable[Option]) -> str | None:
    """The name that somebody may have meant: by another engine's name, or by its letters."""
    names: list[str] = []
    for entry in options:
        if unknown in entry.near:
            return entry.name
        names += [entry.name, *entry.aliases]
    close = difflib.get_close_matches(unknown, names, 1)
    return close[0] if close else None


def near_flags(options: Iterable[Option]) -> dict[str, str]:
    """What other engines call our flags. A switch that they turn off is ours with `--no-` before
    it.
    """
    names = {}
    for entry in options:
        for word in entry.near:
            turns_off = (
                word.startswith("disable_")
                and isinstance(entry.kind, Switch)
                and entry.default is True
            )
            flag = entry.flags[0]
            names[_flag_of(word)] = f"--no-{flag[2:]}" if turns_off else flag
    return names


def show(value: Any) -> str:
    """A value for an error message, cut: a request may hold megabytes, or an integer too long
    for Python to print.
    """
    if isinstance(value, Enum):
        return value.name
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def say(value: Any) -> str:
    """A default in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None or value == {}:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
