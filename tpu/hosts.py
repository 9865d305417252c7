"""Several hosts, one worker: a process on each, `jax.distributed` to join their devices, and the
same calls on all.

Every host runs the same command. On the first, the worker that the engine gets sends each call that
starts device work to the other hosts and then makes it itself; there, the command never gets past
making its worker: `follow` makes the calls in the order in which they come, until the first host
closes. Programs, shapes and steps are the same everywhere, so the hosts agree by construction on
what runs next. A step crosses the network once, as bytes; tokens do not: they are on the devices of
every host.

If a host dies, `jax.distributed` ends the others. The network between the hosts must be trusted:
neither its ports nor this one ask who is there.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from ..bucketing import Table
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.progress import Progress, silent
from ..shared.step import StepInput
from ..shared.worker import ProgramReport, StepHandle, Worker
from .sharding import check_all_take_part

PATIENCE = 300.0
"""Seconds to wait for the other hosts at start."""

ARGUMENTS: dict[str, Any] = {
    "load": None, "allocate_kv": int, "warm_up": Table, "execute": StepInput,
    "sample": np.ndarray, "close": None,
}  # fmt: skip
"""The calls of a worker that all hosts make, and what is sent with each. `load` and `warm_up`
also take a progress.
"""

_joined: tuple[str, int, int] | None = None
"""The address that the first host sends calls from, the number of hosts, and the index of this
one.
"""


def join(coordinator: str, hosts: int, index: int) -> None:
    """Make the devices of all hosts one. Call it before anything else uses JAX, on every host with
    its index.

    `coordinator` is HOST:PORT of the host with index 0; the next port is used too. Raises
    ConfigError, BackendUnavailable.
    """
    global _joined
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(
            f"coordinator: got {coordinator!r}, must be HOST:PORT with a port from 1 to 65534"
        )
    if hosts < 2:
        raise ConfigError(f"hosts: got {hosts}, must be at least 2")
    if not 0 <= index < hosts:
        raise ConfigError(f"host_index: got {index}, must be from 0 to {hosts - 1}")
    try:
        jax.distributed.initialize(coordinator, hosts, index, initialization_timeout=int(PATIENCE))
    except Exception as error:  # several kinds, by what the network says
        raise BackendUnavailable(
            f"coordinator: {coordinator}: {str(error).splitlines()[0]}"
        ) from error
    _joined = f"{host}:{int(port) + 1}", hosts, index


def on_all_hosts(worker: Worker, devices: int) -> Worker:
    """`worker`, or on the first of several hosts one that makes its calls on all. On the others it
    does not return.

    Raises ConfigError unless the `devices` of the worker's mesh are those of all hosts.
    """
    if _joined is None:
        return worker
    address, hosts, index = _joined
    check_all_take_part(devices, f"{hosts} hosts", jax.device_count())
    # Not jax.process_index(): a TPU slice numbers its hosts by their place in it.
    if index > 0:
        follow(worker, address)
        raise SystemExit(0)
    return FirstHost(worker, address, hosts - 1)


def _zmq() -> Any:
    try:
        import msgspec  # noqa: F401 - what is sent is packed by it
        import zmq
    except ImportError as error:
        raise BackendUnavailable(f"hosts: {error}: pip install 'twinfer[hosts]'") from error
    return zmq


def pack(name: str, value: Any) -> list[bytes]:
    """A call as the parts of a message."""
    import msgspec

    return [name.encode(), msgspec.msgpack.encode(value, enc_hook=_array_out)]


def unpack(parts: list[bytes]) -> tuple[str, list[Any]]:
    """The call in a message: its name and arguments. Raises KeyError or msgspec's errors if it
    is none.
    """
    import msgspec

    name = parts[0].decode()
    kind = ARGUMENTS[name]
    value = msgspec.msgpack.decode(parts[1], type=kind or type(None), dec_hook=_array_in)
    return name, [] if kind is None else [value]


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    # What msgspec expects of its hook for a type that neither knows.
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _array_in(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def follow(worker: Worker, address: str) -> None:
    """Make the calls that the first host makes, until it closes."""
    zmq = _zmq()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://{address}")
        name = ""
        while name != "close":
            name, arguments = unpack(socket.recv_multipart())
            if name in ("load", "warm_up"):
                arguments.append(silent)
            getattr(worker, name)(*arguments)


class FirstHost:
    """The worker of the engine: what starts device work is sent to the other hosts, the rest
    asks this one alone.
    """

    def __init__(self, worker: Worker, address: str, others: int) -> None:
        """Waits for the other hosts. Raises BackendUnavailable if they do not come."""
        zmq = _zmq()
        self._worker = worker
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # one message for each host that subscribes
        self._socket.setsockopt(zmq.LINGER, 5000)
        self._socket.bind(f"tcp://*:{address.rpartition(':')[2]}")
        deadline = time.monotonic() + PATIENCE
        for n in range(others):
            if not self._socket.poll(1000 * max(0.0, deadline - time.monotonic())):
                self._leave()
                raise BackendUnavailable(
                    f"hosts: {n} of {others} others came within {PATIENCE:.0f} s"
                )
            self._socket.recv()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def _send(self, name: str, value: Any = None) -> None:
        self._socket.send_multipart(pack(name, value))

    def load(self, progress: Progress) -> None:
        """See `Worker`."""
        self._send("load")
        self._worker.load(progress)

    def allocate_kv(self, num_pages: int) -> None:
        """See `Worker`."""
        self._send("allocate_kv", num_pages)
        self._worker.allocate_kv(num_pages)

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """See `Worker`."""
        self._send("warm_up", table)
        return self._worker.warm_up(table, progress)

    def execute(self, step: StepInput) -> StepHandle:
        """See `Worker`."""
        self._send("execute", step)
        return self._worker.execute(step)

    def sample(self, masks: np.ndarray) -> None:
        """See `Worker`."""
        self._send("sample", masks)
        self._worker.sample(masks)

    def logits(self, step: StepInput) -> np.ndarray:
        """Not on several hosts: no host holds all logits."""
        raise BackendUnavailable("logits: backends are compared on one host")

    def close(self) -> None:
        """See `Worker`. The other hosts leave."""
        self._send("close")
        self._worker.close()
        self._leave()

    def _leave(self) -> None:
        self._socket.close()
        self._context.term()
