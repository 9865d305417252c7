"""How many weights are read at a time, and in what order they are finished."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.shared.reading_ahead import MOST_BEGUN, READERS, Begun, finish_ahead, readers

SIZES = st.lists(st.integers(0, 60), max_size=200)


@given(SIZES, st.integers(0, 200))
def test_all_are_finished_in_order_and_no_more_begin_than_there_is_room_for(sizes, most):
    finished, held = [], []

    def begin():
        for number, size in enumerate(sizes):
            held.append(size)
            # What was there before this one has room, and this one alone may be larger.
            assert sum(held) <= most + size
            assert len(held) <= MOST_BEGUN + 1
            yield Begun(size, partial(finish, number))

    def finish(number):
        finished.append(number)
        held.pop(0)

    for count, _ in enumerate(finish_ahead(begin(), most)):
        assert len(finished) == count + 1
    assert finished == list(range(len(sizes)))


def test_others_begin_before_one_is_waited_for():
    began = []

    def begin():
        for number in range(100):
            began.append(number)
            yield Begun(10, lambda: None)

    next(finish_ahead(begin(), 55))
    assert began == list(range(6))


def test_an_error_is_raised_in_its_turn_and_nothing_begins_behind_it():
    began = []

    def fail():
        raise ValueError("no number")

    def begin():
        for number in range(1000):
            began.append(number)
            yield Begun(1, fail if number == 3 else lambda: None)

    with pytest.raises(ValueError, match="no number"):
        list(finish_ahead(begin(), 10))
    assert began == list(range(14))


def test_as_many_threads_as_processors(monkeypatch):
    for count, expected in ((1, 1), (4, 4), (256, READERS)):
        own = set(range(count))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, own=own: own, raising=False)
        assert readers() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, expected in ((1, 1), (4, 4), (256, READERS), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert readers() == expected
