"""Take the screenshots of the inspection page from the demo's run.html.

    make demo
    python docs/screenshots.py demo/run.html

needs chromium and Pillow (which comes with matplotlib).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium's values of the colour scheme that a page may ask for.
SCHEMES = {"light": 1, "dark": 0}


def take(page: Path, picture: Path, scheme: str, height: int) -> None:
    """Draw a page as it opens, 1280 wide, in at most 128 colours."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
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
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
            picture, optimize=True
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
            take(short, FOLDER / f"row-{scheme}.png", scheme, 1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
