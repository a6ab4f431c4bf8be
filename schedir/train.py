"""Train: a configuration in, a trained GPT out, on as many processes as it asks for."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedir.check import check, check_draft
from schedir.compile import compile, lower
from schedir.config import Config, read
from schedir.errors import ExecutionError, ProgramError, UsageError
from schedir.files import replacing
from schedir.graph import Model
from schedir.launch import crash, end_with_parent, launch, leave
from schedir.load import load
from schedir.program import Program

# What is wrong with a configuration is said before torch is imported.
if TYPE_CHECKING:
    from schedir.trainer import Result

MODEL: Model = "edge"  # what Gloo gives
GRACE = 5.0  # seconds in which a machine's first rank speaks for all of them
CLOSED = "standard output was closed"


def run(path: str, sets: Sequence[str] = ()) -> int:
    """Train as the configuration in `path` says, with settings of `sets` on top.

    Under torchrun, this process is one rank.  Otherwise it starts all that are asked for on
    this machine.  Returns the exit code: 0, 1 after a crash, 2 if a rank refused, 130 after
    Ctrl-C.  Raises ProgramError for what can be refused before anything is started.
    """
    if "RANK" in os.environ:
        return _run_rank(path, sets)
    config = read(path, sets)
    program = program_of(config)
    make_folder(config.output.folder)
    try:
        from schedir.trainer import batches

        batches(config).batch(0)
        if config.world > 1:
            return launch(["train", *(f"--set={s}" for s in sets), "--", path], config.world)
        _train(config, program)
    except ExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        crash(CLOSED)
    except KeyboardInterrupt:
        return 130
    return 0


def program_of(config: Config) -> Program:
    """The program that a configuration trains, checked.

    Raises ProgramError for a schedule that is wrong, does not train, or does not fit the rest.
    """
    pipeline = config.pipeline
    found = load(pipeline.schedule)
    tied = config.model.tied and pipeline.plan.stages > 1  # one stage shares the weight itself
    clip = config.train.clip > 0
    if not isinstance(found, Program):
        program = compile(
            found, pipeline.plan, pipeline.tp, pipeline.dp, MODEL, tied=tied, clip=clip
        )
    elif found.is_draft:
        whole = replace(found, tp=pipeline.tp, dp=pipeline.dp, tied=tied, clip=clip)
        program = check(lower(check_draft(whole)), MODEL)
    else:
        for what, has, wants in (
            ("tied", found.tied, tied),
            ("clip", found.clip, clip),
        ):
            if has != wants:
                raise UsageError(
                    f"{pipeline.schedule} has {what} {_yes(has)}, the configuration {_yes(wants)}"
                )
        program = check(found, MODEL)
    if not program.trains:
        raise UsageError(f"schedule {pipeline.schedule} has no backward: it trains nothing")
    return program


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def make_folder(folder: str) -> None:
    """Make a folder for results.  Raises UsageError if nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to the output folder {folder}: {error.strerror}") from None


def _run_rank(path: str, sets: Sequence[str]) -> int:
    """One of several processes: they read the same configuration, and one says what is wrong."""
    end_with_parent()
    missing = [v for v in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise UsageError(
            f"RANK is set, but {' and '.join(missing)} not", hint="use torchrun, or unset RANK"
        )
    try:
        config = read(path, sets)
        program = program_of(config)
        if os.environ["RANK"] == "0":
            make_folder(config.output.folder)
        _train(config, program)
    except ExecutionError as error:
        crash(str(error))
    except ProgramError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(GRACE)  # its end is the end of this process, if it refuses too
        raise
    except BrokenPipeError:
        crash(CLOSED)
    except Exception:
        crash(traceback.format_exc())
    leave()


def _train(config: Config, program: Program) -> None:
    from schedir.trainer import train

    folder = Path(config.output.folder)
    first = os.environ.get("RANK", "0") == "0"
    with (folder / "loss.csv").open("w") if first else nullcontext() as losses:
        if losses is not None:
            losses.write("step,loss,learning_rate,gradient_norm\n")
        result = train(config, program, losses)
    if result is not None:
        _save(result, folder)


def _save(result: Result, folder: Path) -> None:
    from schedir.viz import compare, save

    picture, summary = folder / "timeline.png", folder / "summary.json"
    save(compare([result.predicted, result.measured]), picture)
    facts = {
        "program": result.measured.program.name,
        "digest": result.measured.program.digest,
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "bubble": {"measured": result.measured.bubble, "predicted": result.predicted.bubble},
        "seconds": {"measured": result.measured.span, "predicted": result.predicted.span},
    }
    with replacing(summary) as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"wrote loss.csv, {summary.name} and {picture.name} to {folder}", flush=True)
