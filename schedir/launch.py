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
from typing import NoReturn

from schedir.errors import UsageError

MOST = 256  # processes that one machine is asked to start
GRACE = 5.0  # seconds in which the first rank to fail ends the others

_LAUNCHED = "SCHEDIR_LAUNCHED"


def launch(arguments: Sequence[str], world: int) -> int:
    """Run `python -m schedir ARGUMENTS` in `world` processes, as torchrun would.

    They find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.  What rank 0
    prints is passed on.  When a rank fails, what it wrote to standard error is passed on, the
    others are ended, and its exit code is returned, or 1 if it was killed.

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
            rank, code = _first_failure(processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()
            del store
        sys.stderr.write(errors[rank].read_text(errors="replace"))
    if code < 0:
        how = f"signal {-code} ({signal.strsignal(-code)})"
        print(f"rank {rank} was ended by {how}; the others were stopped", file=sys.stderr)
    return code if code >= 0 else 1


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """The first rank to fail and its exit code, at once; (0, 0) when all have ended well."""
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((rank, process.wait()))

    for rank, process in enumerate(processes):
        Thread(target=watch, args=(rank, process), daemon=True).start()
    for _ in processes:
        rank, code = ended.get()
        if code:
            return rank, code
    return 0, 0


def end_with_parent() -> None:
    """In a process that `launch` started: end as soon as its parent has gone."""
    if _LAUNCHED not in os.environ:
        return

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def crash(why: str | None, code: int = 1) -> NoReturn:
    """End this rank at once: a tidy end would close connections first, and others seem to fail.

    Only the first rank of a run to fail says why.  The failures of others are its consequences:
    they are silent, and wait to be ended with it.  So is one that has nothing to say.
    """
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
