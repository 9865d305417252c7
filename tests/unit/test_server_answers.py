"""Answers of the server from texts that a model might write: reasoning, calls, and their pieces."""

import asyncio
import dataclasses
import json
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseIncludable
from tokenizers.processors import TemplateProcessing

from twinfer.serving.formats.parser import OutputParser
from twinfer.serving.formats.table import FORMATS
from twinfer.serving.responses import ResponseEvents
from twinfer.serving.server.answers import ChatAnswer, Reader, Words
from twinfer.serving.server.app import build_app
from twinfer.serving.server.engine import EngineProcess, Limits
from twinfer.serving.server.fields import ChatRequest, read_fields
from twinfer.serving.server.live import Live
from twinfer.serving.server.messages import Add, Refused
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.responses import ResponsesRequest, _scores
from twinfer.serving.server.server import LARGE, Server, Settings, last_of
from twinfer.shared.engine import Logprob, Update
from twinfer.shared.errors import PromptTooLong, RequestError
from twinfer.shared.models.locate import model_folder
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(model_folder("demo"))
THINKING = "<think>\nA file.\n</think>\n\n"
CALLS = (
    'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "ü {}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def answered(text, *, step, names=("read", "now"), scores=None, form="qwen", **options):
    """The whole answer to a chat whose completion is `text`, and the pieces of its stream."""
    ids = TOKENIZER.encode(text)

    def fresh():
        live = Live([1], [SamplingParams(max_tokens=999, logprobs=scores)], TOKENIZER)
        answer = ChatAnswer(
            "chatcmpl-1", "m", 1, Words(TOKENIZER), scores,
            lambda: OutputParser(FORMATS[form], "", names), None, **options,
        )  # fmt: skip
        return live, answer

    def update(tokens, last):
        rows = None if scores is None else [{t: Logprob(-1.0, 1)} for t in tokens]
        return Update("1", tuple(tokens), FinishReason.LENGTH if last else None, rows)

    async def run():
        live, answer = fresh()
        live.take(0, update(ids, True))
        whole = answer.whole(live)
        live, answer = fresh()
        pieces = []
        for first in range(0, len(ids), step):
            live.take(0, update(ids[first : first + step], first + step >= len(ids)))
            pieces += [piece for news in live.news() for piece in answer.pieces(live, news)]
        return whole, pieces

    return asyncio.run(run())


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_calls_whole_and_in_pieces(step):
    whole, pieces = answered(THINKING + CALLS, step=step)
    message = ChatCompletion.model_validate(whole, strict=True).choices[0].message
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert calls == [("read", {"path": "ü {}"}), ("now", {})]
    assert message.content == "I look."
    assert message.reasoning == message.reasoning_content
    assert message.reasoning == "A file."
    content, reasoning, streamed = "", "", {}
    for piece in pieces:
        delta = ChatCompletionChunk.model_validate(piece, strict=True).choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", "") or ""
        for call in delta.tool_calls or ():
            if call.id:
                assert call.function.arguments == ""
                assert call.index == len(streamed)
                streamed[call.index] = [call.function.name, ""]
            else:
                streamed[call.index][1] += call.function.arguments
    assert (content, reasoning) == ("I look.", "A file.")
    assert [(name, json.loads(text)) for name, text in streamed.values()] == calls
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[:-1]] == [None] * (
        len(pieces) - 1
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_inside_of_a_call_is_why_it_ends(stream):
    text = '<tool_call>\n{"name": "read", "arguments": {"path": "Berlin"}}\n</tool_call>'
    body = {"messages": SAID, "tools": [READ_TOOL], "stream": stream}
    for stop, reason in (("Berlin", "stop"), ("</tool", "tool_calls")):
        told = asked(CHAT[0], body | {"stop": stop}, text, form="qwen")
        if stream:
            told = told.split("data: ")[-2]
        (choice,) = json.loads(told)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)


def test_without_tools_their_marks_are_content():
    whole, _ = answered(CALLS, step=1, names=())
    message = whole["choices"][0]["message"]
    assert message["content"] == CALLS
    assert "tool_calls" not in message


def test_without_a_tokenizer_the_field_that_needs_one_is_named():
    server = Server(Settings(["m"], None, SamplingParams(), FORMATS["none"]), None, None)
    chat = read_fields(ChatRequest, {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(RequestError, match=r"no tokenizer\.json, so there are no chats") as caught:
        server._render(chat, None)
    response = read_fields(ResponsesRequest, {"input": "x"})
    assert caught.value.field == "messages"
    assert response.named(caught.value).field == "input"
    with pytest.raises(RequestError, match=r"prompt: .* so text needs token ids"):
        asyncio.run(server.encode(["x"], True, None))


def test_special_tokens_of_a_chat_are_those_of_its_template_unless_it_asks_for_more():
    tokenizer = Tokenizer.load(model_folder("demo"))
    tokenizer._backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    server = Server(Settings(["m"], tokenizer, SamplingParams(), FORMATS["none"]), None, None)
    body = {"messages": [{"role": "user", "content": "x"}]}
    _, plain = server._render(read_fields(ChatRequest, body), None)
    _, more = server._render(read_fields(ChatRequest, body | {"add_special_tokens": True}), None)
    assert more == [0, *plain]


@pytest.mark.parametrize(
    ("kept", "read"), [(9, "^abcd@"), (6, "^abcd@"), (5, "^bcd@"), (3, "^d@"), (2, "^@"), (1, "@")]
)
def test_what_begins_each_text_stays_before_its_end(kept, read):
    tokenizer = Tokenizer.load(model_folder("demo"))
    (begin,), (end,) = tokenizer.encode("^"), tokenizer.encode("@")
    tokenizer._backend.post_processor = TemplateProcessing(
        single="^ $A @", special_tokens=[("^", begin), ("@", end)]
    )
    server = Server(Settings(["m"], tokenizer, SamplingParams(), FORMATS["none"]), None, None)
    own = [token for one in "abcd" for token in tokenizer.encode(one, False)]
    ids = [begin, *own, end]
    found = last_of(ids, kept, server.front(True, kept))
    assert [tokenizer.decode([token], False) for token in found] == list(read)
    assert last_of(own, 3, server.front(False, 3)) == own[-3:]
    assert tokenizer.front == [begin]
    assert TOKENIZER.front == []


def test_others_run_while_many_short_texts_are_encoded():
    others_ran = threading.Event()

    class Waits:
        def encode(self, *arguments):
            assert others_ran.wait(60)
            return TOKENIZER.encode(*arguments)

    server = Server(Settings(["m"], Waits(), SamplingParams(), FORMATS["none"]), None, None)
    text = "def f(x): " * 300

    async def run():
        others = 0
        encoding = asyncio.create_task(server.encode([text] * 200, True, None))
        while not encoding.done():
            others += 1
            if others > 3:
                others_ran.set()
            await asyncio.sleep(0.001)
        assert await encoding == [TOKENIZER.encode(text)] * 200
        return others

    assert asyncio.run(run()) > 3


def test_reasoning_that_has_not_ended_is_counted():
    for text, all_of_it in ((THINKING, False), (THINKING[:12], True)):
        usage = answered(text, step=1)[0]["usage"]
        count = usage["completion_tokens_details"]["reasoning_tokens"]
        assert count == (usage["completion_tokens"] if all_of_it else 0)  # no token ends it here


class Counted(list):
    """Token ids that count how many of them were looked through."""

    looked = 0

    def index(self, *given):
        Counted.looked += len(self)
        return super().index(*given)

    def __contains__(self, token):
        Counted.looked += len(self)
        return super().__contains__(token)

    def __getitem__(self, key):
        found = super().__getitem__(key)
        return Counted(found) if isinstance(key, slice) else found


@pytest.mark.parametrize(("end", "count"), [(7, 700), (None, 1000)])
def test_each_token_is_looked_at_once_for_the_end_of_reasoning(end, count):
    """However often the usage is told."""
    think = dataclasses.replace(FORMATS["think"], think=("<think>", ";"))
    Counted.looked = 0

    async def run():
        live = Live([1], [SamplingParams(max_tokens=9999)], None)
        live.outputs[0].token_ids = Counted()
        answer = ChatAnswer(
            "c", "m", 1, Words(None), None, lambda: OutputParser(think, "<think>", ()), end
        )
        for place in range(1000):
            live.take(0, Update("1", (7 if place == 699 else 5,)))
            for news in live.news():
                answer.pieces(live, news)
            told = answer.usage(live)["usage"]
            assert told["completion_tokens"] == place + 1
        return told["completion_tokens_details"]["reasoning_tokens"]

    assert asyncio.run(run()) == count
    assert Counted.looked <= 2000


def test_a_response_has_no_scores_of_reasoning_however_it_arrives():
    ids = TOKENIZER.encode("a file;b c")
    end = TOKENIZER.encode(";")[0]
    think = dataclasses.replace(FORMATS["think"], think=("<think>", ";"))
    server = Server(Settings(["m"], TOKENIZER, SamplingParams(), think), None, None)
    server.think_end = end
    chat = read_fields(ChatRequest, {"messages": [], "logprobs": True})

    async def run(step):
        live = Live([1], [SamplingParams(max_tokens=99, logprobs=0)], TOKENIZER)
        events = ResponseEvents("r", "m", 1)
        reader = Reader(OutputParser(think, "<think>", ()), end)
        for first in range(0, len(ids), step):
            tokens = ids[first : first + step]
            reason = FinishReason.LENGTH if first + step >= len(ids) else None
            live.take(
                0, Update("1", tuple(tokens), reason, [{t: Logprob(-1.0, 1)} for t in tokens])
            )
            for news in live.news():
                for part, places in reader.parts(news):
                    events.take(part, _scores(server, chat, news, places))
        return events.response(None)["output"]

    for step in (1, 3, 99):
        reasoning, message = asyncio.run(run(step))
        assert reasoning["content"][0]["text"] == "a file"
        (part,) = message["content"]
        assert part["text"] == "".join(score["token"] for score in part["logprobs"]) == "b c"


@pytest.mark.parametrize("step", [1, 5])
def test_each_token_has_its_log_probability(step):
    whole, pieces = answered(THINKING + CALLS, step=step, scores=1)
    count = len(TOKENIZER.encode(THINKING + CALLS))
    assert len(whole["choices"][0]["logprobs"]["content"]) == count
    told = [piece["choices"][0]["logprobs"] for piece in pieces]
    assert sum(len(scores["content"]) for scores in told if scores) == count


def test_arguments_reach_a_template_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    (message,) = read_fields(ChatRequest, body).conversation()
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
        read_fields(ChatRequest, body).conversation()


def test_names_of_tools_are_printable():
    """No parser finds another one in what a model writes."""
    for name in ("f\n", "a\x00b", "\x7f", "a\u2028"):
        tools = [{"type": "function", "function": {"name": name}}]
        chat = read_fields(ChatRequest, {"messages": [], "tools": tools})
        with pytest.raises(RequestError, match=r"^tools\[0\].function.name: got .* printable"):
            chat.check()
    tools = [{"type": "function", "function": {"name": 'a "ü" b'}}]
    read_fields(ChatRequest, {"messages": [], "tools": tools}).check()


def test_what_a_response_may_include_is_what_the_api_has():
    include = [*get_args(ResponseIncludable)]
    body = read_fields(ResponsesRequest, {"input": "x", "include": include})
    body.check()
    assert body.chat().logprobs


@pytest.mark.parametrize("tools", [[{}], [{"type": "function"}], [{"type": "web", "function": {}}]])
def test_tools_without_names_are_refused(tools):
    chat = read_fields(ChatRequest, {"messages": [], "tools": tools})
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        chat.check()


def test_input_items_are_the_turns_of_a_chat():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ]
    tools = [{"type": "function", "name": "read", "parameters": {}}]
    body = read_fields(ResponsesRequest, {"input": items, "instructions": "s", "tools": tools})
    chat = body.chat()
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool"]
    turn = chat.messages[2]
    assert turn["reasoning_content"] == "b"
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]
    assert chat.tool_names == ["read"]


def test_what_was_thought_and_said_is_one_turn():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}
    said = {"role": "assistant", "content": "c"}
    asked = {"role": "user", "content": "d"}
    both = {"role": "assistant", "content": "c", "reasoning_content": "b"}
    for items, turns in (
        ([thought, said, asked], [both, asked]),
        ([thought, said, said], [both, said]),
        ([said, said], [said, said]),
        ([thought, asked], [{**both, "content": ""}, asked]),
    ):
        assert read_fields(ResponsesRequest, {"input": items}).chat().messages == turns


def test_a_list_of_no_calls_is_none():
    """Templates ask whether there is one."""
    for content in ("x", None):
        body = {"messages": [{"role": "assistant", "content": content, "tool_calls": []}]}
        (message,) = read_fields(ChatRequest, body).conversation()
        assert message == {"role": "assistant", "content": content or ""}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": "x"}, "y"]}, "input[1]"),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "function_call", "name": "f", "arguments": "{"},
                ]
            },
            "input[1].arguments",
        ),
        ({"include": ["banana"]}, "include[0]"),
        ({"include": ["reasoning.encrypted_content", "message"]}, "include[1]"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function", "name": "f\n"}]}, "tools[0].name"),
    ],
)
def test_what_a_response_cannot_have_is_named(change, field):
    def read():
        body = read_fields(ResponsesRequest, {"input": "x"} | change)
        body.check()
        chat = body.chat()
        try:
            chat.check()
            chat.scores()
        except RequestError as error:
            raise body.named(error) from None

    with pytest.raises(RequestError) as error:
        read()
    assert error.value.field == field


@pytest.mark.parametrize("step", [1, 99])
def test_reasoning_that_nobody_wants_is_left_out(step):
    """And nothing else: tokens are counted, and have their ids."""
    whole, pieces = answered(
        THINKING + "It is.", step=step, reasoning=False, with_ids=True, scores=0
    )
    (choice,) = whole["choices"]
    message = choice["message"]
    assert message["content"] == "It is."
    assert not message.keys() & {"reasoning", "reasoning_content"}
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    told = [piece["choices"][0] for piece in pieces]
    assert "".join(one["delta"].get("content") or "" for one in told) == "It is."
    assert not any("reasoning" in one["delta"] for one in told)
    assert [i for one in told for i in one.get("token_ids", [])] == choice["token_ids"]
    scored = [entry for one in told for entry in (one["logprobs"] or {"content": []})["content"]]
    assert len(scored) == len(choice["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_who_asks_for_an_answer_without_reasoning_gets_that(path, stream):
    said = (
        {"input": "x"} if "responses" in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    if path == MESSAGE[0]:
        said = MESSAGE[1]
    told = asked(path, said | {"stream": stream}, THINKING + "It is.")
    assert "A file" in told
    told = asked(path, said | {"stream": stream, "include_reasoning": False}, THINKING + "It is.")
    assert "A file" not in told
    assert "It is." in told


SAID = [{"role": "user", "content": "x"}]
CHAT, RESPONSE, COMPLETION, MESSAGE = (
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 9}),
)
JSON_FORM = {"type": "json_object"}
OBJECT_FORM = {"type": "json_schema", "schema": {"type": "object"}}
READ = {"name": "read", "parameters": {"type": "object"}}
READ_TOOL = {"type": "function", "function": READ}
NOW_TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("call", "more", "ours", "theirs"),
    [
        (CHAT, {"max_tokens": 5}, "max_tokens", "max_tokens"),
        (CHAT, {"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        (CHAT, {"logprobs": True}, "logprobs", "top_logprobs"),
        (CHAT, {"response_format": JSON_FORM}, "structured_outputs", "response_format"),
        (CHAT, {}, "prompt", "messages"),
        (RESPONSE, {"max_output_tokens": 5}, "max_tokens", "max_output_tokens"),
        (RESPONSE, {"text": {"format": JSON_FORM}}, "structured_outputs", "text.format"),
        (RESPONSE, {}, "prompt", "input"),
        (RESPONSE, {"seed": 5}, "seed", "seed"),
        (MESSAGE, {}, "max_tokens", "max_tokens"),
        (MESSAGE, {}, "stop", "stop_sequences"),
        (
            MESSAGE,
            {"output_config": {"format": OBJECT_FORM}},
            "structured_outputs",
            "output_config.format",
        ),
        (MESSAGE, {}, "prompt", "messages"),
        (COMPLETION, {"max_tokens": 5}, "max_tokens", "max_tokens"),
        (COMPLETION, {"response_format": JSON_FORM}, "structured_outputs", "response_format"),
    ],
    ids=str,
)
def test_a_refusal_of_the_engine_names_what_the_client_has_said(call, more, ours, theirs):
    path, body = call
    for stream in (False, True):
        told = asked(path, body | more | {"stream": stream}, refusal=(ours, "got 5"))
        error = json.loads(told)["error"]
        assert error["message"] == f"{theirs}: got 5"
        assert call is MESSAGE or error["param"] == theirs


@pytest.mark.parametrize(
    ("call", "more", "reason", "says"),
    [
        (CHAT, {"tools": [NOW_TOOL, READ_TOOL], "tool_choice": "required"},
         "grammar: arguments_1: bad", "tools: parameters of 'read': bad"),
        (CHAT, {"tools": [NOW_TOOL, READ_TOOL], "tool_choice": READ_TOOL},
         "grammar: value_0_3_json: bad", "tools: parameters of 'read': bad"),
        (RESPONSE, {"tools": [READ | {"type": "function"}], "tool_choice": "required"},
         "grammar: arguments_0: bad", "tools: parameters of 'read': bad"),
        (CHAT, {"response_format": JSON_FORM}, "grammar: answer: bad", "response_format: bad"),
        (CHAT, {"structured_outputs": {"json_object": True}}, "grammar: answer: bad",
         "structured_outputs: bad"),
        (CHAT, {"structured_outputs": {"grammar": "start: answer"}}, "grammar: answer: bad",
         "structured_outputs: grammar: answer: bad"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_compiled_is_named_as_the_client_has_it(call, more, reason, says):
    """Not by a rule of a grammar that the client has not written."""
    path, body = call
    told = asked(path, body | more, refusal=("structured_outputs", reason), form="qwen")
    assert json.loads(told)["error"]["message"] == says


@pytest.mark.parametrize(
    ("call", "more", "says"),
    [
        (CHAT, {"max_tokens": 2}, "must not exceed max_tokens (2)"),
        (CHAT, {"max_completion_tokens": 2}, "must not exceed max_completion_tokens (2)"),
        (RESPONSE, {"max_output_tokens": 2}, "must not exceed max_output_tokens (2)"),
        (CHAT, {"response_format": JSON_FORM}, "cannot be had with response_format:"),
        (COMPLETION, {"response_format": JSON_FORM}, "cannot be had with response_format:"),
        (COMPLETION, {"structured_outputs": {"regex": "a"}}, "be had with structured_outputs:"),
        (RESPONSE, {"text": {"format": JSON_FORM}}, "cannot be had with text.format:"),
        (CHAT, {"tools": [READ_TOOL], "tool_choice": "required"}, "be had with tool_choice:"),
        (
            RESPONSE,
            {"tools": [READ | {"type": "function"}], "tool_choice": "required"},
            "be had with tool_choice:",
        ),
        (
            CHAT,
            {"tools": [READ_TOOL], "parallel_tool_calls": False},
            "be had with parallel_tool_calls:",
        ),
    ],
    ids=str,
)
def test_what_a_minimum_cannot_be_had_with_is_named_as_the_client_has_it(call, more, says):
    path, body = call
    error = json.loads(asked(path, body | {"min_tokens": 3} | more, form="qwen"))["error"]
    assert error["param"] == "min_tokens"
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_is_not_told_ends_nothing(stream):
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "stop": "y", "stream": stream}
    told = asked(COMPLETION[0], body, "y")
    (choice,) = json.loads(told.split("data: ")[-2] if stream else told)["choices"]
    assert choice["text"] == "x"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def asked(path, body, text="", *, refusal=None, form="think"):
    """What a server says to a call that its engine answers with a text, or refuses."""
    engine = EngineProcess({}, TOKENIZER, limits=Limits(9, 9999))
    sizes = {"max_num_seqs": 4, "num_pages": 99, "max_model_len": 999, "page_size": 16}
    sizes |= {"vocab_size": 2048, "longest_request": 99}
    engine.ready = SimpleNamespace(model=sizes, options={})

    def answer(message):
        if isinstance(message, Add) and refusal is not None:
            refused = Refused(message.id, *refusal)
            asyncio.get_running_loop().call_soon(lambda: engine._take(refused))
        elif isinstance(message, Add):
            ids = tuple(TOKENIZER.encode(text))
            asyncio.get_running_loop().call_soon(
                lambda: engine._live[message.id][0].take(
                    0, Update(str(message.id), ids, FinishReason.LENGTH)
                )
            )

    engine._send = answer
    app = build_app(Settings(["m"], TOKENIZER, SamplingParams(), FORMATS[form]), engine, Metrics())

    async def call():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as client:
            method = "GET" if body is None else "POST"
            return (await client.request(method, path, json=body)).text

    return asyncio.run(call())


def test_the_length_that_is_told_is_what_context_and_cache_hold():
    """Clients cut their prompts by it."""
    assert json.loads(asked("/v1/models", None, ""))["data"][0]["max_model_len"] == 99
    assert json.loads(asked("/tokenize", {"prompt": "a"}, ""))["max_model_len"] == 99


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * LARGE}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * LARGE}]}),
        ("/v1/completions", {"prompt": ["x" * 600_000] * 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * LARGE}]}),
    ],
    ids=["text", "turns", "completion", "chat"],
)
def test_large_texts_are_split_one_after_the_other(path, body, monkeypatch):
    """Each takes hundreds of megabytes meanwhile. Small ones need not wait for them."""
    begun, ended, now = threading.Event(), threading.Event(), Counter()

    def encode(text, *_):
        if len(text) < LARGE // 2:
            assert begun.wait(60)
            ended.set()
            return [1]
        now["split"] += 1
        now["most"] = max(now["most"], now["split"])
        begun.set()
        assert ended.wait(60)
        time.sleep(0.02)
        now["split"] -= 1
        raise PromptTooLong("prompt", "too long")

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    engine = SimpleNamespace(ready=None, alive=True, why="", admit=lambda *_: None)
    shown = "{{ messages[0].content }}"
    settings = Settings(["m"], TOKENIZER, SamplingParams(), FORMATS["none"], template=shown)
    app = build_app(settings, engine, Metrics())

    async def calls():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as client:
            asked = [(path, body)] * 3 + [("/tokenize", {"prompt": "x" * 5000})]
            return await asyncio.gather(*(client.post(to, json=what) for to, what in asked))

    *large, small = asyncio.run(calls())
    assert [answer.status_code for answer in large] == [400] * 3
    assert small.json()["tokens"] == [1]
    assert now["most"] == 1
