"""SVG text made fit to stand inside a page: it scales, has a text alternative, and refers to nothing outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


def embedded(svg: str, name: str, alt: str, theme: Mapping[str, str]) -> str:
    """The SVG file as an <svg> element, its ids prefixed by `name`, its colours exchanged by `theme`."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"A figure's name must be lower-case letters, digits and hyphens, found {name!r}.")
    root = ET.fromstring(svg)
    for metadata in root.findall(f"{SVG}metadata"):
        root.remove(metadata)
    for parent in [*root.iter(f"{SVG}defs")]:
        for style in parent.findall(f"{SVG}style"):
            parent.remove(style)  # it would hold for the whole page, not for this figure
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        element.attrib = {key.removeprefix(XLINK): _local(value, key, name) for key, value in element.attrib.items()}
        if "style" in element.attrib:  # the only place where colours may refer to the page
            element.attrib["style"] = re.sub("#[0-9a-f]{6}", lambda m: theme.get(m[0], m[0]), element.attrib["style"])
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    described = ET.Element("title", {"id": f"{name}-alt"})
    described.text = alt
    root.insert(0, described)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-alt", "class": "plot"})
    root.attrib.update({"stroke-linejoin": "round", "stroke-linecap": "butt"})
    return ET.tostring(root, encoding="unicode")


def _local(value: str, key: str, name: str) -> str:
    """Ids, and references to ids, prefixed by the figure's name."""
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", f"{XLINK}href"):
        return value.replace("#", f"#{name}-", 1)
    return re.sub(r"url\(#", f"url(#{name}-", value)
