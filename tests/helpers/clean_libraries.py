"""Functions of other libraries whose gradient is right, made in the test: a check must not make an error of anything."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from helpers.clean import KEY, Clean, F, Lazy, positive

LIBRARIES: list[Lazy] = []


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def wide(tree):
    """A tree with the precision of the day: arrays are made in float32, and a function of x64 is of float64."""
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    narrow = lambda leaf: getattr(leaf, "dtype", None) in (jnp.float32, jnp.float64)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype) if narrow(leaf) else leaf, tree)


def table(library, rows, make, x64=None):
    """Each row of a table by itself: what `make` makes of it when it is asked for is a function and its arguments."""

    def made(row):
        function, *args = make(row)
        return Clean("", function, wide(tuple(args)), quiet=False)

    for name, row in rows.items():
        LIBRARIES.append(Lazy(f"{library}_{name}", functools.partial(made, row), x64))


# --- equinox.nn --------------------------------------------------------------------------------------------------

ONE, TWO, THREE = (2, 6), (2, 4, 4), (2, 4, 4, 4)
LAYERS = {
    "Linear": (lambda nn: nn.Linear(3, 2, key=KEY), (3,)),
    "Identity": (lambda nn: nn.Identity(), (3,)),
    "Lambda": (lambda nn: nn.Lambda(jnp.tanh), (3,)),
    "MLP": (lambda nn: nn.MLP(3, 2, 4, 1, key=KEY), (3,)),
    "Conv1d": (lambda nn: nn.Conv1d(2, 2, 3, key=KEY), ONE),
    "Conv2d": (lambda nn: nn.Conv2d(2, 2, 3, padding="SAME", key=KEY), TWO),
    "Conv3d": (lambda nn: nn.Conv3d(2, 2, 2, key=KEY), THREE),
    "ConvTranspose1d": (lambda nn: nn.ConvTranspose1d(2, 2, 3, stride=2, key=KEY), ONE),
    "ConvTranspose2d": (lambda nn: nn.ConvTranspose2d(2, 2, 2, key=KEY), TWO),
    "ConvTranspose3d": (lambda nn: nn.ConvTranspose3d(2, 1, 2, key=KEY), THREE),
    "AvgPool1d": (lambda nn: nn.AvgPool1d(2, 2), ONE),
    "AvgPool2d": (lambda nn: nn.AvgPool2d(2), TWO),
    "AvgPool3d": (lambda nn: nn.AvgPool3d(2), THREE),
    "MaxPool1d": (lambda nn: nn.MaxPool1d(2, 2), ONE),
    "MaxPool2d": (lambda nn: nn.MaxPool2d(2), TWO),
    "MaxPool3d": (lambda nn: nn.MaxPool3d(2), THREE),
    "AdaptiveAvgPool1d": (lambda nn: nn.AdaptiveAvgPool1d(2), ONE),
    "AdaptiveAvgPool2d": (lambda nn: nn.AdaptiveAvgPool2d(2), TWO),
    "AdaptiveAvgPool3d": (lambda nn: nn.AdaptiveAvgPool3d(2), THREE),
    "AdaptiveMaxPool1d": (lambda nn: nn.AdaptiveMaxPool1d(2), ONE),
    "AdaptiveMaxPool2d": (lambda nn: nn.AdaptiveMaxPool2d(2), TWO),
    "AdaptiveMaxPool3d": (lambda nn: nn.AdaptiveMaxPool3d(2), THREE),
    "Embedding": (lambda nn: nn.Embedding(4, 3, key=KEY), None),
    "LayerNorm": (lambda nn: nn.LayerNorm(4), (4,)),
    "RMSNorm": (lambda nn: nn.RMSNorm(4), (4,)),
    "GroupNorm": (lambda nn: nn.GroupNorm(2, 4), (4, 3)),
    "PReLU": (lambda nn: nn.PReLU(0.2), (4,)),
    "Dropout": (lambda nn: nn.Dropout(0.4), (5,)),
    "GRUCell": (lambda nn: nn.GRUCell(3, 3, key=KEY), (3,)),
    "LSTMCell": (lambda nn: nn.LSTMCell(3, 3, key=KEY), (3,)),
    "MultiheadAttention": (lambda nn: nn.MultiheadAttention(2, 4, inference=True, key=KEY), (3, 4)),
    "RotaryPositionalEmbedding": (lambda nn: nn.RotaryPositionalEmbedding(4), (3, 4)),
    "WeightNorm": (lambda nn: nn.WeightNorm(nn.Linear(3, 2, key=KEY)), (3,)),
    "SpectralNorm": (lambda nn: nn.SpectralNorm(nn.Linear(3, 2, key=KEY), "weight", key=KEY), (3,)),
    "BatchNorm": (lambda nn: nn.BatchNorm(3, "batch", mode="batch"), (3,)),
    "BatchNorm_ema": (lambda nn: nn.BatchNorm(3, "batch", mode="ema"), (3,)),
    "Sequential": (lambda nn: nn.Sequential([nn.Linear(3, 4, key=KEY), nn.Lambda(jax.nn.relu)]), (3,)),
    "Shared": (
        lambda nn: nn.Shared(nn.Sequential([nn.Linear(3, 3, key=KEY)] * 2), lambda m: m[1], lambda m: m[0]),
        (3,),
    ),
}


def layer(row):
    make, shape = row
    model, state = eqx.nn.make_with_state(make)(eqx.nn)
    x = random(*(shape or ()))

    def called(model, x):
        match model:
            case eqx.nn.Embedding():
                return model(2) * x
            case eqx.nn.GRUCell():
                return model(x, jnp.ones_like(x))
            case eqx.nn.LSTMCell():
                return model(x, (jnp.ones_like(x), x))
            case eqx.nn.MultiheadAttention():
                return model(x, x, x, np.tril(np.ones((3, 3), bool)))
            case eqx.nn.BatchNorm():
                stacked = jnp.stack([x, 2 * x * x])
                return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(stacked, state)
            case eqx.nn.SpectralNorm():
                return model(x, jax.tree.map(lambda leaf: leaf, state))
            case eqx.nn.Shared():
                return model()(x)
            case eqx.nn.Dropout() | eqx.nn.Sequential():
                return model(x, key=KEY)
        return model(x)

    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(both):
        outputs = eqx.filter(called(eqx.combine(both[0], rest), both[1]), eqx.is_inexact_array)
        return sum(jnp.sum(jnp.tanh(output) ** 2) for output in jax.tree.leaves(outputs))

    return loss, (arrays, x)


table("equinox", LAYERS, layer)

# --- optax.losses ------------------------------------------------------------------------------------------------

X, Y = random(3, 4), np.abs(random(3, 4, seed=1))
Y /= Y.sum(1, keepdims=True)
BITS = np.array([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]], np.float32)
LABELS = np.array([2, 0, 3], np.int32)
CTC = np.array([[0, 0, 0, 1]], np.float32), np.array([[1, 2]]), np.zeros((1, 2), np.float32)
soft = lambda x: jax.nn.softmax(x)
LOSSES = {
    "binary_dice_loss": lambda lib, x: lib.binary_dice_loss(x[..., None], BITS[..., None]),
    # Where a target is zero, so is its term.
    "generalized_kl_divergence_of_zeros": lambda lib, x: lib.generalized_kl_divergence(jax.nn.log_softmax(x), BITS / 2),
    "cosine_distance": lambda lib, x: lib.cosine_distance(x, Y),
    "cosine_similarity": lambda lib, x: lib.cosine_similarity(x, Y),
    "ctc_loss": lambda lib, x: lib.ctc_loss(jnp.stack([x.T]), *CTC),
    "ctc_loss_with_forward_probs": lambda lib, x: lib.ctc_loss_with_forward_probs(jnp.stack([x.T]), *CTC)[0],
    "dice_loss": lambda lib, x: lib.dice_loss(x, BITS),
    "generalized_kl_divergence": lambda lib, x: lib.generalized_kl_divergence(jax.nn.log_softmax(x), Y),
    "hinge_loss": lambda lib, x: lib.hinge_loss(x, 2 * BITS - 1),
    "huber_loss": lambda lib, x: lib.huber_loss(x, Y, delta=0.5),
    "kl_divergence": lambda lib, x: lib.kl_divergence(jax.nn.log_softmax(x), Y),
    "kl_divergence_with_log_targets": lambda lib, x: lib.kl_divergence_with_log_targets(
        jax.nn.log_softmax(x), jnp.log(Y)
    ),
    "l2_loss": lambda lib, x: lib.l2_loss(x, Y),
    "log_cosh": lambda lib, x: lib.log_cosh(x, Y),
    "make_fenchel_young_loss": lambda lib, x: jax.vmap(lib.make_fenchel_young_loss(jax.nn.logsumexp))(x, Y),
    "multiclass_generalized_dice_loss": lambda lib, x: lib.multiclass_generalized_dice_loss(x, BITS),
    "multiclass_hinge_loss": lambda lib, x: lib.multiclass_hinge_loss(x, LABELS),
    "multiclass_perceptron_loss": lambda lib, x: lib.multiclass_perceptron_loss(x, LABELS),
    "multiclass_sparsemax_loss": lambda lib, x: lib.multiclass_sparsemax_loss(x, LABELS),
    "ntxent": lambda lib, x: lib.ntxent(x, np.array([0, 1, 0])),
    "perceptron_loss": lambda lib, x: lib.perceptron_loss(x, 2 * BITS - 1),
    "poly_loss_cross_entropy": lambda lib, x: lib.poly_loss_cross_entropy(x, Y),
    "ranking_softmax_loss": lambda lib, x: lib.ranking_softmax_loss(x, Y),
    "safe_softmax_cross_entropy": lambda lib, x: lib.safe_softmax_cross_entropy(x, BITS / 2),
    "sigmoid_binary_cross_entropy": lambda lib, x: lib.sigmoid_binary_cross_entropy(x, BITS),
    "sigmoid_focal_loss": lambda lib, x: lib.sigmoid_focal_loss(x, BITS, alpha=0.3),
    "smooth_labels": lambda lib, x: lib.smooth_labels(soft(x), 0.1) ** 2,
    "softmax_cross_entropy": lambda lib, x: lib.softmax_cross_entropy(x, Y),
    "softmax_cross_entropy_with_integer_labels": lambda lib, x: lib.softmax_cross_entropy_with_integer_labels(
        x, LABELS
    ),
    "sparsemax_loss": lambda lib, x: lib.sparsemax_loss(x, BITS),
    "squared_error": lambda lib, x: lib.squared_error(x, Y),
    "triplet_margin_loss": lambda lib, x: lib.triplet_margin_loss(x, Y, Y[::-1]),
}
table("optax", LOSSES, lambda f: (lambda x: f(optax.losses, x), X))

# --- diffrax -----------------------------------------------------------------------------------------------------

# Its default, `RecursiveCheckpointAdjoint`, is in `adaptive_ode_solve` of `helpers/clean.py`.
ADJOINTS = {"direct": "DirectAdjoint", "backsolve": "BacksolveAdjoint"}


def solve(adjoint):
    import diffrax

    def final(p):
        term = diffrax.ODETerm(lambda t, y, args: -args["rate"] * y + args["drive"] * jnp.sin(t))
        return diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            0.0,
            0.3,
            0.1,
            p["start"],
            args={"rate": p["rate"], "drive": p["drive"]},
            max_steps=16,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            adjoint=getattr(diffrax, adjoint)(),
        ).ys

    return final, {"rate": F(0.7)[0], "drive": F(0.4)[0], "start": F(1.2, 2.4)}


table("diffrax", ADJOINTS, solve)

# --- optimistix --------------------------------------------------------------------------------------------------

TOLERANCES = (1e-5, 1e-5)
SOLVERS = {
    "Newton": (lambda o: o.Newton(*TOLERANCES), "root_find"),
    "Chord": (lambda o: o.Chord(*TOLERANCES), "root_find"),
    "Bisection": (lambda o: o.Bisection(*TOLERANCES), "root_find"),
    "FixedPointIteration": (lambda o: o.FixedPointIteration(*TOLERANCES), "fixed_point"),
    "GaussNewton": (lambda o: o.GaussNewton(*TOLERANCES), "least_squares"),
    "LevenbergMarquardt": (lambda o: o.LevenbergMarquardt(*TOLERANCES), "least_squares"),
    "IndirectLevenbergMarquardt": (lambda o: o.IndirectLevenbergMarquardt(*TOLERANCES), "least_squares"),
    "Dogleg": (lambda o: o.Dogleg(*TOLERANCES), "least_squares"),
    "BFGS": (lambda o: o.BFGS(*TOLERANCES), "minimise"),
    "DFP": (lambda o: o.DFP(*TOLERANCES), "minimise"),
    "LBFGS": (lambda o: o.LBFGS(*TOLERANCES), "minimise"),
    "NelderMead": (lambda o: o.NelderMead(*TOLERANCES), "minimise"),
    "NonlinearCG": (lambda o: o.NonlinearCG(*TOLERANCES), "minimise"),
    "GradientDescent": (lambda o: o.GradientDescent(0.2, *TOLERANCES), "minimise"),
    "OptaxMinimiser": (lambda o: o.OptaxMinimiser(optax.adam(0.1), *TOLERANCES), "minimise"),
    "BestSoFarMinimiser": (lambda o: o.BestSoFarMinimiser(o.BFGS(*TOLERANCES)), "minimise"),
}


def optimum(row):
    import optimistix

    make, problem = row
    functions = {
        "root_find": lambda x, p: x**3 + p["a"] * x - p["b"],
        "fixed_point": lambda x, p: jnp.cos(p["a"] * x) * 0.5 + 0.1 * p["b"],
        "least_squares": lambda x, p: jnp.stack([x - p["a"], x**2 - p["b"], 0.3 * x]),
        "minimise": lambda x, p: (x - p["a"]) ** 2 + 0.1 * jnp.cosh(p["b"] * x),
    }

    def best(p):
        options = {"options": {"lower": 0.0, "upper": 3.0}} if "Bisection" in str(make(optimistix)) else {}
        solve = getattr(optimistix, problem)
        # The rule of the implicit function is that of the solution, from wherever it is reached.
        return solve(functions[problem], make(optimistix), jnp.ones_like(p["a"]), p, max_steps=400, **options).value

    return best, {"a": F(1.2)[0], "b": F(1.7)[0]}


table("optimistix", SOLVERS, optimum)

# --- lineax ------------------------------------------------------------------------------------------------------

SYMMETRIC = positive(3)
OPERATORS = {
    "AutoLinearSolver": (lambda lib: lib.AutoLinearSolver(well_posed=True), "MatrixLinearOperator", ()),
    "LU": (lambda lib: lib.LU(), "MatrixLinearOperator", ()),
    "QR": (lambda lib: lib.QR(), "MatrixLinearOperator", ()),
    "SVD": (lambda lib: lib.SVD(), "MatrixLinearOperator", ()),
    "Cholesky": (lambda lib: lib.Cholesky(), "MatrixLinearOperator", ("positive_semidefinite_tag",)),
    "CG": (lambda lib: lib.CG(1e-5, 1e-5), "MatrixLinearOperator", ("positive_semidefinite_tag",)),
    "NormalCG": (lambda lib: lib.Normal(lib.CG(1e-5, 1e-5)), "MatrixLinearOperator", ()),
    "GMRES": (lambda lib: lib.GMRES(1e-5, 1e-5), "MatrixLinearOperator", ()),
    "BiCGStab": (lambda lib: lib.BiCGStab(1e-5, 1e-5), "MatrixLinearOperator", ()),
    "LSMR": (lambda lib: lib.LSMR(1e-5, 1e-5), "MatrixLinearOperator", ()),
    "Diagonal": (lambda lib: lib.Diagonal(), "DiagonalLinearOperator", ()),
    "Triangular": (lambda lib: lib.Triangular(), "MatrixLinearOperator", ("lower_triangular_tag",)),
    "Tridiagonal": (lambda lib: lib.Tridiagonal(), "TridiagonalLinearOperator", ()),
}


def linear(row):
    import lineax

    make, operator, tags = row

    def solution(p):
        matrix = p["matrix"]
        parts = {
            "MatrixLinearOperator": lambda: (jnp.tril(matrix) if "lower_triangular_tag" in tags else matrix,),
            "DiagonalLinearOperator": lambda: (jnp.diag(matrix),),
            "TridiagonalLinearOperator": lambda: [jnp.diag(matrix, k) for k in (0, -1, 1)],
        }[operator]()
        tagged = [getattr(lineax, tag) for tag in tags]
        return lineax.linear_solve(
            getattr(lineax, operator)(*parts, *([tagged] if tags else [])), p["b"], make(lineax)
        ).value

    return solution, {"matrix": SYMMETRIC, "b": F(1, 2, 3)}


table("lineax", OPERATORS, linear)

# --- densities ---------------------------------------------------------------------------------------------------

UNIT, SIMPLEX = F(0.3, 0.6), F(0.2, 0.3, 0.5)
DENSITIES = {
    "Normal": lambda d, p: d.Normal(p["a"], p["b"]).log_prob(p["x"]),
    "LogNormal": lambda d, p: d.LogNormal(p["a"], p["b"]).log_prob(p["x"]),
    "HalfNormal": lambda d, p: d.HalfNormal(p["b"]).log_prob(p["x"]),
    "Beta": lambda d, p: d.Beta(p["a"], p["b"]).log_prob(p["u"]),
    "Gamma": lambda d, p: d.Gamma(p["a"], p["b"]).log_prob(p["x"]),
    "InverseGamma": lambda d, p: d.InverseGamma(p["a"], p["b"]).log_prob(p["x"]),
    "StudentT": lambda d, p: d.StudentT(p["a"], p["b"], p["b"]).log_prob(p["x"]),
    "Cauchy": lambda d, p: d.Cauchy(p["a"], p["b"]).log_prob(p["x"]),
    "Laplace": lambda d, p: d.Laplace(p["a"], p["b"]).log_prob(p["x"]),
    "Gumbel": lambda d, p: d.Gumbel(p["a"], p["b"]).log_prob(p["x"]),
    "Weibull": lambda d, p: d.Weibull(p["a"], p["b"]).log_prob(p["x"]),
    "VonMises": lambda d, p: d.VonMises(p["a"], p["b"]).log_prob(p["u"]),
    "TruncatedNormal": lambda d, p: d.TruncatedNormal(p["a"], p["b"], low=0.0).log_prob(p["x"]),
    "Uniform": lambda d, p: d.Uniform(0.0, 2 * p["b"] + 5).log_prob(p["x"]),
    "Dirichlet": lambda d, p: d.Dirichlet(p["c"]).log_prob(jax.nn.softmax(p["logits"])),
    "MultivariateNormal": lambda d, p: d.MultivariateNormal(0.0, p["matrix"] @ p["matrix"].T).log_prob(p["logits"]),
    "LKJCholesky": lambda d, p: d.LKJCholesky(3, p["a"]).log_prob(d.transforms.CorrCholeskyTransform()(p["logits"])),
    "Bernoulli": lambda d, p: d.Bernoulli(logits=p["logits"]).log_prob(np.array([0, 1, 1])),
    "BernoulliProbs": lambda d, p: d.Bernoulli(p["u"]).log_prob(np.array([0, 1])),
    "Binomial": lambda d, p: d.Binomial(5, p["u"]).log_prob(np.array([0, 3])),
    "Categorical": lambda d, p: d.Categorical(logits=p["logits"]).log_prob(1),
    "Multinomial": lambda d, p: d.Multinomial(3, logits=p["logits"]).log_prob(np.array([1, 0, 2])),
    "Poisson": lambda d, p: d.Poisson(p["b"]).log_prob(np.array([0, 3])),
    "NegativeBinomial2": lambda d, p: d.NegativeBinomial2(p["a"], p["b"]).log_prob(np.array([0, 3])),
    "ZeroInflatedPoisson": lambda d, p: d.ZeroInflatedPoisson(p["u"], p["b"]).log_prob(np.array([0, 3])),
    "OrderedLogistic": lambda d, p: d.OrderedLogistic(p["a"], jnp.cumsum(p["c"])).log_prob(np.array([0, 2])),
    "Mixture": lambda d, p: d.MixtureSameFamily(d.Categorical(logits=p["logits"]), d.Normal(p["c"], p["c"])).log_prob(
        p["x"]
    ),
}
POINT = {
    "a": F(0.8, 1.4),
    "b": F(1.3, 0.7),
    "x": F(0.4, 2.1),
    "u": UNIT,
    "c": F(0.8, 1.5, 2.0),
    "logits": F(0.2, -0.4, 0.7),
    "matrix": np.tril(SYMMETRIC),
}


def density(f):
    import numpyro.distributions as distributions

    used = lambda p: f(distributions, {name: p.get(name, value) for name, value in wide(POINT).items()})
    jaxpr = jax.make_jaxpr(used)(wide(POINT)).jaxpr
    names = [
        name for name, v in zip(sorted(POINT), jaxpr.invars, strict=True) if any(v in e.invars for e in jaxpr.eqns)
    ]
    return used, {name: POINT[name] for name in names}


table("numpyro", DENSITIES, density)


def eight_schools(y, sigma):
    import numpyro
    import numpyro.distributions as distributions

    mean = numpyro.sample("mean", distributions.Normal(0, 5))
    scale = numpyro.sample("scale", distributions.HalfCauchy(5))
    with numpyro.plate("schools", len(y)):
        effect = numpyro.sample("effect", distributions.Normal(0, 1))
        numpyro.sample("y", distributions.Normal(mean + scale * effect, sigma), obs=y)


def school_densities(which):
    from numpyro.infer.util import initialize_model, log_density

    data = F(28, 8, -3), F(15, 10, 16)
    if which == "potential":
        potential = initialize_model(KEY, eight_schools, model_args=data).potential_fn
        return potential, {"mean": F(4)[0], "scale": F(1)[0], "effect": F(0.2, -0.1, 0.4)}
    density = lambda p: log_density(eight_schools, data, {}, p)[0]
    return density, {"mean": F(4)[0], "scale": F(3)[0], "effect": F(0.2, -0.1, 0.4)}


table("numpyro_model", {name: name for name in ("potential", "log_density")}, school_densities)


def of_blackjax(which):
    import blackjax

    density = lambda x: -0.5 * jnp.sum(x["a"] ** 2) - jnp.sum(jnp.exp(x["b"]) - x["b"])
    point = {"a": F(0.3, -0.8), "b": F(0.4)[0]}
    if which == "energy":

        def energy(x):
            metric = blackjax.mcmc.metrics.default_metric(jnp.ones(3))
            step = blackjax.mcmc.integrators.velocity_verlet(density, metric.kinetic_energy)
            momentum = jax.tree.map(jnp.ones_like, x)
            state = blackjax.mcmc.integrators.new_integrator_state(density, x, momentum)
            state = lax.fori_loop(0, 3, lambda _, state: step(state, 0.1), state)
            return metric.kinetic_energy(state.momentum) - state.logdensity

        return energy, point
    if which == "elbo":
        from blackjax.vi import meanfield_vi

        def elbo(p):
            draws = meanfield_vi._sample(KEY, p["mean"], p["log_scale"], 3)
            of_guide = meanfield_vi.generate_meanfield_logdensity(p["mean"], p["log_scale"])
            return jnp.mean(jax.vmap(lambda x: of_guide(x) - density(x))(draws))

        return elbo, {"mean": point, "log_scale": jax.tree.map(np.zeros_like, point)}

    return lambda x: blackjax.nuts.init(x, density).logdensity, point


table("blackjax", {name: name for name in ("logdensity", "energy", "elbo")}, of_blackjax)

# --- Gaussian processes ------------------------------------------------------------------------------------------

KERNELS = {
    "ExpSquared": lambda k, p: p["a"] * k.ExpSquared(scale=p["s"]),
    "Exp": lambda k, p: p["a"] * k.Exp(scale=p["s"]),
    "Matern32": lambda k, p: p["a"] * k.Matern32(scale=p["s"]),
    "Matern52": lambda k, p: p["a"] * k.Matern52(scale=p["s"]),
    "ExpSineSquared": lambda k, p: p["a"] * k.ExpSineSquared(scale=p["s"], gamma=p["g"]),
    "RationalQuadratic": lambda k, p: p["a"] * k.RationalQuadratic(scale=p["s"], alpha=p["g"]),
    "Cosine": lambda k, p: p["a"] * k.Cosine(scale=p["s"]),
    "Polynomial": lambda k, p: p["a"] * k.Polynomial(order=2, scale=p["s"], sigma=p["g"]),
    "quasisep_Matern32": lambda k, p: k.quasisep.Matern32(scale=p["s"], sigma=p["a"]),
    "quasisep_SHO": lambda k, p: k.quasisep.SHO(omega=1 + p["g"], quality=p["s"], sigma=p["a"]),
    "quasisep_Celerite": lambda k, p: k.quasisep.Celerite(p["a"], 0.1 * p["g"], p["s"], 2.0),
}


def gaussian_process(kernel):
    import tinygp

    x, y = np.sort(random(5)), random(5, seed=1)

    def likelihood(p):
        made = kernel(tinygp.kernels, p)
        points = x[:, None] if isinstance(made, tinygp.kernels.Product) else x
        return tinygp.GaussianProcess(made, points, diag=p["noise"] ** 2).log_probability(y)

    return likelihood, {"a": F(1.3)[0], "s": F(0.9)[0], "g": F(0.6)[0], "noise": F(0.5)[0]}


table("tinygp", KERNELS, gaussian_process)

OBJECTIVES = ("conjugate_mll", "conjugate_loocv", "non_conjugate_mll", "elbo", "collapsed_elbo")


def of_gpjax(name):
    import gpjax

    x = np.sort(random(6))[:, None].astype(float)
    data = gpjax.Dataset(jnp.asarray(x), jnp.asarray(np.sin(x)))
    prior = gpjax.gps.Prior(gpjax.kernels.RBF() + gpjax.kernels.Matern32(), gpjax.mean_functions.Constant())
    posterior = prior * gpjax.likelihoods.Gaussian(data.n)
    objective = getattr(gpjax.objectives, name)
    if name == "non_conjugate_mll":
        data = gpjax.Dataset(data.X, jnp.asarray((x > 0).astype(float)))
        posterior = (prior * gpjax.likelihoods.Bernoulli(data.n)).init_latent(data.n)
    if name == "elbo":
        posterior = gpjax.variational_families.VariationalGaussian(posterior, data.X[::2])
    if name == "collapsed_elbo":
        posterior = gpjax.variational_families.CollapsedVariationalGaussian(posterior, data.X[::2])
    return lambda model: objective(model, data), posterior


# The versions of GPJax that there are take no JAX later than 0.10.
if jax.__version_info__ < (0, 11):
    table("gpjax", {name: name for name in OBJECTIVES}, of_gpjax, x64=True)

# --- losses with stops and straight-through steps ----------------------------------------------------------------


def proximal_policy(p):
    """The clipped objective of PPO, its value and its entropy."""
    states, actions, advantages = random(6, 3), np.array([0, 1, 1, 0, 1, 0]), random(6, seed=2)
    log_p = jax.nn.log_softmax(jnp.tanh(states @ p["policy"]) @ p["head"])
    old = lax.stop_gradient(log_p) + 0.2 * random(6, 2, seed=3)
    chosen = lambda table: jnp.take_along_axis(table, actions[:, None], 1)[:, 0]
    ratio = jnp.exp(chosen(log_p) - chosen(old))
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    value = (states @ p["value"] - lax.stop_gradient(states @ p["value"] + advantages)) ** 2
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return jnp.mean(-surrogate + 0.5 * value - 0.01 * entropy)


def simple_siamese(p):
    """SimSiam: each view predicts the other, which is stopped."""
    project = lambda x: jnp.tanh(x @ p["encoder"])
    unit = lambda z: z / jnp.linalg.norm(z, axis=1, keepdims=True)
    distance = lambda z, other: -jnp.mean(jnp.sum(unit(z @ p["predictor"]) * unit(lax.stop_gradient(other)), axis=1))
    one, other = project(random(4, 3)), project(random(4, 3, seed=1))
    return distance(one, other) / 2 + distance(other, one) / 2


def vector_quantised(p):
    """A VQ-VAE: the nearest code, straight-through, with both of its terms."""
    z = jnp.tanh(random(4, 3) @ p["encoder"])
    nearest = jnp.argmin(jnp.sum((z[:, None] - p["codes"]) ** 2, axis=-1), axis=1)
    code = p["codes"][nearest]
    through = z + lax.stop_gradient(code - z)
    terms = (code - lax.stop_gradient(z)) ** 2 + 0.25 * (z - lax.stop_gradient(code)) ** 2
    return jnp.mean((through @ p["decoder"] - 0.3) ** 2) + jnp.mean(terms)


def target_network(p):
    """Double Q-learning with a target network."""
    states, following, rewards = random(5, 3), random(5, 3, seed=1), random(5, seed=2)
    q = states @ p["online"]
    best = jnp.argmax(following @ p["online"], axis=1)
    target = lax.stop_gradient(rewards + 0.9 * jnp.take_along_axis(following @ p["target"], best[:, None], 1)[:, 0])
    return jnp.mean(optax.losses.huber_loss(q[:, 0], target))


STOPPED = {
    "proximal_policy": (proximal_policy, {"policy": random(3, 4), "head": random(4, 2), "value": random(3)}),
    "simple_siamese": (simple_siamese, {"encoder": random(3, 4), "predictor": random(4, 4)}),
    "vector_quantised": (
        vector_quantised,
        {"encoder": random(3, 2), "codes": random(5, 2, seed=4), "decoder": random(2, 1)},
    ),
    "target_network": (target_network, {"online": random(3, 2), "target": random(3, 2, seed=5)}),
}
table("stopped", STOPPED, lambda row: row)
