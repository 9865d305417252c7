"""Messages to a prompt, by the Jinja template that comes with a model, as `apply_chat_template` of
transformers 5.

A template is data from a download: it runs in Jinja's sandbox, sees plain JSON values only, and its
output is limited. Time and the memory used on the way are not: nested loops run for hours, 'x' *
10**12 asks for a terabyte. So a template must never come from a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ModelError, RequestError
from .models.fields import show
from .tokenizer import Tokenizer

MAX_MESSAGES = 4096
MAX_DEPTH = 32
"""How deeply tool calls and schemas may nest."""
MAX_OUTPUT = 8 << 20
"""Characters of a rendered prompt; no context is that long."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a content that are text, and which field has it."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
REASONING = ("reasoning_content", "thinking", "reasoning")
END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued while it is rendered: the text and the
space of transformers.
"""


def render_chat(
    tokenizer: Tokenizer,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Any = None,
    documents: Any = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    max_output: int = MAX_OUTPUT,
) -> str:
    """The prompt for a conversation. Its special tokens are in it: encode it with
    `add_special_tokens=False`.

    `messages` is a list of objects with `role` and `content`: text, null, or a list of text parts,
    which are joined by line ends. Their other fields, such as tool_calls, `tools` and `documents`
    (objects to answer from) reach the template as they are. `template` replaces the model's own,
    `variables` (such as enable_thinking) are what else the template may read. With
    `continue_final_message` the prompt ends where the last message's content does, so that the
    model goes on with it. Raises RequestError for messages that are malformed or that the template
    refuses, ModelError if there is no template or it is broken.
    """
    _check_options(add_generation_prompt, continue_final_message, template, variables)
    conversation = _checked_messages(messages)
    for name, given in (("tools", tools), ("documents", documents)):
        if given is not None and (
            not isinstance(given, list) or not all(isinstance(item, dict) for item in given)
        ):
            raise RequestError(name, f"got {show(given)}, must be a list of objects")
    context = tokenizer.special_tokens | check_variables(variables or {})
    context |= {
        "messages": conversation,
        "tools": _plain("tools", tools),
        "documents": _plain("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    source = _choose(tokenizer, tools, template)
    if not continue_final_message:
        return _render(_compile(source), context, max_output)
    if not isinstance(conversation[-1].get("content"), str):
        raise RequestError("continue_final_message", "the last message has no content to continue")
    conversation[-1]["content"] += END_TAG
    return _cut_at_tag(_render(_compile(source), context, max_output))


def check_template(source: str) -> None:
    """Raise ModelError for a template that does not compile, or that makes no prompt at all."""
    if not source.strip():
        raise ModelError("chat_template: is empty")
    _compile(source)


def check_variables(variables: Mapping[str, Any]) -> Any:
    """A copy of what a template may read besides. Raises RequestError."""
    plain = _plain("chat_template_kwargs", variables)
    for name in RESERVED:
        if name in variables:
            raise RequestError("chat_template_kwargs", f"{name} has a parameter of its own")
    return plain


def _check_options(
    add_generation_prompt: Any, continue_final_message: Any, template: Any, variables: Any
) -> None:
    flags = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RequestError(name, f"got {show(value)}, allowed are true and false")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message", "needs add_generation_prompt=False: a prompt ends in one way"
        )
    if template is not None and not isinstance(template, str):
        raise RequestError("chat_template", f"got {show(template)}, must be the text of a template")
    if variables is not None and not isinstance(variables, Mapping):
        raise RequestError(
            "chat_template_kwargs", f"got {show(variables)}, must map names to values"
        )


def _cut_at_tag(text: str) -> str:
    """The text up to `END_TAG`. A template that strips the content has stripped the tag's space,
    as it does ours.
    """
    place = text.rfind(END_TAG.strip())
    if place < 0:
        raise RequestError(
            "continue_final_message", "the chat template leaves out the end of the last message"
        )
    return text[:place] if text.startswith(END_TAG, place) else text[:place].rstrip()


def _choose(tokenizer: Tokenizer, tools: Any, template: str | None) -> str:
    if template is not None:
        return template
    named = tokenizer.chat_templates
    if tools is not None and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise ModelError(
            f"chat_template: the model has only templates named {', '.join(sorted(named))}, none "
            "is default"
        )
    raise ModelError(
        "chat_template: the model has none: put chat_template.jinja into its folder, give one in "
        "Python, or use the completions API"
    )


def _render(template: jinja2.Template, context: Mapping[str, Any], max_output: int) -> str:
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate(context):
            length += len(part)
            if length > max_output:
                raise RequestError(
                    "messages", f"the rendered prompt is longer than {max_output} characters"
                )
            parts.append(part)
    except RequestError:
        raise
    except jinja2.exceptions.SecurityError as why:
        raise ModelError(f"chat_template: does what a template must not do: {_line(why)}") from None
    except Exception as why:
        # Whatever a template does with messages that it was not written for: raise_exception, a
        # missing key, a type.
        raise RequestError("messages", f"the chat template refuses them: {_line(why)}") from None
    return "".join(parts)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages", f"got {show(messages)}, must be a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(
            "messages", f"has {len(messages)} messages, allowed is 1 to {MAX_MESSAGES}"
        )
    return [
        _checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)
    ]


def _checked_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(where, f"got {show(message)}, must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role", f"got {show(role)}, must be text such as system, user or assistant"
        )
    if not all(isinstance(key, str) for key in message):
        raise RequestError(where, f"has a key that is not text: {show(list(message))}")
    # Clients send null for what they do not use, and templates test whether a key is there.
    present = {str.__str__(key): value for key, value in message.items() if value is not None}
    if "content" not in present and "refusal" in present:
        present["content"] = present["refusal"]
    if "content" not in present and not present.keys() & {"tool_calls", *REASONING}:
        raise RequestError(f"{where}.content", "is missing, must be text or a list of text parts")
    plain = {
        key: content_text(f"{where}.content", value) if key == "content" else _plain(where, value)
        for key, value in present.items()
    }
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def content_text(where: str, content: Any) -> str:
    """The text of a message's content, which may be a list of parts. Raises RequestError."""
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise RequestError(where, f"got {show(content)}, must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part
        if isinstance(kind, str) and kind in TEXT_PARTS:
            text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}]",
                f"got {show(part)}, must be a text part: this model reads only text",
            )
        texts.append(text)
    return "\n".join(str.__str__(text) for text in texts)


def _plain(where: str, value: Any, depth: int = 0) -> Any:
    """A copy of JSON data in exact built-in types: nothing else may reach a template, which can
    call methods.
    """
    if depth > MAX_DEPTH:
        raise RequestError(where, f"is nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): _plain(where, item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, item, depth + 1) for item in value]
    raise RequestError(where, f"has {show(value)}, must be JSON data")


def _line(why: BaseException) -> str:
    return show(" ".join(str(why).split()) or type(why).__name__, 240)


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training; here it only scopes
    variables, as it does there.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global `dict`: the calls that templates make, without a class to climb up from."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without attributes that begin with an underscore, which would reach
    Python's internals.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=1)` is a legal call
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as why:
        raise ModelError(f"chat_template: line {why.lineno}: {_line(why)}") from None
    except Exception as why:
        raise ModelError(f"chat_template: cannot be compiled: {_line(why)}") from None
