"""The probe: do trainer and engine hold the same policy? Asked at the start and after every sync.

The engine writes a few texts when the program starts. Both sides compute the log-probabilities of
their response tokens, and two questions are asked:

* Are they the same? In float32 they agree to the last digits. In 16 bits they differ by more than
  one optimizer step changes, so weights that arrive only in part would not be noticed.
* Hence the second question: do they *change* alike? With x_t the trainer's change of
  log pi(y_t) and y_t the engine's, the slope

      b = sum_t w_t y_t / sum_t w_t x_t          (w_t: x_t, cut off so that no token dominates)

  is 1 when everything arrived, 0 when nothing did, 0.5 when half of it did. A gap that was there
  before cancels, and noise averages out over many tokens. There are two slopes: for the change
  since the engine had the base weights, which grows with training, and for the change since the
  last sync, because over a long time weights that are one step old would look nearly right.

Once, before training, both sides get a large random adapter (`rehearse`), and each layer's own part
of the change gets a slope: that shows a single missing layer, also in 8 bits.
(docs/logprobs.md says what is seen and what is not.)
"""
import contextlib
import itertools
import math
import re
from typing import NamedTuple

import torch

from parts.logprobs import Sequence, micro_batches, split_by_row, token_logprobs

MOST_TOKENS = 4096  # in all texts, prompts included: a check should take one per cent of a step
ON_CPU = 1024  # the same on a CPU, for a model that is not built in
LONGEST = 32  # tokens of a probe's response
AT_ONCE = 8192  # tokens of a forward pass
PASSES = 8  # the rehearsal's passes without a layer cost as much as so many passes of all texts

# Limits, from sound and from broken syncs. e: the slope's standard error; q: noise / change.
SINCE_LAST = 0.5  # + 4 e: how far a slope since the last sync may be off; noise in x alone took 0.3
CLEAR = 3.0  # such a slope is judged once the change is this many times the noise
REHEARSED = 0.3  # nats (rms) by which the random adapter moves the log-probs of three layers
PART = 0.2  # a layer is lost if its slope is off 1 by more than PART + 2.5 e
UNCLEAR = 0.3  # a layer with a larger error cannot be told from a missing one, and is let pass


class Limits(NamedTuple):
    """How far apart a sound engine and trainer may be in these precisions; see `limits`."""

    statistic: str  # of |log mu - log pi| over the tokens: "max", "mean" or "median"
    gap: float  # nats
    rest: float  # share of the rehearsal's change that may differ (medians), before noise
    slope: float = 0.04  # how far from 1 the slope since the start may be, beyond 3 e + (2 q)^2


def limits(dtype: str, engine_dtype: str, kv_cache_dtype: str, mixture: bool) -> Limits:
    """Those of a run. In low precision the gap only shows another model or temperature."""
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

    advice = "try the other --sync (merge or adapter)."

    def __init__(self, engine, policy, problems, *, limits: Limits, max_tokens: int = LONGEST,
                 temperature: float = 1.0):
        self.engine, self.policy, self.limits = engine, policy, limits
        small = sum(p.numel() for p in policy.parameters()) < 10**7
        self.tokens = MOST_TOKENS if small or policy.device.type == "cuda" else ON_CPU
        self.rows, sampled_T = self.write_texts(problems, min(LONGEST, max_tokens))
        print(f"probe: do trainer and engine hold the same policy? {len(self.rows)} texts, "
              f"{len(layers_of(policy))} layers", flush=True)
        with policy.disable_adapter():
            gaps = self.require_close(sampled_T, self.trainer(temperature))
            self.begin(self.trainer(), self.of_engine())
        self.rehearsed = self.rehearse()
        print(f"       yes: log-probs differ by {gaps['probe_gap_max']:.0e} at most, and a trial "
              "change of the weights arrived", flush=True)

    def begin(self, mine_T, theirs_T) -> None:
        """Remember what both sides say with the base weights."""
        self.start = mine_T, theirs_T
        self.noise = max(rms(mine_T - theirs_T), 1e-5)
        self.last = self.start  # at the last sync by which the policy had clearly moved
        self.before = self.start  # at the last sync

    def write_texts(self, problems, max_tokens: int) -> tuple[list[Sequence], torch.Tensor]:
        """The engine's responses to as many problems as the limit allows, one at least, and their
        log-probs [T].
        """
        empty = [Sequence(problem.prompt_ids + [0] * max_tokens, len(problem.prompt_ids))
                 for problem in problems]
        texts = [row.ids[:row.prompt_length] for row in first(empty, self.tokens)]
        rollouts = self.engine.generate(texts, n=1, max_tokens=max_tokens)
        rows = [Sequence(ids + r.token_ids, len(ids)) for ids, (r,) in zip(texts, rollouts)]
        return rows, torch.tensor([x for (r,) in rollouts for x in r.logprobs])

    @torch.no_grad()
    def trainer(self, temperature: float = 1.0, rows: list[Sequence] | None = None):
        """log pi [T] of all response tokens, in the order of `rows` (None: of all texts)."""
        rows = rows or self.rows
        logprobs = {}  # by the row's identity: micro-batches have another order
        for micro in micro_batches(rows, AT_ONCE):
            lp_T, _ = token_logprobs(self.policy, micro, temperature)
            logprobs |= zip(map(id, micro), split_by_row(lp_T.cpu(), micro))
        return torch.cat([logprobs[id(row)] for row in rows])

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
                             f"those from before the sync: {self.advice}")

    def require_close(self, theirs_T, mine_T) -> dict:
        gap_T = (theirs_T - mine_T).abs()
        if not getattr(gap_T, self.limits.statistic)() < self.limits.gap:  # also when it is NaN
            raise SystemExit("Engine and trainer disagree: |log mu - log pi_old| is "
                             f"{gap_T.mean():.1e} on average and {gap_T.max():.1e} at most. "
                             "Training would be wrong; try --sync merge or --dtype float32. (If it "
                             "is nan, the weights are damaged, or too large for float16.)")
        return dict(probe_gap_mean=gap_T.mean().item(), probe_gap_max=gap_T.max().item())

    def require_slope(self, reference, now, margin: float, errors: float) -> float:
        """The slope since `reference`, which must be 1 within margin + errors * error."""
        b, error = slope(now[0] - reference[0], now[1] - reference[1])
        if not abs(b - 1) <= margin + errors * error:
            raise SystemExit("The new weights reached the engine in part or late: its log-probs "
                             f"changed by {b:.2f} +- {error:.2f} times what the trainer's did. "
                             f"Training would be wrong; {self.advice}")
        return b

    # -------------------------------------------------------------------------- before training
    def rehearse(self) -> dict:
        """Sync a large random adapter once: does every layer arrive? Returns what `parts` finds."""
        with self.random_adapter():
            self.engine.sync(self.policy)
            found = self.parts(self.trainer(), self.without_each_layer(), self.of_engine())
        self.engine.sync(self.policy)
        if found["lost"] or not found["rest"] <= found["limit"]:
            raise SystemExit("A trial adapter moved the trainer's log-probs by "
                             f"{found['moved']:.2f}, and the engine's followed with a rest of "
                             f"{found['rest']:.0%} (layers in doubt: {found['lost']}): weights "
                             f"reach it in part only; {self.advice}")
        return found

    def without_each_layer(self) -> dict:
        """Layer -> the trainer's log-probs with all of the adapter but that layer's part.

        Each layer costs a pass. For a deep model on a CPU only the first texts are taken.
        """
        found, layers, rows = {}, layers_of(self.policy), self.rows
        if self.tokens == ON_CPU:
            rows = first(rows, PASSES * self.tokens // len(layers))
        for layer, second in layers.items():
            with set_to(second, [torch.zeros_like(p) for p in second]):
                found[layer] = self.trainer(rows=rows)
        return found

    def parts(self, mine_T, without: dict, theirs_T) -> dict:
        """How far the trial adapter moved the trainer (nats), and how the engine followed.

        slope: of the whole change. rest: median |y - x| / median |x|, and its limit. layers: the
        slope and its error of each one. lost: the layers that did not arrive. With d_t what a layer
        adds in the trainer, the engine's change is the trainer's without that layer, plus a slope
        times d_t: 1 when the layer arrived, 0 when it did not.
        """
        x_T, y_T = mine_T - self.start[0], theirs_T - self.start[1]
        size, noise = x_T.abs().median(), (self.start[0] - self.start[1]).abs().median()
        layers = {}
        for layer, less_T in without.items():
            at = slice(len(less_T))  # perhaps of the first texts only
            layers[layer] = slope(mine_T[at] - less_T, y_T[at] - (less_T - self.start[0][at]))
        lost = [layer for layer, (b, error) in layers.items()
                if not abs(b - 1) <= PART + 2.5 * error and not error > UNCLEAR]
        return dict(moved=rms(x_T), slope=slope(x_T, y_T)[0],
                    rest=((y_T - x_T).abs().median() / size).item(),
                    limit=self.limits.rest + 3 * (noise / size).item(), layers=layers, lost=lost)

    @contextlib.contextmanager
    def random_adapter(self):
        """The policy with random B, large enough to move the log-probs by REHEARSED nats (rms).

        With more layers it moves them further, so that each one's part is as large beside the
        noise. Late layers count less, so theirs are larger.
        """
        generator, layers = torch.Generator().manual_seed(0), layers_of(self.policy)
        second = [p for weights in layers.values() for p in weights]
        noise = [torch.randn(p.shape, generator=generator).to(p) * (1 + layer)**0.5
                 for layer, weights in layers.items() for p in weights]
        wanted, scale = REHEARSED * max(1, len(layers) / 3)**0.5, 1e-3
        with set_to(second, [scale * z for z in noise]):
            while (moved := rms(self.trainer() - self.start[0])) <= wanted and scale <= 1:
                # the change grows at least as fast as the scale: few passes get there
                scale *= min(max(wanted / max(moved, 1e-9), 1.4), 4)
                for p, z in zip(second, noise):
                    p.data.copy_(scale * z)
            yield


def first(rows: list[Sequence], tokens: int) -> list[Sequence]:
    """As many of the first rows as have at most so many tokens together; one at least."""
    sums = itertools.accumulate(len(row.ids) for row in rows)
    return rows[:max(1, sum(total <= tokens for total in sums))]


def layers_of(policy) -> dict[int, list]:
    """Layer -> the B matrices of its adapters, all zero before training."""
    found = {}
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            found.setdefault(int(re.search(r"\.layers\.(\d+)\.", name)[1]), []).append(p)
    return found


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
