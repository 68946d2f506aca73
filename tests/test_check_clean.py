"""`check` raises no false alarm."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import partgrad as pg
from helpers.clean import CLEAN, Lazy
from helpers.clean_libraries import LIBRARIES
from helpers.tables import table

CASES = [
    pytest.param(case, x64, id=f"{case.name}-{'x64' if x64 else 'x32'}")
    for case in CLEAN
    for x64 in ([False, True] if case.x64 is None else [case.x64])
]
# Solvers and densities under `double_where` take a minute each.
OF_LIBRARIES = [
    pytest.param(case, wrapped, x64, id=f"{case.name}{'-wrapped' * wrapped}-{'x64' if x64 else 'x32'}")
    for case in LIBRARIES
    for wrapped in ([False, True] if case.name.startswith(("equinox_", "optax_")) else [False])
    for x64 in ([False, True] if case.x64 is None else [case.x64])
]


def made(case):
    return case.make() if isinstance(case, Lazy) else case


@table(
    "case, wrapped, x64",
    OF_LIBRARIES,
    quick=0,
    most=3,
    kind=lambda case, wrapped, x64: (case.name.split("_")[0], wrapped),
)
def test_no_error_is_found_in_what_libraries_do(case, wrapped, x64):
    with jax.enable_x64(x64 if case.x64 is None else case.x64):
        case = made(case)
        function = pg.double_where(case.function) if wrapped else case.function
        report = pg.check(function, progress=False)(*case.args)
        # A solver that chooses its steps jumps wherever it chooses otherwise.
        assert report.verdict != "error", str(report)


@table("case, x64", CASES, quick=3, most=20)
def test_nothing_is_found(case, x64):
    with jax.enable_x64(x64):
        case = made(case)
        report = pg.check(case.function, case.wrt)(*case.args, **case.kwargs)
        text = str(report)
    assert report.verdict == case.verdict, text
    assert all(f.severity != "error" for f in report.findings), text
    if case.quiet:
        assert all(f.severity == "info" for f in report.findings), text
    report.raise_if_failed(allow_inconclusive=case.verdict == "inconclusive")


@pytest.mark.parametrize("reduced", [jnp.max, jnp.min])
def test_an_operand_that_is_rounded_in_two_ways(reduced):
    """XLA at its lowest level computes it in two kernels: then none of its elements was the largest one."""
    slopes = jnp.array([-1.7320511, 5.9604631e-08, 1.7320513, -1.7320507], jnp.float32)
    points = jnp.stack(jnp.meshgrid(*[jnp.linspace(-1.0, 1.0, 10, dtype=jnp.float32)] * 2))
    report = pg.check(lambda x: reduced(slopes[:, None, None] * x[0] - x[1], axis=0))(points)
    assert not [finding for finding in report.findings if finding.severity == "error"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "length"), [("int8", 300), ("uint8", 300), ("int16", 40_000)])
def test_indices_whose_dtype_does_not_hold_the_length(dtype, length):
    """The kernels that XLA (0.10.2) compiles quickly compare the two in that dtype."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    indices, weights = jnp.array([[100], [126], [127]], dtype), jnp.array([1.0, 2.0, 3.0])
    read = lambda x: lax.gather(x, indices, numbers, (1,), mode="promise_in_bounds")
    assert pg.check(lambda x: jnp.sum(weights * read(x)), progress=False)(jnp.arange(float(length))).ok
