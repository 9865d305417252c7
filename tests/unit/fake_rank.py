"""A rank whose worker computes nothing and can be told to fail: for tests of the executor. Its
argument, or the environment variable FAULT, says `rank,place,what`; a rank of * is all of them.
"""

import ctypes
import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np

from twinfer.shared.config import DeviceInfo
from twinfer.shared.errors import BackendUnavailable
from twinfer.shared.executor import rank
from twinfer.shared.step import StepOutput

FAULT = (*sys.argv[1:], os.environ.get("FAULT", ""))[0].split(",")


class FakeWorker:
    multi_step, changes = True, ()

    def __init__(self, shard, config, folder):
        self.shard, self.config, self.folder, self.steps = shard, config, folder, 0
        self.seen = []

    def fault(self, place):
        if FAULT[:2] not in ([str(self.shard.index), place], ["*", place]):
            return
        if FAULT[2] == "raise":
            raise ValueError("planted\nin two lines")
        if FAULT[2] == "refuse":
            raise BackendUnavailable("planted: no such device")
        if FAULT[2] == "exit":
            os._exit(3)
        if FAULT[2] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT[2] == "hang":
            time.sleep(1000)
        if FAULT[2] == "hang holding the lock":
            ctypes.PyDLL(None).sleep(1000)
        if FAULT[2] == "work":
            sys.setswitchinterval(1000)  # no other thread of Python's runs meanwhile
            end = time.thread_time() + 0.6
            while time.thread_time() < end:
                pass
            sys.setswitchinterval(0.005)

    def plan_hash(self):
        return "other" if FAULT[:2] == [str(self.shard.index), "plan"] else "same"

    def load(self, progress):
        progress("weights", 1, 2)
        self.fault("load")
        progress("weights", 2, 2)

    def measure(self):
        return 1000 - self.shard.index

    def page_bytes(self):
        return 10

    def allocate_kv(self, num_pages):
        self.pages = num_pages

    def warm_up(self, table, progress):
        self.fault("warm_up")
        return []

    def execute(self, step):
        self.fault("execute")
        self.seen.append(step.step_id)
        return SimpleNamespace(result=lambda: self.result(step), step=step)

    def result(self, step):
        if step.step_id == 3:
            self.fault("result")
        tokens = step.field("kv_lens").copy()
        if step.step_id == 3 and FAULT[:2] == [str(self.shard.index), "differ"]:
            tokens[0] += 1
        self.steps += 1
        return StepOutput(step.step_id, tokens)

    def sample(self, masks):
        self.masks = masks

    def logits(self, step):
        return np.full((2, 3), step.step_id, np.float32)

    def compilations_after_ready(self):
        return 5 * self.shard.index

    def close(self):
        self.fault("close")


def find_rank_device(device, place):
    shard = place.shard
    if FAULT[:2] == [str(shard.index), "device"]:
        raise BackendUnavailable("planted: no such device")
    return DeviceInfo("cpu", device, 100 - shard.index)


fake = SimpleNamespace(
    find_rank_device=find_rank_device,
    join_ranks=lambda place, device: setattr(fake, "shard", place.shard),
    make_worker=lambda model, config, device, folder: FakeWorker(fake.shard, config, folder),
)

if __name__ == "__main__":
    rank.backend_module = lambda name: fake
    code = rank.main()
    sys.stdout.flush()
    os._exit(code)
