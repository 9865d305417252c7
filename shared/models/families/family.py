"""What a family states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from ..fields import Fields, nearest, show
from ..spec import Model
from ..table import ParameterTable
from . import dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a config.json is read, and what follows from it.

    `fields`, `fixed` and `harmless` come on top of those of all dense decoders (`dense.py`): fields
    that `read` reads, fields with the only values that leave the maths as it is, and fields that do
    not touch it.
    """

    read: Callable[[Fields], ModelConfig] = dense.read
    model: Callable[[ModelConfig], Model] = dense.model
    parameters: Callable[[ModelConfig], ParameterTable] = dense.parameters
    fields: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    @property
    def read_fields(self) -> frozenset[str]:
        """All fields that are read."""
        return dense.READ | self.fields

    @property
    def fixed_fields(self) -> dict[str, tuple[Any, ...]]:
        """All fields with fixed values."""
        fixed = {name: values for name, values in dense.FIXED.items() if name not in self.fields}
        return fixed | dict(self.fixed)

    def refuse_unknown(self, fields: Fields) -> None:
        """Raise UnsupportedModel for a field that might change the maths in a way that nothing
        here computes.
        """
        fixed, known = self.fixed_fields, self.read_fields | dense.HARMLESS | self.harmless
        for name, value in fields.raw.items():
            if value is None or name in known:
                continue
            if name not in fixed:
                near = nearest(name, sorted(known | fixed.keys()))
                why = f"this field is not known, so it might change the result{near}"
                fields.refuse(show(name), value, f"absent ({why})")
            fields.only(name, *fixed[name])
