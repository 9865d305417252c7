"""Progress bars on a terminal; nothing where the output is not one."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def print_progress(what: str, done: int, total: int) -> None:
    """A `Progress` callback that writes a line to standard error: where there is no terminal for
    a bar.
    """
    name, _, note = what.partition("; ")
    print(f"{name}: {done} of {total} {note}".rstrip(), file=sys.stderr, flush=True)


class StartBar:
    """Shows what an engine does before it is ready. Use as a context manager; `update` is a
    `Progress` callback.
    """

    def __init__(self, title: str, *, shown: bool) -> None:
        self._title = title
        self._tasks: dict[str, object] = {}
        self._progress = _bars(shown)

    def __enter__(self) -> StartBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @property
    def shown(self) -> bool:
        """Whether there is a terminal to show a bar on."""
        return not self._progress.disable

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done of `what`, which may end in a changing note:
        `graphs; 90 GB free`.
        """
        name, _, note = what.partition("; ")
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task("", total=total)
        description = f"{self._title} ({name})" + (f" {note}" if note else "")
        self._progress.update(self._tasks[name], completed=done, description=description)  # type: ignore[arg-type]


class GenerationBar:
    """Counts completions that have ended and shows tokens per second, in and out."""

    def __init__(self, completions: int, *, shown: bool) -> None:
        self._completions = completions
        self._progress = _bars(shown)
        self._tokens = self._prompt_tokens = 0
        self._started = self._drawn = time.perf_counter()

    def __enter__(self) -> GenerationBar:
        self._progress.start()
        self._task = self._progress.add_task("generating", total=self._completions)
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def tokens(self, count: int) -> None:
        """So many tokens more. The text is renewed ten times a second: a step must not wait for
        a terminal.
        """
        self._tokens += count
        now = time.perf_counter()
        if now - self._drawn > 0.1:
            self._drawn = now
            self._describe(now)

    def completion(self, prompt_tokens: int) -> None:
        """One completion more has ended; `prompt_tokens` are those that were read for it, not
        for another.
        """
        self._prompt_tokens += prompt_tokens
        self._describe(time.perf_counter())
        self._progress.advance(self._task)

    def _describe(self, now: float) -> None:
        seconds = max(now - self._started, 1e-9)
        rates = (
            f"in {self._prompt_tokens / seconds:.0f} tok/s, out {self._tokens / seconds:.0f} tok/s"
        )
        self._progress.update(self._task, description=f"generating ({rates})")


def _bars(shown: bool) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(
        *columns,
        console=console,
        disable=not (shown and console.is_terminal),
        refresh_per_second=10,
        # Else what is printed to a file while a bar is shown would go to the terminal instead.
        redirect_stdout=False,
    )
