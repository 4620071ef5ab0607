"""What is trained on, and its log-probabilities: from hidden states, a chunk of tokens at a time.

Everything in policy-gradient training hangs on log pi(y_t). The rules, and what breaks without them
(docs/logprobs.md):

* The trainer reads the token ids that the engine sampled. Text tokenised again may be other tokens.
* The end token counts, or nothing would teach when to stop. The prompt does not: it was not drawn.
* Logits are divided by the engine's temperature. Otherwise this is the score of a policy that did
  not sample: it has no mean zero, and likely tokens get likelier without any reward.
* Rows are padded on the right: attention is causal, so no token sees the padding.
* Logits are float32, whatever the weights are stored in. bfloat16 rounds one of 20 by up to 1/16.
* A tensor of [tokens, vocabulary] never exists (`ChunkedLogprobs`).
"""
from dataclasses import dataclass

import torch

CHUNK_BYTES = 2**27  # of a chunk's logits: 220 tokens of 151,936 words


# ------------------------------------------------------------------------------ what is trained on
@dataclass
class Row:
    """One kept sample as the update sees it: a prompt and a response of T tokens."""

    ids: list[int]  # prompt and response
    prompt_length: int
    mu: list[float]  # [T], the engine's log-probs of the response
    coefficient: float  # advantage times row weight: the factor of grad log pi
    scale: float = 1.0  # the weight of one of its tokens in the loss (minirl.set_scales)
    routes: torch.Tensor | None = None  # the engine's experts [len(ids) - 1, layers, k]
    replay: torch.Tensor | None = None  # the experts that the trainer has to use, likewise
    old: torch.Tensor | None = None  # [T], log pi_old of the response
    agrees: torch.Tensor | None = None  # [T, MoE layers]: did pi_old choose the engine's experts?
    mini_batch: int = 0  # the optimizer step in which it was trained
    theta: torch.Tensor | None = None  # [T], log pi_theta; this and the next: what `objective` saw
    mask: torch.Tensor | None = None  # [T]
    weight: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T], of the whole distribution at each token, in nats

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_length


def store_on_rows(rows: list[Row], **values_T) -> None:
    """Give each row its own part of values that were computed for all of them, [T] each."""
    lengths = [row.length for row in rows]
    for name, value_T in values_T.items():
        for row, part in zip(rows, value_T.split(lengths)):
            setattr(row, name, part)


def micro_batches(rows: list[Row], tokens: int, padding: float = 0.05) -> list[list[Row]]:
    """Cut the rows into batches for the forward pass, in order of length.

    No batch (rows x longest row) exceeds `tokens`, and at most a share `padding` of all batches
    together is padding: a batch with room for everything could be mostly padding otherwise.
    """
    batches = [[]]
    real, closed = 0, 0  # tokens so far; area (rows x longest row) of the finished batches
    for row in sorted(rows, key=lambda row: len(row.ids)):
        real += len(row.ids)
        area = (len(batches[-1]) + 1) * len(row.ids)  # of the last batch, if this row joined it
        if batches[-1] and (area > tokens or real < (1 - padding) * (closed + area)):
            closed += len(batches[-1]) * len(batches[-1][-1].ids)
            batches.append([])
        batches[-1].append(row)
    return batches if rows else []


# ------------------------------------------------------------------------------ its log-probs
def token_logprobs(policy, rows: list[Row], temperature: float = 1.0,
                   chunk_bytes: int = CHUNK_BYTES):
    """(log pi_T, entropy_T) in nats of the response tokens of all rows, one row after the other.

    chunk_bytes: what a chunk's logits may take.
    """
    h_T, target_T = response_states(policy, rows)
    head = head_of(policy.get_base_model())
    chunk = max(1, chunk_bytes // (4 * len(head.weight)))
    return ChunkedLogprobs.apply(h_T, head, target_T, temperature, chunk)


def response_states(policy, rows: list[Row]):
    """(h_T, target_T): the last hidden state [T, hidden] before each response token of all rows,
    and that token's id [T].
    """
    model = policy.get_base_model()
    device, length = model.lm_head.weight.device, max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    predicts = torch.zeros((len(rows), length), dtype=torch.bool)  # the next token is a response's
    for i, row in enumerate(rows):
        ids[i, :len(row.ids)] = torch.tensor(row.ids)
        predicts[i, row.prompt_length - 1:len(row.ids) - 1] = True
    target_T = ids.roll(-1, 1)[predicts].to(device)
    shared = shared_tokens(policy, rows)
    states = last_states(model, ids.to(device), shared)
    return states[predicts[:, shared:].to(device)], target_T


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(z / temperature)[y] and its entropy. In plain words, with all logits at once:

        logp_T = (head.logits(h_T) / temperature).log_softmax(-1)      # [T, vocabulary]
        logprob_T = logp_T.gather(-1, target_T[:, None])[:, 0]
        entropy_T = -(logp_T.exp() * logp_T).sum(-1)

    logp_T would be the largest tensor of the program (8,192 tokens x 151,936 words: 5 GB, and its
    gradient as much again). So `chunk` tokens are done at a time. LoRA leaves W frozen, and the
    only gradient that is needed is the one with respect to h,

        d log p(y) / d h = sum_v (onehot(y) - p)_v dz_v/d(W h)_v W_v / temperature.

    It is as small as h, so it is computed while the chunk's logits exist, and kept for backward.
    onehot - p is formed in float32 and then rounded to W's precision: where the policy is sure of
    y, a rounded p would cancel to noise. In float16 it is also scaled by 256, or it would
    underflow. The entropy is a metric and has no gradient.
    """

    @staticmethod
    def forward(ctx, h_T, head, target_T, temperature, chunk):
        logprob_T, entropy_T = h_T.new_empty((2, len(h_T)), dtype=torch.float32)
        slope_T = torch.empty_like(h_T) if ctx.needs_input_grad[0] else None  # d log p(y) / d h
        ctx.larger = 256 if h_T.dtype == torch.float16 else 1
        for start in range(0, len(h_T), chunk):
            at = slice(start, start + chunk)
            logp, slope = log_softmax(head, h_T[at], temperature)  # [chunk, vocabulary]
            logprob_T[at] = logp.gather(-1, target_T[at, None])[:, 0]
            p = logp.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logp)  # sum of p log p without their product
            if slope_T is not None:
                E = onehot_minus(p, target_T[at])
                slope_T[at] = E.mul_(slope * ctx.larger).to(head.weight.dtype) @ head.weight
        ctx.save_for_backward(slope_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        (slope_T,) = ctx.saved_tensors
        grad_T = grad_T[:, None] / ctx.larger
        return (grad_T * slope_T).to(slope_T.dtype), None, None, None, None


def log_softmax(head, h_T, temperature: float):
    """(log p [T, vocabulary], dz / d(W h) / temperature), without a second tensor of this size."""
    z = head.logits(h_T)
    slope = head.slope(z) / temperature
    z.div_(temperature)
    return z.sub_(z.logsumexp(-1, keepdim=True)), slope


def onehot_minus(p, target_T):
    """onehot(y) - p [T, vocabulary], in the place of p."""
    E = p.neg_()
    E[torch.arange(len(E), device=E.device), target_T] += 1
    return E


# ------------------------------------------------------------------------------ the head
@dataclass
class Head:
    """From the last hidden state h to logits: z = W h in most families.

    Phi adds a bias. Gemma 2 caps the result: z = cap tanh((W h + bias) / cap).
    """

    weight: torch.Tensor  # W [vocabulary, hidden]
    bias: torch.Tensor | None = None  # [vocabulary]
    cap: float | None = None

    def logits(self, h_T):
        """z [T, vocabulary] in float32."""
        z = float32_product(h_T, self.weight)
        if self.bias is not None:
            z += self.bias
        if self.cap is not None:
            z.div_(self.cap).tanh_().mul_(self.cap)
        return z

    def slope(self, z):
        """dz / d(W h) at the logits z: 1, and 1 - (z / cap)^2 under a cap."""
        return 1.0 if self.cap is None else (z / self.cap).square_().neg_().add_(1)


def head_of(model) -> Head:
    """The head of a Hugging Face model of one of the families in models.FAMILIES."""
    config, head = model.config.get_text_config(), model.lm_head
    return Head(head.weight, head.bias, getattr(config, "final_logit_softcapping", None))


def float32_product(h_T, weight, words=2048):
    """h W^T in float32 [T, vocabulary], also of 16-bit matrices.

    torch would round the product to 16 bits, which alone moves log-probs by up to 0.03. On a GPU
    the product's float32 sums can be kept. On a CPU, W is converted to float32 in slices of the
    vocabulary: a whole copy would take a gigabyte.
    """
    if h_T.dtype in (torch.float32, torch.float64):
        return (h_T @ weight.T).float()
    if h_T.is_cuda:
        return torch.mm(h_T, weight.T, out_dtype=torch.float32)
    wide_T, z = h_T.float(), h_T.new_empty((len(h_T), len(weight)), dtype=torch.float32)
    for start in range(0, len(weight), words):
        at = slice(start, start + words)
        torch.mm(wide_T, weight[at].float().T, out=z[:, at])
    return z


# ------------------------------------------------------------------------------ a common beginning
# With examples in the prompt most of what a small model reads is the same in every row. That part
# is computed once for all rows.
SHARING = ("llama", "qwen2")  # every token attends to all before it, whatever the row's length
WORTH_SHARING = 16  # tokens; below, one pass is faster than two


def shared_tokens(policy, rows: list[Row]) -> int:
    """How many tokens are computed once for all rows; 0: nothing is shared.

    Gradient checkpointing runs layers again in the backward pass, on whole rows: no sharing there.
    """
    model = policy.get_base_model()
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
    from transformers import DynamicCache

    cache = DynamicCache()
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    rest = model.model(input_ids=ids[:, shared:], past_key_values=cache, use_cache=True)
    return rest.last_hidden_state


def tokens_at_once(policy, rows: list[Row], tokens: int) -> int:
    """The limit for whole rows that takes as much memory as `tokens` tokens without sharing.

    Each row needs its own tokens and a copy of the beginning's keys and values, which are at most
    an eighth of what a forward pass keeps of it.
    """
    shared, longest = shared_tokens(policy, rows), max(len(row.ids) for row in rows)
    per_row = longest - shared + shared / 8
    return max(tokens, int((tokens - shared) * longest / per_row))


# ------------------------------------------------------------------------------ for --sampler gvm
@torch.no_grad()
def gvm_norms(policy, groups, temperature: float) -> list[float]:
    """GVM's G_i: the mean norm of the head's gradient over a prompt's right pilots; 0 without."""
    norms = []
    for group in groups:
        ids = group.problem.prompt_ids
        right = [Row(ids + s.rollout.token_ids, len(ids), [], 1.0) for s in group.pool if s.correct]
        found = [head_gradient_norm(policy, row, temperature) for row in right]
        norms.append(sum(found) / len(found) if found else 0.0)
    return norms


def head_gradient_norm(policy, row: Row, temperature: float, chunk: int = 128) -> float:
    """|| grad_W log pi(y|x) || at `temperature`, without a backward pass.

    W is the head's, so the gradient is the sum over the response's tokens of E_t h_t^T, with
    E_t = (onehot(y_t) - p_t) dz/d(W h) / temperature. `chunk` tokens are added at a time.
    """
    head = head_of(policy.get_base_model())
    h_T, target_T = response_states(policy, [row])
    gradient = torch.zeros_like(head.weight, dtype=torch.float32)
    for start in range(0, len(h_T), chunk):
        at = slice(start, start + chunk)
        logp, slope = log_softmax(head, h_T[at], temperature)
        E = onehot_minus(logp.exp_(), target_T[at]).mul_(slope)
        gradient.addmm_(E.T, h_T[at].float())
    return gradient.norm().item()
