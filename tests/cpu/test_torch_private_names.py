"""Tests that the installed torch has each private name on which `schedir.torch_pipelining` depends.

torch may change private names in any version. If a name is missing, a test here fails, and names
the feature that would break.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from schedir.torch_pipelining import Schedule

FOLDER = Path(inspect.getfile(Schedule)).parent
SCHEDULES = "torch.distributed.pipelining.schedules"

# (module, name) -> the feature that needs it.
IMPORTED = {
    (SCHEDULES, "_Action"): "lists of actions for torch's runtime",
    (SCHEDULES, "_PipelineScheduleRuntime"): 'runtime="torch"',
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"): "checks of stages",
    ("torch.distributed.pipelining", "_backward"): 'split backwards with runtime="torch"',
    ("torch.distributed._composable.contract", "_get_registry"): "the refusal of `replicate`",
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"): "hooks of `fully_shard`",
    ("torch.utils._pytree", "tree_leaves"): "nested arguments",
    ("torch.utils._pytree", "tree_map_only"): "nested arguments",
}
# Methods of torch's runtime that schedir replaces. torch must still call them.
REPLACED = {
    "_initialize_stages": "the first step",
    "_load_csv": "the refusal of unchecked CSV files",
    "_maybe_compute_loss": "losses in the order of microbatches",
    "_maybe_get_loss": "losses in the order of microbatches",
    "_merge_outputs": "outputs of microbatches of different lengths",
    "_split_inputs": "lists of microbatches",
    "_step_microbatches": "programs with torch's runtime",
    "_update_losses": "losses in the order of microbatches",
}
# Attributes that torch's runtime sets and schedir reads or sets.
ATTRIBUTES = {
    "_args_chunk_spec": "the division of a batch into microbatches",
    "_has_backward": "schedules without a loss",
    "_internal_losses": "losses",
    "_kwargs_chunk_spec": "the division of a batch into microbatches",
    "_loss_fn": "losses",
    "_n_microbatches": "the number of microbatches",
    "_output_merge_spec": "outputs of microbatches of different lengths",
    "_stages": "the stages of a rank",
    "_stages_backward_initialized": "the first step",
    "_stages_forward_initialized": "the first step",
}
TORCH_SOURCE = "".join(
    inspect.getsource(kind)
    for kind in _PipelineScheduleRuntime.__mro__
    if kind.__module__ == SCHEDULES
)
OWN_CLASSES = [kind for kind in Schedule.__mro__ if kind.__module__.startswith("schedir.")]


def list_imported() -> set[tuple[str, str]]:
    """Return the private names that the files of the folder import from torch."""
    return {
        (node.module, alias.name)
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if node.module and (alias.name.startswith("_") or "._" in node.module)
    }


def list_attributes() -> set[str]:
    """Return the private attributes that both torch's runtime and schedir's classes use."""
    own_source = "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in OWN_CLASSES)
    names = [{*re.findall(r"self\.(_[a-z]\w*)", text)} for text in (own_source, TORCH_SOURCE)]
    methods = {name for kind in OWN_CLASSES for name in vars(kind)}
    return names[0] & names[1] - methods


def list_replaced() -> set[str]:
    """Return the private methods of torch's runtime that schedir's classes define, too."""
    theirs = {name for kind in _PipelineScheduleRuntime.__mro__ for name in vars(kind)}
    own = {name for kind in OWN_CLASSES for name in vars(kind) if re.match(r"_[a-z]", name)}
    return (own & theirs) - {"_abc_impl"}


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_torch_has_imported_name(module: str, name: str) -> None:
    owner = import_module(module)
    feature = IMPORTED[module, name]
    assert hasattr(owner, name), f"torch has no {module}.{name}, which {feature} needs"


@pytest.mark.parametrize("name", REPLACED)
def test_torch_calls_replaced_method(name: str) -> None:
    message = f"torch's runtime does not use {name}, which {REPLACED[name]} needs"
    assert name == "_load_csv" or f"self.{name}(" in TORCH_SOURCE, message
    assert hasattr(_PipelineScheduleRuntime, name), message


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_torch_has_attribute(name: str) -> None:
    message = f"torch's runtime has no attribute {name}, which {ATTRIBUTES[name]} needs"
    assert f"self.{name}" in TORCH_SOURCE, message


def test_torch_has_functions_of_split_backward_and_stage_metadata() -> None:
    backward = import_module("torch.distributed.pipelining._backward")
    assert hasattr(backward, "_get_grad_fn_or_grad_acc"), 'split backwards with runtime="torch"'
    assert "self._stage_meta" in inspect.getsource(_PipelineStageBase), "checks of output shapes"


def test_reduction_uses_public_function() -> None:
    """`register_custom_function` is torch's public way to replace the function of an action."""
    assert hasattr(_PipelineScheduleRuntime, "register_custom_function")


def test_tables_list_all_private_names() -> None:
    assert list_imported() == {*IMPORTED}
    assert list_replaced() == {*REPLACED}
    assert list_attributes() == {*ATTRIBUTES}
