"""The timeline page: everything in one file, nothing of a run's text is markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from infra.tracking.page import MOST, timeline_page
from infra.tracking.plots import Lane
from rl.trajectory import Span


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def drawn(lanes: list[Lane], path: Path, title: str = "t") -> Page:
    timeline_page(lanes, title, path)
    return Page(path.read_text())


def test_busy_and_bubble_are_told_and_nothing_is_fetched(tmp_path: Path) -> None:
    trainer = Lane("trainer", [Span("wait", 0, 6), Span("train", 6, 8), Span("push", 8, 10)])
    generate = Lane("generate", [Span("generate", 100, 100), Span("generate", 0, 5), Span("generate", 2, 5)])
    page = drawn([trainer, generate, Lane("empty", [])], tmp_path / "t.html", "<b>a & b</b>")
    assert "<b>a & b</b>" in page.words and "b" not in [tag for tag, _ in page.tags]
    at = page.words.index("trainer", page.words.index("most at once"))
    assert [w for w in page.words[at : at + 12] if w][:5] == ["trainer", "4.0%", "96.0%", "2", "1"]
    assert "empty" not in page.words
    assert not [a for _, attrs in page.tags for a in attrs if a in ("src", "href")]
    assert "generate: up to 2 at once" in page.words


def test_a_long_run_stays_a_file_that_opens(tmp_path: Path) -> None:
    many = [Span("train" if n % 2 else "push", n, n + 0.5) for n in range(5 * MOST)]
    crowd = [Span("generate", n, n + 7) for n in range(5 * MOST)]
    page = drawn([Lane("trainer", many), Lane("generate", crowd)], tmp_path / "t.html")
    assert len([tag for tag, _ in page.tags if tag == "rect"]) <= 2 * MOST + 2
    assert (tmp_path / "t.html").stat().st_size < 3_000_000
