"""The documents do what they say: their code runs, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_adding_an_op_works_when_followed_literally(tmp_path):
    text = (ROOT / "docs" / "adding-an-op.md").read_text()
    program = tmp_path / "new_op.py"
    program.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("plan hash ")


def test_links_and_paths_resolve():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_docs.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
