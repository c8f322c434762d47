"""Cells and tables in Markdown."""

HEADS = [(151936, 4096), (128256, 8192), (151936, 2048), (201088, 2880)]
DRAWS = ["tiled, gaussian", "tiled, peaked"]


def table(header, rows, align="---"):
    """A table in Markdown; `align` is one mark for all columns, or a list of marks."""
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
    return f"**{text}**" if round(max(ratios), 2) > target else text
