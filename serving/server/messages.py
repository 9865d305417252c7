"""What the front and the engine's process tell each other: typed structs as msgpack, each with a
tag. Plain values alone; nothing here can carry code.

A step's tokens travel as columns of bytes, since that is twenty times cheaper than objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...shared.engine import Logprob, TokenLogprobs, Update
from ...shared.request import FinishReason
from ...shared.sampling_params import SamplingParams


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """What the engine's process is to run; the first line of its standard input, as JSON.

    `sockets` is the folder with the two sockets. `options` are those of `EngineConfig`.
    `log_format` is one of `logs.FORMATS`.
    """

    sockets: str
    options: dict[str, Any]
    log_format: str = "text"


class Add(msgspec.Struct, tag="add", array_like=True):
    """A request. `prompt` holds int32 token ids."""

    id: int
    prompt: bytes
    params: SamplingParams
    priority: int = 0
    salt: str = ""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Nobody wants these requests any more. Unknown ones are passed over."""

    ids: list[int]


class Finish(msgspec.Struct, tag="finish", array_like=True):
    """The text of these requests has reached a stop string. Unknown ones are passed over."""

    ids: list[int]


class Reset(msgspec.Struct, tag="reset", array_like=True):
    """End all requests."""


class ResetPrefixes(msgspec.Struct, tag="reset_prefixes", array_like=True):
    """Forget all cached prefixes. Each is answered, in their order, with `PrefixesReset`."""


Inbox = Add | Abort | Finish | Reset | ResetPrefixes


class Starting(msgspec.Struct, tag="starting", array_like=True):
    """How far the start has come: what is being done, how much of it, of how much."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine takes requests. `report` is for people: a line for each thing that was filled
    in.
    """

    model: dict[str, Any]
    report: list[str]
    seconds: dict[str, float]
    programs: int
    hang_limit: float
    """Seconds without a message after which the engine counts as hung."""
    options: dict[str, Any] = {}
    """Those of `EngineConfig`, as they were resolved."""


class Gauges(msgspec.Struct, array_like=True):
    """The scheduler's gauges and counters since the start; see `SchedulerMetrics`."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    padded_share: float = 0.0
    errors: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    late_compilations: int = 0


class Score(msgspec.Struct, array_like=True):
    """The log-probabilities of one position: columns of tokens, values and ranks."""

    tokens: list[int]
    values: list[float]
    ranks: list[int]


class Scores(msgspec.Struct, array_like=True):
    """Log-probabilities of the update at `place`, of its tokens and of its prompt."""

    place: int
    output: list[Score] | None
    prompt: list[Score | None] | None


class Step(msgspec.Struct, tag="step", array_like=True):
    """What one step brought, a column for each part of `Update`; all but `tokens` have a row for
    each update. `counts` divides `tokens` among them, `ended` has an index into `REASONS`.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    ended: bytes
    cached: bytes
    started: bytes
    """Ids of requests that the engine has begun with, of any update or none."""
    scores: list[Scores]
    gauges: Gauges | None
    """At most ten times a second."""


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The loop goes round and has nothing to do."""

    gauges: Gauges


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A request that the engine did not take: `field` and `reason` of its RequestError."""

    id: int
    field: str
    reason: str


class PrefixesReset(msgspec.Struct, tag="prefixes_reset", array_like=True):
    """Whether the prefixes were forgotten: not while there are requests."""

    done: bool


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine has ended. `exit_code` is the whole server's."""

    exit_code: int
    message: str


Outbox = Starting | Ready | Step | Beat | Refused | PrefixesReset | Fatal

REASONS: tuple[FinishReason | None, ...] = (None, *FinishReason)
_PLACE = {reason: place for place, reason in enumerate(REASONS)}

encode = msgspec.msgpack.Encoder().encode
decode_inbox = msgspec.msgpack.Decoder(Inbox).decode
decode_outbox = msgspec.msgpack.Decoder(Outbox).decode


def step_message(updates: list[Update], gauges: Gauges | None, started: Sequence[str] = ()) -> Step:
    """The updates of a step and what it began with, for the way to the front. Ids are numbers as
    text.
    """
    tokens = [token for update in updates for token in update.tokens]
    return Step(
        ids=_column(int(update.request_id) for update in updates),
        counts=_column(len(update.tokens) for update in updates),
        tokens=_column(tokens),
        ended=_column(_PLACE[update.finish_reason] for update in updates),
        cached=_column(update.num_cached_tokens for update in updates),
        started=_column(map(int, started)),
        scores=[
            Scores(place, _scores(update.logprobs), _scores(update.prompt_logprobs))
            for place, update in enumerate(updates)
            if update.logprobs is not None or update.prompt_logprobs is not None
        ],
        gauges=gauges,
    )


def updates_of(step: Step) -> list[tuple[int, Update]]:
    """The ids and updates that `step_message` was given."""
    ids, counts, tokens, ended, cached = (
        np.frombuffer(column, np.int64).tolist()
        for column in (step.ids, step.counts, step.tokens, step.ended, step.cached)
    )
    found, first = [], 0
    for place, number in enumerate(ids):
        last = first + counts[place]
        update = Update(
            str(number),
            tuple(tokens[first:last]),
            REASONS[ended[place]],
            num_cached_tokens=cached[place],
        )
        found.append((number, update))
        first = last
    for scores in step.scores:
        number, update = found[scores.place]
        brought = None if scores.output is None else [_read(score) for score in scores.output]
        prompt = None
        if scores.prompt is not None:
            prompt = [None if score is None else _read(score) for score in scores.prompt]
        found[scores.place] = (number, update._replace(logprobs=brought, prompt_logprobs=prompt))
    return found


def started_in(step: Step) -> list[int]:
    """The ids of requests that the engine has begun with."""
    found: list[int] = np.frombuffer(step.started, np.int64).tolist()
    return found


def _column(values: Any) -> bytes:
    return np.fromiter(values, np.int64).tobytes()


def _scores(positions: Any) -> Any:
    if positions is None:
        return None
    return [None if best is None else _score(best) for best in positions]


def _score(best: TokenLogprobs) -> Score:
    entries = best.values()
    return Score(
        list(best), [entry.logprob for entry in entries], [entry.rank for entry in entries]
    )


def _read(score: Score) -> TokenLogprobs:
    columns = zip(score.tokens, score.values, score.ranks, strict=True)
    return {token: Logprob(value, rank) for token, value, rank in columns}
