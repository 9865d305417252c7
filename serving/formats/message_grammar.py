"""Grammars of answers that are a row of messages; see `AnswerGrammar`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .grammar import ANYTHING, AnswerGrammar, TokenId, argument_schema, as_rule, literal
from .messages import ANSWERS, FUNCTIONS, REASONING, MessageParser, layout_of
from .table import Format

ROLE = "assistant"
PREAMBLE, FINAL = ANSWERS


class MessageGrammar:
    """As `AnswerGrammar`, where each message has a header. `ends` are tokens that end an answer and
    that a grammar has to name: of those that the model's config knows it says nothing.
    """

    def __init__(
        self, form: Format, token_id: TokenId, prompt_tail: str, ends: Collection[int] = ()
    ) -> None:
        layout = layout_of(form)
        self._channel, self._constrain, self._message, self._end, start = (
            f"<[{token_id(mark)}]>"
            for mark in (layout.channel, layout.constrain, layout.message, layout.end, layout.start)
        )
        self._begin = f"{start} {literal(ROLE)}"
        self._next = f"{self._end} {self._begin}"
        known = (number for number in map(token_id, layout.stops) if number in ends)
        stops = [f"<[{number}]>" for number in known]
        self._stop = f" ({' | '.join(stops)})?" if stops else ""
        place = MessageParser(form, None, prompt_tail)
        self._in_answer, self._in_reasoning = place.answers, place.reasons
        self._in_header = prompt_tail.rstrip().endswith(f"{layout.start}{ROLE}")

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may come before the answer itself."""
        return not self._in_answer

    def form(self, kind: str, text: str) -> str | None:
        """See `AnswerGrammar`."""
        if not self.may_reason:
            return None
        if kind in ("json", "json_object"):
            return self.json(json.loads(text) if text else {"type": "object"})
        if kind == "regex":
            return self._final(_expression(text))
        return self.choice(json.loads(text)) if kind == "choice" else None

    def json(self, schema: Mapping[str, Any]) -> str:
        """A value of `schema`, behind reasoning."""
        return self._final(as_rule(schema))

    def choice(self, texts: Sequence[str]) -> str:
        """One of some texts, behind reasoning."""
        return self._final(" | ".join(map(literal, texts)))

    def calls(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """One call of one of `tools`, or `several`, behind reasoning."""
        more = f" ({self._next} call)*" if several else ""
        return self._whole(f"call{more}{self._stop}", self._call_rules(tools, None))

    def may_call(
        self, tools: Sequence[Mapping[str, Any]], *, several: bool, strict: Collection[str]
    ) -> str:
        """Reasoning and any text, and behind it, or between if `several` may come, calls of
        `tools`. Arguments of the tools named `strict` keep to their schemas; those of others are
        any object.
        """
        rules = self._call_rules(tools, strict)
        rules += f"say: {self._head(PREAMBLE)} TEXT {self._next}\n"
        rules += f"final: {self._head(FINAL)} TEXT\n"
        before = f"think | say | call {self._next}" if several else "think | say"
        body = f"({before})* (final | call){self._stop}"
        if self._in_answer:
            return self._whole(f"TEXT ({self._next} {body})?", rules, opened="")
        return self._whole(body, rules)

    def _final(self, answer: str) -> str:
        return self._whole(f"{self._head(FINAL)} answer{self._stop}", f"answer: {answer}\n")

    def _whole(self, body: str, rules: str, opened: str | None = None) -> str:
        """A grammar of reasoning and then `body`, behind what ends what the prompt has begun."""
        if opened is None:
            opened = "" if self._in_header else self._begin
            if self._in_answer or self._in_reasoning:
                opened = f"TEXT {self._next}"
            opened = f"{opened} think*"
        think = f"think: {self._head(REASONING)} TEXT {self._next}\n"
        kind = f'kind: " "? {self._constrain} "json" | " json"\n'
        return f"start: {opened} {body}\n{rules}{think}{kind}{ANYTHING}"

    def _head(self, channel: str) -> str:
        """The header of a message behind its role."""
        kind = " kind?" if channel == FINAL else ""
        return f"{self._channel} {literal(channel)}{kind} {self._message}"

    def _call_rules(
        self, tools: Sequence[Mapping[str, Any]], strict: Collection[str] | None
    ) -> str:
        """`call` and what it needs; of all tools if nobody says which are `strict`."""
        rules = "call: " + " | ".join(f"call_{i}" for i in range(len(tools))) + "\n"
        for i, tool in enumerate(tools):
            to = literal(f" to={FUNCTIONS}{tool['function']['name']}")
            channel = f"{self._channel} {literal(PREAMBLE)}"
            rules += f"call_{i}: ({to} {channel} | {channel} {to}) kind? {self._message} "
            rules += f"arguments_{i}\narguments_{i}: {as_rule(argument_schema(tool, strict))}\n"
        return rules


def _expression(text: str) -> str:
    """A regular expression as a grammar has it: between slashes, in one line."""
    escaped = re.sub(r"(?s)\\.|/|\n", _escaped, text)
    return f"/{escaped}/"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def answer_grammar(
    form: Format, token_id: TokenId, prompt_tail: str, ends: Collection[int] = ()
) -> AnswerGrammar | MessageGrammar:
    """The grammars of a format."""
    if form.messages is None:
        return AnswerGrammar(form, token_id, prompt_tail)
    return MessageGrammar(form, token_id, prompt_tail, ends)
