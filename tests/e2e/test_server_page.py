"""The page of `twinfer serve` in Chromium: what a person sees and does there."""

import asyncio

import pytest

pytest.importorskip("aiohttp")

from .browser import CHROMIUM, opened
from .server_process import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
FLAGS = ["--backend", "torch", "--device", "cpu", "--dtype", "float32"]


def test_a_person_sees_the_server_and_asks_it():
    async def look(server):
        async with opened(server.url) as page:
            await page.wait("at('state').textContent == 'ready'")
            assert await page.text("model") == "demo"
            await page.fill("most", "12")
            await page.fill("temperature", "0")
            await page.click("send")
            assert "pieces in" in await page.wait("at('note').textContent")
            answer = await page.text("answer")
            with server.openai() as client:
                chat = client.chat.completions.create(
                    model="demo", max_tokens=12, temperature=0,
                    messages=[{"role": "user", "content": "Write a function."}],
                )  # fmt: skip
            assert answer == chat.choices[0].message.content
            await page.wait("at('line').getAttribute('points').split(' ').length > 2")
            tiles = await page.run("[...document.querySelectorAll('.tile b')].map(b => b.id)")
            assert len(tiles) == 8
            for name in tiles:
                assert await page.text(name) not in ("–", "NaN", "NaN %")
            assert await page.text("recompiles_after_ready_total") == "0"
            # what the server says of a wrong field is told
            await page.fill("temperature", "50")
            await page.click("send")
            assert "temperature: got 50" in await page.wait("at('note').textContent")
            assert not await page.run("at('send').disabled")
            assert all(url.startswith(server.url) for url in page.asked if url != "about:blank")
            # of complaints there is the answer 400 alone
            assert len(page.complaints) == 1
            assert "400" in page.complaints[0]
            server.stop()
            await page.wait("at('state').className == 'bad'")

    with served(*FLAGS) as server:
        asyncio.run(look(server))


def test_a_person_needs_the_key():
    async def look(server):
        async with opened(server.url) as page:
            await page.wait("at('state').textContent == 'an API key is needed'")
            assert not await page.run("at('locked').hidden")
            await page.fill("key", "wrong")
            await page.click("send")
            assert "no valid API key" in await page.wait("at('note').textContent")
            await page.fill("key", "secret")
            await page.wait("at('state').textContent == 'ready'")
            await page.fill("most", "3")
            await page.click("send")
            assert "pieces in" in await page.wait("at('note').textContent.includes('pieces') && "
                                                  "at('note').textContent")  # fmt: skip

    with served(*FLAGS, "--api-key", "secret") as server:
        asyncio.run(look(server))
