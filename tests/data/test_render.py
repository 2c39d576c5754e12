"""Rendering: what Transformers renders, and one sentence for a template that runs away."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.data import renderer
from hasten.data import template_sandbox as render_module
from hasten.data.chat_template import encode, encode_all
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import PROMPT_FORMATS, choose_chat_template
from hasten.data.template_sandbox import render
from hasten.data.tokenize import BOS, EOS
from hasten.data.turns import Message
from hasten.errors import InputError

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "<Hi> & 你好"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
USUAL = """\
{% set ns = namespace(found=false) %}{% for m in messages if m.role != 'system' %}
    {% if loop.first or not loop.last %}{{ loop.length ~ '/' ~ loop.index }}{% endif %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
    {% generation %}{{ m['content'].split('</think>')[-1] | trim }}{% endgeneration %}
    {% set ns.found = true %}{{ m | tojson(indent=2) }}{{ [m.role, 'x'] | join('-') }}
    {{ m.content.replace('H', 'J') if m.content.startswith('<') else m.content[::-1] }}
{% endfor %}{% macro f(x, n=2) %}{{ x | upper | indent(n) }}{% endmacro %}{{ f(bos_token) }}
{%- if ns.found and tools is none and not (documents or undefined_name) %}{{ 7 % 2 }}{% endif %}
{{- messages | map(attribute='role') | list | length }}{{ messages[-1].content | string }}
{%- for i in range(3) recursive %}{{ i * 2 + 1 }}{% endfor %}"""


@pytest.mark.parametrize(
    "source", [USUAL, *PROMPT_FORMATS.values()], ids=["usual", *PROMPT_FORMATS]
)
@pytest.mark.parametrize("prompt", [False, True])
def test_the_text_is_the_one_transformers_renders(
    tokenizer: Any, source: str, prompt: bool
) -> None:
    tokenizer.chat_template = source
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt)
    values = {"messages": TURNS, "tools": None, "documents": None, "add_generation_prompt": prompt}
    assert render(source, "a:1", {**tokenizer.special_tokens_map, **values}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ['a'] | join(attribute='__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ namespace({'__class__': 1}) }}",
        "{% for",
    ],
)
def test_a_template_that_reaches_out_or_writes_too_much_ends_in_one_sentence(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_module, "CHARS", 1 << 20)
    with pytest.raises(InputError, match="chat template fails on a:1") as caught:
        render(source, "a:1", {"messages": TURNS})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no\nsystem turn') }}", "fails on it: no system turn"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ messages[1].content + none }}", "can only concatenate"),
    ],
)
def test_a_template_that_fails_on_a_record_costs_that_record(
    tokenizer: Any, source: str, words: str
) -> None:
    rest = PROMPT_FORMATS["deepseek-llm"]
    tokenizer.chat_template = (
        f"{{% if messages[0].content == 'odd' %}}{source}{{% else %}}{rest}{{% endif %}}"
    )
    odd, usual = encode_all(tokenizer, [dialogue("odd", "b"), dialogue("a", "b")], 99)
    assert odd.examples == ()
    assert words in str(odd.reason)
    assert "\n" not in str(odd.reason)
    assert usual.examples


def dialogue(*contents: str) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    turns = tuple(Message(r, c) for r, c in zip(roles, contents, strict=False))
    return Conversation(turns, None, "a:1")


def test_r1_keeps_the_thought_of_the_last_answer_in_the_target(tokenizer: Any) -> None:
    choose_chat_template(tokenizer, "deepseek-r1")
    thought = "<think>\nhm\n</think>\n\n"
    (example,) = encode(tokenizer, dialogue("a", f"{thought}b", "c", f"{thought}d"), 999).examples
    assert tokenizer.decode(example.input_ids) == (
        f"{BOS}<｜User｜>a<｜Assistant｜>\n\nb{EOS}<｜User｜>c<｜Assistant｜>{thought}d{EOS}"
    )
    trained = tokenizer.decode(example.input_ids[example.trained])
    assert trained == f"\n\nb{EOS}hm\n</think>\n\nd{EOS}"  # the prompt has opened the last thought


def test_a_doubled_bos_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ bos_token }}" + PROMPT_FORMATS["deepseek-llm"]
    with pytest.raises(InputError, match="twice: remove it from the chat template"):
        encode(tokenizer, dialogue("a", "b"), 99)


def test_a_recipe_chooses_the_template(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = "own"
    assert choose_chat_template(tokenizer, "auto") == "the tokenizer's own"
    assert tokenizer.chat_template == "own"
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}")
    assert str(path) in choose_chat_template(tokenizer, str(path))
    assert tokenizer.chat_template == "{{ messages }}"
    tokenizer.chat_template = None
    assert "deepseek-llm" in choose_chat_template(tokenizer, "auto")
    assert tokenizer.chat_template == PROMPT_FORMATS["deepseek-llm"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("deepseek-r2", None, "use deepseek-r1"),
        ("none.jinja", None, "No such file"),
        ("a.jinja", b"{% for", "a.jinja:1: "),
        ("a.jinja", b"\n{{ x | nofilter }}", "a.jinja:2: "),
        ("a.jinja", b"\xff", "not UTF-8"),
        ("a.jinja", b"x" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(
    tokenizer: Any, tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=words):
        choose_chat_template(tokenizer, str(tmp_path / name) if ".jinja" in name else name)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A renderer that may take hardly any time and 64 MiB."""
    renderer.stop()
    monkeypatch.setattr(renderer, "SECONDS", 0)
    monkeypatch.setattr(renderer, "MEMORY", 64 << 20)
    yield
    renderer.stop()


_NESTED = (
    "{% set ns = namespace(x=['a']) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{% for i in range(30000) %}{% set x = 'a' * (8000000 + i) %}{% endfor %}",
            "processor time more than the texts explain at a:1",
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(3000) %}"
            "{% set ns.x = ns.x + [i ~ 'a' * 1000000] %}{% endfor %}",
            "more memory than it may have on a:1",
        ),
        (_NESTED + "{{ ns.x | tojson }}", "than"),
        pytest.param(_NESTED + "{{ ns.x ~ '' }}", "than", marks=pytest.mark.long),
        pytest.param(_NESTED + "{{ [ns.x, 1] | string }}", "than", marks=pytest.mark.long),
    ],
    ids=["copies", "kept", "tojson", "joined", "string"],
)
def test_a_template_has_limits_of_time_and_memory_whatever_a_single_text_does(
    tokenizer: Any, limits: None, source: str, said: str
) -> None:
    tokenizer.chat_template = source
    with pytest.raises(InputError, match=said) as caught:
        encode(tokenizer, dialogue("a", "b"), 99)
    assert "\n" not in str(caught.value)
    choose_chat_template(tokenizer, "deepseek-llm")
    assert encode(tokenizer, dialogue("a", "b"), 99).examples, "the next template is rendered"


@pytest.mark.cold  # its PYTHONPATH would have a server of its own
def test_libraries_do_not_count_as_memory_of_a_template(
    limits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's build of torch takes more address space than a template may have."""
    (tmp_path / "large_library.py").write_text(
        "import mmap\nMAPPED = mmap.mmap(-1, 1 << 30)\ndef size(n): return len(bytearray(n))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    size = importlib.import_module("large_library").size
    assert renderer.ask("a:1", 1, size, 1000) == 1000
    with pytest.raises(InputError, match="more than 64 MiB"):
        renderer.ask("a:1", 1, size, 200 << 20)


def test_constants_of_a_template_file_are_computed_within_the_limits(
    tokenizer: Any, limits: None, tmp_path: Path
) -> None:
    source = ("{{ 'a' " + "| replace('a', 'aaaa')" * 11 + "| replace('a', '') }}") * 3000
    (tmp_path / "a.jinja").write_text(source)
    with pytest.raises(InputError, match="processor time"):
        choose_chat_template(tokenizer, str(tmp_path / "a.jinja"))


def test_a_dialogue_of_thousands_of_turns_is_left_out_with_its_reason(tokenizer: Any) -> None:
    choose_chat_template(tokenizer, "deepseek-llm")
    found = encode(tokenizer, dialogue(*"ab" * 4000), 99)
    assert found.reason == "a dialogue of 8,000 turns: split those of over 1,000"


def test_a_forked_process_renders_in_a_process_of_its_own(tokenizer: Any) -> None:
    choose_chat_template(tokenizer, "deepseek-llm")
    expected = encode(tokenizer, dialogue("a", "b"), 99).examples[0].input_ids.tolist()
    child = os.fork()
    if not child:
        same = renderer.ask("a:1", 1, os.getppid) == os.getpid()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert encode(tokenizer, dialogue("a", "b"), 99).examples[0].input_ids.tolist() == expected


def test_a_renderer_that_uses_no_processor_time_is_ended_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer.ask("a start", 0, len, "")  # the process is there
    monkeypatch.setattr(renderer, "WAIT_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"takes over 0 s at a text: correct the template"):
        renderer.ask("a text", 0, time.sleep, 60)
    assert time.monotonic() - began < 10
    monkeypatch.setattr(renderer, "WAIT_SECONDS", 60.0)
    assert renderer.ask("the next text", 0, len, "abc") == 3
