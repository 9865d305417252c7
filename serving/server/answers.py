"""What goes back to clients: objects and stream pieces of OpenAI's API."""

from __future__ import annotations

import codecs
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ... import __version__
from ...shared.engine import TokenLogprobs
from ...shared.errors import (
    InternalError,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    TwinferError,
    UserError,
)
from ...shared.tokenizer import Tokenizer
from ..formats.events import (
    ContentText,
    Event,
    Finish,
    ParsedMessage,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from ..formats.parser import Parser
from .live import Live, News
from .messages import Ready
from .reader import Reader, finish_reason

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
SILENCE = b": the request is waiting\n\n"
"""A comment line: clients pass over it, and proxies see that the stream lives."""
TOO_LONG = "context_length_exceeded"
"""The word for which clients look that shorten a conversation by themselves."""
MESSAGE_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Those of Anthropic's API."""
MESSAGE_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Its names of errors by status, where they are not the usual ones."""
MESSAGE_DETAILS = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""What its errors say besides about some fields: a client that reads this one goes on with whole
conversations.
"""


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error. Nothing of the engine's inside goes out."""
    if isinstance(error, UserError):
        words = " ".join(str(error).split())
        status, param = error.http_status, getattr(error, "field", None)
        if isinstance(error, ModelNotFound):
            return status, error_body(words, "invalid_request_error", "model", "model_not_found")
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        return status, error_body(words, "invalid_request_error", param, code)
    if isinstance(error, Overloaded):
        return 503, error_body(str(error), "overloaded_error", code="overloaded")
    if isinstance(error, TwinferError) and not isinstance(error, InternalError):
        return 503, error_body(str(error), "server_error", code="engine_unavailable")
    return 500, error_body("an error inside of the server; its log says more", "server_error")


def message_of(error: Exception) -> str:
    """What an error says to whoever has caused it, or waits."""
    return str(error_of(error)[1]["error"]["message"])


def message_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error as Anthropic's clients read it; `body` is that of OpenAI's."""
    error = body["error"]
    usual = "invalid_request_error" if status < 500 else "api_error"
    message = str(error["message"])
    if error["code"] == TOO_LONG:  # here they look for these words
        field, _, reason = message.partition(": ")
        message = f"{field}: prompt is too long: {reason}"
    told: dict[str, Any] = {"type": MESSAGE_ERRORS.get(status, usual), "message": message}
    if error["param"] in MESSAGE_DETAILS:
        told["details"] = MESSAGE_DETAILS[error["param"]]
    return {"type": "error", "error": told}


def error_on(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an error as the clients of a path read it; `body` is that of OpenAI's."""
    return message_error(status, body) if path in MESSAGE_PATHS else body


def usage(lives: Sequence[Live], *, hidden: int = 0) -> dict[str, Any]:
    """Tokens of prompts, and of completions as far as they were told; `hidden` tokens of each never
    are.
    """
    prompt = sum(len(live.prompt_ids) for live in lives)
    count = sum(max(0, told - hidden) for live in lives for told in live.told)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": sum(live.num_cached_tokens for live in lives)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def fingerprint_of(ready: Ready | None) -> str | None:
    """A name for the model and what runs it: its digest, this version of the package, the device
    and the engine's options as they were resolved. Where it differs, the same seed may give other
    tokens.
    """
    if ready is None:
        return None
    names = "backend", "platform", "device", "digest"
    about = {name: ready.model.get(name) for name in names}
    told = msgspec.json.encode([__version__, about, ready.options], order="deterministic")
    return f"fp_{hashlib.sha256(told).hexdigest()[:12]}"


class Words:
    """The text of tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text."""
        piece = None if self._tokenizer is None else self._tokenizer.piece(token)
        if piece is None:
            return b""
        return piece.encode() if isinstance(piece, str) else piece

    def text(self, token: int) -> str:
        """The same as text; parts of characters as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name(self, token: int, *, as_id: bool = False) -> str:
        """A name that no other token has where its bytes are no text, as OpenAI has it."""
        if as_id or self._tokenizer is None:
            return f"token_id:{token}"
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(
        self,
        tokens: list[int],
        scores: list[TokenLogprobs],
        count: int,
        *,
        as_ids: bool = False,
    ) -> dict[str, Any]:
        """Log-probabilities of a chat's tokens, with the `count` best of each place."""
        return {
            "content": [
                self._entry(token, best[token].logprob, as_ids)
                | {
                    "top_logprobs": [
                        self._entry(other, entry.logprob, as_ids)
                        for other, entry in top(best, count)
                    ]
                }
                for token, best in zip(tokens, scores, strict=True)
            ],
            "refusal": None,
        }

    def _entry(self, token: int, value: float, as_id: bool) -> dict[str, Any]:
        raw = self.bytes_of(token)
        return {
            "token": self.name(token, as_id=True) if as_id else raw.decode("utf-8", "replace"),
            "logprob": value,
            "bytes": list(raw),
        }

    def prompt(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None], count: int
    ) -> list[Any]:
        """By position of a prompt, what each token has: its own, and the `count` best."""
        return [
            best
            and {
                str(other): {
                    "logprob": entry.logprob,
                    "rank": entry.rank,
                    "decoded_token": self.text(other),
                }
                for other, entry in top(best, count, token)
            }
            for token, best in zip(tokens, scores, strict=True)
        ]

    def completion(
        self,
        tokens: Sequence[int],
        scores: Sequence[TokenLogprobs | None],
        count: int,
        offsets: Offsets,
        *,
        as_ids: bool,
    ) -> dict[str, Any]:
        """Log-probabilities of a completion's tokens; `offsets` has taken those before them. The
        first token of a text has none.
        """
        return {
            "tokens": [self.name(token, as_id=as_ids) for token in tokens],
            "token_logprobs": [
                None if best is None else best[token].logprob
                for token, best in zip(tokens, scores, strict=True)
            ],
            "top_logprobs": [
                None
                if best is None
                else {
                    self.name(other, as_id=as_ids): entry.logprob
                    for other, entry in top(best, count, token)
                }
                for token, best in zip(tokens, scores, strict=True)
            ],
            "text_offset": [offsets.take(self.bytes_of(token)) for token in tokens],
        }


class Offsets:
    """Where the tokens of a text begin in it, in characters. By their bytes, not by what was sent
    of the text, which is held back where a stop string may come; a character of several tokens is
    one.
    """

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token: bytes) -> int:
        """The place of the next token."""
        place = self._characters
        self._characters += len(self._decoder.decode(token))
        return place


def top(best: TokenLogprobs, count: int, taken: int | None = None) -> list[tuple[int, Any]]:
    """The `count` best tokens of a place, best first; and the one that was taken, if it is named:
    completions have it there also where it is none of the best.
    """
    ranked = sorted(best.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= count or item[0] == taken]


class ChatAnswer:
    """The answer to one chat, whole or in pieces. `parsers` make one for each completion.

    `echoed` stands before the text of each completion. `reasoning`: whether it is told.
    `prompt_scores`: how many log-probabilities of each token of the prompt. `as_ids`: tokens are
    named by their ids. `with_ids`: ids stand beside the texts.
    """

    def __init__(
        self,
        name: str,
        model: str,
        created: int,
        words: Words,
        scores: int | None,
        parsers: Callable[[], Parser],
        think_end: int | None,
        *,
        fingerprint: str | None = None,
        echoed: str = "",
        prompt_scores: int | None = None,
        reasoning: bool = True,
        as_ids: bool = False,
        with_ids: bool = False,
    ) -> None:
        self._echoed = echoed
        self._prompt_scores = prompt_scores
        self._reasoning = reasoning
        self._as_ids = as_ids
        self._with_ids = with_ids
        self._head = {
            "id": name,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._words = words
        self._scores = scores
        self._new_parser = parsers
        self._readers: dict[int, Reader] = {}
        self._think_end = think_end

    def whole(self, live: Live) -> dict[str, Any]:
        """The object chat.completion."""
        choices = [
            {
                "index": news.index,
                **self._message(news),
                "stop_reason": news.stop_reason,
                "logprobs": self._logprobs(news.token_ids, news.logprobs),
                **self._ids(news),
            }
            for news in live.news()
        ]
        head = self._head | {"object": "chat.completion"} | self._prompt(live)
        return head | {"choices": choices, "usage": self._usage(live)}

    def _message(self, news: News) -> dict[str, Any]:
        message = ParsedMessage()
        for part in self._events(news):
            message.add(part)
        calls = [_whole_call(call.id, call.name, call.arguments) for call in message.tool_calls]
        told: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            told |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
        if calls:
            told |= {"content": message.content or None, "tool_calls": calls}
        return {"message": told, "finish_reason": message.finish_reason}

    def _prompt(self, live: Live) -> dict[str, Any]:
        """What is told of the prompt."""
        told: dict[str, Any] = {}
        if self._with_ids:
            told["prompt_token_ids"] = live.prompt_ids
        if self._prompt_scores is not None and live.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._words.prompt(
                live.prompt_ids, live.prompt_logprobs, self._prompt_scores
            )
        return told

    def pieces(self, live: Live, news: News) -> list[dict[str, Any]]:
        """Objects chat.completion.chunk for what is new."""
        deltas: list[dict[str, Any]] = []
        if news.first:
            deltas.append({"role": "assistant", "content": "", "refusal": None})
        reason = None
        for part in self._events(news):
            if isinstance(part, Finish):
                reason = part.reason
            elif (delta := _delta(part)) is not None:
                deltas.append(delta)
        scores, ids = self._logprobs(news.token_ids, news.logprobs), self._ids(news)
        if (scores is not None or ids) and len(deltas) == int(news.first):
            deltas.append({"content": ""})  # their text is still held back
        found = [
            self._piece(news.index, delta, scores if last else None, None)
            for last, delta in zip(_lasts(deltas), deltas, strict=True)
        ]
        if ids:
            found[-1]["choices"][0] |= ids
        if news.first and not news.index:
            found[0] |= self._prompt(live)
        if reason is not None:
            found.append(self._piece(news.index, {}, None, reason))
            found[-1]["choices"][0]["stop_reason"] = news.stop_reason
        return found

    def _events(self, news: News) -> list[Event]:
        reader = self._readers.get(news.index)
        if reader is None:
            reader = Reader(self._new_parser(), self._think_end, tells=self._reasoning)
            self._readers[news.index] = reader
        events = reader.read(news)
        if news.first and self._echoed:
            events.insert(0, ContentText(self._echoed))
        return events

    def _ids(self, news: News) -> dict[str, Any]:
        return {"token_ids": news.token_ids} if self._with_ids else {}

    def usage(self, live: Live) -> dict[str, Any]:
        """The last piece of a stream that was asked for it."""
        return self._head | {
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": self._usage(live),
        }

    def _usage(self, live: Live) -> dict[str, Any]:
        told = usage([live])
        told["completion_tokens_details"]["reasoning_tokens"] = sum(
            reader.reasoning_tokens for reader in self._readers.values()
        )
        return told

    def _piece(
        self, index: int, delta: dict[str, Any], scores: Any, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, tokens: list[int], scores: list[TokenLogprobs] | None) -> Any:
        if self._scores is None or scores is None:
            return None
        return self._words.chat(tokens, scores, self._scores, as_ids=self._as_ids)


def named_events(events: Sequence[dict[str, Any]]) -> bytes:
    """Server-sent events under the names in their `type`."""
    return b"".join(b"event: " + one["type"].encode() + b"\n" + event(one) for one in events)


def _lasts(deltas: Sequence[Any]) -> list[bool]:
    return [place == len(deltas) - 1 for place in range(len(deltas))]


def _whole_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments or "{}"},
    }


def _delta(part: Event) -> dict[str, Any] | None:
    """What a client hears of an event of the parser's."""
    match part:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning": text, "reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [{"index": index} | call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


class CompletionAnswer:
    """The answer to one call of /v1/completions, with all its prompts, whole or in pieces.

    `echo`: the prompt's text stands before the completion's. `hide`: the one token that was
    computed is not told.
    """

    def __init__(
        self,
        name: str,
        model: str,
        created: int,
        words: Words,
        *,
        fingerprint: str | None,
        prompts: Sequence[str],
        per_prompt: int,
        scores: int | None,
        echo: bool,
        hide: bool,
        as_ids: bool,
        with_ids: bool,
        prompt_scores: int | None,
    ) -> None:
        self._head = {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._words = words
        self._prompts = prompts
        self._per_prompt = per_prompt
        self._scores = scores
        self._echo = echo
        self._hide = hide
        self._as_ids = as_ids
        self._with_ids = with_ids
        self._prompt_scores = prompt_scores
        self._offsets: defaultdict[tuple[int, int], Offsets] = defaultdict(Offsets)

    def whole(self, lives: Sequence[Live]) -> dict[str, Any]:
        """The object text_completion."""
        choices = [
            self._choice(place, live, news)
            for place, live in enumerate(lives)
            for news in live.news()
        ]
        return self._head | {"choices": choices, "usage": usage(lives, hidden=int(self._hide))}

    def piece(self, place: int, live: Live, news: News) -> dict[str, Any]:
        """A piece of a stream."""
        return self._head | {"choices": [self._choice(place, live, news)]}

    def usage(self, lives: Sequence[Live]) -> dict[str, Any]:
        """The last piece of a stream that was asked for it."""
        return self._head | {"choices": [], "usage": usage(lives, hidden=int(self._hide))}

    def _choice(self, place: int, live: Live, news: News) -> dict[str, Any]:
        tokens: list[int] = [] if self._hide else news.token_ids
        scores: list[Any] | None = [] if self._hide else news.logprobs
        text = "" if self._hide else news.text
        if self._echo and news.first:
            text = self._prompts[place] + text
            tokens = live.prompt_ids + tokens
            if scores is not None and live.prompt_logprobs is not None:
                scores = live.prompt_logprobs + scores
        logprobs = None
        if self._scores is not None and scores is not None:
            offsets = self._offsets[place, news.index]
            logprobs = self._words.completion(
                tokens, scores, self._scores, offsets, as_ids=self._as_ids
            )
        reason, stop = finish_reason(news.finish_reason), news.stop_reason
        if self._hide and reason is not None:
            reason, stop = "length", None
        choice = {
            "index": place * self._per_prompt + news.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stop,
        }
        if self._prompt_scores is not None and news.first and live.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._words.prompt(
                live.prompt_ids, live.prompt_logprobs, self._prompt_scores
            )
        if self._with_ids:
            choice["token_ids"] = tokens
            if news.first:
                choice["prompt_token_ids"] = live.prompt_ids
        return choice
