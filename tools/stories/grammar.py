"""The grammar of grammar.txt: draws stories, and checks whether a sentence is grammatical."""

import random
import re
from functools import lru_cache
from pathlib import Path

GENDERS = "fm"
TOKEN = re.compile(r"[A-Za-z']+|[^\sA-Za-z]")


class Grammar:
    def __init__(self, path=Path(__file__).with_name("grammar.txt")):
        """Reads the rules. A rule with a mark (`%`, `&`) becomes one rule for each gender."""
        self.rules, self.bound = {}, set()
        joined = re.sub(r"\n +", " ", path.read_text())
        for line in joined.splitlines():
            if line.startswith("bind "):
                self.bound |= {f"<{name}>" for name in line.split()[1:]}
            elif line and not line.startswith("#"):
                name, _, body = line.partition(" = ")
                for copy_name, copy_body in self.copies(name, body):
                    self.rules[copy_name] = [alternative.split() for alternative in copy_body.split(" | ")]

    @staticmethod
    def copies(name, body):
        """Expands the marks. A rule without marks in its name keeps one body, with a marked alternative once for each gender."""
        texts = [(name, body)]
        for mark in "%&":
            if mark in name:
                texts = [(n.replace(mark, g), b.replace(mark, g)) for n, b in texts for g in GENDERS]
            else:
                texts = [(n, Grammar.spread(b, mark)) for n, b in texts]
        return texts

    @staticmethod
    def spread(body, mark):
        parts = body.split(" | ")
        return " | ".join(p.replace(mark, g) for p in parts for g in (GENDERS if mark in p else "-"))

    def expand(self, symbol, rng, kept):
        """The words of a symbol; `kept` has the expansions of the bound symbols in this story."""
        if symbol not in self.rules:
            return [symbol]
        if symbol in kept:
            return kept[symbol]
        choices = self.rules[symbol]
        weights = [1 / (place + 2) for place in range(len(choices))]
        words = [w for part in rng.choices(choices, weights)[0] for w in self.expand(part, rng, kept)]
        if symbol in self.bound:
            kept[symbol] = words
        return words

    def story(self, rng):
        """A story as text; hero and friend have different names."""
        while True:
            kept = {}
            words = self.expand("<story>", rng, kept)
            people = [tuple(name) for symbol, name in kept.items() if symbol.startswith(("<hero", "<friend"))]
            if len(set(people)) == len(people):
                return render(words)

    def recognises(self, words):
        """Whether <sentence> derives the words, which have no capital at the beginning of a sentence or a quotation."""

        @lru_cache(maxsize=None)
        def ends(symbol, at):
            if symbol not in self.rules:
                return frozenset([at + 1] if at < len(words) and words[at] == symbol else [])
            found = set()
            for alternative in self.rules[symbol]:
                places = {at}
                for part in alternative:
                    places = {end for place in places for end in ends(part, place)}
                found |= places
            return frozenset(found)

        return len(words) in ends("<sentence>", 0)

    def is_grammatical(self, sentence):
        """Whether a sentence, as a list of tokens, has correct capitals and a derivation."""
        words, begins, quoted = [], True, False
        for token in sentence:
            if token == '"':
                quoted = not quoted
                begins |= quoted
            elif begins and token[0].isalpha():
                if not token[0].isupper():
                    return False
                begins = False
                if token != "I" and token not in self.names():
                    token = token[0].lower() + token[1:]
            words.append(token)
        return self.recognises(tuple(words))

    @lru_cache(maxsize=None)
    def names(self):
        return {name for g in GENDERS for (name,) in self.rules[f"<name.{g}>"]}


def render(words):
    """Words and punctuation as text, with capitals and spaces."""
    text, begins, quoted, glued = "", True, False, True
    for word in words:
        closing = word == '"' and quoted
        if begins and word[0].isalpha():
            word, begins = word[0].upper() + word[1:], False
        if not (glued or closing or word in ".,!?"):
            text += " "
        text += word
        if word == '"':
            quoted = not quoted
        glued = word == '"' and quoted
        begins |= glued or (word == "." and not quoted) or (closing and text.endswith('."'))
    return text


def sentences(text):
    """The finished sentences of a text, each as a list of tokens."""
    found, current, quoted = [], [], False
    for token in TOKEN.findall(text):
        current.append(token)
        quoted ^= token == '"'
        if not quoted and (token == "." or (token == '"' and current[-2:-1] == ["."])):
            found.append(current)
            current = []
    return found


def stories(seed, count):
    """Stories that depend only on the seed."""
    grammar, rng = Grammar(), random.Random(seed)
    return [grammar.story(rng) for _ in range(count)]


if __name__ == "__main__":
    grammar = Grammar()
    made = stories(1, 1000)
    print(*made[:5], sep="\n\n")
    parts = [s for story in made for s in sentences(story)]
    assert all(grammar.is_grammatical(s) for s in parts), next(s for s in parts if not grammar.is_grammatical(s))
    words = {w for s in parts for w in s}
    print(f"\n{len(parts)} sentences of 1000 stories are grammatical; {len(words)} different words", end="; ")
    print(f"{sum(len(s) for s in parts) / 1000:.0f} tokens a story")
