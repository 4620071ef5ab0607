"""Log-probabilities of sampled tokens, computed from hidden states in chunks of tokens.

The trainer reads the token ids that the engine sampled, the end token included, at the engine's
temperature, and computes logits in float32. docs/runs.md says what breaks otherwise.
"""
from dataclasses import dataclass

import torch
from transformers import DynamicCache

CHUNK_BYTES = 2**27  # of the logits of a chunk, such as 220 tokens with a vocabulary of 151,936


@dataclass
class Sequence:
    """A prompt and an answer of T tokens."""

    ids: list[int]  # of both
    prompt_length: int

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_length  # T


def split_by_row(value_T, rows: list[Sequence]) -> tuple:
    """Split values [..., T] of the answer tokens of all rows into those of each row."""
    return value_T.split([row.length for row in rows], dim=-1)


def micro_batches(rows: list[Sequence], tokens: int, padding: float = 0.05,
                  policy=None) -> list[list[Sequence]]:
    """The rows in batches for the forward pass, in order of length.

    No batch of several rows (rows x longest row) exceeds `tokens`, and at most a share `padding` of
    all is padding. With a `policy`, `tokens` is raised if its rows share tokens that are computed
    only once.
    """
    if policy:
        tokens = tokens_at_once(policy, rows, tokens)
    batches = [[]]
    real, closed = 0, 0  # tokens so far; area (rows x longest row) of the finished batches
    for row in sorted(rows, key=lambda row: len(row.ids)):
        real += len(row.ids)
        area = (len(batches[-1]) + 1) * len(row.ids)  # of the last batch with this row
        if batches[-1] and (area > tokens or real < (1 - padding) * (closed + area)):
            closed += len(batches[-1]) * len(batches[-1][-1].ids)
            batches.append([])
        batches[-1].append(row)
    return batches


def token_logprobs(policy, rows: list[Sequence], temperature=1.0, chunk_bytes=CHUNK_BYTES):
    """(log pi_T, entropy_T) in nats of the answer tokens of all rows, one row after the other."""
    h_T, target_T = response_states(policy, rows)
    head = head_of(policy.get_base_model())
    chunk = max(1, chunk_bytes // (4 * len(head.weight)))
    return ChunkedLogprobs.apply(h_T, head, target_T, temperature, chunk)


def response_states(policy, rows: list[Sequence]):
    """(hidden states h_T [T, hidden] before the answer tokens of all rows, their ids [T])"""
    model = policy.get_base_model()
    device, length = model.lm_head.weight.device, max(len(row.ids) for row in rows)
    # Rows are padded on the right, and attention is causal, so no token attends to the padding.
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    predicts = torch.zeros((len(rows), length), dtype=torch.bool)  # the next token is an answer's
    for i, row in enumerate(rows):
        ids[i, :len(row.ids)] = torch.tensor(row.ids)
        predicts[i, row.prompt_length - 1:len(row.ids) - 1] = True
    target_T = ids.roll(-1, 1)[predicts].to(device)
    shared = shared_tokens(policy, rows)
    states = last_states(model, ids.to(device), shared)
    return states[predicts[:, shared:].to(device)], target_T


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(z / temperature)[y] and its entropy. With all logits at once this would be:

        logp_T = (head.logits(h_T) / temperature).log_softmax(-1)      # [T, vocabulary]
        logprob_T = logp_T.gather(-1, target_T[:, None])[:, 0]
        entropy_T = -(logp_T.exp() * logp_T).sum(-1)

    logp_T would be the largest tensor of the program, so it is computed for `chunk` tokens at a
    time. LoRA leaves W frozen, so only the gradient with respect to h is needed, as small as h:

        d log p(y) / d h = sum_v (onehot(y) - p)_v W_v / temperature

    It is computed while the logits of the chunk exist. The entropy is a metric without gradient.
    """

    @staticmethod
    def forward(ctx, h_T, head, target_T, temperature, chunk):
        logprob_T, entropy_T = h_T.new_empty((2, len(h_T)), dtype=torch.float32)
        slope_T = torch.empty_like(h_T) if ctx.needs_input_grad[0] else None  # d log p(y) / d h
        ctx.larger = 256 if h_T.dtype == torch.float16 else 1  # against underflow
        for start in range(0, len(h_T), chunk):
            at = slice(start, start + chunk)
            logp = log_softmax(head, h_T[at], temperature)  # [chunk, vocabulary]
            logprob_T[at] = logp.gather(-1, target_T[at, None])[:, 0]
            p = logp.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logp)  # sum of p log p without their product
            if slope_T is not None:
                E = onehot_minus(p, target_T[at])  # in float32, or rounding of p would dominate
                E.mul_(ctx.larger / temperature)
                slope_T[at] = E.to(head.weight.dtype) @ head.weight
        ctx.save_for_backward(slope_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        (slope_T,) = ctx.saved_tensors
        grad_T = grad_T[:, None] / ctx.larger
        return (grad_T * slope_T).to(slope_T.dtype), None, None, None, None


def log_softmax(head, h_T, temperature: float):
    """log p [T, vocabulary], with only one tensor of this size."""
    z = head.logits(h_T).div_(temperature)
    return z.sub_(z.logsumexp(-1, keepdim=True))


def onehot_minus(p, target_T):
    """onehot(y) - p [T, vocabulary], which overwrites p."""
    E = p.neg_()
    E[torch.arange(len(E), device=E.device), target_T] += 1
    return E


@dataclass
class Head:
    """The layer from the last hidden state h to logits z = W h."""

    weight: torch.Tensor  # W [vocabulary, hidden]

    def logits(self, h_T, words=2048):
        """z [T, vocabulary] in float32, even if h and W have 16 bits.

        torch would round the product to 16 bits, which moves log-probs by up to 0.03. On a CPU, W
        is converted in slices of the vocabulary, because a whole copy would take a gigabyte.
        """
        weight = self.weight
        if h_T.dtype in (torch.float32, torch.float64):
            return (h_T @ weight.T).float()
        if h_T.is_cuda:
            return torch.mm(h_T, weight.T, out_dtype=torch.float32)
        wide_T, z = h_T.float(), h_T.new_empty((len(h_T), len(weight)), dtype=torch.float32)
        for start in range(0, len(weight), words):
            at = slice(start, start + words)
            torch.mm(wide_T, weight[at].float().T, out=z[:, at])
        return z


def head_of(model) -> Head:
    """The head of a Hugging Face model."""
    return Head(model.lm_head.weight)


# With examples in the prompt, most tokens are the same in every row and are computed only once.
SHARING = ("llama", "qwen2")  # each token attends to all earlier ones, whatever the length
WORTH_SHARING = 16  # tokens; with fewer, one pass is faster than two


def shared_tokens(policy, rows: list[Sequence]) -> int:
    """How many tokens are computed once for all rows."""
    model = policy.get_base_model()
    # Gradient checkpointing runs layers again in the backward pass, on whole rows.
    if len(rows) == 1 or model.is_gradient_checkpointing or model.config.model_type not in SHARING:
        return 0
    first, last = min(row.ids for row in rows), max(row.ids for row in rows)
    most = min(row.prompt_length for row in rows) - 1  # a prompt's last token predicts
    same = next((t for t in range(most) if first[t] != last[t]), most)
    return same if same >= WORTH_SHARING else 0


def last_states(model, ids, shared: int):
    """The last hidden states of ids [rows, length] from token `shared` on."""
    if not shared:
        return model.model(input_ids=ids).last_hidden_state
    cache = DynamicCache()
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    rest = model.model(input_ids=ids[:, shared:], past_key_values=cache, use_cache=True)
    return rest.last_hidden_state


def tokens_at_once(policy, rows: list[Sequence], tokens: int) -> int:
    """The limit for whole rows that takes as much memory as `tokens` tokens without sharing."""
    # A row's copy of the shared keys and values is at most an eighth of what a pass keeps of it.
    shared, longest = shared_tokens(policy, rows), max(len(row.ids) for row in rows)
    per_row = longest - shared + shared / 8
    return max(tokens, int((tokens - shared) * longest / per_row))


@torch.no_grad()
def gvm_grad_norms(run, groups) -> list[float]:
    """GVM's G_i: the mean norm of the head's gradient over right pilots; 0 if none is right."""
    means = []
    run.engine.sleep()  # as in each pass of the trainer, because the largest batch was tried so
    for group in groups:
        ids = group.problem.prompt_ids
        rows = [Sequence(ids + s.rollout.token_ids, len(ids)) for s in group.pool if s.correct]
        norms = [head_gradient_norm(run.policy, row, run.config.temperature) for row in rows]
        means.append(sum(norms) / len(norms) if norms else 0.0)
    run.engine.wake()
    if run.engine.sleeps:
        run.engine.sync(run.policy)  # as after each pass, or a damaged adapter would be sampled
    return means


def head_gradient_norm(policy, row: Sequence, temperature: float, chunk: int = 128) -> float:
    """|| grad_W log pi(y|x) || for the head's W, the norm of sum_t E_t h_t^T. No backward pass."""
    head = head_of(policy.get_base_model())
    h_T, target_T = response_states(policy, [row])
    gradient = torch.zeros_like(head.weight, dtype=torch.float32)
    for start in range(0, len(h_T), chunk):
        at = slice(start, start + chunk)
        p = log_softmax(head, h_T[at], temperature).exp_()
        E = onehot_minus(p, target_T[at]).mul_(1 / temperature)  # [chunk, vocabulary]
        gradient.addmm_(E.T, h_T[at].float())
    return gradient.norm().item()


def try_largest_batch(run) -> None:
    """Run the largest possible micro-batch, so that a lack of memory shows up now."""
    config = run.config
    context = config.max_prompt_tokens + config.max_tokens
    rows = [Sequence([0] * context, prompt_length=1)] * max(1, config.micro_tokens // context)
    run.engine.sleep()
    lp_T, _ = token_logprobs(run.policy, rows, config.temperature)
    run.policy.loss_scale.scale(lp_T.mean()).backward()
    run.policy.zero_grad(set_to_none=True)
    run.engine.wake()
