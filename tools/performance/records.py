"""Readers of the files in docs/records."""

import json
import pathlib

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
