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
# Each plain and wrapped, in both precisions, if all are asked for. Else the newer version takes a quarter of the layers and
# losses, in one of these ways, and the older one of everything, solvers and densities plain; and what was an alarm once.
WAYS = [(wrapped, x64) for x64 in (False, True) for wrapped in (False, True)]
FOUND = {"optimistix_BFGS", "lineax_Cholesky"}
IS_LAYER = {case.name: case.name.startswith(("equinox_", "optax_")) for case in LIBRARIES}
OF_LIBRARIES = [
    pytest.param(case, wrapped, x64, id=f"{case.name}{'-wrapped' * wrapped}-{'x64' if x64 else 'x32'}")
    for number, case in enumerate(LIBRARIES)
    for wrapped, x64 in (WAYS if ALL else [WAYS[number // 4 % 4 if IS_LAYER[case.name] else 0]])
    if ALL or case.name in FOUND or (number % 4 == 2 * OLDER and (OLDER or IS_LAYER[case.name]))
    if case.x64 is None or not ALL or case.x64 == x64
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
