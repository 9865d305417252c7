"""`LLM`: offline generation in this process."""

from __future__ import annotations

import difflib
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import NoneType
from typing import Any

import numpy as np

from ..shared.config import EngineConfig
from ..shared.demand import ANYTHING, Demand
from ..shared.engine import Engine
from ..shared.errors import ConfigError, EngineClosed, RequestError
from ..shared.generation_config import default_params
from ..shared.models.config_json import load_config
from ..shared.models.fields import show
from ..shared.models.locate import model_folder
from ..shared.models.shapes import check_weights
from ..shared.sampling_params import SamplingParams
from ..shared.tokenizer import Tokenizer
from .batch import Batch, Prompt
from .conversations import ChatTemplate, Message
from .other_flags import checked_options
from .outputs import RequestOutput, StreamUpdate
from .progress import GenerationBar, StartBar

ARGUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "progress": ((bool,), "allowed are true and false"),
    "use_tqdm": ((bool,), "allowed are true and false"),
    "return_errors": ((bool,), "allowed are true and false"),
    "on_finish": ((Callable, NoneType), "allowed is a function of a RequestOutput, or None"),  # type: ignore[dict-item]
    "demand": ((Demand,), "allowed is a Demand"),
    "tokenizer": (
        (Tokenizer, NoneType),
        "allowed is a Tokenizer, or None for that of the model's folder",
    ),
}
"""Arguments that are no options of an engine: their types, and what an error says is allowed."""
OTHER_ARGUMENTS = {
    "guided_options_request": "say structured_outputs in the sampling params",
    "lora_request": "adapters are not supported; merge them into the checkpoint",
    "params": "did you mean 'sampling_params'?",
    "priority": "each prompt says its own: {'prompt': TEXT, 'priority': 1}",
    "prompt_token_ids": "each prompt says its own: {'prompt_token_ids': IDS}, or the list itself",
}
"""Arguments of vLLM's `generate` and `chat` that are none here, and what stands in their place."""


class LLM:
    """A model on one backend, ready to generate.

    `model` is a folder with a Hugging Face checkpoint, the word demo, or the name of a shape such
    as qwen3-0.6b, which has no weights and needs `load_format="dummy"`. `options` are those of
    `EngineConfig`. Building one loads the weights and compiles every program; afterwards nothing
    compiles. `demand` (`shared/demand.py`) says what will be asked for, so that only what that
    needs is compiled; a request that needs more is refused. `tokenizer`: the model's, where it is
    loaded already.

    `default_params` are used where a call gives no params: those of the model's
    generation_config.json, unless `generation_config` is "none". What they change is in
    `engine.report.changes`.

    Raises ConfigError, ModelError, BackendUnavailable. `close()` frees the device; it is also a
    context manager.
    """

    def __init__(
        self,
        model: str,
        *,
        backend: str = "auto",
        device: str = "auto",
        generation_config: str = "auto",
        progress: bool = True,
        tokenizer: Tokenizer | None = None,
        demand: Demand = ANYTHING,
        **options: Any,
    ) -> None:
        _check_arguments(ConfigError, tokenizer=tokenizer, demand=demand, progress=progress)
        config = EngineConfig.from_options(
            {"model": model, "backend": backend, "device": device, **checked_options(options)}
        )
        check_weights(model, config.load_format)
        folder = model_folder(model)
        model_config = load_config(folder)
        self.tokenizer = tokenizer or Tokenizer.load(folder)
        self.default_params, changes = default_params(folder, generation_config)
        with StartBar(
            "starting" if backend == "auto" else f"{backend}: starting", shown=progress
        ) as bar:
            self.engine = Engine(config, model_config, folder, bar.update, demand)
        self.engine.report.changes += changes
        self._ids = itertools.count()
        self._generating = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device."""
        self.engine.close()

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None for a model without."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without params takes; `dataclasses.replace` changes some of it."""
        return self.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget what was kept of earlier prompts. False if a stream is running, or the engine has
        ended: nothing is forgotten then.
        """
        if not self._generating.acquire(blocking=False):
            return False
        try:
            with _NothingLeft(self.engine):
                while self.engine.has_work:  # steps that were on their way when all had ended
                    self.engine.step()
                return self.engine.reset_prefix_cache()
        except EngineClosed:
            return False
        finally:
            self._generating.release()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        return_errors: bool = False,
        on_finish: Callable[[RequestOutput], None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; results stand in the order of the prompts.

        A refused request raises RequestError after the others were withdrawn; with `return_errors`
        it comes back with `error` set and the others go on. `on_finish` is called with each result
        when it is complete. `use_tqdm` is taken for `progress`, as vLLM calls it.
        """
        progress = _progress(progress, others)
        _check_arguments(
            RequestError, progress=progress, return_errors=return_errors, on_finish=on_finish
        )
        with self._alone():
            batch = self._add_all(prompts, sampling_params, return_errors)
            self._run(batch, progress, on_finish)
            return batch.outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_errors: bool = False,
    ) -> Generator[StreamUpdate, None, None]:
        """What each step brings to each completion, as it comes; see `StreamUpdate`.

        Nothing runs before the first update is asked for. Closing the generator aborts what has not
        ended, and so does leaving a loop over it, once nobody holds it any more. Until then no
        other call can run.
        """
        with closing(
            self.stream_steps(prompts, sampling_params, return_errors=return_errors)
        ) as steps:
            for updates in steps:
                yield from updates

    def stream_steps(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_errors: bool = False,
    ) -> Generator[list[StreamUpdate], None, None]:
        """As `stream`, with all updates of a step together, so that a step is handed over whole or
        not at all.

        The first list has the refused prompts; it may be empty.
        """
        _check_arguments(RequestError, return_errors=return_errors)
        with self._alone():
            batch = self._add_all(prompts, sampling_params, return_errors)
            refused = [
                (index, output)
                for index, output in enumerate(batch.outputs)
                if output.error is not None
            ]
            yield [StreamUpdate(index, 0, output, error=output.error) for index, output in refused]
            while batch:
                yield [entry.news() for entry in batch.step()]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool = True,
        return_errors: bool = False,
        on_finish: Callable[[RequestOutput], None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: messages with `role` and `content`, rendered by the
        model's template.

        The options of the template are those of `chat_prompts`, the others those of `generate`.
        """
        progress = _progress(progress, others)
        prompts = self.chat_prompts(
            messages,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            return_errors=return_errors,
        )
        return self.generate(
            prompts,
            sampling_params,
            progress=progress,
            return_errors=return_errors,
            on_finish=on_finish,
        )

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        return_errors: bool = False,
    ) -> list[Any]:
        """The prompts of one conversation or several, for `generate` and `stream`.

        `tools` are JSON schemas of functions. `chat_template` is a Jinja template instead of the
        model's own, and `chat_template_kwargs` are variables for it, such as enable_thinking.
        Without `add_generation_prompt` the prompt ends with the last message; with
        `continue_final_message` it ends inside of it, and the model goes on with it.

        A conversation that is refused raises RequestError; with `return_errors` the error stands in
        its place.
        """
        template = ChatTemplate(
            tools,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt,
            continue_final_message,
        )
        return template.prompts(self.tokenizer, messages, return_errors=return_errors)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time; none leaves requests behind."""
        if self._generating.locked():
            raise RequestError(
                "prompts",
                "generate() or a stream is running already: close the stream first; on_finish and "
                "other threads "
                "cannot start another",
            )
        # In one line: wherever an interrupt comes, the lock is given back.
        with self._generating, _NothingLeft(self.engine):
            yield

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        return_errors: bool,
    ) -> Batch:
        listed: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        settings = _per_prompt(self.default_params if params is None else params, len(listed))
        batch = Batch(self.engine, self.tokenizer)
        for number, (prompt, setting) in enumerate(zip(listed, settings, strict=True)):
            try:
                batch.add(str(next(self._ids)), prompt, setting)
            except RequestError as error:
                if return_errors:
                    continue
                if len(listed) > 1:
                    error.args = (f"prompt {number}: {error}",)
                raise
        return batch

    def _run(
        self, batch: Batch, progress: bool, on_finish: Callable[[RequestOutput], None] | None
    ) -> None:
        with GenerationBar(len(batch), shown=progress) as bar:
            counted = 0
            while batch:
                entries = batch.step()
                bar.tokens(batch.num_tokens - counted)
                counted = batch.num_tokens
                for entry in entries:
                    if entry.completion.done:
                        first = entry.completion.output.index == 0
                        bar.completion(len(entry.output.prompt_token_ids) if first else 0)
                    if entry.ends_request and on_finish is not None:
                        on_finish(entry.output)


class _NothingLeft:
    """A context that begins and ends with an engine without requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.abort_all()  # what an interrupt in the last call's clean-up left behind

    def __exit__(self, *error: object) -> None:
        self._engine.abort_all()


def _check_arguments(error: type[ConfigError] | type[RequestError], **given: Any) -> None:
    """Raise `error` for an argument that has not the type that `ARGUMENTS` says."""
    for name, value in given.items():
        types, allowed = ARGUMENTS[name]
        if isinstance(value, types):
            continue
        reason = f"got {value!r}, {allowed}"
        raise (
            RequestError(name, reason)
            if issubclass(error, RequestError)
            else ConfigError(f"{name}: {reason}")
        )


def _progress(progress: bool, others: Mapping[str, Any]) -> bool:
    """Whether there is a bar, by either name. Raises RequestError for any other argument, with what
    stands in its place.
    """
    for name, value in others.items():
        if name == "use_tqdm":
            _check_arguments(RequestError, use_tqdm=value)
            if progress is not True:
                raise RequestError("progress", "is use_tqdm too: give one of them")
        elif name not in OTHER_ARGUMENTS or value is not None:
            words = OTHER_ARGUMENTS.get(name, "no such argument")
            near = difflib.get_close_matches(name, ("sampling_params", "progress"), 1)
            hint = f"did you mean {near[0]!r}?" if near else words
            raise RequestError(name, f"got {show(value)}; {hint}")
    use_tqdm: bool = others.get("use_tqdm", progress)
    return use_tqdm


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, bytes, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts", f"got {type(prompts).__name__}, must be text, token ids, or a list of those"
        )
    return bool(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise RequestError(
            "sampling_params",
            f"got {type(params).__name__}, must be SamplingParams, or a list of them",
        )
    if len(params) != count:
        raise RequestError(
            "sampling_params", f"got {len(params)} for {count} prompts; give one, or one for each"
        )
    return list(params)
