"""Writes curves as a picture (matplotlib) or as a page that needs no other file and no network (plotly)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle
from pathlib import Path

from llama_stack_provider_trl.errors import InvalidRequest, MissingExtra

from .curves import AXES, Axis, Panel, PlotCurve

EXTRA = "plot"
_WIDTH, _HEIGHT = 9.0, 4.0
"""Inches of one panel."""
_DPI = 150
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_FAINT = 0.3
"""Opacity of points beside their smoothed line."""


def check_output(output: str | Path) -> Path:
    """The file to write, before anything is fetched for it. Raises InvalidRequest: it is of another kind, or its
    directory does not exist."""
    target = Path(output)
    if target.suffix.lower() not in _WRITERS:
        raise InvalidRequest("output", str(target), f"expected a file that ends with {', '.join(_WRITERS)}.")
    if not target.parent.is_dir():
        raise InvalidRequest("output", str(target), f"the directory {target.parent} does not exist.")
    return target


def write_plot(panels: Sequence[Panel], target: Path, x: Axis) -> Path:
    """Write panels below one another; returns `target`. Raises MissingExtra; OSError: the file cannot be written."""
    target.write_bytes(_WRITERS[target.suffix.lower()](panels, AXES[x]))
    return target


def _picture(kind: str) -> Callable[[Sequence[Panel], str], bytes]:
    def write(panels: Sequence[Panel], x_label: str) -> bytes:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtra(f"a plot as {kind}", "matplotlib", EXTRA) from error
        # Not pyplot: this needs no display, no global state and no main thread.
        colours = _colours(panels)
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(panels)), layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            for curve in panel.curves:
                _draw(axes, curve, colours[curve.job_uuid])
            axes.set_xlabel(x_label)
            # A name with dollar signs is no formula.
            axes.set_ylabel(panel.metric, parse_math=False)
            axes.grid(alpha=_FAINT)
            axes.legend()
        out = io.BytesIO()
        # The same points give the same file: no date, no random ids.
        with matplotlib.rc_context({"svg.hashsalt": "llama_stack_provider_trl"}):
            figure.savefig(out, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
        return out.getvalue()

    return write


def _draw(axes: object, curve: PlotCurve, colour: str) -> None:
    plot = axes.plot  # type: ignore[attr-defined]
    if curve.kind == "validation":
        plot(curve.x, curve.y, "o--", color=colour, label=_label(curve))
        return
    is_faint = bool(curve.smoothed)
    # A single point makes no line.
    marker = "o" if len(curve.x) == 1 else None
    alpha, label = (_FAINT, "") if is_faint else (1, _label(curve))
    plot(curve.x, curve.y, color=colour, alpha=alpha, marker=marker, label=label)
    if is_faint:
        plot(curve.x, curve.smoothed, color=colour, linewidth=2, label=_label(curve))


def _page(panels: Sequence[Panel], x_label: str) -> bytes:
    try:
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise MissingExtra("a plot as html", "plotly", EXTRA) from error
    figure = make_subplots(rows=len(panels), cols=1)
    colours, shown = _colours(panels), set()
    for row, panel in enumerate(panels, start=1):
        for curve in panel.curves:
            lines = [(curve.y, _label(curve), not curve.smoothed)]
            lines += [(curve.smoothed, f"{_label(curve)}, smoothed", True)] if curve.smoothed else []
            for values, name, is_bold in lines:
                figure.add_trace(
                    Scatter(
                        x=curve.x,
                        y=values,
                        name=name,
                        legendgroup=_label(curve),
                        showlegend=is_bold and _label(curve) not in shown,
                        mode="lines+markers" if curve.kind == "validation" or len(curve.x) == 1 else "lines",
                        line={
                            "color": colours[curve.job_uuid],
                            "dash": "dash" if curve.kind == "validation" else "solid",
                        },
                        opacity=1 if is_bold else _FAINT,
                    ),
                    row=row,
                    col=1,
                )
            shown.add(_label(curve))
        figure.update_xaxes(title_text=x_label, row=row, col=1)
        # plotly shows some tags of HTML in a title.
        figure.update_yaxes(title_text=escape(panel.metric), row=row, col=1)
    figure.update_layout(height=120 + 380 * len(panels), template="plotly_white", hovermode="x unified")
    page: str = figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False})
    return page.encode()


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Job -> its colour in every panel."""
    jobs = dict.fromkeys(curve.job_uuid for panel in panels for curve in panel.curves)
    return dict(zip(jobs, cycle(_COLOURS), strict=False))


def _label(curve: PlotCurve) -> str:
    return f"{curve.job_uuid}, validation" if curve.kind == "validation" else curve.job_uuid


_WRITERS: dict[str, Callable[[Sequence[Panel], str], bytes]] = {
    ".png": _picture("png"),
    ".svg": _picture("svg"),
    ".html": _page,
}
