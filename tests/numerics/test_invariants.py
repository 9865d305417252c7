"""`twinfer numerics invariants`: every relation holds as declared; one that is broken on purpose
is named.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import twinfer.numerics.questions.invariants as module
from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.questions.bench import Bench, Schedule, permuted_pages
from twinfer.numerics.questions.invariants import RELATIONS, Judge, check_invariants, render
from twinfer.numerics.showing.junit import suite_xml
from twinfer.numerics.showing.terminal import LINES
from twinfer.numerics.sides.reference import Reference
from twinfer.numerics.sides.steps import by_group, default_prompts
from twinfer.numerics.sides.subject import HostWeights, open_subject, parse_target
from twinfer.ops import resolve
from twinfer.ops.implement import IMPLEMENTATIONS, ROWS
from twinfer.shared.errors import ConfigError
from twinfer.shared.models import decoder

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}  # fmt: skip
TORCH, JAX = parse_target("torch:cpu"), parse_target("jax:cpu")
BITWISE = {"repeat", "company", "page-permutation", "overlap"}
HERE = BITWISE | {"batch", "chunks", "prefix-cache", "preemption", "padding", "decode-prefill"}
"""What applies to every target."""


def open_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return open_subject(str(folder), load_format="dummy")


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return open_config(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Two layers in two page groups. No prompt fits into the window, and pages are released."""
    windows = {"use_sliding_window": True, "sliding_window": 9}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    return open_config(tmp_path_factory.mktemp("model"), CONFIG | windows | kinds)


def check(subject, target, **options):
    return check_invariants(subject, target, default_prompts(subject, seed=1), **options)


def test_all_hold_on_torch(subject):
    report = check(subject, TORCH, names=sorted(HERE))
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert {(r.relation, r.mode) for r in report.results} == {(n, m) for n in HERE for m in "SP"}
    assert {r.relation for r in report.results if r.promise == "bitwise"} == BITWISE
    assert all(r.compared > 20 for r in report.results)
    text = render(report)
    assert text.startswith("ALL HOLD")
    assert len(text.splitlines()) <= LINES
    assert json.loads(report.dumps())["exit_code"] == 0


@pytest.mark.slow
def test_all_hold_on_jax(subject):
    report = check(subject, JAX, names=[*sorted(HERE), "scan"])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert {(r.relation, r.mode) for r in report.results} == {
        (n, m) for n in HERE | {"scan"} for m in "SP"
    }


def test_all_hold_on_torch_with_page_groups(windowed):
    report = check(windowed, TORCH, names=[*sorted(HERE), "page-groups"])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert {(r.relation, r.mode) for r in report.results} == {
        (n, m) for n in HERE | {"page-groups"} for m in "SP"
    }


@pytest.mark.slow
def test_all_hold_on_jax_with_page_groups(windowed):
    report = check(windowed, JAX, names=[*sorted(HERE), "page-groups"])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing


def test_a_bench_runs_the_page_groups_of_an_engine(windowed):
    """Pages are released and taken again, as the scheduler has too few for all tokens."""
    bench = Bench(windowed, TORCH, [64])
    prompts = default_prompts(windowed, seed=1)
    rows = bench.logits(Schedule(budget=8, decoded=24), prompts)
    bench.close()
    assert [group.window for group in bench.layout.groups] == [0, 9]
    assert {step.shape.num_groups for step in rows.steps} == {2}
    keeps_all, keeps_some = (
        np.stack([by_group(step.field("page_table"), bench.layout.groups)[group, 0]
                  for step in rows.steps if step.field("kv_lens")[0] > 48])
        for group in (0, 1)
    )  # fmt: skip
    assert (np.count_nonzero(keeps_some, axis=1) < np.count_nonzero(keeps_all, axis=1)).all()


def test_scrubbing_reaches_every_slot_of_every_layer(windowed):
    bench = Bench(windowed.with_dtype("float32"), TORCH, [20, 30])
    caches = [cache[: bench.pages] for cache in bench.worker._kv]
    assert not any(cache.any() for cache in caches)
    bench.scrub()
    assert len(caches) == 2
    assert all(cache.all() for cache in caches)
    bench.close()


def test_the_reference_reads_each_layer_s_own_pages(windowed):
    """Another page in the second group's table is another result in the second layer only."""
    where = windowed.with_dtype("float32")
    bench = Bench(where, TORCH, [64] * 6)
    step = bench.logits(Schedule(), default_prompts(where, seed=1)).steps[0]
    bench.close()
    wrong = step.field("page_table").copy()
    by_group(wrong, bench.layout.groups)[1] += 1
    weights = HostWeights(where)
    tables = decoder.rotary_tables(where.model, where.max_model_len)
    outputs = []
    for given in (step, replace(step, page_table=wrong)):
        reference = Reference(where.model, tables, exact=True, groups=[0, 1])
        reference.begin(given)
        hidden = reference.embed(weights.top())
        for layer in (0, 1):
            cache = np.ones((bench.pages + 2, *bench.layout.page_shape(layer)))
            state = hidden, np.zeros_like(hidden), cache
            outputs.append(reference.layer(layer, weights.layer(layer), state)[0])
    assert [np.array_equal(outputs[i], outputs[i + 2]) for i in (0, 1)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["traced", "compiled"])
def test_torch_levels_agree(subject, relation):
    """Few shapes: Inductor takes half a minute for each."""
    few = replace(subject, tokens=16, max_num_seqs=2)
    report = check(few, TORCH, names=[relation], modes=("P",))
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing


@pytest.mark.slow
def test_two_ranks_of_torch_agree_with_one(subject):
    report = check(subject, TORCH, names=["tensor-parallel"])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert {r.mode for r in report.results} == {"S", "P"}
    # Costly where ranks are processes of a CPU: not there unless it is named.
    assert not any(r.relation == "tensor-parallel" for r in check(subject, TORCH).results)


@pytest.fixture
def pages_without_tables(monkeypatch):
    """Pages are moved, and the tables that say where they are do not say so."""

    def wrong(*given, **named):
        change = permuted_pages(*given, **named)
        return lambda step: replace(change(step), page_table=step.page_table)

    monkeypatch.setattr(module, "permuted_pages", wrong)


@pytest.mark.parametrize("target", [TORCH, pytest.param(JAX, marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("pages_without_tables")
def test_a_page_that_is_moved_without_its_table_is_named(subject, target):
    names = ["repeat", "page-permutation", "batch"]
    report = check(subject, target, names=names, modes=("S",))
    assert report.exit_code == 1
    assert [r.relation for r in report.failures] == ["page-permutation"]
    assert "request" in report.failures[0].complaints[0]
    assert "page-permutation bitwise  BROKEN" in render(report)
    assert "<failure" in suite_xml(report)


@pytest.mark.usefixtures("pages_without_tables")
def test_pages_of_every_group_move_with_their_tables(windowed):
    names = ["page-permutation"]
    report = check(windowed, TORCH, names=names, modes=("S",))
    assert [r.relation for r in report.failures] == names


def wrong_tables(step):
    """The second page of each request is read as its first."""
    table = step.field("page_table").copy()
    table[:, 1] = table[:, 0]
    return replace(step, page_table=table)


@pytest.mark.parametrize("relation", sorted(HERE - {"overlap"}))
def test_each_relation_can_fail(subject, relation, monkeypatch):
    """A stale page in the run that is compared, and in that one only."""
    right = RELATIONS[relation]

    def wrong(lab):
        run = lab.bench.logits
        with monkeypatch.context() as patch:
            stale = lambda schedule, prompts: run(replace(schedule, change=wrong_tables), prompts)  # noqa: E731
            patch.setattr(lab.bench, "logits", stale)
            return right.run(lab)

    monkeypatch.setitem(RELATIONS, relation, replace(right, run=wrong))
    report = check(subject, TORCH, names=[relation, "repeat"], modes=("S",))
    assert [r.relation for r in report.failures] == [relation]


def test_an_overlap_that_loses_a_token_is_seen(subject):
    bench = Bench(subject.with_dtype("float32"), TORCH, [64] * 6)
    execute = bench.worker.execute
    prompts = default_prompts(subject, seed=1)
    one = bench.generate(prompts, 1)
    pending = []

    def late(step):
        """What is sampled reaches the next step one step too late."""
        handle = execute(step)
        tokens = bench.worker._programs.last_tokens
        kept = tokens.clone()
        if pending:
            tokens.copy_(pending.pop())
        pending.append(kept)
        return handle

    bench.worker.execute = late
    two = bench.generate(prompts, 2)
    result = Judge(subject, "S", bench.layout)(RELATIONS["overlap"], (one, two))
    bench.close()
    assert result.complaints


def test_a_fault_that_depends_on_the_batch_is_caught(subject):
    """Each request reads the page table of the one before it."""
    report = check(subject, TORCH, modes=("S",), names=["batch"], fault=plant("page-table-row"))
    assert [r.relation for r in report.failures] == ["batch"]


def test_a_run_that_is_not_what_it_says_is_no_pass(subject):
    """Prompts shorter than a page leave nothing in the prefix cache."""
    prompts = [np.arange(n, dtype=np.int32) for n in (5, 6)]
    report = check_invariants(subject, TORCH, prompts, names=["prefix-cache"], modes=("S",))
    assert report.exit_code == 3
    assert "no prefix" in report.missing[0]


@pytest.mark.parametrize("lengths", [(4, 5, 6), (5,), (120,)])
def test_prompts_of_any_length_are_preempted(subject, lengths):
    prompts = [np.arange(n, dtype=np.int32) for n in lengths]
    report = check_invariants(subject, TORCH, prompts, names=["preemption"])
    assert report.exit_code == 0, report.missing
    assert all(result.compared for result in report.results)


@pytest.mark.parametrize(
    ("target", "relation"),
    [(TORCH, "graphs"), (TORCH, "scan"), (TORCH, "page-groups")],
)
def test_what_does_not_apply_is_missed_only_if_it_was_named(subject, target, relation):
    assert check(subject, target, names=[relation], modes=("S",)).exit_code == 3
    report = check(subject, target, names=["repeat", relation], modes=("S",))
    assert report.exit_code == 3
    assert relation in report.missing[0]


def test_names_are_checked(subject):
    with pytest.raises(ConfigError, match="relation"):
        check(subject, TORCH, names=["nope"])


def test_steps_that_an_engine_spoils_are_seen(subject):
    """By what depends on the schedule, and by no step alone."""
    fault = plant("slots-stale", subject.model, between_steps=True)
    report = check(subject, TORCH, names=["repeat", "batch"], modes=("S",), fault=fault)
    assert [r.relation for r in report.failures] == ["batch"]
    with pytest.raises(ConfigError, match="`invariants` alone shows it"):
        plant("slots-stale", subject.model)


def test_rows_are_told_by_request_and_position(subject):
    bench = Bench(subject, TORCH, [64] * 6)
    prompts = default_prompts(subject, seed=1)
    rows = bench.logits(Schedule(budget=8), prompts)
    bench.close()
    assert sorted(rows.keys) == sorted(
        (i, p) for i, prompt in enumerate(prompts) for p in range(len(prompt) - 1)
    )
    assert all(
        np.isfinite(value).all() and value.shape == (CONFIG["vocab_size"],) for value in rows.values
    )


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_row_invariance_is_judged_bitwise(windowed, backend):
    names = sorted(HERE - {"preemption"} | {"page-groups"})
    report = check(windowed, parse_target(f"{backend}:cpu:row_invariant=true"), names=names)
    assert {r.promise for r in report.results} == {"bitwise"}
    assert not report.failures, render(report)
    assert not report.missing, render(report)


def test_a_product_whose_sums_depend_on_the_rows_is_seen(subject, monkeypatch):
    resolve("torch")  # registers them
    plain = IMPLEMENTATIONS["linear", "torch"][ROWS]

    # Another order of sums for a few rows, as a library chooses one by shape.
    def by_shape(x, weight, bias):
        y = plain.function(x, weight, bias)
        return y if len(x) > 8 else y.nextafter(y + 1)

    planted = replace(plain, function=by_shape)
    monkeypatch.setitem(IMPLEMENTATIONS["linear", "torch"], ROWS, planted)
    target = parse_target("torch:cpu:row_invariant=true")
    report = check(subject, target, names=["company", "padding"], modes=("S",))
    assert [r.relation for r in report.failures] == ["padding"], render(report)


@pytest.mark.parametrize("text", ["torch:cpu:row_invariant=yes", "jax:cpu:scan_layers=1"])
def test_a_switch_of_a_target_is_true_or_false(text):
    with pytest.raises(ConfigError, match="must be true or false"):
        parse_target(text)
