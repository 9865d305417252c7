"""`twinfer numerics logits --b dump:FOLDER`: what another engine computed, layer by layer."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.numerics.bundles.dump import read_dump
from twinfer.numerics.errors import NotComparable
from twinfer.numerics.judging.metrics import divergence
from twinfer.numerics.questions.logits import compare_ends, load_transformers, parse_side
from twinfer.numerics.showing.terminal import render
from twinfer.numerics.sides.steps import default_prompts
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
TORCH = parse_target("torch:cpu")


@pytest.fixture(scope="module")
def small(small_model):
    return open_subject(small_model, load_format="dummy", dtype="float32")


@pytest.fixture(scope="module")
def demo():
    return open_subject("demo")


def dumped(subject, folder, spoil=lambda model: None):
    """A dump of transformers, whose model is spoiled first."""
    model = load_transformers(subject)
    spoil(model)
    kept = {}

    def keep(name):
        def hook(module, given, out):
            kept[name] = (out[0] if isinstance(out, tuple) else out)[0].float().numpy()

        return hook

    model.model.embed_tokens.register_forward_hook(keep("embed"))
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer.{i}"))
    folder.mkdir(parents=True)
    files = []
    for ids in default_prompts(subject, seed=1)[:3]:
        with torch.inference_mode():
            logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
        files.append(f"prompt-{len(files)}.safetensors")
        # what lay side by side shares no memory here
        tensors = {name: np.ascontiguousarray(x) for name, x in kept.items()}
        tensors |= {"token_ids": ids, "logits": logits.float().numpy()}
        save_file(tensors, folder / files[-1])
    manifest = {"format": "twinfer-dump", "version": 1, "engine": "transformers", "prompts": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def compare(subject, folder):
    return compare_ends(subject, [TORCH, parse_side(f"dump:{folder}")], [])


@pytest.mark.parametrize("model", ["small", "demo"])
def test_a_right_dump_is_equal(model, tmp_path, request):
    subject = request.getfixturevalue(model)
    diff = compare(subject, dumped(subject, tmp_path / "dump"))
    diff.assert_ok()
    of_dump = {f.tap for f in diff.findings if f.side.startswith("b dump:")}
    layers = {f"layer.{i}" for i in range(subject.model.num_layers)}
    assert of_dump == {"embed", "final logits"} | layers
    assert diff.environment["sides"][diff.sides[1]]["device"] == "transformers"


def scaled(module, factor):
    """All weights of a module times a factor."""
    with torch.no_grad():
        for weight in module.parameters():
            weight *= factor


WRONG = {
    "layer.1": lambda model: scaled(model.model.layers[1].mlp.down_proj, 1.05),
    "layer.0": lambda model: scaled(model.model.layers[0].self_attn.v_proj, 1.05),
    "embed": lambda model: scaled(model.model.embed_tokens, 1.05),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("model", ["small", "demo"])
def test_a_wrong_dump_is_blamed_on_the_right_layer(model, name, tmp_path, request):
    subject = request.getfixturevalue(model)
    diff = compare(subject, dumped(subject, tmp_path / "dump", WRONG[name]))
    assert diff.exit_code == 1
    first = diff.first_divergence()
    assert (first.side[0], first.tap) == ("b", name)
    assert {f.side[0] for f in diff.failures} == {"b"}


def test_frequencies_that_are_off_are_blamed_on_the_first_layer(demo, tmp_path):
    def spoil(model):
        model.model.rotary_emb.inv_freq *= 1.01

    diff = compare(demo, dumped(demo, tmp_path / "dump", spoil))
    assert diff.exit_code == 1
    assert diff.first_divergence().tap == "layer.0"


@pytest.mark.parametrize("name", ["logits", "layer.1"])
def test_the_last_position_is_judged_too(small, name, tmp_path):
    folder = dumped(small, tmp_path / "dump")
    right = read_dump(str(folder), small).tensors[0][name].copy()
    right[-1] = -right[-1]
    rewritten(folder, **{name: right})
    first = compare(small, folder).first_divergence()
    assert first is not None
    assert first.tap == ("final logits" if name == "logits" else name)


def test_a_prompt_may_have_one_token_or_leave_room_for_one(small_model, tmp_path):
    subject = open_subject(
        small_model, load_format="dummy", dtype="float32", max_model_len=32, tokens=16
    )
    model = load_transformers(subject)
    for count in (1, 31):
        ids = np.arange(count, dtype=np.int32) + 40
        with torch.inference_mode():
            logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
        folder = tmp_path / f"dump-{count}"
        folder.mkdir()
        save_file({"token_ids": ids, "logits": logits.float().numpy()}, folder / "a.safetensors")
        about = {"format": "twinfer-dump", "version": 1, "prompts": ["a.safetensors"]}
        (folder / "manifest.json").write_text(json.dumps(about))
        diff = compare(subject, folder)
        diff.assert_ok()
        assert diff.environment["tokens"] == count


def rewritten(folder, **changes):
    """The first prompt's tensors, some of them changed; None is left out."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "prompt-0.safetensors") | changes
    kept = {name: x for name, x in tensors.items() if x is not None}
    save_file(kept, folder / "prompt-0.safetensors")


def test_layers_are_told_by_number_where_some_are_missing(demo, tmp_path):
    folder = dumped(demo, tmp_path / "dump")
    described(folder, prompts=["prompt-0.safetensors"])
    rewritten(folder, **{"layer.2": None})
    text = render(compare(demo, folder))
    assert re.search(r"inherited sigma by layer: 0: \S+ 1: \S+ 3: \S+ 4: \S+  \(", text)


def test_a_logit_of_minus_infinity_on_both_sides_is_no_divergence():
    logits = np.array([[1.0, 2.0, -np.inf]])
    other = np.array([[2.0, 1.0, -np.inf]])
    assert divergence(logits, logits) == [0.0]
    assert divergence(logits, other) == pytest.approx(divergence(logits[:, :2], other[:, :2]))
    assert np.isnan(divergence(np.array([[np.nan, 1.0]]), np.ones((1, 2)))).all()


def described(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGE = {
    "token_ids": lambda folder: rewritten(folder, token_ids=None),
    "allowed are token_ids, embed, logits and layer.0 to layer.1": lambda folder: rewritten(
        folder, other=np.zeros(3, np.float32)
    ),
    r"layer.1 \[3, 64\] in float32, must be floats \[43, 64\]": lambda folder: rewritten(
        folder, **{"layer.1": np.zeros((3, 64), np.float32)}
    ),
    "differ in layer.1": lambda folder: rewritten(folder, **{"layer.1": None}),
    "outside of the vocabulary of 300": lambda folder: rewritten(
        folder, token_ids=np.full(43, 300, np.int32)
    ),
    "must be a list of files": lambda folder: described(folder, prompts="prompt-0.safetensors"),
    "no plain name": lambda folder: described(folder, prompts=["../prompt-0.safetensors"]),
    "cannot be read": lambda folder: described(folder, prompts=["prompt-9.safetensors"]),
    "format is": lambda folder: described(folder, format="twinfer-bundle"),
    "layer.1 is in 'U64', allowed are F64, F32": lambda folder: rewritten(
        folder, **{"layer.1": np.zeros((43, 64), np.uint64)}
    ),
    "is damaged": lambda folder: (folder / "prompt-0.safetensors").write_bytes(b"no tensors"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_what_is_no_dump_is_refused(small, words, tmp_path):
    folder = dumped(small, tmp_path / "dump")
    DAMAGE[words](folder)
    with pytest.raises(NotComparable, match=words):
        read_dump(str(folder), small)


def test_prompts_beside_a_dump_are_refused(small_model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3, 4, 5]}\n')
    argv = f"numerics logits --model {small_model} --load-format dummy --a torch:cpu --b dump:x"
    assert main([*argv.split(), "--prompts", str(file)]) == 2
    assert "prompts: got " in capsys.readouterr().err


@pytest.mark.parametrize("other", ["dump:x", "torch:cpu", "transformers"])
@pytest.mark.parametrize("flag", ["--positions 4", "--server-logits float32"])
def test_what_only_servers_are_asked_is_refused_beside_others(small_model, flag, other, capsys):
    argv = f"numerics logits --model {small_model} --load-format dummy --a torch:cpu --b {other}"
    assert main([*argv.split(), *flag.split()]) == 2
    name, value = flag[2:].replace("-", "_").split()
    said = f"{name}: got {value}, which is for servers, and {other} is none: leave it out"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dump:", "http://", "https:///"])
def test_a_side_without_a_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"or transformers, http://HOST:PORT .*, dump:FOLDER"):
        parse_side(name)


def test_one_dump_at_a_time(small, tmp_path):
    folder = dumped(small, tmp_path / "dump")
    side = parse_side(f"dump:{folder}")
    with pytest.raises(ConfigError, match="allowed is one dump or server"):
        compare_ends(small, [TORCH, side, side], [])
