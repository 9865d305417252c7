"""Several engines behind one front, each in a process of its own, as one.

A prompt goes to the engine that was sent the longest equal beginning, page by page, unless that one
has much more to do than another. If an engine ends, what waits there for its first token moves to
the others; what has tokens gets an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...shared.config import parse_device
from ...shared.errors import ConfigError, EngineDead
from ...shared.kv_manager import extend_digests
from ...shared.sampling_params import SamplingParams
from .engine import Counters, EngineProcess
from .live import Live
from .messages import Gauges, Ready

LOG = logging.getLogger("twinfer.server")
SPREAD = 8
"""Requests that an engine may have more than the one with the fewest and still be sent one whose
beginning it has.
"""
GPUS = Path("/proc/driver/nvidia/gpus")
SHARES = ("cache_usage", "padded_share")
"""Gauges that are parts of a whole: of several engines the mean counts."""


def devices_of_replicas(count: int, ranks: int, device: str) -> list[dict[str, str]]:
    """The environment of each of `count` engines with `ranks` GPUs each: which GPUs it sees. None
    on a machine without, or for engines on a CPU. Raises ConfigError if there are too few.
    """
    kind, number = parse_device(device)
    if kind == "tpu" or number is not None:
        raise ConfigError(
            f"data_parallel_size: got {count}, and device {device}: allowed are cpu and cuda "
            "without a number, as each engine gets devices of its own"
        )
    visible = _visible_gpus()
    if kind == "cpu" or not visible:
        return [{} for _ in range(count)]
    if len(visible) < count * ranks:
        raise ConfigError(
            f"data_parallel_size: got {count}, each with {ranks} of {len(visible)} GPUs; allowed "
            f"is at most {len(visible) // ranks}"
        )
    shares = [visible[i * ranks : (i + 1) * ranks] for i in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [word.strip() for word in named.split(",") if word.strip()]
    return [str(i) for i, _ in enumerate(GPUS.glob("*"))]


class Sent:
    """The beginnings of prompts that one engine was sent, as digests of pages: the latest `room`
    of them.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, digests: Sequence[bytes]) -> int:
        """How many of these leading digests it was sent."""
        for count, digest in enumerate(digests):
            if digest not in self._digests:
                return count
        return len(digests)

    def keep(self, digests: Sequence[bytes]) -> None:
        """It is sent these. Ends are forgotten before the beginnings that they stand behind."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._room:
            self._digests.popitem(last=False)


class Replicas:
    """See `EngineProcess`, whose place it takes. All calls come from the thread of the event loop.

    It is ready when all engines are; it has ended when one fails at the start, or all have ended.
    """

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self._engines = list(engines)
        self.tokenizer = engines[0].tokenizer
        self.limits = engines[0].limits
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self._sent: list[Sent] = []
        self._page_size = 0
        self._tasks: list[asyncio.Task[None]] = []
        for engine in self._engines:
            engine.rescue = self._rescue

    # -- life

    def start(self) -> None:
        """Start all engines."""
        for engine in self._engines:
            engine.start()
        self._tasks = [asyncio.create_task(self._watch(engine)) for engine in self._engines]

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def _watch(self, engine: EngineProcess) -> None:
        starting = [asyncio.create_task(e.wait()) for e in (engine.started, engine.ended)]
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        for task in starting:
            task.cancel()
        if engine.ready is None:
            self.ended.set()
            return
        if all(other.ready is not None for other in self._engines):
            self._sent = [Sent(e.ready.model["num_pages"]) for e in self._engines if e.ready]
            self._page_size = engine.ready.model["page_size"]
            self.started.set()
        await engine.ended.wait()
        if not self._running:
            self.ended.set()
        else:
            LOG.error("replica %d: %s", self._engines.index(engine), engine.why)

    @property
    def _running(self) -> list[EngineProcess]:
        return [engine for engine in self._engines if engine.exit_code is None]

    @property
    def exit_code(self) -> int | None:
        """That of an engine that failed at the start, or of the first one once all have ended."""
        for engine in self._engines:
            if engine.exit_code is not None and (engine.ready is None or not self._running):
                return engine.exit_code
        return None

    @property
    def why(self) -> str:
        """Why it has ended."""
        for engine in self._engines:
            if engine.exit_code is not None and (engine.ready is None or not self._running):
                return engine.why
        return ""

    @property
    def alive(self) -> bool:
        """Whether an engine is heard of."""
        return any(engine.alive for engine in self._engines)

    @property
    def ready(self) -> Ready | None:
        """What the first engine said, with the sizes of all together; a request has to fit into
        any of them. None before all are ready.
        """
        found = [engine.ready for engine in self._engines if engine.ready is not None]
        if len(found) < len(self._engines):
            return None
        sums = {
            name: sum(ready.model[name] for ready in found)
            for name in ("max_num_seqs", "num_pages", "cached_tokens")
        }
        longest = min(ready.model["longest_request"] for ready in found)
        first = found[0]
        return Ready(
            first.model | sums | {"longest_request": longest, "replicas": len(found)},
            first.report,
            first.seconds,
            first.programs,
            first.hang_limit,
            first.options,
        )

    # -- numbers

    @property
    def gauges(self) -> Gauges:
        """Sums, and means of shares, over the engines that run."""
        running = [engine.gauges for engine in self._running] or [Gauges()]
        found = {name: sum(getattr(g, name) for g in running) for name in Gauges.__struct_fields__}
        return Gauges(**found | {name: found[name] / len(running) for name in SHARES})

    @property
    def counters(self) -> Counters:
        """Sums over all engines."""
        total = Counters()
        for engine in self._engines:
            for field in dataclasses.fields(Counters):
                if field.name != "rejected":
                    value = getattr(total, field.name) + getattr(engine.counters, field.name)
                    setattr(total, field.name, value)
            for reason, count in engine.counters.rejected.items():
                total.rejected[reason] = total.rejected.get(reason, 0) + count
        return total

    @property
    def num_waiting(self) -> int:
        """Requests that have not had a token yet."""
        return sum(engine.num_waiting for engine in self._engines)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(engine.num_live for engine in self._engines)

    @property
    def draining(self) -> bool:
        """Whether no more requests are taken."""
        return any(engine.draining for engine in self._engines)

    @draining.setter
    def draining(self, value: bool) -> None:
        for engine in self._engines:
            engine.draining = value

    # -- requests

    def admit(self, prompts: int, tokens: int) -> None:
        """As `EngineProcess`: of the engine with the least to do."""
        self._least().admit(prompts, tokens)

    def _least(self) -> EngineProcess:
        running = self._running
        if not running:
            raise EngineDead(f"the engines have ended: {self.why}")
        return min(running, key=lambda engine: engine.num_live)

    def _choose(self, prompt: Sequence[int], salt: str) -> EngineProcess:
        """The engine for a prompt, which is noted as sent there."""
        chosen = self._least()
        if not self._sent:
            return chosen
        digests: list[bytes] = []
        tokens = np.array(prompt, np.int32)
        extend_digests(digests, tokens, len(prompt) // self._page_size, self._page_size, salt)
        most = chosen.num_live + SPREAD
        best = self._sent[self._engines.index(chosen)].matched(digests)
        for engine, sent in zip(self._engines, self._sent, strict=True):
            if engine.exit_code is None and engine.num_live <= most:
                matched = sent.matched(digests)
                if matched > best:
                    chosen, best = engine, matched
        self._sent[self._engines.index(chosen)].keep(digests)
        return chosen

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        changed: asyncio.Event | None = None,
    ) -> Live:
        """As `EngineProcess`."""
        engine = self._choose(prompt, salt)
        if engine.has_too_much(params.n, len(prompt) * params.n):
            engine = self._least()
        return engine.add(prompt, params, priority=priority, salt=salt, changed=changed)

    def _rescue(self, live: Live) -> bool:
        """Send what waited in an engine that has ended to another one; False if there is none."""
        running = self._running
        if not running or self.draining or any(part.output.token_ids for part in live.completions):
            return False
        self._choose(live.prompt_ids, live.salt).send(live)
        return True

    def abort(self, live: Live) -> None:
        """As `EngineProcess`; the engines that do not have it pass it over."""
        for engine in self._engines:
            engine.abort(live)

    def reset(self) -> None:
        """As `EngineProcess`."""
        for engine in self._running:
            engine.reset()

    async def reset_prefix_cache(self) -> bool:
        """As `EngineProcess`: False if any engine has requests."""
        found = await asyncio.gather(*(engine.reset_prefix_cache() for engine in self._running))
        self._sent = [Sent(e.ready.model["num_pages"]) for e in self._engines if e.ready]
        return all(found)

    def requests(self) -> list[dict[str, Any]]:
        """As `EngineProcess`, with the number of the engine."""
        return [
            {"replica": index, **request}
            for index, engine in enumerate(self._engines)
            for request in engine.requests()
        ]


Engines = EngineProcess | Replicas
"""What the routes are over."""
