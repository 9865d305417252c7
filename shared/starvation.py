"""How long processes could have run and got no processor: the machine's doing, not theirs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/proc")


class Starvation:
    """Looks at a process of this machine and at those that it has started, thread by thread. On
    systems that do not tell (all but Linux) nothing is ever starved.
    """

    def __init__(self, pid: int, system: Path = SYSTEM, processors: int | None = None) -> None:
        self._pid = pid
        self._system = system
        self._processors = processors or _processors_of(pid)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds since the last look in which one of the threads that were there then could run
        and did not, because others had the processors: of the thread that waited longest, but no
        more than the share of the processors that these threads together did not have. 0 at first.
        """
        now = time.monotonic()
        before, elapsed = self._seen, now - self._looked
        self._seen, self._looked = {}, now
        longest = used = 0.0
        for thread in _threads(self._system, self._pid):
            with suppress(OSError, ValueError, IndexError):  # it has ended, or nothing is told
                ran, waited = map(int, (thread / "schedstat").read_text().split()[:2])
                self._seen[thread] = ran, waited
                if thread not in before:
                    continue
                ran_before, waited_before = before[thread]
                used += (ran - ran_before) / 1e9
                wait = (waited - waited_before) / 1e9
                if ran == ran_before and _can_run(thread):
                    wait = elapsed  # the system adds a wait when it is over
                longest = max(longest, wait)
        return max(0.0, min(longest, elapsed - used / self._processors))


def _processors_of(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # another system; it has ended
        return os.cpu_count() or 1


def _threads(system: Path, pid: int) -> Iterator[Path]:
    """The threads of a process and of its descendants."""
    with suppress(OSError):  # it has ended
        for thread in (system / str(pid) / "task").iterdir():
            yield thread
            with suppress(OSError):
                for child in (thread / "children").read_text().split():
                    yield from _threads(system, int(child))


def _can_run(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
