"""How this program starts another process of its own."""

from __future__ import annotations

import sys

ISOLATION = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs a module by this interpreter.

    It looks for code in no place where this process, by its options, looks for none, and never in
    the current folder (`-P`): a user's `json.py` there would be taken for the library's.
    """
    isolation = (name for name, is_set in ISOLATION.items() if is_set)
    return (sys.executable, "-P", *isolation, "-m", module)
