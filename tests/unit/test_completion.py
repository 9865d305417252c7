"""The text side of a completion: the updates of a request, several tokens at once or one by one."""

import pytest

from twinfer.serving.completion import Completion, Mark
from twinfer.shared.engine import Logprob, Update
from twinfer.shared.models.locate import model_folder
from twinfer.shared.request import NO_TOKEN, NOT_FINITE, FinishReason
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.tokenizer import Tokenizer

from .written_texts import byte_tokenizer

TEXT = "def read(path):\n    return path.name\n"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(model_folder("demo"))


def complete(tokenizer, updates, **options):
    """(what `take` said, the output)."""
    completion = Completion(0, [5, 6], SamplingParams(**options), tokenizer)
    said = []
    for update in updates:
        if completion.done:
            break
        said.append(completion.take(update))
    return said, completion


def updates(ids, reason, *, at_once):
    """The tokens in one update, or in one each; `reason` is that of the last."""
    if at_once:
        return [Update("r", tuple(ids), reason)]
    return [
        Update("r", (token,), reason if i == len(ids) - 1 else None) for i, token in enumerate(ids)
    ]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("stop", [(), ("return",), ("name\n",)])
def test_tokens_that_come_at_once_give_what_they_give_one_by_one(tokenizer, stop, reason):
    ids = tokenizer.encode(TEXT)
    _, single = complete(tokenizer, updates(ids, reason, at_once=False), stop=stop)
    said, several = complete(tokenizer, updates(ids, reason, at_once=True), stop=stop)
    assert several.output == single.output
    assert several.done
    assert said == [False]  # the request has ended by itself


def test_what_comes_behind_a_stop_string_is_dropped_and_the_request_must_end(tokenizer):
    ids = tokenizer.encode(TEXT)
    said, completion = complete(tokenizer, updates(ids, None, at_once=True), stop=("return",))
    assert (said, completion.done) == ([True], True)
    assert (completion.output.finish_reason, completion.output.stop_reason) == ("stop", "return")
    assert completion.output.text == TEXT[: TEXT.index("return")]
    assert completion.output.token_ids == ids[: len(completion.output.token_ids)] != ids


@pytest.mark.parametrize(
    ("reason", "told", "why"),
    [
        (FinishReason.ABORT, "abort", None),
        (FinishReason.ERROR, "error", NOT_FINITE),
        (FinishReason.STUCK, "error", NO_TOKEN),
    ],
)
def test_a_request_that_ends_without_one_more_token_says_why(tokenizer, reason, told, why):
    ids = tokenizer.encode(TEXT)
    last = [Update("r", tuple(ids)), Update("r", (), reason, num_cached_tokens=16)]
    _, completion = complete(tokenizer, last)
    assert (completion.output.text, completion.output.token_ids) == (TEXT, ids)
    assert (completion.output.finish_reason, completion.output.stop_reason) == (told, why)
    assert completion.num_cached_tokens == 16


def test_each_token_brings_its_log_probability():
    found = [{1: Logprob(-0.5, 1)}, {2: Logprob(-0.25, 1)}]
    _, completion = complete(None, [Update("r", (1, 2), FinishReason.LENGTH, found)], logprobs=0)
    assert completion.output.logprobs == found
    assert completion.output.cumulative_logprob == -0.75


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_marks_are_told_of_by_their_places(at_once, reason):
    """Also the one that ends the request, and where a text waits for the rest of a stop string or
    of a character.
    """
    tokenizer = byte_tokenizer(["<a>", "<b>"])
    first, second = tokenizer.token_id("<a>"), tokenizer.token_id("<b>")
    ids = tokenizer.encode("xy<a>zé<b>", False)
    ids = [*ids[:-2], ids[-1]]  # half of a character
    completion = Completion(
        0, [5], SamplingParams(stop=("yz", "y<a>z", "�q"), max_tokens=99), tokenizer
    )
    completion.look_for({first: None, second: None})
    for update in updates(ids, reason, at_once=at_once):
        completion.take(update)
    assert (completion.output.text, completion.output.stop_reason) == ("xyz�", None)
    assert completion.marks == [Mark(first, 2, 2), Mark(second, 4, 5)]


@pytest.mark.parametrize("at_once", [True, False])
def test_marks_say_where_stop_strings_count(at_once):
    tokenizer = byte_tokenizer(["<on>", "<off>", "<same>"])
    on, off, same = (tokenizer.token_id(mark) for mark in ("<on>", "<off>", "<same>"))
    ids = tokenizer.encode("x<same>z<off>xy<same>xy<on>zx<same>y<on>axyb", False)
    completion = Completion(0, [5], SamplingParams(stop=("xy",), max_tokens=99), tokenizer)
    completion.look_for({on: True, off: False, same: None})
    for update in updates(ids, FinishReason.LENGTH, at_once=at_once):
        if not completion.done:
            completion.take(update)
    assert (completion.output.text, completion.output.stop_reason) == ("xzxyxyzxya", "xy")


def test_a_mark_behind_a_stop_string_is_none():
    tokenizer = byte_tokenizer(["<a>"])
    completion = Completion(0, [5], SamplingParams(stop=("y",)), tokenizer)
    completion.look_for({tokenizer.token_id("<a>"): None})
    completion.take(Update("r", tuple(tokenizer.encode("xy<a>z", False))))
    assert (completion.output.text, completion.marks) == ("x", [])
