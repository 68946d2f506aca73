"""`check` says nothing beyond notes about the losses of ordinary models."""

import partgrad as pg
from helpers.ordinary_models import MODELS
from helpers.tables import table


@table("make", MODELS, quick=0, most=10, ids=lambda make: make.__name__)
def test_an_ordinary_model_is_ok(make):
    loss, model = make()
    report = pg.check(loss, progress=False)(model)
    assert report.verdict == "ok", str(report)
    assert {finding.severity for finding in report.findings} <= {"info"}, str(report)
