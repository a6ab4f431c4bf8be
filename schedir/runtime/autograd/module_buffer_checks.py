"""Check the buffers that forwards change, such as running statistics.

Buffers get the same values as in a plain training loop if one rank has the stage and runs its
forwards in the order of the microbatches. Stage replicas and data-parallel replicas compute buffers
from some of the microbatches only. A forward that a backward recomputes changes buffers twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from operator import is_
from typing import NamedTuple

import torch
from torch import nn

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Instr
from schedir.runtime.model_checks.memory_overlap import find_shared_buffers
from schedir.runtime.model_checks.tensor_fingerprint import get_versions, has_same_bits
from schedir.runtime.program_state import ProgramState


def add_buffer_checks(
    state: ProgramState, i: Instr, is_forward: bool, run: Callable[[], None]
) -> Callable[[], None]:
    """Wrap `run` with a check for changes of buffers that would give wrong results.

    A buffer counts as changed if a write gives it other values, or if a new buffer of the same
    shape with other values replaces it. The check ignores a buffer that is removed, or replaced by
    a buffer of another shape. Some kernels, such as torch's batch_norm, write without an increment
    of the version counter. So on a CPU, the first call for each opcode and mode (training or
    evaluation) compares values. Later calls compare version counters, and the values of buffers
    that an earlier call rewrote with equal values, such as caches.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes.
        is_forward: True for a forward, False for a backward.
        run: A function that runs the module of a local stage, and the loss for the last stage.

    Returns:
        A function that raises ModelError for a change that gives wrong results. For a change that
        only gives other values than a plain training loop, the function warns once per stage.
    """
    stage = state.stages[i.stage]
    modules = [*stage.module.named_modules()]
    for loss in state.options.loss_modules if i.stage == state.shape.stages - 1 else ():
        modules += [(f"loss.{path}".rstrip("."), module) for path, module in loss.named_modules()]
    modules_with_buffers = [(path, module) for path, module in modules if module._buffers]
    cases = _find_cases(state, i, is_forward) if modules_with_buffers else []
    if not cases:
        return run

    def run_checked() -> None:
        mode = (i.op, stage.module.training)
        is_first = mode not in stage.checked_buffer_modes
        stage.checked_buffer_modes.add(mode)
        entries = [
            (path, module, name, buffer)
            for path, module in modules_with_buffers
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        buffers = [buffer for *_, buffer in entries]
        old_versions = get_versions(buffers)
        has_copy = [
            is_first or (path, name) in stage.rewritten_buffers for path, _, name, _ in entries
        ]
        old_values = [
            b.clone() if is_copied else b for b, is_copied in zip(buffers, has_copy, strict=True)
        ]
        run()
        new_buffers = [module._buffers.get(name) for _, module, name, _ in entries]
        new_versions = get_versions(buffers)
        compares_values = is_first and state.device.type == "cpu"
        if (
            not compares_values
            and old_versions == new_versions
            and all(map(is_, buffers, new_buffers))
        ):
            return
        for k, (path, module, name, buffer) in enumerate(entries):
            new_buffer, old_value = new_buffers[k], old_values[k]
            is_written = old_versions[k] != new_versions[k]
            if new_buffer is None or new_buffer.shape != buffer.shape:
                continue
            is_changed = is_written or new_buffer is not buffer
            if not is_changed and not compares_values:
                continue
            if (has_copy[k] or not is_written) and has_same_bits(new_buffer, old_value):
                if is_changed:
                    stage.rewritten_buffers.add((path, name))
                continue
            case = next((case for case in cases if case.concerns(module, buffer)), None)
            if case is None:
                continue
            full_name = ".".join(filter(None, (path, name)))
            fact = f"stage {i.stage} changes its buffer {full_name} {case.fact}"
            if case.hint:
                raise ModelError(fact, hint=case.hint)
            if not stage.has_warned_of_buffers:
                stage.has_warned_of_buffers = True
                warnings.warn(fact, stacklevel=2)

    return run_checked


class _Case(NamedTuple):
    """A reason why a change of a buffer is wrong, for some buffers or for all buffers.

    Attributes:
        fact: The end of the error or warning message.
        hint: The hint of the error. If it is empty, the change causes a warning only.
        modules: The case concerns all buffers of these modules.
        buffers: Other buffers that the case concerns. If `modules` and `buffers` are empty, the
            case concerns all buffers.
    """

    fact: str
    hint: str = ""
    modules: Collection[nn.Module] = ()
    buffers: Collection[torch.Tensor] = ()

    def concerns(self, owner: nn.Module, buffer: torch.Tensor) -> bool:
        is_specific = bool(self.modules or self.buffers)
        return not is_specific or owner in self.modules or any(b is buffer for b in self.buffers)


def _find_cases(state: ProgramState, i: Instr, is_forward: bool) -> list[_Case]:
    """Return the reasons why an instruction must not change a buffer, the most serious first."""
    if not is_forward:
        fact = "in a backward, such as in a recomputed forward: the schedule decides when"
        return [_Case(fact, "do not checkpoint layers that change buffers")]
    if state.shape.placement_rows > 1:
        rows = state.shape.placement_rows
        fact = f"in a forward, and each of the {rows} stage replicas would have different values"
        hint = "call eval() on its module, or use a placement with one rank for each stage"
        return [_Case(fact, hint)]
    if state.program.dp > 1:
        return [_Case("in a forward: each replica has different values, from its own microbatches")]
    cases = []
    module = state.stages[i.stage].module
    other_modules = [stage.module for s, stage in state.stages.items() if s != i.stage]
    other_modules += state.resources.options.other_rank_stages
    other_submodules = {m for other_module in other_modules for m in other_module.modules()}
    shared_modules = [m for m in module.modules() if m._buffers and m in other_submodules]
    shared_buffers = find_shared_buffers(module, other_modules)
    if shared_modules or shared_buffers:
        fact = (
            "in a forward, and another stage uses it: the schedule decides when that stage gets "
            "the change, and a stage in another process never gets it"
        )
        cases.append(_Case(fact, modules=shared_modules, buffers=shared_buffers))
    order = [mb for op, s, mb in state.stream if op is i.op and s == i.stage]
    if order != sorted(order):
        fact = "in a forward, but its forwards do not run in the order of the microbatches"
        cases.append(_Case(fact))
    return cases
