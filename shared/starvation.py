"""How long a process gives no sign of life, and how much of that is the machine's doing: it could
have run and got no processor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows the control groups of its second version."""
HELD_UP_S = 1.0
"""Who looks after a process was stopped itself, or held up, if it did not look for so long."""


class Silence:
    """How long a process has given no sign of life though it could have: without the time in which
    nobody looked, since its messages wait meanwhile, and without that in which it got no processor.
    And how long a signal has kept it stopped.
    """

    def __init__(self) -> None:
        self._starvation: Starvation | None = None
        self._looked = self._ran = time.monotonic()
        self.stopped = 0.0
        """Seconds for which a signal has kept it stopped, by the last look."""
        self.end()

    def end(self) -> None:
        """It was heard of."""
        self.heard = time.monotonic()
        """When it was heard of last, by `time.monotonic`."""
        self.excused = 0.0
        """Of the seconds since then, those that are no silence of its own, by what was seen."""

    def look(self, pid: int | None, quiet_s: float) -> None:
        """To be called several times a second. Whether process `pid` of this machine gets a
        processor is looked at once it was silent for `quiet_s` seconds.
        """
        now = time.monotonic()
        held_up, self._looked = self._held_up(now), now
        # Who did not look cannot say that it was stopped all the time.
        self._ran = min(now, self._ran + held_up) if pid is not None and is_stopped(pid) else now
        self.stopped = now - self._ran
        starved = 0.0
        if pid is None or now - self.heard < quiet_s:
            self._starvation = None
        else:
            self._starvation = self._starvation or Starvation(pid)
            starved = self._starvation.look()
        self.excused = min(self.excused + max(held_up, starved), now - self.heard)

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        now = time.monotonic()
        return now - self.heard - self.excused - self._held_up(now)

    def _held_up(self, now: float) -> float:
        return max(0.0, now - self._looked - HELD_UP_S)


class Starvation:
    """Looks at a process of this machine and at those that it has started, thread by thread. On
    systems that do not tell (all but Linux) nothing is ever starved.
    """

    def __init__(self, pid: int, system: Path = SYSTEM, processors: float | None = None) -> None:
        self._pid = pid
        self._system = system
        self._processors = processors or processors_of(pid)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._looked = time.monotonic()
        self._room = 0.0
        """Seconds before the last look that a wait which was not over may have taken."""

    def look(self) -> float:
        """Seconds since the last look in which one of the threads that were there then could run
        and did not, because others had the processors: of the thread that waited longest, but no
        more than the share of the processors that these threads together did not have. 0 at first.
        Of a wait that is over now, what lay before the last look counts here. While a quota holds a
        thread back, Linux counts that as its wait.
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
                if ran == ran_before and _state(thread) == "R":
                    wait = elapsed  # the system adds a wait when it is over
                longest = max(longest, wait)
        most = max(0.0, elapsed - used / self._processors)
        starved = min(longest, most + self._room)
        self._room = max(0.0, most - longest) if before else 0.0
        return starved


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped by a signal."""
    with suppress(OSError):  # it has ended; another system
        return _state(SYSTEM / str(pid)) in ("T", "t")
    return False


def processors_of(pid: int, system: Path = SYSTEM, groups: Path = GROUPS) -> float:
    """How many processors a process and its descendants may use: those that it may run on, or as
    many as the quota of its container allows, or that of a group around it.
    """
    try:
        count = len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # another system; it has ended
        count = os.cpu_count() or 1
    return min([count, *_quotas(pid, system, groups)])


def _quotas(pid: int, system: Path, groups: Path) -> Iterator[float]:
    """The processors that each control group around a process allows, where it says so."""
    with suppress(OSError, ValueError):
        for line in (system / str(pid) / "cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number != "0" or ".." in Path(path).parts:  # the first version; outside of ours
                continue
            group = groups / path.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(groups):
                    break
                with suppress(OSError, ValueError):  # no bound is said, or "max", which is none
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                    yield quota / period


def _threads(system: Path, pid: int) -> Iterator[Path]:
    """The threads of a process and of its descendants."""
    with suppress(OSError):  # it has ended
        for thread in (system / str(pid) / "task").iterdir():
            yield thread
            with suppress(OSError):
                for child in (thread / "children").read_text().split():
                    yield from _threads(system, int(child))


def _state(thread: Path) -> str:
    """What a thread or a process does, in Linux's letter: R if it could run. Raises OSError."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
