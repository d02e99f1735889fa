"""Draw the picture of the front page from the GPU report."""

from html import escape

from scripts.docs.tables import Row, format_mib, read_gpu

PICTURE = "docs/images/memory-and-time.svg"

BARS = {
    "nnU-Net PlainConvUNet, compiled": ("nnU-Net", "compiled, as nnU-Net trains it"),
    "fused, whole maps": ("unet3d", "fused blocks, whole maps"),
    "fused": ("unet3d", "fused blocks, tiles of 64 MiB"),
}
"""Ways to train nnU-Net's network, in the part `graphs` of the report, with their labels."""

WIDTH, LEFT, BAR_WIDTH, BAR_HEIGHT, ROW = 800, 218, 460, 40, 60


def draw_front() -> str:
    """Return an SVG: a bar of memory for each way to train one network, with the time of a step."""
    rows = read_gpu("graphs")
    values = {name: read_step(rows[f"nnU-Net PlainConvUNet: {name}"]) for name in BARS}
    most = max(nbytes for nbytes, _ in values.values())
    parts = []
    for n, (name, (nbytes, seconds)) in enumerate(values.items()):
        top, width = 14 + n * ROW, round(BAR_WIDTH * nbytes / most)
        middle = top + BAR_HEIGHT / 2
        title, setting = BARS[name]
        color = "#3b5bdb" if name.startswith("fused") else "#868e96"
        bar = f'x="{LEFT}" y="{top}" width="{width}" height="{BAR_HEIGHT}" rx="4" fill="{color}"'
        parts += [
            f"<rect {bar}/>",
            draw_text(LEFT - 14, middle - 3, "end bold", title),
            draw_text(LEFT - 14, middle + 14, "end small", setting),
            draw_text(LEFT + 14, middle + 5, "time", f"{1000 * seconds:.0f} ms"),
            draw_text(LEFT + width + 10, middle + 5, "bold", format_mib(nbytes)),
        ]
    height = 8 + len(BARS) * ROW
    style = (
        "text{font:14px system-ui,sans-serif;fill:#212529}.end{text-anchor:end}"
        ".bold,.time{font-weight:600}.time{fill:#fff}.small{font-size:11px;fill:#495057}"
    )
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_text(x: float, y: float, style: str, text: str) -> str:
    """Return an element with a text."""
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>'


def read_step(row: Row) -> tuple[int, float]:
    """Return the reserved bytes and the seconds of a step, of a replayed one if there is one."""
    if replayed := row.get("replayed"):
        return replayed["reserved"], replayed["step_seconds"]
    return row["measured"]["reserved"], row["step_seconds"]
