"""Processes that this program starts find the code that it finds, and no other."""

import json
import subprocess
import sys

from twinfer.shared.interpreter import module_command

SHOWN = """
import json
from twinfer.shared.interpreter import module_command
print(json.dumps(module_command("a.module")[1:]))
"""


def test_a_process_is_isolated_as_its_starter_is():
    """Options of this interpreter that leave places out are handed on."""
    for options in [], ["-s"], ["-E", "-s"]:
        shown = subprocess.check_output([sys.executable, "-P", *options, "-c", SHOWN], text=True)
        assert json.loads(shown) == ["-P", *options, "-m", "a.module"]


def test_a_file_of_the_current_folder_is_not_taken_for_a_module(tmp_path):
    """A user's file may have the name of a module of the library."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    found = subprocess.run(
        module_command("json.tool"), cwd=tmp_path, input="{}", text=True, capture_output=True
    )
    assert (found.returncode, found.stdout) == (0, "{}\n"), found.stderr
