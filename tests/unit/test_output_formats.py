"""Reasoning and tool calls in model output: the same events however the text is cut, the same
message as transformers' own parser, and bounded work for any input.
"""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.serving.formats.calls import MAX_HELD
from twinfer.serving.formats.detect import detect_format
from twinfer.serving.formats.events import (
    Finish,
    ParsedMessage,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from twinfer.serving.formats.json_text import JsonValue, is_object
from twinfer.serving.formats.marks import hidden_marks, shown_marks
from twinfer.serving.formats.parser import OutputParser, open_parser, parse
from twinfer.serving.formats.table import FORMATS
from twinfer.serving.serve_flags import PARSERS
from twinfer.shared.detokenizer import Detokenizer
from twinfer.shared.errors import ConfigError, InternalError

from .written_texts import byte_tokenizer, joined

NASTY = {
    "q": 'a "b" </tool_call> \\ {[',
    "deep": {"x": [{"y": "é中😀"}]},
    "n": [-1.5e3, None, True],
}
RAW = json.dumps(NASTY, ensure_ascii=False)


def run(form, pieces, tail="", tools=None, reason="stop"):
    """The events of a text in pieces, neighbours of a kind joined."""
    ids = iter(range(10**6))
    parser = open_parser(FORMATS[form], None, tail, tools, new_id=lambda: f"id{next(ids)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish(reason)])


def calls(message):
    return [(call.name, call.arguments) for call in message.tool_calls if call.complete]


def call(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(name, arguments):
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


# format, text, content, reasoning, calls
MESSAGES = {
    "plain": ("qwen", " Hello,\n world <3 \n", " Hello,\n world <3 \n", "", []),
    "thought": ("qwen", "<think>\nhm <b>\n</think>\n\nHi", "Hi", "hm <b>", []),
    "one": ("qwen", "Look:\n" + hermes("f", RAW), "Look:", "", [("f", RAW)]),
    "several": (
        "hermes",
        "<think>x</think>" + hermes("f", "{}") + "\n" + hermes("g", RAW),
        "",
        "x",
        [("f", "{}"), ("g", RAW)],
    ),
    "no_arguments": ("qwen", '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
    "null_arguments": ("qwen", hermes("f", "null"), "", "", [("f", "{}")]),
    "quoted_arguments": ("qwen", hermes("f", json.dumps(RAW)), "", "", [("f", RAW)]),
    "order": (
        "qwen",
        '<tool_call>{"arguments": {"a": 1}, "x": [2], "name": "f"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "missing_brace": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>Done',
        "Done",
        "",
        [("f", '{"a": 1}')],
    ),
    "lookalike": ("qwen", "a <tool_calls> b <tool_call", "a <tool_calls> b <tool_call", "", []),
    "call_in_thought": (
        "qwen",
        f"<think>{hermes('f', '{}')}</think>Hi",
        "Hi",
        hermes("f", "{}"),
        [],
    ),
    "late_think": ("qwen", "Write <think> so", "Write <think> so", "", []),
    "broken": (
        "qwen",
        '<tool_call>{"name": "f", nope}</tool_call>.',
        '<tool_call>{"name": "f", nope}</tool_call>.',
        "",
        [],
    ),
    "unknown_tool": ("qwen", hermes("rm", "{}"), hermes("rm", "{}"), "", []),
    "llama": ("llama3_json", call("f", RAW, "parameters"), "", "", [("f", RAW)]),
    "llama_several": (
        "llama3_json",
        f"<|python_tag|>{call('f', RAW, 'parameters')}; {call('g', '{}', 'parameters')}",
        "",
        "",
        [("f", RAW), ("g", "{}")],
    ),
    "llama_tag_no_arguments": ("llama3_json", '<|python_tag|>{"name": "f"}', "", "", [("f", "{}")]),
    "llama_json_answer": (
        "llama3_json",
        '{"name": "f", "age": 3}',
        '{"name": "f", "age": 3}',
        "",
        [],
    ),
    "llama_space": ("llama3_json", "\u00a0\n" + call("f", "{}"), "", "", [("f", "{}")]),
    "content_after": (
        "qwen",
        "Look:\n" + hermes("f", "{}") + "\nDone\n",
        "Look:\nDone\n",
        "",
        [("f", "{}")],
    ),
    "much_space": ("qwen", "a" + 300 * " " + hermes("f", "{}"), "a" + 44 * " ", "", [("f", "{}")]),
    "repeated_name": (
        "qwen",
        '<tool_call>{"name": "f", "name": "g"}',
        '<tool_call>{"name": "f", "name": "g"}',
        "",
        [],
    ),
    "repeated_arguments": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}',
        ': {"a": 1}}',
        "",
        [("f", "{}")],
    ),
    "llama_builtin": (
        "llama3_json",
        '<|python_tag|>search(q="x")',
        '<|python_tag|>search(q="x")',
        "",
        [],
    ),
    "mistral_list": (
        "mistral",
        f"[TOOL_CALLS] [{call('f', RAW)}, {call('g', '{}')}]",
        "",
        "",
        [("f", RAW), ("g", "{}")],
    ),
    "mistral_named": (
        "mistral",
        f"Ok[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{RAW}[TOOL_CALLS]g[ARGS]{{}}",
        "Ok",
        "",
        [("f", RAW), ("g", "{}")],
    ),
    "mistral_broken_list": (
        "mistral",
        '[TOOL_CALLS][x [TOOL_CALLS]f[ARGS]{"a": 1}',
        "[TOOL_CALLS][x",
        "",
        [("f", '{"a": 1}')],
    ),
    "mistral_prose": ("mistral", "[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", "", []),
    "tags": (
        "qwen3_coder",
        "<think>\nx\n</think>\n\nOk\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        '<parameter=b>\n a "b" </para\nmeter>\n\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call><function=g></function></tool_call>",
        "Ok",
        "x",
        [("f", r'{"a": 1, "b": " a \"b\" </para\nmeter>\n"}'), ("g", "{}")],
    ),
    "tags_prose": ("qwen3_coder", "<tool_call> is a mark", "<tool_call> is a mark", "", []),
    "tags_unknown": (
        "qwen3_coder",
        "<tool_call><function=rm></function></tool_call>",
        "<tool_call><function=rm></function></tool_call>",
        "",
        [],
    ),
    "arguments": (
        "glm45",
        "Ok<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, {}]</arg_value>\n<arg_key>b</arg_key>"
        "<arg_value>\né</arg_value></tool_call><tool_call>g</tool_call> </tool_call>",
        "Ok</tool_call>",
        "",
        [("f", r'{"a": [1, {}], "b": "\né"}'), ("g", "{}")],
    ),
    "none": ("none", hermes("f", "{}") + " \n", hermes("f", "{}") + " \n", "", []),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message_is_what_it_says_cut_anywhere(name):
    form, text, content, reasoning, expected = MESSAGES[name]
    message = parse(text, form, tools=["f", "g"])
    assert (message.content, message.reasoning, calls(message)) == (content, reasoning, expected)
    assert message.finish_reason == ("tool_calls" if expected else "stop")
    whole = run(form, [text], tools=["f", "g"])
    assert run(form, list(text), tools=["f", "g"]) == whole
    for cut in range(len(text)):
        assert run(form, [text[:cut], text[cut:]], tools=["f", "g"]) == whole


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "abcDEF123", "f", "[", "]", "{", "}", ",", ";", ":", '"', "\\", "\n"),
    *(
        " ",
        "\u00a0",
        "<",
        "1",
        "-",
        "null",
        '"name"',
        '"arguments"',
        '"parameters"',
        "é",
        "\\ud800",
    ),
    *("<function=", "<parameter=", ">", "</parameter>", "</function>", "<function=f><parameter=a>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>f<arg_key>a</arg_key>"),
    *(call("f", RAW), call("f", '{"a": 1}', "parameters"), '{"name": "f", "arguments": {', '{"a"'),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from(["", "<think>\n"]),
)
def test_any_cut_gives_the_same_events(form, fragments, cuts, tail):
    text = "".join(fragments)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = run(form, [text], tail)
    assert run(form, pieces, tail) == whole
    assert run(form, list(text), tail) == whole
    message = ParsedMessage()
    for event in whole:
        message.add(event)
    for tool_call in message.tool_calls:
        assert not tool_call.complete or isinstance(json.loads(tool_call.arguments), dict)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*'{}[],:"\\u0189-+.eE \n', '"a"', "null", "true", "1"])).map("".join)
)
def test_json_is_judged_as_by_python(text):
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    assert is_object(text) == (isinstance(value, dict) and text.startswith("{"))


@pytest.mark.parametrize(
    "text",
    ['{"a": [1}', '{"a": 1]', '{"a": 1,}', "{,}", '{"a" 1}', '{"a": 01}', '{"a": "\n"}', "{} "],
)
def test_what_is_no_json_object_is_none(text):
    assert not is_object(text)


def test_json_has_a_depth():
    assert is_object('{"a":' * 100 + "1" + "}" * 100)
    value = JsonValue()
    assert value.feed("[" * 10**6, 0, 10**6) < 200
    assert value.bad


def test_arguments_stream_as_they_come():
    parser = OutputParser("qwen")
    text = "<tool_call>" + call("f", '{"a": "long"}')
    sizes = [
        sum(isinstance(event, ToolCallArguments) for event in parser.push(character))
        for character in text
    ]
    assert sum(sizes) == len('{"a": "long"}')


TYPED = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "b": {"type": "boolean"},
    "u": {"type": ["string", "array"]},
    "e": {"enum": ["1", None]},
    "x": {},
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "3", "3"), ("s", "null", "null"), ("s", '"q"', '"q"'), ("i", " 3 ", 3),
        ("i", "three", "three"), ("n", "1e3", 1000.0), ("n", "None", None), ("b", "True", True),
        ("b", "1", "1"), ("u", "[1]", [1]), ("u", '"a"', '"a"'), ("u", "{}", "{}"), ("e", "1", "1"),
        ("e", "null", None), ("x", "[1", "[1"), ("x", '"a"', "a"), ("new", "NaN", "NaN"),
    ],
)  # fmt: skip
def test_what_a_value_between_tags_is_says_its_schema(key, written, value):
    """And without a schema it is JSON, if it is."""
    tools = {"f": {"type": "object", "properties": TYPED}}
    for form, text in {
        "qwen3_coder": f"<tool_call><function=f><parameter={key}>\n{written}\n</parameter></function>",
        "glm45": f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{written}</arg_value></tool_call>",
    }.items():
        (call,) = parse(text, form, tools=tools).tool_calls
        assert json.loads(call.arguments) == {key: value}
        assert call.complete
        assert run(form, list(text), tools=tools) == run(form, [text], tools=tools)


def test_a_text_between_tags_streams_as_it_comes():
    tools = {"f": {"properties": {"s": {"type": "string"}}}}
    parser = OutputParser("qwen3_coder", tools=tools)
    parser.push("<tool_call><function=f><parameter=s>\n")
    told = [event.text for c in 'a "b"' for event in parser.push(c)]
    assert "".join(told) == r"a \"b\""
    held = [event for c in "\n</parameter" for event in parser.push(c)]
    assert held == []


def test_tags_that_break_end_the_call():
    text = "<tool_call><function=f><parameter=a>1</parameter>x"
    message = parse(text, "qwen3_coder")
    assert message.content == "x"
    assert (message.tool_calls[0].arguments, message.tool_calls[0].complete) == ('{"a": 1', False)


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_tags_without_an_end_take_linear_time(form):
    begin = {
        "qwen3_coder": "<tool_call><function=f><parameter=s>",
        "glm45": "<tool_call>f<arg_key>s",
    }
    middle = "</arg_key><arg_value>" if form == "glm45" else ""
    for more in ("<", "\n", "</par", "x"):
        parser = OutputParser(form)
        began = time.thread_time()  # of this thread's work, whoever else has the processors
        parser.push(begin[form])
        for piece in [middle, *[more] * 50_000]:
            parser.push(piece)
        parser.finish("length")
        assert time.thread_time() - began < 5


def test_a_call_cut_off_is_partial():
    events = run("qwen", [hermes("f", RAW)[:50]], reason="length")
    assert [type(event) for event in events] == [
        ToolCallStart,
        ToolCallArguments,
        ToolCallEnd,
        Finish,
    ]
    assert not events[2].complete
    assert events[-1].reason == "length"
    early = parse('<tool_call>{"name": "f", "arg', "qwen", reason="length")
    assert (early.content, early.tool_calls) == ('<tool_call>{"name": "f", "arg', [])


@pytest.mark.parametrize(
    ("form", "text", "close"),
    [
        ("qwen", 'Look:\n<tool_call>\n{"name": "f", "arguments": {}}', "\n</tool_call>"),
        (
            "qwen3_coder",
            "Look:\n<tool_call>\n<function=f>\n</function>",
            "\n</tool_call>",
        ),
    ],
)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_closing_mark_that_is_cut_off_is_no_content(form, text, close, reason):
    for size in range(len(close) + 1):
        message = parse(text + close[:size], form, tools=["f"], reason=reason)
        assert (message.content, calls(message)) == ("Look:", [("f", "{}")])
        events = run(form, list(text + close[:size]), tools=["f"], reason=reason)
        assert [type(event) for event in events[-2:]] == [ToolCallEnd, Finish]
    # What else may stand there is content, as is the same text where no call is open.
    assert parse(f"{text}\nDone <", form, tools=["f"]).content == "Look:\nDone <"
    assert parse(f"{text}{close}\n</", form, tools=["f"]).content == "Look:\n</"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "Ber'),
        ("qwen", hermes("f", "{}") + '\n<tool_call>{"name": "f", "arguments": {"a": '),
        ("llama3_json", '{"name": "f", "parameters": {"a": '),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>Ber"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "Ber'),
    ],
)
def test_an_answer_that_ends_inside_of_a_call_tells_why(form, text):
    """A client that reads of tool_calls would make the call."""
    for reason in ("stop", "length"):
        message = parse(text, form, tools=["f"], reason=reason)
        assert not message.tool_calls[-1].complete
        assert message.finish_reason == reason


def test_arguments_that_break_end_the_call_and_the_rest_is_content():
    message = parse('<tool_call>{"name": "f", "arguments": {"a": nope}} x', "qwen")
    assert (message.tool_calls[0].arguments, message.tool_calls[0].complete) == (
        '{"a": nope',
        False,
    )
    assert message.content == "}} x"


def test_prompt_may_open_reasoning():
    assert parse("a</think>b", "qwen", "<|im_start|>assistant\n<think>\n").reasoning == "a"
    assert parse("b", "qwen", "assistant\n<think>\n\n</think>\n\n").content == "b"
    # only its end counts: what a user wrote before does not
    assert parse("b", "qwen", "user <think> assistant\n").content == "b"


def test_no_tools_on_offer_makes_marks_content():
    text = "<think>a</think>" + hermes("f", "{}")
    assert parse(text, "qwen", tools=[]).content == hermes("f", "{}")
    assert parse('{"name": "f", "parameters": {}}', "llama3_json", tools=[]).tool_calls == []


def test_ids():
    message = parse("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "mistral")
    first, second = (call.id for call in message.tool_calls)
    assert first == "abcDEF123"
    assert len(second) == 9
    assert second.isalnum()
    assert parse(hermes("f", "{}"), "qwen").tool_calls[0].id.startswith("call_")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", [name for name, entry in MESSAGES.items() if entry[0] != "none"])
def test_marks_are_found_as_tokens(name, special, skip):
    form, text, *_ = MESSAGES[name]
    marks = FORMATS[form].marks
    tokenizer = byte_tokenizer(marks) if special else byte_tokenizer((), marks)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if any(mark in text for mark in marks):
        assert len(ids) < len(text.encode())
    detokenizer = Detokenizer(tokenizer, (), skip)
    detokenizer.show(shown_marks(FORMATS[form], tokenizer))
    numbers = iter(range(100))
    parser = OutputParser(form, "", ["f", "g"], new_id=lambda: f"id{next(numbers)}")
    events = [event for i in ids for event in parser.push(detokenizer.append([i]))]
    assert joined([*events, *parser.push(detokenizer.finish()), *parser.finish()]) == run(
        form, [text], tools=["f", "g"]
    )


HOSTILE = {
    "half_marks": ("qwen", "<tool_call" * 100_000),
    "marks": ("qwen", "<tool_call>" * 90_000),
    "thoughts": ("qwen", "<think></think>" * 66_000),
    "spaces": ("qwen", " " * 1_000_000),
    "spaced_marks": ("qwen", "   <tool_call>" * 70_000),
    "open_string": ("qwen", '<tool_call>{"name": "' + "a" * 1_000_000),
    "open_arguments": ("qwen", '<tool_call>{"arguments": {"a": "' + "a" * 1_000_000),
    "nested": ("qwen", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 200_000),
    "escapes": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"' * 300_000),
    "number": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 500_000),
    "braces": ("llama3_json", "{" * 1_000_000),
    "heads": ("mistral", "[TOOL_CALLS]" * 80_000),
    "lists": ("mistral", "[TOOL_CALLS][" + '{"name": "f"},' * 40_000),
}


IN_TURN = (
    "marks", "thoughts", "spaced_marks", "open_string", "open_arguments", "nested", "escapes",
    "number", "braces", "heads", "lists",
)  # fmt: skip
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
    form, text = HOSTILE[name]
    parser = OutputParser(form)
    start = time.process_time()
    for place in range(0, len(text), size):
        parser.push(text[place : place + size])
        if place % 7000 == 0:
            held = sum(map(len, parser._held)) + len(parser._rest) + len(parser._space)
            assert held <= MAX_HELD + 600
    parser.finish()
    assert time.process_time() - start < 10  # quadratic time would be minutes


LONG = {
    "call": ("qwen", f'<tool_call>{{"x": "{"a" * MAX_HELD}", "name": "f"}} y', 0),
    "keys": ("qwen", "<tool_call>{" + '"x": 1, ' * 9000 + '"name": "f"} y', 0),
    "name": ("qwen", f'<tool_call>{{"name": "{"a" * MAX_HELD}"}} y', 0),
    "key": ("qwen", f'<tool_call>{{"name": "f", "arguments": {{}}, "{"a" * MAX_HELD}": 1}} y', 1),
    "head": ("mistral", f"[TOOL_CALLS]{'a' * 600}{{}} y", 0),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_to_hold_is_content(name):
    form, text, num_calls = LONG[name]
    message = parse(text, form)
    assert len(message.tool_calls) == num_calls
    assert message.content.endswith("} y")
    assert num_calls or message.content == text
    whole = run(form, [text])
    for size in (1, 1000, 65_000):
        assert run(form, [text[i : i + size] for i in range(0, len(text), size)]) == whole


def test_nothing_goes_in_after_the_end():
    parser = OutputParser("none")
    parser.finish()
    with pytest.raises(InternalError, match=r"used after finish\(\)"):
        parser.push("a")
    with pytest.raises(InternalError, match=r"used after finish\(\)"):
        parser.finish()


def test_formats_whose_marks_are_text_take_no_tokens():
    with pytest.raises(InternalError, match="token 7 is no mark of this format"):
        OutputParser("mistral").push_mark(7)


def test_special_marks_are_known_to_be_hidden():
    tokenizer = byte_tokenizer(["[TOOL_CALLS]"])
    mark = tokenizer.token_id("[TOOL_CALLS]")
    assert hidden_marks(FORMATS["mistral"], tokenizer) == {mark: "[TOOL_CALLS]"}
    assert hidden_marks(FORMATS["qwen"], byte_tokenizer([], ["<tool_call>"])) == {}


def test_format_is_found_by_tokens_and_template():
    assert detect_format(byte_tokenizer([])).name == "none"
    assert detect_format(byte_tokenizer(["<|im_start|>"], ["<tool_call>"])).name == "qwen"
    assert detect_format(byte_tokenizer([]), "... <tool_call> ...").name == "hermes"
    marked = byte_tokenizer([], ["<tool_call>"])
    assert detect_format(marked, "<think> <tool_call><function=f></think>").name == "qwen3_coder"
    assert detect_format(marked, "<tool_call>f<arg_key>a</arg_key>").name == "glm45"
    assert detect_format(byte_tokenizer(["[TOOL_CALLS]"])).name == "mistral"
    assert detect_format(byte_tokenizer(["<|python_tag|>"])).name == "llama3_json"


def test_every_format_may_be_named():
    assert {*PARSERS} == {"auto", *FORMATS}


def test_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="output format: got xml, allowed are none, think"):
        OutputParser("xml")
