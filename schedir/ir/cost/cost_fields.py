"""The fields of `Costs`: one for each cost in the instruction table.

`cost_fields.pyi` has the same fields for type checkers and editors. After a change of the table,
generate it again with `python -m schedir.ir.cost.cost_fields`.
"""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import Final

from schedir.ir.cost.per_stage_values import PerStage
from schedir.ir.isa.instructions import INSTRUCTIONS

# Opcode -> name of its cost.  A receive has no cost, because it ends together with its send.
COST_BY_OPCODE: Final = {row.op: row.cost for row in INSTRUCTIONS if row.cost}
_LEADING_NAMES: Final = (
    "F", "I", "W", "B", "R", "FB", "send", "step",
    "reduce_grads", "reduce_replicated_stages", "reduce_tied", "reduce_norm",
)  # fmt: skip
COST_NAMES: Final = tuple(dict.fromkeys((*_LEADING_NAMES, *COST_BY_OPCODE.values())))
STUB_PATH: Final = Path(__file__).with_suffix(".pyi")

CostFields = make_dataclass(
    "CostFields", [(n, PerStage | None, None) for n in COST_NAMES], frozen=True, kw_only=True
)


def make_stub() -> str:
    """Return the text of `cost_fields.pyi`.

    Returns:
        The source code of the stub.
    """
    lines = [f"    {name}: PerStage | None = ...\n" for name in COST_NAMES]
    return f"""\
# Generated from the instruction table by `python -m schedir.ir.cost.cost_fields`; do not edit.
from dataclasses import dataclass
from pathlib import Path

from schedir.ir.cost.per_stage_values import PerStage
from schedir.ir.isa.opcodes import Opcode

COST_BY_OPCODE: dict[Opcode, str]
COST_NAMES: tuple[str, ...]
STUB_PATH: Path

def make_stub() -> str: ...

@dataclass(frozen=True, kw_only=True)
class CostFields:
{"".join(lines)}"""


if __name__ == "__main__":
    STUB_PATH.write_text(make_stub())
