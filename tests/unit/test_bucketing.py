"""The table of programs: every step that the limits allow has one, the smallest that is large
enough.
"""

from hypothesis import given
from hypothesis import strategies as st

from twinfer.bucketing import Descriptor, PaddingAccount, Table, decode_ladder, mixed_ladder


def test_ladders():
    assert decode_ladder(32) == (8, 16, 24, 32)
    assert decode_ladder(20) == (8, 16, 20)
    assert decode_ladder(3) == (3,)
    assert decode_ladder(16, small=(1, 2, 4)) == (1, 2, 4, 8, 16)
    assert mixed_ladder(128) == (16, 32, 64, 128)
    assert mixed_ladder(100) == (16, 32, 64, 100)
    assert mixed_ladder(5) == (5,)


@given(st.integers(1, 300), st.integers(1, 3000), st.data())
def test_every_allowed_step_has_the_smallest_program_that_holds_it(max_requests, max_tokens, data):
    max_tokens = max(max_tokens, max_requests)
    table = Table(decode_ladder(max_requests), mixed_ladder(max_tokens), max_requests)
    requests = data.draw(st.integers(1, max_requests))
    extra = data.draw(st.integers(0, max_tokens - requests))
    found = table.decide(requests + extra, requests, 1 if not extra else extra + 1)
    assert found in set(table)
    assert found.tokens >= requests + extra
    assert found.requests >= requests
    same_kind = [
        d
        for d in table
        if d.kind == found.kind and d.tokens >= requests + extra and d.requests >= requests
    ]
    assert found.tokens == min(d.tokens for d in same_kind)
    if not extra:
        assert found.kind == "decode"


def test_what_does_not_fit_has_no_program():
    table = Table((8,), (16, 32), 8)
    assert table.decide(33, 1, 33) is None
    assert table.decide(9, 9, 1) is None
    assert table.decide(20, 9, 3) is None
    assert len(table) == len(list(table)) == 3


def test_padding_is_accounted_by_kind():
    account = PaddingAccount()
    assert account.padded_share == 0
    account.record(Descriptor("decode", 8, 8, 1), 5)
    account.record(Descriptor("mixed", 32, 8, 32), 31)
    assert account.padded == {"decode": 3, "mixed": 1}
    assert account.padded_share == 4 / 40
