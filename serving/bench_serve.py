"""`twinfer bench serve`: load on a running server that speaks OpenAI's API, ours or another's, and
what its clients see of it. Names of options, lines and fields are those of vLLM's benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ..shared.errors import ConfigError, TwinferError
from ..shared.models.config_json import load_config
from ..shared.models.fields import show
from ..shared.models.locate import model_folder
from ..shared.option_text import json_value

MARGIN = 100
"""Random token ids keep away from both ends of the vocabulary, where special tokens lie."""
SMALL_VOCABULARY = 1000
"""Ids below it are taken to exist where the server's model is not known here."""
METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
           "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip
WIDTH = 50
REFUSALS = (401, 403)
"""Answers to a wrong key, which do not change by waiting."""
QUIET_S = 5.0
"""How long a server is waited for before that is told."""


@dataclass(slots=True)
class Asked:
    """One request: token ids or text, and how many tokens at most."""

    prompt: Any
    prompt_len: int
    output_len: int


@dataclass(slots=True)
class Seen:
    """What a client saw of a request. Times in seconds; `start` is since the benchmark's."""

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean time between tokens; None where there was one token."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0; 1 if a request failed. Raises ConfigError, TwinferError."""
    goals = dict(_goal(text) for text in arguments.goodput or ())
    result = asyncio.run(_run(arguments, goals))
    _print(result, arguments)
    if arguments.json:
        mode = "a" if arguments.append_result else "w"
        with open(arguments.json, mode, encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 1 if result["failed"] else 0


async def _run(arguments: argparse.Namespace, goals: dict[str, float]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    # Clients of OpenAI's API are given an address with /v1.
    root = arguments.base_url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        model = await _wait_for_model(session, root, arguments.ready_check_timeout_sec)
        asked = _requests(arguments, arguments.model or model)
        client = _Client(session, root, arguments, model)
        for one in asked[: arguments.num_warmups]:
            warm = await client.ask(one, time.perf_counter())
            if warm.error:
                raise TwinferError(f"the first request failed: {warm.error}")
        start = time.perf_counter()
        seen = await client.ask_all(asked, start)
        seconds = time.perf_counter() - start
    return _summary(arguments, model, seen, seconds, goals)


async def _wait_for_model(session: aiohttp.ClientSession, root: str, most: float) -> str:
    """The name of the first model of the server at `root`, as soon as it takes requests: within
    `most` seconds. Raises TwinferError.
    """
    start = time.monotonic()
    is_told = False
    while True:
        try:
            async with session.get(f"{root}/v1/models") as answer:
                if answer.status in REFUSALS:
                    text = (await answer.text())[:200]
                    raise TwinferError(f"the server at {root} says {answer.status}: {text}")
                answer.raise_for_status()
                card = (await answer.json())["data"][0]
                if "max_model_len" not in card or card["max_model_len"]:
                    return str(card["id"])
                why = "it is starting"
        except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
            why = str(error) or type(error).__name__
        waited = time.monotonic() - start
        if waited > most:
            raise TwinferError(f"no server answers at {root}: {why}")
        if waited > QUIET_S and not is_told:
            print(f"waits up to {most:g} s for a server at {root}: {why}", file=sys.stderr)
            is_told = True
        await asyncio.sleep(0.5)


def _requests(arguments: argparse.Namespace, model: str) -> list[Asked]:
    numbers = random.Random(arguments.seed)
    count, longest = arguments.num_prompts, arguments.input_len
    if arguments.dataset_name == "custom":
        return _read_prompts(arguments)
    vocabulary = _vocabulary(model)
    least, most = (MARGIN, vocabulary - MARGIN) if vocabulary > 4 * MARGIN else (0, vocabulary)

    def ids(length: int) -> list[int]:
        return [numbers.randrange(least, most) for _ in range(length)]

    if arguments.dataset_name == "prefix-repetition":
        if arguments.prefix_len >= longest:
            raise ConfigError(f"prefix-len: got {arguments.prefix_len}, must be below input-len")
        prefixes = [ids(arguments.prefix_len) for _ in range(arguments.num_prefixes)]
        rest = longest - arguments.prefix_len
        prompts = [prefixes[i % len(prefixes)] + ids(rest) for i in range(count)]
    else:
        prompts = [ids(_around(longest, arguments.range_ratio, numbers)) for _ in range(count)]
    lengths = [_around(arguments.output_len, arguments.range_ratio, numbers) for _ in range(count)]
    return [
        Asked(prompt, len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)
    ]


def _around(length: int, ratio: float, numbers: random.Random) -> int:
    """`length` within a factor of 1 - ratio to 1 + ratio."""
    return max(1, round(length * numbers.uniform(1 - ratio, 1 + ratio)))


def _vocabulary(model: str) -> int:
    try:
        return load_config(model_folder(model)).vocab_size
    except TwinferError:
        return SMALL_VOCABULARY


def _read_prompts(arguments: argparse.Namespace) -> list[Asked]:
    """Records with `prompt`, and perhaps `output_tokens`, one a line."""
    if not arguments.dataset_path:
        raise ConfigError("dataset-path: none given, and the dataset custom is read from there")
    try:
        lines = Path(arguments.dataset_path).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        found = [
            Asked(record["prompt"], 0, int(record.get("output_tokens", arguments.output_len)))
            for record in records
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"dataset-path: {arguments.dataset_path}: needs a JSON object with prompt in each "
            f"line: {error!r}"
        ) from None
    if not found:
        raise ConfigError(f"dataset-path: {arguments.dataset_path}: is empty")
    return [found[i % len(found)] for i in range(arguments.num_prompts)]


class _Client:
    """Asks, and keeps the time."""

    def __init__(
        self, session: aiohttp.ClientSession, root: str, arguments: argparse.Namespace, model: str
    ) -> None:
        self._session, self._url = session, f"{root}/v1/completions"
        self._arguments = arguments
        self._model = model
        most = arguments.max_concurrency or arguments.num_prompts
        self._room = asyncio.Semaphore(most)

    async def ask_all(self, asked: Sequence[Asked], start: float) -> list[Seen]:
        """Each at its time: in intervals of a gamma distribution around 1 / request-rate."""
        rate, shape = self._arguments.request_rate, self._arguments.burstiness
        numbers = random.Random(self._arguments.seed + 1)
        tasks, due = [], start
        for one in asked:
            if math.isfinite(rate):
                due += numbers.gammavariate(shape, 1 / (rate * shape))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask_in_turn(one, start)))
        return await asyncio.gather(*tasks)

    async def _ask_in_turn(self, asked: Asked, start: float) -> Seen:
        async with self._room:
            return await self.ask(asked, start)

    async def ask(self, asked: Asked, start: float) -> Seen:
        """One request. An error is part of what was seen."""
        sent = last = time.perf_counter()
        seen = Seen(asked.prompt_len, sent - start)
        try:
            async with self._session.post(self._url, json=self._body(asked)) as answer:
                if answer.status != 200:
                    seen.error = f"{answer.status}: {(await answer.text())[:200]}"
                    return seen
                async for line in answer.content:
                    now = time.perf_counter()
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen.error = str(event["error"])[:200]
                        return seen
                    if event.get("usage"):
                        seen.output_len = event["usage"]["completion_tokens"]
                        seen.prompt_len = event["usage"]["prompt_tokens"]
                    if not event["choices"]:
                        continue
                    if seen.ttft:
                        seen.itl.append(now - last)
                    else:
                        seen.ttft = now - sent
                    last = now
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.latency = last - sent
        if not seen.error and not seen.output_len:
            seen.error = "the stream ended without its usage"
        return seen

    def _body(self, asked: Asked) -> dict[str, Any]:
        arguments = self._arguments
        body = {
            "model": arguments.served_model_name or self._model,
            "prompt": asked.prompt,
            "max_tokens": asked.output_len,
            "temperature": arguments.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": arguments.ignore_eos,
        }
        for text in arguments.extra_body or ():
            name, _, value = text.partition("=")
            try:
                body[name] = json_value(value)
            except ValueError:
                raise ConfigError(f"extra-body: got {show(text)}, must be NAME=JSON") from None
        return body


def _summary(
    arguments: argparse.Namespace,
    model: str,
    seen: list[Seen],
    seconds: float,
    goals: dict[str, float],
) -> dict[str, Any]:
    good = [one for one in seen if not one.error]
    samples = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": [value for one in good for value in one.itl],
        "e2el": [one.latency for one in good],
    }
    total_in, total_out = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    result: dict[str, Any] = {
        "model": model,
        "base_url": arguments.base_url,
        "request_rate": arguments.request_rate if math.isfinite(arguments.request_rate) else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "num_prompts": len(seen),
        "completed": len(good),
        "failed": len(seen) - len(good),
        "duration": seconds,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "errors": sorted({one.error for one in seen if one.error})[:10],
    }
    if goals:
        reached = sum(
            all(_value(one, name) * 1000 <= limit for name, limit in goals.items()) for one in good
        )
        result["request_goodput"] = reached / seconds
    for name, values in samples.items():
        for word, value in _statistics(values, arguments.metric_percentiles):
            result[f"{word}_{name}_ms"] = value * 1000
    if arguments.save_detailed:
        result["requests"] = [asdict(one) for one in seen]
    return result


def _value(one: Seen, name: str) -> float:
    return {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.latency}[name]


def _statistics(values: list[float], percentiles: Sequence[float]) -> Iterator[tuple[str, float]]:
    if not values:
        return
    yield "mean", statistics.fmean(values)
    yield "median", statistics.median(values)
    yield "std", statistics.pstdev(values)
    ranked = sorted(values)
    for percent in percentiles:
        place = (len(ranked) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ranked) - 1)
        value = ranked[low] + (ranked[high] - ranked[low]) * (place - low)
        yield f"p{percent:g}", value


def _peak_tokens(seen: Sequence[Seen]) -> int:
    """The most tokens that arrived within a second."""
    counts: dict[int, float] = {}
    for one in seen:
        pieces = 1 + len(one.itl)
        at = one.start + one.ttft
        for step in (0.0, *one.itl):
            at += step
            counts[int(at)] = counts.get(int(at), 0.0) + one.output_len / pieces
    return round(max(counts.values(), default=0))


def _peak_requests(seen: Sequence[Seen]) -> int:
    """The most requests that were under way at once."""
    changes = sorted(
        change for one in seen for change in ((one.start, 1), (one.start + one.latency, -1))
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _print(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if "request_goodput" in result:
        rows.insert(6, ("Request goodput (req/s):", result["request_goodput"]))
    for title, value in rows:
        _print_row(title, value)
    for name, title in METRICS.items():
        if name not in arguments.percentile_metrics:
            continue
        print(f"{title:-^{WIDTH}}")
        for word in ("mean", "median", *(f"p{p:g}" for p in arguments.metric_percentiles)):
            value = result.get(f"{word}_{name}_ms")
            if value is not None:
                _print_row(f"{word.capitalize()} {name.upper()} (ms):", value)
    print("=" * WIDTH)
    for error in result["errors"]:
        print(f"failed: {error}")


def _print_row(title: str, value: Any) -> None:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    print(f"{title:<40}{shown:>{WIDTH - 40}}")


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
        if name not in ("ttft", "tpot", "e2el") or not limit > 0:
            raise ValueError
        return name, limit
    except ValueError:
        raise ConfigError(
            f"goodput: got {text}, must be ttft:MS, tpot:MS or e2el:MS with more than 0 of them"
        ) from None
