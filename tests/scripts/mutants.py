"""Mutation testing: do the tests notice when a line of partgrad changes?

    export PYTHONPATH=src JAX_COMPILATION_CACHE_DIR=~/.cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    python tests/scripts/mutants.py map       # which quick tests enter which line
    python tests/scripts/mutants.py draw 300  # a random sample of all mutants
    python tests/scripts/mutants.py run 100   # the tests of the next hundred of them, and the share that is killed
    python tests/scripts/mutants.py again     # the survivors once more, with tests (after another `map`) and code as they are now

The operators are mutmut's. Running them is our own. mutmut puts a function of its own in front of each that it mutates,
which our errors and warnings would take for the user's line, so it passes over what is decorated; and it forks after JAX
has started threads, which no child inherits. Here a process that has imported other libraries, and neither partgrad nor
the tests, forks for each mutant, and the child imports partgrad with one module changed.

Not mutated is what only a person reads: strings of several words, f-strings, `raise` statements, and what errors are made
of; nor annotations, overloads and type variables, decorators, `strict=True`, and calls of `isinstance` and `len`. Of the
many mutants of one call's arguments, which any test kills, one may be drawn.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import libcst
import pytest
from hypothesis import Phase, settings
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
MAP, SAMPLE, LOG = BUILD / "mutants_map.json", BUILD / "mutants.json", BUILD / "mutant.log"
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"
PACKAGES = ("_selection", "_marks", "_transforms", "_double_where")
# The rest of `_double_where` runs programs; these say where masks go.
RULES = ["masks", "moves", "products", "solves", "known", "fed", "walk", "masked"]
MODULES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / "src" / "partgrad" / package).glob("*.py"))
    if package != "_double_where" or path.stem in RULES
]
# Tests of `check`, of the pages and of other commands say nothing about these packages.
OTHERS = ("audit", "benchmarks", "check", "docs", "example", "mutants", "soak", "types")
TESTS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if path.parent.name in ("tests", "internal") and not path.stem.removeprefix("test_").startswith(OTHERS)
]
# CPU seconds: of a test that counts as quick, and of the tests that a mutant has to survive.
QUICK, ENOUGH = 2.0, 6.0
# Seconds after which a mutant hangs.
LIMIT = 240
UNMUTATED_CALLS = {"isinstance", "len", "cast"}


@dataclasses.dataclass(frozen=True, eq=False)
class Mutant:
    """A change of one node, in a function, on lines from the start of its statement to the node."""

    path: Path
    function: str
    lines: list[int]
    call: libcst.Call | None
    module: libcst.Module
    nodes: tuple[libcst.CSTNode, libcst.CSTNode]

    @functools.cached_property
    def entry(self):
        """What the sample keeps of it: its name says which lines differ."""
        source, code = self.module.code, self.module.deep_replace(*self.nodes).code
        before, after = (collections.Counter(text.splitlines()) for text in (source, code))
        old, new = (" ".join(line.strip() for line in lines) for lines in (before - after, after - before))
        name = f"{self.path.parent.name}.{self.path.stem} {self.function}: {old} -> {new}"
        return {"name": name, "path": str(self.path), "lines": self.lines, "source": source, "code": code}


def is_unmutated(node):
    match node:
        case libcst.FunctionDef(decorators=[libcst.Decorator(decorator=libcst.Name(value="overload"))]):
            return True
        case libcst.Annotation() | libcst.Decorator() | libcst.Raise() | libcst.FormattedString():
            return True
        case libcst.AnnAssign(annotation=libcst.Annotation(annotation=libcst.Name(value="TypeAlias"))):
            return True
        case libcst.Assign(value=libcst.Call(func=libcst.Name(value="TypeVar" | "TypeVarTuple" | "ParamSpec"))):
            return True
        case (
            libcst.Assign(value=libcst.Subscript(value=libcst.Name(value="Literal")))
            | libcst.Arg(keyword=libcst.Name(value="strict"))
        ):
            return True
        case libcst.SimpleString():
            return " " in node.value
        case libcst.Call(func=libcst.Name(value=name)):
            return name in UNMUTATED_CALLS or name.endswith("Error")
    return False


def strictness(node):
    arguments = node.args if isinstance(node, libcst.Call) else ()
    return [one for one in arguments if one.keyword is not None and one.keyword.value == "strict"]


def mutants_of(path):
    """All mutants of a module."""
    wrapper = MetadataWrapper(libcst.parse_module((ROOT / path).read_text()), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)

    def below(node, function, start):
        if is_unmutated(node):
            return
        if isinstance(node, libcst.FunctionDef | libcst.ClassDef):
            function = f"{function}.{node.name.value}".lstrip(".")
        line = positions[node].start.line if node in positions else start
        if isinstance(node, libcst.SimpleStatementLine | libcst.BaseCompoundStatement):
            start = line
        for kind, operator in mutation_operators:
            call = node if operator is operator_arg_removal else None
            for changed in operator(node) if isinstance(node, kind) else ():
                if strictness(node) == strictness(changed):
                    lines = list(range(start, line + 1))
                    yield Mutant(path, function, lines, call, wrapper.module, (node, changed))
        for child in node.children:
            yield from below(child, function, start)

    return list(below(wrapper.module, "", 1))


def sample(count, seed):
    """The entries of so many mutants, of all that are Python."""
    found = [mutant for path in MODULES for mutant in mutants_of(path)]
    random.Random(seed).shuffle(found)
    calls, drawn = set(), []
    for mutant in found:
        if len(drawn) < count and (mutant.call is None or mutant.call not in calls):
            calls.add(mutant.call)
            with contextlib.suppress(SyntaxError):
                compile(mutant.entry["code"], "", "exec")
                drawn.append(mutant.entry)
    return drawn


class Changed(importlib.machinery.SourceFileLoader):
    """Finds a module, and loads other code for its file, which tracebacks still name."""

    def __init__(self, path, code):
        name = ".".join(Path(path).relative_to("src").with_suffix("").parts).removesuffix(".__init__")
        super().__init__(name, str(ROOT / path))
        self.code = code

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname):
        return compile(self.code, self.path, "exec", dont_inherit=True)


class Entered:
    """A plugin of pytest: the CPU seconds of each test that passes, and which tests enter each line of the modules."""

    def __init__(self):
        self.lines = {str(ROOT / path): collections.defaultdict(set) for path in MODULES}
        self.seconds, self.others, self.test = {}, set(), None
        tool, line = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "mutants")
        sys.monitoring.register_callback(tool, line, self.enter)
        sys.monitoring.set_events(tool, line)

    def enter(self, code, line):
        lines = self.lines.get(code.co_filename)
        return sys.monitoring.DISABLE if lines is None else lines[line].add(self.test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test, start = item.nodeid, time.process_time()
        result = yield
        self.test, self.seconds[item.nodeid] = None, time.process_time() - start
        return result

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.others.add(report.nodeid)


class Chosen:
    """A plugin of pytest: these tests alone, in this order; and what failed first."""

    def __init__(self, tests):
        self.place = {test: place for place, test in enumerate(tests)}
        self.failed = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((item for item in items if item.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def run_pytest(plugin, *arguments):
    """Run pytest as in the core tier, with laws that draw the same each time, and do not look for simple examples."""
    settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")
    options = ["-q", "-n0", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning"]
    return pytest.main([*options, *arguments], plugins=[plugin])


def measure(file):
    """The seconds of each quick test of a file, which enter each line, and the libraries that were imported."""
    entered = Entered()
    run_pytest(entered, file)
    quick = {test: cost for test, cost in entered.seconds.items() if cost < QUICK and test not in entered.others}
    lines = {
        str(path): {line: sorted(tests & set(quick)) for line, tests in entered.lines[str(ROOT / path)].items()}
        for path in MODULES
    }
    places = [(name, getattr(module, "__file__", None) or "") for name, module in sys.modules.items()]
    return {"seconds": quick, "lines": lines, "libraries": [name for name, place in places if "site-packages" in place]}


def chosen(path, lines, measured):
    """The tests of each file that enter lines, or else the module, as many of the quickest as there is time for."""
    seconds = {test: cost for of in measured.values() for test, cost in of["seconds"].items()}
    entering = [item for of in measured.values() for item in of["lines"].get(path, {}).items()]
    tests = {test for line, tests in entering if int(line) in lines for test in tests}
    tests = sorted(tests or {test for _, tests in entering for test in tests}, key=lambda test: (seconds[test], test))
    spent = itertools.accumulate(map(seconds.get, tests))
    files = {}
    for test, so_far in zip(tests, spent, strict=True):
        if so_far < ENOUGH:
            files.setdefault(test.split("::")[0], []).append(test)
    # The file that is about this code has most of its tests here.
    return sorted(files.items(), key=lambda item: -len(item[1]) / len(measured[item[0]]["seconds"]))


def attempt(path, code, files):
    """The first test that fails, or None."""
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.meta_path.insert(0, Changed(path, code))
    for file, tests in files:
        plugin = Chosen(tests)
        if run_pytest(plugin, "-x", file) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return plugin.failed or f"{file} cannot be imported"
    return None


def in_child(limit, function, *arguments):
    """What a function returns in a child; "timeout" when it takes too long, or "crash" when the child ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            with os.fdopen(writing, "w") as pipe:
                json.dump(function(*arguments), pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if status == 0:
        return json.loads(answer)
    return "timeout" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "crash"


def is_found(entry):
    """Whether a mutant is there in the code as it is now."""
    function = entry["name"].split(":")[0].split(" ")[-1]
    if (ROOT / entry["path"]).read_text() != entry["source"]:
        alike = [mutant.entry for mutant in mutants_of(Path(entry["path"])) if mutant.function == function]
        entry |= next((other for other in alike if other["name"] == entry["name"]), {})
    return (ROOT / entry["path"]).read_text() == entry["source"]


def run(entries, drawn, measured):
    """Give each entry its outcome: the test that failed, "survived", "timeout", "crash", or "gone" from the code."""
    for entry in entries:
        start, outcome = time.monotonic(), "gone"
        if is_found(entry):
            files = chosen(entry["path"], entry["lines"], measured)
            outcome = in_child(LIMIT, attempt, entry["path"], entry["code"], files) or "survived"
        entry["outcome"] = outcome
        entry.setdefault("first", outcome)
        SAMPLE.write_text(json.dumps(drawn, indent=1))
        print(f"{time.monotonic() - start:4.0f} s  {entry['name']}\n        {outcome}", flush=True)


def wilson(part, whole, z=1.96):
    """A 95 % confidence interval of a share."""
    middle = (part + z * z / 2) / (whole + z * z)
    reach = z / (whole + z * z) * math.sqrt(part * (whole - part) / whole + z * z / 4)
    return middle - reach, middle + reach


def report(drawn):
    """Print the share killed, of those that are not known to be equivalent, at first and in the last attempt."""
    equivalent = EQUIVALENT.read_text().splitlines()
    done = [entry for entry in drawn if "outcome" in entry and entry["name"] not in equivalent]
    for package in (*PACKAGES, ""):
        for when in ("first", "outcome"):
            tried = [entry for entry in done if entry["name"].startswith(package) and entry[when] != "gone"]
            if tried:
                killed = sum(entry[when] != "survived" for entry in tried)
                low, high = wilson(killed, len(tried))
                share = f"{killed / len(tried):.1%} ({low:.1%} to {high:.1%})"
                print(f"{package or 'all':14} {when:8} {killed:3} of {len(tried):3}: {share}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["map", "draw", "run", "again", "report"])
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--files", nargs="*", default=TESTS, help="the test files that `map` measures again")
    parser.add_argument("--seed", type=int, default=15)
    options = parser.parse_args()
    os.chdir(ROOT)
    BUILD.mkdir(exist_ok=True)
    measured = json.loads(MAP.read_text()) if MAP.exists() else {}
    drawn = json.loads(SAMPLE.read_text()) if SAMPLE.exists() else []
    if options.step == "map":
        for file in options.files:
            measured[file] = in_child(3600, measure, file)
            MAP.write_text(json.dumps(measured))
    elif options.step == "draw":
        SAMPLE.write_text(json.dumps(sample(options.count, options.seed), indent=1))
    elif options.step in ("run", "again"):
        for name in {name for of in measured.values() for name in of["libraries"]}:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        survived = [entry for entry in drawn if entry.get("outcome") == "survived"]
        left = [entry for entry in drawn if "outcome" not in entry][: options.count]
        run(survived if options.step == "again" else left, drawn, measured)
    report(drawn)


if __name__ == "__main__":
    main()
