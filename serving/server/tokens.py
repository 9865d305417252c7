"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import RequestError
from ...shared.models.fields import show
from ..batch import need_tokenizer
from .answers import encode
from .fields import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, read_fields
from .server import COMPLETION_TOKENS, Server, in_thread, json_response, last_of, read_body

PART_IDS = 1 << 14
"""Token ids, or their entries, that are written at once."""


async def tokenize(server: Server, request: Request) -> Response:
    """Text, or a conversation, to token ids."""
    body = await read_body(request)
    if isinstance(body, dict) and "messages" in body:
        chat: TokenizeChatRequest = read_fields(TokenizeChatRequest, body)
        server.accept(chat)
        _, ids = await server.render_in_thread(request, chat, None)
        named = chat.return_token_strs
    else:
        text: TokenizeRequest = read_fields(TokenizeRequest, body)
        server.accept(text)
        kept = server.kept(text, COMPLETION_TOKENS)
        special = text.add_special_tokens is not False
        (whole,) = await server.encode([text.prompt], special, None)
        ids = last_of(whole, kept, server.front(special, kept))
        named = text.return_token_strs
    head = encode({"count": len(ids), "max_model_len": server.room})[:-1]
    data = b'%s,"tokens":%s' % (head, await in_thread(_listed, ids, size=len(ids)))
    if named:
        # The entries of the vocabulary, as `convert_ids_to_tokens` of transformers has them.
        token_text = need_tokenizer(server.settings.tokenizer).token_text

        def entries() -> bytes:
            return _listed([token_text(token) for token in ids])

        data += b',"token_strs":%s' % await in_thread(entries, size=len(ids))
    return Response(data + b"}", media_type="application/json")


async def detokenize(server: Server, request: Request) -> Response:
    """Token ids to text, special tokens too."""
    body: DetokenizeRequest = read_fields(DetokenizeRequest, await read_body(request))
    server.check_model(body.model)
    server.count_unknown(list(body.model_extra or {}))
    tokenizer = need_tokenizer(server.settings.tokenizer, "tokens", "there is no text")
    ids = body.tokens

    def decode() -> str:
        most = tokenizer.vocab_size - 1
        if ids and (odd := [token for token in (min(ids), max(ids)) if not 0 <= token <= most]):
            raise RequestError("tokens", f"has {show(odd[0])}, allowed is 0 to {most}")
        return tokenizer.decode(ids, skip_special_tokens=False)

    return json_response(200, {"prompt": await in_thread(decode, size=len(ids))})


def _listed(items: Sequence[Any]) -> bytes:
    """A JSON list. One call for millions would let nobody else run."""
    parts = (items[start : start + PART_IDS] for start in range(0, len(items), PART_IDS))
    return b"[%s]" % b",".join(encode(part)[1:-1] for part in parts)
