"""The report of a check: its data, its table, and what must be found in it on one line."""

import json
import math
import re
import time

import pytest
from hypothesis import Phase, given, settings, strategies as st

from messages import refused
from partgrad import errors
from partgrad._check.finding import KINDS, SEVERITIES, Finding
from partgrad._check.report import GradientReport, LeafRow as Row
from partgrad._display.table import ROOT, columns

pytestmark = pytest.mark.internal

NAN = Finding("nan", "error", "b", "my-model.py:42", "the gradient is NaN; a number was expected.\n  Fix: mend it.")
DRAW = Finding("draw", "warning", "b", "model.py:50", "the gradient of `poisson` is silently zero")
DEAD = Finding("zero", "warning", "dead", "", "no path to the output: `loss` never uses it. Remove it, or use it.")
VALUE = Finding("value", "error", "", "model.py:9", "jit(f)(x) is 1 and f(x) is 2.")
NOTE = Finding("precision", "info", "", "", "digits cancel")


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
loss: 2 errors, 2 warnings, 1 note in 5 leaves, 1 of which is not decided

leaf         type    verdict         gradient  found
-----------  ------  --------------  --------  ------------------------
b            f32[3]  error           nan       nan at my-model.py:42...
dead         f32[3]  warning         0         zero
kink         f32[3]  inconclusive    1e+05
layers[0].w  f32[3]  ok              0.0123
period       f32[3]  held by a mark

error: nan at my-model.py:42 in b
  the gradient is NaN; a number was expected.
    Fix: mend it.
error: value at model.py:9
  jit(f)(x) is 1 and f(x) is 2.
warning: draw at model.py:50 in b
  the gradient of `poisson` is silently zero
warning: zero in dead
  no path to the output: `loss` never uses it. Remove it, or use it.
note: precision
  digits cancel

checked      3 of 5 leaves
evaluations  12 function, 1,264 finite differences"""
    found = report(rows, NOTE, DRAW, DEAD, NAN, VALUE, **{"function": 12, "finite differences": 1264})
    assert lines_with(found, "b ", " error ", "nan at", "(+1)")
    assert [line.split()[0] for line in str(found).splitlines()[4:9]] == ["b", "dead", "kink", "layers[0].w", "period"]
    below = lambda text: text.split("\n\n", 2)[2]
    assert below(str(found)) == below(expected)
    assert str(found).splitlines()[0] == expected.splitlines()[0]
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
    found = report([row("a")], NOTE._replace(leaf="a"))
    assert str(found).startswith("loss: ok, 1 note in 1 leaf\n")
    assert lines_with(found, "a ", " ok ", "precision")


def test_what_is_not_decided_is_not_ok():
    found = report([row("a"), row("b", "inconclusive")])
    assert str(found).startswith("loss: inconclusive in 2 leaves, 1 of which is not decided\n")


def test_the_worst_is_the_verdict():
    found = report([row("b", "inconclusive")], NOTE._replace(leaf="b"), DRAW)
    assert lines_with(found, "b ", " inconclusive ", "draw at model.py:50 (+1)")
    assert lines_with(report([row("b", "inconclusive")], NAN), "b ", " error ")


def test_what_is_found_at_a_lone_leaf_stands_in_its_row():
    assert lines_with(report([row("")], DEAD._replace(leaf="")), ROOT, "warning", "zero")


def test_ok_and_raise_if_failed():
    fine = report([row("a")], DRAW, NOTE)
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
    assert max(map(len, found.splitlines())) <= 80
    other = NAN._replace(message="another")
    assert str(report([row("b")], NAN, other)).count("error: nan at my-model.py:42 in b") == 2


def test_lines_break_between_words():
    quoted, where = "`tree['a key with blanks'].scale`", "a-name of-a-file-of-a-user.py:1234"
    message = f"word {where} and {quoted} " * 20 + "x" * 150
    below = str(report([row("b")], NAN._replace(message=message, where=where))).split("\n\n")[2].splitlines()
    assert sum(line.count(where) for line in below) == 21
    assert sum(line.count(quoted) for line in below) == 20
    assert max(map(len, below)) <= 80


def test_many_leaves_without_findings_are_folded():
    paths = [f"p[{i}]" for i in range(1000)]
    rows = [row(path, "integer" if i >= 700 else "checked") for i, path in enumerate(paths)]
    found = report(rows, NAN._replace(leaf="p[650]"))
    shown = re.findall(r"^p\[(\d+)\]", str(found), re.MULTILINE)
    assert list(map(int, shown)) == [650, *range(10), *range(690, 700), *range(700, 710), *range(990, 1000)]
    assert [line.split() for line in lines_with(found, "more leaves")] == [
        ["...", "679", "more", "leaves", "ok"],
        ["...", "280", "more", "leaves", "integer"],
    ]
    assert len(lines_with(report(rows[:200]), "p[")) == 200


def test_ten_thousand_leaves_take_no_time():
    rows = [row(f"p[{i}]") for i in range(10_000)]
    findings = [NAN._replace(leaf=r.path) for r in rows]
    start = time.process_time()
    assert len(lines_with(report(rows, *findings), "p[", "nan at my-")) >= 10_000
    report(rows, *findings)._repr_html_()
    assert time.process_time() - start < 2


def test_html():
    rows = [row("['<b>&']", "integer"), row("b")]
    text = report(rows, NAN, VALUE._replace(message="<script>"))._repr_html_()
    assert "<strong>loss: 2 errors in 2 leaves</strong>" in text
    assert ">[&#x27;&lt;b&gt;&amp;&#x27;]</td>" in text
    assert re.search('<td><span [^>]*title="error">✕</span> error</td>', text)
    assert len(re.findall("<details[^>]* open>", text)) == 2
    assert "&lt;script&gt;" in text
    assert "<b>" not in text
    assert "<script>" not in text
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


@settings(max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(reports())
def test_no_line_is_wider_than_a_terminal_and_every_leaf_has_one(found):
    """Whatever the names: each leaf has its verdict, the worst come first, and nothing breaks a line."""
    text, table = str(found), str(found).split("\n\n")[1].splitlines()[2:]
    assert all(line.isprintable() for line in text.split("\n"))
    assert max(map(columns, text.split("\n"))) <= 80
    assert len(table) == len(found.rows)
    own = lambda row: [f.severity for f in found.findings if f.leaf == row.path]
    wrong = sum("error" in own(row) for row in found.rows)
    assert all(" error" in line for line in table[:wrong])
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.ok == all(finding.severity != "error" for finding in found.findings)
    for finding in found.findings:
        assert finding.kind in text
