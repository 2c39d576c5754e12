"""The page in a real browser: live, reloaded, at 20,000 steps, by keyboard, on a telephone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from contrast import contrast
from hasten.monitor.server import MonitorServer
from monitor.browser import Browser, browser
from watched import TOKEN, append, serving, step_line, write_run

PAGE = resources.files("hasten.monitor").joinpath("page.html").read_text(encoding="utf-8")
TEXTS = ("ink", "muted", "accent", "good", "warn", "bad")  # colours that text or keys have
RUNS = tuple(f"run{number}" for number in range(8))
STEP = "runs.get(chosen).standing.step"
DRAWN = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))"


def colours(dark: bool) -> dict[str, str]:
    light, night = re.findall(r":root \{(.*?)\n *\}", PAGE, re.DOTALL)
    found = dict(re.findall(r"--(\w[\w-]*): (#\w{6});", light))
    if dark:
        found |= dict(re.findall(r"--(\w[\w-]*): (#\w{6});", night))
    return found


def test_the_contrast_formula_knows_black_and_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_lines_and_edges_have_contrast_aa(dark: bool) -> None:
    found = colours(dark)
    for name in TEXTS:
        assert contrast(found[name], found["page"]) >= 4.5, name
    assert contrast(found["ink"], found["bad-soft"]) >= 4.5
    for name in (*RUNS, "edge"):
        assert contrast(found[name], found["page"]) >= 3, name
    assert len({found[name] for name in RUNS}) == len(RUNS)


def test_the_page_takes_no_text_for_markup_and_nothing_from_elsewhere() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "src="):
        assert word not in PAGE
    assert not re.findall(r"<[^>]+\sstyle=|<[^>]+\son\w+=", PAGE)


@pytest.fixture(scope="module")
def opened_once() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def chromium(opened_once: Browser) -> Iterator[Browser]:
    """The browser, which has nothing to complain of after the test."""
    opened_once.complaints.clear()
    yield opened_once
    assert opened_once.complaints == []


def opened(chromium: Browser, server: MonitorServer, step: int) -> None:
    chromium.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
    chromium.until(f"chosen !== null && {STEP} === {step}")


def shown(chromium: Browser, server: MonitorServer, step: int) -> None:
    opened(chromium, server, step)
    chromium.until("!CHARTS[0].figure.hidden")


def test_new_steps_appear_without_a_reload_and_stay_after_one(
    chromium: Browser, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "live", 20)
    with serving([folder]) as server:
        chromium.size(1280, 900)
        shown(chromium, server, 20)
        assert chromium.value("location.search") == ""  # the token isn't in the history
        append(folder / "metrics.jsonl", *(step_line(step) for step in range(21, 31)))
        chromium.until(f"{STEP} === 30")
        assert chromium.value("column(runs.get('live'), ['steps', 'loss']).x.length") == 30
        chromium.reload()
        chromium.until(f"chosen !== null && {STEP} === 30")
        write_run(tmp_path / "live", 30, finished=True)
        chromium.until("runs.get('live').standing.status === 'done'")


def test_a_page_whose_monitor_goes_away_says_so_and_finds_it_again(
    chromium: Browser, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", 5)
    with serving([folder]) as server:
        shown(chromium, server, 5)
    chromium.until("!document.getElementById('lost').hidden")
    assert chromium.value(STEP) == 5
    chromium.complaints.clear()  # that nobody answers


def test_20_000_steps_are_drawn_from_few_points(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", 20_000)
    with serving([folder]) as server:
        shown(chromium, server, 20_000)
        points = chromium.value("column(runs.get('long'), ['steps', 'loss']).mean.length")
        assert 1000 <= points <= 2048
        append(folder / "metrics.jsonl", step_line(20_001))
        chromium.until(f"{STEP} === 20001")


def test_a_chart_is_read_with_the_arrow_keys(chromium: Browser, tmp_path: Path) -> None:
    with serving([write_run(tmp_path / "run", 20)]) as server:
        shown(chromium, server, 20)
        chromium.value("CHARTS[0].canvas.focus()")
        read = "CHARTS[0].read.textContent"
        for key, step in (("ArrowRight", 20), ("ArrowLeft", 19), ("Home", 1), ("ArrowRight", 2)):
            chromium.press(key)
            chromium.until(f"{read}.endsWith('at step {step}')")
        label = "CHARTS[0].canvas.getAttribute('aria-label')"
        assert "at step 2" in chromium.value(label)


def test_everything_that_can_be_used_is_reached_by_tab_and_has_a_name(
    chromium: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path / "one", 20)
    write_run(tmp_path / "two", 10)
    with serving([tmp_path]) as server:
        chromium.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
        chromium.until("runs.size === 2 && !CHARTS[0].figure.hidden")
        reached = []
        for _ in range(40):
            chromium.press("Tab")
            reached.append(
                chromium.value(
                    "(() => { const e = document.activeElement; return [e.tagName, e.type || '',"
                    " e.getAttribute('aria-label') || (e.labels && e.labels[0] &&"
                    " e.labels[0].textContent.trim()) || e.textContent.trim()] })()"
                )
            )
        kinds = {(tag, kind) for tag, kind, _ in reached}
        assert {("INPUT", "checkbox"), ("INPUT", "radio"), ("SELECT", "select-one")} <= kinds
        assert ("CANVAS", "") in kinds
        assert all(name for tag, _, name in reached if tag != "BODY")
        chromium.value("document.querySelector('input[type=checkbox]').focus()")
        chromium.press(" ")
        chromium.until("[...runs.values()].filter(isDrawn).length === 1")


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (768, False), (360, True), (320, False)])
def test_nothing_is_wider_than_the_screen(
    chromium: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    write_run(tmp_path / "a-run-with-a-name-that-is-far-too-long-for-any-telephone", 20)
    with serving([tmp_path]) as server:
        chromium.size(width, 800)
        chromium.dark(dark)
        shown(chromium, server, 20)
        chromium.value(DRAWN)
        chromium.value(DRAWN)
        assert chromium.value("document.documentElement.scrollWidth") <= width
        background = chromium.value("getComputedStyle(document.body).backgroundColor")
        wanted = colours(dark)["page"]
        assert background == "rgb({}, {}, {})".format(
            *(int(wanted[i : i + 2], 16) for i in (1, 3, 5))
        )


def test_names_and_texts_from_files_are_shown_as_they_are(
    chromium: Browser, tmp_path: Path
) -> None:
    evil = "<img src=x onerror=document.title='evil'>"
    folder = write_run(tmp_path / "<b>run", 5, hardware=evil, currency=evil)
    append(folder / "restarts.jsonl", {"attempt": evil, "cause": evil, "rank": evil, "step": 1})
    with serving([folder]) as server:
        chromium.size(1280, 900)
        shown(chromium, server, 5)
        assert chromium.value("document.querySelector('#runs img, #events img, h2 img')") is None
        assert evil in chromium.value("document.getElementById('events').textContent")
        assert chromium.value("document.title") == "hasten monitor"


def visible_tiles(chromium: Browser) -> list[str]:
    found: list[str] = chromium.value(
        "[...document.querySelectorAll('#tiles > div')].filter((box) => !box.hidden)"
        ".map((box) => box.querySelector('dt').textContent)"
    )
    return found


def test_a_tile_is_there_only_if_the_run_has_its_value(chromium: Browser, tmp_path: Path) -> None:
    line = {"step": 1, "loss": 2.5, "step_seconds": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with serving([tmp_path]) as server:
        opened(chromium, server, 1)
        assert visible_tiles(chromium) == ["Step", "Loss", "Step time", "Time"]
        append(tmp_path / "metrics.jsonl", step_line(2))
        chromium.until(f"{STEP} === 2")
        assert {"MFU", "Tokens/s", "Expert load"} <= set(visible_tiles(chromium))


def test_a_chart_appears_with_its_second_point_and_marks_whole_steps(
    chromium: Browser, tmp_path: Path
) -> None:
    drawn = "CHARTS.filter((c) => !c.figure.hidden).map((c) => c.id)"
    texts = "CanvasRenderingContext2D.prototype"
    with serving([write_run(tmp_path, 1)]) as server:
        opened(chromium, server, 1)
        chromium.until("runs.get(chosen).series.evaluations !== undefined")
        chromium.value(DRAWN)
        assert chromium.value(drawn) == []
        chromium.value(
            f"window.marks = [], {texts}.plain = {texts}.fillText, {texts}.fillText ="
            " function (text, x, y) { if (this.textAlign === 'center') marks.push(text);"
            " this.plain(text, x, y); }, 0"
        )
        append(tmp_path / "metrics.jsonl", step_line(2, loss=1.0))
        chromium.until("marks.length > 0")
        assert "loss" in chromium.value(drawn)
        assert set(chromium.value("marks")) == {"1", "2"}


def test_a_curve_without_change_is_a_line_of_text(chromium: Browser, tmp_path: Path) -> None:
    with serving([write_run(tmp_path, 20)]) as server:
        shown(chromium, server, 20)
        chromium.value(DRAWN)
        drawn = chromium.value("CHARTS.filter((c) => !c.figure.hidden).map((c) => c.id)")
        assert drawn == ["loss"]
        assert "Padding 10 %" in chromium.value("document.getElementById('constant').textContent")
        append(tmp_path / "metrics.jsonl", step_line(21, padding_share=0.2))
        chromium.until("!CHARTS.find((c) => c.id === 'padding').figure.hidden")


def test_only_runs_of_the_same_model_and_data_are_drawn_until_their_box_is_ticked(
    chromium: Browser, tmp_path: Path
) -> None:
    for name, data in (("one", "a.json"), ("same", "a.json"), ("other", "b.json")):
        write_run(tmp_path / name, 20, model="tiny", dataset=data)
    drawn = "[...runs.values()].filter(isDrawn).map((run) => run.name).sort().join()"
    with serving([tmp_path]) as server:
        shown(chromium, server, 20)
        chromium.until("runs.size === 3")
        chromium.value("choose('one')")
        assert chromium.value(drawn) == "one,same"
        chromium.value("choose('other')")
        assert chromium.value(drawn) == "other"
        chromium.value(DRAWN)
        chromium.value("runs.get('one').row.box.click()")
        assert chromium.value(drawn) == "one,other"


def test_smoothing_is_the_mean_of_the_points_around_and_keeps_gaps(chromium: Browser) -> None:
    values = chromium.value("smoothed([1, 2, 9, null, 3], 3)")
    assert values == [1.5, 4, 5.5, None, 3]


def test_the_button_stops_the_selected_run_at_its_second_click(
    chromium: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path / "one", 5)
    write_run(tmp_path / "two", 5)
    text = "document.getElementById('stop').textContent"
    with serving([tmp_path]) as server:
        shown(chromium, server, 5)
        chromium.until("runs.size === 2")
        chromium.value("choose('two')")
        chromium.value("document.getElementById('stop').click()")
        assert chromium.value(text).startswith("Click again")
        assert not (tmp_path / "two" / "stop").exists()
        chromium.value("document.getElementById('stop').click()")
        chromium.until(f"{text} === 'Stop requested'")
        assert (tmp_path / "two" / "stop").is_file()
        assert not (tmp_path / "one" / "stop").exists()
        write_run(tmp_path / "two", 5, finished=True)
        chromium.until("document.getElementById('stop').hidden")


def test_texts_of_the_model_and_the_reason_of_a_slowdown_are_shown(
    chromium: Browser, tmp_path: Path
) -> None:
    folder = write_run(tmp_path, 100)
    for step in (50, 100):
        line = {"step": step, "prompt": "def f(x):", "answer": f"\treturn {step}<b>"}
        append(folder / "samples.jsonl", line)
    slower = (step_line(s, tokens_per_second=500.0, data_seconds=0.4) for s in range(101, 121))
    append(folder / "metrics.jsonl", *slower)
    with serving([folder]) as server:
        opened(chromium, server, 120)
        texts = chromium.value(
            "[...document.querySelectorAll('#samples p')].map((p) => p.innerText)"
        )
        assert texts == ["\treturn 100<b>", "\treturn 50<b>"]  # the newest first
        reason = chromium.value("document.getElementById('slow').textContent")
        assert "75% fewer tokens/s than usual: waiting for data takes 80% of a step" in reason


def test_a_report_is_one_click_away_and_runs_no_script(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path, 5)
    page = "<title>a report</title><script>document.title = 'evil'</script>"
    (folder / "report.html").write_text(page)
    with serving([folder]) as server:
        shown(chromium, server, 5)
        chromium.until("!document.getElementById('report').hidden")
        chromium.open(chromium.value("document.getElementById('report').href"))
        chromium.until("document.title === 'a report'")
    (blocked,) = chromium.complaints
    assert "Blocked script execution" in blocked
    chromium.complaints.clear()
