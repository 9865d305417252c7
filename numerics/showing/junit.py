"""A report as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree

from ..errors import NOT_COMPARED
from ..judging.record import Report


def suite_xml(report: Report) -> str:
    """The XML text of a report's cases, and of what was not compared."""
    cases, missing = report.cases(), report.missing
    if report.exit_code == NOT_COMPARED:
        missing = missing or [report.kind]
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
