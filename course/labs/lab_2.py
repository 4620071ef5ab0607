"""Lab 2: log-probabilities of what was sampled, from hidden states.

    python course/check.py 2
    python course/train.py --with lab_2

Read `Sequence` and `Head` (from a hidden state to logits) in parts/logprobs.py first.
Do not read further there. Useful:

    model = policy.get_base_model()                              # Hugging Face's class
    model.model(input_ids=ids).last_hidden_state                 # ids [rows, length] gives
                                                                 # [rows, length, hidden]
    head_of(model).logits(h_T)                                   # [T, vocabulary], float32
"""
import torch  # noqa: F401

from parts.logprobs import head_of  # noqa: F401


def response_states(policy, rows: list):
    """The hidden states that predict the responses' tokens, and these tokens.

    The rows have different lengths. row.ids is a list of ids, first the prompt's and then the
    response's, and row.prompt_length is the length of the prompt. Every row has a prompt and a
    response. Returns (h_T, target_T), one row's response after the other, in the order of rows:
        h_T       [T, hidden]: the last hidden state at the position *before* each response token
        target_T  [T] int64: the ids of the response tokens, the end token included

    The state at position t predicts token t + 1. So the first token of a response is predicted at
    the last position of the prompt. You may run one row at a time, or all rows in one batch. For a
    batch pad on the right, for example with 0. Attention is causal, so no token sees the padding
    after it, and no mask is needed. (The caller has switched dropout off.)
    """
    raise NotImplementedError


def token_logprobs(policy, rows: list, temperature: float = 1.0, chunk_bytes: int = 2**27):
    """(log pi_T, entropy_T) of the response tokens of all rows, in nats, both [T].

        log pi(y_t) = z_t[y_t] / tau - logsumexp(z_t / tau)         z: logits, tau: temperature
        entropy_t   = - sum_v pi(v) log pi(v)

    Call your own response_states. log pi has a gradient. The entropy is a metric, and a constant to
    autograd. tau belongs inside the softmax, because the engine samples at tau, and anything else
    is the log-prob of another policy. Both must be finite at a low tau such as 0.05, too.

    You may ignore chunk_bytes, which limits how many tokens' logits exist at a time. (With 151,936
    words and 8,192 tokens all logits at once are 5 GB. How would you keep the gradient?)
    """
    raise NotImplementedError
