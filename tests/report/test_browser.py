"""The report in a real browser: every section, no console error, nothing cut off on a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import ATTACK, SECTIONS, attacked

from residual_ebm.report.page import html_report, read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# Reads the page in a frame of a given width and writes down what it measures there.
_FRAME = """<!doctype html><title>frame</title>
<iframe id="frame" src="{page}" style="width: {width}px; height: 800px; border: 0"></iframe>
<pre id="measured"></pre>
<script>
document.getElementById("frame").onload = (event) => {{
  const page = event.target.contentDocument;
  const beyond = [...page.querySelectorAll("body *")]
    .filter((one) => !one.closest(".scroll") && !one.closest("pre") && !one.closest("svg"))
    .filter((one) => one.getBoundingClientRect().right > {width} + 1)
    .map((one) => one.tagName);
  document.getElementById("measured").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, beyond: beyond,
  }});
}};
</script>
"""


def load(page: Path) -> tuple[str, str]:
    """The page as the browser sees it in the end, and what its console said."""
    command = [
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--allow-file-access-from-files", "--virtual-time-budget=5000"),
        *("--enable-logging=stderr", "--window-size=1280,1000", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


@pytest.fixture
def page(tiny_run: Path, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(html_report([attacked(read_run(tiny_run))]), encoding="utf-8")
    return path


def test_sections_and_console(page: Path) -> None:
    seen, console = load(page)
    assert console == ""
    for section in (*SECTIONS, "repeats"):
        assert f'id="run-1-{section}"' in seen
    assert seen.count("<svg") == 11
    assert "<script" not in seen
    assert ATTACK.split()[0].replace("<", "&lt;").replace(">", "&gt;") in seen


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_off(page: Path, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(page=page.name, width=width), encoding="utf-8")
    seen, _ = load(frame)
    (measured,) = re.findall(r'<pre id="measured">(.*?)</pre>', seen)
    found = json.loads(measured)
    assert found["width"] <= width
    assert found["beyond"] == []
