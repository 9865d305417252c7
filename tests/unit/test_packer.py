"""The packer against a slow twin that fills every field of a `StepInput` request by request, in
plain Python.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from twinfer.bucketing import Table, decode_ladder, mixed_ladder
from twinfer.shared import packer
from twinfer.shared.errors import InternalError
from twinfer.shared.packer import pack
from twinfer.shared.request import Request
from twinfer.shared.request_table import ScheduledStep
from twinfer.shared.sampling_encoding import (
    FAR,
    ONE,
    encode_bias,
    encode_mask,
    encode_processors,
    encode_sampling,
)
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig
from twinfer.shared.step import (
    PROCESSING,
    SAMPLERS,
    TABLES,
    Sampler,
    StepInput,
    StepShape,
    batch_layout,
    mask_words,
    processor_layout,
    sampling_layout,
    tables_of,
    with_all_entries,
)

VOCABULARY = 70
PAGE = 4
ROWS = 5
MODEL_LEN = 30
SHAPE = StepShape(
    pages_per_request=8, max_rows=ROWS, max_model_len=MODEL_LEN, vocab_size=VOCABULARY
)


def make_scheduler(**options: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 16,
        "max_model_len": MODEL_LEN,
        "page_size": PAGE,
        "num_pages": 40,
    }
    return Scheduler(
        SchedulerConfig(**values | options),
        Table(decode_ladder(ROWS, 2), mixed_ladder(16, 4), ROWS + 1),
    )


def make_request(name: str, length: int, stop_ids: tuple[int, ...] = (), **options: Any) -> Request:
    prompt = np.array(
        [(len(name) * 31 + index * 7) % VOCABULARY for index in range(length)], np.int32
    )
    return Request(
        name,
        prompt,
        SamplingParams(**options),
        seed=-(len(name) << 40) + int(prompt[-1]),
        stop_ids=stop_ids,
    )


def known_tokens(request: Request) -> list[int]:
    return request.prompt.tolist() + request.output


def slow_batch(step: ScheduledStep, pages: list[list[int]]) -> dict[str, list[Any]]:
    """The batch as lists. `pages` are the pages of each request, in order."""
    tokens, requests = step.descriptor.tokens, step.descriptor.requests
    batch: dict[str, list[Any]] = {
        "token_ids": [],
        "positions": [],
        "slots": [],
        "query_start": [0],
    }
    batch |= {name: [] for name in ("kv_lens", "rows", "sample_index")}
    singles = 0
    for i, request in enumerate(step.requests):
        known = known_tokens(request)
        start, end = int(step.starts[i]), int(step.ends[i])
        for position in range(start, end):
            batch["token_ids"].append(known[position] if position < len(known) else -1)
            batch["positions"].append(position)
            batch["slots"].append(pages[i][position // PAGE] * PAGE + position % PAGE)
        batch["query_start"].append(len(batch["token_ids"]))
        batch["kv_lens"].append(end)
        batch["rows"].append(request.row)
        batch["sample_index"].append(len(batch["token_ids"]) - 1)
        assert (end - start == 1) <= (singles == i), (
            "a request with one token stands behind one with more"
        )
        singles += end - start == 1
    batch["counts"] = [singles, len(step.requests)]
    count = len(batch["token_ids"])
    empty = {
        "token_ids": 0,
        "positions": 0,
        "slots": -1,
        "query_start": count,
        "kv_lens": 0,
        "rows": ROWS,
    }
    empty |= {"sample_index": 0}
    for name, value in empty.items():
        size = (
            tokens
            if name in ("token_ids", "positions", "slots")
            else requests + (name == "query_start")
        )
        batch[name] += [value] * (size - len(batch[name]))
    return batch


def slow_page_table(step: ScheduledStep, pages: list[list[int]]) -> list[list[int]]:
    lists = pages + [[]] * (step.descriptor.requests - len(pages))
    return [list_ + [0] * (SHAPE.pages_per_request - len(list_)) for list_ in lists]


def slow_sampling(step: ScheduledStep) -> dict[str, list[float]]:
    """The sampling buffer as lists; padding is a greedy request that nobody waits for."""
    sampling: dict[str, list[float]] = {name: [] for name in sampling_layout(1).fields}
    for i in range(step.descriptor.requests):
        if i < len(step.requests):
            request = step.requests[i]
            fields = encode_sampling(request.params, request.seed)
            fields["sample_rows"] = request.row if step.samples[i] else ROWS
            fields["position"] = int(step.ends[i]) if step.samples[i] else 0
        else:
            fields = encode_sampling(SamplingParams(temperature=0.0), 0) | {
                "sample_rows": ROWS,
                "position": 0,
            }
        for name, value in fields.items():
            sampling[name].append(value)
    return sampling


PENALTIES = ("presence", "frequency")


def slow_sampler(step: ScheduledStep) -> str:
    needed = {"greedy"}
    for i, request in enumerate(step.requests):
        params = request.params
        fields = encode_sampling(params, request.seed)
        masks_stops = (
            int(step.ends[i]) - request.num_prompt_tokens < params.min_tokens and request.stop_ids
        )
        if not step.samples[i]:
            continue
        if (
            params.logit_bias
            or params.repetition_penalty != 1.0
            or any(encode_processors(params)[name] for name in PENALTIES)
        ):
            needed.add("processed")
        elif replace(params, min_tokens=0).needs_processors or masks_stops:
            needed.add("masked")
        elif params.temperature == 0.0:
            needed.add("greedy")
        elif fields["top_k"] != 0 or fields["top_p"] != ONE or fields["min_p"] != FAR:
            needed.add("filtered")
        else:
            needed.add("random")
    return max(needed, key=SAMPLERS.index)


def slow_processors(step: ScheduledStep, sampler: Sampler) -> dict[str, list[Any]]:
    """The processor buffer as lists."""
    processors: dict[str, list[Any]] = {name: [] for name in processor_layout(1, SHAPE).fields}
    masks: list[Any] = []
    biases: list[Any] = []
    for i in range(step.descriptor.requests):
        request = step.requests[i] if i < len(step.requests) else None
        params = SamplingParams() if request is None else request.params
        pending = request is not None and step.starts[i] == len(known_tokens(request))
        processors["pending"].append(int(pending))
        for name, value in encode_processors(params).items():
            processors[name].append(value)
        remembers = request is not None and has_history(request) and sampler == "processed"
        processors["history_row"].append(request.row if request is not None and remembers else -1)
        processors["prompt_len"].append(0 if request is None else request.num_prompt_tokens)
        processors["rows"].append(ROWS if request is None else request.row)
        ids, values = encode_bias(params)
        biased = ids and sampler == "processed"
        processors["bias_row"].append(len(biases) if biased else -1)
        if biased:
            biases.append((ids + [-1] * (304 - len(ids)), values + [0] * (304 - len(values))))
        words = encode_mask(params, VOCABULARY)
        mask = [-1] * mask_words(VOCABULARY) if words is None else words.tolist()
        if (
            request is not None
            and int(step.ends[i]) - request.num_prompt_tokens < params.min_tokens
        ):
            for token in request.stop_ids:
                if token < VOCABULARY:
                    bits = (mask[token // 32] & 0xFFFFFFFF) & ~(1 << token % 32)
                    mask[token // 32] = bits - (1 << 32 if bits >> 31 else 0)
        bans = (
            request is not None
            and request.stop_ids
            and int(step.ends[i]) - request.num_prompt_tokens < params.min_tokens
        )
        changed = request is not None and (words is not None or bool(bans))
        processors["mask_row"].append(len(masks) if changed else -1)
        if changed:
            masks.append(mask)
    slots = 304 if sampler == "processed" else 0
    for name, entries, width in (
        ("bias_ids", [ids for ids, _ in biases], slots),
        ("bias", [values for _, values in biases], slots),
        ("masks", masks, mask_words(VOCABULARY)),
    ):
        processors[name] = entries + [[-1] * width] * (step.descriptor.requests - len(entries))
    return processors


def has_history(request: Request) -> bool:
    return encode_processors(request.params) != encode_processors(SamplingParams())


def slow_histories(step: ScheduledStep) -> list[list[int]]:
    """The histories of the requests that have one."""
    return [known_tokens(request) for request in step.requests if has_history(request)]


def take_new_tokens(packed: StepInput, histories: list[list[int]]) -> None:
    """What a device does with the difference of histories, which are one for each row. Only what is
    new may come.
    """
    new = packed.new_tokens
    assert new is not None
    tokens, rows = new.tokens.tolist(), packed.field("rows").tolist()
    for index, first, end in zip(
        new.indices.tolist(), new.firsts.tolist(), new.ends.tolist(), strict=True
    ):
        history = histories[rows[index]]
        assert first in (0, len(history)), "a history goes on elsewhere than at its end"
        assert end > first, "a request is named that got no token"
        history[first:] = tokens[: end - first]
        del tokens[: end - first]
    assert not tokens
    dtypes = {x.dtype for x in (new.indices, new.firsts, new.ends, new.tokens)}
    assert dtypes == {np.dtype(np.int32)}


def slow_targets(step: ScheduledStep) -> list[int] | None:
    targets: list[int] = []
    for i, request in enumerate(step.requests):
        for position in range(int(step.starts[i]), int(step.ends[i])):
            wanted = (
                request.params.prompt_logprobs is not None
                and position + 1 < request.num_prompt_tokens
            )
            targets.append(int(request.prompt[position + 1]) if wanted else -1)
    if all(target == -1 for target in targets):
        return None
    return targets + [-1] * (step.descriptor.tokens - len(targets))


def check(
    turn: int,
    step: ScheduledStep,
    scheduler: Scheduler,
    tables: dict[int, dict[int, int]],
    histories: list[list[int]],
) -> None:
    """Every field is the slow twin's, of the step with its page table too; `tables` are made of
    new pages alone, `histories` of new tokens.
    """
    packed = pack(step, scheduler.table, SHAPE, turn)
    alone = pack(step, scheduler.table, SHAPE, turn, with_page_table=True)
    requests = step.descriptor.requests
    pages = [scheduler.table.pages_of(request.row) for request in step.requests]
    assert (packed.page_table, alone.new_pages) == (None, None)
    assert alone.field("page_table").tolist() == slow_page_table(step, pages)
    assert np.array_equal(alone.batch, packed.batch)
    with pytest.raises(InternalError, match="not the page table"):
        packed.field("page_table")
    new = packed.new_pages
    assert new is not None
    for row, column, page in zip(
        new.rows.tolist(), new.columns.tolist(), new.pages.tolist(), strict=True
    ):
        if column == 0:
            tables[row] = {}
        tables[row][column] = page
    for request, list_ in zip(step.requests, pages, strict=True):
        assert tables[request.row] == dict(enumerate(list_))
    compare(batch_layout(step.descriptor, SHAPE).views(packed.batch), slow_batch(step, pages))
    compare(sampling_layout(requests).views(packed.sampling), slow_sampling(step))
    assert packed.sampler == slow_sampler(step)
    assert (packed.processors is not None) == (packed.sampler in PROCESSING)
    if packed.processors is not None:
        layout = processor_layout(requests, SHAPE, packed.sampler)
        given = layout.views(with_all_entries(layout, packed.processors))
        compare(given, slow_processors(step, packed.sampler))
        for name, entries in tables_of(layout, packed.processors).items():
            needed = (given[TABLES[name]] >= 0).sum()
            assert len(entries) == needed, f"{name} that nobody needs travel"
    assert alone.new_tokens is None
    assert packed.histories is None
    assert (alone.histories is None) == (packed.new_tokens is None)
    if alone.histories is not None:
        given = [[token for token in row if token >= 0] for row in alone.histories.tolist()]
        assert given == slow_histories(step)
        take_new_tokens(packed, histories)
        kept = [histories[request.row] for request in step.requests if has_history(request)]
        assert kept == given
    assert packed.logprobs == any(
        request.params.logprobs is not None and sampled
        for request, sampled in zip(step.requests, step.samples.tolist(), strict=True)
    )
    targets = slow_targets(step)
    assert (packed.prompt_targets is None) == (targets is None)
    if packed.prompt_targets is not None:
        assert packed.prompt_targets.dtype == np.int32
        assert packed.prompt_targets.tolist() == targets


def compare(fast: dict[str, np.ndarray], slow: dict[str, list[Any]]) -> None:
    assert set(fast) == set(slow)
    for name, values in fast.items():
        np.testing.assert_array_equal(values, np.array(slow[name], values.dtype), err_msg=name)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "logprobs": 1},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9999999, "min_tokens": 3},
    {"temperature": 0.5, "top_k": 9, "min_p": 0.1},
    {"prompt_logprobs": 0},
    {"temperature": 0.3, "prompt_logprobs": 4, "logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 2},
    {"logit_bias": {3: -1.5, 69: 100.0}, "banned_token_ids": (1, 31, 32, 69)},
    {"allowed_token_ids": (5, 6, 31, 63), "min_tokens": 2},
    {"min_tokens": 3, "temperature": 0.0},
]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 40))]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_random_steps_are_packed_as_by_the_slow_twin(seed: int, depth: int) -> None:
    dice = random.Random(seed)
    # Some seeds see few kinds of requests, so that the cheap samplers are taken too; some run short
    # of pages.
    options = dice.sample(OPTIONS, dice.choice([1, 2, len(OPTIONS)]))
    scheduler = make_scheduler(pipeline_depth=depth, num_pages=dice.choice([9, 40]))
    in_flight: deque[ScheduledStep] = deque()
    tables: dict[int, dict[int, int]] = {}
    histories: list[list[int]] = [[] for _ in range(ROWS)]
    for turn in range(60):
        if dice.random() < 0.4 and turn < 40:
            stop_ids = dice.choice([(), (2, 31, 63), (500, *range(40, 50))])
            length, tokens = dice.randrange(1, MODEL_LEN - 1), dice.randrange(3, 12)
            request = make_request(
                f"r{turn}", length, stop_ids, max_tokens=tokens, **dice.choice(options)
            )
            scheduler.add(request)
        step = scheduler.schedule()
        if step is not None:
            check(turn, step, scheduler, tables, histories)
            in_flight.append(step)
        if in_flight and (step is None or len(in_flight) == depth):
            oldest = in_flight.popleft()
            tokens = [dice.choice([1, 2, 3, 31, 69]) for _ in range(oldest.descriptor.requests)]
            scheduler.update(oldest, np.array(tokens, np.int32))
        if dice.random() < 0.05 and scheduler.requests:
            scheduler.abort(dice.choice(list(scheduler.requests)))
        scheduler.check_integrity()


def test_a_token_that_is_not_read_yet_is_left_to_the_device() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, repetition_penalty=1.5))
    first = scheduler.schedule()
    assert first is not None
    packed = pack(first, scheduler.table, SHAPE, 1)
    assert packed.field("token_ids")[:6].tolist() == scheduler.requests["a"].prompt.tolist()
    second = scheduler.schedule()
    assert second is not None
    packed = pack(second, scheduler.table, SHAPE, 2)
    assert (packed.descriptor.kind, packed.step_id) == ("decode", 2)
    assert packed.field("token_ids").tolist() == [-1, 0]
    assert packed.field("slots").tolist()[1] == -1
    assert packed.processors is not None
    layout = processor_layout(2, SHAPE)
    assert packed.new_tokens is not None
    assert (packed.new_tokens.start, len(packed.new_tokens)) == (6, 0)
    assert layout.view(packed.processors, "pending").tolist() == [1, 0]
    scheduler.update(first, np.array([33], np.int32))
    scheduler.update(second, np.array([34], np.int32))
    third = scheduler.schedule()
    assert third is not None
    packed = pack(third, scheduler.table, SHAPE, 3)
    assert packed.field("token_ids").tolist() == [34, 0]
    assert packed.new_tokens is not None
    assert (packed.new_tokens.firsts.tolist(), packed.new_tokens.tokens.tolist()) == ([6], [33, 34])


def test_min_tokens_take_the_masked_sampler_only_while_they_mask() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, stop_ids=(9,), temperature=0.0, min_tokens=2, max_tokens=4))
    samplers = []
    while (step := scheduler.schedule()) is not None:
        samplers.append(pack(step, scheduler.table, SHAPE, 0).sampler)
        scheduler.update(step, np.array([1], np.int32))
    assert samplers == ["masked", "masked", "greedy", "greedy"]


def test_only_requests_that_sample_choose_the_sampler() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("plain", 10, temperature=0.0))
    scheduler.add(make_request("long", 20, repetition_penalty=2.0, logprobs=1))
    for expected in (("greedy", False), ("processed", True)):
        step = scheduler.schedule()
        assert step is not None
        packed = pack(step, scheduler.table, SHAPE, 0)
        assert (packed.sampler, packed.logprobs) == expected


def test_no_buffer_is_shared_between_steps() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, repetition_penalty=1.5))
    buffers = []
    for step_id in range(2):
        step = scheduler.schedule()
        assert step is not None
        packed = pack(step, scheduler.table, SHAPE, step_id)
        buffers.append((packed.batch, packed.sampling))
    for first, second in zip(*buffers, strict=True):
        assert not np.shares_memory(first, second)
        assert {first.dtype, second.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.5},
        {"logit_bias": {3: -1.5}},
        {"banned_token_ids": (4,)},
        {"allowed_token_ids": (5, 6), "min_tokens": 20},
    ],
)
def test_nothing_is_rebuilt_for_requests_that_did_not_change(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the same requests share their processors, and send each token of a history once."""
    built = []
    build = packer._with_entries
    monkeypatch.setattr(
        packer, "_with_entries", lambda *args: built.append(args[0]) or build(*args)
    )
    scheduler = make_scheduler()
    scheduler.add(make_request("plain", 3, max_tokens=26))
    scheduler.add(make_request("other", 3, (9,), max_tokens=26, **options))
    in_flight: deque[ScheduledStep] = deque()
    shared, counts = [], []
    for turn in range(18):
        step = scheduler.schedule()
        assert step is not None
        packed = pack(step, scheduler.table, SHAPE, turn)
        assert packed.processors is not None
        shared.append(packed.processors)
        counts.append(0 if packed.new_tokens is None else len(packed.new_tokens))
        in_flight.append(step)
        if len(in_flight) == 2:
            scheduler.update(in_flight.popleft(), np.array([1, 2], np.int32))
    # The prompts, and the first step whose tokens were not read back.
    assert len(built) == 2
    assert all(processors is shared[-1] for processors in shared[1:])
    assert not shared[-1].flags.writeable
    penalised = "presence_penalty" in options
    assert counts == ([3, 0] + [1] * 16 if penalised else [0] * 18)


def test_processors_are_built_again_once_a_ban_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, (9,), min_tokens=4, max_tokens=20, presence_penalty=0.5))
    rows = []
    for turn in range(7):
        step = scheduler.schedule()
        assert step is not None
        packed = pack(step, scheduler.table, SHAPE, turn)
        assert packed.processors is not None
        layout = processor_layout(packed.descriptor.requests, SHAPE, packed.sampler)
        rows.append(int(layout.view(packed.processors, "mask_row")[0]))
        scheduler.update(step, np.array([1], np.int32))
    assert rows == [0, 0, 0, 0, -1, -1, -1]


def test_a_step_cannot_be_packed_after_its_request_has_left() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6))
    step = scheduler.schedule()
    assert step is not None
    scheduler.abort("a")
    with pytest.raises(InternalError, match="packed too late"):
        pack(step, scheduler.table, SHAPE, 0)


@pytest.mark.parametrize(
    "change", [{"max_rows": 6}, {"max_model_len": 31}, {"pages_per_request": 7}]
)
def test_a_table_of_another_shape_is_refused(change: dict[str, int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(InternalError, match="is not for StepShape"):
        pack(step, scheduler.table, replace(SHAPE, **change), 0)
