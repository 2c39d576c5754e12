"""The text of a chat template: an untrusted program that runs with limits.

Templates come with models. They run in Jinja's immutable sandbox, with the names that
Transformers gives them. The sandbox blocks access to Python's attributes. This module
also limits:

  - steps: each turn of a loop, item of a range and call is one; a text has `STEPS` of
    them
  - sizes: a result has at most `CHARS` characters if it is written, joined, added,
    multiplied or returned by a method. Methods and filters that pad to a width of the
    template's choice aren't available

Loops are counted by wrapping their iterables while the template is parsed. The total
time and memory of a text are limited by the process that renders it: see `renderer`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hasten.errors import InputError

STEPS = 200_000
CHARS = 1 << 24
_PADDING_METHODS = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate")
)
_PADDING_FILTERS = ("center", "format", "batch", "slice", "wordwrap", "urlize", "pprint")


class RunawayError(TemplateError):
    """A template that exceeds the limits of this module."""


class UnrenderedError(Exception):
    """The reason why a valid template can't render some values."""


def render(source: str, location: str, values: Mapping[str, Any]) -> str:
    """Renders a template.

    Raises:
        UnrenderedError: the template refuses the values, or fails on them.
        InputError: the template has a syntax error, or exceeds its limits or permissions.
    """
    try:
        environment, template = _compiled(source)
        environment.remaining_steps = STEPS
        size, pieces = 0, []
        for chunk in template.generate(dict(values)):
            size += len(chunk)
            if size > CHARS:
                raise RunawayError(f"writes more than {CHARS:,} characters")
            pieces.append(chunk)
    except MemoryError as error:
        raise InputError(
            f"the tokenizer's chat template takes more memory than it may have on {location}: "
            "correct the template or the example"
        ) from error
    except (SecurityError, RunawayError, TemplateSyntaxError, RecursionError) as error:
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
def _compiled(source: str) -> tuple[_Environment, Any]:
    environment = _Environment()
    return environment, environment.from_string(source)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks answers for other trainers; renders its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with Transformers' names and the bounds of this module."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.add_extension(_Generation)
        self.remaining_steps = STEPS
        for name in _PADDING_FILTERS:
            self.filters.pop(name)
        self.filters |= {"tojson": _tojson, "_counted": self._counted, "_joined": self._joined}
        self.filters |= {"indent": _indent, "join": self._join, "replace": self._replace}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form[:100]),
            "namespace": _Namespace,
        }
        for name in ("cycler", "joiner", "lipsum"):
            self.globals.pop(name)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        for text in list(tree.find_all(nodes.Concat)):
            items = nodes.List(list(text.nodes), lineno=text.lineno)
            text.nodes = [nodes.Filter(items, "_joined", [], [], None, None, lineno=text.lineno)]
        tree.set_environment(self)
        return tree

    def spend(self, steps: int) -> None:
        self.remaining_steps -= steps
        if self.remaining_steps < 0:
            raise RunawayError(f"takes more than {STEPS:,} steps")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for part in items:
            self.spend(1)
            yield part

    def _joined(self, parts: list[Any]) -> str:
        return self._join(parts)

    def _join(self, parts: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            raise SecurityError("join takes no attribute here")
        texts = [str(part) for part in self._counted(parts)]
        self._fits(sum(map(len, texts)) + len(str(d)) * len(texts))
        return str(d).join(texts)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        full_text = str(text)
        self._fits(len(full_text) + full_text.count(str(old)) * len(str(new)))
        return full_text.replace(str(old), str(new), -1 if count is None else count)

    def _fits(self, size: int) -> None:
        if size > CHARS:
            raise RunawayError(f"makes a text or list of more than {CHARS:,}")

    def call(self, context: Any, owner_object: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(1)
        owner, name = getattr(owner_object, "__self__", None), getattr(owner_object, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING_METHODS:
                raise SecurityError(f"the method {name} of texts is not allowed")
            if name == "replace":
                return self._replace(owner, *args)
            if name == "join":
                return self._join(args[0] if args else (), owner)
        returned = super().call(context, owner_object, *args, **kwargs)
        if isinstance(returned, range):
            self.spend(len(returned))
        return returned

    def unsafe_undefined(self, owner_object: Any, attribute: str) -> Any:
        # Jinja's own method returns an undefined value, which renders as an empty text.
        raise SecurityError(
            f"{attribute!r} of a {type(owner_object).__name__} is not for templates"
        )

    def call_binop(self, context: Any, operator: str, left_value: Any, right_value: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left_value, str)):
            raise SecurityError(f"the operator {operator} is not allowed on these")
        sizes = [
            len(part) for part in (left_value, right_value) if isinstance(part, (str, list, tuple))
        ]
        numbers = [part for part in (left_value, right_value) if isinstance(part, int)]
        if operator == "*" and sizes and numbers:
            self._fits(sizes[0] * max(numbers))
        elif operator == "*" and any(abs(number) > 1 << 64 for number in numbers):
            raise RunawayError("multiplies numbers beyond 64 bits")
        elif len(sizes) == 2:
            self._fits(sum(sizes))
        return super().call_binop(context, operator, left_value, right_value)


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


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > 80:
        raise SecurityError("indent takes at most 80")
    plain = Environment().filters["indent"]
    return str(plain(text, width, first, blank))
