"""expectation: unbiased gradients, beside exact enumeration and quadrature."""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import stats

import partgrad as pg
from helpers.messages import refused
from helpers.tables import table
from partgrad import errors

KEY = jax.random.key(3)
HERE = os.path.basename(__file__)
LOGITS = jnp.array([0.1, -0.4, 0.7])
VALUES = jnp.array([1.0, 2.0, 5.0])

flip = functools.partial(pg.draw, jax.random.bernoulli, gradient="score", log_prob=stats.bernoulli.logpmf)


def location(key, mean):
    return mean + jax.random.normal(key)


def choose(key, logits, **shape):
    log_prob = lambda draw, logits: jax.nn.log_softmax(logits)[draw]
    return pg.draw(jax.random.categorical, key, logits, gradient="score", log_prob=log_prob, **shape)


normal = functools.partial(pg.draw, location, gradient="score", log_prob=stats.norm.logpdf)


def expected_of_normal(f, mean):
    """Gauss-Hermite quadrature of f(x), x normal around the mean."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    return (f(mean + nodes) * weights).sum() / np.sqrt(2 * np.pi)


# --- programs and their exact expectations -----------------------------------------------------------------------


def discrete(key, p):
    return jnp.where(flip(key, p), 3.0 + p, 1.0)


def mixed(key, p):
    """A discrete draw, a continuous one around it held, and a pathwise one."""
    first, second, third = jax.random.split(key, 3)
    x = flip(first, jax.nn.sigmoid(p))
    y = normal(second, x + p)
    z = pg.draw(location, third, x * p)
    return jnp.sin(y) * z + p * y


def mixed_exact(p):
    q = jax.nn.sigmoid(p)
    given = lambda x: expected_of_normal(lambda y: jnp.sin(y) * x * p + p * y, x + p)
    return q * given(1.0) + (1 - q) * given(0.0)


def walk(key, p):
    def step(at, key):
        up = flip(key, jax.nn.sigmoid(0.3 * at + p))
        return at + jnp.where(up, 1.0, -0.5) * p, up

    end, ups = lax.scan(step, 0.0, jax.random.split(key, 3))
    return end**2 + ups[0]


def walk_exact(p):
    total = 0.0
    for ups in itertools.product([1.0, 0.0], repeat=3):
        at, probability = 0.0, 1.0
        for up in ups:
            q = jax.nn.sigmoid(0.3 * at + p)
            probability *= q * up + (1 - q) * (1 - up)
            at = at + (1.5 * up - 0.5) * p
        total += probability * (at**2 + ups[0])
    return total


def branches(key, p):
    first, second, third = jax.random.split(key, 3)
    return lax.cond(
        flip(first, p), lambda: jnp.where(flip(second, p**2), 5.0, 1.0), lambda: 2 * p + normal(third, p) ** 2
    )


def branches_exact(p):
    return p * (1 + 4 * p**2) + (1 - p) * (2 * p + p**2 + 1)


def mapped(key, p):
    draws = jax.vmap(flip)(jax.random.split(key, 3), p * jnp.array([1.0, 0.5, 0.2]))
    return jnp.prod(1.0 + draws)


def mapped_exact(p):
    return (1 + p) * (1 + 0.5 * p) * (1 + 0.2 * p)


def many(key, p):
    """A draw of many numbers."""
    return flip(key, p, shape=(2, 2)).sum() ** 2 * 1.0


def inner(key, p):
    """A derivative inside, by something that the draws do not depend on."""
    loop = lambda w: lax.scan(lambda c, k: (jnp.sin(c) * (1 + flip(k, p)), None), w, jax.random.split(key, 2))[0]
    return jax.grad(jax.jit(loop))(1.0)


def inner_exact(p):
    slope = lambda a, b: jax.grad(lambda w: jnp.sin(jnp.sin(w) * (1 + a)) * (1 + b))(1.0)
    chance = lambda a: p if a else 1 - p
    return sum(chance(a) * chance(b) * slope(a, b) for a in (0, 1) for b in (0, 1))


def nested(key, p):
    """The derivative of an expectation inside one."""
    first, second = jax.random.split(key)
    square = pg.expectation(lambda key, p: jnp.where(flip(key, p), p, 0.0), samples=4)
    return jax.grad(square, 1)(first, p) * flip(second, p)


PROGRAMS = {
    "discrete": (discrete, lambda p: p * (3 + p) + 1 - p),
    "mixed": (mixed, mixed_exact),
    "jit of checkpoint of scan": (jax.jit(jax.checkpoint(walk)), walk_exact),
    "cond": (branches, branches_exact),
    "vmap of cond": (
        lambda key, p: jax.vmap(branches, (0, None))(jax.random.split(key, 2), p).sum(),
        lambda p: 2 * branches_exact(p),
    ),
    "vmap": (mapped, mapped_exact),
    "many": (many, lambda p: 4 * p * (1 - p) + 16 * p**2),
    "inner": (inner, inner_exact),
    "nested": (nested, lambda p: 2 * p * p),
}


def z_score(estimates, exact):
    """How many of its own standard errors a mean of independent estimates is away; the error is below a tenth."""
    estimates = np.asarray(estimates, np.float64)
    error = estimates.std(0, ddof=1) / np.sqrt(len(estimates))
    assert np.all(error < 0.1 * np.maximum(np.abs(np.asarray(exact)).max(), 0.5))
    return np.abs(estimates.mean(0) - np.asarray(exact)) / error


@pytest.mark.slow
@table("name", PROGRAMS)
def test_value_gradient_and_hessian_are_unbiased(name):
    f, exact = PROGRAMS[name]
    p, keys = 0.4, jax.random.split(KEY, 100)
    mean = pg.expectation(f, samples=200)
    derivatives = {0: mean, 1: jax.grad(mean, 1), 2: jax.jacfwd(jax.grad(mean, 1), 1)}
    truths = {0: exact, 1: jax.grad(exact), 2: jax.jacfwd(jax.grad(exact))}
    # In one program, for one compilation.
    everything = lambda ds, *args: {order: derivative(*args) for order, derivative in ds.items()}
    estimates = jax.jit(jax.vmap(functools.partial(everything, derivatives), (0, None)))(keys, p)
    exactly = jax.jit(functools.partial(everything, truths))(p)
    for order in derivatives:
        assert z_score(estimates[order], exactly[order]) < 4, order


@pytest.mark.slow
def test_forward_and_reverse_agree_and_the_value_is_the_plain_mean(x64):
    mean = pg.expectation(branches, samples=50)

    @jax.jit
    def everything(key, p):
        # A plain mean of what a function draws: drawing outside an expectation is no error.
        plain = jnp.mean(jax.vmap(branches, (0, None))(jax.random.split(key, 50), p))
        ours = pg.grad(mean, argnums=1)(key, p)
        return plain, mean(key, p), jax.grad(mean, 1)(key, p), jax.jacfwd(mean, 1)(key, p), ours

    plain, value, reverse, forward, ours = everything(KEY, 0.4)
    np.testing.assert_allclose([value, reverse], [plain, forward], rtol=1e-9 if x64 else 1e-3)
    np.testing.assert_allclose(ours, reverse, rtol=1e-9 if x64 else 1e-3)


@pytest.mark.slow
def test_one_sample_is_the_score_function_written_by_hand():
    def score(p):
        x = discrete(KEY1, p)
        drawn = jax.random.bernoulli(KEY1, p)
        return jax.grad(stats.bernoulli.logpmf, 1)(drawn * 1.0, p) * x + drawn

    KEY1 = jax.random.split(KEY, 1)[0]
    assert jax.grad(pg.expectation(discrete, samples=1), 1)(KEY, 0.4) == pytest.approx(score(0.4))


@pytest.mark.slow
def test_leave_one_out_baseline_by_hand():
    keys = jax.random.split(KEY, 5)
    costs = jax.vmap(discrete, (0, None))(keys, 0.4)
    drawn = jax.vmap(lambda k: jax.random.bernoulli(k, 0.4))(keys)
    scores = jnp.where(drawn, 1 / 0.4, -1 / 0.6)
    baselines = (costs.sum() - costs) / 4
    expected = jnp.mean(scores * (costs - baselines) + drawn)
    assert jax.grad(pg.expectation(discrete, samples=5), 1)(KEY, 0.4) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_the_baseline_does_not_care_for_an_offset():
    gradient = lambda offset: jax.grad(pg.expectation(lambda *at: discrete(*at) + offset, samples=2000), 1)(KEY, 0.4)
    np.testing.assert_allclose(gradient(1e3), gradient(0.0), rtol=1e-3)


@pytest.mark.slow
def test_categorical_with_trees_of_outputs_and_parameters():
    def f(key, model):
        choice = choose(key, model["logits"])
        return {"value": VALUES[choice] * model["scale"], "one hot": choice == jnp.arange(3), "choice": choice}

    model = {"logits": LOGITS, "scale": 2.0}
    derivative = jax.jit(jax.vmap(jax.jacrev(pg.expectation(f, samples=100), 1), (0, None)))
    estimates = derivative(jax.random.split(KEY, 100), model)
    softmax = jax.nn.softmax
    exact = jax.jacrev(
        lambda m: {
            "value": softmax(m["logits"]) @ VALUES * m["scale"],
            "one hot": softmax(m["logits"]),
            "choice": softmax(m["logits"]) @ jnp.arange(3.0),
        }
    )(model)
    assert z_score(estimates["value"]["logits"], exact["value"]["logits"]).max() < 4
    assert z_score(estimates["value"]["scale"], exact["value"]["scale"]) < 4
    assert z_score(estimates["one hot"]["logits"], exact["one hot"]["logits"]).max() < 4
    assert z_score(estimates["choice"]["logits"], exact["choice"]["logits"]).max() < 4
    value = pg.expectation(f, samples=3)(KEY, model)
    assert value["one hot"].dtype == value["choice"].dtype == value["value"].dtype == jnp.float32
    assert value["one hot"].shape == (3,)


@pytest.mark.slow
def test_a_distribution_object():
    class Poisson:
        def __init__(self, rate):
            self.rate = rate

        def sample(self, key, sample_shape=()):
            return jax.random.poisson(key, self.rate, sample_shape)

        def log_prob(self, value):
            return stats.poisson.logpmf(value, self.rate)

    def f(key, rate):
        d = Poisson(rate)
        return jnp.sum(pg.draw(d.sample, key, sample_shape=(2,), gradient="score", log_prob=d.log_prob)) ** 2

    estimates = jax.jit(jax.vmap(jax.grad(pg.expectation(f, samples=200), 1), (0, None)))(
        jax.random.split(KEY, 50), 1.5
    )
    assert z_score(estimates, 2 + 8 * 1.5) < 4


def test_log_prob_gets_the_arguments_but_shape_and_dtype():
    seen = []

    def log_prob(draw, *args, **kwargs):
        seen.append((args, kwargs))
        return jnp.zeros(draw.shape)

    word = {"gradient": "score", "log_prob": log_prob}
    pg.draw(jax.random.uniform, KEY, (2,), jnp.float32, 0.5, maxval=2.0, **word)
    pg.draw(lambda key, shape, p, sample_shape: p * jnp.ones(shape), KEY, (2,), p=3.0, sample_shape=1, **word)
    pg.draw(lambda *args: args[1] * jnp.ones(2), KEY, 4.0, **word)
    assert seen == [((0.5,), {"maxval": 2.0}), ((), {"p": 3.0}), ((4.0,), {})]


@pytest.mark.slow
def test_transforms_of_an_expectation():
    mean = pg.expectation(walk, samples=20)
    gradient = jax.jit(jax.grad(mean, 1))
    keys, ps = jax.random.split(KEY, 3), jnp.array([0.1, 0.2, 0.3])
    one_by_one = [gradient(key, p) for key, p in zip(keys, ps, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient))(keys, ps), one_by_one, rtol=1e-4)
    in_scan = lax.scan(lambda _, xs: (None, gradient(*xs)), None, (keys, ps))[1]
    np.testing.assert_allclose(in_scan, one_by_one, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(mean), 1))(keys[0], 0.1), one_by_one[0], rtol=1e-4)
    # The parameter closed over, in an argument by name, and the old kind of key.
    closed = jax.jit(jax.grad(lambda p: pg.expectation(lambda key: walk(key, p), samples=20)(keys[0])))(0.1)
    named = jax.jit(jax.grad(lambda p: mean(keys[0], p=p)))(0.1)
    np.testing.assert_allclose([closed, named], [one_by_one[0]] * 2, rtol=1e-4)
    assert jnp.isfinite(gradient(jax.random.PRNGKey(0), 0.1))


@pytest.mark.slow
def test_other_words_inside():
    mean = lambda word: jax.grad(
        pg.expectation(lambda key, p: pg.draw(location, key, p, gradient=word) ** 2, samples=400), 1
    )
    assert mean("pathwise")(KEY, 2.0) == pytest.approx(4, abs=0.2)
    assert mean("fixed")(KEY, 2.0) == 0
    refused(lambda: mean("error")(KEY, 2.0), errors.DrawError, "`location`", "`mean`", f"At: {HERE}:")


@pytest.mark.slow
def test_low_precision_and_complex_outputs():
    low = pg.expectation(lambda key, p: flip(key, p).astype(jnp.bfloat16), samples=100)
    assert low(KEY, jnp.bfloat16(0.4)).dtype == jax.grad(low, 1)(KEY, jnp.bfloat16(0.4)).dtype == jnp.bfloat16
    turn = pg.expectation(lambda key, p: jnp.where(flip(key, p), 1j, 1.0), samples=4000)
    value, slope = jax.jvp(lambda p: turn(KEY, p), (0.4,), (1.0,))
    np.testing.assert_allclose([value, slope], [0.6 + 0.4j, -1 + 1j], atol=0.06)


@pytest.mark.slow
def test_the_mean_of_infinite_samples_is_infinite_and_its_gradient_not_finite():
    value, slope = jax.value_and_grad(pg.expectation(lambda key, p: jnp.log(1.0 * flip(key, p)), samples=20), 1)(
        KEY, 0.4
    )
    assert value == -jnp.inf
    assert not jnp.isfinite(slope)


@pytest.mark.slow
def test_nothing_drawn():
    mean = pg.expectation(lambda key, p: (p**2, 3.0), samples=8)
    assert mean(KEY, 2.0) == (4.0, 3.0)
    assert jax.grad(lambda p: mean(KEY, p)[0])(2.0) == 4


# --- refusals ----------------------------------------------------------------------------------------------------


@jax.custom_jvp
def with_rule(key, p):
    return flip(key, p) * 1.0


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[1]))


@jax.custom_vjp
def with_reverse_rule(key, p):
    return flip(key, p) * 1.0


with_reverse_rule.defvjp(lambda key, p: (with_reverse_rule(key, p), None), lambda _, ct: (None, ct))


def looped(key, p):
    body = lambda c: (c[0] + 1, c[1] + flip(jax.random.fold_in(key, c[0]), p))
    return lax.while_loop(lambda c: c[0] < 3, body, (0, 0.0))[1]


def sharded(key, p):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P()), "out_specs": jax.P()}
    return jax.shard_map(lambda key, p: flip(key, p) * p, mesh=mesh, **specs)(key, p)


HIDDEN = {
    "a `while` loop": looped,
    "a custom derivative rule": with_rule,
    "inside a custom derivative rule": with_reverse_rule,
    "`shard_map`": sharded,
    "that a derivative inside the function runs again": lambda key, p: jax.grad(
        jax.checkpoint(lambda w: jnp.sin(w) * flip(key, p))
    )(1.0),
}


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda key, p: lax.cond(p > 0, f, lambda *_: 0.0, key, p)])
def test_draws_that_cannot_be_counted_are_refused(where, around):
    mean = pg.expectation(jax.jit(around(HIDDEN[where])), samples=3)
    refused(lambda: mean(KEY, 0.3), errors.DrawError, "`jax.random.bernoulli` at ", f"{HERE}:", where)


INSIDE = {
    "grad": lambda key, p: jax.grad(lambda p: p * flip(key, p))(p),
    "jacfwd": lambda key, p: jax.jacfwd(lambda p: p * flip(key, p))(p),
    "scan": lambda key, p: jax.grad(lambda p: walk(key, p))(p),
    "outside": None,
}


@table("name", INSIDE)
def test_differentiated_before_the_expectation_is_refused(name):
    call = lambda: pg.expectation(INSIDE[name], samples=3)(KEY, 0.3) if INSIDE[name] else jax.grad(walk, 1)(KEY, 0.3)
    refused(call, TypeError, "`jax.random.bernoulli`", "outside `pg.expectation`", f"At: {HERE}:", "pg.expectation(f")


@pytest.mark.slow
def test_one_key_for_all_elements_of_a_vmap_is_refused():
    f = lambda key, p: jax.vmap(lambda p: flip(key, p))(p).sum() * 1.0
    refused(
        lambda: pg.expectation(f, samples=3)(KEY, jnp.ones(2)), errors.DrawError, "one key for all", "split(key, n)"
    )
    raw = lambda: pg.expectation(f, samples=3)(jax.random.PRNGKey(0), jnp.ones(2))
    refused(raw, errors.DrawError, "one key for all")
    # One draw, of which the elements make different things.
    shared = pg.expectation(lambda key, p: jax.vmap(lambda s: s * flip(key, p))(jnp.arange(3.0)).sum(), samples=8000)
    assert jax.grad(shared, 1)(KEY, 0.4) == pytest.approx(3, abs=0.2)


@pytest.mark.slow
def test_a_log_prob_that_does_not_see_the_parameter_is_refused():
    blind = lambda draw, p: stats.bernoulli.logpmf(draw, lax.stop_gradient(p))
    f = lambda key, p: pg.draw(jax.random.bernoulli, key, p, gradient="score", log_prob=blind) * 1.0
    mean = pg.expectation(f, samples=3)
    assert 0 <= mean(KEY, 0.3) <= 1
    refused(
        lambda: jax.grad(mean, 1)(KEY, 0.3), errors.DrawError, "`jax.random.bernoulli`", f"{HERE}:", "does not depend"
    )
    # What the sampler is not given may be seen in another way.
    logit = lambda key, x: pg.draw(
        jax.random.bernoulli,
        key,
        jax.nn.sigmoid(x),
        gradient="score",
        log_prob=lambda draw, _p: stats.bernoulli.logpmf(draw, jax.nn.sigmoid(x)),
    )
    assert jax.grad(pg.expectation(logit, samples=4000), 1)(KEY, 0.0) == pytest.approx(0.25, abs=0.02)


WRONG = {
    "float32[3, 2]": lambda draw, p: jnp.zeros((3, 2)),
    "int32[]": lambda draw, p: 3,
    "complex64[]": lambda draw, p: 1j,
    "no array": lambda draw, p: None,
}


@pytest.mark.parametrize("found", WRONG)
def test_what_is_no_log_probability_is_refused(found):
    drawn = lambda: pg.draw(jax.random.bernoulli, KEY, 0.3, shape=(2,), gradient="score", log_prob=WRONG[found])
    refused(drawn, errors.DrawError, "`log_prob` of `jax.random.bernoulli`", f"At: {HERE}:", "at most 2", found)


@pytest.mark.parametrize("samples", [0, -1, 2.0, True, None])
def test_samples_are_a_positive_integer(samples):
    refused(lambda: pg.expectation(walk, samples=samples), errors.ArgumentError, f"{samples!r}", "positive integer")


@pytest.mark.slow
def test_what_has_no_mean_is_refused():
    refused(lambda: pg.expectation(lambda key: key, samples=2)(KEY), errors.DrawError, "key<fry>", "no mean")
    refused(lambda: pg.expectation(3, samples=2), TypeError, "expectation")
