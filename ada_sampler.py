"""Adaptive sampling: which prompts get more samples, when to stop, which samples are kept.

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

Two budgets per prompt: up to N*M samples are *drawn*, n are *kept* for the update. Half of the kept
are right because they were chosen so, however hard the prompt is: their mean says nothing of it.
The baseline is the mean of all that was drawn.

**Rounds.** Prompts do not wait for each other, but a round is always completed. Short answers
finish first. If right answers are the short ones, half a round shows too many of them, and a
decision at that moment would bias the pool and its mean. The *next* round may start early, as soon
as it will be needed however the missing answers turn out. This changes when it is drawn, not what
(`Collector.advance`).

**The rules** (`--sampler`). Each is a row of RULES; a new one, such as ada-neg, is a new row.
    uniform      draw n, keep n: GRPO, or REINFORCE with a group baseline
    dapo         draw n; if all are right or all wrong, drop the prompt and try another one
    ada-pos      rounds of M until an answer is right; keep n, of both kinds if there are any
    ada-balance  rounds of M until n//2 answers are right and n - n//2 wrong; keep those (default)
    ada-est      draw ~ 1/sqrt(p), p from earlier visits; keep all, weigh by this pool's 1/sqrt(p)
    gvm          pilot samples estimate p; then draw where it lowers the gradient's variance most
If you only want ada-balance, skip the last section, which serves ada-est and gvm.

**A prompt that is never solved** (ada-balance).
    1. After N*M wrong answers `exit_test` closes it as "too few correct".
    2. `keep` finds no right answer and takes n wrong ones, as the released code does. The papers
       drop the prompt instead (drop_unresolved).
    3. Each reward equals the pool's mean, so each coefficient is 0: the prompt teaches nothing,
       unless the rewards of wrong answers differ.
    4. The trainer skips the forward pass of such rows, but counts them in its mean: a prompt's
       weight must not depend on how many others are silent.
    5. The log shows it in unresolved_too_few_correct, zero_signal and spent_by_pass_rate.
With a single hit it is unresolved too, but has a gradient: the hit and n - 1 wrong answers are
kept. Of the other rules, uniform spends n draws on it; dapo replaces it; ada-est gives it up to
N_MAX draws at its next visit; gvm gives it nothing beyond its pilots.

**Try them** without a model: `python course/simulate.py --pass-rate 0.05 0.3 0.9`.

**Use them** in another trainer: this file needs only the standard library. `collect()` takes an
engine with submit(key, problem), step() -> [(key, rollout)] and busy, and a grader with submit(key,
problem, rollout) and result(key) -> verdict with .reward and .status. Rewards may be any number;
who is sampled and what is kept depends only on whether they exceed the threshold. NaN means that
there is no verdict.

Papers: v1 and v3 are versions of Reinforce-Ada, arXiv 2510.04996; GVM is 2505.02391; DAPO is
2503.14476. Symbols are theirs: n, M, N, tau, p.
"""
import math
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Callable, Literal, NamedTuple, get_args, get_origin, get_type_hints


# ---------------------------------------------------------------------------------------- the rules
class Rule(NamedTuple):
    """Everything that distinguishes one sampler from another, as numbers."""

    round_size: int  # samples in each of a prompt's rounds
    rows_per_prompt: int  # samples kept for the update (ada-est, gvm: on average)
    max_rounds: int = 1
    min_correct: int = 0  # a prompt is resolved by so many correct answers
    min_wrong: int = 0  # and so many wrong ones
    max_rounds_all_correct: int = 0  # rounds of a prompt without a wrong answer; 0 = max_rounds
    drops: bool = False  # an unresolved prompt is not trained on
    refills: int = 0  # how often another prompt is tried in the place of an unresolved one
    allocates: str = ""  # "by memory", "by pilots": gives prompts more draws by their pass rates
    reads: tuple[str, ...] = ()  # the settings that it reads


RULES = {  # name -> the rule under the settings c; what only other rows read has no effect on it
    "uniform": lambda c: Rule(round_size=c.n, rows_per_prompt=c.n, reads=("n",)),
    "dapo": lambda c: Rule(
        round_size=c.n, rows_per_prompt=c.n, min_correct=1, min_wrong=1, drops=True,
        refills=3, reads=("n",)),  # if 2/3 of the prompts are silent, 4/5 of the places are filled
    "ada-pos": lambda c: Rule(
        round_size=c.M, rows_per_prompt=c.n, max_rounds=c.N, min_correct=1,
        drops=c.drop_unresolved, reads=("n", "M", "N", "drop_unresolved")),
    "ada-balance": lambda c: Rule(
        round_size=c.M, rows_per_prompt=c.n, max_rounds=c.N,
        min_correct=c.n // 2, min_wrong=c.n - c.n // 2,
        max_rounds_all_correct=c.max_rounds_all_correct, drops=c.drop_unresolved,
        reads=("n", "M", "N", "max_rounds_all_correct", "drop_unresolved")),
    # These two allocate the step's draws to its prompts: see the last section of this file.
    "ada-est": lambda c: Rule(
        round_size=c.M, rows_per_prompt=c.M, allocates="by memory", reads=("M",)),
    "gvm": lambda c: Rule(
        round_size=GVM_PILOTS, rows_per_prompt=c.M, allocates="by pilots", reads=("M",)),
}


# ------------------------------------------------------------------------------------ configuration
@dataclass(frozen=True)
class SamplerConfig:
    """All that decides about sampling. A trainer's config inherits from it."""

    sampler: Literal[tuple(RULES)] = "ada-balance"
    """who is sampled: once (uniform, dapo), in rounds (ada-pos, -balance), by p (ada-est, gvm)"""
    n: int = 4
    """samples kept per prompt for the update (uniform, dapo: also drawn)"""
    M: int = 8
    """samples per round (ada-est, gvm: per prompt, on average)"""
    N: int = 4
    """most rounds per prompt (ada-pos, ada-balance)"""
    threshold: float = 0.7
    """a reward above it counts as correct; baselines average the rewards themselves"""
    max_rounds_all_correct: int = 0
    """ada-balance: close a prompt after so many rounds without a wrong answer; 0 = off"""
    drop_unresolved: bool = False
    """ada-pos, ada-balance: train on no prompt that stayed unresolved, as in the papers"""
    advantage: Literal["pool-mean", "leave-one-out", "group-std", "positives-only"] = "pool-mean"
    """what a reward is compared with; group-std is GRPO's, positives-only RAFT's"""
    weighting: Literal["none", "unbiased", "log", "inv_p"] = "none"
    """weights of kept samples: none, unbiased (ascend about p), log (about log p), inv_p (1/p)"""

    @property
    def rule(self) -> Rule:
        return RULES[self.sampler](self)

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what would train on nonsense."""
        for name, kind in get_type_hints(type(self)).items():
            choices, value = get_args(kind), getattr(self, name)
            if get_origin(kind) is Literal and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r:.80}")
        rule = self.rule
        reweighs = [rule.allocates == "by memory", self.advantage == "group-std",
                    self.weighting != "none"]
        if min(self.n, self.M, self.N) < 1:
            raise ValueError("n, M and N must be at least 1")
        if rule.round_size < self.n and not rule.allocates:  # v1 Alg. 1 asks for M >= n
            raise ValueError(f"a round of {self.M} is below n = {self.n}: raise M or lower n")
        if rule.rows_per_prompt < 2 and (self.advantage != "positives-only" or rule.min_correct
                                         or rule.min_wrong):
            raise ValueError("one sample has nothing to be compared with: set "
                             f"{'M' if rule.allocates else 'n'} to 2 or more")
        if rule.allocates == "by memory" and not N_MIN <= self.M <= N_MAX:
            raise ValueError(f"ada-est draws {N_MIN} to {N_MAX} samples of each prompt: M, their "
                             f"mean, cannot be {self.M}")
        if sum(reweighs) > 1:
            raise ValueError("ada-est, advantage group-std and weighting each change what a prompt "
                             "counts by its pass rate: choose only one of them")


# ---------------------------------------------------------------------------------- data structures
@dataclass(slots=True)
class Sample:
    """One draw. `rollout` is what the engine returned; this file only counts its token_ids."""

    index: int  # its place in the prompt's pool: the order of drawing, never of finishing
    round: int  # 0, 1, ...
    rollout: Any = None  # None while the engine is writing
    reward: float = 0.0  # the grader's (where it failed: see `without_verdict`)
    status: str | None = None  # the grader's word for it; None while there is no verdict
    correct: bool = False  # reward > threshold
    why: str = ""  # the grader's reason, where it gives one
    parts: dict = field(default_factory=dict)  # what the reward is the sum of, where it is one


@dataclass
class Group:
    """A prompt and everything drawn for it. The trainer gets this same object."""

    index: int  # its place in the batch
    problem: Any
    pool: list[Sample] = field(default_factory=list)  # all draws
    rounds: int = 0  # opened so far
    # resolved, too few correct, too few wrong, out of budget (gvm gave it no draws); "" = open
    outcome: str = ""
    refill: int = 0  # dapo: how many prompts were tried before this one in its place
    # `settle` sets the rest, once all prompts are closed
    baseline: float = 0.0  # mean reward of the pool (gvm: without the pilots)
    p_hat: float = 0.0  # share correct in the pool (gvm: of draws after the pilots, if any)
    kept: list[Sample] = field(default_factory=list)  # what the update sees, in drawing order
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
    rule = config.rule
    if correct >= rule.min_correct and wrong >= rule.min_wrong:
        return "resolved"
    lacking = "too few correct" if correct < rule.min_correct else "too few wrong"
    most_rounds = rule.max_rounds
    if lacking == "too few wrong" and wrong == 0 and rule.max_rounds_all_correct:
        # A prompt that is always solved takes all N*M draws and teaches nothing: end it earlier.
        most_rounds = min(most_rounds, rule.max_rounds_all_correct)
    return lacking if rounds >= most_rounds else ""


# ------------------------------------------------------------------------------------ what is kept?
def keep(pool: list[Sample], n: int) -> list[Sample]:
    """n samples, n//2 of them correct; where one kind is short the other fills up (v1 Alg. 1).

    Of each kind it takes those drawn first. The order of drawing says nothing about an answer, so
    this choice is as good as a random one.
    """
    positives = [s for s in pool if s.correct]
    negatives = [s for s in pool if not s.correct]
    k_pos = min(n // 2, len(positives))
    k_neg = min(n - k_pos, len(negatives))
    k_pos = min(n - k_neg, len(positives))
    return sorted(positives[:k_pos] + negatives[:k_neg], key=lambda s: s.index)


# --------------------------------------------------------------------------- advantages and weights
def mean(values: list[float]) -> float:
    """The mean; exact where all values are equal, so that no rounding error becomes a signal."""
    return values[0] if min(values) == max(values) else fmean(values)


def without_verdict(rewards: list[float], if_all: float = 0.0) -> list[float]:
    """The rewards; for each NaN (the grader failed) 0, or the worst of the others if negative.

    An answer must gain nothing by making the grader fail. If it failed on all, all are `if_all`.
    """
    given = [r for r in rewards if not math.isnan(r)]
    worst = min([0.0, *given]) if given else if_all
    return [worst if math.isnan(r) else r for r in rewards]


def advantages(kept: list[float], pool: list[float], kind: str) -> list[float]:
    """Advantages of the kept rewards, compared with the whole pool: the kept were selected.

    pool-mean       r - mean
    leave-one-out   r - mean of the others  RLOO: unbiased for a fixed m; pool-mean is (m-1)/m of it
    group-std       (r - mean) / std        GRPO: std with m - 1 in the denominator
    positives-only  max(r, 0)               RAFT

    Why does pool-mean not divide by std, which is about sqrt(p(1-p))? It would ascend 2 arcsin
    sqrt(p) in the place of p (course/notes/1): hard and easy prompts count more than middling ones.
    And a lucky hit would count the more, the larger its pool: one hit in 512 would get an advantage
    of 22.6 (v1 section 2.3).
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

    "none" is the default, and what the released code does: every row counts 1. But keeping half of
    each kind changes the objective. With the pool mean as baseline, the expected update of a
    balanced prompt is w(p) grad p with w(p) = [p^2 + (1-p)^2] / [2p(1-p)]: about 1/(2p) where p is
    small, and as large where 1-p is small. (This holds if the pool is so large that its mean is p.
    For 4 rounds of 8 and a small p, w(p) is less.) To undo it, but for the bias of a stopped pool
    (course/notes/3: 21 % at p = 0.05), let a row stand for its share of the pool:
        unbiased  c+ = p n/k_pos, c- = (1-p) n/k_neg   ascends p
        log       that, times 1/p                      ascends log p (v3 section 2.2)
        inv_p     "none", times 1/p                    v3 section 3.2 to the letter: about 1/(2p^2)
    With "unbiased" and all m draws kept every weight is n/m, which undoes GVM's allocation. With
    positives-only and log this is the estimator of GVM's paper: the sum over the accepted samples
    times 1/(n_i p_i).
    """
    scale = 1.0
    if kind in ("log", "inv_p") and p_hat > 0:  # with no hit at all, `settle` passes half a hit
        scale = 1 / p_hat
    if kind in ("none", "inv_p"):
        return [scale for _ in correct]
    k_pos = sum(correct)
    k_neg = len(correct) - k_pos
    c_pos = p_hat * n / max(k_pos, 1)
    c_neg = (1 - p_hat) * n / max(k_neg, 1)
    return [scale * (c_pos if c else c_neg) for c in correct]


def settle_all(groups: list[Group], config: SamplerConfig, estimator=None) -> None:
    """Settle the groups of a whole step; ada-est remembers them.

    A prompt without any verdict gets the worst reward of the step. Its advantages are 0 either way,
    but if rewards are negative a 0 would be the best of all, and wrongly raise the reward curve.
    """
    worst = min(without_verdict([s.reward for group in groups for s in group.pool]), default=0.0)
    for group in groups:
        settle(group, config, worst)
        if config.rule.allocates == "by memory":
            estimator.update(group)


def settle(group: Group, config: SamplerConfig, worst: float = 0.0) -> None:
    """Keep, compare, weigh: fills in the rest of a closed group.

    worst: the reward of all its answers if none has a verdict.
    """
    rule, pool = config.rule, group.pool
    for s, reward in zip(pool, without_verdict([s.reward for s in pool], worst)):
        s.reward = reward
    group.p_hat = pass_rate(pool)
    if rule.allocates == "by pilots":  # they served to estimate p, and are not trained on
        pool = [s for s in pool if s.round > 0]
        if not pool:
            return
        group.p_hat = pass_rate(pool)
    rewards = [s.reward for s in pool]
    group.baseline = mean(rewards)  # for the log and the pictures; `advantages` computes its own
    if group.outcome != "resolved" and rule.drops:
        return
    # n of each prompt, so that each counts the same however long the hunt was. Rules that allocate
    # draws keep all: the number of a prompt's rows is its weight.
    group.kept = pool if rule.allocates else keep(pool, config.n)
    group.advantages = advantages([s.reward for s in group.kept], rewards, config.advantage)
    p = group.p_hat
    if p == 0 and config.weighting in ("log", "inv_p"):
        p = 1 / (2 * len(pool))  # half a hit, so that it weighs no less than a prompt with one hit
    correct = [s.correct for s in group.kept]
    group.weights = row_weights(correct, p, rule.rows_per_prompt, config.weighting)
    if rule.allocates == "by memory":  # the 1/p of log p: its root by draws, its root here (v3)
        group.weights = [w / (group.p_hat + EST_EPS) ** 0.5 for w in group.weights]


def pass_rate(pool: list[Sample]) -> float:
    """Share of correct answers."""
    return sum(s.correct for s in pool) / len(pool)


# ----------------------------------------------------------------------------------------- the loop
def collect(
    problems: list, config: SamplerConfig, engine, grader, *,
    estimator: "Estimator | None" = None, more: Callable[[], Any] | None = None,
    grad_norms: Callable[[list], list[float]] | None = None,
) -> list[Group]:
    """Sample one step's batch. Returns one closed Group per problem, in the order of `problems`.

    estimator   ada-est: kept by the caller from step to step; updated here
    more        dapo: gives one further problem, or None if there is none. Their groups follow those
                of `problems`; dropped ones are returned too, for they did cost samples
    grad_norms  gvm: from groups with graded pilots to one G_i per group; without it, G_i = 1

    Raises ValueError for a config that cannot work, RuntimeError if the engine loses samples.
    """
    config.validate()
    run = Collector(config, engine, grader, more)
    sizes = [config.rule.round_size for _ in problems]
    if config.rule.allocates == "by memory":
        sizes = sizes_by_memory(problems, config.M, estimator)
    for problem, size in zip(problems, sizes):
        run.add(problem, size)
    run.drive()
    if config.rule.allocates == "by pilots":
        draw_after_pilots(run, grad_norms)
        run.drive()
    settle_all(run.groups, config, estimator)
    return run.groups


class Collector:
    """One step's groups, and the loop that advances them.

    What is submitted before which engine step depends on finished samples and their verdicts, never
    on the clock or on the order in which verdicts come in. So with a deterministic engine a run can
    be repeated exactly.
    """

    def __init__(self, config: SamplerConfig, engine, grader, more=None):
        self.config, self.engine, self.grader, self.more = config, engine, grader, more
        self.groups: list[Group] = []

    def add(self, problem, size: int, refill: int = 0) -> None:
        """Take a prompt into the batch and open its first round."""
        group = Group(len(self.groups), problem, refill=refill)
        self.groups.append(group)
        self.open_round(group, size)

    def open_round(self, group: Group, size: int) -> None:
        """Submit `size` more samples of a prompt."""
        for index in range(len(group.pool), len(group.pool) + size):
            group.pool.append(Sample(index, group.rounds))
            key = (group.index, index)  # by which the sample finds its way home
            self.engine.submit(key, group.problem)
        group.rounds += 1

    def drive(self) -> None:
        """Step the engine until every prompt is closed.

        Finished samples go to the grader at once, but are acted on one engine step later. So
        grading overlaps with writing, and no decision depends on how long grading takes. When the
        engine is idle, they are acted on at once.
        """
        arrived = []
        while self.engine.busy or arrived:
            due = arrived
            arrived = list(self.engine.step()) if self.engine.busy else []
            for key, rollout in arrived:
                self.grader.submit(key, self.groups[key[0]].problem, rollout)
            for (p, index), rollout in due:
                self.groups[p].pool[index].rollout = rollout
            for p in sorted({p for (p, _), _ in due}):
                self.advance(self.groups[p])
        lost = [group.index for group in self.groups if not group.outcome]
        if lost:
            raise RuntimeError(
                f"the engine is idle, but samples of these prompts never came back: {lost}")

    def advance(self, group: Group) -> None:
        """Close a prompt or open its next round, if the present one is complete.

        While answers are missing nothing is closed, for those are the long ones. But if the next
        round is certain, it opens now: one straggler does not hold up its prompt.
        """
        missing = sum(s.rollout is None for s in group.pool)
        if missing:
            if self.next_round_is_certain(group, missing):
                self.open_round(group, self.config.rule.round_size)
            return
        self.read_verdicts(group)
        correct = sum(s.correct for s in group.pool)
        group.outcome = exit_test(correct, len(group.pool) - correct, group.rounds, self.config)
        if not group.outcome:
            self.open_round(group, self.config.rule.round_size)
        elif group.outcome != "resolved":
            self.try_another(group)

    def next_round_is_certain(self, group: Group, missing: int) -> bool:
        """Will the prompt stay open, whatever the missing answers turn out to be?"""
        rule = self.config.rule
        if missing >= max(rule.min_correct, rule.min_wrong):
            return False  # they could be all that is lacking: no need to wait for verdicts
        self.read_verdicts(group)
        correct = sum(s.correct for s in group.pool)
        wrong = len(group.pool) - missing - correct
        ends = [exit_test(correct + k, wrong + missing - k, group.rounds, self.config)
                for k in range(missing + 1)]  # if k of the missing ones are correct
        return not any(ends)

    def read_verdicts(self, group: Group) -> None:
        """Wait for the verdicts on all finished samples of a prompt."""
        for sample in group.pool:
            if sample.rollout is not None and sample.status is None:
                verdict = self.grader.result((group.index, sample.index))
                sample.reward, sample.status = float(verdict.reward), verdict.status
                sample.why = getattr(verdict, "why", "")
                sample.parts = getattr(verdict, "parts", {})
                sample.correct = verdict.reward > self.config.threshold

    def try_another(self, group: Group) -> None:
        """dapo: try another prompt in this one's place, a few times; then it stays empty."""
        if not self.more or group.refill >= self.config.rule.refills:
            return
        problem = self.more()
        if problem is not None:
            self.add(problem, self.config.rule.round_size, group.refill + 1)


# -------------------------------------------------------------- ada-est and gvm: who gets how many?
# v3 gives no values for ada-est: these are this project's choice.
EST_DECAY = 0.9  # what a visit to a prompt leaves of its older counts, for the policy moves
EST_ALPHA, EST_BETA = 0.5, 0.5  # Beta prior of a pass rate (Jeffreys')
EST_EPS = 0.01  # in 1/sqrt(p + eps): bounds draws and weight of a prompt that is never solved
N_MIN, N_MAX = 2, 32  # draws of a prompt: two can be compared; 32 are what ada-balance has
# GVM's released code has these.
GVM_PILOTS = 8  # samples per prompt that estimate its pass rate
GVM_ALPHA, GVM_BETA = 1e-3, 2.0  # see `allocate_gvm`: most go to a prompt of p = sqrt(alpha)


def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Integers that add up to `total`: the shares rounded down, then +1 by largest remainder."""
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def allocate_est(p: list[float], total: int, eps: float, low: int, high: int) -> list[int]:
    """ada-est (v3 Alg. 1): n_x ~ 1/sqrt(p_x + eps) within [low, high]; they add up to `total`.

    Clipping changes the sum, so bisection finds the factor ("water-filling").
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
    """ada-est's memory of prompts' pass rates (Ada-EMA, v3 Alg. 1). Its state is plain JSON.

    It knows a problem by its `.id`. In the first epoch it knows nothing: each prompt gets M draws.
    """

    def __init__(self):
        self.counts = {}  # id -> [T, K]: decayed counts of draws, of correct draws

    def pass_rate(self, problem: Any) -> float:
        """The posterior mean, (K + alpha) / (T + alpha + beta)."""
        T, K = self.counts.get(str(problem.id), (0.0, 0.0))
        return (K + EST_ALPHA) / (T + EST_ALPHA + EST_BETA)

    def update(self, group: Group) -> None:
        T, K = self.counts.get(str(group.problem.id), (0.0, 0.0))
        drawn, correct = len(group.pool), sum(s.correct for s in group.pool)
        self.counts[str(group.problem.id)] = [EST_DECAY * T + drawn, EST_DECAY * K + correct]

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(counts) for key, counts in self.counts.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        self.counts = {key: list(counts) for key, counts in state.items()}


def sizes_by_memory(problems: list, M: int, estimator) -> list[int]:
    """ada-est: how many samples of each prompt to draw, by what earlier steps have shown."""
    if estimator is None:
        raise ValueError("ada-est needs estimator=Estimator(), kept from step to step")
    rates = [estimator.pass_rate(problem) for problem in problems]
    return allocate_est(rates, M * len(problems), EST_EPS, N_MIN, N_MAX)


def draw_after_pilots(
    run: Collector, grad_norms: Callable[[list[Group]], list[float]] | None
) -> None:
    """gvm: allocate M draws per prompt by what the pilots showed. For this, prompts do wait."""
    config = run.config
    p = [pass_rate(group.pool) for group in run.groups]
    norms = grad_norms(run.groups) if grad_norms else [1.0 for _ in p]
    sizes = allocate_gvm(p, norms, config.M * len(p), GVM_ALPHA, GVM_BETA)
    for group, rate, size in zip(run.groups, p, sizes):
        if size:
            group.outcome = ""
            run.open_round(group, size)
        else:
            group.outcome = "out of budget" if rate else "too few correct"
