"""What is asked of the encyclopedia: facts that stand in its documents in a form that has one answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

QUESTIONS = {
    "capital": "What is the capital of {}?",
    "code": "What is the internet country code of {}?",
    "peak": "What is the highest point of {}?",
    "height": "How high is the highest point of {}, in metres?",
    "area": "What is the total area of {}, in sq km?",
    "coast": "How long is the coastline of {}, in km?",
    "year": "In which year did {} become independent?",
    "people": "What was the population of {} in July 2015?",
    "age": "What is the median age in {}, in years?",
    "life": "What is the life expectancy at birth in {}, in years?",
    "adjective": "What is the adjective of nationality for {}?",
    "name": "What is the long form of the name of {}?",
    "airports": "How many airports did {} have in 2013?",
    "version": "In which version of Python was the function {} added?",
}
CLUES = {
    "capital": "the country whose capital is {}",
    "code": "the country whose internet country code is {}",
    "peak": "the country whose highest point is {}",
}
"""How to speak of a country without its name."""
_WORDS = r"[^\W\d_][^;,()0-9]{1,40}?"
_FIELDS = {
    "capital": (("Government", "Capital", "name"), rf"({_WORDS})"),
    "code": (("Communications", "Internet country code"), r"(\.[a-z]{2})"),
    "peak": (("Geography", "Elevation extremes", "highest point"), rf"(?!unnamed)({_WORDS}) -?[\d,]+ m"),
    "height": (("Geography", "Elevation extremes", "highest point"), rf"{_WORDS} ([\d,]+) m"),
    "area": (("Geography", "Area", "total"), r"([\d,]+) sq km"),
    "coast": (("Geography", "Coastline"), r"([\d,]+) km"),
    "year": (("Government", "Independence"), r"\d+ \w+ (\d{4}) \(from .*"),
    "people": (("People and Society", "Population"), r"([\d,]+) \(July 2015 est\.\)"),
    "age": (("People and Society", "Median age", "total"), r"([\d.]+) years"),
    "life": (("People and Society", "Life expectancy at birth", "total population"), r"([\d.]+) years"),
    "adjective": (("People and Society", "Nationality", "adjective"), rf"({_WORDS})"),
    "name": (("Government", "Country name", "conventional long form"), rf"({_WORDS})"),
    "airports": (("Transportation", "Airports"), r"([\d,]+) \(2013\)"),
}
"""Where in a country's profile a fact stands, and the whole text of that field with the answer as its group."""
_NO_CLUE = {("height", "peak")}
"""Questions that a clue would answer by half."""
_FUNCTION = re.compile(r"^\.\. function:: ([\w.]+)\(.*\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
_ADDED = re.compile(r"^   \.\. versionadded:: (\d\.\d*[1-9])\n(?! {4})", re.MULTILINE)


class Fact(NamedTuple):
    """A question's `attribute` and `subject`, its answer, and where that stands: at the end of a text of a document."""

    attribute: str
    subject: str
    value: str
    document: int
    evidence: str


def search_words(attribute: str) -> str:
    """What a document calls it."""
    return " ".join(_FIELDS[attribute][0]) if attribute in _FIELDS else "function versionadded"


def is_clue(attribute: str, asked: str) -> bool:
    """Whether the one may stand for a country of which the other is asked."""
    return attribute in CLUES and attribute != asked and (asked, attribute) not in _NO_CLUE


def of_country(name: str, profile: dict[str, Any], documents: dict[str, int]) -> Iterator[Fact]:
    """The facts of a profile of the World Factbook, whose sections are these documents."""
    for attribute, (path, pattern) in _FIELDS.items():
        text: Any = profile
        for key in (*path, "text"):
            text = text.get(key, {}) if isinstance(text, dict) else {}
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if found and len(found[1]) > 1 and found[1].casefold() not in ("none", "na", name.casefold()):
            yield Fact(attribute, name, found[1], documents[path[0]], text)


def of_module(module: str, section: str, document: int) -> Iterator[Fact]:
    """The functions that a section of Python's manual describes and says since when there are."""
    for function in _FUNCTION.finditer(section):
        added = [*_ADDED.finditer(section, *function.span(2))]
        if len(added) == 1 and added[0][1] != "3.1":  # which is easily taken for 3.10
            name = function[1] if function[1].startswith(f"{module}.") else f"{module}.{function[1]}"
            evidence = section[function.start() : added[0].end(1)]
            yield Fact("version", f"{name}()", added[0][1], document, evidence)
