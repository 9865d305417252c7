"""Weights on disk: what is read is what was written, and each way a folder can be wrong is one
line.
"""

import json
import os
import struct
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.errors import CheckpointError, ModelNotFound

GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
TENSORS = {
    "a": GRID,
    "b": GRID.astype(ml_dtypes.bfloat16),
    "c": GRID.astype(np.float16),
    "scalar": np.array(3.0, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "cube": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "bytes": np.arange(5, dtype=np.uint8),
}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items() if name != "bytes"}


def write(folder, tensors=TENSORS):
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, *shards, weight_map=None):
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    where = {
        tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors
    }
    write_index(folder, where if weight_map is None else weight_map)
    return folder


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def fails(*words, error=CheckpointError):
    """Check that the block raises `error`, in one line that has these words."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 3000
    for word in words:
        assert word in message, message


def split(tensors=TENSORS):
    items = list(tensors.items())
    return dict(items[:3]), dict(items[3:])


@pytest.fixture(params=["single", "sharded"])
def folder(request, tmp_path):
    return write(tmp_path) if request.param == "single" else write_shards(tmp_path, *split())


# Reading


def test_reads_what_was_written(folder):
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.names() == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert checkpoint.shape(name) == tensor.shape
            assert checkpoint.dtype(name) == tensor.dtype
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype
            np.testing.assert_array_equal(read, tensor)
    np.testing.assert_array_equal(checkpoint.read("a"), GRID)  # opens again


def test_what_was_read_stays_and_is_not_written_to(folder):
    with Checkpoint(folder) as checkpoint:
        read = checkpoint.read("a"), checkpoint.read_slice("a", 1, 0, 2)
    for values, expected in zip(read, (GRID, GRID[:, :2]), strict=True):
        with pytest.raises(ValueError, match="read-only"):
            values[...] = 0
        np.testing.assert_array_equal(values, expected)


def test_headers_of_any_length_are_read(tmp_path):
    """Newer libraries pad headers to eight bytes; nothing says that all files are theirs."""
    file = write(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    file.write_bytes(
        (size + 3).to_bytes(8, "little") + whole[8 : 8 + size] + b"   " + whole[8 + size :]
    )
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


@given(st.sampled_from(["a", "b", "c", "cube", "empty"]), st.data())
def test_slices_are_those_of_the_tensor(tmp_path_factory, name, data):
    folder = tmp_path_factory.getbasetemp() / "slices"
    if not folder.exists():
        folder.mkdir()
        write(folder)
    tensor = TENSORS[name]
    axis = data.draw(st.integers(0, tensor.ndim - 1))
    start = data.draw(st.integers(0, tensor.shape[axis]))
    stop = data.draw(st.integers(start, tensor.shape[axis]))
    part = Checkpoint(folder).read_slice(name, axis, start, stop)
    assert part.dtype == tensor.dtype
    np.testing.assert_array_equal(part, np.take(tensor, range(start, stop), axis))


def resident_kib(file):
    """Memory of this process that is mapped from `file` and was touched."""
    with open("/proc/self/smaps") as maps:
        lines = maps.read().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(file))]
    return sum(
        int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) for i in starts
    )


@pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="needs Linux to tell what was read"
)
def test_a_slice_reads_only_its_part(tmp_path):
    rows, file = 1 << 14, tmp_path / "model.safetensors"
    write(tmp_path, {"big": np.zeros((rows, 4096), np.uint8)})  # 64 MiB
    checkpoint = Checkpoint(tmp_path)
    for start in range(0, rows, rows // 8):
        assert not checkpoint.read_slice("big", 0, start, start + 16).any()
    # Linux maps what it has cached around a touched byte, at most a huge page of 2 MiB.
    assert resident_kib(file) <= 8 * 2048
    assert not checkpoint.read("big").any()
    assert resident_kib(file) > 64_000  # so that the number above means something


@pytest.mark.parametrize(
    ("axis", "start", "stop"),
    [(2, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 3, 2), (0, 0, 5), (1, 0, 7), (1, 7, 7)],
)
def test_slices_outside_are_refused(folder, axis, start, stop):
    with fails("a", "[4, 6]", f"{start}:{stop} on axis {axis}"):
        Checkpoint(folder).read_slice("a", axis, start, stop)
    with fails("scalar"):
        Checkpoint(folder).read_slice("scalar", 0, 0, 0)


def test_unknown_tensor(folder):
    checkpoint = Checkpoint(folder)
    for call in (
        checkpoint.read,
        checkpoint.shape,
        checkpoint.dtype,
        lambda n: checkpoint.read_slice(n, 0, 0, 1),
    ):
        with fails("no tensor", "x.weight", str(folder)):
            call("x.weight")


def test_files_open_when_needed(tmp_path):
    write_shards(tmp_path, *split())
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"junk")
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("a"), GRID)
    with fails("model-00002-of-00002.safetensors", "truncated or corrupt"):
        checkpoint.read("cube")


@pytest.mark.parametrize("then", ["gone", "other entries", "another dtype", "other names"])
def test_a_file_that_is_put_in_the_place_of_an_open_one_changes_nothing(tmp_path, then):
    """A download that runs beside the load does so."""
    write(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape("a") == GRID.shape
    file = tmp_path / "model.safetensors"
    if then == "gone":
        file.unlink()
    else:
        others = {
            "other entries": {"first": GRID, "a": GRID + 1},
            "another dtype": {"a": np.tile(GRID.astype(np.float16), 2)},
            "other names": {"b": GRID},
        }
        (tmp_path / "new").mkdir()
        os.replace(write(tmp_path / "new", others[then]) / "model.safetensors", file)
    np.testing.assert_array_equal(checkpoint.read("a"), GRID)
    np.testing.assert_array_equal(checkpoint.read_slice("a", 0, 1, 3), GRID[1:3])


def test_dtypes_that_numpy_has_not_are_read_by_a_header_that_is_read_once(tmp_path, monkeypatch):
    """That of a shard of experts takes tens of milliseconds, and has thousands of tensors."""
    dtype = ml_dtypes.float8_e4m3fn
    tensors = {f"w{i}": (GRID + i).astype(dtype) for i in range(3)} | {"empty": GRID[:0]}
    write(tmp_path, tensors)
    read, texts = json.loads, []
    monkeypatch.setattr(
        "twinfer.shared.checkpoint.json.loads", lambda x: texts.append(x) or read(x)
    )
    with Checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            found = checkpoint.read(name)
            assert type(found) is np.ndarray
            assert found.dtype == tensor.dtype
            np.testing.assert_array_equal(found, tensor)
            np.testing.assert_array_equal(checkpoint.read_slice(name, 1, 1, 3), tensor[:, 1:3])
    assert len(texts) == 1
    np.testing.assert_array_equal(checkpoint.read("w1"), tensors["w1"])  # opens again
    assert len(texts) == 2


def test_a_single_file_goes_before_an_index(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("junk")
    assert Checkpoint(tmp_path).names() == sorted(TENSORS)


def test_links_are_followed(tmp_path):
    """The cache of huggingface_hub is made of them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write(blobs)
    (snapshot / "model.safetensors").symlink_to("../blobs/model.safetensors")
    np.testing.assert_array_equal(Checkpoint(snapshot).read("a"), GRID)


def test_an_unreadable_dtype_is_named(tmp_path):
    write(tmp_path, {"w": GRID.astype(ml_dtypes.float8_e5m2)})
    with fails("w", "F8_E5M2", "BF16"):
        Checkpoint(tmp_path).read("w")
    with fails("w", "F8_E5M2", "F32 or BF16 or F16"):
        Checkpoint(tmp_path).check({"w": (4, 6)})


# The folder


def test_no_folder(tmp_path):
    for folder in (tmp_path / "no", "\0", "a" * 5000, ""):
        with fails("no such folder", error=ModelNotFound):
            Checkpoint(folder)


def test_no_weights(tmp_path):
    with fails("no weights", "model.safetensors"):
        Checkpoint(tmp_path)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    with fails("no weights", "consolidated.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nowhere(tmp_path, file):
    """As caches of downloads have them whose files were removed."""
    (tmp_path / file).symlink_to("../../blobs/0123")
    with fails(file, "is a link to ../../blobs/0123, which is not there"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "model.pt",
        "consolidated.00.pth",
        "last.ckpt",
    ],
)
def test_pickles_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with fails(name, "only safetensors"):
        Checkpoint(tmp_path)
    write(tmp_path)
    assert Checkpoint(tmp_path).names()  # a pickle beside safetensors does no harm


def file_bytes(header, data=b"\0" * 4):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\0",
        b"\xff" * 8,
        b"not safetensors at all, but long enough",
        file_bytes(b"{"),
        file_bytes(b"\xff\xfe"),
        file_bytes(b"[]"),
        file_bytes({"a": ONE}, b""),
        file_bytes({"a": ONE}, b"\0" * 5),
        file_bytes({"a": ONE | {"shape": [2]}}),
        file_bytes({"a": ONE | {"shape": [-1]}}),
        file_bytes({"a": ONE | {"shape": [2**63, 2**63]}}),
        file_bytes({"a": ONE | {"dtype": "F99"}}),
        file_bytes({"a": ONE | {"data_offsets": [4, 0]}}),
        file_bytes({"a": ONE, "b": ONE}),
        file_bytes(b"[" * 100_000),
    ],
)
def test_corrupt_files(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with fails("model.safetensors", "truncated or corrupt"):
        Checkpoint(tmp_path)


def test_any_truncation_is_noticed(tmp_path):
    content = (write(tmp_path) / "model.safetensors").read_bytes()
    for length in {*range(0, len(content), 37), len(content) - 1}:
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with fails("model.safetensors", "truncated or corrupt"):
            Checkpoint(tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with fails("model.safetensors", "cannot be read"):
        Checkpoint(tmp_path)


# The index


def test_a_shard_that_is_missing(tmp_path):
    write_shards(tmp_path, *split())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with fails("model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_a_link_to_nowhere(tmp_path):
    write_shards(tmp_path, *split())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/5")
    with fails(str(shard), "is a link to ../blobs/5, which is not there"):
        Checkpoint(tmp_path)


def test_a_tensor_that_its_shard_lacks(tmp_path):
    write_shards(
        tmp_path, {"a": GRID}, weight_map=dict.fromkeys("az", "model-00001-of-00001.safetensors")
    )
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == ["a", "z"]
    for call in (lambda: checkpoint.read("z"), lambda: checkpoint.check({"a": (4, 6), "z": (1,)})):
        with fails("model-00001-of-00001.safetensors", "z"):
            call()


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "/etc/x.safetensors",
        "../model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "..safetensors",
        "a..safetensors",
        ".hidden.safetensors",
        "model.bin",
        "",
        "x.safetensors\0",
        "x.safetensors\n",
        "a b.safetensors",
        5,
        None,
        ["x.safetensors"],
        {},
    ],
)
def test_index_entries_are_plain_names(tmp_path, file):
    write_index(tmp_path, {"a": file})
    save_file({"a": GRID}, tmp_path.parent / "model.safetensors")
    with fails("model.safetensors.index.json", "a is in", "same folder"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": null}',
        "[" * 100_000,
    ],
)
def test_malformed_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with fails("model.safetensors.index.json"):
        Checkpoint(tmp_path)


# Fitting a model


def test_check_accepts_what_fits(tmp_path):
    tensors = {name: TENSORS[name] for name in SHAPES}
    extra = {
        "model.rotary_emb.inv_freq": GRID,
        "model.layers.0.self_attn.rotary_emb.inv_freq": GRID,
        "extra": GRID,
    }
    checkpoint = Checkpoint(write(tmp_path, tensors | extra))
    rotary = ("model.rotary_emb.inv_freq", "*.self_attn.rotary_emb.*")
    checkpoint.check(SHAPES, (*rotary, "extra"))
    checkpoint.check(SHAPES | {"extra": [4, 6]}, rotary)
    with fails("1 unexpected: extra"):
        checkpoint.check(SHAPES, rotary)


def test_a_tensor_that_the_index_does_not_name_is_named_with_its_file(tmp_path):
    """Another one, or another copy of one: transformers would read either."""
    first, second = split()
    write_shards(tmp_path, first, second)
    second |= {"more": GRID, "a": -GRID}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    path = f"{tmp_path}/model-00002-of-00002.safetensors"
    with fails(f"2 not of the index: {path}: a, {path}: more"):
        Checkpoint(tmp_path).check(SHAPES, ["bytes"])
    with fails(f"1 not of the index: {path}: a"):
        Checkpoint(tmp_path).check(SHAPES, ["bytes", "mor*"])


def test_a_tensor_that_nothing_reads_is_named_with_the_nearest_that_is(tmp_path):
    write(
        tmp_path,
        {
            "layers.0.q_proj.weight": GRID,
            "layers.0.k_proj.weight": GRID,
            "layers.0.kk_proj.weight": GRID,
        },
    )
    with fails(
        "1 unexpected: layers.0.kk_proj.weight; the nearest known one is layers.0.k_proj.weight"
    ):
        Checkpoint(tmp_path).check(
            {"layers.0.q_proj.weight": (4, 6), "layers.0.k_proj.weight": (4, 6)}
        )


def test_check_reports_everything_at_once(tmp_path):
    tensors = {f"t{i}": GRID for i in range(20)} | {"bytes": TENSORS["bytes"]}
    checkpoint = Checkpoint(write_shards(tmp_path, *split(tensors)))
    expected = {f"u{i}": (1,) for i in range(9)} | {"t0": (6, 4), "t1": (4, 6), "bytes": (5,)}
    with fails(
        "9 missing: u0, u1, u2, u3, u4 and 4 more",
        "18 unexpected: t10",
        "2 mismatched",
        "t0 has shape [4, 6], expected [6, 4]",
        "bytes has dtype U8, expected F32 or BF16 or F16",
        "model-00001-of-00002.safetensors",
    ):
        checkpoint.check(expected)


def test_an_output_head_beside_tied_embeddings(tmp_path):
    embedding = np.random.default_rng(0).normal(size=(9000, 3)).astype(np.float32)
    name, head = "model.embed_tokens.weight", "lm_head.weight"
    write(tmp_path, {name: embedding, head: embedding})
    Checkpoint(tmp_path).check({name: (9000, 3)}, copies={head: name})
    other = embedding.copy()
    other[8999, 2] += 1
    for wrong in (other, embedding[:8999], embedding.astype(np.float16), np.array(1.0, np.float32)):
        write(tmp_path, {name: embedding, head: wrong})
        with fails(head, name, "tie_word_embeddings"):
            Checkpoint(tmp_path).check({name: (9000, 3)}, copies={head: name})
    # The same numbers in another dtype are a copy.
    half = embedding.astype(ml_dtypes.bfloat16)
    write(tmp_path, {name: half, head: half.astype(np.float32)})
    Checkpoint(tmp_path).check({name: (9000, 3)}, copies={head: name})
    write(tmp_path, {head: embedding})
    with fails("1 missing: model.embed_tokens.weight", "1 unexpected: lm_head.weight"):
        Checkpoint(tmp_path).check({name: (9000, 3)}, copies={head: name})


def test_names_from_a_file_cannot_break_the_message(tmp_path):
    write(tmp_path, {"x\ny" * 1000: GRID})
    with fails("1 unexpected"):
        Checkpoint(tmp_path).check({})


def test_tensors_of_a_transformers_model(tmp_path):
    """Written by transformers in shards, read here: names, shapes, dtypes and bits."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **small
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "many", "10KB")):
        model.save_pretrained(folder, max_shard_size=size)
        checkpoint = Checkpoint(folder)
        for name in checkpoint.names():
            theirs = model.state_dict()[name]
            assert checkpoint.dtype(name) == ml_dtypes.bfloat16
            np.testing.assert_array_equal(
                checkpoint.read(name).astype(np.float32), theirs.float().numpy()
            )
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
