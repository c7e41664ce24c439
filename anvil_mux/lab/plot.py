"""One picture of several runs: a panel each, on the same scales.

From top to bottom a panel shows who holds which GPU, how many requests wait in which line, and what each
request has waited, over the moment at which it arrived. It is a fold over events, so it draws what was
simulated and what really happened alike.

Hours of events have more to them than a picture has points: lines are then drawn by their longest in each of
``COLUMNS`` parts of the time, and waits that would cover each other by one larger dot.

Drawing needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from anvil_mux.config.config import Config
from anvil_mux.errors import MuxError
from anvil_mux.lab.figures import figures
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.eventlog import Situation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawn = tuple[str, Sequence[Event], Config, Mapping[str, Any]]
"""A title, a log, the configuration that it is of, and the situation in which it begins, as JSON."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's, which colour-blind people tell apart as well."""
OTHER = "#999999"
"""The colour of all models beyond those."""
GREY = "#D0D0D0"
INK = "#333333"
SAMPLE = "#777777"
"""The colour of states in a legend."""

PANEL_INCHES = (3.5, 3.5)
MOST_COLUMNS = 3
"""The most panels side by side that can be read on a page."""
LEGEND_INCHES = (0.65, 0.075)
"""The width of an entry of a legend, and of each of its letters."""
DOT = 7.0
"""Square points of a request's wait."""
COLUMNS, ROWS = 800, 200
"""Into how many parts the axes are divided where there is too much to draw."""
HATCHED = 1 / 60
"""The least part of the width at which a bar is hatched."""
SEEN = 1 / 200
"""The least part of the longest bar at which a phase can be seen."""
MOST_LETTERS = 80
"""The longest note at the end of a bar."""


class CannotDraw(MuxError):
    """The picture cannot be made."""


class Bar(NamedTuple):
    """The time in which a backend was in a state that holds its GPUs."""

    backend: str
    state: str
    since: float
    until: float


class PlottedWait(NamedTuple):
    """The wait of a request for its model."""

    at: float
    seconds: float
    model: str
    end: str = "leased"
    """How it ended: leased, severed after that, or unserved, because it failed or its client left."""


_HOLDING = ("loading", "cancelling", "ready", "draining", "evicting", "stuck")
_MOVES = frozenset((*_HOLDING, "stopped", "standby", "demoting"))


class History:
    """The part of a log that a picture shows, with moments from its beginning on."""

    def __init__(self, log: Sequence[Event], begins: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._origin = begins.get("at", log[0].at if log else 0.0)
        self.end = log[-1].at - self._origin if log else 0.0
        self.bars: list[Bar] = []
        self.lengths: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        """Model -> (moment, how many wait from then on)."""
        self.waits: dict[int, PlottedWait] = {}
        """The waits by ticket."""
        self._states: dict[str, tuple[str, float]] = {}
        self._queued: defaultdict[str, set[int]] = defaultdict(set)
        situation = Situation.parse(begins)
        for name, there in situation.backends.items():
            self._enter(name, there.state, 0.0)
        for model, queue in situation.queues.items():
            self._queued[model] |= queue.tickets.keys()
            self.lengths[model].append((0.0, len(queue.tickets)))
        for event in log:
            self._read(event, event.at - self._origin)
        for backend in tuple(self._states):
            self._enter(backend, "", self.end)

    def _read(self, event: Event, now: float) -> None:
        match event.kind:
            case "queued":
                self._queued[event.model].add(event.ticket)
                self.lengths[event.model].append((now, len(self._queued[event.model])))
            case "leased" | "failed" | "gone":
                if event.ticket in self._queued[event.model]:
                    self._queued[event.model].remove(event.ticket)
                    self.lengths[event.model].append((now, len(self._queued[event.model])))
                end = "leased" if event.kind == "leased" else "unserved"
                self.waits[event.ticket] = PlottedWait(now - event.seconds, event.seconds, event.model, end)
            case "severed" if event.ticket in self.waits:
                self.waits[event.ticket] = self.waits[event.ticket]._replace(end="severed")
            case kind if kind in _MOVES:
                self._enter(event.backend, event.kind, now)

    def _enter(self, backend: str, state: str, now: float) -> None:
        before, since = self._states.get(backend, ("", now))
        if before in _HOLDING and now > since:
            self.bars.append(Bar(backend, before, since, now))
        self._states[backend] = state, now


def check_file(path: str | os.PathLike[str]) -> None:
    """CannotDraw if no picture can be drawn into a file of this name."""
    try:
        import matplotlib.figure  # noqa: F401 (only to see whether it is there)
    except ImportError:
        raise CannotDraw("drawing needs matplotlib: pip install 'anvil-mux[plot]'") from None
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CannotDraw(f"{os.fspath(path)}: its name must end in .png, .svg or .pdf")


def draw(runs: Iterable[Drawn], path: str | os.PathLike[str]) -> None:
    """Draws the runs side by side into a file."""
    runs = list(runs)
    if not runs:
        raise CannotDraw("there is nothing to draw")
    with picture(path) as figure:
        _Panels(figure, runs).draw()


@contextmanager
def picture(path: str | os.PathLike[str]) -> Iterator[Figure]:
    """A figure that is saved at the end, in a file whose name ends in .png, .svg or .pdf."""
    check_file(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    suffix = Path(path).suffix.lower()
    with rc_context(_STYLE):
        figure = Figure(layout="constrained")
        yield figure
        try:
            figure.savefig(path, dpi=130, metadata={} if suffix == ".png" else _UNDATED[suffix])
        except OSError as error:
            raise CannotDraw(f"{os.fspath(path)} cannot be written: {error.strerror}") from None


class PhaseBar(NamedTuple):
    """A bar of phases that follow each other."""

    name: str
    phases: Mapping[str, float]
    mark: float | None
    """Another total to compare it with; None: there is none."""
    note: str = ""
    """Words at its end."""


def draw_phases(panels: Mapping[str, Sequence[PhaseBar]], order: Sequence[str], figure: Figure) -> None:
    """A panel for each title, each on a scale of its own, with its bars from top to bottom.

    Phases that nobody could see in any panel are left out.
    """
    counts = [len(bars) for bars in panels.values()]
    figure.set_size_inches(8.0, 0.8 + 0.5 * len(panels) + 0.35 * sum(counts))
    every = figure.subplots(len(panels), squeeze=False, height_ratios=counts)[:, 0]
    phases = [phase for phase in order if any(_is_seen(phase, bars) for bars in panels.values())]
    colours = dict(zip(phases, (*COLOURS, *[OTHER] * len(phases)), strict=False))
    entries: dict[str, Any] = {}
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
        entries |= _draw_bars(axes, bars, colours)
        axes.set_title(title, loc="left", fontweight="bold", color=INK)
    every[-1].set_xlabel("seconds")
    labels = [*phases, "by hand"]
    words = [label.replace("_", " ") for label in labels]
    columns = _columns(words, figure)
    drawn = [entries[label] for label in labels]
    figure.legend(drawn, words, loc="outside lower center", ncols=columns, frameon=False)


def _is_seen(phase: str, bars: Sequence[PhaseBar]) -> bool:
    longest = max(sum(bar.phases.values()) for bar in bars)
    return any(bar.phases.get(phase, 0.0) >= max(SEEN * longest, 1e-9) for bar in bars)


def _draw_bars(axes: Axes, bars: Sequence[PhaseBar], colours: Mapping[str, str]) -> dict[str, Any]:
    """Draw the bars of one panel; the entries of its phases and marks in a legend."""
    places, ends = range(len(bars)), [0.0] * len(bars)
    entries: dict[str, Any] = {}
    for phase, colour in colours.items():
        seconds = [bar.phases.get(phase, 0.0) for bar in bars]
        entries[phase] = axes.barh(places, seconds, left=ends, height=0.6, color=colour)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    marks = [(bar.mark, place) for place, bar in enumerate(bars) if bar.mark is not None]
    entries["by hand"] = axes.plot(*zip(*marks, strict=True), "|", color=INK, markersize=16)[0]
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.35 * max(*ends, *(mark for mark, _ in marks)))
    for place, bar in enumerate(bars):
        end = max(ends[place], bar.mark or 0.0)
        words = bar.note if len(bar.note) <= MOST_LETTERS else f"{bar.note[: MOST_LETTERS - 3]}..."
        axes.annotate(words, (end, place), (6, 0), textcoords="offset points", va="center", color=INK)
    return entries


def _columns(labels: Sequence[str], figure: Figure) -> int:
    """How many entries of a legend fit into a row, all rows being alike."""
    wanted = sum(LEGEND_INCHES[0] + LEGEND_INCHES[1] * len(label) for label in labels)
    return math.ceil(len(labels) / math.ceil(wanted / figure.get_figwidth()))


def draw_dots(
    panels: Mapping[str, Mapping[str, Sequence[float]]], bold: str, unit: str, figure: Figure
) -> None:
    """A panel for each title, and in it a line for each name: its values as dots, their mean as a mark."""
    rows = math.ceil(len(panels) / MOST_COLUMNS)
    columns = math.ceil(len(panels) / rows)
    most = max(len(lines) for lines in panels.values())
    figure.set_size_inches(4.4 * columns, rows * (0.9 + 0.22 * most))
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, lines) in zip(every, panels.items(), strict=False):
        _draw_lines(axes, lines, bold)
        axes.set_title(title, fontweight="bold", color=INK)
        axes.set_xlabel(unit)
    for axes in every[len(panels) :]:
        axes.remove()


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[float]], bold: str) -> None:
    order = sorted(lines, key=lambda name: -fmean(lines[name]))
    for height, name in enumerate(order):
        colour = COLOURS[5] if name == bold else COLOURS[0]
        values = lines[name]
        axes.plot(values, [height] * len(values), "o", color=colour, markersize=3, alpha=0.35, mew=0)
        axes.plot([fmean(values)], [height], "|", color=colour, markersize=11, mew=2.2)
    axes.set_yticks(range(len(order)), order)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == bold else "normal")
    axes.set_xscale("log")
    least, most = axes.get_xlim()
    marks = [part * 10.0**power for power in range(-6, 7) for part in (1, 2, 5)]
    axes.set_xticks([mark for mark in marks if least <= mark <= most])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="x", color="#E8E8E8", linewidth=0.5)


_STYLE: Any = {
    "font.size": 8.5,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "hatch.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "anvil-mux",
    "text.parse_math": False,
}
_UNDATED: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class _Panels:
    """The panels and what they have in common: colours and scales."""

    def __init__(self, figure: Figure, runs: Sequence[Drawn]) -> None:
        self._figure = figure
        self._runs = [
            (title, figures(log, begins=begins), History(log, begins), config)
            for title, log, config, begins in runs
        ]
        told = [history for _, _, history, _ in self._runs]
        models = _busiest_first(told)
        self._colours = dict.fromkeys(models, OTHER) | dict(zip(models, COLOURS, strict=False))
        self._lanes = [_lanes(history.bars, config) for _, _, history, config in self._runs]
        self._end = max(history.end for history in told) or 1.0
        self._stacks = [_stack(history.lengths, self._colours, self._end) for history in told]
        self._longest = max([sum(row) for _, rows in self._stacks for row in zip(*rows, strict=True)] or [0])
        self._slowest = max([wait.seconds for history in told for wait in history.waits.values()] or [0.0])

    def draw(self) -> None:
        count = len(self._runs)
        rows = math.ceil(count / MOST_COLUMNS)
        columns = math.ceil(count / rows)
        width, height = PANEL_INCHES
        self._figure.set_size_inches(width * (1.35 if columns == 1 else columns), height * rows + 0.4)
        shape = {"height_ratios": (0.2 + 0.2 * max(map(len, self._lanes)), 0.8, 1.4)}
        for row, group in enumerate(self._figure.subfigures(rows, 1, squeeze=False)[:, 0]):
            panels = group.subplots(3, columns, sharex=True, squeeze=False, gridspec_kw=shape)
            for column in range(columns):
                number = row * columns + column
                if number < count:
                    self._draw_panel(panels[:, column], number, is_left=column == 0)
                else:
                    for axes in panels[:, column]:
                        axes.remove()
        self._draw_legend()

    def _draw_panel(self, panel: Sequence[Axes], number: int, *, is_left: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        title, come_to, history, config = self._runs[number]
        residents, lines, waits = panel
        swaps = f"{come_to.swaps} swap" + ("" if come_to.swaps == 1 else "s")
        mean, longest = _duration(come_to.wait_mean_seconds), _duration(come_to.wait_max_seconds)
        residents.set_title(f"{title}\n", fontweight="bold", color=INK)
        text = f"{swaps}; mean wait {mean}, longest {longest}"
        residents.text(0, 1.04, text, transform=residents.transAxes, va="bottom", color=INK)
        self._draw_residents(residents, self._lanes[number], config)
        moments, lengths = self._stacks[number]
        if lengths:
            lines.stackplot(moments, lengths, colors=self._colours.values(), step="post", linewidth=0)
        lines.set_ylim(0, max(self._longest, 1) * 1.05)
        lines.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        self._draw_waits(waits, history)
        waits.hlines(come_to.wait_mean_seconds, 0, history.end, **_MEAN)
        waits.set_ylim(-0.03 * self._slowest, max(self._slowest, 1e-9) * 1.06)
        self._draw_time(waits)
        if is_left:
            lines.set_ylabel("requests\nthat wait")
            waits.set_ylabel("wait of each\nrequest (s)")
        else:
            lines.tick_params(labelleft=False)
            waits.tick_params(labelleft=False)
            residents.tick_params(
                labelleft=any(lanes.keys() != self._lanes[0].keys() for lanes in self._lanes)
            )

    def _draw_time(self, axes: Axes) -> None:
        unit, name, step = _time_scale(self._end)
        marks = range(int(self._end / unit / step) + 1)
        axes.set_xlim(0, self._end)
        axes.set_xticks([mark * step * unit for mark in marks], [f"{mark * step:g}" for mark in marks])
        axes.set_xlabel(name)

    def _draw_residents(self, axes: Axes, lanes: _Lanes, config: Config) -> None:
        models = {backend.name: backend.model for backend in config.backends}
        for lane, rows in enumerate(lanes.values()):
            height = 0.8 / len(rows)
            for row, bars in enumerate(rows):
                top = lane + 0.1 + row * height
                for (state, model), spans in _spans(bars, models).items():
                    self._draw_bars(axes, spans, (top, height), state, self._colours.get(model, OTHER))
        axes.set_ylim(len(lanes), 0)
        axes.set_yticks(
            [lane + 0.5 for lane in range(len(lanes))], [f"GPU {gpu}" if gpu else "no GPU" for gpu in lanes]
        )
        axes.tick_params(left=False, bottom=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    def _draw_bars(
        self, axes: Axes, spans: list[tuple[float, float]], at: tuple[float, float], state: str, colour: str
    ) -> None:
        wide = [span for span in spans if span[1] >= HATCHED * self._end]
        narrow = [span for span in spans if span[1] < HATCHED * self._end]
        face, hatch = _looks(state, colour)
        axes.broken_barh(narrow, at, facecolor=face, linewidth=0, rasterized=len(narrow) > COLUMNS)
        axes.broken_barh(wide, at, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=0)

    def _draw_waits(self, axes: Axes, history: History) -> None:
        dots: defaultdict[tuple[str, str], defaultdict[tuple[int, int], list[PlottedWait]]]
        dots = defaultdict(lambda: defaultdict(list))
        for wait in history.waits.values():
            cell = (int(wait.at / self._end * COLUMNS), int(wait.seconds / (self._slowest or 1.0) * ROWS))
            dots[wait.model, wait.end][cell].append(wait)
        for (model, end), cells in sorted(dots.items(), key=lambda item: item[0][1]):
            served = end == "leased"
            axes.scatter(
                [waits[0].at for waits in cells.values()],
                [waits[0].seconds for waits in cells.values()],
                s=[DOT * math.sqrt(len(waits)) for waits in cells.values()],
                color=self._colours[model] if served else INK,
                marker=_MARKS[end],
                linewidths=0.0 if served else 0.9,
                alpha=0.75,
                zorder=3,
                clip_on=False,
            )

    def _draw_legend(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        shown: list[Any] = [
            Patch(facecolor=colour, label=model) for model, colour in self._colours.items() if colour != OTHER
        ]
        if OTHER in self._colours.values():
            shown.append(Patch(facecolor=OTHER, label="other models"))
        states = {bar.state for _, _, history, _ in self._runs for bar in history.bars}
        for state in _STATES:
            if state in states:
                face, hatch = _looks(state, SAMPLE)
                shown.append(Patch(facecolor=face, edgecolor=SAMPLE, hatch=hatch, linewidth=0, label=state))
        shown.append(Line2D([], [], **_MEAN, label="mean wait"))
        ends = {wait.end for _, _, history, _ in self._runs for wait in history.waits.values()}
        for end, name in _ENDS.items():
            if end in ends:
                shown.append(
                    Line2D([], [], color=INK, marker=_MARKS[end], linestyle="", markersize=4, label=name)
                )
        columns = _columns([entry.get_label() for entry in shown], self._figure)
        self._figure.legend(handles=shown, loc="outside lower center", ncols=columns, frameon=False)


MOST_MARKS = 6
_SCALES: Sequence[tuple[float, str, Sequence[float]]] = (
    (1.0, "seconds", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 50)),
    (60.0, "minutes", (1, 2, 5, 10, 15, 20, 30)),
    (3600.0, "hours", (1, 2, 3, 4, 6, 12, 24)),
    (86400.0, "days", (1, 2, 7, 14, 28, 91, 365, 36500)),
)
_MEAN: Any = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 2))}
_STATES = ("loading", "draining", "evicting", "stuck")
"""The states that a legend explains, if they come."""
_ENDS = {"severed": "severed later", "unserved": "never served"}
_MARKS = {"leased": "o", "severed": "x", "unserved": "+"}


def _looks(state: str, colour: str) -> tuple[str | tuple[float, float, float], str]:
    """The face and the hatch of a bar."""
    match state:
        case "loading":
            return _pale(colour, 0.8), "/////"
        case "draining":
            return _pale(colour, 0.45), ""
        case "evicting" | "cancelling":
            return GREY, ""
        case "stuck":
            return INK, ""
    return colour, ""


def _pale(colour: str, white: float) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _busiest_first(histories: Iterable[History]) -> list[str]:
    counts: defaultdict[str, int] = defaultdict(int)
    for history in histories:
        for wait in history.waits.values():
            counts[wait.model] += 1
    return sorted(counts, key=lambda model: (-counts[model], model))


_Lanes = dict[str, list[list[Bar]]]
"""GPU -> rows of bars of which no two overlap: one row, unless backends share the GPU."""


def _lanes(bars: Iterable[Bar], config: Config) -> _Lanes:
    lanes: _Lanes = {gpu: [] for b in config.backends for gpu in b.gpus}
    gpus = {backend.name: backend.gpus or ("",) for backend in config.backends}
    for bar in sorted(bars, key=lambda bar: bar.since):
        for gpu in gpus.get(bar.backend, ("",)):
            _put(bar, lanes.setdefault(gpu, []))
    return {gpu: rows or [[]] for gpu, rows in lanes.items()}


def _put(bar: Bar, rows: list[list[Bar]]) -> None:
    free = [row for row in rows if row[-1].until <= bar.since]
    own = [row for row in free if row[-1].backend == bar.backend and row[-1].until == bar.since]
    for row in own or free:
        row.append(bar)
        return
    rows.append([bar])


def _spans(
    bars: Iterable[Bar], models: Mapping[str, str]
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Bars by (state, model): since when, and how wide."""
    spans: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        spans[bar.state, models.get(bar.backend, "")].append((bar.since, bar.until - bar.since))
    return spans


def _stack(
    lengths: Mapping[str, Sequence[tuple[float, int]]], models: Iterable[str], end: float
) -> tuple[list[float], list[list[int]]]:
    """Moments, and for each model the length of its queue from each of them on."""
    moments = sorted({0.0, end, *[moment for steps in lengths.values() for moment, _ in steps]})
    if len(moments) > COLUMNS:
        moments = [end * part / COLUMNS for part in range(COLUMNS + 1)]
    return moments, [_longest(lengths.get(model, ()), moments) for model in models]


def _longest(steps: Sequence[tuple[float, int]], moments: Sequence[float]) -> list[int]:
    """The longest length in each part of the time, which begins at its moment; the last one is a moment."""
    changes = deque(dict(steps).items())  # the last one at each moment
    found, length = [], 0
    for since, until in zip(moments, [*moments[1:], math.inf], strict=True):
        held = [] if changes and changes[0][0] == since else [length]
        while changes and changes[0][0] < until:
            length = changes.popleft()[1]
            held.append(length)
        found.append(max(held))
    return found


def _time_scale(end: float) -> tuple[float, str, float]:
    """The unit, its name, and after how many of them marks are set."""
    unit, name, steps = next(scale for scale in _SCALES if end <= scale[0] * scale[2][-1] * MOST_MARKS)
    return unit, name, next(step for step in steps if end <= unit * step * MOST_MARKS)


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
