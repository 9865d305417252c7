"""Sampling parameters: the one place that validates them must let nothing through and never fail
in another way.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.shared import sampling_params as limits
from twinfer.shared.errors import RequestError
from twinfer.shared.sampling_params import SamplingParams

HUGE = pytest.param(10**5000, id="huge")
NAMES = [field.name for field in dataclasses.fields(SamplingParams)]


def refused(name, value, *words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    assert len(message) < 300
    for word in words:
        assert word in message, message


def test_defaults():
    params = SamplingParams()
    assert not params.greedy
    assert not params.needs_processors
    assert params.stop == params.stop_token_ids == params.banned_token_ids == ()
    assert params.logit_bias == {}
    assert params.allowed_token_ids is None
    params.check_vocabulary(1)


NUMPY = {
    "allowed_token_ids": ([np.int64(3), 4], (3, 4)),
    "banned_sequences": ([[np.int32(1), 2]], ((1, 2),)),
    "logit_bias": ({np.int64(3): np.float32(0.5)}, {3: 0.5}),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_of_numpy_may_stand_in_lists(name):
    value, kept = NUMPY[name]
    assert getattr(SamplingParams(**{name: value}), name) == kept


@pytest.mark.parametrize("value", [np.bool_(True), np.timedelta64(3, "ns")])
def test_truth_values_and_times_of_numpy_are_no_token_ids(value):
    refused("stop_token_ids", [value], "allowed is an integer")


INTEGERS = {
    "n": (1, limits.MAX_N),
    "max_tokens": (1, limits.INT32_MAX),
    "top_k": (-1, limits.INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, limits.MAX_LOGPROBS),
    "prompt_logprobs": (0, limits.MAX_LOGPROBS),
}
NUMBERS = {
    "temperature": (0.0, limits.MAX_TEMPERATURE),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    refused(name, low - 1, f"got {low - 1}")
    refused(name, high + 1, f"got {high + 1}", f"{low} to {high}")


@pytest.mark.parametrize("name", [*INTEGERS, "min_tokens"])
@pytest.mark.parametrize("value", [1.0, "1", True, False, [1], {}, float("nan"), b"1", HUGE])
def test_what_is_no_integer(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    low, high = NUMBERS[name]
    for value in (low, high, 1):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 0.5, high + 0.5, float("inf"), float("-inf"), 10**400, -(10**400)):
        refused(name, value, "allowed is")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), "1", None, True, [], 1j, HUGE])
def test_what_is_no_number(name, value):
    refused(name, value)


@pytest.mark.parametrize(
    "name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
)
@pytest.mark.parametrize("value", [0, 1, None, "true", [], "x" * 10_000])
def test_switches(name, value):
    refused(name, value, "true and false")


def test_edges():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy
    refused("temperature", 0.009, "0 (greedy)")
    refused("top_p", 0, "more than 0")
    refused("top_p", 0.0)
    assert SamplingParams(min_tokens=16).min_tokens == 16
    refused("min_tokens", 17, "must not exceed max_tokens (16)")
    refused("min_tokens", -1, "an integer from 0")


# Stop strings, token ids, bias


def test_stop_strings():
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=["a"] * limits.MAX_STOP_STRINGS)
    assert SamplingParams(stop=["a" * limits.MAX_STOP_STRING_LENGTH])


@pytest.mark.parametrize(
    "value",
    [
        "",
        [""],
        ["a", ""],
        [5],
        [None],
        [["a"]],
        5,
        b"a",
        {"a": 1},
        {"a"},
        ["a"] * (limits.MAX_STOP_STRINGS + 1),
        "a" * (limits.MAX_STOP_STRING_LENGTH + 1),
        ["x" * 10**6, 5],
    ],
)
def test_malformed_stop_strings(value):
    refused("stop", value)


@pytest.mark.parametrize("name", ["stop_token_ids", "banned_token_ids", "allowed_token_ids"])
def test_token_ids(name):
    assert getattr(SamplingParams(**{name: [0, 5]}), name) == (0, 5)
    for value in (
        5,
        "5",
        b"5",
        {5},
        {5: 1},
        [-1],
        [2**31],
        [1.0],
        ["1"],
        [True],
        [None],
        [10**5000],
    ):
        refused(name, value)


def test_absent_lists():
    params = SamplingParams(
        stop_token_ids=None, banned_token_ids=None, allowed_token_ids=None, logit_bias=None
    )
    assert params == SamplingParams()
    refused("allowed_token_ids", [], "is empty")
    refused("stop_token_ids", [1] * (limits.MAX_STOP_TOKEN_IDS + 1), "at most")


def test_logit_bias():
    assert SamplingParams(logit_bias={"42": 1, 7: -100.0}).logit_bias == {42: 1.0, 7: -100.0}
    assert SamplingParams(logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIAS), 0.5))
    for value in (
        5,
        [],
        [[1, 2]],
        "x",
        {"-1": 1},
        {"1.0": 1},
        {"x": 1},
        {"": 1},
        {"²": 1},
        {"9" * 5000: 1},
        {str(2**31): 1},
        {True: 1},
        {1.0: 1},
        {None: 1},
        {1: "x"},
        {1: None},
        {1: True},
        {1: float("nan")},
        {1: 100.5},
        {1: float("-inf")},
        {1: 10**400},
        dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 0.5),
    ):
        refused("logit_bias", value)


def test_vocabulary():
    SamplingParams(
        stop_token_ids=[9], banned_token_ids=[9], allowed_token_ids=[8, 9], logit_bias={9: 1}
    ).check_vocabulary(10)
    for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
        with pytest.raises(
            RequestError, match=rf"^{name}: token id 10 is out of range: the vocabulary has 10"
        ):
            SamplingParams(**{name: [10]}).check_vocabulary(10)
    with pytest.raises(RequestError, match=r"^logit_bias: token id 10 is out of range"):
        SamplingParams(logit_bias={10: 1}).check_vocabulary(10)
    with pytest.raises(RequestError, match=r"^banned_token_ids: bans the whole vocabulary"):
        SamplingParams(banned_token_ids=range(10)).check_vocabulary(10)
    SamplingParams(banned_token_ids=[3] * 50).check_vocabulary(10)
    with pytest.raises(
        RequestError, match=r"^allowed_token_ids: every allowed token is also banned"
    ):
        SamplingParams(banned_token_ids=[3, 4], allowed_token_ids=[4, 4]).check_vocabulary(10)


# What follows from them


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        (
            {
                "temperature": 0.0,
                "top_k": 5,
                "top_p": 0.5,
                "min_p": 0.1,
                "seed": 1,
                "stop": "x",
                "logprobs": 3,
            },
            False,
        ),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {1: 1}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"banned_token_ids": [1]}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_needs_processors(fields, needed):
    assert SamplingParams(**fields).needs_processors is needed


@pytest.mark.parametrize(
    ("value", "shown"), [(1, "1"), (1.0, "1.0"), (0, "0"), ("", '""'), ("true", '"true"')]
)
def test_any_json_object_is_asked_for_with_true_alone(value, shown):
    words = f"structured_outputs: got json_object {shown}, allowed are true and false"
    refused("structured_outputs", {"json_object": value}, words)
    form = SamplingParams(structured_outputs={"json_object": True})
    assert dataclasses.replace(form) == form
    beside = {"json_object": False, "regex": "a", "json": None}
    assert SamplingParams(structured_outputs=beside).structured_outputs.kind == "regex"


def test_with_seed():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={"5": 1}, allowed_token_ids=[1])
    again = params.with_seed(7)
    assert again.seed == 7
    assert dataclasses.replace(again, seed=None) == params


def test_it_does_not_share_what_it_was_given():
    ids, bias = [1], {1: 2.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(2)
    bias[2] = 1.0
    assert params.stop_token_ids == (1,)
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(NAMES), ANY, max_size=4))
def test_any_values_are_accepted_or_refused(fields):
    try:
        params = SamplingParams(**fields)
    except RequestError as error:
        message = str(error)
    else:
        message = ""
        assert 1 <= params.n <= limits.MAX_N
        assert 0 <= params.min_tokens <= params.max_tokens
        assert params.temperature == 0 or 0.01 <= params.temperature <= limits.MAX_TEMPERATURE
        assert 0 < params.top_p <= 1
        assert all(isinstance(token, int) for token in params.logit_bias)
        assert SamplingParams(**{name: getattr(params, name) for name in NAMES}) == params
    assert "\n" not in message
    assert len(message) < 300
