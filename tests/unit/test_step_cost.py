"""The model of a step's cost against the points that two GPUs gave, as docs/measurements/two-gpus.md
has them, and by hand.
"""

import re
from pathlib import Path

import pytest

from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.step_cost import (
    LINKS,
    Devices,
    Link,
    estimate,
    ici,
    number_of_sums,
    step_ms,
    sum_us,
    sums_ms,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "two-gpus.md"
BATCHES = (1, 8, 64, 256)
PROMPTS = 8192
LLAMA = load_config(model_folder("llama3-8b"))


def row(text, begin):
    """The numbers of the first row of a table that begins so."""
    cells = re.search(rf"^\| {re.escape(begin)} \|(.*)\|$", text, re.MULTILINE)[1]
    return [float(cell.replace(" ", "").replace("%", "")) for cell in cells.split("|")]


def section():
    text = PAGE.read_text()
    return text[text.index("## Steps on two GPUs") : text.index("## The executor alone")]


@pytest.mark.parametrize(
    ("link", "measured", "stated"),
    [("nccl", "two, NCCL", "NCCL"), ("peers", "two, peers, 2026-11-25", "peers")],
)
def test_the_model_is_as_far_off_as_is_said(link, measured, stated):
    text = section()
    *one, one_rate = row(text, "one GPU")
    *two, two_rate = row(text, measured)
    errors = [
        step_ms(LLAMA, alone, batch, 2, 2, LINKS[link]) / took - 1
        for batch, alone, took in zip(BATCHES, one, two, strict=True)
    ]
    prompts = step_ms(LLAMA, 1e3 * PROMPTS / one_rate, PROMPTS, 2, 2, LINKS[link])
    errors.append(prompts / (1e3 * PROMPTS / two_rate) - 1)
    assert [100 * error for error in errors] == pytest.approx(row(text, stated), abs=0.06)
    assert max(map(abs, errors)) < 0.045


def test_a_sum_sends_all_but_a_devices_own_part_twice():
    link = Link(10.0, 1e9, 2e9, "made up")
    assert sum_us(link, 1000, 1) == 0.0
    assert sum_us(link, 1000, 2) == pytest.approx(10 + 1.0)
    assert sum_us(link, 1000, 4) == pytest.approx(10 + 1.5)
    assert sum_us(link, 16 << 20, 2) == pytest.approx(10 + (16 << 20) / 2e3)


def test_an_estimate_by_hand():
    """16 GB of weights on 4 devices of 1 TB/s; 65 sums of 8 rows of 4096 bfloat16 numbers."""
    devices = Devices(4, 1e12, 1e14, ici(45e9))
    found = estimate("decode", LLAMA, [100] * 8, (2, 2), devices)
    entries = 8_030_261_248 - 128256 * 4096
    cache = 8 * 100 * 32 * 2 * 8 * 128
    assert found.bytes == pytest.approx(2 * (entries + 8 * 4096 + cache) / 4)
    assert found.flops == pytest.approx(2 * entries * 8 / 4, rel=1e-3)
    assert (found.sums, found.sum_bytes) == (65, 8 * 4096 * 2)
    assert found.sums_ms == pytest.approx(65 * (10 + 1.5 * 65536 / 45e3) / 1e3)
    assert found.ms == pytest.approx(found.bytes / 1e9 + found.sums_ms)
    prompts = estimate("prefill", LLAMA, [1024] * 8, (2, 2), devices)
    assert prompts.sum_bytes == 8192 * 4096 * 2
    assert prompts.flops_ms > prompts.bytes_ms
    assert prompts.ms == pytest.approx(prompts.flops_ms + prompts.sums_ms)


def test_an_mlp_beside_experts_is_one_more_sum():
    """As `twinfer aot` counts them in what is compiled: 3 a layer (docs/measurements/tpu-compiler.md)."""
    assert number_of_sums(load_config(model_folder("gemma4-26b-a4b"))) == 3 * 30 + 1
    assert number_of_sums(load_config(model_folder("qwen3-30b-a3b"))) == 2 * 48 + 1


def test_norms_over_all_heads_sum_two_numbers_a_token_more():
    model, link = load_config(model_folder("olmo3-7b")), ici(45e9)
    found = sums_ms(model, 8, 2, 4, link)
    assert found == pytest.approx(
        (65 * (10 + 1.5 * 65536 / 45e3) + 32 * (10 + 1.5 * 64 / 45e3)) / 1e3
    )


def test_one_device_sums_nothing():
    alone = estimate("decode", LLAMA, [100], (2, 2), Devices(1, 1e12, 1e14, ici(45e9)))
    assert (alone.sums, alone.sums_ms) == (0, 0.0)
    assert step_ms(LLAMA, 5.0, 1, 2, 1, LINKS["peers"]) == pytest.approx(5.0)
