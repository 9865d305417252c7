"""Sockets that servers listen on."""

import socket
import threading

import pytest

from twinfer.serving.server import sockets
from twinfer.shared.errors import ConfigError


def test_two_that_start_at_once_take_one_path_once(tmp_path, monkeypatch):
    """The second took the path of the first, which was bound and did not listen yet and so seemed
    left behind: nobody could reach the first one then.
    """
    path, bound, go = str(tmp_path / "door"), threading.Event(), threading.Event()
    listen = socket.socket.listen

    class Slow(socket.socket):
        def listen(self, queue):
            if not bound.is_set():
                bound.set()
                assert go.wait(60)
            listen(self, queue)

    monkeypatch.setattr(sockets.socket, "socket", Slow)
    doors, errors = [], []

    def start():
        try:
            doors.append(sockets.bind_socket("", 0, path))
        except ConfigError as error:
            errors.append(str(error))

    first, second = threading.Thread(target=start), threading.Thread(target=start)
    first.start()
    assert bound.wait(60)
    second.start()
    second.join(0.3)  # it waits for the first one, or has taken the path by now
    go.set()
    first.join(60)
    second.join(60)
    assert errors == [f"uds: cannot listen on {path}: Address already in use"]
    (door,) = doors
    with door, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        door.setblocking(True)
        door.accept()[0].close()


def test_a_path_that_a_killed_server_left_behind_is_taken(tmp_path):
    path = str(tmp_path / "door")
    left = sockets.bind_socket("", 0, path)
    left.close()
    with (
        sockets.bind_socket("", 0, path),
        pytest.raises(ConfigError, match=r"uds: cannot listen on .*Address already in use"),
    ):
        sockets.bind_socket("", 0, path)


def test_a_file_is_left_alone(tmp_path):
    (tmp_path / "door").write_text("mine")
    with pytest.raises(ConfigError, match="uds: cannot listen on"):
        sockets.bind_socket("", 0, str(tmp_path / "door"))
    assert (tmp_path / "door").read_text() == "mine"


def test_the_socket_of_the_admin_is_for_this_user_alone(tmp_path):
    path = tmp_path / "admin"
    with sockets.bind_admin_socket(str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
