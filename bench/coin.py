"""A random --reward: half of all answers are right, whatever the model has learnt."""
import random


def coin(problem, completion):
    return float(random.Random(f"{problem}{completion}").random() < 0.5)
