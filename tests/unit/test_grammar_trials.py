"""Forms that take too much work, tried out in a process that is killed."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from twinfer.serving.server.trial import COMPILE_S, MODULE, PROCESSES, Trials
from twinfer.shared.errors import RequestError
from twinfer.shared.grammars import Grammars
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.structured_outputs import StructuredOutputs

DEMO = Path(__file__).resolve().parents[2] / "shared/models/demo"
DOUBLED = "".join(f"T{i + 1}: T{i} T{i}\n" for i in range(18))
PATTERNS = {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(60)]}
ENDLESS = {
    "one after another": StructuredOutputs("regex", ".*" * 100_000),
    "doubled": StructuredOutputs("grammar", f"start: T18\nT0: /.*/\n{DOUBLED}"),
    "all of them": StructuredOutputs("json", json.dumps(PATTERNS)),
}
OVERLAP = '[{"type": "integer"}, {"type": "number"}]'
GOOD = StructuredOutputs("regex", "[ab]{3}")


@pytest.fixture
def trials():
    made = Trials(Grammars(DEMO, 2048, [0]))
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "all of them" else pytest.mark.slow)
        for name in ENDLESS
    ],
)
def test_a_form_without_an_end_is_refused(name, trials):
    """Each takes minutes; the next one is tried as if nothing had been."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(
        RequestError, match=f"^structured_outputs: {ENDLESS[name].kind}: comp.* work"
    ):
        trials.check(ENDLESS[name])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < COMPILE_S + 2  # with the start of the process
    for _ in range(2 * PROCESSES):
        trials.check(GOOD)


def test_a_form_whose_tokens_take_long_is_refused(trials):
    with pytest.raises(RequestError, match="too much work"):
        trials.check(StructuredOutputs("regex", "a?" * 8000))


def test_what_cannot_be_compiled_says_why(trials):
    for form, says in (
        (StructuredOutputs("regex", "("), "unclosed group"),
        (StructuredOutputs("json", '{"not": {}}'), "not"),
        (StructuredOutputs("json", f'{{"oneOf": {OVERLAP}}}'), "oneOf .* allowed are anyOf"),
        (
            StructuredOutputs("grammar", f'start: "\u2028" a\na: %json {{"oneOf": {OVERLAP}}}'),
            "a: oneOf .* exclude each other$",
        ),
        (StructuredOutputs("grammar", 'start: %json {"not": {}}'), r'start: .*\["not"\]$'),
        (StructuredOutputs("grammar", "start: x"), "1 | start: x"),
    ):
        with pytest.raises(RequestError, match=f"^structured_outputs: {form.kind}: .*{says}"):
            trials.check(form)


@pytest.mark.parametrize(
    "form",
    [
        {
            "json": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(120)},
            }
        },
        {"json": {"enum": [f"v{i}" for i in range(9000)]}},
        {"choice": ["yes", "no"]},
        {"json_object": True},
        {"regex": "(a|b)*c.{2000}d"},
        {"grammar": 'start: "[" /[ab]/ ("," /[ab]/)~1..4 "]"'},
    ],
    ids=lambda form: str(form)[:20],
)
def test_forms_of_use_pass(form, trials):
    trials.check(SamplingParams(structured_outputs=form).structured_outputs)


def test_a_process_whose_engine_has_ended_says_nothing():
    for told in (b"", b'{"folder": "x'):
        done = subprocess.run([sys.executable, "-P", "-m", MODULE], input=told, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_process_that_was_killed_has_a_successor(trials):
    for _ in range(PROCESSES):
        trials.check(GOOD)
    processes = [trials._free.get() for _ in range(PROCESSES)]
    for process in processes:
        process._process.kill()
        process._process.wait()
        trials._free.put(process)
    for _ in range(PROCESSES):
        trials.check(GOOD)
    assert trials._free.qsize() == PROCESSES


def test_a_process_that_cannot_start_takes_nobodys_place(trials, monkeypatch):
    """Where the system has no process left, a form fails; later ones do not wait for ever."""
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError("no process left")))
        for _ in range(PROCESSES + 1):
            with pytest.raises(BlockingIOError):
                trials.check(GOOD)
    trials.check(GOOD)
