"""Tables of benches/decode.py, decode_ranks.py and vllm_engine.py: decode steps from Python on one and two GPUs, what a
neighbour with filters or another seed changes, and steps of vLLM."""

from markdown import table
from records import RECORDS

STEPS = "2026-11-28-h200-decode.txt"
NEIGHBOURS = "2026-11-28-h200-neighbours.txt"
TWO_GPUS = "2026-11-28-h200-x2-decode.txt"
VLLM = "2026-11-27-h200-vllm-engine.txt"
SAMPLERS = ["torch", "flashinfer", "vllm"]


def cells(columns, record):
    """The rows of the record's tables with this number of columns."""
    for line in (RECORDS / record).read_text().splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == columns and any(cell[:1].isdigit() for cell in row[1:]):
            yield row


def steps(record):
    times = {}
    for model, rows, filters, sampler, step, draw, _, _, saved in cells(9, record):
        times.setdefault((model, rows, filters), {})[sampler] = float(step), float(draw), saved
    body = []
    for (model, rows, filters), by in times.items():
        step, draw, _ = by["ours"]
        body.append([model.upper(), rows, filters, f"{step / 1e3:.2f}", f"{draw:.0f}", f"{draw / step:.1%}",
                     *(f"{by[name][0] / step:.3f}" for name in SAMPLERS), *(f"{by[name][1] / draw:.2f}" for name in SAMPLERS),
                     by["flashinfer"][2]])
    return table(["Qwen3", "sequences", "filters", "step, ms", "head and draw, us", "share", "step: torch", "step: FlashInfer",
                  "step: vLLM", "draw: torch", "draw: FlashInfer", "draw: vLLM", "saved"], body,
                 ["---", "---:", "---", *["---:"] * 10])


def neighbours():
    names = {"ours": "ours", "torch": "torch", "flashinfer": "FlashInfer", "vllm": "vLLM"}
    body = [[model.upper(), filters, names[sampler], *rest] for model, filters, sampler, *rest in cells(8, NEIGHBOURS)]
    return table(["Qwen3", "one sequence has", "sampler", "tokens of others that change", "tokens that differ alone", "us without it", "us with it",
                  "ratio"], body, ["---", "---", "---", *["---:"] * 5])


def python_steps():
    return steps(STEPS)


def two_gpus():
    return steps(TWO_GPUS)


def vllm_engine():
    body = []
    for requests, rows, own, plugin, ratio, *times in (row for row in cells(9, VLLM) if "." in row[2]):
        cpu, gpu = (f"{times[i]} / {times[i + 1]}" for i in (0, 2))
        body.append([requests, rows, own, plugin, f"{float(ratio):.2f}", cpu, gpu])
    return table(["requests", "sequences", "step, vLLM", "step, plugin", "ratio", "CPU", "GPU"], body, ["---", *["---:"] * 6])
