"""Pictures: a Timeline in, a matplotlib Figure out.  Nothing else knows matplotlib.

Importing this loads no matplotlib; the first use of a name does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedir.viz.chart import compare, gantt
    from schedir.viz.output import save

__all__ = ["compare", "gantt", "save"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from schedir.viz import chart, output

    return getattr(output if name == "save" else chart, name)
