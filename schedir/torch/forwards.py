"""Forwards: what each shows of what torch's runtime will do, looked at before it goes wrong."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from schedir.torch import halves
from schedir.torch.losses import ByMicrobatch
from schedir.torch.stages import require_as_told

_RUN_BY: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()  # stages, by what schedule last


class Watched(ByMicrobatch):
    """torch's runtime, with each forward looked at."""

    _has_backward: bool
    _splits: frozenset[int]  # stages some of whose backwards are in halves
    _seen: list[Any]  # stages whose backwards were looked at

    def _take_stages(self) -> None:
        """Find shapes anew where another schedule has run these stages since, with its own."""
        if any(stage in _RUN_BY and _RUN_BY[stage]() is not self for stage in self._stages):
            self._stages_forward_initialized = self._stages_backward_initialized = False
        for stage in self._stages:
            _RUN_BY[stage] = ref(self)

    def _ran_forward(self, stage: Any, output: Any, mb_index: int) -> None:
        """Look at what a forward of a stage shows of its backward."""
        if not stage.is_last:
            own = {each.stage_index for each in self._stages}
            require_as_told(stage, output, sent=stage.stage_index + 1 not in own)
        if not self._has_backward:
            return
        if stage.is_first or stage.stage_index not in self._splits or stage.dw_builder is not None:
            return  # whole: that of the first stage is, at W
        outputs, inputs = stage.fwd_cache[mb_index]
        if stage.is_last:
            ends = (halves.detachable(self._loss_of[mb_index]),)
            self._loss_of[mb_index] = ends[0]
        else:
            ends = tuple(map(halves.detachable, outputs))
            stage.fwd_cache[mb_index] = (ends, inputs)
        if stage not in self._seen:
            self._seen.append(stage)
            if halves.loses(stage, ends, mb_index):
                stage.dw_builder = halves.whole_at_i
