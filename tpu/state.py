"""What requests keep on the devices between steps: page tables and sampling parameters of all
rows, donated from step to step. `shared/step_difference.py` packs what the host sends for a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ..shared.step import StepShape
from ..shared.step_difference import PARAMETERS, initial_tables, update_layout


class State(NamedTuple):
    """pages [G (row + 1), P] int32, one group's tables behind another's, and parameters [field, row
    + 1] int32 (the last row is for padding).
    """

    pages: Any
    parameters: Any


def state_shapes(shape: StepShape) -> State:
    """The shapes of the tables."""
    rows = shape.max_rows + 1
    return State(
        jax.ShapeDtypeStruct((shape.table_rows, shape.pages_per_request), np.int32),
        jax.ShapeDtypeStruct((len(PARAMETERS), rows), np.int32),
    )


def updated(state: State, f: dict[str, jax.Array]) -> State:
    """The tables with the changes of an unpacked buffer."""
    pages = (
        state.pages.reshape(-1)
        .at[f["page_at"]]
        .set(f["page"], mode="drop")
        .reshape(state.pages.shape)
    )
    return State(pages, state.parameters.at[:, f["new_rows"]].set(f["new_parameters"], mode="drop"))


def update(state: State, buffer: jax.Array) -> State:
    """The program `update`: changes alone."""
    return updated(state, update_layout().unpack(buffer, lambda x: x))


def initial_state(shape: StepShape) -> State:
    """The tables before the first step."""
    return State(*initial_tables(shape))


def sampling_fields(
    parameters: jax.Array, rows: jax.Array, position: jax.Array, as_float: Any
) -> dict[str, jax.Array]:
    """The arguments of the samplers that a request keeps, and the position: by name, each [R]."""
    fields = dict(zip(PARAMETERS, parameters[:, rows], strict=True))
    return fields | {"scale": as_float(fields["scale"]), "position": position}
