"""The report of a check: its data, its table, and what must be found in it on one line."""

import json
import math
import re
import time

import pytest
from hypothesis import given, settings, strategies as st

from messages import refused
from partgrad import errors
from partgrad._check.finding import KINDS, SEVERITIES, Finding
from partgrad._check.report import GradientReport, Row
from partgrad._display.table import ROOT

pytestmark = pytest.mark.internal

NAN = Finding("nan", "error", "b", "my-model.py:42", "the gradient is NaN; a number was expected.\n  Fix: mend it.")
DRAW = Finding("draw", "warning", "b", "model.py:50", "the gradient of `poisson` is silently zero")
DEAD = Finding("zero", "warning", "dead", "", "no path to the output: `loss` never uses it. Remove it, or use it.")
VALUE = Finding("value", "error", "", "model.py:9", "jit(f)(x) is 1 and f(x) is 2.")
SCALE = Finding("scale", "info", "", "", "the gradients differ in size by 10^7")


def row(path, status="checked", gradient=0.5):
    return Row(path, "f32[3]", status, gradient)


def report(rows, *findings, **cost):
    return GradientReport("loss", tuple(rows), findings, cost)


def lines_with(found, *words):
    return [line for line in str(found).splitlines() if all(word in line for word in words)]


def test_the_text_of_a_report():
    rows = [
        row("layers[0].w", gradient=0.0123),
        row("b", gradient=math.nan),
        row("dead", gradient=0.0),
        row("kink", "inconclusive", 1e5),
        row("period", "held by a mark", None),
    ]
    expected = """\
loss: 2 errors, 2 warnings, 1 note in 5 leaves

leaf         type    verdict         gradient  found
-----------  ------  --------------  --------  -----
layers[0].w  f32[3]  ok              0.0123
b            f32[3]  error           nan       nan at my-model.py:42: the gradient is NaN; also draw at model.py:50
b                                              draw at model.py:50: the gradient of `poisson` is silently zero
dead         f32[3]  warning         0         zero: no path to the output: `loss` never uses it
kink         f32[3]  inconclusive    1e+05
period       f32[3]  held by a mark

Of the whole function
  error: value at model.py:9
    jit(f)(x) is 1 and f(x) is 2.
  note: scale
    the gradients differ in size by 10^7

Of leaves
  error: nan at my-model.py:42 in b
    the gradient is NaN; a number was expected.
      Fix: mend it.
  warning: draw at model.py:50 in b
    the gradient of `poisson` is silently zero
  warning: zero in dead
    no path to the output: `loss` never uses it. Remove it, or use it.

checked       4 of 5 leaves
inconclusive  1 leaf: finite differences neither confirm nor refute the gradient there
evaluations   12 function, 1,264 finite differences"""
    found = report(rows, SCALE, DRAW, DEAD, NAN, VALUE, **{"function": 12, "finite differences": 1264})
    assert str(found) == expected
    assert repr(found) == str(found)


def test_a_report_without_findings_is_calm():
    assert (
        str(report([row("a"), row("b", "integer", None)]))
        == """\
loss: ok in 2 leaves

leaf  type    verdict  gradient
----  ------  -------  --------
a     f32[3]  ok       0.5
b     f32[3]  integer

checked  1 of 2 leaves"""
    )


def test_a_note_leaves_a_leaf_ok():
    found = report([row("a")], SCALE._replace(leaf="a"))
    assert str(found).startswith("loss: ok, 1 note in 1 leaf\n")
    assert lines_with(found, "a ", " ok ", "scale: the gradients differ")


def test_the_worst_finding_is_the_verdict_beside_the_status():
    found = report([row("b", "inconclusive")], SCALE._replace(leaf="b"), DRAW)
    assert lines_with(found, "warning, inconclusive", "draw at model.py:50: the gradient", "; also scale")


def test_what_is_found_at_a_lone_leaf_stands_in_its_row():
    found = report([row("")], DEAD._replace(leaf=""))
    assert lines_with(found, ROOT, "warning", "no path to the output")
    assert "Of the whole function" not in str(found)


def test_ok_and_raise_if_failed():
    fine = report([row("a")], DRAW, SCALE)
    assert fine.ok
    assert fine.raise_if_failed() is fine
    failed = report([row("b")], DRAW, NAN)
    assert failed.findings == (NAN, DRAW)
    assert not failed.ok
    refused(failed.raise_if_failed, errors.CheckError, "`loss` did not pass", str(failed))
    refused(failed.raise_if_failed, AssertionError)


def test_same_findings_of_several_leaves_are_told_once():
    paths = [f"a[{i}]" for i in range(25)]
    found = str(report(map(row, paths), *(NAN._replace(leaf=path) for path in reversed(paths))))
    assert found.count("Fix: mend it.") == 1
    below = found.split("\n\n")[2].replace("\n ", "")
    assert ", ".join(paths[:4:-1]) + " and 5 more" in below
    assert max(map(len, found.splitlines())) <= 100
    other = NAN._replace(message="another")
    assert str(report([row("b")], NAN, other)).count("error: nan at my-model.py:42 in b") == 2


def test_lines_break_between_words_only():
    quoted = "`tree['a key with blanks'].scale`"
    where = "a-very-long-name of-a-file-of-a-user.py:1234"
    message = f"word {where} and {quoted} " * 20 + "x" * 150
    below = str(report([row("b")], NAN._replace(message=message, where=where))).split("\n\n")[2].splitlines()
    assert sum(line.count(where) for line in below) == 21
    assert sum(line.count(quoted) for line in below) == 20
    assert max(len(line) for line in below[:-1]) <= 100
    assert below[-1].strip() == "x" * 150


def test_long_headlines_end_between_words():
    (line,) = lines_with(report([row("b")], NAN._replace(message="long words " * 20)), "my-model.py:42: ")
    assert line.endswith("long words long ...")
    assert len(line.partition(": ")[2]) <= 76
    (line,) = lines_with(report([row("b")], NAN._replace(message="x" * 200 + " y")), "my-model.py:42: ")
    assert line.endswith("x" * 200 + " y")


def test_many_leaves_without_findings_are_folded():
    paths = [f"p[{i}]" for i in range(1000)]
    rows = [row(path, "integer" if i >= 700 else "checked") for i, path in enumerate(paths)]
    found = report(rows, NAN._replace(leaf="p[650]"))
    shown = re.findall(r"^p\[(\d+)\]", str(found), re.MULTILINE)
    assert list(map(int, shown)) == [*range(10), *range(640, 700), *range(700, 710), *range(990, 1000)]
    assert [line.split() for line in lines_with(found, "more leaves")] == [
        ["...", "630", "more", "leaves", "ok"],
        ["...", "280", "more", "leaves", "integer"],
    ]
    assert len(lines_with(report(rows[:200]), "p[")) == 200


def test_ten_thousand_leaves_take_no_time():
    rows = [row(f"p[{i}]") for i in range(10_000)]
    findings = [NAN._replace(leaf=r.path) for r in rows]
    start = time.perf_counter()
    assert len(lines_with(report(rows, *findings), "p[", "my-model.py:42")) > 10_000
    report(rows, *findings)._repr_html_()
    assert time.perf_counter() - start < 2


def test_html():
    rows = [row("['<b>&']", "integer"), row("b")]
    text = report(rows, NAN, VALUE._replace(message="<script>"))._repr_html_()
    assert "<strong>loss: 2 errors in 2 leaves</strong>" in text
    assert ">[&#x27;&lt;b&gt;&amp;&#x27;]</td>" in text
    assert "white-space: nowrap'>nan at my-model.py:42: the gradient is NaN</td>" in text
    assert "<strong>error</strong>" in text
    assert "&lt;script&gt;" in text
    assert "<b>" not in text
    assert "<script>" not in text
    assert "color" not in text
    assert text.count("<tr>") == 1 + 2


def test_to_dict_is_plain_data():
    rows = [row("a", gradient=math.nan), row("b", gradient=math.inf), row("c", "integer", None), row("d", gradient=2)]
    found = report(rows, NAN, function=3).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [r["gradient"] for r in found["rows"]] == ["nan", "inf", None, 2.0]
    assert found["findings"] == [NAN._asdict()]
    assert (found["function"], found["ok"], found["cost"]) == ("loss", False, {"function": 3})


ANY_TEXT = st.text(max_size=60)
NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=120)
PATHS = st.one_of(NAMES, st.builds("['{} {}']".format, NAMES, NAMES))


@st.composite
def reports(draw):
    paths = draw(st.lists(PATHS, min_size=1, max_size=5, unique=True))
    statuses = st.sampled_from(["checked", "inconclusive", "held by a mark"])
    rows = [Row(path, "f32[]", draw(statuses), draw(st.none() | st.floats())) for path in paths]
    wheres = st.one_of(st.just(""), st.builds("{}.py:{}".format, PATHS, st.integers(1, 10**5)))
    kinds, severities = st.sampled_from(KINDS), st.sampled_from(SEVERITIES)
    findings = st.builds(Finding, kinds, severities, st.sampled_from(["", *paths]), wheres, ANY_TEXT)
    return GradientReport(draw(ANY_TEXT), tuple(rows), tuple(draw(st.lists(findings, max_size=6))), {})


@settings(deadline=None)
@given(reports())
def test_every_leaf_has_a_line_with_all_that_was_found(found):
    """Whatever the names: nothing of a path or of a line of code is lost, and nothing breaks a line."""
    text, table = str(found), str(found).split("\n\n")[1].splitlines()[2:]
    assert all(line.isprintable() for line in text.split("\n"))
    for leaf in found.rows:
        own = [finding for finding in found.findings if finding.leaf == leaf.path]
        first = next(line for line in table if line.startswith(leaf.path + " "))
        worst = min((SEVERITIES.index(finding.severity) for finding in own), default=2)
        expected = "" if worst == 2 else SEVERITIES[worst]
        assert f" {expected or leaf.status.replace('checked', 'ok')}" in first
        for finding in own:
            assert finding.kind in first
            assert finding.where in first
            assert [line for line in table if line.startswith(leaf.path) and finding.where in line]
    for finding in found.findings:
        below = text.split("\n\n", 2)[2]
        assert any(finding.kind in line and finding.where in line for line in below.splitlines())
        assert finding.where in below
        assert finding.leaf in below
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.ok == all(finding.severity != "error" for finding in found.findings)
