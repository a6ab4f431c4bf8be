"""The sections of the configuration of a training run.  Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from schedir.errors import UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.sizes import Sizes, parse_bytes
from schedir.ir.pipeline.field_schema import Field, FieldType
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.ir.pipeline.stage_segments import NO_COLLECTIVE
from schedir.ir.program import ATTRIBUTE_FIELDS, HEADER_FIELDS, Program
from schedir.models.gpt_config import GPTConfig
from schedir.models.partitioning import split_tokens
from schedir.passes.pass_registry import OPTION_SECTIONS, PASS_OPTIONS
from schedir.passes.pass_types import BufferSharing
from schedir.training.config.model_kinds import MODEL_KINDS, ModelConfig, get_model_kind
from schedir.training.config.segmentation import StageSegmentation, make_segmentation
from schedir.training.config.setting_types import NumberRange, require_known
from schedir.training.config.train_config import Fraction, PositiveInteger, TrainConfig
from schedir.transports.registry import AUTO, DEVICES

_Section = TypeVar("_Section", bound=type)


def _add_pipeline_settings(section: _Section) -> _Section:
    """A class with a setting, too, for each field of a program, and each option of a pass, that it
    does not name."""
    return _add_settings(section, _list_program_settings("pipeline"))


def _list_program_settings(section: str) -> dict[str, tuple[FieldType, Any]]:
    """The fields of programs and the options of passes that are settings of a section, with what
    they are unless said."""
    fields = {
        f.name: (f.field_type, f.default)
        for f in HEADER_FIELDS
        if f.in_config and f.section == section
    }
    return fields | {
        name: (kind, _get_option_default(kind))
        for name, (kind, _) in PASS_OPTIONS.items()
        if OPTION_SECTIONS[name] == section
    }


def _add_settings(section: _Section, settings: Mapping[str, tuple[FieldType, Any]]) -> _Section:
    for name, (kind, default) in settings.items():
        if name not in section.__annotations__:
            section.__annotations__[name] = _make_setting_type(kind, optional=default is None)
            setattr(section, name, default)
    return section


def _get_option_default(kind: FieldType) -> bool | None:
    """The value of an option that nobody says."""
    return False if kind.type is bool else None


def _make_setting_type(kind: FieldType, *, optional: bool) -> Any:
    limited = kind.type
    if kind.min_value is not None and kind.max_value is not None:
        limited = Annotated[kind.type, NumberRange(kind.min_value, below=kind.max_value + 1)]
    return limited | None if optional else limited


@dataclass(frozen=True)
@_add_pipeline_settings
class PipelineConfig:
    """The schedule, the shape of the pipeline, and how the program is compiled.

    `schedule` is the name of a built-in schedule, `file.py:function` (the file is executed;
    `--no-code` refuses it), or FILE.sched.  The first two take options in brackets:
    `"interleaved(group=4)"`.  A FILE.sched brings the other settings of this section with it.  A
    schedule that needs a placement, or two stages per rank, gets them by default.

    - `ranks`, `tp`, `dp`: ranks * tp * dp processes train.
    - `optimizer_steps`: the number of optimizer steps in one program, without a flush between them.
      `weight_delay` is by how many of them the weights that a microbatch uses are old: one number,
      or one per stage.  `pipedream_2bw` sets its delay.
    - `sequence_parallel`: tensor-parallel ranks split the tokens between their linear layers, too.
      What they save and send of these activations is 1/tp.
    - `overlap`: group opposite transfers, and begin receives and unshards early.
    - `buffer_sharing`: "none" gives each value a static buffer of its own, "minimal" shares as few
      buffers as possible, "latency_preserving" as few as possible without a longer step, if a
      message takes half as long as a forward.  "auto" is "latency_preserving" on GPUs and "none" on
      CPUs, and keeps the buffers of a FILE.sched.
    - `layers_per_stage`: the number of layers of each stage; by default they are divided evenly.
    - `stage_segments`: "layers" splits the stages of a GPT at each tensor-parallel collective: n
      layers become 4 n + 1 segments.  A number, or one per stage, splits them into so many.
    - `microbatch_chunks`: split each microbatch into so many chunks, of `data.microbatch_size` /
      chunks samples each.  Stages and microbatches in [memory] are then segments and chunks.
    - `fill_collective_waits` needs costs, which a training run does not have: `schedir compile ...
      -O stage_segments=fgfg -O fill_collective_waits=W --costs ... -o x.sched` writes a program for
      `schedule = "x.sched"`.
    """

    schedule: str = "one_f_one_b"
    ranks: int = 1
    microbatches: int = 8
    stages_per_rank: int = field(default=1, metadata={"default": "1, or 2 with a parameter v"})
    placement: Placement = "loop"
    optimizer_steps: int = 1
    weight_delay: int | tuple[int, ...] = 0
    tp: PositiveInteger = 1
    dp: PositiveInteger = 1
    overlap: bool = True
    buffer_sharing: str = AUTO
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        known = (AUTO, "none", "minimal", "latency_preserving")
        require_known("buffer_sharing", self.buffer_sharing, known)
        for f in ATTRIBUTE_FIELDS:
            if f.in_config and f.section == "pipeline":
                f.field_type.resolve(
                    f.name, getattr(self, f.name), self.shape
                )  # refuses what cannot be

    @property
    def shape(self) -> PipelineShape:
        """The shape of the pipeline; raises ShapeError if there is none such."""
        return PipelineShape(**{f.name: getattr(self, f.name) for f in SHAPE_FIELDS if f.in_config})


def _add_memory_settings(section: _Section) -> _Section:
    return _add_settings(section, _list_program_settings("memory"))


@dataclass(frozen=True)
@_add_memory_settings
class MemoryConfig:
    """Limits of memory, and how memory is saved.

    - `memory_limit`: bytes of a device, such as "1.5GB".  A run is refused before its first step if
      a rank is predicted to hold more.
    - `recompute`: which forwards save only their inputs and run again before their backwards:
      "all", "half", stages such as "0,1", microbatches of stages such as "0.3,0.4", or "fit": as
      few as `memory_limit` requires.  `recompute_at` is "early", where it costs no time, or "late",
      just before the backward.
    - `offload`: which saved activations move to the host's memory until they are used; given like
      `recompute`.  `offload_to_disk`: which of these move on to the disk, into an unnamed file in
      the directory `spill_dir`, such as "/nvme".
    - `host_memory_limit`: bytes of offloaded values on the host of a rank; "fit" of
      `offload_to_disk` depends on it.
    - `unsharded_stages`: with zero = 3,
    how many stages of a rank have unsharded weights at once; by
      default the stage that computes and the next one.  `unshard_prefetch`: by how many runs of
      other stages an unshard precedes its use (1).
    - `optimizer_placement`: where the optimizer's state is between steps: "device"; "host", and
      `optimizer_device_buffers` stages of a rank (2) have theirs on the device while they are
      stepped; "disk", in a file in `spill_dir`, through `optimizer_host_buffers` stages of a rank
      on the host (2); or "cpu_step", where the host has the state and makes the step, as in
      ZeRO-Offload.  With "host" and "disk" the device makes the step.
    """

    memory_limit: str | None = None
    recompute: str | None = None
    offload: str | None = None
    offload_to_disk: str | None = None
    spill_dir: str | None = None

    def __post_init__(self) -> None:
        for f in ATTRIBUTE_FIELDS:
            if f.in_config and f.section == "memory":
                f.field_type.resolve(f.name, getattr(self, f.name), PipelineShape(1, 1))
        for name, does in (("recompute", "recomputes"), ("offload", "offloads")):
            if self.limit_bytes is None and getattr(self, name) == "fit":
                raise UsageError(
                    f'{name} = "fit" {does} what does not fit: it needs memory_limit',
                    hint='memory_limit = "1.5GB"',
                    fields=[name],
                )
        for name, asked in (
            ("offload_to_disk", self.offload_to_disk),
            ("optimizer_placement", getattr(self, "optimizer_placement", "") == "disk" or None),
        ):
            if asked is not None and self.spill_dir is None:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r} writes to the disk, and spill_dir names no "
                    "directory",
                    hint='spill_dir = "/nvme"',
                    fields=["spill_dir", name],
                )

    @property
    def limit_bytes(self) -> float | None:
        """The limit, if there is one.  Raises UsageError for what says no bytes."""
        try:
            return None if self.memory_limit is None else parse_bytes(self.memory_limit)
        except ValueError:
            raise UsageError(
                f"memory_limit {self.memory_limit!r} is not a number of bytes",
                hint='"1.5GB"',
                fields=["memory_limit"],
            ) from None

    @property
    def is_fitted(self) -> bool:
        """Whether what is recomputed or offloaded is chosen by limits."""
        return "fit" in (self.recompute, self.offload, getattr(self, "offload_to_disk", None))

    def needs_sizes(self, name: str) -> bool:
        """Whether what a setting says is known only with the sizes of the stages."""
        chosen = getattr(self, name, None) == "fit" or name == "host_memory_limit"
        return chosen or (name == "offload_to_disk" and self.offload == "fit")


@dataclass(frozen=True)
class DataConfig:
    """What is read: a .bin of tokens, or text files and globs of them.

    Without a `source`, the Python source of the standard library is read.

    - `tokenizer`: "bytes", or the path of a tokenizer.json.  `end_of_document` is its token after
      each document; by default it is found by its usual names.
    - `packing`: "concatenate" joins all documents into one stream of tokens; "best_fit" packs whole
      documents into windows.
    - `validation`: data that is never trained on: another source, or a share of this one from its
      end, such as 0.01.
    - `microbatch_size`: samples of a microbatch.  A step reads the next dp * microbatches *
      microbatch_size windows of the model's context.  An epoch reads each window once.
    - `seed`: decides the order of the windows and what dropout leaves out.
    """

    source: str | tuple[str, ...] | None = None
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    packing: str = "concatenate"
    validation: Fraction | str | tuple[str, ...] | None = None
    microbatch_size: PositiveInteger = 4
    seed: Annotated[int, NumberRange(0)] = 0

    def __post_init__(self) -> None:
        require_known("packing", self.packing, ("concatenate", "best_fit"))
        if self.end_of_document is not None and self.tokenizer == "bytes":
            raise UsageError(
                "end_of_document is for a tokenizer of a file: bytes has its own",
                fields=["end_of_document", "tokenizer"],
            )


@dataclass(frozen=True)
class OutputConfig:
    """Where results go.

    - `dir`: a directory, which is created.  Results of an earlier run there are refused; with
      `overwrite` they are removed when the first step begins.
    - `trace`: a directory for the Timeline of the last step.  It needs `record`, which notes when
      each instruction begins and ends; without `record` no bubble is reported.
    - `memory`: count the bytes that are alive in the second step, which makes it slower.
    """

    dir: str = "schedir-output"
    overwrite: bool = False
    trace: str | None = None
    record: bool = True
    memory: bool = False

    def __post_init__(self) -> None:
        if self.trace is not None and not self.record:
            raise UsageError("trace needs record to be true", fields=["trace", "record"])


@dataclass(frozen=True)
class Config:
    """A training run; raises SchedirError if its sections do not go together."""

    model: ModelConfig = field(default_factory=GPTConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        kind, _ = (
            MODEL_KINDS[get_model_kind(self.model)],
            self.segmentation,
        )  # which refuses what cannot be
        if getattr(self.pipeline, "fill_collective_waits", None) is not None:
            raise UsageError(
                "fill_collective_waits needs costs, and a training run has none before it begins",
                hint="schedir compile ... -O fill_collective_waits=W --costs ... -o x.sched, "
                "then schedule = x.sched",
                fields=["fill_collective_waits"],
            )
        if self.train.precision == "float16" and self.pipeline.optimizer_steps > 1:
            raise UsageError(
                "the scale of a float16 loss changes between updates, and a step has "
                f"{self.pipeline.optimizer_steps} of them",
                hint='precision = "bfloat16", or optimizer_steps = 1',
                fields=["precision", "optimizer_steps"],
            )
        kind.check_tp_split(self.model, self.pipeline.tp)
        if getattr(self.pipeline, "sequence_parallel", False):
            split_tokens(self.model.context, self.pipeline.tp)
        if self.train.evaluate_every and not self.data.validation:
            raise UsageError(
                f"evaluate_every is {self.train.evaluate_every}, and data.validation names no data",
                hint="data.validation = 0.01 keeps the last hundredth of the source",
                fields=["evaluate_every", "validation"],
            )

    @property
    def request(self) -> Request:
        """What is asked for: the program of the pipeline, checked as the transport needs it."""
        return self.request_with_sizes(None)

    def request_with_sizes(self, sizes: Sizes | None) -> Request:
        """The same within the limit, if these are the sizes of the stages; without any, and before
        these are known, nothing is recomputed for it."""
        pipeline, train = self.pipeline, self.train
        said = {
            f.name: getattr(getattr(self, f.section), f.name) for f in HEADER_FIELDS if f.in_config
        }
        said |= {"tied_weights": self.model.tied, "clip_grad_norm": train.clip_grad_norm > 0}
        said |= {"skips": (), "norm_check": "before_step"}
        source = Source(pipeline.schedule)
        found = source.schedule_or_program if train.checkpoint_dir is not None else None
        finer = {"stage_segments": self.segmentation.segments_per_stage}
        # A file that has its transfers has its snapshots, or none: it is saved between steps.
        if found is not None and (not isinstance(found, Program) or found.is_draft):
            said["checkpoint_snapshots"] = True
        return Request(
            source,
            said,
            defaults={},
            progress_model=train.progress_model,
            blocking_hosts=True,
            overlap=pipeline.overlap,
            buffer_sharing=self.buffer_sharing,
            compile_options={
                name: finer.get(name, said)
                for name, (kind, _) in PASS_OPTIONS.items()
                if (said := getattr(getattr(self, OPTION_SECTIONS[name]), name))
                is not _get_option_default(kind)
                and not (sizes is None and self.memory.needs_sizes(name))
            },
            sizes=sizes,
            memory_limit=None if sizes is None else self.memory.limit_bytes,
            lower_drafts=True,
            make_conflict_error=make_contradiction_error,
        )

    @property
    def segmentation(self) -> StageSegmentation:
        """How its stages and microbatches are cut."""
        pipeline, name, found = self.pipeline, get_model_kind(self.model), None
        if pipeline.schedule.endswith((".sched", ".timeline")):
            found = Source(pipeline.schedule).schedule_or_program
        meets, layer = (
            found.segment_boundaries if isinstance(found, Program) else "",
            MODEL_KINDS[name].layer_boundaries,
        )
        return make_segmentation(
            self.model.layers,
            pipeline.shape,
            pipeline.layers_per_stage,
            microbatch_size=self.data.microbatch_size,
            layer_boundaries=NO_COLLECTIVE * len(layer) if meets and pipeline.tp == 1 else layer,
            model_kind=name,
            stage_segments=getattr(pipeline, "stage_segments", None),
            microbatch_chunks=getattr(pipeline, "microbatch_chunks", None),
            segment_boundaries=meets,
            frozen_stages=getattr(pipeline, "frozen_stages", 0),
            tied_weights=bool(getattr(self.model, "tied", False)),
        )

    @property
    def buffer_sharing(self) -> BufferSharing | None:
        """How values share slots, as is said or as suits the device; None for slots as they are."""
        said = self.pipeline.buffer_sharing
        if said == AUTO:
            found = Source(self.pipeline.schedule).schedule_or_program
            own = isinstance(found, Program) and found.shares_slots
            said = "none" if own else DEVICES[self.train.device].buffer_sharing
        return None if said == "none" else cast(BufferSharing, said)

    @property
    def setting_texts(self) -> dict[str, str]:
        """Every setting, as "section.name", in words."""
        said = {
            f"{section}.{name}": str(value)
            for section, own in vars(self).items()
            for name, value in vars(own).items()
        }
        return {"model.kind": get_model_kind(self.model)} | said

    @property
    def world_size(self) -> int:
        """How many processes train."""
        return self.pipeline.ranks * self.pipeline.tp * self.pipeline.dp


def make_contradiction_error(
    source: str, field: Field, program_value: str, config_value: str
) -> UsageError:
    """The refusal of a configuration that says of a program what its file does not."""
    fact, hint = (
        f"{source} has {field.name} {program_value}, not {config_value}",
        f"leave out {field.name}",
    )
    if field.name == "norm_check":
        fact = (
            f"{source} checks the norm {program_value}; a training run reports the norm of "
            "each step"
        )
        hint = "compile it without -O norm_check=after_step"
    if own := {
        "tied_weights": "model.tied = {}",
        "clip_grad_norm": "train.clip_grad_norm = {:.1f}",
    }.get(field.name):
        fact = f"{source} has {field.name} {program_value}, the configuration {config_value}"
        right = own.format(
            json.dumps(program_value != "no")
            if field.name == "tied_weights"
            else program_value != "no"
        )
        hint = f"{right}, or compile it with{'out' * (config_value == 'no')} -O {field.name}"
    return UsageError(fact, hint=hint, fields=[field.name])
