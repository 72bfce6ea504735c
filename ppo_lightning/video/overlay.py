"""What the agent thinks, drawn beside the picture: the "visual" variant of Huang et al. (2022)."""

from collections.abc import Sequence

import numpy as np

from ppo_lightning.errors import import_extra

WIDTH, ROW, MARGIN = 220, 16, 8  # pixels
SMALLEST = 320  # height of a picture; smaller ones are enlarged
DARK, GREY, LIGHT, CHOSEN = (24, 24, 24), (70, 70, 70), (230, 230, 230), (255, 170, 0)


def draw(
    picture: np.ndarray,
    lines: Sequence[str],
    names: Sequence[str],
    shares: np.ndarray,
    numbers: Sequence[str],
    chosen: int | None,
) -> np.ndarray:
    """Puts a panel to the right of a picture: lines of text, then a bar for each action.

    Args:
        picture: [H, W, 3] uint8.
        lines: Of text.
        names: Of the actions, A.
        shares: Lengths of the bars, [A] between 0 and 1.
        numbers: Written at the right of the bars, A.
        chosen: Index of the bar to highlight; None: no one.

    Returns:
        [H', W', 3] uint8, H' and W' even, as video encoders want them; a small picture is enlarged by a whole factor.

    Raises:
        ConfigError: Pillow is not installed.
    """
    image, painter = (import_extra(f"PIL.{name}", extra="video") for name in ("Image", "ImageDraw"))
    factor = -(-SMALLEST // picture.shape[0])
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height = max(picture.shape[0], 2 * MARGIN + ROW * (len(lines) + 1 + len(names)))
    panel = image.new("RGB", (WIDTH, height), DARK)
    pen = painter.Draw(panel)
    for row, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + row * ROW), line, fill=LIGHT)
    left, right = 90, WIDTH - 50  # of the bars
    for index, (name, share, number) in enumerate(zip(names, shares, numbers, strict=True)):
        top = MARGIN + (len(lines) + 1 + index) * ROW
        colour = CHOSEN if index == chosen else LIGHT
        pen.text((MARGIN, top), name[:13], fill=colour)
        pen.rectangle((left, top + 2, right, top + ROW - 4), fill=GREY)
        pen.rectangle(
            (left, top + 2, left + round(float(share) * (right - left)), top + ROW - 4), fill=colour
        )
        pen.text((right + 6, top), number, fill=colour)
    whole = np.full((height + height % 2, picture.shape[1] + WIDTH + picture.shape[1] % 2, 3), DARK, np.uint8)
    whole[: picture.shape[0], : picture.shape[1]] = picture
    whole[:height, picture.shape[1] : picture.shape[1] + WIDTH] = np.asarray(panel)
    return whole
