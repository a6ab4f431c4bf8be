"""The ordered list of passes that lower a draft to a program.

`compile` runs these passes, `check` verifies the instructions that they require, and `relower`
repeats them for another draft. A module of this folder, or of its sub-folders, registers its passes
in a constant `PASSES`. The fields `Pass.phase` and `Pass.order` determine the order of the passes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Final

from schedir.ir.pipeline.field_schema import YES_OR_NO_TYPE, FieldType
from schedir.passes.pass_types import LOWERING_PHASES, Pass


def _find_passes() -> Iterator[Pass]:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "PASSES", ())


LOWERING_PASSES: Final[tuple[Pass, ...]] = tuple(
    sorted(_find_passes(), key=lambda p: (LOWERING_PHASES.index(p.phase), p.order, p.name))
)

# Name of an option that a pass defines -> (type, help text).
PASS_OPTIONS: Final[Mapping[str, tuple[FieldType, str]]] = {
    option: (
        lowering_pass.option_types.get(option, YES_OR_NO_TYPE),
        lowering_pass.option_descriptions.get(option)
        or lowering_pass.description
        or f"with the pass {lowering_pass.name}",
    )
    for lowering_pass in LOWERING_PASSES
    for option in lowering_pass.option_names
}
# Opcode -> option of the pass that inserts this instruction (`Pass.opcodes`).
OPTION_BY_OPCODE: Final[Mapping[int, str]] = {
    op: option
    for lowering_pass in LOWERING_PASSES
    for op in lowering_pass.opcodes
    for option in lowering_pass.option_names
}
# Name of an option that a pass defines -> section of a configuration that has the option.
OPTION_SECTIONS: Final = {
    option: lowering_pass.section
    for lowering_pass in LOWERING_PASSES
    for option in lowering_pass.option_names
}
