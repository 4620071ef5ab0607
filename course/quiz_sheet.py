"""Prints the quizzes without answers: writes a PDF with one A4 page for each session.

    python course/quiz_sheet.py             # quiz.pdf, all eight sessions
    python course/quiz_sheet.py 3 4         # only these sessions
    python course/quiz_sheet.py 3 --out week-3.pdf

The questions are read from the section "Quiz" of the notes, so the sheet always agrees with them.
"""
import argparse
import re
import textwrap
from pathlib import Path

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

NOTES = sorted((Path(__file__).parent / "notes").glob("*.md"))
A4 = (8.27, 11.69)  # inches
COLUMNS = 80  # characters in a line of the page
LINE = 0.022  # height of a line, as a share of the page
LEFT, RIGHT = 0.1, 0.9


def quiz_of(text: str) -> list[str]:
    """The questions and options of a note's quiz, in order. An option begins with "(a)"."""
    section = text.split("## Quiz\n")[1].split("\n## ")[0]
    parts = re.split(r"\n\s*\n|\n(?=\* )", section.strip())
    return [re.sub(r"^\* ", "", " ".join(part.split())) for part in parts]


def printable(part: str) -> list[str]:
    """Its lines on the page. No line ends inside a formula, because matplotlib sets formulas."""
    part = part.replace("\\lt", "<").replace("\\gt", ">").replace("`", "").replace("*", "")
    joined = re.sub(r"\$[^$]*\$", lambda formula: formula[0].replace(" ", "\0"), part)
    return [line.replace("\0", " ") for line in textwrap.wrap(joined, COLUMNS)]


def page(session: int, title: str, parts: list[str]) -> Figure:
    """One sheet: the questions, a box for each option, and room for the reasons."""
    figure, y = Figure(figsize=A4), 0.85
    figure.text(LEFT, 0.93, f"Session {session}: {title}", fontsize=14, weight="bold")
    figure.text(LEFT, 0.895, "Name: " + "_" * 40, fontsize=11)
    for part, after in zip(parts, [*parts[1:], ""]):
        is_option = part.startswith("(")
        if is_option:
            figure.add_artist(Rectangle((LEFT, y - 0.001), 0.015, 0.0106, fill=False))
        for line in printable(part):
            figure.text(LEFT + 0.03 * is_option, y, line, fontsize=11)
            y -= LINE
        y -= 0.4 * LINE
        if not after.startswith("("):  # a question and its options are complete
            y = room_for_reasons(figure, y)
    return figure


def room_for_reasons(figure: Figure, y: float, lines: int = 5) -> float:
    """Draws empty lines below the height y. Returns the height below them."""
    figure.text(LEFT, y, "Why?", fontsize=11)
    for k in range(lines):
        height = y - (1 + 1.3 * k) * LINE
        figure.add_artist(Line2D([LEFT, RIGHT], [height] * 2, color="0.6", linewidth=0.6))
    return y - (1 + 1.3 * lines) * LINE


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", type=int, nargs="*", metavar="session",
                        help="numbers of sessions; default: all")
    parser.add_argument("--out", type=Path, default=Path("quiz.pdf"))
    args = parser.parse_args(argv)
    sessions = args.sessions or range(1, len(NOTES) + 1)
    if not all(1 <= session <= len(NOTES) for session in sessions):
        parser.error(f"the sessions are 1 to {len(NOTES)}")
    with PdfPages(args.out) as pdf:
        for session in sessions:
            text = NOTES[session - 1].read_text(encoding="utf-8")
            title = re.match(r"# \d+\. (.*)", text)[1]
            pdf.savefig(page(session, title, quiz_of(text)))
    print(f"{args.out}: {len(sessions)} pages")


if __name__ == "__main__":
    main()
