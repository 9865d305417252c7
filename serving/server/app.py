"""The routes. Each reads its body, asks the engine, and answers as OpenAI's API does."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from ... import __version__
from ...shared.chat import MAX_OUTPUT, render_chat
from ...shared.errors import ModelNotFound, PromptTooLong, RequestError
from ...shared.models.fields import show
from ...shared.request_checks import out_of_range
from ...shared.sampling_params import SamplingParams
from ...shared.structured_outputs import StructuredOutputs
from ...shared.tokenizer import LONG, Tokenizer
from ..bad_words import banning, sequences_of
from ..batch import need_tokenizer
from ..formats.history import described_tools, turns_of_one_call
from ..formats.marks import searched_marks, shown_marks
from ..formats.message_grammar import answer_grammar
from ..formats.parser import Parser, open_parser
from ..formats.table import Format
from ..message_events import Ending, MessageEvents
from ..responses import ResponseEvents, Usage
from .answers import (
    ChatAnswer,
    CompletionAnswer,
    Words,
    encode,
    error_body,
    error_of,
    error_on,
    fingerprint_of,
    message_error,
    message_of,
)
from .anthropic import CountRequest, MessagesRequest
from .as_chat import AsChat
from .cors import shared
from .doors import Doors, Load, TooLarge, too_large
from .events import log_failure, piece_events, told_events
from .fields import (
    LONG_BODY,
    MAX_COMPLETIONS,
    MAX_LISTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeChatRequest,
    TokenizeRequest,
    read_fields,
    read_json,
)
from .live import Live, News, wait_for_all, wait_for_news
from .metrics import Metrics
from .reader import Reader
from .replicas import Engines
from .responses import ResponsesRequest
from .streams import ClientGone, EventStream, while_there
from .traces import Traces

RETRY_AFTER_S = 1
FIRST_NEWS_S = 2.0
"""How long a stream waits for its first event before it begins, so that a refusal is a status."""
TAIL = 64
"""Characters of a prompt's end that say whether it has opened reasoning."""
LARGE = 1 << 20
"""Bytes or characters of a text that takes hundreds of megabytes while it is split: such texts take
turns.
"""
BODY_S = 120.0
"""How long a body may take to arrive."""
COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where nobody says, as OpenAI has it."""


PART_IDS = 1 << 14
"""Token ids, or their entries, that are written at once."""
PAGE = "/"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)
"""The page loads nothing from anywhere, and asks nobody but this server."""
_PAGE = (Path(__file__).parent / "page.html").read_bytes()


@dataclass(slots=True)
class Settings:
    """What the routes know of this server. `max_body` in bytes."""

    names: Sequence[str]
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    format: Format
    template: str | None = None
    """How chats are rendered; None: as the model's own template has it."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What that template may read, if a chat does not say otherwise."""
    keys: Sequence[str] = ()
    max_body: int = 32 << 20
    draw_seeds: bool = True
    page: bool = True
    log_requests: bool = False
    bounds_answers: bool = False
    """Whether the model brings the `max_tokens` of `defaults` along."""
    traces: Traces | None = None
    stream_interval: int = 1
    """How many new tokens of a completion an event of a stream has at least, behind its first."""
    load: Load | None = None
    """Where calls under way are counted; None: they are not."""
    cors: dict[str, Any] | None = None
    """See `cors_options`."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a chat's answer, of which the model itself says nothing."""


class Server:
    """The routes over one engine."""

    def __init__(self, settings: Settings, engine: Engines, metrics: Metrics) -> None:
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._words = Words(settings.tokenizer)
        self._created = int(time.time())
        self._large_text_lock = asyncio.Lock()
        think, tokenizer = settings.format.think, settings.tokenizer
        self._think_end = tokenizer.token_id(think[1]) if think and tokenizer else None

    # -- what a server says of itself

    async def health(self, request: Request) -> Response:
        """Whether the engine has started and is heard of: scripts for other servers wait for this,
        and send requests then.
        """
        if self._engine.ready is not None and self._engine.alive:
            return Response(b"", 200)
        state = "the engine is starting" if self._engine.alive else "the engine is silent"
        return _json(503, error_body(self._engine.why or state, "server_error"))

    async def ready(self, request: Request) -> Response:
        """Whether a request would be taken now."""
        self._engine.admit(0, 0)
        return Response(b"", 200)

    async def models(self, request: Request) -> Response:
        """The model, by all its names."""
        return _json(200, {"object": "list", "data": [self._card(n) for n in self._settings.names]})

    async def model(self, request: Request) -> Response:
        """One name of the model."""
        name = request.path_params["name"]
        self._check_model(name)
        return _json(200, self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "twinfer",
            "root": self._settings.names[0],
            "parent": None,
            "max_model_len": self._room,
        }

    async def page(self, request: Request) -> Response:
        """A page for people: what `metrics` says, and a box for a prompt. It holds no secret."""
        headers = {"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY"}
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)

    async def version(self, request: Request) -> Response:
        """The version of the package."""
        return _json(200, {"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- tokens

    async def tokenize(self, request: Request) -> Response:
        """Text, or a conversation, to token ids."""
        body = await _body(request)
        if isinstance(body, dict) and "messages" in body:
            chat: TokenizeChatRequest = read_fields(TokenizeChatRequest, body)
            self._accept(chat)
            _, ids = await self._render_in_thread(request, chat, None)
            named = chat.return_token_strs
        else:
            text: TokenizeRequest = read_fields(TokenizeRequest, body)
            self._accept(text)
            kept, special = (
                self._kept(text, COMPLETION_TOKENS),
                text.add_special_tokens is not False,
            )
            (whole,) = await self._encode([text.prompt], special, None)
            ids = _last(whole, kept, self._front(special, kept))
            named = text.return_token_strs
        head = encode({"count": len(ids), "max_model_len": self._room})[:-1]
        data = b'%s,"tokens":%s' % (head, await _in_thread(_listed, ids, size=len(ids)))
        if named:
            # The entries of the vocabulary, as `convert_ids_to_tokens` of transformers has them.
            token_text = need_tokenizer(self._settings.tokenizer).token_text

            def entries() -> bytes:
                return _listed([token_text(token) for token in ids])

            data += b',"token_strs":%s' % await _in_thread(entries, size=len(ids))
        return Response(data + b"}", media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text, special tokens too."""
        body: DetokenizeRequest = read_fields(DetokenizeRequest, await _body(request))
        self._check_model(body.model)
        self._count_unknown(list(body.model_extra or {}))
        tokenizer, ids = (
            need_tokenizer(self._settings.tokenizer, "tokens", "there is no text"),
            body.tokens,
        )

        def decode() -> str:
            most = tokenizer.vocab_size - 1
            if ids and (odd := [token for token in (min(ids), max(ids)) if not 0 <= token <= most]):
                raise RequestError("tokens", f"has {show(odd[0])}, allowed is 0 to {most}")
            return tokenizer.decode(ids, skip_special_tokens=False)

        return _json(200, {"prompt": await _in_thread(decode, size=len(ids))})

    async def _encode(
        self, texts: Sequence[str], special: bool, most: int | None
    ) -> list[list[int]]:
        """The token ids of texts, each of at most `most` tokens. Many short ones take as long as a
        long one.
        """
        tokenizer = need_tokenizer(self._settings.tokenizer)
        if max(map(len, texts)) > MAX_OUTPUT:
            raise RequestError("prompt", f"has more than {MAX_OUTPUT} characters")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, special, most) for text in texts]

        size = sum(map(len, texts))
        async with self._turn(size):
            found: list[list[int]] = await _in_thread(encode, size=size)
        return found

    def _turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """What to hold while texts of `size` characters or bytes are split."""
        return self._large_text_lock if size >= LARGE else nullcontext()

    @property
    def _room(self) -> int | None:
        """Tokens of a prompt and its completion that context and cache hold; None before the engine
        has said so.
        """
        ready = self._engine.ready
        return None if ready is None else int(ready.model["longest_request"])

    @property
    def _longest(self) -> int | None:
        """Tokens of the longest prompt: one more has to fit."""
        return None if self._room is None else self._room - 1

    def _kept(self, body: Generation, usual: int) -> int | None:
        """How many of a prompt's last tokens are read, see `Generation.kept`. None: all of them, as
        also before the engine has said its sizes.
        """
        wanted = body.truncate_prompt_tokens
        if wanted is None:
            return None
        ready, room = self._engine.ready, self._room
        if ready is None or room is None:
            return None
        return body.kept(wanted, ready.model["max_model_len"], room, usual)

    def _front(self, special: bool, kept: int | None) -> list[int]:
        """The special tokens that stay before the last `kept` of a text that was encoded with them
        (`special`), if they leave room for more.
        """
        if kept is None or not special:
            return []
        front = need_tokenizer(self._settings.tokenizer).front
        return front if len(front) < kept else []

    async def _render_in_thread(
        self, request: Request, chat: ChatRequest, most: int | None
    ) -> tuple[str, list[int]]:
        """See `_render`. Others are served meanwhile."""
        async with self._turn(len(await request.body())):
            return await asyncio.to_thread(self._render, chat, most)

    def _render(self, chat: ChatRequest, most: int | None) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and as tokens. Raises RequestError; for more than
        `most` tokens before there is a list of them, unless fewer are to be read.
        """
        tokenizer = need_tokenizer(self._settings.tokenizer, "messages", "there are no chats")
        continues = bool(chat.continue_final_message)
        generates = chat.add_generation_prompt
        conversation, tools = chat.conversation(), chat.described
        if self._settings.format.messages is not None:
            conversation, tools = turns_of_one_call(conversation), described_tools(tools)
        text = render_chat(
            tokenizer,
            conversation,
            tools=tools or None,
            documents=chat.documents,
            template=self._settings.template,
            variables={**self._settings.variables, **chat.template_variables()},
            add_generation_prompt=not continues if generates is None else generates,
            continue_final_message=continues,
        )
        kept, special = self._kept(chat, 1), bool(chat.add_special_tokens)
        try:
            ids = tokenizer.encode(text, special, most if kept is None else None)
            return text, _last(ids, kept, self._front(special, kept))
        except RequestError as error:
            raise chat.named(error) from None

    # -- generation

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        chat: ChatRequest = read_fields(ChatRequest, await _body(request))
        live, new_parser = await self._begin_chat(request, chat)
        answer = ChatAnswer(
            f"chatcmpl-{request.scope['twinfer.id']}",
            chat.model or self._settings.names[0],
            int(time.time()),
            self._words,
            (chat.top_logprobs or 0) if chat.logprobs else None,
            new_parser,
            self._think_end,
            fingerprint=fingerprint_of(self._engine.ready),
            echoed=chat.echoed,
            prompt_scores=chat.prompt_logprobs,
            reasoning=chat.include_reasoning is not False,
            as_ids=bool(chat.return_tokens_as_token_ids),
            with_ids=bool(chat.return_token_ids),
        )
        if chat.stream:
            pieces = piece_events(
                [live],
                lambda place, live, news: answer.pieces(live, news),
                (lambda: answer.usage(live)) if chat.wants_usage else None,
                always=chat.wants_usage_always,
            )
            return await self._stream(request, [live], pieces)
        await self._whole(request, [live])
        return await _told(lambda: answer.whole(live), [live])

    async def _begin_chat(
        self, request: Request, chat: ChatRequest
    ) -> tuple[Live, Callable[[], Parser]]:
        """Sends a chat to the engine; with what makes a parser for each of its completions."""
        self._accept(chat)
        self._engine.admit(0, 0)
        text, ids = await self._render_in_thread(request, chat, self._longest)
        params = await self._with_words(self._params(chat, len(ids), whole_context=True), 1)
        params = self._seeded(params)
        if (bound := self._bound(chat, params, text[-TAIL:])) is not None:
            try:
                params = replace(params, structured_outputs=bound)
            except RequestError as error:
                raise chat.named(error) from None
        if (ends := self._settings.end_token_ids) and not params.ignore_eos:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        live = self._add(request, chat, ids, params)
        tokenizer, form = self._settings.tokenizer, self._settings.format
        tail, schemas = text[-TAIL:], chat.tool_schemas
        live.look_for(searched_marks(form, tokenizer), shown_marks(form, tokenizer))
        return live, lambda: open_parser(form, tokenizer, tail, schemas)

    def _bound(
        self, chat: ChatRequest, params: SamplingParams, tail: str
    ) -> StructuredOutputs | None:
        """The form of the whole answer, where marks of reasoning or of calls are part of it."""
        tokenizer, form = self._settings.tokenizer, params.structured_outputs
        if tokenizer is None:
            return None
        ends = self._settings.end_token_ids
        grammar = answer_grammar(self._settings.format, tokenizer.token_id, tail, ends)
        if chat.must_call:
            several = chat.parallel_tool_calls is not False and not chat.named_tool
            text = grammar.calls(chat.offered, several=several)
        elif form is None and chat.offered and chat.parallel_tool_calls is False:
            text = grammar.may_call(chat.offered, several=False, strict=chat.tool_names)
        elif form is None and chat.binds_calls and self._settings.format.may_call:
            text = grammar.may_call(chat.offered, several=True, strict=chat.strict_tools)
        elif form is not None and (around := grammar.form(form.kind, form.text)) is not None:
            text = around
        else:
            return None
        return StructuredOutputs("grammar", text)

    async def responses(self, request: Request) -> Response:
        """/v1/responses, without a store: each call brings all that was said."""
        body: ResponsesRequest = read_fields(ResponsesRequest, await _body(request))
        chat, live, reader = await self._begin_other(request, body)
        events = ResponseEvents(
            f"resp_{request.scope['twinfer.id']}",
            chat.model or self._settings.names[0],
            int(time.time()),
            body.repeated(),
        )

        def take() -> list[dict[str, Any]]:
            return [
                out
                for news in live.news()
                for part, places in reader.parts(news)
                for out in events.take(part, self._scores(chat, news, places))
            ]

        def fail(error: Exception) -> list[dict[str, Any]]:
            return events.fail(message_of(error))

        if body.stream:
            told = told_events(
                live, events.start, take, lambda: events.end(_used(live, reader)), fail
            )
            return await self._stream(request, [live], told)
        await self._whole(request, [live])

        def whole() -> dict[str, Any]:
            take()
            return events.response(_used(live, reader))

        return await _told(whole, [live])

    async def messages(self, request: Request) -> Response:
        """/v1/messages, as Anthropic's API has it."""
        body: MessagesRequest = read_fields(MessagesRequest, await _body(request))
        chat, live, reader = await self._begin_other(request, body)
        name = chat.model or self._settings.names[0]
        events = MessageEvents(f"msg_{request.scope['twinfer.id']}", name)

        def take() -> list[dict[str, Any]]:
            return [out for news in live.news() for out in events.take(reader.read(news))]

        def ending() -> Ending:
            output, usage = live.outputs[0], _used(live, reader)
            stop = output.stop_reason if isinstance(output.stop_reason, str) else None
            return Ending(usage, stop, is_full=usage.prompt + usage.completion == self._room)

        def fail(error: Exception) -> list[dict[str, Any]]:
            return [message_error(*error_of(error))]

        if body.stream:
            told = told_events(
                live,
                lambda: events.start(_used(live, reader)),
                take,
                lambda: events.end(ending()),
                fail,
            )
            return await self._stream(request, [live], told)
        await self._whole(request, [live])

        def whole() -> dict[str, Any]:
            take()
            return events.message(ending())

        return await _told(whole, [live])

    async def count_tokens(self, request: Request) -> Response:
        """/v1/messages/count_tokens."""
        body: CountRequest = read_fields(CountRequest, await _body(request))
        body.check()
        chat = body.chat()
        try:
            self._accept(chat)
            _, ids = await self._render_in_thread(request, chat, None)
        except RequestError as error:
            raise body.named(error) from None
        return _json(200, {"input_tokens": len(ids)})

    async def _begin_other(
        self, request: Request, body: AsChat
    ) -> tuple[ChatRequest, Live, Reader]:
        """Sends the chat to the engine that a call of another API asks for. Errors have the names
        that fields have there.
        """
        body.check()
        chat = body.chat()
        try:
            live, new_parser = await self._begin_chat(request, chat)
        except RequestError as error:
            raise body.named(error) from None
        live.named = lambda error: body.named(chat.named(error))
        tells = chat.include_reasoning is not False
        return chat, live, Reader(new_parser(), self._think_end, tells=tells)

    def _scores(self, chat: ChatRequest, news: News, places: Sequence[int]) -> list[dict[str, Any]]:
        """Log-probabilities of new tokens at some places, if they were asked for."""
        if not chat.logprobs or news.logprobs is None:
            return []
        tokens = [news.token_ids[place] for place in places]
        scores = [news.logprobs[place] for place in places]
        told: list[dict[str, Any]] = self._words.chat(tokens, scores, chat.top_logprobs or 0)[
            "content"
        ]
        return told

    async def invocations(self, request: Request) -> Response:
        """/invocations: what the body is."""
        body = await _body(request)
        if isinstance(body, dict) and "messages" in body:
            return await self.chat(request)
        if isinstance(body, dict) and "prompt" in body:
            return await self.completions(request)
        raise RequestError("body", "needs messages, as a chat, or a prompt, as a completion")

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        body: CompletionRequest = read_fields(CompletionRequest, await _body(request))
        self._accept(body)
        prompts = body.prompts()
        body.check_lists(len(prompts))
        self._engine.admit(0, 0)
        kept, front = self._kept(body, COMPLETION_TOKENS), list[int]()
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if kept is not None:  # else it is done where they are sent
            await _in_thread(self._check_known, ids, size=sum(map(len, ids)))
        if texts := [prompt for prompt in prompts if isinstance(prompt, str)]:  # all, or none
            special = body.add_special_tokens is not False
            ids = await self._encode(texts, special, self._longest if kept is None else None)
            front = self._front(special, kept)
        read = [_last(prompt, kept, front) for prompt in ids]
        # What is echoed is what was read.
        prompts = [
            prompt if few is whole else few[len(front) :]
            for prompt, whole, few in zip(prompts, ids, read, strict=True)
        ]
        ids = read
        params = self._params(body, len(ids[0]), whole_context=False)
        params = await self._with_words(params, len(ids))
        settings = [self._seeded(params) for _ in ids]
        answer = CompletionAnswer(
            f"cmpl-{request.scope['twinfer.id']}",
            body.model or self._settings.names[0],
            int(time.time()),
            self._words,
            fingerprint=fingerprint_of(self._engine.ready),
            prompts=[self._text(prompt) for prompt in prompts] if body.echo else [],
            per_prompt=settings[0].n,
            scores=body.logprobs,
            echo=bool(body.echo),
            hide=body.max_tokens == 0,
            as_ids=bool(body.return_tokens_as_token_ids),
            with_ids=bool(body.return_token_ids),
            prompt_scores=body.prompt_logprobs,
        )
        lives = self._add_all(request, body, ids, settings)
        if body.stream:
            pieces = piece_events(
                lives,
                lambda *news: [answer.piece(*news)],
                (lambda: answer.usage(lives)) if body.wants_usage else None,
                always=body.wants_usage_always,
            )
            return await self._stream(request, lives, pieces)
        await self._whole(request, lives)
        return await _told(lambda: answer.whole(lives), lives)

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._settings.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def _accept(self, body: Generation) -> None:
        self._check_model(body.model)
        body.check()
        self._count_unknown(body.unknown)

    def _count_unknown(self, names: Sequence[str]) -> None:
        if names:
            self._metrics.unknown_field(len(names))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._settings.names:
            allowed = ", ".join(self._settings.names)
            raise ModelNotFound(f"model: got {show(name)}, this server has {allowed}")

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("prompt", "is empty: at least one token is needed")
        most = self._longest
        if most is not None and len(ids) > most:  # else all of it goes to the engine first
            raise PromptTooLong("prompt", f"got {len(ids)} tokens, allowed is at most {most}")
        self._check_known([ids])

    def _check_known(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise RequestError for a token id that the model has not."""
        ready = self._engine.ready
        size = ready.model["vocab_size"] if ready else 2**31
        for ids in prompts:
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < size:
                    raise out_of_range(token, size)

    def _params(self, body: Generation, length: int, *, whole_context: bool) -> SamplingParams:
        """The settings for a prompt of `length` tokens. Raises RequestError."""
        settings, room = self._settings, self._room
        own, has_own, most = settings.defaults.max_tokens, settings.bounds_answers, None
        if room is not None and whole_context:
            fits = max(1, room - length)
            most = min(own, fits) if has_own else fits
        elif not has_own:
            most = COMPLETION_TOKENS
        params = body.params(settings.defaults, most)
        if params.stop and settings.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and the model has none")
        return params

    async def _with_words(self, params: SamplingParams, prompts: int) -> SamplingParams:
        """With what a text may not have, as tokens, for each of so many prompts. Raises
        RequestError.
        """
        words = params.bad_words
        if not words:
            return params
        tokenizer = need_tokenizer(self._settings.tokenizer, "bad_words", "there are no words")

        def banned() -> SamplingParams:
            found, count = sequences_of(words, tokenizer), prompts * params.n
            if (size := sum(map(len, found))) * count > MAX_LISTED:
                raise RequestError(
                    "bad_words",
                    f"are {size} tokens for each of {count} completions, at most {MAX_LISTED} in "
                    "all",
                )
            return banning(params, found)

        made: SamplingParams = await _in_thread(banned, size=sum(map(len, words)))
        return made

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """With a seed of its own, where the client names none."""
        if params.seed is None and self._settings.draw_seeds:
            return params.with_seed(secrets.randbits(63))
        return params

    def _add(
        self, request: Request, body: Generation, ids: list[int], params: SamplingParams
    ) -> Live:
        return self._add_all(request, body, [ids], [params])[0]

    def _add_all(
        self,
        request: Request,
        body: Generation,
        prompts: Sequence[list[int]],
        settings: Sequence[SamplingParams],
    ) -> list[Live]:
        """Send all prompts, or none."""
        for ids in prompts:
            self._check_ids(ids)
        count = sum(params.n for params in settings)
        if count > MAX_COMPLETIONS:
            raise RequestError(
                "n", f"makes {count} completions of all prompts, at most {MAX_COMPLETIONS}"
            )
        self._engine.admit(count, sum(map(len, prompts)) * settings[0].n)
        salt = request.scope["twinfer.salt"] + (body.cache_salt or "")
        changed = asyncio.Event()
        lives = [
            self._engine.add(ids, params, priority=body.priority or 0, salt=salt, changed=changed)
            for ids, params in zip(prompts, settings, strict=True)
        ]
        for live in lives:
            live.name = request.scope["twinfer.name"]
            live.named = body.named
            live.interval = self._settings.stream_interval if body.stream else 1
        request.scope["twinfer.lives"] += lives
        return lives

    async def _whole(self, request: Request, lives: Sequence[Live]) -> None:
        try:
            await while_there(request, wait_for_all(lives))
        finally:
            self._let_go(lives)

    def _let_go(self, lives: Sequence[Live]) -> None:
        """Whatever has not ended is not wanted any more."""
        for live in lives:
            if not live.done:
                self._metrics.abort()
            self._engine.abort(live)

    async def _stream(
        self, request: Request, lives: Sequence[Live], pieces: AsyncGenerator[bytes, None]
    ) -> Response:
        """A stream; but an error that comes at once is a status."""
        try:
            await while_there(request, wait_for_news(lives[0].changed, FIRST_NEWS_S))
        except BaseException:
            self._let_go(lives)
            raise
        lives[0].changed.set()
        for live in lives:
            if live.error is not None:
                self._let_go(lives)
                raise live.error
        return EventStream(pieces, lambda: self._let_go(lives))


def build_app(settings: Settings, engine: Engines, metrics: Metrics) -> Any:
    """The ASGI application."""
    server = Server(settings, engine, metrics)
    app = FastAPI(
        title="Twinfer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # They would go to whatever host the client has named, with its body and without a word.
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, no_route)
    for path, methods, route in (
        *([(PAGE, "GET", server.page)] if settings.page else []),
        ("/health", "GET", server.health),
        ("/ping", "GET POST", server.health),
        *([("/load", "GET", _telling(settings.load))] if settings.load is not None else []),
        ("/ready", "GET", server.ready),
        ("/metrics", "GET", server.metrics),
        ("/version", "GET", server.version),
        ("/v1/models", "GET", server.models),
        ("/v1/models/{name:path}", "GET", server.model),
        ("/tokenize", "POST", server.tokenize),
        ("/detokenize", "POST", server.detokenize),
        ("/v1/chat/completions", "POST", server.chat),
        ("/v1/completions", "POST", server.completions),
        ("/v1/responses", "POST", server.responses),
        ("/v1/messages", "POST", server.messages),
        ("/v1/messages/count_tokens", "POST", server.count_tokens),
        ("/invocations", "POST", server.invocations),
    ):
        app.add_route(path, _guarded(route, settings), methods=methods.split())
    pages = (PAGE,) if settings.page else ()
    doors = Doors(
        app,
        keys=settings.keys,
        max_body=settings.max_body,
        open_paths=pages,
        is_path=partial(_is_path, app),
        load=settings.load,
        log_requests=settings.log_requests,
        traces=settings.traces,
    )
    return shared(doors, settings.cors)


def _telling(load: Load) -> Any:
    """A route that tells how many calls that generate are under way."""

    async def tell(request: Request) -> Response:
        return _json(200, {"server_load": load.calls})

    return tell


def _is_path(app: FastAPI, path: str) -> bool:
    """Whether there is a route for a path, with whatever method."""
    scope = {"type": "http", "path": path, "method": ""}
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


async def no_route(request: Request, error: Exception) -> Response:
    """No such path, or no such method of it."""
    status, headers = 500, None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})  # of a 405, what is allowed
    words = f"{request.method} {show(request.url.path)}: there is no such call"
    body = error_on(
        request.scope.get("twinfer.path", ""), status, error_body(words, "invalid_request_error")
    )
    return _json(status, body, headers)


def _guarded(route: Any, settings: Settings) -> Any:
    """A route whose errors are answers."""

    async def guarded(request: Request) -> Response:
        path = request.scope["twinfer.path"]
        try:
            response: Response = await route(request)
            return response
        except (ClientGone, ClientDisconnect):
            return Response(b"", 499)
        except TooLarge:
            return _json(413, error_on(path, 413, too_large(settings.max_body)))
        except Exception as error:
            log_failure(error)
            status, body = error_of(error)
            retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
            return _json(status, error_on(path, status, body), retry)

    return guarded


async def _body(request: Request) -> Any:
    """The JSON of a request. Raises RequestError."""
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.body()
    except TimeoutError:
        raise RequestError("body", f"did not arrive within {BODY_S:.0f} s") from None
    if len(data) < LONG_BODY:
        return read_json(data)
    return await asyncio.to_thread(read_json, data)


def _last(ids: list[int], kept: int | None, front: list[int]) -> list[int]:
    """The last `kept` tokens of a prompt, among them those that it begins with (`front`)."""
    if kept is None or len(ids) <= kept:
        return ids
    return front + ids[len(ids) - kept + len(front) :]


async def _in_thread(work: Callable[..., Any], *arguments: Any, size: int) -> Any:
    """What `work` gives for `size` values; if these are many, others are served meanwhile."""
    if size < LONG:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _used(live: Live, reader: Reader) -> Usage:
    """The tokens of a chat's one completion so far."""
    count, cached = len(live.outputs[0].token_ids), live.num_cached_tokens
    return Usage(len(live.prompt_ids), count, cached, reader.reasoning_tokens)


async def _told(answer: Callable[[], Any], lives: Sequence[Live]) -> Response:
    """A whole answer. Log-probabilities make a large one."""
    size = sum(
        len(best or ())
        for live in lives
        for scores in (live.prompt_logprobs, *(output.logprobs for output in live.outputs))
        for best in (scores or ())
    )
    response: Response = await _in_thread(lambda: _json(200, answer()), size=size)
    return response


def _listed(items: Sequence[Any]) -> bytes:
    """A JSON list. One call for millions would let nobody else run."""
    parts = (items[start : start + PART_IDS] for start in range(0, len(items), PART_IDS))
    return b"[%s]" % b",".join(encode(part)[1:-1] for part in parts)


def _json(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")
