"""One row of every published layout, and every spelling of a gold: what is problem and answer."""
import time

import pytest

from parts.sources import AFTER, find_gold, find_problem, gold_text, last_boxed, problem_text

DAPO = ("Solve the following math problem step by step. The last line of your response should be "
        "of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is "
        "2+3?\n\nRemember "
        "to put your answer on its own line after \"Answer:\".")
CHAT = ("<|im_start|>system\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+3? Let's think step by step and output the final answer "
        "within \\boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n")
LLAMA_CHAT = ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+3?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n")
Q = "What is 2+3?"

LAYOUTS = {  # one row as each published data set has it; all mean: What is 2+3? -> 5
    "reinforce_ada": dict(problem=Q, gt="5"),
    "math500": dict(problem=Q, solution="We add: $\\boxed{4}$", answer="5", level=2,
                    unique_id="a/1"),
    "gsm8k": dict(question=Q, answer="2+3 = <<2+3=5>>5\n#### 5"),
    "hendrycks": dict(problem=Q, level="Level 1", type="Algebra",
                      solution="First \\boxed{4}, no, $\\boxed{5}$."),
    "olympiadbench": dict(question=Q, final_answer=["5"], modality="Text-only", unit=None,
                          error=None),
    "amc (float)": dict(id=0, problem=Q, answer=5.0, url="x"),
    "capitals (int)": dict(ID="2024-I-1", Problem=Q, Solution="long", Answer=5),
    "question and answer": dict(Question=Q, Answer="5"),
    "dr. grpo (list)": dict(problem=Q, answer=["5"]),
    "deepscaler, empty answer": dict(problem=Q, answer="", solution="so \\boxed{5}"),
    "dapo": dict(prompt=[dict(role="user", content=DAPO)],
                 reward_model=dict(ground_truth="5", style="rule")),
    "dapo with raw": dict(prompt=[dict(role="user", content="x")],
                          reward_model=dict(ground_truth="5"),
                          extra_info=dict(raw_problem=Q)),
    "dapo processed": dict(prompt=DAPO, solution="5"),
    "open-reasoner": dict(prompt=[{"from": "human", "value": Q}], final_answer="5"),
    "verl": dict(prompt=[dict(role="system", content="Be good."), dict(
        role="user",
        content=Q + " Let's think step by step and output the final answer within \\boxed{}.")],
        reward_model=dict(ground_truth=["5"])),
    "prompt selection (chat string)": dict(problem=CHAT, answer="5"),
    "a rendered chat of two turns": dict(input="<|im_start|>user\nHi<|im_end|>\n" + CHAT,
                                         target="5"),
    "llama chat string": dict(input=LLAMA_CHAT, target="5"),
    "qwen-boxed suffix": dict(
        input=Q + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        expected_answer="5"),
    "gvm (whole solution as answer)": dict(problem=Q,
                                           answer="We add.\nHence the sum is \\boxed{5}."),
    "svamp": dict(ID="chal-1", Body="What is", Question="2+3?", Answer="5.0", Equation="2+3"),
    "json inside a string": dict(problem=Q, ground_truth='["5"]'),
    "messages": dict(messages=[
        dict(role="system", content="Be good."), dict(role="user", content="Hi"),
        dict(role="assistant", content="\\boxed{4}?"), dict(role="user", content=Q),
        dict(role="assistant", content="We add: \\boxed{3}, no, $\\boxed{5}$.")]),
    "conversations": dict(conversations=[
        {"from": "human", "value": Q}, {"from": "gpt", "value": "2+3 = 5\n#### 5"}]),
    "metamath": dict(query=Q, response="We add.\n#### 5\nThe answer is: 5", type="x"),
    "alpaca": dict(instruction="What is", input="2+3?", output="5"),
    "alpaca, empty input": dict(instruction=Q, input="", output="It is \\boxed{5}."),
    "digits first, then marked": dict(question=Q, answer="#### 4 was wrong\n#### 5"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts(name):
    row = LAYOUTS[name]
    assert find_problem(row) == Q and find_gold(row) in ("5", "5.0")


TWO_TURNS = [dict(role="user", content="first"), dict(role="assistant", content="\\boxed{1}"),
             dict(role="user", content="second")]
LONG = "+".join(f"x^{{{i}}}" for i in range(30))  # only WORKED columns are distrusted for length


@pytest.mark.parametrize("row, gold", [
    (dict(solution="x" * 101), ""), (dict(solution="two\nlines"), ""), (dict(solution="7"), "7"),
    (dict(answer=LONG, solution="7"), LONG),
    (dict(prompt=TWO_TURNS, answer="so #### 3, no\n#### 1,024"), "1024"),
    (dict(messages=TWO_TURNS), ""),  # it answers an earlier question
    (dict(messages=[*TWO_TURNS, dict(role="assistant", content="It is 5.")]), ""),
    (dict(messages=[*TWO_TURNS, dict(role="assistant", content="It is \\boxed{5}.")]), "5"),
])
def test_which_column_is_the_gold(row, gold):
    assert find_gold(row) == gold


def test_the_last_user_turn_is_the_problem():
    for column in ("messages", "prompt"):
        assert find_problem({column: TWO_TURNS}) == "second"


def test_named_columns_win_nested_and_joined():
    row = dict(problem="no", answer="no", meta=dict(text="yes", gold=3.0), a="", b="b", c="c")
    assert find_problem(row, "meta.text") == "yes" and find_gold(row, "meta.gold") == "3"
    assert find_problem(row, "b+c") == "b c" and find_problem(row, "b+a") == "b"
    assert find_problem(row, "a+b") == find_problem(row, "gone+b") == ""  # the first must be there


@pytest.mark.parametrize("raw, gold", [
    ("#### 1,234", "1234"), ("so it is 7\n#### -12", "-12"), (27.0, "27"), (0, "0"), (0.5, "0.5"),
    ("033", "033"),
    ("$\\frac12$.", "\\frac12"), ("\\$32.50", "32.50"), ("$69$,$84$", "69,84"),
    (["1", "$2$"], "1, 2"),
    ("[1, 2]", "[1, 2]"), ("336^\\circ", "336^\\circ"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("a \\boxed{1} b \\boxed{ \\{1,2\\} }.", "\\{1,2\\}"), ("\\fbox{3}", "3"), ("$\\boxed 2$", "2"),
    ("\\boxed{}", ""), ("\\boxed{\\boxed{5}}", "5"), ("\\boxed{1", ""),
    ("\\left\\{x\\right.", "\\left\\{x\\right."),
    (None, ""), (float("nan"), ""), ([], ""), ("  ", ""), ("$", ""), ("1,\\!080", "1,\\!080"),
    ("p - q", "p - q"),
    # after #### a comma goes only from between the thousands of a number, alone or with a unit
    ("#### $1,234,567.50.", "1234567.50"), ("#### -\\$5,000", "-5000"),
    ("#### **1,234**", "**1234**"), ("#### 1,234 m^2\nin all", "1234 m^2"),
    ("#### 12,500%", "12500%"), ("#### 033", "033"),
    ("vertex #### (3,4)", "(3,4)"), ("#### (1,234)", "(1,234)"), ("#### [0,100)", "[0,100)"),
    ("#### 2, 5", "2, 5"), ("#### 1,2,300.", "1,2,300"), ("#### 1,234,5", "1,234,5"),
    ("#### 1,2345", "1,2345"), ("#### 1,234, 5", "1,234, 5"), ("#### {1,234}", "{1,234}"),
    ("#### 1{,}234", "1{,}234"), ("#### 1,\\!234", "1,\\!234"), ("#### f(x,y)=x+y", "f(x,y)=x+y"),
])
def test_gold_formats(raw, gold):
    assert gold_text(raw) == gold


@pytest.mark.parametrize("solution", [
    "#### Step 1\nAdd.\n#### Step 2: Solve\nso \\boxed{5}.", "\\boxed{5}\n#### Check\nIt fits.",
    "#### \\boxed{5}", "so \\boxed{5}.\n#### 5"])
def test_where_there_is_a_box_four_hashes_are_a_heading(solution):
    turns = [dict(role="user", content="2+3?"), dict(role="assistant", content=solution)]
    assert gold_text(solution) == gold_text(turns) == find_gold(dict(solution=solution)) == "5"


def test_last_boxed_counts_braces_but_not_escaped_ones():
    assert last_boxed("no box") is None
    assert last_boxed("\\boxed{a_{b_{c}}} and text }") == "a_{b_{c}}"
    assert last_boxed("\\boxed{\\left\\{ x \\right.}") == "\\left\\{ x \\right."
    assert last_boxed("\\boxed{a\\\\}") == "a\\\\"  # a line break, then the brace that closes


@pytest.mark.parametrize("gold", ["[1, 2]", "[0,1)", "{1, 2}", "{}", '["a, b'])
def test_a_gold_in_brackets_is_text_and_not_a_nested_column(gold):
    assert find_gold(dict(answer=gold)) == gold


def test_an_instruction_is_taken_off_only_where_nothing_follows():
    asked = f"First this.\n\n{AFTER}.\nHow many are there?"
    assert problem_text(asked) == asked and problem_text(f"How many? {AFTER}.") == "How many?"


@pytest.mark.parametrize("problem", [
    "x" + " " * 100_000 + "y", "x" + "." * 100_000 + "y", "\n" * 100_000 + "y", "x" + " ." * 50_000,
    AFTER * 2000 + "\n"])
def test_long_runs_of_one_character_take_no_time(problem):
    """In quadratic time each would take minutes: compared with a tenth of the length."""
    def seconds(text):
        start = time.process_time()
        for _ in range(3):
            problem_text(text), gold_text(text)
        return time.process_time() - start

    assert seconds(problem) < 40 * seconds(problem[:len(problem) // 10]) + 0.5
