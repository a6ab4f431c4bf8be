"""The sections of the configuration of a training run. Needs no torch.

`docs/reference/configuration.md` shows the docstrings of the sections as Markdown.
"""

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
from schedir.ir.pipeline.stage_segments import EP_LETTERS, NO_COLLECTIVE, has_collectives
from schedir.ir.program import ATTRIBUTE_FIELDS, HEADER_FIELDS, Program
from schedir.models.gpt_config import GPTConfig
from schedir.models.partitioning import split_tokens
from schedir.passes.pass_registry import OPTION_SECTIONS, PASS_OPTIONS
from schedir.passes.pass_types import BufferSharing
from schedir.passes.selection import parse_selection
from schedir.training.config.expert_requirements import require_expert_parallelism
from schedir.training.config.model_kinds import MODEL_KINDS, ModelConfig, get_model_kind
from schedir.training.config.segmentation import StageSegmentation, make_segmentation
from schedir.training.config.setting_types import NumberRange, require_known
from schedir.training.config.train_config import (
    SETTING_CHOICES,
    Fraction,
    PositiveInteger,
    TrainConfig,
)
from schedir.transports.registry import AUTO, DEVICES

_Section = TypeVar("_Section", bound=type)


def _add_pipeline_settings(section: _Section) -> _Section:
    """Add the program fields and pass options of [pipeline] that a class does not define."""
    return _add_settings(section, _list_program_settings("pipeline"))


def _list_program_settings(section: str) -> dict[str, tuple[FieldType, Any]]:
    """Return the type and default of each program field and pass option of a section."""
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
    """Return the value of an option that is not set."""
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

    The number of processes is ranks * tp * dp.

    - `schedule`: the name of a built-in schedule, a function as `file.py:function`, or a program as
      `FILE.sched`. A name or a function takes options in brackets, as in `"interleaved(group=4)"`.
      schedir executes `file.py`, unless `--no-code` is given. A setting that contradicts the
      settings in a `FILE.sched` is an error.
    - `ranks`: the number of pipeline ranks.
    - `microbatches`: the number of microbatches of each replica in a step.
    - `stages_per_rank`: the number of stages of each rank. The default is that of the schedule,
      such as 1 for `gpipe`, 2 for `interleaved` and 4 for `bitpipe`.
    - `placement`: the rank of each stage: "loop", "vee", "mirror", "mirror-vee", or a list of
      ranks. A list of lists has one list for each stage replica. A schedule that needs a placement
      sets it.
    - `optimizer_steps`: the number of optimizer steps in one program. Between these steps, the
      pipeline does not drain.
    - `weight_delay`: the age of the weights that a microbatch uses, in optimizer steps: one number,
      or one per stage. The schedule `pipedream_2bw` sets `weight_delay`.
    - `tp`: the number of ranks in a tensor-parallel group.
    - `dp`: the number of data-parallel replicas.
    - `ep`: the number of replicas that share the experts of a model of kind "moe". It must divide
      `dp`.
    - `overlap`: if true, ranks issue opposite transfers as a group, and begin receives and
      unshards (gathers of weights) early.
    - `buffer_sharing`: how values share static buffers.
      - "none" gives each value its own buffer.
      - "minimal" uses as few buffers as possible.
      - "latency_preserving" searches for few buffers that do not make the predicted step longer.
      - "auto" is "latency_preserving" on GPUs and "none" on CPUs. If a `FILE.sched` shares buffers
        already, "auto" does not change them.
    - `layers_per_stage`: the number of layers of each stage. By default, the layers are divided
      evenly.
    - `frozen_stages`: the number of stages at the start of the pipeline that are not trained.
    - `zero`: the ZeRO level. With 0, the replicas shard nothing. With 1, they shard the optimizer
      state; with 2, also the gradients; with 3, also the weights.
    - `reduce_scatter_at`: when the replicas reduce gradients: "update_end", once after the last
      microbatch, or "each_backward", after each group of consecutive backwards of a stage.
      "each_backward" needs `zero` 2 or 3.
    - `sequence_parallel`: if true, each tensor-parallel rank has 1/tp of the tokens outside of the
      linear layers. So a rank saves and sends 1/tp of these activations.
    - `stage_segments`: splits each stage of a GPT into segments: "layers", a number of segments, or
      a list with one number per stage. "layers" splits a stage at each tensor-parallel collective,
      or at each all-to-all of a model of kind "moe". With this setting, the stage numbers in
      [memory] count segments: in `recompute = "0.3"`, 0 is a segment. By default, stages are not
      split.
    - `microbatch_chunks`: splits each microbatch into this number of chunks. With this setting, the
      microbatch numbers in [memory] count chunks: in `recompute = "0.3"`, 3 is a chunk. By default,
      microbatches are not split.
    - `fill_collective_waits`: not available here, because it needs costs. Compile a program with
      `schedir compile ... -O stage_segments=fgfg -O fill_collective_waits=W --costs ... -o x.sched`
      and train it with `schedule = "x.sched"`.
    """

    schedule: str = "one_f_one_b"
    ranks: int = 1
    microbatches: int = 8
    stages_per_rank: int = field(default=1, metadata={"default": "set by the schedule"})
    placement: Placement = "loop"
    optimizer_steps: int = 1
    weight_delay: int | tuple[int, ...] = 0
    tp: PositiveInteger = 1
    dp: PositiveInteger = 1
    ep: PositiveInteger = 1
    overlap: bool = True
    buffer_sharing: str = AUTO
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_known("buffer_sharing", self.buffer_sharing, SETTING_CHOICES["buffer_sharing"])
        for f in ATTRIBUTE_FIELDS:
            if f.in_config and f.section == "pipeline":
                # `resolve` raises an error if the value is invalid.
                f.field_type.resolve(f.name, getattr(self, f.name), self.shape)

    @property
    def shape(self) -> PipelineShape:
        """Return the shape of the pipeline.

        Raises:
            ShapeError: A pipeline cannot have this shape.
        """
        return PipelineShape(**{f.name: getattr(self, f.name) for f in SHAPE_FIELDS if f.in_config})


def _add_memory_settings(section: _Section) -> _Section:
    return _add_settings(section, _list_program_settings("memory"))


@dataclass(frozen=True)
@_add_memory_settings
class MemoryConfig:
    """Memory limits, and the methods that save memory.

    A number of bytes is a string such as "1.5GB".

    - `memory_limit`: the bytes of a device that a rank may use. If the predicted memory of a rank
      is larger, schedir refuses the run before its first step. By default, there is no limit.
    - `recompute`: the forwards that save only their inputs and run again before their backwards.
      Values are "all", "half" (every other microbatch), stages such as "0,1", pairs of a stage and
      a microbatch such as "0.3,0.4", or "fit" (as few as `memory_limit` requires). By default, no
      forward runs again.
    - `offload`: the saved activations that move to the host's memory until they are used. `offload`
      takes the same values as `recompute`. By default, none move.
    - `offload_to_disk`: the offloaded activations that move on to the disk. `offload_to_disk` takes
      the same values as `recompute`; "fit" is as few as `host_memory_limit` requires. By default,
      none move.
    - `spill_dir`: a directory on a disk, such as "/nvme". `offload_to_disk` and
      `optimizer_placement = "disk"` require this setting.
    - `optimizer_placement`: the place of the optimizer state between steps.
      - "device" keeps it on the device.
      - "host" keeps it in the memory of the host, and the device updates the weights.
      - "disk" keeps it in a file in `spill_dir`, and the device updates the weights.
      - "cpu_step" keeps it in the memory of the host, and the host updates the weights, as in
        ZeRO-Offload.
    - `recompute_at`: when a forward runs again: "early", while the rank would be idle (the
      default), or "late", just before the backward.
    - `optimizer_device_buffers`: with `optimizer_placement` "host" or "disk", the number of stages
      of a rank whose optimizer state is on the device at the same time. The default is 2.
    - `optimizer_host_buffers`: with `optimizer_placement` "disk", the number of stages of a rank
      whose optimizer state is on the host at the same time. The default is 2.
    - `unsharded_stages`: with `zero = 3`, the largest number of stages of a rank that have all
      their weights at the same time. The default is 2: the stage that computes, and the next stage.
      If the schedule overlaps two stages of a rank, as `dualpipe_v` does, the default is 3.
    - `unshard_prefetch`: with `zero = 3`, the number of computations of other stages between an
      unshard and its use. The default is 1.
    - `host_memory_limit`: the bytes of offloaded values that a rank may have on its host. By
      default, there is no limit.
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
        for name in ("recompute", "offload", "offload_to_disk"):
            try:
                parse_selection(getattr(self, name) or "none")
            except ValueError as error:
                raise UsageError(f"{name} {error}", fields=[name]) from None
        for name in ("recompute", "offload"):
            if self.limit_bytes is None and getattr(self, name) == "fit":
                raise UsageError(
                    f'{name} = "fit" needs memory_limit, which is not set',
                    hint='memory_limit = "1.5GB"',
                    fields=[name],
                )
        for name, is_set in (
            ("offload_to_disk", self.offload_to_disk),
            ("optimizer_placement", getattr(self, "optimizer_placement", "") == "disk" or None),
        ):
            if is_set is not None and self.spill_dir is None:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r} needs spill_dir, which is not set",
                    hint='spill_dir = "/nvme"',
                    fields=["spill_dir", name],
                )

    @property
    def limit_bytes(self) -> float | None:
        """Return `memory_limit` in bytes, or None if there is no limit.

        Raises:
            UsageError: `memory_limit` is not a number of bytes.
        """
        try:
            return None if self.memory_limit is None else parse_bytes(self.memory_limit)
        except ValueError:
            raise UsageError(
                f"memory_limit must be a number of bytes, not {self.memory_limit!r}",
                hint='memory_limit = "1.5GB"',
                fields=["memory_limit"],
            ) from None

    @property
    def is_fitted(self) -> bool:
        """Return whether a limit decides which activations are recomputed or offloaded."""
        return "fit" in (self.recompute, self.offload, getattr(self, "offload_to_disk", None))

    def needs_sizes(self, name: str) -> bool:
        """Return whether a setting has an effect only when the sizes of the stages are measured.

        Args:
            name: The setting.
        """
        chosen = getattr(self, name, None) == "fit" or name == "host_memory_limit"
        return chosen or (name == "offload_to_disk" and self.offload == "fit")


@dataclass(frozen=True)
class DataConfig:
    """The data that a run reads: a `.bin` of tokens, or text files.

    A window has `model.context` input tokens and their targets. A step reads the next
    dp * microbatches * microbatch_size windows. An epoch reads each window once.

    - `source`: a path or a glob, or a list of them: a `.bin`, or text files. The default is the
      Python source of the standard library.
    - `tokenizer`: "bytes", or the path of a tokenizer.json.
    - `end_of_document`: the token of the tokenizer.json after each document. By default, schedir
      selects a usual name that is in the vocabulary, such as `</s>`. The tokenizer "bytes" has its
      own token.
    - `packing`: "concatenate" joins all documents into one stream of tokens. "best_fit" packs
      complete documents into windows.
    - `validation`: the data for evaluation, on which the run never trains: another source, or a
      share of `source`, such as 0.01, at its end. By default, there is none.
    - `microbatch_size`: the number of windows in a microbatch.
    - `seed`: the seed of the order of the windows, and of dropout.
    """

    source: str | tuple[str, ...] | None = None
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    packing: str = "concatenate"
    validation: Fraction | str | tuple[str, ...] | None = None
    microbatch_size: PositiveInteger = 4
    seed: Annotated[int, NumberRange(0)] = 0

    def __post_init__(self) -> None:
        require_known("packing", self.packing, SETTING_CHOICES["packing"])
        if self.end_of_document is not None and self.tokenizer == "bytes":
            raise UsageError(
                'end_of_document needs a tokenizer from a file: tokenizer = "bytes" has its own '
                "token for the end of a document",
                fields=["end_of_document", "tokenizer"],
            )


@dataclass(frozen=True)
class OutputConfig:
    """The files that a run writes, and the measurements that they contain.

    - `dir`: the directory for results. If the directory has results of an earlier run, `overwrite`
      must be true.
    - `overwrite`: if true, the first step removes the results of an earlier run.
    - `trace`: a directory for the timeline of the last step. `trace` requires `record = true`. By
      default, no timeline is written.
    - `record`: if true, the run records the start and the end of each instruction, in the steps
      that it reports. If false, the run reports no bubble.
    - `memory`: if true, the run measures the memory that its second step uses. This makes the
      second step slower.
    """

    dir: str = "schedir-output"
    overwrite: bool = False
    trace: str | None = None
    record: bool = True
    memory: bool = False

    def __post_init__(self) -> None:
        if self.trace is not None and not self.record:
            raise UsageError("trace needs record = true", fields=["trace", "record"])


@dataclass(frozen=True)
class Config:
    """The configuration of a training run.

    Args:
        model: The section [model]: the kind of model and its sizes.
        pipeline: The section [pipeline]: the schedule and the parallel degrees.
        memory: The section [memory]: memory limits, recomputation and offload.
        data: The section [data]: the data.
        train: The section [train]: the steps, the optimizer, the processes and the checkpoints.
        output: The section [output]: the results.

    Raises:
        SchedirError: A section does not fit the other sections.
    """

    model: ModelConfig = field(default_factory=GPTConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        # `segmentation` raises an error if the stages cannot be split as the settings require.
        kind = MODEL_KINDS[get_model_kind(self.model)]
        _ = self.segmentation
        if getattr(self.pipeline, "fill_collective_waits", None) is not None:
            raise UsageError(
                "fill_collective_waits needs costs, but a training run has no costs when it "
                "compiles the schedule",
                hint="schedir compile ... -O fill_collective_waits=W --costs ... -o x.sched, "
                'then set schedule = "x.sched" in [pipeline]',
                fields=["fill_collective_waits"],
            )
        if self.train.precision == "float16" and self.pipeline.optimizer_steps > 1:
            raise UsageError(
                f"precision = 'float16' needs optimizer_steps = 1, not "
                f"{self.pipeline.optimizer_steps}: the loss scale changes after each update",
                hint='precision = "bfloat16", or optimizer_steps = 1',
                fields=["precision", "optimizer_steps"],
            )
        kind.check_tp_split(self.model, self.pipeline.tp)
        require_expert_parallelism(self)
        if getattr(self.pipeline, "sequence_parallel", False):
            split_tokens(self.model.context, self.pipeline.tp)
        if self.train.evaluate_every and not self.data.validation:
            raise UsageError(
                f"evaluate_every = {self.train.evaluate_every} needs data.validation, which is not "
                "set",
                hint="data.validation = 0.01 uses the last 1 % of the source for validation",
                fields=["evaluate_every", "validation"],
            )

    @property
    def request(self) -> Request:
        """Return the request for the program, without settings that need sizes of stages."""
        return self.request_with_sizes(None)

    def request_with_sizes(self, sizes: Sizes | None) -> Request:
        """Return the request for the program that fits into the memory limit.

        Args:
            sizes: The sizes of the stages. If None, the memory limit and all settings that need
                sizes are ignored.
        """
        pipeline, train = self.pipeline, self.train
        set_options = {
            f.name: getattr(getattr(self, f.section), f.name) for f in HEADER_FIELDS if f.in_config
        }
        set_options |= {"tied_weights": self.model.tied, "clip_grad_norm": train.clip_grad_norm > 0}
        set_options |= {"skips": (), "norm_check": "before_step"}
        source = Source(pipeline.schedule)
        schedule_or_program = (
            source.schedule_or_program if train.checkpoint_dir is not None else None
        )
        layer = MODEL_KINDS[get_model_kind(self.model)].layer_boundaries
        segment_options = {
            "stage_segments": tuple(
                (layer * number)[: number - 1] or 1
                for number in self.segmentation.segments_per_stage
            )
        }
        # The snapshots of a compiled program in a file are not changed. If the program has no
        # snapshots, checkpoints are saved between steps.
        if schedule_or_program is not None and (
            not isinstance(schedule_or_program, Program) or schedule_or_program.is_draft
        ):
            set_options["checkpoint_snapshots"] = True
        return Request(
            source,
            set_options,
            defaults={},
            progress_model=train.progress_model,
            blocking_hosts=True,
            overlap=pipeline.overlap,
            buffer_sharing=self.buffer_sharing,
            compile_options={
                name: segment_options.get(name, set_options)
                for name, (kind, _) in PASS_OPTIONS.items()
                if (set_options := getattr(getattr(self, OPTION_SECTIONS[name]), name))
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
        """Return how the stages and microbatches are split.

        Raises:
            UsageError: The stages or microbatches cannot be split as the settings require.
        """
        pipeline, name, schedule_or_program = self.pipeline, get_model_kind(self.model), None
        if pipeline.schedule.endswith((".sched", ".timeline")):
            schedule_or_program = Source(pipeline.schedule).schedule_or_program
        boundaries = (
            schedule_or_program.segment_boundaries
            if isinstance(schedule_or_program, Program)
            else ""
        )
        layer = MODEL_KINDS[name].layer_boundaries
        group_size = pipeline.ep if has_collectives(layer, EP_LETTERS) else pipeline.tp
        return make_segmentation(
            self.model.layers,
            pipeline.shape,
            pipeline.layers_per_stage,
            microbatch_size=self.data.microbatch_size,
            layer_boundaries=NO_COLLECTIVE * len(layer)
            if boundaries and group_size == 1
            else layer,
            model_kind=name,
            stage_segments=getattr(pipeline, "stage_segments", None),
            microbatch_chunks=getattr(pipeline, "microbatch_chunks", None),
            segment_boundaries=boundaries,
            frozen_stages=getattr(pipeline, "frozen_stages", 0),
            tied_weights=bool(getattr(self.model, "tied", False)),
        )

    @property
    def buffer_sharing(self) -> BufferSharing | None:
        """Return how values share buffers, or None to keep the buffers of the program."""
        sharing = self.pipeline.buffer_sharing
        if sharing == AUTO:
            schedule_or_program = Source(self.pipeline.schedule).schedule_or_program
            has_own_sharing = (
                isinstance(schedule_or_program, Program) and schedule_or_program.shares_slots
            )
            sharing = "none" if has_own_sharing else DEVICES[self.train.device].buffer_sharing
        return None if sharing == "none" else cast(BufferSharing, sharing)

    @property
    def setting_texts(self) -> dict[str, str]:
        """Return all settings as text: "section.name" -> value."""
        texts = {
            f"{section}.{name}": str(value)
            for section, section_config in vars(self).items()
            for name, value in vars(section_config).items()
        }
        return {"model.kind": get_model_kind(self.model)} | texts

    @property
    def world_size(self) -> int:
        """Return the number of processes that train."""
        return self.pipeline.ranks * self.pipeline.tp * self.pipeline.dp


def make_contradiction_error(
    source: str, field: Field, program_value: str, config_value: str
) -> UsageError:
    """Return the error of a setting that contradicts the program in a file.

    Args:
        source: The file of the program.
        field: The field of the program.
        program_value: The value in the program, as text.
        config_value: The value in the configuration, as text.
    """
    fact = f"{source} has {field.name} {program_value}, not {config_value}"
    hint = f"leave out {field.name}" + ", or compile the schedule again" * source.endswith(".sched")
    if field.name == "norm_check":
        fact = (
            f"{source} has norm_check {program_value}, but a training run needs the norm of each "
            "step before the step"
        )
        hint = "compile it without -O norm_check=after_step"
    if setting := {
        "tied_weights": "model.tied = {}",
        "clip_grad_norm": "train.clip_grad_norm = {:.1f}",
    }.get(field.name):
        fact = f"{source} has {field.name} {program_value}, not {config_value}"
        correct_setting = setting.format(
            json.dumps(program_value != "no")
            if field.name == "tied_weights"
            else program_value != "no"
        )
        hint = (
            f"{correct_setting}, or compile it with{'out' * (config_value == 'no')} -O {field.name}"
        )
    return UsageError(fact, hint=hint, fields=[field.name])
