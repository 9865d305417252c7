"""Twinfer behind Ray Serve: each replica runs `twinfer serve` on a socket of its own, and forwards
requests to it as they are.

    serve run ray_serve:app serve='demo --backend torch --device cpu'      # in this folder

`serve` are the words behind `twinfer serve`. Ray Serve places replicas, gives each its GPUs,
restarts what is unhealthy and makes more of them under load; all else is the server's, its metrics
and exit codes too. `rayservice.yaml` has it on Kubernetes. Needs `pip install 'ray[serve]==2.60.*'`
beside 'twinfer[serve]'.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import aiohttp
import ray
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

DRAIN_S = 60
"""How long a server that goes down lets its requests end, if `serve` says nothing else; Ray Serve
waits longer.
"""
PARTING_S = 10
"""How long it may take after that."""
LOOK_S = 0.2
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl."""
OF_ONE_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade")
"""Headers that say something of a connection, not of a message."""


@serve.deployment(
    max_ongoing_requests=512,
    health_check_period_s=5,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=DRAIN_S + 2 * PARTING_S,
)
class Twinfer:
    """One server. It is ready once the model is."""

    async def __init__(self, words: str) -> None:
        folder = tempfile.TemporaryDirectory(prefix="twinfer-serve-")
        self._folder, socket = folder, os.path.join(folder.name, "http")
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "twinfer", "serve", "--drain-timeout", str(DRAIN_S),
            *shlex.split(words), "--uds", socket, preexec_fn=_end_with_this_process,
            # For ranks that Ray places: in this cluster, unless another one is named.
            env={"RAY_ADDRESS": ray.get_runtime_context().gcs_address} | os.environ,
        )  # fmt: skip
        self._client = aiohttp.ClientSession(
            "http://twinfer",
            connector=aiohttp.UnixConnector(socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        try:
            while not await self._answers("/ready"):
                self._check_process()
                await asyncio.sleep(LOOK_S)
        except BaseException:
            await self._end()
            raise

    async def __call__(self, request: Request) -> Response:
        """Forward a request, and the answer as it comes."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        answer = await self._client.request(
            request.method, path, data=body, headers=_of_message(request.headers)
        )
        return StreamingResponse(
            _chunks(answer), status_code=answer.status, headers=_of_message(answer.headers)
        )

    async def check_health(self) -> None:
        """Ray Serve asks; an error makes it start another replica."""
        self._check_process()
        if not await self._answers("/health"):
            raise RuntimeError("twinfer serve is not healthy")

    def _check_process(self) -> None:
        code = self._server.returncode
        if code is not None:
            raise RuntimeError(f"twinfer serve has ended with exit code {code}")

    async def _answers(self, path: str) -> bool:
        with suppress(aiohttp.ClientError, OSError):
            async with self._client.get(path) as answer:
                return answer.status == 200
        return False

    async def _end(self) -> None:
        await self._client.close()
        if self._server.returncode is None:
            self._server.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait(), DRAIN_S + PARTING_S)
        if self._server.returncode is None:
            self._server.kill()
            await self._server.wait()
        self._folder.cleanup()

    async def __del__(self) -> None:
        """Ray Serve awaits it when a replica goes."""
        await self._end()


def _end_with_this_process() -> None:
    """Ask the system to end a server whose replica is killed."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)


def _of_message(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_ONE_HOP}


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Closing it, as when a client has left, ends the request."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()


def app(arguments: dict[str, str]) -> serve.Application:
    """What `serve run` and a RayService import. `arguments`: `serve`."""
    unknown = set(arguments) - {"serve"}
    if unknown or not arguments.get("serve"):
        raise ValueError(f"arguments: got {sorted(arguments)}, allowed is serve, which is needed")
    return Twinfer.bind(arguments["serve"])
