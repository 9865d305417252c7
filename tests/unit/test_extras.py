"""What is installed: each extra has code, each import has an extra, and what is missing is named
in one line.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
SOURCES = [
    path
    for name in PACKAGES
    for path in (ROOT / name.partition(".")[2].replace(".", "/")).glob("*.py")
]

MODULES = {
    "pyzmq": "zmq",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""Distributions whose module has another name."""
BROUGHT = {"triton", "pydantic_core", "pytest"}
"""Imported, and named by no extra: torch brings Triton, pydantic its core; pytest loads the
plug-in, so it is there.
"""
TAKEN_BY_NAME = {"httptools", "uvloop"}
"""Never imported by a statement: uvicorn takes the one, `import_module` the other."""


def distribution(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def imported() -> set[str]:
    """The top modules that the package imports, whether at its top or inside of a function."""
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"twinfer"}


def required(*extras: str) -> set[str]:
    """The distributions of extras, without the package itself."""
    names = {
        distribution(line) for extra in extras for line in PROJECT["optional-dependencies"][extra]
    }
    return names - {"twinfer"}


def test_every_extra_has_code_and_every_import_an_extra():
    extras = set(PROJECT["optional-dependencies"]) - {"dev"}
    everything = {distribution(line) for line in PROJECT["dependencies"]} | required(*extras)
    modules = {MODULES.get(name, name.replace("-", "_")) for name in everything}
    found = imported()
    assert modules - found == TAKEN_BY_NAME
    assert found - modules == BROUGHT


def test_no_framework_comes_unasked():
    assert not {"torch", "jax", "flax", "triton"} & {
        distribution(line) for line in PROJECT["dependencies"]
    }


def test_what_is_said_to_be_installed_exists():
    """In messages and documents: `twinfer[NAME]` and `.[NAME]` name extras."""
    documents = [
        ROOT / "README.md",
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(ROOT / "docs").rglob("*.md"),
    ]
    named = {
        (path.name, extra)
        for path in [*SOURCES, *documents]
        for names in re.findall(r"(?:'twinfer|'\.|\"twinfer)\[([a-z,0-9]+)\]", path.read_text())
        for extra in names.split(",")
    }
    assert {extra for _, extra in named} >= {"torch", "jax", "tpu", "hosts", "flax"}
    assert {
        (path, extra) for path, extra in named if extra not in PROJECT["optional-dependencies"]
    } == set()


def test_every_requirement_is_pinned_for_ci():
    pins = {
        line.partition("==")[0]
        for name in ("constraints.txt", "constraints-xla.txt")
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line
    }
    wanted = {distribution(line) for line in PROJECT["dependencies"]} | required(
        *PROJECT["optional-dependencies"]
    )
    assert {name.replace("_", "-") for name in wanted} - pins == set()


def run_without(modules: tuple[str, ...], code: str) -> str:
    """Standard output, then standard error, of a process in which `modules` cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); "
    done = subprocess.run(
        [sys.executable, "-c", hide + code], capture_output=True, text=True, check=False, cwd="/"
    )
    return done.stdout + done.stderr


COMMAND = "from twinfer.serving.cli import main; print(main({!r}))"
TORCH, JAX = ("torch",), ("jax", "jaxlib")
GENERATE = ["generate", "demo", "--device", "cpu", "--prompt-token-ids", "1", "--max-tokens", "1"]
INSTALL_TORCH = "backend torch: it is not installed: pip install 'twinfer[torch]'"
INSTALL_JAX = (
    "backend jax: it is not installed: pip install 'twinfer[jax]' (on TPUs 'twinfer[tpu]', "
)
AOT = ["aot", "qwen3-0.6b", "--topology", "v6e:2x2"]


@pytest.mark.parametrize(
    ("hidden", "words", "named"),
    [
        (TORCH, [*GENERATE, "--backend", "torch"], [INSTALL_TORCH]),
        (JAX, [*GENERATE, "--backend", "jax"], [INSTALL_JAX]),
        (TORCH + JAX, GENERATE, ["backend: none runs here", INSTALL_TORCH, INSTALL_JAX]),
        (TORCH + JAX, ["plan", "demo"], [INSTALL_TORCH, INSTALL_JAX]),
        (JAX, AOT, [INSTALL_JAX]),
        (TORCH, ["demo"], [INSTALL_TORCH]),
        (
            TORCH,
            ["bench", "latency", "demo", "--max-model-len", "512", "--backend", "torch"],
            [INSTALL_TORCH],
        ),
        # The one side is compiled and run before the other is missed.
        pytest.param(
            TORCH,
            ["numerics", "model", "demo", "--b", "torch:cpu"],
            [INSTALL_TORCH],
            marks=pytest.mark.slow,
        ),
        (JAX, ["numerics", "ops", "--op", "add", "--a", "jax:cpu"], [INSTALL_JAX]),
    ],
)
def test_a_missing_framework_is_one_line_with_its_remedy(hidden, words, named):
    code, *progress, error = run_without(hidden, COMMAND.format(words)).splitlines()
    assert code == "4"
    assert error.startswith("twinfer: error: ")
    assert "Traceback" not in "".join(progress)
    for text in named:
        assert text in error


@pytest.mark.parametrize(("hidden", "found"), [(TORCH, "jax"), (JAX, "torch")])
def test_auto_takes_what_is_installed(hidden, found):
    code = (
        "from twinfer.shared import backends as b; print(b.find_backend('auto', 'cpu')[0], "
        "b.first_installed('cpu'))"
    )
    assert run_without(hidden, code).split() == [found, found]


@pytest.mark.parametrize(
    ("hidden", "code", "extra"),
    [
        (("flax",), "import twinfer.tpu.module", "flax"),
        (("zmq",), "import twinfer.tpu.hosts as h; h._link()", "hosts"),
        (
            ("zmq",),
            "import twinfer.shared.worker as w; w.start_ranks('torch', 'cpu', 2, print)",
            "ranks",
        ),
        (
            ("ray",),
            "import twinfer.shared.worker as w; w.start_ranks('torch', 'cpu', 2, print, 'ray')",
            "ray",
        ),
    ],
)
def test_what_an_extra_brings_is_missed_by_name(hidden, code, extra):
    error = run_without(hidden, code).splitlines()[-1]
    assert error.startswith("twinfer.shared.errors.BackendUnavailable: ")
    assert error.endswith(f"pip install 'twinfer[{extra}]'")
