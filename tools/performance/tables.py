#!/usr/bin/env python3
"""Writes the tables of docs/performance.md, docs/decode.md and README.md, and the picture docs/speed.svg, from docs/records.

    tools/performance/tables.py            rewrites tables and picture
    tools/performance/tables.py --check    fails if one of them differs from its records

A table begins directly below a line `<!-- table: NAME -->`, and ends at the first line without a bar. The check also fails
if a page names a missing record, or if no page names a record.
"""

import fnmatch
import re
import sys

from gpus import H200, Draw, filters, logits_and_log_z, one_gpu, other_kernels, rank_filters, ranks, readme
from markdown import HEADS, head_name
from picture import picture
from processors import logits, processors
from records import RECORDS, ROOT, Bench
from steps import neighbours, python_steps, two_gpus, vllm_engine

PAGES = ["README.md", "docs/performance.md", "docs/decode.md"]
PICTURE = ROOT / "docs/speed.svg"
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
    "python-steps": python_steps,
    "neighbours": neighbours,
    "two-gpus": two_gpus,
    "vllm-engine": vllm_engine,
}


def speed():
    """The picture of speed: one draw from the first head, by our kernel and by the rivals."""
    bench, head = Bench(H200), HEADS[0]
    draws = {rows: Draw(bench, head, rows) for rows in [1, 16, 64, 128, 192, 256]}

    def rival(name):
        return {rows: draw.rivals[name] * 1e6 for rows, draw in draws.items() if name in draw.rivals}

    return picture(
        title=f"One draw of {head_name(head)} in bf16 on one H200, matmul included",
        series=[
            ("this project", "ours", {rows: draw.time * 1e6 for rows, draw in draws.items()}),
            ("cuBLAS, the matmul alone", "bare", {rows: draw.best["cuBLAS"] * 1e6 for rows, draw in draws.items()}),
            ("cuBLAS + FlashInfer", "rival", rival("fi2")),
            ("the paper's Triton kernel", "paper", rival("triton")),
        ])


def filled(text):
    """The page with every table generated from the records."""
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
    """Errors for missing records that a page names, and for records that no page names."""
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
