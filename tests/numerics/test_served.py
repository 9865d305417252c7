"""What engines served, judged: clean runs pass, and faults of what only an engine has are seen."""

import json
import re
import sys
from collections import Counter
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from twinfer.gpu import inputs, module, plumbing, regional, worker
from twinfer.numerics.judging.served import Row, judge_row, judge_rows
from twinfer.numerics.judging.streams import StreamErrors, judge_streams
from twinfer.numerics.questions import served
from twinfer.numerics.questions.selftest_model import open_model
from twinfer.numerics.questions.served import check_served, chooser
from twinfer.numerics.questions.workload import workload
from twinfer.numerics.sides import sampling, serving
from twinfer.numerics.sides.serving import Answer, Ask, Served, refusal
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.ops import REGISTRY
from twinfer.serving.cli import main
from twinfer.shared import (
    config,
    engine,
    kv_manager,
    packer,
    prefix_cache,
    sampling_encoding,
    xla_config,
)
from twinfer.shared.config import DeviceInfo
from twinfer.shared.errors import ConfigError, InternalError, RequestError
from twinfer.shared.models import decoder
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_encoding import encode_mask, encode_sampling
from twinfer.shared.sampling_params import SamplingParams
from twinfer.tests.e2e.conftest import build

ABOUT = {"side": "a", "run": "r", "requests": 1, "steps": {}, "preemptions": 0, "cached": 0}


def check(folder, mode="S", backend="torch", **options):
    """Judge what an engine served, in all runs."""
    subject = open_subject(folder, load_format="dummy")
    return check_served(subject, [parse_target(f"{backend}:cpu")], modes=(mode,), **options)


def check_runs(monkeypatch, folder, *runs):
    """The same in some of the runs: a fault is planted that these show."""
    with monkeypatch.context() as during:
        during.setattr(served, "RUNS", {run: served.RUNS[run] for run in runs})
        return check(folder, definition="off")


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("torch", "S"),
        ("torch", "P"),
        pytest.param("jax", "P", marks=pytest.mark.slow),
        pytest.param("jax", "S", marks=pytest.mark.slow),
    ],
)
def test_a_right_engine_passes(small_model, backend, mode):
    diff = check(small_model, mode, backend)
    diff.assert_ok()
    assert diff.exit_code == 0
    steps, loops, plain = diff.served
    assert steps.positions > 200
    assert min(steps.steps["mixed"], steps.steps["decode"], steps.preemptions, steps.cached) > 0
    assert loops.steps["loop"] > 0
    assert loops.tokens > 200
    assert len(steps.streams) == len(loops.streams) == 3
    assert not plain.streams
    assert (plain.steps, plain.positions, plain.tokens) == (
        steps.steps,
        steps.positions,
        steps.tokens,
    )
    assert 0.0 < max(steps.streams) < 3.0
    assert "transformers" in diff.environment["definition"]


@pytest.mark.parametrize(
    ("settings", "filtered"),
    [
        ({"temperature": 0.0, "top_k": 3}, False),
        ({"top_p": 0.9999999}, False),
        ({"top_k": 3}, True),
        ({"top_p": 0.6}, True),
        ({"min_p": 0.2}, True),
    ],
)
def test_filters_that_nobody_asks_for_change_no_token(settings, filtered, monkeypatch):
    """The sampler's definition leaves them out, which takes half as long."""
    asked, reference = [], REGISTRY["sample"].reference

    def noted(*arguments):
        asked.append(arguments[-1])
        return reference(*arguments)

    monkeypatch.setattr(sampling, "REGISTRY", {"sample": SimpleNamespace(reference=noted)})
    logits = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    scores = REGISTRY["quantize_logits"].reference(sampling.XP, logits)
    values = encode_sampling(SamplingParams(**settings), 5) | {"position": 7}
    tokens = sampling.sample(logits, scores, values)
    assert asked == [filtered]
    columns = [np.full(40, values[name]) for name in sampling.FIELDS]
    columns = [c.astype(np.float32 if c.dtype.kind == "f" else np.int32) for c in columns]
    want = reference(sampling.XP, logits, scores, *columns, True)
    np.testing.assert_array_equal(tokens, want)
    plain = reference(sampling.XP, logits, scores, *columns, False)
    assert (plain != want).any() == filtered, "the settings would not show it"


def test_the_configuration_says_what_an_engine_has_not(small_model, monkeypatch):
    """Not the comparison: no loops on torch-xla, which need not be installed to say so."""
    subject = open_subject(small_model, load_format="dummy")
    for target in map(parse_target, ("torch:cpu", "jax:cpu")):
        assert refusal(subject, target, decode_steps=4) is None
    there = SimpleNamespace(find_device=lambda device: DeviceInfo("cpu", "cpu", 1 << 34))
    monkeypatch.setattr(serving, "backend_module", lambda backend: there)
    target = parse_target("torch-xla:cpu")
    assert refusal(subject, target, decode_steps=1) is None
    assert refusal(subject, target, decode_steps=4).startswith("decode_steps: got 4")


def test_a_run_that_the_configuration_refuses_is_left_out_and_said(small_model, monkeypatch):
    monkeypatch.setitem(xla_config.ALLOWED, "decode_steps", (1, "it has none"))
    monkeypatch.setattr(
        config, "check_ladders", lambda config, *_: xla_config.check_torch_xla(config, "int8")
    )
    diff = check(small_model, definition="off")
    assert [run.run for run in diff.served] == ["steps", "plain"]
    (note,) = diff.notes
    assert note.startswith("a torch:cpu: not run with loops of decode steps: decode_steps: got 4, ")
    assert note.endswith("it has none")
    assert diff.exit_code == 0


def written(folder, architecture, model_type, **own):
    """A folder with the config.json of a model of two layers, which has `own` fields."""
    config = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": 300,
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | own))
    return str(folder)


def test_streams_of_joined_layers_are_judged_as_those_of_layers_alone(tmp_path):
    """A GLM-4, whose layers leave their last norm to the next one."""
    folder = written(tmp_path, "Glm4ForCausalLM", "glm4")
    assert any(decoder.joints(decoder.model_of(open_subject(folder, load_format="dummy").model)))
    check(folder, definition="off").assert_ok()


def layer_twice(monkeypatch):
    """Layer 1 has the weights of layer 0."""
    right = module.Decoder.freeze

    def freeze(self):
        right(self)
        self._layers[1] = self._layers[0]
        self._joined = decoder.with_joints(self.model, self._top, self._layers)

    monkeypatch.setattr(module.Decoder, "freeze", freeze)


def rounded_tables(monkeypatch):
    """The tables on the device are bfloat16, those of the reference are not."""

    def tables(*args):
        return [
            torch.from_numpy(table).bfloat16().float().numpy()
            for table in decoder.rotary_tables(*args)
        ]

    shim = type("shim", (), {**vars(decoder), "rotary_tables": staticmethod(tables)})
    monkeypatch.setattr(worker, "decoder", shim)


def late_sample(monkeypatch):
    """Requests with one token in a mixed step sample the row behind theirs."""
    right = packer._batch

    def batch(step, table, shape):
        buffer = right(step, table, shape)
        if not step.decode_only:
            view = packer.batch_layout(step.descriptor, shape).view(buffer, "sample_index")
            single = np.flatnonzero(step.ends - step.starts == 1)
            view[single] = np.minimum(view[single] + 1, step.num_tokens - 1)
        return buffer

    monkeypatch.setattr(packer, "_batch", batch)


def loop_stands_still(monkeypatch):
    """The noise of a loop's tokens is that of its first."""
    right = plumbing.advance

    def advance(fields, pages, page_sizes):
        kept = fields["position"].clone()
        right(fields, pages, page_sizes)
        fields["position"].copy_(kept)

    monkeypatch.setattr(plumbing, "advance", advance)


def pages_alone(monkeypatch):
    """The prefix cache names a page by its own tokens only."""

    def extend(digests, tokens, count, page_size, salt):
        for page in range(len(digests), count):
            data = tokens[page * page_size : (page + 1) * page_size].tobytes()
            digests.append(kv_manager._digest(kv_manager.root_digest(salt) + data))

    for room in (kv_manager, prefix_cache):
        monkeypatch.setattr(room, "extend_digests", extend)


def last_layer_mixes(monkeypatch):
    """The last layer of a mixed step adds something of another row."""
    right = decoder.layer

    def layer(ops, spec, weights, stream, cache, batch, *ends):
        if batch.rows is not None:
            residual = stream.residual
            last = residual[-1:]
            stream = stream._replace(residual=residual + 0.1 * last)
        return right(ops, spec, weights, stream, cache, batch, *ends)

    monkeypatch.setattr(decoder, "layer", layer)


def rotary_rows_end(monkeypatch):
    """Positions from 200 on have the rotary rows of position 200."""
    right = plumbing.select

    def select(ids, positions, *others):
        return right(ids, positions.clamp(max=200), *others)

    monkeypatch.setattr(plumbing, "select", select)


def target_at_a_chunks_end_lost(monkeypatch):
    """The last token of a chunk is not told the log-probability of the prompt's next token."""
    right = packer._prompt_targets

    def targets(step, table):
        found = right(step, table)
        if found is not None:
            ends = np.cumsum(step.ends - step.starts) - 1
            found[ends[step.ends < table.prompt_len[step.rows]]] = -1
        return found

    monkeypatch.setattr(packer, "_prompt_targets", targets)


def parts_of_a_prompt_are_its_first(monkeypatch):
    """Log-probabilities of a step's prompts are those of its first 64 tokens, again and again."""
    right = worker.TorchWorker._prompt_logprobs

    def logprobs(self, targets, hidden):
        parts = hidden.split(worker.PROMPT_ROWS)
        return right(self, targets, torch.cat([parts[0][: len(part)] for part in parts]))

    monkeypatch.setattr(worker.TorchWorker, "_prompt_logprobs", logprobs)


def padding_lives_in_loops(monkeypatch):
    """The first padding of a loop goes on like a request, and writes to page 0."""
    right = plumbing.advance

    def advance(fields, pages, page_sizes):
        counts = fields["counts"]
        counts[1] += 1
        right(fields, pages, page_sizes)
        counts[1] -= 1

    monkeypatch.setattr(plumbing, "advance", advance)


def masks_of_the_step_before(monkeypatch):
    """New masks go to the device only with other fields of the processors."""
    right = inputs.StepInputs._fill_tables

    def fill(self, layout, processors, tables):
        head, sent = processors[: layout.fields["bias_ids"].offset], self._sent
        if sent is None or sent[0] is not layout or (head != sent[1]).any():
            right(self, layout, processors, tables)

    monkeypatch.setattr(inputs.StepInputs, "_fill_tables", fill)


def allowed_ids_big_endian(monkeypatch):
    """Bytes of masks have the bits of their tokens from the other end."""

    def mask(*args):
        found = encode_mask(*args)
        if found is None:
            return None
        bits = np.unpackbits(found.view(np.uint8), bitorder="little")
        return np.packbits(bits, bitorder="big").view(np.int32)

    for room in (packer, engine):
        monkeypatch.setattr(room, "encode_mask", mask)


def stop_ban_one_too_long(monkeypatch):
    """Stop ids are masked for one token more than `min_tokens`."""
    right = packer._processors

    def processors(step, *others):
        group = step.group
        ends, step_ends = group.min_total, step.ends
        group.__dict__["min_total"] = np.where(ends == step_ends, ends + 1, ends)
        try:
            return right(step, *others)
        finally:
            group.__dict__["min_total"] = ends

    monkeypatch.setattr(packer, "_processors", processors)


def one_seed_for_all(monkeypatch):
    """Requests without a seed all have that of the first."""
    right = engine.derive_seed
    monkeypatch.setattr(engine, "derive_seed", lambda seed, number: right(seed, 0))


BEHIND = "behind the layers"
FAULTS = {
    layer_twice: {"steps": "layer.1, in step 1", "loops": "layer.1, in step 1"},
    rounded_tables: {"steps": "layer.0, in step 1"},
    # The last layer of a mixed step asks for the tokens that are sampled from, and no others.
    late_sample: {"steps": "layer.1, in step", "loops": "layer.1, in step"},
    loop_stands_still: {"loops": BEHIND},
    # Keys of the first layer know nothing of the pages before: the second layer's do.
    pages_alone: {"steps": "layer.1, in step"},
    last_layer_mixes: {"steps": "layer.1, in step"},
    rotary_rows_end: {"steps": "layer.0, in step", "loops": "layer.0, in step"},
    target_at_a_chunks_end_lost: {"steps": BEHIND},
    parts_of_a_prompt_are_its_first: {"steps": BEHIND},
    padding_lives_in_loops: {"loops": "layer.0, in step"},
    masks_of_the_step_before: {"steps": BEHIND},
    allowed_ids_big_endian: {"steps": BEHIND},
    stop_ban_one_too_long: {"steps": BEHIND},
    one_seed_for_all: {"steps": BEHIND, "loops": BEHIND},
}
"""By fault, the runs that show it at least, and where they are wrong first."""
HELD = {layer_twice: "weights layer.1.", rounded_tables: "rotary table cos"}
"""By fault, what the programs are given and should not be."""
LIKE_OTHERS = (rounded_tables, late_sample, stop_ban_one_too_long, one_seed_for_all)
"""Whose places others have as well, or whom another test plants too."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.slow if fault in LIKE_OTHERS else ())
        for fault in FAULTS
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_of_the_engine_is_seen_and_placed(small_model, monkeypatch, fault):
    fault(monkeypatch)
    diff = check_runs(monkeypatch, small_model, *FAULTS[fault])
    assert diff.exit_code == 1
    places = {entry.run: entry.first_wrong for entry in diff.served if entry.complaints}
    for run, place in FAULTS[fault].items():
        assert places[run].startswith(place)
    assert any(HELD[fault] in text for text in diff.problems) if fault in HELD else True


def encoded(function, change):
    """Plants `change(numbers, params)` behind a function of `sampling_encoding`, wherever it is
    known: as if it were written so.
    """

    def plant(monkeypatch):
        right = getattr(sampling_encoding, function)

        def wrong(params, *more):
            return change(right(params, *more), params)

        for name, where in list(sys.modules.items()):
            if name.startswith("twinfer.") and getattr(where, function, None) is right:
                monkeypatch.setattr(where, function, wrong)

    return plant


def scaled_by_e(numbers, params):
    return numbers | {"scale": 1.0 / (params.temperature or 1.0)}


def min_p_in_nats(numbers, params):
    off = params.min_p == 0.0
    return numbers | {"min_p": numbers["min_p"] if off else round(-np.log(params.min_p) * 65536)}


def bias_after_temperature(numbers, params):
    ids, values = numbers
    return ids, [round(value * (params.temperature or 1.0)) for value in values]


def penalties_swapped(numbers, params):
    return numbers | {"presence": numbers["frequency"], "frequency": numbers["presence"]}


ENCODINGS = {
    "temperature by e": encoded("encode_sampling", scaled_by_e),
    "min-p in nats": encoded("encode_sampling", min_p_in_nats),
    "bias after the temperature": encoded("encode_bias", bias_after_temperature),
    "presence and frequency swapped": encoded("encode_processors", penalties_swapped),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault == "temperature by e" else pytest.mark.slow)
        for fault in ENCODINGS
    ],
)
def test_parameters_that_are_encoded_wrong_are_seen(small_model, monkeypatch, fault):
    ENCODINGS[fault](monkeypatch)
    diff = check_runs(monkeypatch, small_model, "steps")
    assert diff.exit_code == 1
    assert "tokens are not those of their logits" in "".join(diff.served[0].complaints)


def test_ranks_that_begin_at_zero_are_seen(small_model, monkeypatch):
    counted = SimpleNamespace(**vars(engine.itertools) | {"count": lambda first: count(first - 1)})
    monkeypatch.setattr(engine, "itertools", counted)
    diff = check_runs(monkeypatch, small_model, "steps")
    assert diff.exit_code == 1
    assert "has rank 0" in "".join(diff.served[0].complaints)


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [
        ({1: 1, 2: 2, 0: 3, 3: 4}, ""),
        ({1: 2, 2: 1, 0: 3}, ""),  # which of the two is first, noise decides
        ({1: 0}, "token 1 has rank 0, its logit has 1 to 2"),
        ({1: 1, 2: 3}, "token 2 has rank 3, its logit has 1 to 2"),
        ({0: 2}, "token 0 has rank 2, its logit has 3"),
    ],
)
def test_ranks_are_those_of_the_logits_where_noise_does_not_decide(ranks, wrong):
    exact = np.array([0.0, 5.0, 4.99, -3.0])
    faithful = exact + 0.01 * np.array([1.0, -1.0, 1.0, -1.0])
    row = judge_row("here", exact, faithful, dict.fromkeys(ranks, 0.0), None, None, ranks=ranks)
    assert row.problem == (wrong and f"here: {wrong}")


def torch_group_of_the_first_layer(monkeypatch):
    """Without streams, the last layer reads the pages of the first one's group."""
    right = regional.RegionalPass.layers

    def layers(self, block, *others):
        groups = self._groups
        if self._keep is None:
            self._groups = [groups[0]] * len(groups)
        found = right(self, block, *others)
        self._groups = groups
        return found

    monkeypatch.setattr(regional.RegionalPass, "layers", layers)


def jax_group_of_the_first_layer(monkeypatch):
    """The same of JAX's."""
    from twinfer.tpu import layers

    right = layers.ScannedPass._of_group

    def of_group(self, group):
        return right(self, group if self._kept is not None else 0)

    monkeypatch.setattr(layers.ScannedPass, "_of_group", of_group)


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("torch", torch_group_of_the_first_layer),
        pytest.param("jax", jax_group_of_the_first_layer, marks=pytest.mark.slow),
    ],
    ids=["torch", "jax"],
)
def test_programs_without_streams_are_judged_too(tmp_path, monkeypatch, backend, fault):
    """They are those that users get."""
    fault(monkeypatch)
    subject = open_model(tmp_path, 1)
    target = parse_target(f"{backend}:cpu")
    diff = check_served(subject, [target], modes=("S",), definition="off")
    wrong = {run.run: run.first_wrong for run in diff.served if run.complaints}
    assert wrong == {"plain": "in the programs without streams, which users get"}
    assert diff.exit_code == 1


def test_what_is_wrong_with_streams_is_not_blamed_on_programs_without(small_model, monkeypatch):
    late_sample(monkeypatch)
    diff = check_runs(monkeypatch, small_model, "steps", "plain")
    wrong = {run.run: run.first_wrong for run in diff.served}
    assert wrong["steps"].startswith("layer.1, in step")
    assert wrong["plain"] == "as in the run 'steps'"


@pytest.mark.parametrize("length", [128, 256])
@pytest.mark.parametrize("loops", [False, True])
def test_one_request_fills_the_context(small_model, length, loops):
    """Or what goes wrong at late positions, and across chunks of a prompt, is not seen."""
    subject = open_subject(small_model, load_format="dummy", max_model_len=length)
    asks = workload(subject, loops=loops)
    ends = [len(ask.prompt) + ask.params.max_tokens for ask in asks]
    assert ends[0] == max(ends) == length
    assert asks[0].params.max_tokens > 2 * sorted(ask.params.max_tokens for ask in asks)[-2] - 1
    if not loops:
        assert asks[0].params.prompt_logprobs
        assert asks[1].params.prompt_logprobs
        assert len(asks[0].prompt) + len(asks[1].prompt) > subject.most_tokens * 3 // 2


def test_a_mistake_that_all_share_is_our_definition(small_model, monkeypatch):
    right = decoder.rope_inverse_frequencies

    def frequencies(*args):
        inverse, scaling = right(*args)
        return inverse * 1.01, scaling

    monkeypatch.setattr(decoder, "rope_inverse_frequencies", frequencies)
    diff = check(small_model)
    assert diff.exit_code == 1
    assert not [complaint for entry in diff.served for complaint in entry.complaints]
    (problem,) = diff.problems
    assert problem.startswith("our definition: transformers")


@pytest.mark.slow
@pytest.mark.parametrize("is_rounded", [True, False])
def test_an_embedding_is_multiplied_as_transformers_does(tmp_path, monkeypatch, is_rounded):
    """In float32 a factor that is not rounded to the run dtype is the same."""
    own = {"hidden_size": 96, "sliding_window": 64, "query_pre_attn_scalar": 32}
    folder = written(tmp_path, "Gemma3ForCausalLM", "gemma3_text", **own)
    if not is_rounded:
        monkeypatch.setattr(decoder, "rounded", lambda factor, dtype: factor)
    subject = open_subject(folder, load_format="dummy")
    diff = check_served(subject, [parse_target("torch:cpu")])
    assert diff.exit_code == (0 if is_rounded else 1)
    assert all("another embedding in bfloat16" in problem for problem in diff.problems)
    assert bool(diff.problems) != is_rounded


def test_what_was_not_reached_is_named():
    idle = Served([], Counter({"mixed": 3, "decode": 2}), 0, 0, {})
    preemption = "preemption: none in the run 'steps'"
    assert list(served._not_reached("steps", idle, keeps=False)) == [preemption]
    assert list(served._not_reached("steps", idle, keeps=True)) == [
        "prefix cache: none in the run 'steps'",
        preemption,
    ]
    assert "loop: none in the run 'loops'" in list(served._not_reached("loops", idle, keeps=True))


@pytest.fixture
def without_prefixes(monkeypatch):
    """Engines that serve keep no prefixes."""
    right = served.serve

    def serve(*args, **options):
        return right(*args, **options, enable_prefix_caching=False)

    monkeypatch.setattr(served, "serve", serve)


# What is named is shown by a run that is made up, above.
@pytest.mark.slow
def test_a_prefix_cache_that_no_run_reached_is_named(small_model, without_prefixes):
    diff = check(small_model, definition="off")
    assert diff.missing == [
        f"a torch:cpu, mode S: prefix cache: none in the run {run!r}"
        for run in ("steps", "loops", "plain")
    ]
    assert diff.exit_code == 3


@pytest.fixture
def short_windows(tmp_path):
    """The folder of a Mistral whose layers all have windows of 4 tokens."""
    own = {"head_dim": 16, "max_position_embeddings": 512, "sliding_window": 4}
    return written(tmp_path, "MistralForCausalLM", "mistral", **own)


def test_layers_that_all_have_short_windows_are_judged(short_windows):
    """Requests hold less while they decode than while their prompts are read."""
    diff = check(short_windows, definition="off")
    assert not diff.missing
    diff.assert_ok()
    assert diff.served[0].preemptions


@pytest.mark.slow
def test_of_short_windows_alone_some_run_has_to_find_a_prefix(short_windows, without_prefixes):
    diff = check(short_windows, definition="off")
    assert "prefix cache: none in any run" in "".join(diff.missing)
    assert not any("none in the run" in text for text in diff.missing)
    assert diff.exit_code == 3


def test_the_workload_has_pages_that_are_equal_alone(small_model):
    subject = open_subject(small_model, load_format="dummy")
    page = subject.page_size
    asks = workload(subject)
    waves = {ask.wave for ask in asks}
    assert waves == {0, 1}
    assert len(asks) > subject.max_num_seqs
    pairs = [
        (a, b)
        for a in asks
        for b in asks
        if a is not b and min(len(a.prompt), len(b.prompt)) >= 2 * page
        if (a.prompt[page : 2 * page] == b.prompt[page : 2 * page]).all()
        if (a.prompt[:page] != b.prompt[:page]).any()
    ]
    assert pairs
    assert all(ask.params.logprobs is None for ask in workload(subject, loops=True))


def test_a_context_that_is_too_short_for_the_workload_is_refused(small_model):
    def opened(length):
        return open_subject(small_model, load_format="dummy", max_model_len=length)

    with pytest.raises(ConfigError, match="max_model_len: got 32, allowed is at least 33"):
        workload(opened(32))
    assert max(len(ask.prompt) for ask in workload(opened(33))) == 32


def test_the_chooser_takes_what_the_sampler_is_asked_for():
    logits = np.array([[0.0, 5.0, 4.9, -3.0]], np.float32)
    prompt = np.array([1, 1], np.int32)

    def chosen(index=0, tokens=(), **params):
        answer = Answer(Ask(prompt, SamplingParams(seed=3, **params)), list(tokens))
        return int(chooser(answer, index)(logits)[0])

    assert chosen(temperature=0.0) == 1
    assert chosen(temperature=0.0, logit_bias={3: 20.0}) == 3
    assert chosen(temperature=0.0, repetition_penalty=2.0) == 2
    assert chosen(1, (1,), temperature=0.0, presence_penalty=1.0) == 2
    assert {chosen(i, (0,) * i, temperature=5.0, top_k=2) for i in range(20)} == {1, 2}
    assert chosen(temperature=0.0, allowed_token_ids=[0, 3]) == 0
    assert chosen(temperature=0.0, banned_token_ids=[1]) == 2
    stops = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": [1]}
    assert (chosen(**stops), chosen(1, (2,), **stops)) == (2, 1)
    banned = {"temperature": 0.0, "banned_sequences": [(2, 0, 1)]}
    assert [chosen(2, t, **banned) for t in ((2, 0), (0, 0), (0, 2))] == [2, 1, 1]


def ends(tokens, reason, **params):
    """What is said of an answer that ends so."""
    settings = {"max_tokens": 4, "min_tokens": 1, "stop_token_ids": [7]} | params
    answer = Answer(Ask(np.array([1], np.int32), SamplingParams(**settings)), tokens)
    answer.finish_reason = reason
    return [*served._wrong_ends(Served([answer], Counter(), 0, 0, {}))]


def test_an_answer_ends_at_its_first_stop_id_or_its_length():
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert not ends([7, 1, 7], stop)
    assert not ends([7, 1, 2, 3], length)
    assert ends([7, 1, 7, 2], length) == ["request 0 ended by length with 4 of 3 tokens"]
    assert ends([7], stop) == ["request 0 ended by stop with 1 of 4 tokens"]
    assert ends([1, 2, 3], length) == ["request 0 ended by length with 3 of 4 tokens"]


def test_requests_that_ended_by_error_are_one_problem():
    ask = Ask(np.array([1], np.int32), SamplingParams(max_tokens=4))
    answers = [
        Answer(ask, [1, 2, 3, 4], finish_reason=FinishReason.LENGTH),
        *(Answer(ask, [1], finish_reason=FinishReason.ERROR) for _ in range(2)),
    ]
    assert [*served._wrong_ends(Served(answers, Counter(), 0, 0, {}))] == [
        "2 of 3 requests ended by error; the first is request 1 with 1 of 4 tokens"
    ]


@pytest.mark.parametrize("failing", [["steps"], ["steps", "loops", "plain"]])
def test_an_engine_that_fails_is_missing_and_the_others_are_judged(
    small_model, monkeypatch, failing
):
    right = served.serve

    def serve(*args, **options):
        runs = [name for name, of in served.RUNS.items() if of.items() <= options.items()]
        if runs[-1] in failing:
            raise InternalError("page 15 cannot be\nregistered")
        return right(*args, **options)

    monkeypatch.setattr(served, "serve", serve)
    diff = check(small_model, definition="off")
    assert diff.exit_code == 3
    assert [run.run for run in diff.served] == [run for run in served.RUNS if run not in failing]
    assert diff.missing == [
        f"a torch:cpu, {run}, mode S: the engine failed with InternalError: page 15 cannot be "
        "registered"
        for run in failing
    ]


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        ({5: (-0.1, 1), 3: (-2.5, 2)}, ""),
        ({5: (-0.1, 1), 2: (-2.5, 2)}, "token 3 is not in its list"),
        ({5: (-0.1, 0), 3: (-2.5, 1)}, r"token 3 has ranks \[0, 1\]"),
        ({5: (-2.5, 1), 3: (-0.1, 2)}, r"token 3 has ranks \[1, 2\]"),
        ({5: (-0.1, 1), 4: (-0.5, 2), 3: (-2.5, 9)}, ""),
    ],
)
@pytest.mark.parametrize("of_prompt", [False, True])
def test_a_list_of_logprobs_has_its_token_and_ranks(lists, complaint, of_prompt):
    top = {token: engine.Logprob(*found) for token, found in lists.items()}
    asked = {"prompt_logprobs": 2} if of_prompt else {"logprobs": 2}
    answer = Answer(Ask(np.array([1, 3], np.int32), SamplingParams(**asked)), [3])
    if of_prompt:
        answer.prompt_logprobs = [None, top]
    else:
        answer.logprobs = [top]
    found = " ".join(served._wrong_lists(Served([answer], Counter(), 0, 0, {})))
    assert re.search(complaint, found) if complaint else not found


def pick(logits):
    return logits.argmax(-1)


@pytest.mark.parametrize(
    ("token", "noise", "is_tie"), [(1, 0.0, None), (2, 0.2, True), (2, 0.001, False)]
)
def test_a_greedy_token_is_a_tie_within_the_noise(token, noise, is_tie):
    exact = np.array([0.0, 5.0, 4.9, -3.0])
    faithful = exact + noise * np.array([1.0, -1.0, 1.0, -1.0])
    row = judge_row("here", exact, faithful, {}, token, pick, by_logits=True)
    assert (row.flip.tie if row.flip else None) is is_tie


@pytest.mark.parametrize("noise", [0.2, 0.001])
def test_a_drawn_token_is_a_tie_if_noise_reaches_it(noise):
    exact = np.array([0.0, 5.0, 4.9, -3.0])
    faithful = exact + noise * np.array([1.0, -1.0, 1.0, -1.0])
    row = judge_row("here", exact, faithful, {}, 2, pick)
    assert row.flip.tie is (noise > 0.1)


def test_logprobs_are_judged_together_and_one_by_one():
    rng = np.random.default_rng(0)
    right = [Row(f"p{i}", rng.normal(size=8) * 0.01, 0.01) for i in range(100)]
    fine = judge_rows(right, "P", 0, **ABOUT)
    assert not fine.complaints
    assert 0.8 < fine.sigma < 1.2
    louder = [Row(row.place, row.errors * 2, row.noise) for row in right]
    assert any("sigma" in c for c in judge_rows(louder, "P", 0, **ABOUT).complaints)
    one = [*right[:-1], Row("bad", right[-1].errors + 0.1, 0.01)]
    assert any("bad" in c for c in judge_rows(one, "P", 0, **ABOUT).complaints)


@pytest.mark.parametrize(
    ("positions", "own", "first_wrong", "is_wrong"),
    [
        (1, 0.005, "", False),
        (2, 0.005, "", False),
        (3, 0.005, "", True),  # as many are no luck
        (1, 0.1, "", True),  # wrong behind the stream that the engine had
        (1, None, "", True),  # no pass is known that finished it
        (1, 0.005, "layer.1", True),  # what carried the error is wrong itself
    ],
)
def test_a_position_of_little_noise_is_judged_by_the_stream_of_the_engine(
    positions, own, first_wrong, is_wrong
):
    rng = np.random.default_rng(0)
    right = [Row(f"p{i}", rng.normal(size=8) * 0.01, 0.01) for i in range(100)]
    by_own = () if own is None else (Row("own", np.full(8, own), 0.01),)
    off = [Row(f"off{i}", np.full(8, 0.06), 0.01, own=by_own) for i in range(positions)]
    found = judge_rows([*right, *off], "P", 0, first_wrong, **ABOUT)
    assert any("off" in text for text in found.complaints) is is_wrong


def streams(error, layers=2, tokens=20, dim=16):
    """Streams whose error is `error` [layer + 1, tok] times their noise."""
    rng = np.random.default_rng(0)
    of = [f"step {1 + i // 10} (mixed), request 0, position {i}" for i in range(tokens)]
    found = StreamErrors(of, layers)
    for layer in range(layers + 1):
        exact = rng.normal(size=(tokens, dim))
        noise = 0.01 * rng.normal(size=(2, tokens, dim))
        got = exact + error[layer][:, None] * noise[0]
        found.look(layer, np.arange(tokens), got, exact, exact + noise[1])
    return found


def test_streams_name_the_first_layer_and_its_first_token():
    error = np.ones((3, 20))
    sigmas, first_wrong = judge_streams(streams(error), "P")
    assert not first_wrong
    assert all(0.8 < sigma < 1.25 for sigma in sigmas)
    error[2, 3] = error[1, 14] = 50.0
    _, first_wrong = judge_streams(streams(error), "P")
    assert first_wrong.startswith("layer.0, in step 2 (mixed), request 0, position 14")
    _, first_wrong = judge_streams(streams(np.full((3, 20), 2.0)), "P")
    assert first_wrong.startswith("the embedding, over all tokens: sigma 2")


@pytest.mark.parametrize(("layer", "is_wrong"), [(0, True), (1, True), (2, False)])
def test_only_the_last_layer_may_drop_a_token(layer, is_wrong):
    error = np.ones((3, 20))
    error[layer, 5] = np.nan
    _, first_wrong = judge_streams(streams(error), "P")
    assert bool(first_wrong) is is_wrong


def test_tokens_without_a_reference_are_counted():
    found = StreamErrors(["", "", ""], 0)
    one = np.ones((1, 4))
    found.look(0, np.array([1]), one, one, one)
    assert found.missing == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logprob_that_is_not_finite_is_wrong(value):
    exact = np.array([0.0, 5.0, 4.9, -3.0])
    row = judge_row("here", exact, exact, {1: value}, None, None)
    found = judge_rows([row], "S", 0, **ABOUT)
    assert any("not finite" in complaint for complaint in found.complaints)


def test_the_command(small_model, tmp_path, capsys):
    result, prompts = tmp_path / "r.json", tmp_path / "p.jsonl"
    words = ["numerics", "served", "--model", small_model, "--load-format", "dummy"]
    words += ["--on", "torch:cpu", "--definition", "off", "--mode", "S"]
    assert main([*words, "--json", str(result), "--junit", str(tmp_path / "r.xml")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("EQUAL within the gates")
    assert "definition: not checked" in shown
    record = json.loads(result.read_text())
    assert [entry["run"] for entry in record["served"]] == ["steps", "loops", "plain"]
    assert "--max-model-len" not in record["environment"]["command"]
    assert "--on torch:cpu" in record["environment"]["command"]
    assert main(["numerics", "report", str(result)]) == 0
    assert "What engines served" in (tmp_path / "r.html").read_text()

    assert main([*words, "--max-model-len", "32"]) == 2
    assert "max_model_len: got 32" in capsys.readouterr().err
    assert main([*words, "--mode", "X"]) == 2
    prompts.write_text(json.dumps({"token_ids": [1] * 240}) + "\n")
    assert main([*words, "--prompts", str(prompts)]) == 2
    assert "allowed are 1 to 232" in capsys.readouterr().err


def test_a_prompt_outside_of_the_vocabulary_is_refused(small_model):
    subject = open_subject(small_model, load_format="dummy")
    with pytest.raises(RequestError, match="prompt 0 has a token"):
        workload(subject, [np.array([300], np.int32)])


@pytest.mark.slow
def test_a_rank_that_a_rounding_moves_is_judged_by_the_stream(tmp_path, monkeypatch):
    """In a mixture a rounding may choose another expert: then the references' logits, which agree
    by luck, say nothing of the ranks.
    """
    build("glm4-moe-lite", folder := str(tmp_path / "it"))
    monkeypatch.setattr(served, "RUNS", {"steps": served.RUNS["steps"]})
    subject, on = open_subject(folder, dtype="bfloat16"), [parse_target("torch:cpu")]
    check_served(subject, on, modes=("P",), definition="off").assert_ok()
