"""Tests of the worker on torch-xla, in its own environment: `make test-xla`. Elsewhere none of them
is collected.
"""

import os
from importlib.util import find_spec

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before anything starts the runtime, which reads them once.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
