"""A value that arrives by steps, as it is compared or rounded, has no derivative: that has its line, and is not `ok`.

Differences see one step, of which the derivative is right, or many, of which it is wrong: it is `stopped` in both.
"""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table


def halving(steps, choose=jnp.where):
    def root(k):
        def half(_, ends):
            low, high = ends
            middle = (low + high) / 2
            above = middle**3 + k * middle > 2.0  # compared
            return choose(above, low, middle), choose(above, middle, high)

        return lax.fori_loop(0, steps, half, (0.0, 2.0))[0]

    return root


def by_branches(above, one, other):
    return lax.cond(above, lambda: one, lambda: other)


def unrolled(k):
    low, high = 0.0, 2.0
    for _ in range(26):
        middle = (low + high) / 2
        above = middle**3 + k * middle > 2.0  # unrolled
        low, high = jnp.where(above, low, middle), jnp.where(above, middle, high)
    return low


def ternary(k):
    def third(_, ends):
        low, high = ends
        left, right = low + (high - low) / 3, high - (high - low) / 3
        lower = (left - k) ** 2 < (right - k) ** 2  # ternary
        return jnp.where(lower, low, left), jnp.where(lower, right, high)

    return lax.fori_loop(0, 60, third, (-3.0, 3.0))[0]


def by_bits(k):
    bit = lambda v, weight: (jnp.where(v + weight <= k, v + weight, v), None)  # bits
    return lax.scan(bit, 0.0, 2.0 ** -jnp.arange(30.0))[0]


def after_a_solve(k):
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    return halving(40)(jnp.linalg.solve(matrix, k * jnp.array([5.0, 1.0]))[0])


STAIRS = {
    "a few halvings": (halving(20), "compared", "compared"),
    "many halvings": (halving(40), "compared", "compared"),
    "branches": (halving(40, by_branches), "compared", "compared"),
    "unrolled": (unrolled, "compared", "unrolled"),
    "mapped": (lambda k: jax.vmap(halving(40))(k * jnp.arange(1.0, 3.0)).sum(), "compared", "compared"),
    "a product": (lambda k: 3.0 * halving(40)(k), "compared", "compared"),
    "after a solve": (after_a_solve, "compared", "compared"),
    "ternary search": (ternary, "compared", "ternary"),
    "bits": (by_bits, "compared", "bits"),
    "rounded": (lambda k: jnp.round(k * 1e8) / 1e8, "rounded", "rounded"),  # rounded
    "a floor": (lambda k: jnp.floor(k * 2.0**24) / 2.0**24, "rounded", "a floor"),  # a floor
    "a cast": (lambda k: (k * 1e8).astype(int) / 1e8, "cast", "a cast"),  # a cast
}


def line(name):
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {name}")]
    return f"test_check_stairs.py:{found}"


@table("name", list(STAIRS), quick=2)
def test_what_is_only_compared_or_rounded_has_a_line(name):
    function, reason, at = STAIRS[name]
    report = pg.check(function, progress=False)(jnp.float32(0.7))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.reason) == ("zero", "warning", reason)
    assert finding.where == line(at)
    assert report.verdict == "stopped"
    assert "where the function changes by" in finding.message


def until(k):
    def half(ends):
        middle = (ends[0] + ends[1]) / 2
        above = middle**3 + k * middle > 2.0  # until
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    return lax.while_loop(lambda ends: ends[1] - ends[0] > 1e-6, half, (0.0, 2.0))[0]


def nearest(k):
    grid = jnp.linspace(0.0, 1.0, 20_001)
    return grid[jnp.argmin((grid - k) ** 2)]  # nearest


# What arrives by steps as `f`, and smoothly too: the derivative of the one is there, and that of the other is not.
BESIDE = {
    "a sum": lambda f, k: f + jnp.sin(k),
    "a product": lambda f, k: f * k,
    "a loss": lambda f, k: (f - 2 * k) ** 2,
}
ARRIVING = {
    "many halvings": (halving(40), "compared"),
    "a few halvings": (halving(20), "compared"),
    "until": (until, "until"),
    "unrolled": (unrolled, "unrolled"),
    "bits": (by_bits, "bits"),
    "nearest": (nearest, "nearest"),
    "rounded": STAIRS["rounded"][::2],
    "a floor": (lambda k: jnp.floor(k * 1e4) / 1e4, "a small floor"),  # a small floor
    "a cast": STAIRS["a cast"][::2],
}


@table("name", list(ARRIVING), quick=2)
@pytest.mark.parametrize("beside", list(BESIDE))
def test_what_arrives_by_steps_beside_a_smooth_part_is_stopped(name, beside):
    function, at = ARRIVING[name]
    report = pg.check(lambda k: BESIDE[beside](function(k), k), progress=False)(jnp.float32(0.7))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.reason) == ("mismatch", "warning", "stairs")
    assert finding.where == line(at)
    assert report.verdict == "stopped"
    low, high = jnp.float32(0.697), jnp.float32(0.703)
    away = BESIDE[beside](function(high), high) - BESIDE[beside](function(low), low)
    assert finding.figures.slope == pytest.approx(float(away) / 0.006, rel=0.1)


GRID = jnp.linspace(0.0, 1.0, 10_001)
RIGHT = {
    "few steps": lambda k: k * jnp.round(3 * k),
    "kinks": lambda k: jnp.where(k > GRID, k - GRID, 0.0).sum(),
    "a sawtooth": lambda k: 1e4 * k + 0.3 - jnp.floor(1e4 * k + 0.3),
    "a dead zone": lambda k: jnp.where(jnp.abs(k - 0.7) < 1e-3, 0.0, jnp.sin(k - 0.7)),
    "a pinball loss": lambda k: jnp.where(k > GRID, 0.9 * (k - GRID), 0.1 * (GRID - k)).mean(),
    "a table off its grid": lambda k: jnp.interp(k + 3e-5, GRID, jnp.sin(GRID)),
    "a folded phase": lambda k: jnp.sin(2 * jnp.pi * (k * 3000.0 % 1.0)) + k,
    "a table": lambda k: jnp.interp(k, GRID, jnp.sin(GRID)),
    "clipped": lambda k: jnp.clip(k * jnp.arange(1000.0), 1.0, 500.0).mean(),
    "sorted": lambda k: jnp.sort(jnp.sin(k * jnp.arange(1000.0)))[500:].sum(),
}


@table("name", list(RIGHT), quick=2)
def test_what_has_the_derivative_of_its_steps_is_ok(name):
    report = pg.check(RIGHT[name], progress=False)(jnp.float32(0.7))
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.kind not in ("tie", "zero")]


@pytest.mark.slow
def test_another_leaf_is_judged_by_itself():
    report = pg.check(lambda p: halving(40)(p["a"]) * jnp.sin(p["b"]), progress=False)({"a": 0.7, "b": 2.0})
    assert {row.path: row.verdict for row in report.rows} == {"['a']": "stopped", "['b']": "ok"}


@pytest.mark.slow
def test_what_is_meant_is_ok():
    report = pg.check(halving(40), intended=[line("compared")], progress=False)(0.7)
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.slow
def test_a_wrong_rule_keeps_the_blame():
    wrong = jax.custom_jvp(jnp.sin)
    wrong.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 0.0 * tangents[0]))
    report = pg.check(lambda k: wrong(k) + 0.0 * halving(40)(k), progress=False)(0.7)
    assert {finding.kind for finding in report.findings} == {"mismatch"}
    assert report.verdict in ("stopped", "error")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_an_exception_at_the_point_is_no_step(width):
    report = pg.check(lambda x: jnp.where(jnp.abs(x) < width, 0.0, jnp.log1p(x)), progress=False)(jnp.float32(0.0))
    # At the smallest differences the widest one is flat.
    expected = ("error", "removable") if width < 1e-3 else ("info", "truly zero")
    assert [(finding.severity, finding.reason) for finding in report.findings] == [expected]


noted = lambda report: [(f.severity, f.kind, f.leaves) for f in report.findings if f.reason == "partly"]
weights = {"w": jnp.array([[0.31, -0.42], [0.77, -0.11]]), "b": jnp.array([0.3, -0.2])}
STEPS_BESIDE = {
    "four bits": lambda w: jnp.round(w * 7) / 7,
    "four bits, of which half count": lambda w: jnp.round(w * 7) * jnp.arange(2.0),
    "two bits": lambda w: jnp.floor(w * 2) / 2,
    "signs": jnp.sign,
    "integers": lambda w: (w * 7).astype(jnp.int8).astype(jnp.float32),
    "a threshold": lambda w: jnp.where(w > 0.25, 1.0, 0.0),
    "three values": lambda w: jnp.where(jnp.abs(w) > 0.25, jnp.sign(w), 0.0),
    "the largest": lambda w: jax.nn.one_hot(jnp.argmax(w, axis=-1), 2),
    "a table": lambda w: jnp.linspace(0.0, 1.0, 16)[jnp.round(w * 7 + 7).astype(int)],
}


@table("name", list(STEPS_BESIDE), quick=3)
def test_steps_beside_a_penalty_are_a_note(name):
    quantized = STEPS_BESIDE[name]
    loss = lambda p: jnp.sum(jnp.tanh(quantized(p["w"]) @ jnp.arange(1.0, 3.0)) * p["b"]) + 1e-3 * jnp.sum(p["w"] ** 2)
    report = pg.check(loss, progress=False)(weights)
    assert (report.verdict, noted(report)) == ("ok", [("info", "zero", ("['w']",))])
    assert "the gradient is that of the rest" in str(report)


NO_JUMP = {
    "interpolation": lambda x: jnp.interp(x, jnp.linspace(-2.0, 2.0, 9), jnp.linspace(-2.0, 2.0, 9) ** 2),
    "interpolation by hand": lambda x: (cell := jnp.floor(4 * x)) ** 2 + (4 * x - cell) * (2 * cell + 1),
    "an angle": lambda x: jnp.cos(20 * x - 2 * jnp.pi * jnp.floor(20 * x / (2 * jnp.pi))),
    "a hinge": lambda x: jnp.where(x > 0.25, x - 0.25, 0.0),
    "two formulas": lambda x: jnp.where(jnp.abs(x) < 1e-2, 1 - x**2 / 6 + x**4 / 120, jnp.sin(x) / x),
    "a loop's end": lambda x: lax.fori_loop(0, 4, lambda i, y: jnp.where(y > 2.0, y, y + 0 * i), x),
    "gamma": lambda x: jnp.exp(jax.scipy.special.gammaln(1.5 + x)),
    "a root": lambda x: jnp.where(x > 0.25, jnp.sqrt(jnp.where(x > 0.25, x - 0.25, 1.0)), 0.0),
    "a root of high order": lambda x: jnp.where(x > 0.1, jnp.where(x > 0.1, x - 0.1, 1.0) ** 0.1, 0.0),
}


@table("name", list(NO_JUMP), quick=3)
def test_steps_at_which_the_value_does_not_jump_are_no_note(name):
    report = pg.check(lambda p: jnp.sum(NO_JUMP[name](p["w"])) + jnp.sum(p["b"]), progress=False)(weights)
    assert (report.verdict, noted(report)) == ("ok", [])


def test_the_remedy_of_a_note_is_one():
    rounded = pg.surrogate(lambda w: jnp.round(w * 7) / 7, smooth=lambda w: w)
    report = pg.check(lambda p: jnp.sum(rounded(p["w"])) + jnp.sum(p["w"] ** 2) + jnp.sum(p["b"]), progress=False)(
        weights
    )
    assert {f.kind for f in report.findings} == {"surrogate"}


def symmetric(w, levels):
    scale = jnp.max(jnp.abs(w)) / levels
    return jnp.round(w / scale) * scale  # symmetric


def by_channel(w, levels):
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / levels
    return jnp.clip(jnp.round(w / scale), -levels, levels) * scale  # by channel


def affine(w, levels):
    low, high = w.min(), w.max()
    scale = (high - low) / (2 * levels + 1)
    return jnp.floor((w - low) / scale + 0.5) * scale + low  # affine


def cast(w, levels):
    scale = jnp.max(jnp.abs(w)) / levels
    return (w / scale).astype(jnp.int8).astype(w.dtype) * scale  # cast


def remainder(w, levels):
    return w - jnp.mod(w, jnp.float32(1 / levels))  # remainder


def divided(w, levels):
    return w // jnp.float32(1 / levels) / levels  # divided


def clamped(w, levels):
    scale = jnp.max(jnp.abs(w)) / levels
    return lax.clamp(jnp.int32(-levels), jnp.round(w / scale).astype(jnp.int32), jnp.int32(levels)) * scale  # clamped


QUANTIZERS = {
    "clamped": clamped,
    "remainder": remainder,
    "divided": divided,
    "symmetric": symmetric,
    "by channel": by_channel,
    "affine": affine,
    "cast": cast,
}
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
inputs, targets = draw(0, 32, 8), draw(1, 32, 3)
LAYERS = {
    "linear": (lambda q, w: jnp.mean((inputs @ q(w) - targets) ** 2), draw(2, 8, 3)),
    "penalized": (lambda q, w: jnp.mean((inputs @ q(w) - targets) ** 2) + 1e-2 * jnp.sum(w**2), draw(3, 8, 3)),
    "classes": (lambda q, w: -jnp.mean(jax.nn.log_softmax(inputs @ q(w))[:, 0]), draw(4, 8, 3)),
    "two layers": (
        lambda q, p: jnp.mean((jnp.tanh(inputs @ q(p[0])) @ q(p[1]) - targets) ** 2),
        [draw(5, 8, 16) / 3, draw(6, 16, 3) / 4],
    ),
    "activations": (
        lambda q, p: jnp.mean((q(jnp.tanh(inputs @ p)) @ jnp.ones((16, 3)) - targets) ** 2),
        draw(7, 8, 16) / 3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("levels", [127, 7])
@pytest.mark.parametrize("name", list(QUANTIZERS))
@pytest.mark.parametrize("layer", list(LAYERS))
def test_quantized_numbers_without_a_straight_through_estimator_are_stopped(name, layer, levels):
    loss, leaves = LAYERS[layer]
    report = pg.check(lambda p: loss(lambda w: QUANTIZERS[name](w, levels), p), progress=False)(leaves)
    assert all(verdict == "stopped" for verdict in (row.verdict for row in report.rows)), str(report)
    (found,) = (finding for finding in report.findings if finding.reason in ("stairs", "rounded"))
    assert (found.where, len(found.leaves)) == (line(name), len(jax.tree.leaves(leaves)))


@pytest.mark.slow
def test_a_product_of_integers_is_followed():
    def loss(w):
        scale, of_inputs = lax.stop_gradient(jnp.max(jnp.abs(w))) / 127, jnp.max(jnp.abs(inputs)) / 127
        rounded = jnp.round(inputs / of_inputs).astype(jnp.int8), jnp.round(w / scale).astype(jnp.int8)  # integers
        product = lax.dot_general(*rounded, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return jnp.mean((jnp.tanh(product * (of_inputs * scale)) - targets) ** 2) + 1e-2 * jnp.sum(w**2)

    report = pg.check(loss, progress=False)(draw(2, 8, 3))
    (found,) = (finding for finding in report.findings if finding.reason == "stairs")
    assert (report.verdict, found.where) == ("stopped", line("integers"))


@pytest.mark.slow
def test_a_leaf_that_loses_nothing_at_a_line_at_which_others_do_is_ok():
    nearest = lambda x: jnp.floor(x + 0.5)

    def loss(p):
        folded = p["x"] - 2.0 * nearest(p["x"] / 2.0)
        quantized = jnp.tanh(inputs @ (nearest(p["w"] / 0.2) * 0.2))
        return jnp.mean((quantized - targets) ** 2) + 1e-2 * jnp.sum(p["w"] ** 2) + jnp.sum((folded - 0.3) ** 2)

    report = pg.check(loss, progress=False)({"w": draw(3, 8, 3), "x": 3 * draw(4, 10)})
    assert {row.path: row.verdict for row in report.rows} == {"['w']": "stopped", "['x']": "ok"}


TIMES = jnp.linspace(0.0, 48.0, 200)


def noise_on_a_lattice(stretch):
    x = jnp.linspace(0.3, 5.1, 40) * stretch
    cell = jnp.floor(x)
    part = x - cell
    gradients = [(hashed := jnp.sin(i * 127.1) * 43.5) - jnp.floor(hashed) for i in (cell, cell + 1)]
    weight = part * part * (3 - 2 * part)
    return jnp.sum(((1 - weight) * gradients[0] * part + weight * gradients[1] * (part - 1)) ** 2)


def nearest_images(p):
    apart = p["x"][:, None] - p["x"][None]
    apart -= p["box"] * jnp.round(apart / p["box"])
    return jnp.sum(jnp.exp(-jnp.sum(apart**2, -1) / 0.1))


def compounded(p):
    whole = jnp.floor(p["years"] * 12)
    return (1 + p["rate"] / 12) ** whole * (1 + p["rate"] * (p["years"] - whole / 12))


def hats(x):
    cell = jnp.clip(jnp.floor(x / 0.25), -8, 7)
    part = x / 0.25 - cell
    return jnp.sum(jnp.sin(cell) * (1 - part) + jnp.sin(cell + 1) * part)


ROUNDED_RIGHTLY = {
    "noise on a lattice": (noise_on_a_lattice, 1.37),
    "nearest images": (nearest_images, {"x": jax.random.uniform(jax.random.key(8), (12, 3)) * 6, "box": 6.1}),
    "a triangle wave": (lambda f: jnp.mean(jnp.abs(2 * (f * TIMES - jnp.floor(f * TIMES + 0.5)))), 0.77),
    "a folded angle": (lambda x: jnp.sum((x - 2 * jnp.pi * jnp.round(x / (2 * jnp.pi))) ** 2), 9 * draw(9, 20)),
    "an error of quantization": (lambda w: jnp.sum((w - jnp.round(w * 16) / 16) ** 2), draw(10, 40)),
    "a scale that is learned": (
        lambda p: jnp.sum((p["w"] - jnp.clip(jnp.round(p["w"] / p["s"]), -7, 7) * p["s"]) ** 2),
        {"w": draw(11, 64), "s": 0.3},
    ),
    "interest": (compounded, {"rate": 0.05, "years": 7.71}),
    "hats": (hats, draw(12, 50)),
    "a straight-through estimator": (
        lambda w: jnp.mean((inputs @ (w + lax.stop_gradient(symmetric(w, 7) - w)) - targets) ** 2) * 0 + jnp.sum(w),
        draw(13, 8, 3),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROUNDED_RIGHTLY))
def test_rounding_that_loses_nothing_is_ok(name):
    function, leaves = ROUNDED_RIGHTLY[name]
    report = pg.check(function, progress=False)(leaves)
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.slow
def test_all_layers_of_a_quantized_network_are_stopped():
    layers = [{"w": draw(seed, 16, 16) / 4, "b": draw(seed + 50, 16) / 10} for seed in range(20, 32)]

    def loss(layers):
        hidden = draw(19, 8, 16)
        for layer in layers:
            hidden += jax.nn.gelu(hidden @ symmetric(layer["w"], 7) + layer["b"])
        return jnp.mean(hidden**2)

    report = pg.check(loss, progress=False)(layers)
    (found,) = (finding for finding in report.findings if finding.reason == "stairs")
    assert found.leaves == tuple(f"[{number}]['w']" for number in range(12))
    assert {row.path[-3:-2]: row.verdict for row in report.rows} == {"w": "stopped", "b": "ok"}
