"""`twinfer numerics report`: a result as one page that loads nothing and says what is wrong."""

import json
import re
from html.parser import HTMLParser

import pytest

from twinfer.numerics import commands, compare_targets, write_report
from twinfer.numerics.errors import NotComparable
from twinfer.numerics.questions.bisect import BisectReport
from twinfer.numerics.questions.ops_check import OpsReport
from twinfer.numerics.showing.report import page, read_record
from twinfer.serving.cli import main

FAULT = "attention-scale-1e-2@1"
TORCH = "torch:cpu:compile_level=0"
PROMPTS = [[*range(3, 30)], [7, 8, 9, 10, 11]]


def run(model, **options):
    return compare_targets(
        model, TORCH, "torch:cpu", load_format="dummy", prompts=PROMPTS, **options
    )


@pytest.fixture(scope="module")
def record(small_model):
    diff = run(small_model, plant=[FAULT])
    assert diff.exit_code == 1
    return json.loads(diff.dumps())


class Checker(HTMLParser):
    """Collects text and attributes; every tag must be closed by its own end."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.attributes, self.tags = [], [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_says_what_is_wrong_and_loads_nothing(record):
    text = page(record)
    found = Checker(text)
    assert not found.tags & {"script", "img", "link", "iframe"}
    assert not [
        v
        for n, v in found.attributes
        if n in ("src", "onclick") or (n == "href" and not v.startswith("#"))
    ]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert len(text) < 200_000
    words = " ".join(" ".join(found.words).split())
    first = record["first_divergence"]
    for part in (
        "✕ Different",
        "layer.1.paged_attention",
        first["complaints"][0],
        "request",
        "page",
        "head",
    ):
        assert part in words, part
    targets = {v[1:] for n, v in found.attributes if n == "href"}
    assert targets <= {v for n, v in found.attributes if n == "id"}


def test_the_layer_with_the_fault_is_marked_and_none_before_it(record):
    text = page(record)
    rows = re.findall(
        r'<tr><th class="row"><a href="#([SP])-(\w+)">\w+</a></th>(.*?)</tr>', text, re.DOTALL
    )
    marked = {(mode, name) for mode, name, cells in rows if 'class="bad"' in cells}
    assert (
        {("S", "1"), ("P", "1")} <= marked <= {("S", "1"), ("P", "1"), ("S", "end"), ("P", "end")}
    )
    assert len(rows) == 2 * 2 * 4  # modes, sides, and rows: embed, two layers, end


def test_axes_name_what_is_before_the_layers(record):
    text = page(record)
    assert re.search(r'text-anchor="middle">embed</text>', text)
    assert not re.search(r'text-anchor="middle">-1</text>', text)


def test_an_equal_result_is_good(small_model):
    diff = run(small_model, modes=("P",))
    text = page(json.loads(diff.dumps()))
    assert "✓ Equal within the gates" in text
    assert 'td class="bad"' not in text


def test_what_stands_in_a_result_is_text_and_no_markup(record):
    text = page(record | {"problems": ["<script>alert(1)</script>"], "notes": ["<b>"]})
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_result_of_ops_is_a_page_too():
    result = {
        "side": "a jax:cpu", "op": "rms_norm", "provider": "native", "dtype": "bfloat16",
        "mode": "P", "compared": 3,
        "refused": 0, "error": "inf", "gain": 0.2, "case": "wide", "complaints": ["error inf"],
        "raised": [],
    }  # fmt: skip
    given = {
        "exit_code": 1,
        "sides": ["a jax:cpu"],
        "environment": {"versions": {}},
        "results": [result],
        "compared": 3,
        "seconds": 1.0,
    }
    found = Checker(page(json.loads(OpsReport((), {}).dumps()) | given))
    assert "rms_norm=native" in found.words


def test_a_result_of_a_search_is_a_page_too():
    culprit = {
        "layer": 3, "program": "layer", "op": "paged_attention", "tap": "paged_attention",
        "implementation": "triton", "what": "this op fails", "name": "layer.3.paged_attention",
    }  # fmt: skip
    given = {
        "exit_code": 1, "sides": ["torch:cuda"], "environment": {"model": "demo"}, "seconds": 1.0,
        "looked_at": "ops", "culprits": [culprit], "mode": "S", "runs": 1, "bound": 2, "units": 81,
        "notes": [], "commands": [], "problems": [], "missing": [], "compared": True,
    }  # fmt: skip
    found = Checker(page(json.loads(BisectReport("").dumps()) | given))
    assert "layer.3.paged_attention" in found.words
    assert "comparisons" not in " ".join(found.words)


def test_the_command_writes_a_file(record, tmp_path, capsys, monkeypatch):
    result = tmp_path / "run.json"
    result.write_text(json.dumps(record))
    assert main(["numerics", "report", str(result)]) == 0
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert "run.html" in capsys.readouterr().out
    (tmp_path / "run.html").unlink()
    (tmp_path / "run.html").mkdir()
    monkeypatch.chdir(tmp_path)  # long names are cut in errors
    with monkeypatch.context() as no_work:
        no_work.setattr(commands, "page", None)
        assert main(["numerics", "report", "run.json"]) == 2
    said = "error: cannot write run.html: Is a directory: name the page with --out"
    assert said in capsys.readouterr().err
    assert main(["numerics", "report", "none.json", "--out", "none/a.html"]) == 2
    assert "error: out: cannot write none/a.html: No such" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"sides": []}', '{"sides": ["a"], "findings": [{}]}']
)
def test_what_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["numerics", "report", str(path)]) == 3
    with pytest.raises(NotComparable):
        page(read_record(str(path)))


def test_python_writes_the_same_page(small_model, tmp_path):
    diff = run(small_model, modes=("P",), layers=[1])
    path = write_report(diff, tmp_path / "page.html")
    assert path.read_text() == page(json.loads(diff.dumps()))
