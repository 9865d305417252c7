"""Which token would complete a banned sequence, by what each of them says alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinfer.shared.banned_sequences import BannedSequences, every_token

TOKENS = st.integers(0, 3)
VOCAB = 70


def listed(words):
    """The tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@given(
    st.lists(st.lists(TOKENS, min_size=2, max_size=4).map(tuple), min_size=1, max_size=6),
    st.lists(TOKENS, max_size=12),
    st.integers(0, 3),
)
def test_a_sequence_may_not_be_completed(sequences, output, min_tokens):
    banned = BannedSequences(sequences, (40, 69), min_tokens)
    for count in range(len(output) + 1):
        said = output[:count]
        expected = {
            one[-1] for one in sequences if said[max(0, count + 1 - len(one)) :] == [*one[:-1]]
        }
        expected |= {40, 69} if count < min_tokens else set()
        words = every_token(VOCAB)
        assert listed(words) - listed(banned.masked(words)) == expected
        assert listed(words) == set(range(VOCAB))
        if count < len(output):
            banned.take(output[count])


def test_tokens_that_do_not_exist_are_passed_over():
    banned = BannedSequences([(1, 2)], (5, 9999), 1)
    assert listed(banned.masked(every_token(VOCAB))) == set(range(VOCAB)) - {5}
