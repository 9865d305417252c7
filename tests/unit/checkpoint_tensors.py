"""What files of weights hold."""

from twinfer.shared.checkpoint import TRANSPOSED, view_of
from twinfer.shared.models.table import keys


def expected_tensors(table):
    """Every tensor that a checkpoint of this table has under its usual name, with its shape."""
    expected = {}
    for parameter, layer in table.placed():
        if parameter.value is not None:
            continue
        for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
            expected[key] = parameter.part_shape(part)
    return expected


def stored_tensors(table):
    """The same by the names and shapes in the file, where a tensor may hold all experts."""
    stored = {}
    for key, shape in expected_tensors(table).items():
        name, view = view_of(key)
        if view:
            experts = int(key.removeprefix(name + view))
            inner = shape[0] // experts, *shape[1:]
            shape = (experts, *(reversed(inner) if view == TRANSPOSED else inner))
        stored[name] = shape
    return stored
