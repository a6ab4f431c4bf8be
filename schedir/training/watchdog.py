"""Watchdog: a run in which nothing moves ends, and says where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import perf_counter

import torch

from schedir.errors import ExecutionError, Site
from schedir.runtime.executor import Executor
from schedir.runtime.progress import Progress, Standing, waits_for
from schedir.training.launch import crash

ANSWER = 1.0  # seconds in which a GPU tells what has ended


@contextmanager
def watchdog(executor: Executor, most: float, step: Callable[[], int]) -> Iterator[None]:
    """Within this, crash if nothing moves for `most` seconds, and say where the run stands.

    On a CPU that is where the host is, in the step that `step` says, from 1.  The host of a GPU
    has most often issued everything, and waits; so the GPU is asked.
    """
    over, device, progress = Event(), executor.state.device, None
    standing: Callable[[], Standing | None] = lambda: None  # noqa: E731
    if device.type == "cuda":
        progress = Progress(executor)
        standing = _Asked(progress, device).standing

    def watch() -> None:
        stood: object = None
        since = perf_counter()
        while not over.wait(min(1.0, most / 4)):
            stands = step(), executor.position, standing()
            if stands != stood:
                stood, since = stands, perf_counter()
            elif perf_counter() - since > most:
                fact = f"nothing has moved for {most:g} s"
                crash(str(standstill(fact, executor, step(), progress, stands[-1])))

    Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def standstill(
    fact: str, executor: Executor, step: int, progress: Progress | None, standing: Standing | None
) -> ExecutionError:
    """The error of a run that stands in a step (from 1), for the reason that `fact` says.

    Of a GPU, as it is `standing`, the first site is the first instruction of the Stream that has
    not ended though all that it needs of its own rank has; those follow that are under way beside
    it, on other lanes.  Else the site is where the host is.
    """
    stream, program, notes = executor.state.stream, executor.program, dict[int, str]()
    if progress is not None and standing is not None:
        notes = {
            k: f"in step {standing.step}, {waits_for(program, stream[k])}"
            for k in progress.heads(standing)
        }
    notes = notes or {executor.position: f"in step {step}"}
    sites = [Site(executor.rank, k, stream[k], note) for k, note in notes.items()]
    return ExecutionError(fact, program=program.name, sites=sites)


class _Asked:
    """A GPU's progress, asked by a thread that may get no answer: while the host waits in the
    driver, as for memory, the driver may answer nobody."""

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self.progress, self.device = progress, device
        self.asking: Thread | None = None
        self.known: Standing | None = None

    def standing(self) -> Standing | None:
        """As the GPU has last answered."""
        if self.asking is None or not self.asking.is_alive():
            self.asking = Thread(target=self._ask, daemon=True)
            self.asking.start()
        self.asking.join(ANSWER)
        return self.known

    def _ask(self) -> None:
        with suppress(RuntimeError):  # of a GPU that has failed, whose error the host will meet
            torch.cuda.set_device(self.device)
            self.known = self.progress.standing()
