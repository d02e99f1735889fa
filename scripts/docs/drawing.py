"""Draw the picture of the front page from the GPU report, and memory by the number of classes."""

from html import escape

from scripts.docs.tables import Row, format_mib, read_gpu, read_result

BLUE, GRAY = "#3b5bdb", "#868e96"

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
        color = BLUE if name.startswith("fused") else GRAY
        bar = f'x="{LEFT}" y="{top}" width="{width}" height="{BAR_HEIGHT}" rx="4" fill="{color}"'
        parts += [
            f"<rect {bar}/>",
            draw_text(LEFT - 14, middle - 3, "end bold", title),
            draw_text(LEFT - 14, middle + 14, "end small", setting),
            draw_text(LEFT + 14, middle + 5, "time", f"{1000 * seconds:.0f} ms"),
            draw_text(LEFT + width + 10, middle + 5, "bold", format_mib(nbytes)),
        ]
    return wrap(parts, 8 + len(BARS) * ROW)


MAX_CLASSES = 250  # drawn: beyond, lines of other projects would leave no room


def draw_classes() -> str:
    """Return an SVG: the memory of a step over the number of classes, a line for each network."""
    peaks = {
        name: {n: mib for n, mib in row.items() if int(n) <= MAX_CLASSES}
        for name, row in read_result("cpu-classes")["peak_mib"].items()
    }
    names = {"nnU-Net": "nnU-Net", "MONAI DynUNet": "MONAI DynUNet", "lean": "unet3d, lean"}
    most = max(mib for name in names for mib in peaks[name].values())
    count = max(map(int, peaks["lean"]))
    left, width, bottom, height = 70, 560, 260, 236
    parts = [
        f'<path d="M{left} {bottom}h{width}" stroke="#ced4da"/>',
        draw_text(left + width / 2, bottom + 38, "middle small", "classes"),
    ]
    for gib in range(0, most // 1024 + 1, 5):
        y = bottom - height * gib * 1024 / most
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#e9ecef"/>')
        parts.append(draw_text(left - 8, y + 4, "end small", f"{gib} GiB"))
    for name, title in names.items():
        points = [
            (left + width * int(n) / count, bottom - height * mib / most)
            for n, mib in peaks[name].items()
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        color = BLUE if name == "lean" else GRAY
        parts.append(f'<path d="M{path}" stroke="{color}" stroke-width="3" fill="none"/>')
        x, y = points[-1]
        parts.append(draw_text(x + 8, y + 5, "bold", title))
    for n in peaks["lean"]:
        x = left + width * int(n) / count
        parts.append(draw_text(x, bottom + 18, "middle small", n))
    return wrap(parts, bottom + 48)


def wrap(parts: list[str], height: int) -> str:
    """Return an SVG of these elements."""
    style = (
        "text{font:14px system-ui,sans-serif;fill:#212529}.end{text-anchor:end}"
        ".middle{text-anchor:middle}.bold,.time{font-weight:600}.time{fill:#fff}"
        ".small{font-size:11px;fill:#495057}"
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


PICTURES = {
    "docs/images/memory-and-time.svg": draw_front,
    "docs/images/classes.svg": draw_classes,
}
