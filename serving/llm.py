"""`LLM`: offline generation in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..shared.chat import render_chat
from ..shared.config import EngineConfig
from ..shared.engine import Engine, derive_seed, token_array
from ..shared.errors import ConfigError, RequestError
from ..shared.models.config import load_config
from ..shared.models.locate import model_folder
from ..shared.request import FinishReason
from ..shared.sampling_params import SamplingParams
from ..shared.tokenizer import Tokenizer
from .completion import Completion
from .outputs import RequestOutput
from .progress import GenerationBar, StartBar

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids` (and `cache_salt`, `priority`)."""


class LLM:
    """A model on one backend, ready to generate.

    `model` is a folder with a Hugging Face checkpoint or the word demo; `options` are those of `EngineConfig`. Building
    one loads the weights and compiles every program; afterwards nothing compiles. Raises ConfigError, ModelError,
    BackendUnavailable. `close()` frees the device; it is also a context manager.
    """

    def __init__(
        self, model: str, *, backend: str = "auto", device: str = "auto", progress: bool = True, **options: Any
    ) -> None:
        config = EngineConfig.from_options({"model": model, "backend": backend, "device": device, **options})
        folder = model_folder(model)
        model_config = load_config(folder)
        self.tokenizer = Tokenizer.load(folder)
        with StartBar("starting" if backend == "auto" else f"{backend}: starting", shown=progress) as bar:
            self.engine = Engine(config, model_config, folder, bar.update)
        self._next_id = 0
        self._generating = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        return_errors: bool = False,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results stand in the order of the prompts.

        A refused request raises RequestError after the others were withdrawn; with `return_errors` it comes back with
        `error` set and the others go on. `on_finish` is called with each result when it is complete.
        """
        batch: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        settings = _per_prompt(params, len(batch))
        if self._generating.locked():
            raise RequestError("prompts", "generate() is running already; on_finish and other threads cannot call it")
        # In one line: wherever an interrupt comes, the lock is given back.
        with self._generating, _NothingLeft(self.engine):
            return self._generate(batch, settings, progress, return_errors, on_finish)

    def _generate(
        self,
        batch: Sequence[Any],
        settings: Sequence[SamplingParams],
        progress: bool,
        return_errors: bool,
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        live: dict[str, tuple[RequestOutput, Completion]] = {}
        for prompt, setting in zip(batch, settings, strict=True):
            outputs.append(RequestOutput(str(self._next_id), prompt if isinstance(prompt, str) else None, []))
            self._next_id += 1
            try:
                live.update(self._add(outputs[-1], prompt, setting))
            except RequestError as error:
                outputs[-1].error = error
                if not return_errors:
                    raise
        self._run(live, progress, on_finish)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: messages with `role` and `content`, rendered by the model's template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        tokenizer = self._tokenizer("chat")
        texts = [render_chat(tokenizer, conversation, add_generation_prompt=True) for conversation in conversations]
        prompts: list[Prompt] = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
        ]
        return self.generate(prompts, params, **options)

    def _tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("prompt", f"the model folder has no tokenizer.json, so {purpose} needs token ids")
        return self.tokenizer

    def _add(self, output: RequestOutput, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        if not isinstance(params, SamplingParams):
            raise RequestError("params", f"got {type(params).__name__}, must be SamplingParams")
        options: dict[str, Any] = {}
        text: Any = prompt if isinstance(prompt, str) else None
        token_ids: Any = None if isinstance(prompt, str) else prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "priority"}
            if unknown:
                raise RequestError("prompt", f"unknown keys {', '.join(sorted(map(str, unknown)))}")
            options = {key: prompt[key] for key in ("cache_salt", "priority") if prompt.get(key) is not None}
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise RequestError("prompt", f"got {type(text).__name__}, must be text")
            if text is None and token_ids is None:
                raise RequestError("prompt", "needs the key 'prompt' or 'prompt_token_ids'")
        output.prompt = text
        if token_ids is None:
            token_ids = self._tokenizer("text").encode(text or "")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and the model folder has no tokenizer.json")
        tokens = token_array(token_ids)
        output.prompt_token_ids = tokens.tolist()
        made: dict[str, tuple[RequestOutput, Completion]] = {}
        try:
            for index in range(params.n):
                own = params if index == 0 or params.seed is None else params.with_seed(derive_seed(params.seed, index))
                request = self.engine.add(f"{output.request_id}/{index}", tokens, own, **options)
                completion = Completion(index, request, self.tokenizer)
                output.outputs.append(completion.output)
                made[request.request_id] = output, completion
        except RequestError:
            output.outputs.clear()
            for request_id in made:
                self.engine.abort(request_id)
            raise
        return made

    def _run(
        self,
        live: dict[str, tuple[RequestOutput, Completion]],
        progress: bool,
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> None:
        missing = {output.request_id: len(output.outputs) for output, _ in live.values()}
        with GenerationBar(len(missing), shown=progress) as bar:
            while live:
                for update in self.engine.step():
                    entry = live.get(update.request.request_id)
                    if entry is None:
                        continue
                    output, completion = entry
                    if update.prompt_logprobs is not None:
                        output.prompt_logprobs = update.prompt_logprobs
                    if completion.take(update):
                        self.engine.finish(update.request.request_id, FinishReason.STOP)
                    bar.token()
                # A request that somebody aborted ends without an update.
                ended = [key for key, (_, completion) in live.items() if completion.ended()]
                for key in ended:
                    output, completion = live.pop(key)
                    output.num_cached_tokens = max(output.num_cached_tokens, completion.request.num_cached_tokens)
                    missing[output.request_id] -= 1
                    if not missing[output.request_id]:
                        bar.request(len(output.prompt_token_ids))
                        if on_finish is not None:
                            on_finish(output)


class _NothingLeft:
    """A context that begins and ends with an engine without requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.abort_all()  # what an interrupt in the last call's clean-up left behind

    def __exit__(self, *error: object) -> None:
        self._engine.abort_all()


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, bytes, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts", f"got {type(prompts).__name__}, must be text, token ids, or a list of those")
    return bool(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise RequestError("params", f"got {type(params).__name__}, must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ConfigError(f"params: got {len(params)} for {count} prompts; give one, or one for each")
    return list(params)
