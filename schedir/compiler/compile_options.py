"""The options of `compile` that are attributes of programs or options of passes, with their types.

`compile_options.pyi` lists the options for type checkers and editors. After a change of an option,
generate `compile_options.pyi` again with `python -m schedir.compiler.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from inspect import Parameter, signature, unwrap
from pathlib import Path
from typing import Any, Final, TypeVar

from schedir.ir.program import ATTRIBUTE_FIELDS
from schedir.passes.pass_registry import PASS_OPTIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])
CompileOptions = dict[str, Any]
STUB_PATH: Final = Path(__file__).with_suffix(".pyi")


def list_options_in_signature(function: _Function) -> _Function:
    """Make `help` and notebooks show all options instead of `**extra_options` in a signature.

    Args:
        function: A function whose last parameter is `**extra_options: Unpack[CompileOptions]`.
    """
    old_signature = signature(function)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=type_text)
        for name, type_text in _list_option_types(old_signature.parameters).items()
    ]
    parameters = [*[*old_signature.parameters.values()][:-1], *options]
    vars(function)["__signature__"] = old_signature.replace(parameters=parameters)
    return function


def make_stub(function: Callable[..., Any]) -> str:
    """Return the text of `compile_options.pyi`.

    Args:
        function: The function `compile`.

    Returns:
        The source code of the stub.
    """
    types = _list_option_types(unwrap(function).__annotations__)
    lines = [f"    {name}: {type_text}\n" for name, type_text in types.items()]
    return f"""\
# Generated from the options of programs and passes by `python -m schedir.compiler.compile`;
# do not edit.
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from schedir.passes.selection import Selection
from schedir.passes.splitting.stage_segmentation import SegmentSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
STUB_PATH: Path

def list_options_in_signature(function: _Function) -> _Function: ...
def make_stub(function: Callable[..., Any]) -> str: ...

class CompileOptions(TypedDict, total=False):
    \"\"\"Keywords of `compile`, which `schedir options` describes.

    None means that an option is not given.
    \"\"\"

{"".join(lines)}"""


def _list_option_types(explicit: Container[str]) -> dict[str, str]:
    """Return the source text of the type of each option that is not in `explicit`."""
    types = {field.name: field.field_type for field in ATTRIBUTE_FIELDS}
    types |= {name: field_type for name, (field_type, _) in PASS_OPTIONS.items()}
    return {
        name: f"{types[name].argument_type or types[name].type.__name__} | None"
        for name in sorted(types)
        if name not in explicit
    }
