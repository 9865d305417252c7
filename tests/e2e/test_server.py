"""`twinfer serve` as clients see it: the openai package, plain HTTP, many streams at once."""

import asyncio
import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from twinfer.serving.cli import main
from twinfer.serving.llm import LLM
from twinfer.serving.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from twinfer.serving.server.responses import ResponsesRequest
from twinfer.serving.server.trial import COMPILE_S
from twinfer.shared.sampling_params import SamplingParams

from .server_process import served
from .test_structured_outputs import HOSTILE

MESSAGES = [{"role": "user", "content": "Write a function."}]
SIZES = {"max_model_len": 512, "max_num_seqs": 32, "dtype": "float32"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def server(backend):
    flags = ["--backend", backend, "--device", "cpu", "--tool-call-parser", "hermes"]
    with served(*flags, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def llm(backend):
    with LLM("demo", backend=backend, device="cpu", progress=False, **SIZES) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai() as it:
        yield it


SETTINGS = [
    dict(temperature=0.0),
    dict(temperature=0.8, seed=7, top_p=0.9),
    dict(temperature=1.0, seed=-3, presence_penalty=0.5, frequency_penalty=0.5),
    dict(temperature=0.7, seed=5, stop=["return", "\n\n"]),
    dict(temperature=0.7, seed=6, logit_bias={"10": -100, "20": 3}),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: " ".join(s))
def test_texts_are_those_of_offline_generation(sampling, client, llm):
    """Whole and streamed, two completions each."""
    params = {k: tuple(v) if k == "stop" else v for k, v in sampling.items()}
    if "logit_bias" in params:
        params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
    (output,) = llm.generate(
        ["def f(x):"], SamplingParams(max_tokens=24, n=2, **params), progress=False
    )
    texts = [o.text for o in output.outputs]
    reasons = [o.finish_reason for o in output.outputs]
    call = dict(model="demo", prompt="def f(x):", max_tokens=24, n=2, **sampling)
    whole = client.completions.create(**call)
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == reasons
    assert whole.usage.completion_tokens == sum(len(o.token_ids) for o in output.outputs)
    pieces, ended = ["", ""], [None, None]
    for event in client.completions.create(**call, stream=True):
        for choice in event.choices:
            pieces[choice.index] += choice.text
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert (pieces, ended) == (texts, reasons)


def test_a_chat_is_what_offline_chat_says(client, llm):
    params = SamplingParams(max_tokens=20, temperature=0.6, seed=3, logprobs=2)
    (output,) = llm.chat(MESSAGES, params, progress=False)
    call = dict(model="demo", messages=MESSAGES, max_completion_tokens=20, temperature=0.6, seed=3)
    answer = client.chat.completions.create(**call, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", output.outputs[0].text)
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    told = choice.logprobs.content
    assert len(told) == len(output.outputs[0].token_ids)
    for entry, token, best in zip(
        told, output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
    ):
        assert entry.logprob == best[token].logprob
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (e.logprob for e in best.values() if e.rank <= 2), reverse=True
        )
    assert b"".join(bytes(entry.bytes) for entry in told).decode("utf-8", "replace")
    events = list(
        client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True})
    )
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == output.outputs[0].text
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(told)
    assert all(event.usage is None for event in events[:-1])
    with client.chat.completions.stream(**call) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == output.outputs[0].text


def test_responses_are_chats(client):
    """Whole and streamed: the same text, ids that agree, and every event as the client knows it."""
    call = dict(model="demo", input="Write a function.", max_output_tokens=20, temperature=0)
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=20, temperature=0
    )
    whole = client.responses.create(**call)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    events = list(client.responses.create(**call, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    (item,) = events[-1].response.output
    assert {event.item_id for event in deltas} == {item.id}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**call, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"


def test_messages_are_chats(server, client):
    """As Anthropic's client asks for them, whole and streamed: the same text and tokens."""
    anthropic = pytest.importorskip("anthropic")
    more = {"temperature": 0}
    chat = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=20, **more)
    call = dict(model="demo", messages=MESSAGES, max_tokens=20, extra_body=more)
    with anthropic.Anthropic(base_url=server.url, api_key="none") as other:
        whole = other.messages.create(**call)
        with other.messages.stream(**call) as stream:
            text, final = "".join(stream.text_stream), stream.get_final_message()
        again = other.messages.create(**call)
    (block,) = whole.content
    assert block.text == text == final.content[0].text == chat.choices[0].message.content
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    for usage in (whole.usage, final.usage, again.usage):
        assert usage.output_tokens == 20
        read = usage.input_tokens + usage.cache_read_input_tokens
        assert read == chat.usage.prompt_tokens


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def test_answers_keep_to_a_schema(client):
    """Chats whole and streamed, responses, and completions by our own name for it."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    call = dict(model="demo", messages=MESSAGES, temperature=1.0, seed=5, max_completion_tokens=80)
    whole = client.chat.completions.create(**call, response_format=form)
    found = json.loads(whole.choices[0].message.content)
    assert set(found) == {"name", "size"}
    assert found["size"] in (1, 2)
    assert whole.choices[0].finish_reason == "stop"
    text = ""
    for event in client.chat.completions.create(**call, response_format=form, stream=True):
        text += event.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
    answer = client.responses.create(
        model="demo", input="x", max_output_tokens=80, extra_body={"seed": 5},
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )  # fmt: skip
    assert set(json.loads(answer.output_text)) == {"name", "size"}
    plain = client.completions.create(
        model="demo", prompt="x", extra_body={"structured_outputs": {"regex": "[ab]{4}"}}
    )
    assert re.fullmatch("[ab]{4}", plain.choices[0].text)
    # As vLLM has it: a completion takes it too.
    plain = client.completions.create(
        model="demo",
        prompt="x",
        max_tokens=200,
        temperature=0,
        extra_body={"response_format": form},
    )
    assert set(json.loads(plain.choices[0].text)) == {"name", "size"}
    free = client.chat.completions.create(**call, response_format={"type": "json_object"})
    assert free.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_had_is_named(form, field, server):
    with server.client() as client:
        body = {"messages": MESSAGES, "prompt": "x", "response_format": form}
        for path, stream in itertools.product(("chat/completions", "completions"), (False, True)):
            answer = client.post(f"/v1/{path}", json=body | {"stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"description": "x" * (1 << 18)}], ids=["engine", "parameters"]
)
def test_what_refuses_a_form_names_the_field_that_asked(schema, server):
    function = {"name": "f", "parameters": schema}
    must = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    ours = {"structured_outputs": {"json": schema}}
    with server.client() as client:
        for path, body, field in (
            ("chat/completions", {"messages": MESSAGES} | must, "tools"),
            ("chat/completions", {"messages": MESSAGES} | ours, "structured_outputs"),
            ("responses", {"input": "x", "text": {"format": form}}, "text.format"),
            ("completions", {"prompt": "x"} | ours, "structured_outputs"),
        ):
            for stream in (False, True):
                answer = client.post(f"/v1/{path}", json=body | {"stream": stream})
                assert answer.status_code == 400, path
                error = answer.json()["error"]
                assert error["param"] == field
                assert error["message"].startswith(f"{field}: ")
                assert error["message"].count("structured_outputs") == ("outputs" in field)


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_takes_too_much_work_is_that_requests_error(stream, server):
    form = {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(15_000))}
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": form, "stream": stream}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    if stream and answer.status_code == 200:  # it has begun, as the refusal took 2 s
        *_, last, done = [line[6:] for line in answer.text.splitlines() if line[:6] == "data: "]
        assert done == "[DONE]"
        error = json.loads(last)["error"]  # behind what the model has said until then
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["param"] == "structured_outputs"
    assert "too much work" in error["message"]


ENDLESS = [
    {"regex": ".*" * 100_000},
    {"regex": "a?" * 20_000},
    {"grammar": "start: T18\nT0: /.*/\n" + "".join(f"T{i + 1}: T{i} T{i}\n" for i in range(18))},
    {"json": {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(60)]}},
    {"regex": "(((((a{9}){9}){9}){9}){9}){9}"},
    {"json": {"type": "integer", "multipleOf": 7919 * 7907, "maximum": 10**18}},
]


def _processor_seconds(server):
    """Of both processes so far; the one that tries forms out bounds its own."""
    clock = os.sysconf("SC_CLK_TCK")
    parts = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        for pid in (server.process.pid, server.engine_pid())
    ]
    return sum(int(ticks) for part in parts for ticks in part) / clock


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if number % 3 else ())
        for number, form in enumerate(HOSTILE + ENDLESS)
    ],
    ids=lambda form: str(form)[:24],
)
def test_a_form_is_answered_or_refused_within_two_seconds(form, server):
    """Of processor time, as others are at work too; and a stream beside it goes on."""
    free = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    body = {"prompt": "x", "max_tokens": 3, "structured_outputs": form}
    with server.client() as client:
        before = _processor_seconds(server)
        answer = client.post("/v1/completions", json=body)
        assert _processor_seconds(server) - before < 2 - COMPILE_S
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] in ("structured_outputs", "body")
        alone = client.post("/v1/completions", json=free).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=free | {"stream": True}) as stream:
            lines = stream.iter_lines()
            pieces, asking = [next(lines)], threading.Thread(
                target=httpx.post,
                args=(f"{server.url}/v1/completions",),
                kwargs={"json": body | {"seed": 2}, "timeout": 60},
            )  # fmt: skip
            asking.start()
            pieces += lines
            asking.join()
        told = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
        assert "".join(one["choices"][0]["text"] for one in told) == alone
    assert server.idle()


def test_a_chat_in_the_terminal_is_what_the_server_says(server, client, capsys, monkeypatch):
    flags = ["--url", f"{server.url}/v1", "--temperature", "0", "--max-tokens", "12"]
    call = dict(model="demo", temperature=0, max_completion_tokens=12)
    answer = client.chat.completions.create(**call, messages=MESSAGES).choices[0].message.content
    assert main(["chat", *flags, "--quick", MESSAGES[0]["content"]]) == 0
    assert capsys.readouterr().out == answer + "\n"
    turns = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]
    more = client.chat.completions.create(**call, messages=turns).choices[0].message.content
    first = MESSAGES[0]["content"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{first}\n\nb\n/reset\n{first}\n"))
    assert main(["chat", *flags]) == 0
    assert capsys.readouterr().out == f"{answer}\n{more}\n{answer}\n"
    assert more != answer
    assert main(["chat", *flags, "--model", "other", "--quick", "x"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "says 404: model: got other" in told.err


def test_the_slowest_step_is_measured_and_changes_nothing(llm):
    params = SamplingParams(max_tokens=8, temperature=0)
    before = llm.generate(["x"], params, progress=False)[0].outputs[0].token_ids
    step = llm.engine.worker.execute
    took = []

    def slow(given):
        took.append(given.descriptor)
        time.sleep(0.2)
        return step(given)

    llm.engine.worker.execute = slow
    try:
        assert 0.2 < llm.engine.slowest_step() < 10
    finally:
        llm.engine.worker.execute = step
    assert max(llm.engine.table, key=lambda d: d.tokens) in took
    assert {d.kind for d in took} == {d.kind for d in llm.engine.table}
    assert llm.engine.worker.compilations_after_ready() == 0
    after = llm.generate(["x"], params, progress=False)[0].outputs[0].token_ids
    assert after == before
    llm.engine.scheduler.check_integrity()


def test_without_a_maximum_a_chat_may_fill_the_context(client):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == SIZES["max_model_len"]
    assert answer.choices[0].finish_reason == "length"


def test_scoring_by_echo(client, llm):
    """As lm-eval asks: token ids, one token, log-probabilities of the prompt."""
    ids = llm.tokenizer.encode("def f(x):\n    return x")
    (output,) = llm.generate(
        [ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), progress=False
    )
    expected = [
        None if best is None else best[token].logprob
        for token, best in zip(ids, output.prompt_logprobs, strict=True)
    ]
    for most in (1, 0):
        answer = client.completions.create(
            model="demo", prompt=[ids, ids], max_tokens=most, logprobs=1, echo=True, temperature=0
        )
        for choice in answer.choices:
            scores = choice.logprobs
            assert scores.token_logprobs[0] is None
            # two prompts share a step, which rounds elsewhere on JAX
            assert scores.token_logprobs[1 : len(ids)] == pytest.approx(expected[1:], rel=1e-5)
            assert len(scores.tokens) == len(scores.top_logprobs) == len(ids) + most
            assert scores.top_logprobs[0] is None
            for token, top in list(zip(scores.tokens, scores.top_logprobs, strict=True))[1:]:
                assert token in top
                assert len(top) <= 2
            assert choice.text.startswith("def f(x):\n    return x")
        assert answer.usage.completion_tokens == 2 * most


def test_the_token_that_was_taken_has_a_score_among_the_best_ones(client):
    """As OpenAI has it: "there may be up to logprobs+1 elements"."""
    for count in (0, 1, 3):
        scores = (
            client.completions.create(
                model="demo", prompt="x", max_tokens=24, temperature=2, seed=1, logprobs=count
            )
            .choices[0]
            .logprobs
        )
        places = list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))
        assert all(top[token] == score for token, score, top in places)
        sizes = {len(top) for _, _, top in places}
        assert sizes == ({1} if count == 0 else {count, count + 1})


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_tokens_in_a_text(echo, client):
    """Whole and streamed, also of characters that several tokens make, and of text that is held
    back because a stop string may come.
    """
    prompt, stop = "# é, 汉字:\n    ", ["return self_"]
    call = dict(model="demo", prompt=prompt, max_tokens=24, temperature=0, logprobs=0, echo=echo)
    for more in (dict(stop=stop), dict(logit_bias={"128": 30, "103": 28})):
        whole = client.completions.create(**call, **more).choices[0]
        scores = whole.logprobs
        for token, place in zip(scores.tokens, scores.text_offset, strict=True):
            if not token.startswith("bytes:"):
                assert whole.text.startswith(token, place), (token, place)
        streamed = client.completions.create(**call, **more, stream=True)
        parts = [event.choices[0].logprobs for event in streamed]
        assert [n for part in parts for n in (part.text_offset if part else ())] == (
            scores.text_offset
        )


def test_log_probabilities_of_a_prompt_by_our_own_name(client):
    answer = client.completions.create(
        model="demo", prompt=[305, 288, 8], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, *others = answer.choices[0].prompt_logprobs
    assert first is None
    for token, best in zip((288, 8), others, strict=True):
        assert best[str(token)]["logprob"] < 0
        assert {entry["rank"] for entry in best.values()} >= {1}


def test_200_streams_at_once(server, llm):
    prompts = [f"x{i} = {i}\n" for i in range(200)]
    params = [SamplingParams(max_tokens=12, seed=i, temperature=0.9) for i in range(200)]
    expected = [o.outputs[0].text for o in llm.generate(prompts, params, progress=False)]

    async def one(client, i):
        text = ""
        stream = await client.completions.create(
            model="demo", prompt=prompts[i], max_tokens=12, seed=i, temperature=0.9, stream=True
        )
        async for event in stream:
            text += event.choices[0].text
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    assert asyncio.run(all_of_them()) == expected
    assert server.metric("recompiles_after_ready_total") == 0
    assert server.idle()


BAD = [
    (dict(temperature=11), "temperature"),
    (dict(temperature="hot"), "temperature"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(n=1000), "n"),
    (dict(top_p=0), "top_p"),
    (dict(logit_bias={"999999": 1}), "logit_bias"),
    (dict(logit_bias={"a": 1}), "logit_bias"),
    (dict(logit_bias={" 5": 1}), "logit_bias"),
    (dict(logit_bias={"5": 1, "05": 2}), "logit_bias"),
    (dict(logit_bias={"1_0": 1}), "logit_bias"),
    (dict(guided_regex="a"), "guided_regex"),
    (dict(banned_sequences=[[5]]), "banned_sequences"),
    (dict(banned_sequences=[5, 6]), "banned_sequences"),
    (dict(banned_sequences=[[5, 10**9]]), "banned_sequences"),
    (dict(banned_sequences=[[5, -1]]), "banned_sequences"),
    (dict(banned_sequences=[[5] * 65]), "banned_sequences"),
    (dict(banned_sequences=[[5, 6]] * 1025), "banned_sequences"),
    (dict(banned_sequences=[[5] * 60] * 1000, n=64), "banned_sequences"),
    (dict(banned_sequences=[[5, 6]] * 1024, bad_words=["aaaaaaaaaaab"]), "bad_words"),
    (dict(bad_words="a"), "bad_words"),
    (dict(bad_words=["a", ""]), "bad_words"),
    (dict(bad_words=["a", 5]), "bad_words"),
    (dict(bad_words=["a" * 257]), "bad_words"),
    (dict(bad_words=["\U0010ffff" * 100]), "bad_words"),  # of 400 bytes, each a token
    (dict(bad_words=["a"] * 513), "bad_words"),
    (dict(bad_words=[f"{i} {'<>' * 99}" for i in range(99)], prompt=["x"] * 64, n=16), "bad_words"),
    (dict(bad_words=["a"], allowed_token_ids=[65]), "allowed_token_ids"),
    (dict(stop=["a"] * 17), "stop"),
    (dict(prompt=[]), "prompt"),
    (dict(prompt=""), None),
    (dict(prompt=[1, -1]), "prompt"),
    (dict(prompt=[10**9]), "prompt"),
    (dict(prompt=[[1], []]), "prompt"),
    (dict(prompt=[1] * 600), "prompt"),
    (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=513), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=10**30), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=2.0), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=True), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=-1, max_tokens=512), "truncate_prompt_tokens"),
    # What is cut away is read too.
    (dict(truncate_prompt_tokens=1, prompt=[-1, 1]), "prompt"),
    (dict(truncate_prompt_tokens=1, prompt=[[5, 1], [4096, 1]]), "prompt"),
    (dict(truncate_prompt_tokens=1, prompt=[[5, 1], []]), "prompt"),
    (dict(prompt={"a": 1}), "prompt"),
    (dict(prompt=["a", 1]), "prompt"),
    (dict(prompt=[True]), "prompt"),
    (dict(prompt=[[1], [1.0]]), "prompt"),
    (dict(prompt="def f(x):\n" * 10_000), "prompt"),
    (dict(prompt=["x"] * 9, n=128), "n"),
    (dict(suffix="x"), "suffix"),
    (dict(best_of=3), "best_of"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
    # The engine gets the list for each of 1024 completions: minutes, in which it counts as hung.
    (dict(prompt=["x"] * 64, n=16, allowed_token_ids=[1, 2] * 200_000), "allowed_token_ids"),
    (dict(n=128, banned_token_ids=[1, 2] * 200_000), "banned_token_ids"),
    (dict(max_completion_tokens=2), "max_completion_tokens"),
    (dict(tools=[{}]), "tools"),
    (dict(top_logprobs=2), "top_logprobs"),
    (dict(thinking_token_budget=9), "thinking_token_budget"),
    (
        dict(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "response_format",
    ),
    (dict(priority=10**6), "priority"),
    (dict(priority=1), "priority"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda v: str(v)[:40])
def test_a_bad_field_is_named(change, field, server):
    body = {"model": "demo", "prompt": "x", "max_tokens": 2} | change
    with server.client() as client:
        for stream in (False, True) if "stream_options" not in change else (False,):
            answer = client.post("/v1/completions", json=body | {"stream": stream})
            if field is None and answer.status_code == 200:
                continue  # a model with a token that begins texts can go on from nothing
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert (error["param"] or "").split("[")[0] == (field or "prompt"), error


CHAT_BAD = [
    (dict(messages=[]), "messages"),
    (dict(messages=[{"content": "x"}]), "messages"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
    (dict(messages="hello"), "messages"),
    (dict(max_completion_tokens=0), "max_completion_tokens"),
    (dict(logprobs=True, top_logprobs=21), "top_logprobs"),
    (dict(top_logprobs=2), "top_logprobs"),
    (dict(functions=[{}]), "functions"),
    (dict(modalities=["audio"]), "modalities"),
    (dict(chat_template="{{ 1 }}"), "chat_template"),
    (dict(echo=1), "echo"),
    (dict(bad_words=[""]), "bad_words"),
    (dict(bad_words={"a": 1}), "bad_words"),
    (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=-1, max_completion_tokens=512), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=4, echo=True), "echo"),
    (dict(prompt_logprobs=21), "prompt_logprobs"),
    (dict(use_beam_search=True), "use_beam_search"),
    (dict(logprob_token_ids=[1]), "logprob_token_ids"),
    (dict(vllm_xargs={"a": 1}), "vllm_xargs"),
    (dict(truncation_side="right", truncate_prompt_tokens=4), "truncation_side"),
    (dict(documents=["x"]), "documents"),
    (dict(guided_json={"type": "object"}), "guided_json"),
    (dict(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]), "tools"),
    (
        dict(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "1",
                            "function": {"name": "f", "arguments": "[" + '"",' * 200_000 + "1]"},
                        }
                    ],
                }
            ]
        ),
        "messages",
    ),
]


@pytest.mark.parametrize(("change", "field"), CHAT_BAD, ids=lambda v: str(v)[:40])
def test_a_bad_field_of_a_chat_is_named(change, field, server):
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES} | change)
    assert answer.status_code == 400, answer.text
    param = answer.json()["error"]["param"]
    assert param.split("[")[0] == field


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/tokenize", dict(tools=[{}], tool_choice={"function": {"name": "x"}}), "tools[0]"),
        ("/tokenize", dict(model="other"), "model"),
        ("/detokenize", dict(tokens=[5], model="other"), "model"),
        ("/v1/responses", dict(text={"format": "x"}), "text.format"),
        ("/v1/responses", dict(text={"format": {"type": "json_schema"}}), "text.format.schema"),
        ("/v1/responses", dict(reasoning={"effort": []}), "reasoning.effort"),
        ("/v1/responses", dict(n=2), "n"),
        ("/v1/responses", dict(stop=["a"] * 17), "stop"),
        ("/v1/responses", dict(input="def f(x):\n" * 10_000), "input"),
        ("/v1/chat/completions", dict(tools=[{}] * 2000), "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_of_another_path_is_named(path, change, field, server):
    said = {"input": "x"} if path == "/v1/responses" else {"messages": MESSAGES}
    with server.client() as client:
        answer = client.post(path, json=said | change)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == field


PLAIN = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}


def told(client, path, body):
    """What is told of each choice, whole: texts, and ids of prompt and completion."""
    answer = client.post(path, json=PLAIN | body)
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    return [
        (
            one["text"] if "text" in one else one["message"]["content"],
            one.get("prompt_token_ids", answer.get("prompt_token_ids")),
            one["token_ids"],
        )
        for one in answer["choices"]
    ], answer["usage"]["prompt_tokens"]


def told_in_events(client, path, body):
    """The same of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=PLAIN | body | options) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line[6:7] == "{"]
    found = {}
    for event in events[:-1]:
        (one,) = event["choices"]
        text, prompt, ids = found.get(one["index"], ("", None, []))
        more = one["text"] if "text" in one else one["delta"].get("content", "")
        prompt = prompt or one.get("prompt_token_ids") or event.get("prompt_token_ids")
        found[one["index"]] = text + more, prompt, ids + one.get("token_ids", [])
    # In chats the first choice's first piece has those of all.
    first = found[0][1]
    return [(t, p or first, i) for _, (t, p, i) in sorted(found.items())], events[-1]["usage"][
        "prompt_tokens"
    ]


@pytest.mark.parametrize(
    ("path", "body", "tell"),
    [
        pytest.param(path, body, tell, marks=() if tell is quick else pytest.mark.slow)
        for path, body, quick in (
            ("/v1/completions", {"prompt": ["def f(x):\n", "x = "], "n": 2}, told),
            ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, told_in_events),
        )
        for tell in (told, told_in_events)
    ],
)
def test_bad_words_do_not_come(tell, path, body, server):
    """Their tokens, that is, as a text begins with them and behind a space."""
    with server.client() as client:

        def encoded(text):
            return client.post("/tokenize", json={"prompt": text}).json()["tokens"]

        def has(ids, word):
            return any(ids[place : place + len(word)] == word for place in range(len(ids)))

        body = body | {"max_tokens": 30, "ignore_eos": True}
        free, _ = tell(client, path, body)
        words = [word for text, *_ in free for word in text.split() if len(word) < 200][:40]
        sequences = [encoded(text) for word in words for text in (word, f" {word}")]
        assert {len(ids) for ids in sequences} > {1, 2, 3}
        assert any(has(ids, word) for _, _, ids in free for word in sequences if len(word) > 1)
        bound, _ = tell(client, path, body | {"bad_words": [f" {word}" for word in words]})
        assert not any(has(ids, word) for _, _, ids in bound for word in sequences)
        assert all(len(ids) == 30 for _, _, ids in bound)
        assert bound == tell(client, path, body | {"bad_words": words})[0]
        longer = [ids for ids in sequences if len(ids) > 1]
        single = [token for (token,) in (ids for ids in sequences if len(ids) == 1)]
        same = {"banned_sequences": longer, "banned_token_ids": single}
        assert bound == tell(client, path, body | same)[0]
        same = {"banned_sequences": longer, "bad_words": words[:5], "banned_token_ids": single}
        assert bound == tell(client, path, body | same)[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"],
    ids=lambda p: p[4:],
)
@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"structured_outputs": {"regex": "aab"}}, "structured_outputs"),
        ({"bad_words": ["aaa"]}, "bad_words"),
        ({}, "banned_sequences"),
        pytest.param(
            *({"structured_outputs": {"regex": "a+"}, "bad_words": ["aaa"]}, "structured_outputs"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["form", "words", "sequences", "both"],
)
def test_a_call_that_has_no_token_left_says_which_field_it_is(more, field, path, stream, server):
    """After two tokens; nobody else notices."""
    said = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    with server.client() as client:
        (a,) = client.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
        body = said.get(path, {"messages": MESSAGES}) | {"allowed_token_ids": [a]} | more
        if field == "banned_sequences":
            body[field] = [[a, a]]
        # Events have names there; other streams end with one more.
        named = path in ("/v1/responses", "/v1/messages")
        if path != "/v1/responses":
            body |= {"max_tokens": 9}
        if not named:
            body |= {"n": 2}
        answer = client.post(path, json=body | {"stream": stream})
        if answer.status_code == 200:  # the stream had begun
            assert stream
            last = answer.text.strip().split("\n\n")[-1 if named else -2]
            error = json.loads(last.partition("data: ")[2])
            assert "no token was left" in json.dumps(error)
            assert named or error["error"]["param"] == field
        else:
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error.get("param", error["message"].partition(":")[0]) == field
    assert server.idle()


@pytest.mark.parametrize("tell", [told, told_in_events])
def test_the_end_of_a_prompt_may_be_all_that_is_read(tell, server):
    """Of each prompt its own; what is echoed, scored and counted is what was read."""
    path = "/v1/completions"
    with server.client() as client:
        ids = client.post("/tokenize", json={"prompt": "def f(x):\n    return x"}).json()["tokens"]
        prompts = [ids, ids[:5], ids * 30]
        for kept in (1, 3, len(ids), 511, 512):
            cut = {"prompt": prompts, "truncate_prompt_tokens": kept, "n": 2}
            if kept > 500:
                cut["max_tokens"] = 1
            found, count = tell(client, path, cut)
            same = cut | {"prompt": [one[-min(kept, 511) :] for one in prompts]}
            del same["truncate_prompt_tokens"]
            assert (found, count) == tell(client, path, same)
            assert [prompt for _, prompt, _ in found[::2]] == same["prompt"]
        # -1: what fits beside the answer.
        for most, left in ((40, 472), (None, 496)):
            cut = {"prompt": ids * 60, "truncate_prompt_tokens": -1, "max_tokens": most}
            ((_, prompt, new),), count = tell(client, path, cut)
            assert prompt == (ids * 60)[-left:]
            assert (count, len(new)) == (left, most or 16)
        text = {"prompt": "y = 1\nx = 12", "truncate_prompt_tokens": 3}
        assert client.post("/tokenize", json=text).json()["count"] == 3
        less = client.post("/tokenize", json={"prompt": "x " * 600, "truncate_prompt_tokens": -1})
        assert less.json()["count"] == 496
        text["echo"] = True
        ((echoed, prompt, new),), count = tell(client, path, text)
        assert count == 3
        assert prompt == client.post("/tokenize", json=text).json()["tokens"]
        assert echoed.startswith(
            client.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
        )
        assert new[:3] == prompt


@pytest.mark.parametrize("tell", [told, told_in_events])
def test_the_end_of_a_chat_may_be_all_that_is_read(tell, server):
    path, chat = "/v1/chat/completions", {"messages": MESSAGES}
    with server.client() as client:
        ids = client.post("/tokenize", json=chat).json()["tokens"]
        few = client.post("/tokenize", json=chat | {"truncate_prompt_tokens": 4}).json()
        assert (few["count"], few["tokens"]) == (4, ids[-4:])
        found, count = tell(client, path, chat | {"truncate_prompt_tokens": 4, "n": 2})
        assert ([prompt for _, prompt, _ in found], count) == ([ids[-4:]] * 2, 4)
        ((_, prompt, _),), _ = tell(client, path, chat | {"truncate_prompt_tokens": -1})
        assert prompt == ids
        long = {"messages": [{"role": "user", "content": "x = 1\n" * 400}]}
        assert client.post(path, json=PLAIN | long).status_code == 400
        ((_, prompt, new),), _ = tell(client, path, long | {"truncate_prompt_tokens": -1})
        assert (len(prompt), len(new)) == (506, 6)
        response = {"input": "x = 1\n" * 400, "truncate_prompt_tokens": 9, "max_output_tokens": 2}
        usage = client.post("/v1/responses", json=response).json()["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (9, 2)


def test_an_invocation_is_the_call_that_its_body_is_of(server):
    """As SageMaker sends them."""
    with server.client() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "def f(x):"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            told = [client.post(at, json=body | PLAIN).json() for at in (path, "/invocations")]
            assert told[0]["object"] == told[1]["object"]
            assert told[0]["choices"] == told[1]["choices"]
        with client.stream("POST", "/invocations", json={"prompt": "x", "stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        for wrong in ({"input": "x"}, [], {"messages": []}):
            answer = client.post("/invocations", json=wrong)
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )
        assert "needs messages" in client.post("/invocations", json={}).json()["error"]["message"]


def test_what_asks_for_nothing_is_not_refused(server):
    nothing = {"use_beam_search": False, "bad_words": [], "guided_json": None, "suffix": None}
    nothing |= {"truncation_side": "left", "vllm_xargs": None, "watermarking": False}
    with server.client() as client:
        for path, body in (
            ("completions", {"prompt": "x", "max_tokens": 1}),
            ("chat/completions", {"messages": MESSAGES, "max_tokens": 1, "echo": False}),
            (
                "chat/completions",
                {"messages": MESSAGES, "max_tokens": 1, "logprobs": False, "top_logprobs": 0},
            ),
        ):
            answer = client.post(f"/v1/{path}", json=body | nothing)
            assert answer.status_code == 200, answer.text


def test_temperatures_that_the_sampler_has_not_are_the_least_that_it_has(client):
    """As vLLM has it. Clients that want the best token send 1e-8."""
    call = dict(model="demo", prompt="x", max_tokens=8, seed=5)
    texts = {
        client.completions.create(**call, temperature=t).choices[0].text
        for t in (1e-300, 1e-8, 0.009, 0.01)
    }
    assert len(texts) == 1
    with pytest.raises(openai.BadRequestError, match=r"temperature: got -1e-08, allowed is 0 "):
        client.completions.create(**call, temperature=-1e-8)


def test_a_response_takes_every_setting_of_a_chat(server):
    with server.client() as client:
        body = {"input": "x", "max_output_tokens": 8, "structured_outputs": {"regex": "[ab]{3}"}}
        answer = client.post("/v1/responses", json=body).json()
        assert re.fullmatch("[ab]{3}", answer["output"][0]["content"][0]["text"])
        before = server.metric("unknown_fields_total")
        client.post("/v1/responses", json=body | {"what": 1, "store": True, "include": []})
    assert server.metric("unknown_fields_total") == before + 1


def test_log_probabilities_of_a_response_are_those_of_a_chat(client):
    asked = dict(model="demo", temperature=0, top_logprobs=3)
    chat = client.chat.completions.create(
        messages=MESSAGES, max_tokens=12, logprobs=True, **asked
    ).choices[0]
    whole = client.responses.create(input=MESSAGES, max_output_tokens=12, **asked)
    (part,) = whole.output[0].content
    told = [one.model_dump() for one in part.logprobs]
    assert told == [one.model_dump() for one in chat.logprobs.content]
    assert len(told) == 12
    assert {len(one["top_logprobs"]) for one in told} == {3}
    with client.responses.stream(input=MESSAGES, max_output_tokens=12, **asked) as stream:
        pieces = [one for one in stream if one.type == "response.output_text.delta"]
    streamed = [entry for one in pieces for entry in one.logprobs]
    assert [(one.token, one.logprob) for one in streamed] == [
        (one["token"], one["logprob"]) for one in told
    ]
    named = client.responses.create(
        model="demo", input="x", max_output_tokens=3, include=["message.output_text.logprobs"]
    )
    assert len(named.output[0].content[0].logprobs) == 3


def test_a_call_is_admitted_as_a_whole_or_not_at_all(server):
    """More prompts than may wait, of which some would find a place."""
    body = _long(prompt=["x"] * 1000, max_tokens=2)
    with server.client() as client:
        busy = [contextlib.ExitStack() for _ in range(2)]
        for stack in busy:
            stack.enter_context(client.stream("POST", "/v1/completions", json=_long(stream=True)))
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 1000
        for stack in busy:
            stack.close()
    assert server.idle()


def test_what_a_stream_cannot_tell_is_named(server):
    options = {"continuous_usage_stats": True}
    with server.client() as client:
        body = {"prompt": "x", "stream": True, "stream_options": options}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_usage_in_every_event(server):
    """Rising to that of the last one, which stands alone. A front that gets no processor for a while
    puts what has come by then into one event: not all of so many tokens.
    """
    body = {"max_tokens": 100, "ignore_eos": True, "stream": True, "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.client() as client:
        for path, said in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": MESSAGES}),
        ):
            answer = client.post(f"/v1/{path}", json=body | said | {"stream_options": options})
            events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == 200
            assert counts[0] < 200
            assert not events[-1]["choices"]


def test_a_chat_in_token_ids(server, llm):
    body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "n": 2}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
    (prompt,) = llm.chat_prompts(MESSAGES)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, progress=False)
    ids = list(output.outputs[0].token_ids)
    with server.client() as client:
        whole = client.post("/v1/chat/completions", json=body | {"top_logprobs": 1}).json()
        assert whole["prompt_token_ids"] == prompt["prompt_token_ids"]
        for choice in whole["choices"]:
            assert choice["token_ids"] == ids
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in ids]
            assert [entry["top_logprobs"][0]["token"] for entry in entries] == [
                f"token_id:{i}" for i in ids
            ]
        answer = client.post("/v1/chat/completions", json=body | {"stream": True})
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        assert events[0]["prompt_token_ids"] == prompt["prompt_token_ids"]
        for index in range(2):
            told = [c for event in events for c in event["choices"] if c["index"] == index]
            assert [i for choice in told for i in choice.get("token_ids", [])] == ids
        plain = client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}
        ).json()
        assert "prompt_token_ids" not in plain
        assert "token_ids" not in plain["choices"][0]


def test_a_message_that_goes_on_is_told_from_its_beginning(server):
    said = {"role": "assistant", "content": [{"type": "text", "text": "def "}]}
    body = {"messages": [*MESSAGES, said], "max_tokens": 5, "temperature": 0, "n": 2}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    with server.client() as client:

        def texts(**more):
            answer = client.post("/v1/chat/completions", json=body | more)
            if not more.get("stream"):
                return [one["message"]["content"] for one in answer.json()["choices"]]
            found = ["", ""]
            for line in answer.text.split("\n\n")[:-2]:
                for choice in json.loads(line[6:])["choices"]:
                    found[choice["index"]] += choice["delta"].get("content", "")
            return found

        plain = texts()
        assert texts(echo=True) == texts(echo=True, stream=True) == ["def " + one for one in plain]
        new = body | {"messages": MESSAGES, "echo": True, "continue_final_message": False}
        assert client.post("/v1/chat/completions", json=new).status_code == 200


def test_scores_of_a_chats_prompt(server, llm):
    (prompt,) = llm.chat_prompts(MESSAGES)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params, progress=False)
    body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 2}
    with server.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
        lines = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    assert json.loads(lines[0][6:])["prompt_logprobs"] == whole
    assert whole[0] is None
    for told, best in zip(whole[1:], output.prompt_logprobs[1:], strict=True):
        assert {int(token): one["logprob"] for token, one in told.items()} == {
            token: entry.logprob for token, entry in best.items()
        }


LIGHT = {
    "name": "set_light",
    "parameters": {
        "type": "object",
        "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["level"],
        "additionalProperties": False,
    },
}
BELL = {
    "name": "ring",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": function} for function in (LIGHT, BELL)]


def allowed(mode, *names):
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"set_light", "ring"}),
        (allowed("required", "ring"), {"ring"}),
        ({"type": "function", "function": {"name": "set_light"}}, {"set_light"}),
    ],
)
def test_calls_that_are_asked_for_come(choice, names, client):
    """Streamed and whole the same, with arguments that keep to the schema."""
    call = dict(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=choice, seed=0, n=4,
        temperature=1.0, parallel_tool_calls=False, max_tokens=200,
    )  # fmt: skip
    deltas = [
        (one.index, delta.function)
        for event in client.chat.completions.create(**call, stream=True)
        for one in event.choices
        for delta in one.delta.tool_calls or ()
    ]
    choices = client.chat.completions.create(**call).choices
    assert len(choices) == 4
    for whole in choices:
        assert whole.finish_reason == "tool_calls"
        assert not whole.message.content
        (called,) = whole.message.tool_calls
        assert called.function.name in names
        arguments = json.loads(called.function.arguments)
        if called.function.name == "set_light":
            assert set(arguments) == {"level"}
            assert 0 <= arguments["level"] <= 99
        pieces = [function for index, function in deltas if index == whole.index]
        assert pieces[0].name == called.function.name
        assert "".join(piece.arguments for piece in pieces) == called.function.arguments
    if isinstance(choice, dict) and "function" in choice:
        choice = {"type": "function", "name": "set_light"}
    elif isinstance(choice, dict):
        tools = [{"type": "function", "name": "ring"}]
        choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(
        model="demo", input="x", tools=flat, tool_choice=choice, parallel_tool_calls=False
    )
    assert {item.type for item in answer.output} == {"function_call"}
    assert {item.name for item in answer.output} <= names


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": ["object", "null"], "additionalProperties": False},
        {"anyOf": [{"type": "object", "additionalProperties": False}, {"const": "x"}]},
        {"enum": [{"a": 1}, 5]},
        None,
    ],
    ids=str,
)
def test_arguments_are_an_object_whatever_else_a_schema_takes(parameters, client):
    tool = {"type": "function", "function": {"name": 'a "ü" b', "parameters": parameters}}
    must = {"type": "function", "function": {"name": 'a "ü" b'}}
    choices = client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=[tool], tool_choice=must, seed=0, n=6,
        temperature=2.0, max_tokens=300,
    ).choices  # fmt: skip
    assert len(choices) == 6
    for choice in choices:
        if choice.finish_reason == "length":
            continue
        (called,) = choice.message.tool_calls
        assert called.function.name == 'a "ü" b'
        assert isinstance(json.loads(called.function.arguments), dict)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters.type",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": allowed("sometimes", "ring")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", "ring", "x")}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
                    }
                ]
            },
            "tools",
        ),
    ],
)
def test_calls_that_cannot_be_had_are_refused(more, param, server):
    body = {"messages": MESSAGES, "tools": TOOLS} | more
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TAKEN = {
    "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": 1}, "max_tokens": 2,
    "metadata": {"a": "b"}, "n": 2, "seed": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.5,
    "user": "u",
}  # fmt: skip
CACHED = {
    "prompt_cache_key": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "safety_identifier": "a", "service_tier": "auto", "store": False,
}  # fmt: skip
OF_CHATS = TAKEN | CACHED | {
    "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 2, "modalities": ["text"],
    "parallel_tool_calls": True, "reasoning_effort": "low", "response_format": {"type": "text"},
    "stream_options": {"include_usage": True}, "tool_choice": "none", "tools": [FUNCTION],
    "verbosity": "low",
}  # fmt: skip
OF_COMPLETIONS = TAKEN | {
    "best_of": 1,
    "echo": True,
    "logprobs": 2,
    "stream_options": {"include_usage": True},
}
OF_RESPONSES = CACHED | {
    "include": ["message.output_text.logprobs"], "instructions": "Be brief.",
    "max_output_tokens": 2, "metadata": {"a": "b"}, "parallel_tool_calls": True,
    "reasoning": {"effort": "low"}, "stream_options": {"include_obfuscation": False},
    "temperature": 0.5, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "top_logprobs": 2, "top_p": 0.5, "truncation": "disabled", "user": "u",
}  # fmt: skip
REFUSED_THERE = {
    "chat.completions": {
        "audio": {"voice": "alloy", "format": "wav"}, "function_call": "auto",
        "functions": [{"name": "f"}], "moderation": {"model": "x"}, "web_search_options": {},
        "prediction": {"type": "content", "content": "x"},
    },
    "completions": {"suffix": "x"},
    "responses": {
        "access_programs": ["x"], "background": True, "background_options": {"x": 1},
        "context_management": [{"type": "compaction"}], "conversation": "c", "image": {"x": 1},
        "max_tool_calls": 2, "moderation": {"model": "x"}, "previous_response_id": "r",
        "prompt": {"id": "p"},
    },
}  # fmt: skip
CALLS = {
    "chat.completions": ({"messages": MESSAGES, "max_completion_tokens": 3}, OF_CHATS),
    "completions": ({"prompt": "x", "max_tokens": 3}, OF_COMPLETIONS),
    "responses": ({"input": "x", "max_output_tokens": 16}, OF_RESPONSES),
}
PARAMETERS = {
    "chat.completions": chat_params.CompletionCreateParamsBase.__annotations__,
    "completions": text_params.CompletionCreateParamsBase.__annotations__,
    "responses": response_params.ResponseCreateParamsBase.__annotations__,
}


def _bodies(path):
    """A call for each parameter that the client has, but for those that each call has."""
    usual, taken = CALLS[path]
    for name in PARAMETERS[path]:
        if name in ("model", "messages", "prompt", "input") and name not in REFUSED_THERE[path]:
            continue
        value = (taken | REFUSED_THERE[path])[name]  # a new parameter has to be thought about
        more = {"logprobs": True} if name == "top_logprobs" and path != "responses" else {}
        yield name, {"model": "demo"} | usual | more | {name: value}


def _method(client, path):
    return functools.reduce(getattr, path.split("."), client).create


@pytest.mark.parametrize("path", CALLS)
def test_every_parameter_of_the_client(path, client, server):
    """Taken, or refused by its name; by the one client and the asynchronous one, each streamed and
    not.
    """
    unknown = server.metric("unknown_fields_total")

    def check(name, error, answer):
        if name in REFUSED_THERE[path]:
            assert error is not None, name
            assert error.param == name
        else:
            assert error is None, (name, error)
            assert answer, name

    def ways():
        """With `stream` and without it, but for what a stream alone may have."""
        for name, body in _bodies(path):
            yield name, body | {"stream": True}
            if name != "stream_options":
                yield name, body

    for name, body in ways():
        error = answer = None
        try:
            answer = _method(client, path)(**body)
            answer = list(answer) if "stream" in body else answer
        except openai.BadRequestError as refused:
            error = refused
        check(name, error, answer)

    async def ask(other, name, body):
        error = answer = None
        try:
            answer = await _method(other, path)(**body)
            answer = [event async for event in answer] if "stream" in body else answer
        except openai.BadRequestError as refused:
            error = refused
        check(name, error, answer)

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as other:
            await asyncio.gather(*(ask(other, *one) for one in ways()))

    asyncio.run(all_of_them())
    assert server.metric("unknown_fields_total") == unknown


class Light(pydantic.BaseModel):
    """What a parsed answer must be."""

    level: Literal[1, 2, 3]
    is_on: bool


def test_helpers_of_the_client(server, client):
    """Streams, parsed answers and calls of tools: what the client puts together is what a whole
    answer says, by the one client and the asynchronous one, for chats and responses.
    """
    call = dict(model="demo", temperature=1.0)
    chat = call | dict(messages=MESSAGES, max_completion_tokens=60, seed=3)
    more = {"seed": 3}
    respond = call | dict(input="x", max_output_tokens=60, extra_body=more)
    tool = openai.pydantic_function_tool(Light)
    must = {"type": "function", "function": {"name": "Light"}}

    whole = client.chat.completions.parse(**chat, response_format=Light).choices[0].message
    assert whole.parsed == Light.model_validate_json(whole.content)
    response = client.responses.parse(**respond, text_format=Light)
    assert response.output_parsed == Light.model_validate_json(response.output_text)
    called = client.chat.completions.parse(**chat, tools=[tool], tool_choice=must).choices[0]
    (made,) = called.message.tool_calls
    assert isinstance(made.function.parsed_arguments, Light)

    with client.chat.completions.stream(**chat, response_format=Light) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert (final.content, final.parsed) == (whole.content, whole.parsed)
    with client.chat.completions.stream(**chat, tools=[tool], tool_choice=must) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(
        kinds
    )
    (streamed,) = final.message.tool_calls
    assert streamed.function.parsed_arguments == made.function.parsed_arguments
    assert final.finish_reason == called.finish_reason == "tool_calls"
    with client.responses.stream(**respond, text_format=Light) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == response.output_parsed
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(kinds)

    async def others():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as other:
            parsed = await other.chat.completions.parse(**chat, response_format=Light)
            assert parsed.choices[0].message.parsed == whole.parsed
            parsed = await other.responses.parse(**respond, text_format=Light)
            assert parsed.output_parsed == response.output_parsed
            async with other.chat.completions.stream(**chat, response_format=Light) as stream:
                assert [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert final.choices[0].message.parsed == whole.parsed
            async with other.chat.completions.stream(
                **chat, tools=[tool], tool_choice=must
            ) as stream:
                final = await stream.get_final_completion()
            (streamed,) = final.choices[0].message.tool_calls
            assert streamed.function.parsed_arguments == made.function.parsed_arguments
            async with other.responses.stream(**respond, text_format=Light) as stream:
                final = await stream.get_final_response()
            assert final.output_parsed == response.output_parsed
            raw = await other.chat.completions.with_raw_response.create(**chat)
            assert raw.headers["x-request-id"]
            assert raw.parse().choices[0].finish_reason in ("length", "stop")
            assert [model.id async for model in other.models.list()] == ["demo"]
            with pytest.raises(openai.BadRequestError) as error:
                async with other.chat.completions.stream(**chat | {"temperature": 99}) as stream:
                    await stream.until_done()
            assert error.value.param == "temperature"

    asyncio.run(others())


def test_error_types_of_the_client(server, client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="demo", prompt="x" * (33 << 20))
    assert error.value.status_code == 413
    with server.openai(timeout=0.05) as hasty:
        call = functools.partial(hasty.completions.create, model="demo", prompt="x", n=16)
        with pytest.raises(openai.APITimeoutError):
            # Again and again: while this process stands still, one may be answered.
            list(iter(lambda: call(max_tokens=400), None))
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt="x", temperature=50)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="x")

    async def others():
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as other:
            for stream in (False, True):
                with pytest.raises(openai.NotFoundError):
                    await other.completions.create(model="other", prompt="x", stream=stream)
                with pytest.raises(openai.BadRequestError) as error:
                    await other.responses.create(
                        model="demo", input="x", temperature=50, stream=stream
                    )
                assert error.value.param == "temperature"

    asyncio.run(others())
    assert server.idle()


def test_bodies_that_are_no_requests(server):
    deep = "[" * 200 + "]" * 200
    with server.client() as client:
        for body in ("", "{", "[]", "null", '"x"', "\ud800".encode("utf-8", "surrogatepass"),
                     f'{{"prompt": {deep}}}', '{"prompt": ' + "[" * 100_000):  # fmt: skip
            answer = client.post("/v1/completions", content=body)
            assert answer.status_code == 400, body[:20]
            assert answer.json()["error"]["param"] in ("body", "prompt")
        assert client.post("/v1/completions", content=b" " * (33 << 20)).status_code == 413

        def parts():
            for _ in range(34):
                yield b" " * (1 << 20)

        assert client.post("/v1/completions", content=parts()).status_code == 413
        wrong = client.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        # A redirect would go to whatever host the client names.
        assert client.post("/v1/completions/", json={"prompt": "x"}).status_code == 404
        missing = client.get("/nothing")
        assert missing.status_code == 404
        assert "no such call" in missing.json()["error"]["message"]


def _raw(server, data, *, half=False):
    """The first line of what comes back for bytes on a connection; empty if it is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        found = b""
        with contextlib.suppress(OSError):
            connection.sendall(data)
            if half:
                connection.shutdown(socket.SHUT_WR)
            while b"\r\n" not in found and (piece := connection.recv(1 << 16)):
                found += piece
        return found.partition(b"\r\n")[0]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + LENGTH + BODY, b"200"),
        (HEAD + b"X: y\r\n" * 100 + LENGTH + BODY, b"200"),
        (HEAD + b"X: y\r\n" * 200 + LENGTH + BODY, b"400"),
        (HEAD + b"X: " + b"y" * (1 << 20) + b"\r\n" + LENGTH + BODY, b"400"),
        (HEAD + b"X: " + b"y" * (1 << 20), b"400"),
        (b"GET /" + b"y" * (1 << 20), b"400"),
        (b"\0\1\2\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n20\r\n" + BODY + b"\r\n0\r\n\r\n", b"200"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_what_is_hardly_http(data, status, server):
    assert _raw(server, data).split(b" ")[1:2] in ([status], [])
    if status == b"200":
        assert _raw(server, data)


def test_half_a_body_is_nobodys_trouble(server):
    before = server.log
    _raw(server, HEAD + b"Content-Length: 100\r\n\r\n" + BODY, half=True)
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.log.removeprefix(before)


def test_unknown_fields_are_counted(server):
    before = server.metric("unknown_fields_total")
    with server.client() as client:
        body = {"prompt": "x", "max_tokens": 1, "what": 1, "user": "me", "store": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert server.metric("unknown_fields_total") == before + 1


def test_tokens_and_back(server, llm):
    text = "def f(x): # ü\n"
    with server.client() as client:
        ids = client.post("/tokenize", json={"prompt": text}).json()
        assert ids["tokens"] == llm.tokenizer.encode(text)
        assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == text
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        (prompt,) = llm.chat_prompts(MESSAGES)
        assert chat == prompt["prompt_token_ids"]
        assert client.post("/detokenize", json={"tokens": ["a"]}).status_code == 400
        assert (
            client.post("/detokenize", json={"tokens": chat}).json()["prompt"] == prompt["prompt"]
        )
        marked = client.post("/detokenize", json={"tokens": [0, 88]}).json()["prompt"]
        assert marked == "<|endoftext|>x"
        for path, told in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            answer = client.post(path, json=told | {"model": "other"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        many = text * 4000
        ids = client.post("/tokenize", json={"prompt": many}).json()
        assert ids["tokens"] == llm.tokenizer.encode(many)
        assert ids["count"] == len(ids["tokens"])
        assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == many
        for odd in (-1, 10**6, 10**30):
            told = client.post("/detokenize", json={"tokens": [5, odd]})
            assert (told.status_code, told.json()["error"]["param"]) == (400, "tokens")


def test_tokens_by_name(server, llm):
    """Entries of the vocabulary, as transformers and vLLM name them; and only if asked."""
    text = "def f(x): # ü\n" * 400
    with server.client() as client:
        for body in ({"prompt": text}, {"messages": MESSAGES}):
            plain = client.post("/tokenize", json=body).json()
            assert set(plain) == {"count", "max_model_len", "tokens"}
            assert plain["max_model_len"] == SIZES["max_model_len"]
            named = client.post("/tokenize", json=body | {"return_token_strs": True}).json()
            names = named.pop("token_strs")
            assert named == plain
            assert names == [llm.tokenizer.token_text(token) for token in plain["tokens"]]


def test_tokens_of_a_chat_are_those_of_its_completion(server, llm):
    """Whatever says how it is rendered."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    turns = [*MESSAGES, {"role": "assistant", "content": "def"}]
    end = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    with server.client() as client:
        counts = []
        for body in (
            {"messages": MESSAGES},
            {"messages": MESSAGES, "add_generation_prompt": False},
            {"messages": MESSAGES, "add_special_tokens": True},
            {"messages": MESSAGES, "tools": [tool]},
            end,
        ):
            ids = client.post("/tokenize", json=body).json()["tokens"]
            answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens"] == len(ids)
            counts.append(len(ids))
        assert counts[1] < counts[0]
        both = client.post("/tokenize", json=end | {"add_generation_prompt": True})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("priority", [1001, -(10**30), 10**30])
def test_a_priority_that_no_message_holds_is_refused(server, priority):
    with server.client() as client:
        for path, text in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": MESSAGES}),
            ("responses", {"input": "x"}),
        ):
            told = client.post(f"/v1/{path}", json=text | {"priority": priority})
            assert (told.status_code, told.json()["error"]["param"]) == (400, "priority")


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(server):
    long = "def f(x):\n" * 1000
    with server.client() as client:
        for path, body, field in (
            ("completions", {"prompt": long}, "prompt"),
            ("completions", {"prompt": [[5], [5] * SIZES["max_model_len"]]}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
            ("responses", {"input": long}, "input"),
        ):
            error = client.post(f"/v1/{path}", json=body).json()["error"]
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_a_chat_says_what_has_stopped_it(client):
    """As vLLM has it, and as completions have it here."""
    call = dict(model="demo", messages=MESSAGES, temperature=0, max_tokens=40)
    free = client.chat.completions.create(**call).choices[0].message.content
    stop = free[8:10]
    for more, expected in ((dict(stop=stop), stop), (dict(), None)):
        whole = client.chat.completions.create(**call, **more).choices[0]
        *_, last = client.chat.completions.create(**call, **more, stream=True)
        assert whole.stop_reason == last.choices[0].stop_reason == expected


def test_a_model_that_is_not_served_is_named_as_openai_does(server):
    with server.client() as client:
        told = client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        error = told.json()["error"]
        assert told.status_code == 404
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_a_form_without_an_end_is_refused_in_a_line(server):
    loop = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": loop}}
    with server.client() as client:
        body = {"messages": MESSAGES, "max_tokens": 4, "response_format": form}
        told = client.post("/v1/chat/completions", json=body)
        assert told.status_code == 400
        assert told.json()["error"]["param"] == "response_format"
        assert "<state>" not in told.text


def test_what_it_says_of_itself(server):
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", SIZES["max_model_len"])
        assert client.get("/v1/models/demo").json() == model
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert "twinfer:time_to_first_token_seconds_bucket" in client.get("/metrics").text
        first = client.get("/version")
        assert first.json()["version"]
        assert len(first.headers["x-request-id"]) == 16


def test_a_page_that_asks_nobody_else(server):
    with server.client() as client:
        answer = client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert "://" not in answer.text
        metrics = client.get("/metrics").text
        names = re.findall(r"values\.(\w+_total)", answer.text)
        assert len(names) > 3
        assert all(f"\ntwinfer:{name} " in metrics for name in names)
        for path in re.findall(r'fetch\("([^"]+)"', answer.text):
            assert client.get(f"/{path}").status_code in (200, 405)


def _long(**more):
    return {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0} | more


def test_a_client_that_leaves_frees_its_pages(server):
    with server.client() as client:
        # in the middle of decoding
        with client.stream("POST", "/v1/completions", json=_long(stream=True, n=4)) as answer:
            next(answer.iter_bytes())
        assert server.idle()
        for body, seconds in (
            (_long(n=16), 0.2),  # of a call that is not streamed: before it has ended
            (_long(n=64), 0.05),  # while most wait for a place
            (_long(prompt=[5] * 100, n=16), 0.01),  # a prompt in chunks
        ):
            before, calls = server.metric("requests_aborted_total"), 0
            # Again where it was answered meanwhile, and later where it had not reached the engine.
            while (aborted := server.metric("requests_aborted_total")) == before:
                calls += 1
                assert calls < 20
                with contextlib.suppress(httpx.ReadTimeout):
                    limit = httpx.Timeout(60, read=seconds)
                    client.post("/v1/completions", json=body, timeout=limit)
                    continue
                assert server.idle()
                seconds *= 1.5
            assert aborted <= before + calls


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        pytest.param("/v1/chat/completions", marks=pytest.mark.slow),
        "/v1/responses",
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["queue", "prompt", "decode", "last"])
def test_a_client_may_leave_in_every_phase(phase, stream, path, server):
    """What it asked for would take far longer than what is waited for here."""
    said = "x = 1\n" * (80 if phase == "prompt" else 1)
    inputs = {"/v1/completions": {"prompt": said}, "/v1/responses": {"input": said}}
    body = inputs.get(path, {"messages": [{"role": "user", "content": said}]})
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body |= {most: 2 if phase == "last" else 400, "ignore_eos": phase != "last", "stream": stream}
    if path != "/v1/responses" and phase != "last":
        body["n"] = 16
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(2 if phase == "queue" else 0):  # all places are taken
            busy = stack.enter_context(server.client())
            stack.enter_context(
                busy.stream("POST", "/v1/completions", json=_long(n=16, stream=True))
            )
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + data)
            if phase == "decode" and stream:
                assert connection.recv(1)
            else:
                time.sleep({"last": 0.08, "decode": 0.3}.get(phase, 0.03))
    assert server.idle()
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_values_are_finite_json(server):
    with server.client() as client:
        text = client.post(
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 3, "logprobs": 5, "banned_token_ids": [1, 2, 3]},
        ).text
    values = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert all(math.isfinite(v) for v in values["choices"][0]["logprobs"]["token_logprobs"])


NUMBER = (
    st.integers(-(2**66), 2**66)
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
)
LIKELY = {
    "prompt": st.text(max_size=8) | st.lists(st.integers(-1, 2000), max_size=6)
    | st.lists(st.text(max_size=3), max_size=3) | st.lists(st.lists(NUMBER, max_size=2), max_size=2),
    "n": st.integers(-1, 5), "max_tokens": st.integers(-1, 3), "temperature": st.floats(-1, 11),
    "top_p": st.floats(-0.1, 1.1), "top_k": NUMBER, "min_p": st.floats(-0.1, 1.1), "seed": NUMBER,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=4),
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "repetition_penalty": NUMBER,
    "logit_bias": st.dictionaries(st.text(max_size=2) | NUMBER.map(str), NUMBER, max_size=3),
    "min_tokens": st.integers(-1, 4), "stop_token_ids": st.lists(NUMBER, max_size=3),
    "ignore_eos": st.booleans(), "allowed_token_ids": st.lists(st.integers(-1, 2000), max_size=3),
    "banned_token_ids": st.lists(st.integers(-1, 2000), max_size=3), "logprobs": NUMBER,
    "prompt_logprobs": NUMBER, "echo": st.booleans(), "stream": st.booleans(), "priority": NUMBER,
    "cache_salt": st.text(max_size=300), "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(), "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(), "add_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 6) | NUMBER,
    "truncation_side": st.sampled_from(["left", "right", "x"]) | NUMBER,
    "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "banned_sequences": st.lists(st.lists(st.integers(-1, 2000) | NUMBER, max_size=3), max_size=3),
    "best_of": st.integers(-1, 5), "model": st.sampled_from(["demo", "", "x\0"]) | NUMBER,
}  # fmt: skip


LEAF = st.none() | st.booleans() | NUMBER | st.text(max_size=5)
BRANCH = st.lists(LEAF, max_size=3) | st.dictionaries(st.text(max_size=4), LEAF, max_size=3)
ANY = LEAF | BRANCH | st.lists(BRANCH, max_size=2) | st.dictionaries(
    st.sampled_from(["type", "format", "effort", "function", "x"]), LEAF | BRANCH, max_size=2
)  # fmt: skip
ROLE = st.sampled_from(["user", "assistant", "system", "developer", "tool", "x", 5])
TOOL = st.sampled_from(
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {}, "f"]
)
CHOICE = st.sampled_from(["none", "auto", "required", "x", {"function": {"name": "f"}}, {}])
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"role": ROLE, "content": st.text(max_size=5) | ANY, "tool_calls": ANY, "type": ANY},
)
OPTIONS = st.fixed_dictionaries(
    {}, optional={"include_usage": st.booleans() | ANY, "continuous_usage_stats": st.booleans()}
)
FORM = st.fixed_dictionaries(
    {},
    optional={
        "regex": st.sampled_from(["[ab]{2}", "("]) | ANY, "choice": st.lists(LEAF, max_size=2),
        "json": st.dictionaries(st.sampled_from(["type", "enum", "anyOf", "x"]), ANY, max_size=2),
        "grammar": st.text(max_size=9), "json_object": st.booleans(), "x": ANY,
    },
)  # fmt: skip
LIKELY |= {
    "stream_options": OPTIONS | ANY, "structured_outputs": FORM | ANY, "response_format": ANY,
}  # fmt: skip
COMMON = {
    name: one for name, one in LIKELY.items()
    if name not in ("prompt", "n", "max_tokens", "logprobs")
}  # fmt: skip
IN_CHATS = COMMON | {
    "messages": st.lists(MESSAGE, max_size=3) | ANY, "tools": st.lists(TOOL, max_size=2) | ANY,
    "tool_choice": CHOICE | ANY, "logprobs": st.booleans(),
    "top_logprobs": NUMBER, "n": st.integers(-1, 4), "max_tokens": st.integers(-1, 3),
    "chat_template_kwargs": ANY, "documents": ANY, "parallel_tool_calls": st.booleans() | ANY,
    "include_reasoning": st.booleans(), "reasoning_effort": ANY, "modalities": ANY, "max_completion_tokens": st.integers(-1, 3),
    "continue_final_message": st.booleans(), "add_generation_prompt": st.booleans(),
}  # fmt: skip
IN_RESPONSES = COMMON | {
    "input": st.text(max_size=5) | st.lists(MESSAGE, max_size=3) | ANY, "instructions": ANY,
    "tools": st.lists(TOOL, max_size=2) | ANY, "tool_choice": CHOICE | ANY, "text": ANY,
    "reasoning": ANY, "truncation": ANY, "n": NUMBER, "what": ANY, "metadata": ANY,
    "include": st.lists(st.just("message.output_text.logprobs") | LEAF, max_size=2) | ANY,
    "max_output_tokens": st.integers(-1, 3), "parallel_tool_calls": st.booleans() | ANY,
    "top_logprobs": NUMBER,
}  # fmt: skip
STRS = {"return_token_strs": st.booleans()}
IN_TOKENIZE = LIKELY | STRS
IN_DETOKENIZE = {"tokens": st.lists(NUMBER, max_size=4) | ANY, "model": LIKELY["model"]}
FUZZ = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 2}, LIKELY, CompletionRequest),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, IN_CHATS, ChatRequest),
    "/v1/responses": ({"input": "x", "max_output_tokens": 2}, IN_RESPONSES, ResponsesRequest),
    "/tokenize": ({"prompt": "x"}, IN_TOKENIZE, TokenizeRequest),
    "/tokenize of a chat": ({"messages": MESSAGES}, IN_CHATS | STRS, TokenizeChatRequest),
    "/detokenize": ({"tokens": [5]}, IN_DETOKENIZE, DetokenizeRequest),
}


def _ask_anything(client, path, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def ask(data):
        _ask_with_fields(client, path, data)

    ask()


def _ask_with_fields(client, path, data):
    usual, likely, _ = FUZZ[path]
    change = data.draw(st.dictionaries(st.sampled_from(sorted(likely)), st.none(), max_size=5))
    body = usual | {name: data.draw(likely[name]) for name in change}
    answer = client.post(path.partition(" ")[0], json=body)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert (answer.status_code == 404) == (error["code"] == "model_not_found")
        names = [part.strip() for part in error["param"].split(",")]
        assert any(name.split("[")[0].split(".")[0] in body for name in names), (body, error)
    told = answer.text.replace('"error":null', "")
    assert '"error"' not in told or answer.status_code != 200


@pytest.mark.parametrize("path", FUZZ)
def test_the_fuzz_below_has_every_field(path):
    _, likely, kind = FUZZ[path]
    assert set(kind.model_fields) <= set(likely)


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", FUZZ)
def test_nothing_that_a_body_may_hold_ends_the_server(path, examples, server):
    with server.client() as client:
        _ask_anything(client, path, examples)
        assert client.get("/health").status_code == 200
    assert server.idle()
    assert server.metric("recompiles_after_ready_total") == 0


def test_load_and_what_its_clients_see(server, tmp_path, capsys):
    """`bench serve` counts every token of every request, and a refused one as failed."""
    from twinfer.serving.cli import main

    flags = ["bench", "serve", "--base-url", server.url, "--num-prompts", "20", "--input-len", "32"]
    kept = tmp_path / "result.json"
    code = main([*flags, "--output-len", "8", "--request-rate", "200", "--json", str(kept)])
    result = json.loads(kept.read_text())
    assert code == 0
    assert result["failed"] == 0
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (640, 160)
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert result["max_concurrent_requests"] <= 20
    out = capsys.readouterr().out
    assert "Successful requests:                            20" in out
    prefixes = ["--dataset-name", "prefix-repetition", "--prefix-len", "24", "--num-prefixes", "2"]
    assert main([*flags, "--output-len", "2", *prefixes]) == 0
    assert main([*flags, "--output-len", "2", "--extra-body", "temperature=77"]) == 1


@pytest.mark.slow
def test_the_comparison_of_backends_reads_this_server(server, tmp_path):
    """What it serves is what the other backend computes, in each way in which it is computed."""
    from twinfer.serving.cli import main

    found = tmp_path / "run.json"
    flags = ["--model", "demo", "--a", "torch:cpu", "--b", server.url, "--dtype", "float32"]
    assert main(["numerics", "logits", *flags, "--json", str(found)]) == 0
    notes = json.dumps(json.loads(found.read_text()))
    assert all(kind in notes for kind in ("prompt", "decode", "batch", "again"))
