"""Save figures to files."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

from schedir.errors import UsageError, require_type
from schedir.io.files import atomic_write, require_path

# By suffix, the metadata that would make two equal pictures differ, left out.
FORMAT_METADATA: Final[dict[str, dict[str, None]]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
# Text stays text: fonts are embedded in PDF, named in SVG; equal pictures are equal bytes.
_RC_PARAMS: Final[dict[Any, Any]] = {
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "schedir",
}
_DPI: Final = 200


def require_figure_suffix(path: str | Path, hint: str = "") -> str:
    """The suffix of a picture's file name, in lower case; UsageError if it is none of ours."""
    suffix = require_path(path).suffix.lower()
    if suffix not in FORMAT_METADATA:
        raise UsageError(
            f"a picture ends in {', '.join(FORMAT_METADATA)}: {path} does not", hint=hint
        )
    return suffix


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`; the file appears whole.

    Raises UsageError for any other suffix, and where the file cannot be written.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import schedir
    >>> run = schedir.simulate(schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(2, 4)))
    >>> with TemporaryDirectory() as folder:
    ...     schedir.viz.save(schedir.viz.gantt(run), f"{folder}/gpipe.svg")
    ...     print(*[path.name for path in Path(folder).iterdir()])
    gpipe.svg
    """
    require_type(figure, Figure, "schedir.viz.gantt(timeline)")
    suffix = require_figure_suffix(path)
    # Figures are first written to memory: on a full disk, matplotlib's PDF writer hides the OSError
    # behind errors of its own.
    content = BytesIO()
    with matplotlib.rc_context(_RC_PARAMS), warnings.catch_warnings():
        # A letter that the font does not have is drawn as a box, and nothing more is to be said.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(content, format=suffix[1:], dpi=_DPI, metadata=FORMAT_METADATA[suffix])
    with atomic_write(path) as temporary:
        # Not `getbuffer`: Python 3.12.1 crashes when it collects a BytesIO with a view (gh-77894).
        temporary.write_bytes(content.getvalue())
