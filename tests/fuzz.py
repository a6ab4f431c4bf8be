"""Test every reader with files that are changed at random or in fixed ways.

    nice -n 19 python -m tests.fuzz --files 100000 --seed 1

prints a table for docs/results/fuzz.md. A reader accepts a file or refuses it with a SchedirError
in a few lines. Any other exception is a bug.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZipFile

import schedir
from schedir.commands.common.schedule_options import parse_costs, parse_sizes
from schedir.errors import SchedirError
from schedir.hang_diagnosis.flight_recorder import read_dumps
from schedir.hang_diagnosis.safe_unpickler import loads
from schedir.io import torch_csv
from schedir.io.cluster_file import load_cluster
from schedir.io.source_loader import load_source
from schedir.io.terminal_output import format_error
from schedir.io.timeline_file import load_timeline, save_timeline
from schedir.traces.trace_import import read_run
from schedir.training.config.config_file import read_config
from tests import kineto
from tests.flight_recorder_dumps import Recorder

Content = bytes
LONGEST = 12  # lines of a refusal
FAILED = Path("fuzz-failed")  # the folder for files on which a reader fails


class Reader(NamedTuple):
    """A function that reads a file, and some right files."""

    read: Callable[[Path], object]
    right: list[Content]


def make_readers(folder: Path) -> dict[str, Reader]:
    """Return every reader by the kind of its files."""
    programs = [
        schedir.to_text(
            schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 3))
        ),
        schedir.to_text(
            schedir.compile(
                schedir.schedules.zb_h1, schedir.PipelineShape(2, 2), clip_grad_norm=True
            )
        ),
        schedir.to_text(
            schedir.compile(
                schedir.schedules.interleaved,
                schedir.PipelineShape(2, 2, 2),
                tp=2,
                buffer_sharing="minimal",
            ),
            folded=False,
        ),
    ]
    plain = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 2))
    run = schedir.simulate(plain)
    save_timeline(run, folder / "right.timeline")
    alone = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(1, 3))
    (trace,) = kineto.write_traces(folder, [schedir.simulate(alone)], 1)
    whole = trace.read_bytes()
    recorder = Recorder(0)
    recorder.group("0", range(2), "default_pg")
    recorder.messages("0", [("send", 1)], ended=True)
    recorder.messages("0", [("recv", 1), ("send", 1)], ended=False)
    dumps = []
    for as_json in (False, True):
        place = folder / f"dumps{as_json}"
        place.mkdir()
        recorder.save(place, as_json=as_json)
        dumps += [file.read_bytes() for file in place.iterdir()]
    text = "F=1:2,B=2/3:4/5,send=0.1,R=1e-3,step=0"
    return {
        "program, .sched": Reader(_program, [p.encode() for p in programs]),
        "torch's CSV": Reader(
            lambda path: torch_csv.from_csv(path.read_bytes().decode("utf-8", "replace")),
            [torch_csv.to_csv(plain, form).encode() for form in torch_csv.CSV_FORMATS],
        ),
        "configuration, TOML": Reader(lambda path: read_config(str(path)), [_CONFIG.encode()]),
        "cluster, TOML": Reader(load_cluster, [_CLUSTER.encode()]),
        "costs, @FILE": Reader(lambda path: parse_costs(f"@{path}"), [text.encode()]),
        "sizes, @FILE": Reader(
            lambda path: parse_sizes(f"@{path}"),
            [b"activation=16MB,saved=1.2GB:1GB,model_states=3"],
        ),
        "run, .timeline": Reader(load_timeline, [(folder / "right.timeline").read_bytes()]),
        "a run's header": Reader(
            with_header(folder), [ZipFile(folder / "right.timeline").read("header.json")]
        ),
        "trace of torch.profiler": Reader(
            lambda path: read_run([path]), [whole, gzip.compress(whole, mtime=0)]
        ),
        "dump of a flight recorder": Reader(lambda path: read_dumps([str(path)]), dumps),
        "pickle": Reader(lambda path: loads(path.read_bytes()), dumps[:1]),
    }


_CONFIG = """\
[model]
layers = 4
hidden = 32

[pipeline]
schedule = "interleaved(group=2)"
ranks = 2
microbatches = 4
placement = "loop"

[memory]
memory_limit = "1.5GB"

[train]
betas = [0.9, 0.95]
lr = 1e-3
"""
_CLUSTER = """\
nodes = 2
gpus_per_node = 8
flops = "312TFLOP/s"
memory = "80GB"
hbm_bandwidth = "2039GB/s"
nvlink_bandwidth = "300GB/s"
network_bandwidth = "25GB/s"
latency = "5us"
"""


def _program(path: Path) -> None:
    found = load_source(str(path))
    if isinstance(found, schedir.Program):
        schedir.check(found)


def with_header(folder: Path) -> Callable[[Path], object]:
    """Return a reader of a run that is right except for its header."""
    with ZipFile(folder / "right.timeline") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def reads(path: Path) -> object:
        path.with_suffix(".timeline").unlink(missing_ok=True)
        with ZipFile(path.with_suffix(".timeline"), "w") as archive:
            for name, content in (members | {"header.json": path.read_bytes()}).items():
                archive.writestr(name, content)
        return load_timeline(path.with_suffix(".timeline"))

    return reads


# ---------------------------------------------------------------- wrong files

NASTY = (
    b"", b"-1", b"0", b"1e999", b"-0.0", b"nan", b"NaN", b"inf", b"Infinity", b"9" * 19,
    b"9" * 5000, b"4294967296", b"0x10", b"1_0", b"null", b"true", b"[]", b"{}", b'""',
    b'"\\u0000"', b"'", b'"', b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", "\u0663".encode(),
    "\U0001f600".encode(), b"\x1b[2J", b"\r", b"\n", b"\n\n", b"\t", b"#", b";", b"&", b"=", b",",
    b"..", b"/", b"[" * 2000, b"{" * 2000, b"(" * 2000, b"a." * 1500, b" " * 5000, b"x" * 5000,
    b"../../etc/passwd", b"/dev/zero", b"1e-999", b"0.1.2", b"--", b"\\", b"%s%n",
    b"\xed\xa0\x80", b"18446744073709551616",
)  # fmt: skip


def make_hand_written_changes(right: list[Content]) -> Iterator[Content]:
    """Yield files in which a word or space is replaced by bad text, and damaged files.

    These are truncated, doubled, reversed or empty.
    """
    for content in right:
        yield from (b"", content * 2, content[::-1], content.replace(b"\n", b"\r\n"), *NASTY)
    for nth in range(10**6):
        some = False
        for k, content in enumerate(right):
            words = [*re.finditer(rb"[\w.+-]+|[^\w\s]|\s+", content)]
            if nth < len(words) * len(NASTY):
                at = words[(nth * 7919 + k) % len(words)]
                yield content[: at.start()] + NASTY[nth % len(NASTY)] + content[at.end() :]
                some = True
        if not some:
            return


def mutate_file(right: list[Content], rng: random.Random) -> Content:
    """Return a file with a few changes."""
    data = bytearray(rng.choice(right))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 16, 64))
        match rng.randrange(7):
            case 0:
                data[at : at + size] = rng.randbytes(size)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                data[at:at] = rng.choice(NASTY[:32])
            case 4 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 5:
                other = rng.choice(right)
                begin = rng.randrange(len(other) + 1)
                data[at : at + size] = other[begin : begin + size]
            case _:
                del data[at:]
    return bytes(data)


# ---------------------------------------------------------------- reading them


class Outcome(NamedTuple):
    """The number of accepted files, of refused files by kind of error, and the failures."""

    kinds: Counter[str]
    failed: list[tuple[Content, str]]


def run_reader(reader: Reader, files: Iterator[Content], path: Path) -> Outcome:
    """Let a reader read files one after the other at one path."""
    kinds: Counter[str] = Counter()
    failed = []
    for content in files:
        path.unlink(missing_ok=True)  # some file systems write an overwritten file at once
        path.write_bytes(content)
        try:
            reader.read(path)
            kinds["taken"] += 1
        except SchedirError as error:
            kinds[type(error).__name__] += 1
            said = format_error(error)
            if len(said.splitlines()) > LONGEST or len(said) > 4000:
                failed.append((content, f"a refusal of {len(said)} characters: {said[:500]}"))
        except Exception:
            kinds["bug"] += 1
            failed.append((content, traceback.format_exc()[-1500:]))
    return Outcome(kinds, failed)


ENDS = {"program, .sched": "a.sched", "dump of a flight recorder": "dump_0"}


def fuzz(number: int, hand: int, seed: int) -> Iterator[tuple[str, Outcome, float]]:
    """Yield each reader's outcome for `number` random and at most `hand` other changes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for what, reader in make_readers(folder).items():
            rng = random.Random(f"{seed} {what}")
            files = chain(
                islice(make_hand_written_changes(reader.right), hand),
                (mutate_file(reader.right, rng) for _ in range(number)),
            )
            began = time.process_time()
            outcome = run_reader(reader, files, folder / ENDS.get(what, "file"))
            yield what, outcome, time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000, help="mutated, in all")
    parser.add_argument("--by-hand", type=int, default=200, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        each = -(-options.files // len(make_readers(Path(name))))
    print("| reader | files | taken | refused, by kind | bugs | ms a file |")
    print("| --- | --: | --: | --- | --: | --: |")
    bugs = 0
    for what, (kinds, failed), seconds in fuzz(each, options.by_hand, options.seed):
        refused = {k: n for k, n in kinds.most_common() if k not in ("taken", "bug")}
        told = ", ".join(f"{kind} {n}" for kind, n in refused.items())
        total = sum(kinds.values())
        print(f"| {what} | {total} | {kinds['taken']} | {told} | {len(failed)} "
              f"| {1000 * seconds / total:.1f} |", flush=True)  # fmt: skip
        bugs += len(failed)
        for content, why in failed[:5]:
            FAILED.mkdir(exist_ok=True)
            path = FAILED / re.sub(r"\W+", "-", f"{what} {abs(hash(content))}")
            path.write_bytes(content)
            print(f"\n{path}\n{why}", file=sys.stderr)
    return bool(bugs)


if __name__ == "__main__":
    sys.exit(main())
