"""Faults of what an engine keeps between steps: each is where its name says, and nowhere else."""

import numpy as np
import pytest

from twinfer.numerics.faults.catalogue import CATALOGUE
from twinfer.numerics.faults.engine import EditedSteps
from twinfer.numerics.questions.bench import Bench, Schedule
from twinfer.numerics.questions.selftest_model import LAYER, open_model
from twinfer.numerics.sides.steps import default_prompts
from twinfer.numerics.sides.subject import parse_target

ONE_BY_ONE = Schedule(decoded=1 << 20)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The model of the self-test on torch, whose faults change from test to test."""
    where = open_model(tmp_path_factory.mktemp("model"), 1).with_dtype("float32")
    made = Bench(where, parse_target("torch:cpu"), [64] * 6)
    yield made
    made.close()


def run(bench, fault, schedule, prompts):
    """What the worker gives with a fault in its steps."""
    worker = bench.worker
    bench.worker = EditedSteps(worker, bench.layout.groups, CATALOGUE[fault].edit)
    try:
        return bench.logits(schedule, prompts)
    finally:
        bench.worker = worker


def with_tables(step):
    """The step as it is: such a one has its page tables, others what is new in them."""
    return step


def differing(bench, fault, schedule=ONE_BY_ONE):
    """Positions of the longest prompts at which a fault changes the logits."""
    prompts = [ids for ids in default_prompts(bench.subject, 1) if len(ids) > 60]
    right = bench.logits(schedule, prompts).first()
    wrong = run(bench, fault, schedule, prompts).first()
    assert right.keys() == wrong.keys()
    return {key[1] for key in right if not np.array_equal(right[key], wrong[key])}


def test_the_model_of_the_self_test_runs_in_page_groups(bench):
    assert bench.shape.num_groups == 2
    windows = [bench.layout.groups[place.group].window for place in bench.layout.places]
    assert windows == [0, 24]
    assert windows[LAYER] == 24


@pytest.mark.parametrize("change", [None, with_tables], ids=["new pages", "page tables"])
def test_a_page_that_is_freed_early_is_wrong_for_its_last_reader_only(bench, change):
    """Pages of 16 tokens, a window of 24: the query at 38 is the last one that reads token 15."""
    schedule = Schedule(decoded=1 << 20, change=change)
    assert differing(bench, "window-page-freed-early", schedule) == {38, 54}


@pytest.mark.parametrize("change", [None, with_tables], ids=["new pages", "page tables"])
def test_the_table_of_another_group_is_wrong_everywhere(bench, change):
    schedule = Schedule(decoded=1 << 20, change=change)
    assert len(differing(bench, "table-of-another-group", schedule)) > 60


def test_a_lost_token_is_lost_in_every_group(bench):
    """With the first group's slots alone, the layer with a window would still have it."""
    seen = []
    execute = bench.worker.logits
    bench.worker.logits = lambda step: seen.append(step) or execute(step)
    run(bench, "chunk-start-lost", ONE_BY_ONE, default_prompts(bench.subject, 1)[2:3])
    bench.worker.logits = execute
    later = [step for step in seen if step.field("positions")[0] > 0]
    assert later
    assert all((step.field("slots") == -1).all() for step in later)
