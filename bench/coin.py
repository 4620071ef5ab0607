"""A --reward that needs no answer: half of all answers are right, whatever the model knows."""
import random


def coin(problem, completion):
    return float(random.Random(f"{problem}{completion}").random() < 0.5)
