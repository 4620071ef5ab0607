"""Adaptive sampling: who is sampled, how much, when to stop, what is kept and compared with what.

**The idea.** A policy gradient learns from differences between answers to the same prompt. Draw
n = 4 answers from a model that is right 5 % of the time, and 81 % of the prompts come back all
wrong: reward minus mean is 0 four times over, and the compute is lost. The prompt was not hopeless,
only four draws too few to see it. Reinforce-Ada goes on drawing, in rounds, until a prompt has
shown enough right and enough wrong answers.

           +---------- not yet, and fewer than N rounds: M more ----------+
           v                                                              |
    a round of M  -->  engine writes  -->  grader judges  -->  exit test on the WHOLE pool
                                                                          |
           update  <--  n rows, reward - pool mean  <--  keep n  <-- closed

Two budgets per prompt: up to N*M samples are *drawn*, n are *kept* for the update. The kept ones
are balanced by force, so their mean says nothing; the baseline is the mean of all that was drawn.

**Rounds.** No prompt waits for another's. But no round is cut short: short answers finish first,
and where right answers are the short ones, half a round shows too many of them. Deciding then would
tilt the pool, and its mean. What may come early is the *next* round, once the missing answers can
no longer prevent it: that changes when it is drawn, and not what (`Collector.advance`).

**The rules** (`--sampler`). Each is a row of RULES; a new one, such as ada-neg, is a new row.
    uniform      draw n, keep n: GRPO, or REINFORCE with a group baseline
    dapo         draw n; all right or all wrong: drop them, and try another prompt in their place
    ada-pos      rounds of M until k_pos answers are right; keep n, of both kinds if there are any
    ada-balance  rounds of M until n//2 answers are right and n - n//2 wrong; keep those (default)
    ada-est      remember each prompt's pass rate p; draw ~ 1/sqrt(p), keep all, weigh by 1/sqrt(p)
    gvm          pilot samples estimate p; then draw where it lowers the gradient's variance most

**A prompt that is never solved** (ada-balance) opens one round after the other, until N*M answers
are wrong and `exit_test` closes it as "too few correct", or until the step's budget is spent and it
is "out of budget". `keep` finds no correct answer and fills up with wrong ones, as the released
code does; the papers drop the prompt (drop_unresolved). Either way it teaches nothing: each reward
is the pool's mean, each coefficient 0. (Where rewards are more than 0 and 1, wrong answers differ,
and it does teach which were less wrong.) The trainer spares such rows the forward pass but counts
them in its mean, like an all-wrong group in GRPO: what a prompt counts must not depend on how many
others are silent. The log shows the prompt in unresolved_too_few_correct and zero_signal, its draws
in spent_by_pass_rate. With a single hit it is unresolved too, but does have a gradient: that hit
and n - 1 wrong answers are kept. Under the other rules it costs n draws (uniform), makes room for
another prompt (dapo), is remembered as hard and gets up to N_max draws at its next visit (ada-est),
or gets nothing beyond its pilots (gvm).

**See them** without a model: `python course/simulate.py --all --pass-rate 0.05`.

**Use them** in another trainer: this file needs only the standard library. `collect()` takes an
engine with submit(key, problem), step() -> [(key, rollout)] and busy, and a grader with submit(key,
problem, rollout) and result(key) -> verdict with .reward and .status. A reward is any number; only
whether it is above the threshold counts for who is sampled and what is kept. NaN is no verdict.

Papers: v1 and v3 are versions of Reinforce-Ada, arXiv 2510.04996; GVM is 2505.02391; DAPO is
2503.14476. Symbols are theirs: n, M, N, tau, p.
"""
import math
import sys
from dataclasses import dataclass, field, fields
from statistics import fmean, stdev
from typing import Any, Callable, Literal, NamedTuple, get_args, get_origin, get_type_hints


# ---------------------------------------------------------------------------------------- the rules
class Rule(NamedTuple):
    """All that tells one way of sampling from another: no other code asks for a rule's name.

    Why keep n? Then each prompt counts the same, and the update costs the same, however long the
    hunt was. Why all? A rule that shares out draws says by the number of rows what a prompt counts.
    """

    first: str  # the setting with the samples of a prompt's first round
    reads: str  # its settings, besides those that every rule has
    wants: Callable[[Any], tuple[int, int]] = lambda c: (0, 0)  # right, wrong: these resolve it
    rounds: bool = False  # may take up to N rounds of M; otherwise one round
    refills: bool = False  # drops an unresolved prompt, and tries another one in its place
    shares: str = ""  # "by memory", "by pilots": shares out the step's draws by pass rates
    kept: str = "n"  # "n" or "all" samples of a prompt
    rows: Callable[[Any], int] = lambda c: c.n  # that are kept of a prompt, on average


ADA = "n M N M_first drop_unresolved max_tokens_per_step"
RULES = {
    "uniform": Rule("n", "n"),
    "dapo": Rule(
        "n", "n max_refills max_tokens_per_step", wants=lambda c: (1, 1), refills=True),
    "ada-pos": Rule(
        "M_first", ADA + " k_pos", wants=lambda c: (c.k_pos, 0), rounds=True),
    "ada-balance": Rule(
        "M_first", ADA + " max_rounds_all_correct",
        wants=lambda c: (c.n // 2, c.n - c.n // 2), rounds=True),
    "ada-est": Rule(
        "M", "M N_min N_max est_decay est_alpha est_beta est_eps",
        shares="by memory", kept="all", rows=lambda c: c.M),
    "gvm": Rule(
        "gvm_pilot",
        "M gvm_pilot gvm_alpha gvm_beta gvm_norms gvm_reuse_pilots max_tokens_per_step",
        shares="by pilots", kept="all", rows=lambda c: c.M + c.gvm_pilot * c.gvm_reuse_pilots),
}


# ------------------------------------------------------------------------------------ configuration
def limited(default, least=None, most=None, also=()):
    """A dataclass field with a range: least <= value <= most, or one of `also`."""
    return field(default=default, metadata=dict(least=least, most=most, also=also))


@dataclass
class SamplerConfig:
    """All that decides about sampling. A trainer's config inherits from it."""

    sampler: Literal[tuple(RULES)] = "ada-balance"
    """who is sampled how much"""
    n: int = limited(4, least=1, most=4096)
    """samples kept per prompt for the update (uniform, dapo: also drawn)"""
    M: int = limited(8, least=1, most=4096)
    """samples per round (ada-est, gvm: per prompt, on average)"""
    N: int = limited(4, least=1, most=1000)
    """rounds a prompt may take (ada-pos, ada-balance)"""
    M_first: int = limited(0, least=0, most=4096)
    """samples in a prompt's first round (ada-pos, ada-balance); 0 = M"""
    threshold: float = 0.7
    """tau: a reward above it is correct; baselines average rewards as they are"""
    k_pos: int = limited(1, least=1, most=4096)
    """ada-pos: correct answers that close a prompt"""
    max_rounds_all_correct: int = limited(0, least=0, most=1000)
    """ada-balance: close a prompt after so many rounds without a wrong answer; 0 = off"""
    drop_unresolved: bool = False
    """ada-pos, ada-balance: unresolved prompts leave the batch, as in the papers"""
    max_samples_per_step: int = limited(0, least=0, most=10**9)
    """open no round that would exceed so many samples; 0 = off"""
    max_tokens_per_step: int = limited(0, least=0, most=10**12)
    """open no further round once so many tokens are written; 0 = off"""
    max_refills: int = limited(3, least=0, most=1000)
    """dapo: further prompts to try for one place in the batch; 0 = none"""
    advantage: Literal["pool-mean", "leave-one-out", "group-std", "positives-only"] = "pool-mean"
    """what a reward is compared with; group-std is GRPO's, positives-only RAFT's"""
    weighting: Literal["none", "unbiased", "log", "inv_p"] = "none"
    """row weights: none, unbiased (ascend p), log (ascend log p), inv_p (1/p)"""
    est_decay: float = limited(0.9, least=0, most=1)
    """ada-est: lambda, what a visit leaves of a prompt's old counts"""
    est_alpha: float = limited(0.5, least=1e-6, most=1e6)
    """ada-est: alpha of the Beta prior of a pass rate"""
    est_beta: float = limited(0.5, least=1e-6, most=1e6)
    """ada-est: beta of the Beta prior of a pass rate"""
    est_eps: float = limited(0.01, least=1e-9, most=1)
    """ada-est: eps in 1/sqrt(p + eps)"""
    N_min: int = limited(2, least=1, most=4096)
    """ada-est: fewest samples of a prompt"""
    N_max: int = limited(32, least=1, most=4096)
    """ada-est: most samples of a prompt"""
    gvm_pilot: int = limited(8, least=1, most=4096)
    """gvm: N', pilot samples per prompt, which estimate p"""
    gvm_alpha: float = limited(1e-3, least=0, most=1)
    """gvm: alpha, the penalty on hopeless prompts; 0 = none"""
    gvm_beta: float = limited(2.0, least=0, most=10)
    """gvm: beta, its exponent; with 2 a prompt of p = sqrt(alpha) gets most"""
    gvm_norms: Literal["head", "one"] = "head"
    """gvm: G, the gradient norm per prompt: of the language-model head, or one (G = 1)"""
    gvm_reuse_pilots: bool = False
    """gvm: train on the pilots too (the paper throws them away)"""

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work."""
        check_ranges(self)
        for f in fields(self):
            readers = [name for name, rule in RULES.items() if f.name in rule.reads.split()]
            if readers and self.sampler not in readers and getattr(self, f.name) != f.default:
                raise ValueError(f"{f.name} has no effect under {self.sampler}, only under "
                                 f"{', '.join(readers)}: leave it at {f.default}")
        for wrong, sentence in contradictions(self):
            if wrong:
                raise ValueError(sentence)


# ---------------------------------------------------------------------------------- data structures
@dataclass(slots=True)
class Sample:
    """One draw. `rollout` is what the engine returned; only its token_ids are counted here."""

    index: int  # its place in the prompt's pool: the order of drawing, never of finishing
    round: int  # 0, 1, ...
    rollout: Any = None  # None while the engine is writing
    reward: float = 0.0  # as the grader gave it, but see `without_verdict`
    status: str | None = None  # the grader's word for it; None while there is no verdict
    correct: bool = False  # reward > tau
    why: str = ""  # the grader's reason, where it gives one


@dataclass
class Group:
    """A prompt and all that was drawn for it: goes from sampler to trainer, never rebuilt."""

    index: int  # its place in the batch
    problem: Any
    pool: list[Sample] = field(default_factory=list)  # all draws
    rounds: int = 0  # opened so far
    # resolved, too few correct, too few wrong, out of budget, not drawn again; "" = open
    outcome: str = ""
    refill: int = 0  # dapo: prompts that were tried for this place before
    # the rest is set by `settle`, once all prompts are closed
    baseline: float = 0.0  # mean reward of the pool (gvm: without the pilots)
    p_hat: float = 0.0  # share of correct answers in it (gvm: if it is empty, in the pilots)
    kept: list[Sample] = field(default_factory=list)  # what the update sees, as they were drawn
    advantages: list[float] = field(default_factory=list)  # one per kept sample
    weights: list[float] = field(default_factory=list)  # one per kept sample

    def rows(self) -> list[tuple[Sample, float]]:
        """[(sample, advantage * weight)]: what multiplies grad log pi(sample) in the update."""
        return [(s, a * w) for s, a, w in zip(self.kept, self.advantages, self.weights)]

    @property
    def zero_signal(self) -> bool:
        """Nothing to learn here: every row's coefficient is 0, or there is no row."""
        return not any(coefficient for _, coefficient in self.rows())


# ------------------------------------------------------------------------ when does a prompt close?
def exit_test(correct: int, wrong: int, rounds: int, config: SamplerConfig) -> str:
    """The outcome after `rounds` complete rounds with these answers; "" if the prompt goes on."""
    rule = RULES[config.sampler]
    want_correct, want_wrong = rule.wants(config)
    if correct >= want_correct and wrong >= want_wrong:
        return "resolved"
    if correct < want_correct:
        lacking, most_rounds = "too few correct", config.N
    elif wrong == 0 and config.max_rounds_all_correct:
        # An always solved prompt eats all N*M draws and teaches nothing: that hunt can be capped.
        lacking, most_rounds = "too few wrong", config.max_rounds_all_correct
    else:
        lacking, most_rounds = "too few wrong", config.N
    return lacking if rounds >= most_rounds or not rule.rounds else ""


# ------------------------------------------------------------------------------------ what is kept?
def keep(pool: list[Sample], n: int) -> list[Sample]:
    """n samples, n//2 of them correct; where one kind is short the other fills up (v1 Alg. 1).

    The first of each kind in the order of drawing: given how many there are, they are as good as
    random ones.
    """
    positives = [s for s in pool if s.correct]
    negatives = [s for s in pool if not s.correct]
    k_pos = min(n // 2, len(positives))
    k_neg = min(n - k_pos, len(negatives))
    k_pos = min(n - k_neg, len(positives))
    return sorted(positives[:k_pos] + negatives[:k_neg], key=lambda s: s.index)


# --------------------------------------------------------------------------- advantages and weights
def mean(values: list[float]) -> float:
    """Equal values have exactly that mean: a rounding error must not pass for a signal."""
    return values[0] if min(values) == max(values) else fmean(values)


def without_verdict(rewards: list[float], if_all: float = 0.0) -> list[float]:
    """The rewards, where NaN (the grader failed) is 0, or the worst of the others if that is below.

    Neither the best answer nor a middling one: nobody must gain by making the grader fail. Where it
    failed on all of them, they are `if_all`.
    """
    given = [r for r in rewards if not math.isnan(r)]
    worst = min([0.0, *given]) if given else if_all
    return [worst if math.isnan(r) else r for r in rewards]


def advantages(kept: list[float], pool: list[float], kind: str) -> list[float]:
    """Advantages of the kept rewards, by the statistics of the pool: the kept ones were chosen.

    pool-mean       r - mean
    leave-one-out   r - mean of the others  RLOO: unbiased; pool-mean shrinks by (m-1)/m
    group-std       (r - mean) / std        GRPO: std with m - 1 in the denominator
    positives-only  max(r, 0)               RAFT

    Why pool-mean does not divide by std, about sqrt(p(1-p)): that is another objective, 2 arcsin
    sqrt(p), in which hard and easy prompts count more than middling ones. And the larger a pool,
    the more a lucky hit counts: 22.6 for one in 512 (v1 section 2.3).
    """
    m, baseline = len(pool), mean(pool)
    if kind == "positives-only":
        return [max(r, 0.0) for r in kept]
    if m < 2:
        return [0.0 for _ in kept]  # nothing to compare with
    scale = 1.0
    if kind == "leave-one-out":
        scale = m / (m - 1)
    elif kind == "group-std":
        scale = 1 / (stdev(pool) + 1e-6)
    return [(r - baseline) * scale for r in kept]


def row_weights(correct: list[bool], p_hat: float, n: float, kind: str) -> list[float]:
    """Weights of the kept rows, from which of them are correct and the pass rate of the pool.

    "none" is the default and the released code: every row counts 1. It pays to know what that
    optimises, for keeping half of each kind changes the objective. With the pool mean as baseline,
    the expected update of a balanced prompt is w(p) grad p with
    w(p) = [p^2 + (1-p)^2] / [2p(1-p)]: about 1/(2p) where p is small, and as large where 1-p is
    small. (This assumes a pool large enough that its mean is p. For 4 rounds of 8 and a small p,
    w(p) is less.) To undo it, a row stands for its share of the pool:
        unbiased  c+ = p n/k_pos, c- = (1-p) n/k_neg   ascends p
        log       that, times 1/p                      ascends log p (v3 section 2.2)
        inv_p     "none", times 1/p                    v3 section 3.2 to the letter: about 1/(2p^2)
    If all m draws are kept, c+ = c- = n/m cancels GVM's allocation; with positives-only and log it
    is the GVM paper's estimator: the sum over the accepted samples, times 1/(n_i p_i).
    """
    scale = 1.0
    if kind in ("log", "inv_p") and p_hat > 0:  # `settle` knows a pool's size, and puts a floor
        scale = 1 / p_hat
    if kind in ("none", "inv_p"):
        return [scale for _ in correct]
    k_pos = sum(correct)
    k_neg = len(correct) - k_pos
    c_pos = p_hat * n / max(k_pos, 1)
    c_neg = (1 - p_hat) * n / max(k_neg, 1)
    return [scale * (c_pos if c else c_neg) for c in correct]


def rows_per_prompt(config: SamplerConfig) -> int:
    """What a prompt brings to the update, on average: the n of `row_weights`."""
    return RULES[config.sampler].rows(config)


def settle_all(groups: list[Group], config: SamplerConfig, estimator=None) -> None:
    """Settle a whole step; ada-est remembers it.

    A prompt without any verdict gets the worst reward of the step. It teaches nothing either way.
    But where rewards are negative a 0 would be the best of all, and the curve would rise.
    """
    worst = min(without_verdict([s.reward for group in groups for s in group.pool]), default=0.0)
    for group in groups:
        settle(group, config, worst)
        if RULES[config.sampler].shares == "by memory":
            estimator.update(group)


def settle(group: Group, config: SamplerConfig, worst: float = 0.0) -> None:
    """Keep, compare, weigh: fills in the rest of a closed group.

    worst: the reward of all its answers if none has a verdict.

    Weights with 1/p take p = 1/(2m), half a hit, where none of m draws is correct. With rewards
    beside 0 and 1 the wrong answers of such a prompt differ, so it has a signal, and without the
    floor it would count 1 where one with a single hit counts m.
    """
    rule, pool = RULES[config.sampler], group.pool
    if not pool:
        return
    for s, reward in zip(pool, without_verdict([s.reward for s in pool], worst)):
        s.reward = reward
    group.p_hat = pass_rate(pool)
    if rule.shares == "by pilots" and not config.gvm_reuse_pilots:
        pool = [s for s in pool if s.round > 0]
        if not pool:
            return
        group.p_hat = pass_rate(pool)
    rewards = [s.reward for s in pool]
    group.baseline = mean(rewards)
    drops = config.drop_unresolved or rule.refills
    if drops and group.outcome != "resolved":
        return
    group.kept = keep(pool, config.n) if rule.kept == "n" else pool
    correct, n = [s.correct for s in group.kept], rows_per_prompt(config)
    group.advantages = advantages([s.reward for s in group.kept], rewards, config.advantage)
    p = max(group.p_hat, 1 / (2 * len(pool)) if config.weighting in ("log", "inv_p") else 0)
    group.weights = row_weights(correct, p, n, config.weighting)
    if rule.shares == "by memory":  # v3 Alg. 1: half of the log objective by sampling, half here
        group.weights = [w / (group.p_hat + config.est_eps) ** 0.5 for w in group.weights]


def pass_rate(pool: list[Sample]) -> float:
    """Share of correct answers."""
    return sum(s.correct for s in pool) / len(pool)


# --------------------------------------------------------------------------------------- allocation
def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Integers that add up to `total`: the shares rounded down, then +1 by largest remainder."""
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def allocate_est(p: list[float], total: int, eps: float, low: int, high: int) -> list[int]:
    """ada-est (v3 Alg. 1): n_x ~ 1/sqrt(p_x + eps) within [low, high]; they add up to `total`.

    Clipping changes the sum, so the factor is searched for (water-filling: the sum grows with it).
    Raises ValueError if the bounds cannot meet the total.
    """
    if not low * len(p) <= total <= high * len(p):
        raise ValueError(f"{total} samples cannot be shared out over {len(p)} prompts, "
                         f"{low} to {high} each")
    weights = [(x + eps) ** -0.5 for x in p]
    below, above = 0.0, high / min(weights, default=1.0)
    for _ in range(60):
        factor = (below + above) / 2
        shares = [min(max(factor * w, low), high) for w in weights]
        if sum(shares) < total:
            below = factor
        else:
            above = factor
    return largest_remainder(shares, total)


def allocate_gvm(
    p: list[float], norms: list[float], total: int, alpha: float, beta: float
) -> list[int]:
    """GVM Prop. 1: n_i = total w_i / sum(w), w_i = G_i / sqrt(p_i + alpha/p_i^(beta-1)).

    norms: G_i, the mean gradient norm of a prompt's accepted samples. w_i = 0 where p_i = 0; if all
    w_i are 0, nobody gets anything.
    """
    weights = [
        g / (x + alpha / x ** (beta - 1)) ** 0.5 if x > 0 else 0.0 for x, g in zip(p, norms)
    ]
    whole = sum(weights)
    if not whole:
        return [0 for _ in p]
    return largest_remainder([total * w / whole for w in weights], total)


class Estimator:
    """Ada-EMA (v3 Alg. 1): prompts' pass rates, remembered between visits. Its state is plain JSON.

    A problem is known by its `.id`. In the first epoch nothing is known: everyone gets M draws.
    """

    def __init__(self, config: SamplerConfig):
        self.config = config
        self.counts = {}  # id -> [T, K]: decayed counts of draws, of correct draws

    def pass_rate(self, problem: Any) -> float:
        """The posterior mean, (K + alpha) / (T + alpha + beta)."""
        T, K = self.counts.get(str(problem.id), (0.0, 0.0))
        alpha, beta = self.config.est_alpha, self.config.est_beta
        return (K + alpha) / (T + alpha + beta)

    def update(self, group: Group) -> None:
        if not group.pool:
            return  # a prompt that got no draw taught nothing, and what is known of it stays
        T, K = self.counts.get(str(group.problem.id), (0.0, 0.0))
        drawn, correct = len(group.pool), sum(s.correct for s in group.pool)
        decay = self.config.est_decay
        self.counts[str(group.problem.id)] = [decay * T + drawn, decay * K + correct]

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(counts) for key, counts in self.counts.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        self.counts = {key: list(counts) for key, counts in state.items()}


# ----------------------------------------------------------------------------------------- the loop
def collect(
    problems: list, config: SamplerConfig, engine, grader, *,
    estimator: Estimator | None = None, more: Callable[[], Any] | None = None,
    grad_norms: Callable[[list], list[float]] | None = None,
    barrier: bool = False, early_opening: bool = True, part: slice | None = None,
) -> list[Group]:
    """Sample one step's batch. Returns one closed Group per problem, in the order of `problems`.

    estimator      ada-est: kept by the caller from step to step; updated here
    more           dapo: gives one further problem, or None if there is none. Their groups follow
                   those of `problems`; dropped ones are returned too, for they did cost samples
    grad_norms     gvm: from groups with graded pilots to one G_i per group; without it, G_i = 1
    barrier        decide only when no prompt has an unfinished round, as the papers' code does
    early_opening  open a prompt's next round as soon as it is certain (see `Collector.advance`)
    part           sample these of the problems only; what ada-est gives them is decided among all.
                   Whoever has the groups of all parts calls `settle_all`

    Raises ValueError for a config that cannot work, RuntimeError if the engine loses samples.
    """
    config.validate()
    run = Collector(config, engine, grader, more, barrier, early_opening)
    sizes = first_sizes(problems, config, estimator)
    for problem, size in list(zip(problems, sizes))[part or slice(None)]:
        run.add(problem, size)
    run.drive()
    if RULES[config.sampler].shares == "by pilots":
        run.second_stage(grad_norms)
        run.drive()
    if part is None:
        settle_all(run.groups, config, estimator)
    return run.groups


def first_size(config: SamplerConfig) -> int:
    return getattr(config, RULES[config.sampler].first) or config.M


def first_sizes(problems: list, config: SamplerConfig, estimator: Estimator | None) -> list[int]:
    """How much of every prompt is drawn before this step knows anything about it."""
    if RULES[config.sampler].shares != "by memory":
        return [first_size(config) for _ in problems]
    if estimator is None:
        raise ValueError("ada-est needs estimator=Estimator(config), kept from step to step")
    total = min(config.M * len(problems), config.max_samples_per_step or sys.maxsize)
    low = min(config.N_min, total // max(len(problems), 1))
    rates = [estimator.pass_rate(problem) for problem in problems]
    return allocate_est(rates, total, config.est_eps, low, config.N_max)


class Collector:
    """The groups of one step, what they have cost so far, and the loop that takes them on.

    What is submitted before which engine step depends on finished samples and their verdicts, never
    on the clock or the order in which verdicts come in: with a deterministic engine, a run can be
    repeated exactly.
    """

    def __init__(self, config, engine, grader, more, barrier, early_opening):
        self.config, self.engine, self.grader, self.more = config, engine, grader, more
        self.barrier, self.early_opening = barrier, early_opening
        self.groups: list[Group] = []
        self.samples = 0  # drawn so far, finished or not
        self.tokens = 0  # of the finished ones

    def add(self, problem, size: int, refill: int = 0) -> None:
        """Take a prompt into the batch and open its first round."""
        group = Group(len(self.groups), problem, refill=refill)
        self.groups.append(group)
        if not self.open_round(group, size):
            group.outcome = "out of budget"

    def affordable(self, size: int) -> bool:
        """Is there budget for a round of this size?"""
        samples = self.config.max_samples_per_step or sys.maxsize
        tokens = self.config.max_tokens_per_step or sys.maxsize
        return size > 0 and self.samples + size <= samples and self.tokens < tokens

    def scarce(self) -> bool:
        """Could the open prompts ask for more than the budget still has?

        Then nobody may go ahead. Otherwise the fastest prompts would take the rest, favouring
        whichever kind is shorter. So decisions wait for all unfinished rounds, and come in the
        order of the batch. Nobody knows how many tokens a round will take, so under a limit of
        tokens they always wait. (A refill of dapo is a new prompt, equally good whoever made room
        for it.)
        """
        config = self.config
        if not RULES[config.sampler].rounds:
            return False
        if config.max_tokens_per_step:
            return True
        still_open = [group for group in self.groups if not group.outcome]
        wanted = sum(config.M * (config.N - group.rounds) for group in still_open)
        return self.samples + wanted > (config.max_samples_per_step or sys.maxsize)

    def open_round(self, group: Group, size: int) -> bool:
        """Submit `size` more samples of a prompt; False, and nothing done, if not affordable."""
        if not self.affordable(size):
            return False
        for index in range(len(group.pool), len(group.pool) + size):
            group.pool.append(Sample(index, group.rounds))
            key = (group.index, index)  # by which the sample finds its way home
            self.engine.submit(key, group.problem)
        group.rounds += 1
        self.samples += size
        return True

    def drive(self) -> None:
        """Step the engine until every prompt is closed.

        A finished sample goes to the grader at once and is acted on one engine step later: grading
        overlaps with writing, and yet no decision depends on how long it takes. When the engine is
        idle, what is finished is acted on at once.
        """
        arrived = []
        while self.engine.busy or arrived:
            due = arrived
            arrived = list(self.engine.step()) if self.engine.busy else []
            for key, rollout in arrived:
                self.grader.submit(key, self.groups[key[0]].problem, rollout)
            if (arrived or self.engine.busy) and (self.barrier or self.scarce()):
                arrived = due + arrived  # all of them become due when the engine is idle
                continue
            for (p, index), rollout in due:
                self.groups[p].pool[index].rollout = rollout
                self.tokens += len(rollout.token_ids)
            for p in sorted({p for (p, _), _ in due}):
                self.advance(self.groups[p])
        lost = [group.index for group in self.groups if not group.outcome]
        if lost:
            raise RuntimeError(
                f"the engine is idle, but samples of these prompts never came back: {lost}")

    def advance(self, group: Group) -> None:
        """Close a prompt, open its next round, or go on waiting.

        A round with answers missing closes nothing, for those are the long ones. But where the exit
        test at its end will fail whatever they turn out to be, the next round is certain, and may
        be opened now: a single straggler no longer holds up its prompt.
        """
        config = self.config
        missing = sum(s.rollout is None for s in group.pool)
        quota = max(RULES[config.sampler].wants(config))
        if missing and (not self.early_opening or missing >= quota):
            return  # the missing ones may still be all that is lacking: nothing is certain yet
        self.read_verdicts(group)
        correct = sum(s.correct for s in group.pool)
        wrong = len(group.pool) - missing - correct
        if missing:
            ends = [exit_test(correct + k, wrong + missing - k, group.rounds, config)
                    for k in range(missing + 1)]  # k of the missing ones turn out correct
            if not any(ends):
                self.open_round(group, config.M)
            return
        group.outcome = exit_test(correct, wrong, group.rounds, config)
        if not group.outcome and not self.open_round(group, config.M):
            group.outcome = "out of budget"
        if RULES[config.sampler].refills and group.outcome != "resolved":
            self.try_another(group)

    def read_verdicts(self, group: Group) -> None:
        """Wait for the verdicts on all finished samples of a prompt."""
        for sample in group.pool:
            if sample.rollout is not None and sample.status is None:
                verdict = self.grader.result((group.index, sample.index))
                sample.reward, sample.status = verdict.reward, verdict.status
                sample.why = getattr(verdict, "why", "")
                sample.correct = verdict.reward > self.config.threshold

    def try_another(self, group: Group) -> None:
        """dapo: try another prompt in this one's place, but not for ever: then it stays empty."""
        if not self.more or group.refill >= self.config.max_refills:
            return
        if not self.affordable(self.config.n):
            return
        problem = self.more()
        if problem is not None:
            self.add(problem, self.config.n, group.refill + 1)

    def second_stage(self, grad_norms: Callable[[list[Group]], list[float]] | None) -> None:
        """gvm: share out M per prompt by what the pilots showed. Here alone, prompts wait."""
        config = self.config
        groups = [group for group in self.groups if group.pool]
        p = [pass_rate(group.pool) for group in groups]
        norms = grad_norms(groups) if grad_norms else [1.0 for _ in groups]
        left = (config.max_samples_per_step or sys.maxsize) - self.samples
        wanted = config.M * len(groups)
        total = min(wanted, left)
        sizes = allocate_gvm(p, norms, total, config.gvm_alpha, config.gvm_beta)
        for group, rate, size in zip(groups, p, sizes):
            group.outcome = ""
            if self.open_round(group, size):
                continue
            if not rate:
                group.outcome = "too few correct"
            elif size or total < wanted:
                group.outcome = "out of budget"
            else:
                group.outcome = "not drawn again"


# ------------------------------------------------------------------------------ what cannot work
KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def check_ranges(config: Any) -> None:
    """Check every field of a dataclass against its type, its `Literal` choices and its range.

    Raises ValueError, one sentence that names the field and the value.
    """
    hints = get_type_hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        wanted = misfit(value, hints[f.name], **f.metadata)
        if wanted:
            raise ValueError(f"{f.name} must be {wanted}, not {value!r}")


def misfit(value, kind, least=None, most=None, also=()) -> str:
    """What a value should be; "" if it is. A bool is no number, a whole number may be a float."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    if kind in KINDS and type(value) is not kind and not (kind is float and type(value) is int):
        return KINDS[kind]
    if value is None or value in also:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    words = "".join(f"{each:g} or " for each in also)
    if least is not None and value < least:
        return f"{words}at least {least}"
    return f"at most {most}" if most is not None and value > most else ""


def contradictions(c: SamplerConfig) -> list[tuple[bool, str]]:
    """[(is it so?, what to do)]: sizes that cannot work, what has no effect, what divides twice."""
    rule, first = RULES[c.sampler], first_size(c)
    smallest, draws = min(first, c.M), first + (c.N - 1) * c.M
    rows = "n" if rule.kept == "n" else "M"
    alone = c.gvm_reuse_pilots or (c.advantage == "positives-only" and rule.wants(c) == (0, 0))
    more_rounds, refills = rule.rounds and c.N > 1, rule.refills and c.max_refills
    further = more_rounds or refills or rule.shares == "by pilots"
    est, std = rule.shares == "by memory", c.advantage == "group-std"
    return [
        # v1 Alg. 1 asks for M >= n: otherwise ada-pos could close with fewer than n samples
        (rule.rounds and smallest < c.n,
         f"a round of {smallest} is below n = {c.n}: raise M (and M_first) or lower n"),
        (rule.rounds and draws < c.k_pos,
         f"k_pos = {c.k_pos} is more than all {draws} draws: raise M or N"),
        (getattr(c, rows) < 2 and not alone,
         f"{rows} = 1 leaves nothing to compare a sample with: set {rows} to 2 or more"),
        (est and not c.N_min <= c.M <= c.N_max, "M must lie from N_min to N_max for ada-est"),
        (0 < c.max_samples_per_step < first,
         f"max_samples_per_step = {c.max_samples_per_step} does not allow one prompt its first "
         f"{first} samples: raise it, or 0 for off"),
        (c.M_first and c.N == 1,
         "M_first has no effect with N = 1, where the first round is all: set M"),
        (c.max_rounds_all_correct >= c.N,
         f"max_rounds_all_correct has no effect from N = {c.N} on: lower it, or 0 for off"),
        (c.max_tokens_per_step and not further,
         "max_tokens_per_step has no effect where no prompt gets a further round: leave it at 0"),
        (not c.gvm_alpha and c.gvm_beta != SamplerConfig.gvm_beta,
         f"gvm_beta has no effect with gvm_alpha = 0: leave it at {SamplerConfig.gvm_beta}"),
        (est and c.weighting != "none",
         "ada-est weighs by 1/sqrt(p + eps): leave weighting at none"),
        (est and std,
         "ada-est weighs by 1/sqrt(p + eps), and group-std would divide once more: set advantage "
         "to pool-mean"),
        (std and c.weighting != "none",
         f"group-std divides by the standard deviation, so weighting {c.weighting} would not be "
         "what it says: set advantage to pool-mean, or weighting to none"),
    ]
