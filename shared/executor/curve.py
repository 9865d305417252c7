"""Sockets between machines: CURVE, on one interface, open to those alone whose public keys are
known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from .messages import Keys


class CurveServer:
    """The end that binds. It has a key pair of its own, and lets in whose keys it was told."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._public, self._secret = zmq.curve_keypair()
        self._allowed: set[bytes] = set()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def allow(self, public_keys: Iterable[str]) -> str:
        """Let these in from now on, and return this end's own public key, without which nobody can
        connect.

        There is no other way to it, as nobody may have it sooner: ZeroMQ never tries again where
        it was refused, so who comes before it is let in waits for ever.
        """
        self._allowed |= {key.encode() for key in public_keys}
        return self._public.decode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether who has this public key may connect: what the authenticator asks."""
        return key in self._allowed

    def bind(self, kind: int, ip: str, port: int = 0) -> tuple[Any, str]:
        """A socket on this interface, and its address. Port 0: one that is free. Raises
        zmq.ZMQError.
        """
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret
        socket.bind(f"tcp://{ip}:{port or '*'}")
        return socket, socket.last_endpoint.decode()

    def close(self) -> None:
        """Let nobody in any more. The sockets are the caller's to close."""
        self._authenticator.stop()


def connected(context: Any, kind: int, address: str, keys: Keys | None) -> Any:
    """A socket that is connected to `address`, by CURVE if there are keys. One that subscribes
    hears all.
    """
    socket = context.socket(kind)
    socket.set_hwm(0)
    if keys is not None:
        socket.curve_serverkey = keys.driver.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    return socket
