"""What it costs a training step to count NaN and inf by slot (nonfinite.py, train/nonfinite.py): at most 1 %.

    python -m benchmarks.nonfinite [--size S M] [--recipes mxfp8 nvfp4 delayed_scaling] [--modes auto off]

The same Trainer twice, alternated in one run: as it is, and with kernels that are told no slot and steps that end
without sums. Each logs as often as a run does by default. ms: medians of turns; cost_pct: of the step without.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from unittest import mock

from benchmarks import rows
from benchmarks.step import Data, Ours, Prepared, alternated
from benchmarks.step_cases import MODES, SIZES
from hqsweep.ops.quantize import nonfinite
from hqsweep.train.loop import Step

COLUMNS = ("size", "recipe", "mode", "ran", "counted_ms", "uncounted_ms", "cost_pct", "pass")
RECIPES = ("mxfp8", "nvfp4", "delayed_scaling")
GOAL_PCT = 1.0


class Uncounted(Ours):
    """A step that notes nothing."""

    def __init__(self, *case: object) -> None:
        super().__init__(*case)
        self.trainer.nonfinite.end_step = lambda *_: None
        self.slots: dict = {}

    def __call__(self) -> Step:
        unnumbered = mock.patch.object(nonfinite, "slot_number", lambda *_: nonfinite.NOBODY)
        with unnumbered, mock.patch.object(nonfinite, "_last", self.slots):
            return super().__call__()


def measure(name: str, recipe: str, mode: str, args: argparse.Namespace) -> rows.Row:
    """The row of one case."""
    size = SIZES[name]
    data = Data(size, args.device)
    builds = [partial(kind, size, data, recipe, mode, args.device) for kind in (Ours, Uncounted)]
    cases = [Prepared(build, args.device, is_deterministic=True) for build in builds]
    counted, uncounted = (1e3 * seconds for seconds in alternated(cases, args.steps or size.turn, args.turns))
    cost = 100 * (counted / uncounted - 1)
    times = {"counted_ms": counted, "uncounted_ms": uncounted, "cost_pct": cost, "pass": cost <= GOAL_PCT}
    return {"ran": cases[0].call.ran} | times


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["auto", "off"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, help="in a turn (default: of the size)")
    rows.add_arguments(parser, ("time",))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    writer = rows.Writer("nonfinite", args.device, args)
    for name, recipe, mode in product(args.size, args.recipes, args.modes):
        named = {"size": name, "recipe": recipe, "mode": mode}
        writer.attempt(named, partial(measure, name, recipe, mode, args))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
