"""Ports that a test has to choose, because several processes must know them before one listens.

A server that picks its own (`--port 0`) needs none of this.
"""

import contextlib
import socket
from pathlib import Path

FIRST = 20000
"""Above the ports that Ray gives to its workers: 10002 to 19999."""

COUNT = 3
"""Ports given at a time. It is the same for all, so that what is given never overlaps."""

_guards: list[socket.socket] = []


def free_ports() -> int:
    """The first of three free ports side by side on 127.0.0.1, which are this process's until it
    ends.

    They are outside of the range that the kernel takes from for connections that go out, so that
    none of these gets a port before the test's own process listens on it. The port before them
    is bound for as long as this process lives: no other process, such as another of xdist's
    workers, is given the same.
    """
    for guard_port in range(FIRST, _first_of_connections() - COUNT, COUNT + 1):
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", guard_port))
            _check_free(range(guard_port + 1, guard_port + 1 + COUNT))
        except OSError:
            guard.close()
            continue
        _guards.append(guard)
        return guard_port + 1
    raise OSError(f"no {COUNT} free ports side by side from {FIRST} on")


def _check_free(ports: range) -> None:
    """Raise OSError where one is taken."""
    with contextlib.ExitStack() as opened:
        for port in ports:
            opened.enter_context(socket.socket()).bind(("127.0.0.1", port))


def _first_of_connections() -> int:
    """Where the range of connections that go out begins: Linux' default is lower than others'."""
    try:
        words = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except FileNotFoundError:
        return 32768
    return int(words[0])
