"""The harmony format of gpt-oss: messages with headers, as events, as answers, and as history."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from twinfer.serving.formats.calls import MAX_HELD
from twinfer.serving.formats.detect import detect_format
from twinfer.serving.formats.events import ParsedMessage, ToolCallArguments, ToolCallStart
from twinfer.serving.formats.history import turns_of_one_call
from twinfer.serving.formats.messages import MAX_HEADER
from twinfer.serving.formats.parser import open_parser, parse
from twinfer.serving.formats.table import FORMATS
from twinfer.serving.server.run import _ends, _format
from twinfer.shared.detokenizer import Detokenizer
from twinfer.shared.errors import ConfigError

from ..harmony_template import TEMPLATE
from .scripted_server import ScriptedServer
from .written_texts import byte_tokenizer, joined

HARMONY = FORMATS["harmony"]
TOKENIZER = byte_tokenizer(["<|endoftext|>", *HARMONY.marks])
CALL, RETURN = map(TOKENIZER.token_id, ("<|call|>", "<|return|>"))
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>"
SAY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
RAW = json.dumps({"q": 'a "b" \\ {[', "deep": {"x": [{"y": "é中😀"}]}}, ensure_ascii=False)


def to(name, arguments, *, behind="role", kind=" json"):
    """A call of a tool, up to its end."""
    if behind == "role":
        return f" to=functions.{name}<|channel|>commentary{kind}<|message|>{arguments}"
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}"


# text, content, reasoning, calls
MESSAGES = {
    "final": (f"{THINK}hm{NEXT}{FINAL} Hi \n<|return|>", " Hi \n", "hm", []),
    "no_end": (f"{THINK}hm{NEXT}{FINAL}Hi", "Hi", "hm", []),
    "call": (f"{THINK}hm{NEXT}{to('f', RAW)}<|call|>", "", "hm", [("f", RAW)]),
    "recipient_behind_channel": (
        to("f", RAW, behind="channel", kind=" <|constrain|>json") + "<|call|>", "", "",
        [("f", RAW)],
    ),
    "constrain_without_space": (
        to("f", RAW, behind="channel", kind="<|constrain|>json"), "", "", [("f", RAW)],
    ),
    "no_kind": (to("f", RAW, behind="channel", kind=""), "", "", [("f", RAW)]),
    "in_analysis": (
        f" to=functions.f<|channel|>analysis json<|message|>{RAW}<|call|>", "", "", [("f", RAW)],
    ),
    "no_channel": (f" to=functions.f<|message|>{RAW}<|call|>", "", "", [("f", RAW)]),
    "bare_name": (f"<|channel|>commentary to=f<|message|>{RAW}<|call|>", "", "", [("f", RAW)]),
    "preamble": (
        f"{THINK}a{NEXT}{SAY}I look.{NEXT}{to('f', '{}')}<|call|>", "I look.", "a", [("f", "{}")],
    ),
    "two_thoughts": (f"{THINK}a{NEXT}{THINK}b{NEXT}{FINAL}c", "c", "a\nb", []),
    "two_answers": (f"{SAY}a{NEXT}{FINAL}b<|return|>", "a\nb", "", []),
    "two_calls": (
        to("f", RAW) + NEXT + to("g", "{}") + "<|call|>", "", "", [("f", RAW), ("g", "{}")],
    ),
    "behind_a_call": (f"{to('f', '{}')}<|call|>{NEXT}{FINAL}x{THINK}y", "", "", [("f", "{}")]),
    "behind_the_end": (f"{FINAL}x<|return|>y<|start|>assistant{to('f', '{}')}", "x", "", []),
    "no_arguments": (f"{to('f', ' ')}<|call|>", "", "", [("f", "{}")]),
    "null_arguments": (f"{to('f', 'null')}<|call|>", "", "", [("f", "{}")]),
    "quoted_arguments": (to("f", json.dumps(RAW)), "", "", [("f", RAW)]),
    "space_around_arguments": (f"{to('f', f' {RAW} ')}<|call|>", "", "", [("f", RAW)]),
    "unknown_tool": (f"{THINK}a{NEXT}{to('rm', RAW)}<|call|>", RAW, "a", []),
    "built_in_tool": (
        f"<|channel|>analysis to=python code<|message|>1{NEXT}{FINAL}x", "x", "1", [],
    ),
    "no_json": (f"{to('f', 'print(1)')}<|call|>", "print(1)", "", []),
    "call_then_text": (f"{to('f', '{}')} }} and{NEXT}{FINAL}x", "x", "", [("f", "{}")]),
    "unknown_channel": (f"<|channel|>comment<|message|>a{NEXT}{FINAL}b", "a\nb", "", []),
    "odd_channel": (f"<|channel|>analysis??<|message|>a{NEXT}{FINAL}b", "b", "a", []),
    "two_channels": (f"<|channel|>final{THINK}a{NEXT}{FINAL}b", "b", "a", []),
    "order": (f"{FINAL}b{NEXT}{THINK}a", "b", "a", []),
    "stray_recipient": (
        f"<|channel|>commentary to=assistant{THINK}a{NEXT}{FINAL}b", "b", "a", [],
    ),
    "to_itself": (f"<|channel|>commentary to=assistant<|message|>a{NEXT}{FINAL}b", "a\nb", "", []),
    "recipient_of_another_channel": (
        f"<|channel|>analysis to=functions.f<|channel|>commentary json<|message|>{RAW}<|call|>",
        "", "", [("f", RAW)],
    ),
    "recipient_for_a_channel": (
        f"<|channel|>functions.f<|channel|>commentary to=assistant json<|message|>{RAW}<|call|>",
        "", "", [("f", RAW)],
    ),
    "odd_channel_before_a_thought": (f"<|channel|>??{NEXT}{THINK}a{NEXT}{FINAL}b", "b", "a", []),
    "known_channel_before_a_thought": (f"<|channel|>commentary{NEXT}{THINK}a", "", "a", []),
    "odd_channel_at_the_end": ("<|channel|>Hello!<|return|>", "Hello!", "", []),
    "signs_before_a_channel": (f"<|channel|>––analysis<|message|>a{NEXT}{FINAL}b", "b", "a", []),
    "recipient_alone": (" to=functions.f", "", "", []),
    "recipient_alone_at_an_end": (f"{FINAL}a{NEXT} to=functions.f<|call|>", "a", "", []),
    "no_header": ("Hello <b>", "Hello <b>", "", []),
    "no_message_mark": ("<|channel|>final Hi<|return|>", "Hi", "", []),
    "call_without_message_mark": (
        f"<|channel|>commentary to=functions.f <|constrain|>json {RAW}<|call|>", "", "",
        [("f", RAW)],
    ),
    "no_end_of_a_thought": (f"{THINK}a<|start|>assistant{FINAL}b", "b", "a", []),
    "no_start": (f"{THINK}a<|end|>{FINAL}b", "b", "a", []),
    "role_without_start": (f"{THINK}a<|end|>assistant{FINAL}b", "b", "a", []),
    "space_between": (f"{THINK}a<|end|>\n<|start|>assistant{FINAL}b", "b", "a", []),
    "marks_of_headers_in_a_text": (f"{FINAL}a<|message|>b<|constrain|>c", "abc", "", []),
    "others_speak": (
        f"{FINAL}a<|end|><|start|>user<|message|>b<|end|><|start|>functions.f to=assistant{SAY}c",
        "a", "", [],
    ),
    "empty": ("", "", "", []),
    "empty_messages": (f"{THINK}{NEXT}{FINAL}<|return|>", "", "", []),
    "long": (f"<|channel|>final {'x' * 2 * MAX_HEADER}", "x" * 2 * MAX_HEADER, "", []),
    "lookalike": (f"{FINAL}a <|en", "a <|en", "", []),
}  # fmt: skip


def run(pieces, tools=("f", "g"), reason="stop", tail=PROMPT):
    """The events of a text in pieces, its marks spelled out; neighbours of a kind joined."""
    ids = (f"id{i}" for i in itertools.count())
    parser = open_parser(HARMONY, None, tail, tools, new_id=lambda: next(ids))
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish(reason)])


def of_tokens(ids, tools=("f", "g"), reason="stop", size=1):
    """The events of tokens, whose marks no text has."""
    names = (f"id{i}" for i in itertools.count())
    parser = open_parser(HARMONY, TOKENIZER, PROMPT, tools, new_id=lambda: next(names))
    detokenizer = Detokenizer(TOKENIZER)
    events = [
        event
        for i in ids
        for event in [*parser.push(detokenizer.append([i])), *parser.push_mark(i)]
    ]
    return joined([*events, *parser.push(detokenizer.finish()), *parser.finish(reason)])


def message_of(events):
    message = ParsedMessage()
    for event in events:
        message.add(event)
    return message


def called(message):
    return [(call.name, call.arguments) for call in message.tool_calls if call.complete]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", MESSAGES)
def test_message_is_what_it_says_cut_anywhere(name):
    text, content, reasoning, calls = MESSAGES[name]
    whole = run([text])
    message = message_of(whole)
    assert (message.content, message.reasoning, called(message)) == (content, reasoning, calls)
    assert message.finish_reason == ("tool_calls" if calls else "stop")
    assert run(list(text)) == whole
    for cut in range(len(text)):
        assert run([text[:cut], text[cut:]]) == whole
    assert of_tokens(encode(text)) == whole


PARTS = [
    *HARMONY.marks, *(THINK, SAY, FINAL, NEXT, "assistant", "user", "analysis", "commentary"),
    *(" to=functions.f", " to=functions.k", " to=f", "to=", " json", " ", "\n", "Hi", "{}", RAW),
    *("{", "}", '"', "null", "é", "<|", "x" * 300, to("f", '{"a": 1}'), to("g", '{"a"')),
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=14),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([PROMPT, PROMPT + THINK, PROMPT + FINAL + "I say", "<|end|>", "no mark", ""]),
)
def test_any_cut_gives_the_same_events(parts, cuts, reason, tail):
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = run([text], reason=reason, tail=tail)
    assert (
        run([text[a:b] for a, b in itertools.pairwise(places)], reason=reason, tail=tail) == whole
    )
    assert run(list(text), reason=reason, tail=tail) == whole
    for call in message_of(whole).tool_calls:
        assert not call.complete or isinstance(json.loads(call.arguments), dict)
        assert call.name in ("f", "g")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14), st.sampled_from(["stop", "length"]))
def test_marks_that_are_tokens_reach_nobody(parts, reason):
    events = of_tokens(encode("".join(parts)), reason=reason)
    message = message_of(events)
    said = [message.content, message.reasoning, *(call.arguments for call in message.tool_calls)]
    assert not any(mark in text for mark in HARMONY.marks for text in said)


def test_marks_that_a_model_spells_are_text():
    """Of somebody who writes about the format, or a file of one."""
    spelled = [i for c in f"{NEXT}{FINAL}<|call|>" for i in encode(c)]
    message = message_of(of_tokens([*encode(FINAL + "So: "), *spelled]))
    assert message.content == f"So: {NEXT}{FINAL}<|call|>"
    written = [*encode(to("f", '{"text": "')), *spelled, *encode('"}<|call|>')]
    ((name, arguments),) = called(message_of(of_tokens(written)))
    assert (name, json.loads(arguments)) == ("f", {"text": f"{NEXT}{FINAL}<|call|>"})


def test_calls_stream_as_they_come():
    parser = open_parser(HARMONY, None, PROMPT, ["f"])
    parser.push(to("f", ""))
    (begun, first) = parser.push("{")
    assert isinstance(begun, ToolCallStart)
    assert first == ToolCallArguments(0, "{")
    assert [event.text for c in '"a": 1' for event in parser.push(c)] == list('"a": 1')


def test_without_tools_calls_are_content():
    text = f"{THINK}a{NEXT}{to('f', '{}')}<|call|>"
    message = parse(text, "harmony", PROMPT, tools=[])
    assert (message.content, message.tool_calls, message.finish_reason) == ("{}", [], "stop")
    named = parse(text, "harmony", PROMPT)  # any name
    assert called(named) == [("f", "{}")]
    assert parse(f"{SAY[:-11]} to=python<|message|>{{}}", "harmony", PROMPT).tool_calls == []


@pytest.mark.parametrize(
    "text",
    ["", " to=fun", " t", "<|channel|>", "<|channel|>ana", "<|channel|>commentary to=functions.f",
     f"{THINK}{NEXT}", to("f", ""), f"{THINK}<|end|><|start|>assi"],
)  # fmt: skip
def test_a_header_that_the_length_cuts_off_says_nothing(text):
    message = parse(text, "harmony", PROMPT, ["f"], reason="length")
    assert (message.content, message.reasoning, message.tool_calls) == ("", "", [])
    assert message.finish_reason == "length"


def test_a_call_cut_off_is_partial():
    message = parse(to("f", '{"a": '), "harmony", PROMPT, ["f"], reason="length")
    (call,) = message.tool_calls
    assert (call.arguments, call.complete, message.finish_reason) == ('{"a": ', False, "length")


@pytest.mark.parametrize("arguments", ['{"a": nope} x', '{"a": "line\nbreak"}', '{"a": 1'])
def test_arguments_that_break_are_what_the_model_wrote(arguments):
    """Their end is known all the same, and a client may make more of them."""
    text = f"{to('f', arguments)}{NEXT}{FINAL}y"
    message = parse(text, "harmony", PROMPT, ["f"])
    assert [(call.arguments, call.complete) for call in message.tool_calls] == [(arguments, False)]
    assert message.content == "y"
    assert run(list(text)) == run([text])


@pytest.mark.parametrize(
    ("tail", "text", "content", "reasoning"),
    [
        ("<|start|>assistant<|channel|>final<|message|>I sa", "y.<|return|>", "y.", ""),
        ("of a message that is to be continued, whose header is far away", " So.", " So.", ""),
        ("<|start|>assistant<|channel|>analysis<|message|>", f"a{NEXT}{FINAL}b", "b", "a"),
        ("<|return|><|start|>user<|message|>x<|end|>", f"<|start|>assistant{FINAL}b", "b", ""),
        ("<|call|>", f"<|start|>assistant{FINAL}b", "b", ""),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a", "", "a"),
    ],
)
def test_a_prompt_may_have_begun_the_message(tail, text, content, reasoning):
    message = parse(text, "harmony", tail)
    assert (message.content, message.reasoning) == (content, reasoning)


HOSTILE = {
    "half_marks": "<|chan" * 150_000,
    "headers": "<|channel|>" * 90_000,
    "constraints": "<|channel|>final" + "<|constrain|>" * 70_000,
    "starts": "<|start|>" * 100_000,
    "messages": f"{THINK}a{NEXT}" * 15_000,
    "space": to("f", " " * 1_000_000),
    "text": to("f", '"' + "a" * 1_000_000),
    "arguments": to("f", '{"a": "' + "a" * 1_000_000),
    "calls": (to("f", "{}") + NEXT) * 10_000,
}


IN_TURN = ("constraints", "starts", "space", "text", "calls", "messages")
"""By few characters in `make test-slow`: they are held and let go as others are."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.slow if name in IN_TURN and size == 7 else ())
        for name in HOSTILE
        for size in (7, 10**7)
    ],
)
def test_hostile_text_takes_linear_time_and_bounded_memory(name, size):
    parser = open_parser(HARMONY, None, PROMPT)
    start = time.process_time()
    for place in range(0, len(HOSTILE[name]), size):
        parser.push(HOSTILE[name][place : place + size])
        held = len(parser._held) + len(parser._rest) + len(parser._header or "")
        assert size > 7 or held <= MAX_HELD + 2 * MAX_HEADER
    parser.finish()
    assert time.process_time() - start < 10  # quadratic time would be minutes


def test_the_format_is_found_by_its_tokens():
    assert detect_format(TOKENIZER, "<tool_call>").name == "harmony"
    few = byte_tokenizer(HARMONY.marks[1:])
    assert detect_format(few).name == "none"
    assert detect_format(byte_tokenizer([], HARMONY.marks)).name == "none"  # spelled by anybody
    assert _format("harmony", TOKENIZER, None) is HARMONY
    with pytest.raises(ConfigError, match=r"tool-call-parser: got harmony, but <\|start\|> is no"):
        _format("harmony", few, None)


def test_what_ends_an_answer_is_known_without_the_config():
    assert _ends(HARMONY, TOKENIZER, [RETURN]) == (CALL,)
    assert _ends(HARMONY, TOKENIZER, [RETURN, CALL]) == ()
    assert _ends(FORMATS["qwen"], TOKENIZER, []) == _ends(HARMONY, None, []) == ()


# Over HTTP: what a server says to a call that its engine answers with tokens.

TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "finds", "parameters": {}}},
    {"type": "function", "function": {"name": "g"}},
]


def scripted(*texts, form=HARMONY, tokenizer=TOKENIZER, **options):
    """A server of gpt-oss."""
    ends = CALL, RETURN
    return ScriptedServer(
        *texts, form=form, tokenizer=tokenizer, template=TEMPLATE, last=ends, **options
    )


def put_together(pieces, index=0):
    """Content, reasoning, calls, the end and the tokens of a stream."""
    content = reasoning = ""
    calls, reasons, tokens = {}, [], []
    for piece in pieces:
        for choice in piece["choices"]:
            ChatCompletionChunk.model_validate(piece)
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["function"]["arguments"] == ""
                    calls[call["index"]] = [call["function"]["name"], ""]
                else:
                    calls[call["index"]][1] += call["function"]["arguments"]
            reasons.append(choice["finish_reason"])
            tokens += [one["token"] for one in (choice["logprobs"] or {"content": []})["content"]]
    return content, reasoning, list(calls.values()), reasons[-1], tokens


AGENT = f"{THINK}I need f.{NEXT}{SAY}I look.{NEXT}{to('f', RAW)}<|call|>"


@pytest.mark.parametrize("step", [1, 5, 9999])
def test_an_answer_whole_and_in_pieces(step):
    server = scripted(AGENT, step=step)
    whole = server.post(tools=TOOLS)
    choice = ChatCompletion.model_validate(whole).choices[0]
    assert (choice.message.content, choice.message.reasoning) == ("I look.", "I need f.")
    assert choice.message.tool_calls[0].function.arguments == RAW
    assert choice.finish_reason == "tool_calls"
    pieces = server.post(tools=TOOLS, stream=True, stream_options={"include_usage": True})
    assert put_together(pieces)[:4] == ("I look.", "I need f.", [["f", RAW]], "tool_calls")
    thought = len(encode("analysis<|message|>I need f.<|end|>"))
    for usage in (whole["usage"], pieces[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == thought
        assert usage["completion_tokens"] == len(encode(AGENT))


def test_each_token_has_its_log_probability():
    server = scripted(AGENT, step=3)
    spelled = [TOKENIZER.piece(i).decode("utf-8", "replace") for i in encode(AGENT)]
    whole = server.post(tools=TOOLS, logprobs=True)
    scores = whole["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in scores] == spelled
    assert put_together(server.post(tools=TOOLS, logprobs=True, stream=True))[4] == spelled


@pytest.mark.parametrize("stream", [False, True])
def test_several_completions_are_read_apart(stream):
    told = scripted(f"{THINK}a{NEXT}{FINAL}b", AGENT).post(n=2, tools=TOOLS, stream=stream)
    if stream:
        found = [put_together(told, index)[:2] for index in (0, 1)]
    else:
        found = [(c["message"]["content"], c["message"]["reasoning"]) for c in told["choices"]]
    assert found == [("b", "a"), ("I look.", "I need f.")]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_nobody_wants_is_left_out(stream):
    told = scripted(AGENT).post(tools=TOOLS, stream=stream, include_reasoning=False)
    assert "need" not in json.dumps(told)
    assert "I look." in (put_together(told)[0] if stream else json.dumps(told))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 9999])
def test_a_stop_string_ends_reasoning_and_no_header_has_one(stream, step):
    server = scripted(f"{THINK}One. Two.{NEXT}{FINAL}b", step=step)
    told = server.post(stop=[" Two"], stream=stream)
    if stream:
        assert put_together(told)[:4] == ("", "One.", [], "stop")
    else:
        (choice,) = told["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "One.")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " Two")
    # What a client does not see ends nothing, nor does a text that goes on behind a mark.
    stop = ["analysis", "assistant", "final", "lb", ".assistant", "<|end|>"]
    whole = server.post(stop=stop, stream=stream)
    content = put_together(whole)[0] if stream else whole["choices"][0]["message"]["content"]
    assert content == "b"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_reasoning_takes_all_tokens(stream):
    told = scripted(f"{THINK}One. Tw", length=True).post(stream=stream)
    if stream:
        assert put_together(told)[:4] == ("", "One. Tw", [], "length")
        return
    (choice,) = told["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "One. Tw")
    assert choice["finish_reason"] == "length"
    count = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert count == told["usage"]["completion_tokens"] - 1  # but for the mark before its channel


@pytest.mark.parametrize("step", [1, 4, 9999])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_items(stream, step):
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    server = scripted(AGENT, step=step)
    told = server.post("/v1/responses", input="x", tools=tools, top_logprobs=1, stream=stream)
    told = told[-1]["response"] if stream else told
    Response.model_validate(told)
    reasoning, message, call = told["output"]
    assert reasoning["content"][0]["text"] == "I need f."
    (part,) = message["content"]
    assert part["text"] == "".join(one["token"] for one in part["logprobs"]) == "I look."
    assert (call["name"], call["arguments"], call["status"]) == ("f", RAW, "completed")
    thought = len(encode("analysis<|message|>I need f.<|end|>"))
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] == thought


def test_what_ends_an_answer_ends_generation_unless_nothing_may():
    server = scripted(AGENT, ends=[CALL])
    server.post()
    server.post(stop_token_ids=[3], ignore_eos=False)
    server.post(ignore_eos=True)
    assert [params.stop_token_ids for params in server.asked] == [(CALL,), (3, CALL), ()]


def test_special_tokens_that_a_client_asks_for_are_text():
    """But marks are none, wherever they come from."""
    ids = encode(f"{THINK}a{NEXT}{FINAL}b<|endoftext|>c")
    (choice,) = scripted(ids).post(skip_special_tokens=False)["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (
        "b<|endoftext|>c",
        "a",
    )
    (choice,) = scripted(ids).post()["choices"]
    assert choice["message"]["content"] == "bc"
    # And stop strings are found in them, and in no mark.
    server = scripted(ids)
    stop = ["<|endof", "<|end|>", "<|channel|>"]
    (choice,) = server.post(skip_special_tokens=False, stop=stop)["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("b", "a")
    assert choice["stop_reason"] == "<|endof"


@pytest.mark.parametrize("step", [1, 5, 9999])
@pytest.mark.parametrize("skip", [False, True])
def test_each_message_has_the_log_probabilities_of_its_text(step, skip):
    server = scripted(f"{SAY}a{NEXT}{THINK}b{NEXT}{FINAL}cd<|return|>", step=step)
    told = server.post("/v1/responses", input="x", top_logprobs=1, skip_special_tokens=skip)
    first, _, last = told["output"]
    assert (first["content"][0]["text"], last["content"][0]["text"]) == ("a", "\ncd")
    assert [[one["token"] for one in item["content"][0]["logprobs"]] for item in (first, last)] == [
        ["a"],
        ["c", "d"],
    ]
    count = told["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert count == len(encode("analysis<|message|>b<|end|>"))


@pytest.mark.parametrize("step", [1, 9999])
@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_that_are_no_marks_are_left_out_in_other_formats_too(stream, step):
    form = FORMATS["mistral"]
    tokenizer = byte_tokenizer(["<pad>", *form.marks])
    text = '[THINK]a<pad>b[/THINK]c<pad>d[TOOL_CALLS]f[ARGS]{"a": 1}<pad>'
    server = scripted(text, step=step, form=form, tokenizer=tokenizer)
    told = server.post(tools=TOOLS[:1], stream=stream, stop=["bc", "1}"])
    if stream:
        content, reasoning, calls, *_ = put_together(told)
    else:
        message = told["choices"][0]["message"]
        content, reasoning = message["content"], message["reasoning"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]]
    assert (content, reasoning, calls) == ("cd", "ab", [["f", '{"a": ']])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_ids_of_marks_end_answers_of_other_formats(stream):
    """A client sees marks where they mark nothing, and may ask for what stands before a call."""
    form = FORMATS["mistral"]
    tokenizer = byte_tokenizer(form.marks)
    server = scripted("[THINK]a[/THINK]c[TOOL_CALLS]f", form=form, tokenizer=tokenizer)

    def ask(**more):
        told = server.post(tools=TOOLS[:1], stream=stream, **more)
        if stream:
            return put_together(told)[:2]
        message = told["choices"][0]["message"]
        return message["content"], message.get("reasoning", "")

    assert ask() == ("c[TOOL_CALLS]f", "a")
    assert ask(stop=["c[TOOL_CALLS]"]) == ("", "a")
    assert ask(stop=["[TOOL_CALLS]"]) == ("c", "a")
    assert ask(stop=["[/THINK]"]) == ("", "a")
    # The token that ends an answer is no part of its text.
    mark = tokenizer.token_id("[TOOL_CALLS]")
    server = scripted("[THINK]a[/THINK]c[TOOL_CALLS]", form=form, tokenizer=tokenizer)
    assert ask(stop_token_ids=[mark]) == ("c", "a")
    assert ask(stop_token_ids=[mark], include_stop_str_in_output=True) == ("c[TOOL_CALLS]", "a")


def test_a_turn_that_comes_back_is_what_the_template_reads():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}
    server = scripted(FINAL)
    for thought in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "I look.", "tool_calls": [call, other]}
        server.post(
            messages=[
                {"role": "user", "content": "x"},
                turn | {thought: "I need f."},
                {"role": "tool", "tool_call_id": "2", "content": "two"},
                {"role": "tool", "tool_call_id": "1", "content": "one"},
                {"role": "assistant", "content": "Done.", thought: "So.", "tool_calls": []},
                {"role": "user", "content": "y"},
            ],
            tools=TOOLS,
            reasoning_effort="high",
        )
    assert server.prompts[0] == server.prompts[1] == (
        "<|start|>system<|message|>Reasoning: high<|end|>"
        "<|start|>developer<|message|>f: finds<|end|><|start|>developer<|message|>g: <|end|>"
        "<|start|>user<|message|>x<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I need f.\nI look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"one"<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"two"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
        "<|start|>user<|message|>y<|end|><|start|>assistant"
    )  # fmt: skip


def test_items_that_come_back_are_the_same_turns():
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    server = scripted(AGENT, FINAL)
    told = server.post("/v1/responses", input="x", tools=tools)
    result = {
        "type": "function_call_output",
        "call_id": told["output"][2]["call_id"],
        "output": "1",
    }
    server.post(
        "/v1/responses",
        input=[{"role": "user", "content": "x"}, *told["output"], result],
        tools=tools,
        reasoning={"effort": "low"},
    )
    assert server.prompts[1].endswith(
        "<|start|>user<|message|>x<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I need f.\nI look.<|end|>"
        f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{RAW}<|call|>"
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant"
    )
    assert "Reasoning: low" in server.prompts[1]


def test_a_turn_that_was_cut_off_within_its_reasoning_comes_back():
    server = scripted(FINAL)
    cut = {"role": "assistant", "content": None, "reasoning": "I need"}
    server.post(messages=[{"role": "user", "content": "x"}, cut, {"role": "user", "content": "y"}])
    assert f"<|start|>assistant{FINAL}<|end|><|start|>user<|message|>y" in server.prompts[0]


def test_results_that_name_no_call_stay():
    turn = {"role": "assistant", "tool_calls": [{"id": "1"}, "odd"]}
    results = [{"role": "tool", "tool_call_id": "9", "content": "a"}, {"role": "tool"}]
    assert turns_of_one_call([turn, *results]) == [
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": ["odd"]},
        *results,
    ]
    assert turns_of_one_call([turn]) == turns_of_one_call([turn, *results])[:2]


def test_a_message_that_is_continued_goes_on_as_content():
    server = scripted("ne.<|return|>")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is do"}]
    told = server.post(messages=messages, continue_final_message=True, echo=True)
    assert server.prompts[0].endswith("<|channel|>final<|message|>It is do")
    assert told["choices"][0]["message"]["content"] == "It is done."
