"""Execute a sequence of steps with the oracle of `oracle_threads.py`.

Each step has separate hosts.  All steps share the queues of a rank, and the channels between ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from schedir.ir.program import Program
from tests.oracle_host import Host
from tests.oracle_threads import Machine, Verdict
from tests.oracle_values import Entry, Event, Message, OracleError, Slot


def verdict(runs: Sequence[Sequence[Program]], model: str, seed: int) -> Verdict:
    """Run the programs of each rank, in a random order that depends on `seed`."""
    try:
        return Together(runs, model, seed).run()
    except OracleError as wrong:
        return Verdict("wrong", str(wrong))


class Step(Machine):
    """One step: a machine whose messages and collectives go to the common machine."""

    def __init__(self, program: Program, together: Together) -> None:
        super().__init__(program, together.model, None)
        self.together = together
        self.hosts = [Host(self, rank) for rank in range(len(self.lists))]

    def happen(self, event: Event) -> None:
        self.together.happen(event)

    def post(self, message: Message) -> None:
        self.together.step_of[id(message)] = self
        self.together.post(message)

    def join(self, communicator: Slot, members: int, member: tuple[Event, int]) -> None:
        """Join a collective. All its members must be of one step."""
        steps = self.together.joined[communicator]
        steps.append(self)
        if steps[0] is not self:
            raise OracleError(f"{communicator}: two steps meet")
        if len(steps) == members:
            steps.clear()
        self.together.join(communicator, members, member)


class Together(Machine):
    """All steps, and the messages and collectives between their ranks."""

    def __init__(self, runs: Sequence[Sequence[Program]], model: str, seed: int) -> None:
        super().__init__(next(program for row in runs for program in row), model, seed)
        self.steps: dict[tuple[str, int], Step] = {}
        self.step_of: dict[int, Step] = {}
        self.joined: dict[Slot, list[Step]] = defaultdict(list)
        self.rows: list[list[Step]] = []
        for row in runs:
            counted = Counter[str]()
            self.rows.append([])
            for program in row:
                which = program.digest, counted[program.digest]
                counted[program.digest] += 1
                if which not in self.steps:
                    self.steps[which] = Step(program, self)
                self.rows[-1].append(self.steps[which])

    def run(self) -> Verdict:
        ran = [(step.hosts[rank], rank) for rank, row in enumerate(self.rows) for step in row]
        queues: dict[object, list[Entry]] = defaultdict(list)
        threads: list[Iterator[Event]]
        for host, rank in ran:
            host.issue_all()
            for entry in host.entries:
                for queue in entry.queues:
                    queues[rank, queue].append(entry)
        threads = [self.thread(entries) for entries in queues.values()]
        for rank in range(len(self.rows)):  # a host issues one step after the other
            threads.append(chain(*(self.calls(host) for host, own in ran if own == rank)))
        self.let_run(threads)
        for host, rank in ran:
            for entry in host.entries:
                if not entry.done.when:
                    return Verdict("hang", f"rank {rank} never ends {entry}")
        for host, _ in ran:
            host.judge()
        return Verdict("ok")

    def post(self, message: Message) -> None:
        """Post a message. Both its sides must be of one step."""
        waiting = (self.received if message.sends else self.sent)[message.channel]
        if waiting and self.step_of[id(waiting[0])] is not self.step_of[id(message)]:
            raise OracleError(f"{message.channel}: a message arrives in another step")
        super().post(message)
