"""The bounds of the HTTP protocol, over real sockets: what comes around bodies, who does not read,
who leaves with several requests on the way.
"""

import asyncio
import contextlib
import socket

import pytest
import uvicorn

from twinfer.serving.server import http
from twinfer.serving.server.http import MAX_HEAD, BoundedHttp

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
LAST = HEAD + b"Connection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = 30 << 20
"""More than the system holds for a client."""


async def read_body(receive):
    found, more = b"", True
    while more:
        message = await receive()
        found += message.get("body", b"")
        more = message.get("more_body", False)
    return found


async def answer(send, body):
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app):
    """A server with this protocol. Its address, and its open connections."""
    config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    with socket.create_server(("127.0.0.1", 0)) as door:
        task = asyncio.create_task(server.serve([door]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield door.getsockname(), server.server_state.connections
        finally:
            server.force_exit = server.should_exit = True
            await asyncio.wait_for(task, 60)


async def until(told, seconds=60):
    """Wait until `told()` is true; whether it came to that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not told():
                await asyncio.sleep(0.01)
    return told()


async def ask(address, *parts):
    """What comes back for bytes on a connection, until it ends."""
    reader, writer = await asyncio.open_connection(*address)
    found = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while piece := await asyncio.wait_for(reader.read(1 << 16), 60):
            found += piece
    except ConnectionError:
        pass  # it was closed while there was more to send
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return found


async def echo(scope, receive, send):
    await answer(send, b"%d" % len(await read_body(receive)))


@pytest.mark.parametrize(
    "endless",
    [
        [CHUNKED + b"1;", *[b"a" * 65536] * 40],
        [CHUNKED + b"1\r\nx\r\n0\r\nX: ", *[b"a" * 65536] * 40],
        [CHUNKED + b"1\r\nx\r\n0\r\n", *[b"X: y\r\n" * 10_000] * 40],
    ],
    ids=["beside a chunk's size", "a trailer", "trailers"],
)
def test_what_surrounds_a_body_is_bounded(endless):
    kept = []

    async def app(scope, receive, send):
        kept.append(scope)
        await read_body(receive)
        await asyncio.sleep(1)
        await answer(send, b"")

    async def check():
        async with serving(app) as (address, _):
            found = await ask(address, *endless)
        assert found.startswith(b"HTTP/1.1 400")
        assert all(len(scope["headers"]) == 2 for scope in kept)

    asyncio.run(check())


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_bodies_in_small_chunks_are_taken(size):
    """Although what surrounds them is more than they are."""
    chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
    count = 200_000 // size

    async def check():
        async with serving(echo) as (address, _):
            start = LAST + b"Transfer-Encoding: chunked\r\n\r\n"
            found = await ask(address, start, chunk * count, b"0\r\nX: y\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200")
        assert found.endswith(b"\r\n\r\n%d" % (size * count))

    asyncio.run(check())


@pytest.mark.parametrize("size", [MAX_HEAD + 1, 2 * MAX_HEAD, 6 * MAX_HEAD])
def test_the_end_of_a_body_is_no_part_of_the_next_head(size):
    body = b"Content-Length: %d\r\n\r\n%s" % (size, b"x" * size)
    end = b"Connection: close\r\nContent-Length: 1\r\n\r\nx"

    async def check():
        async with serving(echo) as (address, _):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD + body + HEAD)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.write(end)
            assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await writer.wait_closed()

    asyncio.run(check())


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_a_client_that_does_not_read_a_whole_answer_is_left(more, monkeypatch):
    monkeypatch.setattr(http, "READ_S", 0.2, raising=False)
    transports, waits = [], []

    async def check():
        async def app(scope, receive, send):
            (protocol,) = connections
            await answer(send, b"x" * LARGE)
            transports.append(protocol.transport)
            waits.append(protocol.transport.get_write_buffer_size())

        async with serving(app) as (address, connections):
            with socket.create_connection(address) as client:
                client.sendall(HEAD + more + b"Content-Length: 0\r\n\r\n")
                assert await until(lambda: waits)
                assert waits[0] > 1 << 20
                assert await until(lambda: not connections)
                assert transports[0].get_write_buffer_size() == 0

    asyncio.run(check())


def test_a_client_that_reads_slowly_is_not_left(monkeypatch):
    """Each time that is looked, something was read; in the end nothing."""
    monkeypatch.setattr(http, "READ_S", 1e6, raising=False)

    async def app(scope, receive, send):
        await answer(send, b"x" * LARGE)

    async def check():
        async with serving(app) as (address, connections):
            with socket.create_connection(address) as client:
                client.sendall(HEAD + b"Content-Length: 0\r\n\r\n")
                assert await until(lambda: connections)
                (protocol,) = connections
                left = protocol.transport.get_write_buffer_size
                assert await until(lambda: left() > 1 << 20)
                for _ in range(3):
                    before, taken = left(), 0
                    while taken < 1 << 20 or left() == before:
                        taken += len(client.recv(1 << 16))
                        await asyncio.sleep(0)
                    protocol._look_at_reader()
                    assert not protocol.transport.is_closing()
                await asyncio.sleep(0.2)  # until the system holds all that it can
                protocol._look_at_reader()
                protocol._look_at_reader()
                assert protocol.transport.is_closing()

    asyncio.run(check())


def test_all_requests_of_a_client_that_leaves_hear_of_it():
    begun, gone = [], []

    async def app(scope, receive, send):
        begun.append(1)
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.append(1)

    async def check():
        async with serving(app) as (address, _):
            with socket.create_connection(address) as client:
                client.sendall((HEAD + b"Content-Length: 0\r\n\r\n") * 3)
                assert await until(lambda: begun)
            assert await until(lambda: len(gone) == len(begun))
            await asyncio.sleep(0.1)
            assert len(begun) == len(gone) == 1

    asyncio.run(check())
