"""`check` raises no false alarm."""

import jax
import pytest

import partgrad as pg
from clean import CLEAN, Lazy
from clean_libraries import LIBRARIES
from turns import ALL, OLDER, is_mine

# They take many seconds each.
LONG = {"adaptive_ode_solve", "small_gaussian_process"}
# Of those that take either precision, each takes half.
CASES = [
    pytest.param(case, x64, id=f"{case.name}-{'x64' if x64 else 'x32'}", marks=[pytest.mark.long] * (case.name in LONG))
    for number, case in enumerate(CLEAN)
    for x64 in [bool(number // 2 % 2) if case.x64 is None else case.x64]
    if is_mine(number)
]
# Each plain and wrapped, in both precisions. Unless all are asked for, each version takes a quarter, in one of the ways,
# and what was a false alarm once.
WAYS = [(wrapped, x64) for x64 in (False, True) for wrapped in (False, True)]
FOUND = {"optimistix_BFGS", "lineax_Cholesky"}
OF_LIBRARIES = [
    pytest.param(case, wrapped, bool(x64), id=f"{case.name}{'-wrapped' * wrapped}-{'x64' if x64 else 'x32'}")
    for number, case in enumerate(LIBRARIES)
    for wrapped, x64 in (WAYS if ALL else [WAYS[0 if case.name in FOUND else number // 4 % 4]])
    if (ALL or number % 4 == 2 * OLDER or case.name in FOUND) and (case.x64 is None or (case.x64 == x64) >= ALL)
]


def made(case):
    return case.make() if isinstance(case, Lazy) else case


@pytest.mark.long
@pytest.mark.parametrize(("case", "wrapped", "x64"), OF_LIBRARIES)
def test_no_error_is_found_in_what_libraries_do(case, wrapped, x64):
    with jax.enable_x64(x64 if case.x64 is None else case.x64):
        case = made(case)
        function = pg.double_where(case.function) if wrapped else case.function
        report = pg.check(function, progress=False)(*case.args)
        assert report.ok, str(report)


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
