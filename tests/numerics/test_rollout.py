"""What one side drew and the other computed: importance ratios, drift, perplexity."""

import json

import numpy as np
import pytest

from twinfer.numerics.errors import EQUAL, FAILED
from twinfer.numerics.questions import rollout
from twinfer.numerics.questions.rollout import check_rollout, render
from twinfer.numerics.showing.report import page
from twinfer.numerics.sides.steps import encode
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.shared.errors import ConfigError

SIDES = [
    parse_target("torch:cpu"),
    parse_target("torch:cpu:row_invariant=true,paged_attention=rows"),
]
TOKENS = 300


@pytest.fixture(scope="module")
def subject():
    return open_subject("demo", max_model_len=160)


@pytest.fixture(scope="module")
def clean(subject):
    text = np.asarray(encode("import json\n\n\ndef read(path):\n" * 20, subject), np.int32)
    return check_rollout(subject, SIDES, tokens=TOKENS, text=text)


def test_two_right_sides_are_equal(clean):
    assert clean.exit_code == EQUAL, render(clean)
    found = clean.figures
    assert found["ratios"]["tokens"] == TOKENS == sum(x["tokens"] for x in found["drift"])
    assert (
        0.0 < found["sigma"] <= 1.2
    )  # other kernels: not the same bits, and no more than rounding
    assert found["ratios"]["smallest"] < 1.0 < found["ratios"]["largest"]
    assert found["perplexity"]["a"] == pytest.approx(found["perplexity"]["b"], rel=1e-2)


def test_it_is_shown(clean):
    html = page(json.loads(clean.dumps()))
    assert "importance ratios" in html
    assert "perplexity" in html
    assert "positions 16 to 31" in render(clean)


def serving(monkeypatch, change):
    """What `rollout` serves, changed by `change(answer, side)`."""
    serve = rollout.serve

    def changed(subject, target, asks, **options):
        served = serve(subject, target, asks, **options)
        for answer in served.answers:
            change(answer, "ab"[bool(target.options)])
        return served

    monkeypatch.setattr(rollout, "serve", changed)


def scale(top, factor):
    return {token: entry._replace(logprob=entry.logprob * factor) for token, entry in top.items()}


@pytest.mark.parametrize("side", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_a_side_whose_values_are_off_is_seen(subject, monkeypatch, side):
    def change(answer, of):
        if of == side and answer.prompt_logprobs:
            answer.prompt_logprobs = [top and scale(top, 1.02) for top in answer.prompt_logprobs]
        if of == side:
            answer.logprobs = [scale(top, 1.02) for top in answer.logprobs]

    serving(monkeypatch, change)
    report = check_rollout(subject, SIDES, tokens=TOKENS)
    assert report.exit_code == FAILED
    assert "of what two roundings make" in report.problems[0]


def test_a_difference_that_grows_with_the_position_is_seen():
    rng = np.random.default_rng(0)
    positions, noise = np.arange(16, 272), 0.01 * rng.standard_normal(256)
    delta = 0.01 * rng.standard_normal(256)
    growth, limit = rollout._growth(positions, delta, noise)
    assert growth <= limit
    growth, limit = rollout._growth(positions, delta * positions / 16.0, noise)
    assert growth > limit
    # Two sides that share roundings near the start are right.
    growth, limit = rollout._growth(positions, delta * positions / 300.0, noise)
    assert growth <= limit


def test_every_prompt_is_as_long(subject):
    asks = rollout._asks(subject, 10_000)
    assert {len(ask.prompt) for ask in asks} == {rollout.FIRST}
    assert sum(ask.params.max_tokens for ask in asks) == 10_000


def test_wrong_input_is_refused(subject):
    with pytest.raises(ConfigError, match="rollout_tokens: got 0"):
        check_rollout(subject, SIDES, tokens=0)
    with pytest.raises(ConfigError, match="max_model_len: got 16"):
        check_rollout(open_subject("demo", max_model_len=16), SIDES)
    with pytest.raises(ConfigError, match="text: got 1 tokens"):
        check_rollout(subject, SIDES, text=np.zeros(1, np.int32))
