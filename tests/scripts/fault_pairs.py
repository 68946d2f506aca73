"""Two planted faults in one function: the report of `check` on a leaf must not depend on faults in other leaves.

    python tests/scripts/fault_pairs.py --seed 0 --count 100

draws pairs from the gallery (`tests/helpers/gallery`), adds the two functions, each with leaves of its own, and prints
where a leaf has another verdict, or other findings than notes, than it has alone.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import partgrad as pg

sys.path.insert(0, str(Path(__file__).parent.parent))
from helpers.gallery import GALLERY


def total(output):
    return sum(jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(output) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def checked(faults):
    """The verdict on each leaf, and what was found in it; None if something is said of the whole function."""
    loss = lambda model: sum(total(f.function(model[f.name], *f.args[1:])) for f in faults)
    model = {fault.name: fault.args[0] for fault in faults}
    report = pg.check(loss, progress=False)(model)
    if not all(finding.leaves for finding in report.findings):
        return None
    told = {}
    for finding in report.findings:
        for leaf in finding.leaves if finding.severity != "info" else ():
            told.setdefault(leaf, set()).add((finding.kind, finding.reason, finding.where))
    return {row.path: (row.verdict, told.get(row.path, set())) for row in report.rows if row.verdict is not None}


def can_join(fault):
    """Whether a fault is one of single leaves of a dict, in a function whose value is finite."""
    if fault.x64 or fault.wrt is not None or not isinstance(fault.args[0], dict):
        return False
    return bool(np.isfinite(total(fault.function(*fault.args))))


def main(seed, count):
    faults = list(filter(can_join, GALLERY))
    pairs = random.Random(seed).sample(list(itertools.combinations(faults, 2)), count)
    alone, tried, differing = {}, 0, 0
    for pair in pairs:
        for fault in pair:
            if fault.name not in alone:
                alone[fault.name] = checked([fault])
        if not all(alone[fault.name] for fault in pair):
            continue
        tried += 1
        together, expected = checked(pair) or {}, alone[pair[0].name] | alone[pair[1].name]
        different = sorted(leaf for leaf in expected if together.get(leaf) != expected[leaf])
        differing += bool(different)
        for leaf in different:
            print(
                *(fault.name for fault in pair),
                leaf,
                "\n  alone   ",
                expected[leaf],
                "\n  together",
                together.get(leaf),
            )
    print(f"{differing} of {tried} pairs differ")
    return differing > 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    sys.exit(main(arguments.seed, arguments.count))
