"""The sockets that a server listens on. They are taken first, so that a taken one costs no start of
an engine.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...shared.errors import ConfigError

QUEUE = 2048
"""Connections that may wait for being taken."""


def bind_socket(host: str, port: int, path: str | None) -> socket.socket:
    """The socket of an address, or of the path of a Unix socket. Raises ConfigError."""
    if path:
        return _at_path(path, "uds")
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(door, (host, port), "host, port")


def bind_admin_socket(path: str) -> socket.socket:
    """The socket of the admin's routes, which only this user may connect to. Raises ConfigError."""
    before = os.umask(0o177)  # from its first moment on
    try:
        return _at_path(path, "admin-uds")
    finally:
        os.umask(before)


def _at_path(path: str, field: str) -> socket.socket:
    with _folder_lock(Path(path).absolute().parent):
        _remove_stale(path)
        return _listen(socket.socket(socket.AF_UNIX), path, field)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Let no other server take a socket in a folder within the block: one that is bound and does
    not listen yet would seem to it as one that was left behind.

    Nothing is kept on disk. Where the system locks no folder, nobody waits.
    """
    try:
        place = os.open(folder, os.O_RDONLY)
    except OSError:  # who listens there says why that fails
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _listen(door: socket.socket, address: Any, field: str) -> socket.socket:
    try:
        door.bind(address)
        door.listen(QUEUE)
    except OSError as error:
        door.close()
        raise ConfigError(
            f"{field}: cannot listen on {address}: {error.strerror or error}"
        ) from None
    door.setblocking(False)
    return door


def _remove_stale(path: str) -> None:
    """A socket that a server left behind which was killed. One that answers stays, and what is no
    socket, which refuses connections too.
    """
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            pass
