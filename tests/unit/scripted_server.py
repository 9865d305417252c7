"""A server whose engine writes what a test says."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import httpx

from twinfer.serving.server.app import build_app
from twinfer.serving.server.engine import EngineProcess, Limits
from twinfer.serving.server.messages import Add
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.server import Settings
from twinfer.shared.engine import Logprob, Update
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_params import SamplingParams


class ScriptedServer:
    """A server whose engine writes `texts`, one for each completion of a call, in steps of `step`
    tokens. `asked` are the settings that reached it, `prompts` what it was to go on with. A text
    ends with its last token if that is one of `last`, else behind it. `more` are other settings.
    """

    def __init__(
        self,
        *texts,
        form,
        tokenizer,
        template,
        step=1,
        ends=(),
        last=(),
        length=False,
        room=9999,
        **more,
    ):
        self.asked, self.prompts = [], []
        engine = EngineProcess({}, tokenizer, limits=Limits(9, 99_999))
        sizes = {"max_num_seqs": 4, "num_pages": 999, "max_model_len": room, "page_size": 16}
        sizes |= {"vocab_size": tokenizer.vocab_size, "longest_request": room}
        engine.ready = SimpleNamespace(model=sizes, options={})
        texts = itertools.cycle(texts)

        def steps(message, text):
            ids = text if isinstance(text, list) else tokenizer.encode(text, False)
            scored = message.params.logprobs is not None
            live, index = engine._live[message.id]

            async def write():
                end = FinishReason.LENGTH if length else FinishReason.STOP
                for place in range(0, len(ids), step):
                    part = ids[place : place + step]
                    ends = *last, *message.params.stop_token_ids
                    is_last = place + step >= len(ids) and part[-1] in ends
                    scores = [{token: Logprob(-1.0, 1)} for token in part] if scored else None
                    if live.take(index, Update("x", tuple(part), end if is_last else None, scores)):
                        return
                    await asyncio.sleep(0)
                if not live.completions[index].done:
                    live.take(index, Update("x", (), end))

            return write()

        def answer(message):
            if isinstance(message, Add):
                self.asked.append(message.params)
                self.prompts.append(
                    tokenizer.decode(list(memoryview(message.prompt).cast("i")), False)
                )
                self._tasks.append(asyncio.ensure_future(steps(message, next(texts))))

        engine._send = answer
        self._tasks = []
        settings = Settings(["m"], tokenizer, SamplingParams(), form, template, **more)
        settings.end_token_ids = tuple(ends)
        self.app = build_app(settings, engine, Metrics())

    def post(self, path="/v1/chat/completions", **body):
        """The answer, or the events of its stream."""
        if "responses" not in path:
            body = {"messages": [{"role": "user", "content": "x"}]} | body

        async def call():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(path, json=body)

        answer = asyncio.run(call())
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]
