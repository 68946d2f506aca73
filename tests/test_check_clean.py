"""`check` raises no false alarm."""

import jax
import pytest

import partgrad as pg
from clean import CLEAN, Lazy
from turns import is_mine

# They take many seconds each.
LONG = {"adaptive_ode_solve", "small_gaussian_process"}
# Of those that take either precision, each takes half.
CASES = [
    pytest.param(case, x64, id=f"{case.name}-{'x64' if x64 else 'x32'}", marks=[pytest.mark.long] * (case.name in LONG))
    for number, case in enumerate(CLEAN)
    for x64 in [bool(number // 2 % 2) if case.x64 is None else case.x64]
    if is_mine(number)
]


def made(case):
    if not isinstance(case, Lazy):
        return case
    try:
        return case.make()
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed.")


@pytest.mark.share
@pytest.mark.parametrize(("case", "x64"), CASES)
def test_nothing_is_found(case, x64):
    with jax.enable_x64(x64):
        case = made(case)
        report = pg.check(case.function, case.wrt)(*case.args, **case.kwargs)
        text = str(report)
    assert report.ok, text
    assert all(f.severity != "error" for f in report.findings), text
    if case.quiet:
        assert all(f.severity == "info" for f in report.findings), text
    report.raise_if_failed()
