"""What the driver and the ranks tell each other: typed structs as msgpack. Plain values and arrays;
nothing here can carry code.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import msgspec
import numpy as np

from ..config import Change, DeviceInfo, ResolvedConfig
from ..models.config import ModelConfig
from ..models.spec import Place
from ..step import StepOutput


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """The CURVE keys of a rank, and the public one of the driver."""

    public: str
    secret: str
    driver: str


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """What a rank is to be; the first line of its standard input, as JSON. `device` is the option.
    `calls`, `reports` and `beats` are addresses of the driver's: those of another machine come with
    keys, and with beats, as a rank does not see the end of a driver that is far away.
    """

    place: Place
    backend: str
    device: str
    calls: str
    reports: str
    beats: str = ""
    keys: Keys | None = None


class Make(msgspec.Struct, array_like=True):
    """What a worker is made of."""

    model: ModelConfig
    config: ResolvedConfig
    folder: str


class Call(msgspec.Struct, array_like=True):
    """A call that all ranks make, the `number`-th of the driver's. `value` is its argument."""

    number: int
    name: str
    value: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))


class Found(msgspec.Struct, tag="found", array_like=True):
    """The rank has its device."""

    rank: int
    device: DeviceInfo


class Made(msgspec.Struct, array_like=True):
    """The rank has its worker. `digests` name what must be the same on all ranks."""

    config: ResolvedConfig
    changes: list[Change]
    multi_step: bool
    digests: dict[str, str]


class Progressed(msgspec.Struct, tag="progressed", array_like=True):
    """How far rank 0 has come with a call."""

    what: str
    done: int
    total: int


class Done(msgspec.Struct, tag="done", array_like=True):
    """A call has ended. `value` is its result."""

    rank: int
    number: int
    value: msgspec.Raw


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """A step has ended. `digest` is that of its tokens, and of the residual if it was kept; rank 0
    has the output too. `late` are the compilations since *ready*.
    """

    rank: int
    number: int
    digest: int
    late: int
    output: StepOutput | None = None


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The rank's process runs."""

    rank: int


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The rank has met an error, and does no more. `kind` is the name of its class."""

    rank: int
    kind: str
    words: str


Report = Found | Progressed | Done | Stepped | Beat | Failed
"""What ranks send."""


def encode(message: Any) -> bytes:
    """A message, or a value of one, as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_array_out)


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """The message in these bytes. Raises msgspec's errors if there is none."""
    return _decoder(kind).decode(data)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_array_in)


def shown(change: Change) -> Change:
    """A change whose values are text, as it is printed."""
    before, after = (
        value.name if isinstance(value, Enum) else str(value)
        for value in (change.before, change.after)
    )
    return Change(change.field, before, after, change.why)


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    # What msgspec expects of its hook for a type that neither knows.
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _array_in(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
