"""Makes one slide per session from the notes: question, one formula, figure, quiz.

    python course/slides.py                        # writes course/slides.md; GitHub shows it too
    npx @marp-team/marp-cli course/slides.md       # shows it as slides: slides.html (or --pdf)

The formula is the one below `<!-- on the slide -->`. To change a slide, edit the notes.
"""
import re
from pathlib import Path

COURSE = Path(__file__).resolve().parent
NOTES = sorted((COURSE / "notes").glob("*.md"))
HEAD = """---
marp: true
math: katex
style: "section { font-size: 20px }"
---
<!-- made by python course/slides.py from the notes: edit those -->
"""


def sections(text: str) -> dict[str, str]:
    """Heading -> the text below it; the text before the first heading has the key ""."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return {"": parts[0]} | dict(zip(parts[1::2], map(str.strip, parts[2::2])))


def slide(text: str) -> str:
    """The slide of a session's notes."""
    parts = sections(text)
    title, question = re.search(r"# (.*)\n\n\*\*.*?\*\* (.*)", parts[""].split("\nSymbols")[0],
                                re.S).groups()
    formula = re.search(r"<!-- on the slide -->\n```math\n(.*?)```", text, re.S)[1]
    formula = re.sub(r"\\tag\{.*?\}", "", formula)  # would be printed over it
    figure = re.search(r"!\[.*?\]\(\.\./(figures/\w+\.png)\)", text)[1]
    quiz = re.sub(r"\n(?!\n)(?<!\n\n)", " ", parts["Quiz"].replace("\n* ", " \u2003"))
    return (f"# {title}\n\n**{' '.join(question.split())}**\n\n"
            f"$$\n{formula}$$\n\n![h:195]({figure})\n\n**Quiz.** {quiz}\n")


def slides() -> str:
    return HEAD + "\n---\n\n".join(slide(path.read_text(encoding="utf-8")) for path in NOTES)


if __name__ == "__main__":
    (COURSE / "slides.md").write_text(slides(), encoding="utf-8")
