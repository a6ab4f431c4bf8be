"""Find which instructions produce, change, read and free each value of a program.

Each value has a chain of instructions along the Stream of its rank.  One instruction makes the
value, some may change it, some read it, and one frees it.  The dependency graph, the slot counts,
the memory estimate and the error messages all take these chains from this module.  The properties
of a kind of value are in its row of `VALUES`.  The effect of an instruction on values is in its
row of `INSTRUCTIONS`.

An instruction that reads a value is a needer of the value. The giver is the instruction that made
or last changed the value before the needer in the Stream.  If each value of a kind is made once and
changed at most once, a table look-up finds the giver: the instruction that changed the value if
there is one, otherwise the instruction that made it.  The look-up also finds a giver that comes
after the needer in the Stream.  `check` then reports the two instructions that are in the wrong
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    LOCAL_HANDOVER,
    VALUES,
    Lane,
    Opcode,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Value,
    find_change,
    find_form_changes,
    find_modifiers,
    find_possible_givers,
    find_producers,
)
from schedir.ir.isa.table_validation import require_tables
from schedir.ir.program import Program
from schedir.ir.value_chains import NO_FORM, ChainMember, ValueChains

require_tables()

Keys = NDArray[np.int64]

# Kind of value -> the instructions that free it, each with a rule or None.  The rule leads from the
# stage that made the value to the stage that frees it.  The rule is None if the stage that made the
# value also frees it.  If a stage passes a value to the next stage on the same rank, the next stage
# frees the value.
FREEING_OPS: Final[dict[Value, list[tuple[Opcode, PeerRule | None]]]] = {
    kind: [(row.op, None) for row in INSTRUCTIONS if kind in row.frees]
    + [
        (row.op, hop.opposite)
        for received, (source, hop) in LOCAL_HANDOVER.items()
        for row in INSTRUCTIONS
        if source is kind and received in row.frees
    ]
    for kind in Value
}


# The memory of a program is computed from the same lifetimes many times. For a small program, this
# takes longer than everything else. The lifetimes of a larger program would use too much memory.
_MAX_INSTRUCTIONS_WITH_CACHED_LIFETIMES: Final = 2**18


class StaleRead(NamedTuple):
    """A read of a value after another instruction has freed the value or changed its state.

    Attributes:
        needer: Position of the instruction that reads the value.
        culprit: Position of the last instruction before the reader that changed or freed the value.
        value: The kind of value.
    """

    needer: int
    culprit: int
    value: Value


class ValueLives(NamedTuple):
    """The lifetimes of all values of one kind, ordered by `filled_at`.

    Attributes:
        filled_at: Position of the instruction that writes each value, ascending, shape (values,).
        freed_at: Position of the instruction that frees each value, shape (values,).
        sorted_freed_at: The positions of `freed_at`, ascending.
        rank_offsets: The values of rank r have the indices `rank_offsets[r]` to
            `rank_offsets[r + 1] - 1`; shape (ranks + 1,).
    """

    filled_at: Positions
    freed_at: Positions
    sorted_freed_at: Positions
    rank_offsets: NDArray[np.intp]

    def get_rank_slice(self, rank: int) -> slice:
        """Return the slice of the arrays for the values of one rank.

        Args:
            rank: Number of the rank.
        """
        return slice(self.rank_offsets[rank], self.rank_offsets[rank + 1])

    def count_peak(self, groups: Positions) -> NDArray[np.int64]:
        """Return the largest number of values that exist on each rank at the same time.

        This is the smallest number of slots with which the rank can run its Stream.

        Args:
            groups: Number of each instruction's group, ascending, shape (instructions,). The
                instructions of a group are issued together. A slot that one instruction of a group
                frees is not free for another instruction of the group.

        Returns:
            The number of values, shape (ranks,).
        """
        fills = groups[self.filled_at]
        alive = np.arange(1, len(fills) + 1) - np.searchsorted(groups[self.sorted_freed_at], fills)
        return self.max_per_rank(alive)

    def max_per_rank(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the maximum of some numbers over the values of each rank.

        Args:
            values: A number for each value, shape (values,).

        Returns:
            The maximum over the values of each rank, shape (ranks,); 0 for a rank without values.
        """
        maxima = np.zeros(len(self.rank_offsets) - 1, values.dtype)
        ranks = np.flatnonzero(np.diff(self.rank_offsets))  # reduceat needs non-empty ranges
        if len(ranks):
            maxima[ranks] = np.maximum.reduceat(values, self.rank_offsets[ranks])
        return maxima


class ValueStates(NamedTuple):
    """The states of all values of one kind between the instructions that change them.

    Attributes:
        begin: Position of the instruction after which the value has this state, ascending.
        end: Position of the next instruction that changes or frees the value.
        tier: Memory tier of the value, as an index into TIERS.
        form: The field of `Sizes` with the bytes of the value, as an index into
            `ValueChains.forms`.  NO_FORM means the size in the value's row of `VALUES`.
        is_created: True if `begin` makes the value.
        is_freed: True if `end` frees the value.
    """

    begin: Positions
    end: Positions
    tier: NDArray[np.int64]
    form: NDArray[np.int64]
    is_created: NDArray[np.bool_]
    is_freed: NDArray[np.bool_]


class Dataflow:
    """The flow of values through a program.

    Args:
        index: The tables with the positions of all instructions of the program.
    """

    def __init__(self, index: InstructionIndex) -> None:
        self.index = index
        self._stale_reads: list[StaleRead] = []  # filled by `givers`
        self._chains: dict[Value, ValueChains | None] = {}
        self._lifetimes: dict[tuple[Value, int], ValueLives] = {}

    @classmethod
    def from_program(cls, program: Program) -> Dataflow:
        """Return the flow of a program, which the program caches.

        Args:
            program: The program.
        """
        return program.cached("flow", lambda twin: cls(InstructionIndex.from_program(twin)))

    # ------------------------------------------------------------ givers of values

    @cached_property
    def givers(self) -> NDArray[np.int32]:
        """Return the positions of the givers of each instruction, shape (n, instructions).

        `givers[k, i]` is the instruction that gives instruction i the k-th kind of value that it
        needs.  The order is that of `Row.needs`, without kinds that the program does not have.  The
        entry is -1 if no instruction gives the value, for example because the value exists from the
        start.

        Further entries follow after the last needed kind in two cases: a value has givers on
        several lanes, or an instruction makes a value again after another instruction freed it.
        """
        entries: list[tuple[int, Positions, Positions]] = []
        for row, needer in self.index.iterate_rows():
            needed = self._get_needed_values(row)
            next_row = len(needed)
            for k, kind in enumerate(needed):
                first_giver, *other_givers = self._find_givers(row, kind, needer)
                entries.append((k, needer, first_giver))
                for giver in other_givers:
                    entries.append((next_row, needer, giver))
                    next_row += 1
            for kind in (kind for kind in row.gives if kind not in row.needs):
                is_latest = VALUES[kind].producer_rule is ProducerRule.LATEST
                if is_latest and self.index.program.uses_value(kind):
                    entries.append((next_row, needer, self._find_prior_frees(kind, needer)))
                    next_row += 1
        givers = np.full(
            (max([2, *(k + 1 for k, _, _ in entries)]), len(self.index)), NO_POSITION, np.int32
        )
        for k, needer, giver in entries:
            givers[k, needer] = giver
        return givers

    def find_missing_giver(self) -> tuple[int, Value] | None:
        """Return an instruction that needs a value without a giver, and the kind of this value.

        Only values that are made once (`ProducerRule.ONCE`) and have no chains are searched.
        `stale_reads` covers values with chains. Instructions that run a stage are left out, because
        some of their values are optional.

        Returns:
            The position of the instruction and the kind of value, or None.
        """
        for row, needer in self.index.iterate_rows():
            if row.is_compute:
                continue
            for k, kind in enumerate(self._get_needed_values(row)):
                if VALUES[kind].producer_rule is not ProducerRule.ONCE or self.get_chains(kind):
                    continue
                missing = self.givers[k, needer] == NO_POSITION
                if missing.any():
                    return int(needer[missing][0]), kind
        return None

    @property
    def stale_reads(self) -> list[StaleRead]:
        """Return the reads of values that were freed or changed before, and not made again."""
        return self._stale_reads if self.givers.size else []

    def find_value(self, needer: int, giver: int) -> Value | None:
        """Return the kind of value that one instruction takes from another.

        Args:
            needer: Position of the instruction that needs a value.
            giver: Position of the instruction that may give the value.

        Returns:
            The kind of value. None if the giver gives no value that the other instruction needs.
        """
        row = INSTRUCTIONS[int(self.index.op[needer])]
        given_values = INSTRUCTIONS[int(self.index.op[giver])].gives
        for k, kind in enumerate(self._get_needed_values(row)):
            if int(self.givers[k, needer]) == giver:
                return kind
        return next((kind for kind in row.needs if kind in given_values), None)

    def _get_needed_values(self, row: Row) -> list[Value]:
        """Return the values of `Row.needs` that the program has."""
        return [kind for kind in row.needs if self.index.program.uses_value(kind)]

    def _find_givers(self, row: Row, value: Value, needer: Positions) -> Iterator[Positions]:
        """Yield the givers of a value for the instructions at the positions `needer`.

        If givers are on several lanes, there is one array per lane, in the shape of `needer`.
        """
        rule = VALUES[value].producer_rule
        if rule is ProducerRule.ALL:
            yield from self._find_last_givers(row, value, needer)
        elif rule is ProducerRule.VERSION:
            yield self._find_version_givers(row, value, needer)
        elif rule is ProducerRule.LATEST_OR_START:
            givers = self.index.find_all_positions(find_possible_givers(row.op, value))
            yield self._find_latest_before(
                self._compute_keys(value, givers), givers, self._compute_keys(value, needer), needer
            )
        elif (chains := self.get_chains(value)) is not None:
            yield self._find_nearest_givers(chains, row, value, needer)
        else:
            yield self._find_single_givers(row, value, needer)

    def _find_single_givers(self, row: Row, value: Value, needer: Positions) -> Positions:
        """Return the givers of values that are made once.

        `find_possible_givers` lists the opcodes of possible givers. The giver has the first
        of these opcodes for which the program has an instruction on the value.
        """
        giver = self._find_first_present(
            find_possible_givers(row.op, value), self.index.key[needer]
        )
        if value in LOCAL_HANDOVER:
            source, hop = LOCAL_HANDOVER[value]
            missing = np.flatnonzero(giver == NO_POSITION)
            neighbor_keys = self.index.find_neighbor_keys(hop, needer[missing])
            giver[missing] = self._find_first_present(find_producers(source), neighbor_keys)
        return giver

    def _find_first_present(self, ops: tuple[Opcode, ...], key: Positions) -> Positions:
        """Return, for each key, the position of its instruction, or -1 if there is none.

        If several of `ops` have an instruction with the key, the result is the instruction with the
        first of these opcodes.
        """
        tables = [op for op in ops if op in self.index.position_by_key]
        if not tables:
            return np.full(len(key), NO_POSITION, np.int32)
        giver = self.index.find_positions(tables[0], key)
        for op in tables[1:]:
            giver = np.where(giver == NO_POSITION, self.index.find_positions(op, key), giver)
        return giver

    def _find_version_givers(self, row: Row, value: Value, needer: Positions) -> Positions:
        """Return the givers of the version of the weights that each instruction uses.

        The giver is the instruction that changes this version, or otherwise the instruction that
        makes it.  The giver is -1 for the weights from before the program, and for the weights of
        a frozen stage.  The optimizer step of update u makes version u + 1.  An instruction of
        update u that changes weights changes version u.
        """
        index, shape = self.index, self.index.program.shape
        changing_ops = [
            op
            for op in find_possible_givers(row.op, value)
            if op in index.position_by_key and value in INSTRUCTIONS[op].needs
        ]
        if shape.optimizer_steps == 1 and not changing_ops:
            self._add_late_reads(row, value, needer)
            return np.full(len(needer), NO_POSITION, np.int32)
        version = (
            shape.weight_version(index.stage[needer], index.mb[needer])
            if row.scope is Scope.MICROBATCH
            else index.find_updates(needer)
        )
        is_trained = np.full(len(needer), True)
        if row.scope is not Scope.RANK:
            is_trained = index.stage[needer] >= index.program.frozen_stages
        giver = np.full(len(needer), NO_POSITION, np.int32)
        for op in find_possible_givers(row.op, value):
            update = version if op in changing_ops else version - 1
            key = np.where(
                (update >= 0) & is_trained,
                index.compute_keys(INSTRUCTIONS[op].scope, needer, update),
                NO_POSITION,
            )
            giver = np.where(
                giver == NO_POSITION, index.find_positions(op, key.astype(np.int32)), giver
            )
        return giver

    def _add_late_reads(self, row: Row, value: Value, needer: Positions) -> None:
        """Record reads of weights after the optimizer step, in a program with one update."""
        index = self.index
        if row.scope is not Scope.RANK:
            needer = needer[index.stage[needer] >= index.program.frozen_stages]
        first_update = np.zeros(len(needer), np.int64)
        for op in find_producers(value):
            step = index.find_positions(
                op,
                index.compute_keys(INSTRUCTIONS[op].scope, needer, first_update).astype(np.int32),
            )
            is_late = (step != NO_POSITION) & (step < needer)
            self._stale_reads += [
                StaleRead(reader, giver, value)
                for reader, giver in zip(
                    needer[is_late].tolist(), step[is_late].tolist(), strict=True
                )
            ]

    def _find_last_givers(self, row: Row, value: Value, needer: Positions) -> Iterator[Positions]:
        """Yield the last giver on each lane, for values that several instructions add to.

        The givers of all stages of the rank are included if the needer or a giver is per rank, or
        if the needer uses the values of all stages. Otherwise only givers of the needer's stage are
        included.
        """
        index = self.index
        ops = find_possible_givers(row.op, value)
        scope = row.scope
        if (
            row.needs_all_stages
            or row.group == "tied_weights"
            or any(INSTRUCTIONS[op].scope is Scope.RANK for op in ops)
        ):
            scope = Scope.RANK  # an instruction per rank gives its value to all stages of the rank
        for lane in sorted(
            {INSTRUCTIONS[op].lane for op in ops if op in index.position_by_key}
        ) or [row.lane]:
            givers = index.find_all_positions(op for op in ops if INSTRUCTIONS[op].lane is lane)
            if row.group == "tied_weights":  # the instruction sums all tied weights of the rank
                tied_stages = [s for stages in index.program.trained_ties for s in stages]
                givers = givers[np.isin(index.stage[givers], tied_stages)]
            last_by_key = np.full(index.key_count[scope], NO_POSITION, np.int32)
            last_by_key[index.compute_keys(scope, givers)] = givers
            key = index.compute_keys(scope, needer)
            last_givers = last_by_key[key]
            if scope is Scope.STAGE:
                last_givers = np.maximum(last_givers, self._find_tied_sums(ops, lane, needer))
            if row.scope is Scope.OCCURRENCE:
                # The last occurrence of a stage needs the last giver.  An earlier occurrence needs
                # the nearest giver before this occurrence.
                final_by_key = np.full(index.key_count[scope], NO_POSITION, np.int32)
                final_by_key[key] = needer
                nearest = self._find_latest_before(
                    index.compute_keys(scope, givers), givers, key, needer
                )
                is_early = (final_by_key[key] != needer) & (nearest != NO_POSITION)
                last_givers[is_early] = nearest[is_early]
                previous = self._find_latest_before(key, needer, key, needer)  # previous occurrence
                is_stale = (previous != NO_POSITION) & (last_givers < previous)
                self._stale_reads += map(
                    StaleRead, needer[is_stale], previous[is_stale], [value] * int(is_stale.sum())
                )
            yield last_givers

    def _find_tied_sums(self, ops: tuple[Opcode, ...], lane: Lane, needer: Positions) -> Positions:
        """Return the position of the last `reduce_tied` on the rank of each instruction.

        One `reduce_tied` sums the gradients of all tied weights of its rank.  The result is -1 if
        the rank has no `reduce_tied`, or if the instruction's stage has no tied weight.
        """
        index = self.index
        last_by_rank = np.full(index.key_count[Scope.RANK], NO_POSITION, np.int32)
        sums = index.find_all_positions(
            op
            for op in ops
            if INSTRUCTIONS[op].group == "tied_weights" and INSTRUCTIONS[op].lane is lane
        )
        last_by_rank[index.compute_keys(Scope.RANK, sums)] = sums
        tied_stages = [s for stages in index.program.trained_ties for s in stages]
        last_sums = last_by_rank[index.compute_keys(Scope.RANK, needer)]
        return np.where(np.isin(index.stage[needer], tied_stages), last_sums, np.int32(NO_POSITION))

    def _find_prior_frees(self, value: Value, needer: Positions) -> Positions:
        """Return the last instruction that freed each value before `needer` makes it, or -1."""
        freers = self.index.find_all_positions(op for op, _ in FREEING_OPS[value])
        key = self._compute_keys(value, freers)
        return self._find_latest_before(key, freers, self._compute_keys(value, needer), needer)

    @staticmethod
    def _find_latest_before(
        giver_keys: Keys, givers: Positions, needer_keys: Keys, needers: Positions
    ) -> Positions:
        """Return, for each needer, the last earlier giver with the same key, or else -1."""
        span = max(int(givers.max(initial=0)), int(needers.max(initial=0))) + 1
        sort_keys = giver_keys * span + givers
        order = np.argsort(sort_keys)
        event = np.searchsorted(sort_keys[order], needer_keys * span + needers) - 1
        nearest = np.append(order, 0)[event]  # index -1, no earlier giver, selects the 0
        if not len(givers):
            return np.full(len(needers), NO_POSITION, np.int32)
        is_match = (event >= 0) & (giver_keys[nearest] == needer_keys)
        return np.where(is_match, givers[nearest], NO_POSITION).astype(np.int32)

    def _find_nearest_givers(
        self, chains: ValueChains, row: Row, value: Value, needer: Positions
    ) -> Positions:
        """Return the givers that `chains` finds for the needers. Also record the stale reads."""
        giver, stale = chains.find_givers(
            self._compute_keys(value, needer), needer, find_change(row.op, value)
        )
        self._stale_reads += [StaleRead(reader, culprit, value) for reader, culprit in stale]
        return giver

    # ------------------------------------------------------------ lifetimes

    def get_chains(self, value: Value) -> ValueChains | None:
        """Return the chains of all values of a kind.

        Args:
            value: The kind of value.

        Returns:
            The chains. None if the kind needs no chains, because a table look-up finds the givers.
        """
        if value not in self._chains:
            self._chains[value] = self._build_chains(value) if self._needs_chains(value) else None
        return self._chains[value]

    def _needs_chains(self, value: Value) -> bool:
        if VALUES[value].producer_rule in (ProducerRule.LATEST, ProducerRule.ALL):
            return True
        # Changes of form need no chains: they always run in the order of `find_modifiers`.
        form_ops = find_form_changes(value)
        changing_ops = [
            op
            for op in find_modifiers(value)
            if op in self.index.position_by_key and op not in form_ops
        ]
        if VALUES[value].producer_rule is not ProducerRule.ONCE or not changing_ops:
            return False
        use_counts = np.sum(
            [self.index.position_by_key[op] != NO_POSITION for op in changing_ops], 0
        )
        return bool((use_counts > 1).any()) or any(find_change(op, value) for op in changing_ops)

    def _build_chains(self, value: Value) -> ValueChains:
        members = []
        for op in (*find_producers(value), *find_modifiers(value)):
            positions = self.index.positions.get(op)
            if positions is not None:
                change = find_change(op, value)
                members.append(
                    ChainMember(
                        positions,
                        self._compute_keys(value, positions),
                        True,
                        op in find_producers(value),
                        change,
                    )
                )
        for op, hop in FREEING_OPS[value]:
            positions = self.index.positions.get(op)
            if positions is not None:
                key = self._compute_keys(value, positions, hop and hop.opposite)
                members.append(ChainMember(positions, key, False, False, None))
        initial_tier = self.index.program.initial_tier(value)
        return ValueChains.from_members(
            members,
            accumulated=VALUES[value].producer_rule is ProducerRule.ALL,
            initial_tier=initial_tier,
        )

    def _compute_keys(
        self, value: Value, positions: Positions, peer_rule: PeerRule | None = None
    ) -> Keys:
        """Return the key of the value that each instruction makes, changes, reads or frees.

        With `peer_rule`, the value belongs to the stage to which this rule leads.
        """
        if peer_rule is not None:
            return self.index.find_neighbor_keys(peer_rule, positions).astype(np.int64)
        if VALUES[value].scope is Scope.MICROBATCH:
            return self.index.key[positions].astype(np.int64)
        return self.index.compute_keys(
            VALUES[value].scope, positions, np.zeros(len(positions), np.int64)
        )

    def find_lifetimes(self, value: Value, tier: int = 0) -> ValueLives:
        """Return the lifetimes of the values of one kind on a memory tier.

        A value that is offloaded and reloaded has two lifetimes on the device.  If several
        instructions add to a value, its lifetime starts with the first of these instructions.

        Args:
            value: The kind of value.
            tier: The memory tier, as an index into TIERS; 0 is the device.

        Returns:
            The lifetimes.  Values that are never freed, or are freed on another rank, are left out.
            The result is empty if `Program.takes_memory` is False for the kind. Do not change the
            arrays, because the flow of a small program caches them.
        """
        lives = self._lifetimes.get((value, tier))
        if lives is None:
            lives = self._compute_lifetimes(value, tier)
            if len(self.index) <= _MAX_INSTRUCTIONS_WITH_CACHED_LIFETIMES:
                self._lifetimes[value, tier] = lives
        return lives

    def _compute_lifetimes(self, value: Value, tier: int) -> ValueLives:
        """Compute what `find_lifetimes` returns."""
        index = self.index
        # Most programs have no memory for some kinds of values. Their chains would take long.
        takes_memory = index.program.takes_memory(value)
        chains = self.get_chains(value) if takes_memory else None
        if not takes_memory or (tier and chains is None):
            empty = np.empty(0, np.int32)
            return ValueLives(empty, empty, empty, np.zeros(len(index.program.offsets), np.intp))
        if chains is not None:
            filled_at, freed_at = chains.find_tier_intervals(tier)
        else:
            filled_at = index.find_all_positions(find_producers(value))
            freed_at = self._find_frees(value, filled_at)
        is_freed = freed_at != NO_POSITION
        is_freed[is_freed] = index.rank[freed_at[is_freed]] == index.rank[filled_at[is_freed]]
        filled_at, freed_at = filled_at[is_freed], freed_at[is_freed]
        rank_offsets = np.searchsorted(filled_at, index.program.offsets)
        return ValueLives(filled_at, freed_at, np.sort(freed_at), rank_offsets)

    def _find_frees(self, value: Value, filled_at: Positions) -> Positions:
        """Return the position of the instruction that frees each value, or -1.

        Call this method only for values that are made once.
        """
        index = self.index
        freed_at = np.full(len(filled_at), NO_POSITION, np.int32)
        for op, hop in FREEING_OPS[value]:
            if op in index.position_by_key:
                if hop is None:
                    key = index.key[filled_at]
                else:
                    key = index.find_neighbor_keys(hop, filled_at)
                positions = index.find_positions(op, key)
                freed_at = np.where(freed_at == NO_POSITION, positions, freed_at)
        return freed_at

    def find_states(self, value: Value) -> ValueStates:
        """Return the states of all values of a kind, ordered by `begin`.

        Args:
            value: The kind of value.
        """
        chains = self.get_chains(value)
        if chains is not None:
            return ValueStates(*chains.find_state_intervals())
        lives = self.find_lifetimes(value)
        count = len(lives.filled_at)
        true = np.ones(count, bool)
        zero = np.zeros(count, np.int64)
        return ValueStates(lives.filled_at, lives.freed_at, zero, zero + NO_FORM, true, true)
