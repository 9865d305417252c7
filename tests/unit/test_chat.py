"""Chat templates: the same prompts as transformers renders, and a template cannot do more than
render.
"""

import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import twinfer.shared.chat as chat
from twinfer.serving.conversations import read_template
from twinfer.shared.chat import render_chat
from twinfer.shared.errors import ConfigError, ModelError, RequestError, TwinferError
from twinfer.shared.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' -%}
        {{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""

TOOLS = """{{- bos_token }}{% set ns = namespace(found=false, count=0) %}
{%- if date_string is not defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif -%}
Today: {{ date_string }}
{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2, sort_keys=true) }}
{{ tool | tojson(separators=(',', ':'), ensure_ascii=true) }}
{% endfor %}{% endif %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- if ns.count > 6 %}{% break %}{% endif %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for c in message.tool_calls %}{% set f=c.function %}<call>{{ f.name }}({{ f.arguments | tojson }})</call>
        {%- endfor %}
    {%- elif message.role == "tool" %}<response id="{{ message.tool_call_id }}">{{ message.content }}</response>
    {%- else %}<|{{ message.role | upper }}|>{{ message.content | trim | e }}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- if message.thinking is defined %}!{{ message.thinking }}{% endif %}
    {%- if message.name %} ({{ message.name }}){% endif %}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}<|ASSISTANT|>{% endif -%}"""

GENERATION = """{{ messages | tojson }}{% for message in messages %}{% set tail = '.' %}
{% if message.role == 'assistant' %}{% generation %}{% set tail = '!' %}{{ message.content }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{{ tail }}{% endfor %}
{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 2) | tojson }}{{ unknown_name }}{{ eos_token }}{{ pad_token }}
  {% if true %}   {# lstrip_blocks, trim_blocks #}
    indented {{ dict.items is defined }}
    {% endif %}
{# a comment #}  {{ '%s-%d' % ('a', 3) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ [1] * 3 }}"""

TEMPLATES = {"chatml": CHATML, "llama_2": LLAMA_2, "tools": TOOLS, "generation": GENERATION}

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "  Hi\n there "},
    ],
    [
        {"role": "user", "content": "One?", "name": "Ann"},
        {"role": "assistant", "content": "1", "reasoning": "counted", "refusal": None},
        {"role": "user", "content": "Zwei? é 中 😀 {{ 7 * 7 }} {% raw %}"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": "é<", "n": [1, 2.5]}},
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ],
    [{"role": "user", "content": str(i)} for i in range(12)],
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": None}},
}


def tokenizer(template=None, **templates):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    named = templates if template is None else {"default": template}
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, named)


def oracle(folder, template, messages, **options):
    from transformers import AutoTokenizer

    backend = Backend(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    return theirs.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(tmp_path, name, messages, tools, prompt):
    options = {"tools": tools, "add_generation_prompt": prompt}
    try:
        theirs = oracle(tmp_path, TEMPLATES[name], messages, **options)
    except Exception as error:
        theirs = error
    if isinstance(theirs, Exception):
        with pytest.raises(
            RequestError, match=r"^messages: the chat template refuses them: "
        ) as caught:
            render_chat(tokenizer(TEMPLATES[name]), messages, **options)
        assert str(theirs).splitlines()[0][:60] in str(caught.value)
    else:
        assert render_chat(tokenizer(TEMPLATES[name]), messages, **options) == theirs


def test_the_oracle_refuses_only_what_it_should(tmp_path):
    """Else the test above would compare errors only."""
    rendered = {(name, i): True for name in TEMPLATES for i in range(len(CONVERSATIONS))}
    for name, i in rendered:
        try:
            oracle(tmp_path, TEMPLATES[name], CONVERSATIONS[i])
        except Exception:
            rendered[name, i] = False
    assert sum(rendered.values()) >= 15


def test_variables_reach_the_template(tmp_path):
    for variables in ({"enable_thinking": False}, {"date_string": "now"}, {"bos_token": "<other>"}):
        theirs = oracle(tmp_path, TOOLS, CONVERSATIONS[0], add_generation_prompt=True, **variables)
        assert render_chat(tokenizer(TOOLS), CONVERSATIONS[0], variables=variables) == theirs


def test_the_date_is_today(monkeypatch):
    assert (
        render_chat(tokenizer("{{ strftime_now('%Y-%m-%d') }}"), CONVERSATIONS[0])
        == f"{datetime.now():%Y-%m-%d}"
    )


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content in (parts, tuple(parts), ["one", "two"]):
        assert (
            render_chat(
                tokenizer("{{ messages[0].content }}"), [{"role": "user", "content": content}]
            )
            == "one\ntwo"
        )
    assert (
        render_chat(tokenizer("{{ messages[0].content }}"), [{"role": "user", "content": []}]) == ""
    )


def test_which_template():
    assert render_chat(tokenizer(default="A", tool_use="B"), CONVERSATIONS[0]) == "A"
    assert render_chat(tokenizer(default="A", tool_use="B"), CONVERSATIONS[0], tools=[TOOL]) == "B"
    assert render_chat(tokenizer(default="A"), CONVERSATIONS[0], tools=[TOOL]) == "A"
    assert render_chat(tokenizer(default="A"), CONVERSATIONS[0], template="C") == "C"
    assert render_chat(tokenizer(), CONVERSATIONS[0], template="C") == "C"


def test_no_template():
    fails(ModelError, "chat_template: the model has none", {})
    with pytest.raises(ModelError, match="rag"):
        render_chat(tokenizer(rag="A"), CONVERSATIONS[0])


def fails(error, words, templates, messages=CONVERSATIONS[0], **options):
    templates = {"default": templates} if isinstance(templates, str) else templates
    with pytest.raises(error) as caught:
        render_chat(tokenizer(**templates), messages, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert words in message, message


# Messages


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages: got None"),
        ("hi", "messages: got hi"),
        (b"hi", "messages: got b'hi'"),
        ({}, "messages: got {}"),
        (5, "messages: got 5"),
        ([], "messages: has 0 messages"),
        (
            [{"role": "user", "content": ""}] * 5000,
            "messages: has 5000 messages, allowed is 1 to 4096",
        ),
        (["hi"], "messages[0]: got hi"),
        ([None], "messages[0]: got None"),
        ([[]], "messages[0]: got []"),
        ([{}], "messages[0].role: got None"),
        ([{"role": ""}], "messages[0].role: got ''"),
        ([{"role": 5, "content": "x"}], "messages[0].role: got 5"),
        ([{"role": "user"}], "messages[0].content: is missing"),
        ([{"role": "user", "content": None}], "messages[0].content: is missing"),
        ([{"role": "user", "name": "Ann"}], "messages[0].content: is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content: got 5"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content: got"),
        ([{"role": "user", "content": b"x"}], "messages[0].content: got b'x'"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]: got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0]: got",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]: got"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0]: got",
        ),
        ([{"role": "user", "content": "x", "more": object()}], "messages[0]: has <object"),
        ([{"role": "user", "content": "x", "more": {5: 6}}], "messages[0]: has {5: 6}"),
        ([{"role": "user", "content": "x", "more": datetime}], "messages[0]: has <class"),
        ([{"role": "user", "content": "x", 5: 6}], "messages[0]: has"),
        ([{"role": "user", "content": "x" * 10_000, "more": {1}}], "messages[0]: has {1}"),
    ],
)
def test_malformed_messages(messages, words):
    fails(RequestError, words, "x", messages)


def test_nesting_is_limited():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    message = {"role": "user", "content": "x"}
    fails(
        RequestError,
        "messages[0]: is nested more than 32 deep",
        "x",
        [message | {"tool_calls": deep}],
    )
    fails(RequestError, "messages[0].content[0]: got", "x", [message | {"content": deep}])
    fails(RequestError, "tools: is nested", "x", tools=[{"x": deep}])
    fails(RequestError, "chat_template_kwargs: is nested", "x", variables={"x": deep})


@pytest.mark.parametrize("tools", [5, "x", {}, [5], [[]], [None]])
def test_malformed_tools(tools):
    fails(RequestError, "tools: got", "x", tools=tools)


UNFINISHED = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Well,  "}],
    [
        {"role": "user", "content": "a list"},
        {"role": "assistant", "content": "a list\nof a list\n"},
    ],
    [{"role": "user", "content": "Hi"}],
]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("messages", UNFINISHED)
def test_the_last_message_is_continued_as_in_transformers(tmp_path, name, messages):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    theirs = oracle(tmp_path, TEMPLATES[name], messages, **options)
    assert render_chat(tokenizer(TEMPLATES[name]), messages, **options) == theirs
    assert theirs.rstrip().endswith(messages[-1]["content"].strip())
    # Parts of text, which these templates cannot read, are joined before they see them.
    *before, last = messages
    parts = [*before, last | {"content": [{"type": "text", "text": last["content"]}]}]
    assert render_chat(tokenizer(TEMPLATES[name]), parts, **options) == theirs


def test_what_cannot_be_continued():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    called = [*CONVERSATIONS[0], {"role": "assistant", "tool_calls": []}]
    fails(
        RequestError,
        "continue_final_message: the last message has no content",
        "x",
        called,
        **options,
    )
    fails(
        RequestError,
        "continue_final_message: the chat template leaves out",
        "x",
        CONVERSATIONS[0],
        **options,
    )
    both = {"add_generation_prompt": True, "continue_final_message": True}
    fails(RequestError, "continue_final_message: needs add_generation_prompt=False", "x", **both)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("add_generation_prompt", 1, "add_generation_prompt: got 1, allowed are true and false"),
        (
            "continue_final_message",
            None,
            "continue_final_message: got None, allowed are true and false",
        ),
        ("template", b"x", "chat_template: got b'x', must be the text of a template"),
        ("variables", ["x"], "chat_template_kwargs: got ['x'], must map names to values"),
    ],
)
def test_malformed_options(option, value, words):
    fails(RequestError, words, "x", **{option: value})


def test_malformed_variables():
    fails(RequestError, "chat_template_kwargs: has", "x", variables={"x": object()})
    fails(
        RequestError,
        "chat_template_kwargs: messages has a parameter",
        "x",
        variables={"messages": []},
    )


def test_templates_see_plain_data_only():
    class Text(str):
        def secret(self):
            return "leaked"

    for value in (Text("x"), {"y": Text("x")}):
        message = {"role": Text("user"), "content": Text("x"), "more": value}
        template = (
            "{{ messages[0].content.secret }}{{ messages[0].more.secret }}{{ "
            "messages[0].role.secret }}"
        )
        assert render_chat(tokenizer(template), [message]) == ""


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "x", "reasoning": "y", "more": {"a": [1]}}]
    before = json.dumps(messages)
    render_chat(tokenizer("{{ messages[0].reasoning_content }}"), messages)
    assert json.dumps(messages) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON,
        "content": st.text(max_size=8) | JSON,
    },
    optional={
        "tool_calls": JSON,
        "name": JSON,
        "reasoning": JSON,
        "thinking": JSON,
        "tool_call_id": JSON,
    },
)


@given(
    st.sampled_from(sorted(TEMPLATES)),
    JSON | st.lists(MESSAGE, max_size=4),
    JSON,
    st.text(max_size=3),
)
def test_any_messages_give_text_or_one_line(name, messages, tools, variable):
    try:
        text = render_chat(
            tokenizer(TEMPLATES[name]), messages, tools=tools, variables={variable: tools}
        )
    except TwinferError as error:
        text = str(error)
        oneline = "\n" not in text and len(text) < 1000
    else:
        oneline = True
    assert isinstance(text, str)
    assert oneline


# Templates


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ x",
        "{% for %}",
        "{{ 1 +* 2 }}",
        "{% unknown %}",
        "{{ x | nofilter }}",
        "{% generation %}",
        "{% break",
    ],
)
def test_broken_templates(template):
    fails(ModelError, "chat_template: line 1: ", template)


def test_deeply_nested_template():
    fails(ModelError, "chat_template: ", "{{ " + "(" * 50_000 + " }}")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Only\nuser\n\nmessages') }}", "Only user messages"),
        ("{{ raise_exception(5) }}", "refuses them: 5"),
        ("{{ raise_exception('x' * 5000) }}", "xxx..."),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages[0].content + 5 }}", "refuses them: "),
        ("{{ messages[9].content }}", "refuses them: "),
        ("{% include 'x' %}", "refuses them: "),
        ("{{ namespace | tojson }}", "refuses them: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses them: "),
    ],
)
def test_templates_that_refuse(template, words):
    fails(RequestError, words, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ (namespace | attr('__init__')).__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace(a=1) %}{% set ns._x = 2 %}",
    ],
)
def test_templates_that_do_what_they_must_not(template):
    fails(ModelError, "chat_template: does what a template must not do: ", template)


def test_loops_are_limited_by_the_sandbox():
    fails(RequestError, "Range too big", "{% for i in range(999999999) %}x{% endfor %}")


def test_output_is_limited():
    loop = "{% for i in range(1000) %}0123456789{% endfor %}"
    assert len(render_chat(tokenizer(loop), CONVERSATIONS[0], max_output=10_000)) == 10_000
    fails(RequestError, "longer than 9999 characters", loop, max_output=9_999)
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}0123456789{% endfor %}{% endfor %}"
    )
    fails(RequestError, f"longer than {chat.MAX_OUTPUT} characters", endless)
    big = [{"role": "user", "content": "x" * (chat.MAX_OUTPUT + 1)}]
    fails(RequestError, "longer than", "{{ messages[0].content }}", big)


def test_a_template_is_given_as_a_file_or_as_its_text(tmp_path):
    """A file goes first, also one whose name looks like a template."""
    text = "{{ messages[0].content }}"
    assert read_template(None) is None
    assert read_template(text) == text
    for name in ("a.jinja", "{{ x }}"):
        (tmp_path / name).write_text(f"\ufeff{CHATML}\r\n", encoding="utf-8")
        assert read_template(str(tmp_path / name)) == f"{CHATML}\n"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere.jinja", "cannot read nowhere.jinja: No such file or directory; allowed is"),
        ("", "cannot read '': No such file or directory"),
        ("/", "cannot read /: Is a directory"),
        ("a\0b", "cannot read"),
        ("x" * 5000, "File name too long"),
        ("{% if %}", "the text: line 1"),
        ("{{ 'a' | nosuch }}", "the text: line 1: No filter named 'nosuch'"),
        (b"\xff{{ messages }}", "is not UTF-8 text"),
        (b" \n", "is empty"),
        (b"a\n{{ b", ".jinja: line 2"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_templates_that_are_none_are_refused_at_the_start(given, says, tmp_path):
    if isinstance(given, bytes):
        (tmp_path / "a.jinja").write_bytes(given)
        given = str(tmp_path / "a.jinja")
    with pytest.raises(ConfigError, match=r"^chat-template: ") as error:
        read_template(given)
    assert says in str(error.value)
    assert len(str(error.value)) < 400


def test_what_other_calls_name_text_is_text():
    """Turns of a response, and refusals, which clients send back as they got them."""
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    show_all = "{% for m in messages %}{{ m.content }};{% endfor %}"
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    assert render_chat(tokenizer(show_all), messages) == "a\nb\nc;no;"
    for part in ({"type": "refusal", "text": "x"}, {"type": ["text"], "text": "x"}, {"text": "x"}):
        with pytest.raises(RequestError, match=r"content\[0\]"):
            render_chat(tokenizer(show_all), [{"role": "user", "content": [part]}])
