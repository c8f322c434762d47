"""The picture of speed: microseconds of one draw against the rows of the batch, as SVG without scripts.

The background is transparent: the colours have enough contrast on white and on black.
"""

import math

WIDTH, HEIGHT = 840, 372
LEFT, RIGHT, TOP, BOTTOM = 48, 216, 60, 48
COLOURS = {"ours": "#e5534b", "bare": "#848d97", "rival": "#3d8bfd", "paper": "#b08800"}
TEXT = "#7d8590"


def picture(title, series):
    """`series` is a list of (label, kind, {rows: microseconds})."""
    rows_end = max(rows for _, _, points in series for rows in points)
    step = 200
    time_end = step * math.ceil(max(time for _, _, points in series for time in points.values()) / step)

    def x(rows):
        return LEFT + (WIDTH - LEFT - RIGHT) * rows / rows_end

    def y(time):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * time / time_end

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="{TEXT}">',
        f"<title>{title}</title>",
        f'<text x="{LEFT}" y="22" font-size="16" font-weight="600">{title}</text>',
        f'<text x="{LEFT}" y="44">microseconds, least of all calls</text>',
    ]
    for time in range(0, time_end + 1, step):
        out.append(f'<path d="M{LEFT} {y(time):.1f}H{WIDTH - RIGHT}" stroke="{TEXT}" stroke-opacity="{0.8 if time == 0 else 0.25}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(time) + 5:.1f}" text-anchor="end">{time}</text>')
    for rows in sorted({rows for _, _, points in series for rows in points}):
        out.append(f'<text x="{x(rows):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{rows}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">rows of the batch</text>')

    place = 0
    for height, label, kind, points in sorted((y(points[rows_end]), label, kind, points) for label, kind, points in series):
        place = max(height, place + 20)  # labels keep their distance
        colour, width = COLOURS[kind], 3.5 if kind == "ours" else 2
        dash = ' stroke-dasharray="5 4"' if kind == "bare" else ""
        line = "L".join(f"{x(rows):.1f} {y(time):.1f}" for rows, time in sorted(points.items()))
        out.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>')
        for rows, time in sorted(points.items()):
            out.append(f'<circle cx="{x(rows):.1f}" cy="{y(time):.1f}" r="{4 if kind == "ours" else 3}" fill="{colour}"/>')
        weight = ' font-weight="700"' if kind == "ours" else ""
        out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{place + 5:.1f}" fill="{colour}"{weight}>{label}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
