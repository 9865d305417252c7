"""A whole server of a model that writes messages in channels, as gpt-oss does, with the `openai`
client. What it writes is dictated by a grammar, as its weights are noise.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from twinfer.serving.formats.table import FORMATS
from twinfer.shared.models.locate import model_folder

from ..harmony_template import TEMPLATE
from .server_process import served

MARKS = FORMATS["harmony"].marks
FIRST = 2048
"""The id of the first mark: the words of the demo model stand before."""
NEXT = "<|end|><|start|>assistant"
THINK = f"<|channel|>analysis<|message|>I need it.{NEXT}"
CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'
FINAL = "<|channel|>final<|message|>"
CITY = {"type": "string", "enum": ["Ulm", "Bonn"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
MESSAGES = [{"role": "user", "content": "Is it warm in Ulm?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    demo = Path(model_folder("demo"))
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": FIRST + 8}))
    # As some checkpoints have it: a call is no end that they know of.
    ends = {"eos_token_id": [0, FIRST + MARKS.index("<|return|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    (first,) = tokenizer["added_tokens"]
    tokenizer["added_tokens"] += [
        first | {"id": FIRST + place, "content": mark} for place, mark in enumerate(MARKS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(demo / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = "--backend torch --device cpu --dtype float32 --load-format dummy --max-model-len 1024"
    with served(*flags.split(), "--served-model-name", "m", model=folder) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai() as it:
        yield it


def dictated(text):
    """What a request says to have a text written, and no other."""
    parts = [text]
    for mark in MARKS:
        parts = [
            piece
            for part in parts
            for place, one in enumerate(part.split(mark) if part not in MARKS else [part])
            for piece in ([mark, one] if place else [one])
        ]
    words = [
        f"<[{FIRST + MARKS.index(part)}]>" if part in MARKS else json.dumps(part)
        for part in parts
        if part
    ]
    return {"structured_outputs": {"grammar": f"start: {' '.join(words)}\n"}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_goes_on_from_call_to_answer(client, stream):
    chat = dict(model="m", messages=MESSAGES, tools=TOOLS, max_tokens=300)
    preamble = f"<|channel|>commentary<|message|>I look.{NEXT}"

    def ask(text, **more):
        asked = chat | more
        if not stream:
            (choice,) = client.chat.completions.create(**asked, extra_body=dictated(text)).choices
            return choice
        with client.chat.completions.stream(**asked, extra_body=dictated(text)) as events:
            return events.get_final_completion().choices[0]

    choice = ask(THINK + preamble + CALL)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    assert choice.message.content == "I look."
    if not stream:  # the client's own class puts no field together that OpenAI has not
        assert choice.message.reasoning == "I need it."
    told = choice.message.model_dump(exclude={"parsed"})
    told["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": "weather", "arguments": call.function.arguments}}]  # fmt: skip
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
    choice = ask(f"{THINK}{FINAL}No.<|return|>", messages=[*MESSAGES, told, result])
    assert (choice.message.content, choice.finish_reason) == ("No.", "stop")
    assert not choice.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_behind_a_call_is_not_generated(client, stream):
    """Though the checkpoint's own config knows no end there."""
    asked = dict(model="m", messages=MESSAGES, tools=TOOLS, max_tokens=300)
    extra = dictated(f"{CALL}<|start|>assistant{FINAL}More.<|return|>")
    if stream:
        options = {"include_usage": True}
        *_, last = client.chat.completions.create(
            **asked, extra_body=extra, stream=True, stream_options=options
        )
        usage = last.usage
    else:
        whole = client.chat.completions.create(**asked, extra_body=extra)
        assert whole.choices[0].finish_reason == "tool_calls"
        usage = whole.usage
    alone = client.chat.completions.create(**asked, extra_body=dictated(CALL))
    assert usage.completion_tokens == alone.usage.completion_tokens


BIAS = {str(FIRST + MARKS.index("<|end|>")): 100}
"""Noise ends its reasoning at once."""


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_must_come(client, seed):
    (choice,) = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=seed,
        temperature=1.0, max_tokens=900, parallel_tool_calls=False, logit_bias=BIAS,
    ).choices  # fmt: skip
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in CITY["enum"]
    assert not choice.message.content


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_of_a_form(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = dict(model="m", seed=seed, temperature=1.0, logit_bias=BIAS)
    (choice,) = client.chat.completions.create(
        **asked, messages=MESSAGES, response_format=form, max_tokens=900
    ).choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["city"] in CITY["enum"]
    bound = {"structured_outputs": {"regex": "[0-9]{2}/[a-z]"}}
    answer = client.chat.completions.create(
        **asked, messages=MESSAGES, max_tokens=900, extra_body=bound
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch("[0-9]{2}/[a-z]", choice.message.content)
    assert answer.usage.completion_tokens > 4  # it has a header


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_items_and_goes_on(client, stream):
    flat = [{"type": "function", "name": "weather", "parameters": SCHEMA}]

    def ask(text, said):
        asked = dict(model="m", input=said, tools=flat, extra_body=dictated(text))
        if not stream:
            return client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.completed"
        return last.response

    told = ask(THINK + CALL, MESSAGES)
    reasoning, call = told.output
    assert reasoning.content[0].text == "I need it."
    assert (call.name, call.arguments) == ("weather", '{"city": "Ulm"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    before = [item.model_dump() for item in told.output]
    told = ask(f"{THINK}{FINAL}No.<|return|>", [*MESSAGES, *before, result])
    assert (told.output_text, len(told.output)) == ("No.", 2)
