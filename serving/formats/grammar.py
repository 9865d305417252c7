"""Grammars of whole answers: what must be called, or a form that stands behind reasoning.

They are Lark as llguidance reads it. A mark that is a token of its own is named by its id, as no
text stands for it; another is written out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...shared.errors import RequestError
from ...shared.grammars import JSON_OPTIONS
from ...shared.models.fields import show
from .table import Calls, Format, Tags
from .tags import kinds_of

TokenId = Callable[[str], int | None]
"""The id of the token that a text is as a whole, if there is one."""
SPACE = "SPACE: /[ \\n]{0,4}/\n"
ANYTHING = "TEXT: /(?s:.*)/\n"


class AnswerGrammar:
    """Grammars of answers in one format, for a model whose tokens `token_id` knows. `prompt_tail`
    is the end of the prompt, which may have opened reasoning.
    """

    def __init__(self, form: Format, token_id: TokenId, prompt_tail: str) -> None:
        self._form, self._token_id = form, token_id
        self._tail = prompt_tail.rstrip()

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may come before the answer itself."""
        think = self._form.think
        if think is None or self._tail.endswith(think[1]):
            return False
        return self._tail.endswith(think[0]) or self._token_id(think[0]) is not None

    def form(self, kind: str, text: str) -> str | None:
        """What binds an answer to a form of `structured_outputs` behind reasoning; None where the
        form binds all that is written.
        """
        if not self.may_reason:
            return None
        if kind in ("json", "json_object"):
            return self.json(json.loads(text) if text else {"type": "object"})
        return self.choice(json.loads(text)) if kind == "choice" else None

    def json(self, schema: Mapping[str, Any]) -> str:
        """A value of `schema`, behind reasoning."""
        return self._whole("answer", f"answer: {as_rule(schema)}\n")

    def choice(self, texts: Sequence[str]) -> str:
        """One of some texts, behind reasoning."""
        return self._whole("answer", f"answer: {' | '.join(map(literal, texts))}\n")

    def calls(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """One call of one of `tools`, or `several`, behind reasoning. Raises RequestError if the
        format marks no calls.
        """
        calls = self._form.calls
        if calls is None:
            raise RequestError(
                "tool_choice",
                f"calls cannot be asked for: the model's output format is {self._form.name!r}",
            )
        return self._whole(self._marked(calls, several), self._call_rules(calls, tools))

    def may_call(
        self, tools: Sequence[Mapping[str, Any]], *, several: bool, strict: Collection[str]
    ) -> str:
        """Any text, and in it calls of `tools` or, behind it, at most one. Arguments of the tools
        named `strict` keep to their schemas; those of others are any object. Raises RequestError
        if the format marks no calls.
        """
        calls = self._form.calls
        if calls is None:
            raise RequestError(
                "parallel_tool_calls",
                f"calls cannot be bound: the model's output format is {self._form.name!r}",
            )
        rules = self._call_rules(calls, tools, strict)
        mark = calls.open
        if calls.bare:
            # A message that begins with a brace is a call.
            rules += f"PLAIN: /(?s:\\s*([^\\s{{].*)?)/ & ~{_within(mark)}\n"
            return self._whole(
                f"({self._mark(mark)})? {self._marked(calls, several)} | PLAIN", rules
            )
        rules += f"PLAIN: /(?s:.*)/ & ~{_within(mark)}\n"
        opened = f"PLAIN {self._mark(mark)}"
        if self._token_id(mark) is None:
            opened = "opened"
            rules += f"opened[suffix={literal(mark)}]: TEXT\n"
        one = self._between(calls, several, opened)
        body = f"({one})* PLAIN" if several else f"{one} | PLAIN"
        return self._whole(f"({body})", rules)

    def _whole(self, body: str, rules: str) -> str:
        think = self._form.think
        rules += SPACE + ANYTHING
        if think is None or not self.may_reason:
            return f"start: {body}\n{rules}"
        opened, end = self._tail.endswith(think[0]), self._token_id(think[1])
        begin = "" if opened else f"{self._mark(think[0])} "
        if end is not None:
            rules += f"think: {begin}TEXT <[{end}]> SPACE\n"
        else:
            rules += f"think: {begin}thought SPACE\nthought[suffix={literal(think[1])}]: TEXT\n"
        return f"start: think{'' if opened else '?'} {body}\n{rules}"

    def _marked(self, calls: Calls, several: bool) -> str:
        """A `call` between its marks, or several."""
        if calls.bare:
            return f"call ({literal(calls.separator)} SPACE call)*" if several else "call"
        one = self._between(calls, several, self._mark(calls.open))
        if calls.listed and not self._is_named(calls):
            return one
        return f"{one} (SPACE {one})*" if several else one

    def _between(self, calls: Calls, several: bool, opened: str) -> str:
        """What one opening mark, `opened`, stands before, with it."""
        if calls.listed and not self._is_named(calls):
            more = ' ("," SPACE call)*' if several else ""
            return f'{opened} SPACE "[" call{more} "]"'
        closed = f" SPACE {self._mark(calls.close)}" if calls.close else ""
        return f"{opened} SPACE call{closed}"

    def _mark(self, text: str) -> str:
        number = self._token_id(text)
        return literal(text) if number is None else f"<[{number}]>"

    def _is_named(self, calls: Calls) -> bool:
        return calls.named and self._token_id("[ARGS]") is not None

    def _call_rules(
        self,
        calls: Calls,
        tools: Sequence[Mapping[str, Any]],
        strict: Collection[str] | None = None,
    ) -> str:
        """`call` and what it needs; of all tools if nobody says which are `strict`."""
        rules = "call: " + " | ".join(f"call_{i}" for i in range(len(tools))) + "\n"
        for i, tool in enumerate(tools):
            function, schema = tool["function"], argument_schema(tool, strict)
            if calls.tags is not None:
                rules += tag_rules(calls.tags, i, function["name"], schema)
                continue
            if self._is_named(calls):
                head, tail = f"{literal(function['name'])} {self._mark('[ARGS]')}", ""
            else:
                key = calls.argument_keys[0]
                text = f'{{"name": {json.dumps(function["name"])}, "{key}": '
                head, tail = literal(text), ' "}"'
            rules += f"call_{i}: {head} arguments_{i}{tail}\narguments_{i}: {as_rule(schema)}\n"
        return rules


def argument_schema(tool: Mapping[str, Any], strict: Collection[str] | None) -> Any:
    """What the arguments of a tool keep to: its schema, if it is among `strict`, or nobody says
    which tools are.
    """
    function = tool["function"]
    if strict is not None and function["name"] not in strict:
        return {"type": "object"}
    schema = function.get("parameters") or {}
    # They are an object, whatever else it would take.
    return schema | {"type": "object"} if isinstance(schema, dict) else schema


TAGGED = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
"""What the schema of a call that is written as tags may say."""
TOLD = ("title", "description", "$schema", "default", "examples", "strict")
"""What binds nothing."""


def tag_rules(tags: Tags, number: int, name: str, schema: Any) -> str:
    """`call_{number}`: the tool `name` in tags. Arguments stand in the order of their schema; a
    schema that names none allows any. Raises RequestError for one that cannot be kept to in tags.
    """
    if not isinstance(schema, Mapping):
        raise _unbound(name, f"got {show(schema)}")
    if others := [key for key in schema if key not in (*TAGGED, *TOLD)]:
        raise _unbound(name, f"{others[0]} cannot be kept to between tags")
    named, required = schema.get("properties") or {}, schema.get("required") or ()
    rules, parts = "", []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, (key, one) in enumerate(named.items()):
        rule = f"value_{number}_{place}"
        part = f"{literal(tags.key[0] + key)} {_opened(tags)} {rule} SPACE"
        parts.append(part if key in required else f"({part})?")
        rules += _value_rule(tags, rule, name, key, one, shared)
    if not named:
        parts.append(f"({literal(tags.key[0])} KEY {_opened(tags)} value_{number} SPACE)*")
        rules += f"KEY: /[^<>\\n]+/\n{_free_value(tags, f'value_{number}')}"
    head = literal(tags.name[0] + name + tags.name[1])
    end = f" {literal(tags.end)}" if tags.end else ""
    return f"call_{number}: {head} SPACE {' '.join(parts)}{end}\n{rules}"


def _opened(tags: Tags) -> str:
    """What stands between a key and its value."""
    if tags.value[0]:
        return f"{literal(tags.key[1])} SPACE {literal(tags.value[0])}"
    return literal(tags.key[1] + ("\n" if tags.lines else ""))


def _free_value(tags: Tags, rule: str) -> str:
    """Any text up to the mark behind it, which is part of it here."""
    return f"{rule}[suffix={literal(tags.value[1])}]: TEXT\n"


def _value_rule(
    tags: Tags, rule: str, name: str, key: str, one: Any, shared: Mapping[str, Any]
) -> str:
    """A value with what stands behind it."""
    kinds = kinds_of({"properties": {key: one}}, key)
    close = literal(("\n" if tags.lines else "") + tags.value[1])
    one = one if isinstance(one, Mapping) else {}
    choices = one.get("enum", [one["const"]] if "const" in one else None)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"{rule}: ({' | '.join(map(literal, choices))}) {close}\n"
    if kinds is not None and "string" not in kinds:
        return f"{rule}: {rule}_json {close}\n{rule}_json: {as_rule({**shared, **one})}\n"
    if kinds is None and one.keys() - {*TOLD}:
        raise _unbound(name, f"the type of {key!r} is not said")
    if limits := [word for word in LIMITS if word in one]:
        raise _unbound(name, f"{limits[0]} of {key!r} cannot be kept to between tags")
    return _free_value(tags, rule)


LIMITS = ("enum", "const", "pattern", "format", "minLength", "maxLength")
"""What texts would have to keep to."""


def _unbound(name: str, why: str) -> RequestError:
    return RequestError("tools", f"parameters of {name!r}: {why}")


def _within(mark: str) -> str:
    """An expression for any text with a mark in it."""
    escaped = re.sub(r"([][\\.^$*+?{}|()/])", r"\\\1", mark)
    return f"/(?s:.*{escaped}.*)/"


def literal(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def as_rule(schema: Any) -> str:
    """JSON that keeps to a schema, as a grammar has it."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"
