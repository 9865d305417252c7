"""Events of the Responses API: what the openai package accepts, puts together and finds again."""

import itertools

import pytest

from twinfer.serving.formats.events import Finish
from twinfer.serving.formats.parser import OutputParser
from twinfer.serving.responses import ResponseEvents, Usage
from twinfer.shared.errors import InternalError

CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
TEXTS = {
    "text": ("Hello", "stop"),
    "nothing": ("", "stop"),
    "thought": ("<think>hm\nso</think>Hi", "stop"),
    "calls": (f"<think>x</think>Look {CALL}\n{CALL} done", "stop"),
    "no_arguments": ('<tool_call>{"name": "f"}</tool_call>', "stop"),
    "cut_text": ("Hello wor", "length"),
    "cut_call": (CALL[:-22], "length"),
    "broken": ("Hello", "error"),
}


def stream(text, reason, size=3):
    parser = OutputParser("qwen")
    events = ResponseEvents("resp_1", "demo", 1_700_000_000, {"instructions": "Be brief"})
    sent = events.start()
    for place in range(0, len(text), size):
        sent += events.take(parser.push(text[place : place + size]))
    sent += events.take(parser.finish(reason))
    usage = Usage(7, 5, 3, 1)
    sent += events.end(usage)
    return sent, events.response(usage)


@pytest.mark.parametrize("name", TEXTS)
def test_openai_accepts_every_event(name):
    responses = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    adapter = pydantic.TypeAdapter(responses.ResponseStreamEvent)
    sent, _ = stream(*TEXTS[name])
    for event in sent:
        parsed = adapter.validate_python(event)
        assert parsed.type == event["type"]
        # a field that the types do not know lands among the extra ones
        assert not parsed.model_extra
    final = responses.Response.model_validate(sent[-1]["response"])
    assert not final.model_extra
    assert final.usage.total_tokens == 12
    for item in final.output:
        assert not item.model_extra


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_parts_make_the_final_object(name):
    sent, final = stream(*TEXTS[name])
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in sent if event["type"] == "response.output_item.added"]
    output = sent[-1]["response"]["output"]
    assert done == output == final["output"]
    assert [item["id"] for item in added] == [item["id"] for item in output]
    assert len({item["id"] for item in output}) == len(output)
    for index, item in enumerate(output):
        texts = [
            event["delta"]
            for event in sent
            if event.get("output_index") == index and event["type"].endswith(".delta")
        ]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(texts) == text


@pytest.mark.parametrize("name", TEXTS)
def test_size_of_pieces_changes_only_deltas(name):
    def shape(size):
        sent, _ = stream(*TEXTS[name], size)
        kinds = [event["type"] for event in sent if not event["type"].endswith(".delta")]
        items = [{**item, "id": 0, "call_id": 0} for item in sent[-1]["response"]["output"]]
        return kinds, items

    assert shape(1) == shape(2) == shape(1000)


def kinds_of(text):
    sent, _ = stream(text, "stop", 1000)
    assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
    assert sent[-1]["type"] == "response.completed"
    return [event["type"].removeprefix("response.") for event in sent[2:-1]]


def test_order_of_events():
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds_of(CALL) == ["output_item.added", *call, "output_item.done"]
    for text, part in (("Hi", "output_text"), ("<think>a</think>", "reasoning_text")):
        assert kinds_of(text) == [
            *("output_item.added", "content_part.added", f"{part}.delta"),
            *(f"{part}.done", "content_part.done", "output_item.done"),
        ]


def test_states():
    def state(name):
        response = stream(*TEXTS[name])[0][-1]["response"]
        return response["status"], [item["status"] for item in response["output"]]

    assert state("calls") == ("completed", ["completed"] * 5)
    assert state("cut_text") == ("incomplete", ["incomplete"])
    assert state("cut_call") == ("incomplete", ["incomplete"])
    assert state("broken") == ("failed", ["incomplete"])
    assert stream(*TEXTS["broken"])[1]["error"]["message"] == "the generation ended with error"
    assert stream(*TEXTS["cut_text"])[1]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_failure_closes_what_is_open():
    events = ResponseEvents("resp_1", "demo", 0)
    events.start()
    events.take(OutputParser("none").push("Hello"))
    sent = events.fail("the engine died")
    assert [event["type"] for event in sent][-2:] == [
        "response.output_item.done",
        "response.failed",
    ]
    assert sent[-1]["response"]["error"]["message"] == "the engine died"
    error = events.error("boom", param="model")
    assert error["sequence_number"] == sent[-1]["sequence_number"] + 1


def test_end_needs_the_parsers_finish():
    events = ResponseEvents("resp_1", "demo", 0, new_id=lambda _: "id")
    with pytest.raises(InternalError, match="before the parser's Finish"):
        events.end(Usage(1, 1))
    assert events.take([Finish("stop")]) == []


def test_openai_puts_the_stream_together():
    omit = pytest.importorskip("openai").omit
    module = pytest.importorskip("openai.lib.streaming.responses._responses")
    responses = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    adapter = pydantic.TypeAdapter(responses.ResponseStreamEvent)
    sent, final = stream(CALL + "Hello", "stop")
    state = module.ResponseStreamState(input_tools=[], text_format=omit)
    seen = [state.handle_event(adapter.validate_python(event)) for event in sent]
    kinds = [event.type for event in itertools.chain.from_iterable(seen)]
    assert kinds == [event["type"] for event in sent]
    completed = seen[-1][0].response
    assert completed.output_text == "Hello"
    assert completed.output[0].arguments == final["output"][0]["arguments"]
