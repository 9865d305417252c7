"""A checkpoint's response_template: what we make of it, against transformers' own parser."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.serving.formats.detect import detect_format
from twinfer.serving.formats.parser import OutputParser, parse
from twinfer.serving.formats.response_template import from_response_template
from twinfer.shared.detokenizer import Detokenizer
from twinfer.shared.tokenizer import Tokenizer

parse_response = pytest.importorskip("transformers.utils.chat_parsing").parse_response

DEMO = Path(__file__).resolve().parents[2] / "shared/models/demo"
TOKENIZER = Tokenizer.load(DEMO)
CONTENT = {"content": "text"}
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": CONTENT,
    },
}
MISTRAL = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": CONTENT,
    },
}
LLAMA = {
    "start_anchor": "assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|python_tag\|>",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
        "content": CONTENT,
    },
}
VALUE = {"name": "json", "args": {"allow_non_json": True}}
CODER = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>",
                "value_parser": VALUE,
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": CONTENT,
    },
}
GLM = {
    **CODER,
    "fields": {
        **CODER["fields"],
        "tool_calls": {
            **CODER["fields"]["tool_calls"],
            "open_pattern": r"\s*<tool_call>(?P<name>[^<\s]+)\s*",
            "close_pattern": "</tool_call>",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
                r"<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": VALUE,
            },
        },
    },
}
TAGGED = {"qwen3_coder": CODER, "glm45": GLM}
TEMPLATES = {"qwen": QWEN, "mistral": MISTRAL, "llama3_json": LLAMA}

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["</tool_cal", '"{[\\', "é中😀", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "}", "é"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CALL = st.tuples(
    st.sampled_from(["f", "get_weather"]),
    st.dictionaries(
        st.sampled_from(
            ["x", "y", '"'],
        ),
        VALUES,
        max_size=3,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)


def dump(call, key):
    name, arguments, indent, ascii_only = call
    return json.dumps({"name": name, key: arguments}, indent=indent, ensure_ascii=ascii_only)


def messages(name):
    """Texts of the format: thought, content, calls."""
    text = st.sampled_from(["", "Hi there", "a < b", "中 <tool", "x\ny"])
    if name == "qwen":
        return st.tuples(text, text, st.lists(CALL, max_size=3)).map(
            lambda m: (
                (f"<think>\n{m[0]}\n</think>\n\n" if m[0] else "")
                + m[1]
                + "".join(f"\n<tool_call>\n{dump(c, 'arguments')}\n</tool_call>" for c in m[2])
            )
        )
    if name == "mistral":
        return st.tuples(text, st.lists(CALL, min_size=1, max_size=3)).map(
            lambda m: f"{m[0]}[TOOL_CALLS] [{', '.join(dump(c, 'arguments') for c in m[1])}]"
        )
    return CALL.map(lambda c: f"<|python_tag|>{dump(c, 'parameters')}")


def ours(text, form, tail=""):
    message = parse(text, form, tail)
    return (
        message.content.strip(),
        message.reasoning,
        [(call.name, json.loads(call.arguments)) for call in message.tool_calls],
    )


def theirs(text, template, prefix=""):
    message = parse_response(text, template, prefix=prefix)
    calls = message.get("tool_calls", [])
    calls = [call["function"] for call in (calls if isinstance(calls, list) else [calls])]
    return (
        message.get("content", ""),
        message.get("reasoning_content", ""),
        [(call["name"], call["arguments"]) for call in calls],
    )


def check_cuts(form, text):
    """The same events by character and by token as at once."""
    detokenizer = Detokenizer(TOKENIZER, (), False)
    by_token = [detokenizer.append([i]) for i in TOKENIZER.encode(text, False)]
    found = []
    for pieces in ([text], text, [*by_token, detokenizer.finish()]):
        parser = OutputParser(form, new_id=lambda: "id")
        events = [event for piece in pieces for event in parser.push(piece)]
        found.append(flat([*events, *parser.finish()]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", TEMPLATES)
def test_reads_what_transformers_reads(name):
    template = TEMPLATES[name]
    declared = from_response_template(template)
    assert declared is not None

    @settings(max_examples=150, deadline=None)
    @given(messages(name))
    def check(text):
        expected = theirs(text, template)
        assert ours(text, declared) == expected
        assert ours(text, name) == expected
        check_cuts(declared, text)

    check()


TEXTS = st.text('ab<>/{}"\\né中😀 ', min_size=1, max_size=12).map(str.strip).filter(bool)
PLAIN_CALL = st.tuples(
    st.sampled_from(["f", "get_weather"]),
    st.dictionaries(st.sampled_from(["x", "y", "z z"]), VALUES | TEXTS, max_size=3),
)


def tagged(name, call):
    """A call as the chat template of such a model writes it: texts as they are, the rest as JSON."""
    head, arguments = call
    written = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    if name == "glm45":
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in written.items()
        ]
        return f"<tool_call>{head}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items()]
    return f"<tool_call>\n<function={head}>\n{''.join(pairs)}</function>\n</tool_call>"


@pytest.mark.parametrize("name", TAGGED)
def test_reads_tags_as_transformers_does(name):
    text = st.sampled_from(["", "Hi there", "a < b", "中 <tool", "x\ny"])
    written = st.tuples(text, text, st.lists(PLAIN_CALL, max_size=3)).map(
        lambda m: (
            (f"<think>\n{m[0]}\n</think>\n\n" if m[0] else "")
            + m[1]
            + "".join(f"\n{tagged(name, call)}" for call in m[2])
        )
    )

    @settings(max_examples=300, deadline=None)
    @given(written)
    def check(text):
        expected = theirs(text, TAGGED[name])
        assert ours(text, name) == expected
        check_cuts(name, text)

    check()


def flat(events):
    """Events with their texts joined."""
    out = []
    for event in events:
        head = (type(event).__name__, getattr(event, "index", None))
        if out and hasattr(event, "text") and out[-1][0] == head:
            out[-1] = (head, out[-1][1] + event.text)
        else:
            out.append((head, getattr(event, "text", event)))
    return out


@pytest.mark.parametrize("tail", ["<think>\n", "<think>\n\n</think>\n\n", ""])
def test_prompt_counts_as_it_does_there(tail):
    text = "thought\n</think>\n\nHi" if tail == "<think>\n" else "Hi"
    prefix = "<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n" + tail
    expected = theirs(text, QWEN, prefix)
    form = from_response_template(QWEN)
    message = parse(text, form, prefix)
    assert (message.content, message.reasoning) == (expected[0], expected[1])


def changed(template, field, **values):
    return {**template, "fields": {**template["fields"], field: {**CONTENT, **values}}}


REFUSED = {
    "no object": 3,
    "no fields": {"fields": None},
    "another version": {**QWEN, "version": 2},
    "another field": changed(QWEN, "audio", open="<a>"),
    "xml": changed(QWEN, "tool_calls", open="<t>", close="</t>", content="xml-inline"),
    "a dialect": changed(
        QWEN,
        "tool_calls",
        open="<t>",
        close="</t>",
        content="json",
        content_args={"unquoted_keys": True},
        transform={"type": "function", "function": "{content}"},
    ),
    "a name in the mark": changed(
        QWEN,
        "tool_calls",
        open_pattern=r"<t>(?P<name>\w+)",
        content="json",
        transform={"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    ),
    "reasoning without an end": changed(QWEN, "reasoning_content", open="<think>"),
    "content with a mark": changed(QWEN, "content", open="<answer>"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_lexer_cannot_follow_is_not_taken(name):
    assert from_response_template(REFUSED[name]) is None


def test_a_template_goes_before_tokens(tmp_path):
    for path in DEMO.glob("tokenizer*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert detect_format(Tokenizer.load(tmp_path)).name == "none"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "response_template": QWEN})
    )
    found = detect_format(Tokenizer.load(tmp_path))
    assert found.name == "response_template"
    assert found.calls.open == "<tool_call>"
