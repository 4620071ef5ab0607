r"""The reward: whether the boxed answer of a completion equals the gold answer.

    python rewards.py --gold '\frac12' --completion 'so \boxed{1/2}'    # a verdict, with every step

1. `extract_answer` takes the last box, which has to be closed. Text outside boxes does not count.
2. `decide` compares strings, fractions and words. This is enough for most pairs, without sympy.
3. `judge` lets math-verify compare the rest, outside the trainer's process, with limits of time
   and memory (parts/grader.py). Completions are untrusted, so nothing here runs them as code.

verifier/ has the details: spelling.py (LaTeX), answers.py (kinds), equality.py (math-verify).

The reward is 1 or 0, and its status says why: correct, wrong, no_box (no box, or the last one is
not closed), empty, unparseable (math-verify cannot read answer or gold). With the status timeout or
killed the reward is NaN, and the sampler replaces it by 0 (parts/grader.py).

With --reward, the user's own function replaces all this (docs/rewards.md).
"""
import argparse
import functools
import importlib.util
import re
from concurrent.futures import Future

from parts.grader import WORKERS, ForkingGrader, OwnReward, verdict
from parts.text import shown
from verifier.answers import (
    OF_A_VARIABLE, RELATION, STATEMENT, SURELY_WORDS, TUPLE, equal_numbers, exact,
    expand_signs, find_boxes, has_letters, is_list, rename, solutions, split_top,
    take_choice, take_domain, without_set_braces, words)
from verifier.spelling import is_noun, normalize, plain_characters, squeeze

EQUALITY = importlib.util.find_spec("verifier.equality").origin  # its file, without importing it
MAX_CHARS = 1000  # longer answers are compared as strings only
# The first time that math-verify reads a notation or makes a kind of comparison takes up to 0.1 s.
# So each worker does these once before all questions.
NOTATIONS = r"""
\begin{array}{cc}1&2\\3&4\end{array} ; \begin{pmatrix}-1 \\ \frac{1}{2}\end{pmatrix}
\sin(\frac{18\pi}{180}) ; \log_{2}(8) ; \cos(\pi/7)-\cos(2\pi/7) ; x^{1/3} ; x=(2^{10}-1)x+y
0<x<36, x\neq 9 ; x^{2}+y^{2}=5^{2} ; e^{x^2} ; y = x^2-x+1 ; \max(x, -100) ; \gcd(12,18)
\log_2(x+1) ; (x,y,z)=(2,2,-1) ; (\frac{1}{2},\frac{3}{4}) ; (\sqrt{2}, -1) ; C(5, 2) ; x_1
n \cdot (n-1)! ; f(x)=2x+3 ; \ln |x| + C ; \frac{v_0^2}{2g} ; \sin^{-1}\frac{1}{2} ; 17 \mod {5}
\sum_{k=1}^{42} 1 ; \pi r^{2} ; [0,9) ; x \le -1, x \ge 4 ; \frac{n(n+1)}{2} ; 1+e^{-10} ; 5V_0
\binom{5}{2} ; \{1,2,\frac{1}{3}\} ; |x-1| ; 2\sqrt[3]{5} ; \sqrt{x+1}
(-\infty, 2] \cup (3, \infty) ; 2^{n}-1 ; \emptyset ; \mathbb{R} \setminus \{0\} ; 12\%
\frac{\sqrt{3}}{2} ; 1+\sqrt{2}, 1-\sqrt{2} ; \frac{-1+\sqrt{5}}{2} ; (x-2)(x+3) ; -2x^{2}+3x-1
3-4i ; 2.5 \times 10^{-3} ; \frac{2}{3}\pi ; 5\text{May} ; 1:2 ; a^{2}b^{3} ; \tan x
""".replace("\n", " ; ").strip(" ;").split(" ; ")
EXAMPLES = [
    (r"\frac{3x^{2}+6x}{(x-4)(x+2)}, \frac{2x-8}{(x-4)(x+2)}", [r"\frac{3x}{x-4}, \frac{2}{x+2}"]),
    (r"26n\sqrt{10}+10\sqrt{5}", [r"10\sqrt{5}-26n\sqrt{10}"]),
    (r"\begin{pmatrix} 1/2 & 0 \\ 0 & \frac{1}{3} \end{pmatrix}", ["1/6"]),
    (r"\frac{4}{13}-\frac{6}{13}i", [r"\frac{4-6i}{13}"]),
    (r"2.887 \times 10^{-6}", ["0.000002887"]),
    ("x^2-7x+12=0", ["(x-3)(x-4)=0"]),
    ("x<5", ["(1,5)"]),
    (r"(-\infty,-1]\cup[4,\infty)", [r"x\le -1, x\ge 4"]),
    *((one, [other]) for one, other in zip(NOTATIONS, NOTATIONS[1:]))]


# ------------------------------------------------------------------------------------ 1. the box

# What may stand between the boxes of one list: "x=\boxed{1}, y=\boxed{2}", "\boxed1 and \boxed2"
BETWEEN_BOXES = re.compile(r"""
    (?: [\s,;.&$~*…] | \\[,;:!\ ()\[\]\\] | \\q?quad | \\[lc]?dots
      | \\text\{\s*,?\s*(?:and|or)?\s*\}
      | \b and \b | \b or \b
      | \(?\b[a-z\d]\)                                             # (a)  b)  2)
      | [A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*= )*               # x=  x_1=  f(x)=
    """, re.VERBOSE)
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")


def extract_answer(completion: str, style: str = "") -> str | None:
    r"""The content of the last box. Boxes with only list punctuation between them give "1, 2".

    None if there is no box, or if the last one is not closed, because `\boxed{4` may be truncated.
    With `style="minerva"` and no box it is the last number, as in the papers' evaluations.
    """
    boxes = find_boxes(completion)
    if not boxes and style == "minerva":
        numbers = LAST_NUMBER.findall(completion[-5000:])
        return numbers[-1].rstrip(",") if numbers else None
    if not boxes or boxes[-1][2] is None:
        return None
    later, _, last = boxes[-1]
    parts = {last.strip(): None}  # without duplicates; the last box comes first
    for start, end, content in reversed(boxes[:-1]):
        if "" in parts or content is None or later - end > 80:
            break
        if not BETWEEN_BOXES.fullmatch(completion, end, later):
            break
        if content.strip():
            parts[content.strip()] = None
        later = start
    return ", ".join(reversed(parts))


# ------------------------------------------------------------------------------- 2. the decision
# Where to add a rule depends on its subject:
#
# 1. how something is written: `CHARACTERS`, `SAME` and `REWRITES` in verifier/spelling.py; which
#    words are a unit: `SYMBOLS` there, and which words are none: `CHANGES`;
# 2. the letter of a choice, and words: `take_choice` and `words` in verifier/answers.py;
# 3. additions to a value, such as the domain of a parameter and names before values: `decide`
#    removes an addition if only gold or only answer has it. If both have it, they must agree. Set
#    braces and plus-minus signs are removed there, too;
# 4. values that math-verify would misread: `COMPARED_AS_TEXT`;
# 5. when two expressions, lists or relations are equal: `same` in verifier/equality.py.

def decide(gold: str, answer: str, style: str = "") -> tuple[str | None, str, str, list[str]]:
    """(status, why, gold, parts). Status None: math-verify must compare `parts` with `gold`."""
    decided = compare_as_written(gold, answer)  # first, because it bounds the length of the rest
    if decided:
        return *decided, gold, [answer]
    gold, answer = normalize(gold), normalize(answer)
    if not gold or not answer:
        return "empty" if gold else "unparseable", "nothing is left of it", gold, [answer]
    # before words are compared, because `b` and `(B) 7` are right if the gold is B
    answer = take_choice(gold, answer)
    # with the set braces, because the set {1, 2} is not the point (1, 2)
    decided = compare_words(gold, answer)
    if decided:
        return *decided, gold, [answer]
    without_domains = take_domain(gold, answer)
    if not without_domains:
        return "wrong", "another domain of the parameter", gold, [answer]
    # the braces first, because {1 \pm 2, 5} is one set
    gold, answer = map(expand_signs, map(without_set_braces, without_domains))
    # before tuples are made, because `y=1, x=2` is the point (2, 1)
    without_names = take_names_off(gold, answer)
    if not without_names:
        return "wrong", "another name, or an equation for a value", gold, [answer]
    gold, parts = without_names
    parts = [as_tuple_of(gold, part) for part in parts]
    gold = as_tuple_of(parts[-1], gold)
    verdicts = [compare_values(gold, part, style) for part in parts]
    wrong = [pair for pair in verdicts if pair and pair[0] != "correct"]
    if wrong or all(verdicts):
        return *(wrong or verdicts)[0], gold, parts
    return None, "strings, fractions and words do not decide", gold, parts


def compare_as_written(gold: str, answer: str) -> tuple[str, str] | None:
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same string"
    for text in (gold, answer):  # one Unicode character can become eighteen others
        if len(text) > MAX_CHARS or len(plain_characters(text)) > MAX_CHARS:
            return "unparseable", f"longer than {MAX_CHARS} characters, so compared as a string"
    return None


def compare_words(gold: str, answer: str) -> tuple[str, str] | None:
    """(status, why) if both are the same, or are words; None if they are other mathematics."""
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same after normalization"
    unlike = are_unlike(gold, answer)
    if unlike:
        return "wrong", unlike
    if STATEMENT.search(gold) or STATEMENT.search(answer):
        return "wrong", "statements of logic are compared as text"
    gold_words = words(gold)
    if gold_words and gold_words == words(answer):
        return "correct", "the same words"
    if gold_words and (SURELY_WORDS.search(gold) or len(gold) == 3 and is_noun(gold)):
        return "wrong", "the gold is a word, compared as text"
    return None


def are_unlike(gold: str, answer: str) -> str:
    """Why they cannot be equal, although math-verify would accept them; "" if they can be."""
    for one, other in ((gold, answer), (answer, gold)):
        if one.startswith("\\{") and one.endswith("\\}") and TUPLE.fullmatch(other):
            return "a set is no tuple and no interval"
        if RELATION.search(one) and not RELATION.search(other) and is_list(other):
            return "a list is no inequality"  # -2 < x < 3 is more than -2, 3
    return ""


def take_names_off(gold: str, answer: str) -> tuple[str, list[str]] | None:
    """(gold, parts of the answer that must all equal it) without names; None if those differ."""
    if RELATION.search(gold) or RELATION.search(answer):
        return gold, [answer]
    g = solutions(gold, lenient=False)
    a = solutions(answer, lenient=bool(g) and not any(name for claims in g for name, _ in claims))
    if not g or not a:
        first, *sides = split_top(answer, "=")
        return (gold, [f"{first}={side}" for side in sides] or [answer]) if "=" in gold else None
    names, other = ([name for name, _ in each[0]] for each in (g, a))
    several = [len({re.sub(r"_\w+$", "", name) for name in each}) > 1 for each in (names, other)]
    if set(names) == {""}:
        is_point = gold.startswith("(") and len(set(other)) > 1 or several[1] and len(a) > 1
        golds, parts = layout(g, False), layout(a, is_point)
    elif set(other) == {""}:
        golds, parts = layout(g, several[0]), layout(a, False)
    elif flat(names) == flat(other):
        golds, parts = (layout(each, len({*one}) > 1) for each, one in ((g, names), (a, other)))
    elif function := same_function(g[0][0], a[0][0]):
        return function
    else:  # y=2x can be solved for x, too, but x=5 says nothing about y
        is_formula = any(has_letters(side) for claims in g for _, sides in claims for side in sides)
        return (gold, [answer]) if is_formula else None
    return golds[-1], parts + golds[:-1]


def flat(names: list[str]) -> list[str]:
    """The single names, sorted. `(x,y)=(1,2)` has the names x and y."""
    return sorted({*",".join(names).replace("(", "").replace(")", "").split(",")})


def layout(cases: list[list[tuple[str, list[str]]]], as_point: bool) -> list[str]:
    """The values without names, or all sides if there is only one equation.

    Different names make a point, whose values are sorted by name: `y=1, x=2` is (2, 1).
    """
    if len(cases) == len(cases[0]) == 1:
        return cases[0][0][1]
    points = []
    for claims in cases:
        ordered = sorted(claims, key=lambda claim: claim[0]) if as_point else claims
        listed = ", ".join("=".join(sides) for _, sides in ordered)
        points.append(f"({listed})" if as_point and len(claims) > 1 else listed)
    return [", ".join(points)]


def same_function(gold: tuple[str, list], answer: tuple[str, list]) -> tuple[str, list] | None:
    """f(t)=t^2 is f(x)=x^2, and y=x^2; but g(x)=x^2 is another function."""
    one, two = OF_A_VARIABLE.fullmatch(gold[0]), OF_A_VARIABLE.fullmatch(answer[0])
    if one and two and one[1] == two[1]:
        sides = [rename(side, two[2] or two[3], one[2] or one[3]) for side in answer[1]]
        return (gold[1][-1], sides) if all(sides) else None
    if one and answer[0] == "y" or two and gold[0] == "y":
        return gold[1][-1], answer[1]
    return None


def as_tuple_of(gold: str, answer: str) -> str:
    """`1, 2` as the tuple (1, 2) if the gold is a tuple, because then its order is given."""
    is_point = TUPLE.fullmatch(gold) and is_list(answer) and not RELATION.search(answer)
    return f"({answer})" if is_point else answer


COMPARED_AS_TEXT = re.compile(r"""
    \\ldots | \\pmod                                 # 1,2,\ldots,n
    | \d\)?\s*_                                      # 52_8: the base is part of it, 52 is wrong
    | ^\d+:0\d | ^[^:]*:[^:]*:                       # 10:05 is no ratio, and 1:2:3 is not 1:6
    | ^[12]\d{3}-[01]\d-[0-3]\d(?!\d)                # 2024-01-05 is no difference
    | \\(?:gcd|lcm)\s*[({][^(){}]*[A-Za-z]           # sympy takes variables for coprime polynomials
    | \d' | \\infty\s*\]                             # 42' is not 42; no interval ends in infinity]
    | \d.*(?:\\text\{[^{}]*\w\W?\w|[\u4e00-\u9fff])  # 4:30\text{pm}, 5\text{ or so}: more than a
    | (?:\\text\{[^{}]*\w\W?\w|[\u4e00-\u9fff]).*\d  #    unit, which would be gone by now
    | \d\s+[A-Za-z]+\s+\d                            # 5 ft 6 in is not 6 ft 5 in
    """, re.VERBOSE)
TIME = re.compile(r"(?:1?\d|2[0-4]):[0-5]\d")
RANGE = re.compile(r"(\d+)-(\d+)")
UNIMPORTANT_IN_TEXT = re.compile(r"[{}()\s]")


def compare_values(gold: str, answer: str, style: str) -> tuple[str, str] | None:
    """(status, why) of two values, as far as strings can tell; None if math-verify must.

    Kinds of answers that math-verify misreads are compared here.
    """
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same value"
    text = same_text(gold, answer)
    if text is not None:
        return "correct" if text else "wrong", "bases, dots and other text are compared as written"
    numbers = exact(gold), exact(answer)
    if all(numbers):
        equal = equal_numbers(*numbers, style)
        return "correct" if equal else "wrong", "compared as exact fractions"
    return None


def same_text(gold: str, answer: str) -> bool | None:
    """Compares bases, dots and times of day, which math-verify misreads; None for the rest."""
    times = TIME.fullmatch(gold) and TIME.fullmatch(answer)  # 2:30 is not 1:15, 20:30 may be 2:3
    ends = RANGE.fullmatch(gold)
    is_range = ends and int(ends[1]) < int(ends[2])  # nobody writes 5-7 for -2
    if not (times or is_range or any(map(COMPARED_AS_TEXT.search, (gold, answer)))):
        return None
    bare = [UNIMPORTANT_IN_TEXT.sub("", text).lower() for text in (gold, answer)]
    return bare[0] == bare[1]


# ------------------------------------------------------------------------------ 3. the grader

class Grader(ForkingGrader):
    """Grades (gold, completion) pairs. If `decide` cannot, `judge` does in another process."""

    def __init__(self, workers: int = WORKERS, **limits: float):
        super().__init__(f"{EQUALITY}:judge", examples=EXAMPLES, workers=workers, **limits)
        # because many answers to a problem are equal and get the same verdict
        self.ask_judge = functools.lru_cache(10_000)(super().ask)

    def submit(self, key, problem, rollout, style: str = "") -> None:
        """Start judging an answer. `key` is any hashable, and `result(key)` gives the verdict."""
        self.pending[key] = self.ask(problem.answer, rollout.text, style)

    def ask(self, gold: str, completion: str, style: str = "") -> Future:
        """A Future of the verdict, which is done at once if no other process is needed."""
        answer = extract_answer(completion, style)
        if answer is None:
            status, why = "no_box", "no closed box at the end"
        elif not answer:
            status, why = "empty", "an empty box"
        else:
            try:
                status, why, gold, parts = decide(gold, answer, style)
            except Exception as error:  # an unexpected answer must not end a training run
                status, why = "unparseable", f"{type(error).__name__} in the fast path"
        if not status:
            return self.ask_judge(gold, tuple(parts), style)
        future = Future()
        future.set_result(verdict(status, why))
        return future

    def check_golds(self, golds: list[str]) -> list[bool]:
        """Whether each gold is compared as a string, or can be read and equals itself."""
        checks = []
        for gold in golds:
            status, _, left, (_, *sides) = decide(gold, "x")
            verdicts = [compare_values(left, side, "") for side in sides]  # for 3+3 = 6
            if any(pair and pair[0] == "wrong" for pair in verdicts):
                checks.append("false")
            elif status or exact(left) and all(verdicts):
                checks.append(status or "wrong")
            else:
                checks.append(self.ask_judge(left, (left, *sides), ""))
        return [check in ("correct", "wrong") if isinstance(check, str)
                else check.result().status == "correct" for check in checks]


def open_grader(reward: str, threshold: float) -> ForkingGrader:
    """The grader of a program, which is math-verify or the function of --reward."""
    return OwnReward(reward, threshold) if reward else Grader()


# --------------------------------------------------------------------------- 4. the command line

def explain(gold: str, completion: str, style: str = "") -> None:
    """Print each step from the completion to the verdict."""
    answer = extract_answer(completion, style)
    print("box        ", repr(answer))
    if answer:
        status, why, left, parts = decide(gold, answer, style)
        print(f"gold        {gold!r} -> {normalize(gold)!r}")
        print(f"answer      {answer!r} -> {normalize(answer)!r}")
        print(f"fast path   {status or 'undecided'}: {why}")
        print("compared   ", repr(left), "with", " and with ".join(map(repr, parts)))
    with Grader(workers=1) as grader:
        v = grader.grade([(gold, completion)], style=style)[0]
    print(f"verdict     {v.status}, reward {v.reward}: {shown(v.why, 600)}")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--gold", required=True, help="write a negative one as --gold='-1/2'")
    parser.add_argument("--completion", required=True, help="what the model wrote")
    parser.add_argument("--style", default="", choices=["", "minerva"],
                        help="minerva: relative tolerance 1e-4, also x100 and /100")
    explain(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
