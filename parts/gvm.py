"""GVM's G_i: how large the gradient of a prompt's right answers is (GVM-RAFT, Proposition 1)."""
import torch

from parts.logprobs import Head, head_of, response_states
from parts.policy import Row


@torch.no_grad()
def gvm_norms(policy, groups, temperature: float) -> list[float]:
    """GVM's G_i: the mean norm of the head's gradient over a prompt's right pilots; 0 without."""
    norms = []
    for group in groups:
        ids = group.problem.prompt_ids
        right = [Row(ids + s.rollout.token_ids, len(ids), [], 1.0) for s in group.pool if s.correct]
        found = head_gradient_norms(policy, right, temperature)
        norms.append(sum(found) / len(found) if found else 0.0)
    return norms


def head_gradient_norms(policy, rows: list[Row], temperature: float = 1.0,
                        words: int = 8192) -> list[float]:
    """|| grad_W log pi(y|x) || of each row at `temperature`: the G of GVM, without a backward pass.

    With E = (onehot(y) - p) dz/d(W h) / temperature [T, vocabulary] and H [T, hidden] the gradient
    for the head's W, summed over the response's tokens, is E^T H, so its squared Frobenius norm is
    the sum over token pairs (s, t) of (E E^T)_st (H H^T)_st. E is made of `words` words at a time.
    """
    head, norms = head_of(policy.get_base_model()), []
    for row in rows:
        h_T, target_T = response_states(policy, [row])
        log_total = log_normalizer(head, h_T, temperature, words)
        similarity = h_T.new_zeros((len(h_T), len(h_T)), dtype=torch.float32)  # E E^T
        for start in range(0, len(head.weight), words):
            z = head.logits(h_T, slice(start, start + words))
            slope = head.slope(z) / temperature
            E = z.div_(temperature).sub_(log_total).exp_().neg_()
            mine = (target_T >= start) & (target_T < start + words)
            E[mine, target_T[mine] - start] += 1
            E *= slope
            similarity += E @ E.T
        gram = h_T.float() @ h_T.float().T  # H H^T
        norms.append((similarity * gram).sum().clamp(min=0).sqrt().item())
    return norms


def log_normalizer(head: Head, h_T, temperature: float, words: int):
    """log sum_v exp(z_v / temperature) [T, 1], `words` words at a time."""
    total = h_T.new_full((len(h_T), 1), -torch.inf, dtype=torch.float32)
    for start in range(0, len(head.weight), words):
        z = head.logits(h_T, slice(start, start + words)).div_(temperature)
        total = torch.logaddexp(total, z.logsumexp(-1, keepdim=True))
    return total
