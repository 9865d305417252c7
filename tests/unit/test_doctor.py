"""`twinfer doctor` and `collect-env`: what is in the way is said, and no secret is."""

import json
import socket
import tomllib
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from twinfer.serving import doctor
from twinfer.serving.cli import main
from twinfer.shared.errors import BackendUnavailable


def verdicts(capsys, *words):
    code = main(["doctor", "--json", *words])
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    return code, found


def test_what_runs_here(capsys):
    code, found = verdicts(capsys, "demo", "--port", "0")
    assert code == 0
    assert {found[f"backend {name}"]["verdict"] for name in ("jax", "torch")} == {"ok"}
    assert found["model"]["text"].startswith("Qwen3ForCausalLM, 0.0")
    assert main(["doctor"]) in (0, 1)
    assert "extra serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "says"),
    [("/nowhere", "no such folder"), ("llama3.1-70b", "more than the device has")],
)
def test_a_model_that_cannot_run(model, says, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_backend", small_device)
    code, found = verdicts(capsys, model)
    assert code == 1
    assert found["model"]["verdict"] == "bad"
    assert says in found["model"]["text"]


def small_device(backend, device):
    return "torch", type("D", (), {"platform": "cpu", "memory": 16 << 30})(), []


def version_without(*names):
    """Versions where some distributions are not installed."""

    def version(name):
        if name in names:
            raise PackageNotFoundError
        return metadata.version(name)

    return version


def test_every_extra_is_looked_at(capsys):
    """Those of pyproject.toml, but for those that are no more than a backend."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    extras = set(tomllib.loads(text)["project"]["optional-dependencies"])
    _, found = verdicts(capsys)
    listed = {name.removeprefix("extra ") for name in found if name.startswith("extra ")}
    assert listed == extras - {"torch", "jax", "torch-xla", "tpu", "cuda", "dev"}
    assert {"ray", "traces"} <= listed


def test_sources_that_are_not_installed_have_no_extras(capsys, monkeypatch):
    """But what runs is known nevertheless."""

    def not_found(name):
        raise PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", not_found)
    _, found = verdicts(capsys)
    assert not [name for name in found if name.startswith("extra ")]
    assert found["extras"]["verdict"] == "note"
    assert main(["collect-env"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    assert {"python", "numpy", "torch", "triton", "jax", "jaxlib"} <= set(versions)


def test_what_is_missing(capsys, monkeypatch, tmp_path):
    def unavailable(backend, device):
        raise BackendUnavailable("backend: none runs here")

    monkeypatch.setattr(doctor, "find_backend", unavailable)
    monkeypatch.setattr(doctor, "is_installed", lambda name: False)
    monkeypatch.setattr(doctor, "has_nvidia", lambda: True)
    monkeypatch.setattr(doctor, "version", version_without("fastapi", "torch"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = verdicts(capsys, "--port", str(port))
    assert code == 1
    assert found["chosen"] == {
        "name": "chosen", "verdict": "bad", "text": "backend: none runs here",
    }  # fmt: skip
    assert found["device cuda"]["verdict"] == "bad"
    assert found["backend jax"]["text"] == "not installed"
    assert found["extra serve"]["text"] == "misses fastapi: pip install 'twinfer[serve]'"
    assert found["extra ranks"]["text"].startswith("misses torch: ")  # by another extra
    assert found["extra hosts"]["verdict"] == "ok"
    assert "cannot be written" in found["cache"]["text"]
    assert found[f"port {port}"]["verdict"] == "note"


def test_the_environment_has_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("TWINFER_API_KEY", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HOME_OF_OTHERS", "x")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "hush" not in text
    assert found["variables"]["TWINFER_API_KEY"] == "(not shown)"
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "HOME_OF_OTHERS" not in found["variables"]
    assert {"twinfer", "python", "numpy", "torch", "ray", "triton"} <= set(found["versions"])


def test_help_finds_flags_by_a_word(capsys):
    assert main(["serve", "--help=QUEUED"]) == 0
    text = capsys.readouterr().out
    assert "--max-num-queued-reqs" in text
    assert "--host " not in text
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--help=nonsense"])
    assert left.value.code == 2
    assert "no flag speaks of nonsense" in capsys.readouterr().err
