"""draw: one word for what the gradient through a draw means."""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.messages import refused
from helpers.tables import table
from partgrad import errors

KEY = jax.random.key(7)
HERE = os.path.basename(__file__)


def bernoulli(key, p, **how):
    return pg.draw(jax.random.bernoulli, key, p, **how) * 1.0


def line_here():
    return sys._getframe(1).f_lineno


class Normal:
    """A distribution in numpyro's style."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale

    def sample(self, key, sample_shape=()):
        return self.loc + self.scale * jax.random.normal(key, sample_shape)

    def log_prob(self, value):
        return jax.scipy.stats.norm.logpdf(value, self.loc, self.scale)


class Flip:
    """In distrax's style: the key is `seed`, by keyword; and it keeps what it has computed."""

    def __init__(self, logits):
        self.logits = logits

    @functools.cached_property
    def probability(self):
        return jax.nn.sigmoid(self.logits)

    def sample(self, *, seed, sample_shape=()):
        return jax.random.bernoulli(seed, self.probability, sample_shape)


# --- values ------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "uniform": (jax.random.uniform, (), {"maxval": 3.0}),
    "shape and dtype": (jax.random.normal, ((3,),), {"dtype": jnp.float32}),
    "gamma": (jax.random.gamma, (jnp.array([0.5, 2.0]),), {}),
    "poisson": (jax.random.poisson, (3.0,), {"shape": (4,)}),
    "categorical": (jax.random.categorical, (jnp.array([0.1, 0.5]),), {"shape": (5,)}),
    "NumPy": (jax.random.bernoulli, (np.array([0.2, 0.9]),), {}),
    "low precision": (jax.random.normal, (), {"dtype": jnp.bfloat16}),
    "tree": (lambda key, p: {"a": p["a"] * jax.random.normal(key), "n": 3}, ({"a": 2.0},), {}),
    "branching": (lambda key, p: jax.random.normal(key) * (p if p > 1 else 1.0), (jnp.float32(2.0),), {}),
    "method": (Normal(1.0, 2.0).sample, (), {"sample_shape": (3,)}),
    "seed": (Flip(0.3).sample, (), {"sample_shape": (3,)}),
    "partial": (functools.partial(jax.random.bernoulli, p=0.3), (), {"shape": (6,)}),
}


@table("name, word", SAMPLERS, ["pathwise", "fixed", "error", "score"], most=6, kind=lambda name, word: word)
def test_values_are_those_of_the_sampler(name, word, x64):
    sampler, args, kwargs = SAMPLERS[name]
    expected = sampler(*args, seed=KEY, **kwargs) if name == "seed" else sampler(KEY, *args, **kwargs)
    log_prob = lambda draw, *args, **kwargs: jnp.zeros(())
    found = pg.draw(sampler, KEY, *args, gradient=word, log_prob=log_prob, **kwargs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(one).dtype == jnp.asarray(other).dtype
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["pathwise", "fixed", "error"])
def test_values_under_transforms(word):
    def total(keys, p):
        def step(carry, key):
            draw = bernoulli(key, p, gradient=word)
            return carry + draw, draw

        return lax.scan(jax.checkpoint(step), 0.0, keys)

    keys = jax.random.split(KEY, 20)
    p = jnp.array([0.2, 0.7])
    carry, draws = jax.jit(jax.vmap(total, (None, 0)))(keys, p)
    same = jnp.stack([jax.vmap(lambda k, q=q: jax.random.bernoulli(k, q))(keys) for q in p]) * 1.0
    np.testing.assert_array_equal(draws, same)
    np.testing.assert_array_equal(carry, same.sum(1))
    value, _ = jax.value_and_grad(lambda w: total(keys, 0.4)[0] * w)(2.0)
    assert value == 2 * jax.vmap(lambda k: jax.random.bernoulli(k, 0.4))(keys).sum()


def test_where_the_key_goes():
    seen = []

    def second(p, rng):
        seen.append(rng)
        return p * jax.random.normal(rng)

    assert pg.draw(second, KEY, 2.0) == 2 * jax.random.normal(KEY)
    assert seen == [KEY]
    tfp = lambda sample_shape=(), seed=None: jax.random.normal(seed, sample_shape)
    assert pg.draw(tfp, KEY, (3,)).shape == (3,)
    assert pg.draw(lambda *everything: everything[0], KEY) is KEY
    assert pg.draw(max, 3, 5) == 5  # a builtin without a signature


# --- the four meanings -------------------------------------------------------------------------------------------


def test_the_two_examples_of_the_thread():
    first = lambda x, word: x * pg.draw(jax.random.uniform, KEY, gradient=word)
    second = lambda x, word: pg.draw(jax.random.uniform, KEY, maxval=x, gradient=word)
    u = jax.random.uniform(KEY)
    for word in ("pathwise", "fixed", "error"):
        assert jax.grad(first)(10.0, word) == u
    assert jax.grad(second)(10.0, "pathwise") == pytest.approx(u)
    assert jax.grad(second)(10.0, "fixed") == 0
    refused(lambda: jax.grad(second)(10.0, "error"), TypeError, "`jax.random.uniform`", "`maxval`")


HOW = {
    "argument": lambda word, p: (
        pg.draw(Normal(0.0, 1.0).sample, KEY, gradient=word)
        + pg.draw(lambda key, p: p * jax.random.normal(key), KEY, p, gradient=word)
    ),
    "keyword": lambda word, p: pg.draw(lambda key, p: p * jax.random.normal(key), KEY, p=p, gradient=word),
    "closure": lambda word, p: pg.draw(lambda key: p * jax.random.normal(key), KEY, gradient=word),
    "method": lambda word, p: pg.draw(Normal(p, 1.0).sample, KEY, gradient=word),
    "partial": lambda word, p: pg.draw(functools.partial(jax.random.uniform, maxval=p), KEY, gradient=word),
    "tree": lambda word, p: pg.draw(lambda key, d: d["a"][0] + jax.random.normal(key), KEY, {"a": [p]}, gradient=word),
    "branching": lambda word, p: pg.draw(lambda key, p: p if p > 0 else -p, KEY, p, gradient=word),
    "branching closure": lambda word, p: pg.draw(lambda key: p if p > 0 else -p, KEY, gradient=word),
    "discrete": lambda word, p: bernoulli(KEY, p, gradient=word) * p,
    "discrete closure": lambda word, p: pg.draw(lambda key: jax.random.bernoulli(key, p), KEY, gradient=word) * p,
    "discrete method": lambda word, p: pg.draw(Flip(p).sample, KEY, gradient=word) * p,
    "wrapped": lambda word, p: pg.draw(lambda key, d: d.sample(key), KEY, Normal(p, 1.0), gradient=word),
    "complex": lambda word, p: pg.draw(lambda key, z: z * 1.0, KEY, p * (1 + 1j), gradient=word).real,
}


@pytest.mark.parametrize("how", HOW)
def test_fixed_holds_and_error_refuses(how):
    drawn = HOW[how]
    outside = float(drawn("fixed", 0.6)) / 0.6 if how.startswith("discrete") else 0
    assert jax.grad(functools.partial(drawn, "fixed"))(0.6) == pytest.approx(outside)
    refused(
        lambda: jax.grad(functools.partial(drawn, "error"))(0.6),
        errors.DrawError,
        "gradient='error'",
        f"At: {HERE}:",
        "through ",
    )


# What is differentiated is `w`, which no draw depends on; or `p`, which it does.
PROGRAMS = {
    "plain": lambda d, w, p: jnp.sin(w) * (1 + d(KEY, p)),
    "scan": lambda d, w, p: lax.scan(lambda c, k: (jnp.sin(c) * (1 + d(k, p)), None), w, jax.random.split(KEY, 2))[0],
    "scan over parameters": lambda d, w, p: lax.scan(
        lambda c, k: (jnp.sin(c) * (1 + d(*k)), None), w, (jax.random.split(KEY, 2), p * jnp.arange(2.0))
    )[0],
    "scan of checkpoint": lambda d, w, p: lax.scan(
        jax.checkpoint(lambda c, k: (jnp.sin(c) * (1 + d(k, p)), None)), w, jax.random.split(KEY, 2)
    )[0],
    "cond": lambda d, w, p: lax.cond(w > 0, lambda: jnp.sin(w) * (1 + d(KEY, p)), lambda: w),
    "vmap": lambda d, w, p: jax.vmap(lambda k: jnp.sin(w) * (1 + d(k, p)))(jax.random.split(KEY, 2)).sum(),
    "vmap over parameters": lambda d, w, p: jax.vmap(lambda q: jnp.sin(w) * (1 + d(KEY, q)))(p * jnp.ones(2)).sum(),
}
WRAPS = {"plain": lambda f: f, "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f))}
log_prob = jax.scipy.stats.bernoulli.logpmf


@pytest.mark.slow
@table("program, word, wrap", PROGRAMS, ["error", "score"], WRAPS, most=2, kind=lambda program, word, wrap: program)
def test_refused_through_every_transform_and_silent_otherwise(program, word, wrap):
    drawn = functools.partial(bernoulli, gradient=word, log_prob=log_prob)
    f = WRAPS[wrap](functools.partial(PROGRAMS[program], drawn))
    silent = functools.partial(PROGRAMS[program], lambda key, p: jax.random.bernoulli(key, p) * 1.0)
    refused(lambda: jax.grad(f, 1)(1.0, 0.3), errors.DrawError, "`jax.random.bernoulli`", f"At: {HERE}:")
    for inner in (jax.grad, jax.jacfwd):
        derivative = inner(f)
        assert derivative(1.0, 0.3) == pytest.approx(inner(silent)(1.0, 0.3))
        with pytest.raises(errors.DrawError):
            jax.grad(derivative, 1)(1.0, 0.3)


def test_the_error_names_sampler_argument_and_call_site():
    def loss(p):
        return pg.draw(jax.random.bernoulli, KEY, p["rate"][0], gradient="error") * 1.0

    line = loss.__code__.co_firstlineno + 1
    fix = "Fix: write gradient='fixed' to hold the draw, 'pathwise' for JAX's own derivative, or 'score'"
    first = "`jax.random.bernoulli` is drawn with gradient='error' and differentiated through `p`."
    for call in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(jax.vmap(loss, axis_size=1, in_axes=None)))):
        with pytest.raises(errors.DrawError) as caught:
            call({"rate": [0.3]})
        lines = str(caught.value).splitlines()
        assert lines[:2] == [first, f"  At: {HERE}:{line}."]
        assert lines[-1].startswith(f"  {fix}")


ONES = jnp.ones(2, int)
NAMES = {
    "`probability`": lambda p: pg.draw(
        lambda key, probability: jax.random.bernoulli(key, probability), KEY, p, gradient="error"
    ),
    "`d['a'][1]`": lambda p: pg.draw(lambda key, d: d["a"][1] * 1.0, KEY, {"a": [0.0, p]}, gradient="error"),
    "`b`": lambda p: jax.jit(lambda a: pg.draw(lambda key, a, b: (a * b).sum(), KEY, a, p, gradient="error"))(ONES),
    "a value that the sampler closes over": lambda p: pg.draw(
        functools.reduce(lambda inner, _: lambda key: inner(key), range(9), lambda key: p * 1.0), KEY, gradient="error"
    ),
    "`scale`": lambda p: pg.draw(lambda key, **k: k["scale"] * 1.0, KEY, scale=p, gradient="error"),
    "`args[0]`": lambda p: pg.draw(lambda key, *args: args[0] * 1.0, KEY, p, gradient="error"),
    "`p`, a value that the sampler closes over": lambda p: pg.draw(lambda key: p * 1.0, KEY, gradient="error"),
    "`self.loc`, a value": lambda p: pg.draw(Normal(p, 1.0).sample, KEY, gradient="error"),
    "`maxval`, a value": lambda p: pg.draw(functools.partial(jax.random.uniform, maxval=p), KEY, gradient="error"),
    "`d.loc`": lambda p: pg.draw(lambda key, d: d.sample(key), KEY, Normal(p, 1.0), gradient="error"),
    "`Normal.sample`": lambda p: pg.draw(Normal(p, 1.0).sample, KEY, gradient="error"),
    "`sampled`": lambda p: pg.draw(sampled, KEY, p, gradient="error"),
    "`Sampling`": lambda p: pg.draw(Sampling(), KEY, p, gradient="error"),
}


def sampled(key, p):
    return p * jax.random.normal(key)


class Sampling:
    def __call__(self, key, p):
        return p * jax.random.normal(key)


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    refused(lambda: jax.grad(lambda p: NAMES[name](p) * 1.0)(0.3), errors.DrawError, name)


def test_the_call_site_of_a_transformed_draw_is_the_users():
    f = lambda p: jax.vmap(functools.partial(pg.draw, sampled, gradient="error"))(jax.random.split(KEY, 2), p).sum()
    refused(lambda: jax.grad(f)(jnp.ones(2)), errors.DrawError, f"At: {HERE}:{f.__code__.co_firstlineno}.")


def test_a_name_that_cannot_be_found_is_no_other_error():
    odd = {1: 0, "a": 1}
    f = lambda p: pg.draw(lambda key: p * len(odd), KEY, gradient="error")
    refused(lambda: jax.grad(f)(0.3), errors.DrawError, "a value that the sampler closes over")


def test_explicit_zero_tangents_count():
    refused(lambda: jax.jvp(lambda p: bernoulli(KEY, p, gradient="error"), (0.3,), (0.0,)), errors.DrawError)


@pytest.mark.slow
def test_an_object_keeps_no_tracer_of_the_draw():
    flip = Flip(jnp.float32(0.4))
    pg.draw(flip.sample, KEY, gradient="error")
    assert flip.probability == jax.nn.sigmoid(0.4)
    with jax.checking_leaks():
        pg.draw(Flip(flip.logits).sample, KEY, gradient="error")
        assert jax.jit(jax.grad(lambda p: p * bernoulli(KEY, lax.stop_gradient(p), gradient="error")))(0.3) in (
            0.0,
            1.0,
        )


def test_parameters_used_only_for_their_shape_are_no_parameters():
    f = lambda p: (pg.draw(lambda key, p: jax.random.normal(key, p.shape), KEY, p, gradient="error") * p).sum()
    np.testing.assert_allclose(jax.grad(f)(jnp.ones(3)), jax.random.normal(KEY, (3,)))


def test_fixed_takes_a_sampler_that_has_no_derivative():
    def sampler(key, p):
        return jax.pure_callback(lambda p: np.float32(p + 1), jax.ShapeDtypeStruct((), jnp.float32), p)

    value, slope = jax.value_and_grad(lambda p: p * pg.draw(sampler, KEY, p, gradient="fixed"))(2.0)
    assert (value, slope) == (6.0, 3.0)


def test_with_selections_and_marks():
    @pg.dataclass
    class Model:
        p: float
        w: float

    f = lambda m: m.w * bernoulli(KEY, m.p, gradient="error")
    assert pg.grad(f, wrt=lambda m: m.w)(Model(0.9, 2.0)) in (0.0, 1.0)
    assert pg.grad(f)(Model(pg.NonDiff(0.9), 2.0)).w in (0.0, 1.0)
    refused(lambda: pg.grad(f, wrt=lambda m: m.p)(Model(0.9, 2.0)), errors.DrawError, "`p`")


@pytest.mark.slow
def test_second_derivatives_of_pathwise_draws():
    f = lambda p: pg.draw(lambda key, p: p**3 * jax.random.normal(key), KEY, p)
    assert jax.hessian(f)(2.0) == pytest.approx(12 * jax.random.normal(KEY))


def test_words_are_checked():
    refused(
        lambda: pg.draw(jax.random.normal, KEY, gradient="pathwize"),
        errors.ArgumentError,
        "gradient='pathwize'",
        "'pathwise', 'fixed', 'error', 'score'",
        "write gradient='pathwise'",
    )
    refused(lambda: pg.draw(jax.random.normal, KEY, gradient=3), ValueError, "gradient=3")
    refused(
        lambda: pg.draw(jax.random.normal, KEY, gradient="score"),
        errors.ArgumentError,
        "`jax.random.normal`",
        "no `log_prob`",
        f"At: {HERE}:{line_here() - 4}",
        "log_prob=distribution.log_prob",
    )
