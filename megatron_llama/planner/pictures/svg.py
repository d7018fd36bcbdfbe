"""Drawings as SVG, which every browser shows and which can be written without a library."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WHITE = "#ffffff"
INK = "#222831"


def ink_on(fill: str) -> str:
    """Return white or INK for a text on ``fill`` (``#rrggbb``), whichever has the higher contrast
    (WCAG 2.2, section 1.4.3)."""
    ground = _luminance(fill)
    white = (_luminance(WHITE) + 0.05) / (ground + 0.05)
    black = (ground + 0.05) / (_luminance(INK) + 0.05)
    return WHITE if white > black else INK


def _luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, from 0 to 1."""
    light = 0.0
    for place, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        level = int(colour[place : place + 2], 16) / 255
        light += weight * (level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4)
    return light


class Drawing:
    """Boxes, lines and texts on a canvas. Coordinates are pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._width = width
        self._height = height
        self._elements: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "",
        tip: str = "",
        rounded: float = 0,
        css_class: str = "",
    ) -> None:
        """Draw a filled rectangle. ``tip`` is shown while the mouse is over it."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        more = f' rx="{rounded:g}"' if rounded else ""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._elements.append(f"<rect{_paint(fill, css_class)} {place}{more}>{title}</rect>")

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        *,
        stroke: str = "",
        dashes: str = "",
        css_class: str = "",
        tip: str = "",
    ) -> None:
        """Draw a straight line. ``dashes`` are pixels drawn and left out in turn, such as ``4 3``.
        ``tip`` is shown while the mouse is over it."""
        more = f' stroke-dasharray="{dashes}"' if dashes else ""
        more += f' stroke="{stroke}"' if stroke else ""
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._elements.append(f"<line{_paint('', css_class)} {ends}{more}>{title}</line>")

    def strokes(self, places: Iterable[float], y: float, to_y: float, *, css_class: str) -> None:
        """Draw a vertical line from ``y`` to ``to_y`` at each of ``places``."""
        drawn = "".join(f"M{x:g},{y:g}V{to_y:g}" for x in places)
        self._elements.append(f'<path{_paint("none", css_class)} d="{drawn}"/>')

    def curve(
        self, points: Iterable[tuple[float, float]], *, stroke: str = "", css_class: str = ""
    ) -> None:
        """Draw straight lines from each point to the next, or a dot if there is only one."""
        places = [f"{x:.1f},{y:.1f}" for x, y in points]
        # A line of length 0 with round ends is a dot.
        whole = " ".join(places if len(places) > 1 else places * 2)
        more = f' stroke="{stroke}"' if stroke else ""
        self._elements.append(
            f'<polyline{_paint("none", css_class)} points="{whole}"{more} stroke-linecap="round" '
            'stroke-linejoin="round"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        fill: str = "",
        anchor: str = "start",
        size: float = 0,
        css_class: str = "",
    ) -> None:
        """Write a text whose baseline is at ``y``. ``anchor`` (``start``, ``middle``, ``end``) is
        the part of the text at ``x``."""
        more = f' font-size="{size:g}"' if size else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._elements.append(
            f'<text{_paint(fill, css_class)} x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'
        )

    def svg(
        self, *, inline: bool = False, style: str = "", title: str = "", description: str = ""
    ) -> str:
        """Return the ``<svg>`` element: a file of its own or, ``inline``, a part of an HTML page,
        which needs no namespace. ``style`` is the CSS of a file; ``title`` and ``description`` are
        for screen readers."""
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        view = f'viewBox="0 0 {self._width:.0f} {self._height:.0f}"'
        form = 'role="img" font-family="sans-serif"'
        namespace = "" if inline else 'xmlns="http://www.w3.org/2000/svg" '
        opened = f"<svg {namespace}{view} {size} {form}>"
        named = [f"<title>{escape(title)}</title>"] if title else []
        named += [f"<desc>{escape(description)}</desc>"] if description else []
        styles = [f"<style>{style}</style>"] if style else []
        return "\n".join([opened, *named, *styles, *self._elements, "</svg>"])


def _paint(fill: str, css_class: str) -> str:
    return (f' class="{css_class}"' if css_class else "") + (f' fill="{fill}"' if fill else "")
