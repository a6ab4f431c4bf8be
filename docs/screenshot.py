"""Take the screenshot docs/images/page.png of the gallery: `python docs/screenshot.py`.

The script needs Chromium.  It opens the output of
`schedir draw one_f_one_b --ranks 6 --microbatches 12 --costs F=1,B=2,send=0.2 -o x.html`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from schedir.__main__ import main  # noqa: E402
from tests.browser.chromium import Chromium, found  # noqa: E402

DRAW_COMMAND = "draw one_f_one_b --ranks 6 --microbatches 12 --costs F=1,B=2,send=0.2 -o"
SEARCH_TEXT = "B 4.6"

if __name__ == "__main__":
    path = found()
    if path is None:
        sys.exit("needs Chromium")
    with TemporaryDirectory() as folder, Chromium(path, 1280, 700, ratio=1.5) as browser:
        page = Path(folder, "x.html")
        main([*DRAW_COMMAND.split(), str(page)])
        browser.open(page)
        browser.key("/")
        browser.type(SEARCH_TEXT)
        browser.key("Enter")
        browser.js("document.getElementById('find').value = ''")
        browser.js("document.activeElement.blur()")
        browser.frame()
        (ROOT / "docs" / "images" / "page.png").write_bytes(browser.picture())
