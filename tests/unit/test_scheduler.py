"""The scheduler's rules, one by one. A step's tokens are made up by the test: nothing is
computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twinfer.bucketing import Table, decode_ladder, mixed_ladder
from twinfer.shared.errors import ConfigError, InternalError, OutsideTable, RequestError
from twinfer.shared.page_groups import PageGroup
from twinfer.shared.request import FinishReason, Request, RequestState, WaitingQueue
from twinfer.shared.request_table import Loop, RequestTable, ScheduledStep, StepEvents
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig

PAGE = 4


def make_scheduler(**options: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
        "page_size": PAGE,
        "num_pages": 32,
        "watermark": 0.0,
    }
    config = SchedulerConfig(**values | options)
    programs = Table(
        decode_ladder(config.max_num_seqs),
        mixed_ladder(config.max_num_batched_tokens),
        config.max_num_seqs,
    )
    return Scheduler(config, programs)


def make_request(
    name: str, prompt: int | list[int], max_tokens: int = 8, **options: Any
) -> Request:
    """A request; a number stands for a prompt of that length that no other request shares."""
    if isinstance(prompt, int):
        prompt = [1000 + sum(name.encode()) * 100 + index for index in range(prompt)]
    fields = {
        key: options.pop(key) for key in ("stop_ids", "priority", "cache_salt") if key in options
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)
    return Request(name, np.array(prompt, np.int32), params, seed=0, **fields)


def add(
    scheduler: Scheduler, name: str, prompt: int | list[int], max_tokens: int = 8, **options: Any
) -> Request:
    request = make_request(name, prompt, max_tokens, **options)
    scheduler.add(request)
    return request


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    scheduler.check_integrity()
    assert step is not None
    return step


def read(scheduler: Scheduler, step: ScheduledStep, token: int = 7) -> StepEvents:
    events = scheduler.update(step, np.full(len(step.rows), token, np.int32))
    scheduler.check_integrity()
    return events


def turn(scheduler: Scheduler, token: int = 7) -> ScheduledStep:
    """One step, scheduled and read."""
    step = schedule(scheduler)
    read(scheduler, step, token)
    return step


def parts(step: ScheduledStep) -> dict[str, tuple[int, int]]:
    """Which positions of which request a step computes."""
    return {
        request.request_id: (start, end)
        for request, start, end in zip(
            step.requests, step.starts.tolist(), step.ends.tolist(), strict=True
        )
    }


class TestAdmission:
    def test_a_request_runs_from_prompt_to_length(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 6, max_tokens=3)
        assert (request.max_total, request.state) == (9, RequestState.WAITING)
        assert parts(turn(scheduler)) == {"a": (0, 6)}
        assert (request.state, request.output) == (RequestState.RUNNING, [7])
        assert parts(turn(scheduler, 8)) == {"a": (6, 7)}
        assert parts(turn(scheduler, 9)) == {"a": (7, 8)}
        assert (request.state, request.finish_reason) == (
            RequestState.FINISHED,
            FinishReason.LENGTH,
        )
        assert request.output == [7, 8, 9]
        assert scheduler.schedule() is None
        assert not scheduler.has_work
        assert scheduler.kv.available == 32

    @pytest.mark.parametrize(
        ("prompt", "options", "field", "message"),
        [
            ([], {}, "prompt", "got 0 tokens, allowed is at least 1"),
            (32, {}, "prompt", "got 32 tokens, allowed is at most 31"),
            ([5, -1], {}, "prompt", "got token ids -1 to 5, allowed are 0 to"),
            (4, {"priority": 2**31}, "priority", "allowed is -2147483647 to 2147483647"),
            (
                4,
                {"min_tokens": 2, "allowed_token_ids": [3], "stop_ids": (3,)},
                "min_tokens",
                "each allowed token id",
            ),
        ],
    )
    def test_what_can_never_run_is_refused(
        self, prompt: int | list[int], options: dict[str, Any], field: str, message: str
    ) -> None:
        scheduler = make_scheduler()
        with pytest.raises(RequestError, match=message) as caught:
            add(scheduler, "a", prompt, **options)
        assert caught.value.field == field
        assert not scheduler.has_work

    def test_a_prompt_that_is_no_list_of_ids_is_refused(self) -> None:
        for prompt in (np.ones(3), np.ones((2, 2), np.int32)):
            with pytest.raises(
                RequestError, match=r"prompt: got .* allowed is a list of token ids"
            ):
                make_scheduler().add(Request("a", prompt, SamplingParams(), seed=0))

    def test_a_prompt_that_the_cache_can_never_hold_is_refused(self) -> None:
        scheduler = make_scheduler(num_pages=4)
        with pytest.raises(RequestError, match="prompt: got 16 tokens, allowed is at most 15"):
            add(scheduler, "a", 16)

    @pytest.mark.parametrize("max_tokens", [8, 9, 100, 2**31 - 2, 2**31 - 1, None])
    def test_the_cache_cuts_the_output(self, max_tokens: int | None) -> None:
        """A request that filled the cache and went on would be preempted for ever."""
        scheduler = make_scheduler(num_pages=4)
        request = add(scheduler, "a", 8, max_tokens=max_tokens)
        while scheduler.has_work:
            turn(scheduler)
        assert (len(request.output), request.finish_reason) == (8, FinishReason.LENGTH)

    def test_max_model_len_cuts_the_output(self) -> None:
        scheduler = make_scheduler(max_model_len=8)
        request = add(scheduler, "a", 6, max_tokens=100)
        while scheduler.has_work:
            turn(scheduler)
        assert (len(request.output), request.finish_reason) == (2, FinishReason.LENGTH)

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 4)
        with pytest.raises(RequestError, match="request_id: got 'a'"):
            add(scheduler, "a", 4)
        scheduler.abort("a")
        add(scheduler, "a", 4)

    def test_a_request_is_added_once(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4)
        scheduler.abort("a")
        with pytest.raises(InternalError, match="request a was prepared before"):
            scheduler.add(request)


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_pages": 0}, "num_pages: got 0, allowed is at least 1"),
            (
                {"max_num_seqs": 64},
                r"max_num_batched_tokens: got 32, allowed is at least 64 \(max_num_seqs\)",
            ),
            (
                {"enable_chunked_prefill": False, "max_model_len": 40},
                "at least 40 .max_model_len without chunked",
            ),
            ({"policy": "lifo"}, "policy: got 'lifo', allowed are 'fcfs' and 'priority'"),
            ({"priority_window": 0}, "priority_window: got 0"),
            ({"pipeline_depth": 3}, "pipeline_depth: got 3, allowed are 1 and 2"),
            ({"watermark": 1.0}, "watermark: got 1.0"),
        ],
    )
    def test_contradictions_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make_scheduler(**options)

    def test_programs_must_serve_all_steps(self) -> None:
        config = make_scheduler().config
        with pytest.raises(
            ConfigError, match="max_num_batched_tokens: got 32, the largest program is for 16"
        ):
            Scheduler(config, Table((4,), (16,), 4))
        with pytest.raises(ConfigError, match="max_num_seqs: got 4, programs are for 3"):
            Scheduler(config, Table((4,), (32,), 3))

    def test_a_step_without_a_program_is_an_internal_error(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 4)
        scheduler.programs = Table((), (), 4)
        with pytest.raises(OutsideTable, match="no program for 4 tokens of 1 requests"):
            scheduler.schedule()


class TestBatching:
    def test_decodes_go_first_then_prompts_under_way_then_waiting_ones(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        add(scheduler, "a", 4)
        add(scheduler, "b", 12)
        add(scheduler, "c", 3)
        assert parts(turn(scheduler)) == {"a": (0, 4), "b": (0, 6)}
        assert parts(turn(scheduler)) == {"a": (4, 5), "b": (6, 12), "c": (0, 3)}
        assert parts(turn(scheduler)) == {"a": (5, 6), "b": (12, 13), "c": (3, 4)}

    def test_requests_with_one_token_stand_first(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        add(scheduler, "a", 2)
        add(scheduler, "b", 3)
        add(scheduler, "c", 1)
        add(scheduler, "d", 5)
        step = schedule(scheduler)
        assert list(parts(step).items()) == [
            ("c", (0, 1)),
            ("a", (0, 2)),
            ("b", (0, 3)),
            ("d", (0, 2)),
        ]
        assert step.num_single == 1
        assert step.samples.tolist() == [True, True, True, False]
        assert (step.num_tokens, step.decode_only) == (8, False)

    def test_a_prompt_goes_whole_or_waits_without_chunked_prefill(self) -> None:
        scheduler = make_scheduler(enable_chunked_prefill=False)
        add(scheduler, "a", 20)
        add(scheduler, "b", 20)
        add(scheduler, "c", 2)
        # c would fit beside a, but b comes before it.
        assert parts(turn(scheduler)) == {"a": (0, 20)}
        assert parts(turn(scheduler)) == {"a": (20, 21), "b": (0, 20), "c": (0, 2)}

    def test_no_more_requests_run_than_there_are_rows(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for name in "abc":
            add(scheduler, name, 2, max_tokens=2)
        assert set(parts(turn(scheduler))) == {"a", "b"}
        assert set(parts(turn(scheduler))) == {"a", "b"}
        assert set(parts(turn(scheduler))) == {"c"}

    def test_the_head_of_the_queue_is_not_overtaken_when_pages_are_short(self) -> None:
        scheduler = make_scheduler(num_pages=8)
        add(scheduler, "a", 20)
        add(scheduler, "big", 16)
        add(scheduler, "small", 2)
        assert set(parts(turn(scheduler))) == {"a"}
        assert set(parts(turn(scheduler))) == {"a"}
        scheduler.abort("a")
        assert set(parts(turn(scheduler))) == {"big", "small"}

    def test_a_head_that_does_not_fit_blocks_the_queue_only_while_it_is_there(self) -> None:
        scheduler = make_scheduler(num_pages=8)
        add(scheduler, "a", 20)
        turn(scheduler)
        add(scheduler, "big", 16)
        add(scheduler, "small", 2)
        assert set(parts(turn(scheduler))) == {"a"}
        scheduler.abort("big")
        assert set(parts(turn(scheduler))) == {"a", "small"}

    def test_the_watermark_keeps_pages_free_unless_nothing_runs(self) -> None:
        scheduler = make_scheduler(num_pages=8, watermark=0.5)
        add(scheduler, "a", 18)
        add(scheduler, "b", 2)
        assert set(parts(turn(scheduler))) == {"a"}
        scheduler.abort("a")
        assert set(parts(turn(scheduler))) == {"b"}

    def test_priority_goes_first_but_ages(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1, policy="priority", priority_window=3)
        add(scheduler, "first", 2, max_tokens=1, priority=1)
        for index in range(6):
            add(scheduler, f"p{index}", 2, max_tokens=1)
        order = []
        while scheduler.has_work:
            order += list(parts(turn(scheduler)))
        # `first` has the key 3, as p2 has, and came earlier.
        assert order == ["p0", "p1", "first", "p2", "p3", "p4", "p5"]

    def test_fcfs_does_not_look_at_priority(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        add(scheduler, "a", 2, priority=5)
        add(scheduler, "b", 2, priority=-5)
        assert set(parts(schedule(scheduler))) == {"a"}

    def test_the_padding_account_counts_each_step(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 17)
        turn(scheduler)
        turn(scheduler)
        assert scheduler.padding.padded == {"decode": 3, "mixed": 15}
        assert scheduler.metrics().padded_share == 18 / 36


class TestPipelining:
    def test_a_step_is_scheduled_before_the_one_before_it_is_read(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4, max_tokens=3)
        steps = [schedule(scheduler), schedule(scheduler)]
        assert [parts(step) for step in steps] == [{"a": (0, 4)}, {"a": (4, 5)}]
        assert scheduler.schedule() is None
        read(scheduler, steps[0], 7)
        last = schedule(scheduler)
        assert parts(last) == {"a": (5, 6)}
        read(scheduler, steps[1], 8)
        # The third token is on its way: nothing is scheduled beyond the limit.
        assert scheduler.schedule() is None
        events = read(scheduler, last, 9)
        assert [request.output, events.finished] == [[7, 8, 9], [request]]

    def test_a_token_after_the_end_is_dropped(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4, stop_ids=(5, 9))
        first, second = schedule(scheduler), schedule(scheduler)
        events = read(scheduler, first, 9)
        assert (events.finished, request.finish_reason) == ([request], FinishReason.STOP)
        events = read(scheduler, second, 8)
        assert (len(events.requests), len(events.tokens), len(events.indices)) == (0, 0, 0)
        assert request.output == [9]
        assert not scheduler.has_work

    def test_a_row_that_has_a_new_tenant_does_not_take_the_old_ones_token(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        old = add(scheduler, "old", 4)
        new = add(scheduler, "new", 4)
        first = schedule(scheduler)
        scheduler.abort("old")
        second = schedule(scheduler)
        assert (first.rows.tolist(), list(parts(second))) == (second.rows.tolist(), ["new"])
        assert len(read(scheduler, first, 1).requests) == 0
        read(scheduler, second, 2)
        assert (old.output, new.output) == ([], [2])

    def test_events_point_into_the_steps_output(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        for name, length in (("a", 2), ("b", 2), ("c", 9)):
            add(scheduler, name, length)
        step = schedule(scheduler)
        scheduler.abort("a")
        events = scheduler.update(step, np.array([10, 11, 12, 13], np.int32))
        assert [request.request_id for request in events.requests] == ["b"]
        assert (events.tokens.tolist(), events.indices.tolist()) == ([11], [1])

    def test_steps_are_read_in_order(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4)
        first, second = schedule(scheduler), schedule(scheduler)
        with pytest.raises(InternalError, match="not the oldest one in flight"):
            read(scheduler, second)
        with pytest.raises(InternalError, match="a step of 1 requests came back with 0 tokens"):
            scheduler.update(first, np.zeros(0, np.int32))
        read(scheduler, first)
        read(scheduler, second)
        with pytest.raises(InternalError, match="not the oldest one in flight"):
            read(scheduler, second)
        assert len(request.output) == 2

    def test_depth_one_waits_for_each_step(self) -> None:
        scheduler = make_scheduler(pipeline_depth=1)
        add(scheduler, "a", 4)
        step = schedule(scheduler)
        assert scheduler.schedule() is None
        read(scheduler, step)
        schedule(scheduler)


class TestEnding:
    def test_a_stop_id_ends_only_once_min_tokens_are_there(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4, stop_ids=(9,), min_tokens=2)
        # The sampler masks 9 for the first two; a worker that does not is not believed.
        for _ in range(2):
            assert not read(scheduler, schedule(scheduler), 9).finished
        assert read(scheduler, schedule(scheduler), 9).finished == [request]
        assert (request.finish_reason, request.output) == (FinishReason.STOP, [9, 9, 9])

    def test_stop_wins_over_length(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4, max_tokens=1, stop_ids=(9,))
        turn(scheduler, 9)
        assert request.finish_reason is FinishReason.STOP

    def test_any_of_many_stop_ids_ends(self) -> None:
        scheduler = make_scheduler()
        many = add(scheduler, "a", 4, stop_ids=tuple(range(100, 160)))
        few = add(scheduler, "b", 4, stop_ids=(5,))
        step = schedule(scheduler)
        events = scheduler.update(step, np.array([159, 159], np.int32))
        assert (events.finished, few.output) == ([many], [159])

    def test_abort_in_every_state(self) -> None:
        scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=8)
        decoding, prefilling, waiting = (
            add(scheduler, n, k) for n, k in (("d", 4), ("p", 9), ("w", 4))
        )
        step = schedule(scheduler)
        assert [r.state.value for r in (decoding, prefilling, waiting)] == [
            "running",
            "running",
            "waiting",
        ]
        for request in (prefilling, decoding, waiting):
            assert scheduler.abort(request.request_id)
            scheduler.check_integrity()
            assert (request.state, request.finish_reason) == (
                RequestState.FINISHED,
                FinishReason.ABORT,
            )
            assert not scheduler.abort(request.request_id)
        assert scheduler.kv.available == scheduler.config.num_pages
        assert scheduler.has_work
        assert len(read(scheduler, step).requests) == 0
        assert not scheduler.has_work
        assert not scheduler.abort("never heard of")

    def test_the_front_end_can_finish_a_request(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 4)
        turn(scheduler, 1)
        step = schedule(scheduler)
        assert scheduler.finish("a", FinishReason.STOP)
        assert len(read(scheduler, step, 2).requests) == 0
        assert (request.output, request.finish_reason) == ([1], FinishReason.STOP)
        assert not scheduler.finish("a", FinishReason.STOP)

    def test_nothing_is_left_behind(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 9, logit_bias={1: 2.0}, banned_token_ids=(3,))
        turn(scheduler)
        scheduler.abort("a")
        table = scheduler.table
        assert request.page_hashes == []
        assert (table.num_used, dict(scheduler.requests), table.biases, table.masks) == (
            0,
            {},
            {},
            {},
        )
        assert not table.pages.any()


class TestPreemption:
    def test_the_last_in_order_gives_way_and_resumes_with_what_is_known(self) -> None:
        scheduler = make_scheduler(num_pages=4, enable_prefix_caching=False)
        old, new = add(scheduler, "old", 7), add(scheduler, "new", 6)
        turn(scheduler, 1)
        turn(scheduler, 2)
        # old needs its third page, all four are taken.
        assert parts(turn(scheduler, 3)) == {"old": (8, 9)}
        assert (new.state, new.output, new.num_preemptions) == (RequestState.WAITING, [1, 2], 1)
        assert scheduler.metrics().preemptions == 1
        while old.state is RequestState.RUNNING:
            turn(scheduler, 4)
        assert parts(turn(scheduler, 5)) == {"new": (0, 8)}
        while scheduler.has_work:
            turn(scheduler, 6)
        assert new.output == [1, 2, 5, 6, 6, 6, 6, 6]

    def test_the_one_that_asks_may_be_the_victim(self) -> None:
        scheduler = make_scheduler(num_pages=4)
        old, new = add(scheduler, "old", 5), add(scheduler, "new", 7)
        turn(scheduler)
        turn(scheduler)
        assert set(parts(turn(scheduler))) == {"old"}
        assert (old.num_preemptions, new.num_preemptions) == (0, 1)

    def test_a_token_in_flight_of_a_victim_is_dropped_and_sampled_again(self) -> None:
        scheduler = make_scheduler(num_pages=4, enable_prefix_caching=False)
        add(scheduler, "old", 7)
        new = add(scheduler, "new", 6)
        first, second = schedule(scheduler), schedule(scheduler)
        read(scheduler, first, 1)
        third = schedule(scheduler)
        assert set(parts(third)) == {"old"}
        events = read(scheduler, second, 2)
        assert [request.request_id for request in events.requests] == ["old"]
        assert new.output == [1]
        assert scheduler.abort("old")
        resumed = schedule(scheduler)
        assert parts(resumed) == {"new": (0, 7)}
        read(scheduler, third, 3)
        read(scheduler, resumed, 4)
        assert new.output == [1, 4]

    def test_who_gives_way_for_its_own_sake_does_not_come_back_at_once(self) -> None:
        scheduler = make_scheduler(num_pages=4)
        add(scheduler, "old", 5, max_tokens=11)
        new = add(scheduler, "new", 7)
        first, second = schedule(scheduler), schedule(scheduler)
        read(scheduler, first)
        for _ in range(3):
            third = schedule(scheduler)
            assert set(parts(third)) == {"old"}
            read(scheduler, second)
            second = third
        assert new.num_preemptions == 1

    def test_a_resumed_request_finds_its_own_pages_in_the_cache(self) -> None:
        scheduler = make_scheduler(num_pages=5)
        add(scheduler, "old", 7, max_tokens=3)
        new = add(scheduler, "new", 11)
        turn(scheduler, 1)
        turn(scheduler, 2)
        assert set(parts(turn(scheduler))) == {"old"}
        assert new.num_preemptions == 1
        # `old` is done; it took the last of the three full pages that `new` gave up.
        assert parts(turn(scheduler)) == {"new": (8, 13)}

    def test_preemption_spares_the_first_in_order(self) -> None:
        scheduler = make_scheduler(
            num_pages=8, max_num_seqs=4, policy="priority", priority_window=100
        )
        requests = [
            add(scheduler, f"r{index}", 7, priority=priority)
            for index, priority in enumerate((3, 1, 0, 2))
        ]
        while scheduler.has_work:
            turn(scheduler)
        assert [request.num_preemptions > 0 for request in requests] == [True, False, False, True]
        assert all(len(request.output) == 8 for request in requests)


SHARED = list(range(12))


class TestPrefixCache:
    def test_full_pages_of_a_finished_request_are_found(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", [*SHARED, 50])
        turn(scheduler)
        scheduler.abort("a")
        request = add(scheduler, "b", [*SHARED, 60, 61])
        assert parts(turn(scheduler)) == {"b": (12, 14)}
        assert request.num_cached_tokens == 12
        metrics = scheduler.metrics()
        assert (metrics.prefix_queries, metrics.prefix_hits) == (13 + 14, 12)

    def test_one_token_at_least_is_computed(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", SHARED)
        turn(scheduler)
        add(scheduler, "b", SHARED)
        assert parts(schedule(scheduler))["b"] == (8, 12)

    def test_pages_are_shared_in_the_step_that_computes_them(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", SHARED)
        add(scheduler, "b", [*SHARED, 9])
        step = schedule(scheduler)
        assert parts(step) == {"b": (12, 13), "a": (0, 12)}
        rows = {
            request.request_id: scheduler.table.pages_of(request.row) for request in step.requests
        }
        assert rows["a"] == rows["b"][:3]

    def test_a_page_is_not_found_before_it_is_scheduled(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        add(scheduler, "a", SHARED)
        turn(scheduler)
        assert scheduler.kv.num_registered == 2
        add(scheduler, "b", [*SHARED, 9])
        # a computes its last two tokens in this step, so b may have all three pages.
        assert parts(turn(scheduler)) == {"b": (12, 13), "a": (10, 12)}

    def test_a_page_is_not_found_in_the_step_whose_single_token_fills_it(self) -> None:
        """In a step of single tokens workers may read before the step has written."""
        scheduler = make_scheduler(max_num_batched_tokens=11)
        add(scheduler, "a", SHARED)
        turn(scheduler)
        add(scheduler, "b", [*SHARED, 9])
        assert parts(turn(scheduler)) == {"b": (8, 13), "a": (11, 12)}

    def test_generated_pages_are_found_once_their_tokens_are_known(self) -> None:
        scheduler = make_scheduler()
        request = add(scheduler, "a", 6, max_tokens=8)
        steps = [schedule(scheduler), schedule(scheduler)]
        while scheduler.has_work:
            read(scheduler, steps.pop(0), 3)
            step = scheduler.schedule()
            if step is not None:
                steps.append(step)
        # 14 tokens: three full pages; the last token was never computed.
        assert scheduler.kv.num_registered == 3
        add(scheduler, "b", [*request.prompt.tolist(), *request.output, 3])
        assert parts(schedule(scheduler)) == {"b": (12, 15)}

    def test_other_salts_do_not_see_it(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", [*SHARED, 1], cache_salt="x")
        add(scheduler, "b", [*SHARED, 1], cache_salt="y")
        add(scheduler, "c", [*SHARED, 1], cache_salt="x")
        assert {name: start for name, (start, _) in parts(schedule(scheduler)).items()} == {
            "a": 0,
            "b": 0,
            "c": 12,
        }

    def test_prompt_logprobs_need_the_whole_prompt(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", [*SHARED, 1])
        turn(scheduler)
        add(scheduler, "b", [*SHARED, 1], prompt_logprobs=0)
        assert parts(schedule(scheduler))["b"] == (0, 13)

    def test_off_means_that_nothing_is_hashed(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=False)
        request = add(scheduler, "a", SHARED)
        add(scheduler, "b", SHARED)
        assert parts(turn(scheduler)) == {"a": (0, 12), "b": (0, 12)}
        assert (
            request.page_hashes,
            scheduler.kv.num_registered,
            scheduler.metrics().prefix_queries,
        ) == ([], 0, 0)

    def test_hits_make_room_that_is_counted_once(self) -> None:
        # Four idle pages: three are hit and one is left, but b needs two more.
        scheduler = make_scheduler(num_pages=4, max_model_len=17)
        add(scheduler, "a", [*SHARED, 1], max_tokens=1)
        turn(scheduler)
        b = add(scheduler, "b", [*SHARED, 1], max_tokens=1)
        assert parts(turn(scheduler)) == {"b": (12, 13)}
        assert b.num_cached_tokens == 12

    def test_a_page_with_a_token_that_was_never_read_is_not_registered(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 6)
        turn(scheduler)
        first, second = schedule(scheduler), schedule(scheduler)
        assert parts(second) == {"a": (7, 8)}
        scheduler.abort("a")
        scheduler.check_integrity()
        # Two pages are computed, but the eighth token is known to the device alone.
        assert scheduler.kv.num_registered == 1
        read(scheduler, first)
        read(scheduler, second)

    def test_a_prompt_that_was_given_up_leaves_only_what_was_computed(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=6)
        add(scheduler, "a", SHARED)
        turn(scheduler)
        scheduler.abort("a")
        add(scheduler, "b", SHARED)
        assert parts(schedule(scheduler)) == {"b": (4, 10)}

    def test_the_count_of_cached_tokens_is_that_of_the_first_start(self) -> None:
        scheduler = make_scheduler(num_pages=5)
        add(scheduler, "old", 7, max_tokens=3)
        new = add(scheduler, "new", 11)
        for _ in range(4):
            turn(scheduler)
        assert (new.num_preemptions, new.row >= 0, new.num_cached_tokens) == (1, True, 0)

    def test_reset_forgets_when_nothing_runs(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", [*SHARED, 1])
        turn(scheduler)
        assert not scheduler.reset_prefix_cache()
        scheduler.abort("a")
        assert scheduler.reset_prefix_cache()
        add(scheduler, "b", [*SHARED, 1])
        assert parts(schedule(scheduler)) == {"b": (0, 13)}


FAULTS: dict[str, tuple[Callable[[Scheduler, int], object], str]] = {
    "a page of another request": (
        lambda s, r: s.table.pages.__setitem__((r, 0), 31),
        "page .* has the reference count 1, but 0 requests hold it",
    ),
    "a length that is off": (lambda s, r: s.table.known.__setitem__(r, 30), "are not in order"),
    "too many pending tokens": (
        lambda s, r: s.table.computed.__setitem__(r, 8),
        "3 tokens are pending with 0 steps",
    ),
    "computed too much": (
        lambda s, r: s.table.computed.__setitem__(r, 6),
        "1 tokens are pending with 0 steps",
    ),
    "computed less than nothing": (
        lambda s, r: s.table.computed.__setitem__(r, -1),
        "computed -1 is less than 0",
    ),
    "computed too little": (
        lambda s, r: s.table.computed.__setitem__(r, 3),
        "decodes but lacks more than its last",
    ),
    "a capacity that is off": (
        lambda s, r: s.table.capacity.__setitem__(r, 4),
        "capacity 4 is not that of its pages",
    ),
    "a stale page": (
        lambda s, r: s.table.pages.__setitem__((r, 5), 1),
        "a page table is not 0 outside of its pages",
    ),
    "another prompt": (
        lambda s, r: s.table.tokens.__setitem__((r, 1), 3),
        "its first tokens are not its prompt",
    ),
    "a token beyond the end": (
        lambda s, r: s.table.tokens.__setitem__((r, 9), 3),
        "a token stands behind the known",
    ),
    "a missing token": (lambda s, r: s.table.tokens.__setitem__((r, 5), -1), "a token is missing"),
    "a lost row": (
        lambda s, r: s.table._free.pop(),
        "the free rows are not those without a request",
    ),
    "a request in the wrong row": (
        lambda s, r: setattr(s.requests["a"], "row", 3),
        "its request has row 3",
    ),
    "a stray bias": (
        lambda s, r: s.table.biases.__setitem__(3, ([], [])),
        "a free row has a logit bias",
    ),
    "a lost decode": (
        lambda s, r: s._decoding.clear(),
        "decode or prefill are not those in the table",
    ),
    "a queue out of order": (
        lambda s, r: setattr(s.requests["w"], "key", 99),
        "the waiting queue is not in order",
    ),
    "a lost request": (
        lambda s, r: s._requests.pop("w"),
        "the requests are not those that wait or run",
    ),
    "a wrong state": (
        lambda s, r: setattr(s.requests["w"], "state", RequestState.RUNNING),
        "request w is running in row -1",
    ),
    "a page with other content": (
        lambda s, r: setattr(s.requests["a"], "cache_salt", "other"),
        "is registered for other content",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_integrity_sees(fault: str) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    row = add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    turn(scheduler)
    scheduler.abort("b")
    add(scheduler, "w", 5)
    add(scheduler, "x", 5)
    scheduler.check_integrity()
    plant, message = FAULTS[fault]
    plant(scheduler, row.row)
    with pytest.raises(InternalError, match=message):
        scheduler.check_integrity()


def test_check_integrity_sees_a_decode_among_the_prompts_under_way() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5)
    schedule(scheduler)
    scheduler._prefilling.append(scheduler._decoding.pop(request.row))
    with pytest.raises(InternalError, match="prefills but has nothing left"):
        scheduler.check_integrity()


def test_the_table_refuses_what_it_cannot_do() -> None:
    table = RequestTable(1, 8, (PageGroup(PAGE),))
    request = make_request("a", 3)
    row = table.assign(request, request.prompt)
    with pytest.raises(InternalError, match="all rows of the request table are taken"):
        table.assign(make_request("b", 3), request.prompt)
    table.release(row)
    with pytest.raises(InternalError, match="row 0 was released but is free"):
        table.release(row)


def test_the_queue_refuses_to_give_what_it_does_not_have() -> None:
    queue = WaitingQueue()
    first, second = make_request("a", 3), make_request("b", 3)
    queue.add(first)
    # Both have the same place, as none was ever added to a scheduler.
    with pytest.raises(InternalError, match="request b is not in the waiting queue"):
        queue.remove(second)
    queue.remove(first)
    assert len(queue) == 0


def loop_tokens(step: ScheduledStep, rows: list[list[int]]) -> np.ndarray:
    """What a worker brings back: `rows` of tokens, each for the requests of the step, and
    padding.
    """
    made = np.full((len(rows), step.descriptor.requests), 99, np.int32)
    for into, tokens in zip(made, rows, strict=True):
        into[: len(tokens)] = tokens
    return made


class TestLoops:
    def start(self, *names: str, **options: Any) -> Scheduler:
        scheduler = make_scheduler(decode_steps=4, max_model_len=64, **options)
        for name in names:
            add(scheduler, name, 5, max_tokens=20, stop_ids=(3,))
        turn(scheduler)
        return scheduler

    def test_what_comes_after_an_early_stop_starts_where_it_stopped(self) -> None:
        scheduler = self.start("a", "b")
        first, second = schedule(scheduler), schedule(scheduler)
        assert [(s.loop, s.starts.tolist()) for s in (first, second)] == [
            (Loop(4, False), [5, 5]),
            (Loop(4, True), [9, 9]),
        ]
        a, b = first.requests
        events = scheduler.update(first, loop_tokens(first, [[8, 9], [3, 10]]))
        scheduler.check_integrity()
        assert [r.request_id for r in events.requests] == ["a", "a", "b", "b"]
        assert events.tokens.tolist() == [8, 3, 9, 10]
        assert events.indices.tolist() == [0, 0, 1, 1]
        assert [r.request_id for r in events.finished] == ["a"]
        assert (a.output, a.finish_reason, b.output) == ([7, 8, 3], FinishReason.STOP, [7, 9, 10])
        third = schedule(scheduler)
        assert (third.loop, parts(third)) == (Loop(4, False), {"b": (7, 8)})
        with pytest.raises(InternalError, match="came back with tokens of shape"):
            scheduler.update(second, loop_tokens(second, [[1, 2]]))
        assert not scheduler.update(second, loop_tokens(second, [])).requests
        fourth = schedule(scheduler)
        assert (fourth.loop, parts(fourth)) == (Loop(4, True), {"b": (11, 12)})
        with pytest.raises(InternalError, match="came back with tokens of shape"):
            scheduler.update(third, loop_tokens(third, []))
        scheduler.update(third, loop_tokens(third, [[11], [12], [13], [14]]))
        scheduler.check_integrity()
        assert b.output == [7, 9, 10, 11, 12, 13, 14]

    def test_a_worker_may_run_on_behind_a_stop(self) -> None:
        scheduler = self.start("a", "b")
        first, second = schedule(scheduler), schedule(scheduler)
        a, b = first.requests
        scheduler.update(first, loop_tokens(first, [[8, 9], [3, 10], [4, 11], [3, 12]]))
        events = scheduler.update(second, loop_tokens(second, [[5, 13], [5, 14], [5, 15], [5, 16]]))
        scheduler.check_integrity()
        assert (a.output, b.output) == ([7, 8, 3], [7, 9, 10, 11, 12, 13, 14, 15, 16])
        assert events.indices.tolist() == [1, 1, 1, 1]

    def test_a_request_that_waits_gets_the_next_step_but_those_in_flight(self) -> None:
        scheduler = self.start("a")
        first = schedule(scheduler)
        add(scheduler, "c", 3)
        assert scheduler.schedule() is None
        scheduler.update(first, loop_tokens(first, [[1]] * 4))
        assert parts(schedule(scheduler)) == {"a": (9, 10), "c": (0, 3)}

    def test_no_request_passes_its_length(self) -> None:
        scheduler = self.start("a")
        add(scheduler, "short", 5, max_tokens=4)
        turn(scheduler)
        step = schedule(scheduler)
        assert step.loop == Loop(3, False)
        scheduler.update(step, loop_tokens(step, [[1, 2]] * 3))
        assert scheduler.metrics().running == 1

    @pytest.mark.parametrize(
        "options", [{"stop": ("x",)}, {"logprobs": 1}, {"frequency_penalty": 1.0}]
    )
    def test_what_the_host_must_see_is_decoded_step_by_step(self, options: dict[str, Any]) -> None:
        scheduler = self.start("a")
        add(scheduler, "watched", 5, **options)
        turn(scheduler)
        assert turn(scheduler).loop is None

    def test_min_tokens_are_decoded_step_by_step_and_the_rest_in_loops(self) -> None:
        scheduler = make_scheduler(decode_steps=4)
        add(scheduler, "a", 5, max_tokens=12, min_tokens=3, stop_ids=(3,))
        turn(scheduler)
        assert [turn(scheduler).loop, turn(scheduler).loop, schedule(scheduler).loop] == [
            None,
            None,
            Loop(4, False),
        ]

    def test_few_pages_make_single_steps_and_preempt_nobody(self) -> None:
        scheduler = self.start("a", "b", num_pages=16)
        taken = scheduler.kv.allocate(scheduler.kv.available - 1)
        step = scheduler.schedule()
        assert step is not None
        assert (step.loop, len(step.rows)) == (None, 2)
        scheduler.kv.release(taken)
        read(scheduler, step)
        assert schedule(scheduler).loop == Loop(4, False)


@pytest.mark.parametrize("after", range(1, 9))
def test_starting_over_gives_the_tokens_of_an_undisturbed_run(after: int) -> None:
    """Tokens are a function of request and position; a worker that was lost after any step, with
    another one in flight, changes none.
    """

    def run(lost_after: int | None) -> dict[str, list[int]]:
        scheduler = make_scheduler(num_pages=14)
        made = [
            add(scheduler, name, size, 9)
            for name, size in zip("abcdef", (3, 9, 17, 5, 2, 8), strict=True)
        ]
        number, pending = 0, None
        while scheduler.has_work:
            step = scheduler.schedule()
            if pending is not None:
                tokens = [
                    sum(r.request_id.encode()) * 31 + int(end)
                    for r, end in zip(pending.requests, pending.ends, strict=True)
                ]
                scheduler.update(pending, np.array(tokens, np.int32))
                number += 1
                if number == lost_after:
                    scheduler.start_over()
                    step = None
                    assert scheduler.table.take_new_pages().start == 0
                scheduler.check_integrity()
            pending = step
        return {request.request_id: request.output for request in made}

    assert run(after) == run(None)
