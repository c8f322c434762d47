"""The share of ungrammatical sentences in what the built-in model writes, by temperature and top-p, as a table.

    cargo build --release
    python tools/stories/measure.py target/release/flash-sampling

The model's law at temperature 1 is its own, not the grammar's: what it has not learnt it writes wrongly, and a filter or a
lower temperature cuts that tail. A sentence counts when it is finished; the grammar knows no names across sentences, so a
friend who changes her name within a story is not counted.
"""

import json
import subprocess
import sys

from grammar import Grammar, sentences

STORIES = 100
TEMPERATURES = ["0.5", "0.8", "1", "1.2", "1.5"]
TOP_P = ["1", "0.95", "0.9"]


def share(command, grammar, temperature, top_p):
    """Wrong sentences and all sentences of some stories."""
    flags = ["--temperature", temperature, "--top-p", top_p, "--seed", "1", "--num-sequences", str(STORIES), "--max-tokens", "300"]
    out = subprocess.run([command, "generate", "--format", "json", *flags], check=True, capture_output=True, text=True).stdout
    parts = [part for line in out.splitlines() for part in sentences(json.loads(line)["text"])]
    return sum(not grammar.is_grammatical(part) for part in parts), len(parts)


def main():
    grammar = Grammar()
    print("| temperature | " + " | ".join(f"top-p {p}" if p != "1" else "no filter" for p in TOP_P) + " |")
    print("| ---: |" + " ---: |" * len(TOP_P))
    for temperature in TEMPERATURES:
        cells = []
        for top_p in TOP_P:
            wrong, count = share(sys.argv[1], grammar, temperature, top_p)
            cells.append(f"{100 * wrong / count:.1f}% of {count}")
        print(f"| {temperature} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
