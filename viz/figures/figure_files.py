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

# Suffix -> the metadata to leave out, because it would make the bytes of equal figures differ.
FORMAT_METADATA: Final[dict[str, dict[str, None]]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
# Text remains text: a PDF embeds its fonts, and an SVG names them. The fixed salt of ids in an SVG
# makes the bytes of equal figures equal.
_RC_PARAMS: Final[dict[Any, Any]] = {
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "schedir",
}
_DPI: Final = 200  # pixels per inch of a PNG


def require_figure_suffix(path: str | Path, hint: str = "") -> str:
    """Return the suffix of the file of a figure, in lower case.

    Args:
        path: The file.
        hint: The hint of the error.

    Raises:
        UsageError: The suffix is not in `FORMAT_METADATA`.
    """
    suffix = require_path(path).suffix.lower()
    if suffix not in FORMAT_METADATA:
        raise UsageError(
            f"the file name of a picture must end in {' or '.join(FORMAT_METADATA)}, not "
            f"{str(path)!r}",
            hint=hint,
        )
    return suffix


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF, according to the suffix of `path`.

    The file is written completely or not at all. Equal figures give equal bytes.

    Args:
        figure: The figure.
        path: The file.

    Raises:
        UsageError: The suffix is not one of these three, or the file cannot be written.

    Example:
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
    require_type(figure, "figure", Figure, "schedir.viz.gantt(timeline)")
    suffix = require_figure_suffix(path)
    # The figure is first written to memory. On a full disk, matplotlib's PDF writer raises other
    # errors instead of the OSError.
    content = BytesIO()
    with matplotlib.rc_context(_RC_PARAMS), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box. The warning would not help the user.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(content, format=suffix[1:], dpi=_DPI, metadata=FORMAT_METADATA[suffix])
    with atomic_write(path) as temporary:
        # Not `getbuffer`: Python 3.12.1 crashes when it collects a BytesIO with a view (gh-77894).
        temporary.write_bytes(content.getvalue())
