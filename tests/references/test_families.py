"""The references against transformers: the families that the product has or will have, each a few
lines of data over one decoder.
"""

import numpy as np
import pytest

from twinfer.tests.references.comparison import CHUNKS, GATE, logits, oracle, worst
from twinfer.tests.references.configurations import ROWS

SAME = 1e-9
"""Of a reference beside itself: it computes in float64."""


@pytest.mark.parametrize("name", ROWS)
def test_reference_is_transformers(name):
    built, want = oracle(name)
    whole = logits(built)
    assert worst(whole, want) < GATE
    assert worst(logits(built, chunks=CHUNKS), whole) < SAME
    np.testing.assert_array_equal(whole.argmax(1), want.argmax(1))
