"""Every error that Twinfer raises on purpose, as one tree.

TwinferError                     500  exit 1
├── UserError                    400  exit 2   somebody asked for something that cannot be had
│   ├── ConfigError              400  exit 2   an engine option is wrong or options contradict each
                                               other
│   ├── ModelError               400  exit 2   a model folder cannot be served
│   │   ├── ModelNotFound        404  exit 2   no such folder or file
│   │   ├── UnsupportedModel     400  exit 2   an architecture or a config field that changes the
                                               maths
│   │   └── CheckpointError      400  exit 2   a tensor is missing, truncated, or has another shape
│   └── RequestError             400  exit 2   one request is wrong; other requests go on
│       └── PromptTooLong        400  exit 2   its prompt leaves no room for a completion
├── Overloaded                   503  exit 1   admission refused; try again later
├── BackendUnavailable           500  exit 4   the framework or the device is not there
├── EngineDead                   500  exit 1   a step failed, so that nothing that the engine holds
                                               can be trusted
├── RankLost                 500  exit 1   a process of several that run a model has died, hangs, or
                                               differs from the others
├── EngineClosed                 500  exit 1   the engine was closed before this call
└── InternalError                500  exit 1   a broken invariant: a bug of ours
    └── OutsideTable             500  exit 1   a shape that was not compiled before *ready*
"""

from __future__ import annotations


class TwinferError(Exception):
    """Base of all errors raised on purpose. The message is one line and fit to show to a user."""

    http_status = 500
    exit_code = 1


class UserError(TwinferError):
    """The input is at fault."""

    http_status = 400
    exit_code = 2


class ConfigError(UserError):
    """An engine option is wrong."""


class ModelError(UserError):
    """A model folder cannot be served."""


class ModelNotFound(ModelError):
    """A model folder or a file in it does not exist."""

    http_status = 404


class UnsupportedModel(ModelError):
    """The architecture, or a config field that changes the maths, is not known."""


class CheckpointError(ModelError):
    """The weights do not fit the model."""


class RequestError(UserError):
    """One request is wrong. `field` names the culprit, `reason` says what is wrong with it, and may
    name another field, `other`.
    """

    def __init__(self, field: str, message: str, other: str = "") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message
        self.other = other


class PromptTooLong(RequestError):
    """The prompt of a request leaves no room for a completion."""


class Overloaded(TwinferError):
    """The engine does not take more requests now."""

    http_status = 503


class BackendUnavailable(TwinferError):
    """A framework or a device is missing on this machine."""

    exit_code = 4


class EngineDead(TwinferError):
    """A step failed earlier: cache, tables and books may disagree. The message says what failed;
    make a new engine.
    """


class RankLost(TwinferError):
    """One of the processes that run a model together is gone, or does something else; all of them
    were ended.
    """


class EngineClosed(TwinferError):
    """The engine was closed before this call; make a new one."""


class InternalError(TwinferError):
    """An invariant of ours does not hold."""


class OutsideTable(InternalError):
    """A step asked for a shape that is not in the frozen table of programs."""
