"""The tables of one GPU and of several."""

from markdown import DRAWS, HEADS, head_name, percent, table, us
from records import Bench, lines, peers

H200 = "2026-11-23-h200-bench-da2adbe.json"
RIVALS = "2026-11-23-h200-peers.jsonl"
H100 = "2026-11-24-h100-bench.json"
PIPELINE = "2026-11-23-h200-pipeline-4f2cdf9.json"


class Draw:
    """The figures of one head and number of rows on the GPU, for the slower draw of Gaussian and peaked logits."""

    def __init__(self, bench, head, rows):
        best = bench.best("matmul and draw", rows, head)
        self.best = best
        self.time = max(best[name] for name in DRAWS)
        read = min(best["read"], best["read, bulk copies"])
        products = 2 * rows * head[0] * head[1] / bench.data["gpu"]["matrix_flops"]
        self.ceiling = max(read, products) / self.time
        self.rivals = peers(RIVALS, head, rows)
        self.over_cublas = self.time / best["cuBLAS"]
        self.inverse_cdf = best["cuBLAS + inverse CDF"] / self.time

    def over(self, rival):
        """The rival's time over ours; empty without a time of the rival."""
        return f"{self.rivals[rival] / self.time:.2f}" if rival in self.rivals else ""


def one_gpu():
    bench, second, body = Bench(H200), Bench(H100), []

    def noise(draw):
        return " / ".join(percent(1 - draw.best["greedy"] / draw.best[name]) for name in DRAWS)

    for head in HEADS:
        for i, rows in enumerate([1, 64, 128, 192, 256]):
            draw, h100 = Draw(bench, head, rows), Draw(second, head, rows)
            body.append([
                "" if i else head_name(head),
                rows,
                " / ".join(us(draw.best[name], 1) for name in DRAWS),
                f"{draw.ceiling:.3f}",
                f"{draw.over_cublas:.3f}",
                draw.over("triton"),
                draw.over("fi2"),
                f"{draw.inverse_cdf:.2f}",
                noise(draw),
                us(h100.time, 1),
                f"{h100.over_cublas:.3f}",
                f"{h100.inverse_cdf:.2f}",
                noise(h100),
            ])
    return table(
        ["head", "rows", "draw, us", "of the ceiling", "over bare cuBLAS", "paper's Triton kernel", "cuBLAS + FlashInfer",
         "cuBLAS + inverse CDF", "noise, %", "H100: draw, us", "over bare cuBLAS", "cuBLAS + inverse CDF", "noise, %"],
        body)


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
        """One row of the table; a cell has one figure for each number of rows."""
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
    return table(["kernel, head, rows", "draw, us", "over bare cuBLAS", "noise, %", "with stored logits, over the draw"], body)


def logits_and_log_z():
    bench, body = Bench("2026-11-28-h200-bench.json"), []
    for rows in [1, 32, 64, 256]:
        best = bench.best("matmul and draw", rows, HEADS[0])
        draw, of_heads = best["standalone, float32"], [bench.best("matmul and draw", rows, head) for head in HEADS]
        body.append([rows, us(draw, 1), f"{draw / best['float32 logits, read']:.2f}"] + [
            f"{of_head['tiled, log Z'] / of_head['tiled, peaked']:.2f}" for of_head in of_heads])
    return table(["rows", "float32 logits, us", "over a plain read", f"log Z over the draw: {head_name(HEADS[0])}",
                  *(head_name(head) for head in HEADS[1:])], body)


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
                if "peers, last block" in best:  # an older record, in which "peers" is the exchange in a separate launch
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
