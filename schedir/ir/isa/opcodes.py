"""The numbers of instructions, values, forms and lanes.  `instructions.py` has a row for each."""

from __future__ import annotations

from enum import IntEnum


class Token(IntEnum):
    """What instructions hand to each other; `TOKENS` has a row for each."""

    ACT_IN = 0
    ACT_OUT = 1
    SAVED = 2
    GRAD_IN = 3
    GRAD_OUT = 4
    TAPE = 5
    WGRAD = 6
    GRAD = 7
    NORM = 8
    PARAMETERS = 9
    SKIP_IN = 10
    SKIP_OUT = 11
    SKIP_GRAD_IN = 12
    SKIP_GRAD_OUT = 13
    OWN_NORM = 14
    FULL = 15
    PARTS = 16
    ROOM = 17
    COPY = 18
    STATE = 19
    STORED = 20
    HOST_GRAD = 21
    HOST_WEIGHTS = 22
    RELOADED = 23
    JUDGED = 24


class Form(IntEnum):
    """How a value is changed while it crosses between stages; `FORMS` has a row for each."""

    PART = 0


class Lane(IntEnum):
    """An in-order queue of a rank; `LANES` has a row for each."""

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


class Opcode(IntEnum):
    """The instructions, by number; the number is the row in `ROWS`.

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
    Scatter = 8
    Gather = 9
    ScatterGrad = 10
    GatherGrad = 11
    ReduceGrads = 12
    ReduceHolders = 13
    ReduceTied = 14
    ReduceNorm = 15
    OptimizerStep = 16
    SendSkip = 17
    RecvSkip = 18
    SendSkipGrad = 19
    RecvSkipGrad = 20
    Recompute = 21
    Validate = 22
    Unshard = 23
    Reshard = 24
    ReduceScatter = 25
    Snapshot = 26
    Offload = 27
    Reload = 28
    Spill = 29
    Fetch = 30
    LoadState = 31
    StepStage = 32
    StoreState = 33
    SumAct = 34
    SumGrad = 35
    ReduceSequence = 36
    FetchState = 37
    SpillState = 38
    OffloadGrads = 39
    StepHost = 40
    ReloadWeights = 41
    ReleaseGrads = 42
