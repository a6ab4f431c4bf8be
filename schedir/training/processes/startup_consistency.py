"""Compare the settings of all processes before the first message.

At the store where torch's processes find each other, before any group is made: what differs is one
sentence, the same in every process, and not what a collective of different shapes says.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from schedir.errors import ExecutionError, ModelError
from schedir.ir.program import Program
from schedir.training.config.run_config import Config
from schedir.training.processes.rendezvous_store import connect_store
from schedir.transports.json_collectives import decode_value, encode_value, find_difference

# Settings that may be a machine's own.
LOCAL_SETTINGS: Final = {
    *("data.source", "data.validation", "data.tokenizer"),  # digests of what they are are compared
    *("train.threads", "pipeline.schedule"),
}
_READ_TIMEOUT: Final = 2.0  # seconds in which all read what is refused, before the store goes
_NO_DIFFERENCE: Final = "fine"


def collect_config_facts(config: Config) -> dict[str, str]:
    """What must be the same in the configuration that each process has read, and in what reads it:
    the whole of it, but for what is a machine's own."""
    versions = {
        "the version of schedir": vars(sys.modules["schedir"])["__version__"],
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
    }
    return versions | {
        name: value for name, value in config.setting_texts.items() if name not in LOCAL_SETTINGS
    }


def collect_run_facts(config: Config, program: Program, data: Mapping[str, str]) -> dict[str, str]:
    """The same, with the program, what is said of the data, and how many processes there are."""
    return collect_config_facts(config) | {
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
        "the program": program.digest[:12],
        **data,
    }


def require_same_data(crcs: Sequence[int], step: int) -> None:
    """Compare what processes have drawn up to a step (from 1), each a crc32: the digests that they
    have met with are of samples, where there is much.  Raises ModelError where two differ."""
    fact = f"the data read up to step {step}"
    if found := find_difference([{fact: f"crc32 {one:08x}"} for one in crcs]):
        raise ModelError(
            found, hint="data.source gives every process the same bytes", fields=["source"]
        )


def run_rendezvous(facts: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """The store at which the processes of the environment meet, this one's number, and how many
    they are, as `init_process_group` takes them, after all have compared `facts`.

    Raises ModelError, in all of them, where one differs or two have one number, and ExecutionError
    where one does not come in `timeout` seconds.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Any = connect_store(timeout, is_master=rank == 0 and not agent)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    compare_facts(
        PrefixStore(f"schedir meets, attempt {attempt}", store), rank, world, facts, timeout
    )
    store = PrefixStore(f"schedir, attempt {attempt}", store)
    return {"store": store, "rank": rank, "world_size": world}


def compare_facts(
    store: Any, rank: int, world: int, facts: Mapping[str, str], timeout: float
) -> None:
    """Compare `facts` with all processes that meet at a store; process 0 judges.  Raises as
    `run_rendezvous`."""
    if store.add(f"came {rank}", 1) > 1:
        twice = f"two processes have RANK {rank}"
        store.set("twice", twice)
        raise ModelError(twice, hint="each process of a run has another RANK")
    store.set(f"facts {rank}", encode_value((dict(facts), _describe_machine())))
    over = monotonic() + timeout
    if rank == 0:
        store.set("verdict", _find_difference(store, world, over) or _NO_DIFFERENCE)
    verdict = _wait_for_key(store, "verdict", over, 0).decode(errors="replace")
    read = store.add("read", 1)
    if verdict == _NO_DIFFERENCE:
        return
    if rank == 0:  # with it the store may go
        over = monotonic() + _READ_TIMEOUT
        while read < sum(store.check([f"came {k}"]) for k in range(world)) and monotonic() < over:
            sleep(0.02)
            read = store.add("read", 0)
    raise ModelError(verdict)


def _find_difference(store: Any, world: int, deadline: float) -> str:
    """In what processes differ, as soon as it is known; "" where they do not."""
    everyone: list[dict[str, str]] = []
    places: dict[object, int] = {}
    for k in range(world):
        try:
            facts, place = _decode_facts(
                _wait_for_key(store, f"facts {k}", deadline, k), f"process {k}"
            )
        except ModelError as error:
            return error.fact
        everyone.append(facts)
        if fact := find_difference(everyone):
            return fact
        if place is not None and (other := places.setdefault(place, k)) != k:
            return f"processes {other} and {k} of one machine both have LOCAL_RANK {place[-1]}"
    return ""


def _decode_facts(data: bytes, sender: str) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """What a process says of itself.  Raises ModelError for what none says."""
    match decode_value(data, sender):
        case (dict() as facts, (tuple() | None) as place):
            if all(isinstance(one, str) for one in (*facts, *facts.values(), *(place or ()))):
                return facts, place
    raise ModelError(f"{sender} tells what no process of a run does: {data[:40]!r}")


def _wait_for_key(store: Any, key: str, deadline: float, process: int) -> bytes:
    """What process `process` sets, which comes until a time.  Raises ModelError where two have one
    number."""
    while not store.check([key]):
        if store.check(["twice"]):
            raise ModelError(store.get("twice").decode(errors="replace"))
        if monotonic() > deadline:
            raise ExecutionError(f"process {process} did not come")
        sleep(0.01)
    return bytes(store.get(key))


def _describe_machine() -> tuple[str, ...] | None:
    """A machine, as far as one sees it, and the number there; None where nobody says it.

    Of two nodes of torchrun on one machine each counts from 0.
    """
    local, node = os.environ.get("LOCAL_RANK"), os.environ.get("GROUP_RANK", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if local is None else (boot, os.readlink("/proc/self/ns/pid"), node, local)
    except OSError:
        return None
