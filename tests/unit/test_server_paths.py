"""Which path a call means: behind a proxy, and those that others' tools ask for."""

import asyncio
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.serving.formats.table import FORMATS
from twinfer.serving.server.answers import fingerprint_of
from twinfer.serving.server.app import build_app
from twinfer.serving.server.doors import Load
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.server import Settings
from twinfer.shared.models import digest as digest_module
from twinfer.shared.models.digest import MOST_PIECES, _places, folder_digest
from twinfer.shared.sampling_params import SamplingParams

READY = SimpleNamespace(model={"longest_request": 64})


def ask(path, *, root="", method="GET", engine=None, **settings):
    """The answer of a server whose engine answers nothing, at a path as uvicorn hands it on."""
    engine = engine or SimpleNamespace(ready=READY, alive=True, why="")
    made = Settings(["m"], None, SamplingParams(), FORMATS["none"], **settings)

    async def call():
        app = build_app(made, engine, Metrics())
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, root + path)

    return asyncio.run(call())


@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "left"])
@pytest.mark.parametrize(
    "root", ["", "/llm", "/v1", "/v1/chat", "/health", "/tokenize", "/v1/chat/completions"]
)
@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 200), ("/v1/models/m", 200), ("/health", 200), ("/nothing", 404), ("/", 200)],
)
def test_a_proxy_may_cut_a_prefix_or_leave_it(root, path, status, cuts):
    """Also one that begins a path of ours."""
    answer = ask(path if cuts else root + path, root=root)
    assert answer.status_code == status


@pytest.mark.parametrize("root", ["/llm", "/v1"])
def test_a_prefix_lets_nobody_in(root):
    for path in ("/v1/models", f"{root}/v1/models", f"{root}{root}/health"):
        assert ask(path, root=root, keys=["k"]).status_code == 401
    for path in ("/health", f"{root}/health"):
        assert ask(path, root=root, keys=["k"]).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_tells_what_health_does_and_needs_no_key(method):
    """As SageMaker asks."""
    states = [(READY, True, 200), (READY, False, 503), (None, True, 503), (None, False, 503)]
    for ready, alive, status in states:
        engine = SimpleNamespace(ready=ready, alive=alive, why="it ended")
        for root in ("", "/llm"):
            answer = ask("/ping", root=root, method=method, engine=engine, keys=["k"])
            assert answer.status_code == status
    refused = ask("/ping", method="PUT")
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


def test_the_load_is_told_where_it_is_counted():
    assert ask("/load").status_code == 404
    assert ask("/load", load=Load()).json() == {"server_load": 0}
    assert ask("/load", load=Load(7)).json() == {"server_load": 7}
    assert ask("/load", load=Load(), keys=["k"]).status_code == 401
    assert ask("/load", load=Load(), method="POST").status_code == 405


def test_a_fingerprint_is_of_what_was_asked_for_and_not_of_what_was_measured():
    def ready(**more):
        model = {"backend": "torch", "platform": "cpu", "device": "x", "num_pages": 9} | more
        return SimpleNamespace(model=model, options={"dtype": "float32"})

    first = fingerprint_of(ready())
    assert first.startswith("fp_")
    assert first == fingerprint_of(ready(num_pages=10))
    assert first != fingerprint_of(ready(backend="jax"))
    assert first != fingerprint_of(ready(digest="2"))
    other = ready()
    other.options["dtype"] = "bfloat16"
    assert first != fingerprint_of(other)
    assert fingerprint_of(None) is None


def test_a_models_digest_is_of_its_texts_and_of_what_is_read(tmp_path):
    def written(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return folder_digest(tmp_path)

    first = written(config__json="{}", tokenizer__json="1", b__safetensors="1")
    assert first == written(README__md="new")
    larger = written(b__safetensors="12")
    assert first != larger
    assert larger != written(config__json="[]")
    assert first != written(config__json="{}", b__safetensors="1", c__safetensors="")
    (tmp_path / "c.safetensors").unlink()
    assert first == folder_digest(tmp_path)
    assert first != written(tokenizer__json="2")


def test_a_models_digest_follows_its_weights(tmp_path):
    """Another fine-tuning has files of the same names and sizes."""

    def digest(**changed):
        tensors = {name: np.zeros((64, 64), np.float32) for name in ("a", "b", "c")}
        save_file(tensors | changed, tmp_path / "model.safetensors")
        return folder_digest(tmp_path)

    ones = np.ones((64, 64), np.float32)
    found = [digest(), digest(a=ones), digest(b=ones), digest(c=ones), digest(a=ones.view("i4"))]
    assert len(set(found)) == 5
    assert found[0] == digest()


def test_a_models_digest_looks_into_a_few_of_many_tensors(tmp_path, monkeypatch):
    """All over the file, so that a fine-tuning of all layers is another model."""
    tensors = {f"{i:04}": np.zeros((4, 4), np.float32) for i in range(1000)}
    save_file(tensors, tmp_path / "model.safetensors")
    before, places = folder_digest(tmp_path), []

    def noted(header, size):
        found = _places(header, size)
        places.extend(found)
        return [Counted(place) for place in found]

    class Counted(tuple):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    monkeypatch.setattr(digest_module, "_places", noted)
    assert folder_digest(tmp_path) == before
    assert len(places) == 1000
    assert 32 < Counted.reads <= MOST_PIECES
    every = {name: np.ones((4, 4), np.float32) for name in tensors}
    save_file(every, tmp_path / "model.safetensors")
    assert folder_digest(tmp_path) != before


@pytest.mark.parametrize(
    "header",
    ["[]", "{", '{"a": 1}', '{"a": {}}', '{"a": {"data_offsets": [0.5, 1.5]}}',
     '{"a": {"data_offsets": [0, 9999]}}', '{"a": {"data_offsets": [3, 1]}}', "[" * 10**5],
)  # fmt: skip
def test_a_models_digest_takes_no_offence_at_a_file_that_nobody_loads(header, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"data")
    before = folder_digest(tmp_path)
    assert len(before) == 16
    other.write_bytes(b"\xff" * 20)
    assert folder_digest(tmp_path) != before
