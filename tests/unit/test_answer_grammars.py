"""Grammars of whole answers: what a model may write where calls or a form are asked for."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twinfer.serving.formats.grammar import AnswerGrammar
from twinfer.serving.formats.message_grammar import answer_grammar
from twinfer.serving.formats.parser import parse
from twinfer.serving.formats.table import FORMATS
from twinfer.shared.errors import RequestError
from twinfer.shared.grammars import Grammars
from twinfer.shared.structured_outputs import StructuredOutputs

INTEGER = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "$defs": {"number": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": INTEGER}},
    {"type": "function", "function": {"name": 'g"h'}},
]
F, G = '{"name": "f", "arguments": {"a": 3}}', r'{"name": "g\"h", "arguments": {"b": [1]}}'
NEVER = '{"name": "f", "arguments": {"a": "x"}}'
OTHER = '{"name": "k", "arguments": {}}'


@pytest.fixture(params=["tokens", "texts"])
def tokens(request, tmp_path):
    """A model that writes bytes, and whose marks are tokens, or not; with what checks a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    if request.param == "tokens":
        marks = {mark for form in FORMATS.values() for mark in form.marks}
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in sorted(marks)])
    backend.save(str(tmp_path / "tokenizer.json"))
    eos = backend.token_to_id("<eos>")
    grammars = Grammars(tmp_path, backend.get_vocab_size(), [eos])

    def accepts(grammar, text, *, spelled=False):
        """Whether the text may be the whole answer; `spelled`: in tokens of one letter."""
        matcher = grammars.start(StructuredOutputs("grammar", grammar), None)
        pieces = text if spelled else [text]
        ids = [i for piece in pieces for i in backend.encode(piece, add_special_tokens=False).ids]
        for token in [*ids, eos]:
            if matcher.finished:
                return token == eos
            if not (int(matcher.mask[token // 32]) >> token % 32) & 1:
                return False
            grammars.advance([(matcher, token)])
        return matcher.finished

    return backend.token_to_id, accepts, request.param == "tokens"


FORMED = {
    "hermes": ("<tool_call>\n{}\n</tool_call>", "\n"),
    "llama3_json": ("{}", "; "),
    "mistral": ("[TOOL_CALLS] [{}]", None),
}


@pytest.mark.parametrize("form", FORMED)
def test_calls_that_must_come(form, tokens):
    token_id, accepts, are_tokens = tokens
    if form == "mistral" and are_tokens:
        pytest.skip("with tokens it has the named form, which has a test of its own")
    mark, between = FORMED[form]
    key = FORMATS[form].calls.argument_keys[0]

    def written(*calls):
        calls = [call.replace("arguments", key) for call in calls]
        if between is None:
            return mark.replace("{}", ", ".join(calls))
        return between.join(mark.replace("{}", call) for call in calls)

    grammar = AnswerGrammar(FORMATS[form], token_id, "")
    one, several = (grammar.calls(TOOLS, several=more) for more in (False, True))
    for accepted in ((F,), (G,)):
        assert accepts(one, written(*accepted))
        assert accepts(several, written(*accepted))
    assert accepts(several, written(F, G, F))
    assert not accepts(one, written(F, G))
    for refused in (written(NEVER), written(OTHER), "", "x", "x" + written(F), written(F) + "x"):
        assert not accepts(one, refused)
        assert not accepts(several, refused)
    # What was asked for is what the parser finds.
    assert not accepts(grammar.calls(TOOLS[:1], several=True), written(G))


def test_named_calls_of_mistral(tokens):
    token_id, accepts, are_tokens = tokens
    if not are_tokens:
        pytest.skip("needs [ARGS] as a token")
    grammar = AnswerGrammar(FORMATS["mistral"], token_id, "").calls(TOOLS, several=True)
    assert accepts(grammar, '[TOOL_CALLS]f[ARGS]{"a": 3}[TOOL_CALLS]f[ARGS]{"a": 4}')
    assert not accepts(grammar, '[TOOL_CALLS]f[ARGS]{"a": "x"}')
    assert not accepts(grammar, '[TOOL_CALLS]k[ARGS]{"a": 3}')


def test_reasoning_goes_before_what_is_asked_for(tokens):
    token_id, accepts, are_tokens = tokens
    answer = '{"a": 3}'
    free = AnswerGrammar(FORMATS["qwen"], token_id, "assistant\n")
    assert free.may_reason == are_tokens
    thought = f'<think>\nOr {{"a": "x"}}?\n</think>\n\n{answer}'
    assert accepts(free.json(INTEGER), answer)
    assert accepts(free.json(INTEGER), thought) == are_tokens
    assert accepts(free.calls(TOOLS, several=False), f"<tool_call>{F}</tool_call>")
    opened = AnswerGrammar(FORMATS["qwen"], token_id, "assistant\n<think>\n")
    assert opened.may_reason
    assert accepts(opened.json(INTEGER), f"So.</think>\n{answer}")
    assert not accepts(opened.json(INTEGER), f"So.</think>\n{answer}x")
    assert not accepts(opened.json(INTEGER), 'So.</think>\n{"a": "x"}')
    assert accepts(opened.choice(["yes", "no"]), "So.</think>yes")
    assert accepts(opened.calls(TOOLS, several=True), f"So.</think>\n\n<tool_call>{F}</tool_call>")
    ended = AnswerGrammar(FORMATS["qwen"], token_id, "assistant\n<think>\n\n</think>\n\n")
    assert not ended.may_reason
    assert not accepts(ended.json(INTEGER), thought)


@pytest.mark.parametrize("form", FORMED)
def test_calls_that_may_come_keep_to_their_schemas(form, tokens):
    """What the parser takes for a call is one of a tool on offer, and strict where it should be."""
    token_id, accepts, are_tokens = tokens
    named = form == "mistral" and are_tokens
    key = FORMATS[form].calls.argument_keys[0]
    mark, between = ("[TOOL_CALLS]{}", "") if named else FORMED[form]

    def written(*calls):
        parts = [call.replace("arguments", key) for call in calls]
        if named:
            parts = [
                f"{json.loads(call)['name']}[ARGS]{json.dumps(json.loads(call)['arguments'])}"
                for call in calls
            ]
        if between is None:
            return mark.replace("{}", ", ".join(parts))
        return between.join(mark.replace("{}", part) for part in parts)

    loose, none = '{"name": "k", "arguments": {"z": [null]}}', '{"name": "k", "arguments": 3}'
    tools = [*TOOLS[:1], {"type": "function", "function": {"name": "k", "parameters": INTEGER}}]
    grammar = AnswerGrammar(FORMATS[form], token_id, "")
    bound = {
        several: grammar.may_call(tools, several=several, strict=["f"]) for several in (True, False)
    }
    before = "" if form == "llama3_json" else "I call.\n"
    for several, text in bound.items():
        for accepted in ("hello", "", before + written(F), written(F), written(loose)):
            assert accepts(text, accepted), accepted
        for refused in (NEVER, none, G):
            assert not accepts(text, before + written(refused)), refused
        assert accepts(text, before + written(F, loose)) == several
        assert not accepts(text, before + written(F, NEVER))
    if form == "hermes":
        assert accepts(bound[True], f"{before}{written(F)}\nAnd <tool_cal {written(loose)} Done.")
        assert not accepts(bound[True], f"{written(F)} Done.<tool_call>")


TYPED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
}


def tagged(form, name, **arguments):
    if form == "glm45":
        pairs = [
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
        ]
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_calls_in_tags(form, tokens):
    """What is accepted keeps to the schema as the parser reads it."""
    token_id, accepts, _ = tokens
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": TYPED}},
        {"type": "function", "function": {"name": "g"}},
    ]
    grammar = AnswerGrammar(FORMATS[form], token_id, "")
    must, may = (
        grammar.calls(tools, several=True),
        grammar.may_call(tools, several=True, strict="f"),
    )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    f = {"city": 'New "<York>"\n', "days": 3}
    for arguments in (f, f | {"unit": "C"}):
        text = tagged(form, "f", **arguments)
        assert accepts(must, text)
        assert accepts(must, f"{text}\n{text}")
        assert accepts(may, f"Hi\n{text}\n")
        (call,) = parse(text, form, tools=schemas).tool_calls
        assert json.loads(call.arguments) == arguments
    for arguments in ({"city": "x"}, f | {"days": 10}, f | {"unit": "K"}, {"days": 3, "city": "x"}):
        assert not accepts(must, tagged(form, "f", **arguments))
        assert not accepts(may, tagged(form, "f", **arguments))
    assert accepts(must, tagged(form, "g", any="thing"))
    assert accepts(must, tagged(form, "g"))
    assert not accepts(must, tagged(form, "k"))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "the type of 'a'"),
        (3, "got 3"),
    ],
)
def test_schemas_that_tags_cannot_keep_to(schema, says):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(RequestError, match=f"^tools: parameters of 'f': .*{says}"):
        AnswerGrammar(FORMATS["glm45"], lambda text: None, "").calls(tools, several=True)


def test_a_mark_that_is_spelled_out_is_bound_too(tokens):
    """Letter by letter it would be found in the text all the same."""
    token_id, accepts, are_tokens = tokens
    grammar = AnswerGrammar(FORMATS["hermes"], token_id, "")
    bound = grammar.may_call(TOOLS, several=True, strict=["f"])
    for text in (f"<tool_call>{NEVER}</tool_call>", "a <tool_call> b"):
        assert not accepts(bound, text, spelled=True)
    assert accepts(bound, f"<tool_call>{F}</tool_call>", spelled=True) == (not are_tokens)
    assert accepts(bound, "a <tool_cal> b", spelled=True)


def test_at_most_one_call(tokens):
    token_id, accepts, _ = tokens
    grammar = AnswerGrammar(FORMATS["qwen"], token_id, "")
    bound = grammar.may_call(TOOLS, several=False, strict=["f"])
    call = f"<tool_call>{F}</tool_call>"
    for text in ("hello", f"I call.\n{call}", call, f"<think>x</think>\nhello {call}"):
        assert accepts(bound, text), text
    for text in (call + call, f"{call} and", "<tool_call>{}</tool_call>"):
        assert not accepts(bound, text), text


NEXT = "<|end|><|start|>assistant"
THOUGHT = f'<|channel|>analysis<|message|>Or {{"a": "x"}} <|en?\n{NEXT}'
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>"


def addressed(name, arguments):
    """A call in the ways in which a header names a recipient, and what its text is."""
    channel = "<|channel|>commentary"
    for kind in (" json", " <|constrain|>json", "<|constrain|>json", ""):
        yield f" to=functions.{name}{channel}{kind}<|message|>{arguments}"
        yield f"{channel} to=functions.{name}{kind}<|message|>{arguments}"


@pytest.fixture
def harmony(tokens):
    """Grammars behind a prompt's end, and what checks a text; for a model with the marks."""
    token_id, accepts, are_tokens = tokens
    if not are_tokens:
        pytest.skip("is no model of that format")

    def behind(tail, *ends):
        return answer_grammar(FORMATS["harmony"], token_id, tail, {*map(token_id, ends)})

    return behind, accepts


def test_forms_of_an_answer_in_messages(harmony):
    """They bind the text of the channel final, whatever was thought before."""
    behind, accepts = harmony
    grammar = behind("<|end|><|start|>assistant")
    assert grammar.may_reason
    for form, good, bad in (
        (grammar.json(INTEGER), '{"a": 3}', '{"a": "x"}'),
        (grammar.choice(["yes", "no"]), "yes", "maybe"),
    ):
        for before in ("", THOUGHT, THOUGHT * 2):
            for kind in ("", " json", " <|constrain|>json"):
                head = f"{before}<|channel|>final{kind}<|message|>"
                assert accepts(form, head + good)
                assert not accepts(form, head + bad)
        for refused in (good, PREAMBLE + FINAL + good, f"{FINAL}{good}<|end|>", THOUGHT):
            assert not accepts(form, refused)
    opened = behind("<|start|>assistant<|channel|>analysis<|message|>")
    assert accepts(opened.json(INTEGER), f"So.{NEXT}{THOUGHT}{FINAL}{{}}".replace("{}", '{"a": 3}'))
    no_role = behind("<|end|>")
    assert accepts(no_role.json(INTEGER), f'<|start|>assistant{FINAL}{{"a": 3}}')
    # What continues a text has no header of its own.
    assert not behind("<|start|>assistant<|channel|>final<|message|>I sa").may_reason


@pytest.mark.parametrize(
    ("expression", "good", "bad"),
    [
        ("[0-9]+/[a-z]", "12/x", "12"),
        (r"a\/b\\/c|d", r"a/b\/c", "a/b/c"),
        ("a\nb|c\\\n", "a\nb", "a"),
        (r"\d{2}\n", "12\n", "12"),
        ('say "(yes|no)"', 'say "no"', "no"),
        ("[/]+é", "//é", "//"),
    ],
)
def test_expressions_bind_the_text_of_the_answer_in_messages(harmony, expression, good, bad):
    behind, accepts = harmony
    form = behind("<|end|><|start|>assistant").form("regex", expression)
    for before in ("", THOUGHT):
        assert accepts(form, before + FINAL + good)
        assert not accepts(form, before + FINAL + bad)
    assert not accepts(form, good)
    assert behind("I sa").form("regex", expression) is None
    assert behind("<|end|><|start|>assistant").form("grammar", "start: /a/") is None


def test_calls_in_messages_that_must_come(harmony):
    behind, accepts = harmony
    grammar = behind("<|end|><|start|>assistant")
    one, several = (grammar.calls(TOOLS, several=more) for more in (False, True))
    for call in addressed("f", '{"a": 3}'):
        for text in (call, THOUGHT + call):
            assert accepts(one, text)
            assert accepts(several, text)
            found = parse(text, "harmony", "<|start|>assistant", ["f"]).tool_calls
            assert [(call.name, call.arguments) for call in found] == [("f", '{"a": 3}')]
        assert accepts(several, call + NEXT + call)
        assert not accepts(one, call + NEXT + call)
    for refused in (
        *addressed("f", '{"a": "x"}'), *addressed("k", "{}"), f"{FINAL}x", THOUGHT, "",
        *(PREAMBLE + call for call in addressed("f", '{"a": 3}')),
    ):  # fmt: skip
        assert not accepts(one, refused), refused
        assert not accepts(several, refused), refused
    assert all(accepts(one, call) for call in addressed('g"h', '{"b": [1]}'))
    within = behind("I sa").calls(TOOLS, several=False)
    assert accepts(within, f"y.{NEXT}" + next(addressed("f", '{"a": 3}')))


@pytest.mark.parametrize("known", [True, False])
def test_a_mark_that_ends_an_answer_may_end_one_that_is_bound(harmony, known):
    """Where it is none of the tokens that end every text, which grammars do not name."""
    behind, accepts = harmony
    grammar = behind("<|end|><|start|>assistant", *([] if known else ["<|call|>"]))
    call = next(addressed("f", '{"a": 3}'))
    for bound in (
        *(grammar.calls(TOOLS, several=several) for several in (True, False)),
        *(grammar.may_call(TOOLS, several=several, strict=["f"]) for several in (True, False)),
    ):
        assert accepts(bound, call)
        assert accepts(bound, f"{call}<|call|>") == (not known)
        assert not accepts(bound, f"{call}<|return|>")
        assert not accepts(bound, f"{call}<|call|>{NEXT}")
    assert accepts(grammar.json(INTEGER), f'{FINAL}{{"a": 3}}<|call|>') == (not known)


def test_calls_in_messages_that_may_come(harmony):
    """What the parser takes for a call is one of a tool on offer, and strict where it should be."""
    behind, accepts = harmony
    tools = [*TOOLS[:1], {"type": "function", "function": {"name": "k", "parameters": INTEGER}}]
    grammar = behind("<|end|><|start|>assistant")
    bound = {
        several: grammar.may_call(tools, several=several, strict=["f"]) for several in (True, False)
    }
    loose = next(addressed("k", '{"z": [null]}'))
    for several, text in bound.items():
        for call in (*addressed("f", '{"a": 3}'), loose):
            for accepted in (call, THOUGHT + PREAMBLE + call, PREAMBLE + THOUGHT + call):
                assert accepts(text, accepted)
            assert accepts(text, call + NEXT + loose) == several
            assert accepts(text, f"{call}{NEXT}{FINAL}x") == several
        for accepted in (FINAL, f"{THOUGHT}{FINAL}hello", f"{PREAMBLE}{FINAL} to=functions.k {{"):
            assert accepts(text, accepted)
        for refused in (
            *addressed("f", '{"a": "x"}'), *addressed("k", "3"), *addressed("g", "{}"), "hello",
            f"{PREAMBLE}<|channel|>commentary to=python<|message|>1", THOUGHT, f"{FINAL}x{NEXT}",
        ):  # fmt: skip
            assert not accepts(text, refused), refused
    within = behind("I sa").may_call(tools, several=True, strict=["f"])
    for accepted in ("y.", f"y.{NEXT}{loose}", f"y.{NEXT}{FINAL}x"):
        assert accepts(within, accepted)
    assert not accepts(within, f"y.{NEXT}{next(addressed('f', '{}'))}")


def test_formats_without_calls():
    for form in ("none", "think"):
        with pytest.raises(RequestError, match=f"^tool_choice: .*'{form}'"):
            AnswerGrammar(FORMATS[form], lambda text: None, "").calls(TOOLS, several=True)
        with pytest.raises(RequestError, match=f"^parallel_tool_calls: .*'{form}'"):
            AnswerGrammar(FORMATS[form], lambda text: None, "").may_call(
                TOOLS, several=False, strict=()
            )
