"""Lab 2: log-probabilities of what was sampled"""
import itertools

import torch

from course.checks import Wrong, asked, must_be, scenes, spelled
from parts.logprobs import Sequence

POLICY = scenes.model()
NOWHERE = "nowhere in these rows"


def row(prompt: int, response: int, first: int = 20) -> Sequence:
    """Different tokens at all places, and the model's end token at the end."""
    ids = list(range(first, first + prompt + response - 1)) + [POLICY.config.eos_token_id]
    return Sequence(ids, prompt)


def rows_of(shapes) -> list[Sequence]:
    """Rows with these lengths of prompt and response; no token is in two of them."""
    return [row(*shape, 20 + 10 * i) for i, shape in enumerate(shapes)]


def logits_of(one: Sequence):
    """[T, vocabulary] that predict the response tokens, by the model itself."""
    return POLICY(input_ids=torch.tensor([one.ids])).logits[0, one.prompt_length - 1:-1]


def alone(one: Sequence, temperature: float = 1.0):
    """log pi [T, vocabulary] at each response token, by the model itself."""
    return (logits_of(one) / temperature).log_softmax(-1)


def of_targets(of_vocabulary, one: Sequence):
    """[T] of [T, vocabulary]: what belongs to the tokens of the response."""
    ids = torch.tensor(one.ids[one.prompt_length:])
    return of_vocabulary.gather(1, ids[:, None])[:, 0]


def of_response(one: Sequence, temperature: float):
    """log pi [T] of its response's tokens, by the model itself."""
    return of_targets(alone(one, temperature), one)


def entropy_of(one: Sequence, temperature: float):
    logp = alone(one, temperature)
    return -(logp.exp() * logp).sum(-1)


def places(h_T, rows: list[Sequence]) -> list[str]:
    """For each state: at which position of which row the model has it."""
    model, found = POLICY.get_base_model().model, [NOWHERE] * len(h_T)
    for i, one in enumerate(rows):
        states = model(input_ids=torch.tensor([one.ids])).last_hidden_state[0]
        for t, state in enumerate(states):
            for at, h in enumerate(h_T):
                if h.shape == state.shape and torch.allclose(h.float(), state, atol=1e-3):
                    found[at] = f"position {t} of row {i}"
    return found


def ask_targets(*shape):
    one = row(*shape)
    _, target_T = asked.states([one])
    must_be(f"target_T of {spelled(one)}", target_T, one.ids[one.prompt_length:])


def ask_states(*shapes):
    rows = rows_of(shapes)
    h_T, target_T = asked.states(rows)
    h_T = torch.tensor(h_T)
    must_be(f"target_T of {spelled(rows)}", target_T,
            [i for one in rows for i in one.ids[one.prompt_length:]])
    hidden = POLICY.config.hidden_size
    must_be(f"the shape of h_T of {spelled(rows)}", list(h_T.shape), [len(target_T), hidden])
    model = POLICY.get_base_model().model
    right = torch.cat([model(input_ids=torch.tensor([one.ids])).last_hidden_state[
        0, one.prompt_length - 1:-1] for one in rows])
    yours, wanted = places(h_T, rows), places(right, rows)
    later = [f"position {t + 1} of row {i}" for i, one in enumerate(rows)
             for t in range(one.prompt_length - 1, len(one.ids) - 1)]
    must_be(f"which of the model's states h_T has, for {spelled(rows)}", yours, wanted,
            why="The states depend on all tokens before them in the row." * (NOWHERE in yours),
            causes={"The state at position t predicts the token at t + 1.": later})


def ask_logprobs(shapes, temperature):
    rows = rows_of(shapes)
    right = torch.cat([of_response(one, temperature) for one in rows])
    logits = [(logits_of(one), one) for one in rows]
    causes = {
        "That is log pi at temperature 1, divided by the temperature.":
            torch.cat([of_response(one, 1) for one in rows]) / temperature,
        "That is log pi where the logits are multiplied by the temperature.":
            torch.cat([of_response(one, 1 / temperature) for one in rows]),
        "That is z / tau - logsumexp(z).": torch.cat([
            of_targets(z / temperature - z.logsumexp(-1, True), one) for z, one in logits])}
    sizes = (2**27, 8 * POLICY.config.vocab_size, 1)  # all tokens, two, and one at a time
    for size in sizes if temperature == 0.5 else sizes[:1]:
        yours, entropy_T, _, _ = asked.log_probs(rows, temperature, size)
        call = f"temperature {temperature:g} of {spelled(rows)}, chunk_bytes={size}"
        must_be(f"log pi at {call}", yours, right, 1e-4, causes=causes)
        must_be(f"entropy at {call}: how many", len(entropy_T), len(right))


def ask_gradient(one):
    if not asked.log_probs([one], 0.5)[2]:
        raise Wrong("log pi has no gradient: nothing could be learnt from it")
    found = torch.tensor(asked.gradient_of_log_probs(one, 0.5))
    right = torch.cat([g.flatten() for g in torch.autograd.grad(
        of_response(one, 0.5).sum(), scenes.adapter())])
    must_be(f"norm of d(sum log pi)/d(adapter) at temperature 0.5, {spelled(one)}", found.norm(),
            right.norm(), 1e-3)
    must_be("its first numbers", found[:3], right[:3], 1e-3)


def ask_entropy(one, temperature):
    _, entropy_T, _, has_gradient = asked.log_probs([one], temperature)
    must_be(f"entropy at temperature {temperature:g} of {spelled(one)}", entropy_T,
            entropy_of(one, temperature), 1e-4, causes={
                "That is the entropy at temperature 1.": entropy_of(one, 1),
                "That is - log pi of the response's tokens, not the mean over all tokens.":
                    -of_response(one, temperature)})
    if has_gradient:
        raise Wrong("the entropy must be a constant to autograd, and yours has a gradient")


SHAPES = ((1, 1),), ((3, 3),), ((2, 1), (1, 3))  # lengths of prompt and response, of each row
CHECKS = [
    (2, "the targets: the response's tokens with its end, not the prompt's",
     ask_targets, [(1, 2), (2, 3), (4, 1)]),
    (2, "the states are those of the position before", ask_states,
     [*zip([(1, 1), (2, 1), (3, 2)])]),
    (1, "rows of different lengths get in a batch what they get alone", ask_states,
     [((1, 1), (1, 2)), ((4, 2), (2, 6), (3, 1))]),
    (2, "log pi is that of the model's own logits, at every temperature",
     ask_logprobs, [*itertools.product(SHAPES, (1.0, 0.5, 2.0, 0.05))]),
    (2, "the gradient is that of the model's own log-probs", ask_gradient,
     [(row(2, 3),)]),
    (1, "the entropy is of the same distribution, without gradient", ask_entropy,
     [(row(2, 2), temperature) for temperature in (1.0, 0.5, 0.05)])]
