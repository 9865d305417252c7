"""Prints which case saw each mutant of an op (`test_ops_contracts.py`) after the run: a line an op, with -v all."""

import pytest

KEY = pytest.StashKey[list]()


@pytest.fixture
def detections(request):
    """A list for (op, mutant, dtype, detection or None), printed at the end."""
    return request.config.stash.setdefault(KEY, [])


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash.get(KEY, [])
    if not found or config.get_verbosity() < 0:
        return
    seen = {(op, mutant) for op, mutant, _, detection in found if detection}
    everyone = {(op, mutant) for op, mutant, _, _ in found}
    terminalreporter.section(f"mutants: {len(seen)} of {len(everyone)} rejected")
    for op in dict.fromkeys(op for op, *_ in found):
        rows = [row[1:] for row in found if row[0] == op]
        if config.get_verbosity() > 0:
            for mutant, dtype, detection in rows:
                what = f"{detection.by:8}{detection.factor:9.3g}  {detection.case}" if detection else "-"
                terminalreporter.write_line(f"{op:24} {mutant:44.44} {dtype:9} {what}")
        else:
            terminalreporter.write_line(f"{op:26} {summary(rows)}")


def summary(rows):
    """Rejected mutants by dtype, and the one that is seen least clearly."""
    parts = []
    for dtype in dict.fromkeys(dtype for _, dtype, _ in rows):
        mine = [detection for _, other, detection in rows if other == dtype]
        seen = [detection for detection in mine if detection]
        weakest = min(seen, key=lambda detection: detection.factor, default=None)
        least = f", least {weakest.factor:.3g} ({weakest.mutant:.28})" if weakest else ""
        parts.append(f"{dtype} {len(seen)}/{len(mine)}{least}")
    return "; ".join(parts)
