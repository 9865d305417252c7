"""Calls that are cancelled, or whose client leaves, at every moment of their way to the engine:
nothing that was sent is left behind.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from twinfer.serving.formats.table import FORMATS
from twinfer.serving.server.app import build_app
from twinfer.serving.server.engine import EngineProcess, Limits
from twinfer.serving.server.messages import Abort, Add
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.server import Settings
from twinfer.shared.engine import Update
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.tokenizer import LONG, Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).resolve().parents[2] / "shared/models/demo")
SIZES = {
    "max_num_seqs": 4, "num_pages": 9999, "max_model_len": 99_999, "page_size": 16,
    "vocab_size": TOKENIZER.vocab_size, "longest_request": 99_999,
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "n": 2}
CALLS = {
    "/v1/completions": {"prompt": ["x = ", "y" * (LONG + 1)], "max_tokens": 9, "n": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 9},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 9},
}
MOMENTS = 60
"""Turns of the event loop; late ones wait a little, for threads."""


def server():
    """The application over an engine that answers when it is told to, and what it was sent."""
    engine = EngineProcess({}, TOKENIZER, limits=Limits(1000, 1 << 20))
    engine.ready = SimpleNamespace(
        model=SIZES, report=[], seconds={}, programs=1, hang_limit=9, options={}
    )
    sent = []
    engine._send = sent.append
    settings = Settings(["demo"], TOKENIZER, SamplingParams(), FORMATS["none"])
    return build_app(settings, engine, Metrics()), engine, sent


def scope(path):
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": ("x", 1), "server": ("x", 1),
    }  # fmt: skip


async def leave(path, body, moment, *, cancels):
    """One call that ends early. The numbers of those that were sent and of those given back."""
    app, engine, sent = server()
    gone, asked = asyncio.Event(), []

    async def receive():
        if not asked:
            asked.append(1)
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0)

    call = asyncio.create_task(app(scope(path), receive, send))
    for turn in range(moment):
        await asyncio.sleep(0 if turn < MOMENTS // 2 else 0.0005)
        if turn == MOMENTS - 10:  # some are answered in part
            while not sent:  # however long threads take
                await asyncio.sleep(0.0005)
            for number, (live, index) in list(engine._live.items()):
                live.take(index, Update(str(number), (5,)))
    if cancels:
        call.cancel()
    else:
        gone.set()
    await asyncio.wait([call], timeout=60)
    assert call.done()
    assert engine.num_live == engine.num_waiting == engine._waiting_tokens == 0
    added = {message.id for message in sent if isinstance(message, Add)}
    aborted = {number for message in sent if isinstance(message, Abort) for number in message.ids}
    return added, aborted


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CALLS)
def test_nothing_is_left_of_a_call_that_ends_at_any_moment(path, stream):
    body = CALLS[path] | {"stream": stream}

    async def check():
        reached = 0
        for moment in range(MOMENTS):
            for cancels in (True, False):
                added, aborted = await leave(path, body, moment, cancels=cancels)
                assert added == aborted
                reached += bool(added)
        assert 0 < reached < 2 * MOMENTS

    asyncio.run(check())
