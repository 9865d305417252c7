"""What the server's front costs: processor time of a streamed token, and how long other calls wait
while a large one arrives.

`python scripts/bench_front.py`: starts `twinfer serve demo` and asks it. Linux only (/proc).
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")


def start(flags):
    """The server's process and its address."""
    command = [sys.executable, "-m", "twinfer", "serve", "demo", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = ""
    for line in process.stderr:  # the last one says why it did not start
        if found := re.search(r"ready: (\S+)", line):
            # Somebody has to read on: it would wait at a full pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    print(f"the server did not start: {line.strip()}", file=sys.stderr)
    raise SystemExit(process.wait())


def processor_seconds(pid):
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def stream(session, body):
    """Events and bytes of one streamed completion."""
    events = size = 0
    async with session.post("/v1/completions", json=body) as answer:
        async for line in answer.content:
            events += line.startswith(b"data: {")
            size += len(line)
    return events, size


async def tokens(session, pid, streams, length):
    """Microseconds of the front's processor time for a token."""
    body = {"prompt": "x = 1\n", "max_tokens": length, "ignore_eos": True, "stream": True}
    await stream(session, body)
    before, began = processor_seconds(pid), time.perf_counter()
    seen = await asyncio.gather(*(stream(session, body) for _ in range(streams)))
    spent, seconds = processor_seconds(pid) - before, time.perf_counter() - began
    count = streams * length
    print(
        f"{streams} streams of {length} tokens: {1e6 * spent / count:.1f} us of the front's "
        f"processor time a token, {count / seconds:.0f} tokens/s, "
        f"{sum(events for events, _ in seen) / count:.2f} events a token"
    )


async def waits(session, what, path, body):
    """The longest that a small call waits while a large one is read, rendered and tokenised."""
    longest, done = 0.0, asyncio.Event()

    async def ask():
        nonlocal longest
        while not done.is_set():
            began = time.perf_counter()
            async with session.get("/version") as answer:
                await answer.read()
            longest = max(longest, time.perf_counter() - began)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.3)
    usual, longest = longest, 0.0
    began = time.perf_counter()
    data = json.dumps(body).encode()
    async with session.post(path, data=data) as answer:
        status = answer.status
        await answer.read()
    seconds = time.perf_counter() - began
    done.set()
    await asking
    print(
        f"{what}: {status} after {1e3 * seconds:.0f} ms; meanwhile a small call waits "
        f"{1e3 * longest:.0f} ms at most, without it {1e3 * usual:.0f}"
    )


async def measure(pid, url, arguments):
    """All of it."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        for streams in arguments.streams:
            await tokens(session, pid, streams, arguments.length)
        text = "def f(x):\n    return x + 1\n" * 40_000
        await waits(session, "a prompt of 1 MB", "/v1/completions", {"prompt": text})
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 20}
            for i in range(4000)
        ]
        await waits(
            session, "a chat of 4000 messages", "/v1/chat/completions", {"messages": messages}
        )


def main():
    """Measures, and ends the server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--length", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--max-num-seqs", default="128", help="rows of the server's batch")
    parser.add_argument("--dtype", default="float32", help="of the server's model")
    arguments = parser.parse_args()
    flags = ["--max-num-seqs", arguments.max_num_seqs, "--dtype", arguments.dtype]
    process, url = start(flags)
    try:
        asyncio.run(measure(process.pid, url, arguments))
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
