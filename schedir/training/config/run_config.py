"""The sections of the configuration of a training run.  Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from schedir.errors import UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.sizes import Sizes, bytes_of
from schedir.ir.pipeline.field_schema import Field, FieldType
from schedir.ir.pipeline.pipeline_shape import PLAN, PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.ir.pipeline.stage_segments import NOBODY
from schedir.ir.program import HEADER, TRAITS, Program
from schedir.models.gpt_config import GPTConfig
from schedir.models.partitioning import split_tokens
from schedir.passes.pass_registry import OPTIONS, SECTION_OF
from schedir.passes.pass_types import BufferSharing
from schedir.training.config.model_kinds import KINDS, ModelConfig, kind_of
from schedir.training.config.segmentation import StageSegmentation, segmentation_of
from schedir.training.config.setting_types import NumberRange
from schedir.training.config.train_config import Count, Share, TrainConfig
from schedir.transports.registry import AUTO, DEVICES

_Section = TypeVar("_Section", bound=type)


def _with_all_settings(section: _Section) -> _Section:
    """A class with a setting, too, for each field of a program, and each option of a pass, that it
    does not name."""
    return _with_settings(section, _settings_of("pipeline"))


def _settings_of(section: str) -> dict[str, tuple[FieldType, Any]]:
    """The fields of programs and the options of passes that are settings of a section, with what
    they are unless said."""
    fields = {f.name: (f.kind, f.default) for f in HEADER if f.in_config and f.section == section}
    return fields | {
        name: (kind, _unsaid(kind))
        for name, (kind, _) in OPTIONS.items()
        if SECTION_OF[name] == section
    }


def _with_settings(section: _Section, said: Mapping[str, tuple[FieldType, Any]]) -> _Section:
    for name, (kind, default) in said.items():
        if name not in section.__annotations__:
            section.__annotations__[name] = _type_of(kind, optional=default is None)
            setattr(section, name, default)
    return section


def _unsaid(kind: FieldType) -> bool | None:
    """The value of an option that nobody says."""
    return False if kind.type is bool else None


def _type_of(kind: FieldType, *, optional: bool) -> Any:
    limited = kind.type
    if kind.least is not None and kind.most is not None:
        limited = Annotated[kind.type, NumberRange(kind.least, below=kind.most + 1)]
    return limited | None if optional else limited


@dataclass(frozen=True)
@_with_all_settings
class PipelineConfig:
    """Who computes what.  A `schedule` that is a FILE.sched brings the other settings along.

    `schedule` is a built-in name, file.py:function (which runs that file; `--no-code` refuses it)
    or FILE.sched; the first two may have options in brackets, as in "interleaved(group=4)". A
    schedule that is for one placement brings that along, and one that takes `v` has 2 stages per
    rank unless told. A step has one update, or several `updates` without a flush, on weights that
    are `delay` updates old (one number per stage, if need be); `pipedream_2bw` brings its delay
    along. With `sequence` tensor-parallel ranks share the sequence, too, where each would do the
    same with all of it: what they save of that, and send, is 1/tp. `overlap` groups opposite
    transfers, and begins gathers and posts receives early; `slots` says whether each value has a
    buffer of its own ("own"), or they share the "fewest", or "enough" to lose no time where a
    message takes half a forward, and hardly any where less; "auto" is "enough" on GPUs, where
    buffers of their own would take gigabytes, and "own" on CPUs, and leaves a FILE.sched that says
    its slots as it is. `division` is the layers of each stage, where they cannot be or shall not be
    the same. pp x tp x dp processes run it.

    With cut = "layers" the stages of a GPT are in pieces, cut where the tensor-parallel ranks of
    each layer meet: n layers are 4 n + 1 pieces; numbers of pieces say as much, one for all stages
    or each its own, with 1 for one that stays whole. With `chunks` each microbatch is cut in as
    many, of `data.microbatch_size` / chunks samples. What `memory` names by stage and microbatch
    are pieces and chunks, then. An order in which something else runs meanwhile (`fill`) needs
    costs: `schedir compile ... -O cut=fgfg -O fill=W --costs ... -o x.sched` writes it, with the
    numbers of pieces, and schedule = "x.sched" trains it.
    """

    schedule: str = "one_f_one_b"
    ranks: int = 1
    microbatches: int = 8
    stages_per_rank: int = field(default=1, metadata={"default": "1, or 2 with a parameter v"})
    placement: Placement = "loop"
    updates: int = 1
    delay: int | tuple[int, ...] = 0
    tp: Count = 1
    dp: Count = 1
    overlap: bool = True
    slots: str = AUTO
    division: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.slots not in (known := (AUTO, "own", "fewest", "enough")):
            raise UsageError(
                f"slots {self.slots!r} is not known", hint=" or ".join(known), fields=["slots"]
            )
        for f in TRAITS:
            if f.in_config and f.section == "pipeline":
                f.kind.settle(f.name, getattr(self, f.name), self.plan)  # refuses what cannot be

    @property
    def plan(self) -> PipelineShape:
        """The shape of the pipeline; raises PlanError if there is none such."""
        return PipelineShape(**{f.name: getattr(self, f.name) for f in PLAN if f.in_config})


def _with_memory(section: _Section) -> _Section:
    return _with_settings(section, _settings_of("memory"))


@dataclass(frozen=True)
@_with_memory
class MemoryConfig:
    """What ranks may hold, and how they come to hold less.

    A run is refused before its first step if by prediction a rank holds more than the `limit`, as
    in "1.5GB".  What is to `recompute` keeps of its forwards the inputs only, and runs them again:
    "all", stages as in "0,1", microbatches of stages as in "0.3,0.4", or "fit", as few as the limit
    asks for; `recompute_at` is "early", where that is hidden, or "late", just before backwards.
    What is to `offload`, said alike, is on the host's memory meanwhile, and what of that is to
    `spill` in a file without a name in a `folder` of the machine's disk, as in "/nvme";
    `host_limit` is the most that ranks may have on the host, and what "fit" spills asks for.
    With zero = 3, as many stages of a rank as are `active` have whole weights at once, by default
    what is computed with, and the next; each is gathered `ahead` of its use by so many runs of
    other stages, by default by one.  `states` says where the optimizer's state lies between steps:
    on the "device", or on the "host", from where `state_slots` stages of a rank at once, by default
    two, have theirs on the device while they are stepped; or on the "disk", in a file in `folder`,
    from where they come through the host, `state_rooms` of a rank at once, by default two; or on
    the host, which steps them itself ("cpu").
    """

    limit: str | None = None
    recompute: str | None = None
    offload: str | None = None
    spill: str | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        for f in TRAITS:
            if f.in_config and f.section == "memory":
                f.kind.settle(f.name, getattr(self, f.name), PipelineShape(1, 1))
        for name, does in (("recompute", "recomputes"), ("offload", "offloads")):
            if self.bytes is None and getattr(self, name) == "fit":
                raise UsageError(
                    f'{name} = "fit" {does} what does not fit: it needs a limit',
                    hint='limit = "1.5GB"',
                    fields=[name],
                )
        for name, asked in (
            ("spill", self.spill),
            ("states", getattr(self, "states", "") == "disk" or None),
        ):
            if asked is not None and self.folder is None:
                what = "what is spilled goes" if name == "spill" else "the optimizer's states go"
                raise UsageError(
                    f"{what} to the disk, and there is no folder for it",
                    hint='folder = "/nvme"',
                    fields=["folder", name],
                )

    @property
    def bytes(self) -> float | None:
        """The limit, if there is one.  Raises UsageError for what says no bytes."""
        try:
            return None if self.limit is None else bytes_of(self.limit)
        except ValueError:
            raise UsageError(
                f"limit {self.limit!r} says no bytes", hint='"1.5GB"', fields=["limit"]
            ) from None

    @property
    def fits(self) -> bool:
        """Whether what is recomputed or offloaded is chosen by limits."""
        return "fit" in (self.recompute, self.offload, getattr(self, "spill", None))

    def waits_for_sizes(self, name: str) -> bool:
        """Whether what a setting says is known only with the sizes of the stages."""
        chosen = getattr(self, name, None) == "fit" or name == "host_limit"
        return chosen or (name == "spill" and self.offload == "fit")


@dataclass(frozen=True)
class DataConfig:
    """What is read: a .bin of tokens, or text files and globs of them.

    Without a `source`, the Python source of the standard library.  The `tokenizer` of text is
    "bytes", or the path of a tokenizer.json, whose `end_of_document` is found unless it is told.
    `documents` are "joined" into one stream, or "packed": whole ones into windows.  `held_out` is
    never trained on: another source, or a share of this one, such as 0.01, from its end.  A step
    takes the next dp x microbatches x `microbatch_size` windows of the model's context: an epoch
    takes each once, in an order that depends on the `seed` alone, as does what dropout leaves out.
    """

    source: str | tuple[str, ...] | None = None
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    documents: str = "joined"
    held_out: Share | str | tuple[str, ...] | None = None
    microbatch_size: Count = 4
    seed: Annotated[int, NumberRange(0)] = 0

    def __post_init__(self) -> None:
        if self.documents not in (known := ("joined", "packed")):
            raise UsageError(
                f"documents {self.documents!r} is not known",
                hint=" or ".join(known),
                fields=["documents"],
            )
        if self.end_of_document is not None and self.tokenizer == "bytes":
            raise UsageError(
                "end_of_document is for a tokenizer of a file: bytes has its own",
                fields=["end_of_document", "tokenizer"],
            )


@dataclass(frozen=True)
class OutputConfig:
    """Where results go: a folder, made if it is not there.

    One that has results of an earlier run is refused; with `replace` they are removed when the
    first step begins.  `trace` is a folder for the last step's Timeline, which needs `record`: to
    note when each instruction begins and ends.  Without it, nothing is said of bubbles.  With
    `memory` the bytes that live in the second step are counted, which then takes longer.
    """

    folder: str = "schedir-output"
    replace: bool = False
    trace: str | None = None
    record: bool = True
    memory: bool = False

    def __post_init__(self) -> None:
        if self.trace is not None and not self.record:
            raise UsageError("trace needs record to be true", fields=["trace", "record"])


@dataclass(frozen=True)
class Config:
    """A training run; raises ProgramError if its sections do not go together."""

    model: ModelConfig = field(default_factory=GPTConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        kind, _ = KINDS[kind_of(self.model)], self.finer  # which refuses what cannot be
        if getattr(self.pipeline, "fill", None) is not None:
            raise UsageError(
                "fill finds an order by costs, and a training run has none before it begins",
                hint="schedir compile ... -O fill=W --costs ... -o x.sched, then schedule = "
                "x.sched",
                fields=["fill"],
            )
        if self.train.precision == "float16" and self.pipeline.updates > 1:
            raise UsageError(
                "the scale of a float16 loss changes between updates, and a step has "
                f"{self.pipeline.updates} of them",
                hint='precision = "bfloat16", or one update',
                fields=["precision", "updates"],
            )
        kind.share(self.model, self.pipeline.tp)
        if getattr(self.pipeline, "sequence", False):
            split_tokens(self.model.context, self.pipeline.tp)
        if self.train.evaluate_every and not self.data.held_out:
            raise UsageError(
                f"evaluate_every is {self.train.evaluate_every}, and nothing is held out to "
                "evaluate on",
                hint="data.held_out = 0.01 keeps the last hundredth of the source",
                fields=["evaluate_every", "held_out"],
            )

    @property
    def request(self) -> Request:
        """What is asked for: the program of the pipeline, checked as the transport needs it."""
        return self.request_within(None)

    def request_within(self, sizes: Sizes | None) -> Request:
        """The same within the limit, if these are the sizes of the stages; without any, and before
        these are known, nothing is recomputed for it."""
        pipeline, train = self.pipeline, self.train
        said = {f.name: getattr(getattr(self, f.section), f.name) for f in HEADER if f.in_config}
        said |= {"tied": self.model.tied, "clip": train.clip > 0, "skips": (), "validate": "before"}
        source = Source(pipeline.schedule)
        found = source.found if train.checkpoint is not None else None
        finer = {"cut": self.finer.pieces}
        # A file that has its transfers has its snapshots, or none: it is saved between steps.
        if found is not None and (not isinstance(found, Program) or found.is_draft):
            said["snapshots"] = True
        return Request(
            source,
            said,
            usual={},
            model=train.model,
            blocks=True,
            overlap=pipeline.overlap,
            slots=self.slots,
            more={
                name: finer.get(name, said)
                for name, (kind, _) in OPTIONS.items()
                if (said := getattr(getattr(self, SECTION_OF[name]), name)) is not _unsaid(kind)
                and not (sizes is None and self.memory.waits_for_sizes(name))
            },
            sizes=sizes,
            limit=None if sizes is None else self.memory.bytes,
            lowers=True,
            contradicts=contradicts,
        )

    @property
    def finer(self) -> StageSegmentation:
        """How its stages and microbatches are cut."""
        pipeline, name, found = self.pipeline, kind_of(self.model), None
        if pipeline.schedule.endswith((".sched", ".timeline")):
            found = Source(pipeline.schedule).found
        meets, layer = found.meets if isinstance(found, Program) else "", KINDS[name].layer
        return segmentation_of(
            self.model.layers,
            pipeline.plan,
            pipeline.division,
            size=self.data.microbatch_size,
            layer=NOBODY * len(layer) if meets and pipeline.tp == 1 else layer,
            kind=name,
            cut=getattr(pipeline, "cut", None),
            chunks=getattr(pipeline, "chunks", None),
            meets=meets,
            frozen=getattr(pipeline, "frozen", 0),
            tied=bool(getattr(self.model, "tied", False)),
        )

    @property
    def slots(self) -> BufferSharing | None:
        """How values share slots, as is said or as suits the device; None for slots as they are."""
        said = self.pipeline.slots
        if said == AUTO:
            found = Source(self.pipeline.schedule).found
            own = isinstance(found, Program) and found.shares_slots
            said = "own" if own else DEVICES[self.train.device].slots
        return None if said == "own" else cast(BufferSharing, said)

    @property
    def told(self) -> dict[str, str]:
        """Every setting, as "section.name", in words."""
        said = {
            f"{section}.{name}": str(value)
            for section, own in vars(self).items()
            for name, value in vars(own).items()
        }
        return {"model.kind": kind_of(self.model)} | said

    @property
    def world(self) -> int:
        """How many processes train."""
        return self.pipeline.ranks * self.pipeline.tp * self.pipeline.dp


def contradicts(source: str, field: Field, has: str, said: str) -> UsageError:
    """The refusal of a configuration that says of a program what its file does not."""
    fact, hint = f"{source} has {field.name} {has}, not {said}", f"leave out {field.name}"
    if field.name == "validate":
        fact = f"{source} validates updates {has} they are made; a training run looks at each step"
        hint = "compile it without -O validate=after"
    if own := {"tied": "model.tied = {}", "clip": "train.clip = {:.1f}"}.get(field.name):
        fact = f"{source} has {field.name} {has}, the configuration {said}"
        right = own.format(json.dumps(has != "no") if field.name == "tied" else has != "no")
        hint = f"{right}, or compile it with{'out' * (said == 'no')} --{field.name}"
    return UsageError(fact, hint=hint, fields=[field.name])
