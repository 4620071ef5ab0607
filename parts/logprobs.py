"""Log-probabilities of what was sampled, from hidden states, a chunk of tokens at a time."""
import torch

from parts.policy import Row


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[y] and its entropy, a chunk of tokens at a time.

    A [tokens, vocabulary] tensor would be the largest of the whole program (8,192 tokens x 151,936 words: 5 GB, and
    softmax and its gradient need several). W is frozen under LoRA, so the only gradient is that of h,

        d log p(y) / d h = (W_y - sum_v p_v W_v) / temperature,

    which is as small as h itself and is computed while the chunk's logits are there. Nothing else is kept for backward.
    The entropy is a metric: no gradient flows through it.
    """

    @staticmethod
    def forward(ctx, h_T, weight, target_T, temperature, chunk):
        logprob_T, entropy_T = h_T.new_empty((2, len(h_T)), dtype=torch.float32)
        slope_T = torch.empty_like(h_T) if ctx.needs_input_grad[0] else None  # d log p(y) / d h, [T, hidden]
        for start in range(0, len(h_T), chunk):
            at = slice(start, start + chunk)
            logits = (h_T[at] @ weight.T).float().div_(temperature)  # [chunk, vocabulary]
            logp = logits.sub_(logits.logsumexp(-1, keepdim=True))  # in place: no second tensor of this size
            logprob_T[at] = logp.gather(-1, target_T[at, None])[:, 0]
            p = logp.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logp)  # sum of p log p, without their product as a tensor
            if slope_T is not None:
                slope_T[at] = (weight[target_T[at]] - p.to(weight.dtype) @ weight) / temperature
        ctx.save_for_backward(slope_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        (slope_T,) = ctx.saved_tensors
        return (grad_T[:, None] * slope_T).to(slope_T.dtype), None, None, None, None


def response_states(policy, rows: list[Row]):
    """(h_T, target_T): the last hidden state [T, hidden] before each response token of all rows, and that token's id [T].

    Rows are padded on the right: with causal attention no token ever looks at padding, so no mask is needed.
    """
    model = policy.get_base_model()
    device, length = model.lm_head.weight.device, max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    predicts = torch.zeros((len(rows), length), dtype=torch.bool)  # positions whose next token belongs to a response
    for i, row in enumerate(rows):
        ids[i, :len(row.ids)] = torch.tensor(row.ids)
        predicts[i, row.prompt_length - 1:len(row.ids) - 1] = True
    target_T = ids.roll(-1, 1)[predicts].to(device)
    return model.model(input_ids=ids.to(device)).last_hidden_state[predicts.to(device)], target_T


def token_logprobs(policy, rows: list[Row], temperature: float = 1.0, chunk_bytes: int = 2**27):
    """(log pi_T, entropy_T) in nats of the response tokens of all rows, one row after the other."""
    h_T, target_T = response_states(policy, rows)
    weight = policy.get_base_model().lm_head.weight
    return ChunkedLogprobs.apply(h_T, weight, target_T, temperature, max(1, chunk_bytes // (4 * len(weight))))


@torch.no_grad()
def head_gradient_norms(policy, rows: list[Row], chunk: int = 8192) -> list[float]:
    """|| grad_W log pi(y|x) || of each row, for the language-model head W: the G of GVM, without a backward pass.

    With E = onehot(y) - p [T, vocabulary] and H [T, hidden] the gradient, summed over the response's tokens, is E^T H, so
    its squared Frobenius norm is the sum over token pairs (s, t) of (E E^T)_st (H H^T)_st. E is made in slices of W.
    """
    weight, norms = policy.get_base_model().lm_head.weight, []
    for row in rows:
        h, target = response_states(policy, [row])
        log_z = torch.logsumexp((h @ weight.T).float(), -1, keepdim=True)
        similarity = h.new_zeros((len(h), len(h)), dtype=torch.float32)  # E E^T
        for start in range(0, len(weight), chunk):
            E = -((h @ weight[start:start + chunk].T).float() - log_z).exp()
            mine = (target >= start) & (target < start + chunk)
            E[mine, target[mine] - start] += 1
            similarity += E @ E.T
        norms.append((similarity * (h.float() @ h.float().T)).sum().clamp(min=0).sqrt().item())
    return norms
