"""Drawing: an SVG canvas, written without a plotting library.

The colors follow the reader's light or dark color scheme; each drawing paints its own background, so that text and
background always match.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

_STYLE = """\
  svg { font-family: -apple-system, BlinkMacSystemFont, "Segoe UI", Helvetica, Arial, sans-serif; }
  .back { fill: #ffffff; stroke: #d1d9e0; }
  .title { fill: #1f2328; font-size: 17px; font-weight: 600; }
  .text { fill: #1f2328; font-size: 13px; }
  .soft { fill: #59636e; font-size: 12px; }
  .grid { stroke: #e4e8ec; }
  .line { stroke: #59636e; stroke-dasharray: 4 3; }
  .one { fill: #d9590b; }
  .two { fill: #2f6fde; }
  .other { fill: #a3adb8; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d; }
    .title, .text { fill: #f0f6fc; }
    .soft { fill: #9198a1; }
    .grid { stroke: #262c34; }
    .line { stroke: #9198a1; }
    .one { fill: #f0883e; }
    .two { fill: #6aa2f8; }
    .other { fill: #59636e; }
  }
"""


@dataclass
class Drawing:
    """SVG elements on a canvas with a background."""

    width: int
    height: int
    title: str
    subtitle: str
    elements: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "text", anchor: str = "start") -> None:
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.elements.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:g}" rx="2"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.elements.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def svg(self) -> str:
        body = "\n".join(self.elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}">\n'
            f"<style>\n{_STYLE}</style>\n"
            f'<rect class="back" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>\n'
            f'<text class="title" x="24" y="34">{escape(self.title)}</text>\n'
            f'<text class="soft" x="24" y="54">{escape(self.subtitle)}</text>\n'
            f"{body}\n</svg>\n"
        )
