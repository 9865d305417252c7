"""README and docs say what is true: each command and Python block runs and prints what is shown, or
is listed below.

What is run here is what a CPU can run. What cannot be run still has to be a command that exists,
with flags that exist. `MODEL` stands for a model's folder (docs/cli.md says so).
"""

import argparse
import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinfer.serving import cli
from twinfer.serving.parser import OneLineParser, join_values
from twinfer.shared.compilation_config import CompilationConfig
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.arguments import WORD, settle_model
from twinfer.shared.models.locate import model_folder

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "pip install": "installs",
    "make test": "runs this test",
    "make setup-xla": "installs an environment of its own",
    "torch:cuda": "needs a GPU",
    "--device cuda": "needs a GPU",
    "jax:tpu": "needs a TPU",
    "--device tpu": "needs a TPU",
    "scripts/profile_step.py": "needs a GPU",
    "/tmp/checkout": "runs a GPU's tests",
    "--tp 4 --prompt": "needs four TPU chips",
    "--coordinator": "needs several hosts with TPUs",
    "twinfer aot": "minutes of libtpu: tests/e2e/test_tpu_aot.py runs it",
    "numerics selftest": "minutes: tests/numerics/test_selftest.py runs a part",
    "numerics rollout": "draws 10 000 tokens: tests/numerics/test_rollout.py draws a few",
    "scaled_relu": "blocks of one program: tests/unit/test_docs.py runs it",
    "twinfer serve": "runs until it is told to end: tests/e2e/test_server.py runs it",
    "127.0.0.1:8000": "needs a server: tests/e2e/test_server.py runs it",
    "FAMILY = Family(": "a module: tests/unit/test_docs.py runs it",
    "tiny-phi3": "runs on the module before it: tests/unit/test_docs.py runs it",
}
"""A part of a command or of a Python block that is not run, and why."""

LONG = {
    "make demo": "compiles on JAX",
    "--a jax:cpu --b torch:cpu": "judges every op on two backends",
    "numerics check": "asks everything: tests/numerics/test_check.py runs a small one",
    "numerics report": "reads what the line before it wrote",
    "--on jax:cpu": "compiles on JAX",
    "load_module": "compiles on JAX",
    "numerics replay": "judges every op",
    "numerics bisect": "judges every op",
    'compare_targets("demo", "torch:cpu", "jax:cpu"': "judges every op on two backends",
    'capture="bundles': "compiles on JAX",
}
"""A part of what takes too long for every run of the tests: `make test-slow` runs it."""

OTHERS_FLAGS = {"--fibers_default_thread_stack_size", "--default_thread_stack_size", "--tool"}
"""Flags that documents name and that are not ours: libtpu's, compute-sanitizer's."""

PLACEHOLDERS = {
    "COMMAND": "generate",
    "$INDEX": "1",
    "FIRST_HOST:8476": "host:8476",
    "NAME": "rms_norm",
    "N": "4",
    "JSON": "{}",
}
"""What stands in documents for a value. MODEL is a folder, when the command is run."""

PROGRAMS = ("twinfer", "python", "pip", "make", "pytest", "mkdir")
BLOCK = re.compile(
    r"^(```|~~~)(\w*)[^\n]*\n(.*?)^\1 *$|((?:^ {4}[^\n]*\n)(?:^ {4}[^\n]*\n|^\n(?= {4}))*)",
    re.M | re.S,
)
INLINE = re.compile(r"`([^`]+)`")
VARIABLE = re.compile(r"\w+=\S*$")


@dataclass(frozen=True)
class Example:
    """A command of a document, with what it says is printed, or a Python block."""

    document: str
    line: int
    text: str
    output: tuple[str, ...] = ()
    python: bool = False

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0]}"


def examples(text: str, document: str = "") -> Iterator[Example]:
    """Everything in a document's blocks that can be run."""
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match[2] == "python":
            yield Example(document, line + 1, match[3], python=True)
        elif match[4]:
            yield from commands(re.sub(r"^ {4}", "", match[4], flags=re.M), document, line)
        elif match[2] in ("console", ""):
            yield from commands(match[3], document, line + 1)


def commands(block: str, document: str, line: int) -> Iterator[Example]:
    """The commands of a block: lines behind `$ ` with their output, or if there are none, lines
    that name a program.
    """
    prompted = re.search(r"^\$ ", block, re.M) is not None
    lines = block.splitlines()
    starts = [i for i in range(len(lines)) if is_command(lines, i, prompted)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        last = next(i for i in range(start, end) if not lines[i].endswith("\\"))
        words = [part.removeprefix("$ ").removesuffix("\\") for part in lines[start : last + 1]]
        output = tuple(lines[last + 1 : end]) if prompted else ()
        yield Example(document, line + start, " ".join(words), output)


def is_command(lines: list[str], i: int, prompted: bool) -> bool:
    if prompted:
        return lines[i].startswith("$ ")
    words = [word for word in lines[i].split() if not VARIABLE.match(word)]
    continued = i > 0 and lines[i - 1].endswith("\\")
    return bool(words) and words[0] in PROGRAMS and not continued


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of all inline code."""
    text = BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INLINE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[1].split())


# --- what can be said of a command without running it
# ----------------------------------------------------------------


def split(command: str) -> list[str]:
    """The words of a command: of alternatives the first, what may be left out included,
    placeholders replaced.
    """
    words = [word.strip("[]") for word in shlex.split(command, comments=True)]
    return [
        PLACEHOLDERS.get(word, word.split("|")[0])
        for word in words
        if word not in ("...", "[...]", "")
    ]


def complaint(words: list[str], whole: bool) -> str | None:
    """What the parser of `twinfer` says against arguments. Those that are not `whole` may lack
    what is required.
    """
    parser = all_parsers()[0]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            arguments, unknown = parser.parse_known_args(join_values(words))
            if flags := [word for word in unknown if word.startswith("-")]:
                parser.leaf(arguments).refuse(flags[0])
            if whole and hasattr(arguments, WORD) and (rest := settle_model(arguments, unknown)):
                return f"unknown argument {rest[0]}"
    except ConfigError as error:
        return str(error)
    except SystemExit as left:
        message = errors.getvalue().strip()
        lacking = not whole and "are required" in message
        return None if left.code == 0 or lacking else message
    return None


def find_problem(command: str, whole: bool = True) -> str | None:
    """Why a command cannot be what somebody types, or None. `whole`: with all that it needs."""
    words = split(command)
    while words and VARIABLE.match(words[0]):
        del words[0]
    match words:
        case ["twinfer", *arguments]:
            # A flag that needs values may stand without them, in a sentence.
            bare = not whole and len(arguments) > 0 and arguments[-1].startswith("--")
            return missing_flag(arguments) if bare else complaint(arguments, whole)
        case ["python", script, *arguments] if script.startswith("scripts/"):
            return script_problem(ROOT / script, arguments)
        case ["pytest", *arguments] | ["python", "-m", "pytest", *arguments]:
            absent = [
                word
                for word in arguments
                if word.startswith("tests/") and not (ROOT / word).exists()
            ]
            return f"no such file: {absent[0]}" if absent else None
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
            absent = sorted(set(targets) - set(known))
            return f"no such target: {absent[0]}" if absent else None
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
            named = [
                extra
                for package in packages
                for names in re.findall(r"^twinfer\[(.*)", package)
                for extra in names.split(",")
            ]
            absent = sorted({extra.strip("]") for extra in named} - set(extras))
            return f"no such extra: {absent[0]}" if absent else None
        case ["mkdir" | "curl", *_]:
            return None
    return f"no such program: {words[:1]}"


def missing_flag(arguments: list[str]) -> str | None:
    flags = [word for word in arguments if word.startswith("--")]
    absent = sorted(
        set(flags).difference(*(parser._option_string_actions for parser in all_parsers()))
    )
    return f"no such flag: {absent[0]}" if absent else None


def script_problem(script: Path, arguments: list[str]) -> str | None:
    if not script.exists():
        return f"no such file: {script.name}"
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text()))
    own = list(itertools.takewhile(lambda word: word != "--", arguments))
    absent = [word for word in own if word.startswith("--") and word not in known]
    if absent:
        return f"{script.name} has no {absent[0]}"
    return missing_flag(arguments[len(own) + 1 :])  # they go to a command of `twinfer`


@functools.cache
def all_parsers() -> tuple[OneLineParser, ...]:
    """That of `twinfer`, and of every command. Made once: the documents name hundreds of flags."""
    parser, _ = cli._parser()
    found = [parser]
    for one in found:
        below = [
            action.choices
            for action in one._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        found += [command for choices in below for command in choices.values()]
    return tuple(found)


def test_a_flag_with_several_values_keeps_all_when_repeated():
    """argparse keeps the last ones only, and says nothing."""
    flags = [flag for parser in all_parsers() for flag in parser._actions if flag.option_strings]
    several = [flag for flag in flags if flag.nargs in ("+", "*")]
    assert several
    assert [flag.option_strings for flag in several if type(flag).__name__ != "_ExtendAction"] == []


def mention_problem(text: str) -> str | None:
    """Why inline code names a command or a flag that does not exist, or None."""
    numerics = (
        "model",
        "ops",
        "logits",
        "compare",
        "report",
        "capture",
        "replay",
        "invariants",
        "bisect",
        "selftest",
    )
    words = text.split()
    if words[0] in PROGRAMS and len(words) > 1:
        return find_problem(text, whole=False)
    if words[0] in numerics and "--" in text:
        return missing_flag(split(text))
    if words[0].startswith("--"):
        flag = words[0].split("=")[0]
        known = [parser for parser in all_parsers() if flag in parser._option_string_actions]
        if not known and flag not in OTHERS_FLAGS:
            return f"no such flag: {flag}"
        refusals = [value_problem(parser, split(text)) for parser in known]
        return refusals[0] if refusals and all(refusals) else None
    return None


def value_problem(parser: OneLineParser, words: list[str]) -> str | None:
    """What a parser says against the value of a flag."""
    action = parser._option_string_actions[words[0].split("=")[0]]
    if action.nargs is None and len(words) == 2:
        try:
            value = parser._get_values(action, words[1:])
            if action.dest == "compilation_config":
                CompilationConfig.from_options(value)
        except (argparse.ArgumentError, ConfigError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_exists(path):
    """Every command can be parsed, run here or not; so can what sentences say, and their flags
    exist.
    """
    text, problems = path.read_text(), []
    for example in examples(text, path.name):
        if not example.python and (problem := find_problem(example.text)):
            problems.append(f"{example}: {problem}")
    for line, mention in mentions(text):
        if problem := mention_problem(mention):
            problems.append(f"{path.name}:{line}: `{mention}`: {problem}")
    assert not problems, "\n".join(problems)


def test_the_lists_name_what_is_there():
    everything = [example.text for path in DOCUMENTS for example in examples(path.read_text())]
    assert dead_entries(everything) == []


def dead_entries(texts: list[str]) -> list[str]:
    """Entries of the lists that no command has."""
    return [part for part in [*NOT_RUN, *LONG] if not any(part in text for text in texts)]


# --- running them
# --------------------------------------------------------------------------------------------------

VARYING = re.compile(
    r"(plan )[0-9a-f]{16}|\b\d+(?:\.\d+)?( s\b| tokens/s)|(best tokens equal: )\d+|(ties )\d+"
)
"""What is another in each run, commit or processor: hashes of plans, which cover the sources;
times; near-ties.
"""
FLOAT = re.compile(
    r"(\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|(?:(?<=sigma )|(?<=worst token )|(?<=at worst )"
    r"|(?<=error )|(?<=exceeded ))\d+)"
)
"""Numbers with fractions, and those that lack one where they are large or their last digit is 0."""
ROUNDING = 1e-11
"""Divergences below this are what rounding in float32 leaves, of which nothing is said."""
EXIT_CODES = {"DIFFERENT": 1, "BROKEN": 1, "FOUND": 1}
"""The exit code that the first word of a verdict stands for; else 0."""


def compare(shown: tuple[str, ...], printed: str) -> str | None:
    """The first line shown that was not printed, or None. A line `...` stands for any lines, `...`
    at an end for more.

    Such numbers (FLOAT) depend on the machine: they have to be alike, which is within a factor of
    two.
    """
    lines = iter(printed.rstrip("\n").split("\n"))
    skipping = False
    for wanted in "\n".join(shown).rstrip("\n").split("\n") if shown else ():
        if wanted.strip() == "...":
            skipping = True
            continue
        found = next((line for line in lines if not skipping or same(wanted, line)), None)
        if found is None or not same(wanted, found):
            return f"shown: {wanted!r}\nprinted: {found!r}"
        skipping = False
    rest = list(lines)
    return f"printed, and not shown: {rest[0]!r}" if shown and rest and not skipping else None


def same(wanted: str, line: str) -> bool:
    if wanted.endswith("..."):
        wanted, line = wanted[:-3], line[: len(wanted) - 3]
    sides = [FLOAT.split(VARYING.sub(r"\1\2\3\4", text.rstrip())) for text in (wanted, line)]
    if [part for part in sides[0][::2]] != [part for part in sides[1][::2]]:
        return False
    return all(
        alike(float(a), float(b)) for a, b in zip(sides[0][1::2], sides[1][1::2], strict=True)
    )


def alike(shown: float, printed: float) -> bool:
    """Within a factor of two, or both of them rounding alone: how a library splits a sum among
    threads is another in each run.
    """
    return max(abs(shown), abs(printed)) < ROUNDING or shown / 2 <= printed <= 2 * shown


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run commands in, with a model in it."""
    shutil.copytree(model_folder("demo"), tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run_here(example: Example) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of an example, run in this process."""
    printed, errors = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        if example.python:
            exec(compile(example.text, str(example), "exec"), {"__name__": "document"})
        else:
            try:
                code = cli.main(split(example.text)[1:])
            except SystemExit as left:
                code = left.code
    return code, printed.getvalue(), errors.getvalue()


def run_apart(example: Example) -> tuple[int, str, str]:
    """The same in a process of its own."""
    words = [sys.executable, "-c", example.text] if example.python else split(example.text)
    cwd = None
    if words[0] == "twinfer":
        words = [sys.executable, "-m", *words]
    if words[0] == "make":  # all is set up already
        Path("stamp").touch()
        words += [f"BIN={Path(sys.executable).parent}", f"STAMP={Path('stamp').resolve()}", "-s"]
        cwd = ROOT
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=dict(os.environ)
    )
    return done.returncode, done.stdout, done.stderr


def failures(document: str, text: str, long: bool) -> Iterator[str]:
    """What goes wrong in the examples of a document, run in their order."""
    for example in examples(text, document):
        if not is_run(example, long):
            continue
        wanted = EXIT_CODES.get(re.match(r"\w*", example.output[0])[0], 0) if example.output else 0
        try:
            code, printed, errors = (run_apart if long else run_here)(example)
        except Exception as error:
            yield f"{example}: {type(error).__name__}: {error}"
            continue
        if code != wanted:
            yield f"{example}: exit code {code}, not {wanted}\n{printed[-2000:]}{errors[-2000:]}"
        elif problem := compare(example.output, printed):
            yield f"{example}:\n{problem}"


def having(long: bool) -> list[Path]:
    """Documents with something to run."""
    return [
        path
        for path in DOCUMENTS
        if any(is_run(example, long) for example in examples(path.read_text()))
    ]


def is_run(example: Example, long: bool) -> bool:
    return not any(p in example.text for p in NOT_RUN) and long == any(
        p in example.text for p in LONG
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path == ROOT / "docs/numerics.md" else ())
        for path in having(long=False)
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_is_shown_happens(path, folder):
    problems = list(failures(path.name, path.read_text(), long=False))
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", having(long=True), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_shown_happens_at_length(path, folder):
    problems = list(failures(path.name, path.read_text(), long=True))
    assert not problems, "\n".join(problems)


# --- that the checks above see something
# -----------------------------------------------------------------------------

FENCE = "```"
RIGHT = """\
$ twinfer generate demo --backend torch --prompt 'def f(x):' --temperature 0 --max-tokens 3
def f(x):
        return
"""
WRONG = {
    "another text": (RIGHT.replace("return", "retort"), "shown: '        retort'"),
    "a line too few": (RIGHT.replace("        return\n", ""), "printed, and not shown"),
    "a line too many": (RIGHT + "done\n", "shown: 'done'"),
    "another exit code": (RIGHT.replace("def f(x):\n", "BROKEN\n"), "exit code 0, not 1"),
    "refused": (RIGHT.replace("--max-tokens 3", "--max-tokens 0"), "max_tokens"),
    "no such flag": (RIGHT.replace("--temperature", "--temprature"), "did you mean"),
    "code that fails": (f"{FENCE}\n{FENCE}python\nimport twinfer.nothing\n", "No module named"),
}


@pytest.mark.parametrize(
    ("line", "alike"),
    [
        (
            "head 3: sigma 344 > 1.09; worst token 438 > 1; contract exceeded 2.1e+02 times at "
            "output 0",
            True,
        ),
        (
            "head 3: sigma 338.5 > 1.09; worst token 414 > 1; contract exceeded 199 times at "
            "output 0",
            True,
        ),
        (
            "head 3: sigma 800 > 1.09; worst token 414 > 1; contract exceeded 199 times at "
            "output 0",
            False,
        ),
        (
            "head 4: sigma 338 > 1.09; worst token 414 > 1; contract exceeded 199 times at "
            "output 0",
            False,
        ),
    ],
)
def test_measures_have_to_be_alike_and_counts_equal(line, alike):
    wanted = (
        "head 3: sigma 338 > 1.09; worst token 414 > 1; contract exceeded 199 times at output 0"
    )
    assert same(wanted, line) == alike


@pytest.mark.parametrize(("worst", "alike"), [("4", True), ("4.1", True), ("9", False)])
def test_a_number_may_have_lost_the_zero_behind_its_point(worst, alike):
    line = "would have seen, mode P: an error of 0.8 (at worst {}) of an op's rounding"
    assert same(line.format("4.1"), line.format(worst)) == alike
    assert same(line.format("4"), line.format(worst)) == alike


@pytest.mark.parametrize(
    ("line", "is_same"),
    [
        ("a 7.3e-08, b 1e-12, noise 1.7e-12", True),
        ("a 7.3e-08, b 3e-11, noise 1.7e-12", False),
        ("a 7.3e-12, b 2.2e-12, noise 1.7e-12", False),
    ],
)
def test_what_rounding_alone_leaves_may_differ(line, is_same):
    assert same("a 7.3e-08, b 2.2e-12, noise 1.7e-12", line) == is_same


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_happen_is_seen(name, folder):
    block, named = WRONG[name]
    (problem,) = failures("planted", f"{FENCE}console\n{block}{FENCE}\n", long=False)
    assert named in problem


def test_what_happens_is_no_problem(folder):
    assert list(failures("planted", f"text\n\n{FENCE}console\n{RIGHT}{FENCE}\n", long=False)) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("twinfer generate demo --temprature 1 --prompt x", "did you mean --temperature?"),
        ("twinfer generate demo --prompt x --dtype float12", "float12"),
        ("twinfer generate demo demo2 --prompt x", "unknown argument demo2"),
        ("twinfer chatter demo", "chatter"),
        ("twinfer aot MODEL --tp 4", "--topology"),
        ("twinfer numerics model --model MODEL --side jax:cpu", "--side"),
        ("A=b python scripts/bench_ops.py --frame torch", "bench_ops.py has no --frame"),
        ("python scripts/soak.py --minutes 1 -- --minutes 1", "no such flag: --minutes"),
        ("python scripts/bench_nothing.py", "no such file"),
        ("pytest tests/unit/test_nothing.py", "no such file"),
        ("make tea", "no such target: tea"),
        ("pip install 'twinfer[sever]'", "no such extra: sever"),
        ("twinker generate demo", "no such program"),
    ],
)
def test_a_command_that_cannot_be_is_seen(text, named):
    assert named in find_problem(text)


@pytest.mark.parametrize(
    "text",
    [
        "--temprature 1",
        "--dtype float12",
        "--kv-heads",
        "twinfer plan --every",
        "model --sides",
        """--compilation-config '{"roads": "piecewise"}'""",
    ],
)
def test_inline_code_that_cannot_be_is_seen(text):
    assert mention_problem(text)


def test_blocks_of_all_kinds_are_read():
    text = f"""
    twinfer demo
    PYTHONPATH=. python scripts/x.py \\
        --flag

        not: a command

- a list
{FENCE}console
$ twinfer a \\
    --b 1
shown
$ twinfer c   # why
{FENCE}
{FENCE}python
print(1)
{FENCE}
{FENCE}text
twinfer nothing
{FENCE}
"""
    found = [(example.text.split(), example.output) for example in examples(text)]
    shell = [["twinfer", "demo"], ["PYTHONPATH=.", "python", "scripts/x.py", "--flag"]]
    fenced = [["twinfer", "a", "--b", "1"], ["twinfer", "c", "#", "why"], ["print(1)"]]
    assert [words for words, _ in found] == shell + fenced
    assert [output for _, output in found] == [(), (), ("shown",), (), ()]


def test_numbers_are_compared_where_they_are_fixed():
    shown = ("a 2 of 3, 4.4 s", "...", "KL 8.8e-05, plan 277ec6ad3118bf12", "cut here...")
    printed = "a 2 of 3, 9.1 s\nmore\nmore\nKL 9.5e-05, plan 0123456789abcdef\ncut here and on"
    assert compare(shown, printed) is None
    for a, b in (("2 of", "1 of"), ("9.5e-05", "9.5e-04"), ("cut", "cat"), ("KL", "KM")):
        assert compare(shown, printed.replace(a, b))


def test_a_dead_entry_is_seen():
    texts = [*NOT_RUN, *LONG]
    assert dead_entries(texts) == []
    assert dead_entries(texts[1:]) == texts[:1]
