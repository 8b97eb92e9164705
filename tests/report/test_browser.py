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


def load(page: Path, *options: str) -> tuple[str, str]:
    """The page as the browser sees it in the end, and what its console said."""
    command = [
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--allow-file-access-from-files", "--virtual-time-budget=5000"),
        *("--enable-logging=stderr", "--window-size=1280,1000", *options, page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


@pytest.fixture
def page(tiny_run: Path, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(html_report([attacked(read_run(tiny_run))]), encoding="utf-8")
    return path


def test_errors_would_be_seen(tmp_path: Path) -> None:
    """Or an empty console would prove nothing."""
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('found'); unknown()</script>", encoding="utf-8")
    _, console = load(page)
    assert "found" in console
    assert "unknown is not defined" in console


_CONTRAST = """<!doctype html><title>frame</title>
<iframe id="frame" src="{page}" style="width: 800px; height: 800px"></iframe>
<pre id="measured"></pre>
<script>
const brightness = (colour) =>
  colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0);
document.getElementById("frame").onload = (event) => {{
  const page = event.target.contentDocument, view = event.target.contentWindow;
  const body = view.getComputedStyle(page.body);
  const label = view.getComputedStyle(page.querySelector("figure svg text"));
  document.getElementById("measured").textContent = JSON.stringify({{
    page: brightness(body.backgroundColor),
    text: brightness(body.color),
    label: brightness(label.fill),
  }});
}};
</script>
"""


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_and_charts_stand_out(page: Path, tmp_path: Path, is_dark: bool) -> None:
    """In light and dark alike; brightness is the sum of red, green and blue, up to 765."""
    frame = tmp_path / "frame.html"
    frame.write_text(_CONTRAST.format(page=page.name), encoding="utf-8")
    dark = "--blink-settings=preferredColorScheme=0" if is_dark else "--window-position=0,0"
    seen, _ = load(frame, dark)
    (measured,) = re.findall(r'<pre id="measured">(.*?)</pre>', seen)
    found = json.loads(measured)
    assert (found["page"] < 200) == is_dark
    for text in (found["text"], found["label"]):
        assert abs(text - found["page"]) > 400


def test_sections_and_console(page: Path) -> None:
    seen, console = load(page)
    assert console == ""
    for section in (*SECTIONS, "repeats"):
        assert f'id="run-1-{section}"' in seen
    assert seen.count("<svg") == 12
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
