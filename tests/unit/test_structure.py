"""The promises that the folder layout makes, checked against the files and against what really
gets imported.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = [
    name.partition(".")[2].replace(".", "/") for name in SETUPTOOLS["packages"] if name != "twinfer"
]
UNPACKAGED = {"tests", "scripts", "docs", "build", "dist"}

SOURCES = sorted(
    [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
)

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
TEST_MODULES = {"unittest", "pytest", "hypothesis"}
MAY_USE_PYTEST = {"numerics/pytest_plugin.py"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "send_pyobj", "recv_pyobj"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_packages_are_the_folders_with_python_files():
    tops = [
        d
        for d in ROOT.iterdir()
        if d.is_dir() and d.name.isidentifier() and d.name not in UNPACKAGED
    ]
    folders = {relative(path.parent) for top in tops for path in top.rglob("*.py")}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_room_says_what_it_is_for(room):
    assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))


def test_package_data_exists():
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / package.partition(".")[2].replace(".", "/")
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: nothing matches {pattern}"


@pytest.mark.parametrize(
    "module",
    [
        "twinfer",
        "twinfer.bucketing",
        "twinfer.ops",
        "twinfer.shared.scheduler",
        "twinfer.shared.kv_manager",
        "twinfer.shared.request_table",
    ],
)
def test_import_loads_no_framework(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip("not written yet")
    code = (
        f"import sys, {module}; print(*({{'flax', 'jax', 'jaxlib', 'torch', 'triton'}} & "
        "set(sys.modules)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd="/"
    ).stdout
    assert loaded.split() == []


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assert():
                # `python -O` drops it, and a user who meets one learns nothing: raise an error from
                # shared/errors.py.
                yield node.lineno, "assert"
            case ast.Import(names=names):
                yield from (
                    (node.lineno, n.name)
                    for n in names
                    if n.name.partition(".")[0] in UNSAFE_MODULES
                )
            case ast.ImportFrom(module=str(name), level=0) if (
                name.partition(".")[0] in UNSAFE_MODULES
            ):
                yield node.lineno, name
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                yield node.lineno, f"{name}()"
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                if (
                    attr in UNSAFE_CALLS - {"eval", "exec"}
                    or f"{ast.unparse(value)}.{attr}" in UNSAFE_CALLS
                ):
                    yield node.lineno, f".{attr}()"
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield node.lineno, "allow_pickle"


def test_offences_are_recognised():
    bad = """
import pickle
from marshal import loads
assert x
eval("1")
exec("1")
torch.load(path)
np.load(path, allow_pickle=True)
socket.send_pyobj(x)
"""
    assert [line for line, _ in sorted(offences(ast.parse(bad)))] == list(range(2, 10))
    good = "model.eval(); jnp.load(path); np.load(path, allow_pickle=False); from .pickle import x"
    assert not list(offences(ast.parse(good)))


def test_sources_execute_no_data_and_assert_nothing():
    scripts = sorted((ROOT / "scripts").rglob("*.py"))
    found = [
        f"{relative(path)}:{line}: {what}"
        for path in [*SOURCES, *scripts]
        for line, what in offences(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports, dots left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_product_code_uses_no_test_tools():
    found = {
        relative(path)
        for path in SOURCES
        for module, _ in imports(path)
        if module.split(".")[0] in TEST_MODULES
    }
    assert found - MAY_USE_PYTEST == set()


def test_numerics_has_no_engine_of_its_own():
    """What it judges is what workers and engines execute (docs/adr/0018), made in few places."""
    found: dict[str, set[str]] = {"create_worker": set(), "Engine": set()}
    for path in (ROOT / "numerics").rglob("*.py"):
        for module, name in imports(path):
            first = module.split(".")[0] or name
            assert first not in {"gpu", "tpu", "xla"}, f"{relative(path)} imports {first}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.get(node.func.id, set()).add(path.name)
    assert found["create_worker"] == {"side.py"}
    assert found["Engine"] == {"serving.py"}


def test_structure_document_names_every_room():
    document = ROOT / "docs/structure.md"
    if not document.exists():
        pytest.skip("not written yet")
    text = document.read_text()
    assert not [room for room in ROOMS if f"{room}/" not in text]


def test_a_share_begins_elsewhere_for_another_word():
    """And is in no file's order: pytest ignores a hook whose name does not begin with its own."""

    def collected(*options: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
        ]
        files = [
            "tests/unit/test_bucketing.py",
            "tests/unit/test_waiting.py",
            "tests/unit/test_ports.py",
        ]
        plain = {name: x for name, x in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(
            [*command, *files], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if "::" in line]

    whole, *shares = collected(), collected("--share", "one:1"), collected("--share", "another:1")
    assert len(whole) > 5
    assert all(sorted(tests) == sorted(whole) for tests in shares)
    assert shares[0] != shares[1]
    assert whole not in shares
    place = shares[1].index(shares[0][0])
    assert shares[1][place:] + shares[1][:place] == shares[0]
