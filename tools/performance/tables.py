#!/usr/bin/env python3
"""Writes the tables of docs/performance.md and README.md, and the picture docs/speed.svg, from docs/records.

    tools/performance/tables.py            rewrites tables and picture
    tools/performance/tables.py --check    fails if one of them differs from its records

A table stands right below a line `<!-- table: NAME -->` and ends at the first line without a bar. The check also fails
if a page names a record that is missing, or if no page names a record.
"""

import fnmatch
import pathlib
import re
import sys

from picture import picture
from records import RECORDS, Bench, ROOT, decode_steps, lines, peers, printed

PAGES = ["README.md", "docs/performance.md"]
PICTURE = ROOT / "docs/speed.svg"

H200 = "2026-11-23-h200-bench-da2adbe.json"
RIVALS = "2026-11-23-h200-peers.jsonl"
PIPELINE = "2026-11-23-h200-pipeline-4f2cdf9.json"
HEADS = [(151936, 4096), (128256, 8192), (151936, 2048), (201088, 2880)]
DRAWS = ["tiled, gaussian", "tiled, peaked"]


def table(header, rows, align="---"):
    """A table in Markdown; `align` is one mark for all columns or a list of marks."""
    marks = [align] * len(header) if isinstance(align, str) else align
    return ["| " + " | ".join(map(str, row)) + " |" for row in [header, marks, *rows]]


def head_name(head):
    return f"{head[0]} x {head[1]}"


def us(seconds, digits=0):
    return f"{seconds * 1e6:.{digits}f}"


def percent(share):
    return f"{round(100 * share, 1) + 0.0:.1f}"  # + 0.0 turns -0.0 into 0.0


def over_target(ratios, target):
    """Ratios of one cell; bold if one of them misses the target."""
    text = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"**{text}**" if max(ratios) > target else text


class Draw:
    """Figures of one head and number of rows on the GPU: the worse draw of Gaussian and peaked logits."""

    def __init__(self, bench, head, rows):
        best = bench.best("matmul and draw", rows, head)
        self.best = best
        self.time = max(best[name] for name in DRAWS)
        read = min(best["read"], best["read, bulk copies"])
        products = 2 * rows * head[0] * head[1] / bench.data["gpu"]["matrix_flops"]
        self.ceiling = max(read, products) / self.time
        self.rivals = peers(RIVALS, head, rows)

    def over(self, rival):
        """The rival's time over ours, or nothing where the rival was not run."""
        return f"{self.rivals[rival] / self.time:.2f}" if rival in self.rivals else ""


def one_gpu():
    bench, body = Bench(H200), []
    for head in HEADS:
        for i, rows in enumerate([1, 64, 128, 192, 256]):
            draw = Draw(bench, head, rows)
            best = draw.best
            body.append([
                "" if i else head_name(head),
                rows,
                " / ".join(us(best[name], 1) for name in DRAWS),
                f"{draw.ceiling:.3f}",
                f"{draw.time / best['cuBLAS']:.3f}",
                draw.over("triton"),
                draw.over("fi2"),
                f"{best['cuBLAS + inverse CDF'] / draw.time:.2f}",
                " / ".join(percent(1 - best["greedy"] / best[name]) for name in DRAWS),
            ])
    return table(
        ["head", "rows", "draw, us", "of the ceiling", "over bare cuBLAS", "paper's Triton kernel", "cuBLAS + FlashInfer",
         "cuBLAS + inverse CDF", "noise, %"], body)


def readme():
    bench, body = Bench(H200), []
    for rows in [1, 64, 128, 256]:
        draw = Draw(bench, HEADS[0], rows)
        body.append([rows, us(draw.time), f"{draw.ceiling:.2f}", draw.over("triton"),
                     f"{draw.best['cuBLAS'] / draw.time:.2f}", draw.over("fi2")])
    return table(["rows", "us", "of the ceiling", "the paper's Triton kernel", "cuBLAS, the matmul alone",
                  "cuBLAS + FlashInfer's sampler"], body, "---:")


def other_kernels():
    bench, body = Bench("2026-11-23-h200-portable-2879d74.json"), []

    def row(name, bests, draws, greedy, unit, stored=None):
        """One row; cells have one figure for each number of rows."""
        times = [max(best[draw] for draw in draws) for best in bests]
        cells = [[us(time * unit) for time in times],
                 [f"{time / best['cuBLAS']:.2f}" for time, best in zip(times, bests)],
                 [percent(1 - best[greedy] / time) for time, best in zip(times, bests)],
                 [f"{best[stored] / time:.2f}" for time, best in zip(times, bests)] if stored else []]
        body.append([name] + [" / ".join(cell) for cell in cells])

    for head in [HEADS[0], HEADS[2]]:
        bests = [bench.best("matmul and draw", rows, head) for rows in [64, 256]]
        row(f"portable kernel on the H200, {head_name(head)}, 64 / 256", bests, ["portable, peaked"], "portable, greedy", 1,
            "portable, logits kept")
    log = printed("2026-11-23-h100-noise2.txt")[HEADS[2]]
    row(f"Hopper kernel on an H100, {head_name(HEADS[2])}, 192 / 256", [log[192], log[256]], DRAWS, "greedy", 1e-6)
    return table(["kernel, head, rows", "draw, us", "over bare cuBLAS", "noise, %", "with stored logits, over the draw"], body)


def logits_and_log_z():
    bench, log, body = Bench(H200), printed("2026-11-23-h200-log-z-4f2cdf9.txt"), []
    for rows in [1, 16, 64, 256]:
        best = bench.best("matmul and draw", rows, HEADS[0])
        draw = best["standalone, float32"]
        body.append([rows, us(draw, 1), f"{draw / best['float32 logits, read']:.2f}"] + [
            f"{log[head][rows]['tiled, log Z'] / log[head][rows]['tiled, peaked']:.2f}" if rows in log[head] else ""
            for head in HEADS[:3]])
    return table(["rows", "float32 logits, us", "over a plain read", f"log Z over the draw: {head_name(HEADS[0])}",
                  *(head_name(head) for head in HEADS[1:3])], body)


FILTERS = {
    "min-p 0.05": "min-p 0.05",
    "top-k 20": "top-k 20",
    "top-k 50, top-p 0.9": "top-k 50, top-p 0.9",
    "top-p 0.95": "top-p 0.95",
    "penalties, 1000 tokens": "penalties over 1000 tokens",
    "mask of 100 tokens": "mask of 100 tokens, different for each row",
}


def filters():
    bench, older, all_rows = Bench(PIPELINE), Bench("2026-11-23-h200-pipeline.json"), [1, 64, 256]

    def ratio(kind, rows, name):
        best = bench.best(f"fused pipeline, {kind} rows", rows, HEADS[0])
        share = best[name] / best["plain"]
        return f"**{share:.3f}**" if kind == "LLM-like" and share > 1.15 else f"{share:.2f}"

    def rival(rows, name):
        section = older.section("fused pipeline, LLM-like rows", rows, HEADS[0])
        rivals = [peer["best"] for peer in section["peers"] if peer["name"].endswith(f": {name}")]
        ours = next(entry["best"] for entry in section["entries"] if entry["name"] == name)
        return [f"{min(rivals) / ours:.2f}"] if rivals else []

    body = [[label] + [" / ".join(ratio(kind, rows, name) for rows in all_rows)
                       for kind in ["LLM-like", "flat", "best in one tile"]]
            + [" / ".join(cell for rows in all_rows for cell in rival(rows, name))] for name, label in FILTERS.items()]
    return table(["rows of the batch: 1 / 64 / 256", "LLM-like rows", "equal logits", "all peaks in one tile",
                  "cuBLAS + FlashInfer over ours, noise version 1"], body)


RANKS = [
    ("one GPU, the whole head", "one GPU"),
    ("one shard, no exchange", "shard alone"),
    ("**exchange of draws by NVLink peers**", "peers"),
    ("the same by a launch of its own", "peers, own launch"),
    ("exchange of draws by NCCL", "nccl"),
    ("cuBLAS, logits gathered by NCCL, our draw", "+ draw"),
]


def ranks():
    setups = [("two", 2, "2026-11-23-h200-x2"), ("four", 4, "2026-11-22-h200-x4")]
    heads, all_rows = [HEADS[1], HEADS[0]], [1, 16, 64, 256]
    columns, body = [], []
    for name, world, record in setups:
        for head in heads:
            bench = Bench(f"{record}-{head[0]}x{head[1]}.json")
            bests = [bench.best(f"a step on {world} GPUs", rows, head) for rows in all_rows]
            for best in bests:
                if "peers, last block" in best:  # an older record, in which "peers" is the exchange by a launch of its own
                    best["peers, own launch"], best["peers"] = best["peers"], best["peers, last block"]
            columns.append((f"{name}, {head_name(head)}", bests, world, head, record))
    for label, entry in RANKS:
        body.append([label] + [" / ".join(us(best[entry]) for best in bests) for _, bests, *_ in columns])
    body.append(["the paper's Triton fan-out, kernels alone"] + [
        " / ".join(f"{line['min_us']:.0f}" for rows in all_rows for line in lines(f"{record}-fanout.jsonl")
                   if (line["V"], line["D"]) == head and line["B"] == rows)
        for _, _, _, head, record in columns])
    return table([""] + [column[0] for column in columns], body)


def rank_filters():
    bench = Bench("2026-11-22-h200-x2-pipeline.json")
    places = ["2 GPUs by peers", "one GPU"]
    names = ["plain", *FILTERS]
    body = [[place] + [f"{bench.best(f'whole calls on {place}, LLM-like rows', 64, HEADS[0])[name] * 1e3:.2f}"
                       for name in names] for place in places]
    return table([""] + names, body)


def processors():
    records = [
        ("2 cores, AVX-512 BF16, hidden 4096", "2026-11-23-xeon-noise2-avx512bf16.json", 4096),
        ("hidden 1024", "2026-11-23-xeon-noise2-avx512bf16.json", 1024),
        ("2 cores, AMX, 1024", "2026-11-23-xeon-noise2-amx.json", 1024),
        ("16 cores, AMX, 4096", "2026-11-23-xeon-16-amx-4096.json", 4096),
        ("1024", "2026-11-23-xeon-16-amx-1024.json", 1024),
    ]
    body = []
    for rows in [1, 16, 64, 256]:
        cells = [rows]
        for _, record, hidden in records:
            best = Bench(record).best("matmul and draw", rows, (151936, hidden), missing=True)
            cells.append(over_target([best[name] / best["greedy"] for name in DRAWS], 1.035) if best else "")
        body.append(cells)
    cells = ["speed over a plain read, at these rows"]
    for _, record, hidden in records:
        bests = [Bench(record).best("matmul and draw", rows, (151936, hidden), missing=True) for rows in [1, 16, 64, 256]]
        cells.append(" / ".join(f"{best['read'] / max(best[name] for name in DRAWS):.2f}" for best in bests if best))
    return table(["rows"] + [name for name, *_ in records], [*body, cells])


def logits():
    groups = [("2 cores", ["2026-11-23-xeon-noise2-avx512bf16.json", "2026-11-23-xeon-noise2-amx.json"]),
              ("16 cores", ["2026-11-23-xeon-16-amx-4096.json", "2026-11-23-xeon-16-amx-1024.json"])]
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


def candle():
    bench = Bench("2026-11-21-xeon-amx-candle.json")
    body = []
    for name, label in [("candle", "candle, a float32 copy of the weight"), ("candle, bf16 kept", "candle, the weight kept in bf16")]:
        cells = [label]
        for rows in [16, 64, 256]:
            best = bench.best("matmul and draw", rows, HEADS[0])
            cells.append(f"{best[name] / max(best[draw] for draw in DRAWS):.1f}")
        body.append(cells)
    return table(["over our draw", "16 rows", "64 rows", "256 rows"], body)


def models():
    body = []
    for machine, model, record, sequences, ours in [
            ("H200", "1.7b", "2026-11-21-h200-decode.txt", [1, 8, 64], "our fused head"),
            ("H200", "8b", "2026-11-21-h200-decode.txt", [1, 8, 64], "our fused head"),
            ("16 cores", "0.6b", "2026-11-21-xeon-decode.txt", [1, 8], "our fused head, weight kept in bf16")]:
        steps = decode_steps(record)

        def column(way, place, steps=steps, model=model, sequences=sequences):
            digits = lambda value: f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10.5 else f"{value:.0f}"
            return " / ".join(digits(steps[model, count, way][place]) for count in sequences)

        body.append([f"{machine}, Qwen3-{model.upper()}, {' / '.join(map(str, sequences))}", column(ours, "head"),
                     column("candle's matmul, gumbel_softmax", "head"), column("candle's matmul, LogitsProcessor", "head"),
                     column(ours, "step")])
    return table(["machine, model, sequences", "our fused head", "candle's matmul + `gumbel_softmax`",
                  "candle's matmul + `LogitsProcessor`", "whole step, ours"], body)


TABLES = {
    "readme": readme,
    "one-gpu": one_gpu,
    "other-kernels": other_kernels,
    "logits-and-log-z": logits_and_log_z,
    "filters": filters,
    "ranks": ranks,
    "rank-filters": rank_filters,
    "processors": processors,
    "logits": logits,
    "candle": candle,
    "models": models,
}


def speed():
    """The picture of speed: one draw of the first head, ours and its rivals."""
    bench, head = Bench(H200), HEADS[0]
    draws = {rows: Draw(bench, head, rows) for rows in [1, 16, 64, 128, 192, 256]}
    return picture(
        title=f"One draw of {head_name(head)} in bf16 on one H200, matmul included",
        series=[
            ("this project", "ours", {rows: draw.time * 1e6 for rows, draw in draws.items()}),
            ("cuBLAS, the matmul alone", "bare", {rows: draw.best["cuBLAS"] * 1e6 for rows, draw in draws.items()}),
            ("cuBLAS + FlashInfer", "rival", {rows: draw.rivals["fi2"] * 1e6 for rows, draw in draws.items() if draw.rivals}),
            ("the paper's Triton kernel", "paper", {rows: draw.rivals["triton"] * 1e6 for rows, draw in draws.items() if draw.rivals}),
        ])


def filled(text):
    """The page with every table made anew."""
    out, names, old = [], [], iter(text.splitlines())
    for line in old:
        mark = re.fullmatch(r"<!-- table: ([a-z0-9-]+) -->", line)
        if not mark:
            out.append(line)
            continue
        names.append(mark[1])
        out += [line, *TABLES[mark[1]]()]
        after = next((rest for rest in old if not rest.startswith("|")), None)
        if after is not None:
            out.append(after)
    return "\n".join(out) + "\n", names


def record_errors():
    """Records that a page names and that are missing, and records that no page names."""
    there = {path.name for path in RECORDS.iterdir()}
    named = set()
    errors = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("crates/*/README.md"))]:
        for name in re.findall(r"20\d\d-\d\d-\d\d-[A-Za-z0-9*.-]+\.(?:jsonl|json|txt)", page.read_text()):
            found = fnmatch.filter(there, name)
            named.update(found)
            if not found:
                errors.append(f"{page.relative_to(ROOT)} names the record {name}, which is missing")
    return errors + [f"no page names the record {name}" for name in sorted(there - named)]


def main():
    check, errors, names = "--check" in sys.argv[1:], [], []
    made = [(PICTURE, speed())]
    for page in PAGES:
        path = ROOT / page
        text, found = filled(path.read_text())
        made.append((path, text))
        names += found
    errors += [f"no page has the table {name}" for name in TABLES if name not in names]
    errors += record_errors()
    for path, text in made:
        if check and (not path.exists() or path.read_text() != text):
            errors.append(f"{path.relative_to(ROOT)} differs from its records; run tools/performance/tables.py")
        elif not check:
            path.write_text(text)
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print(f"{len(names)} tables and the picture agree with the records")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
