"""What all routes share: the settings of this server, how the body of a call becomes requests of
the engine, and how what comes of them becomes an answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...shared.chat import MAX_OUTPUT, render_chat
from ...shared.errors import ModelNotFound, PromptTooLong, RequestError
from ...shared.models.fields import show
from ...shared.request_checks import out_of_range
from ...shared.sampling_params import SamplingParams
from ...shared.tokenizer import LONG, Tokenizer
from ..bad_words import banning, sequences_of
from ..batch import need_tokenizer
from ..formats.history import described_tools, turns_of_one_call
from ..formats.table import Format
from .answers import Words, encode
from .doors import Load
from .fields import LONG_BODY, MAX_COMPLETIONS, MAX_LISTED, ChatRequest, Generation, read_json
from .live import Live, wait_for_all, wait_for_news
from .metrics import Metrics
from .replicas import Engines
from .streams import EventStream, while_there
from .traces import Traces

FIRST_NEWS_S = 2.0
"""How long a stream waits for its first event before it begins, so that a refusal is a status."""
LARGE = 1 << 20
"""Bytes or characters of a text that takes hundreds of megabytes while it is split: such texts take
turns.
"""
BODY_S = 120.0
"""How long a body may take to arrive."""
COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where nobody says, as OpenAI has it."""


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
    """One engine, and what the routes do with it alike."""

    def __init__(self, settings: Settings, engine: Engines, metrics: Metrics) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.words = Words(settings.tokenizer)
        self.created = int(time.time())
        self._large_text_lock = asyncio.Lock()
        think, tokenizer = settings.format.think, settings.tokenizer
        self.think_end = tokenizer.token_id(think[1]) if think and tokenizer else None

    async def encode(
        self, texts: Sequence[str], special: bool, most: int | None
    ) -> list[list[int]]:
        """The token ids of texts, each of at most `most` tokens. Many short ones take as long as a
        long one.
        """
        tokenizer = need_tokenizer(self.settings.tokenizer)
        if max(map(len, texts)) > MAX_OUTPUT:
            raise RequestError("prompt", f"has more than {MAX_OUTPUT} characters")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, special, most) for text in texts]

        size = sum(map(len, texts))
        async with self._turn(size):
            found: list[list[int]] = await in_thread(encode, size=size)
        return found

    def _turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """What to hold while texts of `size` characters or bytes are split."""
        return self._large_text_lock if size >= LARGE else nullcontext()

    @property
    def room(self) -> int | None:
        """Tokens of a prompt and its completion that context and cache hold; None before the engine
        has said so.
        """
        ready = self.engine.ready
        return None if ready is None else int(ready.model["longest_request"])

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt: one more has to fit."""
        return None if self.room is None else self.room - 1

    def kept(self, body: Generation, usual: int) -> int | None:
        """How many of a prompt's last tokens are read, see `Generation.kept`. None: all of them, as
        also before the engine has said its sizes.
        """
        wanted = body.truncate_prompt_tokens
        if wanted is None:
            return None
        ready, room = self.engine.ready, self.room
        if ready is None or room is None:
            return None
        return body.kept(wanted, ready.model["max_model_len"], room, usual)

    def front(self, special: bool, kept: int | None) -> list[int]:
        """The special tokens that stay before the last `kept` of a text that was encoded with them
        (`special`), if they leave room for more.
        """
        if kept is None or not special:
            return []
        front = need_tokenizer(self.settings.tokenizer).front
        return front if len(front) < kept else []

    async def render_in_thread(
        self, request: Request, chat: ChatRequest, most: int | None
    ) -> tuple[str, list[int]]:
        """See `_render`. Others are served meanwhile."""
        async with self._turn(len(await request.body())):
            return await asyncio.to_thread(self._render, chat, most)

    def _render(self, chat: ChatRequest, most: int | None) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and as tokens. Raises RequestError; for more than
        `most` tokens before there is a list of them, unless fewer are to be read.
        """
        tokenizer = need_tokenizer(self.settings.tokenizer, "messages", "there are no chats")
        continues = bool(chat.continue_final_message)
        generates = chat.add_generation_prompt
        conversation, tools = chat.conversation(), chat.described
        if self.settings.format.messages is not None:
            conversation, tools = turns_of_one_call(conversation), described_tools(tools)
        text = render_chat(
            tokenizer,
            conversation,
            tools=tools or None,
            documents=chat.documents,
            template=self.settings.template,
            variables={**self.settings.variables, **chat.template_variables()},
            add_generation_prompt=not continues if generates is None else generates,
            continue_final_message=continues,
        )
        kept, special = self.kept(chat, 1), bool(chat.add_special_tokens)
        try:
            ids = tokenizer.encode(text, special, most if kept is None else None)
            return text, last_of(ids, kept, self.front(special, kept))
        except RequestError as error:
            raise chat.named(error) from None

    def accept(self, body: Generation) -> None:
        self.check_model(body.model)
        body.check()
        self.count_unknown(body.unknown)

    def count_unknown(self, names: Sequence[str]) -> None:
        if names:
            self.metrics.unknown_field(len(names))

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            allowed = ", ".join(self.settings.names)
            raise ModelNotFound(f"model: got {show(name)}, this server has {allowed}")

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("prompt", "is empty: at least one token is needed")
        most = self.longest
        if most is not None and len(ids) > most:  # else all of it goes to the engine first
            raise PromptTooLong("prompt", f"got {len(ids)} tokens, allowed is at most {most}")
        self.check_known([ids])

    def check_known(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise RequestError for a token id that the model has not."""
        ready = self.engine.ready
        size = ready.model["vocab_size"] if ready else 2**31
        for ids in prompts:
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < size:
                    raise out_of_range(token, size)

    async def params(
        self, body: Generation, prompts: Sequence[list[int]], *, whole_context: bool
    ) -> list[SamplingParams]:
        """The settings for each of `prompts`, with a seed of its own where the client names none.
        Raises RequestError.
        """
        settings, room = self.settings, self.room
        own, has_own, most = settings.defaults.max_tokens, settings.bounds_answers, None
        if room is not None and whole_context:
            fits = max(1, room - len(prompts[0]))
            most = min(own, fits) if has_own else fits
        elif not has_own:
            most = COMPLETION_TOKENS
        params = body.params(settings.defaults, most)
        if params.stop and settings.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and the model has none")
        params = await self._with_words(params, len(prompts))
        if params.seed is not None or not settings.draw_seeds:
            return [params] * len(prompts)
        return [params.with_seed(secrets.randbits(63)) for _ in prompts]

    async def _with_words(self, params: SamplingParams, prompts: int) -> SamplingParams:
        """With what a text may not have, as tokens, for each of so many prompts. Raises
        RequestError.
        """
        words = params.bad_words
        if not words:
            return params
        tokenizer = need_tokenizer(self.settings.tokenizer, "bad_words", "there are no words")

        def banned() -> SamplingParams:
            found, count = sequences_of(words, tokenizer), prompts * params.n
            if (size := sum(map(len, found))) * count > MAX_LISTED:
                raise RequestError(
                    "bad_words",
                    f"are {size} tokens for each of {count} completions, at most {MAX_LISTED} in "
                    "all",
                )
            return banning(params, found)

        made: SamplingParams = await in_thread(banned, size=sum(map(len, words)))
        return made

    def add_all(
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
        self.engine.admit(count, sum(map(len, prompts)) * settings[0].n)
        salt = request.scope["twinfer.salt"] + (body.cache_salt or "")
        changed = asyncio.Event()
        lives = [
            self.engine.add(ids, params, priority=body.priority or 0, salt=salt, changed=changed)
            for ids, params in zip(prompts, settings, strict=True)
        ]
        for live in lives:
            live.name = request.scope["twinfer.name"]
            live.named = body.named
            live.interval = self.settings.stream_interval if body.stream else 1
        request.scope["twinfer.lives"] += lives
        return lives

    async def answer(
        self,
        request: Request,
        lives: Sequence[Live],
        pieces: AsyncGenerator[bytes, None] | None,
        whole: Callable[[], Any],
    ) -> Response:
        """The stream of `pieces`, or without them the whole answer, once all has come for it."""
        if pieces is not None:
            return await self._stream(request, lives, pieces)
        try:
            await while_there(request, wait_for_all(lives))
        finally:
            self._let_go(lives)
        # Log-probabilities make a large one.
        size = sum(
            len(best or ())
            for live in lives
            for scores in (live.prompt_logprobs, *(output.logprobs for output in live.outputs))
            for best in (scores or ())
        )
        response: Response = await in_thread(lambda: json_response(200, whole()), size=size)
        return response

    async def _stream(
        self, request: Request, lives: Sequence[Live], pieces: AsyncGenerator[bytes, None]
    ) -> Response:
        """A stream; but an error that comes at once is a status."""
        try:
            await while_there(request, wait_for_news(lives[0].changed, FIRST_NEWS_S))
            if error := next((live.error for live in lives if live.error is not None), None):
                raise error
        except BaseException:
            self._let_go(lives)
            raise
        lives[0].changed.set()
        return EventStream(pieces, lambda: self._let_go(lives))

    def _let_go(self, lives: Sequence[Live]) -> None:
        """Whatever has not ended is not wanted any more."""
        for live in lives:
            if not live.done:
                self.metrics.abort()
            self.engine.abort(live)


async def read_body(request: Request) -> Any:
    """The JSON of a request. Raises RequestError."""
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.body()
    except TimeoutError:
        raise RequestError("body", f"did not arrive within {BODY_S:.0f} s") from None
    if len(data) < LONG_BODY:
        return read_json(data)
    return await asyncio.to_thread(read_json, data)


def last_of(ids: list[int], kept: int | None, front: list[int]) -> list[int]:
    """The last `kept` tokens of a prompt, among them those that it begins with (`front`)."""
    if kept is None or len(ids) <= kept:
        return ids
    return front + ids[len(ids) - kept + len(front) :]


async def in_thread(work: Callable[..., Any], *arguments: Any, size: int) -> Any:
    """What `work` gives for `size` values; if these are many, others are served meanwhile."""
    if size < LONG:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def json_response(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(encode(body), status, headers, media_type="application/json")
