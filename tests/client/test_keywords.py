"""Options as people meet them: in `help()`, and misspelt."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields

import pytest

import headrace
import headrace.aio
from headrace.client.consumer.options import ConsumerConfig, ConsumerOptions
from headrace.client.keywords import KAFKA_NAMES, meanings
from headrace.client.producer.options import ProducerOptions
from proving import proves

NOWHERE = "127.0.0.1:1"


def option_names(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters) - {"topics"}


@proves("U2")
@pytest.mark.parametrize("module", [headrace, headrace.aio])
def test_help_shows_every_option_with_its_meaning(module: object) -> None:
    for name, declared in (("Producer", ProducerOptions), ("Consumer", ConsumerConfig)):
        kind = getattr(module, name)
        shown = pydoc.plain(pydoc.render_doc(kind)).split("Methods defined here")[0]
        for option in option_names(kind):
            assert f"{option}: " in shown.partition("\n |  \n")[2] or f"{option}, " in shown, option
        assert {field.name for field in fields(declared)} - {"topics"} <= option_names(kind)
    assert "default" not in shown
    assert "bootstrap: 'str | Iterable[str]' = '127.0.0.1:9092'" in shown


def test_the_consumers_options_are_declared_once() -> None:
    assert meanings(ConsumerConfig).keys() == ConsumerOptions.__annotations__.keys() == option_names(headrace.Consumer)
    assert all(meanings(ConsumerConfig).values())


@proves("U2")
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("grup", "Consumer has no option 'grup'; did you mean 'group'?"),
        ("commit_interval", "Consumer has no option 'commit_interval'; did you mean 'commit_interval_ms'?"),
        ("auto_offset_reset", "Consumer has no option 'auto_offset_reset'; did you mean 'start'?"),
        ("group.id", "Consumer has no option 'group.id'; did you mean 'group'?"),
        ("zzz", "Consumer has no option 'zzz'; help(headrace.Consumer) shows them all"),
    ],
)
def test_a_wrong_option_is_answered_with_the_nearest(given: str, answer: str) -> None:
    for kind in (headrace.Consumer, headrace.aio.Consumer):
        with pytest.raises(TypeError) as told:
            kind("t", bootstrap=NOWHERE, **{given: 1})  # type: ignore[arg-type]
        assert str(told.value) == answer


@proves("U2")
def test_a_producer_knows_kafkas_names() -> None:
    for kind in (headrace.Producer, headrace.aio.Producer):
        with pytest.raises(TypeError, match="Producer has no option 'linger_ms'; did you mean 'interval_ms'"):
            kind(NOWHERE, linger_ms=5)  # type: ignore[call-arg]
    assert set(KAFKA_NAMES.values()) <= option_names(headrace.Producer) | option_names(
        headrace.Consumer
    ) | option_names(headrace.ShareConsumer)
