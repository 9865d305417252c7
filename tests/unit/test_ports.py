"""tests/ports.py: no two processes are given the same port, and none that is taken."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .. import ports

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from ports import free_ports
print([free_ports() for _ in range(20)], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _given_back(monkeypatch):
    monkeypatch.setattr(ports, "_guards", [])
    yield
    for guard in ports._guards:
        guard.close()


def test_processes_are_given_different_ports():
    command = [sys.executable, "-c", SCRIPT, str(Path(ports.__file__).parent)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        lines = [process.stdout.readline() for process in (one, other)]
        for process in (one, other):
            process.stdin.close()
    firsts = [int(word) for line in lines for word in line.strip("[]\n").split(",")]
    assert len(firsts) == 40
    given = {first + i for first in firsts for i in range(3)}
    assert len(given) == 120
    assert min(given) > ports.FIRST
    assert max(given) < ports._first_of_connections()


@pytest.mark.parametrize("place", range(3))
def test_what_is_taken_is_not_given(place, monkeypatch):
    """Of the next three, one is taken: others are given, and again when that is free. They are at
    the end of all, at a place of this process's own: nobody else is given those meanwhile.
    """
    places = 4 * (20 + os.getpid() % 200)
    monkeypatch.setattr(ports, "FIRST", ports._first_of_connections() - places)
    first = ports.free_ports()
    ports._guards.pop().close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + place))
        assert ports.free_ports() > first + 2
    assert ports.free_ports() == first


def test_no_free_ports_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "FIRST", ports._first_of_connections() - 3)
    with pytest.raises(OSError, match="no 3 free ports side by side from"):
        ports.free_ports()
