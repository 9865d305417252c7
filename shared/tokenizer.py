"""Text to token ids and back, from tokenizer.json, as transformers 5 reads it.

tokenizer.json decides how text is split, which special tokens surround it and how ids become text.
transformers builds those parts anew for a few class names (`LlamaTokenizer`, `Qwen2Tokenizer`);
that is equal for files that it wrote itself, and for others the file is what the model was trained
with. No code that comes with a model is run.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers

from .errors import ModelError, PromptTooLong, RequestError
from .models.fields import need_folder, read_json, show

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a role, in the order in which transformers adds them."""

LONG = 4096
"""Characters of a text that takes more than a few milliseconds to split."""
PIECE = 1 << 16
"""Characters of a text that is likely too long that are split at a time: they take some 20 MB."""
BOUNDARY_TOKENS = 16
"""Tokens that a piece may have more for its ends, where words are cut."""
CHARS_PER_TOKEN = 8
"""Characters a token, from which on a text is likely too long."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How token texts become text, in a form that can be applied token by token.

    bytes: each token is some bytes of UTF-8 (byte-level BPE). text: each is text after the
    replacements in `replace`, or one byte if `byte_fallback`; `separator` goes between tokens, the
    first token loses the characters in `first_drops`, and the whole text loses up to `strip[1]`
    leading `strip[0]`. other: only the library knows.
    """

    kind: Literal["bytes", "text", "other"]
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    separator: str = ""
    first_drops: str = ""
    strip: tuple[str, int] = ("", 0)


class Tokenizer:
    """A model's tokenizer. Build it with `load`. Safe to use from several threads.

    `special_tokens` maps roles such as bos_token to texts, `special_ids` are all ids that
    `skip_special_tokens` drops. `chat_templates` maps names (usually only "default") to Jinja
    sources. `response_template` is the model's own description of its output, unchecked JSON, or
    None. `rule` is how ids become text.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        response_template: Any = None,
    ) -> None:
        self._backend = backend
        self.response_template = response_template
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the highest id. A model's embedding may have more rows, and must not
        have fewer.
        """
        self.rule = _decode_rule(
            json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        )
        self._pieces: dict[int, bytes | str | None] = {}

    @property
    def front(self) -> list[int]:
        """The special tokens that `encode` puts before each text."""
        own = self.encode("a", False)
        ids = self.encode("a")
        places = [place for place in range(len(ids)) if ids[place : place + len(own)] == own]
        return ids[: places[0]] if places else []

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, None if there is no tokenizer.json. Raises
        ModelNotFound, ModelError.
        """
        path = need_folder(folder)
        if not os.path.exists(path / "tokenizer.json"):
            return None
        backend = _read_backend(path / "tokenizer.json")
        config_path = path / "tokenizer_config.json"
        config = read_json(config_path) if os.path.exists(config_path) else {}
        named = _add_tokens(backend, config, path)
        if config.get("clean_up_tokenization_spaces") and not isinstance(
            backend.model, tokenizers.models.BPE
        ):
            raise ModelError(
                f"{config_path}: clean_up_tokenization_spaces is true, allowed: false or absent, "
                "but for BPE models, where it has no effect"
            )
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        return cls(backend, named, _chat_templates(path, config), config.get("response_template"))

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """The ids of a text. Raises RequestError if it is no text, or not valid Unicode, or has
        more than `most` tokens: then no list of them is made.
        """
        if not isinstance(text, str):
            raise RequestError("prompt", f"got {type(text).__name__}, must be text")
        try:
            if most is not None and len(text) > CHARS_PER_TOKEN * most:
                self._refuse_far_too_long(text, most)
            count, ids = self._split(text, add_special_tokens, most)
        except TypeError:  # what the library says to a lone surrogate, which UTF-8 cannot hold
            raise RequestError(
                "prompt", "is not valid Unicode: it has half of a surrogate pair"
            ) from None
        finally:
            if len(text) >= PIECE:
                _return_memory()
        if not ids and count:
            raise PromptTooLong("prompt", f"got {count} tokens, allowed is at most {most}")
        return ids

    def _split(
        self, text: str, add_special_tokens: bool, most: int | None
    ) -> tuple[int, list[int]]:
        """The number of tokens of a text, and the tokens, none of more than `most`."""
        if len(text) < LONG:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # alone this call lets other threads of Python run meanwhile
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        count = len(encoding)
        return count, [] if most is not None and count > most else encoding.ids

    def _refuse_far_too_long(self, text: str, most: int) -> None:
        """Raise PromptTooLong for a text whose pieces have more than twice `most` tokens, before
        all of it is split: a token takes some 300 bytes meanwhile.

        Where a text is cut it may have some tokens more than in one piece, never half of all.
        """
        total = 0
        for start in range(0, len(text), PIECE):
            count, _ = self._split(text[start : start + PIECE], False, 0)
            total += max(count - BOUNDARY_TOKENS, 0)
            if total > 2 * most:
                message = f"got more than {2 * most} tokens, allowed is at most {most}"
                raise PromptTooLong("prompt", message)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a list of ids. Ids that no token has stand for nothing. Raises
        RequestError for what is no id.
        """
        try:
            if len(ids) < LONG:
                text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:  # as in `encode`: other threads run meanwhile
                (text,) = self._backend.decode_batch(
                    [list(ids)], skip_special_tokens=skip_special_tokens
                )
        except (TypeError, OverflowError):
            raise RequestError(
                "tokens", f"got {show(list(ids))}, must be a list of token ids"
            ) from None
        return text

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's entry of an id, such as "Ġthe" or "<0x0A>"; None if there is none."""
        try:
            text: str | None = self._backend.id_to_token(token_id)
        except OverflowError:
            return None
        return text

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry, None if there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text."""
        return (
            self.token_id(self.special_tokens["bos_token"])
            if "bos_token" in self.special_tokens
            else None
        )

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text."""
        return (
            self.token_id(self.special_tokens["eos_token"])
            if "eos_token" in self.special_tokens
            else None
        )

    def piece(self, token_id: int) -> bytes | str | None:
        """What one token adds to a text by `rule`, but for what depends on its place: bytes,
        text, or None.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            text = self.token_text(token_id)
            piece = self._pieces[token_id] = None if text is None else _piece(self.rule, text)
            return piece


def _return_memory() -> None:
    """Give the system what this process has freed. Of threads that have split large texts it would
    stay theirs: glibc has a heap for each, and gives back what lies at its end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _piece(rule: DecodeRule, text: str) -> bytes | str:
    if rule.kind == "bytes":
        try:
            return bytes(_BYTE_OF[character] for character in text)
        except KeyError:  # an added token is its own text, unless every character could be a byte
            return text.encode()
    for old, new in rule.replace:
        text = text.replace(old, new)
    if rule.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match[1], 16)])
    return text


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes, as GPT-2's `bytes_to_unicode` has them: visible
    ones for themselves.
    """
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


_BYTE_OF = _byte_alphabet()


def _decode_rule(decoder: Mapping[str, Any] | None) -> DecodeRule:
    """The rule for the decoder of a tokenizer.json."""
    if decoder is None:
        return DecodeRule("text", separator=" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRule("bytes")
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        drops = "" if steps[0]["prepend_scheme"] == "never" else mark
        return DecodeRule("text", replace=((mark, " "),), first_drops=drops)
    # What Llama 2 and its kin have: replacements, bytes, and then, on the text as a whole, one
    # leading space less.
    if not re.fullmatch(
        r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(f"{kind} " for kind in kinds)
    ):
        return DecodeRule("other")
    replace, strip = [], ("", 0)
    for step in steps:
        if step["type"] == "Replace":
            if set(step["pattern"]) != {"String"}:
                return DecodeRule("other")
            replace.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step["stop"]:
                return DecodeRule("other")
            strip = (step["content"], step["start"])
    return DecodeRule(
        "text", replace=tuple(replace), byte_fallback="ByteFallback" in kinds, strip=strip
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # A stored limit or padding is meant for training batches; transformers lifts both for a
        # plain call, too.
        backend.no_truncation()
        backend.no_padding()
    except OSError as why:
        raise ModelError(f"{path}: cannot be read: {why.strerror or why}") from None
    except BaseException as why:
        # The library raises plain Exception, and a panic of its Rust code is not even that.
        if not isinstance(why, Exception) and type(why).__name__ != "PanicException":
            raise
        raise ModelError(f"{path}: is not a valid tokenizer: {show(str(why), 160)}") from None
    if backend.get_vocab_size(with_added_tokens=False) == 0:
        raise ModelError(f"{path}: model.vocab is empty, at least one token is needed")
    return backend


def _add_tokens(backend: Any, config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Add the tokens that tokenizer.json lacks, and return the texts of those with a role.

    Follows `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` of
    transformers 5.
    """
    declared, roles, extra = _read_tokens(config, folder)
    present = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    # those that are there already take on the flags that they have here
    adding = declared or present
    known = {token.content for token in [*present, *adding]}
    for token in [*roles.values(), *extra]:
        if token.content not in known:
            known.add(token.content)
            adding.append(token)
    names = {token.content for token in roles.values()}
    for token in adding:
        token.special = token.special or token.content in names
    backend.add_tokens(adding)
    return {role: token.content for role, token in roles.items()}


def _read_tokens(
    config: Mapping[str, Any], folder: Path
) -> tuple[
    list[tokenizers.AddedToken], dict[str, tokenizers.AddedToken], list[tokenizers.AddedToken]
]:
    """Tokens that tokenizer_config.json declares, those with a role, and special ones without."""
    where = folder / "tokenizer_config.json"
    settings, old_map = dict(config), folder / "special_tokens_map.json"
    declared = settings.get("added_tokens_decoder")
    if declared is None and os.path.exists(old_map):
        settings |= read_json(old_map)
    declared = declared or {}
    if not isinstance(declared, dict) or not all(
        re.fullmatch(r"[0-9]{1,9}", key) for key in declared
    ):
        raise ModelError(
            f"{where}: added_tokens_decoder is {show(declared)}, must map ids to tokens"
        )
    in_order = sorted(declared.items(), key=lambda item: int(item[0]))
    roles = {role: settings[role] for role in NAMED if settings.get(role) is not None}
    for name, value in settings.items():
        # A role of the model's own, such as image_token; add_bos_token and the like are not tokens.
        if name.endswith("_token") and isinstance(value, (str, dict)):
            roles.setdefault(name, value)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        roles, extra = roles | extra, []
    if not isinstance(extra, list):
        raise ModelError(
            f"{where}: extra_special_tokens is {show(extra)}, must be a list of tokens"
        )
    return (
        [_added(value, f"{where}: added_tokens_decoder", special=False) for _, value in in_order],
        {
            role: _added(value, f"{where}: {show(role)}", special=False)
            for role, value in roles.items()
        },
        [_added(value, f"{where}: extra_special_tokens", special=True) for value in extra],
    )


def _added(value: Any, where: str, special: bool) -> tokenizers.AddedToken:
    """A token from its text, which makes it a special one, or from an object that may say
    whether it is `special`.
    """
    given = {"content": value, "special": True} if isinstance(value, str) else value
    try:
        fields = {"special": special} | {key: given[key] for key in dict(given) if key != "__type"}
        return tokenizers.AddedToken(str(fields.pop("content")), **fields)
    # no object, or none of a token; half of a surrogate pair
    except (TypeError, KeyError, ValueError):
        raise ModelError(
            f"{where} is {show(value)}, must be a token: text, or an object with its content"
        ) from None


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own go before the entry in tokenizer_config.json."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    found = {}
    for name, path in paths.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except OSError as why:
            raise ModelError(f"{path}: cannot be read: {why.strerror or why}") from None
        except ValueError:
            raise ModelError(f"{path}: is not UTF-8 text") from None
    if found:
        return found
    entry, where = config.get("chat_template"), folder / "tokenizer_config.json"
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        named = {item["name"]: item["template"] for item in entry}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(part, str) for item in named.items() for part in item):
        raise ModelError(
            f"{where}: chat_template is {show(entry)}, must be text or a list of name and template"
        )
    return named
