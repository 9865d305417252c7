"""How a program of this package ends: by an exit code, and with a line where something is wrong."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..shared.errors import TwinferError

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What a full disk, or a broken one, says to a write."""


def run_program(work: Callable[[], int | None], name: str | None = None) -> int:
    """Do the work of a program; its exit code. `name` is what complaints begin with, the script's
    where there is none.

    An error on purpose is one line on standard error and its own code (2: wrong input), an
    interrupt 130, an output that cannot be written 1.
    """
    name = name or Path(sys.argv[0]).name
    try:
        code = work()
        sys.stdout.flush()
        return code or 0
    except TwinferError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        where = "the output" if error.filename is None else str(error.filename)
        print(f"{name}: error: cannot write {where}: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    """Nobody takes the output any more; a second complaint when Python flushes at its end would
    help nobody.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
