"""The probe: do trainer and engine hold the same policy? Asked at the start and after every sync.

The engine writes a few texts when the program starts. Both sides compute the log-probabilities of
their response tokens, and two questions are asked:

* Are they the same? In float32 they agree to the last digits. In 16 bits they differ by more than
  one optimizer step changes, so weights that arrive only in part would not be noticed.
* Therefore: do they *change* alike? With x_t the trainer's change of log pi(y_t) and y_t the
  engine's, the slope

      b = sum_t w_t y_t / sum_t w_t x_t          (w_t: x_t, cut off so that no token dominates)

  is 1 when everything arrived, 0 when nothing did, 0.5 when half of it did. A gap that was there
  before cancels, and noise averages out over many tokens. The question is asked twice: for the
  change since the engine had the base weights, which grows with training, and for the change since
  the last sync, because over a long time weights that are one step old would look nearly right.

Once, before training, both sides get a large random adapter (`rehearse`), in whose change a missing
part is plain. docs/gpu.md says what all this sees, and what it cannot see.
"""
import contextlib
import itertools
import math
from typing import NamedTuple

import torch

from parts.logprobs import token_logprobs
from parts.policy import Row, micro_batches

MOST_TOKENS = 4096  # in all texts, prompts included: a check should take one per cent of a step
ON_CPU = 1024  # the same for a model that is not built in: 4,096 would be seconds on two cores
LONGEST = 32  # tokens of a probe's response
AT_ONCE = 8192  # tokens of a forward pass

# Limits from measurement (docs/gpu.md). e: the slope's standard error; q: noise / change.
SINCE_LAST = 0.5  # + 4 e, for a slope since the last sync: noise in x alone has lowered one by 0.3
CLEAR = 3.0  # such a slope is judged once the change is this many times the noise
REHEARSED = 0.3  # nats (rms) by which the random adapter moves the log-probs
REHEARSED_SLOPE = 0.2  # + 3 e, for the slope of that change
ADVICE = "try the other --sync (merge or adapter)."


class Limits(NamedTuple):
    """How far apart a sound engine and trainer may be in these precisions; see `limits`."""

    statistic: str  # of |log mu - log pi| over the tokens: "max", "mean" or "median"
    gap: float  # nats
    rest: float  # share of the rehearsal's change that may differ (medians), before noise
    slope: float = 0.04  # how far from 1 the slope since the start may be, beyond 3 e + (2 q)^2


def limits(dtype: str, engine_dtype: str, kv_cache_dtype: str, mixture: bool) -> Limits:
    """The limits for a training run. In low precision the gap only shows another model or another
    temperature.
    """
    if "fp8" in (engine_dtype, kv_cache_dtype):
        # 8 bits are rough on unlikely tokens: sound runs had gaps of 0.4. And when a policy has
        # moved far the engine follows a little less: sound runs had slopes of 0.93 +- 0.01.
        return Limits("mean", 1.0, 0.6, slope=0.12)
    if (dtype, engine_dtype) == ("float32", "float32"):
        # Not the maximum: a token that training made all but impossible was off by 1.1e-4. And two
        # experts of a mixture may be as good as tied, which changes the rest of that text.
        return Limits("median" if mixture else "mean", 1e-4, 0.05)
    return Limits("mean", 0.2, 0.2 if mixture else 0.1)  # sound 7B models: 0.046 was reported


def slope(x_T, y_T) -> tuple[float, float]:
    """(b, its standard error) of y = b x, where each token may have noise of its own size.

    w is x cut off at its rms. With plain least squares the few tokens that changed most would
    decide, or a single one that jumped because of a tie between two experts. For the same reason
    each token's residual is taken from a fit without that token.
    """
    x_T, y_T = x_T.double(), y_T.double()
    w_T = x_T.clamp(-rms(x_T), rms(x_T))
    size = (w_T * x_T).sum()
    b = (w_T * y_T).sum() / size
    rest_T = (y_T - b * x_T) / (1 - w_T * x_T / size).clamp(min=1e-9)
    error = (w_T * rest_T).square().sum().sqrt() / size
    return b.item(), error.item()


def rms(x_T) -> float:
    return x_T.square().mean().sqrt().item()


class Probe:
    """Raises SystemExit, here and in `check`, when trainer and engine do not hold the same policy.

    It is made while the engine still has the base weights, so that the texts are the same when a
    run is resumed. Their log-probs of sampling are compared once, and from then on those of reading
    the same texts at temperature 1. The engine is left with the policy's weights.
    """

    def __init__(self, engine, policy, problems, *, limits: Limits, max_tokens: int = LONGEST,
                 temperature: float = 1.0):
        self.engine, self.policy, self.limits = engine, policy, limits
        self.rows = self.write_texts(problems, min(LONGEST, max_tokens))
        print(f"probe: do trainer and engine hold the same policy? {len(self.rows)} texts",
              flush=True)
        sampled_T = torch.tensor([x for row in self.rows for x in row.mu])
        with policy.disable_adapter():
            self.require_close(sampled_T, self.trainer(temperature))
            self.begin(self.trainer(), self.of_engine())
        self.rehearsed = self.rehearse()

    def begin(self, mine_T, theirs_T) -> None:
        """Remember what both sides say with the base weights."""
        self.start = mine_T, theirs_T
        self.noise = max(rms(mine_T - theirs_T), 1e-5)
        self.last = self.start  # at the last sync by which the policy had clearly moved
        self.before = self.start  # at the last sync

    def write_texts(self, problems, max_tokens: int) -> list[Row]:
        """The engine's responses to as many problems as the limit allows; one at least."""
        totals = itertools.accumulate(len(p.prompt_ids) + max_tokens for p in problems)
        count = max(1, sum(total <= most_tokens(self.policy) for total in totals))
        texts = [problem.prompt_ids for problem in problems[:count]]
        rollouts = self.engine.generate(texts, n=1, max_tokens=max_tokens)
        return [Row(ids + r.token_ids, len(ids), r.logprobs, 0.0)
                for ids, (r,) in zip(texts, rollouts)]

    @torch.no_grad()
    def trainer(self, temperature: float = 1.0):
        """log pi [T] of all response tokens, in the order of the texts."""
        found = {}
        for micro in micro_batches(self.rows, AT_ONCE):
            logprobs = token_logprobs(self.policy, micro, temperature)[0].cpu()
            found |= zip(map(id, micro), logprobs.split([row.length for row in micro]))
        return torch.cat([found[id(row)] for row in self.rows])

    def of_engine(self):
        """log mu [T] of the same tokens."""
        found = self.engine.prompt_logprobs([row.ids for row in self.rows])
        return torch.tensor([x for row, own in zip(self.rows, found)
                             for x in own[row.prompt_length - 1:]])

    # ------------------------------------------------------------------------ after every sync
    def check(self) -> dict:
        """Gaps and movement in nats, and slopes, which are NaN where too little has changed."""
        return self.compare(self.trainer(), self.of_engine())

    def compare(self, mine_T, theirs_T) -> dict:
        now = mine_T, theirs_T
        self.require_news(now)
        found = self.require_close(theirs_T, mine_T)
        moved = rms(mine_T - self.start[0])
        found |= dict(probe_moved=moved, probe_slope=math.nan, probe_slope_last=math.nan)
        if moved > self.noise:
            margin = self.limits.slope + (2 * self.noise / moved)**2
            found["probe_slope"] = self.require_slope(self.start, now, margin, errors=3)
        if rms(mine_T - self.last[0]) > CLEAR * self.noise:
            found["probe_slope_last"] = self.require_slope(self.last, now, SINCE_LAST, errors=4)
            self.last = now
        self.before = now
        return found

    def require_news(self, now) -> None:
        """Has the engine changed at all? This sees the smallest update."""
        moved = (now[0] - self.before[0]).abs().max()
        if torch.equal(now[1], self.before[1]) and moved > 1e-5:
            raise SystemExit("The new weights did not reach the engine: its log-probs are exactly "
                             f"those from before the sync: {ADVICE}")

    def require_close(self, theirs_T, mine_T) -> dict:
        if mine_T.isnan().any():
            raise SystemExit("The trainer's own log-probs are not numbers (NaN): the model's "
                             "weights are damaged (take a sound model), or too large for --dtype "
                             "float16.")
        gap_T = (theirs_T - mine_T).abs()
        if not getattr(gap_T, self.limits.statistic)() < self.limits.gap:  # also when it is NaN
            raise SystemExit("Engine and trainer disagree: |log mu - log pi_old| is "
                             f"{gap_T.mean():.1e} on average and {gap_T.max():.1e} at most. "
                             "Training would be wrong; try --sync merge or --dtype float32.")
        return dict(probe_gap_mean=gap_T.mean().item(), probe_gap_max=gap_T.max().item())

    def require_slope(self, reference, now, margin: float, errors: float) -> float:
        """The slope since `reference`, which must be 1 within margin + errors * error."""
        b, error = slope(now[0] - reference[0], now[1] - reference[1])
        if not abs(b - 1) <= margin + errors * error:
            raise SystemExit("The new weights reached the engine in part or late: its log-probs "
                             f"changed by {b:.2f} +- {error:.2f} times what the trainer's did. "
                             f"Training would be wrong; {ADVICE}")
        return b

    # -------------------------------------------------------------------------- before training
    def rehearse(self) -> dict:
        """Sync a large random adapter once: does all of it arrive?

        Returns by how much it moved the trainer (nats), the slope, and the rest: median |y - x| /
        median |x|.
        """
        with self.random_adapter():
            self.engine.sync(self.policy)
            x_T, y_T = self.trainer() - self.start[0], self.of_engine() - self.start[1]
        self.engine.sync(self.policy)
        size, noise = x_T.abs().median(), (self.start[0] - self.start[1]).abs().median()
        rest, limit = (y_T - x_T).abs().median() / size, self.limits.rest + 3 * noise / size
        b, error = slope(x_T, y_T)
        if not (rest <= limit and abs(b - 1) <= REHEARSED_SLOPE + 3 * error):
            raise SystemExit(f"A trial adapter moved the trainer's log-probs by {rms(x_T):.2f}, "
                             f"and the engine's by {b:.2f} times as much, with a rest of "
                             f"{rest:.0%}: weights reach it in part only; {ADVICE}")
        return dict(moved=rms(x_T), slope=b, rest=rest.item())

    @contextlib.contextmanager
    def random_adapter(self):
        """The policy with random B, large enough to move the log-probs by REHEARSED nats (rms)."""
        generator, scale = torch.Generator().manual_seed(0), 1e-3
        second = [p for name, p in self.policy.named_parameters() if "lora_B" in name]
        noise = [torch.randn(p.shape, generator=generator).to(p) for p in second]
        with set_to(second, [scale * z for z in noise]):
            while (moved := rms(self.trainer() - self.start[0])) <= REHEARSED and scale <= 1:
                # the change grows at least as fast as the scale: few passes get there
                scale *= min(max(REHEARSED / max(moved, 1e-9), 1.4), 4)
                for p, z in zip(second, noise):
                    p.data.copy_(scale * z)
            yield


def most_tokens(policy) -> int:
    """The limit for all texts of a probe: a CPU is slow."""
    small = sum(p.numel() for p in policy.parameters()) < 10**7
    return MOST_TOKENS if small or policy.device.type == "cuda" else min(ON_CPU, MOST_TOKENS)


@contextlib.contextmanager
def set_to(parameters: list, values: list):
    """Give the parameters other values for a while."""
    kept = [p.detach().clone() for p in parameters]
    try:
        for p, value in zip(parameters, values):
            p.data.copy_(value)
        yield
    finally:
        for p, before in zip(parameters, kept):
            p.data.copy_(before)
