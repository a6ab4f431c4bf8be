"""`schedir.instrument`: mark the instructions of other trainers as profiler ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Final

from schedir.errors import UsageError, describe_exception

# By the name it is asked for, the module that marks a trainer, and imports it only then.  There,
# ROOT is what must be installed, and KNOWN the versions that it is for.
_MARKERS: Final = {
    "torch": "schedir.instrumentation.torch_pipelining",
    "megatron": "schedir.instrumentation.megatron",
    "deepspeed": "schedir.instrumentation.deepspeed",
}


@dataclass
class _InstrumentedTrainer:
    """A trainer whose functions have ours around them, for as long as anybody wants it."""

    package: str
    version: str
    patches: Any


_INSTRUMENTED: dict[str, _InstrumentedTrainer] = {}


@dataclass(repr=False)
class Instrumented:
    """What was instrumented: `undo()`, or the end of a `with`, takes it away again.

    `trainers` are the packages and versions that are marked, `skipped` why others are not, by name.
    """

    trainers: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def undo(self) -> None:
        """Take the ranges away, unless another call still wants them.  Does nothing twice."""
        while self._names:
            name = self._names.pop()
            patches = _INSTRUMENTED[name].patches
            patches.__exit__()
            if not patches.num_users:
                del _INSTRUMENTED[name]

    def __enter__(self) -> Instrumented:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        marked = ", ".join(f"{name} {version}" for name, version in self.trainers.items())
        return "; ".join([f"instrumented {marked or 'nothing'}", *self.skipped.values()])

    def __repr__(self) -> str:
        return f"<{self}>"


def instrument(*trainers: str) -> Instrumented:
    """Put ranges of torch.profiler around the instructions of trainers that do not mark them.

    `trainers` are of "torch" (torch.distributed.pipelining), "megatron" (Megatron-LM) and
    "deepspeed" (its PipelineEngine); with none, whatever of them is installed is imported and
    marked.  Call it in every process, before the trainer makes its first step under a profiler;
    the traces are then for `schedir import`.  Steps that begin without a profiler run as they
    did.  A second call changes nothing; each is undone by itself.

    A range is named as torch names its actions: `PP:0F3`, `PP:0SEND_F3`, `PP:1WAIT_RECV_F3`.  What
    torch's own schedules mark is not marked again.

    Raises UsageError, before anything is changed, for a name that is none of these, and for a
    trainer that was asked for and is not installed, cannot be imported, or is a version without
    the functions that are to be marked.

    >>> import schedir
    >>> with schedir.instrument("torch") as done:
    ...     print(*done.trainers)
    torch
    """
    unknown = [name for name in trainers if name not in _MARKERS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is no trainer that can be instrumented",
            hint=f"there are {', '.join(map(repr, _MARKERS))}",
        )
    done, ready, missing = Instrumented(), {}, {}
    for name in dict.fromkeys(trainers or _MARKERS):
        try:
            ready[name] = _INSTRUMENTED.get(name) or _prepare_trainer(name)
        except UsageError as error:
            missing[name] = error
    if trainers and missing:
        raise UsageError(
            "; ".join(error.fact for error in missing.values()),
            hint="; ".join(filter(None, (error.hint for error in missing.values()))),
            fields=[*missing],
        )
    done.skipped.update({name: error.fact for name, error in missing.items()})
    for name, marked in ready.items():
        _INSTRUMENTED[name] = marked
        marked.patches.__enter__()
        done.trainers[marked.package] = marked.version
        done._names.append(name)
    return done


def _prepare_trainer(name: str) -> _InstrumentedTrainer:
    """A trainer with all that is to be put around its functions, which are all there."""
    from schedir.instrumentation.profiler_ranges import FunctionPatches

    marker: Any = import_module(_MARKERS[name])
    package, patches = marker.PACKAGE, FunctionPatches()
    if not _is_installed(marker.ROOT_MODULE):
        raise UsageError(f"{package} is not installed", hint=f"pip install {package}")
    try:
        version = str(import_module(marker.ROOT_MODULE).__version__)
        marker.add_patches(patches)
    except UsageError as error:
        raise UsageError(
            f"{package} {version} cannot be marked: {error.fact}",
            hint=f"{package} {marker.SUPPORTED_VERSION} can",
        ) from None
    except Exception as error:  # whatever its import may raise
        raise UsageError(f"{package} cannot be imported: {describe_exception(error)}") from None
    return _InstrumentedTrainer(package, version, patches)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of what it lies in
        return False
