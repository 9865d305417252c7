#!/usr/bin/env python3
"""Whether a server is the same after hours of calls: memory, files, threads, answers.

Clients of all kinds ask one `twinfer serve` at once: streams and whole answers, several
completions, forms, log-probabilities, prompts that share pages and some that are too long, calls
that are wrong, clients that leave in the middle. Fixed calls come in between; each must be answered
as at the beginning. At the end nobody asks, and the engine must hold nothing. Linux only (/proc).

    python scripts/soak.py --minutes 30 -- --backend torch --device cpu --dtype float32

Exits with 1 where an answer or a status was not the one that it had to be, where something is held
at the end, or where a process grew in the second half: by more than `--limit` MB, or by more files
or threads than there are clients.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
from bench_front import start

PIECES = (
    "def f(x):\n",
    "    return x + 1\n",
    "class A:\n",
    "import os\n",
    "x = [1, 2, 3]\n",
    "# ä\n",
)
FORMS = (
    {"regex": "[0-9]{1,20}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)
"""Forms that many ask for; others are asked for once."""
WRONG = (
    {"temperature": "hot"},
    {"max_tokens": -1},
    {"top_p": 2},
    {"prompt": []},
    {"prompt": "x " * 100_000},
    {"structured_outputs": {"regex": "("}},
    {"n": 0},
    {"stop": [""]},
    {"logprobs": 1000},
)
FIXED = (
    {"prompt": "def f(x):\n", "max_tokens": 40, "temperature": 0},
    {"prompt": "import os\n", "max_tokens": 30, "seed": 7, "temperature": 1, "logprobs": 2},
    {"prompt": "x = ", "max_tokens": 20, "seed": 1, "structured_outputs": FORMS[0]},
    {"prompt": "class A:\n" * 20, "max_tokens": 20, "temperature": 0},
)
ANSWER_S = 120
"""Within which each call has to be answered."""


class Soak:
    """The clients, and what they have found."""

    def __init__(self, session, seed):
        self._session = session
        self._random = random.Random(seed)
        self.calls = Counter()
        self.wrong = []
        self.is_over = False

    async def client(self):
        """One call after the other, until the end."""
        kinds = (self.whole, self.whole, self.stream, self.stream, self.leave, self.chat, self.bad)
        while not self.is_over:
            call = self._random.choice(kinds)
            try:
                await call()
            except TimeoutError:
                self.wrong.append(f"{call.__name__}: no answer within {ANSWER_S} s")

    def body(self):
        """A completion of random fields."""
        draw = self._random
        body = {
            "prompt": "".join(draw.choices(PIECES, k=draw.randint(1, 40))),
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice((0, 0.7, 1.5)),
        }
        more = (
            {"n": 3},
            {"logprobs": 3},
            {"prompt_logprobs": 2},
            {"stop": ["return", "\n\n"]},
            {"structured_outputs": draw.choice(FORMS)},
            {"structured_outputs": {"choice": [f"{draw.random()}", "no"]}},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"seed": draw.randrange(1000), "top_k": 20, "min_p": 0.01},
            {"bad_words": ["import"]},
            {"logit_bias": {"5": -100}},
            {"echo": True},
            {"cache_salt": str(draw.randrange(1_000_000))},
            {"ignore_eos": True},
        )
        for fields in draw.sample(more, draw.choice((0, 0, 1, 1, 2))):
            body |= fields
        return body

    def note(self, kind, status, allowed, body, said=""):
        """Count a call; keep it if its status had to be another one."""
        self.calls[f"{kind} {status}"] += 1
        if status not in allowed:
            self.wrong.append(f"{kind}: {status} for {json.dumps(body)[:300]}: {said[:200]}")

    async def whole(self):
        """A completion in one piece. Together some fields are refused."""
        body = self.body()
        async with self._session.post("/v1/completions", json=body) as answer:
            self.note("whole", answer.status, (200, 400), body, await answer.text())

    async def stream(self):
        """A completion as it comes."""
        body = self.body() | {"stream": True}
        async with self._session.post("/v1/completions", json=body) as answer:
            last = b""
            async for line in answer.content:
                last = line.strip() or last
            ended = answer.status != 200 or last == b"data: [DONE]"
            allowed = (200, 400) if ended else ()
            self.note("stream", answer.status, allowed, body, last.decode())

    async def leave(self):
        """A client that goes away, before the first byte or after it."""
        body = self.body() | {"stream": self._random.random() < 0.7, "ignore_eos": True}
        try:
            async with asyncio.timeout(self._random.uniform(0, 0.3)):
                async with self._session.post("/v1/completions", json=body) as answer:
                    async for _ in answer.content:
                        if self._random.random() < 0.1:
                            break
        except TimeoutError:
            pass
        self.calls["leave"] += 1

    async def chat(self):
        """A chat, a response, or a message."""
        draw = self._random
        messages = [{"role": "user", "content": draw.choice(PIECES) * draw.randint(1, 10)}]
        body = {"messages": messages, "max_tokens": draw.randint(1, 40)}
        if draw.random() < 0.3:
            body["logprobs"], body["top_logprobs"] = True, 2
        path = "/v1/chat/completions"
        if draw.random() < 0.3:
            path = "/v1/responses"
            body = {"input": messages, "max_output_tokens": draw.randint(16, 40)}
        elif draw.random() < 0.3:
            path = "/v1/messages"
            body = {"messages": messages, "max_tokens": draw.randint(1, 40)}
        async with self._session.post(path, json=body) as answer:
            self.note("chat", answer.status, (200,), body, await answer.text())

    async def bad(self):
        """A call that is wrong."""
        body = {"prompt": "x", "max_tokens": 5} | self._random.choice(WRONG)
        async with self._session.post("/v1/completions", json=body) as answer:
            self.note("bad", answer.status, (400,), body, await answer.text())

    async def fixed(self):
        """What the fixed calls are answered with."""
        found = []
        for body in FIXED:
            async with self._session.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                data = await answer.json()
            found.append([choice["text"] for choice in data["choices"]])
        return found

    async def metric(self, name):
        """The value of a metric without labels."""
        async with self._session.get("/metrics") as answer:
            text = await answer.text()
        return float(re.search(rf"^twinfer:{name} (\S+)$", text, re.M)[1])


def family(pid):
    """A process and all that it started."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found


def footprint(pids):
    """MB of memory that is resident, open files and threads, of each process."""
    found = []
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        size, threads = (
            int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")
        )
        found.append((size / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads))
    return found


async def watch(soak, pid, arguments, lines):
    """Let clients ask, and look at the processes and at the fixed calls meanwhile."""
    expected, began = await soak.fixed(), time.monotonic()
    clients = [asyncio.create_task(soak.client()) for _ in range(arguments.clients)]
    try:
        while (passed := time.monotonic() - began) < 60 * arguments.minutes:
            await asyncio.sleep(min(60 * arguments.minutes / 30, 60))
            for client in clients:
                if client.done():
                    client.result()  # it has ended by an error
            if (found := await soak.fixed()) != expected:
                soak.wrong.append(f"a fixed call is answered otherwise: {found}, not {expected}")
            lines.append((sum(soak.calls.values()), footprint(family(pid)[:2])))
            told = "  ".join("{:.1f}, {}, {}".format(*one) for one in lines[-1][1])
            print(f"{passed / 60:6.1f}  {lines[-1][0]:5}  {told}", flush=True)
    finally:
        soak.is_over = True
        await asyncio.gather(*clients, return_exceptions=True)


async def rest(soak):
    """What is left once nobody asks any more."""
    end = time.monotonic() + 30
    held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while (left := {name: await soak.metric(name) for name in held}) != dict.fromkeys(held, 0):
        if time.monotonic() > end:
            soak.wrong.append(f"held with no call under way: {left}")
            break
        await asyncio.sleep(0.2)
    if late := await soak.metric("recompiles_after_ready_total"):
        soak.wrong.append(f"{late:.0f} late compilations")


async def measure(pid, url, arguments):
    """All of it. Whether everything was as it had to be."""
    limits = {
        "timeout": aiohttp.ClientTimeout(total=ANSWER_S),
        "connector": aiohttp.TCPConnector(limit=0),
    }
    lines = []
    async with aiohttp.ClientSession(url, **limits) as session:
        soak = Soak(session, arguments.seed)
        wrong = soak.wrong
        print("minute  calls  MB, files, threads of front and engine")
        try:
            await watch(soak, pid, arguments, lines)
            await rest(soak)
        except (TimeoutError, aiohttp.ClientError) as error:
            wrong.append(f"the server is gone: {error!r}")
    print(json.dumps(soak.calls, sort_keys=True))
    if lines:
        half, last = lines[len(lines) // 2], lines[-1]
        for name, before, after in zip(("front", "engine"), half[1], last[1], strict=True):
            grown = [now - then for then, now in zip(before, after, strict=True)]
            told = "{:+.1f} MB, {:+} files, {:+} threads".format(*grown)
            print(f"{name}: {told} in the last {last[0] - half[0]} calls")
            if grown[0] > arguments.limit or max(grown[1:]) > arguments.clients:
                wrong.append(f"{name} grows: {told}")
    for line in wrong[:20]:
        print(f"WRONG {line}")
    print(f"{len(wrong)} things were not as they had to be")
    return not wrong


def main():
    """Starts the server, asks it, ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24, help="that ask at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=30, help="MB that a process may grow by")
    parser.add_argument("rest", nargs="*", metavar="-- OPTION", help="of `twinfer serve demo`")
    arguments = parser.parse_args()
    process, url = start(arguments.rest)
    try:
        good = asyncio.run(measure(process.pid, url, arguments))
    finally:
        process.terminate()
        process.wait()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
