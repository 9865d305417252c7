"""The events of a stream: what has come for its requests, as it comes, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from .answers import DONE, SILENCE, error_of, event, named_events
from .live import Live, News
from .streams import Recurring

LOG = logging.getLogger("twinfer.server")
SILENCE_S = 15.0
"""How often a stream without news gets a comment line."""
PART = 1 << 16
"""Bytes of events that are made at once. A client that reads slowly has tens of MB waiting, if it
wants log-probabilities of many completions; while they are made, no other stream goes on.
"""


async def until_ended(
    lives: Sequence[Live], take: Callable[[], Iterable[bytes]]
) -> AsyncGenerator[bytes, None]:
    """What `take` gives each time that something has come for `lives`, which share an event, until
    all have ended: joined, but others run between parts of `PART` bytes. Raises the error of one.
    """
    changed, silent = lives[0].changed, False

    def break_silence() -> None:
        nonlocal silent
        silent = True
        changed.set()

    silence = Recurring(SILENCE_S, break_silence)
    try:
        while True:
            await changed.wait()
            changed.clear()
            # Before the yield: what comes while a slow client reads is for the next time round.
            error = next((live.error for live in lives if live.error is not None), None)
            ended = all(live.done for live in lives)
            held, size = [], 0
            for data in take():
                held.append(data)
                size += len(data)
                if size >= PART:
                    yield b"".join(held)
                    held, size, silent = [], 0, False
                    await asyncio.sleep(0)
            if size or silent:
                yield b"".join(held) or SILENCE
                silent = False
            if error is not None:
                raise error
            if ended:
                return
    finally:
        silence.stop()


async def piece_events(
    lives: Sequence[Live],
    pieces: Callable[[int, Live, News], list[dict[str, Any]]],
    usage: Callable[[], dict[str, Any]] | None,
    *,
    always: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The stream of a chat or a completion. `pieces` makes them of what is new for a request and
    its place among `lives`; `usage`: of the last event, where it was asked for, and `always` in
    each. An error ends the stream with an event of its own.
    """

    def take() -> Iterator[bytes]:
        # As OpenAI has it: who asks for the usage gets the field in every event. It is counted once
        # for all that has come: there may be a thousand completions.
        found: Iterable[dict[str, Any]] = (
            piece
            for place, live in enumerate(lives)
            for news in live.news()
            for piece in pieces(place, live, news)
        )
        extra: dict[str, Any] = {}
        if usage is not None:
            extra["usage"] = None
            if always:
                found = list(found)  # which finds where reasoning ends
                extra["usage"] = usage()["usage"]
        return (event(piece | extra) for piece in found)

    try:
        async with aclosing(until_ended(lives, take)) as told:
            async for data in told:
                yield data
        yield (b"" if usage is None else event(usage())) + DONE
    except Exception as error:
        log_failure(error)
        yield event(error_of(error)[1]) + DONE


async def told_events(
    live: Live,
    start: Callable[[], list[dict[str, Any]]],
    take: Callable[[], list[dict[str, Any]]],
    end: Callable[[], list[dict[str, Any]]],
    fail: Callable[[Exception], list[dict[str, Any]]],
) -> AsyncGenerator[bytes, None]:
    """The stream of a response or a message, each event under its name: the first ones, those of
    what has come, and the last ones, or those of an error.
    """
    try:
        yield named_events(start())
        async with aclosing(until_ended([live], lambda: [named_events(take())])) as told:
            async for data in told:
                yield data
        yield named_events(end())
    except Exception as error:
        log_failure(error)
        yield named_events(fail(error))


def log_failure(error: Exception) -> None:
    """Log an error that is the server's own."""
    status, _ = error_of(error)
    if status == 500:
        LOG.error("a request failed", exc_info=error)
