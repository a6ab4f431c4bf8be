"""Find the producer, the changes, the last reader and the lifetime of every value.

A value has a chain of instructions along the Stream of its rank: one makes it, some may change it,
some read it, one frees it.  Everything that asks for a part of such a chain asks here: the
dependency graph, slots, memory, and the explaining of errors.  What is known of a kind of value is
its row in `VALUES`, what an instruction does with it is the instruction's row in `ROWS`.

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

from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    LOCAL_HANDOVER,
    ROWS,
    VALUES,
    Lane,
    Opcode,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Value,
    chain,
    change_of,
    changes,
    form_changes,
    producers,
)
from schedir.ir.isa.table_validation import require_tables
from schedir.ir.program import Program
from schedir.ir.value_chains import NO_FORM, ChainMember, ValueChains

require_tables()

Keys = NDArray[np.int64]

# Who frees a value, and at which stage: what is handed over is freed by its taker.
FREERS: Final[dict[Value, list[tuple[Opcode, PeerRule | None]]]] = {
    token: [(row.op, None) for row in ROWS if token in row.frees]
    + [
        (row.op, hop.back)
        for taken, (made, hop) in LOCAL_HANDOVER.items()
        for row in ROWS
        if made is token and taken in row.frees
    ]
    for token in Value
}


class StaleRead(NamedTuple):
    """An instruction that needs a value which the last to touch it has freed, or left elsewhere."""

    needer: int
    culprit: int
    token: Value


class ValueLives(NamedTuple):
    """Values of one kind, by where they are filled and freed.

    `fill` has the position that fills each value, rank by rank and along each Stream, `freed`
    the position that frees it, and `free` the latter in order.  Rank r has the values from
    `first[r]` to `first[r + 1]`.
    """

    fill: Positions
    freed: Positions
    free: Positions
    first: NDArray[np.intp]

    def of(self, rank: int) -> slice:
        """Where a rank's values are."""
        return slice(self.first[rank], self.first[rank + 1])

    def peak(self, group: Positions) -> NDArray[np.int64]:
        """The most values that overlap along each Stream: the fewest slots there can be.

        `group` numbers the groups of instructions that are issued as one: what one of them
        frees is not free for another.
        """
        fills = group[self.fill]
        alive = np.arange(1, len(fills) + 1) - np.searchsorted(group[self.free], fills)
        return self.most(alive)

    def most(self, each: NDArray[Any]) -> NDArray[Any]:
        """The largest of each rank's numbers, or 0; `each` has one for each fill."""
        most = np.zeros(len(self.first) - 1, each.dtype)
        here = np.flatnonzero(np.diff(self.first))
        if len(here):
            most[here] = np.maximum.reduceat(each, self.first[here])
        return most


class ValueStates(NamedTuple):
    """What values of one kind are, from one instruction that touches them to the next.

    `begin` and `end` are the positions of the two, `tier` is where the value lies (an index into
    TIERS), `form` which field of Sizes tells its bytes (an index into `ValueChains.forms`, NO_FORM
    for that of the token).  `made` says that the value begins here, `over` that it ends.
    """

    begin: Positions
    end: Positions
    tier: NDArray[np.int64]
    form: NDArray[np.int64]
    made: NDArray[np.bool_]
    over: NDArray[np.bool_]


class Dataflow:
    """The flow of values through a program."""

    def __init__(self, index: InstructionIndex) -> None:
        self.index = index
        self._stale: list[StaleRead] = []  # what `needs` finds on its way
        self._chains: dict[Value, ValueChains | None] = {}

    @classmethod
    def of(cls, program: Program) -> Dataflow:
        """The flow of a program, which is made once."""
        return program.derived("flow", lambda twin: cls(InstructionIndex.of(twin)))

    # ------------------------------------------------------------ who gives what

    @cached_property
    def needs(self) -> NDArray[np.int32]:
        """For each instruction, who gives the values that it needs, shape (k, n).

        Positions, or -1 for what is there from the start.  Row k is for the k-th of `Row.needs`;
        where givers are on several lanes, the last on each is in a further row, and so is, for who
        makes a value again, who has let go of it.
        """
        found: list[tuple[int, Positions, Positions]] = []
        for row, needer in self.index.rows():
            needed = self._needed(row)
            more = len(needed)
            for k, token in enumerate(needed):
                first, *others = self._givers(row, token, needer)
                found.append((k, needer, first))
                for giver in others:
                    found.append((more, needer, giver))
                    more += 1
            for token in (token for token in row.gives if token not in row.needs):
                if VALUES[token].producer_rule is ProducerRule.LATEST and self.index.program.has(
                    token
                ):
                    found.append((more, needer, self._freed_before(token, needer)))
                    more += 1
        needs = np.full((max([2, *(k + 1 for k, _, _ in found)]), len(self.index)), NONE, np.int32)
        for k, needer, giver in found:
            needs[k, needer] = giver
        return needs

    @property
    def stale(self) -> list[StaleRead]:
        """Who needs a value that is not there as it is needed, and will not be."""
        return self._stale if self.needs.size else []

    def token(self, needer: int, giver: int) -> Value | None:
        """Which value of a giver's an instruction needs; None if it is none."""
        row = ROWS[int(self.index.op[needer])]
        given = ROWS[int(self.index.op[giver])].gives
        for k, token in enumerate(self._needed(row)):
            if int(self.needs[k, needer]) == giver:
                return token
        return next((token for token in row.needs if token in given), None)

    def _needed(self, row: Row) -> list[Value]:
        """Of the values that a row needs those that the program has."""
        return [token for token in row.needs if self.index.program.has(token)]

    def _givers(self, row: Row, token: Value, needer: Positions) -> Iterator[Positions]:
        """Who gives a value to each of some instructions of a row, by lane if on several."""
        found = VALUES[token].producer_rule
        if found is ProducerRule.ALL:
            yield from self._last(row, token, needer)
        elif found is ProducerRule.VERSION:
            yield self._of_version(row, token, needer)
        elif found is ProducerRule.LATEST_OR_START:
            given = self.index.where_all(chain(row.op, token))
            yield self._earlier(self._keys(token, given), given, self._keys(token, needer), needer)
        elif (chains := self.chains(token)) is not None:
            yield self._nearest(chains, row, token, needer)
        else:
            yield self._once(row, token, needer)

    def _once(self, row: Row, token: Value, needer: Positions) -> Positions:
        """Of values made once: the last in the chain that is there."""
        giver = self._first(chain(row.op, token), self.index.key[needer])
        if token in LOCAL_HANDOVER:
            made, hop = LOCAL_HANDOVER[token]
            lacks = np.flatnonzero(giver == NONE)
            other = self.index.beside(hop, needer[lacks])
            giver[lacks] = self._first(producers(made), other)
        return giver

    def _first(self, ops: tuple[Opcode, ...], key: Positions) -> Positions:
        """Positions of the first of `ops` that is there, by key."""
        tables = [op for op in ops if op in self.index.at]
        if not tables:
            return np.full(len(key), NONE, np.int32)
        giver = self.index.where(tables[0], key)
        for op in tables[1:]:
            giver = np.where(giver == NONE, self.index.where(op, key), giver)
        return giver

    def _of_version(self, row: Row, token: Value, needer: Positions) -> Positions:
        """Of weights: what changes their version, else what makes it; -1 for those from the start,
        as those of a frozen stage always are.

        The instruction with number u makes version u + 1, and changes version u.
        """
        index, shape = self.index, self.index.program.shape
        changed = [op for op in chain(row.op, token) if op in index.at and token in ROWS[op].needs]
        if shape.optimizer_steps == 1 and not changed:
            return np.full(len(needer), NONE, np.int32)
        version = (
            shape.version(index.stage[needer], index.mb[needer])
            if row.per is Scope.MICROBATCH
            else index.update(needer)
        )
        changes = np.full(len(needer), True)
        if row.per is not Scope.RANK:
            changes = index.stage[needer] >= index.program.frozen_stages
        giver = np.full(len(needer), NONE, np.int32)
        for op in chain(row.op, token):
            time = version if op in changed else version - 1
            key = np.where((time >= 0) & changes, index.keys(ROWS[op].per, needer, time), NONE)
            giver = np.where(giver == NONE, index.where(op, key.astype(np.int32)), giver)
        return giver

    def _last(self, row: Row, token: Value, needer: Positions) -> Iterator[Positions]:
        """Of what many give: the last of a stage's, or of all of a rank's, on each lane."""
        index = self.index
        ops = chain(row.op, token)
        per = row.per
        if (
            row.needs_all_stages
            or row.group == "tied"
            or any(ROWS[op].per is Scope.RANK for op in ops)
        ):
            per = Scope.RANK  # what a rank gives, it gives to each of its stages
        for lane in sorted({ROWS[op].lane for op in ops if op in index.at}) or [row.lane]:
            gives = index.where_all(op for op in ops if ROWS[op].lane is lane)
            if row.group == "tied":  # all copies of the rank
                tied = [s for stages in index.program.summed for s in stages]
                gives = gives[np.isin(index.stage[gives], tied)]
            last = np.full(index.size[per], NONE, np.int32)
            last[index.keys(per, gives)] = gives
            key = index.keys(per, needer)
            found = last[key]
            if per is Scope.STAGE:
                found = np.maximum(found, self._of_copies(ops, lane, needer))
            if row.per is Scope.OCCURRENCE:  # of each turn but the last what is there by then
                final = np.full(index.size[per], NONE, np.int32)
                final[key] = needer
                near = self._earlier(index.keys(per, gives), gives, key, needer)
                early = (final[key] != needer) & (near != NONE)
                found[early] = near[early]
                before = self._earlier(key, needer, key, needer)  # the turn before
                again = (before != NONE) & (found < before)
                self._stale += map(
                    StaleRead, needer[again], before[again], [token] * int(again.sum())
                )
            yield found

    def _of_copies(self, ops: tuple[Opcode, ...], lane: Lane, needer: Positions) -> Positions:
        """What sums the copies of tied weights, which stands for one of a rank's and changes all:
        of each needer whose stage has a copy; -1 for others."""
        index = self.index
        last = np.full(index.size[Scope.RANK], NONE, np.int32)
        sums = index.where_all(
            op for op in ops if ROWS[op].group == "tied" and ROWS[op].lane is lane
        )
        last[index.keys(Scope.RANK, sums)] = sums
        tied = [s for stages in index.program.summed for s in stages]
        found = last[index.keys(Scope.RANK, needer)]
        return np.where(np.isin(index.stage[needer], tied), found, np.int32(NONE))

    def _freed_before(self, token: Value, needer: Positions) -> Positions:
        """Who has let go of a value that is made again, last before it is; -1 for the first."""
        freers = self.index.where_all(op for op, _ in FREERS[token])
        key = self._keys(token, freers)
        return self._earlier(key, freers, self._keys(token, needer), needer)

    @staticmethod
    def _earlier(giver: Keys, given: Positions, key: Keys, needer: Positions) -> Positions:
        """Of givers, by their keys, the last that stands before each needer; -1 where none does."""
        span = max(int(given.max(initial=0)), int(needer.max(initial=0))) + 1
        order = giver * span + given
        sort = np.argsort(order)
        event = np.searchsorted(order[sort], key * span + needer) - 1
        near = np.append(sort, 0)[event]  # -1 is the one that is put behind
        if not len(given):
            return np.full(len(needer), NONE, np.int32)
        fits = (event >= 0) & (giver[near] == key)
        return np.where(fits, given[near], NONE).astype(np.int32)

    def _nearest(self, chains: ValueChains, row: Row, token: Value, needer: Positions) -> Positions:
        """Of what is made again, or changes its state: the nearest earlier giver."""
        giver, stale = chains.givers(self._keys(token, needer), needer, change_of(row.op, token))
        self._stale += [StaleRead(who, culprit, token) for who, culprit in stale]
        return giver

    # ------------------------------------------------------------ how long it lives

    def chains(self, token: Value) -> ValueChains | None:
        """The chains of a token's values; None where the table of instructions is enough."""
        if token not in self._chains:
            self._chains[token] = self._chained(token) if self._needs_chains(token) else None
        return self._chains[token]

    def _needs_chains(self, token: Value) -> bool:
        if VALUES[token].producer_rule in (ProducerRule.LATEST, ProducerRule.ALL):
            return True
        # Changes of form are in the order of the tables, wherever they stand.
        forms = form_changes(token)
        changed = [op for op in changes(token) if op in self.index.at and op not in forms]
        if VALUES[token].producer_rule is not ProducerRule.ONCE or not changed:
            return False
        often = np.sum([self.index.at[op] != NONE for op in changed], 0)
        return bool((often > 1).any()) or any(change_of(op, token) for op in changed)

    def _chained(self, token: Value) -> ValueChains:
        parts = []
        for op in (*producers(token), *changes(token)):
            at = self.index.positions.get(op)
            if at is not None:
                change = change_of(op, token)
                parts.append(
                    ChainMember(at, self._keys(token, at), True, op in producers(token), change)
                )
        for op, hop in FREERS[token]:
            at = self.index.positions.get(op)
            if at is not None:
                key = self._keys(token, at, hop and hop.back)
                parts.append(ChainMember(at, key, False, False, None))
        lies = self.index.program.lies(token)
        return ValueChains.of(
            parts, collected=VALUES[token].producer_rule is ProducerRule.ALL, lies=lies
        )

    def _keys(self, token: Value, at: Positions, hop: PeerRule | None = None) -> Keys:
        """Which value of a token's each of some instructions touches; of another stage's, a hop
        from its own.
        """
        if hop is not None:
            return self.index.beside(hop, at).astype(np.int64)
        if VALUES[token].per is Scope.MICROBATCH:
            return self.index.key[at].astype(np.int64)
        return self.index.keys(VALUES[token].per, at, np.zeros(len(at), np.int64))

    def lives(self, token: Value, tier: int = 0) -> ValueLives:
        """Where the values of a kind are filled on a tier and freed; without those never freed,
        and none of a kind that takes no memory of its own.

        A value that is moved off the device and back fills a slot twice.  What many give, the first
        of them fills.
        """
        index = self.index
        chains = self.chains(token)
        if not index.program.holds(token) or (tier and chains is None):
            none = np.empty(0, np.int32)
            return ValueLives(none, none, none, np.zeros(len(index.program.offsets), np.intp))
        if chains is not None:
            fill, freed = chains.on_tier(tier)
        else:
            fill = index.where_all(producers(token))
            freed = self._freed(token, fill)
        own = freed != NONE
        own[own] = index.rank[freed[own]] == index.rank[fill[own]]
        fill, freed = fill[own], freed[own]
        first = np.searchsorted(fill, index.program.offsets)
        return ValueLives(fill, freed, np.sort(freed), first)

    def _freed(self, token: Value, fill: Positions) -> Positions:
        """Who frees each value that is made once, by where it is filled."""
        index = self.index
        freed = np.full(len(fill), NONE, np.int32)
        for op, hop in FREERS[token]:
            if op in index.at:
                key = index.key[fill] if hop is None else index.beside(hop, fill)
                found = index.where(op, key)
                freed = np.where(freed == NONE, found, freed)
        return freed

    def states(self, token: Value) -> ValueStates:
        """What the values of a kind are, piece by piece, in the order of `begin`."""
        chains = self.chains(token)
        if chains is not None:
            return ValueStates(*chains.pieces())
        lives = self.lives(token)
        whole, none = np.ones(len(lives.fill), bool), np.zeros(len(lives.fill), np.int64)
        return ValueStates(lives.fill, lives.freed, none, none + NO_FORM, whole, whole)
