"""Show how many words the pages have, by folder, with the longest ones; `--pages` shows all.

    python -m release.word_counts

A word has a letter or a digit; code blocks are counted apart. Nothing fails: the numbers are for those who write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # words of a how-to, besides its code


def words_of(text: str) -> tuple[int, int]:
    """Return the words of a page's text, and those of its code blocks."""
    prose = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*```\w*", "", text, flags=re.MULTILINE)
    counted = [len(re.findall(r"\S*\w\S*", each)) for each in (prose, text)]
    return counted[0], counted[1] - counted[0]


def report(root: Path, every_page: bool = False) -> list[str]:
    """Return the lines that say how long the pages below a folder `docs` are."""
    lines, total = [], 0
    for folder in sorted(path for path in (root / "docs").iterdir() if path.is_dir()):
        counts = {path: words_of(path.read_text()) for path in sorted(folder.glob("*.md"))}
        if not counts:
            continue
        prose, code = map(sum, zip(*counts.values(), strict=True))
        total += prose
        longest = max(counts, key=lambda path: counts[path][0])
        lines.append(
            f"docs/{folder.name}: {prose:,} words and {code:,} of code in {len(counts)} pages; "
            f"the longest is {longest.name} with {counts[longest][0]:,}"
        )
        for path, (words, _) in counts.items():
            if every_page or (folder.name == "howto" and words > LIMIT):
                over = f", over {LIMIT}" if words > LIMIT else ""
                lines.append(f"  {path.relative_to(root)}: {words:,} words{over}")
    return [*lines, f"docs: {total:,} words"]


if __name__ == "__main__":
    print("\n".join(report(ROOT, "--pages" in sys.argv)))
