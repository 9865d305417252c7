"""Texts that an output may not have, as the tokens that the sampler knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..shared.errors import RequestError
from ..shared.sampling_params import MAX_BANNED_LENGTH, SamplingParams
from ..shared.tokenizer import Tokenizer


def sequences_of(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each word as a text begins with it and as it stands behind a space, which often
    is part of a token. Raises RequestError.
    """
    bare = [word.lstrip() or word for word in words]
    texts = [*bare, *(f" {word}" for word in bare if word.strip())]
    try:
        found = dict.fromkeys(tuple(tokenizer.encode(text, False)) for text in texts)
    except RequestError as error:
        raise RequestError("bad_words", error.reason) from None
    if (longest := max(map(len, found), default=0)) > MAX_BANNED_LENGTH:
        raise RequestError(
            "bad_words", f"has a text of {longest} tokens, at most {MAX_BANNED_LENGTH}"
        )
    return [ids for ids in found if ids]


def banning(params: SamplingParams, sequences: Sequence[tuple[int, ...]]) -> SamplingParams:
    """The settings with what `sequences_of` gave in the place of their words. Raises
    RequestError.
    """
    single = tuple(ids[0] for ids in sequences if len(ids) == 1)
    longer = tuple(ids for ids in sequences if len(ids) > 1)
    try:
        return replace(
            params,
            bad_words=(),
            banned_token_ids=params.banned_token_ids + single,
            banned_sequences=params.banned_sequences + longer,
        )
    except RequestError as error:
        raise RequestError("bad_words", error.reason) from None
