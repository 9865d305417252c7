"""Which of several engines gets a prompt, and what becomes of requests when one ends: with engines
that only keep what they are sent.
"""

import asyncio
import random
from types import SimpleNamespace

import pytest
import zmq

from twinfer.serving.server import replicas
from twinfer.serving.server.engine import Counters, EngineProcess, Limits
from twinfer.serving.server.messages import Gauges
from twinfer.serving.server.replicas import Replicas, Sent, devices_of_replicas
from twinfer.shared.errors import ConfigError, EngineDead, Overloaded
from twinfer.shared.sampling_params import SamplingParams

PAGE = 4
PARAMS = SamplingParams(max_tokens=5, temperature=0)


def engine(**model):
    made = EngineProcess({}, None, limits=Limits(1000, 1 << 20))
    sizes = {"max_num_seqs": 4, "num_pages": 64, "cached_tokens": 256, "page_size": PAGE}
    sizes["longest_request"] = 256
    made.ready = SimpleNamespace(
        model=sizes | model, report=[], seconds={}, programs=1, hang_limit=9, options={}
    )
    made.sent = []
    made._send = made.sent.append
    return made


def replicas_of(count, **model):
    made = Replicas([engine(**model) for _ in range(count)])
    made._sent, made._page_size = [Sent(512) for _ in range(count)], PAGE
    return made


def where(made, live):
    """The number of the engine that has a request."""
    return next(
        i for i, e in enumerate(made._engines) if any(x is live for x, _ in e._live.values())
    )


@pytest.fixture(autouse=True)
def loop():
    """What `EngineProcess` makes its events in."""

    async def nothing():
        pass

    asyncio.run(nothing())


def test_equal_beginnings_go_where_they_went():
    made = replicas_of(3)
    first = [made.add([n] * 9, PARAMS) for n in (1, 2, 3)]
    assert sorted(where(made, live) for live in first) == [0, 1, 2]
    for n, live in enumerate(first, 1):
        again = made.add([n] * 8 + [7, 8, 9], PARAMS)
        assert where(made, again) == where(made, live)


def test_the_longest_beginning_counts_and_salts_keep_apart():
    made = replicas_of(2)
    short, long = made.add([1] * 4, PARAMS), made.add([1] * 4 + [2] * 8, PARAMS)
    # The second went where the first was: its beginning is there.
    assert where(made, short) == where(made, long)
    other = made.add([1] * 4 + [3] * 8, PARAMS, salt="x")
    assert where(made, other) != where(made, long)


def test_what_is_sent_to_an_engine_that_ended_unseen_is_not_lost(tmp_path):
    """Its end is seen a moment later. Until then calls ended with an error inside of the server."""
    made = replicas_of(2)
    gone = made._engines[0]
    del gone._send
    with zmq.Context() as context, context.socket(zmq.PUSH) as inbox:
        inbox.set_hwm(0)
        inbox.bind(f"ipc://{tmp_path}/in")
        gone._inbox = inbox
        left, live = (gone.add([n] * 9, PARAMS) for n in (1, 2))
        gone.abort(left)
    gone._finish(70, "the engine ended with exit code 3")
    assert where(made, live) == 1
    assert live.error is None
    made._engines[1]._finish(70, "the engine ended with exit code 3")
    assert isinstance(live.error, EngineDead)
    assert left.error is None


def test_an_engine_with_much_more_to_do_is_passed_over():
    made = replicas_of(2)
    lives = [made.add([1] * 8, PARAMS) for _ in range(replicas.SPREAD + 2)]
    assert {where(made, live) for live in lives[:-1]} == {where(made, lives[0])}
    assert where(made, lives[-1]) != where(made, lives[0])


def test_shared_beginnings_are_found_as_by_one_engine():
    """Eight groups of prompts, each with a beginning of its own, in random order: two engines find
    the pages that one finds, but for at most a first time more of each group.
    """

    def found(count):
        rng, made, hits, total = random.Random(1), replicas_of(count), 0, 0
        prompts = [[g] * 64 + [rng.randrange(9, 99) for _ in range(8)] for g in range(8)] * 40
        rng.shuffle(prompts)
        for prompt in prompts:
            digests = []
            replicas.extend_digests(
                digests, replicas.np.array(prompt, "int32"), len(prompt) // PAGE, PAGE, ""
            )
            before = [sent.matched(digests) for sent in made._sent]
            live = made.add(prompt, PARAMS)
            hits, total = hits + before[where(made, live)], total + len(digests)
            if rng.random() < 0.9:
                made.abort(live)
        return hits / total

    one, two = found(1), found(2)
    assert one > 0.8
    assert two > 0.95 * one


def test_what_waits_moves_and_what_has_tokens_gets_an_error():
    made = replicas_of(2)
    lives = [made.add([n] * 5, PARAMS) for n in range(6)]
    dying = made._engines[0]
    theirs = [live for live in lives if where(made, live) == 0]
    assert len(theirs) == 3
    theirs[0].completions[0].output.token_ids.append(3)
    sent = len(made._engines[1].sent)
    dying._finish(70, "killed")
    assert isinstance(theirs[0].error, EngineDead)
    assert all(live.error is None for live in theirs[1:])
    assert [where(made, live) for live in theirs[1:]] == [1, 1]
    assert len(made._engines[1].sent) == sent + 2
    assert made.exit_code is None
    assert all(live.error is None for live in lives if live not in theirs)
    made.abort(theirs[1])
    assert made.num_live == 4
    made._engines[1]._finish(71, "no room")
    assert made.exit_code == 70
    assert made.why == "killed"
    with pytest.raises(EngineDead):
        made.add([1], PARAMS)


def test_a_full_engine_is_not_the_end():
    made = replicas_of(2, max_num_seqs=1)
    made._engines[0].limits = Limits(1, 1 << 20)
    lives = [made.add([1] * 8, PARAMS) for _ in range(4)]
    assert {where(made, live) for live in lives} == {0, 1}
    made._engines[1].limits = Limits(1, 1 << 20)
    with pytest.raises(Overloaded):
        made.admit(1, 8)


def test_numbers_are_those_of_all():
    made = replicas_of(2)
    made._engines[0].gauges = Gauges(running=2, cache_usage=0.5, prefix_hits=7)
    made._engines[1].gauges = Gauges(running=1, cache_usage=0.1, prefix_hits=1)
    made._engines[0].counters = Counters(steps=3, rejected={"tokens": 1})
    made._engines[1].counters = Counters(steps=4, rejected={"tokens": 2, "requests": 1})
    assert made.gauges == Gauges(running=3, cache_usage=0.3, prefix_hits=8)
    assert made.counters == Counters(steps=7, rejected={"tokens": 3, "requests": 1})
    assert made.ready.model["max_num_seqs"] == 8
    assert made.ready.model["replicas"] == 2
    made._engines[1].ready.model["longest_request"] = 128  # a request is of one engine
    assert made.ready.model["longest_request"] == 128
    made.draining = True
    assert all(e.draining for e in made._engines)
    made.draining = False
    made.add([1, 2], PARAMS)
    assert made.requests()[0]["replica"] == 0


def test_ends_of_prompts_are_forgotten_before_their_beginnings():
    sent = Sent(3)
    sent.keep([b"a", b"b", b"c", b"d"])
    assert sent.matched([b"a", b"b", b"c", b"d"]) == 3
    sent.keep([b"a", b"x"])
    assert sent.matched([b"a", b"x"]) == 2
    assert sent.matched([b"a", b"b", b"c"]) == 2


def test_each_engine_sees_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    seen = devices_of_replicas(2, 2, "auto")
    assert seen == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert devices_of_replicas(2, 2, "cpu") == [{}, {}]
    with pytest.raises(ConfigError, match="data_parallel_size: got 3, each with 2 of 4 GPUs"):
        devices_of_replicas(3, 2, "cuda")
    for device in ("cuda:1", "tpu"):
        with pytest.raises(ConfigError, match=f"data_parallel_size: got 2, and device {device}"):
            devices_of_replicas(2, 1, device)
