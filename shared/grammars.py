"""Which tokens may follow, where a request's text must have a form: masks from llguidance.

A matcher belongs to one request and has consumed exactly the tokens that were read back for it, so
a preempted request needs nothing more.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from .banned_sequences import BannedSequences
from .errors import InternalError, RequestError
from .step import mask_words
from .structured_outputs import StructuredOutputs

FIELD = "structured_outputs"
MOST_KEPT = 64
"""Compiled grammars that are kept for later requests."""
MOST_THREADS = 8
"""That make masks, if there are as many cores: 64 masks took 0.80 ms with 1, 0.52 with 4, 0.47 with
8 and 0.40 with 16 of 16 cores.
"""
MOST_LEXERS = 8
"""Of one grammar, and no more than threads. Copies of a matcher share its lexer and the lock of
that, so their masks are made one after another; a text goes to the lexer whose turn it is.
"""
LEXERS_S = 0.02
"""How long compiling a grammar again, for one more lexer, may have taken in all."""
FEW = 8
"""Texts that are looked at without a thread."""
SWITCH_S = 1e-5
"""How long the thread of a look waits for Python's lock, which it needs three times for a moment:
usually it is 5 ms.
"""
WHITESPACE = r"[ \n\t]{0,20}"
"""Between parts of JSON. Without a bound a model may go on with blanks for ever."""

JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
"""How the library reads a schema, whatever the schema's own `x-guidance` says."""

NO_ONE_OF = (
    "oneOf whose branches may overlap is not known; allowed are anyOf, and oneOf of branches that "
    "exclude each other"
)
_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)")

NewMasks = Callable[[int, int], np.ndarray]
"""Memory [count, words] int32, whatever it holds."""


def new_masks(count: int, words: int) -> np.ndarray:
    """As NewMasks."""
    return np.empty((count, words), np.int32)


def is_available() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


class Matcher:
    """The state of one request's text, as it was when its last look was done. `finished`: it is
    complete and nothing can follow. `stuck`: no token may follow, and it is not complete.
    """

    def __init__(
        self,
        matcher: Any,
        base: np.ndarray | None,
        lexer: int = 0,
        banned: BannedSequences | None = None,
    ) -> None:
        self.library = matcher
        """The library's own; None for a text without a form."""
        self.banned = banned
        """What no form says: which tokens may not follow the latest ones."""
        self.lexer = lexer
        """Matchers whose number is the same have one lock."""
        self.finished = self.stuck = False
        self.look: Look | None = None
        """The last look at what may follow, if that is not done."""
        self._base = base
        self._mask: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """[W] int32: the tokens that may follow, bit b of word w for token 32 w + b. Waits for the
        look at them.
        """
        if self.look is not None:
            self.look.done()
        if self._mask is None:
            raise InternalError("nobody has looked at what may follow")
        return self._mask

    def take(self, words: np.ndarray) -> None:
        """Have the tokens `words` [W] that may follow here, of those that may anywhere; whatever
        they are once the text is complete.
        """
        self.look = None
        if self.library is not None:
            # Where none may, the library is in error, and after a token that was none of them.
            self.stuck = self.library.is_error()
            self.finished = not self.stuck and self.library.is_stopped()
        if self._base is not None:
            words = words & self._base
        if self.banned is not None:
            words = self.banned.masked(words)
        self._mask = words
        if not self.plain:
            self.stuck |= not self.finished and not words.any()

    @property
    def plain(self) -> bool:
        """Whether nothing but the form says what may follow."""
        return self._base is None and self.banned is None

    @property
    def error(self) -> str:
        """What the library complains about; empty for nothing."""
        return str(self.library.get_error() or "")


class Task:
    """Work that a thread has been given."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._ends = threading.Lock()
        self._ends.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it; an error is kept."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._ends.release()

    def wait(self) -> None:
        """Until it is done, once. Raises its error."""
        self._ends.acquire()
        if self._error is not None:
            raise self._error


class Helper:
    """A thread that does one piece of work after another. It and who waits for it do next to
    nothing with Python's lock: an executor of Python's took 0.2 ms of a step from both.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._runs = False

    def start(self, work: Callable[[], None]) -> Task:
        """Give it work."""
        if not self._runs:
            self._runs = True
            tasks = self._tasks
            threading.Thread(target=_serve, args=(tasks,), name="masks", daemon=True).start()
            weakref.finalize(self, tasks.put, None)
        task = Task(work)
        self._tasks.put(task)
        return task


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # and with it the masks


class Look:
    """Has several texts take the token that followed, and finds what may follow next, in a thread
    that holds no lock of Python's while it does; until `done`, nobody may touch their matchers.
    `words` [n, W] int32 are the masks.
    """

    def __init__(self, brought: Sequence[tuple[Matcher, int]], words: np.ndarray) -> None:
        self.matchers = [matcher for matcher, _ in brought]
        self.words = words
        self._tokens = [token for _, token in brought]
        self._work: Task | None = None
        self._interval = 0.0
        for matcher in self.matchers:
            matcher.look = self

    def start(self, executor: Any, helper: Helper) -> None:
        """Begin. A few texts take less time than a thread takes to wake: they are done at once."""
        words, matchers, tokens = self.words, self.matchers, self._tokens
        # Threads take neighbours, so those of one lock stand together.
        order = sorted(range(len(matchers)), key=lambda row: matchers[row].lexer)
        followed = [(matchers[row].library, tokens[row]) for row in order]
        places = [(matchers[row].library, row) for row in order]

        def work() -> None:
            executor.consume_token_par(followed)
            executor.unsafe_compute_mask_ptr(
                places, words.ctypes.data, words.strides[0], len(words)
            )

        if len(places) < FEW:
            work()
            self.done()
            return
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._work = helper.start(work)

    @property
    def runs(self) -> bool:
        """Whether a thread is at it, for all that is known."""
        return self._work is not None

    def is_all_of(self, matchers: Sequence[Matcher | None]) -> bool:
        """Whether `words` are their masks, in their order."""
        return len(matchers) == len(self.matchers) and all(
            mine is other and mine.plain
            for mine, other in zip(self.matchers, matchers, strict=True)
        )

    def wait(self) -> None:
        """Until the masks are there."""
        if self._work is not None:
            sys.setswitchinterval(self._interval)
            work, self._work = self._work, None
            work.wait()

    def done(self) -> bool:
        """Wait for it, and have each matcher take what is its own; whether a text has ended."""
        self.wait()
        for matcher, row in zip(self.matchers, self.words, strict=True):
            if matcher.look is self:
                matcher.take(row)
        return any(matcher.finished or matcher.stuck for matcher in self.matchers)


class Compiled(NamedTuple):
    """A grammar before a text's first token."""

    turns: Iterator[Any]
    """The library's matchers, without end; each has a lexer of its own."""
    words: np.ndarray
    """[W] int32: the tokens that may be the first."""


class Grammars:
    """Makes matchers for a model's tokens. `eos_token_ids` end a text that is complete."""

    def __init__(self, folder: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: Any = None
        self._threads: Any = None
        self._helper = Helper()
        self._kept: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the tokenizer, which takes a second for a large one. Raises RequestError if there
        is none, or no library.
        """
        if self._tokenizer is not None:
            return
        if not is_available():
            raise RequestError(FIELD, "needs llguidance: pip install 'twinfer[grammars]'")
        if not self._path.exists():
            raise RequestError(FIELD, "needs a tokenizer, and the model has no tokenizer.json")
        from llguidance import LLExecutor, LLTokenizer

        text = self._path.read_text(encoding="utf-8")
        try:
            self._tokenizer = LLTokenizer(text, self._vocab_size, self._eos or None)
            self._threads = LLExecutor(num_threads=_threads())
        except ValueError as error:
            raise RequestError(
                FIELD, f"the model's tokenizer cannot be used for it: {_line(str(error))}"
            ) from None

    def start(
        self,
        wanted: StructuredOutputs,
        base: np.ndarray | None,
        banned: BannedSequences | None = None,
    ) -> Matcher:
        """A matcher before its first token. `base` [W] int32 has the tokens that are allowed
        anyway, `banned` says which of them may not follow. Raises RequestError for what cannot be
        compiled.
        """
        made = self.compile(wanted)
        source = next(made.turns)
        matcher = Matcher(source.deep_copy(), base, id(source), banned)
        matcher.take(made.words)
        if matcher.stuck or matcher.finished:
            raise RequestError(FIELD, f"{wanted.kind}: no token may begin the text")
        return matcher

    def is_compiled(self, wanted: StructuredOutputs) -> bool:
        """Whether `start` has nothing to compile."""
        with self._lock:
            return wanted in self._kept

    def compile(self, wanted: StructuredOutputs) -> Compiled:
        """The grammar before a text's first token; kept for later. Any thread may call it. Raises
        RequestError.
        """
        with self._lock:
            self.prepare()
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
        # Seconds for a large one. Who else needs it meanwhile compiles it too.
        words = np.zeros(mask_words(self._vocab_size), np.int32)
        began = time.perf_counter()
        matchers = [self._compile(wanted, words)]
        most = min(MOST_LEXERS, _threads())
        while len(matchers) < most and _may_repeat(began, len(matchers)):
            matchers.append(self._compile(wanted, words))
        made = Compiled(cycle(matchers), words)
        with self._lock:
            self._kept[wanted] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    @property
    def tokens(self) -> tuple[str, int, list[int]]:
        """What it was made with."""
        return str(self._folder), self._vocab_size, self._eos

    def try_out(self, wanted: StructuredOutputs, steps: int) -> float:
        """Compile a grammar, and have a text take up to `steps` tokens: the processor time of the
        slowest one, in seconds. Raises RequestError. Nothing of it is kept.
        """
        self.prepare()
        words = np.zeros(mask_words(self._vocab_size), np.int32)
        matcher, slowest = self._compile(wanted, words), 0.0
        for _ in range(steps):
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if matcher.is_stopped() or len(allowed) == 0:
                break
            began = time.process_time()
            # One in the middle is seldom an end.
            if not matcher.consume_token(int(allowed[len(allowed) // 2])):
                break
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            slowest = max(slowest, time.process_time() - began)
        return slowest

    def forget(self, wanted: StructuredOutputs) -> None:
        """Compile a grammar anew for the next text: one that has failed may have used up what its
        lexer, which all texts share, was allowed.
        """
        with self._lock:
            self._kept.pop(wanted, None)

    def advance(
        self, brought: Sequence[tuple[Matcher, int]], new_masks: NewMasks = new_masks
    ) -> Look | None:
        """Start to have texts, none of which has ended, take the tokens that followed, and to find
        what may follow next, on the cores that there are; None if there are no texts. `new_masks`
        gives memory for what is found.
        """
        if not brought:
            return None
        # New for each call: a step that was packed keeps its masks.
        words = new_masks(len(brought), mask_words(self._vocab_size))
        look = Look(brought, words)
        look.start(self._threads, self._helper)
        return look

    def _compile(self, wanted: StructuredOutputs, words: np.ndarray) -> Any:
        """The library's matcher; `words` [W] become the tokens that may be the first."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(LLMatcher, wanted)
        except ValueError as error:
            raise RequestError(FIELD, _refusal(wanted, str(error))) from None
        # Work that a grammar may make, of itself and for one token. What exceeds it is an error of
        # that request.
        limits = LLParserLimits(
            max_items_in_row=2_000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=250_000,
            max_grammar_size=500_000,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        # Here and not in the engine's loop: a first look makes most of what later ones need.
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise RequestError(FIELD, _refusal(wanted, matcher.get_error()))
        return matcher


def _threads() -> int:
    """That make masks here."""
    return min(MOST_THREADS, os.cpu_count() or 1)


def _may_repeat(began: float, times: int) -> bool:
    """Whether what took so long since `began` can be done once more."""
    spent = time.perf_counter() - began
    return spent + spent / times < LEXERS_S


def _grammar(library: Any, wanted: StructuredOutputs) -> Any:
    if wanted.kind == "grammar":
        return library.grammar_from_lark(wanted.text)
    if wanted.kind == "regex":
        return library.grammar_from_regex(wanted.text)
    if wanted.kind == "choice":
        choices = " | ".join(
            json.dumps(text, ensure_ascii=False) for text in json.loads(wanted.text)
        )
        return library.grammar_from_lark(f"start: {choices}")
    schema = wanted.text if wanted.kind == "json" else '{"type": "object"}'
    return library.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)


def _refusal(wanted: StructuredOutputs, said: str) -> str:
    """What llguidance says of a form; of a schema within a grammar, with the rule that has it in
    place of the lines around.
    """
    rule, match = "", _SCHEMA.match(said) if wanted.kind == "grammar" else None
    if match is not None:
        name = wanted.text.split("\n")[int(match[1]) - 1].partition(":")[0].strip()
        rule, said = f"{name}: " if name.isidentifier() else "", match[2]
    if said.startswith("oneOf "):  # it advises an option of its own
        said = NO_ONE_OF
    return f"{wanted.kind}: {rule}{_line(said)}"


def _line(text: str) -> str:
    """What llguidance says, without the state of its parser that it may add."""
    said = " ".join(text.partition("<state>")[0].split())[:300]
    # Its name for the state of a parser that no token may follow.
    return "no text keeps to it" if said == "NoExtensionBias" else said
