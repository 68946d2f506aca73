"""`python -m partgrad audit`: a script or a module runs as it would by itself, and then its gradients are checked."""

import __future__

import argparse
import ast
import atexit
import builtins
import contextlib
import functools
import importlib.util
import json
import operator
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._programs import is_users
from ..errors import PartgradError
from .audit import Audited, audited
from .page import page
from .recorder import Recorder, wait
from .report import data, text
from .settings import Settings, from_project

_WRONG_USAGE = 2
# What `from __future__ import` says to the compiler.
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `audit`, and return the exit status: the script's own, else 1 if a gradient is wrong."""
    parser = _parser()
    # Not intermixed: what follows the script is the script's.
    given = parser.parse_args(arguments)
    options = {"everything": given.all, "search": given.search, "seconds": given.seconds, "total": given.total}
    options["calls"] = tuple(given.calls)
    if not given.arguments:
        parser.error("expected a script, or -m and a module")
    target, *rest = given.arguments
    if not given.module and not Path(target).is_file():
        parser.error(f"there is no script {target!r} in {Path.cwd()}")
    if given.module and not _is_module(target):
        parser.error(f"there is no module {target!r} in {Path.cwd()} or among the installed ones")
    for file in (given.json, given.html):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(file.absolute().parent)!r} to write {file.name!r} to")
    packages = [target.partition(".")[0]] if given.module else []
    try:
        settings = from_project(Path.cwd(), packages=packages, **options)
    except PartgradError as error:
        parser.error(str(error))
    recorder = Recorder(settings)
    status = _run(recorder, target, rest, given.module)
    result = audited(recorder, settings, _progress())
    return _report(result, settings, given, status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m partgrad")
    audit = parser.add_subparsers(required=True, metavar="audit").add_parser(
        "audit", help="run a script, and check every gradient that it takes"
    )
    audit.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    audit.add_argument("--all", action="store_true", help="also functions of other libraries")
    calls = "also check the functions with such qualified names that are called, as 'package.physics.*'"
    audit.add_argument("--calls", action="append", default=[], metavar="GLOB", help=calls)
    audit.add_argument("--search", action="store_true", help="also search for bad points nearby")
    strict = "what makes the exit status 1: errors, or a gradient that is cut too (%(default)s)"
    audit.add_argument("--strict", choices=("errors", "stopped"), default="errors", help=strict)
    audit.add_argument("--seconds", type=float, default=20.0, help="the most for one function (%(default)s)")
    audit.add_argument("--total", type=float, help="the most for all functions (3 for each, and at least 300)")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    audit.add_argument("--html", type=Path, metavar="FILE", help="write the findings as a page")
    audit.add_argument("--verbose", action="store_true", help="print notes too")
    audit.add_argument("arguments", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="what to run")
    return parser


def _is_module(name: str) -> bool:
    path = list(sys.path)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path[:] = path


def _run(recorder: Recorder, target: str, rest: Sequence[str], is_module: bool) -> int:
    """Run the script as Python does, and return its exit status."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *rest]
    # With `python -P` it is an entry of PYTHONPATH.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)
    recorder.install()
    recorder.see_calls()
    try:
        with _handlers_at_exit():
            source = _source_of(target, is_module)
            if source is not None and recorder.swapped.is_asked:
                _run_in_steps(source, recorder)
            elif is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                # As the interpreter does: the script may change the folder.
                runpy.run_path(os.path.abspath(target), run_name="__main__")
    except SystemExit as stop:
        return _status_of(stop.code)
    except BaseException as error:
        # As the interpreter does: the traceback of the script, without the frames that run it.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames or error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        wait()
        recorder.remove()
        sys.argv, sys.path[:] = argv, path
    return 0


class Source(NamedTuple):
    """The source of a script or of a module that is run as one."""

    file: str
    text: bytes
    spec: Any


def _source_of(target: str, is_module: bool) -> Source | None:
    """The source of what is to run; None if it has none, such as an archive."""
    if not is_module:
        return Source(os.path.abspath(target), Path(target).read_bytes(), None) if target.endswith(".py") else None
    spec = importlib.util.find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target}.__main__")
    file = getattr(spec, "origin", None) or ""
    return Source(file, Path(file).read_bytes(), spec) if file.endswith(".py") else None


def _run_in_steps(source: Source, recorder: Recorder) -> None:
    """Run a script statement by statement, so that its own functions are seen as soon as they are there."""
    tree = ast.parse(source.text, source.file)
    flags = compile(tree, source.file, "exec", dont_inherit=True).co_flags & _FUTURE
    module: Any = types.ModuleType("__main__", ast.get_docstring(tree, clean=False))
    module.__file__, module.__builtins__, module.__spec__ = source.file, builtins, source.spec
    module.__package__ = None if source.spec is None else source.spec.parent
    module.__loader__ = None if source.spec is None else source.spec.loader
    before, sys.argv[0] = sys.modules["__main__"], sys.argv[0] if source.spec is None else source.file
    sys.modules["__main__"] = module
    try:
        for statement in tree.body:
            step = ast.Module([statement], [])
            exec(compile(step, source.file, "exec", flags, dont_inherit=True), vars(module))
            recorder.swapped.extend([module])
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _handlers_at_exit() -> Iterator[None]:
    """Run at the end what the user's code registers with `atexit` meanwhile, as it may take gradients too."""
    module: Any = atexit
    register, unregister, handlers = module.register, module.unregister, list[tuple[Any, Callable[[], Any]]]()

    def registering(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_users(sys._getframe(1).f_code.co_filename):
            return register(function, *args, **kwargs)
        handlers.append((function, lambda: function(*args, **kwargs)))
        return function

    def unregistering(function: Any) -> None:
        handlers[:] = [handler for handler in handlers if handler[0] != function]
        unregister(function)

    module.register, module.unregister = registering, unregistering
    try:
        yield
    finally:
        while handlers:
            try:
                handlers.pop()[1]()
            except BaseException:
                # As the interpreter does.
                traceback.print_exc()
        module.register, module.unregister = register, unregister


def _status_of(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _report(result: Audited, settings: Settings, given: argparse.Namespace, status: int) -> int:
    print(f"\n== gradients\n{text(result, settings, is_verbose=given.verbose)}", file=sys.stderr)
    for file, written in (
        (given.json, lambda: json.dumps(data(result, settings), indent=1)),
        (given.html, lambda: page(result, settings)),
    ):
        if file is not None:
            file.write_text(written(), encoding="utf-8")
    return status or int(result.errors > 0 or (given.strict == "stopped" and result.stopped > 0))


def _progress() -> Callable[[str], object]:
    """What shows a line that the next one replaces, on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return lambda line: None
    return lambda line: sys.stderr.write(f"\r\x1b[K{line[:79]}")
