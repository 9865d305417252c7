"""Which marks of a format are tokens that a text is without."""

from __future__ import annotations

from ...shared.tokenizer import Tokenizer
from .table import Format


def missing_marks(form: Format, tokenizer: Tokenizer) -> list[str]:
    """The marks of a format that takes them for tokens, and that are no special tokens here."""
    marks = form.marks if form.messages else ()
    return [mark for mark in marks if mark not in hidden_marks(form, tokenizer).values()]


def searched_marks(form: Format, tokenizer: Tokenizer | None) -> dict[int, bool | None]:
    """The marks of messages by id, and whether stop strings are looked for behind each: not in
    headers, of which a client sees nothing. None: as before it.
    """
    rows = form.messages
    if rows is None:
        return {}
    return {
        token_id: None if mark == rows.constrain else mark == rows.message
        for token_id, mark in hidden_marks(form, tokenizer).items()
    }


def shown_marks(form: Format, tokenizer: Tokenizer | None) -> dict[int, str]:
    """The hidden marks of other formats, by id. What looks like a call and is none is content, mark
    and all: a text has them, so that stop strings are found in them.
    """
    return hidden_marks(form, tokenizer) if form.messages is None else {}


def hidden_marks(form: Format, tokenizer: Tokenizer | None) -> dict[int, str]:
    """The marks that are special tokens, by id: where these are skipped, a text is without them.

    A parser then has to be told of them, each at its place in the text.
    """
    if tokenizer is None:
        return {}
    ids = [(tokenizer.token_id(mark), mark) for mark in form.marks]
    return {
        token_id: mark
        for token_id, mark in ids
        if token_id is not None and token_id in tokenizer.special_ids
    }
