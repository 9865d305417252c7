"""Parts of the server alone: messages, the engine's loop, streams, doors."""

import asyncio
import json
import logging
import re
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.serving.server import child, messages
from twinfer.serving.server.answers import Words, error_of, finish_reason, usage
from twinfer.serving.server.child import IDLE_MS, Loop, _fatal, hang_limit
from twinfer.serving.server.doors import Doors
from twinfer.serving.server.events import piece_events
from twinfer.serving.server.fields import (
    ChatRequest,
    CompletionRequest,
    NotJson,
    check_depth,
    read_fields,
    read_json,
)
from twinfer.serving.server.live import Live
from twinfer.serving.server.logs import JsonFormatter
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.streams import EventStream
from twinfer.serving.server.traces import Traces
from twinfer.shared.engine import Logprob, Update
from twinfer.shared.errors import ConfigError, EngineDead, InternalError, Overloaded, RequestError
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import SchedulerMetrics

from .written_texts import byte_tokenizer

TOKEN = st.integers(0, 2**31 - 1)
BEST = st.dictionaries(
    TOKEN, st.builds(Logprob, st.floats(-9999, 0), st.integers(1, 10**6)), min_size=1, max_size=4
)
UPDATES = st.lists(
    st.builds(
        Update,
        st.integers(0, 2**62).map(str),
        st.lists(TOKEN, max_size=4).map(tuple),
        st.sampled_from([None, *FinishReason]),
        st.none() | st.lists(BEST, max_size=3),
        st.none() | st.lists(st.none() | BEST, max_size=3),
        st.integers(0, 10**6),
    ),
    max_size=6,
)


@given(UPDATES)
def test_a_step_arrives_as_it_was_sent(updates):
    data = messages.encode(messages.step_message(updates, None))
    assert messages.updates_of(messages.decode_outbox(data)) == [
        (int(update.request_id), update) for update in updates
    ]


def test_parameters_arrive_as_they_were_sent():
    params = SamplingParams(
        n=3, max_tokens=7, temperature=0.5, stop=("a", "b"), logit_bias={3: 1.5},
        allowed_token_ids=(1, 2), seed=-5, logprobs=2,
    )  # fmt: skip
    add = messages.decode_inbox(messages.encode(messages.Add(7, b"\1\0\0\0", params, 2, "s")))
    assert add.params == params
    assert type(add.params.stop) is tuple
    assert (add.id, add.priority, add.salt) == (7, 2, "s")


class FakeEngine:
    """Takes requests, and ends each in the next step."""

    started = ()

    def late_compilations(self):
        return 0

    def __init__(self):
        self.waiting, self.calls = [], []

    @property
    def has_work(self):
        return bool(self.waiting)

    def add(self, name, prompt, params, *, priority, cache_salt):
        if len(prompt) == 0:
            raise RequestError("prompt", "is empty")
        if len(prompt) == 7:
            raise ValueError("a bug")
        self.calls.append(("add", name))
        self.waiting.append(name)

    def finish(self, name, reason):
        self.calls.append((str(reason), name))
        if name in self.waiting:
            self.waiting.remove(name)

    def abort(self, name):
        self.finish(name, FinishReason.ABORT)

    def abort_all(self):
        self.waiting.clear()

    def step(self):
        updates = [Update(name, (1,), FinishReason.LENGTH) for name in self.waiting]
        self.waiting.clear()
        return updates

    def metrics(self):
        return SchedulerMetrics(0, 0, 0.0, 0, 0, 0, 0.0, 0)


def turned(inbox, turns=1):
    """What a loop sends for these messages, and what it asked of its engine."""
    engine, sent, waits = FakeEngine(), [], []
    queue = list(inbox)

    def receive(wait_ms):
        waits.append(wait_ms)
        return queue.pop(0) if queue else None

    loop = Loop(engine, receive, sent.append)
    for _ in range(turns):
        loop.turn()
    return sent, engine, waits


def add(number, prompt=(1, 2)):
    return messages.encode(
        messages.Add(number, np.array(prompt, np.int32).tobytes(), SamplingParams())
    )


def test_a_turn_takes_all_messages_then_steps_once():
    sent, _, waits = turned([add(1), add(2)])
    assert [number for number, _ in messages.updates_of(sent[0])] == [1, 2]
    assert waits == [IDLE_MS, 0, 0]


def test_steps_go_on_while_very_many_messages_come(monkeypatch):
    """Each of a large form, say."""
    decode = child.decode_inbox
    monkeypatch.setattr(child, "decode_inbox", lambda data: time.sleep(0.02) or decode(data))
    sent, _, _ = turned([add(number) for number in range(1, 11)], turns=10)
    steps = [message for message in sent if isinstance(message, messages.Step)]
    assert len(steps) > 2
    assert [n for step in steps for n, _ in messages.updates_of(step)] == list(range(1, 11))


def test_an_abort_behind_its_request_keeps_it_from_starting():
    sent, engine, _ = turned([add(1), add(2), messages.encode(messages.Abort([1]))])
    assert ("add", "1") not in engine.calls
    assert [number for number, _ in messages.updates_of(sent[0])] == [2]


def test_a_refused_request_alone_is_refused():
    sent, _, _ = turned([add(1, ()), add(2)])
    assert sent[0] == messages.Refused(1, "prompt", "is empty")
    assert [number for number, _ in messages.updates_of(sent[1])] == [2]


def test_a_bug_that_one_request_meets_ends_no_other(caplog):
    sent, _, _ = turned([add(1, range(7)), add(2)])
    assert sent[0].id == 1
    assert "a bug" not in sent[0].reason
    assert "a bug" in caplog.text
    assert [number for number, _ in messages.updates_of(sent[1])] == [2]


class SlowGrammars:
    """Compiles once `go` is set; the expression "bad" cannot be."""

    def __init__(self):
        self.go, self.known = threading.Event(), set()

    def is_compiled(self, form):
        return form in self.known

    def compile(self, form):
        assert self.go.wait(20)
        if form.text == "bad":
            raise RequestError("structured_outputs", "is bad")
        self.known.add(form)


def formed(number, expression):
    params = SamplingParams(structured_outputs={"regex": expression})
    return messages.encode(messages.Add(number, b"\1\0\0\0", params))


def test_steps_go_on_while_a_grammar_is_compiled():
    """The request waits for it alone; one that nobody wants any more never starts; what cannot be
    compiled is refused.
    """
    engine, sent = FakeEngine(), []
    engine.grammars = SlowGrammars()
    inbox = [formed(1, "a"), formed(2, "bad"), formed(3, "c"), formed(4, "d"), add(5)]

    def receive(wait_ms):
        time.sleep(0 if inbox else wait_ms / 1000)
        return inbox.pop(0) if inbox else None

    loop = Loop(engine, receive, sent.append)
    loop.turn()
    assert [number for number, _ in messages.updates_of(sent[0])] == [5]
    inbox += [messages.encode(messages.Abort([3])), messages.encode(messages.Finish([4])), add(6)]
    loop.turn()
    assert engine.calls[-1] == ("add", "6")
    engine.grammars.go.set()
    end = time.monotonic() + 20
    while loop._compiling and time.monotonic() < end:
        loop.turn()
    assert [call for call in engine.calls if call[0] == "add"] == [
        ("add", "5"),
        ("add", "6"),
        ("add", "1"),
    ]
    refused = [message for message in sent if isinstance(message, messages.Refused)]
    assert refused == [messages.Refused(2, "structured_outputs", "is bad")]
    # The next one with the same form waits for nothing.
    inbox.append(formed(7, "a"))
    loop.turn()
    assert engine.calls[-1] == ("add", "7")


def test_an_idle_loop_beats():
    sent, _, waits = turned([], turns=2)
    assert [type(message) for message in sent] == [messages.Beat] * 2
    assert waits == [IDLE_MS] * 2


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70).filter(lambda i: -(2**63) <= i < 2**64)
    | st.floats() | st.text(max_size=4) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
TAG = st.sampled_from(["add", "abort", "finish", "reset", "step", "x"])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=40) | st.tuples(TAG, VALUE, VALUE, VALUE).map(messages.encode)))
def test_no_message_ends_the_loop(inbox):
    sent, _, _ = turned(inbox, turns=2)
    assert sent


def test_exit_codes():
    assert _fatal(MemoryError(), starting=False).exit_code == 71
    assert _fatal(RuntimeError("RESOURCE_EXHAUSTED: out"), starting=True).exit_code == 71
    assert _fatal(ValueError("x"), starting=False).exit_code == 70
    assert _fatal(RequestError("x", "y"), starting=False).exit_code == 70
    assert _fatal(RequestError("x", "y"), starting=True).exit_code == 2
    assert _fatal(ValueError("x"), starting=True).exit_code == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("n", "x"), 400),
        (Overloaded("x"), 503),
        (EngineDead("x"), 503),
        (InternalError("secret"), 500),
        (ValueError("secret"), 500),
    ],
)
def test_errors_have_a_status_and_no_inside(error, status):
    found, body = error_of(error)
    assert found == status
    assert "secret" not in json.dumps(body)


def live(count=1, **params):
    return Live([1], [SamplingParams(**params)] * count, None)


def test_news_are_told_once_and_together():
    async def check():
        one = live(2)
        one.take(0, Update("1", (5,)))
        one.take(0, Update("1", (6,)))
        one.take(1, Update("2", (7,)))
        assert [(n.index, n.token_ids, n.first) for n in one.news()] == [
            (0, [5, 6], True), (1, [7], True),
        ]  # fmt: skip
        assert one.news() == []
        one.take(0, Update("1", (), FinishReason.LENGTH))
        (last,) = one.news()
        assert (last.token_ids, last.finish_reason, last.first) == ([], "length", False)
        assert one.news() == []
        assert not one.done

    asyncio.run(check())


def test_news_tell_of_marks_where_they_stand_in_new_text():
    tokenizer = byte_tokenizer(["<a>"])
    (mark,) = tokenizer.encode("<a>", False)
    ids = tokenizer.encode("xy<a>z<a>", False)

    async def check(size):
        one = Live([1], [SamplingParams(max_tokens=99)], tokenizer)
        one.look_for({mark: None})
        text, places = "", []
        for place in range(0, len(ids), size):
            one.take(0, Update("1", tuple(ids[place : place + size])))
            for news in one.news():
                for found in news.marks:
                    assert 0 <= found.place <= len(news.text)
                    assert ids[found.number] == found.token_id == mark
                    places.append(len(text) + found.place)
                text += news.text
        assert (text, places) == ("xyz", [2, 3])

    for size in (1, 2, 5):
        asyncio.run(check(size))


def test_news_may_wait_for_more_tokens():
    """The first of a completion and its end never do, nor what came before an error."""

    async def check():
        one, said = live(2, max_tokens=99), []
        one.interval = 3

        def after(index, *tokens, reason=None):
            one.changed.clear()
            one.take(index, Update(str(index), tokens, reason))
            news = [(n.index, n.token_ids, n.finish_reason) for n in one.news()]
            assert one.changed.is_set() == bool(news)
            said.extend(token for _, ids, _ in news for token in ids)
            assert usage([one])["completion_tokens"] == len(said)
            return news

        assert after(0, 5) == [(0, [5], None)]
        assert after(0, 6) == after(0, 7) == []
        assert after(1, 1) == [(1, [1], None)]  # the other one's wait on
        assert after(0, 8) == [(0, [6, 7, 8], None)]
        assert after(0, 9) == []
        assert after(1, 2, 3, 4, 5) == [(1, [2, 3, 4, 5], None)]  # of a step with several
        assert after(0, 1, reason=FinishReason.LENGTH) == [(0, [9, 1], "length")]
        assert after(1, 6) == []
        one.changed.clear()
        one.fail(RequestError("x", "y"))
        assert one.changed.is_set()
        assert [(n.index, n.token_ids) for n in one.news()] == [(1, [6])]
        assert one.news() == []

    asyncio.run(check())


def test_a_request_without_a_token_left_ends_with_what_it_asked_for():
    """Its stream too, which has begun: not with an error of the server's own."""

    async def told():
        one = live()
        one.named = lambda error: RequestError("tools", error.reason)
        one.take(0, Update("1", (5,)))
        one.take(0, Update("1", (), FinishReason.STUCK))

        def pieces(place, live, news):
            return [{"t": news.token_ids, "f": finish_reason(news.finish_reason)}]

        return [data async for data in piece_events([one], pieces, None)]

    first, last = asyncio.run(told())
    assert first == b'data: {"t":[5],"f":null}\n\n'
    assert b'"param":"tools"' in last
    assert b"no token was left" in last


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({}, "bad_words"),
        ({"tools": [TOOL]}, "bad_words"),  # which may be called or not: they bind nothing
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "tools"),
        ({"tools": [TOOL], "bad_words": None}, "tools"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
def test_what_leaves_no_token_is_named(more, field):
    body = {"messages": [{"role": "user", "content": "x"}], "bad_words": ["a"]} | more
    assert read_fields(ChatRequest, body).form_field == field


def test_what_comes_while_a_slow_client_reads_is_told():
    """Its end among it, with the reason."""

    async def told():
        one, got = live(), []
        one.take(0, Update("1", (5,)))
        pieces = piece_events(
            [one], lambda _, __, n: [{"t": n.token_ids, "f": n.finish_reason}], None
        )
        async for data in pieces:
            if not got:
                one.take(0, Update("1", (6,), FinishReason.LENGTH))
            got.append(data)
        return got

    assert asyncio.run(told()) == [
        b'data: {"t":[5],"f":null}\n\n',
        b'data: {"t":[6],"f":"length"}\n\n',
        b"data: [DONE]\n\n",
    ]


def test_others_run_while_much_is_told():
    """As of many completions with log-probabilities, to a client that has not read for a while."""

    async def told():
        one, turns, others = live(64), [], 0

        async def run():
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(run())
        for index in range(64):
            one.take(index, Update(str(index), (5,), FinishReason.LENGTH))
        pieces = piece_events([one], lambda _, __, n: [{"i": n.index, "x": "x" * 30_000}], None)
        found = []
        async for data in pieces:
            turns.append(others)
            found += re.findall(rb'"i":(\d+)', data)
        running.cancel()
        assert found == [b"%d" % index for index in range(64)]
        return turns

    turns = asyncio.run(told())
    assert len(set(turns)) > 10  # 2 MB in parts of 64 KiB


async def never():
    await asyncio.Event().wait()


def test_a_client_that_does_not_read_is_left():
    ended = []

    async def events():
        while True:
            yield b"x"

    async def send(message):
        if message["type"] == "http.response.body":
            await never()

    stream = EventStream(events(), lambda: ended.append(1), write_s=0.05)
    asyncio.run(asyncio.wait_for(stream({}, never, send), 60))
    assert ended == [1]


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_ends_its_stream(begun):
    ended, closed = [], []

    async def events():
        try:
            yield b"x"
            await never()
        finally:
            closed.append(1)

    async def check():
        gone, sending = asyncio.Event(), asyncio.Event()

        async def send(message):
            if not begun or message["type"] == "http.response.body":
                sending.set()
            if not begun:
                await never()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(
            EventStream(events(), lambda: ended.append(1))({}, receive, send)
        )
        await asyncio.wait_for(sending.wait(), 60)
        gone.set()
        await asyncio.wait_for(task, 60)

    asyncio.run(check())
    assert ended == [1]
    assert closed == ([1] if begun else [])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://x/v1/traces", r"pip install 'twinfer\[traces\]'"),
        ("x:4317", "got x:4317, allowed is a URL"),
    ],
)
def test_traces_that_cannot_be_had_are_refused(url, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=f"^otlp-traces-endpoint: .*{says}"):
        Traces(url)


def test_doors_ask_before_anything_is_read():
    sent = []

    async def app(scope, receive, send):
        raise AssertionError("nobody may come here")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer \xff")]}
    asyncio.run(Doors(app, keys=["one"], max_body=10)(scope, never, send))
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("root", ["", "/llm", "/llm/v1"])
@pytest.mark.parametrize(
    ("path", "is_open"),
    [("/health", True), ("/", True), ("/llmx", False), ("/health/x", False), ("/v1/models", False)],
)
def test_open_paths_are_those_that_a_proxy_passes_on(root, path, is_open, cuts):
    """uvicorn puts the prefix that a proxy has cut off before each path again, also where one has
    left it there.
    """
    sent = []

    async def app(scope, receive, send):
        sent.append({"status": 200})

    async def send(message):
        sent.append(message)

    path = root + (path if cuts else root + path)
    scope = {"type": "http", "path": path, "root_path": root, "headers": []}
    asyncio.run(Doors(app, keys=["one"], max_body=10, open_paths=["/"])(scope, never, send))
    assert sent[0]["status"] == (200 if is_open else 401)


def test_slow_engines_may_be_silent_for_longer():
    assert hang_limit(0.01) == hang_limit(0.5) == 10
    assert hang_limit(3.0) == 60


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"a name: 7", True), (b"~" * 128, True), (b"", False), (b"~" * 129, False),
        (b"a\tb", False), (b"a\n", False), (b"\xe4", False),
    ],
)  # fmt: skip
def test_a_client_names_its_request(given, kept, caplog):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/x", "method": "POST", "headers": [(b"x-request-id", given)]}
    caplog.set_level("INFO")
    asyncio.run(Doors(app, keys=[], max_body=10, log_requests=True)(scope, never, send))
    ((_, name),) = sent[0]["headers"]
    assert (name == given) == kept
    assert name
    fields = caplog.records[0].fields
    assert (fields["request_id"], fields["status"]) == (name.decode(), 204)
    assert (fields["reason"], fields["first_token_ms"]) == (None, None)


def test_a_line_of_json_has_what_went_wrong():
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "got %s", ("é",), sys.exc_info())
    record.fields = {"count": 3}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"]) == ("ERROR", "x", "got é")
    assert read["count"] == 3
    assert "ValueError" in read["exception"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "suffix"})


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([ChatRequest, CompletionRequest]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_a_body_is_read_or_refused_by_name(kind, change):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]} | change
    refused = None
    try:
        read = read_fields(kind, body)
        read.check()
        if kind is CompletionRequest:
            read.prompts()
        read.params(SamplingParams(), 100)
    except RequestError as error:
        refused = error.field.split("[")[0].split(".")[0]
    assert refused is None or refused in body, (refused, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * (1 << 20) + b"1]}",
        b'{"prompt": "x", "z": [' + b"[]," * 200_000 + b"1]}",
        b'{"messages": [' + b"{}," * 200_000 + b"{}]}",
        b'{"z": [' + b'"a",' * 140_000 + b'"a"]}',
        b'{"a": {' + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}}",
    ],
    ids=lambda body: str(body[:30]),
)
def test_values_of_a_body_are_bounded(body):
    with pytest.raises(RequestError, match="more than 1048576 values"):
        read_json(body)


@pytest.mark.parametrize(
    "text", ['{"a": [1], },' * 200_000, "\\" * 2_000_000, '\\"' * 1_000_000, "," * 3_000_000]
)
def test_texts_of_a_body_are_not_counted(text):
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_half_a_text_is_read_once():
    """Each of its quotes could begin one."""
    start = time.thread_time()  # of its work, whoever else has the processors
    with pytest.raises(RequestError, match="is no JSON"):
        read_json(b'[1,"' + b'\\",[' * 2_000_000)
    assert time.thread_time() - start < 5


def test_depth_is_bounded():
    value = "x"
    for _ in range(64):
        value = [value]
    check_depth(value)
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        check_depth([value])


def test_tokens_that_are_no_text_have_names_of_their_own():
    class Pieces:
        def piece(self, token):
            return [b"\xc3", b"\xa9", "é", None][token]

    words = Words(Pieces())
    assert [words.name(token) for token in range(3)] == ["bytes:\\xc3", "bytes:\\xa9", "é"]
    assert words.name(3, as_id=True) == "token_id:3"
    assert words.text(0) == "\ufffd"
    assert words.bytes_of(3) == b""


def test_the_time_of_a_request_is_divided():
    """Its parts add up to the whole, and are told once, however many completions there are."""
    metrics = Metrics()
    live = Live([1], [SamplingParams(max_tokens=3)] * 2, None)
    live.created = 100.0
    live.begin(1, 102.0)
    live.begin(0, 103.0)
    for now in (107.0, 109.0, 117.0):
        for index in range(2):
            reason = FinishReason.LENGTH if now == 117.0 else None
            live.take(index, Update(str(index), (5,), reason))
        metrics.tokens(live, 2, now)
    metrics.end(live)
    told = metrics.text().decode()
    for name, seconds in (
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 5.0),
        ("request_decode_time_seconds", 10.0),
        ("request_inference_time_seconds", 15.0),
        ("e2e_request_latency_seconds", 17.0),
        ("time_to_first_token_seconds", 7.0),
    ):
        assert f"twinfer:{name}_sum {seconds}\n" in told
        assert f"twinfer:{name}_count 1.0\n" in told


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": "5"}, 'max_tokens: got "5"; input should be a valid integer'),
        ({"temperature": "0.5"}, 'temperature: got "0.5"; input should be a valid number'),
        ({"stream": "true"}, 'stream: got "true"; input should be a valid boolean'),
        ({"max_tokens": True}, "max_tokens: got True; input should be a valid integer"),
        ({"stop": ["x", 5]}, "stop[1]: got 5; input should be a valid string"),
    ],
)
def test_a_text_where_a_number_is_expected_does_not_look_like_one(body, says):
    with pytest.raises(RequestError) as refused:
        read_fields(CompletionRequest, {"prompt": "x"} | body)
    assert str(refused.value) == says


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000])
def test_a_number_that_is_out_of_range_is_json(number):
    with pytest.raises(RequestError, match=r"^body: has a number that is out") as refused:
        read_json(f'{{"prompt": "a", "temperature": {number}}}'.encode())
    assert not isinstance(refused.value, NotJson)


def test_what_asks_for_the_best_of_more_is_refused():
    for kind in (ChatRequest, CompletionRequest):
        for best_of in (None, 2):
            body = {"prompt": "x", "messages": [], "n": 2, "best_of": best_of}
            read_fields(kind, body).check()
        with pytest.raises(RequestError, match=r"^best_of: got 2, must equal n"):
            read_fields(kind, {"prompt": "x", "messages": [], "best_of": 2}).check()


def test_an_empty_text_asks_for_nothing():
    read_fields(CompletionRequest, {"prompt": "x", "suffix": ""}).check()
    with pytest.raises(RequestError, match=r"^suffix: is not supported"):
        read_fields(CompletionRequest, {"prompt": "x", "suffix": "a"}).check()


def test_a_body_may_begin_with_a_mark_of_its_encoding():
    assert read_json(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}
