"""A server is the same after many calls, and scripts/soak.py sees one that is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .server_process import ROOT, fault

FLAGS = ["--minutes", "0.7", "--clients", "8", "--limit", "30"]
SERVER = ["--backend", "torch", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8"]


def soak(env):
    return subprocess.run(
        [sys.executable, str(Path(ROOT, "scripts", "soak.py")), *FLAGS, "--", *SERVER],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("", "0 things were not as they had to be"),
        ("calls.append(bytes(500_000))", "WRONG engine grows: "),
        (
            "return [u._replace(tokens=tuple(t ^ 1 for t in u.tokens)) if u.logprobs is None else u "
            "for u in step(self)]",
            "WRONG a fixed call is answered otherwise",
        ),
        ("os._exit(3)", "the engine ended with exit code 3"),
    ],
    ids=["sound", "leak", "other tokens", "end"],
)
def test_what_many_calls_leave(what, words, tmp_path):
    done = soak(fault(tmp_path, what, 300) if what else {})
    assert (done.returncode, done.stderr) == (int(bool(what)), "")
    assert words in done.stdout
