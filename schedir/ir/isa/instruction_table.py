"""The tables of instructions, values, forms and lanes.

Each table has one row per instruction, kind of value, form or lane.  `table_schema.py` describes
the columns.  The printer, the parser, the flow of values, the dependency graph, the memory
estimate, the simulator, the executor and `docs/reference/instructions.md` read these rows.  No
other module repeats a fact of a row.
"""

from __future__ import annotations

from typing import Final, Literal

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Value
from schedir.ir.isa.table_schema import (
    Change,
    CollectiveRing,
    FormRow,
    LaneRow,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Traffic,
    ValueRow,
)

_V, _L, _O = Value, Lane, Opcode
_MB, _STAGE, _RANK = Scope.MICROBATCH, Scope.STAGE, Scope.RANK
_ONCE, _ALL = ProducerRule.ONCE, ProducerRule.ALL

VALUES: Final[tuple[ValueRow, ...]] = (
    ValueRow(
        _V.ACT_IN, _MB, _ONCE, "the activation",
        size="activation", peer=PeerRule.PREVIOUS, local_source=_V.ACT_OUT,
    ),
    ValueRow(_V.ACT_OUT, _MB, _ONCE, "the activation", size="activation", peer=PeerRule.NEXT),
    ValueRow(_V.SAVED, _MB, _ONCE, "the saved activations", size="saved", is_training_only=True),
    ValueRow(
        _V.GRAD_IN, _MB, _ONCE, "the gradient",
        size="activation_grad", peer=PeerRule.NEXT, local_source=_V.GRAD_OUT, is_training_only=True,
        size_fallback="activation",
    ),
    ValueRow(
        _V.GRAD_OUT, _MB, _ONCE, "the gradient",
        size="activation_grad", peer=PeerRule.PREVIOUS, is_training_only=True,
        size_fallback="activation",
    ),
    ValueRow(
        _V.DEFERRED_WGRAD, _MB, _ONCE, "the deferred weight gradients",
        size="deferred_wgrad", converted_from=(_V.SAVED, "saved_and_deferred"),
        is_training_only=True,
        size_fallback="saved",
    ),
    ValueRow(_V.WGRAD, _STAGE, _ALL, "the weights' gradient", size="grads", is_training_only=True),
    ValueRow(_V.GRAD, _STAGE, _ALL, "the reduced gradient", is_training_only=True),
    ValueRow(_V.NORM, _RANK, _ALL, "the norm"),
    ValueRow(_V.PARAMS, _RANK, ProducerRule.VERSION, "the weights"),
    ValueRow(
        _V.SKIP_IN, _MB, _ONCE, "the skip",
        size="skip", peer=PeerRule.SKIP_FROM, local_source=_V.SKIP_OUT,
    ),
    ValueRow(_V.SKIP_OUT, _MB, _ONCE, "the skip", size="skip", peer=PeerRule.SKIP_TO),
    ValueRow(
        _V.SKIP_GRAD_IN, _MB, _ONCE, "the skip's gradient",
        size="skip", peer=PeerRule.SKIP_TO, local_source=_V.SKIP_GRAD_OUT, is_training_only=True,
    ),
    ValueRow(
        _V.SKIP_GRAD_OUT, _MB, _ONCE, "the skip's gradient",
        size="skip", peer=PeerRule.SKIP_FROM, is_training_only=True,
    ),
    ValueRow(_V.LOCAL_NORM, _RANK, _ALL, "the rank's part of the norm"),
    ValueRow(
        _V.UNSHARDED_PARAMS, _STAGE, ProducerRule.LATEST, "the unsharded weights",
        size="params", program_attribute="zero", is_training_only=True,
    ),
    ValueRow(
        _V.SHARDED_PARAMS, _STAGE, _ALL, "the sharded weights",
        program_attribute="zero", is_training_only=True,
    ),
    ValueRow(
        _V.WGRAD_BUFFER, _STAGE, ProducerRule.LATEST_OR_START,
        "the buffer for the weights' gradient",
        program_attribute="reduce_scatter_at", is_training_only=True,
    ),
    ValueRow(
        _V.SNAPSHOT, _STAGE, _ALL, "the snapshot",
        program_attribute="checkpoint_snapshots", is_training_only=True,
    ),
    ValueRow(
        _V.STATE, _STAGE, ProducerRule.LATEST, "the optimizer's state",
        size="optimizer", program_attribute="optimizer_placement", initial_tier="host",
        is_training_only=True,
    ),
    ValueRow(
        _V.STATE_WRITTEN, _STAGE, _ALL, "the written state",
        program_attribute="optimizer_placement", attribute_values=("host", "disk"),
        is_training_only=True,
    ),
    ValueRow(
        _V.HOST_GRAD, _STAGE, _ALL, "the gradient on the host",
        program_attribute="optimizer_placement", attribute_values=("cpu_step",),
        reserved_memory=("host", "grads"),
        is_training_only=True,
    ),
    ValueRow(
        _V.HOST_WEIGHTS, _STAGE, _ALL, "the weights on the host",
        program_attribute="optimizer_placement", attribute_values=("cpu_step",),
        reserved_memory=("host", "params"), is_training_only=True,
    ),
    ValueRow(
        _V.WEIGHTS_RELOADED, _STAGE, _ALL, "the reloaded weights",
        program_attribute="optimizer_placement", attribute_values=("cpu_step",),
        is_training_only=True,
    ),
    ValueRow(
        _V.GRADS_CHECKED, _RANK, _ALL, "the check of the gradients",
        program_attribute="optimizer_placement", attribute_values=("cpu_step",),
        is_training_only=True,
    ),
)  # fmt: skip

FORMS: Final[tuple[FormRow, ...]] = (
    FormRow(Form.TP_SHARD, "a tensor-parallel rank's 1/t of the value", is_tp_split=True),
)

LANES: Final[tuple[LaneRow, ...]] = (
    LaneRow(_L.COMPUTE, False, "runs", "compute instructions of the rank", "peer"),
    LaneRow(_L.ACT, True, "starts", "messages with activations",
            color="#0072b2", label="activations"),
    LaneRow(_L.GRAD, True, "starts", "messages with gradients",
            color="#d55e00", label="gradients"),
    LaneRow(_L.TP, False, "waits", "collectives of the tensor-parallel group",
            color="#7a7a7a", label="tensor parallel"),
    LaneRow(_L.DP, False, "starts", "reductions over replicas and ranks",
            "reduction", "#1a1a1a", "reductions"),
    LaneRow(_L.PARAMS, False, "starts", "gathers of weights over replicas",
            "weights", "#cc79a7", "gathers of weights"),
    LaneRow(_L.D2H, False, "starts", "copies to the host", "offload", "#8c6d31"),
    LaneRow(_L.H2D, False, "starts", "copies from the host", "offload", "#c9a45c"),
    LaneRow(_L.DISK, False, "starts", "writes of the host to its disk, and reads from it",
            "disk", "#4a3728", "disk"),
    LaneRow(_L.HOST, False, "starts",
            "optimizer steps that the host runs, in parallel with the device",
            "step", "#6b8e23", "host computes"),
    LaneRow(_L.EP, False, "waits", "all-to-alls of the expert-parallel group",
            "all_to_all", "#882255", "expert parallel"),
)  # fmt: skip

# The sizes that an optimizer step moves.  The step reads and writes weights and optimizer state,
# and reads gradients.
OPTIMIZER_STEP_SIZES: Final = ("params", "params", "grads", "optimizer", "optimizer")


def _make_state_traffic(
    link: Literal["hbm", "host", "disk", "dram"], *sizes: str, placements: str
) -> Traffic:
    """Return traffic that exists only with some values of `optimizer_placement`."""
    return Traffic(
        link,
        sizes,
        program_attribute="optimizer_placement",
        attribute_values=tuple(placements.split()),
    )


INSTRUCTIONS: Final[tuple[Row, ...]] = (
    Row(
        _O.Forward, "F", _L.COMPUTE, _MB,
        needs=(_V.ACT_IN, _V.PARAMS, _V.SKIP_IN, _V.UNSHARDED_PARAMS),
        gives=(_V.ACT_OUT, _V.SAVED, _V.SKIP_OUT),
        frees=(_V.ACT_IN, _V.SKIP_IN),
        doc="Runs a stage on a microbatch. The last stage also computes the loss.",
        cost="F", is_compute=True,
    ),
    Row(
        _O.Backward, "B", _L.COMPUTE, _MB,
        needs=(_V.SAVED, _V.GRAD_IN, _V.SKIP_GRAD_IN, _V.UNSHARDED_PARAMS, _V.WGRAD_BUFFER),
        gives=(_V.GRAD_OUT, _V.WGRAD, _V.SKIP_GRAD_OUT),
        frees=(_V.SAVED, _V.GRAD_IN, _V.SKIP_GRAD_IN),
        doc="Computes the full backward: the gradients of the input and of the weights.",
        cost="B", is_compute=True,
    ),
    Row(
        _O.BackwardInput, "I", _L.COMPUTE, _MB,
        needs=(_V.SAVED, _V.GRAD_IN, _V.SKIP_GRAD_IN, _V.UNSHARDED_PARAMS, _V.WGRAD_BUFFER),
        gives=(_V.GRAD_OUT, _V.DEFERRED_WGRAD, _V.WGRAD, _V.SKIP_GRAD_OUT),
        frees=(_V.SAVED, _V.GRAD_IN, _V.SKIP_GRAD_IN),
        doc=(
            "Computes the gradient of the input, and of the weights that cannot be deferred "
            "(biases, norms). The tensors that W needs become the value `deferred_wgrad`, and I "
            "frees the other saved activations. The zero-bubble papers call this instruction B."
        ),
        cost="I", is_compute=True,
    ),
    Row(
        _O.BackwardWeight, "W", _L.COMPUTE, _MB,
        needs=(_V.DEFERRED_WGRAD, _V.WGRAD_BUFFER),
        gives=(_V.WGRAD,),
        frees=(_V.DEFERRED_WGRAD,),
        doc="Computes the deferred weight gradients.",
        cost="W", is_compute=True,
    ),
    Row(
        _O.SendAct, "send_act", _L.ACT, _MB,
        needs=(_V.ACT_OUT,),
        frees=(_V.ACT_OUT,),
        doc="Sends an activation to the rank of the next stage.",
        cost="send", peer=PeerRule.NEXT, partner=_O.RecvAct,
    ),
    Row(
        _O.RecvAct, "recv_act", _L.ACT, _MB,
        gives=(_V.ACT_IN,),
        doc="Receives an activation from the rank of the previous stage.",
        peer=PeerRule.PREVIOUS, partner=_O.SendAct,
    ),
    Row(
        _O.SendGrad, "send_grad", _L.GRAD, _MB,
        needs=(_V.GRAD_OUT,),
        frees=(_V.GRAD_OUT,),
        doc="Sends a gradient to the rank of the previous stage.",
        cost="send", peer=PeerRule.PREVIOUS, partner=_O.RecvGrad,
    ),
    Row(
        _O.RecvGrad, "recv_grad", _L.GRAD, _MB,
        gives=(_V.GRAD_IN,),
        doc="Receives a gradient from the rank of the next stage.",
        peer=PeerRule.NEXT, partner=_O.SendGrad,
    ),
    Row(
        _O.TPScatterAct, "tp_scatter_act", _L.COMPUTE, _MB,
        needs=(_V.ACT_OUT,),
        gives=(_V.ACT_OUT,),
        doc=(
            "Keeps this tensor-parallel rank's 1/t of an activation, so that only this part is "
            "sent."
        ),
        cost="tp_scatter", form=Form.TP_SHARD, traffic=Traffic("hbm", moves_per_byte=2),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.TPGatherAct, "tp_gather_act", _L.TP, _MB,
        needs=(_V.ACT_IN,),
        gives=(_V.ACT_IN,),
        doc=(
            "All-gathers a received activation in the tensor-parallel group while the rank "
            "computes. With sequence parallelism, the instruction also all-gathers the output of a "
            "segment of a stage (arXiv 2205.05198), or the first tensor of this output if there "
            "are several."
        ),
        cost="tp_gather", ring=CollectiveRing("tp"), form=Form.TP_SHARD,
        between_segments="sequence_parallel", is_implicit_in_torch=True,
    ),
    Row(
        _O.TPScatterGrad, "tp_scatter_grad", _L.COMPUTE, _MB,
        needs=(_V.GRAD_OUT,),
        gives=(_V.GRAD_OUT,),
        doc="Keeps this tensor-parallel rank's 1/t of a gradient.",
        cost="tp_scatter", form=Form.TP_SHARD, traffic=Traffic("hbm", moves_per_byte=2),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.TPGatherGrad, "tp_gather_grad", _L.TP, _MB,
        needs=(_V.GRAD_IN,),
        gives=(_V.GRAD_IN,),
        doc="All-gathers a received gradient in the tensor-parallel group.",
        cost="tp_gather", ring=CollectiveRing("tp"), form=Form.TP_SHARD,
        between_segments="sequence_parallel", is_implicit_in_torch=True,
    ),
    Row(
        _O.ReduceGrads, "reduce_grads", _L.DP, _STAGE,
        needs=(_V.WGRAD,),
        gives=(_V.GRAD,),
        frees=(_V.WGRAD,),
        doc=(
            "Multiplies a stage's gradient by the argument `grad_scale` of `Executor.step`, and "
            "sums it over the data-parallel group."
        ),
        cost="reduce_grads", ring=CollectiveRing("dp", "grads", 2),
    ),
    Row(
        _O.ReduceReplicatedStages, "reduce_replicated_stages", _L.DP, _STAGE,
        needs=(_V.GRAD,),
        gives=(_V.GRAD,),
        doc=(
            "If several pipeline ranks have a copy of a stage, as in `dualpipe`: sums the gradient "
            "of the stage over these ranks."
        ),
        cost="reduce_replicated_stages", partner=_O.ReduceReplicatedStages, group="stage_replicas",
        host_sync="replicas", ring=CollectiveRing("stage_replicas", "grads", 2),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.ReduceTied, "reduce_tied", _L.DP, _STAGE,
        needs=(_V.GRAD,),
        gives=(_V.GRAD,),
        doc=(
            "Sums the gradients of the copies of each tied weight of the rank, in the order of "
            "stages. Each copy gets the sum."
        ),
        cost="reduce_tied", partner=_O.ReduceTied, group="tied_weights", host_sync="always",
        is_implicit_in_torch=True,
    ),
    Row(
        _O.ReduceNorm, "reduce_norm", _L.DP, _RANK,
        needs=(_V.GRAD,),
        gives=(_V.NORM,),
        doc="Computes the norm of all gradients, over all pipeline ranks.",
        cost="reduce_norm", partner=_O.ReduceNorm, group="model", host_sync="always",
        is_implicit_in_torch=True,
    ),
    Row(
        _O.OptimizerStep, "step", _L.COMPUTE, _RANK,
        needs=(
            _V.GRAD, _V.NORM, _V.SHARDED_PARAMS, _V.SNAPSHOT, _V.STATE_WRITTEN, _V.WEIGHTS_RELOADED,
            _V.GRADS_CHECKED,
        ),
        gives=(_V.PARAMS, _V.LOCAL_NORM),
        frees=(_V.GRAD, _V.NORM),
        doc=(
            "Updates the parameters of the rank's stages. If each stage has its own optimizer "
            "step, OptimizerStep only marks the end of the update."
        ),
        cost="step", is_implicit_in_torch=True,
    ),
    Row(
        _O.SendSkip, "send_skip", _L.ACT, _MB,
        needs=(_V.SKIP_OUT,),
        frees=(_V.SKIP_OUT,),
        doc="Sends a skip (the second output of a stage) to the rank of a later stage.",
        cost="send", peer=PeerRule.SKIP_TO, partner=_O.RecvSkip,
    ),
    Row(
        _O.RecvSkip, "recv_skip", _L.ACT, _MB,
        gives=(_V.SKIP_IN,),
        doc="Receives a skip from the rank of an earlier stage.",
        peer=PeerRule.SKIP_FROM, partner=_O.SendSkip,
    ),
    Row(
        _O.SendSkipGrad, "send_skip_grad", _L.GRAD, _MB,
        needs=(_V.SKIP_GRAD_OUT,),
        frees=(_V.SKIP_GRAD_OUT,),
        doc="Sends the gradient of a skip to the rank of the stage that sent the skip.",
        cost="send", peer=PeerRule.SKIP_FROM, partner=_O.RecvSkipGrad,
    ),
    Row(
        _O.RecvSkipGrad, "recv_skip_grad", _L.GRAD, _MB,
        gives=(_V.SKIP_GRAD_IN,),
        doc="Receives the gradient of a skip from the rank of the later stage.",
        peer=PeerRule.SKIP_TO, partner=_O.SendSkipGrad,
    ),
    Row(
        _O.Recompute, "R", _L.COMPUTE, _MB,
        needs=(_V.SAVED, _V.PARAMS, _V.UNSHARDED_PARAMS),
        gives=(_V.SAVED,),
        doc="Runs the forward of an F again. This F saved only the inputs of the stage.",
        cost="R", changes=(Change(_V.SAVED, "recompute_inputs", "saved"),), is_compute=True,
    ),
    Row(
        _O.ReduceNormAfterStep, "reduce_norm_after_step", _L.DP, _RANK,
        needs=(_V.LOCAL_NORM,),
        frees=(_V.LOCAL_NORM,),
        doc=(
            "Computes the norm of all gradients, after an optimizer step that did not wait for "
            "this norm. The next training step checks the norm (post-validation)."
        ),
        cost="reduce_norm_after_step", partner=_O.ReduceNormAfterStep, group="model",
        is_implicit_in_torch=True,
    ),
    Row(
        _O.Unshard, "unshard", _L.PARAMS, Scope.OCCURRENCE,
        needs=(_V.PARAMS,),
        gives=(_V.UNSHARDED_PARAMS,),
        doc="All-gathers the weights of a stage over the replicas.",
        cost="unshard", ring=CollectiveRing("dp", "params"),
    ),
    Row(
        _O.Reshard, "reshard", _L.COMPUTE, Scope.OCCURRENCE,
        needs=(_V.UNSHARDED_PARAMS,),
        gives=(_V.SHARDED_PARAMS,),
        frees=(_V.UNSHARDED_PARAMS,),
        doc="Frees all weights of a stage except the replica's own part.",
    ),
    Row(
        _O.ReduceScatter, "reduce_scatter", _L.DP, Scope.OCCURRENCE,
        needs=(_V.WGRAD,),
        gives=(_V.GRAD, _V.WGRAD_BUFFER),
        frees=(_V.WGRAD,),
        doc=(
            "Multiplies a stage's gradient by the argument `grad_scale` of `Executor.step`, and "
            "sums it over the data-parallel group. Each replica gets its part of the sum."
        ),
        cost="reduce_scatter", ring=CollectiveRing("dp", "grads"),
    ),
    Row(
        _O.Snapshot, "snapshot", _L.D2H, _STAGE,
        needs=(_V.PARAMS,),
        gives=(_V.SNAPSHOT,),
        doc=(
            "Copies the weights and the optimizer state of a stage to the host before the "
            "optimizer step changes them. A checkpoint is written from this copy while the "
            "next steps run. If no checkpoint is due, the instruction does nothing."
        ),
        cost="snapshot", idle_cause="snapshot",
        traffic=Traffic("host", ("params", "optimizer"), is_always_sharded=True,
                        program_attribute="checkpoint_snapshots", attribute_values=(True,)),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.Offload, "offload", _L.D2H, _MB,
        needs=(_V.SAVED,),
        gives=(_V.SAVED,),
        doc="Moves saved activations to the host.",
        cost="offload", changes=(Change(_V.SAVED, "device", "host"),),
    ),
    Row(
        _O.Reload, "reload", _L.H2D, _MB,
        needs=(_V.SAVED,),
        gives=(_V.SAVED,),
        doc="Moves saved activations back to the device.",
        cost="reload", changes=(Change(_V.SAVED, "host", "device"),),
    ),
    Row(
        _O.OffloadToDisk, "offload_to_disk", _L.DISK, _MB,
        needs=(_V.SAVED,),
        gives=(_V.SAVED,),
        doc="Moves offloaded activations from the host to its disk.",
        cost="offload_to_disk", changes=(Change(_V.SAVED, "host", "disk"),),
    ),
    Row(
        _O.ReloadFromDisk, "reload_from_disk", _L.DISK, _MB,
        needs=(_V.SAVED,),
        gives=(_V.SAVED,),
        doc="Moves offloaded activations from the disk back to the host.",
        cost="reload_from_disk", changes=(Change(_V.SAVED, "disk", "host"),),
    ),
    Row(
        _O.ReloadState, "reload_state", _L.H2D, _STAGE,
        needs=(_V.STATE, _V.GRAD, _V.SNAPSHOT),
        gives=(_V.STATE,),
        doc=(
            "Moves the optimizer state of a stage to the device, after the gradient of the stage "
            "is reduced."
        ),
        cost="reload_state", changes=(Change(_V.STATE, "host", "device"),),
        traffic=_make_state_traffic("host", "optimizer", placements="host disk"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.StageOptimizerStep, "stage_step", _L.COMPUTE, _STAGE,
        needs=(_V.STATE, _V.GRAD, _V.NORM, _V.SHARDED_PARAMS),
        gives=(_V.STATE,),
        doc=(
            "Updates the parameters of a stage, after all gradients of the rank exist and were "
            "found to be finite."
        ),
        cost="stage_step", needs_all_stages=True,
        traffic=_make_state_traffic("hbm", *OPTIMIZER_STEP_SIZES, placements="host disk"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.OffloadState, "offload_state", _L.D2H, _STAGE,
        needs=(_V.STATE,),
        gives=(_V.STATE, _V.STATE_WRITTEN),
        doc="Moves the optimizer state of a stage back to the host.",
        cost="offload_state", changes=(Change(_V.STATE, "device", "host"),),
        traffic=_make_state_traffic("host", "optimizer", placements="host disk"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.TPReduceAct, "tp_reduce_act", _L.TP, _MB,
        needs=(_V.ACT_IN,),
        gives=(_V.ACT_IN,),
        doc=(
            "Sums the output of a segment of a stage over the tensor-parallel group, before the "
            "next segment uses it (the function g of Megatron-LM). With sequence parallelism, each "
            "rank keeps its part of the sum."
        ),
        cost="tp_reduce", ring=CollectiveRing("tp", rounds=2), between_segments="always",
    ),
    Row(
        _O.TPReduceGrad, "tp_reduce_grad", _L.TP, _MB,
        needs=(_V.GRAD_IN,),
        gives=(_V.GRAD_IN,),
        doc=(
            "Sums the gradient of a segment's input over the tensor-parallel group, before the "
            "previous segment uses it (the function f of Megatron-LM). With sequence parallelism, "
            "each rank keeps its part of the sum."
        ),
        cost="tp_reduce", ring=CollectiveRing("tp", rounds=2), between_segments="always",
    ),
    Row(
        _O.ReduceSequenceParallelGrads, "reduce_sequence_parallel_grads", _L.TP, _STAGE,
        needs=(_V.GRAD,),
        gives=(_V.GRAD,),
        doc=(
            "Sums the gradients of normalization layers, and of biases that are added after a "
            "reduction, over the tensor-parallel group. Each rank applies these parameters to its "
            "own tokens."
        ),
        cost="reduce_sequence_parallel_grads", idle_cause="reduction", is_implicit_in_torch=True,
    ),
    Row(
        _O.ReadStateFromDisk, "read_state_from_disk", _L.DISK, _STAGE,
        needs=(_V.STATE,),
        gives=(_V.STATE,),
        doc="Moves the optimizer state of a stage from the disk to the host.",
        cost="read_state_from_disk", changes=(Change(_V.STATE, "disk", "host"),),
        traffic=_make_state_traffic("disk", "optimizer", placements="disk"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.WriteStateToDisk, "write_state_to_disk", _L.DISK, _STAGE,
        needs=(_V.STATE,),
        gives=(_V.STATE, _V.STATE_WRITTEN),
        doc="Moves the optimizer state of a stage back to the disk.",
        cost="write_state_to_disk", changes=(Change(_V.STATE, "host", "disk"),),
        traffic=_make_state_traffic("disk", "optimizer", placements="disk"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.OffloadGrads, "offload_grads", _L.D2H, _STAGE,
        needs=(_V.GRAD, _V.PARAMS),
        gives=(_V.HOST_GRAD,),
        doc="Copies the reduced gradient of a stage to the host, which runs the optimizer step.",
        cost="offload_grads", host_sync_lanes=(_L.DP,),
        traffic=_make_state_traffic("host", "grads", placements="cpu_step"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.HostOptimizerStep, "host_step", _L.HOST, _STAGE,
        needs=(_V.HOST_GRAD, _V.NORM, _V.SHARDED_PARAMS, _V.SNAPSHOT, _V.GRADS_CHECKED),
        gives=(_V.HOST_WEIGHTS,),
        doc=(
            "Updates a stage's parameters on the host, which has the optimizer state, when all "
            "gradients of the rank exist and are known to be finite."
        ),
        cost="host_step", needs_all_stages=True, host_sync_lanes=(_L.DP, _L.D2H),
        traffic=_make_state_traffic("dram", *OPTIMIZER_STEP_SIZES, placements="cpu_step"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.ReloadWeights, "reload_weights", _L.H2D, _STAGE,
        needs=(_V.HOST_WEIGHTS,),
        gives=(_V.WEIGHTS_RELOADED,),
        doc="Copies the weights that the host has updated back to the device.",
        cost="reload_weights",
        traffic=_make_state_traffic("host", "params", placements="cpu_step"),
        is_implicit_in_torch=True,
    ),
    Row(
        _O.CheckGradsFinite, "check_grads_finite", _L.COMPUTE, _RANK,
        needs=(_V.HOST_GRAD, _V.NORM),
        gives=(_V.GRADS_CHECKED,),
        doc=(
            "Waits until all gradients of the rank are on the host, and checks whether they are "
            "finite. After that, the backwards of the next update may add to gradients on the "
            "device."
        ),
        cost="check_grads_finite", host_sync_lanes=(_L.DP, _L.D2H), is_implicit_in_torch=True,
    ),
    Row(
        _O.Dispatch, "dispatch", _L.EP, _MB,
        needs=(_V.ACT_IN,),
        gives=(_V.ACT_IN,),
        doc=(
            "Sends the tokens of a mixture-of-experts layer to the ranks of their experts, by an "
            "all-to-all of the expert-parallel group (GShard, arXiv 2006.16668)."
        ),
        cost="dispatch", ring=CollectiveRing("ep"), between_segments="always",
    ),
    Row(
        _O.Combine, "combine", _L.EP, _MB,
        needs=(_V.ACT_IN,),
        gives=(_V.ACT_IN,),
        doc=(
            "Sends the outputs of experts back to the ranks of their tokens, by an all-to-all of "
            "the expert-parallel group."
        ),
        cost="combine", ring=CollectiveRing("ep"), between_segments="always",
    ),
    Row(
        _O.CombineGrad, "combine_grad", _L.EP, _MB,
        needs=(_V.GRAD_IN,),
        gives=(_V.GRAD_IN,),
        doc=(
            "The backward of combine: sends the gradients of the experts' outputs to the ranks of "
            "the experts, over the same links as dispatch."
        ),
        cost="dispatch", ring=CollectiveRing("ep"), between_segments="always",
    ),
    Row(
        _O.DispatchGrad, "dispatch_grad", _L.EP, _MB,
        needs=(_V.GRAD_IN,),
        gives=(_V.GRAD_IN,),
        doc=(
            "The backward of dispatch: sends the gradients of the tokens back to their ranks, over "
            "the same links as combine."
        ),
        cost="combine", ring=CollectiveRing("ep"), between_segments="always",
    ),
)  # fmt: skip
