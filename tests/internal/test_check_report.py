"""The report of a check: its data, its table, and what must be found in it on one line."""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys

import pytest
from hypothesis import Phase, given, settings, strategies as st

from helpers.messages import refused
from partgrad import errors
from partgrad._check.finding import Figures, Finding, Fix, Rule, merged
from partgrad._check.report import GradientReport, LeafRow as Row
from partgrad._check.verdict import VERDICTS
from partgrad._display.table import ROOT, columns

FILE = "/home/somebody/my-model.py"
NAN = Finding(
    "nan",
    "error",
    "no remedy",
    ("b",),
    FILE,
    42,
    "sqrt",
    details={"mode": "gradient", "first": "NaN", "element": (), "steps": []},
)
DRAW = Finding("draw", "warning", "discrete", ("b",), "/home/somebody/model.py", 50, "poisson")
DEAD = Finding("zero", "warning", "no path", ("dead",))
VALUE = Finding("value", "error", "python", (), "", 0, details={"plain": 2.0, "other": 1.0, "ways": ["jit"]})
NOTE = Finding("zero", "info", "cancels")


def about(finding, *leaves):
    return dataclasses.replace(finding, leaves=leaves)


def row(path, verdict="ok", gradient=0.5):
    is_checked = verdict in VERDICTS
    status = ("inconclusive" if verdict == "inconclusive" else "checked") if is_checked else verdict
    return Row(path, "f32[3]", status, gradient, None, verdict if is_checked else None)


def report(rows, *findings, **cost):
    return GradientReport("loss", tuple(rows), findings, cost)


def lines_with(found, *words):
    return [line for line in str(found).splitlines() if all(word in line for word in words)]


def test_the_text_of_a_report():
    rows = [
        row("layers[0].w", gradient=0.0123),
        row("b", "error", math.nan),
        row("dead", gradient=0.0),
        row("jump", "inconclusive", 1e5),
        row("period", "held by a mark", None),
    ]
    found = report(rows, NOTE, DRAW, DEAD, NAN, VALUE, **{"function": 12, "finite differences": 1264})
    lines = str(found).splitlines()
    assert lines[0] == "loss: 2 errors, 2 warnings, 1 note in 5 leaves, 1 of which is not decided"
    assert lines_with(found, "b ", " error ", "nan at", "(+1)")
    assert [line.split()[0] for line in lines[4:9]] == ["b", "jump", "dead", "layers[0].w", "period"]
    assert [line for line in lines if line.startswith(("error:", "warning:", "note:"))] == [
        "error: nan at my-model.py:42 in b",
        "error: value",
        "warning: draw at model.py:50 in b",
        "warning: zero in dead",
        "note: zero",
    ]
    assert lines[-2:] == ["checked      3 of 5 leaves", "evaluations  12 function, 1,264 finite differences"]
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


VERDICTS_OF = [
    ([row("a")], (), "ok"),
    ([row("a"), row("b", "integer")], (NOTE, DRAW), "ok"),
    ([row("a"), row("b", "inconclusive")], (), "inconclusive"),
    ([row("a", "inconclusive"), row("b", "error")], (NAN,), "error"),
    ([row("a")], (VALUE,), "error"),
]


@pytest.mark.parametrize(("rows", "findings", "verdict"), VERDICTS_OF)
def test_the_verdict_is_the_worst_and_ok_is_ok(rows, findings, verdict):
    found = report(rows, *findings)
    assert found.verdict == verdict
    assert found.ok == (verdict == "ok")
    assert str(found).startswith(f"loss: {verdict}" if verdict != "error" else "loss: 1 error")
    for allowed in (False, True):
        if verdict == "ok" or (allowed and verdict == "inconclusive"):
            assert found.raise_if_failed(allow_inconclusive=allowed) is found
        else:
            raises = functools.partial(found.raise_if_failed, allow_inconclusive=allowed)
            refused(raises, errors.CheckError, "`loss` did not pass", str(found))
            refused(raises, AssertionError)


def test_what_is_found_at_a_lone_leaf_stands_in_its_row():
    assert lines_with(report([row("")], about(DEAD, "")), ROOT, "warning", "zero")


def test_a_leaf_whose_path_is_empty_is_not_the_whole_function():
    found = report([row("['']", "error"), row("['a']")], about(NAN, "['']"))
    assert lines_with(found, "['']", " error ", "nan at")
    assert lines_with(found, "['a']", " ok ")


def test_a_cause_of_several_leaves_is_told_once():
    paths = [f"a[{i}]" for i in range(25)]
    found = str(report([row(path, "error") for path in paths], about(NAN, *paths)))
    assert found.count("a true singularity") == 1
    below = found.split("\n\n")[2].replace("\n ", "")
    assert ", ".join(paths[:20]) + " and 5 more" in below
    assert max(map(len, found.splitlines())) <= 80


def test_the_line_of_the_user_stands_beside_its_number(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("import jax\n\ny = jnp.sqrt(x)  # here\n")
    finding = dataclasses.replace(NAN, file=str(path), line=3)
    assert finding.where == "model.py:3"
    assert lines_with(report([row("b", "error")], finding), "| y = jnp.sqrt(x)  # here")


def test_merging_keeps_causes_apart_and_leaves_together():
    same = [about(NAN, "a"), about(NAN, "b"), dataclasses.replace(about(NAN, "c"), line=43), about(NAN, "a")]
    assert [finding.leaves for finding in merged(same, "abc")] == [("a", "b"), ("c",)]


def test_many_leaves_without_findings_are_folded():
    paths = [f"p[{i}]" for i in range(1000)]
    rows = [row(path, "integer" if i >= 700 else "ok") for i, path in enumerate(paths)]
    rows[650] = row(paths[650], "error")
    found = report(rows, about(NAN, "p[650]"))
    shown = re.findall(r"^p\[(\d+)\]", str(found), re.MULTILINE)
    assert list(map(int, shown)) == [650, *range(10), *range(690, 700), *range(700, 710), *range(990, 1000)]
    assert [line.split() for line in lines_with(found, "more leaves")] == [
        ["...", "679", "more", "leaves", "ok"],
        ["...", "280", "more", "leaves", "integer"],
    ]
    assert len(lines_with(report(rows[:200]), "p[")) == 200


@pytest.mark.slow
def test_the_work_of_printing_grows_as_the_number_of_leaves():
    def calls(number):
        rows = [row(f"p[{i}]", "error") for i in range(number)]
        shown = report(rows, *(dataclasses.replace(about(NAN, r.path), line=i) for i, r in enumerate(rows)))
        counter = itertools.count()
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: next(counter) if event == "call" else None)
        try:
            text = str(shown)
            shown._repr_html_()
        finally:
            sys.setprofile(before)
        assert len([line for line in text.splitlines() if "p[" in line or "nan at my-" in line]) >= number
        return next(counter)

    assert calls(8_000) < 4.2 * calls(2_000)


def test_html():
    rows = [row("['<b>&']", "integer"), row("b", "error")]
    text = report(rows, NAN, dataclasses.replace(VALUE, details={**VALUE.details, "ways": ["vjp"]}))._repr_html_()
    assert "<strong>loss: 2 errors in 2 leaves</strong>" in text
    assert ">[&#x27;&lt;b&gt;&amp;&#x27;]</td>" in text
    assert re.search('<td><span [^>]*title="error">✕</span> error</td>', text)
    assert len(re.findall("<details[^>]* open>", text)) == 2
    assert "<b>" not in text
    assert text.count("<tr>") == 1 + 2


def test_to_dict_is_plain_data():
    figures = Figures("b", (1,), math.inf, 1 + 2j, 0.5, 0.25, 1e-9, (0.1, 0.02), 0.5)
    full = dataclasses.replace(NAN, rule=Rule("module.rule"), figures=figures, fix=Fix("f", "g", 1.0, 1.0))
    rows = [row("a", gradient=math.nan), row("b", "error", math.inf), row("c", "integer", None), row("d", gradient=2)]
    found = report(rows, full, function=3).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [r["gradient"] for r in found["rows"]] == ["nan", "inf", None, 2.0]
    assert [r["verdict"] for r in found["rows"]] == ["ok", "error", None, "ok"]
    (finding,) = found["findings"]
    assert (finding["file"], finding["line"], finding["where"]) == (FILE, 42, "my-model.py:42")
    assert (finding["rule"], finding["fix"]["by"], finding["figures"]["reverse"]) == ("module.rule", "g", "inf")
    assert (found["function"], found["verdict"], found["ok"], found["cost"]) == (
        "loss",
        "error",
        False,
        {"function": 3},
    )


ANY_TEXT = st.text(max_size=60)
NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=120)
PATHS = st.one_of(NAMES, st.builds("['{} {}']".format, NAMES, NAMES))


@st.composite
def reports(draw):
    paths = draw(st.lists(PATHS, min_size=1, max_size=5, unique=True))
    files = st.one_of(st.just(""), st.builds("/{}.py".format, PATHS))
    made = []
    for finding in draw(st.lists(st.sampled_from([NAN, DRAW, DEAD, NOTE, VALUE]), max_size=6)):
        some = draw(st.lists(st.sampled_from(paths), min_size=1, unique=True)) if finding.leaves else []
        place = {"file": draw(files), "line": draw(st.integers(1, 10**5)), "operation": draw(NAMES)}
        made.append(dataclasses.replace(about(finding, *some), **place))
    wrong = {path for f in made if f.severity == "error" for path in f.leaves}
    others = st.sampled_from(["ok", "inconclusive", "held by a mark"])
    gradients = st.none() | st.floats()
    rows = [row(path, "error" if path in wrong else draw(others), draw(gradients)) for path in paths]
    return GradientReport(draw(ANY_TEXT), tuple(rows), tuple(made), {})


@pytest.mark.slow
@settings(max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(reports())
def test_no_line_is_wider_than_a_terminal_and_every_leaf_has_one(found):
    """Whatever the names: each leaf has its verdict, the worst come first, and nothing breaks a line."""
    text, table = str(found), str(found).split("\n\n")[1].splitlines()[2:]
    assert all(line.isprintable() for line in text.split("\n"))
    assert max(map(columns, text.split("\n"))) <= 80
    assert len(table) == len(found.rows)
    wrong = sum(row.verdict == "error" for row in found.rows)
    assert all(" error" in line for line in table[:wrong])
    json.dumps(found.to_dict(), allow_nan=False)
    for finding in found.findings:
        assert finding.kind in text
