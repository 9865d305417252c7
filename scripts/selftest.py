"""`twinfer numerics selftest` with every fault that the tests know, beside those of the package.

python scripts/selftest.py [the arguments of twinfer numerics selftest]
"""

import sys

import twinfer.tests.numerics.faults  # noqa: F401 - it adds to the catalogue
from twinfer.serving.cli import main

if __name__ == "__main__":
    sys.exit(main(["numerics", "selftest", *sys.argv[1:]]))
