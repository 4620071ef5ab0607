"""Log-probabilities of what was sampled, from hidden states, a chunk of tokens at a time.

Everything in policy-gradient training hangs on log pi(y_t), and most small projects get it wrong
somewhere. The rules kept here: the same token ids that the engine sampled (never re-tokenised
text), the end token included, the prompt excluded, the same temperature as the engine, right
padding that no token can see, the family's own way from hidden state to logits, logits in float32
whatever the weights are stored in, and never a tensor of [tokens, vocabulary].
"""
from dataclasses import dataclass

import torch

from parts.policy import Row, own_class

CHUNK_BYTES = 2**27  # of a chunk's logits
WORTH_SHARING = 16  # tokens that all rows begin with; below, one pass is faster than two


# ------------------------------------------------------------------------------ the head
@dataclass
class Head:
    """From the last hidden state h to logits: z = cap tanh(s / cap), s = scale (W h + bias).

    Plain in most families (no bias, scale 1, no cap: z = W h). Phi has a bias, Cohere and Granite
    a scale, Gemma 2 a cap.
    """

    weight: torch.Tensor  # W [vocabulary, hidden]
    bias: torch.Tensor | None = None  # [vocabulary]
    scale: float = 1.0
    cap: float | None = None

    def logits(self, h_T, words=slice(None)):
        """z [T, words] in float32; `words`: a slice of the vocabulary."""
        z = float32_product(h_T, self.weight[words])
        if self.bias is not None:
            z += self.bias[words]
        if self.scale != 1:
            z *= self.scale
        if self.cap is not None:
            z.div_(self.cap).tanh_().mul_(self.cap)
        return z

    def slope(self, z):
        """dz / d(W h) at the logits z: `scale`, and under a cap scale (1 - (z / cap)^2)."""
        if self.cap is None:
            return self.scale
        return (z / self.cap).square_().neg_().add_(1).mul_(self.scale)


def float32_product(h_T, weight, words=2048):
    """h W^T in float32 [T, vocabulary], also of 16-bit matrices (torch would round it).

    Rounded logits alone move log-probs by up to 0.03. A GPU can keep the float32 sums that it has
    anyway. On a CPU W is widened a few words at a time: all at once it would fill a gigabyte.
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


def head_of(model) -> Head:
    """The head of a Hugging Face model; scale and cap by their names in its config."""
    config, head = model.config.get_text_config(), model.lm_head
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite divides
    return Head(head.weight, head.bias, scale, getattr(config, "final_logit_softcapping", None))


def check_family(config) -> None:
    """Raises SystemExit, naming the family, unless `head_of` gives the logits that the model gives.

    Needs the config only: the model is built without weights, a small head and made-up hidden
    states are put in, and its own forward pass is asked.
    """
    if getattr(config, "quantization_config", None):
        raise SystemExit("The weights of this model are quantized, and engine and trainer would "
                         "round them differently: take the model that they were made of.")
    try:
        with torch.device("meta"):
            model = own_class(config)(config)
        plain, reason = logits_agree(model), None
    except Exception as error:  # whatever a family of another build raises
        plain, reason = False, error
    if not plain:
        raise SystemExit(
            f"Models of the family {config.model_type} cannot be trained here: their logits are "
            "not those of a linear layer (with or without bias, scale or cap) on a text model's "
            "last hidden state. Take one of Qwen2, Qwen3, Llama, Mistral, OLMo 2, Phi-3, Gemma "
            "(text), Granite or Cohere.") from reason


@torch.no_grad()
def logits_agree(model, tokens=4, vocabulary=8) -> bool:
    """Whether the model's own forward makes the logits that `head_of(model)` makes."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    size, biased = model.lm_head.in_features, model.lm_head.bias is not None
    generator = torch.Generator().manual_seed(0)
    h = 10 * torch.randn((1, tokens, size), generator=generator)  # large enough to meet a cap
    model.lm_head = torch.nn.Linear(size, vocabulary, bias=biased)
    model.model.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=h)
    theirs = model(input_ids=torch.zeros((1, tokens), dtype=torch.long)).logits[0]
    return torch.allclose(theirs, head_of(model).logits(h[0]), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------ log-probs
class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(z / temperature)[y] and its entropy, a chunk of tokens at a time.

    A [tokens, vocabulary] tensor would be the largest of the whole program (8,192 tokens x 151,936
    words: 5 GB, and softmax and its gradient need several). W is frozen under LoRA, so the only
    gradient is that of h,

        d log p(y) / d h = sum_v (onehot(y) - p)_v dz_v/d(W h)_v W_v / temperature,

    which is as small as h itself and is computed while the chunk's logits are there. Nothing else
    is kept for backward. The difference is taken before it is rounded to W's precision: where the
    policy is sure of y, p rounded on its own would cancel to noise. (And made larger for float16,
    in which such differences would be among the smallest numbers, or none.) The entropy is a
    metric: no gradient flows through it.
    """

    @staticmethod
    def forward(ctx, h_T, head, target_T, temperature, chunk):
        logprob_T, entropy_T = h_T.new_empty((2, len(h_T)), dtype=torch.float32)
        slope_T = torch.empty_like(h_T) if ctx.needs_input_grad[0] else None  # d log p(y) / d h
        ctx.larger = 256 if h_T.dtype == torch.float16 else 1
        for start in range(0, len(h_T), chunk):
            at = slice(start, start + chunk)
            z = head.logits(h_T[at])  # [chunk, vocabulary]
            slope = head.slope(z) / temperature
            z.div_(temperature)
            logp = z.sub_(z.logsumexp(-1, keepdim=True))  # in place: no second tensor of this size
            logprob_T[at] = logp.gather(-1, target_T[at, None])[:, 0]
            p = logp.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logp)  # sum of p log p without their product
            if slope_T is not None:
                E = p.neg_()  # onehot(y) - p
                E[torch.arange(len(E), device=E.device), target_T[at]] += 1
                slope_T[at] = E.mul_(slope * ctx.larger).to(head.weight.dtype) @ head.weight
        ctx.save_for_backward(slope_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        (slope_T,) = ctx.saved_tensors
        grad_T = grad_T[:, None] / ctx.larger
        return (grad_T * slope_T).to(slope_T.dtype), None, None, None, None


def response_states(policy, rows: list[Row]):
    """(h_T, target_T): the last hidden state [T, hidden] before each response token of all rows,
    and that token's id [T].

    Rows are padded on the right: with causal attention no token looks there, so no mask is needed.
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


def shared_tokens(policy, rows: list[Row]) -> int:
    """How many tokens all rows begin with, which then are computed once; 0 if not worth it.

    A prompt with examples is most of what a small model reads.
    """
    if len(rows) == 1 or not can_share(policy):
        return 0
    first, last = min(row.ids for row in rows), max(row.ids for row in rows)
    most = min(row.prompt_length for row in rows) - 1  # a prompt's last token predicts
    same = next((t for t in range(most) if first[t] != last[t]), most)
    return same if same >= WORTH_SHARING else 0


def can_share(policy) -> bool:
    """Not where layers are run again in the backward pass, or replay experts: those see whole rows.
    Nor where a token sees a window only, or the length of the row decides its position's angles.
    """
    model = policy.get_base_model()
    config = model.config.get_text_config()
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    angles = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return not (model.is_gradient_checkpointing or getattr(policy, "routing", None) or windows
                or angles in ("dynamic", "longrope"))


def tokens_at_once(policy, rows: list[Row], tokens: int) -> int:
    """How many tokens of whole rows fit where `tokens` fit that share nothing.

    What is shared is kept once, and of its keys and values a copy per row: an eighth, at most.
    """
    shared = shared_tokens(policy, rows)
    longest = max(len(row.ids) for row in rows)
    return max(tokens, int((tokens - shared) * longest / (longest - 7 * shared / 8)))


def last_states(model, ids, shared: int):
    """The last hidden states of ids [rows, length] from token `shared` on. What comes before is
    equal in all rows: its keys and values are computed for one and serve the others.
    """
    if not shared:
        return model.model(input_ids=ids).last_hidden_state
    from transformers import DynamicCache

    cache = DynamicCache()
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    rest = model.model(input_ids=ids[:, shared:], past_key_values=cache, use_cache=True)
    return rest.last_hidden_state


def token_logprobs(policy, rows: list[Row], temperature: float = 1.0,
                   chunk_bytes: int = CHUNK_BYTES):
    """(log pi_T, entropy_T) in nats of the response tokens of all rows, one row after the other."""
    h_T, target_T = response_states(policy, rows)
    head = head_of(policy.get_base_model())
    chunk = max(1, chunk_bytes // (4 * len(head.weight)))
    return ChunkedLogprobs.apply(h_T, head, target_T, temperature, chunk)


# ------------------------------------------------------------------------------ for --sampler gvm
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
