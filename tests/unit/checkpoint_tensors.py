"""What files of weights hold."""

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
