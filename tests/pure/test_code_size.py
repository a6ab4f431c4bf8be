"""The product and the page generators stay within a budget of lines of code, by folder.

`python -m tests.lines_of_code` prints the lines.  Raise a budget only with a reason in the commit,
and lower it when code is deleted.  The whole product is to have 41,500 lines at most.
"""

from tests.lines_of_code import PRODUCT, lines_by_folder
from tests.pure.test_layout import ROOT

BUDGET = {
    "docs": 1_430,
    "kernels": 480,
    "schedir": 1_180,
    "schedir/analysis": 1_990,
    "schedir/checkpoints": 2_150,
    "schedir/commands": 5_860,
    "schedir/compiler": 550,
    "schedir/data": 470,
    "schedir/hang_diagnosis": 2_220,
    "schedir/instrumentation": 560,
    "schedir/io": 2_090,
    "schedir/ir": 4_910,
    "schedir/megatron": 1_180,
    "schedir/models": 1_240,
    "schedir/passes": 2_800,
    "schedir/planner": 5_130,
    "schedir/predict": 1_590,
    "schedir/runtime": 10_210,
    "schedir/schedule_search": 2_980,
    "schedir/schedules": 850,
    "schedir/tensor_parallel": 340,
    "schedir/testing": 1_010,
    "schedir/torch_pipelining": 1_910,
    "schedir/traces": 960,
    "schedir/training": 3_970,
    "schedir/transports": 2_040,
    "schedir/verify": 1_280,
    "viz": 2_590,
}


def test_folders_and_product_are_within_budget() -> None:
    lines = lines_by_folder(ROOT, (*PRODUCT, "docs"))
    assert {*lines} == {*BUDGET}
    too_long = {folder: count for folder, count in lines.items() if count > BUDGET[folder]}
    assert not too_long, f"lines of code of each folder above its budget: {too_long}"
    # A budget far above the number of lines would hide later growth.
    assert sum(BUDGET.values()) <= 1.01 * lines.total()
