"""Lab 3: when is a prompt done, and which of its samples are kept?

    python course/check.py 3
    python course/train.py --with lab_3

config.rule is the rule of the chosen sampler. Its min_correct and min_wrong are the quotas, that
is, how many right and wrong answers resolve a prompt. Its max_rounds says how many rounds a prompt
may take.

    sampler       min_correct   min_wrong    max_rounds
    uniform       0             0            1
    dapo          1             1            1
    ada-pos       1             0            N
    ada-balance   n // 2        n - n // 2   N

There is no need to read ada_sampler.py, which has both functions, too.
"""


def exit_test(correct: int, wrong: int, rounds: int, config) -> str:
    """What happens to a prompt with this many correct and wrong answers after `rounds` rounds.

        "resolved"         both quotas are met
        "too few correct"  too few are right, and there is no further round
        "too few wrong"    enough are right, too few are wrong, and there is no further round
        ""                 the prompt goes on with another round

    `rounds` counts the rounds that are over, so it is 1 after the first one. A prompt takes up to
    config.rule.max_rounds rounds. ada-balance may give up earlier. If
    config.rule.max_rounds_all_correct is c > 0, there is no further round after c rounds (or more)
    for a prompt with enough right answers and not a *single* wrong one. With c = 0 nothing ends
    earlier.
    """
    raise NotImplementedError


def keep(pool: list, n: int) -> list:
    """The n samples that go into the update, or all if the pool is smaller.

    pool has the samples in the order of drawing, with sample.index = 0, 1, ..., and sample.correct
    says which kind a sample is. Keep n // 2 right ones and n - n // 2 wrong ones, also if n is odd.
    If there are too few of one kind, the other kind fills up. Keep the first of each kind, also of
    those that fill up. The result is a list in the order of drawing. The pool itself stays as it
    is, because its mean is the baseline.
    """
    raise NotImplementedError
