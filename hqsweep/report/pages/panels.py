"""The figures of a report. SECTIONS is the one list of them: a new figure takes a function in report/figures and an
entry here; pages, pictures, files for paper and contents follow.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.figures import ages, effects, experts, heatmaps, lines, svg
from hqsweep.report.figures.forest import Forest, Speed, forest_of, speed_of
from hqsweep.report.figures.look import Panel
from hqsweep.report.pages import tables
from hqsweep.report.pages.text import TextTable


@dataclass(frozen=True, kw_only=True)
class After:
    """A table below the figures of a section: its name, whether the name is a heading of its own, and a note."""

    name: str
    table: Callable[[Comparison], TextTable]
    note: str = ""
    headed: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """Figures of one kind.

    name, group  the name of their picture under figures/; the part of a page where the section stands
    heading      in HTML; "{baseline}" becomes the name of the baseline
    short        the heading in Markdown
    draw         the figures of a comparison, [] for nothing to draw
    note         the note below them, HTML by the comparison
    shows        the content of a figure whose own heading is names of arms; "" where headings stand alone
    key          whether the figures have lines of arms, so that the key of lines stands above them
    first_alone  whether the first of several figures has a row of its own
    also_with    another section with which this one stands, even without figures
    """

    name: str
    group: str
    heading: str
    short: str
    draw: Callable[[Comparison], Iterable[Panel]]
    note: Callable[[Comparison], str]
    shows: str = ""
    key: bool = False
    first_alone: bool = False
    also_with: str = ""
    after: tuple[After, ...] = ()


def _always(note: str) -> Callable[[Comparison], str]:
    return lambda comparison: note


def _loss_note(comparison: Comparison) -> str:
    if comparison.design == FORK:
        return (
            "Grey: mean over the trunks. Lines in an arm's colour: its forks, mean over trunks, from every point at"
            " which they leave; a fork first keeps the rate of its trunk, then falls to 0.\n"
            "Dotted lines that end in a cross are runs without a result."
        )
    return (
        "Lines: mean over the finished seeds; bands: lowest to highest seed. Dotted lines that end in a cross are runs"
        " without a result."
    )


def _growth_note(comparison: Comparison) -> str:
    return Markup(
        "Training loss of the arm minus that of '{}' on the same batches, in % of the latter, over the steps since both"
        " left the trunk: mean over trunks; bands: lowest to highest trunk.\n"
        "Band around 0: the margin. The verdict is that of the steps after the dotted line, where the learning rate"
        " falls. Dotted in an arm's colour: the fit of its course, and the interval of the part that lasts."
    ).format(comparison.baseline)


def _gap_note(comparison: Comparison) -> str:
    return Markup(
        "Bands in an arm's colour: its own 95&nbsp;% interval over seeds at that step. Band around 0: the margin of"
        " {:g}&nbsp;% of the final loss of '{}'."
    ).format(comparison.margin_pct, comparison.baseline)


SECTIONS = (
    Section(
        name="effects", group="losses", heading="Effects of the factors", short="Effects of the factors",
        draw=effects.effect_panels,
        note=_always(
            "In % of the baseline's loss, with 95&nbsp;% intervals that hold together for all effects; grey: the"
            " interval holds 0. Main effect: mean over the levels of the other factors.\n"
            "Interaction: what both together cost beyond the sum of each alone; below 0 the two overlap."
        ),
        after=(After(name="Effects of the factors", table=tables.effects_table),),
    ),
    Section(
        name="ages", group="losses", heading="What a whole run costs", short="Gap against age",
        draw=ages.age_panels, key=True,
        note=_always(
            "A mark for each fork, at its age; all end at one step. Line: least squares in a trunk, mean over trunks;"
            " band: the verdict's interval at that age.\n"
            "At age 0 is the part that comes at once, at the right end the gap of a run that had the recipe from its"
            " first step. Where the marks bend, the line does not hold."
        ),
    ),
    Section(
        name="growth", group="losses", heading="Growth of the gap", short="Growth of the gap",
        draw=lines.growth_panels, note=_growth_note, key=True, first_alone=True,
    ),
    Section(
        name="gaps", group="losses", heading="Gap to {baseline} over steps", short="Gap over steps",
        draw=lines.gap_panels, note=_gap_note, key=True,
    ),
    Section(
        name="curves", group="losses", heading="Loss", short="Loss",
        draw=lines.loss_panels, note=_loss_note, key=True,
    ),
    Section(
        name="sqnr", group="errors", heading="Quantization error: SQNR by layer, tensor and direction",
        short="Quantization error: SQNR in dB", draw=heatmaps.sqnr_heatmaps, shows="Median SQNR in dB",
        note=_always(
            "Median over sampled steps and seeds, and over the experts of a grouped linear, in dB: 10 log10(sum x² /"
            " sum (x - Q(x))²). Dark is bad; ∞ means no error at all; grad is grad_output; row and col are the\n"
            "directions that the scale blocks run in."
        ),
    ),
    Section(
        name="underflow", group="errors", heading="Underflow by layer, tensor and direction", short="Underflow in %",
        draw=heatmaps.underflow_heatmaps, shows="Median underflow in %", also_with="sqnr",
        note=_always(
            "Elements that are not 0 but become 0, in %; median over sampled steps and seeds, and over the experts of a"
            " grouped linear. Dark is bad. Arms that are not named here have none."
        ),
    ),
    Section(
        name="what_if", group="errors", heading="Quantization error in other formats",
        short="Quantization error in other formats", draw=heatmaps.what_if_heatmaps,
        shows="Median SQNR in dB, in the own format and in others",
        note=_always(
            "What the formats of stats.what_if would err on the tensors of this training, which ran in its own formats:"
            " median over layers, sampled steps and seeds, in dB. Dark is bad.\n"
            "A line is a tensor in a direction, and the format that it has. Errors that a training in the other format"
            " would change itself are not in it."
        ),
    ),
    Section(
        name="gradients", group="errors", heading="Gradient cosine by layer", short="Gradient cosine by layer",
        draw=lines.gradient_cosines, key=True,
        note=_always(
            "How far the direction of a gradient is off: 1 \u2212 cosine between what the GEMM gave and the FP32"
            " product of the unquantized tensors, median over sampled steps and seeds, and over the experts of a"
            " grouped linear.\n"
            "Left is good; a step of the axis is a factor of ten."
        ),
        after=(
            After(
                name="GEMM output error against FP32", headed=True,
                table=lambda comparison: tables.gemm_errors(comparison.frames.stats),
            ),
        ),
    ),
    Section(
        name="expert_sqnr", group="experts", heading="Expert SQNR by layer, tensor and direction",
        short="Expert SQNR in dB", draw=experts.sqnr_heatmaps, shows="Median SQNR in dB, by expert",
        note=_always(
            "As above, for each expert of the grouped linears of arms that quantize them. An empty cell is an expert"
            " that got no token at any sampled step."
        ),
        after=(
            After(
                name="Experts: lowest SQNR and highest underflow", table=experts.worst_experts,
                note="For each tensor the expert with the lowest SQNR, beside the median of all experts in the same"
                " direction, its tokens and its load; then the expert with the highest\n"
                "underflow. All are medians over sampled steps and seeds.",
            ),
        ),
    ),
    Section(
        name="expert_underflow", group="experts", heading="Expert underflow by layer, tensor and direction",
        short="Expert underflow in %", draw=experts.underflow_heatmaps, shows="Median underflow in %, by expert",
        note=_always("Elements that are not 0 but become 0, in %. Arms that are not named here have none."),
    ),
    Section(
        name="loads", group="balance", heading="Expert load by layer", short="Expert load",
        draw=experts.load_heatmaps, shows="Tokens of an expert over the mean of all",
        note=_always(
            "Tokens of an expert over the mean of its layer, median over sampled steps and seeds; 1 everywhere is an"
            " even load.\nTraining gives a number to another expert in every seed, so that these medians are closer to"
            " 1 than the loads of a run; the table has the extremes of all runs and steps."
        ),
        after=(After(name="Experts: highest and lowest load", table=experts.load_table),),
    ),
    Section(
        name="balance", group="balance", heading="Expert balance by step", short="Expert balance",
        draw=lines.balance_panels, key=True,
        note=_always(
            "The most tokens that an expert got in a step over the mean of its layer, and the loss that keeps loads"
            " even: 1 where they are, and a part of train_loss by\nmodel.load_balance, but not of val_loss."
        ),
    ),
)  # fmt: skip
"""Every kind of figure that plotly draws, in the order of pictures and files."""
SHORT = {section.name: section.short for section in SECTIONS} | {"speed": "Throughput"}
"""The headings of pictures in Markdown, by the names of their files."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The figures of a comparison: the forest plot, the throughput, and plotly's by the name of their section."""

    forest: Forest | None
    speed: Speed | None
    groups: dict[str, list[Panel]]

    def every(self) -> list[Panel]:
        """The figures of plotly."""
        return [panel for group in self.groups.values() for panel in group]

    @cached_property
    def drawings(self) -> dict[str, list[svg.Drawing]]:
        """The figures of plotly as SVG, by section."""
        return {name: [svg.drawing(panel) for panel in group] for name, group in self.groups.items()}

    def shown(self, group: str) -> list[Section]:
        """The sections of a group that stand on a page, in their order."""
        return [
            section
            for section in SECTIONS
            if section.group == group and (section.name in self.groups or section.also_with in self.groups)
        ]


def panels(comparison: Comparison) -> Panels:
    """Every figure that has something to draw."""
    drawn = {section.name: list(section.draw(comparison)) for section in SECTIONS}
    groups = {name: group for name, group in drawn.items() if group}
    return Panels(forest=forest_of(comparison), speed=speed_of(comparison), groups=groups)
