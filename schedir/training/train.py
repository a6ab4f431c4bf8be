"""Train a model from a configuration, on as many processes as the configuration requires."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from schedir.data.token_files import find_files
from schedir.errors import ExecutionError, NonFiniteError, SchedirError, UsageError
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.io.black_box import ProcessPhase
from schedir.io.files import describe_os_error
from schedir.io.terminal_output import format_error
from schedir.ir.cost.number_parsing import parse_integer
from schedir.ir.cost.zero_states import zero_model_states
from schedir.ir.input_trust import format_trust_options
from schedir.ir.pipeline.process_mesh import find_process_count_error
from schedir.ir.program import Program
from schedir.training.config.config_file import locate_setting_errors, read_config
from schedir.training.config.run_config import Config
from schedir.training.processes.graceful_stop import (
    TERMINATED_EXIT_CODE,
    GracefulStop,
    TerminationNotice,
    exit_after_termination,
)
from schedir.training.processes.launcher import launch
from schedir.training.processes.process_exit import (
    RunMember,
    end_with_parent,
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

# torch._dynamo is included because every torch optimizer imports it.
_TRAINER_MODULES = (
    "torch._dynamo",
    "schedir.training.trainer",
)
# Launchers set these variables to the number of processes: torchrun, and mpirun of Open MPI. Each
# of the processes would train the complete model if schedir ignored a missing RANK.
_PROCESS_COUNT_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
_LAUNCHER_HINT = "start it with torchrun, or unset RANK"


def run(path: str, overrides: Sequence[str] = ()) -> int:
    """Train as a configuration file describes.

    Under torchrun, this process is one rank, and it exits at the end. Otherwise this function
    trains in this process, or starts several processes on this machine and returns when they have
    ended.

    Args:
        path: The path of the configuration, a TOML file.
        overrides: Settings that replace the settings of the file, such as "pipeline.ranks=2".

    Returns:
        The exit code: 0, 1 after a crash, 2 if a rank refuses the configuration, 130 after Ctrl-C,
        or 143 after SIGTERM.

    Raises:
        SchedirError: The configuration or the program is invalid, the memory is too small, or a
            directory cannot be used. No process has started.
    """
    if "RANK" in os.environ:
        return _run_rank(path, overrides)
    _require_no_launcher()
    config = read_config(path, overrides)
    with locate_setting_errors(path, overrides):
        program = build_program(config)
    check_memory(config, config.world_size)
    # Report missing data before `claim_directories` reports results of an earlier run.
    _require_data_files(config)
    with interrupt_on_signals(), claim_directories(config):
        return _train_or_launch(path, overrides, config, program)


def _require_data_files(config: Config) -> None:
    """Raise UsageError if no file matches the data of a configuration."""
    for source in (config.data.source, config.data.validation):
        if isinstance(source, str | tuple):
            find_files(source)


def _train_or_launch(path: str, overrides: Sequence[str], config: Config, program: Program) -> int:
    try:
        _import_modules("schedir.training.batches.text_batches")
        from schedir.training.batches.text_batches import Corpus
        from schedir.training.processes.process_world import require_device

        require_device(config)
        corpus = Corpus(config)
        for samples in filter(None, (corpus.batches, corpus.held_out_batches)):
            samples.read_batch(0, samples.batch_size)
        if config.world_size > 1:
            # `from_config` raises an error if the checkpoints are from a run with other data.
            RunIdentity.from_config(config, corpus.facts)
            arguments = [
                "train",
                *format_trust_options(),
                *(f"--set={s}" for s in overrides),
                "--",
                path,
            ]
            grace = None if config.train.checkpoint_dir is None else config.train.shutdown_grace
            return launch(arguments, ProcessLayout.from_program(program), config.output.dir, grace)
        _import_modules(*_TRAINER_MODULES)
        _train(config, program, corpus)
    except ExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        exit_with_error(_describe_os_error(error))
    except TerminationNotice as notice:
        print(notice, file=sys.stderr)
        return TERMINATED_EXIT_CODE
    except KeyboardInterrupt:
        return 130
    return 0


def build_program(config: Config) -> Program:
    """Return the checked program that a configuration trains.

    Args:
        config: The configuration of the run.

    Raises:
        SchedirError: The schedule is wrong, has no backward, or does not fit the other settings.
    """
    program = config.request.program
    if not program.has_backward:
        raise UsageError(
            f"schedule {config.pipeline.schedule} has no backward, so it cannot train",
            fields=["schedule"],
        )
    return program


def check_memory(config: Config, processes: int) -> None:
    """Check that this machine has enough memory for a number of processes.

    The check uses a lower bound of the memory that a process needs. On CPUs, this bound is the
    process's share of the model and of the activations of one microbatch, plus the tokens of a
    step. The model includes gradients and AdamW's two moments, sharded as `pipeline.zero` requires.
    A process needs at least the memory of its unsharded weights, because the modules are built
    unsharded. On GPUs, only the unsharded weights and the tokens are included.

    Args:
        config: The configuration of the run.
        processes: The number of processes on this machine.

    Raises:
        UsageError: The processes need more memory than the machine has.
    """
    cpu = config.train.device == "cpu"
    model, pipeline, data = config.model, config.pipeline, config.data
    windows = pipeline.dp * pipeline.microbatches * data.microbatch_size
    tokens = config.segmentation.microbatch_size * model.context
    shares, number = pipeline.ranks * pipeline.tp, model.num_parameters
    zero: int = vars(pipeline)["zero"]
    states = zero_model_states(4 * number, 4 * number, 8 * number, zero=zero, dp=pipeline.dp)
    needed_bytes = {
        "model": int(max(states.total * cpu, 4 * number)) // shares,
        "activations": 4 * cpu * tokens * (model.hidden * model.layers + model.vocab) // shares,
        "tokens": 8 * windows * (model.context + 1),
    }
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if processes * sum(needed_bytes.values()) > total:
        sizes_text = ", ".join(
            f"{name} {processes * size / 2**30:,.1f}" for name, size in needed_bytes.items()
        )
        raise UsageError(
            f"{processes} processes need more memory than the {total / 2**30:,.1f} GiB of this "
            f"machine: in GiB, they need {sizes_text}"
        )


def _run_rank(path: str, overrides: Sequence[str]) -> int:
    """Train as one of several processes, and exit. Only one process reports an error."""
    end_with_parent()
    # schedir reports peers that exit. torch's warnings about them would only add noise.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _check_environment()
    try:
        config = read_config(path, overrides)
        program = build_program(config)
        _require_process_count(program)
        check_memory(config, _read_integer("LOCAL_WORLD_SIZE", 1, config.world_size, default="1"))
        # `launch` has locked the directories for the processes that it starts.
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
    except TerminationNotice as notice:
        exit_after_termination(str(notice))
    except NonFiniteError as error:  # All ranks raise this error, but only one rank prints it.
        exit_with_error(str(error) if error.process == int(os.environ["RANK"]) else None)
    except ExecutionError as error:
        exit_with_error(str(error), is_peer_failure=_is_peer_failure(error))
    except SchedirError as error:
        # The exit of another process can cause this error, for example during a save.
        is_consequence = _is_peer_failure(error)
        exit_with_error(
            format_error(error), 1 if is_consequence else 2, is_peer_failure=is_consequence
        )
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
    """Import modules without garbage collection, and exclude them from later collections.

    The modules stay loaded, so a collection would free none of them. In a process with few steps,
    garbage collection took a fifth of the time.
    """
    if all(module in sys.modules for module in modules):
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            import_module(module)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _is_peer_failure(error: BaseException) -> bool:
    if isinstance(error, ImportError):  # torch itself may be missing.
        return False
    from schedir.transports.transport import is_caused_by_peer

    return is_caused_by_peer(error)


def _describe_position() -> str:
    """Return the position of this process, as the end of an error message."""
    member = get_current_member()
    return "" if member is None else f", {member.describe_position()}"


def _describe_os_error(error: OSError) -> str:
    """Return the reason for which an OSError ends a run, such as a closed pipe or a full disk."""
    if isinstance(error, BrokenPipeError):
        return "standard output was closed"
    file_text = f" ({error.filename})" if error.filename else ""
    return f"cannot continue: {describe_os_error(error)}{file_text}"


def _require_no_launcher() -> None:
    """Refuse an environment of several processes that does not set the rank of this process."""
    for name in _PROCESS_COUNT_VARIABLES:
        if (count := os.environ.get(name, "1")) != "1":
            raise UsageError(
                f"the environment variable {name} is {count}, but RANK is not set",
                hint=f"start several processes with torchrun, or unset {name}",
            )


def _check_environment() -> None:
    """Check the environment variables that a launcher sets."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(
            f"the environment variable RANK is set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not",
            hint=_LAUNCHER_HINT,
        )
    world = _read_integer("WORLD_SIZE", 1, 2**31 - 1)
    _read_integer("RANK", 0, world - 1)
    _read_integer("MASTER_PORT", 0, 65535)
    _read_integer("LOCAL_RANK", 0, _read_integer("LOCAL_WORLD_SIZE", 1, world, str(world)) - 1, "0")


def _require_process_count(program: Program) -> None:
    """Check that the launcher started the number of processes that the program needs."""
    mesh_sizes = program.shape.ranks, program.tp, program.dp
    world = int(os.environ["WORLD_SIZE"])
    if fact := find_process_count_error(world, *mesh_sizes):
        hint = f"torchrun --nproc-per-node {prod(mesh_sizes)} on one machine, or change "
        raise UsageError(
            fact,
            hint="unset RANK, and schedir starts the processes"
            if world == 1
            else f"{hint}pipeline.ranks, pipeline.tp or pipeline.dp",
            fields=["ranks", "tp", "dp"],
        )


def _read_integer(name: str, minimum: int, maximum: int, default: str = "") -> int:
    value = os.environ.get(name, default)
    try:
        number = parse_integer(value)
        fits = minimum <= number <= maximum
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            f"the environment variable {name} must be from {minimum} to {maximum}, not {value!r}",
            hint=_LAUNCHER_HINT,
        )
    return number


def _train(config: Config, program: Program, corpus: Corpus) -> None:
    """Set up this process, train as one rank, and save the results."""
    from schedir.training.processes.process_world import join_process_group
    from schedir.training.processes.startup_consistency import collect_run_facts
    from schedir.training.processes.watchdog import Watchdog
    from schedir.training.trainer import train

    data = corpus.facts
    facts = collect_run_facts(config, program, data)
    number = int(os.environ.get("RANK", "0"))
    has_checkpoints = config.train.checkpoint_dir is not None
    losses = LossLog(config, RunIdentity.from_config(config, data)) if number == 0 else None
    member = get_current_member() or RunMember(
        config.output.dir, ProcessLayout.from_program(program), 0
    )
    stop = GracefulStop(number, config.world_size) if has_checkpoints else None
    with (
        ExitStack() as outer_stack,
        Watchdog(member, config.train.timeout, stop, config.train.shutdown_grace) as watchdog,
        join_process_group(config.train.timeout, config.train.device, member.black_box, facts),
        closing(losses) if losses is not None else nullcontext(),
    ):
        if get_current_member() is None:  # A single process reports errors without its black box.
            outer_stack.callback(member.finish)
        result = train(config, program, corpus, losses, watchdog)
        member.black_box.enter_phase(ProcessPhase.RESULTS)
        if result is not None:
            save_results(result, config.output)
