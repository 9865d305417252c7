"""Sockets between machines: who was not told of hears nothing and is not heard."""

import contextlib
import time

import pytest

zmq = pytest.importorskip("zmq")

from twinfer.shared.executor.curve import CurveServer, connected  # noqa: E402
from twinfer.shared.executor.messages import Keys  # noqa: E402

from ..ports import free_ports  # noqa: E402

COMES_MS, NEVER_MS = 60_000, 500
"""How long what comes is waited for, and how long what does not."""


@pytest.fixture
def link():
    """Binds and connects, and closes all of it."""
    made = Link()
    yield made
    made.close()


class Link:
    def __init__(self):
        self.context = zmq.Context()
        self.server = CurveServer(self.context)
        self._sockets = []

    def bind(self, kind, port=0):
        socket, at = self.server.bind(kind, "127.0.0.1", port)
        self._sockets.append(socket)
        return socket, at

    def connect(self, kind, at, keys):
        self._sockets.append(connected(self.context, kind, at, keys))
        return self._sockets[-1]

    def close(self):
        for socket in self._sockets:
            socket.close(linger=0)
        self.server.close()
        self.context.term()


def pair():
    return tuple(key.decode() for key in zmq.curve_keypair())


def test_both_ways_for_who_is_known(link):
    public, secret = pair()
    keys = Keys(public, secret, link.server.allow([public]))
    inbox, at = link.bind(zmq.PULL)
    link.connect(zmq.PUSH, at, keys).send(b"up")
    assert inbox.poll(COMES_MS)
    assert inbox.recv() == b"up"
    outbox, at = link.bind(zmq.PUSH)
    client = link.connect(zmq.PULL, at, keys)
    outbox.send(b"down")
    assert client.poll(COMES_MS)


@pytest.mark.parametrize("how", ["unknown key", "other server", "no keys"])
def test_nothing_for_anybody_else(link, how):
    public, secret = pair()
    own = link.server.allow([pair()[0]] if how == "unknown key" else [public])
    whose = pair()[0] if how == "other server" else own
    keys = None if how == "no keys" else Keys(public, secret, whose)
    inbox, at = link.bind(zmq.PULL)
    with contextlib.suppress(zmq.Again):  # it has been refused already, and has nobody to send to
        link.connect(zmq.PUSH, at, keys).send(b"up", zmq.DONTWAIT)
    assert not inbox.poll(NEVER_MS)
    told, at = link.bind(zmq.PUB)
    client = link.connect(zmq.SUB, at, keys)
    assert not client.poll(NEVER_MS)
    told.send(b"secret")
    assert not client.poll(NEVER_MS)


def test_who_comes_before_it_is_let_in_is_refused_for_ever(link):
    """Why nobody may have the server's key before: ZeroMQ does not try again."""
    public, secret = pair()
    keys = Keys(public, secret, link.server.allow([]))
    inbox, at = link.bind(zmq.PULL)
    early = link.connect(zmq.PUSH, at, keys)
    deadline = time.monotonic() + COMES_MS / 1000
    while early.poll(0, zmq.POLLOUT):
        assert time.monotonic() < deadline, "it was not refused"
        time.sleep(0.01)
    link.server.allow([public])
    link.connect(zmq.PUSH, at, keys).send(b"late")
    assert inbox.poll(COMES_MS)
    assert inbox.recv() == b"late"
    assert not early.poll(NEVER_MS, zmq.POLLOUT)  # it has nobody to send to


def test_the_port_is_the_one_that_is_asked_for(link):
    port = free_ports()
    assert link.bind(zmq.PULL, port)[1] == f"tcp://127.0.0.1:{port}"
