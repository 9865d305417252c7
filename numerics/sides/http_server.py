"""Log-probabilities of a server of the OpenAI API, over `/v1/completions`.

A server is read in every way that its engine computes log-probabilities in, because each is a path
of its own: one token after a prefix, a prompt as a whole, a decode, the same prompt again (a prefix
cache), and all prompts in one batch. What a server does not offer is said in `offers`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InfrastructureError
from ..progress import Progress, silent
from .subject import Subject

TIMEOUT = 120.0
"""Seconds for one answer of a server."""
BEST = (20, 5)
"""Log-probabilities that a server is asked for: what vLLM allows, then what the OpenAI API does."""
NEW_TOKENS = 16
"""Tokens that a server generates after each prompt."""

Tops = Mapping[int | str, float]
"""Log-probabilities in nats of some tokens, by id, or by text where a server names no ids."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The log-probabilities that a server named for the token after `position` of `prompt`.

    `way` says how it was asked: `next`, `prompt`, `decode`, `again` or `batch`. `token` is the id
    that it generated there greedily, None where it generated none or named no id.
    """

    way: str
    prompt: int
    position: int
    tops: Tops
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What a server named. `prompts` are those asked for, each with what the server generated
    after it (one id is the last, which no row follows). `offers` says what it does not do.
    """

    readings: tuple[Reading, ...]
    prompts: tuple[np.ndarray, ...]
    offers: tuple[str, ...]
    about: Mapping[str, Any]


class _Refused(InfrastructureError):
    """HTTP 400 or 422: the server does not know what it was asked for."""


class _NotOffered(Exception):
    """The answer lacks what was asked for."""


def read_server(
    url: str,
    subject: Subject,
    prompts: Sequence[np.ndarray],
    positions: int,
    progress: Progress = silent,
) -> Served:
    """Read a server in all ways; one token each after `positions` prefixes of each prompt.

    Raises InfrastructureError if the server does not answer as such or refuses plain requests.
    """
    client = _Client(url)
    reader = _Reader(client, subject.max_model_len)
    for index, ids in enumerate(prompts):
        progress(f"asking for prompt {index + 1} of {len(prompts)}")
        reader.read_next(index, ids, positions)
        reader.read_prompt(index, ids)
    progress("asking for what it generates")
    reader.read_generated(prompts)
    about = {"target": url, "device": f"server of {client.model}"}
    return Served(tuple(reader.readings), tuple(reader.prompts), tuple(reader.offers), about)


class _Reader:
    """Collects readings of one server."""

    def __init__(self, client: _Client, max_model_len: int) -> None:
        self._client, self._length = client, max_model_len
        self.readings: list[Reading] = []
        self.prompts: list[np.ndarray] = []
        self.offers: list[str] = []
        self._prompt_ways = [("echo", True), ("prompt_logprobs", BEST[-1])]

    def read_next(self, index: int, ids: np.ndarray, positions: int) -> None:
        """One token after each of some prefixes."""
        last = min(len(ids), self._length) - 1
        count = min(positions, last)
        for position in sorted({round(x) for x in np.linspace(0, last - 1, count)}):
            choice = self._client.complete(ids[: position + 1].tolist(), max_tokens=1)[0]
            try:
                tops, tokens = _generated(choice)
            except _NotOffered as error:
                raise InfrastructureError(f"{self._client.url}: {error}") from None
            self.readings.append(Reading("next", index, position, tops[0], tokens[0]))

    def read_prompt(self, index: int, ids: np.ndarray) -> None:
        """All positions of a prompt at once, by the first way that the server knows."""
        known = ids[: self._length - 1].tolist()
        while self._prompt_ways:
            field, value = self._prompt_ways[0]
            try:
                choice = self._client.complete(known, max_tokens=1, **{field: value})[0]
                tops = _of_prompt(choice, field, len(known))
            except (_Refused, _NotOffered):
                self._prompt_ways.pop(0)
                if not self._prompt_ways:
                    self.offers.append("b offers no log-probabilities of prompts: not compared")
                continue
            self.readings += [
                Reading("prompt", index, position, top)
                for position, top in enumerate(tops)
                if position < len(ids) - 1
            ]
            return

    def read_generated(self, prompts: Sequence[np.ndarray]) -> None:
        """What follows each prompt: alone, again, and all in one batch."""
        for index, ids in enumerate(prompts):
            found: list[int] = []
            count = min(NEW_TOKENS, self._length - len(ids))
            if count > 0:
                choice = self._client.complete(ids.tolist(), max_tokens=count)[0]
                found = self._add("decode", index, ids, choice, None)
            self.prompts.append(np.append(ids, found).astype(np.int32))
            if found:
                choice = self._client.complete(ids.tolist(), max_tokens=len(found))[0]
                self._add("again", index, ids, choice, found)
        if not any(len(x) > len(ids) for x, ids in zip(self.prompts, prompts, strict=True)):
            self.offers.append("b names no ids of the tokens it generates: decodes not compared")
            return
        self._read_batch(prompts)

    def _read_batch(self, prompts: Sequence[np.ndarray]) -> None:
        count = max(len(x) - len(ids) for x, ids in zip(self.prompts, prompts, strict=True))
        # One length for all: a prompt that has no room for it stays out.
        fits = [i for i, ids in enumerate(prompts) if len(ids) + count <= self._length]
        try:
            choices = self._client.complete([prompts[i].tolist() for i in fits], max_tokens=count)
        except _Refused:
            choices = []
        if len(choices) != len(fits):
            self.offers.append("b offers no batch of prompts in one request: not compared")
            return
        for index, choice in zip(fits, choices, strict=True):
            known = self.prompts[index][len(prompts[index]) :].tolist()
            self._add("batch", index, prompts[index], choice, known)

    def _add(
        self, way: str, index: int, ids: np.ndarray, choice: Any, known: Sequence[int] | None
    ) -> list[int]:
        """Add the readings of one answer as far as its tokens have names; returns these.

        Where the first answer's tokens are `known`, those after the first difference follow other
        tokens, and are left out.
        """
        try:
            tops, tokens = _generated(choice)
        except _NotOffered:
            return []
        found: list[int] = []
        for step, (top, token) in enumerate(zip(tops, tokens, strict=True)):
            if known is not None and (step >= len(known) or found != list(known[:step])):
                break
            self.readings.append(Reading(way, index, len(ids) - 1 + step, top, token))
            if token is None:
                break
            found.append(token)
        return found


class _Client:
    """One server. What it refuses is left out of later requests too."""

    def __init__(self, url: str) -> None:
        self.url = url
        models = self._ask("/v1/models", None)
        try:
            self.model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise InfrastructureError(
                f"{url}/v1/models names no model: {str(models)[:120]}"
            ) from None
        self._plain: list[dict[str, Any]] = [
            {"logprobs": BEST[0], "return_tokens_as_token_ids": True},
            {"logprobs": BEST[1], "return_tokens_as_token_ids": True},
            {"logprobs": BEST[1]},
        ]
        self._answered = False

    def complete(self, prompt: list[Any], max_tokens: int, **more: Any) -> list[Any]:
        """The choices of a greedy completion, in the order of the prompts.

        What the server refuses of plain requests is found out once. Raises _Refused, which is an
        InfrastructureError, for what it refuses after that, or in `more`.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        while True:
            try:
                answer = self._ask("/v1/completions", body | self._plain[0] | more)
                self._answered = True
                break
            except _Refused:
                if more or self._answered or len(self._plain) == 1:
                    raise
                self._plain.pop(0)
        try:
            return sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        except (KeyError, TypeError, AttributeError):
            raise InfrastructureError(
                f"{self.url}: the answer has no choices: {str(answer)[:160]}"
            ) from None

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = " ".join(error.read(500).decode("utf-8", "replace").split())
            words = f"{url}: HTTP {error.code}: {text[:200]}"
            raise (_Refused if error.code in (400, 422) else InfrastructureError)(words) from None
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"{url}: {error}") from None


def _generated(choice: Any) -> tuple[list[Tops], list[int | None]]:
    """The best tokens of each generated position, and the ids of what was generated."""
    try:
        found = choice["logprobs"]
        tops: list[Tops] = [
            {_token(k): float(v) for k, v in top.items()} for top in found["top_logprobs"]
        ]
        names = [_token(name) for name in found.get("tokens") or [""] * len(tops)]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        tops, names = [], []
    if not tops or len(names) != len(tops):
        raise _NotOffered(f"the answer has no top_logprobs: {str(choice)[:160]}")
    return tops, [name if isinstance(name, int) else None for name in names]


def _of_prompt(choice: Any, field: str, count: int) -> list[Tops]:
    """The tokens named after each position of a prompt of `count` ids but the last."""
    try:
        if field == "echo":
            tops = choice["logprobs"]["top_logprobs"][1:count]
            found = [{_token(k): float(v) for k, v in top.items()} for top in tops]
        else:
            tops = choice["prompt_logprobs"][1:count]
            found = [{int(k): float(v["logprob"]) for k, v in top.items()} for top in tops]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise _NotOffered(field) from None
    # A server that does not know echo answers with the generated token alone.
    if len(found) != count - 1 or not found:
        raise _NotOffered(field)
    return list(found)


def _token(name: str) -> int | str:
    head, sign, tail = name.partition("token_id:")
    return int(tail) if sign and not head else name
