"""What was said before, as chat templates of the harmony format read it: a turn has one call, and
either reasoning or content before that, or it has content; a tool has a description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...shared.chat import REASONING, content_text

Json = dict[str, Any]


def turns_of_one_call(messages: Sequence[Json]) -> list[Json]:
    """Each call in a turn of its own, with its results behind it, where templates would leave out
    all but the first. What was said before a call joins what was thought. Raises RequestError for a
    content that is no text.
    """
    found: list[Json] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls")
        place += 1
        if not isinstance(calls, list) or not calls:
            found.append(_answered(message))
            continue
        end = place
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        first = _joined(f"messages[{place - 1}].content", message)
        found += _split(first, calls, messages[place:end])
        place = end
    return found


def _answered(message: Json) -> Json:
    """A turn without calls, which templates take for an answer, though it may be cut off before."""
    silent = message.get("role") == "assistant" and message.get("content") is None
    return {**message, "content": ""} if silent else message


def _split(first: Json, calls: Sequence[Any], results: Sequence[Json]) -> list[Json]:
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    found = []
    for place, call in enumerate(calls):
        turn = first if place == 0 else {"role": first.get("role")}
        found.append({**turn, "tool_calls": [call]})
        found += [one for one in results if _owner(ids, one) == place]
    return found


def _owner(ids: Sequence[Any], result: Json) -> int:
    """The place of the call that a result is of: the last, if it names none."""
    name = result.get("tool_call_id")
    return ids.index(name) if name in ids else len(ids) - 1


def _joined(where: str, message: Json) -> Json:
    """A turn's reasoning and its content as one."""
    content = message.get("content") or ""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), "")
    if not content or not thought or not isinstance(thought, str):
        return message
    kept = {key: value for key, value in message.items() if key not in ("content", *REASONING)}
    return {**kept, REASONING[0]: f"{thought}\n{content_text(where, content)}"}


def described_tools(tools: Sequence[Json]) -> list[Json]:
    """Tools whose functions have a description, if an empty one."""
    return [
        {**tool, "function": {**tool["function"], "description": _description(tool)}}
        for tool in tools
    ]


def _description(tool: Json) -> str:
    return tool["function"].get("description") or ""
