"""What all results share when they are written as JSON: the header, and its version.

{"schema": "twinfer-numerics", "version": 2, "kind": "diff", "command": "twinfer numerics ...",
 "exit_code": 0, "verdict": "equal within the gates", "sides": [...], "environment": {...},
 "seconds": 1.5, "problems": [...], "missing": [...], ...}
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from ..errors import EQUAL, FAILED, NOT_COMPARED, NotComparable

Kind = Literal[
    "diff", "ops", "invariants", "bisect", "selftest", "check", "rollout", "quantization"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEMA, VERSION = "twinfer-numerics", 2
"""The version grows when a field is renamed, removed, or means something else."""
VERDICTS = {
    EQUAL: "equal within the gates",
    FAILED: "different",
    NOT_COMPARED: "not (fully) compared",
}
WORDS = {
    EQUAL: "EQUAL within the gates",
    FAILED: "DIFFERENT",
    NOT_COMPARED: "NOT (fully) COMPARED",
}
HEADER = (
    "schema",
    "version",
    "kind",
    "command",
    "exit_code",
    "verdict",
    "sides",
    "environment",
    "seconds",
    "problems",
    "missing",
)


@dataclass(kw_only=True)
class Report(ABC):
    """What every command of `twinfer numerics` comes to. `problems` are failures that are no single
    result's, `missing` is what should have been compared and was not.
    """

    kind: ClassVar[Kind]
    environment: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> Sequence[Any]:
        """Results that are wrong."""
        return ()

    @property
    def is_wrong(self) -> bool:
        """Whether anything that was compared is wrong."""
        return bool(self.failures or self.problems)

    @property
    @abstractmethod
    def has_compared(self) -> bool:
        """Whether anything was compared."""

    @property
    def exit_code(self) -> int:
        """0 equal, 1 a numeric failure, 3 nothing or not everything compared."""
        if self.is_wrong:
            return FAILED
        return NOT_COMPARED if self.missing or not self.has_compared else EQUAL

    @property
    def word(self) -> str:
        """The verdict, for a terminal."""
        return WORDS[self.exit_code]

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """As a JSON object: `sides`, and what the kind has of its own."""

    @abstractmethod
    def cases(self) -> Mapping[tuple[str, str], Sequence[str]]:
        """Complaints by (group, name), for JUnit."""

    def dumps(self) -> str:
        """JSON text: the header of this module, then the body."""
        header = {
            "schema": SCHEMA, "version": VERSION, "kind": self.kind,
            "command": self.environment.get("command", ""),
            "exit_code": self.exit_code, "verdict": VERDICTS[self.exit_code], "sides": [],
            "environment": self.environment, "seconds": self.seconds, "problems": self.problems,
            "missing": self.missing,
        }  # fmt: skip
        return json.dumps(header | self.body(), allow_nan=False)


def check_header(record: Any, name: str) -> dict[str, Any]:
    """The record, if it is a result of this version. Raises NotComparable naming what it is."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise NotComparable(
            f"{name}: is no result of twinfer numerics: schema is {str(found)[:60]!r}, "
            f"a result has {SCHEMA!r}"
        )
    if record.get("version") != VERSION:
        raise NotComparable(
            f"{name}: version is {str(record.get('version'))[:60]}, this twinfer reads {VERSION}"
        )
    if record.get("kind") not in KINDS:
        raise NotComparable(
            f"{name}: kind is {str(record.get('kind'))[:60]!r}, allowed are {', '.join(KINDS)}"
        )
    if lacking := [field for field in HEADER if field not in record]:
        raise NotComparable(f"{name}: the result is damaged: it has no {lacking[0]}")
    return record
