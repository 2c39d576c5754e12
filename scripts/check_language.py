"""Check names and sentences against the project's language rules (part of ``make lint``).

    python scripts/check_language.py            # new violations and their places
    python scripts/check_language.py --list RULE [FOLDER]   # every place of one rule
    python scripts/check_language.py --shrink   # store today's lower counts as the new limits

Names: vague ones (``VAGUE``) and those that replace them without more meaning (``EMPTY``), for
variables, attributes, arguments, functions, classes and aliases of ``src``; capitals and leading
underscores don't matter. Sentences: docstrings, messages and help texts of ``src``, the pages of
``docs``, README and CONTRIBUTING. Comments of ``src``: a first line without a subject (rule
"subject") or with a pronoun for a noun that the comment doesn't have (rule "pronoun").
``scripts/language_limits.json`` has a limit for each package and rule; a limit only gets lower.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Path(__file__).with_name("language_limits.json")
VAGUE = frozenset(
    (
        *("found", "told", "said", "asked", "known", "given", "own", "place", "held", "whole"),
        *("apart", "settle", "here", "there", "rest", "left", "piece", "kept", "words", "seen"),
        *("beside", "mine"),
    )
)
EMPTY = frozenset(["result", "data", "value", "item", "info", "obj", "tmp", "thing", "current"])
MOST_WORDS = 25  # of a sentence
FEWEST_WORDS = 4  # of a string that is a message
PATTERNS = {
    "start": r"^(What|Whether|Of|Who|Those|As)\b",  # of docstrings alone
    "person": r"\b(says?|said|tells?|told|knows|knew|hears?|heard|asks|owes?|owed|believes?"
    r"|forgets?|sees|stands?|lies)\b",
    "who": r"\b(nobody|somebody|no one|who|whom|whose)\b",
    "inversion": r"(?:^|(?<=[.:] ))(Is|Are|Was|Were|Does|Do|Did|Has|Have|Had|Can|Should)\b[^.?]*,"
    r"[^.?]*(?:\.|$)",
    "idiom": r"\b(in (the|its|their) place|anew|beside|surely|beyond doubt)\b"
    r"|\b(go|goes|went|gone|going) on\b",
}
OPENINGS = {  # of comments
    "subject": re.compile(r"of\b"),
    "pronoun": re.compile(r"([Ii]ts?|[Tt]he(y|ir|m)|[Tt]hose)\b"),
}
EXPRESSIONS = {
    name: re.compile(pattern, re.MULTILINE | (re.IGNORECASE if name in ("who", "idiom") else 0))
    for name, pattern in PATTERNS.items()
}
SENTENCE_END = re.compile(
    r"(?<=[.!?:])\s+(?=[A-Z`*\"'(])|\n\s*\n|\n\s*(?:[-*|#>]|\d+\. )|\n\s+\w[\w, *`]*: "
)
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|\{[^{}]*\}|\]\([^)]*\)|<[^>]*>", re.DOTALL)


class Violation(NamedTuple):
    """One place that breaks a rule."""

    rule: str
    package: str
    place: str
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Check names and sentences.")
    parser.add_argument("--list", nargs="+", metavar=("RULE", "FOLDER"), help="print every place")
    parser.add_argument("--shrink", action="store_true", help="store lower counts as new limits")
    options = parser.parse_args()
    violations = [*of_python(ROOT / "src/hasten"), *of_pages(ROOT / "docs")]
    counts: dict[str, Counter[str]] = {}
    for violation in violations:
        counts.setdefault(violation.package, Counter())[violation.rule] += 1
    if options.list:
        rule, *folder = options.list
        for violation in violations:
            if violation.rule == rule and all(part in violation.place for part in folder):
                print(f"{violation.place}: {violation.text}")
        return 0
    limits: dict[str, dict[str, int]] = json.loads(LIMITS.read_text())
    if options.shrink:
        LIMITS.write_text(json.dumps(lowered(limits, counts), indent=1, sort_keys=True) + "\n")
        return 0
    return report(violations, counts, limits)


def report(
    violations: list[Violation], counts: dict[str, Counter[str]], limits: dict[str, dict[str, int]]
) -> int:
    """Prints packages and rules above their limit, with up to ten places; the exit code."""
    code = 0
    for package, by_rule in sorted(counts.items()):
        for rule, count in sorted(by_rule.items()):
            limit = limits.get(package, {}).get(rule, 0)
            if count <= limit:
                continue
            code = 1
            print(f"{package}: {count} violations of the rule '{rule}', and {limit} are allowed:")
            matching = [v for v in violations if (v.package, v.rule) == (package, rule)]
            for violation in matching[:10]:
                print(f"  {violation.place}: {violation.text}")
    return code


def lowered(
    limits: dict[str, dict[str, int]], counts: dict[str, Counter[str]]
) -> dict[str, dict[str, int]]:
    """New limits: the lower of the old ones and today's counts."""
    lower: dict[str, dict[str, int]] = {}
    for package, by_rule in limits.items():
        counted = counts.get(package, Counter())
        rules = {rule: min(limit, counted[rule]) for rule, limit in by_rule.items()}
        lower[package] = {rule: limit for rule, limit in rules.items() if limit}
    return {package: rules for package, rules in lower.items() if rules}


def of_python(folder: Path) -> Iterator[Violation]:
    """Violations in the names, docstrings and messages of all modules below a folder."""
    for path in sorted(folder.rglob("*.py")):
        package = path.relative_to(folder).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        docstrings = {id(node): node for node in _docstrings(tree)}
        yield from of_comments(path, package)
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            place = f"{path.relative_to(ROOT)}:{line}"
            name = _stored_name(node)
            if name is not None:
                word = name.strip("_").lower()
                rule = "name" if word in VAGUE else "empty" if word in EMPTY else None
                if rule is not None:
                    yield Violation(rule, package, place, name)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text, is_docstring = node.value, id(node) in docstrings
                if is_docstring or len(text.split()) >= FEWEST_WORDS:
                    for rule, excerpt in of_text(text, is_docstring):
                        yield Violation(rule, package, place, excerpt)


def of_comments(path: Path, package: str) -> Iterator[Violation]:
    """Comments of a module that begin without a subject, or with a pronoun."""
    for line, comment in first_lines(path.read_text()):
        for rule, opening in OPENINGS.items():
            if opening.match(comment):
                yield Violation(rule, package, f"{path.relative_to(ROOT)}:{line}", comment)


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each comment; of a block of lines, only the first."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_first = bool(token.line[:column].strip()) or line != last + 1
            last = 0 if token.line[:column].strip() else line
            if is_first:
                yield line, token.string.lstrip("# ")


def of_pages(folder: Path) -> Iterator[Violation]:
    """Violations in English pages: those of a folder, README and CONTRIBUTING."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(folder.rglob("*.md"))]
    for path in pages:
        if path.stem.endswith("zh-CN"):
            continue
        for rule, excerpt in of_text(path.read_text(), docstring=False):
            yield Violation(rule, "docs", str(path.relative_to(ROOT)), excerpt)


def of_text(text: str, docstring: bool) -> Iterator[tuple[str, str]]:
    """(rule, excerpt) for each violation in a text."""
    prose = CODE.sub("x", text)
    if docstring and OPENINGS["pronoun"].match(text):
        yield "pronoun", text.partition("\n")[0]
    for rule, expression in EXPRESSIONS.items():
        if rule == "start" and not docstring:
            continue
        matches = [expression.match(prose)] if rule == "start" else expression.finditer(prose)
        for match in matches:
            if match:
                around = prose[max(match.start() - 40, 0) : match.end() + 40]
                yield rule, " ".join(around.split())
    for sentence in SENTENCE_END.split(prose):
        if sentence and len(sentence.split()) > MOST_WORDS and "|" not in sentence:
            yield "long", " ".join(sentence.split())[:100]


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _stored_name(node: ast.AST) -> str | None:
    """The name that a node gives to something."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.ExceptHandler | ast.MatchAs):
        return node.name
    if isinstance(node, ast.alias):
        return node.asname
    return None


if __name__ == "__main__":
    sys.exit(main())
