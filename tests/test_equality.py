"""Are two answers the same mathematics? One guard at a time; all together in test_rewards.py."""
import pytest

from verifier.equality import from_latex, same


def equal(gold: str, answer: str, style: str = "") -> bool:
    return same(from_latex(gold), from_latex(answer), style)


@pytest.mark.parametrize("gold, answer", [
    ("x>1, x<3", "(1,3)"), ("x<1, x>3", r"(-\infty,1)\cup(3,\infty)"), ("|x|<3", "-3<x<3"),
    (r"\{\frac{1}{2},1\}", r"\{1,0.5\}"), ("2x^2=8", "x^2-4=0"), ("(a+bi)(a-bi)", "a^2+b^2"),
    ("0", r"\sin^2{x}+\cos^2{x}-1"), ("0", r"\sqrt{2}\sqrt{3}-\sqrt{6}"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"), (r"f(0)\cos(ct)", r"\cos(tc)f(0)"),
    (r"N(0)e^{-\frac{t}{a}}", "N(0)e^{-t/a}"),
    ("[0,2^{100}]", r"[0,2\cdot 2^{99}]"), ("0.1x", r"\frac{x}{10}"),
    (r"\{2^{100},1\}", r"\{2\cdot 2^{99},1\}"), ("(2^{100},1)", r"(2\cdot 2^{99},1)"),
    (r"\begin{pmatrix}2^{100}\\1\end{pmatrix}", r"\begin{pmatrix}2\cdot 2^{99}\\1\end{pmatrix}"),
    (r"\ln(x^2)", r"2\ln x")])
def test_the_same_mathematics_is_the_same(gold, answer):
    assert equal(gold, answer) and equal(answer, gold)


@pytest.mark.parametrize("gold, answer", [
    ("x>1, x<3", r"\mathbb{R}"), ("3R^2", "3r^2"), (r"\frac{1}{0}", r"\frac{2}{0}"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\sqrt{x}=-1", r"\sqrt{x}=-2"), ("x=2", "x=x"), ("x^2=4", "0=0"), ("2=3", "4=5"),
    ("1000.5", "1000.55"),
    (r"1.0\cdot 10^{-20}", r"1.0\cdot 10^{-30}"), ("|x-10|", "10-x"), ("2^{100}", "2^{100}-1"),
    ("y<1", "x<1"),
    ("|y|<3", "-3<x<3"), ("[0,2^{100}]", "[0,2^{100}-1]"), ("x", "|x|"), ("x", r"\sqrt{x^2}"),
    ("10^{-20}", "10^{-30}"), (r"\sqrt{2}", r"\sqrt{2}+10^{-20}"),
    (r"[0,\sqrt{2}]", r"[0,\sqrt{2}+10^{-20}]"),
    ("f(0)x", "f(1)x"), ("f(0)x", "g(0)x"), ("N(0)e^{-t}", "N(0)e^t"),
    ("1", "1+e^{-1000}"), ("0.00001x", "0.00002x"), ("x+yi", "x+y"), ("100!", "100!+1"),
    ("1", r"1-\frac{1}{2^{100}}"), ("10^{10}", r"\sqrt{10^{20}+1}"), ("1", r"\sqrt{1+10^{-300}}"),
    ("x", "x+10^{-50}"), (r"\{2^{100},1\}", r"\{2^{100}-1,1\}"), ("(2^{100},1)", "(2^{100}-1,1)"),
    ("x<1", "x<1+10^{-30}"), ("x+y<1", "x+y<1+10^{-30}"), ("x+y=1", "x+y=1+10^{-30}"),
    (r"\begin{pmatrix}2^{100}\\1\end{pmatrix}", r"\begin{pmatrix}2^{100}-1\\1\end{pmatrix}"),
    ("x", r"\max(x,0)"), ("0", r"\sqrt{x^2}-x")])
def test_what_is_nearly_the_same_is_not(gold, answer):
    assert not equal(gold, answer) and not equal(answer, gold)


@pytest.mark.parametrize("answer, reward", [
    ("1.4142", 1), ("141.42", 1), ("0.014142", 1), ("1.4152", 0), ("14.142", 0)])
def test_minerva_knows_percentages_of_expressions(answer, reward):
    assert equal(r"\sqrt{2}", answer, "minerva") == reward
