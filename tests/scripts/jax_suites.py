"""Run JAX's own tests of its transforms with partgrad's in their place, and compare.

    python tests/scripts/jax_suites.py PATH_OF_A_JAX_CHECKOUT [name of a test file ...]

The checkout must be of the version of JAX that is installed. Every test runs twice, once with JAX's transforms and once
with partgrad's; those that pass with the first alone are listed. What is left to differ are the words of errors, and
integers: partgrad has None where JAX has float0. It takes some minutes. The file is also the plugin that pytest loads.
"""

import functools
import os
import pathlib
import subprocess
import sys
import types
from xml.etree import ElementTree

SUITES = ("api_test.py", "custom_api_test.py")
SWITCH = "PARTGRAD_IN_JAX_SUITES"


# --- in the process of the tests -----------------------------------------------------------------------------------


class Module(types.ModuleType):
    """A module as it is, but for some names."""

    def __init__(self, module, replaced):
        super().__init__(module.__name__)
        self.__dict__["_partgrad_module"] = module
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._partgrad_module, name)


def replacements():
    """Partgrad's transforms with the signatures of JAX's."""
    import jax

    import partgrad as pg

    def of_function(name):
        ours, theirs = getattr(pg, name), getattr(jax, name)

        @functools.wraps(theirs)
        def transform(fun, argnums=0, has_aux=False, holomorphic=False, allow_int=False, **options):
            if allow_int or options:
                return theirs(fun, argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int, **options)
            return ours(fun, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic)

        return transform

    names = ("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian")
    return {name: of_function(name) for name in names} | {
        name: getattr(pg, name) for name in ("jvp", "vjp", "linearize")
    }


def pytest_collection_finish(session):
    """Put partgrad's transforms where the test modules look JAX's up; partgrad itself keeps JAX's."""
    if SWITCH not in os.environ:
        return
    import jax
    from jax._src import api

    ours = replacements()
    for module in {item.module for item in session.items}:
        for name, value in list(vars(module).items()):
            if value is jax or value is api:
                setattr(module, name, Module(value, ours))
            elif name in ours and value is getattr(jax, name):
                setattr(module, name, ours[name])


# --- the comparison ------------------------------------------------------------------------------------------------


def outcomes(checkout, suite, ours):
    """For each test that ran, whether it passed."""
    report = pathlib.Path(f"{checkout}/.partgrad-{suite}-{ours}.xml").resolve()
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    places = [pathlib.Path(__file__).parent, *map(pathlib.Path, given)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(place.resolve()) for place in places)}
    environment |= {SWITCH: "1"} if ours else {}
    options = ["-q", "-p", "jax_suites", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={report}", "--tb=line"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/{suite}"],
        cwd=checkout,
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    cases = ElementTree.parse(report).getroot().iter("testcase")
    report.unlink()
    kinds = {"failure", "error", "skipped"}
    results = {f"{case.get('classname')}.{case.get('name')}": [c for c in case if c.tag in kinds] for case in cases}
    return {name: found for name, found in results.items() if all(child.tag != "skipped" for child in found)}


def main(checkout, *suites):
    """Compare, and return how many tests pass with JAX's transforms alone."""
    missing = 0
    for suite in suites or SUITES:
        theirs, ours = outcomes(checkout, suite, ours=False), outcomes(checkout, suite, ours=True)
        passing = [name for name, found in theirs.items() if not found]
        lost = {name: ours[name][0].get("message") for name in passing if ours.get(name)}
        print(f"{suite}: {len(passing)} pass with JAX's transforms, {len(passing) - len(lost)} of them with partgrad's")
        for name, message in lost.items():
            print(f"  {name}\n      {message.splitlines()[0]:.150}")
        missing += len(lost)
    return missing


if __name__ == "__main__":
    main(*sys.argv[1:])
