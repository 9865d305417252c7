"""The bodies of requests, as OpenAI's API has them, and what they ask of the engine.

Types are checked here, ranges by `SamplingParams`. A field that nobody knows is counted and passed
over; one that is known and cannot be had is refused by its name.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from ...shared.chat import content_text
from ...shared.errors import RequestError
from ...shared.json_depth import MAX_DEPTH, nests_too_deep
from ...shared.models.fields import quoted, show
from ...shared.options import asks_for_nothing
from ...shared.request_checks import MAX_PRIORITY
from ...shared.sampling_kinds import Temperature
from ...shared.sampling_params import SamplingParams

MAX_PROMPTS = 1024
MAX_COMPLETIONS = 1024
"""Of all prompts of one call."""
MAX_LISTED = 1 << 21
"""Token ids in a list of a call, over all of its completions: the engine gets one for each."""
MAX_TOOLS = 1024
MAX_VALUES = 1 << 20
"""Of one body; a text, a list or an object counts as `PART`. Without a bound 32 MiB of brackets are
a minute in which nobody else is served.
"""
PART = 8
LONG_BODY = 1 << 16
"""Bytes of a body that takes more than a few milliseconds to read."""

SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
    "allowed_token_ids", "banned_token_ids", "banned_sequences", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "structured_outputs",
)  # fmt: skip
"""Fields that go to `SamplingParams` under the same name."""
IGNORED = (
    "store", "metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier",
    "verbosity", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
"""Known fields that change no token."""
FORM = "structured_outputs"
"""What the engine calls the form of a text, whoever has asked for it."""
ELSEWHERE = {
    name: f"is {FORM} here"
    for name in (
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
        "regex", "ebnf", "json_schema", "structural_tag",
    )
} | {
    name: "is not supported"
    for name in (
        "logits_processors", "logprob_token_ids", "prompt_embeds", "repetition_detection",
        "return_prompt_text", "suffix", "thinking_token_budget", "use_beam_search", "vllm_xargs",
        "watermarking",
    )
}  # fmt: skip
"""Fields that other servers know, each of which changes the text, or what is told of it: not to be
passed over.
"""


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(BaseModel):
    """What chats and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow")
    refused: ClassVar[Mapping[str, str]] = ELSEWHERE
    """Fields that cannot be had, and why."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    banned_sequences: list[list[int]] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    """How many of a prompt's last tokens are read; see `kept`."""
    truncation_side: Literal["left"] | None = None
    """Where a prompt is cut: vLLM can leave out its end, too."""
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody knows."""
        return [name for name in self.model_extra or {} if name not in IGNORED]

    @property
    def form_field(self) -> str:
        """The field that asks for a form of the text, or bounds it otherwise: what refuses it names
        that.
        """
        if self.response_format is not None and self.response_format.get("type") != "text":
            return "response_format"
        if self.structured_outputs is not None:
            return FORM
        asked = ("bad_words", "banned_sequences")
        return next((name for name in asked if getattr(self, name)), FORM)

    @property
    def form_asker(self) -> str:
        """The field that has the text bound at all, whatever says to what."""
        return self.form_field

    @property
    def names(self) -> dict[str, str]:
        """What the client calls fields that the engine calls otherwise."""
        return {FORM: self.form_field}

    def named(self, error: RequestError) -> RequestError:
        """An error of the engine's by the names that the client has given."""
        return renamed(error, self.names, self.names | {FORM: self.form_asker})

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream says how many tokens there were."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event of a stream says so."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check(self) -> None:
        """Raise RequestError for a field that cannot be had, and for options without a stream."""
        for name, why in self.refused.items():
            if not asks_for_nothing((self.model_extra or {}).get(name), False, [], ""):
                raise RequestError(name, why)
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of", f"got {show(self.best_of)}, must equal n")
        self.check_lists(1)
        # Larger ones do not fit into a message to the engine, which checks all else of it.
        if self.priority is not None and abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                "priority", f"got {show(self.priority)}, must be within {MAX_PRIORITY} of 0"
            )
        if self.stream_options is not None:
            if not self.stream:
                raise RequestError("stream_options", "is allowed only with stream: true")
            if self.stream_options.continuous_usage_stats and not self.wants_usage:
                raise RequestError(
                    "stream_options.continuous_usage_stats", "needs include_usage: true"
                )

    @property
    def most_tokens(self) -> int | None:
        """The maximum that the body names."""
        return self.max_tokens

    def kept(self, wanted: int, length: int, room: int, usual: int) -> int:
        """How many of a prompt's last tokens are read, where `wanted` are to be. The context has
        `length` tokens, of which prompt and completion have `room`. -1 leaves room for the maximum
        that is named, else for `usual` tokens. Raises RequestError.
        """
        name = "truncate_prompt_tokens"
        if wanted != -1 and not 1 <= wanted <= length:
            raise RequestError(name, f"got {show(wanted)}, allowed is -1 or 1 to {length}")
        if wanted != -1:
            return min(wanted, room - 1)
        left = usual if self.most_tokens is None else max(1, self.most_tokens)
        if left >= room:
            raise RequestError(
                name, f"got -1, but {left} tokens of the answer leave none of {room} to the prompt"
            )
        return room - left

    def check_lists(self, prompts: int) -> None:
        """Raise RequestError for lists of token ids that are too long for so many prompts."""
        count = prompts * (self.n or 1)
        sequences = sum(map(len, self.banned_sequences or ()))
        for name, size in (
            ("allowed_token_ids", len(self.allowed_token_ids or ())),
            ("banned_token_ids", len(self.banned_token_ids or ())),
            ("banned_sequences", sequences),
        ):
            if size * count > MAX_LISTED:
                raise RequestError(
                    name,
                    f"has {size} token ids for each of {count} completions, at most {MAX_LISTED} "
                    "in all",
                )

    def params(self, defaults: SamplingParams, most_tokens: int | None) -> SamplingParams:
        """The settings; what is not said is of `defaults`. `most_tokens` stands where the body
        names no maximum. Raises RequestError, which names fields as the client does.
        """
        try:
            return self._params(defaults, most_tokens)
        except RequestError as error:
            raise self.named(error) from None

    def _params(self, defaults: SamplingParams, most_tokens: int | None) -> SamplingParams:
        values: dict[str, Any] = {
            name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None
        }
        if self.temperature is not None:
            # OpenAI takes lower ones, and clients send 1e-8 for nearly greedy.
            values["temperature"] = Temperature.raised(self.temperature)
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            values["logit_bias"] = _biases(self.logit_bias)
        if self.most_tokens is not None:
            values["max_tokens"] = self.most_tokens
        elif most_tokens is not None:
            values["max_tokens"] = most_tokens
        return replace(defaults, **values | self.scores())

    def scores(self) -> dict[str, Any]:
        """The settings for log-probabilities, and the form that `response_format` asks for."""
        form = answer_form(self.response_format)
        if form is not None and self.structured_outputs is not None:
            raise RequestError("response_format", "or structured_outputs, not both")
        values: dict[str, Any] = {} if form is None else {FORM: form}
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = self.prompt_logprobs
        return values


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    tokens: list[int]
    model: str | None = None


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    refused: ClassVar[Mapping[str, str]] = ELSEWHERE | {
        "max_completion_tokens": "is for chats; see max_tokens",
        "top_logprobs": "is for chats; see logprobs",
        "tools": "is for chats",
    }

    prompt: Any
    """A text or token ids, or a list of these; see `prompts`."""
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """As `Generation.check`."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens", "got 0, which needs echo: true")

    def scores(self) -> dict[str, Any]:
        """With `echo`, those of the prompt too."""
        values = super().scores()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo:
                values.setdefault("prompt_logprobs", self.logprobs)
        if self.max_tokens == 0:
            values["max_tokens"] = 1  # it is computed and not told
        return values

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts: texts or token ids. Raises RequestError."""
        prompt = self.prompt
        kinds = _kinds(prompt)
        if isinstance(prompt, str) or kinds == {int}:
            return [prompt]
        if isinstance(prompt, list) and not 1 <= len(prompt) <= MAX_PROMPTS:
            raise RequestError(
                "prompt", f"has {len(prompt)} prompts, allowed is 1 to {MAX_PROMPTS}"
            )
        if kinds == {str} or (kinds == {list} and all(_kinds(ids) <= {int} for ids in prompt)):
            return list(prompt)
        allowed = "a text, a list of token ids, or a list of one of them"
        raise RequestError("prompt", f"got {show(prompt)}, allowed is {allowed}")


def _check_tool(where: str, tool: dict[str, Any]) -> None:
    """Raise RequestError unless it is a function with a name whose arguments are an object."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(where, f"got {show(tool)}, must be a function with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(where, f"got {show(tool)}, must be a function with a name")
    if not name.isprintable():  # no parser finds such a one in what a model writes
        raise RequestError(f"{where}.function.name", f"got {show(name)}, must be printable")
    schema, field = function.get("parameters"), f"{where}.function.parameters"
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(field, f"got {show(schema)}, must be a JSON schema")
    kinds = (schema or {}).get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise RequestError(f"{field}.type", f"got {show(kinds)}, must be object: arguments are one")


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = ELSEWHERE | {
        "audio": "this server gives text",
        "prediction": "is not supported",
        "moderation": "this server moderates nothing",
        "web_search_options": "this server searches nothing",
        "functions": "is not supported; it was replaced by tools",
        "function_call": "is not supported; it was replaced by tool_choice",
        "chat_template": "no template may come with a request; see --chat-template",
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    include_reasoning: bool | None = None
    """False: reasoning is left out of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Beside those that the chat template writes."""

    def check(self) -> None:
        """As `Generation.check`."""
        super().check()
        if self.echo and self.truncate_prompt_tokens is not None:
            raise RequestError(
                "echo", "tells a whole message, of which truncate_prompt_tokens may cut a part"
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError("modalities", f"got {show(self.modalities)}, allowed is text")
        if len(self.tools or ()) > MAX_TOOLS:
            raise RequestError("tools", f"has {len(self.tools or ())}, at most {MAX_TOOLS}")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs: true")
        for place, tool in enumerate(self.tools or ()):
            _check_tool(f"tools[{place}]", tool)
        self._check_choice()

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if isinstance(choice, dict):
            self._check_named(choice)
        elif choice not in (None, "none", "auto", "required"):
            raise RequestError(
                "tool_choice",
                f"got {show(choice)}, allowed are none, auto, required, a function and "
                "allowed_tools",
            )
        elif choice == "required" and not self.tools:
            raise RequestError("tool_choice", "got 'required', which needs tools")
        bound = self.response_format is not None or self.structured_outputs is not None
        if bound and self.must_call:
            raise RequestError("tool_choice", "got a call that must come, and a form of the text")
        for place, tool in enumerate(self.tools or ()):
            strict = tool["function"].get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise RequestError(
                    f"tools[{place}].function.strict", f"got {show(strict)}, must be a boolean"
                )

    def _check_named(self, choice: dict[str, Any]) -> None:
        """A choice that names functions."""
        names = self.chosen_tools
        if not names or not set(names) <= set(self.every_tool_name):
            raise RequestError(
                "tool_choice", f"got {show(choice)}, must name some of the functions in tools"
            )
        if self._allowed is not None and self._allowed.get("mode") not in ("auto", "required"):
            raise RequestError(
                "tool_choice.allowed_tools.mode",
                f"got {show(self._allowed.get('mode'))}, allowed are auto and required",
            )

    @property
    def most_tokens(self) -> int | None:
        """See `Generation`; `max_completion_tokens` goes before `max_tokens`."""
        named = self.max_completion_tokens
        return self.max_tokens if named is None else named

    @property
    def names(self) -> dict[str, str]:
        """See `Generation`."""
        named = super().names | {"logprobs": "top_logprobs", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            named["max_tokens"] = "max_completion_tokens"
        return named

    def named(self, error: RequestError) -> RequestError:
        """See `Generation`; of a grammar that the client has not written no rule is named."""
        error = super().named(error)
        match = _OWN_RULE.match(error.reason)
        if match is None or "grammar" in (self.structured_outputs or {}):
            return error
        number, reason = match.groups()
        if number is not None:
            reason = f"parameters of {self.tool_names[int(number)]!r}: {reason}"
        return RequestError(error.field, reason)

    def scores(self) -> dict[str, Any]:
        """Of each token, and of the `top_logprobs` best."""
        values = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return super().scores() | values

    @property
    def form_field(self) -> str:
        """See `Generation`."""
        field = super().form_field
        if field == "response_format" or self.structured_outputs is not None:
            return field
        binds = self.must_call or self.binds_calls or self.parallel_tool_calls is False
        return "tools" if self.tools and (binds or field == FORM) else field

    @property
    def form_asker(self) -> str:
        """See `Generation`."""
        field = self.form_field
        if field != "tools":
            return field
        if self.must_call:
            return "tool_choice"
        return "parallel_tool_calls" if self.parallel_tool_calls is False else field

    @property
    def described(self) -> list[dict[str, Any]]:
        """The tools that the chat template shows. Those that are not allowed are among them, so
        that the prompt stays the same; a tool that is named stands alone.
        """
        if not self.tools or self.tool_choice == "none":
            return []
        return self.tools if self._allowed is not None else self.offered

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        if not self.tools or self.tool_choice == "none":
            return []
        names = self.chosen_tools
        if names is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in names]

    @property
    def chosen_tools(self) -> list[str] | None:
        """The functions that `tool_choice` names; None where it names none."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return None
        named = [choice] if self._allowed is None else self._allowed.get("tools")
        functions = [
            tool.get("function") if isinstance(tool, dict) else None
            for tool in (named if isinstance(named, list) else [])
        ]
        names = [f.get("name") if isinstance(f, dict) else None for f in functions]
        return [name if isinstance(name, str) else "" for name in names]

    @property
    def _allowed(self) -> dict[str, Any] | None:
        """What a `tool_choice` of allowed tools says."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        allowed = choice.get("allowed_tools")
        return allowed if isinstance(allowed, dict) else {}

    @property
    def named_tool(self) -> bool:
        """Whether `tool_choice` is one function, which is called once."""
        return isinstance(self.tool_choice, dict) and self._allowed is None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        if self._allowed is not None:
            return self._allowed.get("mode") == "required"
        return self.tool_choice == "required" or self.named_tool

    @property
    def strict_tools(self) -> list[str]:
        """The functions whose arguments must keep to their schemas."""
        functions = [tool["function"] for tool in self.offered]
        return [function["name"] for function in functions if function.get("strict")]

    @property
    def binds_calls(self) -> bool:
        """Whether not every call is one that may come."""
        return bool(self.strict_tools) or (self._allowed is not None and bool(self.offered))

    @property
    def every_tool_name(self) -> list[str]:
        """The names of all functions, called or not."""
        return [tool["function"]["name"] for tool in self.tools or ()]

    @property
    def tool_names(self) -> list[str]:
        """The names of those that may be called."""
        return [tool["function"]["name"] for tool in self.offered]

    @property
    def tool_schemas(self) -> dict[str, Any]:
        """The `parameters` of those that may be called, by name."""
        functions = [tool["function"] for tool in self.offered]
        return {function["name"]: function.get("parameters") for function in functions}

    @property
    def echoed(self) -> str:
        """What stands before the answer: with `echo` the assistant's message that it goes on with.
        Raises RequestError.
        """
        last = self.messages[-1]
        if not self.echo or last.get("role") != "assistant":
            return ""
        return content_text(
            f"messages[{len(self.messages) - 1}].content", last.get("content") or ""
        )

    def template_variables(self) -> dict[str, Any]:
        """What the chat template may read."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault(
                "enable_thinking", self.reasoning_effort not in ("none", "minimal")
            )
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

    def conversation(self) -> list[dict[str, Any]]:
        """The messages; a developer is what a system is to most templates, and arguments of calls
        are the objects that templates write. Raises RequestError.
        """
        return [_message(f"messages[{i}]", message) for i, message in enumerate(self.messages)]


_OWN_RULE = re.compile(r"grammar: (?:answer|(?:arguments|value)_(\d+)\w*): (.*)")
"""How a refusal begins that is about a schema of the client's, in a grammar made here; the number
is that of a tool on offer.
"""


class TokenizeRequest(CompletionRequest):
    """The body of /tokenize for a text."""

    prompt: str
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """The body of /tokenize for a conversation."""

    return_token_strs: bool | None = None


def renamed(
    error: RequestError, names: Mapping[str, str], others: Mapping[str, str] | None = None
) -> RequestError:
    """An error by the names that a client has given; `names` by our own. `others` are those of a
    second field that it names, if they differ.
    """
    name = names.get(error.field, error.field)
    other = (names if others is None else others).get(error.other, error.other)
    if (name, other) == (error.field, error.other):
        return error
    reason = error.reason.replace(error.other, other) if error.other else error.reason
    return type(error)(name, reason, other)


def answer_form(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """What `structured_outputs` has for a `response_format`. Raises RequestError."""
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema":
        allowed = "text, json_object and json_schema"
        raise RequestError("response_format.type", f"got {show(kind)}, allowed are {allowed}")
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format.json_schema.schema", f"got {show(schema)}, must be a JSON schema"
        )
    return {"json": schema}


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "developer":
        message = message | {"role": "system"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    if not calls:  # templates ask whether the key is there
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return rest if rest.get("content") is not None else rest | {"content": ""}
    return message | {
        "tool_calls": [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    }


def _call(where: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    value = read_arguments(f"{where}.function.arguments", arguments)
    return call | {"function": {**(function or {}), "arguments": value}}


def read_arguments(name: str, text: str) -> Any:
    """The arguments of a call that the field `name` has as text. Raises RequestError."""
    try:
        return read_json(text.encode() or b"{}")
    except NotJson:
        raise RequestError(name, f"got {show(text)}, must be a JSON object as text") from None
    except RequestError as error:
        raise renamed(error, {"body": name}) from None


def read_fields(kind: type[BaseModel], body: Any) -> Any:
    """A body as `kind`. Raises RequestError, which names the field."""
    if not isinstance(body, dict):
        raise RequestError("body", f"got {type(body).__name__}, must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        # Of a field that may be several things, the complaint about the likeliest one: that which
        # looks deepest into it, else the first.
        errors = error.errors(include_url=False, include_context=False)
        same = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
        first = max(same, key=lambda one: len(one["loc"]))
        field = _field(first["loc"])
        got = "" if first["type"] == "missing" else f"got {quoted(first.get('input'))}; "
        raise RequestError(field, f"{got}{first['msg'].lower()}") from None


def _field(place: tuple[int | str, ...]) -> str:
    """`messages[3].role`; without pydantic's names of alternatives behind it."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not text:
            text = part
        elif not any(mark in part for mark in "[(") and part not in ("str", "int", "float", "bool"):
            text += f".{part}"
    return text or "body"


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        # `int` alone reads " 5", "05" and "5_0" too, of which two may be one token.
        if _TOKEN_ID.fullmatch(key) is None:
            raise RequestError("logit_bias", f"got the key {show(key)}, must be token ids")
    return {int(key): value for key, value in given.items()}


_TOKEN_ID = re.compile("-?(?:0|[1-9][0-9]{0,18})")


def _kinds(value: Any) -> set[type]:
    """The types in a list; none of what is no list."""
    return set(map(type, value)) if isinstance(value, list) else set()


class NotJson(RequestError):
    """A body that cannot be parsed."""


def read_json(data: bytes) -> Any:
    """The value of a body. Raises NotJson, and RequestError for what has too many values or nests
    too deep.
    """
    data = data.removeprefix(codecs.BOM_UTF8)  # editors on Windows write it
    if len(data) > MAX_VALUES // PART and _count_values(data) > MAX_VALUES:
        raise RequestError("body", f"has more than {MAX_VALUES} values")
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError:  # of a value without a type it can be no other complaint
        raise RequestError(
            "body",
            "has a number that is out of range; allowed are those of float64, and integers of at "
            "most 4300 digits",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson("body", f"is no JSON: {show(str(error))}") from None
    check_depth(value)
    return value


def _count_values(data: bytes) -> int:
    """About how many values there are. Texts are left out only if it makes the difference, and
    there are not so many that this alone would take long.
    """
    quotes = data.count(b'"') - data.count(b'\\"')
    if quotes > MAX_VALUES // PART * 2:
        return quotes * PART // 2
    count = _count_marks(data)
    return count if count <= MAX_VALUES else _count_marks(_without_texts(data))


def _count_marks(data: bytes) -> int:
    return data.count(b",") + PART * sum(map(data.count, (b":", b"[", b"{")))


def _without_texts(data: bytes) -> bytes:
    """JSON without what stands between quotes. Of calls that take a third of what an expression
    does, and each of them lets others run.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def check_depth(value: Any) -> None:
    """Raise RequestError for JSON that nests too deep."""
    if nests_too_deep(value):
        raise RequestError("body", f"is nested more than {MAX_DEPTH} deep")
