"""Execute replicas with different programs, with the oracle of `oracle_threads.py`.

Each replica has a separate machine.  All machines share the threads, the messages and the
collectives.  Members of a collective match by position, as in `oracle_sharding.meet_replicas`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from schedir.ir.program import Program
from tests.oracle_host import Host
from tests.oracle_threads import Machine, Verdict
from tests.oracle_values import Entry, Event, Message, OracleError, Slot


def verdict(
    programs: Sequence[Program], model: str, seed: int | None, *, blocking_hosts: bool = False
) -> Verdict:
    """Run the program of each replica, in a random order that depends on `seed`."""
    try:
        return Together(programs, model, seed, blocking_hosts=blocking_hosts).run()
    except OracleError as wrong:
        return Verdict("wrong", str(wrong))


class Replica(Machine):
    """One replica: a machine whose messages and collectives go to the common machine."""

    def __init__(self, program: Program, together: Together, number: int) -> None:
        super().__init__(program, together.model, None, replicas=together.replicas)
        self.together = together
        self.hosts = [Host(self, rank, number) for rank in range(len(self.lists))]

    def happen(self, event: Event) -> None:
        self.together.happen(event)

    def post(self, message: Message) -> None:
        self.together.post(message)

    def join(self, communicator: Slot, members: int, member: tuple[Event, int]) -> None:
        self.together.join(communicator, members, member)


class Together(Machine):
    """All replicas, and the collectives between them."""

    def __init__(
        self, programs: Sequence[Program], model: str, seed: int | None, *, blocking_hosts: bool
    ) -> None:
        super().__init__(
            programs[0], model, seed, blocking_hosts=blocking_hosts, replicas=len(programs)
        )
        self.machines = [Replica(program, self, k) for k, program in enumerate(programs)]

    def run(self) -> Verdict:
        self.hosts = [host for machine in self.machines for host in machine.hosts]
        threads: list[Iterator[Event]] = []
        for host in self.hosts:
            queues: dict[object, list[Entry]] = defaultdict(list)
            host.issue_all()
            for entry in host.entries:
                for queue in entry.queues:
                    queues[queue].append(entry)
            threads += map(self.thread, queues.values())
            threads.append(self.calls(host))
        self.let_run(threads)
        for host in self.hosts:
            for entry in host.entries:
                if not entry.done.when:
                    return Verdict("hang", f"replica {host.replica}, rank {host.rank}: {entry}")
        for host in self.hosts:
            host.judge()
        return Verdict("ok")
