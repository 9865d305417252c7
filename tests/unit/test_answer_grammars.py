"""Grammars of whole answers: what a model may write where calls or a form are asked for."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twinfer.serving.formats.grammar import AnswerGrammar
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

    def accepts(grammar, text):
        """Whether the text may be the whole answer."""
        matcher = grammars.start(StructuredOutputs("grammar", grammar), None)
        for token in [*backend.encode(text, add_special_tokens=False).ids, eos]:
            grammars.look([matcher])
            if matcher.finished:
                return token == eos
            if not (int(matcher.mask[token // 32]) >> token % 32) & 1:
                return False
            matcher.advance(token)
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


def test_at_most_one_call(tokens):
    token_id, accepts, are_tokens = tokens
    grammar = AnswerGrammar(FORMATS["qwen"], token_id, "")
    if not are_tokens:
        with pytest.raises(RequestError, match=r"^parallel_tool_calls: got false"):
            grammar.at_most_one_call(TOOLS)
        return
    bound, call = grammar.at_most_one_call(TOOLS), f"<tool_call>{F}</tool_call>"
    for text in ("hello", f"I call.\n{call}", call, f"<think>x</think>\nhello {call}"):
        assert accepts(bound, text), text
    for text in (call + call, f"{call} and", "<tool_call>{}</tool_call>"):
        assert not accepts(bound, text), text


def test_formats_without_calls():
    for form in ("none", "think"):
        with pytest.raises(RequestError, match=f"^tool_choice: .*'{form}'"):
            AnswerGrammar(FORMATS[form], lambda text: None, "").calls(TOOLS, several=True)
    llama = AnswerGrammar(FORMATS["llama3_json"], lambda text: 7, "")
    with pytest.raises(RequestError, match=r"^parallel_tool_calls"):
        llama.at_most_one_call(TOOLS)
