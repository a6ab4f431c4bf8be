"""Compare the settings of all processes before the first message.

The processes exchange their settings at the rendezvous store, before any process group exists. All
processes raise the same error with the first difference. Without this comparison, torch could only
report a mismatch of shapes in a collective.
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

# Settings that may differ between machines. The processes compare digests of the data instead.
LOCAL_SETTINGS: Final = {
    *("data.source", "data.validation", "data.tokenizer"),
    *("train.threads", "pipeline.schedule"),
}
# Before the store closes, all processes have this many seconds to read an error.
_READ_TIMEOUT: Final = 2.0
_NO_DIFFERENCE: Final = "fine"


def collect_config_facts(config: Config) -> dict[str, str]:
    """Return the settings and versions that must be the same on all processes.

    Args:
        config: The configuration that this process has read.

    Returns:
        All settings but `LOCAL_SETTINGS`, and the versions of schedir, torch and Python.
    """
    versions = {
        "the version of schedir": vars(sys.modules["schedir"])["__version__"],
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
    }
    return versions | {
        name: value for name, value in config.setting_texts.items() if name not in LOCAL_SETTINGS
    }


def collect_run_facts(config: Config, program: Program, data: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a run that must be the same on all processes, by name.

    The result has the values of `collect_config_facts`, the number of processes, and digests of the
    program and of the data.

    Args:
        config: The configuration that this process has read.
        program: The program of this process.
        data: `Corpus.facts` of this process.
    """
    return collect_config_facts(config) | {
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
        "the program": program.digest[:12],
        **data,
    }


def require_same_data(crcs: Sequence[int], step: int) -> None:
    """Check that all processes have read the same samples.

    The digests at the start cover only a part of large data, so the samples are compared, too.

    Args:
        crcs: The CRC-32 of the samples of each process.
        step: The step up to which the processes have read, from 1.

    Raises:
        ModelError: Two processes have read different samples.
    """
    fact = f"the data read up to step {step}"
    if difference := find_difference([{fact: f"crc32 {crc:08x}"} for crc in crcs]):
        raise ModelError(
            difference, hint="data.source must give every process the same bytes", fields=["source"]
        )


def run_rendezvous(facts: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """Compare the settings of all processes, and return the arguments of `init_process_group`.

    Args:
        facts: The settings, versions and digests of this process, by name.
        timeout: The seconds that the processes wait for each other.

    Returns:
        The arguments `store`, `rank` and `world_size`.

    Raises:
        ModelError: Facts differ, or two processes have the same number. All processes raise this
            error.
        ExecutionError: A process does not arrive in time.
    """
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
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
    """Compare the settings of all processes through a store. Process 0 compares them.

    Args:
        store: The store.
        rank: The global rank of this process.
        world: The number of processes.
        facts: The settings, versions and digests of this process, by name.
        timeout: The seconds that the processes wait for each other.

    Raises:
        ModelError: Facts differ, or two processes have the same number. All processes raise this
            error.
        ExecutionError: A process does not arrive in time.
    """
    if store.add(f"came {rank}", 1) > 1:
        duplicate = f"two processes have RANK {rank}"
        store.set("twice", duplicate)
        raise ModelError(duplicate, hint="set a different RANK for each process")
    store.set(f"facts {rank}", encode_value((dict(facts), _describe_machine())))
    deadline = monotonic() + timeout
    if rank == 0:
        store.set("verdict", _find_difference(store, world, deadline) or _NO_DIFFERENCE)
    verdict = _wait_for_key(store, "verdict", deadline, 0).decode(errors="replace")
    read = store.add("read", 1)
    if verdict == _NO_DIFFERENCE:
        return
    # The store may be in this process. Wait until the other processes have read the result.
    if rank == 0:
        deadline = monotonic() + _READ_TIMEOUT
        while (
            read < sum(store.check([f"came {k}"]) for k in range(world)) and monotonic() < deadline
        ):
            sleep(0.02)
            read = store.add("read", 0)
    raise ModelError(verdict)


def _find_difference(store: Any, world: int, deadline: float) -> str:
    """Return the first difference between the facts of processes, or "" if there is none."""
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
        if difference := find_difference(everyone):
            return difference
        if place is not None and (other_rank := places.setdefault(place, k)) != k:
            return f"processes {other_rank} and {k} of one machine both have LOCAL_RANK {place[-1]}"
    return ""


def _decode_facts(data: bytes, sender: str) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """Return the facts and the machine of a process. Raises ModelError if the facts are invalid."""
    match decode_value(data, sender):
        case (dict() as facts, (tuple() | None) as place):
            if all(isinstance(text, str) for text in (*facts, *facts.values(), *(place or ()))):
                return facts, place
    raise ModelError(f"{sender} sent invalid facts about its configuration: {data[:40]!r}")


def _wait_for_key(store: Any, key: str, deadline: float, process: int) -> bytes:
    """Wait until a process sets a key, and return the value.

    Raises ModelError if two processes have the same RANK, and ExecutionError after the deadline.
    """
    while not store.check([key]):
        if store.check(["twice"]):
            raise ModelError(store.get("twice").decode(errors="replace"))
        if monotonic() > deadline:
            raise ExecutionError(f"process {process} did not connect in time")
        sleep(0.01)
    return bytes(store.get(key))


def _describe_machine() -> tuple[str, ...] | None:
    """Return the machine, the node and the local rank, or None if there is no local rank.

    With torchrun, one machine can run several nodes. Each of these nodes counts its local ranks
    from 0, so the result includes the number of the node.
    """
    local = os.environ.get("LOCAL_RANK")
    node = os.environ.get("GROUP_RANK", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if local is None else (boot, os.readlink("/proc/self/ns/pid"), node, local)
    except OSError:
        return None
