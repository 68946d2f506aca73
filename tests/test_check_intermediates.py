"""`check` of values inside a function: what follows them is checked, and nothing else."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg
from partgrad.errors import CheckError, NoMatchError, SelectionError

H = pg.intermediate("h")
X = jnp.array([0.3, 0.7])
quiet = lambda f, wrt=None, **options: pg.check(f, wrt, progress=False, **options)


@jax.custom_vjp
def wrong(x):
    return jnp.sin(x)


wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * 3.0,))


def after(x):
    return wrong(checkpoint_name(x**2, "h")).sum()


def before(x):
    return (checkpoint_name(wrong(x), "h") ** 2).sum()


def twice(x):
    return (wrong(checkpoint_name(x, "h")) + checkpoint_name(x * x, "h")).sum()


def in_a_loop(x):
    return jax.lax.scan(lambda c, own: (wrong(checkpoint_name(c * own, "h")), None), jnp.ones(()), x)[0]


def in_a_branch(x):
    return jax.lax.cond(x[0] > 0, lambda x: wrong(checkpoint_name(x, "h")).sum(), lambda x: x.sum(), x)


def in_jit(x):
    return jax.jit(after)(x) * 2.0


def several(x):
    return wrong(checkpoint_name(x, "h1")).sum() + checkpoint_name(x**2, "h2").sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "wrt", "wrong_paths"),
    [
        (after, H, {"intermediate('h')"}),
        (before, H, set()),
        (twice, H, {"intermediate('h')[0]"}),
        (in_a_loop, H, {"intermediate('h')"}),
        (in_a_branch, H, {"intermediate('h')"}),
        (in_jit, H, {"intermediate('h')"}),
        (several, pg.intermediate("h*"), {"intermediate('h*')['h1']"}),
        (several, {"a": pg.intermediate("h2"), "b": pg.intermediate("h1")}, {"intermediate('h1')"}),
        (several, pg.intermediate("h2"), set()),
    ],
)
def test_what_follows_a_named_value_is_checked(f, wrt, wrong_paths):
    report = quiet(f, wrt)(X)
    assert report.ok is not bool(wrong_paths)
    assert {row.path for row in report.rows if row.verdict == "error"} == wrong_paths
    assert {leaf for finding in report.findings for leaf in finding.leaves} == wrong_paths
    if wrong_paths:
        with pytest.raises(CheckError, match="wrong"):
            pg.testing.assert_gradients(f, X, wrt=wrt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_x", "of_h", "wrong_paths"),
    [
        (jnp.sin, wrong, {"intermediate('h')"}),
        (wrong, jnp.sin, {"['x']"}),
        (jnp.sin, jnp.cos, set()),
    ],
)
def test_beside_a_part_of_the_argument(of_x, of_h, wrong_paths):
    def f(p):
        return (of_x(p["x"]) + of_h(checkpoint_name(p["y"] ** 2, "h"))).sum()

    report = quiet(f, {"own": lambda p: p["x"], "inside": H})({"x": X, "y": X})
    assert {row.path: row.verdict for row in report.rows} == {
        path: None if path == "['y']" else "error" if path in wrong_paths else "ok"
        for path in ("['x']", "['y']", "intermediate('h')")
    }


@pytest.mark.parametrize(
    "wrt", [pg.intermediate("hh"), {"a": pg.intermediate("hh")}, {"x": None, "a": pg.intermediate("hh")}]
)
def test_a_misspelt_name_is_an_error(wrt):
    with pytest.raises(NoMatchError, match="Fix: write 'h'"):
        quiet(after, wrt)(X)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e5])
def test_a_value_is_moved_in_proportion_to_its_own_size(size):
    f = lambda x: jnp.log(checkpoint_name(x * size, "h")).sum()
    report = quiet(f, H)(X)
    assert report.ok, report
    off = lambda x: wrong_by_little(checkpoint_name(x * size, "h")).sum()
    assert not quiet(off, H)(X).ok


@jax.custom_jvp
def wrong_by_little(x):
    return jnp.log(x)


wrong_by_little.defjvp(lambda p, t: (jnp.log(p[0]), t[0] / p[0] * 1.001))


@pytest.mark.slow
def test_the_search_moves_the_value():
    f = lambda x: jnp.where((h := checkpoint_name(x, "h")) > 0, h / jnp.sqrt(h), 0.0).sum()
    report = quiet(f, H, search=True, bounds=(0.0, None))(X)
    assert {leaf for finding in report.findings for leaf in finding.leaves} == {"intermediate('h')"}


@pytest.mark.slow
def test_a_finding_at_a_value_can_be_intended():
    assert quiet(after, H, intended="intermediate('h')")(X).ok


def test_a_value_without_a_derivative_is_an_error():
    with pytest.raises(SelectionError, match="Fix"):
        quiet(lambda x: x.sum() * checkpoint_name(jnp.arange(3), "h")[1], H)(X)


@pytest.mark.parametrize("wrt", [None, H])
@pytest.mark.parametrize(
    "output", [lambda x: x, lambda x: (x,), lambda x: (x, 1, 2), lambda x: {"a": x, "b": x}, lambda x: {0: x, 1: x}]
)
def test_with_auxiliary_data_a_function_returns_a_pair(output, wrt):
    f = lambda x: output(checkpoint_name(x**2, "h"))
    for call in (
        lambda: quiet(f, wrt, has_aux=True)(X),
        lambda: pg.testing.assert_gradients(f, X, wrt=wrt, has_aux=True),
    ):
        with pytest.raises(TypeError, match=r"Fix: return \(value, aux\)"):
            call()


@pytest.mark.parametrize("pair", [tuple, list])
def test_a_pair_as_jax_takes_it(pair):
    assert quiet(lambda x: pair([jnp.sin(x), "aux"]), has_aux=True)(X).ok


@pytest.mark.parametrize("options", [{"argnums": ()}, {"argnames": ()}, {"argnums": 1}, {"argnames": "empty"}])
def test_a_check_of_nothing_is_an_error(options):
    f = lambda x, empty: x.sum()
    with pytest.raises(SelectionError, match="nothing to check"):
        quiet(f, **options)(X, empty={}) if "argnames" in options else quiet(f, **options)(X, {})
