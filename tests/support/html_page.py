"""A page that this project has written, as a strict parser sees it."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Parses strictly: every element is closed in its parent. Collects tables, pictures, text and links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.pictures, self.tables = [], [], [], [], []
        self.text = ""
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes) -> None:
        if tag not in VOID:
            self.open.append(tag)
        assert len(dict(attributes)) == len(attributes)
        values = dict(attributes)
        assert tag not in ("script", "link", "iframe", "object", "base")
        assert not [name for name in values if name.startswith("on") or name in ("style", "srcset", "background")]
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        if tag == "img":
            assert set(values) == {"alt", "src"} and values["alt"]
            kind, _, data = values["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.pictures.append(matplotlib.image.imread(io.BytesIO(base64.b64decode(data, validate=True))))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif "style" not in self.open:
            self.text += data

    def table(self, corner: str = "", *columns: str) -> dict[str, dict[str, str]]:
        """The first table with these columns, by row and column."""
        head, *rows = next(t for t in self.tables if t[0][0] == corner and set(columns) <= set(t[0]))
        return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
