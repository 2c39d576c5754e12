"""The text of a chat template: an untrusted program that runs with limits.

Templates come with models. They run in Jinja's immutable sandbox, with the names that
Transformers gives them. The sandbox blocks access to Python's attributes. A text has at
most `CHARS` characters. Time and memory are limited by the process that renders it: see
`renderer`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hasten.errors import InputError

CHARS = 1 << 24


class TooLongError(TemplateError):
    """A template that writes more than `CHARS`."""


class UnrenderedError(Exception):
    """The reason why a valid template can't render some values."""


def render(source: str, location: str, values: Mapping[str, Any]) -> str:
    """Renders a template.

    Raises:
        UnrenderedError: the template refuses the values, or fails on them.
        InputError: the template has a syntax error, or exceeds its limits or permissions.
    """
    try:
        size, pieces = 0, []
        for chunk in _compiled(source).generate(dict(values)):
            size += len(chunk)
            if size > CHARS:
                raise TooLongError(f"writes more than {CHARS:,} characters")
            pieces.append(chunk)
    except MemoryError as error:
        raise InputError(
            f"the tokenizer's chat template takes more memory than it may have on {location}: "
            "correct the template or the example"
        ) from error
    except (SecurityError, TooLongError, TemplateSyntaxError, RecursionError) as error:
        raise InputError(
            f"the tokenizer's chat template fails on {location} ({_error_text(error)}): "
            "correct the template or the example"
        ) from error
    except Exception as error:  # a foreign program: it may raise anything
        raise UnrenderedError(_error_text(error)) from error
    return "".join(pieces)


def _error_text(error: Exception) -> str:
    what = " ".join(str(error).split())[:300]
    if isinstance(error, TemplateError):
        return what
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return f"its line {lines[-1]} fails: {what}" if lines else what


def check_syntax(source: str, location: str) -> None:
    """Raises InputError if a template has a syntax error."""
    try:
        _compiled(source)
    except TemplateSyntaxError as error:
        raise InputError(
            f"{location}:{error.lineno}: {error.message}; correct the template"
        ) from None
    except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        raise InputError(f"{location} can't be compiled: {type(error).__name__}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _Environment().from_string(source)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks answers for other trainers; renders its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with Transformers' names."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.add_extension(_Generation)
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form[:100]),
            "namespace": _Namespace,
        }
        for name in ("cycler", "joiner", "lipsum"):
            self.globals.pop(name)

    def unsafe_undefined(self, owner_object: Any, attribute: str) -> Any:
        # Jinja's own method returns an undefined value, which renders as an empty text.
        raise SecurityError(
            f"{attribute!r} of a {type(owner_object).__name__} is not for templates"
        )


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _public(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, setting: Any) -> None:
        _public(name)
        super().__setitem__(name, setting)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name like {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    setting: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON, as Transformers does: Jinja's own filter escapes for HTML."""
    spaces = min(indent, 8) if isinstance(indent, int) else None
    return json.dumps(
        setting,
        ensure_ascii=ensure_ascii,
        indent=spaces,
        separators=separators,
        sort_keys=sort_keys,
    )
