"""Run a program between steps without changing the state of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from schedir.errors import ModelError
from schedir.runtime.autograd.module_buffers import remembered
from schedir.runtime.model_checks.tensor_fingerprint import sums_of, traces_of
from schedir.runtime.rank_state import State


@contextmanager
def looking(state: State) -> Iterator[None]:
    """Within this modules are as `eval()` has them, and what they draw is drawn for no step; after
    it modes, buffers and generators are as they were.

    Raises ModelError where a forward has written to a Parameter.
    """
    modules = [stage.module for stage in state.stages.values()]
    if isinstance(state.loss, nn.Module):
        modules.append(state.loss)
    modes = [(one, one.training) for module in modules for one in module.modules()]
    backs = [remembered(module) for module in modules]
    names = {p: name for module in modules for name, p in module.named_parameters()}
    # Those in parts have other memory meanwhile, and whoever gathers them looks at their traces.
    parts = {p for s in state.stages.values() if s.weights is not None for p in s.weights.pieces}
    others = [p for p in names if p not in parts]
    by_value = [*names] if state.device.type == "cpu" and not state.looked else []
    before = [*traces_of(others), *sums_of(by_value)]
    state.looks = state.looked = True
    try:
        for module in modules:
            module.eval()
        with state.draws.kept(always=True):
            yield
    finally:
        state.looks = False
        for one, training in modes:
            one.training = training
        for put_back in backs:
            put_back()
    after = [*traces_of(others), *sums_of(by_value)]
    for p, was, now in zip([*others, *by_value], before, after, strict=True):
        if was != now:
            raise ModelError(
                f"a forward writes to {names[p]}, when it is evaluated between steps",
                program=state.program.name,
                hint="let it be a buffer, which is put back, or write in training mode only",
            )
