"""The share of ungrammatical sentences of the built-in model by temperature and top-p, as a table.

    cargo build --release
    python tools/stories/measure.py target/release/flash-sampling

At temperature 1 the law of the model differs from the grammar, so some sentences are wrong; a filter or a lower temperature
cuts this tail. Only finished sentences count. The grammar checks single sentences, so it accepts a friend whose name changes
within a story.
"""

import json
import subprocess
import sys

from grammar import Grammar, sentences

STORIES = 100
TEMPERATURES = ["0.5", "0.8", "1", "1.2", "1.5"]
TOP_P = ["1", "0.95", "0.9"]


def share(command, grammar, temperature, top_p):
    """The number of wrong sentences and of all sentences in some stories."""
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
