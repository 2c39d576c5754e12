"""What Prometheus reads can be read, whatever a run is called."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hasten.monitor.run import Run
from hasten.monitor.server import HELP, escaped, exposition
from watched import get, serving, write_run

LINE = re.compile(r'^[a-z_]+\{run="(?:[^"\\\n]|\\["\\n])*"(?:,status="\w[\w ]*")?\} (\S+)$')


def parsed(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            match = LINE.match(line)
            assert match, line
            found[line.partition("{")[0]] = float(match[1])
    return found


def test_every_known_number_of_a_run_is_there(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 20))
    run.look()
    with run.lock:
        standing = run.standing()
    assert set(HELP) <= set(standing)
    found = parsed(exposition([("r", standing)]))
    known = {f"hasten_{name}" for name in HELP if standing[name] is not None}
    assert set(found) == {*known, "hasten_status"}
    assert found["hasten_step"] == 20
    assert found["hasten_tokens_per_second"] == 2000


@given(st.text())
def test_any_name_is_one_label(name: str) -> None:
    label = escaped(name)
    assert re.fullmatch(r'(?:[^"\\\n]|\\["\\n])*', label)
    unescaped = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), label)
    assert unescaped == name


def test_it_is_served_to_those_with_the_token(tmp_path: Path) -> None:
    with serving([write_run(tmp_path / "run", 20)]) as server:
        status, headers, body = get(server.port, "/metrics")
        assert (status, headers["content-type"]) == (
            200,
            "text/plain; version=0.0.4; charset=utf-8",
        )
        assert parsed(body.decode())["hasten_world_size"] == 2
        assert get(server.port, "/metrics", authorization="")[0] == 401


def test_a_name_that_is_not_utf_8_takes_no_other_run_along(tmp_path: Path) -> None:
    write_run(tmp_path / "good", 20)
    write_run(tmp_path / "bad\udcff\n\u202e", 20)
    with serving([tmp_path]) as server:
        status, _, body = get(server.port, "/metrics")
    assert status == 200
    text = body.decode()
    assert 'hasten_step{run="good"} 20.0' in text
    assert 'hasten_step{run="bad\ufffd\\n\u202e"} 20.0' in text
