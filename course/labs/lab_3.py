"""Lab 3: when is a prompt done, and which of its samples are kept?

    python course/check.py 3
    python course/train.py --with lab_3

Read `Rule`, RULES, `SamplerConfig` and `Sample` in ada_sampler.py first. config.rule is the rule
of the chosen sampler: its min_correct and min_wrong say how many right and wrong answers resolve a
prompt, its max_rounds how many rounds it may take.
"""


def exit_test(correct: int, wrong: int, rounds: int, config) -> str:
    """What happens to a prompt with so many correct and wrong answers after `rounds` rounds.

        "resolved"         both quotas are met
        "too few correct"  too few are right, and there is no further round
        "too few wrong"    enough are right, too few are wrong, and there is no further round
        ""                 it goes on: another round

    A prompt takes up to config.rule.max_rounds rounds. ada-balance may give up earlier: with
    config.rule.max_rounds_all_correct = c > 0, a prompt with enough right answers and not a
    *single* wrong one ends after c rounds.
    """
    raise NotImplementedError


def keep(pool: list, n: int) -> list:
    """The n samples that go into the update (all, if the pool is smaller).

    pool: samples in the order of drawing, sample.index = 0, 1, ...; sample.correct says which kind.
    Keep n // 2 right ones and n - n // 2 wrong ones; if there are too few of one kind, the other
    fills up. Keep the first of each kind. The result is in the order of drawing.
    """
    raise NotImplementedError
