"""Find the producer, the changes, the last reader and the lifetime of every value.

A value has a chain of instructions along the Stream of its rank: one makes it, some may change it,
some read it, one frees it.  Everything that asks for a part of such a chain asks here: the
dependency graph, slots, memory, and the explaining of errors.  What is known of a kind of value is
its row in `VALUES`, what an instruction does with it is the instruction's row in `INSTRUCTIONS`.

The giver of a value is the nearest instruction that gives it and stands earlier in the Stream.
Where each value is made once and changed at most once, that is a look-up in a table: the change if
there is one, else the maker.  If it stands later, it is the giver all the same, so that `check` can
say which two stand the wrong way round.
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

# Who frees a value, and at which stage: what is handed over is freed by its taker.
FREEING_OPS: Final[dict[Value, list[tuple[Opcode, PeerRule | None]]]] = {
    token: [(row.op, None) for row in INSTRUCTIONS if token in row.frees]
    + [
        (row.op, hop.opposite)
        for taken, (made, hop) in LOCAL_HANDOVER.items()
        for row in INSTRUCTIONS
        if made is token and taken in row.frees
    ]
    for token in Value
}


class StaleRead(NamedTuple):
    """An instruction that needs a value which the last to touch it has freed, or left elsewhere."""

    needer: int
    culprit: int
    value: Value


class ValueLives(NamedTuple):
    """Values of one kind, by where they are filled and freed.

    `filled_at` has the position that fills each value, rank by rank and along each Stream,
    `freed_at` the position that frees it, and `sorted_freed_at` the latter in order.  Rank r has
    the values from
    `first[r]` to `first[r + 1]`.
    """

    filled_at: Positions
    freed_at: Positions
    sorted_freed_at: Positions
    rank_offsets: NDArray[np.intp]

    def get_rank_slice(self, rank: int) -> slice:
        """Where a rank's values are."""
        return slice(self.rank_offsets[rank], self.rank_offsets[rank + 1])

    def count_peak(self, groups: Positions) -> NDArray[np.int64]:
        """The most values that overlap along each Stream: the fewest slots there can be.

        `groups` numbers the groups of instructions that are issued as one: what one of them
        frees is not free for another.
        """
        fills = groups[self.filled_at]
        alive = np.arange(1, len(fills) + 1) - np.searchsorted(groups[self.sorted_freed_at], fills)
        return self.max_per_rank(alive)

    def max_per_rank(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest of each rank's numbers, or 0; `values` has one for each fill."""
        most = np.zeros(len(self.rank_offsets) - 1, values.dtype)
        here = np.flatnonzero(np.diff(self.rank_offsets))
        if len(here):
            most[here] = np.maximum.reduceat(values, self.rank_offsets[here])
        return most


class ValueStates(NamedTuple):
    """What values of one kind are, from one instruction that touches them to the next.

    `begin` and `end` are the positions of the two, `tier` is where the value lies (an index into
    TIERS), `form` which field of Sizes tells its bytes (an index into `ValueChains.forms`, NO_FORM
    for that of the token).  `is_created` says that the value begins here, `is_freed` that it ends.
    """

    begin: Positions
    end: Positions
    tier: NDArray[np.int64]
    form: NDArray[np.int64]
    is_created: NDArray[np.bool_]
    is_freed: NDArray[np.bool_]


class Dataflow:
    """The flow of values through a program."""

    def __init__(self, index: InstructionIndex) -> None:
        self.index = index
        self._stale_reads: list[StaleRead] = []  # what `givers` finds on its way
        self._chains: dict[Value, ValueChains | None] = {}

    @classmethod
    def from_program(cls, program: Program) -> Dataflow:
        """The flow of a program, which is made once."""
        return program.cached("flow", lambda twin: cls(InstructionIndex.from_program(twin)))

    # ------------------------------------------------------------ who gives what

    @cached_property
    def givers(self) -> NDArray[np.int32]:
        """For each instruction, who gives the values that it needs, shape (k, n).

        Positions, or -1 for what is there from the start.  Row k is for the k-th of `Row.needs`;
        where givers are on several lanes, the last on each is in a further row, and so is, for who
        makes a value again, who has let go of it.
        """
        found: list[tuple[int, Positions, Positions]] = []
        for row, needer in self.index.iterate_rows():
            needed = self._get_needed_values(row)
            more = len(needed)
            for k, token in enumerate(needed):
                first, *others = self._find_givers(row, token, needer)
                found.append((k, needer, first))
                for giver in others:
                    found.append((more, needer, giver))
                    more += 1
            for token in (token for token in row.gives if token not in row.needs):
                if VALUES[
                    token
                ].producer_rule is ProducerRule.LATEST and self.index.program.uses_value(token):
                    found.append((more, needer, self._find_prior_frees(token, needer)))
                    more += 1
        needs = np.full(
            (max([2, *(k + 1 for k, _, _ in found)]), len(self.index)), NO_POSITION, np.int32
        )
        for k, needer, giver in found:
            needs[k, needer] = giver
        return needs

    @property
    def stale_reads(self) -> list[StaleRead]:
        """Who needs a value that is not there as it is needed, and will not be."""
        return self._stale_reads if self.givers.size else []

    def find_value(self, needer: int, giver: int) -> Value | None:
        """Which value of a giver's an instruction needs; None if it is none."""
        row = INSTRUCTIONS[int(self.index.op[needer])]
        given = INSTRUCTIONS[int(self.index.op[giver])].gives
        for k, token in enumerate(self._get_needed_values(row)):
            if int(self.givers[k, needer]) == giver:
                return token
        return next((token for token in row.needs if token in given), None)

    def _get_needed_values(self, row: Row) -> list[Value]:
        """Of the values that a row needs those that the program has."""
        return [token for token in row.needs if self.index.program.uses_value(token)]

    def _find_givers(self, row: Row, value: Value, needer: Positions) -> Iterator[Positions]:
        """Who gives a value to each of some instructions of a row, by lane if on several."""
        found = VALUES[value].producer_rule
        if found is ProducerRule.ALL:
            yield from self._find_last_givers(row, value, needer)
        elif found is ProducerRule.VERSION:
            yield self._find_version_givers(row, value, needer)
        elif found is ProducerRule.LATEST_OR_START:
            given = self.index.find_all_positions(find_possible_givers(row.op, value))
            yield self._find_latest_before(
                self._compute_keys(value, given), given, self._compute_keys(value, needer), needer
            )
        elif (chains := self.get_chains(value)) is not None:
            yield self._find_nearest_givers(chains, row, value, needer)
        else:
            yield self._find_single_givers(row, value, needer)

    def _find_single_givers(self, row: Row, value: Value, needer: Positions) -> Positions:
        """Of values made once: the last in the chain that is there."""
        giver = self._find_first_present(
            find_possible_givers(row.op, value), self.index.key[needer]
        )
        if value in LOCAL_HANDOVER:
            made, hop = LOCAL_HANDOVER[value]
            lacks = np.flatnonzero(giver == NO_POSITION)
            other = self.index.find_neighbor_keys(hop, needer[lacks])
            giver[lacks] = self._find_first_present(find_producers(made), other)
        return giver

    def _find_first_present(self, ops: tuple[Opcode, ...], key: Positions) -> Positions:
        """Positions of the first of `ops` that is there, by key."""
        tables = [op for op in ops if op in self.index.position_by_key]
        if not tables:
            return np.full(len(key), NO_POSITION, np.int32)
        giver = self.index.find_positions(tables[0], key)
        for op in tables[1:]:
            giver = np.where(giver == NO_POSITION, self.index.find_positions(op, key), giver)
        return giver

    def _find_version_givers(self, row: Row, value: Value, needer: Positions) -> Positions:
        """Of weights: what changes their version, else what makes it; -1 for those from the start,
        as those of a frozen stage always are.

        The instruction with number u makes version u + 1, and changes version u.
        """
        index, shape = self.index, self.index.program.shape
        changed = [
            op
            for op in find_possible_givers(row.op, value)
            if op in index.position_by_key and value in INSTRUCTIONS[op].needs
        ]
        if shape.optimizer_steps == 1 and not changed:
            return np.full(len(needer), NO_POSITION, np.int32)
        version = (
            shape.weight_version(index.stage[needer], index.mb[needer])
            if row.scope is Scope.MICROBATCH
            else index.find_updates(needer)
        )
        changes = np.full(len(needer), True)
        if row.scope is not Scope.RANK:
            changes = index.stage[needer] >= index.program.frozen_stages
        giver = np.full(len(needer), NO_POSITION, np.int32)
        for op in find_possible_givers(row.op, value):
            time = version if op in changed else version - 1
            key = np.where(
                (time >= 0) & changes,
                index.compute_keys(INSTRUCTIONS[op].scope, needer, time),
                NO_POSITION,
            )
            giver = np.where(
                giver == NO_POSITION, index.find_positions(op, key.astype(np.int32)), giver
            )
        return giver

    def _find_last_givers(self, row: Row, value: Value, needer: Positions) -> Iterator[Positions]:
        """Of what many give: the last of a stage's, or of all of a rank's, on each lane."""
        index = self.index
        ops = find_possible_givers(row.op, value)
        per = row.scope
        if (
            row.needs_all_stages
            or row.group == "tied_weights"
            or any(INSTRUCTIONS[op].scope is Scope.RANK for op in ops)
        ):
            per = Scope.RANK  # what a rank gives, it gives to each of its stages
        for lane in sorted(
            {INSTRUCTIONS[op].lane for op in ops if op in index.position_by_key}
        ) or [row.lane]:
            gives = index.find_all_positions(op for op in ops if INSTRUCTIONS[op].lane is lane)
            if row.group == "tied_weights":  # all copies of the rank
                tied = [s for stages in index.program.trained_ties for s in stages]
                gives = gives[np.isin(index.stage[gives], tied)]
            last = np.full(index.key_count[per], NO_POSITION, np.int32)
            last[index.compute_keys(per, gives)] = gives
            key = index.compute_keys(per, needer)
            found = last[key]
            if per is Scope.STAGE:
                found = np.maximum(found, self._find_tied_sums(ops, lane, needer))
            if row.scope is Scope.OCCURRENCE:  # of each turn but the last what is there by then
                final = np.full(index.key_count[per], NO_POSITION, np.int32)
                final[key] = needer
                near = self._find_latest_before(index.compute_keys(per, gives), gives, key, needer)
                early = (final[key] != needer) & (near != NO_POSITION)
                found[early] = near[early]
                before = self._find_latest_before(key, needer, key, needer)  # the turn before
                again = (before != NO_POSITION) & (found < before)
                self._stale_reads += map(
                    StaleRead, needer[again], before[again], [value] * int(again.sum())
                )
            yield found

    def _find_tied_sums(self, ops: tuple[Opcode, ...], lane: Lane, needer: Positions) -> Positions:
        """What sums the copies of tied weights, which stands for one of a rank's and changes all:
        of each needer whose stage has a copy; -1 for others."""
        index = self.index
        last = np.full(index.key_count[Scope.RANK], NO_POSITION, np.int32)
        sums = index.find_all_positions(
            op
            for op in ops
            if INSTRUCTIONS[op].group == "tied_weights" and INSTRUCTIONS[op].lane is lane
        )
        last[index.compute_keys(Scope.RANK, sums)] = sums
        tied = [s for stages in index.program.trained_ties for s in stages]
        found = last[index.compute_keys(Scope.RANK, needer)]
        return np.where(np.isin(index.stage[needer], tied), found, np.int32(NO_POSITION))

    def _find_prior_frees(self, value: Value, needer: Positions) -> Positions:
        """Who has let go of a value that is made again, last before it is; -1 for the first."""
        freers = self.index.find_all_positions(op for op, _ in FREEING_OPS[value])
        key = self._compute_keys(value, freers)
        return self._find_latest_before(key, freers, self._compute_keys(value, needer), needer)

    @staticmethod
    def _find_latest_before(
        giver_keys: Keys, givers: Positions, needer_keys: Keys, needers: Positions
    ) -> Positions:
        """Of givers, by their keys, the last that stands before each needer; -1 where none does."""
        span = max(int(givers.max(initial=0)), int(needers.max(initial=0))) + 1
        order = giver_keys * span + givers
        sort = np.argsort(order)
        event = np.searchsorted(order[sort], needer_keys * span + needers) - 1
        near = np.append(sort, 0)[event]  # -1 is the one that is put behind
        if not len(givers):
            return np.full(len(needers), NO_POSITION, np.int32)
        fits = (event >= 0) & (giver_keys[near] == needer_keys)
        return np.where(fits, givers[near], NO_POSITION).astype(np.int32)

    def _find_nearest_givers(
        self, chains: ValueChains, row: Row, value: Value, needer: Positions
    ) -> Positions:
        """Of what is made again, or changes its state: the nearest earlier giver."""
        giver, stale = chains.find_givers(
            self._compute_keys(value, needer), needer, find_change(row.op, value)
        )
        self._stale_reads += [StaleRead(who, culprit, value) for who, culprit in stale]
        return giver

    # ------------------------------------------------------------ how long it lives

    def get_chains(self, value: Value) -> ValueChains | None:
        """The chains of a token's values; None where the table of instructions is enough."""
        if value not in self._chains:
            self._chains[value] = self._build_chains(value) if self._needs_chains(value) else None
        return self._chains[value]

    def _needs_chains(self, value: Value) -> bool:
        if VALUES[value].producer_rule in (ProducerRule.LATEST, ProducerRule.ALL):
            return True
        # Changes of form are in the order of the tables, wherever they stand.
        forms = find_form_changes(value)
        changed = [
            op
            for op in find_modifiers(value)
            if op in self.index.position_by_key and op not in forms
        ]
        if VALUES[value].producer_rule is not ProducerRule.ONCE or not changed:
            return False
        often = np.sum([self.index.position_by_key[op] != NO_POSITION for op in changed], 0)
        return bool((often > 1).any()) or any(find_change(op, value) for op in changed)

    def _build_chains(self, value: Value) -> ValueChains:
        parts = []
        for op in (*find_producers(value), *find_modifiers(value)):
            at = self.index.positions.get(op)
            if at is not None:
                change = find_change(op, value)
                parts.append(
                    ChainMember(
                        at, self._compute_keys(value, at), True, op in find_producers(value), change
                    )
                )
        for op, hop in FREEING_OPS[value]:
            at = self.index.positions.get(op)
            if at is not None:
                key = self._compute_keys(value, at, hop and hop.opposite)
                parts.append(ChainMember(at, key, False, False, None))
        lies = self.index.program.initial_tier(value)
        return ValueChains.from_members(
            parts, accumulated=VALUES[value].producer_rule is ProducerRule.ALL, initial_tier=lies
        )

    def _compute_keys(
        self, value: Value, positions: Positions, peer_rule: PeerRule | None = None
    ) -> Keys:
        """Which value of a token's each of some instructions touches; of another stage's, a hop
        from its own.
        """
        if peer_rule is not None:
            return self.index.find_neighbor_keys(peer_rule, positions).astype(np.int64)
        if VALUES[value].scope is Scope.MICROBATCH:
            return self.index.key[positions].astype(np.int64)
        return self.index.compute_keys(
            VALUES[value].scope, positions, np.zeros(len(positions), np.int64)
        )

    def find_lifetimes(self, value: Value, tier: int = 0) -> ValueLives:
        """Where the values of a kind are filled on a tier and freed; without those never freed,
        and none of a kind that takes no memory of its own.

        A value that is moved off the device and back fills a slot twice.  What many give, the first
        of them fills.
        """
        index = self.index
        chains = self.get_chains(value)
        if not index.program.takes_memory(value) or (tier and chains is None):
            none = np.empty(0, np.int32)
            return ValueLives(none, none, none, np.zeros(len(index.program.offsets), np.intp))
        if chains is not None:
            fill, freed = chains.find_tier_intervals(tier)
        else:
            fill = index.find_all_positions(find_producers(value))
            freed = self._find_frees(value, fill)
        own = freed != NO_POSITION
        own[own] = index.rank[freed[own]] == index.rank[fill[own]]
        fill, freed = fill[own], freed[own]
        first = np.searchsorted(fill, index.program.offsets)
        return ValueLives(fill, freed, np.sort(freed), first)

    def _find_frees(self, value: Value, fill: Positions) -> Positions:
        """Who frees each value that is made once, by where it is filled."""
        index = self.index
        freed = np.full(len(fill), NO_POSITION, np.int32)
        for op, hop in FREEING_OPS[value]:
            if op in index.position_by_key:
                key = index.key[fill] if hop is None else index.find_neighbor_keys(hop, fill)
                found = index.find_positions(op, key)
                freed = np.where(freed == NO_POSITION, found, freed)
        return freed

    def find_states(self, value: Value) -> ValueStates:
        """What the values of a kind are, piece by piece, in the order of `begin`."""
        chains = self.get_chains(value)
        if chains is not None:
            return ValueStates(*chains.find_state_intervals())
        lives = self.find_lifetimes(value)
        whole, none = np.ones(len(lives.filled_at), bool), np.zeros(len(lives.filled_at), np.int64)
        return ValueStates(lives.filled_at, lives.freed_at, none, none + NO_FORM, whole, whole)
