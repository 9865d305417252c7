"""Anthropic's Messages API: bodies as chats, events as the anthropic package reads them."""

import asyncio
import time

import httpx
import pytest

from twinfer.serving.formats.events import Finish, ToolCallArguments, ToolCallEnd, ToolCallStart
from twinfer.serving.formats.parser import OutputParser
from twinfer.serving.formats.table import FORMATS
from twinfer.serving.message_events import Ending, MessageEvents
from twinfer.serving.responses import Usage
from twinfer.serving.server.anthropic import IGNORED, CountRequest, MessagesRequest
from twinfer.serving.server.fields import read_fields
from twinfer.shared.errors import InternalError, RequestError
from twinfer.shared.models.locate import model_folder
from twinfer.shared.tokenizer import Tokenizer

from .scripted_server import ScriptedServer

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")
pydantic = pytest.importorskip("pydantic")

TOKENIZER = Tokenizer.load(model_folder("demo"))
TEMPLATE = """{{ tools | tojson if tools }}
{%- for m in messages %}[{{ m.role }}{{ ' ' + m.tool_call_id if m.tool_call_id }}]
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}
{%- endfor %}{{ '[assistant]' if add_generation_prompt }}
{{- '!' if enable_thinking is defined and not enable_thinking }}"""
SAID = [{"role": "user", "content": "x"}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é", "b": [1, 2]}}</tool_call>'
TOOL = {"name": "f", "description": "finds", "input_schema": {"type": "object"}}
TEXTS = {
    "text": ("Hello", "stop"),
    "nothing": ("", "stop"),
    "thought": ("<think>hm\nso</think>Hi", "stop"),
    "calls": (f"<think>x</think>Look {CALL}\n{CALL} done", "stop"),
    "no_arguments": ('<tool_call>{"name": "f"}</tool_call>', "stop"),
    "cut_text": ("Hello wor", "length"),
    "cut_call": (CALL[:-26], "length"),
    "cut_string": (CALL[: CALL.index("é")], "length"),
}
USAGE = Usage(7, 5, 3, 1)


def stream(text, reason, size=3, **ending):
    parser = OutputParser("qwen")
    events = MessageEvents("msg_1", "demo")
    sent = events.start(Usage(7, 0))
    for place in range(0, len(text), size):
        sent += events.take(parser.push(text[place : place + size]))
    sent += events.take(parser.finish(reason))
    sent += events.end(Ending(USAGE, **ending))
    return sent, events.message(Ending(USAGE, **ending))


def put_together(sent):
    """The message that the package makes of a stream."""
    accumulate = anthropic.lib.streaming._messages.accumulate_event
    adapter = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    message, buffers = None, {}
    for event in sent:
        parsed = adapter.validate_python(event)
        # a field that the types do not know lands among the extra ones
        assert not parsed.model_extra, parsed
        message = accumulate(event=parsed, current_snapshot=message, json_bufs=buffers)
    return message


@pytest.mark.parametrize("name", TEXTS)
def test_the_package_puts_a_stream_together(name):
    sent, whole = stream(*TEXTS[name])
    final = anthropic.types.Message.model_validate(whole)
    assert not final.model_extra
    message = put_together(sent)
    put = [block.model_dump(exclude={"parsed_output"}) for block in message.content]
    assert put == [block.model_dump() for block in final.content]
    assert message.stop_reason == final.stop_reason
    assert message.usage.output_tokens == final.usage.output_tokens == 5
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (4, 3)
    starts = [event["index"] for event in sent if event["type"] == "content_block_start"]
    stops = [event["index"] for event in sent if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(final.content)))


@pytest.mark.parametrize("name", TEXTS)
def test_the_size_of_pieces_changes_only_deltas(name):
    def shape(size):
        sent, whole = stream(*TEXTS[name], size)
        blocks = [block | {"id": 0} for block in whole["content"]]
        return [event["type"] for event in sent if not event["type"].endswith("_delta")], blocks

    assert shape(1) == shape(2) == shape(1000)


def test_why_a_message_ended():
    def reason(name, **ending):
        sent, whole = stream(*TEXTS[name], **ending)
        delta = next(event["delta"] for event in sent if event["type"] == "message_delta")
        assert delta == {name: whole[name] for name in delta}
        return tuple(delta.values())

    assert reason("text") == ("end_turn", None)
    assert reason("text", stop="lo") == ("stop_sequence", "lo")
    assert reason("calls", stop="lo") == ("tool_use", None)
    assert reason("cut_call") == ("max_tokens", None)
    assert reason("cut_text", is_full=True) == ("model_context_window_exceeded", None)
    assert reason("text", is_full=True) == ("end_turn", None)
    broken = MessageEvents("msg_1", "demo")
    broken.take([Finish("abort")])
    with pytest.raises(InternalError, match="ended with abort"):
        broken.message(Ending(USAGE))


@pytest.mark.parametrize("text", ['{"a": oops}', "[1]", '"x"'])
def test_arguments_that_are_no_object_are_not_taken_for_none(text):
    """No client runs a tool with nothing where the model wrote something."""
    events = MessageEvents("msg_1", "demo")
    events.take([ToolCallStart(0, "c", "f"), ToolCallArguments(0, text), ToolCallEnd(0, False)])
    events.take([Finish("tool_calls")])
    (block,) = events.message(Ending(USAGE))["content"]
    assert block["input"] == {"INVALID_JSON": text}


def test_a_call_that_is_cut_off_has_what_there_is():
    (block,) = stream(*TEXTS["cut_call"])[1]["content"]
    assert block["input"] == {"a": "é"}
    (block,) = stream(*TEXTS["cut_string"])[1]["content"]
    assert block["input"] == {}


def served(*texts, **options):
    """The package's client of a server that writes `texts`, and the server."""
    server = ScriptedServer(
        *texts, form=FORMATS["qwen"], tokenizer=TOKENIZER, template=TEMPLATE, step=3, **options
    )
    client = anthropic.AsyncAnthropic(
        api_key="none",
        base_url="http://x",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app)),
    )
    return client, server


def asked(body, *texts, path="", **options):
    """Status and JSON of the answer to a body, and the server."""
    server = served(*(texts or ("Hi",)), **options)[1]

    async def call():
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(f"/v1/messages{path}", json=body)

    answer = asyncio.run(call())
    return answer.status_code, answer.json(), server


AGENT = f"<think>\nI need f.\n</think>\n\nI look.\n{CALL}"


@pytest.mark.parametrize("streams", [False, True])
def test_an_agents_turn_comes_back_as_it_was(streams):
    """Thought, said and called, whole and streamed; and what is sent back is what the template of a
    chat would show.
    """
    client, server = served(AGENT, "Done.")
    call = {"model": "m", "max_tokens": 999, "tools": [TOOL], "system": "Be brief."}

    async def ask(messages):
        if not streams:
            return await client.messages.create(messages=messages, **call)
        async with client.messages.stream(messages=messages, **call) as stream:
            return await stream.get_final_message()

    async def turns():
        message = await ask(SAID)
        result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "27"}
        answered = [result, {"type": "text", "text": "And now?"}]
        messages = [*SAID, message.to_param(), {"role": "user", "content": answered}]
        return message, await ask(messages)

    message, last = asyncio.run(turns())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thought, said, called = message.content
    assert (thought.thinking, said.text) == ("I need f.", "I look.")
    assert (called.name, called.input) == ("f", {"a": "é", "b": [1, 2]})
    assert (message.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert message.usage.output_tokens == len(TOKENIZER.encode(AGENT))
    assert last.content[0].text == "Done."
    first, second = server.prompts
    shown = first.removesuffix("[assistant]")
    call = '(I need f.)I look.<f {"a": "é", "b": [1, 2]}>'
    expected = f"{shown}[assistant]{call}[tool {called.id}]27[user]And now?[assistant]"
    assert second == expected
    assert first.endswith("[system]Be brief.[user]x[assistant]")
    assert '"parameters": {"type": "object"}' in first


def prompt_of(**body):
    """The prompt that a server makes of a body."""
    status, answer, server = asked({"model": "m", "max_tokens": 9, "messages": SAID} | body)
    assert status == 200, answer
    (prompt,) = server.prompts
    status, count, _ = asked({"model": "m", "messages": SAID} | body, path="/count_tokens")
    assert (status, count) == (200, {"input_tokens": len(TOKENIZER.encode(prompt, False))})
    return prompt


def text(*texts):
    return [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in texts]


def test_what_becomes_of_messages():
    turns = [
        {"role": "user", "content": text("a", "b")},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}, *text("d")]},
        {"role": "system", "content": "e"},
        {"role": "user", "content": []},
    ]
    assert prompt_of(messages=turns) == "[user]a\nb\nc[assistant]d[system]e[user][assistant]"


def test_turns_of_many_messages_are_put_together_in_linear_time():
    """Nobody else is served meanwhile. Of copies of all that was before it took five seconds."""
    blocks = {"type": "thinking", "thinking": "x" * 5000}, CALLED
    said = {"role": "assistant", "content": [*blocks]}
    body = {"max_tokens": 9, "messages": [*SAID, *[said] * 4000, *SAID]}
    start = time.process_time()
    turn = read_fields(MessagesRequest, body).chat().messages[1]
    assert time.process_time() - start < 1
    assert turn["reasoning_content"] == "x" * 5000 * 4000
    assert len(turn["tool_calls"]) == 4000


def test_an_answer_goes_on_with_the_assistants_last_words():
    turns = [*SAID, {"role": "assistant", "content": "The answer is ("}]
    assert prompt_of(messages=turns) == "[user]x[assistant]The answer is ("


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2; cch=fa690;\nBe brief.",
        text("x-anthropic-billing-header: cc_version=2; cch=fa690;", "Be brief."),
        text("x-anthropic-billing-header: cc_version=2; cch=fa690;\nBe brief."),
        "Be brief.",
    ],
)
def test_a_header_for_anthropics_books_is_no_part_of_a_prompt(system):
    """It is another one with each call, and stands in front of all else."""
    assert prompt_of(system=system) == "[system]Be brief.[user]x[assistant]"


def test_whether_a_model_thinks_first():
    assert prompt_of(thinking={"type": "disabled"}).endswith("!")
    for kind in ("enabled", "adaptive"):
        assert not prompt_of(thinking={"type": kind, "budget_tokens": 1024}).endswith("!")
    quiet = {"thinking": {"type": "adaptive", "display": "omitted"}}
    body = {"max_tokens": 99, "messages": SAID}
    for more, kinds in ((quiet, ["text"]), ({}, ["thinking", "text"])):
        _, answer, _ = asked(body | more, "<think>\nhm\n</think>\n\nHi")
        assert [block["type"] for block in answer["content"]] == kinds
    effort = {"output_config": {"effort": "high"}}
    assert read_fields(MessagesRequest, body | effort).chat().reasoning_effort == "high"


def test_a_stop_sequence_is_told():
    _, answer, server = asked(
        {"max_tokens": 99, "messages": SAID, "stop_sequences": ["lo w"]}, "Hello world"
    )
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lo w")
    assert answer["content"] == [{"type": "text", "text": "Hel"}]
    assert server.asked[0].stop == ("lo w",)


def test_a_context_that_is_full_is_told():
    count = len(TOKENIZER.encode("[user]x[assistant]", False)) + len(TOKENIZER.encode("Hi"))
    body = {"max_tokens": 99, "messages": SAID}
    for room, reason in ((count, "model_context_window_exceeded"), (count + 1, "max_tokens")):
        _, answer, _ = asked(body, "Hi", length=True, room=room)
        assert answer["stop_reason"] == reason


def test_which_tools_may_be_called():
    def chat(**choice):
        body = {"max_tokens": 9, "messages": SAID, "tools": [TOOL | {"strict": True}]}
        return read_fields(MessagesRequest, body | {"tool_choice": choice}).chat()

    assert chat(type="auto").tool_choice == "auto"
    assert chat(type="any").must_call
    assert chat(type="none").offered == []
    assert chat(type="tool", name="f").named_tool
    assert chat(type="auto", disable_parallel_tool_use=True).parallel_tool_calls is False
    assert chat(type="auto", disable_parallel_tool_use=False).parallel_tool_calls is None
    assert chat(type="auto").strict_tools == ["f"]


FORM = {"type": "json_schema", "schema": {"type": "object"}}
BLOCK = [{"type": "image", "source": {}}]
CALLED = {"type": "tool_use", "id": "x", "name": "f", "input": {}}


def after(role, *blocks):
    """Messages whose last one has these blocks."""
    return {"messages": [*SAID, {"role": role, "content": [*blocks]}]}


BAD = [
    (after("assistant", CALLED), "messages"),
    (after("assistant", *text("a"), CALLED), "messages"),
    *(
        (
            after("user", {"type": "tool_result", "tool_use_id": "x", "content": content}),
            "messages[1].content[0].content",
        )
        for content in (0, False, {})
    ),
    ({"tools": [TOOL | {"type": False}]}, "tools[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [*SAID, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": BLOCK}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "system", "content": BLOCK}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": BLOCK}],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "{}"}],
                }
            ]
        },
        "messages[0].content[0].input",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
        "messages[0].content[0].thinking",
    ),
    ({"messages": [{"role": "user", "content": "def f(x):\n" * 9_999}]}, "messages"),
    ({"system": BLOCK}, "system[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"temperature": -1.0}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a\nb"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type: got any, which needs tools"),
    ({"tool_choice": {"type": ["any"]}}, "tool_choice.type"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name: got g, must name one of the tools",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "display": 5}}, "thinking.display"),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"format": 5}}, "output_config.format"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": FORM}, "min_tokens": 3}, "min_tokens"),
    ({"n": 2}, "n"),
    ({"stop": ["x"]}, "stop"),
    ({"container": "x"}, "container"),
    ({"logprobs": True}, "logprobs"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"continue_final_message": False}, "continue_final_message"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"output_format": FORM}, "output_format"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named(change, field):
    status, answer, _ = asked({"max_tokens": 9, "messages": SAID} | change)
    assert (status, answer["type"]) == (400, "error"), answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert f"{error['message']}: ".startswith(f"{field}: "), error


def test_errors_are_those_of_the_package():
    client, _ = served("Hi")
    ask = client.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        asyncio.run(ask(model="other", max_tokens=9, messages=SAID))
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id == missing.value.response.headers["x-request-id"]
    client, _ = served("Hi", room=3)
    # Clients that shorten a conversation by themselves look for these words.
    with pytest.raises(anthropic.BadRequestError, match="messages: prompt is too long: got "):
        asyncio.run(client.messages.create(model="m", max_tokens=9, messages=SAID))
    with pytest.raises(RequestError, match="max_tokens"):
        read_fields(MessagesRequest, {"messages": SAID})
    assert read_fields(CountRequest, {"messages": SAID}).max_tokens is None


def test_the_package_runs_tools_without_a_thread_that_the_server_would_hold():
    """It asks for one, and then would send no more than the result: what was said would be gone."""
    client, server = served(CALL.replace("é", "e"), "Done.")

    @anthropic.beta_async_tool
    async def f(a: str, b: list[int]) -> str:
        return f"{a} {b}"

    async def run():
        call = {"model": "m", "max_tokens": 99, "messages": SAID, "system": "Be brief."}
        return await client.beta.messages.tool_runner(tools=[f], **call).until_done()

    assert asyncio.run(run()).content[0].text == "Done."
    first, second = server.prompts
    shown = first.removesuffix("[assistant]")
    assert shown.endswith("[system]Be brief.[user]x")
    assert second.startswith(f'{shown}[assistant]<f {{"a": "e", "b": [1, 2]}}>[tool ')
    assert second.endswith("]e [1, 2][assistant]")


def test_an_error_behind_the_beginning_of_a_stream_is_an_event(monkeypatch):
    def end(self, ending):
        raise RequestError("banned_sequences", "no token was left")

    monkeypatch.setattr(MessageEvents, "end", end)
    client, _ = served("Hi")

    async def read():
        async with client.messages.stream(model="m", max_tokens=9, messages=SAID) as stream:
            return [event async for event in stream]

    with pytest.raises(anthropic.APIStatusError, match="no token was left") as told:
        asyncio.run(read())
    assert told.value.type == "invalid_request_error"


def test_every_parameter_of_the_package_is_known():
    """A new one has to be thought about."""
    known = {*MessagesRequest.model_fields, *IGNORED, *MessagesRequest.refused}
    params = anthropic.types.message_create_params.MessageCreateParamsBase.__annotations__
    assert params.keys() <= known
    params = anthropic.types.beta.message_create_params.MessageCreateParamsBase.__annotations__
    assert params.keys() <= known | {"betas"}  # which goes as a header
    ignored = {name: {"type": "x"} for name in IGNORED}
    chat = read_fields(MessagesRequest, {"max_tokens": 9, "messages": SAID} | ignored).chat()
    assert chat.unknown == []
    other = read_fields(MessagesRequest, {"max_tokens": 9, "messages": SAID, "what": 1}).chat()
    assert other.unknown == ["what"]


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_key_may_stand_where_the_package_has_it(name):
    """And what stands before routes answers as they do."""
    server = served("Hi", keys=["right"], max_body=1000)[1]

    async def call(key, content="x"):
        transport = httpx.ASGITransport(app=server.app)
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        headers = {name: f"Bearer {key}" if name == "authorization" else key}
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.post("/v1/messages", json=body, headers=headers)
        return answer.status_code, answer.json().get("error", {}).get("type")

    assert asyncio.run(call("right")) == (200, None)
    assert asyncio.run(call("wrong")) == (401, "authentication_error")
    assert asyncio.run(call("")) == (401, "authentication_error")
    assert asyncio.run(call("right", "x" * 1000)) == (413, "request_too_large")


def test_a_method_that_there_is_not_is_no_error_of_the_server():
    transport = httpx.ASGITransport(app=served("Hi")[1].app)

    async def call():
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/v1/messages")

    answer = asyncio.run(call())
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
