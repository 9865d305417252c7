"""Ports that two processes of a test agree on before either has opened them."""

import os
import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the ports that a system gives to whoever connects (from 32 768), and above those of Ray's
workers (10 002 to 19 999): between the choice of a port and its opening nobody is given it.
"""
PARTS = 8
"""Processes of one test run that never choose the same: more of them share parts."""


def free_ports(count: int = 1) -> int:
    """The first of `count` ports side by side that are free now."""
    size = (LAST - FIRST) // PARTS
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST + number % PARTS * size
    for _ in range(100):
        port = random.randrange(first, first + size - count)
        opened = [socket.socket() for _ in range(count)]
        try:
            for i, each in enumerate(opened):
                each.bind(("127.0.0.1", port + i))
        except OSError:
            continue
        finally:
            for each in opened:
                each.close()
        return port
    raise OSError(f"no {count} free ports side by side from {first} on")
