"""Who could run and got no processor, by what the system tells of threads."""

import os
import subprocess
import sys
import time

import pytest

from twinfer.shared import starvation
from twinfer.shared.starvation import Silence, Starvation, processors_of

MS = 10**6


class System:
    """A /proc whose clock is set by hand."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now = folder, 100.0
        monkeypatch.setattr(starvation.time, "monotonic", lambda: self.now)

    def thread(self, pid, tid, state, ran, waited, children=()):
        """What is told of a thread; times in milliseconds."""
        at = self.folder / str(pid) / "task" / str(tid)
        at.mkdir(parents=True, exist_ok=True)
        (at / "schedstat").write_text(f"{ran * MS} {waited * MS} 7\n")
        (at / "stat").write_text(f"{tid} (a) R (b) {state} 1 1")
        (at / "children").write_text(" ".join(map(str, children)))
        return at

    def look(self, seen, seconds=0.2):
        self.now += seconds
        return seen.look()


@pytest.fixture
def system(tmp_path, monkeypatch):
    return System(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "first", "second", "starved"),
    [
        ("sleeps", ("S", 50, 9), ("S", 50, 9), 0.0),
        ("waits for a device", ("D", 50, 9), ("D", 50, 9), 0.0),
        ("was stopped", ("T", 50, 9), ("T", 50, 9), 0.0),
        ("runs all the time", ("R", 50, 9), ("R", 250, 9), 0.0),
        ("runs half of the time", ("R", 50, 9), ("R", 150, 109), 0.1),
        ("runs a little", ("R", 50, 9), ("R", 90, 169), 0.16),
        ("has waited and sleeps again", ("S", 50, 9), ("S", 51, 159), 0.15),
        ("waits still", ("R", 50, 9), ("R", 50, 9), 0.2),
        ("is told of a wait that began before", ("R", 50, 9), ("R", 58, 5009), 0.199),
    ],
)
def test_a_thread(name, first, second, starved, system):
    system.thread(7, 7, *first)
    seen = Starvation(7, system.folder, processors=8)
    assert system.look(seen) == 0
    system.thread(7, 7, *second)
    assert system.look(seen) == pytest.approx(starved)


def test_a_wait_across_a_look_counts_once_it_is_over(system):
    """And no more of it than there was time before that look, which others did not fill."""
    system.thread(7, 7, "R", 50, 9)
    seen = Starvation(7, system.folder, processors=8)
    assert system.look(seen) == 0
    system.thread(7, 7, "R", 60, 109)  # and waits for 90 ms, which it is not told of yet
    assert system.look(seen) == pytest.approx(0.1)
    system.thread(7, 7, "R", 70, 389)
    assert system.look(seen) == pytest.approx(0.19875 + 0.09, abs=0.01)
    system.thread(7, 7, "R", 80, 5389)
    assert system.look(seen) == pytest.approx(0.2, abs=0.01)


def test_the_thread_that_waits_longest_counts_whoever_started_it(system):
    system.thread(7, 7, "S", 1, 1, children=[9])
    system.thread(7, 8, "S", 1, 1)
    system.thread(9, 9, "S", 1, 1)
    seen = Starvation(7, system.folder)
    assert system.look(seen) == 0
    system.thread(7, 8, "S", 2, 31)
    system.thread(9, 9, "S", 2, 51)
    assert system.look(seen) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("ran", "starved"), [(100, 0.0), (60, 0.08), (25, 0.15), (0, 0.2)], ids=lambda value: str(value)
)
def test_threads_that_crowd_each_other_out_are_not_starved(ran, starved, system):
    """Four that spin, on two processors: only what others have of those counts."""
    for tid in range(4):
        system.thread(7, tid, "R", 50, 9)
    seen = Starvation(7, system.folder, processors=2)
    assert system.look(seen) == 0
    for tid in range(4):
        system.thread(7, tid, "R", 50 + ran, 9 + 200 - ran)
    assert system.look(seen) == pytest.approx(starved)


def test_threads_that_come_and_go_and_systems_that_tell_nothing(system):
    seen = Starvation(7, system.folder)
    assert system.look(seen) == 0
    at = system.thread(7, 7, "R", 50, 9000)
    assert system.look(seen) == 0
    (at / "schedstat").unlink()
    assert system.look(seen) == 0
    (at / "schedstat").write_text("")
    assert system.look(seen) == 0


@pytest.mark.parametrize(
    ("told", "limits", "processors"),
    [
        ("0::/\n", {"": "150000 100000\n"}, 1.5),
        ("0::/\n", {"": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b": "max 100000\n", "a": "20000 100000\n", "": "50000 100000"}, 0.2),
        ("4:cpu:/x\n0::/a\n", {"a": "10000 50000\n", "x": "1000 100000\n"}, 0.2),
        ("0::/a:b\n", {"a:b": "50000 100000\n"}, 0.5),
        ("0::/../a\n", {"a": "50000 100000\n"}, None),
        ("0::/gone\n", {}, None),
        ("0::/\n", {"": "none\n"}, None),
        ("1:cpu:/\n", {"": "50000 100000\n"}, None),
        ("\n", {"": "50000 100000\n"}, None),
        (None, {"": "50000 100000\n"}, None),
        ("0::/\n", {"": "100000000 1000\n"}, None),  # more than there are
    ],
)
def test_a_quota_is_so_many_processors(told, limits, processors, tmp_path):
    groups = tmp_path / "groups"
    (tmp_path / "7").mkdir()
    if told is not None:
        (tmp_path / "7" / "cgroup").write_text(told)
    for path, text in limits.items():
        (groups / path).mkdir(parents=True, exist_ok=True)
        (groups / path / "cpu.max").write_text(text)
    most = processors_of(7, tmp_path / "nothing", groups)
    assert most == int(most)
    assert processors_of(7, tmp_path, groups) == (processors or most)


def test_threads_that_use_up_their_quota_are_not_starved(system):
    """Else one that hangs in a loop, beside its like, would have an excuse for ever."""
    for tid in range(4):
        system.thread(7, tid, "R", 50, 9)
    seen = Starvation(7, system.folder, processors=0.5)
    assert system.look(seen) == 0
    for tid in range(4):
        system.thread(7, tid, "R", 75, 9 + 175)
    assert system.look(seen) == pytest.approx(0)


class Starved:
    """A look at a process that waits for a processor the whole time."""

    def __init__(self, pid):
        self.pid, self.looked = pid, starvation.time.monotonic()

    def look(self):
        now = starvation.time.monotonic()
        elapsed, self.looked = now - self.looked, now
        return elapsed if self.pid == "starved" else 0.0


def silent_for(system, pid, looks):
    """How long a process was silent that was looked at after each of so many seconds."""
    silence = Silence()
    for seconds in looks:
        system.now += seconds
        silence.look(pid, quiet_s=1.0)
    return silence


@pytest.mark.parametrize(
    ("pid", "looks", "seconds"),
    [
        ("sleeps", [0.5] * 10, 5.0),
        ("starved", [0.5] * 10, 1.0),  # its first second is not looked at
        (None, [0.5] * 10, 5.0),
        ("sleeps", [0.5, 7.0, 0.5], 2.0),  # who looks was stopped
        ("starved", [0.5, 0.5, 7.0], 1.0),  # both at once: no second counts twice
    ],
)
def test_a_silence_is_what_could_have_been_heard(pid, looks, seconds, system, monkeypatch):
    monkeypatch.setattr(starvation, "Starvation", Starved)
    silence = silent_for(system, pid, looks)
    assert silence.seconds == pytest.approx(seconds)
    system.now += 5.0  # nobody has looked since
    assert silence.seconds == pytest.approx(seconds + 1.0)
    silence.end()
    assert silence.seconds <= 0.0
    silence.look(pid, 1.0)
    assert silence.seconds == silence.excused == 0.0


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        ([(0.5, "T"), (0.5, "T"), (0.5, "t")], 1.5),
        ([(0.5, "S"), (0.5, "R"), (0.5, "S")], 0.0),
        ([(0.5, "T"), (0.5, "S"), (0.5, "T")], 0.5),
        # Who looks was stopped too, and cannot say since when the other one was: a second counts.
        ([(0.5, "S"), (7.0, "T"), (0.5, "T")], 1.5),
        ([(0.5, "T"), (7.0, "S"), (0.5, "T")], 0.5),
        ([(0.5, "T"), (0.5, None)], 0.0),  # it has ended
    ],
)
def test_how_long_a_process_stands_still(looks, seconds, system, monkeypatch):
    monkeypatch.setattr(starvation, "SYSTEM", system.folder)
    stat = system.folder / "7" / "stat"
    stat.parent.mkdir()
    silence = Silence()
    assert silence.stopped == 0.0
    for passed, state in looks:
        system.now += passed
        if state is None:
            stat.unlink()
        else:
            stat.write_text(f"7 (a) R (b) {state} 1 1")
        silence.look(7, quiet_s=100.0)
        silence.end()  # what it said before is heard later, and is no sign that it goes on
    assert silence.stopped == pytest.approx(seconds)
    silence.look(None, quiet_s=100.0)
    assert silence.stopped == 0.0


def test_a_real_process_that_waits_and_one_that_sleeps():
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    asleep = "import time; print(flush=True); time.sleep(100)"
    idle = subprocess.Popen([sys.executable, "-S", "-c", asleep], stdout=subprocess.PIPE)
    try:
        (cpu, *_) = os.sched_getaffinity(0)
        for process in busy:
            os.sched_setaffinity(process.pid, [cpu])
        os.setpriority(os.PRIO_PROCESS, busy[0].pid, 19)
        idle.stdout.readline()
        end = time.monotonic() + 60
        while starvation._state(starvation.SYSTEM / str(idle.pid)) != "S":
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(1)
        waits, sleeps = Starvation(busy[0].pid), Starvation(idle.pid)
        assert waits.look() == sleeps.look() == 0
        # A wait counts once it is over, and on a busy machine one may last longer than a second.
        waited, slept, start = 0.0, 0.0, time.monotonic()
        while waited < 1 and time.monotonic() - start < 60:
            time.sleep(0.5)
            waited, slept = waited + waits.look(), slept + sleeps.look()
        assert waited >= 1
        assert slept < 0.1
    finally:
        for process in (*busy, idle):
            process.kill()
            process.wait()
        idle.stdout.close()
