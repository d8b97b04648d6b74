"""Data of the tasks in `tasks/`: questions with choices, and pages shorter and longer than the model was trained at."""

import json
import random
from pathlib import Path

TASKS = Path(__file__).with_name("tasks")
TRAINED_AT = 48
WORDS = ("rain", "coach", "village", "fire", "candle", "daughter", "trunk", "visitor", "year", "inn", "name", "snow")


def sentences(num_words: int, seed: int) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) + choose.choice(["", "", ",", "."]) for _ in range(num_words))


def write_data(folder: Path, shuffled: bool) -> None:
    choose = random.Random(1)
    rows = [
        {
            "question": f"{sentences(choose.randint(1, 9), 10 + i)} the",
            "choices": [sentences(choose.randint(1, 3), 100 + 4 * i + j) for j in range(4)],
            "answer": choose.randrange(4),
            "letter": choose.choice("aeinrt"),
        }
        for i in range(20)
    ]
    pages = [{"page": sentences(size, size)} for size in (3, 40, 90)]
    for name, data in (("choice", rows), ("pages", pages)):
        if shuffled:
            random.Random(2).shuffle(data)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
