"""A reward for answers in JSON, for the right keys first and then for the right values.

    python minirl.py --model Qwen2.5-1.5B-Instruct --data examples/people.jsonl \\
        --reward examples/people.py:score --threshold 0.9 \\
        --template examples/people.json
"""
import json

KEYS = {"name", "age", "city"}


def score(problem: dict, completion: str) -> float:
    """0 if it is no JSON object with these keys; else 0.4, and 0.2 more for each right value."""
    try:
        answer = json.loads(completion)
    except ValueError:  # raised here, it would count as a failure of this function
        return 0.0
    if not isinstance(answer, dict) or answer.keys() != KEYS:
        return 0.0
    return 0.4 + 0.2 * sum(answer[key] == problem[key] for key in KEYS)
