"""Nothing is served from a doubtful state: interrupts at every line, steps that fail, logits
that are not finite.
"""

import itertools
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

import twinfer
from twinfer.serving.cli import main
from twinfer.serving.llm import LLM
from twinfer.shared import interrupts
from twinfer.shared.errors import EngineDead
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_params import SamplingParams

from .conftest import GREEDY_ONLY, small

ROOT = str(Path(twinfer.__file__).parent)
LIBRARIES = sysconfig.get_path("purelib")
"""Below `ROOT` where the environment lies in the checkout."""
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 900, n).tolist() for n in (1, 15, 17, 40, 33)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS = {
    "plain": {"enable_prefix_caching": False},
    "prefix": {},
    "loops": {"decode_steps": 3},
    "loops-plain": {"decode_steps": 3, "enable_prefix_caching": False},
}
PARTS = 8
"""Of what takes minutes: each part is a test."""
BOTH = pytest.mark.parametrize("backend", ["jax", "torch"])
ON_GPUS_TOO = pytest.mark.parametrize(
    "backend", ["jax", pytest.param("torch", marks=pytest.mark.gpu)]
)


def open_llm(checkpoints, backend, device, setting, **options):
    folder, _ = checkpoints("qwen3")
    options = small(backend) | SETTINGS[setting] | options
    return LLM(
        folder, backend=backend, device=device, progress=False, demand=GREEDY_ONLY, **options
    )


def tokens_of(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


class InterruptAtLine:
    """Sends SIGINT when the given line (counted over everything in the package that runs) is
    about to run.

    Libraries are not counted: Python drops an interrupt inside a callback of its garbage collector,
    and JAX has one.
    """

    def __init__(self, number):
        self.lines, self._number = 0, number

    def __call__(self, frame, event, argument):
        file = frame.f_code.co_filename
        return self._line if file.startswith(ROOT) and not file.startswith(LIBRARIES) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self._number:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return self._line

    def run(self, work):
        sys.settrace(self)
        try:
            return work()
        finally:
            sys.settrace(None)


def check_interrupted(llm, want, lines):
    """Interrupt `generate` at each of `lines`; afterwards the engine gives the tokens it gave
    before.
    """
    interrupted = 0
    for line in lines:
        try:
            InterruptAtLine(line).run(lambda: tokens_of(llm))
        except KeyboardInterrupt:
            interrupted += 1
        assert tokens_of(llm) == want, f"wrong tokens after an interrupt at line {line}"
        llm.engine.scheduler.check_integrity()
        assert llm.engine.metrics().cache_usage == 0
    return interrupted


@pytest.fixture(
    params=[
        pytest.param("jax-prefix", marks=pytest.mark.slow),
        pytest.param("torch-loops", marks=pytest.mark.gpu),
    ]
)
def quick(request, checkpoints, device):
    backend, setting = request.param.split("-")
    with open_llm(checkpoints, backend, device, setting) as llm:
        yield llm


def test_an_interrupt_at_some_lines_costs_the_requests_only(quick):
    want = tokens_of(quick)
    every = InterruptAtLine(0)
    assert every.run(lambda: tokens_of(quick)) == want
    # Each of the first and the last, where the call begins and ends, and a share of the rest.
    edges = [*range(1, 12), *range(every.lines - 12, every.lines)]
    lines = range(12, every.lines - 12, max(1, every.lines // 60))
    assert check_interrupted(quick, want, [*edges, *lines]) > 70


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("part", range(PARTS))
def test_an_interrupt_at_every_line_costs_the_requests_only(
    checkpoints, device, backend, setting, part
):
    with open_llm(checkpoints, backend, device, setting) as llm:
        want = tokens_of(llm)
        every = InterruptAtLine(0)
        every.run(lambda: tokens_of(llm))
        # Each line of the first steps, where all kinds of step occur, and a share of the rest.
        lines = itertools.chain(range(1, every.lines // 2), range(every.lines // 2, every.lines, 7))
        assert (
            check_interrupted(llm, want, itertools.islice(lines, part, None, PARTS))
            > every.lines // 3 // PARTS
        )


def interrupt_at_random(monkeypatch, llm, want, number, seed=0):
    """Interrupts at random moments of `generate`, by a thread that sends the signal after a
    random time.
    """
    dice = np.random.default_rng(seed)
    times = []
    for _ in range(3):  # one of which may have stood still
        start = time.perf_counter()
        tokens_of(llm)
        times.append(time.perf_counter() - start)
    length = min(times)
    interrupted = 0
    # Python drops an interrupt that comes while it runs a callback of its own, of a weak reference
    # for instance.
    hook = sys.unraisablehook
    monkeypatch.setattr(
        sys, "unraisablehook", lambda lost: lost.exc_type is KeyboardInterrupt or hook(lost)
    )
    while interrupted < number:
        timer = threading.Timer(dice.uniform(0, length), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            tokens_of(llm)
            timer.join()  # if it comes only now, it comes here
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        if interrupted % 10 == 0 or interrupted == number:
            assert tokens_of(llm) == want, f"wrong tokens after {interrupted} interrupts"
    llm.engine.scheduler.check_integrity()


def test_random_interrupts_leave_a_working_engine(quick, monkeypatch):
    interrupt_at_random(monkeypatch, quick, tokens_of(quick), 40)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("part", range(PARTS))
def test_5000_random_interrupts_leave_a_working_engine(
    checkpoints, device, backend, part, monkeypatch
):
    with open_llm(checkpoints, backend, device, "prefix") as llm:
        interrupt_at_random(monkeypatch, llm, tokens_of(llm), -(-2500 // PARTS), seed=1 + part)


def test_a_hanging_step_can_be_interrupted_in_the_end(checkpoints, device, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.05)
    with open_llm(checkpoints, "torch", device, "plain") as llm:

        def hang(step):
            for _ in range(100):
                time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGINT)

        llm.engine.worker.execute = hang
        with pytest.raises(KeyboardInterrupt):
            tokens_of(llm)
        with pytest.raises(EngineDead, match="KeyboardInterrupt"):
            tokens_of(llm)


def test_a_handler_that_does_not_raise_costs_nothing(checkpoints, device):
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with open_llm(checkpoints, "torch", device, "prefix") as llm:
            want = tokens_of(llm)
            assert InterruptAtLine(500).run(lambda: tokens_of(llm)) == want
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_other_threads_run_steps_without_signals(checkpoints, device):
    with open_llm(checkpoints, "torch", device, "prefix") as llm:
        want, results = tokens_of(llm), []
        thread = threading.Thread(target=lambda: results.append(tokens_of(llm)))
        thread.start()
        thread.join()
        assert results == [want]


def run(engine):
    while engine.has_work:
        engine.step()


class Fault(Exception):
    """The device is on fire."""


def fail(owner, name, call):
    """Let the call number `call` of a method raise."""
    method, calls = getattr(owner, name), itertools.count(1)

    def failing(*arguments, **options):
        if next(calls) == call:
            raise Fault("the device is on fire")
        return method(*arguments, **options)

    setattr(owner, name, failing)


def plant(llm, point, call):
    """A fault in a step: before, inside and behind the backbone, at the sampler, while reading."""
    worker, jax = llm.engine.worker, hasattr(llm.engine.worker, "_buffers")
    if point == "reading":
        execute, calls = worker.execute, itertools.count(1)

        def start(step):
            handle = execute(step)
            if next(calls) < call:
                return handle
            unread = types.SimpleNamespace(result=handle.result)
            fail(unread, "result", 1)
            return unread

        worker.execute = start
    elif not jax:
        owners = {"before": (worker._inputs, "fill"), "inside": (worker._programs, "_put_pages")}
        owners |= {
            "behind": (worker._download, "wait_for_last"),
            "sampler": (worker._programs, "sample"),
        }
        fail(*owners[point], call)
    elif point == "before":
        fail(worker._buffers, "pack", call)
    else:
        programs, calls = worker._programs, itertools.count(1)

        def broken(program, key):
            def run(*arguments):
                sampler = isinstance(key, tuple) and key[0] not in ("loop", "take")
                mine = sampler == (point == "sampler") and key not in ("update", "remember")
                if mine and next(calls) == call:
                    if point == "behind":
                        program(*arguments)  # the cache is donated, and what came of it is lost
                    raise Fault("the device is on fire")
                return program(*arguments)

            return run

        for key, program in list(programs.items()):
            programs[key] = broken(program, key)


POINTS = ("before", "inside", "behind", "sampler", "reading")


def failing_steps():
    """(backend, setting, point). JAX takes long to compile loops of decode steps: one point of
    them comes often.
    """
    for backend, setting, point in itertools.product(
        ("jax", "torch"), ("prefix", "loops-plain"), POINTS
    ):
        slow = (backend, setting) == ("jax", "loops-plain") and point != "inside"
        yield pytest.param(backend, setting, point, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("backend", "setting", "point"), [*failing_steps()])
def test_a_step_that_fails_ends_the_engine_with_its_reason(
    checkpoints, device, backend, setting, point
):
    if point == "sampler" and backend == "jax" and setting == "loops-plain":
        call = 1  # a loop has the sampler inside: only prompts sample apart from it
    else:
        call = 2
    with open_llm(checkpoints, backend, device, setting) as llm:
        tokens_of(llm)
        plant(llm, point, call)
        request = llm.engine.add("first", PROMPTS[0], GREEDY)
        llm.engine.add("second", PROMPTS[3], GREEDY)
        with pytest.raises(Fault):
            run(llm.engine)
        assert request.finish_reason is FinishReason.ERROR
        assert not llm.engine.has_work
        for call_again in (
            llm.engine.step,
            lambda: llm.engine.add("third", PROMPTS[0], GREEDY),
            lambda: tokens_of(llm),
        ):
            with pytest.raises(EngineDead, match="Fault: the device is on fire"):
                call_again()
        assert not llm.engine.abort("second")


@pytest.fixture(scope="module")
def not_finite(checkpoints, tmp_path_factory):
    """not_finite(what) -> the checkpoint with weights, all of them numbers, that make `what` of
    logits: "nan" of all (the stream between the layers is infinite in one entry, and normed), or
    "inf" of one.
    """
    from safetensors.numpy import load_file, save_file

    folder, _ = checkpoints("qwen3")

    def make(what):
        target = tmp_path_factory.mktemp("not-finite") / "model"
        target.mkdir()
        for name in os.listdir(folder):
            if not name.endswith(".safetensors"):
                (target / name).write_bytes((Path(folder) / name).read_bytes())
        tensors = load_file(os.path.join(folder, "model.safetensors"))
        tensors = {name: value.copy() for name, value in tensors.items()}
        if what == "nan":
            down = max(name for name in tensors if name.endswith("mlp.down_proj.weight"))
            tensors[down][7] = 3e38
            tensors[down.replace("down", "up")] *= 1e6
        else:
            tensors["model.norm.weight"][7] = tensors["lm_head.weight"][0, 7] = 1e30
        save_file(tensors, str(target / "model.safetensors"), {"format": "pt"})
        return str(target)

    return make


@pytest.mark.parametrize(
    ("backend", "setting"),
    [
        pytest.param("jax", "loops", marks=pytest.mark.slow),
        pytest.param("jax", "prefix", marks=pytest.mark.slow),
        pytest.param("torch", "loops", marks=pytest.mark.gpu),
        pytest.param("torch", "prefix", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_logits_that_are_not_finite_end_the_request(not_finite, device, backend, setting, what):
    folder = not_finite(what)
    options = SETTINGS[setting] | {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
    dice = SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=2, max_tokens=6)
    penalised = SamplingParams(temperature=1.0, presence_penalty=0.5, max_tokens=6)
    scored = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=6)
    with LLM(folder, backend=backend, device=device, progress=False, **options) as llm:
        for params in (GREEDY, dice, penalised, scored):
            (output,) = llm.generate([PROMPTS[3]], params, progress=False)
            (completion,) = output.outputs
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
            assert "not finite" in completion.stop_reason
            assert not completion.logprobs
        assert llm.engine.metrics().errors == 4
        assert llm.engine.scheduler.kv.num_registered == 0
        llm.engine.scheduler.check_integrity()


@ON_GPUS_TOO
@pytest.mark.parametrize("setting", ["prefix", "loops"])
def test_a_row_that_is_not_finite_leaves_the_others_alone(checkpoints, device, backend, setting):
    """A token whose embedding is NaN: only requests with it in the prompt, or that sample it,
    end.
    """
    with open_llm(checkpoints, backend, device, setting) as llm:
        poison = 950
        clean = [prompt for prompt in PROMPTS if poison not in prompt]
        want = tokens_of(llm, clean)
        assert not any(poison in tokens for tokens in want)
        weights = (
            llm.engine.worker._weights
            if backend == "jax"
            else llm.engine.worker._module.top_weights
        )
        if backend == "jax":
            weights["embed"] = weights["embed"].at[poison].set(np.nan)
        else:
            weights["embed"].data[poison] = float("nan")
        prompts = [[*clean[2], poison, *clean[0]], *clean]
        outputs = llm.generate(prompts, GREEDY, progress=False)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert [output.outputs[0].token_ids for output in outputs[1:]] == want
        # What the request that ended had computed is nobody's prefix.
        assert tokens_of(llm, clean) == want
        llm.engine.scheduler.check_integrity()


def test_the_command_line_says_so_and_prints_json(not_finite, capsys, device):
    folder = not_finite("nan")
    arguments = [
        "--backend",
        "torch",
        "--device",
        device,
        "--logprobs",
        "2",
        "--max-model-len",
        "64",
        "--json",
    ]
    assert main(["generate", "--model", folder, "--prompt-token-ids", "1,2,3", *arguments]) == 1
    printed = capsys.readouterr()
    assert "prompt 0: the model's logits were not finite" in printed.err
    record = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["finish_reason"] == "error"
