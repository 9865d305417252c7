"""/v1/chat/completions and /v1/completions, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import RequestError
from ...shared.sampling_params import SamplingParams
from ...shared.structured_outputs import StructuredOutputs
from ..formats.marks import searched_marks, shown_marks
from ..formats.message_grammar import answer_grammar
from ..formats.parser import Parser, open_parser
from .answers import ChatAnswer, CompletionAnswer, fingerprint_of
from .events import piece_events
from .fields import ChatRequest, CompletionRequest, read_fields
from .live import Live
from .server import COMPLETION_TOKENS, Server, in_thread, last_of, read_body

TAIL = 64
"""Characters of a prompt's end that say whether it has opened reasoning."""


async def chats(server: Server, request: Request) -> Response:
    """/v1/chat/completions."""
    chat: ChatRequest = read_fields(ChatRequest, await read_body(request))
    live, new_parser = await begin_chat(server, request, chat)
    answer = ChatAnswer(
        f"chatcmpl-{request.scope['twinfer.id']}",
        chat.model or server.settings.names[0],
        int(time.time()),
        server.words,
        (chat.top_logprobs or 0) if chat.logprobs else None,
        new_parser,
        server.think_end,
        fingerprint=fingerprint_of(server.engine.ready),
        echoed=chat.echoed,
        prompt_scores=chat.prompt_logprobs,
        reasoning=chat.include_reasoning is not False,
        as_ids=bool(chat.return_tokens_as_token_ids),
        with_ids=bool(chat.return_token_ids),
    )
    pieces = piece_events(
        [live],
        lambda place, live, news: answer.pieces(live, news),
        (lambda: answer.usage(live)) if chat.wants_usage else None,
        always=chat.wants_usage_always,
    )
    whole = partial(answer.whole, live)
    return await server.answer(request, [live], pieces if chat.stream else None, whole)


async def begin_chat(
    server: Server, request: Request, chat: ChatRequest
) -> tuple[Live, Callable[[], Parser]]:
    """Sends a chat to the engine; with what makes a parser for each of its completions."""
    server.accept(chat)
    server.engine.admit(0, 0)
    text, ids = await server.render_in_thread(request, chat, server.longest)
    (params,) = await server.params(chat, [ids], whole_context=True)
    if (bound := _bound(server, chat, params, text[-TAIL:])) is not None:
        try:
            params = replace(params, structured_outputs=bound)
        except RequestError as error:
            raise chat.named(error) from None
    if (ends := server.settings.end_token_ids) and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    (live,) = server.add_all(request, chat, [ids], [params])
    tokenizer, form = server.settings.tokenizer, server.settings.format
    tail, schemas = text[-TAIL:], chat.tool_schemas
    live.look_for(searched_marks(form, tokenizer), shown_marks(form, tokenizer))
    return live, lambda: open_parser(form, tokenizer, tail, schemas)


def _bound(
    server: Server, chat: ChatRequest, params: SamplingParams, tail: str
) -> StructuredOutputs | None:
    """The form of the whole answer, where marks of reasoning or of calls are part of it."""
    tokenizer, form = server.settings.tokenizer, params.structured_outputs
    if tokenizer is None:
        return None
    ends = server.settings.end_token_ids
    grammar = answer_grammar(server.settings.format, tokenizer.token_id, tail, ends)
    if chat.must_call:
        several = chat.parallel_tool_calls is not False and not chat.named_tool
        text = grammar.calls(chat.offered, several=several)
    elif form is None and chat.offered and chat.parallel_tool_calls is False:
        text = grammar.may_call(chat.offered, several=False, strict=chat.tool_names)
    elif form is None and chat.binds_calls and server.settings.format.may_call:
        text = grammar.may_call(chat.offered, several=True, strict=chat.strict_tools)
    elif form is not None and (around := grammar.form(form.kind, form.text)) is not None:
        text = around
    else:
        return None
    return StructuredOutputs("grammar", text)


async def invocations(server: Server, request: Request) -> Response:
    """/invocations: what the body is."""
    body = await read_body(request)
    if isinstance(body, dict) and "messages" in body:
        return await chats(server, request)
    if isinstance(body, dict) and "prompt" in body:
        return await completions(server, request)
    raise RequestError("body", "needs messages, as a chat, or a prompt, as a completion")


async def completions(server: Server, request: Request) -> Response:
    """/v1/completions."""
    body: CompletionRequest = read_fields(CompletionRequest, await read_body(request))
    server.accept(body)
    prompts = body.prompts()
    body.check_lists(len(prompts))
    server.engine.admit(0, 0)
    kept, front = server.kept(body, COMPLETION_TOKENS), list[int]()
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if kept is not None:  # else it is done where they are sent
        await in_thread(server.check_known, ids, size=sum(map(len, ids)))
    if texts := [prompt for prompt in prompts if isinstance(prompt, str)]:  # all, or none
        special = body.add_special_tokens is not False
        ids = await server.encode(texts, special, server.longest if kept is None else None)
        front = server.front(special, kept)
    read = [last_of(prompt, kept, front) for prompt in ids]
    # What is echoed is what was read.
    prompts = [
        prompt if few is whole else few[len(front) :]
        for prompt, whole, few in zip(prompts, ids, read, strict=True)
    ]
    ids = read
    settings = await server.params(body, ids, whole_context=False)
    answer = CompletionAnswer(
        f"cmpl-{request.scope['twinfer.id']}",
        body.model or server.settings.names[0],
        int(time.time()),
        server.words,
        fingerprint=fingerprint_of(server.engine.ready),
        prompts=[_text(server, prompt) for prompt in prompts] if body.echo else [],
        per_prompt=settings[0].n,
        scores=body.logprobs,
        echo=bool(body.echo),
        hide=body.max_tokens == 0,
        as_ids=bool(body.return_tokens_as_token_ids),
        with_ids=bool(body.return_token_ids),
        prompt_scores=body.prompt_logprobs,
    )
    lives = server.add_all(request, body, ids, settings)
    pieces = piece_events(
        lives,
        lambda *news: [answer.piece(*news)],
        (lambda: answer.usage(lives)) if body.wants_usage else None,
        always=body.wants_usage_always,
    )
    whole = partial(answer.whole, lives)
    return await server.answer(request, lives, pieces if body.stream else None, whole)


def _text(server: Server, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = server.settings.tokenizer
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)
