"""Models of several parts, of which the text decoder alone runs: where its config and its tensors
lie.

Sources: `configuration_*.py` and `conversion_mapping.py` of transformers 5. Of the outer config it
reads the dtype and whether embeddings are tied, of the inner one all else; version 4 read the inner
one for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ...errors import InternalError
from ..config import ModelConfig
from ..fields import Fields, show
from ..spec import Model
from ..table import Parameter, ParameterTable, Part
from . import dense, family_of, module_of
from .family import Family

SHARED = (("dtype", "torch_dtype"), ("tie_word_embeddings",), ("eos_token_id",), ("bos_token_id",))
"""Fields, with their other names, that stand inside or outside: where both say something, they
must agree.
"""
TYPES = frozenset({"architectures", "model_type"})
IMAGE_TOKEN = ("image_token_index", "image_token_id")
VIDEO_TOKEN = ("video_token_id",)

Spelling = Mapping[str, str]
"""Beginnings of tensors' names: what the text model has alone -> what it has as a part."""
SPELLINGS: tuple[Spelling, ...] = (
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
    # published files
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
"""Of models that transformers made of a text model and a vision tower."""
LEFT_OUT = {
    "vision tower": ("model.vision_tower.*", "vision_tower.*"),
    "multi-modal projector": ("model.multi_modal_projector.*", "multi_modal_projector.*"),
}
"""Their parts that do not run."""


def nested(
    *texts: str,
    spellings: Sequence[Spelling],
    left_out: Mapping[str, Sequence[str]],
    image_token: int,
    harmless: frozenset[str],
    within: str = "text_config",
    unread: Sequence[str] = (),
    video_token: int | None = None,
    ties_outside: bool = False,
    flat: bool = False,
) -> Family:
    """The family of models that have a text model of one of these architectures as a part, which
    alone runs. One that does not say its type is of the first.

    Its config is the field `within`. A checkpoint has its tensors in one of `spellings`, the first
    of which is that of transformers in memory. `left_out` names the parts that do not run, and the
    patterns of their tensors; `harmless` are fields of theirs. `image_token` is the id that stands
    for images in a prompt where config.json does not say it, and `video_token` that for videos.
    `unread` are fields of the text model that the model of several parts does not apply.
    `ties_outside`: the outer config alone says whether embeddings are tied. `flat`: where the field
    `within` is absent, the fields of the text model stand beside those of the other parts.
    """
    own = frozenset({within, *IMAGE_TOKEN})
    own |= {*VIDEO_TOKEN} if video_token is not None else frozenset()

    def read(fields: Fields) -> ModelConfig:
        if flat and fields.get(within) is None:
            text, inner = texts[0], fields.replaced(dict.fromkeys(own | harmless | TYPES))
        else:
            text, inner = _inside(fields, within, texts, ties_outside)
        for name in unread:
            inner.only(name)
        family_of(text).refuse_unknown(inner)
        config = family_of(text).read(inner)
        images = _tokens(fields, IMAGE_TOKEN, config.vocab_size, image_token)
        if video_token is not None:
            images += _tokens(fields, VIDEO_TOKEN, config.vocab_size, video_token)
        return replace(
            config, text_architecture=text, image_token_ids=images, left_out=tuple(left_out)
        )

    def model(config: ModelConfig) -> Model:
        return family_of(config.text_architecture).model(config)

    def parameters(config: ModelConfig) -> ParameterTable:
        alone = family_of(config.text_architecture).parameters(config)
        copies = [(_renamed(key, names), of) for key, of in alone.copies for names in spellings]
        return ParameterTable(
            tuple(_spelt(parameter, spellings) for parameter in alone),
            (*alone.ignored, *chain(*left_out.values())),
            tuple(copies),
        )

    return Family(read=read, model=model, parameters=parameters, fields=own, harmless=harmless)


def _inside(
    outer: Fields, within: str, texts: Sequence[str], ties_outside: bool
) -> tuple[str, Fields]:
    """The architecture of the text model, and its config with what the outer one says in its
    place.
    """
    raw = outer.need(within, None)
    if not isinstance(raw, dict):
        outer.fail(within, f"is {show(raw)}, must be an object")
    if ties_outside:
        raw = raw | {"tie_word_embeddings": None}
    inner = Fields(raw, outer.where, outer.family, f"{within}.")
    by_type = {module_of(text): text for text in texts}
    inner.only("model_type", *by_type)
    # transformers takes a text model that does not say its type for the first.
    text = by_type.get(inner.get("model_type"), texts[0])
    # transformers 4 may write that of the whole into its part.
    if inner.get("architectures") not in (None, [], [text], outer.get("architectures")):
        inner.refuse("architectures", inner.get("architectures"), f"{text} or absent")
    merged, outside = dict(raw), set()
    for names in SHARED:
        name, value = _said(outer, names)
        if value is None:
            continue
        other, inside = _said(inner, names)
        # transformers 5 writes the text model's default, false, beside the outer field, which alone
        # it reads.
        unread = name == "tie_word_embeddings" and inside is False
        if inside is not None and not unread and not _agree(value, inside):
            _contradicts(outer, name, inner, other)
        merged |= dict.fromkeys(names) | {name: value}
        outside.add(name)
    unused = {"sliding_window"} if outer.get("use_sliding_window") is False else set()
    for name in dense.READ - TYPES - unused - {*chain(*SHARED)}:
        if outer.get(name) not in (None, inner.get(name)):
            _contradicts(outer, name, inner, name)
    return text, Fields(merged, outer.where, outer.family, f"{within}.", frozenset(outside))


def _said(fields: Fields, names: Sequence[str]) -> tuple[str, Any]:
    """The first of `names` that has a value, and that; or the first and None."""
    return next(
        ((name, fields.get(name)) for name in names if fields.get(name) is not None),
        (names[0], None),
    )


def _agree(outside: Any, inside: Any) -> bool:
    """Whether both say the same. One end of a text among several outside is no contradiction: what
    is outside counts.
    """
    one, other = _plain(outside), _plain(inside)
    return bool(one == other or (isinstance(one, list) and other in one))


def _plain(value: Any) -> Any:
    """What may be written in two ways, in one: a dtype with its module, a list of one id."""
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _contradicts(one: Fields, name: str, other: Fields, known: str) -> None:
    value = other.get(known)
    one.refuse(
        name,
        one.get(name),
        f"absent, or as {other.path(known)} ({'absent' if value is None else show(value)})",
    )


def _tokens(fields: Fields, names: Sequence[str], vocab_size: int, default: int) -> tuple[int, ...]:
    """Ids that stand for images, or videos, by fields that must agree. The default may be one that
    the vocabulary has not.
    """
    found = [
        (name, fields.token_ids(name, vocab_size)) for name in names if fields.get(name) is not None
    ]
    for name, ids in found[1:]:
        if ids != found[0][1]:
            _contradicts(fields, name, fields, found[0][0])
    if found:
        return tuple(found[0][1])
    return (default,) if default < vocab_size else ()


def _spelt(parameter: Parameter, spellings: Sequence[Spelling]) -> Parameter:
    """The parameter under the names that it has as a part."""
    every = [parts for parts in (parameter.parts, *parameter.alternatives) if _is_whole(parts)]
    usual, *others = [
        tuple(_part(part, names) for part in parts) for parts in every for names in spellings
    ]
    return replace(parameter, parts=usual, alternatives=tuple(others))


def _is_whole(parts: Sequence[Part]) -> bool:
    """Whether parts have the names of a model that was saved with its head."""
    return all(part.key.startswith(("model.", "lm_head.")) for part in parts)


def _part(part: Part, names: Spelling) -> Part:
    return replace(part, key=_renamed(part.key, names))


def _renamed(key: str, names: Spelling) -> str:
    for alone, within in names.items():
        if key.startswith(alone):
            return within + key.removeprefix(alone)
    raise InternalError(f"tensor {key}: begins with none of {', '.join(names)}")
