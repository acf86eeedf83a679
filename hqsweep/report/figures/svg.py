"""The figures of a report as SVG, for the pages, Markdown and paper.

A picture is made from a figure of plotly. It supports the part of plotly's language that a report's figures use:
scatter (lines, bands, markers), heatmaps, lines and rectangles across the axes, and annotations; anything else raises
ValueError. Lengths are in pixels of a picture WIDTH wide, and every text is escaped. `chart` adds the values, which the
script of a page (pages/page.js) reads for hover, zoom and hidden arms.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any

import numpy as np
from markupsafe import Markup

from hqsweep.report.figures.look import DASH_ARRAYS, MARKERS, Axis, Panel, axis_of

WIDTH, SHRINK, COLUMNS = 410, 0.78, 2
"""The width of a picture; its height relative to plotly's figure; the number of pictures side by side on a
sheet."""
LETTER, HEADING = 6.0, 7.4
"""The widths of letters, of ticks and of headings."""
MOST_POINTS = 150
"""The most points of a line: more cannot be seen at this width."""
SHADES = 64
"""The number of colours of a heatmap; cells of one colour are one path."""

PLACED = '<svg x="{}" y="{}" width="{}" height="{}">{}</svg>\n'
SHEET = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img"'
    ' aria-label="{2}" fill="#222" font-family="system-ui, sans-serif" font-size="11">\n'
    '<rect width="{0}" height="{1}" fill="#fff"/>\n{3}</svg>\n'
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure as SVG: the content of its frame, WIDTH by `height` pixels."""

    panel: Panel
    inner: Markup
    height: int
    values: dict[str, Any]


def chart(drawing: Drawing) -> Markup:
    """The picture with its values as JSON beside it."""
    values = json.dumps(drawing.values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    frame = '<div class="chart">{}<script type="application/json">{}</script></div>'
    return Markup(frame).format(picture(drawing), Markup(values))


def picture(drawing: Drawing) -> Markup:
    """One figure, as wide as its place on a page, with its words for readers who cannot see it."""
    frame = '<svg class="picture" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(frame).format(WIDTH, drawing.height, drawing.panel.says, drawing.inner)


def sheet(drawings: Sequence[Drawing]) -> str:
    """A file with all drawings under their headings, two in a row, and below them the key of lines and arms."""
    columns = min(COLUMNS, len(drawings))
    width, top, parts = columns * WIDTH, 0, []
    for first in range(0, len(drawings), columns):
        row = drawings[first : first + columns]
        for column, drawing in enumerate(row):
            heading = _shortened(drawing.panel.heading, int((WIDTH - 20) / HEADING))
            title = Markup('<text x="{}" y="{}" font-size="13" font-weight="600">{}</text>\n')
            parts.append(title.format(column * WIDTH + 8, top + 18, heading))
            parts.append(Markup(PLACED).format(column * WIDTH, top + 24, WIDTH, drawing.height, drawing.inner))
        top += 34 + max(drawing.height for drawing in row)
    key, rows = _key([drawing.panel for drawing in drawings], width)
    parts.append(Markup(PLACED).format(0, top, width, 20 * rows, key))
    says = " ".join(drawing.panel.says for drawing in drawings)
    return str(Markup(SHEET).format(width, top + 20 * rows + 6, says, Markup("").join(parts)))


def drawing(panel: Panel) -> Drawing:
    """Return the figure of a panel. Raises ValueError for parts that a picture cannot have."""
    layout = panel.figure.layout.to_plotly_json()
    traces = [trace.to_plotly_json() for trace in panel.figure.data]
    height = round(SHRINK * layout["height"])
    labels = axis_of(layout["yaxis"], [trace.get("y") for trace in traces], 1, 0).ticks()
    longest = max((len(_name(label)) for _, label in labels), default=0)
    left = min(LETTER * longest + 10, 0.45 * WIDTH) + (14 if _title(layout["yaxis"]) else 0)
    right, top = WIDTH - 10, 8
    two_lines = any(_is_double(trace.get("x")) for trace in traces)
    bottom = height - 20 - (14 if _title(layout["xaxis"]) else 0) - (13 if two_lines else 0)
    flat_x = [trace["x"][1] if _is_double(trace.get("x")) else trace.get("x") for trace in traces]
    x = axis_of(layout["xaxis"], flat_x, left, right, columns=two_lines)
    y = axis_of(layout["yaxis"], [trace.get("y") for trace in traces], bottom, top)
    clip = '<svg class="area" x="{0:.1f}" y="{1}" width="{2:.1f}" height="{3}" viewBox="{0:.1f} {1} {2:.1f} {3}">'
    marks = Markup("").join([*_shapes(layout, x, y), *_marks(traces, x, y)])
    inner = [
        *_axes(x, y, layout, traces),
        Markup(clip + "{4}</svg>").format(left, top, right - left, bottom - top, marks),
        *_annotations(layout, x, top),
    ]
    values = _values(layout, traces, x, y)
    return Drawing(panel=panel, inner=Markup("").join(inner), height=height, values=values)


def _values(layout: dict[str, Any], traces: list[dict[str, Any]], x: Axis, y: Axis) -> dict[str, Any]:
    """The axes, shapes and traces of a figure, in the order of their elements in the picture."""
    shapes = [
        [None if _spans(shape, name) else shape[f"{name}{end}"] for name in "xy" for end in (0, 1)]
        for shape in layout.get("shapes", ())
    ]
    axes = {
        name: {
            "from": axis.start, "to": axis.end, "low": float(axis.low), "high": float(axis.high),
            "names": [_name(each) for each in axis.names] or None, "signed": axis.signed, "log": axis.log,
        }
        for name, axis in (("x", x), ("y", y))
    }  # fmt: skip
    told = [_cell_values(each) if each["type"] == "heatmap" else _point_values(each, x, y) for each in traces]
    return axes | {"shapes": shapes, "traces": told}


def _point_values(trace: dict[str, Any], x: Axis, y: Axis) -> dict[str, Any]:
    xs, ys = _numbers(trace["x"], x), _numbers(trace["y"], y)
    lines, marks = _parts(trace)
    keep = range(len(xs)) if marks else _few(np.arange(len(xs)), MOST_POINTS)
    beside = {
        key: [str(_short(trace[key][at])) for at in keep]
        for key in ("text", "customdata")
        if trace.get(key) is not None
    }
    hover = re.sub(r"<extra>.*?</extra>", "", trace.get("hovertemplate") or "")
    return {
        "arm": trace.get("legendgroup"), "name": _name(trace.get("name") or ""), "hover": hover,
        "x": [xs[at] for at in keep], "y": [ys[at] for at in keep], **beside,
        "fill": trace.get("fill") == "tonexty", "line": lines, "marks": marks,
    }  # fmt: skip


def _cell_values(trace: dict[str, Any]) -> dict[str, Any]:
    custom = trace.get("customdata")
    words = list(dict.fromkeys(str(each) for row in custom for each in row)) if custom is not None else []
    outer = [" ".join(map(str, pair)) for pair in zip(*trace["x"], strict=True)] if _is_double(trace["x"]) else None
    return {
        "z": [[_short(float(value)) for value in row] for row in np.asarray(trace["z"], dtype=float)],
        "rows": [_name(each) for each in trace["y"]],
        "columns": [_name(each) for each in outer or trace["x"]],
        "words": [_name(word) for word in words],
        "custom": [[words.index(str(each)) for each in row] for row in custom] if words else None,
        "hover": re.sub(r"<extra>.*?</extra>", "", trace.get("hovertemplate") or ""),
    }


def _numbers(values: Any, axis: Axis) -> list[float | int | None]:
    """Values as numbers of six digits, names as their places; None for NaN and inf."""
    places = [axis.names.index(value) if isinstance(value, str) else value for value in values]
    return [_short(math.nan if place is None else float(place)) for place in places]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e9 else float(f"{value:.7g}")


def _parts(trace: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a trace has a line, and whether it has markers."""
    mode = trace.get("mode", "lines")
    return "lines" in mode and trace.get("line", {}).get("width", 2) > 0, "markers" in mode


def _name(name: str) -> str:
    """A category as text: figures hold names escaped for plotly."""
    return unescape(str(name))


def _title(axis: dict[str, Any]) -> str:
    return axis.get("title", {}).get("text") or ""


def _is_double(x: Any) -> bool:
    return x is not None and len(x) == 2 and not isinstance(x[0], str) and np.ndim(x[0]) == 1


def _shortened(text: str, most: int) -> str:
    """The text, shortened at its beginning: names are distinct by their ends."""
    return text if len(text) <= most else "…" + text[len(text) - most + 1 :]


def _axes(x: Axis, y: Axis, layout: dict[str, Any], traces: list[dict[str, Any]]) -> Iterable[Markup]:
    """The grid, ticks, names and titles of both axes."""
    grid = any(trace["type"] == "scatter" for trace in traces)
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    line = Markup('<path d="M{:.1f} {:.1f}{}{:.1f}" stroke="{}"/>')
    room = int((x.start - (24 if _title(layout["yaxis"]) else 10)) / LETTER)
    yield Markup('<g class="ticks">')
    for place, label in y.ticks():
        if grid:
            yield line.format(x.start, place, "H", x.end, "#e6e6e6")
        yield text.format(x.start - 5, place + 4, "end", _shortened(_name(label), room))
    for place, label in x.ticks():
        if grid:
            yield line.format(place, y.start, "V", y.end, "#e6e6e6")
        yield text.format(place, y.start + 14, "middle", _name(label))
    yield Markup("</g>")
    for label, place in _groups(traces, x):
        yield text.format(place, y.start + 27, "middle", label)
    yield line.format(x.start, y.start, "H", x.end, "#888")
    yield line.format(x.start, y.start, "V", y.end, "#888")
    if _title(layout["xaxis"]):
        yield text.format((x.start + x.end) / 2, y.start + 29, "middle", _title(layout["xaxis"]))
    if _title(layout["yaxis"]):
        turned = Markup('<text transform="translate(11 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>')
        yield turned.format((y.start + y.end) / 2, _title(layout["yaxis"]))


def _groups(traces: list[dict[str, Any]], x: Axis) -> Iterable[tuple[str, float]]:
    """The outer names of columns that have two, each in the middle of its columns."""
    for trace in traces:
        if _is_double(trace.get("x")):
            outer = [str(name) for name in trace["x"][0]]
            for name in dict.fromkeys(outer):
                places = [column for column, other in enumerate(outer) if other == name]
                yield _name(name), float(np.mean(x.at(places)))


def _shapes(layout: dict[str, Any], x: Axis, y: Axis) -> Iterable[Markup]:
    for shape in layout.get("shapes", ()):
        ends = [_ends(shape, name, axis) for name, axis in (("x", x), ("y", y))]
        (left, right), (top, bottom) = (sorted(float(end) for end in pair) for pair in ends)
        if shape["type"] == "rect":
            yield Markup('<rect class="shape" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"/>').format(
                left, top, right - left, bottom - top, shape["fillcolor"]
            )
        elif shape["type"] == "line":
            look = _stroke(shape["line"])
            yield Markup('<path class="shape" d="M{:.1f} {:.1f}L{:.1f} {:.1f}" {}/>').format(
                left, top, right, bottom, look
            )
        else:
            raise ValueError(f"figure: a shape {shape['type']!r}; a picture has rect and line")


def _ends(shape: dict[str, Any], name: str, axis: Axis) -> Sequence[float]:
    """The two ends of a shape along an axis; the ends of the axis for a shape that spans it."""
    return (axis.start, axis.end) if _spans(shape, name) else axis.at([shape[f"{name}0"], shape[f"{name}1"]])


def _spans(shape: dict[str, Any], name: str) -> bool:
    return str(shape.get(f"{name}ref", "")).endswith("domain")


def _annotations(layout: dict[str, Any], x: Axis, top: float) -> Iterable[Markup]:
    for note in layout.get("annotations", ()):
        place = float(x.at([note["x"]])[0])
        yield Markup('<text class="said" x="{:.1f}" y="{:.1f}" fill="#555">{}</text>').format(
            place + 3, top + 11, _name(note["text"])
        )


def _marks(traces: list[dict[str, Any]], x: Axis, y: Axis) -> Iterable[Markup]:
    for before, trace in zip([None, *traces], traces, strict=False):
        if trace["type"] == "heatmap":
            yield from _cells(trace, x, y)
        elif trace["type"] == "scatter":
            yield Markup('<g class="trace">{}</g>').format(Markup("").join(_scatter(trace, before, x, y)))
        else:
            raise ValueError(f"figure: a trace {trace['type']!r}; a picture has scatter and heatmap")


def _scatter(trace: dict[str, Any], before: dict[str, Any] | None, x: Axis, y: Axis) -> Iterable[Markup]:
    xs, ys = x.at(trace["x"]), y.at(trace["y"])
    line, (lines, marks) = trace.get("line", {}), _parts(trace)
    if trace.get("fill") == "tonexty":
        edge = _path(np.concatenate([x.at(before["x"]), xs[::-1]]), np.concatenate([y.at(before["y"]), ys[::-1]]))
        yield Markup('<path d="{}z" fill="{}"/>').format(edge, trace["fillcolor"])
    if lines:
        yield Markup('<path d="{}" fill="none" {}/>').format(_path(xs, ys), _stroke(line))
    if marks:
        marker = {"color": line.get("color"), "symbol": "circle", "size": 6} | trace.get("marker", {})
        shape = MARKERS[marker["symbol"]]
        scale = SHRINK * marker["size"] / 10
        for px, py in zip(xs, ys, strict=True):
            if math.isfinite(px) and math.isfinite(py):
                yield Markup('<path d="{}" transform="translate({:.1f} {:.1f}) scale({:.2f})" fill="{}"/>').format(
                    shape, px, py, scale, marker["color"]
                )


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    """A line through the points, broken where one is not finite."""
    good = np.isfinite(xs) & np.isfinite(ys)
    pieces = np.split(np.arange(len(xs)), np.flatnonzero(np.diff(good.astype(int))) + 1)
    pieces = [piece for piece in pieces if len(piece) and good[piece[0]]]
    most = max(20, MOST_POINTS // max(1, len(pieces)))
    return "".join("M" + "L".join(f"{xs[at]:.1f} {ys[at]:.1f}" for at in _few(piece, most)) for piece in pieces)


def _few(places: np.ndarray, most: int) -> np.ndarray:
    """The places, thinned to `most` evenly spaced ones, both ends among them."""
    return places if len(places) <= most else places[np.linspace(0, len(places) - 1, most).round().astype(int)]


def _stroke(line: dict[str, Any]) -> Markup:
    dashes = DASH_ARRAYS[line.get("dash") or "solid"]
    look = Markup('stroke="{}" stroke-width="{:g}"').format(line.get("color"), max(1, SHRINK * line.get("width", 2)))
    return look if dashes == "none" else look + Markup(' stroke-dasharray="{}"').format(dashes)


def _cells(trace: dict[str, Any], x: Axis, y: Axis) -> Iterable[Markup]:
    """The cells of each shade as one path, and the texts over them."""
    z, low, high = np.asarray(trace["z"], dtype=float), trace["zmin"], trace["zmax"]
    width, tall = abs(x.end - x.start) / z.shape[1], abs(y.end - y.start) / z.shape[0]
    share = np.clip((z - low) / ((high - low) or 1), 0, 1)
    shades = np.where(np.isnan(share), -1, np.nan_to_num(share * (SHADES - 1)).round()).astype(int)
    colours = {shade: _shade(trace["colorscale"], shade / (SHADES - 1)) for shade in np.unique(shades[shades >= 0])}
    for shade, (red, green, blue) in colours.items():
        corners = zip(*np.nonzero(shades == shade), strict=True)
        path = "".join(
            f"M{x.start + width * column:.1f} {y.end + tall * row:.1f}h{width - 1:.1f}v{tall - 1:.1f}h-{width - 1:.1f}z"
            for row, column in corners
        )
        yield Markup('<path d="{}" fill="#{:02x}{:02x}{:02x}"/>').format(path, red, green, blue)
    if not trace.get("texttemplate"):
        yield from ()
        return
    dark = {shade: (299 * r + 587 * g + 114 * b) / 1000 < 140 for shade, (r, g, b) in colours.items()}
    for fill, is_dark in (("#fff", True), ("#111", False)):
        texts = [
            Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(
                x.start + width * (column + 0.5), y.end + tall * (row + 0.5) + 4, trace["text"][row][column]
            )
            for row, column in zip(*np.nonzero(shades >= 0), strict=True)
            if dark[shades[row, column]] == is_dark
        ]
        yield Markup('<g fill="{}" text-anchor="middle">{}</g>').format(fill, Markup("").join(texts))


def _shade(scale: Sequence[tuple[float, str]], share: float) -> tuple[int, int, int]:
    """The red, green and blue of a place between 0 and 1 on a scale of #rrggbb colours."""
    places = [float(place) for place, _ in scale]
    parts = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for _, colour in scale])
    return tuple(round(float(np.interp(share, places, parts[:, part]))) for part in range(3))


def _key(panels: Sequence[Panel], width: int) -> tuple[Markup, int]:
    """The line and the name of every arm that is drawn, and the number of rows that they take."""
    looks = {
        trace.legendgroup: (trace.line.to_plotly_json(), trace.marker.to_plotly_json())
        for panel in panels
        for trace in panel.figure.data
        if trace.type == "scatter" and trace.name and _name(trace.name) == trace.legendgroup
    }
    parts, left, row = [], 8.0, 0
    for arm, (line, marker) in looks.items():
        name = _shortened(arm, int((width - 60) / HEADING))
        if left > 8 and left + 40 + HEADING * len(name) > width:
            left, row = 8.0, row + 1
        if line.get("color"):
            parts.append(Markup('<path d="M{:.1f} {}h30" {}/>').format(left, 20 * row + 10, _stroke(line)))
        else:
            where = Markup('transform="translate({:.1f} {})" fill="{}"').format(
                left + 20, 20 * row + 10, marker["color"]
            )
            parts.append(Markup('<path d="{}" {}/>').format(MARKERS[marker["symbol"]], where))
        parts.append(Markup('<text x="{:.1f}" y="{}" font-size="12">{}</text>').format(left + 36, 20 * row + 14, name))
        left += 52 + HEADING * len(name)
    return Markup("").join(parts), row + 1 if looks else 0
