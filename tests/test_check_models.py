"""`check` says nothing beyond notes about the losses of ordinary models."""

import pytest

import partgrad as pg
from helpers.ordinary_models import MODELS


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_an_ordinary_model_is_ok(make):
    loss, model = make()
    report = pg.check(loss, progress=False)(model)
    assert report.verdict == "ok", str(report)
    assert {finding.severity for finding in report.findings} <= {"info"}, str(report)
