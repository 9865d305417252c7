"""Texts that must have a form: a schema, an expression, a choice, a grammar; on both workers."""

import datetime
import ipaddress
import json
import re
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from twinfer.serving.llm import LLM
from twinfer.shared import grammars
from twinfer.shared.errors import RequestError
from twinfer.shared.grammars import Grammars
from twinfer.shared.request import NO_TOKEN
from twinfer.shared.sampling_params import SamplingParams

SIZES = {"max_model_len": 512, "max_num_seqs": 16, "page_size": 16, "dtype": "float32"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def params(form, **more):
    settings = {"max_tokens": 120, "temperature": 1.0, "seed": 1} | more
    return SamplingParams(structured_outputs=form, **settings)


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def llm(request):
    with LLM("demo", backend=request.param, device="cpu", progress=False, **SIZES) as it:
        yield it


def texts(llm, settings, prompt="x = "):
    prompts = [prompt] * len(settings)
    return [o.outputs[0] for o in llm.generate(prompts, settings, progress=False)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_completion_that_ends_with_its_form_is_told_once(count, llm):
    """The step that brought its last token also found its text complete: two updates of one."""
    settings, prompts = params({"choice": ["yes", "no"]}), ["x = "] * count
    finished = []
    llm.generate(prompts, settings, progress=False, on_finish=lambda o: finished.append(o))
    assert len(finished) == count
    updates = list(llm.stream(prompts, settings))
    assert sum(update.finish_reason is not None for update in updates) == count
    for index in range(count):
        told = [update for update in updates if update.index == index]
        assert all(update.token_ids for update in told)
        assert "".join(update.text for update in told) in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no", 'a "quoted" ü']}, 'yes|no|a "quoted" ü'),
        ({"grammar": 'start: "[" /[ab]/ ("," /[ab]/)~1..4 "]"'}, r"\[[ab](,[ab]){1,4}\]"),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_text_has_its_form_and_ends_with_it(form, pattern, ignore_eos, llm):
    """Whatever the temperature, and although end-of-sequence ids are ignored."""
    settings = [
        params(form, seed=i, temperature=(0.0, 1.0, 5.0)[i % 3], ignore_eos=ignore_eos)
        for i in range(9)
    ]
    for output in texts(llm, settings):
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop"


VALUES = st.deferred(
    # As many that have no others in them, so that few are larger than Hypothesis draws.
    lambda: st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 300},
            {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 7},
            {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 60},
            {"allOf": [{"type": "integer", "maximum": 20}, {"type": "integer", "minimum": -3}]},
        ]
    )
    | st.sampled_from(
        [
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "minLength": 2, "maxLength": 4},
        ]
    )
    | st.sampled_from(
        [{"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}]
    )
    | st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"enum": ["x", 1, None]}, {"const": {"k": [1]}}]
    )
    | st.builds(
        lambda first, rest, least: {
            "type": "array", "prefixItems": [first], "items": rest,
            "minItems": least, "maxItems": 2,
        },
        VALUES, VALUES, st.integers(0, 2),
    )
    | st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most},
        VALUES, st.integers(0, 2),
    )
    | st.builds(
        lambda named, optional: {
            "type": "object", "properties": named, "additionalProperties": False,
            "required": sorted(named)[: len(named) - optional],
        },
        st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), st.integers(0, 1),
    )
    | st.builds(lambda one, other: {"anyOf": [one, other]}, VALUES, VALUES)
)  # fmt: skip


FORMATS = {"date": datetime.date.fromisoformat, "ipv4": ipaddress.IPv4Address}


def is_valid(value, schema):
    """Whether a value has the form of one of `VALUES`."""
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    if "allOf" in schema:
        return all(is_valid(value, one) for one in schema["allOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    return KINDS[schema["type"]](value, schema)


def _is_integer(value, schema):
    return (
        type(value) is int
        and value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", value - 1)
        and value < schema.get("exclusiveMaximum", value + 1)
        and value % schema.get("multipleOf", 1) == 0
    )


def _is_string(value, schema):
    if not isinstance(value, str) or not re.fullmatch(schema.get("pattern", ".*"), value, re.S):
        return False
    if "format" in schema and not _has_format(value, schema["format"]):
        return False
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)


def _has_format(text, name):
    try:
        FORMATS[name](text)
    except ValueError:
        return False
    return True


def _is_array(value, schema):
    if not isinstance(value, list):
        return False
    kinds = [*schema.get("prefixItems", ()), *[schema["items"]] * len(value)]
    long_enough = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
    return long_enough and all(map(is_valid, value, kinds))


def _is_object(value, schema):
    return (
        isinstance(value, dict)
        and set(schema.get("required", ())) <= set(value) <= set(schema["properties"])
        and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
    )


KINDS = {
    "integer": _is_integer,
    "string": _is_string,
    "array": _is_array,
    "object": _is_object,
    "null": lambda value, schema: value is None,
    "boolean": lambda value, schema: type(value) is bool,
}


@pytest.mark.parametrize("examples", [16, pytest.param(40, marks=pytest.mark.slow)])
def test_texts_keep_to_random_schemas(examples, llm):
    ended = 0

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # each example is five requests: none is spent on making it small
    )
    @given(st.lists(VALUES, min_size=5, max_size=5))
    def check(schemas):
        nonlocal ended
        forms = [params({"json": schema}, seed=i) for i, schema in enumerate(schemas)]
        for schema, output in zip(schemas, texts(llm, forms), strict=True):
            if output.finish_reason == "stop":
                ended += 1
                assert is_valid(json.loads(output.text), schema), (schema, output.text)
            else:
                assert output.finish_reason == "length"

    check()
    assert ended > examples * 5 // 2


ENGINES = ({"num_pages": 40}, {"async_scheduling": False}, {"decode_steps": 4})


@pytest.mark.parametrize(
    ("few", "bound", "others", "engines"),
    [
        (8, 3, 10, [{"num_pages": 40, "decode_steps": 4}]),
        pytest.param(8, 6, 32, ENGINES, marks=pytest.mark.slow),
        pytest.param(1, 6, 10, ENGINES, marks=pytest.mark.slow),
    ],
)
def test_company_preemption_and_overlap_change_nothing(
    few, bound, others, engines, llm, monkeypatch
):
    """The same tokens alone, among free requests, in a cache that makes some give way, read step by
    step or not; looked at in a thread if there are `few` or more texts.
    """
    monkeypatch.setattr(grammars, "FEW", few)
    forms = [params({"json": SCHEMA}, seed=i) for i in range(bound)]
    free = [SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(others)]
    alone = [texts(llm, [one])[0].token_ids for one in forms]
    free_alone = [texts(llm, [one])[0].token_ids for one in free[:bound]]
    mixed = [one for pair in zip(forms, free, strict=False) for one in pair] + free[bound:]
    found = [output.token_ids for output in texts(llm, mixed)]
    assert found[0 : 2 * bound : 2] == alone
    assert found[1 : 2 * bound : 2] == free_alone
    backend = llm.engine.config.backend
    for more in engines:
        options = {"backend": backend, "device": "cpu", "progress": False} | SIZES | more
        with LLM("demo", **options) as other:
            assert [output.token_ids for output in texts(other, mixed)] == found
            assert "num_pages" not in more or other.engine.metrics().preemptions > 0
            assert not other.engine._matched


@pytest.mark.slow
def test_both_workers_give_bound_texts_the_same_tokens_beside_32_free_ones():
    """All in one batch, and alone."""
    forms = [
        {"json": SCHEMA},
        {"regex": "[0-9]{3}-[a-f]{20}"},
        {"choice": ["yes", "no", "maybe not"]},
        {"json_object": True},
        {"grammar": 'start: "[" /[ab]/ ("," /[ab]/)~1..20 "]"'},
    ]
    bound = [params(form, seed=i) for i, form in enumerate(forms)]
    free = [SamplingParams(max_tokens=130, seed=100 + i, ignore_eos=True) for i in range(32)]
    found = []
    for backend in ("torch", "jax"):
        options = SIZES | {"backend": backend, "device": "cpu", "max_num_seqs": 40}
        with LLM("demo", progress=False, **options) as llm:
            mixed = [output.token_ids for output in texts(llm, bound + free)]
            assert [texts(llm, [one])[0].token_ids for one in bound] == mixed[: len(bound)]
            found.append(mixed)
    assert found[0] == found[1]


def test_a_mask_that_is_a_step_late_is_seen(llm, monkeypatch):
    """Else the tests above could not fail."""
    advance, kept = Grammars.advance, []

    def late(self, brought, *memory):
        found = advance(self, brought, *memory)
        if found is not None:
            found.done()
            kept.append(found.words.copy())
            if len(kept) > 1 and kept[-2].shape == kept[-1].shape:
                found.words[:] = kept[-2]
        return found

    monkeypatch.setattr(Grammars, "advance", late)
    outputs = texts(llm, [params({"json": SCHEMA}, seed=i) for i in range(4)])
    assert any(output.finish_reason == "error" for output in outputs)


UNSUPPORTED = {
    "not": {"not": {"type": "null"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "object"}, "then": {"required": ["a"]}},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "minContains": {"type": "array", "minContains": 2},
    "maxContains": {"type": "array", "maxContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "format": {"type": "string", "format": "nonsense"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "dynamicRef": {"$dynamicRef": "#a"},
    "maxProperties": {"properties": {"b": {"type": "null"}}, "maxProperties": 1},
    "http://x/y": {"$ref": "http://x/y"},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b"},
    "backreferences": {"type": "string", "pattern": r"(a)\1"},
}


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_keyword_that_is_not_known_is_refused_by_name(name, inner, llm):
    """Also where the schema asks the library to pass over it."""
    schema = UNSUPPORTED[name]
    if inner:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for more in ({}, {"x-guidance": {"lenient": True, "coerce_one_of": True}}):
        with pytest.raises(RequestError, match=f"^structured_outputs: json: .*{name}"):
            llm.generate(["x"], params({"json": schema | more}), progress=False)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": {"not": {}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "nonsense"}, "grammar"),
        ({"choice": []}, "choice"),
        ({"json": "{"}, "JSON schema"),
        ({"json": SCHEMA, "regex": "a"}, "json, regex"),
        ({}, "nothing"),
        ({"xml": "a"}, "xml"),
        ({"grammar": "start: start"}, "grammar: no text keeps to it"),
        ({"json": {"$ref": "#"}}, "json: no text keeps to it"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(form, says, llm):
    with pytest.raises(RequestError, match=f"^structured_outputs: .*{says}"):
        llm.generate(["x"], params(form), progress=False)
    assert texts(llm, [params({"regex": "ab"})])[0].text == "ab"


def test_tokens_that_others_forbid(llm):
    """None may begin: refused. None may go on: that request ends with an error, no other."""
    tokenizer = llm.tokenizer
    size = llm.engine.model.vocab_size
    with_z = [i for i in range(size) if "z" in (tokenizer.token_text(i) or "")]
    with pytest.raises(RequestError, match="no token may begin"):
        llm.generate(["x"], params({"regex": "z"}, banned_token_ids=with_z), progress=False)
    stuck = params({"regex": "abz"}, banned_token_ids=with_z)
    free = SamplingParams(max_tokens=8, seed=3)
    (alone,) = texts(llm, [free])
    bad, good = texts(llm, [stuck, free])
    assert bad.finish_reason == "error"
    assert "the form and the other options" in bad.stop_reason
    assert good.token_ids == alone.token_ids
    with pytest.raises(RequestError, match="min_tokens: cannot be had"):
        params({"regex": "a"}, min_tokens=1)


def test_a_text_that_gets_too_much_work_ends_alone(llm):
    """Of so many choices the library looks at no more than at the first token's."""
    form = {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(15_000))}
    (alone,) = texts(llm, [SamplingParams(max_tokens=8, seed=3)])
    bad, good = texts(llm, [params(form), SamplingParams(max_tokens=8, seed=3)])
    assert (bad.finish_reason, bad.stop_reason) == ("error", NO_TOKEN)
    assert good.token_ids == alone.token_ids
    # Its lexer is used up, for the next text too.
    assert not llm.engine.grammars.is_compiled(params(form).structured_outputs)


HOSTILE = [
    {"regex": "(a|b)*c.{2000}d"},
    {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"},
    {"regex": "(" * 5000 + ")" * 5000},
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"json": {"enum": [f"v{i}" for i in range(9000)]}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "object"}]}] * 12}},
    {"grammar": "start: a a a a a a a a\na: b b b b b b b b\nb: /(x|y|z)*/ | a"},
]


@pytest.mark.parametrize("form", HOSTILE, ids=lambda form: str(form)[:24])
def test_hostile_forms_are_answered_or_refused(form, llm):
    """And the requests beside them are served. A generous bound: it is work that is counted, not
    seconds.
    """
    free = SamplingParams(max_tokens=8, seed=3)
    (alone,) = texts(llm, [free])
    began = time.process_time()
    try:
        settings = [params(form, max_tokens=4), free]
    except RequestError:
        return
    _, good = llm.generate(["x = "] * 2, settings, progress=False, return_errors=True)
    assert good.outputs[0].token_ids == alone.token_ids
    assert time.process_time() - began < 60
