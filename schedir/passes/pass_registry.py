"""The ordered list of passes that lower a draft to a program.

The one list of them: `compile` folds over it, `check` counts what it expects, and whoever lowers
another draft in the way of a program repeats it.  A pass is in it by being in this folder: a module
has its records in `PASSES`, and a record says where it stands (`Pass.part`, `Pass.order`).
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
    sorted(
        _find_passes(), key=lambda each: (LOWERING_PHASES.index(each.phase), each.order, each.name)
    )
)

# What passes take beside the options of all lowering: by name the kind, and what it is for.
PASS_OPTIONS: Final[Mapping[str, tuple[FieldType, str]]] = {
    option: (
        each.option_types.get(option, YES_OR_NO_TYPE),
        each.option_descriptions.get(option) or each.description or f"with the pass {each.name}",
    )
    for each in LOWERING_PASSES
    for option in each.option_names
}
# Of which section of a configuration each of them is a setting.
OPTION_SECTIONS: Final = {
    option: each.section for each in LOWERING_PASSES for option in each.option_names
}
