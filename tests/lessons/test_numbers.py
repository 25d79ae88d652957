"""The numbers that pages quote are what the code says, and it says the same each time."""

from __future__ import annotations

import functools
import json

import pytest

from lab import cli, recorded
from support import documents, modules
from support.documents import LESSONS, PAGES


@pytest.mark.parametrize("lesson", [path.stem for path in LESSONS])
def test_facts_and_simulation_are_json(lesson):
    module = cli.numbers(lesson)
    for make in (module.facts, lambda: module.simulate(module.WIDGET_DEFAULT)):
        first, second = json.dumps(make(), sort_keys=True), json.dumps(make(), sort_keys=True)
        assert first == second
    assert module.describe(module.simulate(module.WIDGET_DEFAULT)).strip()


@functools.cache
def facts(source: str) -> dict:
    """Of a lesson's page, or of a file of the lab by its dotted name."""
    return (modules.load(source) if "." in source else cli.numbers(source)).facts()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_numbers(page):
    wrong = []
    for quote in documents.quotes(page):
        source = facts(quote.lesson) if quote.source == "fact" else recorded.results(quote.lesson, quote.source)
        try:
            value = documents.lookup(source, quote.path)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            wrong.append(f"{quote}: no such value ({error!r})")
            continue
        if not quote.agrees_with(value):
            wrong.append(f"{quote}: the code says {value}")
    assert not wrong, "\n".join(wrong)
