"""Bundles: what one backend recorded replays on the other, a fault is found where it is, damage
is named.
"""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from twinfer.numerics.bundles import bundle as bundles
from twinfer.numerics.bundles.capturing import capture_model
from twinfer.numerics.bundles.steps import Recorded, from_json, to_json
from twinfer.numerics.errors import NotComparable
from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.questions.live import parse_policy
from twinfer.numerics.questions.replay import replay
from twinfer.numerics.questions.saved import compare
from twinfer.numerics.sides.steps import default_prompts, held_entries, make_steps
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.errors import ConfigError
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import history_rows

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return open_subject(str(folder), load_format="dummy")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Two layers in two page groups of one buffer. The second releases what its window leaves."""
    folder = tmp_path_factory.mktemp("model")
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    windows = {"use_sliding_window": True, "sliding_window": 9}
    (folder / "config.json").write_text(json.dumps(CONFIG | windows | kinds))
    return open_subject(str(folder), load_format="dummy", page_size=8)


def captured(subject, backend, count=2, **options):
    steps = make_steps(subject, default_prompts(subject, seed=1))[:count]
    return capture_model(subject, parse_target(f"{backend}:cpu"), steps, **options)


@pytest.fixture(scope="module")
def stored(subject, tmp_path_factory):
    """A bundle of the torch backend on disk: one step, as JAX takes seconds to compile for
    another.
    """
    folder = tmp_path_factory.mktemp("bundles") / "torch"
    bundles.write(captured(subject, "torch", 1), str(folder))
    return folder


@pytest.fixture
def copy(stored, tmp_path):
    return shutil.copytree(stored, tmp_path / "bundle")


def test_what_is_read_is_what_was_written(subject, stored, tmp_path):
    one, two = captured(subject, "torch", 1), bundles.read(str(stored))
    assert two.source == one.source
    assert two.subject == one.subject
    for a, b in zip(one.steps, two.steps, strict=True):
        assert a.taps == b.taps
        assert (a.step.descriptor, a.step.shape, a.step.sampler) == (
            b.step.descriptor,
            b.step.shape,
            b.step.sampler,
        )
        assert np.array_equal(a.step.batch, b.step.batch)
        assert np.array_equal(a.step.sampling, b.step.sampling)
        assert a.arrays.keys() == b.arrays.keys()
        for name, value in a.arrays.items():
            assert value.dtype == b.arrays[name].dtype
            assert value.tobytes() == b.arrays[name].tobytes(), name
    bundles.write(two, str(tmp_path / "again"))
    files = [
        sorted((p.name, p.read_bytes()) for p in f.glob("s*")) for f in (stored, tmp_path / "again")
    ]
    assert files[0] == files[1]
    with pytest.raises(ConfigError, match="there already"):
        bundles.write(two, str(stored))


@pytest.mark.parametrize(
    ("recorded", "other"),
    [
        # JAX compiles its programs, and each op alone.
        pytest.param("jax", "torch", marks=pytest.mark.slow),
        pytest.param("torch", "jax", marks=pytest.mark.slow),
        ("torch", "torch"),
    ],
)
def test_a_bundle_replays_on_the_other_backend(subject, stored, tmp_path, recorded, other):
    folder = stored
    if recorded == "jax":
        folder = bundles.write(captured(subject, "jax", 1), str(tmp_path / "jax"))
    diff = replay(bundles.read(str(folder)), [parse_target(f"{other}:cpu")])
    diff.assert_ok()
    scopes = {(f.side.split()[0], f.scope) for f in diff.findings}
    assert scopes == {
        (s, k) for s in ("recorded", "a") for k in ("op", "layer", "inherited", "logits")
    }
    assert {f.layer for f in diff.findings if f.scope == "op"} == {-1, 0, 1}


@pytest.mark.parametrize("guilty", ["recorded", "a"])
def test_a_fault_is_found_on_the_side_that_has_it(subject, tmp_path, guilty):
    run = subject.with_dtype("float32")
    fault = plant("attention-scale-1e-2@1", subject.model)
    made = captured(run, "torch", 1, fault=fault if guilty == "recorded" else None)
    diff = replay(made, [parse_target("torch:cpu")], faults={"a": fault} if guilty == "a" else None)
    assert diff.exit_code == 1
    first = diff.first_divergence()
    assert (first.side.split()[0], first.layer, first.tap) == (guilty, 1, "paged_attention")
    assert {f.side.split()[0] for f in diff.failures} == {guilty}


def test_a_layer_that_writes_elsewhere_is_kept_whole(subject):
    fault = plant("kv-slot-off-by-one", subject.model)
    made = captured(subject, "torch", 1, fault=fault)
    assert "layer.0.kv" in made.steps[0].arrays
    diff = replay(made, [parse_target("torch:cpu")])
    first = diff.first_divergence()
    assert (first.side, first.layer) == ("recorded torch:cpu", 0)
    assert first.tap.startswith("norm_rope_write_kv")


def test_a_step_goes_on_with_the_cache_of_the_one_before(subject):
    diff = replay(captured(subject, "torch", 4), [parse_target("torch:cpu")])
    diff.assert_ok()
    assert {f.step for f in diff.findings} == {0, 1, 2, 3}


def test_a_bundle_has_the_page_tables_of_all_groups(windowed, tmp_path):
    target, steps = parse_target("torch:cpu"), make_steps(windowed, default_prompts(windowed, 1))
    groups = windowed.layout.groups
    held = [held_entries(step, groups) for step in steps]
    assert any(of_step[0].sum() > of_step[1].sum() for of_step in held)  # pages are released
    made = capture_model(windowed, target, steps)
    bundle = bundles.read(str(bundles.write(made, str(tmp_path / "bundle"))))
    arrays = bundle.steps[-1].arrays
    assert "layer.1.kv_rows" in arrays
    assert "layer.1.kv" not in arrays
    replay(bundle, [target]).assert_ok()
    faulty = capture_model(windowed, target, steps, fault=plant("page-table-row@1"))
    first = replay(faulty, [target]).first_divergence()
    assert (first.side, first.layer) == ("recorded torch:cpu", 1)


def test_a_bundle_of_other_page_groups_is_refused(windowed, subject):
    line = to_json(Recorded(make_steps(windowed, default_prompts(windowed, 1))[0]))
    with pytest.raises(NotComparable, match="has 2 page tables a request, the model's layers have"):
        from_json(line, "line 1", subject)


def test_layers_only(subject):
    made = captured(subject, "torch", 1, taps=())
    assert not made.steps[0].taps
    diff = replay(made, [parse_target("torch:cpu")])
    diff.assert_ok()
    assert {f.scope for f in diff.findings if f.side.startswith("recorded")} == {
        "layer",
        "inherited",
        "logits",
    }


def edit(folder, change):
    """Change the manifest and sign it again, as somebody with bad intentions would."""
    path = folder / bundles.MANIFEST
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    change(manifest)
    manifest["sha256"] = bundles._sha(bundles._dumps(manifest).encode())
    path.write_text(json.dumps(manifest))


def edit_steps(folder, change):
    """Change the first step, and sign."""
    path = folder / bundles.STEPS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[0])
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(data)
    edit(
        folder,
        lambda m: m["files"].update(
            {path.name: {"bytes": len(data), "sha256": bundles._sha(data)}}
        ),
    )


def truncate(folder):
    path = folder / "step-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def corrupt(folder):
    path = folder / "step-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def outside(name):
    return lambda folder: edit(
        folder, lambda m: m["files"].update({name: {"bytes": 5, "sha256": "0"}})
    )


def link(folder):
    path = folder / "step-0000.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def not_safetensors(folder):
    data = b"\xff" * 64
    (folder / "step-0000.safetensors").write_bytes(data)
    entry = {"bytes": 64, "sha256": bundles._sha(data)}
    edit(folder, lambda m: m["files"].update({"step-0000.safetensors": entry}))


def reseed(path):
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


HUGE = ["mixed", 1 << 20, 1 << 20, 9]
DAMAGE = {
    "truncated": (truncate, "truncated"),
    "corrupted": (corrupt, "SHA-256"),
    "a file is missing": (lambda f: (f / bundles.STEPS).unlink(), "cannot be read"),
    "no manifest": (lambda f: (f / bundles.MANIFEST).unlink(), "cannot be read"),
    "not JSON": (lambda f: (f / bundles.MANIFEST).write_text("{"), "JSON"),
    "deep JSON": (lambda f: (f / bundles.MANIFEST).write_text("[" * 100_000), "JSON"),
    "a manifest of something else": (lambda f: (f / bundles.MANIFEST).write_text("{}"), "format"),
    "an edited manifest": (lambda f: reseed(f / bundles.MANIFEST), "edited"),
    "another version": (lambda f: edit(f, lambda m: m.update(version=99)), "version"),
    "another model": (lambda f: edit(f, lambda m: m["sizes"].update(seed=1)), "another model"),
    "the model is not here": (lambda f: edit(f, lambda m: m.update(model="/nowhere")), "--model"),
    "a path that leads out": (outside("../../secret.jsonl"), "plain name"),
    "an absolute path": (outside("/secret.safetensors"), "plain name"),
    "a link that leads out": (link, "link"),
    "no safetensors": (not_safetensors, "damaged"),
    "no steps": (lambda f: edit_steps(f, lambda s: s.clear()), "descriptor"),
    "a page outside of the cache": (lambda f: edit_steps(f, lambda s: poke(s, "page_table", 10**6)),
    "page_table"),
    "a slot outside of the cache": (lambda f: edit_steps(f, lambda s: poke(s, "slots", 10**8)),
    "slots"),
    "a token outside of the vocabulary": (lambda f: edit_steps(f,
    lambda s: poke(s, "token_ids", 300)), "token_ids"),
    "a text for a number": (lambda f: edit_steps(f, lambda s: poke(s, "counts", "1")), "counts"),
    "a number that is too large": (lambda f: edit_steps(f, lambda s: poke(s, "counts", 2**40)),
    "counts"),
    "a step of terabytes": (lambda f: edit_steps(f, lambda s: s.update(descriptor=HUGE)),
    "numbers"),
    "an unknown sampler": (lambda f: edit_steps(f, lambda s: s.update(sampler="nobody")),
    "sampler"),
}  # fmt: skip


def poke(line, name, value):
    line["batch"][name][0] = value


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_bundle_is_named(copy, name):
    damage, message = DAMAGE[name]
    bundles.read(str(copy))
    damage(copy)
    with pytest.raises(NotComparable, match=message) as caught:
        bundles.read(str(copy))
    assert caught.value.exit_code == 3
    assert len(str(caught.value)) < 600


def test_an_array_that_is_missing_is_named(subject):
    made = captured(subject, "torch", 1)
    del made.steps[0].arrays["layer.1.kv_rows"]
    with pytest.raises(NotComparable, match=r"layer\.1\.kv_rows"):
        replay(made, [parse_target("torch:cpu")])


def test_a_copy_of_the_model_elsewhere_will_do(subject, stored, tmp_path):
    other = shutil.copytree(subject.folder, tmp_path / "copy")
    assert bundles.read(str(stored), model=str(other)).subject.folder == str(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(NotComparable, match="another model"):
        bundles.read(str(stored), model=str(other))


# --- live engines
# --------------------------------------------------------------------------------------------------


def engine(subject, backend, capture, **options):
    settings = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32} | options
    config = EngineConfig(
        model=subject.folder, backend=backend, device="cpu", load_format="dummy", capture=capture,
        **settings
    )  # fmt: skip
    return Engine(config, subject.model, subject.folder)


def serve(made, count=3):
    rng = np.random.default_rng(4)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    requests = [made.add(f"r{i}", rng.integers(0, 300, 9 + 20 * i), greedy) for i in range(count)]
    while made.has_work:
        made.step()
    made.close()
    return [request.output for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_live_engine_keeps_steps_that_replay_on_the_other_backend(
    subject, tmp_path, backend, other
):
    """The last step of the longest request: decodes, whose tokens the host does not know when it
    starts them.
    """
    made = engine(subject, backend, f"{tmp_path / 'kept'},step=6", async_scheduling=True)
    serve(made)
    (folder,) = made.worker.kept
    bundle = bundles.read(str(folder))
    assert bundle.steps[0].step.descriptor.kind == "decode"
    assert bundle.start is not None
    diff = replay(bundle, [parse_target(f"{other}:cpu")])
    diff.assert_ok()
    scopes = {f.scope for f in diff.findings if f.side.startswith("recorded")}
    assert scopes == {"layer", "inherited"}
    recorded = bundle.steps[0].arrays
    recorded["layer.1.hidden"] = recorded["layer.1.hidden"] * 2
    diff = replay(bundle, [parse_target("torch:cpu")])
    assert diff.first_divergence().side.startswith("recorded")
    assert diff.first_divergence().name.startswith("layer.1.")


def test_bundles_of_live_engines_are_compared_by_what_they_have(subject, tmp_path):
    """They have no logits, which is said; their tokens are judged."""
    kept = []
    for name in ("one", "two"):
        made = engine(subject, "torch", f"{tmp_path / name},step=3")
        serve(made)
        kept.append(bundles.read(str(made.worker.kept[0])))
    diff = compare(*kept)
    assert (diff.exit_code, diff.problems) == (3, [])
    (missing,) = diff.missing
    assert missing.startswith(
        "2: final logits of step 0: this bundle and the one of torch:cpu before it lack them; a live"
    )
    assert {f.side[0] for f in diff.findings} == {"a", "b"}
    with_logits = captured(subject, "torch", 1)
    recorded = with_logits.steps[0].arrays
    lacks = replace(with_logits, steps=[replace(with_logits.steps[0], arrays=recorded.copy())])
    del lacks.steps[0].arrays["logits"]
    assert "the one of torch:cpu before it lacks them" in compare(lacks, with_logits).missing[0]
    assert "this bundle lacks them" in compare(with_logits, lacks).missing[0]
    tokens = kept[1].steps[0].arrays["tokens"]
    tokens[0] = (tokens[0] + 1) % 300
    diff = compare(*kept)
    assert diff.exit_code == 1
    assert f"token {tokens[0]} was served" in diff.problems[0]


def test_a_live_engine_with_captures_keeps_its_page_groups(windowed, tmp_path):
    made = engine(windowed, "torch", f"{tmp_path / 'kept'},step=6", page_size=8)
    assert made.config.page_groups
    serve(made)
    bundle = bundles.read(str(made.worker.kept[0]))
    assert bundle.steps[0].step.shape.num_groups == 2
    replay(bundle, [parse_target("torch:cpu")]).assert_ok()
    with pytest.raises(ConfigError, match="capture: keeps steps with page_groups True, got False"):
        engine(windowed, "torch", f"{tmp_path / 'kept'},step=6", page_groups=False)


def test_a_live_engine_whose_captures_cannot_be_written_does_not_start(subject, tmp_path):
    """It would end at the first step that is kept."""
    with pytest.raises(ConfigError, match="capture: cannot make the folder /dev/null/kept: Not a"):
        engine(subject, "torch", "/dev/null/kept,step=6")
    engine(subject, "torch", f"{tmp_path / 'new'},step=6").close()
    assert not (tmp_path / "new").exists()


def test_a_live_engine_keeps_the_histories_of_its_steps(subject, tmp_path):
    """A step brought one token of it; the bundle has all that were read back."""
    made = engine(subject, "torch", f"{tmp_path / 'kept'},step=6")
    prompts = np.random.default_rng(4).integers(0, 300, (2, 12))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    made.add("free", prompts[0], params)
    penalised = made.add("penalised", prompts[1], replace(params, presence_penalty=1.0))
    while made.has_work:
        made.step()
    made.close()
    recorded = bundles.read(str(made.worker.kept[0])).steps[0]
    step = recorded.step
    (history,), tokens = step.histories, [*prompts[1].tolist(), *penalised.output]
    known = history[history >= 0].tolist()
    assert len(known) > len(prompts[1])
    assert known == tokens[: len(known)]
    assert len(history_rows(step)) == 1
    line = to_json(Recorded(step))
    again = from_json(line, "line 1", subject).step
    assert to_json(Recorded(again)) == line
    assert np.array_equal(again.histories, step.histories)
    line["processors"]["history_row"][0] = 9
    with pytest.raises(NotComparable, match="history_row must be -1 to"):
        from_json(line, "line 1", subject)


def spoiled(made, monkeypatch, number, change):
    """Let the worker of an engine serve `change` of the output of one step."""
    execute = made.worker._worker.execute

    def served(step):
        handle = execute(step)
        if step.step_id != number:
            return handle
        output = change(handle.result())
        return SimpleNamespace(result=lambda: output)

    monkeypatch.setattr(made.worker._worker, "execute", served)


def with_layer(output, layer, times):
    """An output whose stream behind a layer is so many times as large."""
    streams = output.streams.copy()
    streams[:, layer + 1] *= np.asarray(times, streams.dtype)
    return replace(output, streams=streams)


def test_capturing_changes_no_token(subject, tmp_path):
    assert serve(engine(subject, "torch", None)) == serve(
        engine(subject, "torch", f"{tmp_path},nan,request=r1")
    )


def test_steps_of_a_request_are_kept_up_to_a_limit(subject, tmp_path):
    made = engine(subject, "torch", f"{tmp_path},request=r2,most=3")
    serve(made)
    assert len(made.worker.kept) == 3
    assert all("request" in folder.name for folder in made.worker.kept)


def test_a_nan_is_kept(subject, tmp_path, monkeypatch):
    made = engine(subject, "torch", f"{tmp_path},nan")
    spoiled(made, monkeypatch, 3, lambda output: with_layer(output, 1, np.nan))
    serve(made)
    (folder,) = made.worker.kept
    assert folder.name == "step-000003-nan"
    assert np.isnan(bundles.read(str(folder)).steps[0].arrays["layer.1.hidden"]).all()


@pytest.mark.parametrize(
    ("policy", "token", "why"), [("nan", -1, "nan"), ("mismatch=torch:cpu", 7, "mismatch")]
)
def test_a_token_that_is_not_that_of_the_logits_is_kept(
    subject, tmp_path, monkeypatch, policy, token, why
):
    """The model computes the right logits again: only what was served is wrong."""
    made = engine(subject, "torch", f"{tmp_path},{policy},most=1")
    wrong = lambda output: replace(output, tokens=np.full_like(output.tokens, token))  # noqa: E731
    spoiled(made, monkeypatch, 4, wrong)
    serve(made)
    (folder,) = made.worker.kept
    assert folder.name == f"step-000004-{why}"
    diff = replay(bundles.read(str(folder)), [parse_target("torch:cpu")])
    assert any("recorded" in text and "position" in text for text in diff.problems)


def test_what_another_backend_computes_otherwise_is_kept(subject, tmp_path, monkeypatch):
    made = engine(subject, "torch", f"{tmp_path},mismatch=torch:cpu,every=2,most=1")
    spoiled(made, monkeypatch, 4, lambda output: with_layer(output, 1, 1.1))
    serve(made)
    assert [folder.name for folder in made.worker.kept] == ["step-000004-mismatch"]
    assert "layer.1" in bundles.read(str(made.worker.kept[0])).source["why"]


def test_a_log_probability_that_is_not_that_of_the_logits_is_kept(subject, tmp_path, monkeypatch):
    made = engine(subject, "torch", f"{tmp_path},mismatch=torch:cpu,most=1")

    def wrong(output):
        top = output.logprobs
        return replace(output, logprobs=replace(top, top=top.top - 0.2))

    spoiled(made, monkeypatch, 2, wrong)
    made.add("r", np.arange(9), SamplingParams(temperature=0, max_tokens=6, logprobs=5))
    while made.has_work:
        made.step()
    made.close()
    assert [folder.name for folder in made.worker.kept] == ["step-000002-mismatch"]
    assert "log-prob" in bundles.read(str(made.worker.kept[0])).source["why"]


@pytest.mark.parametrize(
    "text", ["", "dir", "dir,step", "dir,step=x", "dir,most=0,nan", "dir,mismatch=cuda", ",nan"]
)
def test_policies_are_checked(text):
    with pytest.raises(ConfigError, match=r"capture|target"):
        parse_policy(text)


def test_an_engine_without_the_option_has_no_part_of_it(subject):
    made = engine(subject, "torch", None)
    assert type(made.worker).__name__ == "TorchWorker"
    made.close()
