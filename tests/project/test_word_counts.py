"""What `make check` says of the length of pages is what they have."""

from __future__ import annotations

from pathlib import Path

from release.word_counts import report, words_of

PAGE = "# A title\n\nTwo words, and | a | table |.\n\n```sh\nsteepest run  # three\n```\n"


def test_code_is_counted_apart_and_marks_are_no_words() -> None:
    assert words_of(PAGE) == (7, 3)


def test_long_how_tos_are_named(tmp_path: Path) -> None:
    for folder, times in (("howto", 201), ("explanation", 900)):
        (tmp_path / "docs" / folder).mkdir(parents=True)
        (tmp_path / "docs" / folder / "page.md").write_text("one two three\n" * times)
    lines = report(tmp_path)
    assert "  docs/howto/page.md: 603 words, over 600" in lines
    assert sum(line.startswith("  ") for line in lines) == 1
    assert lines[-1] == "docs: 3,303 words"
    assert any("explanation/page.md: 2,700" in line for line in report(tmp_path, every_page=True))
