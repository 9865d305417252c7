"""A page in a real Chromium without a window, driven over its own protocol; for tests."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
PORT = "--remote-debugging-port=0"


class Page:
    """One page. `asked` are the addresses that it has asked for, `complaints` what it threw, what
    its console had as errors, and what its policy kept it from.
    """

    def __init__(self, socket):
        self.asked, self.complaints = [], []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method, **params):
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async for message in self._socket:
            told = json.loads(message.data)
            if told.get("id") == number:
                return told["result"]
            self._take(told)
        raise AssertionError("Chromium has left")

    def _take(self, told):
        params = told.get("params", {})
        if told["method"] == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif told["method"] == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif told["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    async def run(self, script):
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, script, seconds=30):
        """The first value of an expression that is true."""
        end = time.monotonic() + seconds
        while not (value := await self.run(script)):
            assert time.monotonic() < end, (script, await self.run("document.body.innerText"))
            await asyncio.sleep(0.1)
        return value

    async def text(self, name):
        return await self.run(f"document.getElementById({json.dumps(name)}).textContent")

    async def fill(self, name, value):
        await self.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")

    async def click(self, name):
        await self.run(f"document.getElementById({json.dumps(name)}).click()")


@contextlib.asynccontextmanager
async def opened(url):
    """A page at an address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [CHROMIUM, *FLAGS, PORT, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(
                    pages[0]["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Network", "Page"):
                        await page.call(f"{domain}.enable")
                    await page.call("Page.navigate", url=url)
                    await page.wait("document.readyState == 'complete'")
                    yield page
        finally:
            process.terminate()
            process.wait(20)


async def _port(path):
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < end, "Chromium did not start"
        await asyncio.sleep(0.05)
    return path.read_text().split()[0]
