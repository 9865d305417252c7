"""The engine core: aborts at any time, late ends, and the counters. Failures:
test_engine_failures.py.
"""

import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.errors import EngineClosed, OutsideTable, RequestError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.request import FinishReason, Request
from twinfer.shared.request_checks import token_array
from twinfer.shared.sampling_params import SamplingParams

from .conftest import GREEDY_ONLY, small

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module", params=["jax", pytest.param("torch", marks=pytest.mark.gpu)])
def started(request, checkpoints, device):
    """An engine for all tests of this file: no test leaves a request in it."""
    folder, _ = checkpoints("qwen3")
    options = small(request.param)
    config = EngineConfig(model=folder, backend=request.param, device=device, **options)
    made = Engine(config, load_config(folder), folder, demand=GREEDY_ONLY)
    yield made
    made.close()


@pytest.fixture
def engine(started):
    yield started
    assert not started.has_work
    started.scheduler.check_integrity()


def finish(engine, *requests):
    while engine.has_work:
        engine.step()
    return [request.output for request in requests]


def prompts(*lengths):
    rng = np.random.default_rng(2)
    return [rng.integers(0, 900, n) for n in lengths]


def test_an_abort_at_any_step_leaves_the_others_alone(engine):
    first, second = prompts(40, 50)
    (want,) = finish(engine, engine.add("alone", second, GREEDY))
    for step in range(8):
        victim, other = engine.add("victim", first, GREEDY), engine.add("other", second, GREEDY)
        for _ in range(step):
            engine.step()
        assert engine.abort("victim")
        assert not engine.abort("victim")
        assert finish(engine, other) == [want]
        assert victim.finish_reason is FinishReason.ABORT
    assert not engine.abort("nobody")
    assert engine.metrics().cache_usage == 0


def test_an_end_of_sequence_found_late_costs_nothing_but_a_step(engine):
    (prompt,) = prompts(10)
    (tokens,) = finish(engine, engine.add("a", prompt, GREEDY))
    stop = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(tokens[7],))
    request = engine.add("b", prompt, stop)
    finish(engine)
    assert request.output == tokens[: tokens.index(tokens[7]) + 1]
    assert request.finish_reason is FinishReason.STOP


def test_each_request_ends_with_exactly_one_update_of_values(engine):
    given = dict(
        zip(
            ("whole", "aborted", "stopped", "waiting", "late"), prompts(9, 20, 5, 7, 3), strict=True
        )
    )
    requests = {
        name: engine.add(name, prompt, GREEDY) for name, prompt in given.items()
    }  # one more than there are rows
    ends = {"aborted": FinishReason.ABORT, "stopped": FinishReason.STOP, "late": FinishReason.ABORT}
    tokens, reasons, turns = {name: [] for name in given}, {}, 0
    assert engine.abort("late")
    while engine.has_work:
        for update in engine.step():
            assert not any(isinstance(value, Request) for value in update)
            assert update.request_id not in reasons, "something came after the last update"
            tokens[update.request_id] += update.tokens
            if update.finish_reason is not None:
                reasons[update.request_id] = update.finish_reason
        turns += 1
        if turns == 6:
            assert engine.abort("aborted")
            assert engine.finish("stopped", FinishReason.STOP)
    assert reasons == dict.fromkeys(given, FinishReason.LENGTH) | ends
    assert tokens == {name: request.output for name, request in requests.items()}
    assert 0 < len(tokens["aborted"]) < len(tokens["whole"])


def test_a_shape_outside_the_table_is_refused(engine):
    from twinfer.bucketing import Descriptor
    from twinfer.shared.packer import padding

    with pytest.raises(OutsideTable):
        engine.worker.execute(padding(Descriptor("decode", 3, 3, 1), engine.shape))


def test_prefix_cache_and_salts(engine):
    *_, prompt = prompts(50, 40)  # no other test's, which the engine would remember
    one, two = (engine.add(name, prompt, GREEDY) for name in ("a", "b"))
    finish(engine)
    again = engine.add("c", prompt, GREEDY)
    other = engine.add("d", prompt, GREEDY, cache_salt="another tenant")
    assert finish(engine, again, other) == [one.output, two.output]
    assert again.num_cached_tokens == 32
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1}, "needs an engine with scheduling_policy='priority'"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_options_of_a_request_are_checked(engine, options, field):
    with pytest.raises(RequestError, match=field):
        engine.add("x", [1, 2], GREEDY, **options)
    with pytest.raises(RequestError, match="priority"):
        engine.add("x", [1, 2], GREEDY, priority=10**5000)
    with pytest.raises(RequestError, match="integer"):
        engine.add("x", [1.5], GREEDY)
    with pytest.raises(RequestError, match="prompt"):
        engine.add("x", list(range(128)), GREEDY)
    engine.add("x", [1, 2], GREEDY)
    with pytest.raises(RequestError, match="request_id"):
        engine.add("x", [1, 2], GREEDY)
    finish(engine)


@pytest.mark.parametrize(
    "prompt",
    [
        "text", b"ab", memoryview(b"ab"), {1}, iter([1]), None, [], (), np.zeros((1, 2), int),
        np.ones(2),
        [True, 2], [np.True_], [1.0], ["1"], [None], [[1]], [np.array(3)], [np.timedelta64(3, "s")],
        [2**63], [1, 10**5000], [np.int64(1), -(10**5000)], [np.uint64(2**63)], np.array([True]),
    ],
    ids=lambda prompt: str(type(prompt)),
)  # fmt: skip
def test_what_is_no_list_of_integers_is_refused(prompt):
    with pytest.raises(RequestError, match=r"^prompt: "):
        token_array(prompt)


def test_integers_of_all_kinds_are_token_ids():
    for prompt in (
        [1, 2],
        (1, 2),
        range(1, 3),
        [np.uint8(1), 2],
        np.array([1, 2], np.uint64),
        np.array([1, 2], ">i2"),
    ):
        made = token_array(prompt)
        assert (made.dtype, made.tolist()) == (np.int64, [1, 2])


def test_a_closed_engine_says_so(checkpoints, device):
    folder, _ = checkpoints("qwen3")
    config = EngineConfig(
        model=folder, backend="torch", device=device, max_model_len=32, max_num_seqs=1
    )
    closed = Engine(config, load_config(folder), folder)
    closed.close()
    closed.close()
    with pytest.raises(EngineClosed, match="closed"):
        closed.add("x", [1], GREEDY)
    with pytest.raises(EngineClosed, match="closed"):
        closed.step()


def test_padding_is_reported(engine):
    finish(engine, engine.add("a", prompts(20)[0], GREEDY))
    assert 0 < engine.metrics().padded_share < 1
