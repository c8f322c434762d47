"""Readers of the files in docs/records."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs/records"


class Bench:
    """A record in JSON, as `bench --json` writes it; times are in seconds."""

    def __init__(self, name):
        self.name = name
        self.data = json.loads((RECORDS / name).read_text())

    def section(self, what, rows, head, missing=False):
        for section in self.data["sections"]:
            if section["what"] == what and section["rows"] == rows and (section["vocab"], section["hidden"]) == head:
                return section
        if missing:
            return None
        raise KeyError(f"{self.name} has no section '{what}' of {rows} rows and head {head}")

    def best(self, what, rows, head, missing=False):
        """The best time of every contender of a section."""
        section = self.section(what, rows, head, missing)
        return section and {entry["name"]: entry["best"] for entry in section["entries"]}


def lines(name):
    """A record with one JSON object per line."""
    return [json.loads(line) for line in (RECORDS / name).read_text().splitlines()]


def peers(name, head, rows):
    """Best times of other programs in seconds, by name."""
    found = [line for line in lines(name) if (line.get("V"), line.get("D"), line.get("B")) == (*head, rows)]
    return {line["peer"]: line["min_us"] / 1e6 for line in found}


def printed(name):
    """The tables that `bench` prints: {head: {rows: {contender: microseconds}}}. The last run of a head counts."""
    heads, head, names = {}, None, []
    for line in (RECORDS / name).read_text().splitlines():
        if begin := re.match(r"(\d+) x (\d+) \w+, (microseconds)?", line):
            head = (int(begin[1]), int(begin[2])) if begin[3] else None
            names = []
            if head:
                heads[head] = {}
        elif head and (label := re.fullmatch(r" +(\d+)  ([a-zA-Z].*)", line)):
            names.append(label[2])
        elif head and names and re.fullmatch(r"[ \d.]+", line) and line.strip():
            cells = line.split()
            heads[head][int(cells[0])] = dict(zip(names, map(float, cells[1:])))
    return heads
