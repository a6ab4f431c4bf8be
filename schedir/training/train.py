"""Train a model from a configuration, on as many processes as it asks for."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from schedir.errors import ExecutionError, NonFiniteError, SchedirError, UsageError
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.io.black_box import ProcessPhase
from schedir.io.files import reason
from schedir.io.terminal import format_error
from schedir.ir.cost.number_parsing import whole
from schedir.ir.cost.zero_states import zero_model_states
from schedir.ir.input_trust import words_of_now
from schedir.ir.program import Program
from schedir.training.config.config_file import read
from schedir.training.config.run_config import Config
from schedir.training.processes.launcher import launch
from schedir.training.processes.process_exit import (
    TOLD,
    RunMember,
    TerminationNotice,
    crash,
    end_as_told,
    end_with_parent,
    is_launched,
    join,
    leave,
    member,
    unwound,
)
from schedir.training.resume_checks import RunIdentity
from schedir.training.run_results import LossLog, claimed, save

if TYPE_CHECKING:
    from schedir.training.batches.text_batches import Corpus

_TRAINER = ("torch._dynamo", "schedir.training.trainer")  # each optimizer imports the former
_LAUNCHER = "use torchrun, or unset RANK"


def run(path: str, sets: Sequence[str] = ()) -> int:
    """Train as the configuration in `path` says, with settings of `sets` on top.

    Under torchrun, this process is one rank.  Otherwise it starts all that are asked for on
    this machine.  Returns the exit code: 0, 1 after a crash, 2 if a rank refused, 130 after
    Ctrl-C, 143 after SIGTERM, when a step is saved.  Raises SchedirError for what can be refused
    before anything is started.
    """
    if "RANK" in os.environ:
        return _run_rank(path, sets)
    config = read(path, sets)
    program = program_of(config)
    check_memory(config, config.world)
    with unwound(), claimed(config):
        return _start(path, sets, config, program)


def _start(path: str, sets: Sequence[str], config: Config, program: Program) -> int:
    """Train in this process, or start those that do."""
    try:
        _load("schedir.training.batches.text_batches")
        from schedir.training.batches.text_batches import Corpus
        from schedir.training.processes.process_world import require_device

        require_device(config)
        corpus = Corpus(config)
        for samples in filter(None, (corpus.batches, corpus.held_out)):
            samples.batch(0, samples.size)
        if config.world > 1:
            RunIdentity.of(config, corpus.facts)  # refuses other data than those of its checkpoints
            words = ["train", *words_of_now(), *(f"--set={s}" for s in sets), "--", path]
            grace = None if config.train.checkpoint_dir is None else config.train.shutdown_grace
            return launch(words, ProcessLayout.of(program), config.output.dir, grace)
        _load(*_TRAINER)
        _train(config, program, corpus)
    except ExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        crash(_refused(error))
    except TerminationNotice as told:
        print(told, file=sys.stderr)
        return TOLD
    except KeyboardInterrupt:
        return 130
    return 0


def program_of(config: Config) -> Program:
    """The program that a configuration trains, checked.

    Raises SchedirError for a schedule that is wrong, does not train, or does not fit the rest.
    """
    program = config.request.program
    if not program.trains:
        raise UsageError(
            f"schedule {config.pipeline.schedule} has no backward: it trains nothing",
            fields=["schedule"],
        )
    return program


def check_memory(config: Config, processes: int) -> None:
    """Refuse what that many processes cannot hold on this machine.

    Counts what cannot be done without: each process's share of the model, with gradients and
    AdamW's two moments, as far as ZeRO leaves them on one replica, but the model whole, as it is
    made; one microbatch's activations; the tokens of a step.  Of what trains on a GPU, the model as
    it is made here, and the tokens.  Raises UsageError.
    """
    cpu = config.train.device == "cpu"
    model, pipeline, data = config.model, config.pipeline, config.data
    windows = pipeline.dp * pipeline.microbatches * data.microbatch_size
    tokens = config.finer.size * model.context
    shares, number = pipeline.ranks * pipeline.tp, model.parameters
    zero: int = vars(pipeline)["zero"]
    states = zero_model_states(4 * number, 4 * number, 8 * number, zero, pipeline.dp)
    needs = {
        "model": int(max(states.bytes * cpu, 4 * number)) // shares,
        "activations": 4 * cpu * tokens * (model.hidden * model.layers + model.vocab) // shares,
        "tokens": 8 * windows * (model.context + 1),
    }
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if processes * sum(needs.values()) > has:
        said = ", ".join(f"{name} {processes * size / 2**30:,.1f}" for name, size in needs.items())
        raise UsageError(
            f"{processes} processes need more than the {has / 2**30:,.1f} GiB that this machine "
            f"has: {said}"
        )


def _run_rank(path: str, sets: Sequence[str]) -> int:
    """One of several processes: they read the same configuration, and one says what is wrong."""
    end_with_parent()
    # What torch has to say of peers that go, in lines of its sources, is said in our words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _check_environment()
    try:
        config = read(path, sets)
        program = program_of(config)
        check_memory(config, _whole("LOCAL_WORLD_SIZE", 1, config.world, otherwise="1"))
        # `launch` has claimed the folders of those that it starts.
        claims = os.environ["RANK"] == "0" and not is_launched()
        with claimed(config) if claims else nullcontext():
            join(RunMember(config.output.dir, ProcessLayout.of(program), int(os.environ["RANK"])))
            _load(*_TRAINER)
            from schedir.training.batches.text_batches import Corpus

            _train(config, program, Corpus(config))
    except TerminationNotice as told:
        end_as_told(str(told), TOLD)
    except NonFiniteError as error:  # which all ranks raise
        crash(str(error) if error.process == int(os.environ["RANK"]) else None)
    except ExecutionError as error:
        crash(str(error), late=_is_late(error))
    except SchedirError as error:
        late = _is_late(error)  # as of a save, where another has ended
        crash(format_error(error), 1 if late else 2, late=late)
    except OSError as error:
        crash(_refused(error))
    except SystemExit as error:
        crash(f"sys.exit({error.code!r}) was called{_where()}")
    except KeyboardInterrupt:
        crash(f"interrupted{_where()}")
    except BaseException as error:
        crash(f"{traceback.format_exc().rstrip()}{_where()}", late=_is_late(error))
    leave()


def _load(*modules: str) -> None:
    """Import what is not yet there, and never look through it for garbage: it stays, and to look
    took a fifth of the time of a process that makes few steps."""
    if all(module in sys.modules for module in modules):
        return
    usual = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            import_module(module)
        gc.freeze()
    finally:
        if usual:
            gc.enable()


def _is_late(error: BaseException) -> bool:
    if isinstance(error, ImportError):  # it may be torch that is not there
        return False
    from schedir.transports.transport import is_late

    return is_late(error)


def _where() -> str:
    """At the end of what is said: what this process is at."""
    own = member()
    return "" if own is None else f", {own.where()}"


def _refused(error: OSError) -> str:
    """Why the system does not let a run go on: a closed pipe, a full disk."""
    if isinstance(error, BrokenPipeError):
        return "standard output was closed"
    where = f" ({error.filename})" if error.filename else ""
    return f"cannot go on: {reason(error)}{where}"


def _check_environment() -> None:
    """Refuse an environment that no launcher would have made."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(f"RANK is set, but {' and '.join(missing)} not", hint=_LAUNCHER)
    world = _whole("WORLD_SIZE", 1, 2**31 - 1)
    _whole("RANK", 0, world - 1)
    _whole("MASTER_PORT", 0, 65535)
    _whole("LOCAL_RANK", 0, _whole("LOCAL_WORLD_SIZE", 1, world, str(world)) - 1, "0")


def _whole(name: str, least: int, most: int, otherwise: str = "") -> int:
    """A whole number of the environment."""
    value = os.environ.get(name, otherwise)
    try:
        number = whole(value)
        fits = least <= number <= most
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            f"{name} is {value!r} in the environment, and not a number from {least} to {most}",
            hint=_LAUNCHER,
        )
    return number


def _train(config: Config, program: Program, corpus: Corpus) -> None:
    from schedir.training.processes.graceful_stop import GracefulStop
    from schedir.training.processes.process_world import processes
    from schedir.training.processes.startup_consistency import all_facts
    from schedir.training.processes.watchdog import Watchdog
    from schedir.training.trainer import train

    data = corpus.facts
    facts = all_facts(config, program, data)
    number, has = int(os.environ.get("RANK", "0")), config.train.checkpoint_dir is not None
    losses = LossLog(config, RunIdentity.of(config, data)) if number == 0 else None
    own = member() or RunMember(config.output.dir, ProcessLayout.of(program), 0)
    stop = GracefulStop(number, config.world) if has else None
    with (
        ExitStack() as last,
        Watchdog(own, config.train.timeout, stop, config.train.shutdown_grace) as watchdog,
        processes(config.train.timeout, config.train.device, own.box, facts),
        closing(losses) if losses is not None else nullcontext(),
    ):
        if member() is None:  # alone it tells its errors itself
            last.callback(own.done)
        result = train(config, program, corpus, losses, watchdog)
        own.box.enter(ProcessPhase.RESULTS)
        if result is not None:
            save(result, config.output)
