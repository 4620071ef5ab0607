"""The probe: do trainer and engine hold the same policy?"""
import torch

from parts.logprobs import token_logprobs
from parts.policy import Row


class Probe:
    """Do trainer and engine hold the same policy? Asked at the start and after every sync, on a few fixed texts.

    Made while the engine still has the base weights: it lets the engine write the texts (so that they are the same when a
    run is resumed) and compares the log-probs of sampling; `check` compares those of a prefill of the same texts, at
    temperature 1 and with the adapter.

    Raises SystemExit when they disagree by more than `tolerance`, ("max", "mean" or "median" over tokens, nats); or when the engine
    answers exactly as before although the trainer has moved.
    """

    def __init__(self, engine, policy, problems, *, tolerance: tuple[str, float], max_tokens: int = 16, temperature: float = 1.0):
        self.engine, self.policy, self.tolerance, self.last = engine, policy, tolerance, None
        rollouts = engine.generate([p.prompt_ids for p in problems], n=1, max_tokens=min(16, max_tokens))
        sampled = [Row(p.prompt_ids + r.token_ids, len(p.prompt_ids), r.logprobs, 0.0) for p, (r,) in zip(problems, rollouts)]
        with policy.disable_adapter():
            self.require_close(torch.tensor([x for row in sampled for x in row.mu]), self.trainer_logprobs(sampled, temperature))
        self.rows = [Row(row.ids, prompt_length=1, mu=[], advantage=0.0) for row in sampled]  # score every token but the first

    def trainer_logprobs(self, rows, temperature: float = 1.0):
        with torch.no_grad():
            return token_logprobs(self.policy, rows, temperature)[0].cpu()

    def check(self) -> dict:
        """Compare on the prompts and responses of the probe; returns the gaps in nats."""
        mine = self.trainer_logprobs(self.rows)
        theirs = torch.tensor([x for row in self.engine.score([row.ids for row in self.rows]) for x in row])
        if self.last is not None and torch.equal(theirs, self.last[1]) and (mine - self.last[0]).abs().max() > 1e-5:
            raise SystemExit("The new weights did not reach the engine: its log-probs are exactly those from before the sync. "
                             "Try the other --sync (merge or adapter).")
        self.last = mine, theirs
        return self.require_close(theirs, mine)

    def require_close(self, theirs, mine) -> dict:
        gap, (statistic, most) = (theirs - mine).abs(), self.tolerance
        if not getattr(gap, statistic)() < most:  # also when it is NaN
            raise SystemExit(f"Engine and trainer disagree: |log mu - log pi_old| is {gap.mean():.1e} on average and "
                             f"{gap.max():.1e} at most. Training would be wrong; try the other --sync, or --dtype float32.")
        return dict(probe_gap_mean=gap.mean().item(), probe_gap_max=gap.max().item())
