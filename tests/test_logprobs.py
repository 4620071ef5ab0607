"""Log-probs, entropy and slopes against the plain computation, for every head and precision. The
checks of lab 2 cover several rows, temperatures and chunks."""
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models_small import LargestTensor, plain_logprobs, policy
from parts.logprobs import (ChunkedLogprobs, Head, Sequence, gvm_grad_norms, head_gradient_norm,
                            micro_batches, shared_tokens, token_logprobs, tokens_at_once)


def example(tokens=37, hidden=16, vocabulary=101, dtype=torch.float32):
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=dtype) / 4
    return h, Head(weight), torch.randint(vocabulary, (tokens,))


def plain(h, head, target, temperature):
    """The computation of Hugging Face, with all logits at once and gradients."""
    log_p = (h @ head.weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_equal_the_plain_computation_forward_and_backward(temperature):
    h, head, target = example()
    upstream = torch.randn(len(h))
    wanted = plain(h, head, target, temperature)
    wanted_grad = torch.autograd.grad(wanted[0], h, upstream)[0]
    for chunk in (1, 8, 37, 1000):
        logprob, entropy = ChunkedLogprobs.apply(h, head, target, temperature, chunk)
        grad = torch.autograd.grad(logprob, h, upstream)[0]
        torch.testing.assert_close(logprob, wanted[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(entropy, wanted[1], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(grad, wanted_grad, atol=2e-6, rtol=1e-5)
        assert not entropy.requires_grad  # a metric


def confident(p: float, tokens=32, hidden=256, vocabulary=20_000, dtype=torch.bfloat16):
    """16-bit (h, head, target) where the target of every token has a probability near p."""
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).to(dtype)
    target = torch.randperm(vocabulary)[:tokens]
    noise = torch.randn(tokens, hidden)
    direction = torch.nn.functional.normalize(weight[target].float(), dim=-1)
    before, gain = noise @ weight.float().T, direction @ weight.float().T
    low, high = torch.zeros(tokens, 1), torch.full((tokens, 1), 60.0)
    for _ in range(15):  # how far h must go along its target's word, by bisection
        middle = (low + high) / 2
        found = (before + middle * gain).softmax(-1).gather(1, target[:, None])
        low, high = torch.where(found < p, middle, low), torch.where(found < p, high, middle)
    return (noise + high * direction).to(dtype).requires_grad_(), Head(weight), target


@pytest.mark.parametrize("p", [0.5, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_slope_of_a_confident_token_survives_16_bits(p, dtype):
    """If p is near 1, the slope 1 - p is lost when p is rounded first. In float16, whose smallest
    numbers are 6e-8 apart, its product with a weight is lost, too."""
    h, head, target = confident(p, dtype=dtype)
    exact = h.detach().double().requires_grad_()
    wanted = plain(exact, Head(head.weight.double()), target, 1.0)[0]
    assert (wanted.exp().median() - p).abs() < 0.2 * (1 - p)  # the example is what it says
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), exact)
    logprob, _ = ChunkedLogprobs.apply(h, head, target, 1.0, 16)
    scale = 2**16 if dtype == torch.float16 else 1  # the loss's
    (slope,) = torch.autograd.grad(logprob.sum() * scale, h)
    assert slope.dtype == dtype
    error = (slope.double() / scale - wanted_slope).norm() / wanted_slope.norm()
    assert error < 0.01  # float16 at p = 0.9999: 0.03 unless they are made larger on the way


def test_logits_of_16_bit_weights_are_not_rounded_to_16_bits():
    h, head, target = confident(0.9)
    exact = plain(h.double(), Head(head.weight.double()), target, 1.0)[0]
    logprob, _ = ChunkedLogprobs.apply(h, head, target, 1.0, 16)
    rounded = (h @ head.weight.T).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert (logprob - exact).abs().max() < 1e-5 < 1e-3 < (rounded - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(dtype):
    h, head, target = example(tokens=512, vocabulary=5000, dtype=dtype)
    with LargestTensor() as seen:
        ChunkedLogprobs.apply(h, head, target, 1.0, 16)[0].sum().backward()
    assert seen.largest == 16 * 5000 < 512 * 5000


def rows_of(*lengths_and_prompts):
    return [Sequence(torch.randint(300, (length,)).tolist(), prompt)
            for length, prompt in lengths_and_prompts]


@pytest.mark.parametrize("prompts, shared", [((24, 30, 26), 20), ((21, 21, 21), 20), ((17, 17), 16),
                                             ((9, 9), 0)])
def test_what_all_rows_begin_with_is_computed_once_and_nothing_changes(prompts, shared):
    trained = policy(moved=0.1)
    adapter = [p for p in trained.parameters() if p.requires_grad]
    start = list(range(20)) if shared else []
    rows = [Sequence(start + row.ids[len(start):], row.prompt_length)
            for row in rows_of(*((prompt + 9 + i, prompt) for i, prompt in enumerate(prompts)))]
    first = rows[0]  # the last row has its prompt, those between have others
    rows.append(replace(first, ids=first.ids[:first.prompt_length] + [1, 2, 3]))
    assert shared_tokens(trained, rows) == shared and shared_tokens(trained, rows[:1]) == 0
    together, _ = token_logprobs(trained, rows, 0.8)
    grads = torch.autograd.grad(together.sum(), adapter)
    alone = torch.cat([plain_logprobs(trained, row, 0.8) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, torch.autograd.grad(alone.sum(), adapter), atol=1e-4,
                               rtol=1e-4)
    # a pass over so many tokens has room for more rows
    most, longest = tokens_at_once(trained, rows, 100), max(len(row.ids) for row in rows)
    assert (most > 100) == bool(shared)
    assert shared + most / longest * (longest - shared + shared / 8) <= 100  # no more memory


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_head_gradient_norms_equal_autograd(temperature):
    """GVM's G without a backward pass, against the real gradient of the head."""
    trained = policy(tie_word_embeddings=False)
    head = trained.get_base_model().lm_head.weight.requires_grad_()
    for row in rows_of((12, 3), (200, 29), (18, 1)):
        with LargestTensor() as seen:
            norm = head_gradient_norm(trained, row, temperature, chunk=10)
        assert seen.largest < 171 * 384  # never tokens x vocabulary
        log_pi = plain_logprobs(trained, row, temperature).sum()
        wanted = torch.autograd.grad(log_pi, head)[0].norm().item()
        torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=1e-5)


def test_gvm_asks_for_the_gradient_of_right_pilots_at_the_temperature_of_sampling():
    trained, pilots = policy(), [(True, [5, 6]), (False, [7]), (True, [9])]
    engine = SimpleNamespace(sleep=lambda: None, wake=lambda: None, sleeps=False)
    run = SimpleNamespace(policy=trained, engine=engine, config=SimpleNamespace(temperature=0.5))
    groups = [SimpleNamespace(problem=SimpleNamespace(prompt_ids=[1, 3]), pool=[
        SimpleNamespace(correct=correct, rollout=SimpleNamespace(token_ids=ids))
        for correct, ids in pool]) for pool in (pilots, [(False, [8, 2])])]
    right = [Sequence([1, 3, *ids], 2) for ids in ([5, 6], [9])]
    expected = sum(head_gradient_norm(trained, row, 0.5) for row in right) / 2
    assert gvm_grad_norms(run, groups) == [pytest.approx(expected), 0.0]


@given(st.lists(st.tuples(st.integers(2, 60), st.integers(1, 60)), min_size=1, max_size=30),
       st.sampled_from([0.0, 0.05, 0.3, 1.0]))
@hypothesis.example([(41, 9), (45, 9), (49, 9), (60, 9)], 0.05)  # the first batch is padded, too
def test_micro_batches_keep_to_their_tokens_and_little_of_them_is_padding(sizes, padding):
    """Prompt and answer fill the memory together, whatever the share of each."""
    rows = [Sequence([0] * length, min(prompt, length - 1)) for length, prompt in sizes]
    cut = micro_batches(rows, 150, padding)
    areas = [len(batch) * max(len(row.ids) for row in batch) for batch in cut]
    assert sorted(id(row) for batch in cut for row in batch) == sorted(map(id, rows))
    assert max(areas) <= 150
    assert sum(len(row.ids) for row in rows) >= (1 - padding) * sum(areas)


def test_micro_batches_are_as_large_as_their_limits_allow():
    for lengths, tokens, sizes in (([30] * 7, 150, [5, 2]), ([19, 20, 20, 20, 40], 300, [4, 1])):
        rows = [Sequence([0] * length, 9) for length in lengths]
        assert [len(batch) for batch in micro_batches(rows, tokens)] == sizes
