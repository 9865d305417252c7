"""A pytest plugin: backends compared in a test. Nothing heavy is imported before a test asks for
it.

def test_my_kernel(numerics):
    numerics.assert_op("rms_norm", "torch:cuda:rms_norm=mine")
    numerics.compare_targets("demo", "torch:cpu", "torch:cuda:rms_norm=mine").assert_ok()
"""

from __future__ import annotations

from typing import Any

import pytest


class Numerics:
    """The functions of `twinfer.numerics`; what a comparison found is shown when the test fails."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def compare_targets(
        self, model: str, a: str = "jax:cpu", b: str = "torch:cpu", **options: Any
    ) -> Any:
        """See `twinfer.numerics.compare_targets`."""
        from .api import compare_targets

        return self._keep(compare_targets(model, a, b, **options))

    def compare(self, *items: Any, **options: Any) -> Any:
        """See `twinfer.numerics.compare`: results, bundles, or their paths."""
        from .questions.saved import compare

        return self._keep(compare(*items, **options))

    def capture(self, model: str, target: str = "jax:cpu", **options: Any) -> Any:
        """See `twinfer.numerics.capture`."""
        from .api import capture

        return capture(model, target, **options)

    def assert_op(self, op: str, target: str) -> None:
        """The implementations of an op on a target keep the op's contract in its own cases.

        Raises AssertionError if one does not, NotComparable if there was nothing to judge.
        """
        from .errors import FAILED, NotComparable
        from .questions.ops_check import check_ops, render
        from .sides.subject import parse_target

        report = check_ops([parse_target(target)], [op])
        self.texts.append(render(report))
        if report.exit_code == FAILED:
            first = report.failures[0]
            raise AssertionError(
                f"{first.side} {first.name} in {first.dtype}: {'; '.join(first.complaints)}"
            )
        if report.exit_code:
            raise NotComparable(
                f"{op} on {target}: not compared: {', '.join(report.missing) or 'nothing to judge'}"
            )

    def _keep(self, diff: Any) -> Any:
        from .showing.terminal import render

        self.texts.append(render(diff))
        return diff


@pytest.fixture
def numerics(request: pytest.FixtureRequest) -> Numerics:
    """Compares backends: `compare_targets`, `compare`, `capture`, `assert_op`."""
    found = Numerics()
    request.node.stash[_KEY] = found.texts
    return found


_KEY = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the views of what was compared beside a failure."""
    report = yield
    texts = item.stash.get(_KEY, [])
    if report.when == "call" and report.failed and texts:
        report.sections.append(("twinfer numerics", "\n\n".join(texts)))
    return report
