"""Draw a Timeline as a matplotlib Figure, an HTML page or a text chart.

Importing this module does not import matplotlib. The first use of a figure imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from schedir.retired_names import make_attribute_error

if TYPE_CHECKING:
    from schedir.viz.figures.figure_files import save
    from schedir.viz.figures.gantt_chart import compare, gantt
    from schedir.viz.figures.plan_charts import plan_memory, plan_scaling, plan_times
    from schedir.viz.figures.summary_charts import bubble_vs_memory, idle_map, memory_frontier
    from schedir.viz.figures.window_chart import window_tiles
    from schedir.viz.html_page import html, save_html
    from schedir.viz.notebook_widget import widget
    from schedir.viz.style import Style
    from schedir.viz.terminal_chart import text_chart

_MODULE_BY_NAME: Final = {
    "Style": "style",
    "compare": "figures.gantt_chart",
    "memory_frontier": "figures.summary_charts",
    "gantt": "figures.gantt_chart",
    "html": "html_page",
    "idle_map": "figures.summary_charts",
    "text_chart": "terminal_chart",
    "plan_memory": "figures.plan_charts",
    "plan_scaling": "figures.plan_charts",
    "plan_times": "figures.plan_charts",
    "save": "figures.figure_files",
    "save_html": "html_page",
    "bubble_vs_memory": "figures.summary_charts",
    "widget": "notebook_widget",
    "window_tiles": "figures.window_chart",
}
__all__ = [
    "Style",
    "bubble_vs_memory",
    "compare",
    "gantt",
    "html",
    "idle_map",
    "memory_frontier",
    "plan_memory",
    "plan_scaling",
    "plan_times",
    "save",
    "save_html",
    "text_chart",
    "widget",
    "window_tiles",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise make_attribute_error(__name__, name)
    return getattr(import_module(f"schedir.viz.{_MODULE_BY_NAME[name]}"), name)
