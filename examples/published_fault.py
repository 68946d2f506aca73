# %% [markdown]
"""
A wrong gradient in a published library, before and after
=========================================================

jaxlie 1.5.0 computes with rigid motions. `SE3.exp` turns a twist into a motion: so much forward while turning by an
angle. At an angle of zero it takes a branch of its own, because its formula divides by the angle. The value there is
right. The derivative is twice what it should be, and an optimiser that starts at "no rotation" starts at that point.
No test of the library looks there. `pg.check` compares the derivative with differences, and says in which call a
branch of its own is taken::

    python -m pip install -e ".[docs]" && python examples/published_fault.py [--out published_fault.png]
"""

# %%
import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlie
import numpy as np
from matplotlib.figure import Figure

import partgrad as pg

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description="A wrong gradient in jaxlie 1.5.0.")
parser.add_argument("--out", type=Path, default=Path("published_fault.png"), help="where the picture goes")
# A notebook has arguments of its own.
OUT = parser.parse_known_args()[0].out

# %% [markdown]
# Before
# ------
#
# One metre forward while turning by an angle: how far does that lead to the side? The answer is (1 - cos a) / a, whose
# slope at zero is 1/2.


# %%
def to_the_side(angle: jax.Array) -> jax.Array:
    """How far to the side one metre forward leads while turning by an angle (rad)."""
    twist = jnp.zeros(6).at[0].set(1.0).at[5].set(angle)
    return jaxlie.SE3.exp(twist).translation()[1]


report = pg.check(to_the_side)(jnp.array(0.0))
print(report)

# %% [markdown]
# After
# -----
#
# The branch is in `_SO3_jac_left`. The report says what to do: "give that branch the slope of the points beside it".
# For a small angle the library takes the rotation itself as the matrix that turns velocity into displacement. That
# matrix is I + K / 2 + K² / 6 + ..., with the generator K of the rotation. With these terms in the branch, the check
# is clean.


# %%
def left_jacobian(rotation: jax.Array) -> jax.Array:
    """The matrix that turns a constant velocity into a displacement (Solà et al. 2018, arXiv:1812.01537, eq. 145)."""
    squared = rotation @ rotation
    is_small = squared < 1e-6
    angle = jnp.sqrt(jnp.where(is_small, 1.0, squared))
    first = jnp.where(is_small, 0.5 - squared / 24, (1 - jnp.cos(angle)) / angle**2)
    second = jnp.where(is_small, 1 / 6 - squared / 120, (angle - jnp.sin(angle)) / angle**3)
    x, y, z = rotation
    generator = jnp.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return jnp.eye(3) + first * generator + second * generator @ generator


def mended(angle: jax.Array) -> jax.Array:
    """The same as `to_the_side`, with the series in the branch."""
    return (left_jacobian(jnp.zeros(3).at[2].set(angle)) @ jnp.array([1.0, 0.0, 0.0]))[1]


print(pg.check(mended)(jnp.array(0.0)))

# %% [markdown]
# The slope around zero
# ---------------------
#
# The interval on which the library's branch is taken is so narrow that a plot of the slope hardly shows it; but it is
# where every fit starts.

# %%
angles = np.concatenate([-np.geomspace(1, 1e-12, 200), [0.0], np.geomspace(1e-12, 1, 200)])
slopes = {name: jax.vmap(jax.grad(f))(angles) for name, f in (("jaxlie 1.5.0", to_the_side), ("mended", mended))}


def true_slope(angle: float) -> float:
    """The derivative of (1 - cos a) / a, by its series where that is exact to round-off."""
    return 0.5 - angle**2 / 8 if abs(angle) < 1e-3 else float((angle * np.sin(angle) - 1 + np.cos(angle)) / angle**2)


truth = np.array([true_slope(angle) for angle in angles])
agree = []
for name, expected, got in (
    ("jaxlie's slope at zero, where 0.5 is right", 1.0, float(slopes["jaxlie 1.5.0"][200])),
    ("the mended slope at zero", 0.5, float(slopes["mended"][200])),
    ("its largest error anywhere", 0.0, float(np.abs(slopes["mended"] - truth).max())),
):
    agree.append(abs(got - expected) < 1e-8)
    print(f"{name:44} expected {expected:.1f}  got {got:8.2g}  {'ok' if agree[-1] else 'MISSED'}")


# %%
def draw() -> Figure:
    """Draw both slopes against the angle, on a scale that shows the branch."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(angles, slopes["jaxlie 1.5.0"], color="C3", label="jaxlie 1.5.0")
    axis.plot(angles, slopes["mended"], color="C0", linestyle="--", label="mended")
    axis.set_xscale("symlog", linthresh=1e-9)
    axis.set(xlabel="angle (rad)", ylabel="slope (m/rad)", ylim=(0, 1.1), xticks=[-1, -1e-4, -1e-8, 0, 1e-8, 1e-4, 1])
    axis.legend(frameon=False, loc="lower center")
    return figure


draw().savefig(OUT, dpi=200)
print(f"\nPicture: {OUT}")
if not all(agree):
    raise SystemExit("A number was missed.")
