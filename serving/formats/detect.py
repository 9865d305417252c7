"""Which format a model has."""

from __future__ import annotations

from ...shared.tokenizer import Tokenizer
from .marks import missing_marks
from .response_template import from_response_template
from .table import FORMATS, Format


def detect_format(tokenizer: Tokenizer, template: str | None = None) -> Format:
    """The format of a model, by its tokens and its chat template (`template`, or its own);
    "none" if nothing is known of it. A `response_template` of its own goes first.

    A template that marks calls in a way that is none of ours leaves reasoning alone.
    """
    declared = from_response_template(tokenizer.response_template)
    if declared is not None:
        return declared
    if not missing_marks(FORMATS["harmony"], tokenizer):
        return FORMATS["harmony"]
    own = tokenizer.chat_templates
    source = template or own.get("tool_use") or own.get("default") or ""

    def has(mark: str) -> bool:
        return tokenizer.token_id(mark) is not None or mark in source

    if has("[TOOL_CALLS]"):
        return FORMATS["mistral"]
    if has("<|python_tag|>"):
        return FORMATS["llama3_json"]
    if has("<tool_call>") and "<function=" in source:
        return FORMATS["qwen3_coder"]
    if has("<tool_call>") and "<arg_key>" in source:
        return FORMATS["glm45"]
    if has("<tool_call>"):
        return FORMATS["qwen" if has("<|im_start|>") else "hermes"]
    return FORMATS["think" if has("</think>") else "none"]
