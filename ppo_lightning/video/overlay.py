"""A panel with the agent's value and policy beside the picture.

Source: the "visual" variant of Huang et al., "The 37 Implementation Details of PPO" (2022).
"""

from collections.abc import Sequence

import numpy as np

from ppo_lightning.errors import import_extra

WIDTH, ROW, MARGIN = 220, 16, 8  # pixels
CURVE = 64  # height of the curve in pixels
SMALLEST = 320  # minimum height in pixels; smaller pictures are enlarged
DARK, GRAY, LIGHT, CHOSEN = (24, 24, 24), (70, 70, 70), (230, 230, 230), (255, 170, 0)


def draw(
    picture: np.ndarray,
    lines: Sequence[str],
    names: Sequence[str],
    shares: np.ndarray,
    numbers: Sequence[str],
    chosen: int | None,
    values: Sequence[float] = (),
) -> np.ndarray:
    """Add a panel to the right of a picture: lines of text, one bar per action, a curve of the value.

    Args:
        picture: The picture, [H, W, 3] uint8. A small one is enlarged by an integer factor.
        lines: Lines of text.
        names: Names of the actions, A.
        shares: Lengths of the bars, [A] in [0, 1].
        numbers: Text to the right of each bar, A.
        chosen: Index of the bar to highlight, if any.
        values: Values of the episode so far, the newest last. The curve shows one value per pixel.

    Returns:
        The new picture, [H', W', 3] uint8. H' and W' are even, as video encoders require.
    """
    image, painter = (import_extra(f"PIL.{name}", extra="video") for name in ("Image", "ImageDraw"))
    factor = -(-SMALLEST // picture.shape[0])
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    rows = ROW * (len(lines) + 1 + len(names))
    height = max(picture.shape[0], 2 * MARGIN + rows + (ROW + CURVE) * bool(values))
    panel = image.new("RGB", (WIDTH, height), DARK)
    pen = painter.Draw(panel)
    for row, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + row * ROW), line, fill=LIGHT)
    left = 90  # pixels; horizontal range of the bars
    right = WIDTH - 50
    for index, (name, share, number) in enumerate(zip(names, shares, numbers, strict=True)):
        top = MARGIN + (len(lines) + 1 + index) * ROW
        color = CHOSEN if index == chosen else LIGHT
        pen.text((MARGIN, top), name[:13], fill=color)
        pen.rectangle((left, top + 2, right, top + ROW - 4), fill=GRAY)
        end = left + round(min(max(float(share), 0), 1) * (right - left))
        pen.rectangle((left, top + 2, end, top + ROW - 4), fill=color)
        pen.text((right + 6, top), number, fill=color)
    shown = np.asarray(values[-(WIDTH - 2 * MARGIN) :])
    if len(shown) > 1:
        top = MARGIN + rows + ROW
        span = max(shown.max() - shown.min(), 1e-6)
        heights = top + CURVE * (shown.max() - shown) / span
        pen.text((MARGIN, top - ROW), "value over time", fill=LIGHT)
        pen.line([(MARGIN + x, y) for x, y in enumerate(heights.tolist())], fill=CHOSEN)
    width = picture.shape[1]
    canvas = np.full((height + height % 2, width + WIDTH + width % 2, 3), DARK, np.uint8)
    canvas[: picture.shape[0], :width] = picture
    canvas[:height, width : width + WIDTH] = np.asarray(panel)
    return canvas
