"""The page of `twinfer numerics report` in Chromium, light and dark."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

from twinfer.serving.cli import main

from .browser import CHROMIUM, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
MODEL = ["--model", "demo", "--a", "torch:cpu", "--b", "torch:cpu", "--mode", "S"]
FAINTEST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgb = text => {  // of any notation, oklab too
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const linear = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * linear(c[0] / 255) + 0.7152 * linear(c[1] / 255)
    + 0.0722 * linear(c[2] / 255);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c[3] == 255) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const words = [...node.childNodes].filter(n => n.nodeType == 3 && n.textContent.trim());
    if (!words.length || !node.getClientRects().length || node.closest('style, title')) continue;
    const style = getComputedStyle(node);
    const front = light(rgb(node instanceof SVGElement ? style.fill : style.color));
    const back = light(behind(node));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    found.push([ratio, words[0].textContent.trim()]);
  }
  return JSON.stringify(found.sort((a, b) => a[0] - b[0]).slice(0, 3));
})()"""
"""The three texts with the least contrast to what is behind them, as WCAG counts it."""


@pytest.mark.parametrize(
    "plant", [[], ["--plant", "attention-scale-1e-3@1"]], ids=["right", "wrong"]
)
def test_all_texts_can_be_read(tmp_path, plant):
    result = tmp_path / "run.json"
    code = main(["numerics", "model", *MODEL, *plant, "--layers", "0-1", "--json", str(result)])
    assert code == len(plant) // 2
    assert main(["numerics", "report", str(result)]) == 0

    async def look():
        backs = []
        async with opened(result.with_suffix(".html").as_uri()) as page:
            for scheme in ("light", "dark"):
                wanted = {"name": "prefers-color-scheme", "value": scheme}
                await page.call("Emulation.setEmulatedMedia", features=[wanted])
                faintest = json.loads(await page.run(FAINTEST))
                assert faintest[0][0] >= 4.5, (scheme, faintest)
                backs.append(await page.run("getComputedStyle(document.body).backgroundColor"))
            assert len(page.asked) == 1
            assert not page.complaints
        assert backs[0] != backs[1]

    asyncio.run(look())
