"""Lab 3: when is a prompt done, and which of its samples are kept?"""
import ada_sampler as ada
from ada_sampler import Sample, SamplerConfig
from course import laws
from course.checks import Wrong, asked, must_be, must_equal

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
SETTINGS = [  # the same with other settings
    ("ada-balance", 1, 2, 4, "resolved", dict(n=3)),
    ("ada-balance", 2, 1, 4, "too few wrong", dict(n=3)),
    ("ada-balance", 2, 3, 4, "resolved", dict(n=5)),
    ("ada-balance", 1, 7, 4, "too few correct", dict(n=5)),
    ("ada-balance", 10, 9, 4, "too few wrong", dict(n=20)),
    ("ada-balance", 9, 9, 4, "too few correct", dict(n=20)),
    ("ada-balance", 3, 9, 4, "too few correct", dict(n=20)),
    ("ada-balance", 2, 6, 1, "", dict(n=6)), ("ada-balance", 3, 5, 1, "resolved", dict(n=6)),
    ("ada-balance", 0, 16, 2, "too few correct", dict(N=2)),
    ("ada-balance", 0, 32, 4, "", dict(N=8)),
    ("ada-balance", 16, 0, 2, "too few wrong", dict(max_rounds_all_correct=2)),
    ("ada-balance", 8, 0, 1, "", dict(max_rounds_all_correct=2)),
    ("ada-balance", 15, 1, 2, "", dict(max_rounds_all_correct=2)),
    ("ada-balance", 0, 16, 2, "", dict(max_rounds_all_correct=2)),
    ("ada-balance", 32, 0, 4, "too few wrong", dict(max_rounds_all_correct=9)),  # N at most
    ("ada-balance", 8, 0, 1, "", dict(n=20, max_rounds_all_correct=1))]  # 10 are to be right
DRAWS = [  # rule, pass rate, expected draws, chance to end unresolved; M = 8, N = 4, n = 4
    ("ada-balance", 0.5, 8.57, 0.000), ("ada-balance", 0.2, 13.42, 0.007),
    ("ada-balance", 0.05, 27.31, 0.520), ("ada-pos", 0.5, 8.03, 0.000),
    ("ada-pos", 0.2, 9.61, 0.001), ("ada-pos", 0.05, 19.16, 0.194)]


def ask(rule, correct, wrong, rounds, outcome, settings={}):
    said = "".join(f", {name}={value}" for name, value in settings.items())
    call = f"exit_test(correct={correct}, wrong={wrong}, rounds={rounds}), {rule}{said}"
    config = SamplerConfig(sampler=rule, **settings)
    must_equal(call, ada.exit_test(correct, wrong, rounds, config), outcome)


def check_draws():
    """expected draws and unresolved prompts, exactly"""
    for rule, p, draws, unresolved in DRAWS:
        pools = laws.closed_pools(p, SamplerConfig(sampler=rule))
        drawn = sum(q * (correct + wrong) for (correct, wrong, _), q in pools.items())
        must_be(f"expected draws of a prompt with pass rate {p}, {rule}", drawn, draws, 1e-3)
        resolved = sum(q for (*_, outcome), q in pools.items() if outcome == "resolved")
        must_be(f"its chance to end unresolved, pass rate {p}, {rule}", 1 - resolved, unresolved,
                1e-3)


def pools(longest: int):
    """All orders of right and wrong, the short pools first."""
    for m in range(longest + 1):
        for code in range(2**m):
            yield [Sample(i, 0, correct=bool(code >> i & 1)) for i in range(m)]


def picture(samples) -> str:
    return " ".join(f"{s.index}{'+' if s.correct else '-'}" for s in samples) or "nothing"


def check_keep_counts():
    """keep: how many of each kind, for every pool of up to 6"""
    for pool in pools(6):
        for n in (1, 2, 3, 4):
            right = sum(s.correct for s in pool)
            possible = [k for k in range(min(n, right) + 1)
                        if min(n, len(pool)) - k in range(len(pool) - right + 1)]
            k = min(possible, key=lambda k: abs(k - n // 2))  # as near to half as possible
            kept = ada.keep(pool, n)
            found = [sum(s.correct for s in kept), sum(not s.correct for s in kept)]
            must_be(f"keep of the pool {picture(pool)}, n={n}: [right, wrong] kept", found,
                    [k, min(n, len(pool)) - k])


def check_keep_order():
    """keep: the first of each kind, in the order of drawing"""
    for pool in pools(5):
        for n in (2, 3):
            given = list(pool)
            kept = ada.keep(given, n)
            call, indices = f"keep of the pool {picture(pool)}, n={n}", [s.index for s in kept]
            if given != pool:
                raise Wrong(f"{call}: the pool is {picture(given)} afterwards, but its mean is "
                            "still needed as baseline: leave it as it is")
            if len(set(indices)) < len(kept):
                raise Wrong(f"{call}: yours has a sample twice, {picture(kept)}")
            must_equal(f"{call}: the order of what is kept", indices, sorted(indices))
            for kind in (True, False):
                mine = [s.index for s in kept if s.correct == kind]
                first = [s.index for s in pool if s.correct == kind][:len(mine)]
                must_equal(f"{call}: yours keeps {picture(kept)}, {'right' if kind else 'wrong'} "
                           "ones", mine, first)


CHECKS = [
    (1, asked("rules of one round: uniform always closes, dapo wants one of each", ask, ONE_ROUND)),
    (2, asked("rules with rounds: resolved, going on, or given up, by what is missing", ask,
              ROUNDS)),
    (2, asked("odd and large n, N and the cap on rounds that are all correct", ask, SETTINGS)),
    (1, check_draws), (2, check_keep_counts), (2, check_keep_order)]
