"""The command `examples`: write the example files of the documentation to a folder.

The cluster presets of `schedir plan` are among these files, in the folder `clusters`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from shutil import copyfile

from schedir.errors import UsageError
from schedir.io.files import describe_os_error
from schedir.planner.hardware.cluster_presets import cluster_presets, get_preset_path

EXAMPLES = """\
  schedir examples

The page docs/tutorials/train-a-model.md has more.
"""
_SOURCE = Path(__file__).parents[1] / "examples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `examples`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "-o", dest="output", metavar="DIR", default="examples",
        help="the folder to create (default: examples)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """Write the example files.

    Args:
        args: The parsed options of `examples`.

    Returns:
        A line with the number of files.

    Raises:
        UsageError: The folder already exists, or cannot be written.
    """
    folder = Path(args.output)
    examples = sorted(path for path in _SOURCE.iterdir() if path.is_file())
    clusters = [path for name in cluster_presets() if (path := get_preset_path(name))]
    try:
        for target, sources in ((folder, examples), (folder / "clusters", clusters)):
            target.mkdir(parents=True)
            for source in sources:
                copyfile(source, target / source.name)
    except FileExistsError:
        raise UsageError(
            f"-o {args.output}: the folder exists already, and its files are not replaced",
            hint="-o DIR writes to another folder",
            fields=["output"],
        ) from None
    except OSError as error:
        raise UsageError(f"-o {args.output}: {describe_os_error(error)}") from None
    count = len(examples) + len(clusters)
    return f"wrote {count} files to {args.output}\n"
