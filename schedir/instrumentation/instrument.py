"""`schedir.instrument`: mark the instructions of other trainers as profiler ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Final

from schedir.errors import UsageError, describe_exception

# Trainer -> the module that marks it. The module imports the trainer only when it adds its patches.
# The constant PACKAGE of the module names the package to install, and ROOT_MODULE names the module
# to import. SUPPORTED_VERSION is a version that works.
_MARKERS: Final = {
    "torch": "schedir.instrumentation.torch_pipelining",
    "megatron": "schedir.instrumentation.megatron",
    "deepspeed": "schedir.instrumentation.deepspeed",
}


@dataclass
class _InstrumentedTrainer:
    """A trainer whose functions are wrapped while at least one `Instrumented` uses it."""

    package: str
    version: str
    patches: Any


_INSTRUMENTED: dict[str, _InstrumentedTrainer] = {}


@dataclass(repr=False)
class Instrumented:
    """The trainers that a call of `instrument` has marked.

    Call `undo` to remove the marks, or use the object as a context manager.

    Args:
        trainers: Marked package -> its version.
        skipped: Name of a trainer that was not marked -> the reason.
    """

    trainers: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def undo(self) -> None:
        """Remove the marks if no other call of `instrument` uses them.

        A second call of `undo` does nothing.
        """
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
        trainers = ", ".join(f"{name} {version}" for name, version in self.trainers.items())
        return "; ".join([f"instrumented {trainers or 'nothing'}", *self.skipped.values()])

    def __repr__(self) -> str:
        return f"<{self}>"


def instrument(*trainers: str) -> Instrumented:
    """Mark the instructions of other trainers as ranges of torch.profiler.

    Call this function in every process, before the first step under a profiler. `schedir import`
    reads the traces. Steps that begin without a profiler are not changed. If several calls mark the
    same trainer, the marks remain until `undo` was called for each of these calls.

    A range has the name that torch gives to its actions: `PP:0F3`, `PP:0SEND_F3`,
    `PP:1WAIT_RECV_F3`. Actions that torch's own schedules mark are not marked twice.

    Args:
        trainers: "torch" (torch.distributed.pipelining), "megatron" (Megatron-LM), or "deepspeed"
            (its PipelineEngine). By default all installed trainers are imported and marked.

    Returns:
        The marked trainers, with the reasons why other trainers were skipped.

    Raises:
        UsageError: A name is unknown. Or a given trainer is not installed, cannot be imported, or
            has a version without the functions to mark. Nothing is changed then.

    Example:
        >>> import schedir
        >>> with schedir.instrument("torch") as done:
        ...     print(*done.trainers)
        torch
    """
    unknown = [name for name in trainers if name not in _MARKERS]
    if unknown:
        raise UsageError(
            f"unknown trainer {unknown[0]!r}",
            hint=f"the trainers are {', '.join(map(repr, _MARKERS))}",
        )
    instrumented, prepared_trainers, errors = Instrumented(), {}, {}
    for name in dict.fromkeys(trainers or _MARKERS):
        try:
            prepared_trainers[name] = _INSTRUMENTED.get(name) or _prepare_trainer(name)
        except UsageError as error:
            errors[name] = error
    if trainers and errors:
        raise UsageError(
            "; ".join(error.fact for error in errors.values()),
            hint="; ".join(filter(None, (error.hint for error in errors.values()))),
            fields=[*errors],
        )
    instrumented.skipped.update({name: error.fact for name, error in errors.items()})
    for name, trainer in prepared_trainers.items():
        _INSTRUMENTED[name] = trainer
        trainer.patches.__enter__()
        instrumented.trainers[trainer.package] = trainer.version
        instrumented._names.append(name)
    return instrumented


def _prepare_trainer(name: str) -> _InstrumentedTrainer:
    """Return a trainer with its planned patches, and check that all functions exist."""
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
            f"{package} {version} cannot be instrumented: {error.fact}",
            hint=f"use {package} {marker.SUPPORTED_VERSION}",
        ) from None
    except Exception as error:  # Importing a trainer may raise any error.
        raise UsageError(f"{package} cannot be imported: {describe_exception(error)}") from None
    return _InstrumentedTrainer(package, version, patches)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # Its parent package is missing.
        return False
