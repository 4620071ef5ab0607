"""Adaptive sampling: who is sampled, how much, when to stop, what is kept, and what it is compared with.

**The idea.** A policy gradient learns from differences between answers to the same prompt. Draw n = 4 answers
from a model that is right 5 % of the time, and 81 % of the prompts come back all wrong: reward minus mean is
0 four times over, and the compute is lost. The prompt was not hopeless, only four draws too few to see it.
Reinforce-Ada goes on drawing, in rounds, until a prompt has shown enough right and enough wrong answers.

           +---------- not yet, and fewer than N rounds: M more ----------+
           v                                                              |
    a round of M  -->  engine writes  -->  grader judges  -->  exit test on the WHOLE pool
                                                                          |
           update  <--  n rows, reward - pool mean  <--  keep n  <-- closed

Two budgets per prompt: up to N*M samples are *drawn*, n are *kept* for the update. The kept ones are balanced
by force, so their mean says nothing; the baseline is the mean of all that was drawn.

Prompts are independent, so none waits for another. But no round is cut short: short answers finish first, and
where the short ones are the right ones, deciding before a round is complete would tilt the pool.

**The rules** (`--sampler`):
    uniform      (grpo)     draw n, keep n: GRPO, or REINFORCE with a group baseline
    dapo                    draw n; all right or all wrong: drop them, and try another prompt in their place
    ada-pos      (pos)      rounds of M until k_pos answers are right; keep n, of both kinds if there are any
    ada-balance  (balance)  rounds of M until n//2 answers are right and n - n//2 wrong; keep those (default)
    ada-est      (est)      remember each prompt's pass rate p; draw ~ 1/sqrt(p), keep all, weigh by 1/sqrt(p)
    gvm                     pilot samples estimate p; then draw where it lowers the gradient's variance most

**See them** without a model: `python ada_sampler.py --all --pass-rate 0.05` or `--rule pos --beta 0.5 1.5`.

**Use them** in another trainer: this file needs only the standard library. `collect()` takes an engine with
submit(key, problem), step() -> [(key, rollout)] and busy, and a grader with submit(key, problem, rollout) and
result(key) -> verdict with .reward and .status. A new rule is a name in CHOICES, and its exit in `quotas` or
its sizes in `first_sizes`.

Papers: v1 and v3 are versions of Reinforce-Ada, arXiv 2510.04996; GVM is 2505.02391; DAPO is 2503.14476.
Symbols are theirs: n, M, N, tau, p. Suffixes of ragged data: _P prompts, _R rounds, _S samples, _T tokens.
"""
import argparse
import math
import operator
import random
import sys
import types
import typing
from collections import Counter, namedtuple
from dataclasses import MISSING, dataclass, field, fields, replace
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, Callable, Literal

CHOICES = dict(
    sampler=("uniform", "dapo", "ada-pos", "ada-balance", "ada-est", "gvm"),
    advantage=("pool-mean", "leave-one-out", "group-std", "positives-only"),
    weighting=("none", "unbiased", "log", "inv_p"),
)
SHORT_NAMES = dict(grpo="uniform", pos="ada-pos", balance="ada-balance", est="ada-est", raft="positives-only")
ROUNDS = ("ada-pos", "ada-balance")  # the rules that may take more than one round
ALLOCATORS = ("ada-est", "gvm")  # the rules that share out M per prompt over the batch, and keep everything


# ------------------------------------------------------------------------------------ configuration
def limited(default, least=None, most=None, above=None, below=None):
    """A dataclass field with a range: least <= value <= most, above < value < below."""
    limits = dict(least=least, most=most, above=above, below=below)
    return field(default=default, metadata=limits)


def check_ranges(config: Any) -> None:
    """Check every field of a dataclass against its type, its `Literal` choices and its limits.

    A bool is no int, an int is a float, and a float must be finite. Raises ValueError, one
    sentence that names the field and the value.
    """
    hints = typing.get_type_hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        check_type(f.name, value, hints[f.name])
        if value is not None:
            check_limits(f.name, value, f.metadata)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError if a field's value is not of its declared type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            choices = ", ".join(map(str, args))
            raise ValueError(f"{name} must be one of {choices}, not {value!r}")
    elif origin in (typing.Union, types.UnionType):  # X | None
        if value is not None:
            check_type(name, value, next(kind for kind in args if kind is not type(None)))
    elif origin in (list, tuple):
        if not isinstance(value, origin):
            raise ValueError(f"{name} must be a {origin.__name__}, not {value!r}")
        for item in value:
            check_type(name, item, args[0])
    elif isinstance(value, bool) and hint is not bool:
        raise ValueError(f"{name} must be {KINDS.get(hint, hint)}, not {value!r}")
    elif not isinstance(value, (int, float) if hint is float else hint):
        raise ValueError(f"{name} must be {KINDS.get(hint, hint)}, not {value!r}")
    elif hint is float and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check_limits(name: str, value: Any, limits: Any) -> None:
    """Raises ValueError if a field's value is out of the range given to `limited`."""
    for limit, words, broken in (
        ("least", "at least", operator.lt), ("most", "at most", operator.gt),
        ("above", "above", operator.le), ("below", "below", operator.ge),
    ):
        bound = limits.get(limit)
        if bound is not None and broken(value, bound):
            raise ValueError(f"{name} must be {words} {bound}, not {value}")


@dataclass
class SamplerConfig:
    """All that decides about sampling. A trainer's config inherits from it and has these settings too."""

    sampler: Literal[
        "ada-balance", "ada-pos", "ada-est", "gvm", "dapo", "uniform",
        "balance", "pos", "est", "grpo",
    ] = "ada-balance"
    """who is sampled how much; short names: balance, pos, est, and grpo for uniform"""
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
    max_samples_per_step: int = limited(0, least=0, most=10**9)
    """open no round that would exceed so many samples; 0 = off"""
    max_tokens_per_step: int = limited(0, least=0, most=10**12)
    """open no further round once so many tokens are written; 0 = off"""
    max_refills: int = limited(3, least=0, most=1000)
    """dapo: further prompts to try for one place in the batch; 0 = none"""
    advantage: Literal[
        "pool-mean", "leave-one-out", "group-std", "positives-only", "raft"
    ] = "pool-mean"
    """what a reward is compared with; group-std is GRPO's, raft is short for positives-only"""
    weighting: Literal["none", "unbiased", "log", "inv_p"] = "none"
    """row weights: none, unbiased (ascend p), log (ascend log p), inv_p (1/p)"""
    est_decay: float = limited(0.9, least=0, most=1)
    """ada-est: lambda, what a visit leaves of a prompt's old counts"""
    est_alpha: float = limited(0.5, above=0, most=1e6)
    """ada-est: alpha of the Beta prior of a pass rate"""
    est_beta: float = limited(0.5, above=0, most=1e6)
    """ada-est: beta of the Beta prior of a pass rate"""
    est_eps: float = limited(0.01, above=0, most=1)
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
        """Resolve short names in place. Raises ValueError, one sentence, for what cannot work."""
        check_ranges(self)
        self.sampler = SHORT_NAMES.get(self.sampler, self.sampler)
        self.advantage = SHORT_NAMES.get(self.advantage, self.advantage)
        if self.advantage not in CHOICES["advantage"]:  # a subclass may declare it as any text
            raise ValueError(f"advantage must be one of {', '.join(CHOICES['advantage'])}, not {self.advantage!r}")
        n, k_pos, rounds, est = self.n, self.k_pos, self.sampler in ROUNDS, self.sampler == "ada-est"
        size, most = min(self.M_first or self.M, self.M), (self.M_first or self.M) + (self.N - 1) * self.M
        alone = self.sampler in ALLOCATORS or (self.sampler, self.advantage) == ("uniform", "positives-only")
        for wrong, sentence in [
            # v1 Alg. 1 asks for M >= n: otherwise ada-pos could close with fewer than n samples
            (rounds and size < n, f"a round of {size} is below n = {n}: raise M (and M_first) or lower n"),
            (rounds and most < k_pos, f"k_pos = {k_pos} is more than all {most} draws: raise M or N"),
            (n < 2 and not alone, "n = 1 leaves nothing to compare a sample with: set n to 2 or more"),
            (est and self.weighting != "none", "ada-est weighs by 1/sqrt(p + eps): leave weighting at none"),
            (est and not self.N_min <= self.M <= self.N_max, "M must lie from N_min to N_max for ada-est"),
        ]:
            if wrong:
                raise ValueError(sentence)


def option(default: Any, help: str, group: str = "sampling", least: float | None = None):
    """A dataclass field that is also a flag (see `add_flags`); `least`: the least value allowed."""
    return field(default=default, metadata={"help": help, "group": group, "least": least})


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Turn a dataclass of `option`s into grouped flags: M_first -> --M-first, a bool b -> --b and --no-b.

    Understands int, float, str, bool, `X | None` and `list[X]`. `from_flags` reads them back.
    """
    groups, hints = {}, typing.get_type_hints(config_class)
    for f in fields(config_class):
        title, hint = f.metadata.get("group", "options"), hints[f.name]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = f.default_factory() if f.default is MISSING else f.default
        kind = next((k for k in typing.get_args(hint) if k is not type(None)), hint)
        if typing.get_origin(kind) is Literal or isinstance(kind, str):
            kind = str
        how = dict(type=kind, metavar=kind.__name__, nargs="*" if typing.get_origin(hint) is list else None)
        if kind is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        text = f"{f.metadata.get('help', '')} (default: {default})".replace("%", "%%")
        groups[title].add_argument("--" + f.name.replace("_", "-"), help=text, **how)
        parser.set_defaults(**{f.name: default})  # given to add_argument, some Pythons would print it twice


def from_flags(args: argparse.Namespace, config_class: type) -> Any:
    """The dataclass that `add_flags` announced, filled from parsed flags."""
    return config_class(**{f.name: getattr(args, f.name) for f in fields(config_class)})


# -------------------------------------------------------------------------------------------- data structures
@dataclass(slots=True)
class Sample:
    """One draw. `rollout` is what the engine returned; only len(rollout.token_ids) is looked at here."""

    index: int  # s, its place in the prompt's pool: the order of drawing, never of finishing
    round: int  # 0, 1, ...
    rollout: Any = None  # None while the engine is writing
    reward: float = 0.0  # as the grader gave it
    status: str | None = None  # the grader's word for it; None while there is no verdict
    correct: bool = False  # reward > tau


@dataclass
class Group:
    """A prompt and all that was drawn for it: what goes from sampler to trainer, never rebuilt."""

    index: int  # p, its place in the batch
    problem: Any
    pool: list[Sample] = field(default_factory=list)  # all draws
    rounds: int = 0  # opened so far
    outcome: str = ""  # "" while open, then resolved, no correct, no wrong (too few of them), out of budget
    refill: int = 0  # dapo: prompts that were tried for this place before
    # the rest is set by `finish`, once all prompts are closed
    baseline: float = 0.0  # mean reward of the pool
    p_hat: float = 0.0  # share of correct answers in the pool
    kept: list[Sample] = field(default_factory=list)  # what the update sees, in the order of drawing
    advantages: list[float] = field(default_factory=list)  # one per kept sample
    weights: list[float] = field(default_factory=list)  # one per kept sample

    def rows(self) -> list[tuple[Sample, float]]:
        """[(sample, advantage * weight)]: what multiplies grad log pi(sample) in the update."""
        return [(s, a * w) for s, a, w in zip(self.kept, self.advantages, self.weights)]

    @property
    def zero_signal(self) -> bool:
        """Nothing to learn here: every row's coefficient is 0, or there is no row."""
        return not any(coefficient for _, coefficient in self.rows())


# ---------------------------------------------------------------------------------- when does a prompt close?
def quotas(config: SamplerConfig) -> tuple[int, int]:
    """(correct, wrong) answers that resolve a prompt (v1 Alg. 1); some rules want none."""
    half = config.n // 2
    wanted = {"ada-balance": (half, config.n - half), "ada-pos": (config.k_pos, 0), "dapo": (1, 1)}
    return wanted.get(config.sampler, (0, 0))


def exit_test(correct: int, wrong: int, rounds: int, config: SamplerConfig) -> str:
    """The outcome of a prompt with these answers after `rounds` complete rounds, or "" if it goes on."""
    want_correct, want_wrong = quotas(config)
    if correct >= want_correct and wrong >= want_wrong:
        return "resolved"
    # An always solved prompt eats all N*M draws and has no gradient in the end: that hunt can be capped.
    capped = correct >= want_correct and wrong == 0 and 0 < config.max_rounds_all_correct <= rounds
    if capped or rounds >= (config.N if config.sampler in ROUNDS else 1):
        return "no correct" if correct < want_correct else "no wrong"
    return ""


# ---------------------------------------------------------------------------------------------- what is kept?
def keep(pool: list[Sample], n: int) -> list[Sample]:
    """n samples of the pool, n//2 of them correct; where one kind is short the other fills up (v1 Alg. 1).

    The first of each kind in the order of drawing: given how many there are, they are as good as random ones.
    An unresolved prompt keeps what there is, as in the released code (the papers drop it): one hit in 32
    draws does give a gradient.
    """
    positives, negatives = [s for s in pool if s.correct], [s for s in pool if not s.correct]
    k_pos = min(n // 2, len(positives))
    k_neg = min(n - k_pos, len(negatives))
    k_pos = min(n - k_neg, len(positives))
    return sorted(positives[:k_pos] + negatives[:k_neg], key=lambda s: s.index)


# ------------------------------------------------------------------------------------- advantages and weights
def mean(values: list[float]) -> float:
    """Equal values have exactly that mean: a rounding error must not pass for a signal."""
    return values[0] if min(values) == max(values) else fmean(values)


def advantages(kept: list[float], pool: list[float], kind: str) -> list[float]:
    """Advantages of the kept rewards. All statistics are the pool's, since the kept ones were chosen.

    pool-mean       r - mean                v1 section 2.3: no division by std, which explodes on rare hits
    leave-one-out   r - mean of the others  RLOO: unbiased, where pool-mean shrinks by (m-1)/m in a pool of m
    group-std       (r - mean) / std        GRPO: std with m - 1 in the denominator
    positives-only  max(r, 0)               RAFT
    """
    m, scale = len(pool), 1.0
    if kind == "positives-only":
        return [max(r, 0.0) for r in kept]
    if m < 2:
        return [0.0 for _ in kept]  # nothing to compare with
    if kind != "pool-mean":
        scale = m / (m - 1) if kind == "leave-one-out" else 1 / (stdev(pool) + 1e-6)
    baseline = mean(pool)
    return [(r - baseline) * scale for r in kept]


def row_weights(correct: list[bool], p_hat: float, n: float, kind: str) -> list[float]:
    """Weights of the kept rows, from which of them are correct and the pool's share of correct answers.

    Keeping half of each kind changes the objective. With the pool mean as baseline, the expected update of a
    balanced prompt is w(p) grad p with w(p) = [p^2 + (1-p)^2] / [2p(1-p)]: about 1/(2p) where p is small, and
    as large where 1-p is small. That is "none", the released code. To undo it, a row stands for its share of
    the pool:
        unbiased  c+ = p n/k_pos, c- = (1-p) n/k_neg   ascends p
        log       that, times 1/p                      ascends log p (v3 section 2.2)
        inv_p     "none", times 1/p                    v3 section 3.2 to the letter: about 1/(2p^2)
    Where all m draws are kept, c+ = c- = n/m takes the sizes that gvm chose back out of the sum; with
    positives-only and log it is the estimator of the GVM paper, 1/(n_i p_i) times the sum over the accepted.
    """
    k_pos, k_neg = sum(correct), len(correct) - sum(correct)
    c_pos, c_neg = p_hat * n / max(k_pos, 1), (1 - p_hat) * n / max(k_neg, 1)
    scale = 1 / p_hat if kind in ("log", "inv_p") and p_hat > 0 else 1.0  # p = 0: no correct row, no signal
    if kind in ("none", "inv_p"):
        return [scale for _ in correct]
    return [scale * (c_pos if c else c_neg) for c in correct]


def rows_per_prompt(config: SamplerConfig) -> int:
    """What a prompt contributes to the update, on average."""
    return config.M if config.sampler in ALLOCATORS else config.n


def finish(group: Group, config: SamplerConfig) -> None:
    """Keep, compare, weigh: fills in the rest of a closed group."""
    pilots = config.sampler == "gvm" and not config.gvm_reuse_pilots
    pool = [s for s in group.pool if s.round > 0] if pilots else group.pool
    if not pool:
        return
    rewards = [s.reward for s in pool]
    group.baseline, group.p_hat = mean(rewards), sum(s.correct for s in pool) / len(pool)
    if config.sampler == "dapo" and group.outcome != "resolved":
        return
    group.kept = keep(pool, config.n) if config.sampler in ROUNDS else pool
    correct, n = [s.correct for s in group.kept], rows_per_prompt(config)
    group.advantages = advantages([s.reward for s in group.kept], rewards, config.advantage)
    group.weights = row_weights(correct, group.p_hat, n, config.weighting)
    if config.sampler == "ada-est":  # v3 Alg. 1: half of the log objective by sampling, the other half here
        group.weights = [w / (group.p_hat + config.est_eps) ** 0.5 for w in group.weights]


# ------------------------------------------------------------------------------------------------- allocation
def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Round shares of `total` to integers that add up to it: round down, then +1 by largest remainder."""
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def allocate_est(p: list[float], total: int, eps: float, low: int, high: int) -> list[int]:
    """ada-est (v3 Alg. 1): n_x ~ 1/sqrt(p_x + eps) within [low, high], and their sum is exactly `total`.

    Clipping changes the sum, so the factor is searched for (water-filling: the sum grows with it).
    Raises ValueError if the bounds cannot meet the total.
    """
    if not low * len(p) <= total <= high * len(p):
        raise ValueError(f"{total} samples cannot be shared out over {len(p)} prompts, {low} to {high} each")
    weights = [(x + eps) ** -0.5 for x in p]
    below, above = 0.0, high / min(weights, default=1.0)
    for _ in range(60):
        factor = (below + above) / 2
        shares = [min(max(factor * w, low), high) for w in weights]
        below, above = (factor, above) if sum(shares) < total else (below, factor)
    return largest_remainder(shares, total)


def allocate_gvm(p: list[float], norms: list[float], total: int, alpha: float, beta: float) -> list[int]:
    """GVM Proposition 1: n_i = total w_i / sum(w), w_i = G_i / sqrt(p_i + alpha/p_i^(beta-1)), 0 if p_i = 0.

    norms: G_i, the mean gradient norm of a prompt's accepted samples. If all w_i are 0, nobody gets anything.
    """
    weights = [g / (x + alpha / x ** (beta - 1)) ** 0.5 if x > 0 else 0.0 for x, g in zip(p, norms)]
    whole = sum(weights)
    return largest_remainder([total * w / whole for w in weights], total) if whole else [0 for _ in p]


class Estimator:
    """Ada-EMA (v3 Alg. 1): what is remembered of prompts' pass rates between visits. Its state is plain JSON.

    A problem is known by its `.id`. In the first epoch nothing is known, and ada-est draws M for everyone.
    """

    def __init__(self, config: SamplerConfig):
        self.config, self.counts = config, {}  # id -> [T, K]: decayed counts of draws, of correct draws

    def pass_rate(self, problem: Any) -> float:
        T, K = self.counts.get(str(problem.id), (0.0, 0.0))
        return (K + self.config.est_alpha) / (T + self.config.est_alpha + self.config.est_beta)

    def update(self, group: Group) -> None:
        T, K = self.counts.get(str(group.problem.id), (0.0, 0.0))
        drawn, correct, decay = len(group.pool), sum(s.correct for s in group.pool), self.config.est_decay
        self.counts[str(group.problem.id)] = [decay * T + drawn, decay * K + correct]

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(counts) for key, counts in self.counts.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        self.counts = {key: list(counts) for key, counts in state.items()}


# --------------------------------------------------------------------------------------------------- the loop
def collect(problems: list, config: SamplerConfig, engine, grader, *, estimator: Estimator | None = None,
            more: Callable[[], Any] | None = None, grad_norms: Callable[[list], list[float]] | None = None,
            barrier: bool = False, early_opening: bool = True) -> list[Group]:
    """Sample one step's batch. Returns one closed Group per problem, in the order of `problems`.

    estimator      ada-est: kept by the caller from step to step; updated here
    more           dapo: gives one further problem, or None if there is none. Their groups follow those of
                   `problems`. Dropped groups are returned too, with nothing kept, for they did cost samples
    grad_norms     gvm: from groups with graded pilots to one G_i per group; without it every G_i is 1
    barrier        decide only when no prompt has an unfinished round, as the papers' code does (slower)
    early_opening  open a prompt's next round as soon as it is certain to come (see `Collector.advance`)

    Raises ValueError for a config that cannot work, RuntimeError if the engine loses samples.
    """
    config.validate()
    run = Collector(config, engine, grader, more, barrier, early_opening)
    for problem, size in zip(problems, first_sizes(problems, config, estimator)):
        run.add(problem, size)
    run.drive()
    if config.sampler == "gvm":
        run.second_stage(grad_norms)
        run.drive()
    for group in run.groups:
        finish(group, config)
        if config.sampler == "ada-est":
            estimator.update(group)
    return run.groups


def first_sizes(problems: list, config: SamplerConfig, estimator: Estimator | None) -> list[int]:
    """sizes_P: how much of every prompt is drawn before this step knows anything about it."""
    if config.sampler != "ada-est":
        size = dict.fromkeys(ROUNDS, config.M_first or config.M) | dict(gvm=config.gvm_pilot)
        return [size.get(config.sampler, config.n)] * len(problems)
    if estimator is None:
        raise ValueError("ada-est needs estimator=Estimator(config), kept by the caller from step to step")
    total = min(config.M * len(problems), config.max_samples_per_step or sys.maxsize)
    low = min(config.N_min, total // max(len(problems), 1))
    return allocate_est([estimator.pass_rate(x) for x in problems], total, config.est_eps, low, config.N_max)


class Collector:
    """The groups of one step, what they have cost so far, and the loop that takes them from round to round.

    What is submitted before which engine step depends on finished samples and their verdicts, never on the
    clock or the order in which verdicts come in: with a deterministic engine, a run can be repeated exactly.
    """

    def __init__(self, config, engine, grader, more, barrier, early_opening):
        self.config, self.engine, self.grader, self.more = config, engine, grader, more
        self.barrier, self.early_opening = barrier, early_opening
        self.groups, self.samples, self.tokens = [], 0, 0

    def add(self, problem, size: int, refill: int = 0) -> None:
        """Take a prompt into the batch and open its first round."""
        group = Group(len(self.groups), problem, refill=refill)
        self.groups.append(group)
        if not self.open_round(group, size):
            group.outcome = "out of budget"

    def affordable(self, size: int) -> bool:
        """Is there budget for a round of this size? Samples count when drawn, their tokens when finished."""
        samples, tokens = self.config.max_samples_per_step, self.config.max_tokens_per_step
        within = not samples or self.samples + size <= samples
        return size > 0 and within and (not tokens or self.tokens < tokens)

    def open_round(self, group: Group, size: int) -> bool:
        """Submit `size` more samples of a prompt; False, and nothing done, if that is not affordable."""
        if not self.affordable(size):
            return False
        for s in range(len(group.pool), len(group.pool) + size):
            group.pool.append(Sample(s, group.rounds))
            self.engine.submit((group.index, s), group.problem)  # by this key it finds its way home
        group.rounds += 1
        self.samples += size
        return True

    def drive(self) -> None:
        """Step the engine until every prompt is closed.

        A finished sample goes to the grader at once and is acted on one engine step later: grading overlaps
        with writing, and yet no decision depends on how long it takes. An idle engine is not waited for.
        """
        arrived = []
        while self.engine.busy or arrived:
            due, arrived = arrived, list(self.engine.step()) if self.engine.busy else []
            for (p, s), rollout in arrived:
                self.grader.submit((p, s), self.groups[p].problem, rollout)
            if self.barrier and (arrived or self.engine.busy):
                arrived = due + arrived
                continue
            for (p, s), rollout in due:
                self.groups[p].pool[s].rollout = rollout
                self.tokens += len(rollout.token_ids)
            for p in sorted({p for (p, s), _ in due}):
                self.advance(self.groups[p])
        if lost := [g.index for g in self.groups if not g.outcome]:
            raise RuntimeError(f"the engine is idle, but samples of these prompts never came back: {lost}")

    def advance(self, group: Group) -> None:
        """Close a prompt, open its next round, or go on waiting.

        An unfinished round closes nothing, for what is missing are the long answers. But when the exit test
        at its end will fail whatever they turn out to be, the next round is certain. Opening it now changes
        when it is drawn and not what is drawn, and a round's one straggler no longer holds up its prompt.
        """
        missing = sum(s.rollout is None for s in group.pool)
        if missing and (not self.early_opening or missing >= max(quotas(self.config))):
            return  # so many can still meet any quota: no verdict could decide anything, so wait for none
        self.read_verdicts(group)
        correct, rounds = sum(s.correct for s in group.pool), group.rounds
        wrong = len(group.pool) - missing - correct
        ends = {exit_test(correct + k, wrong + missing - k, rounds, self.config) for k in range(missing + 1)}
        if ends == {""}:
            if not self.open_round(group, self.config.M) and not missing:
                group.outcome = "out of budget"
        elif not missing:
            group.outcome = ends.pop()
            if self.config.sampler == "dapo" and group.outcome != "resolved":
                self.replace(group)

    def read_verdicts(self, group: Group) -> None:
        """Wait for the verdicts on all finished samples of a prompt."""
        for sample in group.pool:
            if sample.rollout is not None and sample.status is None:
                verdict = self.grader.result((group.index, sample.index))
                sample.reward, sample.status = verdict.reward, verdict.status
                sample.correct = verdict.reward > self.config.threshold

    def replace(self, group: Group) -> None:
        """dapo: try another prompt in this one's place, but not for ever: then the place stays empty."""
        if self.more and group.refill < self.config.max_refills and self.affordable(self.config.n):
            if (problem := self.more()) is not None:
                self.add(problem, self.config.n, group.refill + 1)

    def second_stage(self, grad_norms: Callable[[list[Group]], list[float]] | None) -> None:
        """gvm: share out M per prompt by what the pilots showed. Here alone, prompts wait for each other."""
        c, groups = self.config, [g for g in self.groups if g.pool]
        p = [sum(s.correct for s in g.pool) / len(g.pool) for g in groups]
        norms = grad_norms(groups) if grad_norms else [1.0] * len(groups)
        total = min(c.M * len(groups), (c.max_samples_per_step or sys.maxsize) - self.samples)
        for group, size in zip(groups, allocate_gvm(p, norms, total, c.gvm_alpha, c.gvm_beta)):
            group.outcome = ""
            if not self.open_round(group, size):
                group.outcome = "out of budget" if any(s.correct for s in group.pool) else "no correct"


# ---------------------------------------------------------------------------------------------------- summary
def summarize(groups: list[Group]) -> dict[str, Any]:
    """One step's sampling as plain JSON: shares in [0, 1], means in their own units, no means of nothing.

    reward_first_round is the curve to watch: every prompt counts once and nothing was chosen. reward_kept is
    about 1/2 by construction, whatever the model can do. Shares of prompts count all that were tried.
    """
    pool_S, rounds = [s for g in groups for s in g.pool], Counter(g.rounds for g in groups)
    spent = Counter()  # where the budget went: draws by the pass rate of their own pool: none, up to 0.2, ... below 1, all
    for g in groups:
        spent["none" if not g.p_hat else "all" if g.p_hat == 1 else f"{min(int(g.p_hat * 5), 4) / 5:.1f}"] += len(g.pool)
    averages = dict(
        reward_first_round=[fmean(s.reward for s in g.pool if s.round == 0) for g in groups if g.pool],
        reward_pool=[s.reward for s in pool_S],
        reward_kept=[s.reward for g in groups for s in g.kept],
        response_length=[len(s.rollout.token_ids) for s in pool_S],
        truncated=[getattr(s.rollout, "finish_reason", "") == "length" for s in pool_S],
        zero_signal=[g.zero_signal for g in groups],
        unresolved=[g.outcome != "resolved" for g in groups],
    )
    for reason in ("no correct", "no wrong", "out of budget"):
        averages["unresolved_" + reason.replace(" ", "_")] = [g.outcome == reason for g in groups]
    return dict(
        prompts=len(groups), samples=len(pool_S), tokens=sum(averages["response_length"]),
        kept=len(averages["reward_kept"]),
        rounds_histogram=[rounds[r] for r in range(1, max(rounds, default=0) + 1)],
        spent_by_pass_rate=dict(sorted(spent.items())), verdicts=dict(sorted(Counter(s.status for s in pool_S).items())),
        **{name: fmean(values) for name, values in averages.items() if values},
    )


# ---------------------------------------------------------------------- the simulator: prompts that are coins
Coin = namedtuple("Coin", "id p")  # a problem that is solved with probability p
Flip = namedtuple("Flip", "reward status token_ids")  # rollout and verdict in one
WRONG, CORRECT = Flip(0.0, "wrong", ()), Flip(1.0, "correct", ())


class CoinEngine:
    """In the language model's place: every sample is a flip of its prompt, and finished at the next step."""

    def __init__(self, seed: int = 0):
        self.random, self.busy, self.queue = random.Random(seed).random, False, []

    def submit(self, key, coin: Coin) -> None:
        self.queue.append((key, CORRECT if self.random() < coin.p else WRONG))
        self.busy = True

    def step(self) -> list[tuple]:
        finished, self.queue, self.busy = self.queue, [], False
        return finished


def simulate(config: SamplerConfig, p_P: list[float], seed: int = 0, visits: int = 4) -> list[Group]:
    """One step of the real `collect` with coins of these pass rates (ada-est: the last of several visits)."""
    coins, draw, verdicts = [Coin(i, p) for i, p in enumerate(p_P)], random.Random(seed + 1), {}
    grader = SimpleNamespace(submit=lambda key, coin, flip: verdicts.update({key: flip}), result=verdicts.pop)
    estimator, engine = Estimator(config), CoinEngine(seed)
    for _ in range(visits if config.sampler in ("est", "ada-est") else 1):
        groups = collect(coins, config, engine, grader, estimator=estimator, more=lambda: draw.choice(coins))
    return groups


def effective_weight(group: Group, config: SamplerConfig) -> float:
    """A coin's part in the update, in units of grad p; the mean over many coins is w(p) of `row_weights`.

    Let g+ and g- be the mean of grad log pi over correct and over wrong answers. Then p g+ + (1-p) g- = 0 and
    grad p = p g+, so a correct row counts 1/p and a wrong one -1/(1-p). Ascending p is 1, log p is 1/p.
    """
    p = group.problem.p
    return sum(c / p if s.correct else -c / (1 - p) for s, c in group.rows()) / rows_per_prompt(config)


def report(groups: list[Group], config: SamplerConfig, places: float, tries: float) -> tuple[float, ...]:
    """(draws, unresolved, without signal, effective weight, its standard error), the first three per place.

    dapo may try several prompts to fill one place in the batch: their draws add up, the place is unresolved
    if all of them fail, and a prompt weighs the more, the more often prompts like it are tried.
    """
    weights_P = [tries * effective_weight(g, config) for g in groups]
    error = stdev(weights_P) / len(groups) ** 0.5 if len(groups) > 1 else 0.0
    unresolved = 1 - sum(g.outcome == "resolved" for g in groups) / places
    silent = 1 - sum(not g.zero_signal for g in groups) / places
    return sum(len(g.pool) for g in groups) / places, unresolved, silent, fmean(weights_P), error


def by_band(groups: list[Group], config: SamplerConfig, tries: float, edges: list[float]) -> list[tuple]:
    """[(low, high, report)] over the prompts whose pass rate lies in each band; here every try is a place."""
    bands = [(a, b, [g for g in groups if a <= g.problem.p <= b]) for a, b in zip(edges, edges[1:])]
    return [(a, b, report(band, config, len(band), tries)) for a, b, band in bands if band]


def plot(results: dict[str, tuple], places: int, path: str) -> None:
    """Draws, share without signal and effective weight against the pass rate, one line per rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes, titles = figure.subplots(1, 3), ("draws per prompt", "share without signal", "effective weight")
    for axis, column, title in zip(axes, (0, 2, 3), titles):
        axis.set(title=title, xlabel="pass rate", yscale="log" if column == 3 else "linear")
        for rule, (config, groups) in results.items():
            bands = by_band(groups, config, len(groups) / places, [i / 20 for i in range(21)])
            axis.plot([(a + b) / 2 for a, b, _ in bands], [row[column] for *_, row in bands], label=rule)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a sampling rule does with its budget, on coin flips.")
    parser.add_argument("--rule", dest="sampler", default=argparse.SUPPRESS, help="the same as --sampler")
    parser.add_argument("--all", action="store_true", help="all rules side by side")
    parser.add_argument("--pass-rate", type=float, metavar="P", help="solve every prompt with probability P")
    parser.add_argument("--beta", type=float, nargs=2, default=(1, 1), metavar=("A", "B"),
                        help="pass rates are drawn from Beta(A, B) (default: 1 1, uniform)")
    parser.add_argument("--prompts", type=int, default=2000, help="number of prompts (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the coins (default: 0)")
    parser.add_argument("--plot", metavar="FILE", help="draw it against the pass rate")
    add_flags(parser, SamplerConfig)
    args = parser.parse_args()
    if args.pass_rate is not None and (args.plot or not 0 <= args.pass_rate <= 1):
        raise SystemExit("--pass-rate takes one number from 0 to 1; for --plot give --beta instead")
    if min(args.beta) <= 0 or args.prompts < 2:
        raise SystemExit("--beta takes two positive numbers, and --prompts must be at least 2")
    return args


def main() -> None:
    args, edges = parse(), [0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1]
    config, rng, results = from_flags(args, SamplerConfig), random.Random(args.seed), {}
    one, count = args.pass_rate is not None, args.prompts
    p_P = [args.pass_rate if one else rng.betavariate(*args.beta) for _ in range(count)]
    try:
        for rule in CHOICES["sampler"] if args.all else [config.sampler]:
            weighting = "none" if args.all and rule == "ada-est" else config.weighting
            own = replace(config, sampler=rule, weighting=weighting)
            results[rule] = own, simulate(own, p_P, args.seed)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    source = f"pass rate {args.pass_rate:g}" if one else "pass rates from Beta({:g}, {:g})".format(*args.beta)
    print(f"{count} prompts, {source}; n={config.n}, M={config.M}, N={config.N}")
    print(f"{'':16}{'draws':>8}{'unresolved':>12}{'no signal':>12}{'effective weight':>20}")
    for rule, (own, groups) in results.items():
        tries = len(groups) / count
        rows = [(rule, report(groups, own, count, tries))]
        if not (args.all or one):
            rows += [(f"  p {a:g} to {b:g}", row) for a, b, row in by_band(groups, own, tries, edges)]
        for name, (draws, unresolved, silent, weight, error) in rows:
            print(f"{name:16}{draws:8.2f}{unresolved:12.3f}{silent:12.3f}{weight:11.2f} +- {error:.2f}")
    if args.plot:
        try:
            plot(results, count, args.plot)
        except (ImportError, OSError, ValueError) as error:
            raise SystemExit(f"--plot needs matplotlib and a file it can write: {error}") from None


if __name__ == "__main__":
    main()
