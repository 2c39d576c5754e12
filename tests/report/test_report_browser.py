"""The page in a real browser: no errors, no sideways scrolling on a telephone, legible colours.

The page forbids itself scripts, so a copy without that rule carries a script that measures and
writes what it found into the document, which Chromium prints (--dump-dom). Chromium's own least
window is wider than a telephone, so the page stands in a frame of 360 pixels.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hasten.report.page import write_report
from report.report_pages import Report, full_report

BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs chromium or google-chrome")

MEASURE = """
addEventListener("load", () => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => [0.2126, 0.7152, 0.0722].reduce((s, w, i) => s + w * linear(c[i] / 255), 0);
  const contrast = (a, b) => {
    const [d, l] = [light(a), light(b)].sort((x, y) => x - y);
    return (l + 0.05) / (d + 0.05);
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length && (c.length < 4 || c[3] > 0)) return c;
    }
    return [255, 255, 255];
  };
  const faint = [], wide = [], width = document.documentElement.clientWidth;
  let texts = 0;
  for (const e of document.querySelectorAll("main *")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || style.visibility === "hidden" || e.closest(".hidden")) continue;
    const head = e.closest("thead");
    if (head && getComputedStyle(head).position === "absolute") continue;
    if (box.right > width + 0.5 || box.left < -0.5) wide.push(`${e.tagName} ${box.right}`);
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["title", "desc"].includes(e.tagName)) continue;
    const drawn = e.closest("svg");
    const ink = rgb(drawn ? style.fill : style.color);
    texts += 1;
    if (contrast(ink, behind(drawn ? drawn.parentElement : e)) < 4.5)
      faint.push(`${e.tagName}.${e.getAttribute("class")}`);
  }
  const found = {texts, faint, wide, scroll: document.documentElement.scrollWidth, width};
  const note = (parent.document || document).createElement("pre");
  note.id = "found";
  note.textContent = JSON.stringify(found);
  parent.document.body.append(note);
});
"""


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The document after loading, and what the console said."""
    profile = page.parent / "profile"
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--allow-file-access-from-files", "--dump-dom"]
    command += ["--enable-logging=stderr", "--disable-dev-shm-usage", "--window-size=1280,2000"]
    command += [*flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if not done.stdout.strip():
        pytest.skip(f"the browser doesn't run here: {done.stderr.strip()[-200:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def measured(report: Report, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    html = write_report(report, folder).read_text(encoding="utf-8")
    bare, rule = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert rule == 1
    (folder / "bare.html").write_text(f"{bare}<script>{MEASURE}</script>", encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f'<!DOCTYPE html><body><iframe src="bare.html" style="border:0;width:{width}px;'
        'height:1500px"></iframe></body>'
    )
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    text, console = browse(frame, *flags)
    assert console == []
    note = re.search(r'<pre id="found">(.*?)</pre>', text, re.S)
    assert note, "the page's measuring script didn't end"
    found: dict[str, Any] = json.loads(unescape(note[1]))
    assert found["width"] == width
    return found


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, True)])
def test_the_page_fits_its_width_and_is_legible(width: int, dark: bool, tmp_path: Path) -> None:
    found = measured(full_report(), tmp_path, width, dark)
    assert found["texts"] > 300
    assert found["faint"] == []
    assert found["wide"] == []
    assert found["scroll"] <= width


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.long)])
def test_names_of_any_length_fit_the_page(width: int, tmp_path: Path) -> None:
    report = full_report()
    for number, variant in enumerate(report["variants"][1:-1]):
        variant["name"] = f"{number}" + "m_" * 60
        variant["verdict"] = "w" * 90
        variant["techniques"] = ["t" * 80]
    report["title"] = "T" * 200
    report["verification"][0] |= {
        "technique": "梯" * 90,
        "fidelity": "F" * 50,
        "measured": "9" * 90,
    }
    report["invariance"][0]["what"] = "I" * 150
    report["claims"][0] |= {"metric": "M" * 90, "measured": "X" * 90}
    report["hardware"] |= {"k" * 90: "v" * 90}
    found = measured(report, tmp_path, width, False)
    assert found["wide"] == []
    assert found["scroll"] <= width


def test_the_page_itself_loads_without_a_word_on_the_console(tmp_path: Path) -> None:
    page = write_report(full_report(), tmp_path)
    text, console = browse(page)
    assert console == []
    assert "What did not pay" in text


def test_the_page_prints(tmp_path: Path) -> None:
    page, paper = write_report(full_report(), tmp_path), tmp_path / "report.pdf"
    browse(page, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    if not paper.exists():
        pytest.skip("this browser prints no PDF beside --dump-dom")
    assert paper.read_bytes().startswith(b"%PDF")
