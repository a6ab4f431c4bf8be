"""The attributes of a program beside its shape and instructions, such as `tp`, `dp` and `zero`."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, Final

from schedir.errors import PlanError, describe
from schedir.ir.cost.zero_states import CUT_FROM, LEVELS
from schedir.ir.isa.table_schema import TIERS
from schedir.ir.pipeline.field_schema import (
    YES_OR_NO,
    FieldType,
    itself,
    setting,
    whole_number,
)
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES, PipelineShape
from schedir.ir.pipeline.skip_connections import SKIPS as SKIPS_KIND
from schedir.ir.pipeline.stage_segments import MEETS as MEETS_KIND
from schedir.ir.pipeline.stage_segments import ranks_meet
from schedir.ir.pipeline.tied_weights import TIED as TIED_KIND
from schedir.ir.pipeline.tied_weights import Tied, show_tie, tied_stages


def _digest_of_ties(tied: Tied, plan: PipelineShape) -> tuple[object, ...]:
    """First and last stage are one case, however many stages there are."""
    ends = {tied_stages(True, plan): True, (): False}  # one stage is tied to nothing
    return (ends.get(tied, tied),)


def _settled_frozen(name: str, value: Any, plan: PipelineShape) -> int:
    """How many of the first stages are frozen; of all of them nothing would be trained."""
    frozen: int = _NUMBER.settle(name, value, plan)
    if frozen >= plan.stages:
        raise PlanError(
            f"{frozen} stages are frozen, and there are {plan.stages}: nothing would be trained",
            hint="schedules.forward_only runs forwards, whether stages are frozen or not",
            fields=[name],
        )
    return frozen


def _settled_chunked(name: str, value: Any, plan: PipelineShape) -> int:
    """Into how many chunks each microbatch is cut: those of each update, and of each row of
    holders, are whole ones."""
    chunked: int = CHUNKS.settle(name, value, plan)
    if any(end % (chunked * plan.segments) for end in (*plan.parts, plan.per_update)):
        each = ", in each update and along each row of holders" * (plan.updates + plan.rows > 2)
        raise PlanError(
            f"{plan.microbatches} microbatches are no whole ones of {chunked} chunks{each}",
            fields=[name, "microbatches"],
        )
    return chunked


def _one_of(*words: str) -> FieldType:
    """One of a few words."""
    takes = f"is {', '.join(map(repr, words[:-1]))} or {words[-1]!r}"

    def settle(name: str, value: Any, _: PipelineShape) -> str:
        if value not in words:
            raise PlanError(f"{name} {takes}, not {describe(value)}", fields=[name])
        return str(value)

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{takes}, not {text!r}")
        return text

    return FieldType(takes, read, str, settle=settle, metavar="WHEN")


def require_together(
    plan: PipelineShape,
    *,
    tied: Tied,
    clip: bool,
    frozen: int,
    validate: str,
    zero: int,
    reduce: str,
    snapshots: bool,
    states: str,
    meets: str,
    sequence: bool,
    tp: int,
) -> None:
    """Raise PlanError for traits of which each is right, and that do not go together."""
    for stages in tied:
        if stages[0] < frozen <= stages[-1]:
            raise PlanError(
                f"stages {show_tie(stages)} share a weight, and of these "
                f"{stages[0]} is frozen and {stages[-1]} is trained: one weight cannot be both",
                hint="freeze all stages that share it, or let the frozen one have its own",
                fields=["tied", "frozen"],
            )
    if validate == "after" and not clip:
        raise PlanError(
            "validate is 'after', and the program takes no norm: no step waits for another rank",
            hint="clip=True; a max_norm of infinity clips nothing",
            fields=["validate", "clip"],
        )
    if validate == "after" and plan.updates > 1:
        raise PlanError(
            f"validate is 'after', and a run has {plan.updates} updates, of which each is computed "
            "from the one before it",
            hint="validate='before', or one update",
            fields=["validate", "updates"],
        )
    if zero and plan.updates > 1:
        raise PlanError(
            f"zero is {zero}, and a run has {plan.updates} updates: parts of weights are gathered "
            "once in a step, and each update would need its own",
            hint="zero=0, or one update",
            fields=["zero", "updates"],
        )
    if zero and validate == "after":
        raise PlanError(
            f"zero is {zero}, and validate is 'after': a step that is made again needs what each "
            "replica has let go",
            hint="validate='before'",
            fields=["zero", "validate"],
        )
    if reduce == "turn" and zero < CUT_FROM["grads"]:
        raise PlanError(
            f"reduce is 'turn', and with zero {zero} each replica holds the whole gradient: it is "
            "reduced once",
            hint=f"zero={CUT_FROM['grads']}, or reduce='end'",
            fields=["reduce", "zero"],
        )
    if snapshots and validate == "after":
        raise PlanError(
            "snapshots are copied while the next step runs, and validate is 'after': that step may "
            "find that the update before it was wrong, and take it back",
            hint="validate='before', or no snapshots",
            fields=["snapshots", "validate"],
        )
    if states in TIERS[1:] and plan.updates > 1:
        raise PlanError(
            f"the optimizer's states are on the {states}, and a run has {plan.updates} updates: "
            "the next one computes while weights are stepped stage by stage on the device",
            hint="states='cpu', where the host steps them beside; states='device', or one update",
            fields=["states", "updates"],
        )
    if states != "device" and validate == "after":
        raise PlanError(
            f"the optimizer's states are on the {states}, and validate is 'after': an update that "
            "is made again needs what it has moved there",
            hint="states='device', or validate='before'",
            fields=["states", "validate"],
        )
    if ranks_meet(meets) and tp == 1:
        raise PlanError(
            "meets says where tensor-parallel ranks meet, and tp is 1: there is nobody to meet",
            hint="tp=2, or '.' for each f and g",
            fields=["meets", "tp"],
        )
    if sequence and tp == 1:
        raise PlanError(
            "tensor-parallel ranks share the sequence, and tp is 1: there is nobody to share with",
            hint="tp=2, or sequence=False",
            fields=["sequence", "tp"],
        )


TOGETHER: Final = tuple(signature(require_together).parameters)[1:]  # the traits that it is told

_NUMBER = whole_number(0, MAX_STAGES)
CHUNKS: Final = whole_number(1, MAX_MICROBATCHES)
_CHUNKED = replace(CHUNKS, settle=_settled_chunked)
_FROZEN_STAGES = replace(_NUMBER, settle=_settled_frozen)
TP: Final = setting(whole_number(1, 65535), "tensor-parallel ranks (1)", always=True, digest=itself)
DP: Final = setting(
    whole_number(1, 65535), "data-parallel replicas (1)", always=True, digest=itself
)
TIED: Final = setting(
    TIED_KIND,
    "stages that share weights: yes for the first and the last (a tied embedding), or 0=2,1=3",
    always=True,
    digest=_digest_of_ties,
    in_config=False,  # it is the model's there
)
CLIP: Final = setting(
    YES_OR_NO,
    "clipped gradients",
    always=True,
    digest=itself,
    in_config=False,  # it is the norm's there
)
FROZEN: Final = setting(_FROZEN_STAGES, "first stages that are not trained (0)")
VALIDATE: Final = setting(
    _one_of("before", "after"),
    "whether a step waits for the norm: before it (before), or after",
    in_config=False,  # a training run looks at each step's numbers
)
ZERO: Final = setting(whole_number(0, LEVELS - 1), "level of ZeRO, 0 to 3 (0)")
REDUCE: Final = setting(
    _one_of("end", "turn"), "when gradients in parts are reduced: at the end (end), or each turn"
)
SNAPSHOTS: Final = setting(
    YES_OR_NO,
    "copies of what a step changes, under it, for checkpoints",
    in_config=False,  # it is the checkpoint's there
)
STATES: Final = setting(
    _one_of(*TIERS, "cpu"),
    "where the optimizer's state lies between steps: on the device (device), the host, or its "
    "disk; or on the host, which steps it itself (cpu)",
    section="memory",
)
SEQUENCE: Final = setting(
    YES_OR_NO, "tensor-parallel ranks share the sequence, too: norms, dropout, and what is sent"
)
SKIPS: Final = setting(
    SKIPS_KIND,
    "from which stage to which: 0=3,1=2",
    in_config=False,  # it is the model's there
)
MEETS: Final = setting(
    MEETS_KIND,
    "which stages are pieces of one, and where tensor-parallel ranks meet between them: fgfg-fgfg "
    "(-O cut sets it)",
    in_config=False,  # a cut says it there
)
CHUNKED: Final = setting(
    _CHUNKED,
    "how many of the microbatches are chunks of one (-O chunks sets it)",
    in_config=False,  # chunks say it there
)
