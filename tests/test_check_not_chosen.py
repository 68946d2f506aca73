"""A leaf that is not the one selected has one finding, however it was lost, with its line."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table

both = lambda p: jnp.stack([p["a"], p["b"]])
three = lambda p: jnp.stack([p["a"], p["b"], 1.5 * p["b"]])

SELECTING = {
    "where": lambda p: jnp.where(p["b"] > p["a"], p["b"], p["a"]),
    "select": lambda p: jnp.select([p["b"] > p["a"], p["a"] > p["b"]], [p["b"], p["a"]]),
    "piecewise": lambda p: jnp.piecewise(p["b"], [p["b"] > 1.0], [lambda x: x, lambda x: x * p["a"]]),
    "cond": lambda p: lax.cond(p["b"] > p["a"], lambda q: q["b"], lambda q: q["a"], p),
    "maximum": lambda p: jnp.maximum(p["a"], p["b"]),
    "minimum": lambda p: jnp.minimum(-p["a"], -p["b"]),
    "clip": lambda p: jnp.clip(p["a"], p["b"], 10.0),
    "max": lambda p: jnp.max(both(p)),
    "max and another use": lambda p: jnp.max(both(p)) * p["b"],
    "max under jit": lambda p: jax.jit(jnp.max)(both(p)),
    "nanmax": lambda p: jnp.nanmax(both(p)),
    "norm": lambda p: jnp.linalg.norm(both(p), jnp.inf),
    "in a scan": lambda p: lax.scan(lambda c, x: (jnp.maximum(c, x), None), -1.0, both(p))[0],
    "in a batch": lambda p: jax.vmap(jnp.maximum)(p["a"][None], p["b"][None]).sum(),
    "top_k": lambda p: lax.top_k(both(p), 1)[0][0],
    "approx_max_k": lambda p: lax.approx_max_k(both(p), 1)[0][0],
    "sort": lambda p: jnp.sort(both(p))[-1],
    "partition": lambda p: jnp.partition(both(p), 1)[1],
    "argsort": lambda p: jnp.take_along_axis(both(p), jnp.argsort(both(p)), 0)[-1],
    "median": lambda p: jnp.median(three(p)),
    "quantile": lambda p: jnp.quantile(three(p), 1.0),
    "cummax": lambda p: lax.cummax(both(p))[-1],
    "max_pool": lambda p: lax.reduce_window(both(p), -jnp.inf, lax.max, (2,), (1,), "VALID")[0],
    "segment_max": lambda p: jax.ops.segment_max(both(p), jnp.array([0, 0]), 1)[0],
    "argmax": lambda p: both(p)[jnp.argmax(both(p))],
    # What a slice leaves out is not why.
    "unstacked": lambda p: (lambda x, y: jnp.where(y > 0, x, 0.0))(*jnp.stack([p["a"] ** 2, -1.0])) + p["b"],
    "two slices": lambda p: jnp.where(both(p)[1:] < 0, both(p)[:1], 0.0).sum() + p["b"],
    "take of argmin": lambda p: jnp.take(-both(p), jnp.argmin(-both(p))),
}
# What is lost in another way keeps its own finding.
OTHERWISE = {
    "left out": lambda p: both(p).at[0].set(3.0).sum(),
    "truly zero": lambda p: (p["a"] - 1.0) ** 2 + p["b"],
    "cancels": lambda p: p["a"] - p["a"] + p["b"],
    "saturated": lambda p: jnp.tanh(100 * p["a"]) + p["b"],
    "no path": lambda p: both(p)[1],
}


def of_a(function):
    report = pg.check(function)({"a": jnp.float32(1.0), "b": jnp.float32(2.0)})
    assert report.ok
    # That the value jumps at another sign of it is a note.
    found = [finding for finding in report.findings if finding.reason != "partly"]
    assert not [finding for finding in found if "['b']" in finding.leaves]
    (finding,) = found
    return finding


@table("name", SELECTING, quick=6)
def test_one_finding(name):
    finding = of_a(SELECTING[name])
    assert (finding.kind, finding.severity, finding.reason) == ("zero", "warning", "not chosen")
    assert finding.line == SELECTING[name].__code__.co_firstlineno
    assert finding.operation


@pytest.mark.parametrize("reason", OTHERWISE)
def test_what_is_lost_otherwise(reason):
    assert of_a(OTHERWISE[reason]).reason == reason


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "most"), [(jnp.float32, False, 4), (float, False, 5), (float, True, 7)])
def test_many_leaves_are_told_by_one_program(kind, rule, most, compilations):
    """They are asked with one compiled program, however many are zero, also with weak types and custom rules."""
    same = jax.custom_jvp(lambda x: x)
    same.defjvp(lambda primals, tangents: (same(*primals), *tangents))
    for number in (7, 30):
        leaves = {f"a{i}": kind(i) for i in range(number)} | {"b": kind(100.0)}
        largest = lambda p: jnp.max(jnp.stack(list(p.values())))
        compilations[0] = 0
        report = pg.check((lambda p: same(largest(p))) if rule else largest)(leaves)
        (finding,) = report.findings
        assert (finding.reason, len(finding.leaves)) == ("not chosen", number)
        assert 3 <= compilations[0] <= most


@pytest.mark.slow
def test_a_derivative_outside_of_both_slopes_is_no_convention():
    """Of degenerate eigenvectors, along most directions."""

    def participation(p):
        hopping = (jnp.eye(6, k=1) + jnp.eye(6, k=-1)).at[0, 5].set(-1.0).at[5, 0].set(-1.0)
        values, vectors = jnp.linalg.eigh(jnp.diag(p) - hopping)
        return jnp.sum(vectors[:, 1] ** 4) + values[0]

    with jax.enable_x64(True):
        (found,) = pg.check(participation, progress=False)(jnp.zeros(6)).findings
        assert (found.kind, found.reason, found.fix) == ("nan", "no remedy", None)
        report = pg.check(pg.double_where(participation), progress=False)(jnp.zeros(6))
    assert (report.verdict, [f.reason for f in report.findings]) == ("inconclusive", ["outside"])
    figures = report.findings[0].figures
    assert not min(figures.left, figures.right) <= figures.reverse <= max(figures.left, figures.right)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0, 1.0), (1.0, 2.0, 0.0, 0.0), (1.0, 1.0, -3.0, 2.0)])
def test_eigenvalues_that_meet_have_a_convention(weights):
    matrix = jnp.diag(jnp.array([1.0, 1.0, 2.0, 2.0]))
    loss = lambda x: jnp.linalg.eigvalsh(matrix + x + x.T) @ jnp.array(weights)
    report = pg.check(loss, progress=False)(jnp.zeros((4, 4)))
    assert (report.verdict, {f.severity for f in report.findings if f.reason == "outside"}) == ("ok", set())
