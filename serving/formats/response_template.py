"""A checkpoint's own `response_template` (tokenizer_config.json, transformers 5) as a format.

Only what a lexer of marks and raw arguments can follow: text between fixed marks, and calls that
are JSON objects or lists of them with a name and arguments. XML, JSON dialects, and names in marks
are not among it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .table import Calls, Format

_REASONING = ("reasoning_content", "thinking", "reasoning")
_SPACES = r"\s*"
_PLAIN_PATTERN = re.compile(r"(?:\\\W|[^\\.^$*+?{}\[\]|()])+")
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")


def from_response_template(template: Any) -> Format | None:
    """The format that a template describes; None if it is none, or asks for more than we do."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(f, Mapping) for f in fields.values()):
        return None
    if template.get("version", 1) != 1 or not fields.keys() <= {
        *_REASONING,
        "content",
        "tool_calls",
    }:
        return None
    content = fields.get("content", {})
    if content.keys() & {"open", "open_pattern", "transform"} or _parser(content) != "text":
        return None
    thoughts = [fields[name] for name in _REASONING if name in fields]
    think = _think(thoughts[0]) if len(thoughts) == 1 else None
    calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    if bool(thoughts) != bool(think) or ("tool_calls" in fields) != bool(calls):
        return None
    return Format("response_template", think, calls)


def _think(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    opening, closing = _mark(entry, "open"), _mark(entry, "close")
    if not opening or not closing or _parser(entry) != "text" or "transform" in entry:
        return None
    return opening, closing


def _calls(entry: Mapping[str, Any]) -> Calls | None:
    opening, closing = _mark(entry, "open"), _mark(entry, "close")
    transform, each = entry.get("transform"), entry.get("transform_each", False)
    key = _argument_key(transform, bool(each))
    if not opening or closing is None or key is None or _parser(entry) != "json":
        return None
    if not closing and entry.get("repeats"):
        return None  # the first call's region would reach to the end
    mistral = opening == "[TOOL_CALLS]"  # its chat template refuses other ids
    return Calls(opening, closing, (key,), listed=bool(each), short_ids=mistral)


def _argument_key(transform: Any, each: bool) -> str | None:
    """The key of the arguments in the model's objects."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}" and not each:
        return "arguments"
    if not isinstance(function, Mapping) or set(function) != {"name", "arguments"}:
        return None
    prefix = "" if each else "content."
    if function["name"] != f"{{{prefix}name}}":
        return None
    place = _PLACE.fullmatch(str(function["arguments"]))
    key = place[1] if place else ""
    return key if function["arguments"] == f"{{{prefix}{key}}}" else None


def _parser(entry: Mapping[str, Any]) -> str:
    """The parser of a field, "other" if its arguments change what it reads."""
    changed = {k for k in entry.get("content_args") or {} if k not in ("strip", "allow_non_json")}
    return "other" if changed else str(entry.get("content", "text"))


def _mark(entry: Mapping[str, Any], key: str) -> str | None:
    """The fixed text of an anchor, "" if it has none, None if it is more than a fixed text."""
    if f"{key}_pattern" in entry:
        pattern = str(entry[f"{key}_pattern"]).removeprefix(_SPACES).removesuffix(_SPACES)
        return re.sub(r"\\(\W)", r"\1", pattern) if _PLAIN_PATTERN.fullmatch(pattern) else None
    value = entry.get(key, "")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None
