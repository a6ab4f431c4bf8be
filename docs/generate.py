"""Write all generated pages and pictures: `python docs/generate.py`.

A test compares the committed pages with the output of this script.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # pages import each other as `docs.NAME`

from docs import (  # noqa: E402
    api_page,
    command_line_page,
    config_page,
    design_map,
    errors_page,
    experts_page,
    file_formats_page,
    gallery_page,
    ir_page,
    museum_page,
    planner_page,
    schedules_page,
    which_schedule_page,
    windows_page,
)
from docs.pages import define_page  # noqa: E402

PAGES = {
    **ir_page.PAGES,
    **config_page.PAGES,
    **command_line_page.PAGES,
    **errors_page.PAGES,
    **file_formats_page.PAGES,
    **design_map.PAGES,
    **api_page.PAGES,
    **museum_page.PAGES,
    **planner_page.PAGES,
    **define_page("how-to/offload-to-the-host"),
    **define_page("how-to/split-a-stage-into-segments"),
    **experts_page.PAGES,
    **windows_page.PAGES,
    **which_schedule_page.PAGES,
    **schedules_page.PAGES,
    **gallery_page.PAGES,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(make())
        print(f"wrote docs/{name}")
