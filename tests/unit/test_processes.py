"""tests/processes.py: a test that has waited for too long says what its processes were doing."""

import fcntl
import os
import signal
import subprocess
import sys
import termios

import pytest

from .. import processes

SCRIPT = """
import subprocess, sys, threading, time

def waits_in_a_thread():
    time.sleep(1000)

def waits_for_its_child():
    print("started", file=sys.stderr, flush=True)
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    print(child.pid, flush=True)
    child.wait()

CHILD = '''
import time
def waits_as_a_child():
    print("ready", flush=True)
    time.sleep(1000)
waits_as_a_child()
'''
threading.Thread(target=waits_in_a_thread, daemon=True).start()
waits_for_its_child()
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize("stopped", [False, True])
def test_who_waits_too_long_is_told_where_each_thread_of_each_process_was(stopped):
    with subprocess.Popen([sys.executable, "-c", SCRIPT], **PIPES) as process:
        # In any order: both write to the same pipe.
        (child,) = {process.stdout.readline().strip() for _ in range(2)} - {"ready"}
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(pytest.fail.Exception) as failure:
            processes.wait_until(lambda: False, [process], 0.1)
    said = str(failure.value)
    for words in (
        "not so after 0 s", "process 0 ran", "started", "waits_in_a_thread",
        "waits_for_its_child", "waits_as_a_child",
    ):  # fmt: skip
        assert words in said
    assert process.returncode == -signal.SIGABRT
    assert not processes.is_running(int(child))


def test_a_process_that_ends_too_soon_is_told_of_at_once():
    ended = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('out'); sys.exit('no reason')"], **PIPES
    )
    with (
        ended,
        subprocess.Popen(SLEEP, **PIPES) as other,
        pytest.raises(pytest.fail.Exception) as failure,
    ):
        processes.wait_until(lambda: False, [ended, other], 60)
    said = str(failure.value)
    for words in ("process 0 ended with 1\nno reason", "out", "process 1 ran"):
        assert words in said
    assert other.returncode == -signal.SIGABRT


def test_what_is_written_beside_a_full_pipe_is_read():
    """A process that waits until somebody reads what it has written still writes its stacks."""
    script = "import sys\nwhile True: print('x' * 1000, file=sys.stderr)"

    def full(pipe):
        waits = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(waits, sys.byteorder) > 60_000

    with subprocess.Popen([sys.executable, "-c", script], **PIPES) as process:
        processes.wait_until(lambda: full(process.stderr), [process], 60)
        with pytest.raises(pytest.fail.Exception, match="most recent call first"):
            processes.wait_until(lambda: False, [process], 0.1)


def test_a_command_that_does_not_end_is_told_of():
    said, seconds = "", 1.0
    while "most recent call first" not in said:  # it had not begun yet
        seconds *= 2
        assert seconds < 100
        with pytest.raises(pytest.fail.Exception) as failure:
            processes.run(SLEEP, seconds)
        said = str(failure.value)
        assert f"did not end within {seconds:.0f} s" in said
    assert 'File "<string>"' in said
    done = processes.run([sys.executable, "-c", "print(3)"], 60)
    assert (done.returncode, done.stdout) == (0, "3\n")
