"""Tests of common mistakes: the message names the mistake, and the hint has the right change."""

from pathlib import Path

import pytest

from schedir import (
    B,
    F,
    check,
    compile,
    from_text,
    load_timeline,
    planner,
    save_timeline,
    simulate,
    to_text,
    torch_csv,
)
from schedir.data.token_files import find_files
from schedir.errors import CompletenessError, DeadlockError, ParseError, TraceError, UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.schedules import get_built_in_schedules, suggest_schedules
from schedir.training.config.config_file import read_config
from schedir.training.config.train_config import TrainConfig
from schedir.training.learning_rate import describe_short_warmup
from schedir.training.run_results import make_directory
from tests.commands import run_command, run_refused_command

MEGATRON = """\
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test in a folder that has files of schedir."""
    monkeypatch.chdir(tmp_path)
    program = compile("one_f_one_b", ranks=2, microbatches=2)
    Path("mine.sched").write_text(to_text(program))
    save_timeline(simulate(program), "mine.timeline")
    Path("mine.toml").write_text("[pipeline]\nranks = 2\n")
    Path("meg.sh").write_text(MEGATRON)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_import_refuses_perfetto_export(capsys: pytest.CaptureFixture[str], name: str) -> None:
    run_command(capsys, "export", "mine.timeline", "--to", "perfetto", "-o", name)
    error = run_refused_command(capsys, "import", name, "-o", "x.timeline")
    assert f"{name} was written by schedir export --to perfetto" in error
    assert "hint: use the FILE.timeline or FILE.sched that was exported" in error
    hint = f"that was exported to {name}"
    assert f"hint: give the FILE.timeline or FILE.sched {hint}" in run_refused_command(
        capsys, "explain", name
    )
    with pytest.raises(TraceError, match=f"hint: give the FILE.timeline {hint}"):
        load_timeline(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("interleaved_1f1b", "interleaved"),
        ("Interleaved1F1B", "interleaved"),
        ("interleaved-1f1b", "interleaved"),
        ("1f1b_interleaved", "interleaved"),
        ("InterleavedZeroBubble", "interleaved_zb"),
        ("ScheduleZBVZeroBubble", "zb_v"),
        ("eager1f1b", "eager_1f1b"),
        ("pipedream_flush", "one_f_one_b"),
        ("vpp", "interleaved"),
        ("afab", "gpipe"),
    ],
)
def test_schedule_names_of_other_projects_get_hint(name: str, expected: str) -> None:
    assert suggest_schedules(name, [*get_built_in_schedules()]) == f"did you mean {expected!r}?"


def test_keyword_of_other_project_gets_hint() -> None:
    with pytest.raises(UsageError, match="did you mean 'recompute'"):
        compile("gpipe", ranks=2, microbatches=4, gradient_checkpointing="all")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_deadlock_from_placement_hints_at_placement(name: str) -> None:
    shape = PipelineShape(4, 8, placement=(3, 2, 1, 0))
    with pytest.raises(DeadlockError) as caught:
        compile(name, shape)
    assert caught.value.hint.startswith(f"use placement loop: {name} takes the rank as")


def test_path_instead_of_text_gets_hint() -> None:
    with pytest.raises(ParseError) as caught:
        from_text("mine.sched")
    assert caught.value.hint == "from_text takes the text of a file: Path('mine.sched').read_text()"
    with pytest.raises(ParseError) as caught:
        torch_csv.from_csv("mine.csv")
    assert caught.value.hint == "from_csv takes the text of a file: Path('mine.csv').read_text()"


def test_megatron_script_without_vocabulary_gets_hint(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--cluster", "a100", "--gpus", "8", "--batch", "8", "--closed-form-only")
    error = run_refused_command(capsys, "plan", "--model", "meg.sh", *argv)
    assert "hint: add --vocab-size N to the file, or give --vocab N" in error
    with pytest.raises(UsageError) as caught:
        planner.load_model("meg.sh")
    assert caught.value.hint == "add --vocab-size N to the file, or pass vocab=N"
    run_command(capsys, "plan", "--model", "meg.sh", "--vocab", "256", *argv)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mine.sched", "schedir.from_text(Path('mine.sched').read_text()) reads the program"),
        ("mine.py:idea", "import the function, and give the function instead of its name"),
    ],
)
def test_command_line_names_in_python_get_hint(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match="there is no built-in schedule") as caught:
        compile(name, ranks=2, microbatches=4)
    assert caught.value.hint.startswith(hint)


def test_csv_text_gets_hint_at_from_csv() -> None:
    with pytest.raises(ParseError, match="a program must begin with") as caught:
        from_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert caught.value.hint == "schedir.torch_csv.from_csv(text) reads a CSV of torch"


def test_cut_off_program_file_gets_hint() -> None:
    text = Path("mine.sched").read_text()
    with pytest.raises(ParseError, match="there is no instruction 'reduc'") as caught:
        from_text(text[: text.rindex("reduce_grads") + 5])
    assert caught.value.hint.endswith("the file may be cut off: its last line has no line break")


def test_changed_microbatches_of_program_file_get_hint() -> None:
    text = Path("mine.sched").read_text().replace("microbatches 2", "microbatches 8")
    with pytest.raises(CompletenessError, match="stage 0 has 2 F for 8 microbatches") as caught:
        check(from_text(text))
    assert caught.value.hint == (
        "add the missing F, set microbatches to 2, or compile a program file again for 8"
    )


def test_product_of_last_term_only_gets_hint() -> None:
    with pytest.raises(CompletenessError, match="stage 0 has 1 F for 8 microbatches") as caught:
        compile(lambda rank, ranks, microbatches: F + microbatches * B, ranks=2, microbatches=8)
    assert caught.value.hint == "`*` applies before `+`: 8 * (F + B), not F + 8 * B"


def test_import_reports_placement_of_swapped_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("b.csv").write_text("1F0,1B0\n0F0,0B0\n")
    assert "placement" not in run_command(capsys, "import", "a.csv", "-o", "a.sched")
    output = run_command(capsys, "import", "b.csv", "-o", "b.sched")
    assert "placement: stages 0 to 1 are on ranks 1,0, because row k" in output


def test_transport_of_other_device_gets_hint() -> None:
    with pytest.raises(UsageError, match="transport 'nccl' is not known") as caught:
        TrainConfig(transport="nccl")
    assert caught.value.hint == (
        "auto or shared_memory or gloo; with device = 'cuda': nccl_per_edge or nccl_grouped"
    )


def test_rank_schedule_is_not_reversible() -> None:
    with pytest.raises(TypeError, match="not reversible"):
        reversed(3 * F)


@pytest.mark.parametrize("text", ["0", "0,1", "0.3,0.4"])
def test_selection_on_command_line_needs_no_quotes(text: str) -> None:
    settings = ["pipeline.ranks=2", f"memory.recompute={text}"]
    assert read_config("mine.toml", settings).memory.recompute == text


@pytest.mark.parametrize(
    "notation",
    ["F0.0", "F 0,0", "F(0, 0)", "F[0][0]", "0F0"],
    ids=["joined", "comma", "call", "index", "torch"],
)
def test_other_notation_of_instruction_gets_hint(notation: str) -> None:
    text = Path("mine.sched").read_text().replace("F 0.0", notation, 1)
    assert notation + "+" in text
    with pytest.raises(ParseError, match="there is no instruction") as caught:
        from_text(text)
    assert caught.value.hint == "did you mean 'F 0.0+'?"


def test_parameter_of_own_schedule_gets_hint_at_compile() -> None:
    def with_lead(rank: int, ranks: int, microbatches: int, lead: int = 2) -> object:
        return microbatches * F

    with pytest.raises(UsageError, match="compile has no option 'lead'") as caught:
        compile(with_lead, ranks=2, microbatches=4, lead=3)  # type: ignore[arg-type, call-arg]
    assert caught.value.hint.endswith("compile(functools.partial(with_lead, lead=...))")


def test_schedule_beside_configuration_gets_hint() -> None:
    Path("other").mkdir()
    Path("other/mine.py").write_text("")
    Path("other/mine.toml").write_text('[pipeline]\nschedule = "mine.py:split"\n')
    with pytest.raises(UsageError, match=r"cannot read mine\.py") as caught:
        read_config("other/mine.toml")
    assert caught.value.hint.endswith('schedule = "other/mine.py:split"')


def test_note_on_warmup_longer_than_run() -> None:
    assert not describe_short_warmup(TrainConfig(steps=2))  # the default of warmup
    assert not describe_short_warmup(TrainConfig(steps=4, warmup=4))
    note = describe_short_warmup(TrainConfig(steps=2, lr=1.0, warmup=8))
    assert note.startswith("train.warmup is 8 steps, but the run has 2")
    assert "rises only to 0.25" in note


@pytest.mark.parametrize("name", ["output.dir", "output.trace", "train.checkpoint_dir"])
def test_file_in_place_of_folder_gets_setting(name: str) -> None:
    with pytest.raises(UsageError, match=r"mine.toml is a file, not a folder") as caught:
        make_directory("mine.toml", name)
    assert caught.value.hint == f"--set {name}=... writes elsewhere"


def test_folder_as_source_gets_pattern() -> None:
    Path("corpus").mkdir()
    with pytest.raises(UsageError, match="cannot read corpus: it is a folder") as caught:
        find_files("corpus")
    assert caught.value.hint == "corpus/* reads its files"
