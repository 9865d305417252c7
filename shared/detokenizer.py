"""Token ids to text while they arrive, and the search for stop strings in it.

Instead of decoding a window of tokens again and again, the tokenizer's decoder is applied token by
token (`DecodeRule`): every token costs the same, and what was emitted is final.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from .errors import InternalError
from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_INCOMPLETE_TOKENS = 8
"""Tokens that a character may be spread over where only the library can decode. UTF-8 has at
most 4 bytes.
"""


class Detokenizer:
    """The text of one completion. `prompt_ids` are its context: a character or a space may depend
    on the prompt's end.

    `append` and `finish` return new text. All of it together is the text of prompt and completion,
    less what the prompt alone settles, except that it ends at the first stop string: the one that
    is complete first, and of those that end with the same character, the longest. The stop string
    itself is left out unless `include_stop`. A stop string that is complete within the first
    `min_tokens` tokens does not count.

    The text equals `Tokenizer.decode` for every sequence of tokens with one exception, which
    streaming forces: the library turns a run of byte tokens such as <0x0A> into U+FFFD as a whole
    if any part of it is not UTF-8. Here, characters that were complete before the first wrong byte
    stay, since they were emitted; the rest is the same.

    Where `searches` is false, stop strings are not looked for; it is changed behind `settle`.
    `stopped` is the stop string that was found, `num_tokens` counts the tokens that were taken,
    with the one that completed it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self.searches = True
        self.num_tokens = 0
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._finished = False
        self._stream = _open_stream(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = _StopMatcher(stop) if stop else None
        self._held = ""

    def show(self, token_ids: Collection[int]) -> None:
        """Have these special tokens in the text, though others are skipped. Before any token."""
        self._stream.skipped -= frozenset(token_ids)

    def hide(self, token_ids: Collection[int]) -> None:
        """Skip these tokens, though others are in the text. Before any token."""
        self._stream.skipped |= frozenset(token_ids)

    def append(self, token_ids: Iterable[int]) -> str:
        """Take tokens, return the text that they settle. Tokens after one that completes a stop
        string are ignored.
        """
        if self._finished:
            raise InternalError("detokenizer: tokens after finish()")
        text = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            text += self._release(self._stream.push(token_id))
        return text

    def settle(self) -> str:
        """The text that was held back, where what follows does not go on with it: neither a
        character nor a stop string is made of both.
        """
        if self.stopped is not None:
            return ""
        text = self._release(self._stream.flush())
        if self.stopped is None and self._matcher is not None:
            text, self._held = text + self._held, ""
            self._matcher.forget()
        return text

    def finish(self) -> str:
        """The text that was held back: incomplete characters as U+FFFD, and what might have
        become a stop string.
        """
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        text = self._release(self._stream.flush())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        """What may be emitted once `text` follows. Keeps what could be the start of a stop
        string.
        """
        if self._matcher is None or not text or not self.searches:
            return text
        known, self._held = self._held + text, ""
        stop, end = self._matcher.scan(text, self.num_tokens > self._min_tokens)
        if stop is not None:
            self.stopped = stop
            end += len(known) - len(text)
            return known[: end if self._include_stop else end - len(stop)]
        settled = len(known) - self._matcher.pending
        self._held = known[settled:]
        return known[:settled]


class _StopMatcher:
    """Finds any of several strings in a text that arrives in parts, in one pass (Aho and Corasick,
    1975).

    A state is a prefix of a stop string: the longest one that the text so far ends with. `pending`
    is its length.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        ends: dict[int, str] = {}
        for string in stop:
            state = 0
            for character in string:
                state = self._next[state].setdefault(character, len(self._next))
                if state == len(self._next):
                    self._next.append({})
            ends[state] = string
        self._fail, self._depth = ([0] * len(self._next) for _ in range(2))
        self._found = [ends.get(state) for state in range(len(self._next))]
        self._link_failures()
        self._state = 0

    def _link_failures(self) -> None:
        """For each state, the longest shorter suffix of it that is a state, and what ends there."""
        queue = [0]
        for state in queue:  # breadth first: it grows while it is read
            for character, child in self._next[state].items():
                self._depth[child] = self._depth[state] + 1
                self._fail[child] = self._follow(self._fail[state], character) if state else 0
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)

    def _follow(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._depth[self._state]

    def forget(self) -> None:
        """Begin anew: what was read is part of no string."""
        self._state = 0

    def scan(self, text: str, active: bool) -> tuple[str | None, int]:
        """Read on. The first stop string that ends in `text` and where it ends; (None, 0) if
        none, or not `active`.
        """
        for end, character in enumerate(text, 1):
            self._state = self._follow(self._state, character)
            found = self._found[self._state]
            if found is not None and active:
                return found, end
        return None, 0


class _Stream(Protocol):
    """Tokens in, settled text out, but for `skipped`. `flush` gives the rest once no token
    follows.
    """

    skipped: frozenset[int]

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def _open_stream(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> _Stream:
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    if tokenizer.rule.kind == "bytes":
        return _ByteStream(tokenizer, prompt_ids, skipped)
    if tokenizer.rule.kind == "text":
        return _TextStream(tokenizer, prompt_ids, skipped)
    return _WindowStream(tokenizer, prompt_ids, skipped)


class _ByteStream:
    """Byte-level BPE: the tokens' bytes in a row are UTF-8; what is not becomes U+FFFD as
    Unicode recommends.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._piece = tokenizer.piece
        self.skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):  # an incomplete character is within the last 3 bytes
            tail = self._bytes(token_id) + tail
            if len(tail) >= 3:
                break
        self._decoder.decode(tail)

    def _bytes(self, token_id: int) -> bytes:
        piece = None if token_id in self.skipped else self._piece(token_id)
        return piece if isinstance(piece, bytes) else b""

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TextStream:
    """Tokens that are text, some of them single bytes (Llama 2). A run of byte tokens is UTF-8,
    or wrong as a whole.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._rule = tokenizer.rule
        self.skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._incomplete = 0  # bytes that wait for more
        self._wrong = False  # whether the run has a byte that cannot be UTF-8
        self._started = False
        self._strip = self._rule.strip[1]
        self._read_prompt(prompt_ids)

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Reach the state after the prompt. Only its first text and its last run of bytes
        matter.
        """
        tail = len(prompt_ids)
        while tail and not isinstance(self._piece(prompt_ids[tail - 1]), str):
            tail -= 1
        read = 0
        while read < tail - 1 and self._strip:
            self.push(prompt_ids[read])
            read += 1
        for token_id in prompt_ids[max(read, tail - 1) :]:
            self.push(token_id)

    def _piece(self, token_id: int) -> bytes | str | None:
        return None if token_id in self.skipped else self._tokenizer.piece(token_id)

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            text = self._byte(piece)
        elif self._started:
            text = self._end_run() + self._rule.separator + piece
        else:
            text = self._first(token_id, piece)
        self._started = True
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        return self._end_run()

    def _first(self, token_id: int, piece: str) -> str:
        if not self._rule.first_drops:
            return piece
        return (self._tokenizer.token_text(token_id) or "").replace(self._rule.first_drops, "")

    def _byte(self, byte: bytes) -> str:
        self._incomplete += 1
        if not self._wrong:
            try:
                text = self._decoder.decode(byte)
            except UnicodeDecodeError:
                self._wrong = True
            else:
                self._incomplete = 0 if text else self._incomplete
                return text
        text, self._incomplete = REPLACEMENT * self._incomplete, 0
        return text

    def _end_run(self) -> str:
        text = REPLACEMENT * self._incomplete
        if self._incomplete or self._wrong:
            self._decoder.reset()
            self._incomplete, self._wrong = 0, False
        return text

    def _stripped(self, text: str) -> str:
        while text and self._strip:
            if text[0] != self._rule.strip[0]:
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class _WindowStream:
    """Any other decoder: each time, what the last tokens become with the new one, less what they
    become without it.
    """

    CONTEXT = 6

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.skipped = skipped
        self._context = list(prompt_ids[-self.CONTEXT :])
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._new) < _INCOMPLETE_TOKENS:
            return ""
        return self._settled(text)

    def flush(self) -> str:
        return self._settled(self._text())

    def _settled(self, text: str) -> str:
        self._context = [*self._context, *self._new][-self.CONTEXT :]
        self._new = []
        return text

    def _text(self) -> str:
        before = self._decode(self._context)
        after = self._decode([*self._context, *self._new])
        return after[len(before) :]

    def _decode(self, token_ids: Iterable[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self.skipped]
        return self._tokenizer.decode(shown, False)
