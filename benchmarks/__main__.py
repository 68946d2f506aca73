"""The one entry: `python -m benchmarks [SECTION ...] [--quick] [--page docs/compare/benchmarks.md]`."""

import argparse
import sys
import time
from pathlib import Path

from . import carbon_dioxide, core, selection
from .page import write
from .timing import Effort, Row, environment

# What is compared with peers: a title for each section, and what measures it.
COMPARED = {
    "structure": ("Models as pytrees", core.structure),
    "gradients": ("Gradients", core.gradients),
    "training": ("Training with a part held", core.training),
    "coordinates": ("Other coordinates", core.coordinates),
    "selection": ("Selection in large trees", selection.selecting),
    "callables": ("Selection by a callable", selection.callables),
    "likelihood": ("A Gaussian process on real data", carbon_dioxide.likelihood),
    "imports": ("Import", core.imports),
}
# What measures itself, with arguments of its own.
OTHERS = ("check", "double_where", "intermediates", "stacked_layers")


def main(arguments: list[str]) -> int:
    """Measure, print, and write the page if one is asked for; return how many bounds are missed."""
    if arguments[:1] and arguments[0] in OTHERS:
        return _other(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time partgrad beside its peers, in one process, as ratios of medians.",
        epilog="`check`, `double_where`, `intermediates` and `stacked_layers` have arguments of their own.",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(COMPARED)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, for a busy machine")
    parser.add_argument("--page", type=Path, help="write this Markdown page, and a picture beside it")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(COMPARED):
        parser.error(f"there is no section {', '.join(sorted(unknown))}")

    clock = time.process_time if options.cpu else time.perf_counter
    effort = Effort(3, 0.001, clock, True) if options.quick else Effort(clock=clock)
    groups: dict[str, list[Row]] = {}
    where = environment() + (", CPU time" if options.cpu else "")
    print(where, flush=True)
    for name in options.sections or COMPARED:
        title, measure = COMPARED[name]
        print(f"\n{title}", flush=True)
        groups[title] = []
        for row in measure(effort):
            groups[title].append(row)
            print("\n".join(row.lines()), flush=True)
    missed = [
        f"{row.title} / {peer}" for row in _all(groups) for peer, got, most in row.ratios() if most and got > most
    ]
    print(f"\n{len(missed)} bounds missed{': ' if missed else ''}{', '.join(missed)}")
    if options.page is not None:
        write(groups, where, options.page, " ".join(["python -m benchmarks", *arguments]))
    return 0


def _all(groups: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in groups.values() for row in rows]


def _other(name: str, arguments: list[str]) -> int:
    if name == "check":
        from . import check

        check.main(arguments)
    elif name == "stacked_layers":
        from . import stacked_layers

        return stacked_layers.main(arguments)
    elif name == "intermediates":
        from . import intermediates

        return intermediates.main(arguments)
    else:
        from . import double_where

        double_where.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
