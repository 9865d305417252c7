"""Guesses of what follows: where they are looked up, and which of them are kept."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from twinfer.bucketing import Table
from twinfer.serving.llm import LLM
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.demand import Demand
from twinfer.shared.drafts import Drafts, SpeculativeConfig, look_up
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.ngrams import MOST_BITS, NgramFilter
from twinfer.shared.page_groups import PageGroup
from twinfer.shared.request import Request
from twinfer.shared.request_table import RequestTable
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig

GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


@contextmanager
def guessing(look_up=mock.DEFAULT):
    """Guesses that are not looked up in texts."""
    anywhere = mock.patch.object(NgramFilter, "may_repeat", lambda _, rows, __: rows >= 0)
    with anywhere, mock.patch("twinfer.shared.scheduler.look_up", look_up) as looked_up:
        yield looked_up


def guesses(text, most=3, **config):
    """Guesses behind a text, whose characters are tokens."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    found = look_up(tokens, SpeculativeConfig(most, **config), most)
    assert found.dtype == np.int32
    return bytes(found.tolist()).decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcdXabcd", "Xab"),  # four of the last tokens
        ("abcdXcdYabcd", "Xcd"),  # four go before two that stood later
        ("abXcbYab", "Xcb"),
        ("abXabYab", "Yab"),  # the last place, where three follow
        ("abXYab", "XYa"),
        ("aaaaaaaa", "aaa"),  # not the last place, where one token follows
        ("aaa", "a"),
        ("abcab", "cab"),
        ("abcd", ""),
        ("Xb ab", ""),  # one token alone is too few
        ("b", ""),
        ("", ""),
    ],
)
def test_what_is_looked_up(text, expected):
    assert guesses(text) == expected


def test_how_many_of_the_last_tokens_are_looked_for():
    text = "abcdeX-bcdeY-cdeZ-abcde"
    for most, expected in ((5, "X-b"), (4, "Y-c"), (3, "Z-a")):
        assert guesses("e" + text, prompt_lookup_max=most, prompt_lookup_min=2) == expected
    assert guesses("abXcb", prompt_lookup_min=1) == "Xcb"
    assert guesses("abXcb", prompt_lookup_min=2) == ""
    assert guesses("abXcb", prompt_lookup_min=1, prompt_lookup_max=1) == "Xcb"
    assert guesses("xyab...yab", prompt_lookup_min=4) == ""
    assert guesses("xyab...xyab", prompt_lookup_min=4) == "..."


def looked_up_place_by_place(tokens, config, most):
    """As `look_up` says."""
    last, found = len(tokens) - 1, []
    for end in range(last):
        size = 0
        while size < min(end + 1, config.longest) and tokens[end - size] == tokens[last - size]:
            size += 1
        if size >= config.shortest:
            found.append((size, end))
    ends = [end for size, end in found if size == max(found)[0]]
    roomy = [end for end in ends if end + most <= last]
    first = (roomy[-1:] or ends[:1] or [last])[0] + 1
    return tokens[first : first + most]


@pytest.mark.parametrize("words", [1, 2, 3, 8, 40, 300])
def test_long_texts_of_few_words_and_of_many(words):
    rng = np.random.default_rng(words)
    for size in (1, 2, 3, 7, 60, 400):
        for low, high in ((1, 1), (1, 5), (2, 5), (4, 9)):
            config = SpeculativeConfig(4, prompt_lookup_min=low, prompt_lookup_max=high)
            tokens = rng.integers(0, words, size).astype(np.int32)
            expected = looked_up_place_by_place(tokens.tolist(), config, 4)
            assert look_up(tokens, config, 4).tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_ngram_that_stood_before_is_never_denied(size, monkeypatch):
    """Texts that grow by some tokens at a time, not all of them looked at in each step, in rows
    that others had before.
    """
    monkeypatch.setattr("twinfer.shared.ngrams.FEW", 1)
    rng = np.random.default_rng(size)
    table = RequestTable(4, 200, (PageGroup(4),))
    filters = NgramFilter(table, size)
    config = SpeculativeConfig(3, prompt_lookup_min=size, prompt_lookup_max=max(5, size))
    asked = wrong = right = 0
    for tenant in range(40):
        words, length = int(rng.choice([2, 9, 50_000])), int(rng.integers(1, 60))
        text = rng.integers(0, words, 200).astype(np.int32)
        params, ids = SamplingParams(max_tokens=140), text[:length]
        row = table.assign(Request(str(tenant), ids, params, seed=0), ids)
        while length < 200:
            table.tokens[row, :length] = text[:length]
            if rng.random() < 0.7:
                last = np.array([length - 1])
                (claimed,) = filters.may_repeat(np.array([row]), last).tolist()
                is_there = len(look_up(text[:length], config, 3)) > 0
                assert claimed or not is_there
                wrong, right = wrong + (claimed and not is_there), right + is_there
                asked += 1
            length += int(rng.integers(1, 5))
        table.release(row)
    assert right > 100
    assert wrong < asked / 20


def test_rows_of_one_step_have_sets_of_their_own():
    """One call for all, of texts of different lengths."""
    table, size = RequestTable(4, 64, (PageGroup(4),)), 2
    texts = [b"abcab", b"abcde-fgh", b"xaxbxcxax", b"aa"]
    for name, text in enumerate(texts):
        ids = np.frombuffer(text, np.uint8).astype(np.int32)
        table.assign(Request(str(name), ids, GREEDY, seed=0), ids)
    filters, rows = NgramFilter(table, size), np.array([2, 1, 0, 3])
    lasts = table.known[rows] - 1
    for _ in range(2):
        assert filters.may_repeat(rows, lasts).tolist() == [True, False, True, False]
    longer_than_any_text = NgramFilter(table, 100)
    assert not longer_than_any_text.may_repeat(rows, lasts).any()


def test_the_memory_of_ngrams_is_bounded():
    for length, bits in ((64, 10), (1000, 14), (16_384, 18), (1 << 20, 18)):
        filters = NgramFilter(RequestTable(2, length, (PageGroup(16),)), 2)
        assert filters._stood.nbytes == 2 << bits
        assert bits <= MOST_BITS


def test_a_request_has_no_more_than_it_may():
    tokens = np.array([5, 6, 7, 8, 5, 6], np.int32)
    config = SpeculativeConfig(3)
    assert look_up(tokens, config, 2).tolist() == [7, 8]
    assert look_up(tokens, config, 0).tolist() == []
    assert look_up(tokens, config, -1).tolist() == []


def test_which_guesses_are_kept():
    """Three requests: guesses 1, 2, 3; none; 4, 5."""
    drafts = Drafts(
        heads=np.array([0, 4, 5]),
        counts=np.array([4, 1, 3]),
        places=np.array([1, 2, 3, 6, 7]),
        tokens=np.array([1, 2, 3, 4, 5], np.int32),
    )

    def kept(*sampled):
        return drafts.kept(np.array(sampled)).tolist()

    assert kept(1, 2, 3, 9, 9, 4, 5, 9) == [4, 1, 3]
    assert kept(9, 2, 3, 9, 9, 9, 5, 9) == [1, 1, 1]
    assert kept(1, 9, 3, 9, 9, 4, 9, 9) == [2, 1, 2]
    assert kept(1, 2, 9, 9, 9, 9, 9, 9) == [3, 1, 1]
    columns = drafts.by_request(np.arange(8)).T.tolist()
    assert columns == [[0, 1, 2, 3], [4, 4, 4, 4], [5, 6, 7, 7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"num_speculative_tokens: is missing"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens: got 0, .* from 1 to 64"),
        ({"num_speculative_tokens": True}, r"num_speculative_tokens: got True"),
        ({"num_speculative_tokens": 3, "method": "eagle"}, r"method: got 'eagle', .* ngram"),
        (
            {"num_speculative_tokens": 3, "prompt_lookup_min": 9, "prompt_lookup_max": 5},
            r"got 9, .* prompt_lookup_max \(5",
        ),
        # As large as the default of the other one, but given.
        (
            {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 1},
            r"got 2, .* prompt_lookup_max \(1",
        ),
        ({"num_speculative_tokens": 3, "model": "x"}, r"unknown option 'model', got 'x'"),
        ({"num_speculative_token": 3}, r"did you mean 'num_speculative_tokens'\?"),
        (
            {"num_speculative_tokens": 3, "prompt_lookup_max": 2.5},
            r"prompt_lookup_max: got 2.5, .* from 1 to 64",
        ),
    ],
)
def test_what_cannot_be_had_is_named(options, message):
    with pytest.raises(ConfigError, match=f"speculative_config.*{message}"):
        EngineConfig(model="demo", speculative_config=options)


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({}, 2, 5),
        ({"prompt_lookup_max": 3}, 2, 3),
        ({"prompt_lookup_max": 1}, 1, 1),
        ({"prompt_lookup_min": 1}, 1, 5),
        ({"prompt_lookup_min": 9}, 9, 9),
        ({"prompt_lookup_max": None, "prompt_lookup_min": None}, 2, 5),
    ],
)
def test_a_limit_that_is_not_given_follows_the_other(given, least, most):
    config = EngineConfig(
        model="demo", speculative_config={"num_speculative_tokens": 3} | given
    ).speculative_config
    assert (config.shortest, config.longest) == (least, most)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs: got 3, allowed is at least 4 with 3 guesses"),
        ({"async_scheduling": True}, "async_scheduling: got True, and speculative_config"),
        ({"decode_steps": 2}, "decode_steps: got 2, and speculative_config"),
        ({"capture": "/tmp/x,step=1"}, "capture: keeps steps with speculative_config None"),
    ],
)
def test_what_does_not_go_with_guesses_is_refused(more, message):
    config = {"num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=message):
        LLM("demo", backend="torch", device="cpu", speculative_config=config, **more)


def test_guesses_have_small_programs_where_prompts_are_long():
    """Of one prompt, all mixed steps but its own are those with guesses."""
    config = EngineConfig(model="demo", backend="torch", speculative_config=SpeculativeConfig(3))
    folder = model_folder("demo")
    device, demand = DeviceInfo("cpu", "any", 1 << 34), Demand(requests=1, prompt_tokens=500)
    table = resolve(config, load_config(folder), device, demand)[0].table()
    assert [str(table.decide_single(n)) for n in (3, 8, 9)] == [
        "mixed[4x4]", "mixed[8x8]", "mixed[16x16]"
    ]  # fmt: skip
    assert table.decide(4, 4, 2).tokens == 16


def test_a_scheduler_guesses_one_step_at_a_time():
    with pytest.raises(ConfigError, match="drafts: need pipeline_depth 1 and decode_steps 1"):
        SchedulerConfig(4, 16, 16, 4, 16, drafts=SpeculativeConfig(3))


@pytest.mark.parametrize("count", [3, 4, 7])
def test_windows_leave_pages_behind_and_prefixes_are_registered(count):
    """Pages that were taken for guesses are there before decodes look for some."""
    groups, drafts = (PageGroup(4), PageGroup(4, window=8)), SpeculativeConfig(count)
    config = SchedulerConfig(
        8, 64, 512, 4, 400, pipeline_depth=1, groups=groups, drafts=drafts, watermark=0.0
    )
    scheduler, rng = Scheduler(config, Table((8,), (64,), 8)), np.random.default_rng(0)
    scheduler.add(Request("a", np.arange(6, dtype=np.int32), GREEDY, seed=0))
    with guessing(lambda _, __, most: np.full(most, 9)):
        for _ in range(12):
            step, table = scheduler.schedule(), scheduler.table
            (row,) = set(step.rows.tolist())
            assert table.num_pages[1, row] - table.dropped[1, row] <= 5
            assert table.computed[row] // 4 - table.registered[row] <= 2
            scheduler.update(step, np.where(rng.random(len(step.group)) < 0.6, 9, 8))
            scheduler.check_integrity()


def test_nothing_is_looked_up_where_no_place_is_left():
    config = SchedulerConfig(4, 64, 64, 4, 100, pipeline_depth=1, drafts=SpeculativeConfig(3))
    scheduler = Scheduler(config, Table((4,), (64,), 4))
    with guessing() as looked_up:
        looked_up.side_effect = lambda _, __, most: np.full(most, 9, np.int32)
        for count, calls in ((1, 1), (2, 2), (3, 0), (4, 0)):
            while len(scheduler.requests) < count:
                name = str(len(scheduler.requests))
                scheduler.add(Request(name, np.arange(9, dtype=np.int32), GREEDY, seed=0))
            for _ in range(2):  # prompts, decodes
                looked_up.reset_mock()
                step = scheduler.schedule()
                scheduler.update(step, np.full(len(step.group), 8))
            assert looked_up.call_count == calls


def test_a_text_in_which_nothing_repeats_is_not_looked_through():
    config = SchedulerConfig(9, 64, 64, 4, 100, pipeline_depth=1, drafts=SpeculativeConfig(4))
    scheduler = Scheduler(config, Table((9,), (64,), 9))
    for name, prompt in enumerate([[1, 2, 3, 4, 5]] * 3 + [[1, 2, 7, 3, 1, 2]]):
        scheduler.add(Request(str(name), np.array(prompt, np.int32), GREEDY, seed=0))
    scheduler.update(scheduler.schedule(), np.array([8, 8, 8, 7, *[0] * 5]))
    with mock.patch("twinfer.shared.scheduler.look_up", wraps=look_up) as looked_up:
        step = scheduler.schedule()
    assert [call.args[0].tolist() for call in looked_up.call_args_list] == [[1, 2, 7, 3, 1, 2, 7]]
    assert step.drafts.tokens.tolist() == [3, 1, 2, 7]


@pytest.mark.parametrize(("found", "guessed"), [((2, 0, 0), 0), ((2, 1, 0), 3)])
def test_fewer_guesses_than_requests_are_not_worth_a_step_of_all(found, guessed):
    config = SchedulerConfig(9, 64, 64, 4, 100, pipeline_depth=1, drafts=SpeculativeConfig(4))
    scheduler = Scheduler(config, Table((9,), (64,), 9))
    for name in range(3):
        scheduler.add(Request(str(name), np.arange(6, dtype=np.int32), GREEDY, seed=0))
    scheduler.update(scheduler.schedule(), np.full(9, 7))
    takes = iter(found)
    with guessing() as looked_up:
        looked_up.side_effect = lambda _, __, most: np.full(min(most, next(takes)), 9, np.int32)
        step = scheduler.schedule()
    assert len(step.group) == 3 + guessed
    assert (step.drafts is None) == (guessed == 0)


def test_places_are_dealt_out_in_equal_parts():
    """Eight places: what one request does not take is for those behind it."""
    config = SchedulerConfig(12, 64, 64, 4, 100, pipeline_depth=1, drafts=SpeculativeConfig(5))
    scheduler = Scheduler(config, Table((12,), (64,), 12))
    for name in range(4):
        scheduler.add(Request(str(name), np.arange(6, dtype=np.int32), GREEDY, seed=0))
    scheduler.update(scheduler.schedule(), np.full(12, 7))
    takes = iter((9, 0, 9, 9))
    with guessing() as looked_up:
        looked_up.side_effect = lambda _, __, most: np.full(min(most, next(takes)), 9, np.int32)
        step = scheduler.schedule()
    assert (step.drafts.counts - 1).tolist() == [2, 0, 3, 3]
    assert len(step.group) == 12


@pytest.mark.parametrize(
    ("other", "guessed"),
    [
        ({}, 3),
        ({"min_tokens": 30}, 3),
        ({"banned_token_ids": (3,)}, 0),
        ({"repetition_penalty": 1.5}, 0),
        ({"logprobs": 1}, 0),
    ],
)
def test_what_one_request_asks_for_takes_no_guesses_from_another(other, guessed):
    """Masks of `min_tokens` are each entry's own; what reads a history has none to read."""
    config = SchedulerConfig(12, 64, 64, 4, 100, pipeline_depth=1, drafts=SpeculativeConfig(3))
    scheduler = Scheduler(config, Table((12,), (64,), 12))
    for name, more in (("plain", {}), ("other", other)):
        prompt, params = np.arange(6, dtype=np.int32), replace(GREEDY, **more)
        scheduler.add(Request(name, prompt, params, seed=0, stop_ids=(5,)))
    scheduler.update(scheduler.schedule(), np.full(12, 7))
    with guessing(lambda _, __, most: np.full(most, 9)):
        step = scheduler.schedule()
    assert step.drafts is not None
    assert (step.drafts.counts - 1).tolist() == [3, guessed]


def test_a_repeated_text_takes_fewer_steps():
    """The tokens are those of no guesses, and the numbers say what was guessed."""
    prompts, steps, texts = ["import os\nimport sys\nimport", "def f(x):\n    return x\n"], [], []
    for config in (None, {"num_speculative_tokens": 4}):
        with LLM(
            "demo", backend="torch", device="cpu", dtype="float32", max_num_seqs=16,
            progress=False, speculative_config=config,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, GREEDY, progress=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
            steps.append(llm.engine._step_id)
            metrics = llm.engine.metrics()
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] / 2
    assert 0 < metrics.drafts < steps[1] * 2
    assert metrics.drafts < metrics.accepted_tokens <= metrics.draft_tokens
