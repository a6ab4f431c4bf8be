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
from schedir.io.files import describe_os_error
from schedir.io.terminal import format_error
from schedir.ir.cost.number_parsing import parse_integer
from schedir.ir.cost.zero_states import zero_model_states
from schedir.ir.input_trust import format_trust_options
from schedir.ir.program import Program
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config
from schedir.training.processes.launcher import launch
from schedir.training.processes.process_exit import (
    TERMINATED_EXIT_CODE,
    RunMember,
    TerminationNotice,
    end_with_parent,
    exit_after_termination,
    exit_cleanly,
    exit_with_error,
    get_current_member,
    interrupt_on_signals,
    is_launched,
    join_run,
)
from schedir.training.resume_checks import RunIdentity
from schedir.training.run_results import LossLog, claim_directories, save_results

if TYPE_CHECKING:
    from schedir.training.batches.text_batches import Corpus

_TRAINER_MODULES = (
    "torch._dynamo",
    "schedir.training.trainer",
)  # each optimizer imports the former
_LAUNCHER_HINT = "use torchrun, or unset RANK"


def run(path: str, overrides: Sequence[str] = ()) -> int:
    """Train as the configuration in `path` says, with settings of `overrides` on top.

    Under torchrun, this process is one rank.  Otherwise it starts all that are asked for on
    this machine.  Returns the exit code: 0, 1 after a crash, 2 if a rank refused, 130 after
    Ctrl-C, 143 after SIGTERM, when a step is saved.  Raises SchedirError for what can be refused
    before anything is started.
    """
    if "RANK" in os.environ:
        return _run_rank(path, overrides)
    config = read_config(path, overrides)
    program = build_program(config)
    check_memory(config, config.world_size)
    with interrupt_on_signals(), claim_directories(config):
        return _train_or_launch(path, overrides, config, program)


def _train_or_launch(path: str, overrides: Sequence[str], config: Config, program: Program) -> int:
    """Train in this process, or start those that do."""
    try:
        _import_modules("schedir.training.batches.text_batches")
        from schedir.training.batches.text_batches import Corpus
        from schedir.training.processes.process_world import require_device

        require_device(config)
        corpus = Corpus(config)
        for samples in filter(None, (corpus.batches, corpus.held_out_batches)):
            samples.read_batch(0, samples.batch_size)
        if config.world_size > 1:
            RunIdentity.from_config(
                config, corpus.facts
            )  # refuses other data than those of its checkpoints
            words = [
                "train",
                *format_trust_options(),
                *(f"--set={s}" for s in overrides),
                "--",
                path,
            ]
            grace = None if config.train.checkpoint_dir is None else config.train.shutdown_grace
            return launch(words, ProcessLayout.from_program(program), config.output.dir, grace)
        _import_modules(*_TRAINER_MODULES)
        _train(config, program, corpus)
    except ExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        exit_with_error(_describe_os_error(error))
    except TerminationNotice as told:
        print(told, file=sys.stderr)
        return TERMINATED_EXIT_CODE
    except KeyboardInterrupt:
        return 130
    return 0


def build_program(config: Config) -> Program:
    """The program that a configuration trains, checked.

    Raises SchedirError for a schedule that is wrong, does not train, or does not fit the rest.
    """
    program = config.request.program
    if not program.has_backward:
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
    tokens = config.segmentation.microbatch_size * model.context
    shares, number = pipeline.ranks * pipeline.tp, model.num_parameters
    zero: int = vars(pipeline)["zero"]
    states = zero_model_states(4 * number, 4 * number, 8 * number, zero, pipeline.dp)
    needs = {
        "model": int(max(states.total * cpu, 4 * number)) // shares,
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


def _run_rank(path: str, overrides: Sequence[str]) -> int:
    """One of several processes: they read the same configuration, and one says what is wrong."""
    end_with_parent()
    # What torch has to say of peers that go, in lines of its sources, is said in our words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _check_environment()
    try:
        config = read_config(path, overrides)
        program = build_program(config)
        check_memory(config, _read_integer("LOCAL_WORLD_SIZE", 1, config.world_size, default="1"))
        # `launch` has claimed the folders of those that it starts.
        claims = os.environ["RANK"] == "0" and not is_launched()
        with claim_directories(config) if claims else nullcontext():
            join_run(
                RunMember(
                    config.output.dir, ProcessLayout.from_program(program), int(os.environ["RANK"])
                )
            )
            _import_modules(*_TRAINER_MODULES)
            from schedir.training.batches.text_batches import Corpus

            _train(config, program, Corpus(config))
    except TerminationNotice as told:
        exit_after_termination(str(told), TERMINATED_EXIT_CODE)
    except NonFiniteError as error:  # which all ranks raise
        exit_with_error(str(error) if error.process == int(os.environ["RANK"]) else None)
    except ExecutionError as error:
        exit_with_error(str(error), is_peer_failure=_is_peer_failure(error))
    except SchedirError as error:
        late = _is_peer_failure(error)  # as of a save, where another has ended
        exit_with_error(format_error(error), 1 if late else 2, is_peer_failure=late)
    except OSError as error:
        exit_with_error(_describe_os_error(error))
    except SystemExit as error:
        exit_with_error(f"sys.exit({error.code!r}) was called{_describe_position()}")
    except KeyboardInterrupt:
        exit_with_error(f"interrupted{_describe_position()}")
    except BaseException as error:
        exit_with_error(
            f"{traceback.format_exc().rstrip()}{_describe_position()}",
            is_peer_failure=_is_peer_failure(error),
        )
    exit_cleanly()


def _import_modules(*modules: str) -> None:
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


def _is_peer_failure(error: BaseException) -> bool:
    if isinstance(error, ImportError):  # it may be torch that is not there
        return False
    from schedir.transports.transport import is_caused_by_peer

    return is_caused_by_peer(error)


def _describe_position() -> str:
    """At the end of what is said: what this process is at."""
    own = get_current_member()
    return "" if own is None else f", {own.describe_position()}"


def _describe_os_error(error: OSError) -> str:
    """Why the system does not let a run go on: a closed pipe, a full disk."""
    if isinstance(error, BrokenPipeError):
        return "standard output was closed"
    where = f" ({error.filename})" if error.filename else ""
    return f"cannot go on: {describe_os_error(error)}{where}"


def _check_environment() -> None:
    """Refuse an environment that no launcher would have made."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(f"RANK is set, but {' and '.join(missing)} not", hint=_LAUNCHER_HINT)
    world = _read_integer("WORLD_SIZE", 1, 2**31 - 1)
    _read_integer("RANK", 0, world - 1)
    _read_integer("MASTER_PORT", 0, 65535)
    _read_integer("LOCAL_RANK", 0, _read_integer("LOCAL_WORLD_SIZE", 1, world, str(world)) - 1, "0")


def _read_integer(name: str, minimum: int, maximum: int, default: str = "") -> int:
    """A whole number of the environment."""
    value = os.environ.get(name, default)
    try:
        number = parse_integer(value)
        fits = minimum <= number <= maximum
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            f"{name} is {value!r} in the environment, and not a number from {minimum} to {maximum}",
            hint=_LAUNCHER_HINT,
        )
    return number


def _train(config: Config, program: Program, corpus: Corpus) -> None:
    from schedir.training.processes.graceful_stop import GracefulStop
    from schedir.training.processes.process_world import join_process_group
    from schedir.training.processes.startup_consistency import collect_run_facts
    from schedir.training.processes.watchdog import Watchdog
    from schedir.training.trainer import train

    data = corpus.facts
    facts = collect_run_facts(config, program, data)
    number, has = int(os.environ.get("RANK", "0")), config.train.checkpoint_dir is not None
    losses = LossLog(config, RunIdentity.from_config(config, data)) if number == 0 else None
    own = get_current_member() or RunMember(
        config.output.dir, ProcessLayout.from_program(program), 0
    )
    stop = GracefulStop(number, config.world_size) if has else None
    with (
        ExitStack() as last,
        Watchdog(own, config.train.timeout, stop, config.train.shutdown_grace) as watchdog,
        join_process_group(config.train.timeout, config.train.device, own.black_box, facts),
        closing(losses) if losses is not None else nullcontext(),
    ):
        if get_current_member() is None:  # alone it tells its errors itself
            last.callback(own.finish)
        result = train(config, program, corpus, losses, watchdog)
        own.black_box.enter_phase(ProcessPhase.RESULTS)
        if result is not None:
            save_results(result, config.output)
