"""Launch: start the ranks of a run on this machine, and end them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, NoReturn

from schedir.errors import UsageError

MOST = 256  # processes that one machine is asked to start
MOMENT = 1.0  # seconds in which a process that has closed its connections ends
GRACE = 5.0  # seconds in which the first rank to fail ends the others

_LAUNCHED = "SCHEDIR_LAUNCHED"


def launch(arguments: Sequence[str], world: int) -> int:
    """Run `python -m schedir ARGUMENTS` in `world` processes, as torchrun would.

    They find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.  What rank 0
    prints is passed on.  When a rank fails, what it wrote to standard error is passed on, the
    others are ended, and 1 is returned, or 2 where it said that something is refused.

    Raises UsageError for more processes than `MOST`.
    """
    if world > MOST:
        raise UsageError(
            f"{world} processes are more than the {MOST} that are started on one machine",
            hint="start them with torchrun",
        )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The ranks meet in this process, at a port that is taken from the start.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # all ranks are clients of the store
        "WORLD_SIZE": str(world),
        _LAUNCHED: "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, f"{rank}") for rank in range(world)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(errors):
                with path.open("wb") as error:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "schedir", *arguments],
                            stdin=subprocess.PIPE,  # ends when this process does
                            stdout=None if rank == 0 else subprocess.DEVNULL,
                            stderr=error,
                            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                            start_new_session=True,  # Ctrl-C is for this process alone
                        )
                    )
            rank, code, before = _first_failure(processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()
            del store
        said = errors[rank].read_text(errors="replace")
        sys.stderr.write(said)
    spoke = f"\nrank {rank}: " in f"\n{said}"  # as `crash` does; all else are warnings
    if code == 0 or (code in (1, 2) and spoke):
        return code
    if code == 1 and before:  # of a rank that failed, and knows that it was not the first
        rank, code = before[0], 0
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    print(f"rank {rank} {how}; the others were stopped", file=sys.stderr)
    return 1


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int, list[int]]:
    """The first rank to fail, its exit code, and who ended well before it, at once.

    (0, 0) and all of them when all have ended well.
    """
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((rank, process.wait()))

    for rank, process in enumerate(processes):
        Thread(target=watch, args=(rank, process), daemon=True).start()
    well: list[int] = []
    for _ in processes:
        rank, code = ended.get()
        if code:
            return rank, code, well
        well.append(rank)
    return 0, 0, well


def end_with_parent() -> None:
    """In a process that `launch` started: end as soon as its parent has gone."""
    if _LAUNCHED not in os.environ:
        return

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


class Process(NamedTuple):
    """A process, and what those have in common that see each other's numbers."""

    place: object
    number: int


_MET: dict[int, Process] = {}  # the ranks of this run


def myself() -> Process:
    """This process, as `meet` takes it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return Process((boot, os.readlink("/proc/self/ns/pid")), os.getpid())
    except OSError:
        return Process(None, os.getpid())


def meet(everyone: Sequence[Process]) -> None:
    """Know all ranks of this run, in order, so that one that dies can be named."""
    _MET.update(enumerate(everyone))


def _dead() -> int | None:
    """A rank of this machine that has ended, given a moment: its connections close earlier."""
    own = myself()
    here = {rank: p.number for rank, p in _MET.items() if p.place and p.place == own.place}
    over = time.monotonic() + MOMENT
    while len(here) > 1:
        for rank, number in here.items():
            if _has_ended(number):
                return rank
        if time.monotonic() > over:
            break
        time.sleep(0.01)
    return None


def _has_ended(number: int) -> bool:
    """Whether a process has ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def crash(why: str | None, code: int = 1, *, left: bool = False) -> NoReturn:
    """End this rank at once: a tidy end would close connections first, and others seem to fail.

    Only the first rank of a run to fail says why.  The failures of others are its consequences:
    they are silent, and wait to be ended with it.  So is one that has nothing to say.  Where a
    peer has `left` without a word of its own, it is named; of one that `launch` started, `launch`
    says how it ended.
    """
    dead = _dead() if left else None
    if dead is not None:
        said = f"rank {dead} has left: its process, {_MET[dead].number}, ended without a word"
        why = None if _LAUNCHED in os.environ else f"{said}\n  {why}"
    if why is not None and _is_first():
        print(f"rank {os.environ.get('RANK', '0')}: {why}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)
    os._exit(code)


def _is_first() -> bool:
    """Whether no other rank has failed, as far as the store knows where ranks meet."""
    if "MASTER_PORT" not in os.environ:
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=1),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"schedir failed in attempt {attempt}", 1) == 1)
    except Exception:  # it is gone, or not yet there: let one of each machine speak
        return os.environ.get("LOCAL_RANK", "0") == "0"


def leave() -> NoReturn:
    """End this rank, all done.

    At once, too: while an interpreter is taken down, threads of torch that still run now and
    then abort it ("terminate called without an active exception"; seen in 1 run of 62).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
