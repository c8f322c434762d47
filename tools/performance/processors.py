"""The tables of processors."""

from markdown import DRAWS, over_target, table
from records import Bench

BATCHES = [1, 16, 64, 256]  # rows


def processors():
    records = [
        ("2 cores, AVX-512 BF16, hidden 4096", "2026-11-28-xeon-2-avx512bf16.json", 4096),
        ("hidden 1024", "2026-11-28-xeon-2-avx512bf16.json", 1024),
        ("2 cores, AMX, 1024", "2026-11-28-xeon-2-amx.json", 1024),
        ("16 cores, AMX, 4096", "2026-11-28-xeon-16-draws.json", 4096),
        ("1024", "2026-11-28-xeon-16-draws.json", 1024),
    ]
    columns = [[Bench(name).best("matmul and draw", rows, (151936, hidden), missing=True) for rows in BATCHES]
               for _, name, hidden in records]
    body = [
        [rows] + [over_target([of[name] / of["greedy"] for name in DRAWS], 1.03) if of else "" for of in bests]
        for rows, *bests in zip(BATCHES, *columns)
    ]
    cells = ["speed over a plain read, at these rows"]
    cells += [" / ".join(f"{of['read'] / max(of[name] for name in DRAWS):.2f}" for of in bests if of) for bests in columns]
    return table(["rows"] + [name for name, *_ in records], [*body, cells])


def logits():
    groups = [("2 cores", ["2026-11-28-xeon-2-avx512bf16.json", "2026-11-28-xeon-2-amx.json"]),
              ("16 cores", ["2026-11-28-xeon-16-draws.json"])]
    sections = [[{entry["name"]: entry["best"] for entry in section["entries"]}
                 for record in names for section in Bench(record).data["sections"] if section["what"] == "draw from logits"]
                for _, names in groups]

    def span(values, target):
        low, high = (f"{value:.1f}" for value in (min(values), max(values)))
        text = low if low == high else f"{low} to {high}"
        return f"**{text}**" if max(values) > target else text

    body = []
    for label, entry, target in [("greedy", "greedy", 1.5), ("draw, peaked", "standalone, peaked", 3),
                                 ("min-p 0.05", "min-p 0.05", 4), ("top-k 20", "top-k 20", 3),
                                 ("top-p 0.95, peaked", "top-p 0.95", 13)]:
        body.append([label] + [span([best[entry] / best["read"] for best in bests], target) for bests in sections] + [target])
    body.append(["1000 draws of one row, us a draw"]
                + [span([best["1000 draws"] * 1e3 for best in bests], 12) for bests in sections] + [12])
    return table(["over a plain read"] + [name for name, _ in groups] + ["target"], body)
