"""docs/grafana.json: it asks for what the server exports, and shows all that matters."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from twinfer.serving.server.engine import Counters
from twinfer.serving.server.messages import Gauges
from twinfer.serving.server.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LEFT_OUT = {"twinfer:cache_config_info", "twinfer:unknown_fields_total"}
"""Sizes that never change, and what says nothing of the server's health."""


def exported():
    """The samples' names of a server that has seen everything, without `_created`."""
    metrics = Metrics()
    ready = SimpleNamespace(seconds={"load": 1.0}, model={"page_size": 16})
    counters = Counters(rejected={"tokens": 1})
    metrics.engine = SimpleNamespace(gauges=Gauges(), counters=counters, alive=True, ready=ready)
    metrics._ended.labels("stop").inc()
    names = re.findall(r"^(twinfer:\w+)", metrics.text().decode(), re.M)
    return {name for name in names if not name.endswith("_created")}


def asked():
    return set(re.findall(r"twinfer:\w+", " ".join(EXPRESSIONS)))


def test_each_metric_of_the_dashboard_is_exported():
    assert asked() <= exported()
    (job,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "job")
    assert set(re.findall(r"twinfer:\w+", job["query"])) <= exported()


def test_each_exported_metric_is_in_the_dashboard():
    # Of a histogram the buckets are enough.
    told = {name for name in exported() if not name.endswith(("_sum", "_count"))}
    assert told - LEFT_OUT == asked()


def test_panels_are_told_apart_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(expression.count("(") == expression.count(")") for expression in EXPRESSIONS)
