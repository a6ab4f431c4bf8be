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


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        ("mine.sched", "a program", "schedir check mine.sched"),
        ("mine.timeline", "a run", "schedir explain mine.timeline"),
        ("mine.toml", "a configuration", "schedir train mine.toml"),
    ],
)
def test_import_refuses_files_of_schedir(
    capsys: pytest.CaptureFixture[str], name: str, kind: str, command: str
) -> None:
    error = run_refused_command(capsys, "import", name, "-o", "x.sched")
    assert f"{name} is {kind} of schedir, and needs no import" in error
    assert f"hint: {command}" in error


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("recomputation=all", "-O recompute"),
        ("activation_checkpointing", "-O recompute"),
        ("cpu_offload", "-O offload"),
        ("zero_stage=2", "-O zero"),
        ("max_grad_norm=1", "-O clip_grad_norm"),
        ("num_microbatches=8", "--microbatches"),
        ("tensor_parallel=2", "-O tp"),
        ("tensor_model_parallel=2", "-O tp"),
        ("data_parallel=2", "-O dp"),
        ("pipeline_parallel=2", "--ranks"),
        ("expert_model_parallel_size=2", "-O ep"),
        ("fsdp", "-O zero"),
    ],
)
def test_option_names_of_other_projects_get_hint(
    capsys: pytest.CaptureFixture[str], name: str, expected: str
) -> None:
    error = run_refused_command(capsys, "check", "gpipe", "-O", name)
    assert f"hint: did you mean {expected}?\n" in error + "\n"


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


def test_closed_form_plan_with_offload_gets_hint(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--cluster", "a100", "--gpus", "8", "--batch", "8", "--closed-form-only", "--offload")
    error = run_refused_command(capsys, "plan", "--model", "llama-7b", *argv)
    assert error.rstrip().endswith("hint: leave out --closed-form-only")


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


@pytest.mark.parametrize("command", ["compare", "draw"])
def test_all_wrong_names_are_reported(capsys: pytest.CaptureFixture[str], command: str) -> None:
    error = run_refused_command(capsys, command, "gpipe", "1f1b", "zb-h1", "mine.sched")
    assert "there are no built-in schedules '1f1b', 'zb-h1'" in error
    assert "hint: 1f1b: did you mean 'one_f_one_b'?; zb-h1: did you mean 'zb_h1'?" in error


def test_setting_without_set_option_gets_hint(capsys: pytest.CaptureFixture[str]) -> None:
    error = run_refused_command(capsys, "train", "mine.toml", "train.steps=3")
    assert "hint: --set train.steps=3" in error


@pytest.mark.parametrize("text", ["0", "0,1", "0.3,0.4"])
def test_selection_on_command_line_needs_no_quotes(text: str) -> None:
    settings = ["pipeline.ranks=2", f"memory.recompute={text}"]
    assert read_config("mine.toml", settings).memory.recompute == text


def test_style_option_of_text_chart_gets_hint(capsys: pytest.CaptureFixture[str]) -> None:
    error = run_refused_command(capsys, "draw", "gpipe", "--time-range", "0:5")
    assert "--time-range applies to Gantt charts, not to a text chart" in error
    assert "hint: -o FILE.svg draws a Gantt chart" in error


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_max_activations_of_zero_or_less_is_refused(
    capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    error = run_refused_command(capsys, "recommend", "--max-activations", limit)
    assert f"--max-activations: must be more than 0, not '{limit}'" in error


def test_placement_error_lists_stages_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    error = run_refused_command(capsys, "check", "zb_v", "--ranks", "2", "--placement", "loop")
    assert "hint: in placement 'vee', rank 0 has the stages [0, 3]" in error


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


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("train.resume=true", 'resume = "auto" or resume = "must" or resume = "no"'),
        ("train.on_nonfinite=false", 'on_nonfinite = "stop" or on_nonfinite = "skip"'),
        ("train.device=0", 'device = "cpu" or device = "cuda"'),
        ("data.packing=true", 'packing = "concatenate" or packing = "best_fit"'),
        ("memory.recompute_at=0", "recompute_at must be early or late"),
        ("memory.optimizer_placement=true", "must be 'device', 'host', 'disk' or 'cpu_step'"),
        ("train.checkpoint_dir=true", 'checkpoint_dir = "FOLDER", or leave it out'),
    ],
)
def test_setting_that_is_not_a_string_gets_values(setting: str, hint: str) -> None:
    with pytest.raises(UsageError, match="must be a string, not") as caught:
        read_config("mine.toml", [setting])
    assert hint in caught.value.hint


def test_parameter_of_own_schedule_gets_hint_at_compile() -> None:
    def with_lead(rank: int, ranks: int, microbatches: int, lead: int = 2) -> object:
        return microbatches * F

    with pytest.raises(UsageError, match="compile has no option 'lead'") as caught:
        compile(with_lead, ranks=2, microbatches=4, lead=3)  # type: ignore[arg-type, call-arg]
    assert caught.value.hint.endswith("compile(functools.partial(with_lead, lead=...))")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("draw gpipe -o none/x.svg", "there is no folder none\n  hint: mkdir -p none"),
        ("compile gpipe -o none/x.sched", "there is no folder none\n  hint: mkdir -p none"),
        ("search gpipe --ranks 2", "hint: --initial-schedules gpipe also searches"),
        ("search --time-limit 5m", "must be a number of seconds, such as 60, not '5m'"),
        ("simulate gpipe --sizes saved=-1GB", "a number of bytes of at least 0, or one per stage"),
        ("compile gpipe", "needs -o FILE.sched\n  hint: -o FILE.sched: write the program"),
        ("compile", "needs SCHEDULE, -o FILE.sched\n  hint: see schedir compile --help"),
        ("export zb_v -o x.csv", "needs --to FORMAT\n  hint: --to FORMAT: torch (compute only"),
        ("check gpipe -O context_parallel=2", "hint: schedir options lists all options"),
        ("check gpipe --tensor-parallel 2", "hint: did you mean -O tp=N?"),
        ("simulate gpipe --costs forward=1,backward=2", "hint: did you mean 'F'?"),
        ("simulate gpipe --costs F=1,p2p=0.1", "hint: did you mean 'send'?"),
        ("simulate gpipe --costs F=1;B=2", "between two costs: F=1,B=2\n"),
        ("simulate gpipe --costs F=1:B=2,W=1", "between two costs: F=1,B=2\n"),
        ("check gpipe --sizes saved=1.5GB;grads=2GB", "two sizes: saved=1.5GB,grads=2GB\n"),
        ("search --max-in-flight 4,4", "hint: --max-in-flight 4:4 has one number per rank"),
        ("check gpipe --placement 0 1", "hint: if '1' belongs to a list, write the list with"),
        ("plan --gpu-counts 8 16", "hint: if '16' belongs to a list, write the list with commas"),
        ("plan --expert-parallel 4", "hint: did you mean --ep?"),
        ("train mine.toml --set pipeline.tensor_parallel=2", "did you mean pipeline.tp?"),
        ("train mine.toml --set output.dir=", "output.dir has no value after ="),
        ("simulate gpipe --costs-from mine.timeline", 'hint: --costs "$(schedir calibrate RUN'),
        (
            "train mine.toml --set pipeline.schedule=mine.sched --set pipeline.ranks=4",
            "mine.sched has ranks 2, not 4\n  hint: leave out ranks, or compile the schedule again",
        ),
    ],
)
def test_wrong_command_names_the_correction(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert message in run_refused_command(capsys, *command.split())


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


@pytest.mark.parametrize(
    ("words", "fact", "hint"),
    [
        ("simulate gpipe -ranks 4", "has no option -ranks", "did you mean --ranks?"),
        ("simulate gpipe --costs F:1,B:2", "no cost 'F:1'", "write NAME=VALUE with commas"),
        ("simulate gpipe --costs @costs.json", "no cost '{\"F\":1'", "write NAME=VALUE with"),
        ("draw mine.timeline.gz", "is not a built-in schedule", "gunzip mine.timeline.gz"),
        ("train cluster.toml", "line 1, column 1: no section 'nodes'", "give it to --cluster"),
        ("check gpipe --config cluster.toml", "no section 'nodes'", "give it to --cluster"),
        (
            "plan --model cluster.toml --cluster a100 --gpus 8 --batch 8",
            "a model has no field 'nodes'",
            "the file is a cluster: give it to --cluster",
        ),
        (
            "plan --model gpt-22b --cluster mine.toml --batch 8",
            "a cluster has no field 'pipeline'",
            "the file is a configuration: give it to schedir train",
        ),
        (
            "check interleaved --ranks 2 --placement 0,1/2,3",
            "puts stage 0 on rank 2",
            "placement lists the rank of each stage",
        ),
        ("import one.csv -o x.sched", "no row has stage 0", "stages are numbered from 0"),
        ("studio --export mine.toml", "mine.toml is a file, not a folder", ""),
        ("studio --export mine.toml/x", "mine.toml is a file, not a folder", ""),
    ],
)
def test_hint_of_command(
    capsys: pytest.CaptureFixture[str], words: str, fact: str, hint: str
) -> None:
    Path("costs.json").write_text('{"F": 1, "B": 2}')
    Path("cluster.toml").write_text("nodes = 2\ngpus_per_node = 8\n")
    Path("one.csv").write_text("1F0,1B0\n2F0,2B0\n")
    error = run_refused_command(capsys, *words.split())
    assert fact in error and hint in error


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
