"""`twinfer generate`: prompts in, text or JSON lines out, written as completions end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from ..shared.demand import Demand
from ..shared.engine import Logprob, TokenLogprobs
from ..shared.errors import ConfigError, RequestError
from ..shared.generation_config import default_params
from ..shared.interrupts import DeferredInterrupts
from ..shared.models.config_json import load_config
from ..shared.models.locate import model_folder
from ..shared.sampling_params import SamplingParams
from ..shared.tokenizer import Tokenizer
from .batch import need_tokenizer
from .conversations import ChatTemplate, read_template
from .flags import engine_options, read_prompts, sampling_options
from .llm import LLM
from .outputs import RequestOutput, StreamUpdate
from .progress import GenerationBar


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0; 1 if a completion ended with an error, 2 if a prompt was refused."""
    prompts = read_prompts(arguments.prompts)
    _check(arguments, prompts)
    template = None
    if arguments.chat:
        template = ChatTemplate(chat_template=read_template(arguments.chat_template))
    # Before a minute of work: what was said may be wrong.
    defaults, _ = default_params(model_folder(arguments.model), arguments.generation_config)
    params = replace(defaults, **sampling_options(arguments))
    options = engine_options(arguments) | {"generation_config": arguments.generation_config}
    tokenizer = Tokenizer.load(model_folder(arguments.model))
    if tokenizer is None and all(isinstance(prompt, str) for prompt in prompts):
        load_config(model_folder(arguments.model))  # a folder without any model says that first
        need_tokenizer(tokenizer)
    prompts = _tokenized(tokenizer, prompts, template)
    demand = _demand(prompts, params)
    with LLM(
        arguments.model, backend=arguments.backend, tokenizer=tokenizer, demand=demand, **options
    ) as llm:
        if arguments.verbose:
            _print_report(llm)
        return _complete(llm, prompts, params, _writer(arguments, llm, len(prompts), params))


def _tokenized(
    tokenizer: Tokenizer | None, prompts: list[Any], template: ChatTemplate | None
) -> list[Any]:
    """The prompts as tokens where that is possible: how many there are says which programs are
    needed. With `template` each is what a user says.

    A prompt that is not is left to be refused by its own error, beside others that are completed.
    """
    if template is not None:
        conversations = [[{"role": "user", "content": text}] for text in prompts]
        return template.prompts(tokenizer, conversations, return_errors=True)
    return [_encoded(tokenizer, prompt) for prompt in prompts]


def _encoded(tokenizer: Tokenizer | None, prompt: Any) -> Any:
    if tokenizer is None or not isinstance(prompt, str):
        return prompt
    try:
        return {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt)}
    except RequestError:
        return prompt


def _demand(prompts: list[Any], params: SamplingParams) -> Demand:
    """What the prompts that are not refused already need."""
    tokens = [
        prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt for prompt in prompts
    ]
    return Demand.of((len(ids), params) for ids in tokens if isinstance(ids, list))


def _check(arguments: argparse.Namespace, prompts: list[Any]) -> None:
    if not prompts:
        raise RequestError(
            "prompt", "none given; use --prompt, --prompt-token-ids or --prompt-file"
        )
    if arguments.chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("chat", "renders texts; token ids are rendered already")
    if arguments.chat_template is not None and not arguments.chat:
        raise ConfigError("chat-template: is for --chat, which is not given")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(arguments, name) is not None and not arguments.json:
            raise ConfigError(f"{name.replace('_', '-')}: is printed with --json only")


def _print_report(llm: LLM) -> None:
    report = llm.engine.report
    for change in report.changes:
        print(change, file=sys.stderr)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    tokens = report.cached_tokens
    print(
        f"ready: {phases}; {len(report.programs)} programs, KV cache for {tokens} tokens",
        file=sys.stderr,
    )


class Writer(Protocol):
    """Takes updates as they come."""

    def write(self, update: StreamUpdate) -> None:
        """Print what this update allows to be printed."""
        ...

    def close(self) -> None:
        """Nothing more will come, at the end or after an interrupt."""
        ...


def _complete(llm: LLM, prompts: list[Any], params: SamplingParams, writer: Writer) -> int:
    codes = {0}
    # Beside a text that appears on the same terminal, a bar would only disturb.
    bar = GenerationBar(len(prompts) * params.n, shown=not sys.stdout.isatty())
    steps = llm.stream_steps(prompts, params, return_errors=True)
    with bar, closing(writer), closing(steps):
        for update in next(steps):
            codes.add(_take(update, writer, bar))
        while True:
            # An interrupt waits until all that a step has finished is written.
            with DeferredInterrupts():
                updates = next(steps, None)
                if updates is None:
                    return max(codes)
                for update in updates:
                    codes.add(_take(update, writer, bar))


def _take(update: StreamUpdate, writer: Writer, bar: GenerationBar) -> int:
    """Write an update; returns the exit code that it asks for."""
    writer.write(update)
    bar.tokens(len(update.token_ids))
    if update.error is not None:
        _complain(update, " ".join(str(update.error).split()))
        return 2
    if update.finish_reason is not None:
        bar.completion(len(update.output.prompt_token_ids) if update.completion == 0 else 0)
    if update.finish_reason == "error":
        _complain(update, str(update.stop_reason))
        return 1
    return 0


def _complain(update: StreamUpdate, what: str) -> None:
    print(f"twinfer: error: prompt {update.index}: {what}", file=sys.stderr)


def _writer(arguments: argparse.Namespace, llm: LLM, count: int, params: SamplingParams) -> Writer:
    if not arguments.json:
        return TextLines(count, params.n, pieces=arguments.stream, as_ids=llm.tokenizer is None)
    config = llm.engine.config
    where = {"backend": config.backend, "device": llm.engine.device.platform, "dtype": config.dtype}
    return JsonLines(params, where, pieces=arguments.stream)


class JsonLines:
    """A record for each completion when it has ended, or for each piece of one; one for each
    refused prompt.
    """

    def __init__(self, params: SamplingParams, where: dict[str, Any], *, pieces: bool) -> None:
        self._params = params
        self._where = where
        self._pieces = pieces

    def write(self, update: StreamUpdate) -> None:
        """Print a record if there is one to print. It is in the file when this returns."""
        if update.error is not None:
            record = _named(update, with_prompt=True) | {
                "error": " ".join(str(update.error).split())
            }
        elif self._pieces:
            record = self._piece(update)
        elif update.finish_reason is not None:
            record = self._completion(update) | self._where
        else:
            return
        print(json.dumps(record, allow_nan=False), flush=True)

    def close(self) -> None:
        """All is written."""

    def _piece(self, update: StreamUpdate) -> dict[str, Any]:
        record = _named(update, with_prompt=False) | {
            "token_ids": update.token_ids,
            "text": update.text,
        }
        record |= self._scores(update.token_ids, update.logprobs)
        if update.finish_reason is not None:
            record |= {"finish_reason": update.finish_reason, "stop_reason": update.stop_reason}
            record |= self._prompt_scores(update.output)
        return record

    def _completion(self, update: StreamUpdate) -> dict[str, Any]:
        completion = update.output.outputs[update.completion]
        record = _named(update, with_prompt=True) | {
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        record |= self._scores(completion.token_ids, completion.logprobs)
        return record | self._prompt_scores(update.output)

    def _scores(self, tokens: list[int], scores: list[TokenLogprobs] | None) -> dict[str, Any]:
        if scores is None:
            return {}
        count = self._params.logprobs or 0
        return {
            "logprobs": [
                _scored(token, best, count) for token, best in zip(tokens, scores, strict=True)
            ]
        }

    def _prompt_scores(self, output: RequestOutput) -> dict[str, Any]:
        """Of the prompt's tokens; nothing comes before the first one, so it has none."""
        if output.prompt_logprobs is None:
            return {}
        count = self._params.prompt_logprobs or 0
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        return {"prompt_logprobs": [best and _scored(token, best, count) for token, best in pairs]}


def _named(update: StreamUpdate, *, with_prompt: bool) -> dict[str, Any]:
    """Which completion a record is about."""
    output = update.output
    record: dict[str, Any] = {"index": update.index, "request_id": output.request_id}
    if update.error is None:
        record["completion"] = update.completion
    if with_prompt and output.prompt is not None:
        record["prompt"] = output.prompt
    if with_prompt and output.prompt_token_ids:
        record["prompt_token_ids"] = output.prompt_token_ids
    return record


def _scored(token: int, best: TokenLogprobs, count: int) -> dict[str, Any]:
    """A token's log-probability and rank, and in `top` the `count` best tokens of its place,
    best first.
    """
    ranked = sorted(best.items(), key=lambda item: item[1].rank)[:count]
    return _score(token, best[token]) | {"top": [_score(other, entry) for other, entry in ranked]}


def _score(token: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token, "logprob": entry.logprob, "rank": entry.rank}


Place = tuple[int, int]
"""The numbers of a prompt and of a completion of it."""


class TextLines:
    """Prompts with their completions as text, in the order of the prompts: what comes early
    waits.
    """

    def __init__(self, count: int, n: int, *, pieces: bool, as_ids: bool) -> None:
        self._places: Iterator[Place] = (
            (index, number) for index in range(count) for number in range(n)
        )
        self._current = next(self._places, None)
        self._pieces = pieces
        self._as_ids = as_ids
        self._waiting: dict[Place, str] = {}
        self._refused: set[int] = set()
        self._ended: set[Place] = set()
        self._in_line = False

    def write(self, update: StreamUpdate) -> None:
        """Print this update's text if all before it is printed, and then what has waited for it."""
        place = (update.index, update.completion)
        if update.error is not None:
            self._refused.add(update.index)
        else:
            if update.finish_reason is not None:
                self._ended.add(place)
            if self._pieces or update.finish_reason is not None:
                self._waiting[place] = self._waiting.get(place, "") + self._text(update)
        self._advance()

    def _text(self, update: StreamUpdate) -> str:
        completion = update.output.outputs[update.completion]
        tokens, text = completion.token_ids, completion.text
        first = True
        if self._pieces:
            tokens, text = update.token_ids, update.text
            first = len(tokens) == len(completion.token_ids)
        if self._as_ids:
            return ("" if first else ",") + ",".join(map(str, tokens))
        return (update.output.prompt or "" if first else "") + text

    def _advance(self) -> None:
        while self._current is not None:
            if self._current[0] not in self._refused:
                self._print(self._waiting.pop(self._current, ""))
                if self._current not in self._ended:
                    break
                self._print("\n")
            self._current = next(self._places, None)
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            self._in_line = not text.endswith("\n")

    def close(self) -> None:
        """After an interrupt: also what has ended and waits for a prompt that has not."""
        if self._in_line:
            self._print("\n")
        for place in sorted(self._ended & self._waiting.keys()):
            self._print(self._waiting.pop(place) + "\n")
        sys.stdout.flush()
