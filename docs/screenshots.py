"""Take the screenshots of the inspection page, and make the pictures of scans small.

    make demo
    python docs/screenshots.py demo/run.html
    mlx-lattice segment scan.ply --model surfaces --out segmented
    python docs/screenshots.py segmented/scan.png segmented
    python docs/screenshots.py segmented/scan.html scene
    mlx-lattice detect finder/scene.ply --model finder --score 0.35
    python docs/screenshots.py detected/scene.png boxes

Pages need chromium, all need Pillow (which comes with matplotlib). The name after a
picture or a page is that of its file in docs/images.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

FOLDER = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium's values of the colour scheme that a page may ask for.
SCHEMES = {"light": 1, "dark": 0}


def take(page: Path, picture: Path, scheme: str, height: int) -> None:
    """Draw a page as it opens, 1280 wide, in at most 256 colours."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--use-angle=swiftshader",  # WebGL on the CPU
            "--enable-unsafe-swiftshader",
            "--virtual-time-budget=20000",  # until a scene is drawn
            "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--window-size=1280,{height}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    with Image.open(picture) as image:
        keep(image.convert("RGB"), picture)


def keep(image: Image.Image, path: Path) -> None:
    """Write a picture in at most 256 colours."""
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def trimmed(path: Path, margin: int = 12) -> Image.Image:
    """Return a picture without the white around it."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    drawn = ImageChops.invert(image).getbbox() or (0, 0, *image.size)
    left, top, right, bottom = drawn
    return image.crop(
        (
            max(0, left - margin),
            max(0, top - margin),
            min(image.width, right + margin),
            min(image.height, bottom + margin),
        )
    )


def main(page: Path) -> None:
    """Take the page as it opens, and with its third row open."""
    FOLDER.mkdir(exist_ok=True)
    text = page.read_text(encoding="utf-8")
    parts = text.split("<details ")
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "opened.html"
        # The rows in front and behind are left out, so that the picture is small.
        end = text[text.rindex("</details>") + len("</details>") :]
        opened = parts[0] + "<details open " + parts[3].rstrip() + end
        short.write_text(opened, encoding="utf-8")
        for scheme in SCHEMES:
            take(page, FOLDER / f"run-{scheme}.png", scheme, 1250)
            take(short, FOLDER / f"row-{scheme}.png", scheme, 1230)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith(".html"):
        for scheme in SCHEMES:
            picture = FOLDER / f"{sys.argv[2]}-{scheme}.png"
            take(Path(sys.argv[1]), picture, scheme, 720)
    elif len(sys.argv) == 3:
        keep(trimmed(Path(sys.argv[1])), FOLDER / f"{sys.argv[2]}.png")
    else:
        main(Path(sys.argv[1]))
