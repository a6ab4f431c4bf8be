"""Read and write the CSV of torch.distributed.pipelining (`_load_csv`, `_dump_csv`).

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

Row k is rank k. A cell has a stage, an action, and a microbatch if the action has one.
`(0F7;7B3)OVERLAP_F_B` is two actions that run as one. An empty cell is an idle step of the
schedule.

There are two formats: compute only, which torch lowers, and compute with transfers and reductions.
Tied weights, the norm of gradients and the optimizer step have no action, because torch leaves them
to the training loop.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from io import StringIO
from numbers import Integral
from typing import Final, NamedTuple

import numpy as np

from schedir.analysis.memory.unshard_counts import count_unshards
from schedir.errors import (
    CompletenessError,
    CsvCellError,
    LoweringLevelError,
    UsageError,
    require_type,
)
from schedir.io.torch_compatibility import require_torch_pair, require_torch_support
from schedir.io.torch_unshard import RESHARD, UNSHARD, fit_unshards_to_torch
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    TRANSFER_OPS,
    Opcode,
    Scope,
)
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES, PipelineShape
from schedir.ir.pipeline.placement import NAMED_PLACEMENTS
from schedir.ir.program import (
    JOINED_BIT,
    OP_SHIFT,
    OPCODES,
    STAGE_SHIFT,
    Program,
    SlotCounts,
    Stream,
)

__all__ = ["from_csv", "to_csv"]

# The first format, compute only, is the same in all versions of torch. The second is named after a
# version of torch, because the actions with transfers differ between versions. torch added
# REDUCE_GRAD late in 2025 (pytorch PR 166449). Without REDUCE_GRAD in the file, torch does not
# scale gradients. torch is adding waits (PRs 194121, 196725).
CSV_FORMATS: Final = ("torch", "torch-2.13")

_O = Opcode
ACTIONS: Final = {
    "F": _O.Forward,
    "B": _O.Backward,
    "I": _O.BackwardInput,
    "W": _O.BackwardWeight,
    "SEND_F": _O.SendAct,
    "RECV_F": _O.RecvAct,
    "SEND_B": _O.SendGrad,
    "RECV_B": _O.RecvGrad,
    "REDUCE_GRAD": _O.ReduceGrads,
}
_ACTION_TEXTS: Final = {op: action for action, op in ACTIONS.items()}
# With ZeRO, gradients are reduced to shards. With zero 3, weights are sharded too.
_SHARDED_REDUCE_ACTIONS: Final = {_O.ReduceScatter: "REDUCE_GRAD"}
_SHARDED_ACTIONS: Final = _SHARDED_REDUCE_ACTIONS | {_O.Unshard: UNSHARD, _O.Reshard: RESHARD}
# Actions that are ignored by default -> True if the action has a microbatch. torch writes unshards
# and reshards for all stages. Waits are not needed, because schedir's instructions include them.
IGNORED_ACTIONS: Final = {
    UNSHARD: False,
    RESHARD: False,
    "WAIT_SEND_F": True,
    "WAIT_SEND_B": True,
    "WAIT_REDUCE_GRAD": False,
}
# Action -> its encoded instruction without stage and microbatch (None if the action is ignored),
# and True if the action has a microbatch.
_ACTION_WORDS: Final[dict[str, tuple[int | None, bool]]] = {
    **{
        action: (int(op) << OP_SHIFT, INSTRUCTIONS[op].scope is Scope.MICROBATCH)
        for action, op in ACTIONS.items()
    },
    **{action: (None, has_microbatch) for action, has_microbatch in IGNORED_ACTIONS.items()},
}
PAIR_ACTION: Final = "OVERLAP_F_B"
_MISSING_ROW_HINT: Final = "stages are numbered from 0; is the row of a rank missing?"
_ACTION_PATTERN = re.compile(r"(\d+)([A-Za-z_]+)(\d*)", re.ASCII)
_PAIR_PATTERN = re.compile(r"\(([^()]*)\)(\w*)")

# ---------------------------------------------------------------- program to CSV


def to_csv(program: Program, csv_format: str = "torch") -> str:
    """Return a program as a CSV of torch.distributed.pipelining.

    The format "torch" has only compute. When torch loads the file, it lowers the schedule, and adds
    the actions that FSDP needs. All versions of torch read this format.

    The format "torch-2.13" also has the transfers and reductions of the program. torch loads it
    with format="compute_comms". A program with zero 3 is for stages with FSDP. Other programs are
    for stages without FSDP. With zero 3, the file has UNSHARD and RESHARD where the program has
    Unshard and Reshard. torch also needs an unsharded stage for W and REDUCE_GRAD. If the program
    reshards a stage before one of these actions, `to_csv` finds new places for all UNSHARD and
    RESHARD, with the same number of unsharded stages.

    Instructions without an action are left out. These are tensor-parallel scatters and gathers,
    sums of tied gradients and of norms, optimizer steps with their copies between tiers, and
    snapshots. torch needs no scatters and gathers, because it sends full activations.

    Args:
        program: The program.
        csv_format: One of `CSV_FORMATS`.

    Returns:
        The text of the CSV, one row per rank.

    Raises:
        CompletenessError: The program has no backward, so torch does not load it.
        LoweringLevelError: The program is a draft, and the format has transfers.
        GroupError: A group of instructions is not a pair that torch can run as one action.
        UsageError: The format is unknown, the program has frozen stages, or `require_torch_support`
            refuses it.

    Example:
        >>> from schedir import PipelineShape, compile, schedules, torch_csv
        >>> print(torch_csv.to_csv(compile(schedules.one_f_one_b,
        ...     PipelineShape(ranks=2, microbatches=2))), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    if not program.has_backward:
        raise CompletenessError(
            "the program has no backward, but a schedule of torch needs one", program=program.name
        )
    if program.frozen_stages:
        raise UsageError(
            f"the program has no backward of its {program.frozen_stages} frozen stages, but torch "
            "needs one for each stage",
            program=program.name,
            hint="leave out frozen_stages: torch runs the backward of a frozen stage, too",
        )
    return "".join(",".join(row) + "\n" for row in format_cells(program, csv_format))


def format_cells(program: Program, csv_format: str = "torch") -> list[list[str]]:
    """Return the cells of each rank's row, as `to_csv` writes them.

    A program without a backward is allowed. torch does not load it from a CSV, but its runtime runs
    these actions.

    Args:
        program: The program.
        csv_format: One of `CSV_FORMATS`.

    Returns:
        A list of cells for each rank.

    Raises:
        LoweringLevelError: As for `to_csv`.
        GroupError: As for `to_csv`.
        UsageError: The format is unknown, or `require_torch_support` refuses the program.
    """
    if csv_format not in CSV_FORMATS:
        raise UsageError(
            f"there is no CSV format {csv_format!r}",
            hint=f"the formats are {', '.join(CSV_FORMATS)}",
        )
    if csv_format != "torch" and program.is_draft and program.shape.ranks > 1:
        raise LoweringLevelError(
            f"a draft has no transfers, but the format {csv_format!r} needs them",
            program=program.name,
            hint="export to 'torch', or compile the draft",
        )
    require_torch_support(
        program,
        compute_only=csv_format == "torch",
        supported_ops=(*_ACTION_TEXTS, *_SHARDED_ACTIONS),
    )
    texts = _ACTION_TEXTS | (
        _SHARDED_ACTIONS
        if program.zero == SHARDED_FROM_LEVEL["params"]
        else _SHARDED_REDUCE_ACTIONS
    )
    text_by_op = {
        int(op): text for op, text in texts.items() if csv_format != "torch" or op in COMPUTE_OPS
    }
    rows = []
    for rank, stream in enumerate(program.streams):
        row: list[str] = []
        for index, word in enumerate(stream.words.tolist()):
            op = word >> OP_SHIFT & 0xFF
            if op not in text_by_op:
                continue
            mb = word & 0xFFFFFFFF if _ACTION_WORDS[text_by_op[op]][1] else ""
            cell = f"{word >> STAGE_SHIFT & 0xFFFF}{text_by_op[op]}{mb}"
            if word & JOINED_BIT:
                require_torch_pair(program, rank, index)
                row[-1] = f"({row[-1]};{cell}){PAIR_ACTION}"
            else:
                row.append(cell)
        rows.append(row)
    if UNSHARD not in text_by_op.values():
        return rows
    return [
        fit_unshards_to_torch(row, max_unsharded)
        for row, max_unsharded in zip(rows, count_unshards(program).max_unsharded, strict=True)
    ]


# ---------------------------------------------------------------- CSV to program


class _CellLocation(NamedTuple):
    """The row and column of a cell, from 1, and its text."""

    row: int
    column: int
    text: str

    def make_error(self, fact: str, hint: str = "") -> CsvCellError:
        return CsvCellError(fact, line=self.row, column=self.column, hint=hint)


def from_csv(
    text: str, name: str = "imported", ranks: int | None = None, zero: int | None = None
) -> Program:
    r"""Return the program of a CSV of torch.distributed.pipelining, with or without transfers.

    Ranks, stages, microbatches and the placement are inferred. A file that was cut off after some
    rows may give a program of fewer ranks. An error is raised only if the transfers or the
    placement show that rows are missing. Set `ranks` to detect missing rows in all cases.

    A CSV without transfers gives a draft. Its reductions are left out, because `schedir.compile`
    adds all of them. Waits are ignored. The program is not checked: use `check` for that.

    Args:
        text: The text of the CSV.
        name: The name of the program.
        ranks: The number of rows that the file must have. None accepts any number.
        zero: The ZeRO level. With 3, UNSHARD and RESHARD are the program's Unshard and Reshard.
            Otherwise they are ignored, because torch writes them for all stages. With 1 to 3,
            REDUCE_GRAD reduces gradients to shards.

    Returns:
        The program, a draft if it has no transfers.

    Raises:
        CsvCellError: A cell has no action. A stage is on two ranks or on none. A message has no
            stage at its other end. A stage lacks a microbatch. The number of rows is not `ranks`.
            The error has the row and the column.
        ShapeError: The shape is invalid.

    Example:
        >>> from schedir import compile, torch_csv
        >>> draft = torch_csv.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", name="mine")
        >>> compile(draft)
        <program mine: 2 ranks, 20 instructions>
    """
    require_type(text, "text", str, 'Path("mine.csv").read_text()')
    if ranks is not None:
        require_type(ranks, "ranks", Integral, "4")
    reader = _CsvReader(
        _SHARDED_ACTIONS
        if zero == SHARDED_FROM_LEVEL["params"]
        else _SHARDED_REDUCE_ACTIONS
        if zero
        else {}
    )
    rows = _parse_rows(text)
    if ranks is not None and len(rows) != ranks:
        location = _CellLocation(min(len(rows), ranks) + 1, 1, "")
        row_word = "row" if len(rows) == 1 else "rows"
        problem = f"rank {len(rows)} has no row"
        if len(rows) > ranks:
            problem = f"row {ranks + 1} has no rank"
        raise location.make_error(
            f"the CSV has {len(rows)} {row_word} for {ranks} ranks: {problem}"
        )
    for row, cells in enumerate(rows, 1):
        reader.read_rank(row, cells)
    shape = reader.infer_shape()
    words = [np.array(words, np.int64) for words in reader.rank_words]
    lowered_ops = TRANSFER_OPS if shape.ranks > 1 else (*TRANSFER_OPS, *_SHARDED_ACTIONS)
    if not any(np.isin(array >> OP_SHIFT & 0xFF, lowered_ops).any() for array in words):
        words = [array[np.isin(array >> OP_SHIFT & 0xFF, COMPUTE_OPS)] for array in words]
    program = Program(name, shape, tuple(map(Stream, words)), zero=zero or 0)
    max_unsharded = count_unshards(program).max_unsharded
    slots = [SlotCounts.unspecified()._replace(unsharded_params=count) for count in max_unsharded]
    return program.with_slots(slots) if any(max_unsharded) else program


def _parse_rows(text: str) -> list[list[str]]:
    reader = csv.reader(StringIO(text.removeprefix("\ufeff"), newline=""))
    rows: list[list[str]] = []
    try:
        rows.extend(reader)
    except csv.Error as error:
        line = len(rows) + 1
        raise CsvCellError(f"the file is not valid CSV: {error}", line=line, column=1) from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise CsvCellError("no cell has an action such as 0F0", line=1, column=1)
    return rows


class _CsvReader:
    """Converts the cells of a CSV to encoded instructions, row by row."""

    def __init__(self, sharded_actions: Mapping[Opcode, str]) -> None:
        self.sharded_actions = {
            action: int(op) << OP_SHIFT for op, action in sharded_actions.items()
        }
        # Encoded sharding action of a stage -> the number of equal actions in the cells before.
        self.occurrences = Counter[int]()
        self.rank_words: list[list[int]] = []
        # Stage -> the first cell of the stage, and the first cell with a message to or from it.
        self.stage_cells: dict[int, _CellLocation] = {}
        self.peer_cells: dict[int, _CellLocation] = {}
        self.max_microbatch = -1
        self.max_microbatch_cell = _CellLocation(1, 1, "")

    def read_rank(self, row: int, cells: list[str]) -> None:
        self.rank_words.append([])
        for column, cell in enumerate(cells, 1):
            cell = cell.strip()
            if cell:
                self.read_cell(_CellLocation(row, column, cell))
        if not any(map(str.strip, cells)):
            raise _CellLocation(row, 1, "").make_error(f"the row of rank {row - 1} has no action")

    def read_cell(self, location: _CellLocation) -> None:
        words = self.rank_words[-1]
        pair = _PAIR_PATTERN.fullmatch(location.text) if location.text[0] == "(" else None
        if not pair:
            word = self.parse_action(location, location.text)
            if word is not None:
                words.append(word)
            return
        parts = [part.strip() for part in pair[1].split(";")]
        pair_words = [self.parse_action(location, part) for part in parts]
        ops = [OPCODES[word >> OP_SHIFT & 0xFF] for word in pair_words if word is not None]
        if not (
            pair[2] == PAIR_ACTION
            and len(ops) == len(pair_words) == 2
            and FORWARD in ops
            and any(op in BACKWARD_OPS for op in ops)
        ):
            raise location.make_error(
                f"{_shorten(location.text)} is not a pair of actions that run as one",
                hint=f"a pair is a forward and a backward, such as (0F7;7B3){PAIR_ACTION}",
            )
        first, second = pair_words
        assert first is not None and second is not None
        words += [first, second | JOINED_BIT]

    def parse_action(self, location: _CellLocation, text: str) -> int | None:
        """Return the encoded instruction of an action, or None for an action that is ignored."""
        match = _ACTION_PATTERN.fullmatch(text)
        kind = match[2] if match else ""
        if not match or kind not in _ACTION_WORDS:
            suggestions = get_close_matches(kind[:40], list(_ACTION_WORDS), 1)
            hint = f"did you mean {suggestions[0]}?" if suggestions else ""
            if (";" in text and "(" not in text) or "\t" in text:
                hint = "put commas between the actions"
            if text.endswith(".csv"):
                hint = f"from_csv takes the text of a file: Path({_shorten(text)}).read_text()"
            raise location.make_error(
                f"{_shorten(text)} is not an action such as 0F0 or 3SEND_B1", hint=hint
            )
        word, has_microbatch = _ACTION_WORDS[kind]
        word = self.sharded_actions.get(kind, word)
        if has_microbatch != bool(match[3]):
            example = f"{match[1][:9]}{kind}{'0' * has_microbatch}"
            rule = "needs a microbatch" if has_microbatch else "has no microbatch"
            raise location.make_error(f"{_shorten(text)}: {kind} {rule}, as in {example}")
        stage = int(match[1][:10])
        mb = int(match[3][:10] or 0)
        if len(match[1]) > 9 or stage >= MAX_STAGES:
            raise location.make_error(f"{_shorten(text)}: at most {MAX_STAGES} stages are allowed")
        if len(match[3]) > 9 or mb >= MAX_MICROBATCHES:
            raise location.make_error(
                f"{_shorten(text)}: at most {MAX_MICROBATCHES} microbatches are allowed"
            )
        first_cell = self.stage_cells.setdefault(stage, location)
        if first_cell.row != location.row:
            raise location.make_error(
                f"{_shorten(text)} is on rank {location.row - 1}, but stage {stage} is on rank "
                f"{first_cell.row - 1}: {_shorten(first_cell.text)} in row {first_cell.row}, "
                f"column {first_cell.column}"
            )
        if word is not None and (hop := INSTRUCTIONS[word >> OP_SHIFT & 0xFF].peer):
            # torch sends to the next stage and to the previous one only.
            self.peer_cells.setdefault(stage + (1 if hop.is_downstream else -1), location)
        if has_microbatch and mb > self.max_microbatch:
            self.max_microbatch = mb
            self.max_microbatch_cell = location
        if word is None:
            return None
        word |= stage << STAGE_SHIFT
        if kind in self.sharded_actions:
            mb, self.occurrences[word] = self.occurrences[word], self.occurrences[word] + 1
        return word | mb

    def infer_shape(self) -> PipelineShape:
        """Return the smallest shape that contains all cells. Each stage must have a cell."""
        last_stage = max(self.stage_cells)
        for stage in range(last_stage):
            if stage not in self.stage_cells:
                cell = self.stage_cells[last_stage]
                raise cell.make_error(
                    f"{_shorten(cell.text)} names stage {last_stage}, but no row has stage {stage}",
                    _MISSING_ROW_HINT,
                )
        for stage, cell in sorted(self.peer_cells.items()):
            if stage not in self.stage_cells:
                raise cell.make_error(
                    f"{_shorten(cell.text)} is to or from stage {stage}, but no row has this stage",
                    _MISSING_ROW_HINT if stage > last_stage else "",
                )
        words = np.concatenate([np.array(w, np.int64) for w in self.rank_words])
        forward = words[words >> OP_SHIFT & 0xFF == FORWARD]
        forward_counts = np.bincount(forward >> STAGE_SHIFT & 0xFFFF, minlength=last_stage + 1)
        m = max(self.max_microbatch + 1, 1)
        if (forward_counts < m).any():
            stage = int((forward_counts < m).argmax())
            raise self.max_microbatch_cell.make_error(
                f"{_shorten(self.max_microbatch_cell.text)} names microbatch "
                f"{self.max_microbatch}, so there are {m} microbatches, but stage {stage} has "
                f"only {forward_counts[stage]} forwards"
                if self.max_microbatch >= 0
                else "no cell has a microbatch"
            )
        return find_shape(
            len(self.rank_words), m, [self.stage_cells[s].row - 1 for s in range(last_stage + 1)]
        )


def find_shape(ranks: int, microbatches: int, stage_ranks: list[int]) -> PipelineShape:
    """Return the shape with a given rank for each stage.

    Args:
        ranks: The number of ranks.
        microbatches: The number of microbatches.
        stage_ranks: The rank of each stage.

    Returns:
        The shape. Its placement has a name if one of the named placements equals `stage_ranks`.
    """
    v = len(stage_ranks) // ranks
    for name, placement in NAMED_PLACEMENTS.items():
        is_candidate = len(placement.rows) == 1 and v * ranks == len(stage_ranks)
        if is_candidate and (v > 1 or name == "loop"):
            shape = PipelineShape(ranks, microbatches, v, name)
            if shape.first_rank_per_stage.tolist() == stage_ranks:
                return shape
    return PipelineShape(ranks, microbatches, placement=tuple(stage_ranks))


def _shorten(text: str) -> str:
    """Return a cell for an error, cut after 40 characters."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
