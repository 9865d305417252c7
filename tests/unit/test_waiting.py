"""shared/waiting.py: a wait that takes long says what for."""

import re
import time

import pytest

from twinfer.shared import waiting


@pytest.fixture
def notices(monkeypatch, caplog):
    """What was said, where every twentieth of a second is spoken of."""
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    return lambda: [record.getMessage() for record in caplog.records]


def come(holds):
    """Wait until `holds()`."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_says_what_is_true_then(notices):
    came = 0
    with waiting.waiting(lambda: f"{came} of 2", 30):
        come(notices)
        came = 1
        come(lambda: "1 of 2" in notices()[-1])
    said = notices()
    assert re.fullmatch(r"waits for 0 of 2: \d+ of at most 30 s", said[0])
    assert re.fullmatch(r"waits for 1 of 2: \d+ of at most 30 s", said[-1])
    time.sleep(0.2)
    assert notices() == said


def test_a_wait_without_an_end_says_how_long_it_takes(notices):

    def wait_and_fail():
        with waiting.waiting(lambda: "it"):
            come(notices)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        wait_and_fail()
    assert re.fullmatch(r"waits for it: \d+ s", notices()[0])


def test_a_short_wait_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "NOTICE_S", 300.0)
    began = time.monotonic()
    with waiting.waiting(lambda: "it"):
        pass
    assert time.monotonic() - began < 300.0
    assert caplog.records == []
