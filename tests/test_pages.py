"""Every command block of README.md and docs/ runs and prints what the page says; tests/pages.py has the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pages
from brokers import Brokers
from pages import PAGES, ROOT, RUN, SHOWN, SIGNATURES, Block, blocks_of, pages_with
from proving import proves

INDEX = ROOT / "docs" / "README.md"
MARKS = {"not run", "file", "with", "set-up", "again"}
GROUPS = (None, "etcd", "spark", "pipelines")
"""Those with Spark are read by tests/spark/test_spark_pages.py."""
NEEDS = ("etcd", "kcat")
"""What pages start beside the package, for tools/needs.py."""
NOT_RUN: set[tuple[str, str]] = {
    ("CONTRIBUTING.md", "a test as one would write it"),
    ("examples/README.md", "takes five minutes; tests/pipelines/test_examples.py runs the jobs"),
    ("examples/README.md", "tests/pipelines/test_examples.py runs the jobs"),
    ("examples/README.md", "tests/pipelines/test_declarative.py runs the project"),
    ("README.md", "the test has a broker already"),
    ("deploy/README.md", "needs docker"),
    ("deploy/README.md", "needs systemd"),
    ("docs/CONTEXTS.md", "each line is for another shell"),
    ("docs/KAFKA.md", "needs an Apache Kafka"),
    ("docs/SPARK.md", "the archive is made further below"),
    ("docs/SPARK.md", "there is no query"),
    ("docs/SPARK.md", "the archive is another than that above"),
    ("docs/TUTORIAL.md", "the test has a broker already"),
    ("docs/TUTORIAL.md", "goes on until ctrl-C"),
    ("README.md", "takes a minute; tests/cli/test_cli_local_cluster.py runs it"),
}
"""Page and reason of what no test runs: a new one is a decision."""


def every_block() -> list[Block]:
    return [block for page in PAGES if page != SIGNATURES for block in blocks_of(page)]


@proves("U8")
def test_every_fence_says_what_it_is_and_what_it_needs() -> None:
    wrong = [
        block.place
        for block in every_block()
        if block.language not in RUN + SHOWN or not block.marks.keys() <= MARKS or block.marks.get("with") not in GROUPS
    ]
    assert wrong == [], "a fence has a language (tests/pages.py), and the comment before it a known word"


@proves("U8")
def test_every_page_is_in_the_index() -> None:
    listed = {(ROOT / "docs" / name).resolve() for name in re.findall(r"\]\(([\w./]+)\)", INDEX.read_text())}
    assert set(ROOT.glob("docs/*.md")) - listed == {INDEX}
    assert all(page.exists() for page in listed)


@proves("U8")
def test_what_is_not_run_is_marked_and_known() -> None:
    found = {(block.page, block.marks["not run"]) for block in every_block() if "not run" in block.marks}
    assert found == NOT_RUN


@proves("U8")
@pytest.mark.parametrize("page", pages_with(None), ids=lambda page: page.name)
def test_a_page_prints_what_it_says(page: Path, brokers: Brokers, tmp_path: Path) -> None:
    assert pages.read(page, brokers, tmp_path / "reader")


@proves("U8")
@pytest.mark.parametrize("page", pages_with("etcd"), ids=lambda page: page.name)
def test_a_page_with_a_cluster_prints_what_it_says(page: Path, brokers: Brokers, tmp_path: Path) -> None:
    assert pages.read(page, brokers, tmp_path / "reader", "etcd")


PAGE = """# A page

```console
$ echo one two; echo three
one ...
three
$ for n in 1 2; do \\
> echo $n; done
...
2
$ headrace topic describe nowhere
headrace: ...nowhere...
$ cat <<END
five
END
five
```

```python
print("four", 5)
```
```text
four   ...
```
"""


@proves("U8")
def test_a_page_that_does_not_say_what_is_printed_is_found(brokers: Brokers, tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text(PAGE)
    assert pages.read(page, brokers, tmp_path / "reader") == 2
    for number, (right, wrong) in enumerate(
        [("\nthree\n", "\nfour\n"), ("\n2\n", "\n3\n"), ("headrace: ...", "..."), ("four   ...", "five")]
    ):
        page.write_text(PAGE.replace(right, wrong, 1))
        with pytest.raises(AssertionError, match=r"the page says|ended with"):
            pages.read(page, brokers, tmp_path / f"reader-{number}")
