"""Runs the trainer through the command line, for tests."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from runpy import run_module
from textwrap import indent
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.multiprocessing.spawn import start_processes

from schedir.__main__ import main
from schedir.training.config.config_file import read_config
from schedir.training.processes import launcher, process_exit
from schedir.training.train import run
from schedir.transports.local_processes import run_processes
from tests.cpu.gloo_processes import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds: enough on any machine, and the limit of a hang
TORCHRUN = ["-m", "torch.distributed.run"]
ONE_STAGE_PER_RANK = ["pipeline.tp=1", "pipeline.stages_per_rank=1"]
ONE_PROCESS = ["pipeline.ranks=1", "pipeline.stages_per_rank=1", "pipeline.tp=1", "pipeline.dp=1"]

CONFIG = """\
[model]
layers = 4
hidden = 32
heads = 2
context = 16

[pipeline]
schedule = "interleaved"
ranks = 2
stages_per_rank = 2
tp = 2
microbatches = 3

[data]
source = "{text}"
microbatch_size = 2

[train]
steps = 6
warmup = 2
log_every = 4
"""


def write_config(folder: Path) -> Path:
    """Write a configuration of six steps and its text, and return the path of the configuration."""
    text, path = folder / "text.txt", folder / "run.toml"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    path.write_text(CONFIG.format(text=text))
    return path


def write_small_config(folder: Path) -> Path:
    """Write a configuration of two steps with dropout, without tensor parallelism, and its text."""
    text, path = folder / "text.txt", folder / "config.toml"
    text.write_text("to be or not to be " * 200)
    shorter = CONFIG.replace("steps = 6", "steps = 2").replace("tp = 2", "tp = 1")
    path.write_text(shorter.format(text=text).replace("layers = 4", "layers = 4\ndropout = 0.1"))
    return path


def make_arguments(config: str, folder: Path, *sets: str) -> list[str]:
    return ["train", config, *(f"--set={s}" for s in (*sets, f'output.dir="{folder}"'))]


def write_schedule(folder: Path, text: str) -> str:
    """Write a file with a schedule `mine`, and return the setting that selects it."""
    path = folder / "mine.py"
    path.write_text(text)
    return f"pipeline.schedule={path}:mine"


PATCHED_SCHEDULE = """\
import os
import shutil
import signal
import sys
import time
from pkgutil import resolve_name

from schedir.schedules import one_f_one_b as mine

owner = resolve_name({owner!r})
original = owner.{name}


def patched(*arguments, **options):
    rank = os.environ.get("RANK", "0")
{statements}
    return original(*arguments, **options)


owner.{name} = patched
"""


def write_patched_schedule(folder: Path, function: str, statements: str) -> str:
    """Write a file with 1F1B that patches a function, and return the setting that selects it.

    Args:
        folder: The folder of the file.
        function: The function, for example `schedir.models.gpt:Layer.forward`.
        statements: The statements that run before the function.  They may use `rank`, `arguments`
            and some modules.
    """
    owner, _, name = function.rpartition("." if "." in function.partition(":")[2] else ":")
    return write_schedule(
        folder,
        PATCHED_SCHEDULE.format(owner=owner, name=name, statements=indent(statements, "    ")),
    )


def make_torchrun_command(processes: int, *words: str) -> list[str]:
    """Return the arguments of Python that run a command of schedir in processes of torchrun."""
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", "-m", "schedir", *words]


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def kill_processes() -> None:
    """Kill the processes that a test has started."""
    while _RUNS:
        run = _RUNS.pop()
        run.process.kill()
        run.process.join()


def _heed() -> None:
    """Restore the default handlers of signals.

    Children inherit ignored signals when tests run under nohup or a shell's `&`, and a fork of a
    launcher inherits its handlers.
    """
    for each in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(happens: Callable[[], bool]) -> None:
    """Wait until a condition is true; it fails the test if that takes too long."""
    over = time.monotonic() + LIMIT
    while not happens():
        assert time.monotonic() < over
        time.sleep(0.02)


class Run:
    """A command of schedir, a module or a script, in a fork of a process that has torch loaded.

    The processes that `schedir train`, torchrun and `torch.multiprocessing.spawn` start are forks,
    too. A process is one rank of a run if `environment` has the variables of torchrun.
    """

    def __init__(
        self, words: list[str], folder: Path, *, cwd: str = "", **environment: str
    ) -> None:
        said = folder.parent / f"said-{folder.name}-{environment.get('RANK', '')}"
        said.mkdir(parents=True)
        self.out, self.err = said / "out", said / "err"
        cwd = cwd or str(Path(words[0]).parent if words[0].endswith(".py") else ROOT)
        self.process = CONTEXT.Process(target=_process, args=(words, said, cwd, environment))
        self.process.start()
        self.pid = self.process.pid or 0
        _RUNS.append(self)

    def wait_for(self, text: str) -> None:
        """Wait until the process has printed a text."""

        def has_printed() -> bool:
            is_over = self.process.exitcode is not None
            found = self.out.exists() and text in self.out.read_text()
            assert found or not is_over, self.err.read_text()
            return found

        wait_until(has_printed)

    def finish(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Return the exit code and the output. If the process hangs, kill it and fail the test."""
        self.process.join(limit)
        code = self.process.exitcode
        self.process.kill()
        assert code is not None, "the process has not ended"
        return code, self.out.read_text(), self.err.read_text()


_RUNS: list[Run] = []


def run_launched(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Return the exit code and the output of a command that starts its processes itself."""
    return Run(words, folder).finish()


def run_forked(config: str, folder: Path, *sets: str) -> tuple[int, str, str]:
    """Return the same for a run whose processes find each other as under torchrun.

    For tests of training it saves two seconds of a core per process.
    """
    # The file of a schedule may patch anything, so only the processes load it.
    world = read_config(
        config, [one for one in sets if not one.startswith("pipeline.schedule=")]
    ).world_size
    words = [make_arguments(config, folder, *sets)] * world
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = fork_processes(
        words, folder, store.port, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=str(world)
    )
    code = next((code for code, _, _ in found if code), 0)
    return code, found[0][1], "".join(err for _, _, err in found)


def run_script(what: Path | str, processes: int, folder: Path, *argv: str) -> str:
    """Return what several processes print, which find each other as under torchrun.

    Args:
        what: The path of a script, or the name of a module, as for `-m`.
        processes: The number of processes.
        folder: A folder of this run.
        argv: The arguments of the script.
    """
    words = [str(what), *argv] if isinstance(what, Path) else ["-m", what]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = fork_processes(
        [words] * processes, folder, store.port, TORCHELASTIC_USE_AGENT_STORE="True"
    )
    assert all((code, err) == (0, "") for code, _, err in found), found
    return "".join(out for _, out, _ in found)


def run_in_forks(main: Callable[[], object], processes: int) -> str:
    """Return what a function prints in several forks of this process, which have its imports.

    Use it for the main function of a script that imports a large package. The function creates and
    destroys a process group: here the group exists already.
    """
    forks = multiprocessing.get_context("fork")
    return "".join(run_processes(_print_in_group, processes, main, context=forks, timeout=LIMIT))


def _print_in_group(rank: int, main: Callable[[], object]) -> str:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.dict(os.environ, environment),
        redirect_stdout(StringIO()) as output,
    ):
        main()
    return output.getvalue()


def fork_processes(
    words: Sequence[list[str]], folder: Path, port: int, **more: str
) -> list[tuple[int, str, str]]:
    """Return the exit code and the output of each of several processes, given their arguments.

    They fork from a process that has torch loaded. `port` is that of their store.
    """
    more |= {"WORLD_SIZE": str(len(words)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = [
        Run(own, folder, RANK=str(rank), LOCAL_RANK=str(rank), **more)
        for rank, own in enumerate(words)
    ]
    over = time.monotonic() + LIMIT
    return [run.finish(max(0, over - time.monotonic())) for run in runs]


def _process(words: list[str], said: Path, cwd: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    if "RANK" in environment:  # no launcher waits for the first process to end
        vars(process_exit)["EXIT_GRACE"] = 0.5
    _heed()
    os.chdir(cwd)
    vars(launcher)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _fork_rank})
    vars(subprocess_handler)["Popen"] = _fork_rank
    vars(torch.multiprocessing)["spawn"] = partial(start_processes, start_method="fork")
    for descriptor, name in ((1, "out"), (2, "err")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    if words[0].endswith(".py"):
        folder = str(Path(words[0]).parent)
        sys.argv = words
        # Set the path as Python does for a script, which finds our tree only if it adds it.
        sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(ROOT)))]
        # Its own processes return objects of this module, by either name.
        main_module = ModuleType("__main__")
        main_module.__file__ = words[0]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
        exec(compile(Path(words[0]).read_text(), words[0], "exec"), main_module.__dict__)
    elif words[0] == "-m":
        sys.argv[1:] = words[2:]
        run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.exit(main(words))


def _fork_rank(args: Sequence[str], env: dict[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start `python -m schedir` as a fork of its launcher, which has torch loaded."""

    def be() -> None:
        os.closerange(3, 1 << 12)  # the launcher waits until the last of them is closed
        os.environ.clear()
        os.environ.update(env)
        _heed()
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        code = 1
        try:
            code = main([*args][args.index("schedir") + 1 :])
        finally:
            sys.stderr.flush()
            os._exit(code)

    sys.stdout.flush()
    # Popen restores the default of SIGPIPE, and only a new interpreter would ignore it again:
    # a rank that writes to a peer that has ended would end by SIGPIPE, without its error.
    return subprocess.Popen(args, preexec_fn=be, restore_signals=False, **how)


def train(config: str, folder: Path, *sets: str) -> list[float]:
    """Return the losses of a run with as many processes as it needs, by default without picture."""
    code, out, err = run_forked(config, folder, "output.record=false", *sets)
    assert code == 0, err
    assert err == "" and out.startswith(("predicted memory ", "zero ")) and "\nstep " in out
    return read_losses(folder)


def train_in_this_process(config: str, folder: Path, *sets: str) -> list[float]:
    """Return the losses of the same run in this process."""
    assert run(config, ["output.record=false", *sets, *ONE_PROCESS, f'output.dir="{folder}"']) == 0
    return read_losses(folder)


def read_losses(folder: Path) -> list[float]:
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
