"""Lab 2: log-probabilities of what was sampled"""
import itertools

import torch

from course.checks import Wrong, must_be, spelled
from parts import logprobs
from parts.logprobs import Sequence
from parts.models import tiny_folder
from parts.policy import load_policy

POLICY = load_policy(tiny_folder(), dtype="float32", rank=2, alpha=4, seed=0, device="cpu")
for name, weight in POLICY.named_parameters():
    if "lora_B" in name:  # an adapter begins with zeros there: make it do something
        torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(0))


def row(prompt: int, response: int) -> Sequence:
    """A token of its own at each place, and the model's end token at the end."""
    ids = list(range(20, 20 + prompt + response - 1)) + [POLICY.config.eos_token_id]
    return Sequence(ids, prompt)


def alone(one: Sequence, temperature: float = 1.0):
    """log pi [T, vocabulary] at each response token, by the model itself."""
    logits = POLICY(input_ids=torch.tensor([one.ids])).logits[0, one.prompt_length - 1:-1]
    return (logits / temperature).log_softmax(-1)


def of_response(one: Sequence, temperature: float):
    """log pi [T] of its response's tokens, by the model itself."""
    ids = torch.tensor(one.ids[one.prompt_length:])
    return alone(one, temperature).gather(1, ids[:, None])[:, 0]


def ask_targets(*shape):
    one = row(*shape)
    _, target_T = logprobs.response_states(POLICY, [one])
    must_be(f"target_T of {spelled(one)}", target_T, one.ids[one.prompt_length:])


def ask_states(prompt, response):
    one = row(prompt, response)
    h_T, _ = logprobs.response_states(POLICY, [one])
    model = POLICY.get_base_model().model
    states = model(input_ids=torch.tensor([one.ids])).last_hidden_state[0]
    right = states[prompt - 1:-1]
    must_be(f"the shape of h_T of {spelled(one)}", list(h_T.shape), list(right.shape))
    must_be(f"h_T of {spelled(one)}, its first numbers", h_T[0, :3], right[0, :3], 1e-4,
            f"(The state at position {prompt - 1} predicts the token at position {prompt}.)")


def ask_batch(*shapes):
    rows = [row(*shape) for shape in shapes]
    h_T, target_T = logprobs.response_states(POLICY, rows)
    must_be(f"target_T of {spelled(rows)}", target_T,
            [i for one in rows for i in one.ids[one.prompt_length:]])
    single = torch.cat([logprobs.response_states(POLICY, [one])[0] for one in rows])
    must_be(f"h_T of {spelled(rows)}: sums over the hidden size", h_T.sum(-1), single.sum(-1),
            1e-3, "It differs from that of the same rows, one at a time.")


def ask_logprobs(shapes, temperature):
    rows = [row(*shape) for shape in shapes]
    right = torch.cat([of_response(one, temperature) for one in rows])
    for size in (2**27, 8 * POLICY.config.vocab_size, 1):  # all, two, and one at a time
        yours, entropy_T = logprobs.token_logprobs(POLICY, rows, temperature, size)
        call = f"temperature {temperature:g} of {spelled(rows)}, chunk_bytes={size}"
        must_be(f"log pi at {call}", yours, right, 1e-4)
        must_be(f"entropy at {call}: how many", len(entropy_T), len(right))


def ask_gradient(one):
    weights = [p for p in POLICY.parameters() if p.requires_grad]
    yours, _ = logprobs.token_logprobs(POLICY, [one], 0.5)
    if not yours.requires_grad:
        raise Wrong("log pi has no gradient: nothing could be learnt from it")
    found, right = (torch.cat([g.flatten() for g in torch.autograd.grad(lp_T.sum(), weights)])
                    for lp_T in (yours, of_response(one, 0.5)))
    must_be(f"norm of d(sum log pi)/d(adapter) at temperature 0.5, {spelled(one)}", found.norm(),
            right.norm(), 1e-3)
    must_be("its first numbers", found[:3], right[:3], 1e-3)


def ask_entropy(one, temperature):
    _, entropy_T = logprobs.token_logprobs(POLICY, [one], temperature)
    logp = alone(one, temperature)
    must_be(f"entropy at temperature {temperature:g} of {spelled(one)}", entropy_T,
            -(logp.exp() * logp).sum(-1), 1e-4)
    if entropy_T.requires_grad:
        raise Wrong("the entropy carries a gradient: it is a metric here, detach it")


SHAPES = ((1, 1),), ((3, 3),), ((2, 1), (1, 3))  # lengths of prompt and response, of each row
CHECKS = [
    (2, "the targets: the response's tokens with its end, not the prompt's",
     ask_targets, [(1, 2), (2, 3), (4, 1)]),
    (2, "the states are those of the position before", ask_states, [(1, 1), (2, 1), (3, 2)]),
    (1, "rows of different lengths get in a batch what they get alone", ask_batch,
     [((1, 1), (1, 2)), ((4, 2), (2, 6), (3, 1))]),
    (2, "log pi is that of the model's own logits, at every temperature",
     ask_logprobs, [*itertools.product(SHAPES, (1.0, 0.5, 2.0))]),
    (2, "the gradient is that of the model's own log-probs", ask_gradient,
     [(row(2, 3),)]),
    (1, "the entropy is of the same distribution, without gradient", ask_entropy,
     [(row(2, 2), 1.0), (row(2, 2), 0.5)])]
