"""Enumerations of the instructions, the kinds of values, the forms and the lanes.

The tables in `instruction_table.py` have a row for each member, at the index of its number.
"""

from __future__ import annotations

from enum import IntEnum


class Value(IntEnum):
    """The kinds of values that instructions give to other instructions; see `VALUES`."""

    ACT_IN = 0
    ACT_OUT = 1
    SAVED = 2
    GRAD_IN = 3
    GRAD_OUT = 4
    DEFERRED_WGRAD = 5
    WGRAD = 6
    GRAD = 7
    NORM = 8
    PARAMS = 9
    SKIP_IN = 10
    SKIP_OUT = 11
    SKIP_GRAD_IN = 12
    SKIP_GRAD_OUT = 13
    LOCAL_NORM = 14
    UNSHARDED_PARAMS = 15
    SHARDED_PARAMS = 16
    WGRAD_BUFFER = 17
    SNAPSHOT = 18
    STATE = 19
    STATE_WRITTEN = 20
    HOST_GRAD = 21
    HOST_WEIGHTS = 22
    WEIGHTS_RELOADED = 23
    GRADS_CHECKED = 24


class Form(IntEnum):
    """The representations of a value in a message; see `FORMS`."""

    TP_SHARD = 0


class Lane(IntEnum):
    """The in-order queues of a rank; see `LANES`."""

    COMPUTE = 0
    ACT = 1
    GRAD = 2
    TP = 3
    DP = 4
    PARAMS = 5
    D2H = 6
    H2D = 7
    DISK = 8
    HOST = 9
    EP = 10


class Opcode(IntEnum):
    """The kinds of instructions, such as Forward and SendAct.

    Example:
        >>> from schedir import Opcode, PipelineShape, compile, schedules
        >>> program = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4))
        >>> [instr.mb for instr in program.streams[0] if instr.op is Opcode.SendAct]
        [0, 1, 2, 3]
    """

    Forward = 0
    Backward = 1
    BackwardInput = 2
    BackwardWeight = 3
    SendAct = 4
    RecvAct = 5
    SendGrad = 6
    RecvGrad = 7
    TPScatterAct = 8
    TPGatherAct = 9
    TPScatterGrad = 10
    TPGatherGrad = 11
    ReduceGrads = 12
    ReduceReplicatedStages = 13
    ReduceTied = 14
    ReduceNorm = 15
    OptimizerStep = 16
    SendSkip = 17
    RecvSkip = 18
    SendSkipGrad = 19
    RecvSkipGrad = 20
    Recompute = 21
    ReduceNormAfterStep = 22
    Unshard = 23
    Reshard = 24
    ReduceScatter = 25
    Snapshot = 26
    Offload = 27
    Reload = 28
    OffloadToDisk = 29
    ReloadFromDisk = 30
    ReloadState = 31
    StageOptimizerStep = 32
    OffloadState = 33
    TPReduceAct = 34
    TPReduceGrad = 35
    ReduceSequenceParallelGrads = 36
    ReadStateFromDisk = 37
    WriteStateToDisk = 38
    OffloadGrads = 39
    HostOptimizerStep = 40
    ReloadWeights = 41
    CheckGradsFinite = 42
    Dispatch = 43
    Combine = 44
    CombineGrad = 45
    DispatchGrad = 46
