"""Conversations on their way to prompts: rendered by a chat template, and made tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..shared.chat import check_template, render_chat
from ..shared.errors import ConfigError, ModelError, RequestError
from ..shared.models.fields import show
from ..shared.tokenizer import Tokenizer
from .batch import need_tokenizer

Message = Mapping[str, Any]
"""One message of a conversation: `role` and `content`, and what else a template reads."""


MARKS = ("{{", "{%")
"""What a template has, and hardly any path."""


def read_template(given: str | None) -> str | None:
    """The template that `--chat-template` gives: a file of it, or its text. None where it gives
    none. Raises ConfigError.
    """
    if given is None:
        return None
    try:
        with open(given, encoding="utf-8-sig") as file:
            source, where = file.read(), given
    except UnicodeDecodeError:
        raise ConfigError(f"chat-template: {given} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a text may have what no path can have
        if not any(mark in given for mark in MARKS):
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"chat-template: cannot read {show(given)}: {why}; allowed is a file or the text "
                f"of a template, which has {' or '.join(MARKS)}"
            ) from None
        source, where = given, "the text"
    try:
        check_template(source)
    except ModelError as error:
        why = str(error).removeprefix("chat_template: ")
        raise ConfigError(f"chat-template: {where}: {why}") from None
    return source


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How conversations are rendered; the fields are the options of `LLM.chat_prompts`."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def prompts(
        self,
        tokenizer: Tokenizer | None,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        return_errors: bool = False,
    ) -> list[Any]:
        """The prompts of one conversation or several, for `LLM.generate`. See
        `LLM.chat_prompts`.
        """
        tokenizer = need_tokenizer(tokenizer, "messages", "there are no chats")
        prompts: list[Any] = []
        for conversation in _conversations(messages):
            try:
                text = render_chat(
                    tokenizer,
                    conversation,
                    tools=self.tools,
                    template=self.chat_template,
                    variables=self.chat_template_kwargs,
                    add_generation_prompt=self.add_generation_prompt,
                    continue_final_message=self.continue_final_message,
                )
                ids = tokenizer.encode(text, add_special_tokens=False)
                prompts.append({"prompt": text, "prompt_token_ids": ids})
            except RequestError as error:
                if not return_errors:
                    raise
                prompts.append(error)
        return prompts


def _conversations(messages: Any) -> Sequence[Any]:
    """The conversations in `messages`, which are one of them, or a list of them."""
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        if any(isinstance(item, Mapping) for item in messages):
            return [messages]
        if all(
            isinstance(item, Sequence) and not isinstance(item, (str, bytes)) for item in messages
        ):
            return messages
    raise RequestError(
        "messages",
        f"got {show(messages)}, must be a list of messages with role and content, or a list of "
        "such lists",
    )
