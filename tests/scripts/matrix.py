"""Every feature with every other: a cell is a transform in a surrounding, of a model with marks, of a wrapped function.

Each cell is a function of two scalars whose derivative is known from plain JAX on the bare formula. `python
tests/scripts/matrix.py` runs the whole table, `--write` writes what was run to `tests/matrix.md`, and `--cells TEXT` runs the cells whose
names hold all words of TEXT. `test_matrix.py` runs a covering array: every triple of features is in a row of it.
"""

import argparse
import collections
import functools
import itertools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

import partgrad as pg

FILE = pathlib.Path(__file__).parents[1] / "matrix.md"
A, P = np.float32(0.7), np.float32(1.3)
KEY = 7

# --- models: where the two numbers are, and which of them are differentiated -----------------------------------------


@pg.dataclass
class Both:
    a: Any
    p: Any


@pg.dataclass
class Held:
    a: Any
    p: Any = pg.field(nondiff=True)


@pg.dataclass
class Configured:
    a: Any
    p: Any = pg.field(static=True)


@pg.dataclass
class Vector:
    v: Any


class Module(eqx.Module):
    a: Any
    p: Any


class Model(NamedTuple):
    """A model, its two numbers, the selector, and which of the two are differentiated."""

    build: Any
    read: Any
    wrt: Any
    chosen: tuple


def fields(m):
    return m.a, m.p


MARKS = {
    "no mark": Model(Both, fields, None, (0, 1)),
    "class mark": Model(Held, fields, None, (0,)),
    "inline NonDiff": Model(lambda a, p: Both(a, pg.NonDiff(p)), fields, None, (0,)),
    "Diff": Model(lambda a, p: Held(a, pg.Diff(p)), fields, None, (0, 1)),
    "wrapper": Model(lambda a, p: {"a": a, "p": pg.NonDiff(p)}, lambda m: (m["a"], m["p"].value), None, (0,)),
    "partly held module": Model(
        lambda a, p: pg.freeze({"c": Module(a, p)}, "c.p"), lambda m: (m["c"].a, m["c"].p), None, (0,)
    ),
    "named held leaf": Model(Held, fields, "p", (1,)),
    "elements": Model(lambda a, p: Vector(jnp.stack([a, p])), lambda m: (m.v[0], m.v[1]), "v[1]", (1,)),
}

# --- functions: a formula, and the same with what its wrapper is for -------------------------------------------------


def formula(a, p):
    return jnp.sin(a) * p**2 + 0.5 * a * p


def guarded(a, p):
    """The path not taken has an infinite derivative at the point."""
    return jnp.where(a > 5.0, jnp.sqrt(a - A + p - P), formula(a, p))


def indexed(a, p):
    """The index is out of bounds, so that the last number is read."""
    return jnp.stack([a, p, a * p])[jnp.int32(7)]


def drawn(a, p, held=None):
    key = jax.random.key(KEY)
    moved = pg.draw(lambda key, a, p: a + p * jax.random.normal(key), key, a, p, gradient="pathwise")
    if held is None:
        held = pg.draw(jax.random.uniform, key, maxval=p, gradient="fixed")
    return formula(a, p) + moved + a * held


def sum_of(f, g):
    return lambda a, p: f(a, p) + g(a, p)


def through(*wrappers):
    def wrap(f):
        for wrapper in reversed(wrappers):
            f = wrapper(f)
        return f

    return wrap


class Wrapped(NamedTuple):
    """A function, how it is wrapped, and the bare formula that it is equal to."""

    function: Any
    wrap: Any
    bare: Any


_product = sum_of(formula, lambda a, p: a * p)
_drawn = functools.partial(drawn, held=jax.random.uniform(jax.random.key(KEY), maxval=P))
WRAPPERS = {
    "plain": Wrapped(formula, through(), formula),
    "double_where": Wrapped(guarded, through(pg.double_where), formula),
    "consistent_indexing": Wrapped(sum_of(formula, indexed), through(pg.consistent_indexing), _product),
    "double_where of consistent_indexing": Wrapped(
        sum_of(guarded, indexed), through(pg.double_where, pg.consistent_indexing), _product
    ),
    "consistent_indexing of double_where": Wrapped(
        sum_of(guarded, indexed), through(pg.consistent_indexing, pg.double_where), _product
    ),
    "draws": Wrapped(drawn, through(), _drawn),
}

# --- transforms: what they return, as a vector ------------------------------------------------------------------------

DIRECTION = np.array([0.5, -0.25], np.float32)


def vector(*trees):
    return jnp.concatenate([jnp.ravel(jnp.asarray(leaf)) for leaf in jax.tree.leaves(trees)])


def tangent_of(m, wrt, chosen):
    part = pg.select(m, wrt)
    return jax.tree.unflatten(jax.tree.structure(part), [jnp.float32(DIRECTION[i]) for i in chosen])


def checked(f, m, wrt, chosen):
    report = pg.check(f, wrt, progress=False)(m)
    report.raise_if_failed()
    return jnp.float32(sum(row.status == "checked" for row in report.rows))[None]


TRANSFORMS = {
    "grad": lambda f, m, w, c: vector(pg.grad(f, w)(m)),
    "value_and_grad": lambda f, m, w, c: vector(*pg.value_and_grad(f, w)(m)),
    "jacfwd": lambda f, m, w, c: vector(pg.jacfwd(f, w)(m)),
    "jacrev": lambda f, m, w, c: vector(pg.jacrev(f, w)(m)),
    "hessian": lambda f, m, w, c: vector(pg.hessian(f, w)(m)),
    "jvp": lambda f, m, w, c: vector(*pg.jvp(f, (m,), (tangent_of(m, w, c),), wrt=w)),
    "vjp": lambda f, m, w, c: vector(pg.vjp(f, m, wrt=w)[1](jnp.float32(1.0))),
    "linearize": lambda f, m, w, c: vector(pg.linearize(f, m, wrt=w)[1](tangent_of(m, w, c))),
    "hvp": lambda f, m, w, c: vector(pg.hvp(f, w)(m, tangent_of(m, w, c))),
    "check": checked,
}


@functools.cache
def truth(wrapper):
    """Value, gradient and Hessian of the bare formula, by JAX."""
    f = lambda v: WRAPPERS[wrapper].bare(v[0], v[1])
    point = jnp.array([A, P])
    return tuple(np.asarray(of(point)) for of in (f, jax.grad(f), jax.hessian(f)))


def expected(cell):
    value, gradient, hessian = truth(cell.wrapper)
    chosen = list(MARKS[cell.mark].chosen)
    gradient, hessian, direction = gradient[chosen], hessian[np.ix_(chosen, chosen)], DIRECTION[chosen]
    return {
        "value_and_grad": lambda: np.append(value, gradient),
        "hessian": lambda: hessian.ravel(),
        "jvp": lambda: np.append(value, gradient @ direction),
        "linearize": lambda: gradient @ direction,
        "hvp": lambda: hessian @ direction,
        "check": lambda: len(chosen),
    }.get(cell.transform, lambda: gradient)()


# --- surroundings: of a function of the model to an array -------------------------------------------------------------


def like(g, m):
    shape = jax.eval_shape(g, m)
    return jnp.zeros(shape.shape, shape.dtype)


def scanned(g, wrt):
    return lambda m: lax.scan(lambda t, _: (t, g(t)), m, length=2)[1][-1]


def branched(g, wrt):
    return lambda m: lax.cond(jax.tree.leaves(m)[0].sum() < 99.0, g, lambda m: like(g, m) + 1.0, m)


def looped(g, wrt):
    return lambda m: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], g(c[1])), (0, m, like(g, m)))[2]


def mapped(g, wrt):
    return lambda m: jax.vmap(g)(jax.tree.map(lambda x: jnp.stack([x, x + 0.125]), m))[0]


def with_forward_rule(g, wrt):
    rule = jax.custom_jvp(g)
    rule.defjvp(lambda primals, tangents: jax.jvp(g, primals, tangents))
    return rule


def with_reverse_rule(g, wrt):
    rule = jax.custom_vjp(g)
    rule.defvjp(lambda m: jax.vjp(g, m), lambda pull, cotangent: pull(cotangent))
    return rule


def sharded(g, wrt):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    # Outside `jit`, each operation of the function would be compiled by itself.
    return jax.jit(lambda m: jax.shard_map(g, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(m))


def as_jaxpr(g, wrt):
    return lambda m: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(g)(m))(*jax.tree.leaves(m))[0]


def exported(g, wrt):
    def run(m):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), m)
        return jax.export.export(jax.jit(g))(shapes).call(m)

    return run


def nested(g, wrt):
    """What `g` returns, handed through two transforms as what they do not differentiate."""
    through = lambda g: lambda m: pg.value_and_grad(lambda m: (vector(m).sum(), g(m)), wrt, has_aux=True)(m)[0][1]
    return through(through(g))


SURROUNDINGS = {
    "jit": lambda g, wrt: jax.jit(g),
    "vmap": mapped,
    "scan": scanned,
    "cond": branched,
    "while": looped,
    "checkpoint": lambda g, wrt: jax.checkpoint(g),
    "custom_jvp": with_forward_rule,
    "custom_vjp": with_reverse_rule,
    "shard_map": sharded,
    "checkify": lambda g, wrt: lambda m: checkify.checkify(g)(m)[1],
    "eval_shape": lambda g, wrt: lambda m: g(m) + like(g, m),
    "make_jaxpr": as_jaxpr,
    "export": exported,
    "nested": nested,
}

# Where the surrounding is: around the transform; inside the function, under the wrapper; over the wrapper.
PLACES = ["around", "under", "over"]


class Cell(NamedTuple):
    transform: str
    surrounding: str
    mark: str
    wrapper: str
    place: str

    def __str__(self):
        return "-".join(self)

    __repr__ = __str__


AXES = (list(TRANSFORMS), list(SURROUNDINGS), list(MARKS), list(WRAPPERS), PLACES)

FORWARD = ("jacfwd", "jvp", "linearize", "hessian", "hvp")
REVERSE = ("grad", "value_and_grad", "jacrev", "vjp", "hessian", "hvp")
NO_REVERSE = "Reverse-mode differentiation does not work for lax.while_loop"
# JAX 0.10 writes "differentiation", and 0.12 "autodiff".
NO_FORWARD = "can't apply forward-mode"
# By surrounding inside the function: the transforms that JAX itself refuses, and what it says.
REFUSED = {
    "while": dict.fromkeys(REVERSE, NO_REVERSE) | {"check": "reverse mode does not exist for the `while`"},
    # The second derivatives are forward over reverse, and the reverse rule is a plain function.
    "custom_vjp": dict.fromkeys(("jacfwd", "jvp", "linearize"), NO_FORWARD),
    "export": dict.fromkeys(FORWARD, NO_FORWARD) | {"jacrev": "Batching rule for 'call_exported' not implemented"},
}


def refused(cell):
    """What is raised in a cell that cannot be."""
    if cell.place != "around":
        return REFUSED.get(cell.surrounding, {}).get(cell.transform)
    if cell.transform == "check" and not cell.surrounding.startswith("custom"):
        return "was called inside"
    return None


def is_opaque(cell):
    """Whether the wrapper cannot look into the surrounding: an exported program is compiled already."""
    return cell.surrounding == "export" and cell.place == "under" and cell.wrapper not in ("plain", "draws")


def is_inconclusive(cell):
    """Whether `check` may confirm nothing: what was exported in float32 does not run in float64."""
    return cell.transform == "check" and cell.surrounding == "export" and cell.place != "around"


def is_double(cell):
    """Whether another cell is the same program: nothing is wrapped."""
    return cell.place == "over" and cell.wrapper in ("plain", "draws")


def cells():
    return [cell for cell in itertools.starmap(Cell, itertools.product(*AXES)) if not is_double(cell)]


def run(cell, wrap=None):
    """The vector that the transform returns in the cell."""
    model, wrapped = MARKS[cell.mark], WRAPPERS[cell.wrapper]
    wrap = wrap or wrapped.wrap
    surround = lambda g: SURROUNDINGS[cell.surrounding](g, model.wrt)
    transform = TRANSFORMS[cell.transform]
    core = lambda m: wrapped.function(*model.read(m))
    m = model.build(jnp.asarray(A), jnp.asarray(P))
    if cell.place == "around":
        return surround(lambda m: transform(wrap(core), m, model.wrt, model.chosen))(m)
    f = wrap(surround(core)) if cell.place == "under" else surround(wrap(core))
    return transform(f, m, model.wrt, model.chosen)


def judge(cell):
    """Nothing if the cell is right, otherwise what is wrong with it."""
    reason = refused(cell)
    try:
        got = np.asarray(run(cell))
    except Exception as error:
        if reason is not None and reason in str(error):
            return None
        # The steps of differences are too large for a draw in float32.
        is_undecided = is_inconclusive(cell) and (is_opaque(cell) or cell.wrapper == "draws")
        if is_undecided and isinstance(error, pg.errors.CheckError):
            return None
        return f"{type(error).__name__}: {error}"
    if reason is not None:
        return f"Expected the error {reason!r}, got {got}"
    if is_opaque(cell) and not is_inconclusive(cell):
        return None if np.array_equal(got, np.asarray(run(cell, through())), equal_nan=True) else f"Got {got}"
    want = np.reshape(expected(cell), -1)
    if is_inconclusive(cell) and np.array_equal(got, [0]):
        return None
    if got.shape != want.shape or not np.allclose(got, want, rtol=2e-5, atol=2e-5):
        return f"Expected {want}, got {got}"
    return None


# --- the covering array -----------------------------------------------------------------------------------------------


def subsets(cell, size):
    return itertools.combinations(enumerate(cell), size)


@functools.cache
def covering_array(size):
    """Cells in which every so many features are together that are so in any cell, and one for each reason of a refusal.

    The rows are those of the longest axes; the rest of each row is what covers most that is not covered yet.
    """
    rows, covered, refusals, possible = [], set(), {}, []
    options = list(itertools.product(*AXES[size:]))
    for start in itertools.product(*AXES[:size]):
        ways = [cell for cell in (Cell(*start, *option) for option in options) if not is_double(cell)]
        able = [cell for cell in ways if refused(cell) is None]
        possible += able
        refusals.update({(refused(cell), cell.transform, cell.surrounding): cell for cell in ways if refused(cell)})
        if able:
            best = max(able, key=lambda cell: sum(subset not in covered for subset in subsets(cell, size)))
            covered.update(subsets(best, size))
            rows.append(best)
    for cell in possible:
        if not covered.issuperset(subsets(cell, size)):
            covered.update(subsets(cell, size))
            rows.append(cell)
    return rows + list(refusals.values())


# --- the file ---------------------------------------------------------------------------------------------------------


HEAD = """# Every feature with every other

Each number counts cells that are right: a partgrad transform of a model with two numbers, with something around the transform or
inside the function. The expected numbers come from plain JAX on the bare formula. `python tests/scripts/matrix.py --covering
--write` writes this file.

"""


def page(wrong, ran):
    """The tables of a run: how many cells were right, by transform and surrounding, and by mark and wrapper."""
    lines = [HEAD, f"{len(ran)} cells ran, and {len(ran) - len(wrong)} were right, on JAX {jax.__version__}.\n"]
    notes = {}
    for down, across, title in ((0, 1, "transform"), (2, 3, "marks")):
        lines += ["", f"| {title} | {' | '.join(AXES[across])} |", f"| --- |{' ---: |' * len(AXES[across])}"]
        for row in AXES[down]:
            entries = []
            for column in AXES[across]:
                here = [cell for cell in ran if (cell[down], cell[across]) == (row, column)]
                reasons = sorted({refused(cell) for cell in here} - {None}) if down == 0 else []
                note = "".join(f" [{notes.setdefault(reason, len(notes) + 1)}]" for reason in reasons)
                count = sum(cell not in wrong and not refused(cell) for cell in here)
                entries.append(f"{count}{note}")
            lines.append(f"| {row} | {' | '.join(entries)} |")
    lines += ["", "Impossible cells, inside the function or around the transform, and the error raised there:", ""]
    lines += [f"{number}. {reason}" for reason, number in notes.items()]
    lines += [
        "",
        "Under `export`, a wrapper cannot see into the exported program and changes nothing. A program exported in",
    ]
    lines += ["float32 does not run in float64, so `check` is inconclusive about it."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="", help="only cells whose names hold all these words")
    parser.add_argument("--covering", action="store_true", help="only the covering array")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th cell, from the i-th")
    parser.add_argument("--skip", type=int, default=0, help="pass over so many cells")
    parser.add_argument("--write", action="store_true", help="write tests/matrix.md")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = covering_array(3) if options.covering else cells()
    chosen = [cell for cell in chosen if all(word in str(cell) for word in options.cells.split())][part::parts][
        options.skip :
    ]
    wrong, took = {}, collections.Counter()
    for number, cell in enumerate(chosen, 1):
        start = time.process_time()
        said = judge(cell)
        for axis in cell[:2]:
            took[axis] += time.process_time() - start
        if said is not None:
            wrong[cell] = said
            print(f"{cell}: {said[:400]}", flush=True)
        if number % 200 == 0:
            jax.clear_caches()
            print(f"{number} of {len(chosen)}, {len(wrong)} wrong, {time.process_time():.0f} s", file=sys.stderr)
    if options.write:
        FILE.write_text(page(wrong, chosen))
    print(f"{len(chosen)} cells, {len(wrong)} wrong, {time.process_time():.0f} s", dict(took.most_common(30)))
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
