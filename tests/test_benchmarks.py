"""The benchmarks run, and what they write is what they measured."""

import importlib
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

sys.path.append(str(pathlib.Path(__file__).parent.parent))


def run(arguments, capsys):
    assert importlib.import_module("benchmarks.__main__").main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_run_writes_a_page_and_a_picture(tmp_path, capsys):
    path = tmp_path / "benchmarks.md"
    out = run(["structure", "selection", "callables", "--quick", "--page", str(path)], capsys)
    assert re.search(r"Python 3\.\d+.*, jax \d.*, equinox \d", out)
    assert re.search(r"^construction +[\d.]+ .s  / register_dataclass +[\d.]+$", out, re.MULTILINE)
    page = path.read_text()
    assert "## Models as pytrees" in page
    assert re.search(
        r"^\| flatten, 20 nodes \| [\d.]+ .s \| register_dataclass \**[\d.]+\** \(2.2\); equinox", page, re.MULTILINE
    )
    assert "](benchmarks.svg)" in page
    ElementTree.fromstring(path.with_suffix(".svg").read_text())


@pytest.mark.slow
def test_all_of_a_quick_run(capsys):
    out = run(["gradients", "training", "likelihood", "--quick"], capsys)
    assert "all agree to 1e-06" in out


def test_costs_and_bounds_are_told():
    timing = importlib.import_module("benchmarks.timing")
    row = timing.Row("it", {"partgrad": 2e-6, "a": 1e-6, "b": 4e-6}, {"a": 1.5, "b": 1.0})
    assert list(row.ratios()) == [("a", 2.0, 1.5), ("b", 0.5, 1.0)]
    first, second = row.lines()
    assert first.split() == ["it", "2", "us", "/", "a", "2.000", "(at", "most", "1.5)", "OVER"]
    assert second.split() == ["/", "b", "0.500", "(at", "most", "1)"]
    assert timing.Row("n", {"partgrad": 12345.0, "a": 1.0}, unit="FLOPs").cost() == "12,345 FLOPs"
