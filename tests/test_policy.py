"""Chunked log-probs and entropy against the plain computation, forward and backward, and what they keep in memory."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parts import tiny
from parts.logprobs import ChunkedLogprobs, head_gradient_norms, token_logprobs
from parts.policy import Row, load_policy


def plain(h, weight, target, temperature):
    log_p = (h @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def example(tokens=37, hidden=16, vocabulary=101, dtype=torch.float32):
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    return h, torch.randn(vocabulary, hidden, dtype=dtype) / 4, torch.randint(vocabulary, (tokens,))


def test_chunks_equal_the_plain_computation_forward_and_backward():
    h, weight, target = example()
    upstream = torch.randn(len(h))
    for temperature in (1.0, 0.7):
        wanted = plain(h, weight, target, temperature)
        wanted_grad = torch.autograd.grad(wanted[0], h, upstream)[0]
        for chunk in (1, 8, 37, 1000):
            logprob, entropy = ChunkedLogprobs.apply(h, weight, target, temperature, chunk)
            torch.testing.assert_close(logprob, wanted[0], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(entropy, wanted[1], atol=2e-6, rtol=1e-5)
            assert not entropy.requires_grad  # a metric
            torch.testing.assert_close(torch.autograd.grad(logprob, h, upstream)[0], wanted_grad, atol=2e-6, rtol=1e-5)


def test_gradient_by_finite_differences():
    h, weight, target = example(tokens=5, vocabulary=11, dtype=torch.float64)
    # the result is float32, so the tolerance is that of a float32 difference quotient
    assert torch.autograd.gradcheck(lambda x: ChunkedLogprobs.apply(x, weight, target, 1.3, 2)[0].double(), (h,),
                                    eps=1e-2, atol=1e-3, rtol=1e-2)


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements that any operation returned, also in the backward pass."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made():
    h, weight, target = example(tokens=512, vocabulary=5000)
    with LargestTensor() as seen:
        ChunkedLogprobs.apply(h, weight, target, 1.0, 16)[0].sum().backward()
    assert seen.largest <= 16 * 5000 < 512 * 5000
    with LargestTensor() as seen:  # the instrument does see such a tensor when there is one
        plain(h, weight, target, 1.0)[0].sum().backward()
    assert seen.largest == 512 * 5000


def small_policy(folder, **changes):
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    tiny.build_model(tokenizer).save_pretrained(folder)
    policy = load_policy(str(folder), **dict(dtype="float32", rank=4, alpha=8, seed=0, device="cpu") | changes)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.05)
    return policy


def test_token_logprobs_equal_full_logits_row_by_row(tmp_path):
    """Ragged rows in one padded batch: each token's log-prob is the one it has when its row is alone, with full logits."""
    policy = small_policy(tmp_path)
    rows = [Row(torch.randint(300, (length,)).tolist(), prompt, [], 0.0) for length, prompt in ((9, 4), (30, 1), (12, 11))]
    together, entropy = token_logprobs(policy, rows, temperature=0.8, chunk_bytes=4 * 384 * 5)
    alone = []
    for row in rows:
        log_p = (policy(input_ids=torch.tensor([row.ids])).logits[0, :-1] / 0.8).log_softmax(-1)
        alone.append(log_p.gather(1, torch.tensor(row.ids[1:])[:, None])[row.prompt_length - 1:, 0])
    assert len(together) == sum(row.length for row in rows) == 5 + 29 + 1
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    rows = [Row(torch.randint(300, (20,)).tolist(), 5, [], 0.0) for _ in range(3)]
    gradients = []
    for checkpointing in (False, True):
        policy = small_policy(tmp_path, checkpointing=checkpointing)
        torch.manual_seed(1)
        for p in policy.parameters():
            if p.requires_grad:
                p.data.normal_(0, 0.05)
        token_logprobs(policy, rows)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(g is not None and torch.equal(g, h) for g, h in zip(*gradients))


def test_bfloat16_base_keeps_float32_adapter_and_float32_logprobs(tmp_path):
    policy = small_policy(tmp_path, dtype="bfloat16", checkpointing=True)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    logprob, _ = token_logprobs(policy, [Row(list(range(40)), 8, [], 0.0)])
    logprob.sum().backward()
    assert logprob.dtype == torch.float32 and all(p.grad is not None for p in policy.parameters() if p.requires_grad)


def test_every_linear_layer_but_the_head_is_adapted(tmp_path):
    policy = small_policy(tmp_path)
    adapted = {n.split(".lora_A")[0].split(".")[-1] for n, _ in policy.named_parameters() if ".lora_A" in n}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_head_gradient_norm_equals_autograd(tmp_path):
    """GVM's G without a backward pass, against the real gradient of the head (untied from the embedding here)."""
    policy = small_policy(tmp_path)
    model = policy.get_base_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    rows = [Row(torch.randint(300, (n,)).tolist(), p, [], 0.0) for n, p in ((12, 3), (30, 29), (18, 1))]
    for row, norm in zip(rows, head_gradient_norms(policy, rows, chunk=100)):
        log_p = policy(input_ids=torch.tensor([row.ids])).logits[0, :-1].log_softmax(-1)
        log_pi = log_p.gather(1, torch.tensor(row.ids[1:])[:, None])[row.prompt_length - 1:].sum()
        torch.testing.assert_close(norm, torch.autograd.grad(log_pi, model.lm_head.weight)[0].norm().item(), rtol=1e-4, atol=1e-5)
