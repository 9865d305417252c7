"""The engine's loop with a real engine, and whatever its inbox may hold."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinfer.serving.llm import LLM
from twinfer.serving.server import messages
from twinfer.serving.server.child import Loop
from twinfer.shared.sampling_params import SamplingParams

NUMBER = (
    st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 6)
    | st.floats(-3, 12)
    | st.sampled_from([float("nan"), float("inf")])
)
FORM = st.none() | st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["regex", "json", "choice", "grammar", "x"]),
        "text": st.sampled_from(["[ab]{2}", "(", '{"type": "integer"}', "", "x" * 300]),
    }
)
LISTED = st.lists(st.integers(-1, 3000) | NUMBER, max_size=4)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4)},
    optional={
        "n": NUMBER, "min_tokens": st.integers(-1, 5), "temperature": NUMBER, "top_k": NUMBER,
        "top_p": NUMBER, "min_p": NUMBER, "seed": NUMBER, "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER, "repetition_penalty": NUMBER, "stop_token_ids": LISTED,
        "allowed_token_ids": LISTED, "banned_token_ids": LISTED, "ignore_eos": st.booleans(),
        "stop": st.lists(st.text(max_size=2), max_size=2), "logprobs": st.integers(-1, 21),
        "prompt_logprobs": st.integers(-1, 21), "structured_outputs": FORM, "what": NUMBER,
        "logit_bias": st.dictionaries(st.integers(-1, 3000), NUMBER, max_size=2),
        "banned_sequences": st.lists(LISTED, max_size=2),
    },
)  # fmt: skip
ID = st.integers(0, 8)
PROMPT = st.lists(st.integers(-1, 2100), max_size=40).map(
    lambda ids: b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
)
MESSAGE = st.one_of(
    st.tuples(
        st.just("add"), ID, PROMPT | st.binary(max_size=9), PARAMS, st.just(0) | NUMBER,
        st.text(max_size=300),
    ),
    st.tuples(st.just("add"), ID, PROMPT, PARAMS),
    st.tuples(st.sampled_from(["abort", "finish"]), st.lists(ID | NUMBER, max_size=4)),
    st.tuples(st.sampled_from(["reset", "reset_prefixes"])),
    st.tuples(st.just("abort"), NUMBER),
)  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    options = {"backend": "torch", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
    with LLM("demo", progress=False, num_pages=24, **options) as llm:
        yield llm.engine


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(MESSAGE.map(messages.encode), max_size=12), st.integers(1, 4))
def _run_anything(engine, inbox, at_once):
    queue, sent = [*inbox], []
    given = itertools.count()

    def receive(wait_ms):
        return queue.pop(0) if queue and next(given) % (at_once + 1) < at_once else None

    loop = Loop(engine, receive, sent.append)
    while queue or engine.has_work or loop._compiling:
        loop.turn()
    messages.encode(sent)
    engine.scheduler.check_integrity()
    assert not engine.scheduler.requests
    assert not engine._matched


def test_nothing_in_its_inbox_ends_an_engine(engine, caplog):
    """Each request is served or refused, and what was held is free again."""
    _run_anything(engine)
    assert "met an error inside" not in caplog.text
    assert engine.metrics().cache_usage == 0


@pytest.mark.parametrize("turns", range(9))
def test_who_leaves_frees_all_pages_within_one_turn(turns, engine):
    """In any phase: waiting, within the prompt, decoding. The others go on."""
    queue, sent = [], []
    loop = Loop(engine, lambda wait_ms: queue.pop(0) if queue else None, sent.append)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    prompts = [[5 + number] * (90 if number % 2 else 9) for number in range(6)]
    queue += [
        messages.encode(messages.Add(number, np.array(prompt, np.int32).tobytes(), params))
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(turns):
        loop.turn()
    queue.append(messages.encode(messages.Abort([1, 2, 3, 4, 5])))
    loop.turn()
    kept = engine.scheduler.requests
    assert list(kept) == ["0"]
    assert engine.metrics().cache_usage <= math.ceil((9 + 60) / 16) / engine.report.num_pages
    queue.append(messages.encode(messages.Abort([0])))
    loop.turn()
    assert engine.metrics().cache_usage == 0
    engine.scheduler.check_integrity()
    while engine.has_work:
        loop.turn()
