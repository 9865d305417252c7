"""Jinja's sandbox, in which nothing that a template makes is larger than a prompt may be: a text by
its characters, a list by its entries. What an operation would make is estimated before it is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from .errors import RequestError

MAX_SIZE = 8 << 20
"""Characters of a text, or entries of a list; no context is that long."""
MAX_INDENT = 80
"""Characters that JSON is indented by, or separated with."""

_NUMBER = re.compile(r"[0-9]+")
_PLACE = re.compile(r"[%)][-+ #*.0-9]*")
"""What may be a place of % with its widths: names of values end with a parenthesis."""


def check_size(size: int) -> None:
    """Raise RequestError for what is too large to be made."""
    if size > MAX_SIZE:
        raise RequestError(
            "messages",
            f"the chat template makes a text of more than {MAX_SIZE} characters of them, or a list "
            "of so many entries",
        )


def text_size(value: Any) -> int:
    """Characters that `value` has as a text at least, counted up to `MAX_SIZE`. A list may have
    another one many times over.
    """
    size, left = 0, [value]
    while left and size <= MAX_SIZE:
        item = left.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += 1 + item.bit_length() // 4
        elif isinstance(item, (dict, list, tuple, Collection)):  # the quickly told first
            size += 2 + len(item)
            left.extend(item)
            left.extend(item.values() if isinstance(item, (dict, Mapping)) else ())
        else:
            size += 1
    return size


class Sandbox(ImmutableSandboxedEnvironment):
    """See the module. RequestError goes through a template to whoever renders it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_finalized)
        del self.globals["lipsum"]
        self.filters["tojson"] = to_json
        for name, bound in _FILTERS.items():
            place = _ATTRIBUTES.get(name)
            self.filters[name] = _bounded(self.filters[name], bound, place)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation of a template's, if its result is not too large."""
        check_size(_OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a template's, likewise."""
        # A method format comes wrapped.
        method = getattr(__obj, "__wrapped__", __obj)
        of = getattr(method, "__self__", None)
        if isinstance(of, (str, bytes, int)):
            args = tuple(map(_held, args))
            if isinstance(of, str) and method.__name__ == "format":
                _Fields(__self).vformat(of, args, kwargs)
            elif isinstance(of, str) and method.__name__ == "format_map" and args:
                _Fields(__self).vformat(of, (), args[0])
            bound = _METHODS.get(method.__name__)
            check_size(0 if bound is None else bound(of, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a block or a macro wrote, as one text."""
        return Sandbox.joined(list(parts))

    @staticmethod
    def joined(parts: Collection[Any]) -> str:
        """The texts of some values in a row."""
        check_size(sum(map(text_size, parts)))
        return "".join(map(str, parts))


class _Code(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """The operator ~, which is none of those that can be intercepted."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


Sandbox.code_generator_class = _Code


class _Fields(SandboxedFormatter):
    """What a method format does, each field looked at before it is made: its width may come from
    another value, as a number, as text, or from several of them.
    """

    size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        """One field, or a part of the width of one."""
        self.size += text_size(value) + _widths(format_spec)
        check_size(self.size)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """A value as text, where that is asked for."""
        return super().convert_field(_small(value) if conversion else value, conversion)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has the filter. Jinja's own escapes HTML, which no model was trained on."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    # What is nested deeply has more spaces than text.
    return "".join(_counted(encoder.iterencode(value)))


def _finalized(value: Any) -> Any:
    """What a template writes. Whoever reads that counts its texts."""
    return value if isinstance(value, str) else _small(value)


def _held(value: Any) -> Any:
    """An iterator as a list, so that it can be looked at."""
    return list(_counted(value)) if isinstance(value, Iterator) else value


def _counted(parts: Iterable[Any]) -> Iterator[Any]:
    """Values as they are made, as long as they are not too large together."""
    size = 0
    for part in parts:
        size += text_size(part)
        check_size(size)
        yield part


def _bounded(
    function: Callable[..., Any], bound: Callable[..., int], place: int | None
) -> Callable[..., Any]:
    """A filter that is asked for what it would make before it does. Since it takes the context, the
    compiler makes no constant of it. `place`: where among the arguments it is told an attribute,
    which it takes of each value instead.
    """
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        taken = value = _held(value)
        if place is not None:
            attribute = kwargs.get("attribute", (*args, *[None] * place, None)[place])
            if attribute is not None:
                taken = list(map(make_attrgetter(context.environment, attribute), value))
        check_size(bound(taken, *args, **kwargs))
        if passed == "eval_context":
            return function(context.eval_ctx, value, *args, **kwargs)
        if passed == "environment":
            return function(context.environment, value, *args, **kwargs)
        return function(value, *args, **kwargs)

    return run


# How large a result is at most.


def _largest(values: Iterable[Any]) -> int:
    return max(map(text_size, values), default=0)


def _whole(values: Iterable[Any]) -> int:
    """The numbers among some values, each as a width."""
    return sum(value for value in values if isinstance(value, int) and value > 0)


def _sum(left: Any, right: Any) -> int:
    try:
        return len(left) + len(right)
    except TypeError:
        return 0  # of numbers, or none that can be made


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    count, of = (left, right) if isinstance(left, int) else (right, left)
    return max(0, count) * len(of) if isinstance(count, int) and isinstance(of, Collection) else 0


def _power(left: Any, right: Any) -> int:
    whole = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() * max(0, right) if whole else 0


def _remainder(left: Any, right: Any) -> int:
    return _printed(left, right) if isinstance(left, (str, bytes)) else 0


def _widths(text: str) -> int:
    """The numbers in a text. Those of eight digits are too large, however many more there are."""
    return sum(int(digits[:8]) for digits in _NUMBER.findall(text))


def _printed(text: Any, *values: Any, **named: Any) -> int:
    """By a text with places for `values`: each may stand at each of them, and be padded."""
    if not isinstance(text, (str, bytes)):
        return text_size(text)
    plain = text.decode("latin-1") if isinstance(text, bytes) else text
    widths = sum(map(_widths, _PLACE.findall(plain)))
    lists = (value if isinstance(value, tuple) else (value,) for value in (*values, named))
    flat = [value for one in lists for value in one]
    each = _largest(flat) + (_whole(flat) if "*" in plain else 0)
    return len(plain) + widths + plain.count("%") * each


def _as_text(value: Any, *_: Any, **named: Any) -> int:
    return text_size(value)


def _padded(value: Any, *args: Any, **named: Any) -> int:
    return text_size(value) + _whole((*args, *named.values()))


def _replaced(value: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> int:
    whole, part = (x if isinstance(x, (str, bytes)) else str(_small(x)) for x in (value, old))
    return len(whole) + whole.count(part) * text_size(new)  # type: ignore[arg-type]


def _small(value: Any) -> Any:
    """`value`, if its text is not too large."""
    check_size(text_size(value))
    return value


def _joined(parts: Any, *args: Any, **named: Any) -> int:
    count = len(parts) if isinstance(parts, Collection) else 0
    return text_size(parts) + count * _largest((*args, *named.values()))


def _translated(value: Any, table: Any, *_: Any) -> int:
    size: int = len(value) * _largest(table.values() if isinstance(table, Mapping) else ())
    return size


def _expanded(value: Any, *args: Any, **named: Any) -> int:
    tabs: int = value.count("\t" if isinstance(value, str) else b"\t")
    return len(value) + tabs * (_whole((*args, *named.values())) or 8)


def _indented(value: Any, *args: Any, **named: Any) -> int:
    given = (*args, *named.values())
    lines = 1 + (len(value.splitlines()) if isinstance(value, str) else 0)
    return text_size(value) + lines * ((_whole(given) or 4) + _largest(given))


def _wrapped(value: Any, *args: Any, **named: Any) -> int:
    """Texts of the arguments may stand at each character."""
    texts = [arg for arg in (*args, *named.values()) if isinstance(arg, str)]
    return text_size(value) * (1 + sum(map(len, texts)))


def _json(value: Any, *args: Any, **named: Any) -> int:
    given = (*args, *named.values())
    widest = max(_whole(given), _largest(given))
    return text_size(value) if widest <= MAX_INDENT else MAX_SIZE + 1


def _added(parts: Any, *args: Any, **named: Any) -> int:
    return text_size(parts) + _largest((*args, *named.values()))


_OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "+": _sum,
    "*": _product,
    "**": _power,
    "%": _remainder,
}
_METHODS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    "expandtabs": _expanded,
    "join": lambda separator, parts=(): _joined(parts, separator),
    "replace": _replaced,
    "translate": _translated,
}
_FILTERS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(
        (
            "capitalize", "e", "escape", "forceescape", "list", "lower", "pprint", "reverse",
            "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount",
            "xmlattr",
        ),
        _as_text,
    ),
    **dict.fromkeys(("batch", "center", "slice"), _padded),
    **dict.fromkeys(("urlize", "wordwrap"), _wrapped),
    "format": _printed,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": lambda _, precision=0, *__, **___: _power(10, precision),
    "sum": _added,
    "tojson": _json,
}  # fmt: skip
_ATTRIBUTES = {"join": 1, "sum": 0}
"""Filters that take an attribute of each value, and where that is named among their arguments."""
