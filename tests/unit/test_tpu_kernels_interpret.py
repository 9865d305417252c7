"""The Pallas kernels, tier 2: TPU interpret mode, which simulates memories, copies and semaphores.

It sees what neither the generic interpreter nor the compiler does: a copy that is not waited for, a
buffer that is written while it is read, an address outside of an array, memory that nobody wrote
(here NaN). It does not see tiling or how large memories are (`test_tpu_kernels_compile.py` does).
The planted faults show that each is seen.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from twinfer.ops.cases.attention import paged
from twinfer.ops.testing import Judge
from twinfer.tests import interpreted
from twinfer.tpu.kernels import attention, cache, write
from twinfer.tpu.kernels.blocks import BlockSizes

# Blocks of two pages, so that requests have several and both halves of the buffer are used and used
# again.
BLOCKS = BlockSizes(decode_kv=16, decode_requests=2, mixed_kv=16, mixed_tokens=8, vmem_mib=None)


def arguments(kind, dtype):
    rng = np.random.default_rng(5)
    if kind == "decode":
        return paged(rng, dtype, [37, 5, 16], [1, 1, 1], (4, 2), 16, 8, requests=4, tokens=4)
    return paged(rng, dtype, [20, 19, 9], [1, 11, 9], (4, 2), 16, 8, requests=4, tokens=24)


def attend(**given):
    return attention.attend(**given, blocks=BLOCKS)


@pytest.fixture
def interpret(capfd):
    """interpret(arguments, mode, function=attend) -> (output, what it printed about races). Raises
    what the interpreter raises.
    """

    def run(given, mode, function=attend):
        # Copies draw one of the places in the clock at random; those that draw the same one count
        # as ordered.
        np.random.seed(0)
        params = pltpu.InterpretParams(
            dma_execution_mode=mode, detect_races=True, out_of_bounds_reads="raise",
            uninitialized_memory="nan",
            vector_clock_size=64,
        )  # fmt: skip
        given = {"k_scale": None, "v_scale": None} | given
        capfd.readouterr()
        try:
            out = jax.block_until_ready(interpreted.interpret(function, given, interpret=params))
        finally:
            pltpu.reset_tpu_interpret_mode_state()
        return out, capfd.readouterr().out

    return run


def races(interpret, given, mode):
    """Whether a race is reported.

    The detector cannot compare a strided read with a write: it fails in its own file when it has
    found the two unordered and in the same half of the buffer, which sound kernels never are
    (`test_clean` would fail likewise).
    """
    try:
        _, printed = interpret(given, mode)
    except jax.errors.JaxRuntimeError as error:
        return "race_detection_state.py" in str(error) and "_slices_overlap" in str(error)
    return "RACE DETECTED" in printed


def passes(given, out):
    return Judge("paged_attention", given)([out]).passed


CLEAN = [("mixed", "bfloat16", "on_wait")]
MORE = [
    (kind, dtype, mode)
    for kind in ("decode", "mixed")
    for dtype in ("float32", "bfloat16")
    for mode in ("on_wait", "eager")
    if (kind, dtype, mode) not in CLEAN
]


@pytest.mark.parametrize(
    ("kind", "dtype", "mode"), CLEAN + [pytest.param(*x, marks=pytest.mark.slow) for x in MORE]
)
def test_clean(interpret, kind, dtype, mode):
    given = arguments(kind, dtype)
    out, printed = interpret(given, mode)
    assert "RACE" not in printed
    assert passes(given, out)


def test_copies_that_are_started_in_a_loop_are_clean(interpret, monkeypatch):
    """As those of blocks of many pages are."""
    monkeypatch.setattr(cache, "UNROLLED", 1)
    given = arguments("decode", "float32")
    out, printed = interpret(given, "on_wait")
    assert "RACE" not in printed
    assert passes(given, out)


KINDS = ["decode", pytest.param("mixed", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_wait_is_seen(interpret, monkeypatch, kind):
    """As a race where copies are done at once, as memory that nobody wrote where they are done
    when waited for.
    """
    monkeypatch.setattr(cache.Pages, "wait", lambda *_: None)
    given = arguments(kind, "float32")
    assert races(interpret, given, "eager")
    out, _ = interpret(given, "on_wait")
    assert np.isnan(np.asarray(out[: given["query_start"][-1]])).any()


def test_a_wait_for_too_few_pages_is_seen(interpret, monkeypatch):
    """What is waited for is a number of bytes: one page less leaves a page that nobody wrote."""
    real = cache.Pages.wait
    monkeypatch.setattr(
        cache.Pages, "wait", lambda self, j, wanted, half: real(self, j, (0, wanted[1] - 1), half)
    )
    given = arguments("decode", "float32")
    out, _ = interpret(given, "on_wait")
    assert not passes(given, out)


class OneHalf:
    """The buffer of pages, in which every copy goes to the first half."""

    def __init__(self, ref):
        self.ref = ref

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return self.ref.at[(0, *index[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_race_is_seen(interpret, monkeypatch, kind):
    """With one buffer, the next block overwrites what is being read, though every copy is waited
    for.
    """
    real = {name: getattr(cache.Pages, name) for name in ("start", "head", "clear")}

    def start(self, *rest, **how):
        real["start"](replace(self, buffer=OneHalf(self.buffer)), *rest, **how)

    monkeypatch.setattr(cache.Pages, "start", start)
    monkeypatch.setattr(cache.Pages, "head", lambda self, half, *rest: real["head"](self, 0, *rest))
    monkeypatch.setattr(
        cache.Pages, "clear", lambda self, half, *rest: real["clear"](self, 0, *rest)
    )
    assert races(interpret, arguments(kind, "float32"), "on_wait")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_outside_of_the_cache_is_seen(interpret, kind):
    given = arguments(kind, "float32")
    given["page_table"] = given["page_table"].copy()
    given["page_table"][1, 0] = len(given["kv"])
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        interpret(given, "on_wait")


@pytest.mark.slow
def test_an_entry_outside_of_the_page_table_is_seen(interpret, monkeypatch):
    real = cache.Pages.start
    monkeypatch.setattr(
        cache.Pages,
        "start",
        lambda self, request, *rest, **how: real(self, request + 4, *rest, **how),
    )
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        interpret(arguments("decode", "float32"), "on_wait")


def test_memory_that_nobody_wrote_is_seen(interpret, monkeypatch):
    monkeypatch.setattr(cache.Pages, "clear", lambda *_: None)
    given = arguments("decode", "float32")
    out, _ = interpret(given, "on_wait")
    assert not passes(given, out)


# --- the KV write
# --------------------------------------------------------------------------------------------------


# A prompt of 20 tokens (a run of 16, then single ones), padding, and decodes.
PROMPT = [*range(21, 41), -1, 3, 50, -1]


def rows(dtype, slots=PROMPT):
    rng = np.random.default_rng(6)
    slots = np.array(slots, np.int32)
    made = {name: jnp.asarray(rng.normal(size=(len(slots), 2, 8)), dtype) for name in ("k", "v")}
    return made | {"kv": jnp.asarray(rng.normal(size=(8, 8, 4, 8)), dtype), "slots": slots}


def wrote(given, out):
    return Judge("write_kv", {name: np.asarray(value) for name, value in given.items()})(
        [np.asarray(out)]
    ).passed


@pytest.mark.parametrize(("dtype", "mode"), [("float32", "on_wait"), ("bfloat16", "eager")])
def test_the_write_is_clean(interpret, dtype, mode):
    given = rows(dtype)
    out, printed = interpret(given, mode, write.write)
    assert "RACE" not in printed
    assert wrote(given, out)


@pytest.mark.parametrize(
    "slots",
    [
        [7],
        [-1],
        [-1] * 20,
        [20, 22, 21, *range(23, 36), *range(-1, 3)],  # of which 16 begin and end as a run does
        [*range(63, 41, -1)],
        # In two blocks, and no multiple of them.
        pytest.param([*range(32, 64), *[-1] * 222, *range(18), -1], marks=pytest.mark.slow),
    ],
    ids=["one", "none", "padding", "swapped", "backwards", "two blocks"],
)
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_the_write_of_other_slots_is_clean(interpret, slots, mode):
    given = rows("float32", slots)
    out, printed = interpret(given, mode, write.write)
    assert "RACE" not in printed
    assert wrote(given, out)


class Unwaited:
    """A copy for which nobody waits."""

    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass


def test_a_missing_wait_in_the_write_is_seen(interpret, monkeypatch):
    """As a write that has not happened."""
    real = write.pltpu.make_async_copy
    monkeypatch.setattr(write.pltpu, "make_async_copy", lambda *refs: Unwaited(real(*refs)))
    given = rows("float32")
    out, _ = interpret(given, "on_wait", write.write)
    assert not wrote(given, out)


def test_a_wait_for_too_few_tokens_is_seen(interpret, monkeypatch):
    """What is waited for is a number of bytes: without those of 16 of 22 tokens, copies are open."""
    given = rows("float32")
    real, of_sixteen = write.pltpu.make_async_copy, 16 * given["k"][0].size * 2 // 8  # in words

    def copy(source, target, sem):
        made = real(source, target, sem)
        return Unwaited(made) if source.shape[0] == of_sixteen else made

    monkeypatch.setattr(write.pltpu, "make_async_copy", copy)
    out, _ = interpret(given, "on_wait", write.write)
    assert not wrote(given, out)


def test_a_copy_for_padding_is_seen(interpret, monkeypatch):
    monkeypatch.setattr(write, "is_written", lambda slot: slot >= -1)
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        interpret(rows("float32"), "on_wait", write.write)


def test_two_rows_for_one_slot_are_a_race(interpret):
    given = rows("float32")
    given["slots"][21] = 50
    _, printed = interpret(given, "on_wait", write.write)
    assert "RACE DETECTED" in printed


@pytest.mark.parametrize("slot", [64, 60])
def test_a_slot_outside_of_the_cache_is_seen(interpret, slot):
    """64 is one slot too far; a run of 16 from 60 on begins within the cache."""
    given = rows("float32")
    given["slots"][:20] = range(slot, slot + 20)
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        interpret(given, "on_wait", write.write)
