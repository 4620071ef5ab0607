"""Adaptive sampling: which prompts get more answers, when to stop, which answers are kept.

**The idea.** A policy gradient learns from differences between answers to the same prompt. If a
model is right 5 % of the time, n = 4 answers are all wrong for 81 % of the prompts. Then reward
minus mean is 0 four times, so there is no gradient, and the compute is wasted. Reinforce-Ada
continues to sample, in rounds, until a prompt has enough right and enough wrong answers.

           +---------- not yet, and fewer than N rounds: M more ----------+
           v                                                              |
    a round of M  -->  engine writes  -->  grader judges  -->  exit test on the WHOLE pool
                                                                          |
        update  <--  n answers, reward - pool mean  <--  keep n  <-- closed

Each prompt has two budgets: up to N*M answers are *sampled*, and n are *kept* for the update. Half
of the kept answers are right because they were selected so. Their mean therefore says nothing about
the prompt. The baseline is the mean of all sampled answers, the *pool*.

**Rounds.** Prompts do not wait for each other, but a round is always completed. Short answers
finish first. If right answers are shorter, half a round contains too many of them, and a decision
at that moment would bias the pool. The *next* round may start early, if it will be needed whatever
the missing answers are. This changes when answers are sampled, but not which answers.

**The rules** (`--sampler`). Each is a case of `SamplerConfig.rule`; to add one, name it in RULES.
    uniform      sample n, keep n, as in GRPO or in REINFORCE with a group baseline
    dapo         sample n; if all are right or all wrong, drop the prompt and try another one
    ada-pos      rounds of M until an answer is right; keep n, of both kinds if there are any
    ada-balance  rounds of M until n//2 answers are right and n - n//2 wrong; keep those (default)
    ada-est      sample ~ 1/sqrt(p of earlier epochs); keep all, weights ~ 1/sqrt(p of this pool)
    gvm          pilot answers estimate p; then sample where it lowers the gradient's variance most
The last section serves only ada-est and gvm. A prompt that is never solved takes N*M answers, and
its kept answers have the advantage 0.

**Use it** in another trainer, because it needs only the standard library (examples/own_loop.py).
`collect` takes an engine with submit(key, problem), step() -> [(key, rollout)] and busy, and a
grader with submit(key, problem, rollout) and result(key) -> verdict with .reward and .status. A
reward is any number, or NaN if there is no verdict. Then `set_advantages` keeps n of a group.

Papers: v1 and v3 are versions of Reinforce-Ada, arXiv 2510.04996; GVM is 2505.02391; DAPO is
2503.14476. The symbols n, M, N and p (pass rate of a prompt) are theirs. Their tau is `threshold`.
"""
import math
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Callable, Literal, NamedTuple

# For ada-est. v3 gives no values, so these are this project's choice.
EST_DECAY = 0.9  # factor of a prompt's older counts at each update
EST_ALPHA, EST_BETA = 0.5, 0.5  # Beta prior of a pass rate (Jeffreys')
EST_EPS = 0.01  # bounds 1/sqrt(p + eps) for a prompt that is never solved
EST_MIN, EST_MAX = 2, 32  # answers per prompt; 32 is also ada-balance's default maximum
# For gvm, with the values of its released code.
GVM_PILOTS = 8  # answers per prompt that estimate its pass rate
GVM_ALPHA, GVM_BETA = 1e-3, 2.0  # in `allocate_gvm`; p = sqrt(alpha) gets the most answers


# ---------------------------------------------------------------------------------------- the rules
RULES = ("uniform", "dapo", "ada-pos", "ada-balance", "ada-est", "gvm")


class Rule(NamedTuple):
    """Everything in which the samplers differ, as numbers: see `SamplerConfig.rule`."""

    round_size: int  # answers in each of a prompt's rounds
    rows_per_prompt: int  # answers kept for the update (ada-est, gvm: on average)
    max_rounds: int = 1
    min_correct: int = 0  # a prompt needs this many correct answers to be resolved
    min_wrong: int = 0  # and this many wrong answers
    max_rounds_all_correct: int = 0  # rounds of a prompt without a wrong answer; 0 = max_rounds
    drops: bool = False  # an unresolved prompt is not trained on
    refills: int = 0  # how often another prompt is tried instead of an unresolved one
    allocates: str = ""  # "by history", "by pilots": how pass rates divide a step's answers


# ------------------------------------------------------------------------------------ configuration
ADVANTAGES = ("pool-mean", "leave-one-out", "group-std", "positives-only")  # see `advantages`
WEIGHTINGS = ("none", "unbiased", "log", "inv_p")  # see `row_weights`


@dataclass(frozen=True)
class SamplerConfig:
    """All settings of the sampler. A trainer's config inherits from it."""

    sampler: Literal[RULES] = "ada-balance"  # a Literal, so that --help lists the choices
    """answers per prompt: n (uniform, dapo), rounds of M (ada-pos, -balance), by p (est, gvm)"""
    n: int = 4
    """kept answers n: how many of a prompt's answers are trained on (uniform, dapo: sampled)"""
    M: int = 8
    """round size M: answers per round (ada-est, gvm: per prompt, on average)"""
    N: int = 4
    """largest number of rounds N of a prompt (ada-pos, ada-balance)"""
    threshold: float = 0.7
    """a reward above it counts as right; baselines average the rewards themselves"""
    max_rounds_all_correct: int = 0
    """ada-balance: stop a prompt after this many rounds without a wrong answer; 0 = off"""
    drop_unresolved: bool = False
    """ada-pos, ada-balance: do not train on unresolved prompts, as in the papers"""
    advantage: Literal[ADVANTAGES] = "pool-mean"
    """what a reward is compared with; group-std is GRPO's, positives-only RAFT's"""
    weighting: Literal[WEIGHTINGS] = "none"
    """weights of the kept answers: none, inv_p (1/p), or such that the update follows about the
    gradient of p (unbiased) or of log p (log)"""

    @property
    def rule(self) -> Rule:
        n, M = self.n, self.M
        match self.sampler:
            case "uniform":
                return Rule(round_size=n, rows_per_prompt=n)
            case "dapo":  # if 2/3 of the prompts have no gradient, 4/5 of the places are filled
                return Rule(round_size=n, rows_per_prompt=n, min_correct=1, min_wrong=1,
                            drops=True, refills=3)
            case "ada-pos":
                return Rule(round_size=M, rows_per_prompt=n, max_rounds=self.N, min_correct=1,
                            drops=self.drop_unresolved)
            case "ada-balance":
                return Rule(round_size=M, rows_per_prompt=n, max_rounds=self.N,
                            min_correct=n // 2, min_wrong=n - n // 2,
                            max_rounds_all_correct=self.max_rounds_all_correct,
                            drops=self.drop_unresolved)
            case "ada-est":
                return Rule(round_size=M, rows_per_prompt=M, allocates="by history")
            case "gvm":
                return Rule(round_size=GVM_PILOTS, rows_per_prompt=M, allocates="by pilots")

    def validate(self) -> None:
        """Raises ValueError, one sentence, for settings that contradict each other."""
        choices = dict(sampler=RULES, advantage=ADVANTAGES, weighting=WEIGHTINGS)
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}")
        if min(self.n, self.M, self.N) < 1 or self.max_rounds_all_correct < 0:
            raise ValueError("n, M and N must be at least 1, and max_rounds_all_correct 0")
        rule = self.rule
        if rule.round_size < self.n and not rule.allocates:  # v1 Alg. 1 requires M >= n
            raise ValueError(f"a round of {self.M} is below n = {self.n}: raise M or lower n")
        compares = self.advantage != "positives-only" or rule.min_correct or rule.min_wrong
        if compares and rule.rows_per_prompt < 2:
            raise ValueError(f"set {'M' if rule.allocates else 'n'} to 2 or more, so that right "
                             "and wrong answers can be compared")
        by_history = rule.allocates == "by history"
        if by_history and not EST_MIN <= self.M <= EST_MAX:
            raise ValueError(f"ada-est samples {EST_MIN} to {EST_MAX} answers per prompt, so M, "
                             f"their mean, cannot be {self.M}")
        by_std, by_weight = self.advantage == "group-std", self.weighting != "none"
        if by_history + by_std + by_weight > 1:
            raise ValueError("ada-est, advantage group-std and weighting each weight prompts by "
                             "their pass rate: choose only one of them")


# ---------------------------------------------------------------------------------- data structures
@dataclass(slots=True)
class Sample:
    """One answer. `rollout` is what the engine returned; this file does not look into it."""

    index: int  # its place in the pool, in the order of sampling, not of finishing
    round: int  # 0, 1, ...
    rollout: Any = None  # None while the engine is writing, and one engine step longer: see `drive`
    reward: float = math.nan  # NaN before the verdict, and if the grader could not judge
    status: str | None = None  # the grader's status; None before the verdict
    correct: bool = False  # reward > threshold
    why: str = ""  # the grader's reason, where it gives one
    parts: dict = field(default_factory=dict)  # terms of the reward, if it is a sum
    row: Any = None  # the trainer's record of a kept answer


# Outcomes of a prompt. OPEN means that more rounds may follow.
OPEN, RESOLVED = "", "resolved"
TOO_FEW_CORRECT, TOO_FEW_WRONG = "too few correct", "too few wrong"
OUT_OF_BUDGET = "out of budget"  # gvm samples no more answers to it


@dataclass
class Group:
    """A prompt and all answers to it. The trainer gets this same object."""

    index: int  # its place in the batch
    problem: Any
    pool: list[Sample] = field(default_factory=list)  # all answers that were asked for
    rounds: int = 0  # started so far
    outcome: str = OPEN
    refill: int = 0  # dapo: how many prompts were tried before this one in its place
    # `set_advantages` sets the following fields after the last round.
    baseline: float = 0.0  # mean reward of the judged answers (gvm: without the pilots)
    p_hat: float = 0.0  # the share of them that is correct
    kept: list[Sample] = field(default_factory=list)  # for the update, in the order of sampling
    advantages: list[float] = field(default_factory=list)  # one per kept answer
    weights: list[float] = field(default_factory=list)  # one per kept answer

    @property
    def judged(self) -> list[Sample]:
        """The answers with a verdict. Without one, an answer says nothing about the policy, so it
        counts for neither exit test nor baseline, and is not kept."""
        return [s for s in self.pool if not math.isnan(s.reward)]

    def rows(self) -> list[tuple[Sample, float]]:
        """[(answer, advantage * weight)]: what multiplies grad log pi(answer) in the update."""
        return [(s, a * w) for s, a, w in zip(self.kept, self.advantages, self.weights)]

    @property
    def zero_signal(self) -> bool:
        """Whether the prompt gives no gradient: all coefficients are 0, or nothing is kept."""
        return not any(coefficient for _, coefficient in self.rows())


# ------------------------------------------------------------------------- when does a prompt end?
def exit_test(correct: int, wrong: int, rounds: int, config: SamplerConfig) -> str:
    """The outcome after `rounds` complete rounds; OPEN if another round follows."""
    rule = config.rule
    if correct >= rule.min_correct and wrong >= rule.min_wrong:
        return RESOLVED
    lacking = TOO_FEW_CORRECT if correct < rule.min_correct else TOO_FEW_WRONG
    most_rounds = rule.max_rounds
    if lacking == TOO_FEW_WRONG and wrong == 0 and rule.max_rounds_all_correct:
        # A prompt that is always solved would take N*M answers and give no gradient: end it early.
        most_rounds = min(most_rounds, rule.max_rounds_all_correct)
    return lacking if rounds >= most_rounds else OPEN


# ------------------------------------------------------------------------------------ what is kept?
def keep(pool: list[Sample], n: int) -> list[Sample]:
    """n answers, n//2 of them correct; if one kind has too few, more of the other (v1 Alg. 1).

    Of each kind it takes the first in the order of sampling, which is independent of the answers,
    so this choice is as good as a random one.
    """
    positives = [s for s in pool if s.correct]
    negatives = [s for s in pool if not s.correct]
    k_pos = min(n // 2, len(positives))
    k_neg = min(n - k_pos, len(negatives))
    k_pos = min(n - k_neg, len(positives))  # more, if there are too few wrong ones
    return sorted(positives[:k_pos] + negatives[:k_neg], key=lambda s: s.index)


# --------------------------------------------------------------------------- advantages and weights
def mean(values: list[float]) -> float:
    """The mean; exact if all values are equal, so that no rounding error becomes an advantage."""
    return values[0] if min(values) == max(values) else fmean(values)


def pass_rate(judged: list[Sample]) -> float:
    """Share of correct answers; 0 if there is no answer."""
    return sum(s.correct for s in judged) / max(len(judged), 1)


def advantages(kept_rewards: list[float], pool_rewards: list[float], kind: str) -> list[float]:
    """Advantages of the kept answers: their rewards r compared with those of the whole pool of m.

    pool-mean       r - mean                no division by std: docs/method.md#advantages
    leave-one-out   r - mean of the others  RLOO: unbiased for a fixed m; pool-mean is (m-1)/m of it
    group-std       (r - mean) / std        GRPO: std with m - 1 in the denominator
    positives-only  max(r, 0)               RAFT
    """
    m, baseline = len(pool_rewards), mean(pool_rewards)
    if kind == "positives-only":
        return [max(r, 0.0) for r in kept_rewards]
    if m < 2:
        return [0.0 for _ in kept_rewards]  # nothing to compare with
    scale = 1.0
    if kind == "leave-one-out":
        scale = m / (m - 1)
    elif kind == "group-std":
        scale = 1 / (stdev(pool_rewards) + 1e-6)
    return [(r - baseline) * scale for r in kept_rewards]


def row_weights(correct: list[bool], p_hat: float, rows_per_prompt: float, kind: str):
    """Weights of the kept answers, from which of them are correct and the pool's pass rate.

    Keeping half of each kind gives hard and easy prompts more weight (course/notes/3). "none" keeps
    this, as the released code does. The others weight an answer by its share of the pool:
        unbiased  c+ = p n/k_pos, c- = (1-p) n/k_neg   ascends p
        log       that, times 1/p                      ascends log p (v3 section 2.2)
        inv_p     "none", times 1/p                    v3 section 3.2; a hard prompt counts 1/(2p^2)
    """
    scale = 1.0
    if kind in ("log", "inv_p") and p_hat > 0:
        scale = 1 / p_hat
    if kind in ("none", "inv_p"):
        return [scale for _ in correct]
    k_pos = sum(correct)
    k_neg = len(correct) - k_pos
    c_pos = p_hat * rows_per_prompt / max(k_pos, 1)
    c_neg = (1 - p_hat) * rows_per_prompt / max(k_neg, 1)
    return [scale * (c_pos if c else c_neg) for c in correct]


def set_advantages(group: Group, config: SamplerConfig) -> None:
    """Choose the kept answers of a finished group, with their advantages and weights."""
    rule, pool = config.rule, group.judged
    if rule.allocates == "by pilots":  # the pilots are not trained on
        pool = [s for s in pool if s.round > 0]
    group.p_hat = pass_rate(pool or group.judged)  # gvm may sample nothing after the pilots
    if not pool:
        return
    rewards = [s.reward for s in pool]
    group.baseline = mean(rewards)  # for the log: `advantages` computes it again
    if group.outcome != RESOLVED and rule.drops:
        return
    # Keep n per prompt, or prompts with more rounds would have more rows. Rules that allocate the
    # answers keep all, because the number of a prompt's rows is its weight there.
    group.kept = pool if rule.allocates else keep(pool, config.n)
    group.advantages = advantages([s.reward for s in group.kept], rewards, config.advantage)
    p = group.p_hat
    if p == 0 and config.weighting in ("log", "inv_p"):
        p = 1 / (2 * len(pool))  # as if half an answer were right
    correct = [s.correct for s in group.kept]
    group.weights = row_weights(correct, p, rule.rows_per_prompt, config.weighting)
    if rule.allocates == "by history":
        # answers ~ 1/sqrt(p) times weight ~ 1/sqrt(p) is 1/p, the gradient of log p (v3)
        group.weights = [w / (group.p_hat + EST_EPS) ** 0.5 for w in group.weights]


# ----------------------------------------------------------------------------------------- the loop
def collect(
    problems: list, config: SamplerConfig, engine, grader, *,
    estimator: "Estimator | None" = None, more: Callable[[], Any] | None = None,
    grad_norms: Callable[[list], list[float]] | None = None,
) -> list[Group]:
    """Sample one step's batch: a Group with graded answers for each of `problems`, in order.

    estimator   ada-est: the caller keeps it from step to step; it is updated here
    more        dapo: returns a further problem, or None if there is none. Their groups follow those
                of `problems`. Dropped groups are returned, too, because they cost answers
    grad_norms  gvm: takes the groups with graded pilots, returns G_i of each; without it, G_i = 1

    Raises ValueError for a config that cannot work, RuntimeError if answers never come back.
    """
    config.validate()
    by_history = config.rule.allocates == "by history"
    collector = Collector(config, engine, grader, more)
    sizes = [config.rule.round_size for _ in problems]
    if by_history:
        sizes = estimator.sizes(problems, config.M)
    for problem, size in zip(problems, sizes):
        collector.add(problem, size)
    collector.drive()
    if by_history:
        for group in collector.groups:
            estimator.update(group)
    if config.rule.allocates == "by pilots":
        sample_after_pilots(collector, grad_norms)
        collector.drive()
    return collector.groups


class Collector:
    """One step's groups, and the loop that advances them.

    The submissions before each engine step depend on finished answers and their verdicts, but not
    on the clock or on the order in which verdicts arrive. So with a deterministic engine a run can
    be repeated exactly.
    """

    def __init__(self, config: SamplerConfig, engine, grader, more=None):
        self.config, self.engine, self.grader, self.more = config, engine, grader, more
        self.groups: list[Group] = []

    def add(self, problem, size: int, refill: int = 0) -> None:
        """Add a prompt to the batch and start its first round."""
        group = Group(len(self.groups), problem, refill=refill)
        self.groups.append(group)
        self.open_round(group, size)

    def open_round(self, group: Group, size: int) -> None:
        """Request `size` more answers to a prompt."""
        for index in range(len(group.pool), len(group.pool) + size):
            group.pool.append(Sample(index, group.rounds))
            self.engine.submit((group.index, index), group.problem)  # its key
        group.rounds += 1

    def drive(self) -> None:
        """Step the engine until no prompt is open.

            engine step t      some answers finish, and the grader gets them at once
            engine step t + 1  the grader and the engine work at the same time
            after that         the verdicts of step t are read, so prompts end or get a round

        So no decision depends on how long grading takes. An idle engine makes no step t + 1.
        """
        finished = []  # in the last engine step: [((prompt, its answer), rollout)]
        while self.engine.busy or finished:
            before = finished
            finished = list(self.engine.step()) if self.engine.busy else []
            for (i, index), rollout in finished:
                self.grader.submit((i, index), self.groups[i].problem, rollout)
            for (i, index), rollout in before:  # they count as finished only now
                self.groups[i].pool[index].rollout = rollout
            for i in sorted({i for (i, _), _ in before}):
                self.advance(self.groups[i])
        lost = [group.index for group in self.groups if group.outcome == OPEN]
        if lost:
            raise RuntimeError(
                f"the engine is idle, but answers to these prompts never came back: {lost}")

    def advance(self, group: Group) -> None:
        """End a prompt or start its next round, after a complete round.

        A round that is certain starts earlier, so one slow answer does not delay its prompt."""
        missing = sum(s.rollout is None for s in group.pool)
        if missing:
            if self.next_round_is_certain(group, missing):
                self.open_round(group, self.config.rule.round_size)
            return
        correct, wrong = self.verdicts(group)
        group.outcome = exit_test(correct, wrong, group.rounds, self.config)
        if group.outcome == OPEN:
            self.open_round(group, self.config.rule.round_size)
        elif group.outcome != RESOLVED:
            self.try_another(group)

    def next_round_is_certain(self, group: Group, missing: int) -> bool:
        """Whether the prompt needs another round, whatever the missing answers will be."""
        rule = self.config.rule
        if missing >= max(rule.min_correct, rule.min_wrong):
            return False  # the missing answers alone could satisfy the exit test
        correct, wrong = self.verdicts(group)
        # If k of the missing are correct. An open prompt would be open with fewer verdicts, too.
        outcomes = [exit_test(correct + k, wrong + missing - k, group.rounds, self.config)
                    for k in range(missing + 1)]
        return all(outcome == OPEN for outcome in outcomes)

    def verdicts(self, group: Group) -> tuple[int, int]:
        """(right, wrong) answers to a prompt, as soon as all finished ones have a verdict."""
        for sample in group.pool:
            if sample.rollout is not None and sample.status is None:
                verdict = self.grader.result((group.index, sample.index))
                sample.reward, sample.status = float(verdict.reward), verdict.status
                sample.why = getattr(verdict, "why", "")
                sample.parts = getattr(verdict, "parts", {})
                sample.correct = verdict.reward > self.config.threshold
        right = sum(s.correct for s in group.judged)
        return right, len(group.judged) - right

    def try_another(self, group: Group) -> None:
        """dapo: replace this prompt by another one, but only `refills` times per place."""
        if not self.more or group.refill >= self.config.rule.refills:
            return
        problem = self.more()
        if problem is not None:
            self.add(problem, self.config.rule.round_size, group.refill + 1)


# --------------------------------------------------- ada-est and gvm: how many answers per prompt?
def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Integers that sum to `total`: shares rounded down, then +1 for the largest remainders."""
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def allocate_est(p: list[float], total: int, eps: float, low: int, high: int) -> list[int]:
    """ada-est (v3 Alg. 1): n_x ~ 1/sqrt(p_x + eps) within [low, high]; they add up to `total`.

    The bounds must allow the total. Clipping changes the sum, so bisection finds the factor.
    """
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


def allocate_gvm(p: list[float], norms: list[float], total: int, alpha: float, beta: float):
    """GVM Prop. 1, rounded: n_i = total w_i / sum(w), w_i = G_i / sqrt(p_i + alpha/p_i^(beta-1)).

    norms: G_i, the mean gradient norm of a prompt's right answers. w_i = 0 where p_i = 0.
    """
    weights = [g / (x + alpha / x ** (beta - 1)) ** 0.5 if x > 0 else 0.0
               for x, g in zip(p, norms)]
    whole = sum(weights)
    if not whole:  # no prompt has a right answer
        return [0 for _ in p]
    return largest_remainder([total * w / whole for w in weights], total)


class Estimator:
    """ada-est's running pass rates of the prompts (Ada-EMA, v3 Alg. 1), as plain JSON.

    A problem's `.id` identifies it. In the first epoch all rates are equal: each prompt gets M.
    """

    def __init__(self):
        self.counts = {}  # id -> [T, K]: decayed counts of answers, of correct ones

    def pass_rate(self, problem: Any) -> float:
        """The posterior mean, (K + alpha) / (T + alpha + beta)."""
        T, K = self.counts.get(str(problem.id), (0.0, 0.0))
        return (K + EST_ALPHA) / (T + EST_ALPHA + EST_BETA)

    def update(self, group: Group) -> None:
        T, K = self.counts.get(str(group.problem.id), (0.0, 0.0))
        drawn, correct = len(group.judged), sum(s.correct for s in group.judged)
        self.counts[str(group.problem.id)] = [EST_DECAY * T + drawn, EST_DECAY * K + correct]

    def sizes(self, problems: list, M: int) -> list[int]:
        """How many answers to sample for each prompt, M on average."""
        rates = [self.pass_rate(problem) for problem in problems]
        return allocate_est(rates, M * len(problems), EST_EPS, EST_MIN, EST_MAX)


def sample_after_pilots(collector: Collector, grad_norms: Callable | None) -> None:
    """gvm: allocate M answers per prompt, on average, after the pilots of all prompts are done."""
    groups = collector.groups
    p = [pass_rate(group.judged) for group in groups]
    norms = grad_norms(groups) if grad_norms else [1.0 for _ in p]
    sizes = allocate_gvm(p, norms, collector.config.M * len(p), GVM_ALPHA, GVM_BETA)
    for group, rate, size in zip(groups, p, sizes):
        if size:
            group.outcome = OPEN
            collector.open_round(group, size)
        else:
            group.outcome = OUT_OF_BUDGET if rate else TOO_FEW_CORRECT
