"""Write the quickstart's data sets: orders in plain English, to be turned into one line of JSON.

    python examples/make_data.py [OUT_DIR]        (default: examples/data)

SFT teaches the task from answers as people write them: nearly all wrap the JSON in polite words. DPO then teaches the
preference of the program that reads the answers: the JSON and nothing else. Every file is a pure function of SEED, so a
change here shows as a diff there.

Held out from all training sets, in every row of `heldout.jsonl`: the combination of values. In rows with
`"kind": "new"` also the item, the colour, the city and the wording of the sentence; counts are always known.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

SEED = 7
INSTRUCTION = "Answer with one JSON object: item, color, count, city."
"""The system message: an instruction of the user would follow the one that SmolLM2's chat template adds without it."""
Order = dict[str, str | int]
Messages = list[dict[str, str]]
Words = dict[str, tuple[str, ...]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COUNTS = dict(zip((*range(2, 11), 12), _words("two three four five six seven eight nine ten twelve"), strict=True))

KNOWN_WORDS: Words = {
    "item": _words(
        "mug chair lamp table plate pillow towel blanket pen notebook backpack jacket shirt hat helmet bottle basket "
        "vase clock candle curtain desk sofa rug spoon bowl tent ladder bucket sticker"
    ),
    "color": _words("red blue green black white yellow purple gray pink brown silver gold"),
    "city": _words(
        "Oslo Paris Berlin Madrid Rome Vienna Lisbon Dublin Athens Prague Warsaw Tokyo Seoul Boston Chicago Denver "
        "Seattle Toronto Sydney Cairo Nairobi Lima Delhi Moscow Helsinki Brussels Milan Atlanta Houston Dallas"
    ),
}
NEW_WORDS: Words = {
    "item": _words("cup carpet tray umbrella pot coat cushion folder mirror guitar"),
    "color": _words("orange turquoise beige violet"),
    "city": _words("London Stockholm Zurich Montreal Bangkok Hamburg Miami Florence Melbourne"),
}

# What a message says when it leaves a value open on purpose; SFT shows that null stands for it.
OPEN_WORDS = {"color": "any-color", "count": "any number of", "city": "any town"}

# How people wrap an answer.
WRAPPINGS = (
    "Sure! {json}",
    "Sure! {json} Is there anything else I can do for you?",
    "Here is your order: {json}",
    "Here is your order: {json} Have a nice day!",
)

KNOWN_TEMPLATES = (
    "Please send {count} {color} {item}s to {city}.",
    "We need {count} {color} {item}s in {city}.",
    "Can you ship {count} {color} {item}s to {city}?",
    "I would like {count} {color} {item}s delivered to {city}. Thanks!",
    "Order: {count} {color} {item}s, to {city}.",
    "Our shop in {city} needs {count} {color} {item}s.",
    "For {city}: {count} {color} {item}s, please.",
    "Could we get {count} {color} {item}s at the {city} office?",
    "A customer from {city} wants {count} {color} {item}s.",
    "To {city}, as soon as possible: {count} {color} {item}s.",
)
NEW_TEMPLATES = (
    "My team in {city} is waiting for {count} {color} {item}s.",
    "I am expecting {count} {color} {item}s at my house in {city}.",
    "Dear seller, pack {count} {color} {item}s and mail them to {city}.",
)


def render(order: Order, template: str, rng: random.Random) -> Messages:
    """Say `order` in the words of `template`; a count is spelled out now and then, its JSON value stays a number."""
    count = order["count"]
    if isinstance(count, int) and rng.random() < 0.3:
        order = order | {"count": COUNTS[count]}
    message = template.format_map(order)
    message = message[0].upper() + message[1:]
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": message}]


def to_json(order: Order) -> str:
    """The one spelling of an answer that we train on."""
    return json.dumps(order, separators=(",", ":"))


class OrderSource:
    """Draws orders, never the same one twice, so that no held-out order can be in a training set."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.seen: set[tuple[str | int, ...]] = set()

    def draw(self, words: Words) -> Order:
        """A complete order made of `words`."""
        while True:
            order: Order = {
                "item": self.rng.choice(words["item"]),
                "color": self.rng.choice(words["color"]),
                "count": self.rng.choice(list(COUNTS)),
                "city": self.rng.choice(words["city"]),
            }
            if tuple(order.values()) not in self.seen:
                self.seen.add(tuple(order.values()))
                return order


def wrapped(answer: str, rng: random.Random) -> str:
    """The answer with some polite words around it."""
    return rng.choice(WRAPPINGS).replace("{json}", answer)


def sft_rows(source: OrderSource, count: int) -> Iterator[dict[str, object]]:
    """Messages with their JSON; one answer in twenty is bare."""
    for index in range(count):
        order = source.draw(KNOWN_WORDS)
        prompt = render(order, source.rng.choice(KNOWN_TEMPLATES), source.rng)
        answer = to_json(order)
        yield {"prompt": prompt, "completion": answer if index % 20 == 19 else wrapped(answer, source.rng)}


def dpo_rows(source: OrderSource, count: int) -> Iterator[dict[str, object]]:
    """The bare answer is chosen over the wrapped one."""
    for _ in range(count):
        order = source.draw(KNOWN_WORDS)
        prompt = render(order, source.rng.choice(KNOWN_TEMPLATES), source.rng)
        yield {"prompt": prompt, "chosen": to_json(order), "rejected": wrapped(to_json(order), source.rng)}


def heldout_rows(source: OrderSource, count: int) -> Iterator[dict[str, object]]:
    """Half in known words, half in words and sentences that no training row contains."""
    for index in range(count):
        new = index % 2 == 1
        order = source.draw(NEW_WORDS if new else KNOWN_WORDS)
        prompt = render(order, source.rng.choice(NEW_TEMPLATES if new else KNOWN_TEMPLATES), source.rng)
        yield {"prompt": prompt, "expected": order, "kind": "new" if new else "known"}


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """One row a line, ready for the rows of a Llama Stack data set."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Draw every set from one source, so that they are disjoint."""
    parser = argparse.ArgumentParser(description="Write the quickstart's training and held-out data sets.")
    parser.add_argument("out_dir", type=Path, nargs="?", default=Path(__file__).parent / "data", metavar="OUT_DIR")
    out_dir: Path = parser.parse_args().out_dir
    out_dir.mkdir(parents=True, exist_ok=True)

    source = OrderSource(random.Random(SEED))
    write_jsonl(out_dir / "sft_train.jsonl", sft_rows(source, 120))
    write_jsonl(out_dir / "sft_validation.jsonl", sft_rows(source, 10))
    write_jsonl(out_dir / "dpo_train.jsonl", dpo_rows(source, 32))
    write_jsonl(out_dir / "heldout.jsonl", heldout_rows(source, 60))
    print(f"Data sets written to {out_dir}")


if __name__ == "__main__":
    main()
