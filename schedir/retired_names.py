"""Retired options, settings and keys, and their replacements.

Why each feature was deleted: `docs/decisions/47-deleted-features.md`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# A key is a name as the user writes it: an option (`--count`), a setting of a configuration
# (`section.name`), a value of a setting (`kind = bert`, or the suffix of a file in `source`), or an
# option of `compile`, which is also a key in a `.sched` file (`open`).  The value is the hint of
# the error: it names the replacement.
_OPTIONS = {
    "activations": "max-activations", "axis": "axis-label", "blocks": "blocking-hosts",
    "colours": "colors", "device-waits": "host-device-sync", "draft": "compute-only",
    "eager": "eager-limit", "evaluations": "max-evaluations", "flat": "no-repeat",
    "idle": "idle-map", "in-flight": "max-in-flight", "lazy": "lazy-communicators",
    "limit": "memory-limit", "model": "progress-model", "most-instructions": "max-instructions",
    "no-exact": "closed-form-only", "on": "rank-programs", "order": "rank-order",
    "prove": "bound", "scale": "gpu-counts", "search": "improve-schedules",
    "seconds": "time-limit", "start": "initial-schedules", "take": "select",
    "time": "time-range", "whole": "no-split-backward", "why": "explain-start",
}  # fmt: skip
_COMMANDS = {"best": "recommend", "show": "print", "where": "diagnose"}
RETIRED: Final = MappingProxyType(
    {
        **{f"--{old}": f"--{old} is now --{new}" for old, new in _OPTIONS.items()},
        **{f"schedir {old}": f"it is now schedir {new}" for old, new in _COMMANDS.items()},
        "--ties": "--ties is now -O tied=STAGES",
        "open": "use one program with more microbatches, which accumulates their gradients",
        "kind = bert": "examples/bert.py trains it with schedir.runtime.Executor",
        "kind = encoder_decoder": "examples/encoder_decoder.py trains it with "
        "schedir.runtime.Executor",
        "tokenizer = bpe": "name the path of a tokenizer.json: the library tokenizers trains one, "
        "and ~/.cache/schedir has those of earlier runs",
        "source = .jsonl": "Megatron-LM's tools/preprocess_data.py writes a .bin and an .idx of it",
    }
)
