"""The interactive timeline as a widget of notebooks."""

from __future__ import annotations

from typing import Any

from schedir.extras import require_package
from schedir.predict.timeline import Timeline
from schedir.viz.html_page import build_widget_script, dump_json
from schedir.viz.page_data import describe_runs, describe_texts


def widget(timeline: Timeline, other: Timeline | None = None) -> Any:
    """Return a widget with the interactive timeline of a run, or of two runs.

    This function needs the package anywidget, whose widgets work in Jupyter, VS Code, Colab and
    marimo.

    Args:
        timeline: The run.
        other: A second run, as for `html`.

    Returns:
        An `anywidget.AnyWidget`. The last expression of a cell shows it.

    Raises:
        schedir.extras.MissingPackageError: anywidget is not installed.
        UsageError: The two runs have different numbers of ranks.

    Example:
        >>> import schedir
        >>> run = schedir.simulate(schedir.compile("gpipe", ranks=2, microbatches=4))
        >>> schedir.viz.widget(run)  # doctest: +SKIP
        TimelineWidget()
    """
    require_package("anywidget", "schedir.viz.widget")
    from anywidget import AnyWidget
    from traitlets import Unicode

    runs = [timeline] if other is None else [timeline, other]
    data = describe_runs(runs) | describe_texts(runs)
    members = {
        "__doc__": "The interactive timeline of a run.",
        "_esm": build_widget_script(),
        "data": Unicode().tag(sync=True),
    }
    return type("TimelineWidget", (AnyWidget,), members)(data=dump_json(data))
