"""Every recipe of docs/CLIENT.md runs, in order, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

from brokers import Broker
from proving import proves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "CLIENT.md"
RECIPE = re.compile(r"^## (?P<title>[^\n]+)\n```python\n(?P<code>.*?)```\n```text\n(?P<shown>.*?)```$", re.M | re.S)
ADDRESS = "127.0.0.1:9092"


def run(code: str, title: str, broker: Broker) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code.replace(ADDRESS, broker.bootstrap), f"recipe: {title}", "exec"), {"__name__": "__main__"})
    return said.getvalue()


@proves("R6", "R8", "J8")
def test_every_recipe_prints_what_the_page_says(fresh_broker: Callable[..., Broker]) -> None:
    text = PAGE.read_text()
    recipes = list(RECIPE.finditer(text))
    assert len(recipes) == text.count("```python") == text.count("\n## ")
    broker = fresh_broker(settings={"group.initial.rebalance.delay.ms": 50})
    for recipe in recipes:
        assert run(recipe["code"], recipe["title"], broker) == recipe["shown"], recipe["title"]
