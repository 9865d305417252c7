"""A report as JUnit XML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree


def suite_xml(cases: Mapping[tuple[str, str], Sequence[str]], missing: Sequence[str]) -> str:
    """The XML text of test cases, their complaints by (group, name), and of what was not
    compared.
    """
    suite = ElementTree.Element(
        "testsuite", name="twinfer numerics", tests=str(len(cases) + len(missing))
    )
    for (group, name), complaints in cases.items():
        case_ = ElementTree.SubElement(suite, "testcase", classname=group, name=name)
        if complaints:
            ElementTree.SubElement(case_, "failure", message=complaints[0]).text = "\n".join(
                complaints
            )
    for name in missing:
        case_ = ElementTree.SubElement(suite, "testcase", classname="missing", name=name)
        ElementTree.SubElement(case_, "error", message="not compared")
    suite.set("failures", str(sum(bool(c) for c in cases.values())))
    suite.set("errors", str(len(missing)))
    return ElementTree.tostring(suite, encoding="unicode")
