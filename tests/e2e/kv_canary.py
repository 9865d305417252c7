"""A canary in the KV cache of a server's engine: what stands in each page, checked at every step.

It keeps a memory beside the cache, of the same pages. Where a step writes the keys of a token, it
writes a hash of all tokens up to that one, of their positions and of the request's salt; then it
reads what the request would attend to through the page table, which it knows from the differences
that steps bring. A page that is stale, shared under another prefix or another tenant's salt, or
given away too early ends the engine. At rest the scheduler's books are checked.

It reads steps in the order in which the engine reads their tokens, so that it knows what each step
was given. `watched(folder)` is the environment of a server that has it.
"""

import itertools
import os
from pathlib import Path

import numpy as np

from twinfer.shared import kv_manager

CHILD = """
import sys
if any("server.child" in word for word in sys.orig_argv):
    sys.path.append({folder!r})
    import kv_canary
    kv_canary.install()
"""


class CanaryDied(Exception):
    """A page holds what it should not."""


class Canary:
    """The memory of one engine."""

    def __init__(self, engine):
        (self.group,) = engine.scheduler.config.page_groups
        size, shape = self.group.page_size, engine.shape
        self.memory = np.zeros(engine.report.num_pages * size, np.int64)
        self.tables = np.full((shape.table_rows, shape.pages_per_request), -1)
        self.chains = {}
        self.steps = 0

    def chain(self, request, tokens):
        """[n] the hash at each position of the request's `tokens` [n]."""
        kept = self.chains.setdefault(request.request_id, [])
        last = kept[-1] if kept else hash(request.cache_salt)
        for position in range(len(kept), len(tokens)):
            last = hash((last, tokens[position], position))
            kept.append(last)
        return np.array(kept[: len(tokens)], np.int64)

    def check(self, scheduled, packed):
        """Take a step whose tokens are about to be read. Raises CanaryDied."""
        self.steps += 1
        new = packed.new_pages
        self.tables[new.rows, new.columns] = new.pages
        first, slots = packed.field("query_start"), packed.field("slots")
        known = {}
        for index, request in enumerate(scheduled.requests):
            start, end = int(scheduled.starts[index]), int(scheduled.ends[index])
            tokens = [*request.prompt.tolist(), *request.output][:end]
            chain = known[index] = self.chain(request, tokens)
            # Of a request that was stopped meanwhile nobody knows the last token.
            written = np.full(end - start, -7, np.int64)
            written[: max(0, len(chain) - start)] = chain[start:]
            self.memory[slots[first[index] : first[index + 1]]] = written
        for index, request in enumerate(scheduled.requests):
            chain, row = known[index], packed.field("rows")[index]
            pages = self.tables[row, : self.group.columns_for(len(chain))]
            size = self.group.page_size
            held = self.memory.reshape(-1, size)[pages].reshape(-1)[: len(chain)]
            if (wrong := np.flatnonzero(held != chain)).size:
                raise CanaryDied(
                    f"step {packed.step_id}, request {request.request_id}: the page of position "
                    f"{wrong[0]} holds another one's"
                )

    def rest(self, scheduler):
        """Nothing runs: all books agree, and nothing is held."""
        scheduler.check_integrity()
        self.chains.clear()
        if scheduler.kv.available != self.memory.size // self.group.page_size:
            raise CanaryDied("pages are held, and nothing runs")


def install():
    """Watch each engine of this process, and plant `KV_FAULT`."""
    from twinfer.serving.server.child import Loop
    from twinfer.shared.engine import Engine

    read, turn = Engine._read, Loop.turn

    def watched_read(self, step, output):
        if not hasattr(self, "canary"):
            self.canary = Canary(self)
        self.canary.check(step.scheduled, step.packed)
        return read(self, step, output)

    def watched_turn(self):
        turn(self)
        engine = self._engine
        if not engine.has_work and hasattr(engine, "canary"):
            engine.canary.rest(engine.scheduler)

    Engine._read, Loop.turn = watched_read, watched_turn
    if fault := os.environ.get("KV_FAULT"):
        FAULTS[fault]()


def give_twice():
    """A page that is taken now and then is still another one's."""
    allocate, count, last = kv_manager.KVManager.allocate, itertools.count(), []

    def faulty(self, number):
        pages = allocate(self, number)
        if len(pages) and last and next(count) % 50 == 49:
            pages[-1] = last[-1]
        last[:] = pages.tolist() or last
        return pages

    kv_manager.KVManager.allocate = faulty


def forget_salts():
    """Tenants share what is cached."""
    kv_manager.root_digest = lambda salt: kv_manager._digest(b"root:")


def confuse_pages():
    """Of what a page holds, its digest knows the first token alone."""
    digest = kv_manager._digest
    kv_manager._digest = lambda data: digest(data[: kv_manager.DIGEST_BYTES + 4])


FAULTS = {fault.__name__: fault for fault in (give_twice, forget_salts, confuse_pages)}


def watched(folder, **more):
    """The environment of a server whose engine has a canary."""
    here = str(Path(__file__).parent)
    (folder / "sitecustomize.py").write_text(CHILD.format(folder=here))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} | more
