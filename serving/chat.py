"""`twinfer chat`: a conversation with a running server that speaks OpenAI's API, ours or another's.

Ctrl-C stops an answer, of which the conversation keeps what was said; Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import aiohttp

from ..shared.errors import ConfigError, TwinferError
from .chat_flags import sent_options
from .serve_flags import KEY_VARIABLE

RESET = "/reset"
SILENCE_S = 600.0
"""How long an answer may pause."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HARMLESS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
"""A model's control characters, but tab and newline, would steer the terminal."""


class Conversation:
    """What was said so far, and the server that goes on with it. `write` gets text as it comes."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        fields: dict[str, Any],
        system: str | None,
        write: Callable[[str], None],
        *,
        terminal: bool,
    ) -> None:
        self._session, self._url, self._fields = session, url, fields
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self._write = write
        self._terminal = terminal
        self._shown = False
        self.messages = list(self._begin)

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = list(self._begin)

    async def ask(self, text: str) -> None:
        """Say `text` and write the answer. Raises TwinferError, and then nothing was said. When
        cancelled, what has come of the answer stays.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        said, thinking, finished = "", False, False
        self._shown = False
        try:
            async for delta in self._deltas(asked):
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                if self._terminal and (thought or content) and bool(thought) != thinking:
                    thinking = not thinking
                    self._write(DIM if thinking else PLAIN)
                self._show(thought if self._terminal else "")
                said += content
                self._show(content)
            finished = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TwinferError(
                f"the answer broke off: {str(error) or type(error).__name__}"
            ) from error
        except asyncio.CancelledError:
            finished = bool(said)
            raise
        finally:
            if finished or self._shown:
                self._write((PLAIN if thinking else "") + "\n")
            if finished:
                self.messages = [*asked, {"role": "assistant", "content": said}]

    def _show(self, text: str) -> None:
        if text:
            self._shown = True
            self._write(text.translate(HARMLESS) if self._terminal else text)

    async def _deltas(self, messages: list[dict[str, str]]) -> AsyncIterator[dict[str, Any]]:
        body = {**self._fields, "messages": messages, "stream": True}
        async with self._session.post(f"{self._url}/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise TwinferError(_refusal(answer.status, await answer.text()))
            buffer = b""
            async for data in answer.content.iter_any():
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:") or b"[DONE]" in line[:13]:
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise TwinferError(_refusal(answer.status, line[5:].decode()))
                    for choice in event.get("choices") or ():
                        yield choice.get("delta") or {}


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises ConfigError, TwinferError."""
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"url: got {arguments.url}, must begin with http:// or https://")
    with asyncio.Runner() as runner:
        session = runner.run(_open(arguments))
        try:
            _talk(arguments, runner, session)
        finally:
            runner.run(session.close())
    return 0


def _talk(
    arguments: argparse.Namespace, runner: asyncio.Runner, session: aiohttp.ClientSession
) -> None:
    url = arguments.url.rstrip("/")
    model = arguments.model or runner.run(_first_model(session, url))
    fields = {"model": model, **sent_options(arguments)}
    chat = Conversation(
        session, url, fields, arguments.system, _write, terminal=sys.stdout.isatty()
    )
    if arguments.quick is not None:
        runner.run(chat.ask(arguments.quick))
        return
    typed = sys.stdin.isatty()
    if typed:
        print(f"{model}: Ctrl-C stops an answer, {RESET} begins anew, Ctrl-D leaves", flush=True)
    for line in _typed_lines() if typed else sys.stdin:
        text = line.strip()
        if text == RESET:
            chat.reset()
        elif text:
            _turn(runner, chat, text, typed=typed)


def _turn(runner: asyncio.Runner, chat: Conversation, text: str, *, typed: bool) -> None:
    """One turn. Who types goes on behind an error and an interrupt."""
    try:
        runner.run(chat.ask(text))
    except TwinferError as error:
        if not typed:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if not typed:
            raise


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


async def _open(arguments: argparse.Namespace) -> aiohttp.ClientSession:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the server's first model. Raises TwinferError."""
    try:
        async with session.get(f"{url}/models") as answer:
            if answer.status != 200:
                raise TwinferError(_refusal(answer.status, await answer.text()))
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise TwinferError(f"no server answers at {url}: {why}") from error


def _refusal(status: int, body: str) -> str:
    """What a server says is wrong, in one line."""
    try:
        words = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = body[:200]
    return f"the server says {status}: {' '.join(str(words).split())}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
