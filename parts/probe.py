"""The probe checks that the engine has the weights of the trainer.

Both compute the log-probs of a few texts. In 16 bits these differ by more than one step changes, so
the probe compares their *changes*. x_t is the trainer's change of log pi(y_t) since the base
weights, y_t the engine's. The slope of y on x is 1 if all of the update arrived, 0.5 if half."""
import itertools
import math

import torch

from parts.engine import seed_all
from parts.logprobs import Sequence, micro_batches, token_logprobs

TOKENS = 2048  # in all texts with prompts, so that a check takes about 1 % of a step on a GPU
LONGEST = 32  # tokens of a text's answer
TRIAL = 1.0  # least change (rms, nats) of the trainer's log-probs by the trial adapter
OFF = 0.1  # how far a slope may be from 1, apart from errors; correct runs in 8 bits had 0.93


def tolerances(dtype: str, engine_dtype: str, kv_cache_dtype: str, mixture: bool) -> tuple:
    """(largest mean gap in nats, largest share of the trial's change that may be missing)."""
    if "fp8" in (engine_dtype, kv_cache_dtype):
        return 1.0, 0.6  # 8 bits are coarse for rare tokens: correct runs had gaps of 0.4
    if (dtype, engine_dtype) != ("float32", "float32"):
        return 0.2, 0.2  # correct 7B models had 0.046
    return 0.2 if mixture else 1e-4, 0.05  # a tie of two experts changes the rest of the text


def rms(x_T) -> float:
    return x_T.square().mean().sqrt().item()


def slope(x_T, y_T) -> tuple[float, float]:
    """(b, its standard error) of y = b x, if the tokens' errors may have different variances."""
    w_T = x_T.clamp(-rms(x_T), rms(x_T))  # or a single token could dominate
    b = w_T @ y_T / (w_T @ x_T)
    error = (w_T * (y_T - b * x_T)).norm() / (w_T @ x_T)
    return b.item(), error.item()


class Probe:
    """Made before training, when B is 0, so a resumed run has the same texts of the base model."""

    def __init__(self, engine, policy, problems, *, tolerances: tuple, max_tokens: int = LONGEST,
                 temperature: float = 1.0):
        self.engine, self.policy, (self.gap, self.rest) = engine, policy, tolerances
        tokens = TOKENS // 2 if self.gap < 1e-3 else TOKENS  # float32 has small errors
        sums = itertools.accumulate(len(problem.prompt_ids) + LONGEST for problem in problems)
        count = max(1, sum(total <= tokens for total in sums))
        texts = [problem.prompt_ids for problem in problems[:count]]
        rollouts = engine.generate(texts, n=1, max_tokens=min(LONGEST, max_tokens))
        written = [(Sequence(ids + r.token_ids, len(ids)), r.logprobs)
                   for ids, (r,) in zip(texts, rollouts)]
        written.sort(key=lambda text: len(text[0].ids))  # the order of `micro_batches`
        self.rows, sampled = zip(*written)
        self.start = self.trainer(temperature), torch.tensor([x for mu in sampled for x in mu])
        self.compare(*self.start)  # while sampling there is only a gap, no change
        self.start = self.trainer(), self.of_engine()  # while reading, at temperature 1
        self.try_adapter()
        print(f"probe: trainer and engine agree on {count} texts and a trial change of weights")

    @torch.no_grad()
    def trainer(self, temperature: float = 1.0):
        """log pi [T] of all answer tokens."""
        return torch.cat([token_logprobs(self.policy, micro, temperature)[0].cpu()
                          for micro in micro_batches(self.rows, tokens=8192)])

    def of_engine(self):
        """log mu [T] of the same tokens."""
        scores = self.engine.prompt_logprobs([row.ids for row in self.rows])
        return torch.tensor([x for row, mu in zip(self.rows, scores)
                             for x in mu[row.prompt_length - 1:]])

    def check(self) -> dict:
        """Metrics: gaps and change in nats; slope, NaN if errors are larger. Raises SystemExit."""
        return self.compare(self.trainer(), self.of_engine())

    def compare(self, mine_T, theirs_T, largest_rest: float = math.inf) -> dict:
        x_T, y_T = mine_T - self.start[0], theirs_T - self.start[1]
        noise_T, gap_T = self.start[1] - self.start[0], (theirs_T - mine_T).abs()
        q = max(rms(noise_T), 1e-5) / max(rms(x_T), 1e-9)
        b, error = slope(x_T, y_T) if q < 1 else (math.nan, math.nan)
        rest = ((y_T - x_T).abs().median() - 2 * noise_T.abs().median()) / x_T.abs().median()
        # errors in x lower the slope of a correct pair by at most 2 q^2
        alike = q >= 1 or abs(b - 1) <= OFF + 2 * q**2 + 4 * error and rest <= largest_rest
        stuck = rms(x_T) > 1e-5 and not y_T.any()  # rounding would not give exactly 0
        close = gap_T.mean() < self.gap + 5e-4 * rms(x_T)  # rounding grows with the change
        if stuck or not (close and alike):  # also if one of them is NaN
            raise SystemExit(
                "Engine and trainer disagree: |log mu - log pi_old| is "
                f"{gap_T.mean():.1e} on average and {gap_T.max():.1e} at most (nan: the weights "
                "are damaged, or too large for float16), and the engine's log-probs changed by "
                f"{b:.2f} +- {error:.2f} times as much as the trainer's (nan: it cannot be told). "
                "Training would be wrong: try the other --sync, or --dtype float32.")
        return dict(probe_gap_mean=gap_T.mean().item(), probe_gap_max=gap_T.max().item(),
                    probe_moved=rms(x_T), probe_slope=b)

    def try_adapter(self) -> None:
        """Hand over a random B that moves the log-probs far beyond noise, and then 0 again."""
        second = [p for name, p in self.policy.named_parameters() if "lora_B" in name]
        generator, scale = torch.Generator().manual_seed(0), 1e-3
        noise = [torch.randn(p.shape, generator=generator).to(p) for p in second]
        while scale <= 1 and rms(self.trainer() - self.start[0]) < TRIAL:
            scale *= 2
            for p, z in zip(second, noise):
                p.data.copy_(scale * z)
        self.engine.sync(self.policy)
        self.compare(self.trainer(), self.of_engine(), self.rest)
        for p in second:
            p.data.zero_()
        self.engine.sync(self.policy)


def start_probe(config, engine, policy, held_out: list) -> Probe:
    """The probe, with texts that the engine writes now, from the base weights."""
    seed_all(config.seed, "probe")
    bounds = tolerances(
        config.dtype, config.rollout_dtype, config.kv_cache_dtype, bool(policy.routing))
    # - 1, because vLLM adds a token to a text that it scores.
    return Probe(engine, policy, held_out[:64], tolerances=bounds,
                 max_tokens=max(1, config.max_tokens - 1), temperature=config.temperature)
