"""Tests of Timeline files: a saved Timeline is loaded again, and other files are refused early."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Sizes, Timeline, load_timeline, save_timeline, to_text
from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import lower
from schedir.errors import SchedirError, TraceError, UsageError
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.schedules import dualpipe_v, one_f_one_b
from schedir.testing import compute_programs
from tests.commands import run_command, run_refused_command
from tests.strategies import costs

FILE = Path("x.timeline")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("traces"))
        yield


def simulate_1f1b() -> Timeline:
    program = schedir.compile(one_f_one_b, PipelineShape(3, 4), tp=2, clip_grad_norm=True)
    return schedir.simulate(program, Costs(F=1, B=2, send=0.1, step=3))


def equal_timelines(a: Timeline, b: Timeline) -> bool:
    facts = [
        (t.program, t.kind, t.unit, t.progress_model, t.clock_error, t.sizes, t.blocking_hosts)
        for t in (a, b)
    ]
    return facts[0] == facts[1] and bool((a.spans == b.spans).all())


@given(compute_programs(), st.data(), st.sampled_from(MODELS), st.booleans())
def test_timeline_round_trips(
    draft: Program, data: st.DataObject, progress_model: ProgressModel, grouped: bool
) -> None:
    program = lower(draft)
    if grouped:
        program, progress_model = group_opposite_transfers(program), "per_edge"
    saved = schedir.simulate(program, data.draw(costs(draft.shape)), progress_model=progress_model)
    # In a simulated Timeline no effect is before its cause.
    assert not saved.causality_violations.amount.any()
    shift = data.draw(st.floats(-1e6, 1e6))
    saved.spans["start"] += shift
    saved.spans["end"] += shift
    saved_size = data.draw(st.none() | st.floats(0, 1e12) | st.just((7.5,) * draft.shape.stages))
    sizes = saved_size and Sizes(activation=1.5, saved=saved_size, model_states=0.1)
    saved = replace(saved, kind="measured", unit="s", clock_error=0.25, sizes=sizes or None)
    save_timeline(saved, FILE)
    loaded = load_timeline(FILE)
    assert equal_timelines(loaded, saved) and not loaded.causality_warning


def test_overlapped_pair_round_trips() -> None:
    saved = schedir.simulate(
        schedir.compile(dualpipe_v, PipelineShape(4, 10, 2, "vee")), Costs(FB=1.5)
    )
    save_timeline(saved, FILE)
    assert equal_timelines(load_timeline(FILE), saved)


def test_blocking_hosts_round_trip() -> None:
    saved = schedir.simulate(
        simulate_1f1b().program, Costs(send=1.0), progress_model="per_edge", blocking_hosts=True
    )
    assert saved.blocking_hosts and saved.graph.blocking_hosts
    save_timeline(saved, FILE)
    assert equal_timelines(load_timeline(FILE), saved)
    forge(header_json=make_header())  # a file from before this field existed
    assert not load_timeline(FILE).blocking_hosts


def test_equal_timelines_have_equal_bytes() -> None:
    save_timeline(simulate_1f1b(), FILE)
    first_bytes = FILE.read_bytes()
    save_timeline(simulate_1f1b(), FILE)
    assert FILE.read_bytes() == first_bytes
    assert len(first_bytes) < 40 * len(simulate_1f1b())


def test_numpy_reads_file_without_schedir() -> None:
    """NumPy alone reads a file as `docs/reference/file-formats.md` says."""
    save_timeline(simulate_1f1b(), FILE)
    with np.load(FILE) as file:
        assert (file["end"] == simulate_1f1b().spans["end"]).all()
        assert schedir.from_text(file["program.sched"].decode()) == simulate_1f1b().program
        assert json.loads(file["header.json"])["kind"] == "predicted"


@given(st.data())
def test_damaged_file_is_refused_or_equal(data: st.DataObject) -> None:
    save_timeline(simulate_1f1b(), FILE)
    content = bytearray(FILE.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "drop", "double"]))
    if damage == "cut":
        del content[position:]
    elif damage == "flip":
        content[position] ^= data.draw(st.integers(1, 255))
    elif damage == "drop":
        del content[position : position + data.draw(st.integers(1, 64))]
    else:
        content[position:position] = content[: data.draw(st.integers(1, 64))]
    FILE.write_bytes(content)
    try:
        loaded = load_timeline(FILE)
    except SchedirError as error:
        assert str(FILE) in "".join([str(error), *getattr(error, "__notes__", [])])
    else:
        assert equal_timelines(loaded, simulate_1f1b())


def encode_npy(values: object, dtype: str = "<f8") -> bytes:
    file = BytesIO()
    np.save(file, np.array(values, dtype))
    return file.getvalue()


def forge(**members: bytes) -> None:
    """Write a Timeline file with changed members, whose CRCs and sizes are right."""
    save_timeline(simulate_1f1b(), FILE)
    with ZipFile(FILE) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content |= {name.replace("_", "."): value for name, value in members.items()}
    with ZipFile(FILE, "w", ZIP_DEFLATED) as archive:
        for name, value in content.items():
            archive.writestr(name, value)


def make_header(**changes: object) -> bytes:
    facts = {
        "schedir_timeline": 1,
        "instructions": len(simulate_1f1b()),
        "kind": "predicted",
        "unit": "",
        "digest": simulate_1f1b().program.digest,
        "progress_model": "per_device",
        "blocking_hosts": False,
        "clock_error": 0.0,
    }
    return json.dumps(facts | changes).encode()


def test_file_with_renamed_keys_is_read() -> None:
    """The header and the program of the file have old names."""
    new = simulate_1f1b()
    text = to_text(new.program).replace("tied_weights", "tied").replace("clip_grad_norm", "clip")
    old = json.loads(make_header())
    old |= {"model": "device", "blocks": False, "digest": "of other names"}
    del old["progress_model"], old["blocking_hosts"]
    forge(header_json=json.dumps(old).encode(), program_sched=text.encode())
    loaded = load_timeline(FILE)
    assert loaded.program == new.program and loaded.progress_model == "per_device"
    assert not loaded.blocking_hosts


def test_old_and_new_name_together_are_refused() -> None:
    """If both were read, one value would be ignored."""
    forge(header_json=make_header(model="per_edge"))
    with pytest.raises(TraceError, match="both progress_model and model"):
        load_timeline(FILE)
    sizes = {"deferred_wgrad": 2.0, "tape": 5.0}
    forge(header_json=make_header(sizes=sizes))
    with pytest.raises(TraceError, match="one size under two names"):
        load_timeline(FILE)


END = simulate_1f1b().spans["end"]
IS_LATE_RANK = simulate_1f1b().spans["rank"] == 1  # as if this rank's clock were late
EARLY_STARTS, EARLY_ENDS = (
    simulate_1f1b().spans[name] - 4.0 * IS_LATE_RANK for name in ("start", "end")
)
HUGE = encode_npy(END).replace(b"(%d,)" % len(END), b"(%d,)" % 10**12)
NAN = np.where(np.arange(len(END)) == 5, np.nan, END)
PROGRAM = schedir.to_text(simulate_1f1b().program)
OTHER_PROGRAM = schedir.to_text(schedir.compile(one_f_one_b, PipelineShape(3, 4)))
UNFOLDING_PROGRAM = (
    "schedir 1\nprogram p\nranks 1 microbatches 1048576\nrank 0\n  99999999 x F 0.0\n"
)


@pytest.mark.parametrize(
    "forged, says",
    [
        (lambda: forge(header_json=b"[" * 60_000), "not a Timeline file"),
        (lambda: forge(header_json=b"[]"), "schedir_timeline = 1"),
        (
            lambda: forge(header_json=make_header(schedir_timeline=2)),
            r"schedir_timeline = 1, not 2\n *hint: another version of schedir wrote the file",
        ),
        (lambda: forge(header_json=make_header(instructions=10**15)), "instructions"),
        (lambda: forge(header_json=make_header(instructions=True)), "instructions"),
        (lambda: forge(header_json=make_header(kind="seen")), "kind: 'seen'"),
        (lambda: forge(header_json=make_header(unit="x" * 50_000)), "unit"),
        (lambda: forge(header_json=make_header(unit="parsecs")), r"unit: 'parsecs'\n.*'' and 's'"),
        (
            lambda: forge(start_npy=encode_npy(EARLY_STARTS), end_npy=encode_npy(EARLY_ENDS)),
            "starts or ends too early",
        ),
        (lambda: forge(header_json=make_header(progress_model="gloo")), "model: 'gloo'"),
        (lambda: forge(header_json=make_header(progress_model=[])), "model"),
        (lambda: forge(header_json=make_header(blocking_hosts=1)), "blocking_hosts: 1"),
        (lambda: forge(header_json=make_header(clock_error=float("nan"))), "clock_error: nan"),
        (lambda: forge(header_json=make_header(clock_error=10**400)), "not a Timeline file: int"),
        (lambda: forge(header_json=make_header(digest="0")), "digest"),
        (lambda: forge(header_json=make_header(sizes=[1])), "sizes must be an object with"),
        (lambda: forge(header_json=make_header(sizes={"save": 1})), "sizes must be an object with"),
        (lambda: forge(header_json=make_header(sizes={"saved": "1GB"})), "size saved"),
        (lambda: forge(header_json=make_header(sizes={"saved": [1.0]})), "size saved"),
        (lambda: forge(header_json=b" " * 10**7), "10000000 bytes"),
        (lambda: forge(program_sched=b" " * 10**7), "10000000 bytes"),
        (lambda: forge(start_npy=bytes(10**7)), "10000000 bytes"),
        (lambda: forge(program_sched=OTHER_PROGRAM.encode()), "instructions, but the program has"),
        (lambda: forge(program_sched=UNFOLDING_PROGRAM.encode()),
         r"more instructions than the limit of \d+"),
        (lambda: forge(program_sched=b"\xff"), "not a Timeline file"),
        (lambda: forge(end_npy=encode_npy(END[:-1])), "shape"),
        (lambda: forge(end_npy=encode_npy([*END, 1.0])), "shape"),
        (lambda: forge(end_npy=encode_npy(END, "<f4")), "float32"),
        (lambda: forge(end_npy=encode_npy(END, "<i8")), "int64"),
        (lambda: forge(end_npy=encode_npy(END, "O")), "bytes|object"),
        (lambda: forge(end_npy=HUGE), "shape"),
        (lambda: forge(end_npy=encode_npy(END)[:-8]), "finite time for each"),
        (lambda: forge(end_npy=encode_npy(NAN)), "finite"),
        (lambda: forge(end_npy=encode_npy(END + np.inf)), "finite"),
        (lambda: forge(end_npy=encode_npy(END - 100)), "before its start"),
        (lambda: forge(end_npy=encode_npy(END + 0.5)), "before its rank's last compute ends"),
        (lambda: forge(end_npy=encode_npy([*END[:-1], 1e308])),
         r"end\.npy has the time 1e\+308; times are at most 1e\+300"),
        (lambda: forge(extra=b""), "must contain exactly"),
    ],
)  # fmt: skip
def test_forged_files_are_refused(forged: Callable[[], None], says: str) -> None:
    import re

    forged()
    tracemalloc.start()
    try:
        with pytest.raises(SchedirError) as refusal:
            load_timeline(FILE)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert re.search(says, str(refusal.value)), refusal.value


@pytest.mark.parametrize("options", [[], ["-o", "a.svg"]])
def test_huge_end_time_is_drawn(options: list[str]) -> None:
    forge(end_npy=encode_npy([*END[:-1], 1e299]))
    assert main(["draw", str(FILE), *options]) == 0


def test_forged_size_does_not_allocate_memory() -> None:
    forge(start_npy=bytes(10**7))
    content = FILE.read_bytes()
    for size in ((10**7).to_bytes(4, "little"),):
        assert content.count(size) == 2
        FILE.write_bytes(content.replace(size, (400).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.raises(TraceError):
        load_timeline(FILE)
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    save_timeline(simulate_1f1b(), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TraceError, match="hint: the file is cut off or damaged"):
        load_timeline(path)


@pytest.mark.parametrize("content", [b'{"traceEvents": []}', b"[1]", b"\x1f\x8b\x08trace"])
def test_trace_has_import_hint(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"import FOLDER -o run\.timeline reads torch"):
        load_timeline(path)


def test_other_compression_is_refused() -> None:
    with ZipFile(FILE, "w", ZIP_BZIP2) as archive:
        for name in ("header.json", "program.sched", "start.npy", "end.npy"):
            archive.writestr(name, bytes(1000))
    with pytest.raises(TraceError, match="not deflate"):
        load_timeline(FILE)


def test_illegal_program_in_file_is_refused() -> None:
    text = PROGRAM.replace("F 0.0", "F 0.1")
    forge(
        program_sched=text.encode(),
        header_json=make_header(digest=schedir.from_text(text).digest),
    )
    with pytest.raises(SchedirError, match=r"F 0\.|0\.0"):
        load_timeline(FILE)


@pytest.mark.parametrize("path", ["not-there.timeline", "."])
def test_unreadable_file_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_timeline(path)


def test_failed_write_keeps_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    FILE.write_text("before")

    def raise_error(*_: object) -> str:
        raise RuntimeError

    monkeypatch.setattr("schedir.io.timeline_file.ZipFile.writestr", raise_error)
    with pytest.raises(RuntimeError):
        save_timeline(simulate_1f1b(), FILE)
    assert FILE.read_text() == "before"
    assert not [*Path().glob(".*")]
    with pytest.raises(UsageError, match="cannot write"):
        save_timeline(simulate_1f1b(), "no/such/folder/x.timeline")


def test_commands_accept_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    save_timeline(replace(simulate_1f1b(), kind="measured", unit="s"), FILE)
    assert "one_f_one_b, measured" in run_command(capsys, "simulate", str(FILE))
    assert run_command(capsys, "simulate", str(FILE), "--ranks=3")
    said_of = run_command(
        capsys, "compare", str(FILE), "one_f_one_b", "--ranks=3", "--microbatches=4"
    )
    assert "one_f_one_b, measured" in said_of and "one_f_one_b, predicted" in said_of
    assert run_command(capsys, "draw", str(FILE), "-o", "x.svg")
    assert "leave out --ranks" in run_refused_command(capsys, "simulate", str(FILE), "--ranks=4")
    assert "predicted" in run_command(capsys, "simulate", str(FILE), "--costs=F=1")
    assert "with the progress model per_device" in run_refused_command(
        capsys, "simulate", str(FILE), "--progress-model=per_edge"
    )
    FILE.write_text("a run\n")
    assert "not a Timeline file" in run_refused_command(capsys, "draw", str(FILE), "-o", "x.svg")


def test_causality_violations_appear_in_every_view(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    predicted = schedir.simulate(schedir.compile(one_f_one_b, PipelineShape(3, 4)), Costs(send=0.1))
    spans, is_late = predicted.spans.copy(), predicted.spans["rank"] == 1
    spans["start"], spans["end"] = (
        (spans[field] - 4 * is_late) * 1e-3 for field in ("start", "end")
    )
    shifted = replace(predicted, spans=spans, kind="measured", unit="s")
    # A message sent at 1 ms arrives at 1.1 ms, which the wrong clock shows 4 ms earlier.
    says = "effects up to 0.0039 s before causes"
    assert shifted.causality_warning == says and says in repr(shifted) and says in shifted.caption
    instr = shifted.graph.index.locate(int(shifted.causality_violations.amount.argmax()))[2]
    cause = shifted.graph.index.locate(
        int(shifted.causality_violations.cause[shifted.causality_violations.amount.argmax()])
    )[2]
    assert (str(instr), str(cause)) == ("recv_act 1.3", "send_act 0.3")
    # Clocks whose error may be that large prove no violation.
    assert not replace(shifted, clock_error=0.0039001).causality_warning
    assert replace(shifted, clock_error=0.0038).causality_warning
    save_timeline(shifted, FILE)
    for command in ("simulate", "explain", "draw"):
        assert says in run_command(capsys, command, str(FILE))
    assert says in run_command(capsys, "compare", str(FILE), str(FILE))
    assert (
        json.loads(run_command(capsys, "simulate", str(FILE), "--json"))["causality_warning"]
        == says
    )
    for options in ("", "--width=column", "--idle-map", "html"):
        page = options == "html"
        picture = tmp_path / ("x.html" if page else "x.svg")
        argv = [str(FILE), "-o", str(picture), *([options] if options and not page else [])]
        run_command(capsys, "draw", *argv)
        assert says in picture.read_text()
    run_command(capsys, "compare", str(FILE), str(FILE), "--tradeoff", "-o", "x.svg")
    assert says in Path("x.svg").read_text()
    run_command(capsys, "export", str(FILE), "--to=perfetto", "-o", "x.json")
    assert says in Path("x.json").read_text()
    assert says in shifted._repr_html_()
    assert main(["calibrate", str(FILE)]) == 0
    assert says in capsys.readouterr().err  # standard output contains only the costs


def test_unknown_unit_is_refused() -> None:
    with pytest.raises(UsageError, match="'parsecs'"):
        replace(simulate_1f1b(), unit="parsecs")
