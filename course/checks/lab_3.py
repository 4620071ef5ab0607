"""Lab 3: when is a prompt done, and which of its samples are kept?"""
import itertools

import ada_sampler as ada
from ada_sampler import Sample, SamplerConfig
from course import laws
from course.checks import asked, must_be

ONE_ROUND = [  # rule, correct, wrong, rounds, outcome; n = 4, N = 4
    ("uniform", 0, 4, 1, "resolved"), ("uniform", 4, 0, 1, "resolved"),
    ("ada-est", 8, 0, 1, "resolved"), ("gvm", 0, 8, 2, "resolved"),
    ("dapo", 1, 3, 1, "resolved"), ("dapo", 0, 4, 1, "too few correct"),
    ("dapo", 4, 0, 1, "too few wrong")]
ROUNDS = [  # the same for rules with rounds
    ("ada-balance", 2, 2, 1, "resolved"), ("ada-balance", 1, 7, 1, ""),
    ("ada-balance", 7, 1, 1, ""), ("ada-balance", 8, 0, 1, ""), ("ada-balance", 0, 24, 3, ""),
    ("ada-balance", 1, 31, 4, "too few correct"), ("ada-balance", 31, 1, 4, "too few wrong"),
    ("ada-pos", 1, 7, 1, "resolved"), ("ada-pos", 8, 0, 1, "resolved"), ("ada-pos", 0, 8, 1, ""),
    ("ada-pos", 0, 32, 4, "too few correct")]
SETTINGS = [("ada-balance", *row) for row in [  # the same with other settings
    (1, 2, 4, "resolved", dict(n=3)),
    (2, 1, 4, "too few wrong", dict(n=3)),
    (2, 3, 4, "resolved", dict(n=5)),
    (1, 7, 4, "too few correct", dict(n=5)),
    (10, 9, 4, "too few wrong", dict(n=20)),
    (9, 9, 4, "too few correct", dict(n=20)),
    (3, 9, 4, "too few correct", dict(n=20)),
    (2, 6, 1, "", dict(n=6)), (3, 5, 1, "resolved", dict(n=6)),
    (0, 16, 2, "too few correct", dict(N=2)),
    (0, 32, 4, "", dict(N=8)),
    (16, 0, 2, "too few wrong", dict(max_rounds_all_correct=2)),
    (8, 0, 1, "", dict(max_rounds_all_correct=2)),
    (15, 1, 2, "", dict(max_rounds_all_correct=2)),
    (0, 16, 2, "", dict(max_rounds_all_correct=2)),
    (32, 0, 4, "too few wrong", dict(max_rounds_all_correct=9)),  # N at most
    (8, 0, 1, "", dict(n=20, max_rounds_all_correct=1)),  # 10 are to be right
    (16, 0, 2, "too few wrong", dict(n=20, max_rounds_all_correct=1))]]
DRAWS = [  # rule, pass rate, expected draws, chance to end unresolved; M = 8, N = 4, n = 4
    ("ada-balance", 0.5, 8.57, 0.000), ("ada-balance", 0.2, 13.42, 0.007),
    ("ada-balance", 0.05, 27.31, 0.520), ("ada-pos", 0.5, 8.03, 0.000),
    ("ada-pos", 0.2, 9.61, 0.001), ("ada-pos", 0.05, 19.16, 0.194)]


def ask(sampler, correct, wrong, rounds, outcome, settings={}):
    config = SamplerConfig(sampler=sampler, **settings)
    rule = config.rule
    names = ["min_correct", "min_wrong", "max_rounds"]
    names += ["max_rounds_all_correct"] if sampler == "ada-balance" else []
    said = ", ".join(f"{name}={getattr(rule, name)}" for name in names)
    must_be(f"exit_test(correct={correct}, wrong={wrong}, rounds={rounds}), {sampler} with {said}",
            ada.exit_test(correct, wrong, rounds, config), outcome)


def ask_draws(rule, p, draws, unresolved):
    pools = laws.closed_pools(p, SamplerConfig(sampler=rule))
    drawn = sum(q * (correct + wrong) for (correct, wrong, _), q in pools.items())
    prompt = f"a prompt with pass rate {p}, {rule} with n=4, M=8, N=4"
    must_be(f"the expected number of samples of {prompt}", drawn, draws, 1e-3)
    resolved = sum(q for (*_, outcome), q in pools.items() if outcome == "resolved")
    must_be(f"the probability that {prompt} ends unresolved", 1 - resolved, unresolved, 1e-3)


def half_right(pool, n):
    """Of all choices of n, in the order of drawing, the first that is nearest to half right."""
    choices = itertools.combinations(pool, min(n, len(pool)))
    return min(choices, key=lambda choice: abs(sum(right for _, right in choice) - n // 2))


def picture(pool) -> str:
    return " ".join(f"{place}{'+' if right else '-'}" for place, right in pool) or "nothing"


def counts(pool) -> list[int]:
    return [sum(right == kind for _, right in pool) for kind in (True, False)]


def keep_of(pool, n) -> tuple:
    """What is kept of a pool of (place, right?), and the pool afterwards."""
    return asked.kept([Sample(place, 0, correct=right) for place, right in pool], n)


def ask_keep_counts(pool, n):
    must_be(f"keep of the pool {picture(pool)}, n={n}: [right, wrong] kept",
            counts(keep_of(pool, n)[0]), counts(half_right(pool, n)))


def ask_keep_order(pool, n):
    call, (kept, afterwards) = f"keep of the pool {picture(pool)}, n={n}", keep_of(pool, n)
    must_be(call, picture(kept), picture(half_right(pool, n)))
    must_be(f"{call}: the pool afterwards, whose mean is still needed as baseline",
            picture(afterwards), picture(pool))


POOLS = [[*enumerate(drawn)]  # all of up to 6 draws
         for m in range(7) for drawn in itertools.product((False, True), repeat=m)]
CHECKS = [
    (1, "rules of one round: uniform always closes, dapo wants one of each", ask, ONE_ROUND),
    (2, "rules with rounds: resolved, going on, or given up, by what is missing", ask, ROUNDS),
    (2, "odd and large n, N and the cap on rounds that are all correct", ask, SETTINGS),
    (1, "expected draws and unresolved prompts, exactly", ask_draws, DRAWS),
    (2, "keep: how many of each kind, for every pool of up to 6", ask_keep_counts,
     [*itertools.product(POOLS, (1, 2, 3, 4))]),
    (2, "keep: the first of each kind, in the order of drawing", ask_keep_order,
     [*itertools.product(POOLS, (2, 3))])]
