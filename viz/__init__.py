"""Pictures: a Timeline in, a matplotlib Figure or an HTML page out.  Nothing else knows matplotlib.

Importing this loads no matplotlib; the first use of a figure does, that of a page does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from schedir.viz.chart import compare, gantt
    from schedir.viz.output import save
    from schedir.viz.page import html, save_html
    from schedir.viz.plans import plan_memory, plan_scaling, plan_times
    from schedir.viz.style import Style
    from schedir.viz.summary_charts import frontier, idle_map, tradeoff
    from schedir.viz.text_chart import letters
    from schedir.viz.windows import visited

_HOME: Final = {
    "Style": "style",
    "compare": "chart",
    "frontier": "summary_charts",
    "gantt": "chart",
    "html": "page",
    "idle_map": "summary_charts",
    "letters": "text_chart",
    "plan_memory": "plans",
    "plan_scaling": "plans",
    "plan_times": "plans",
    "save": "output",
    "save_html": "page",
    "tradeoff": "summary_charts",
    "visited": "windows",
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
