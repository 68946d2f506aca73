"""`check` finds every planted fault, in the leaf and at the line where it is."""

import re

import jax
import pytest

import partgrad as pg
from helpers.gallery import GALLERY
from helpers.tables import table

faults = pytest.mark.parametrize("fault", GALLERY, ids=[fault.name for fault in GALLERY])
some_faults = table("fault", GALLERY, most=8, kind=lambda fault: (fault.kind, fault.severity), ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def precision_of_the_fault(request):
    """Float64 where the fault asks for it, and float32 elsewhere."""
    fault = request.node.callspec.params.get("fault") if hasattr(request.node, "callspec") else None
    with jax.enable_x64(fault is not None and fault.x64):
        yield


def differentiated(fault):
    return [row.path for row in pg.summary(fault.args[0], fault.wrt).rows if row.status == "differentiated"]


def is_about(finding, leaf):
    return leaf in finding.leaves or (not leaf and not finding.leaves)


@some_faults
def test_it_is_found_where_it_is(fault):
    report = pg.check(fault.function, fault.wrt)(*fault.args)
    text = str(report)
    found = [f for f in report.findings if f.kind == fault.kind and is_about(f, fault.leaf)]
    assert found, f"No {fault.kind} of {fault.leaf!r} in:\n{text}"
    blamed = [f for f in found if f.severity == fault.severity and (not fault.where or f.where in fault.where)]
    assert blamed, f"Expected {fault.severity} at {sorted(fault.where)}, got {found}"
    assert any(all(word in f.message for word in fault.words) for f in blamed), f"Expected {fault.words} in {blamed}"
    assert report.ok is fault.ok, text
    known = {fault.leaf, *fault.also}
    others = [f for f in report.findings if f.severity == "error" and not set(f.leaves) <= known]
    assert not others, f"Not to blame: {others}"
    if fault.leaf:
        lines = [line for line in text.splitlines() if fault.leaf in line]
        assert lines, text
        assert any(f.where in line for f in blamed for line in lines) or not fault.where, text
    _raises_for_errors(fault, report)


def _raises_for_errors(fault, report):
    assert report.ok == all(row.verdict in ("ok", None) for row in report.rows)
    is_stopped = any(f.reason in ("stop", "mark") and f.severity == "warning" for f in report.findings)
    assert (report.verdict == "stopped") == (is_stopped and all(f.severity != "error" for f in report.findings)), report
    if fault.ok:
        report.raise_if_failed()
    else:
        with pytest.raises(AssertionError, match=re.escape(fault.leaf or fault.kind)):
            report.raise_if_failed()


# --- what the gallery says is so, without a check ----------------------------------------------------------------


def test_names_are_unique_and_there_are_enough():
    names = [fault.name for fault in GALLERY]
    assert len(set(names)) == len(names) >= 60
    assert {f.kind for f in GALLERY} == {
        "value",
        "mismatch",
        "nan",
        "oob",
        "zero",
        "draw",
        "tie",
        "precision",
        "nondeterminism",
    }


@faults
def test_the_data_are_consistent(fault):
    assert len(fault.where) >= (fault.marker != "")
    leaves = differentiated(fault)
    assert fault.leaf in [*leaves, ""]
    assert set(fault.also) <= set(leaves) - {fault.leaf}
    assert not (fault.ok and fault.severity == "error")
