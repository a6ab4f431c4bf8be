"""Draw a Timeline as a matplotlib Figure or an HTML page.

Importing this loads no matplotlib; the first use of a figure does, that of a page does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from schedir.viz.figures.figure_files import save
    from schedir.viz.figures.gantt_chart import compare, gantt
    from schedir.viz.figures.plan_charts import plan_memory, plan_scaling, plan_times
    from schedir.viz.figures.summary_charts import frontier, idle_map, tradeoff
    from schedir.viz.figures.window_chart import visited
    from schedir.viz.html_page import html, save_html
    from schedir.viz.style import Style
    from schedir.viz.text_chart import letters

_HOME: Final = {
    "Style": "style",
    "compare": "figures.gantt_chart",
    "frontier": "figures.summary_charts",
    "gantt": "figures.gantt_chart",
    "html": "html_page",
    "idle_map": "figures.summary_charts",
    "letters": "text_chart",
    "plan_memory": "figures.plan_charts",
    "plan_scaling": "figures.plan_charts",
    "plan_times": "figures.plan_charts",
    "save": "figures.figure_files",
    "save_html": "html_page",
    "tradeoff": "figures.summary_charts",
    "visited": "figures.window_chart",
}
__all__ = [
    "Style",
    "compare",
    "frontier",
    "gantt",
    "html",
    "idle_map",
    "letters",
    "plan_memory",
    "plan_scaling",
    "plan_times",
    "save",
    "save_html",
    "tradeoff",
    "visited",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"schedir.viz.{_HOME[name]}"), name)
