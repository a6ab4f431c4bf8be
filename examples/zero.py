"""Train within a memory limit that needs both ZeRO and activation recomputation.

    python examples/zero.py [FOLDER]

The script writes its results to FOLDER, by default ./zero-output, and replaces results of an
earlier run. The exit code is 0 if schedir refuses the first three runs and completes the fourth:

1. replicas without ZeRO and without recomputation
2. recomputation without ZeRO
3. ZeRO without recomputation
4. ZeRO and recomputation
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from schedir.errors import SchedirError, format_bytes
from schedir.training.config.config_file import read_config
from schedir.training.run_results import make_directory
from schedir.training.train import run

CONFIG = Path(__file__).with_suffix(".toml")
MEMORY = read_config(str(CONFIG)).memory
ZERO, RECOMPUTE = "pipeline.zero=3", "memory.recompute=fit"
REFUSED_SETTINGS = {
    "Two replicas, each with all weights, gradients and the optimizer's state": [],
    "Running forwards again as far as that helps": [RECOMPUTE],
    "Each replica with a part of weights, gradients and the optimizer's state (zero 3)": [ZERO],
}


def main() -> int:
    folder = Path(*sys.argv[1:2] or ["zero-output"])
    try:
        make_directory(str(folder))
    except SchedirError as error:
        print(error)
        return 2
    set_options = [f"output.dir={json.dumps(str(folder))}", "output.overwrite=true"]
    errors = []
    for title, settings in REFUSED_SETTINGS.items():
        print(f"{title}:", flush=True)
        if run(str(CONFIG), [*set_options, *settings]) != 2:
            errors.append(f"was not refused: {title}")
        print(flush=True)
    print("Both:", flush=True)
    if exit_code := run(str(CONFIG), [*set_options, ZERO, RECOMPUTE]):
        return exit_code
    summary = json.loads((folder / "summary.json").read_text())
    (predicted,), (counted,) = (summary["memory"][name] for name in ("predicted", "counted"))
    print(
        f"a replica held {format_bytes(counted)}, predicted {format_bytes(predicted)}, of "
        f"{MEMORY.memory_limit}"
    )
    if max(predicted, counted) > (MEMORY.limit_bytes or 0):
        errors.append("the limit was exceeded")
    for message in errors:
        print(f"FAILED: {message}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
