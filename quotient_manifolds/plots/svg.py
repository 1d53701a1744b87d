"""Make SVG fit to stand inside a page: it scales, has a text alternative, and refers to nothing outside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


def embedded(
    svg: str, name: str, alt: str, theme: Mapping[str, str], names: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the SVG file as an <svg> element, its ids prefixed by `name`, its colours exchanged by `theme`.

    names: by the id of a group, a name for each of its markers in order, or one for the group if it has no markers.
    """
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
    for group in root.iter("g"):
        if here := (names or {}).get(group.attrib.get("id", "").removeprefix(f"{name}-")):
            _name_marks(group, here)
    described = ET.Element("title", {"id": f"{name}-alt"})
    described.text = drawable(alt)
    root.insert(0, described)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-alt", "class": "plot"})
    root.attrib.update({"stroke-linejoin": "round", "stroke-linecap": "butt"})
    return ET.tostring(root, encoding="unicode")


def drawable(text: str) -> str:
    """Return the text with a mark for every character that XML has no place for."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text)


def _name_marks(group: ET.Element, names: Sequence[str]) -> None:
    marks = [(parent, child) for parent in group.iter("g") for child in parent if child.tag == "use"]
    if len(marks) == len(names):
        for (parent, mark), text in zip(marks, names, strict=True):
            place = list(parent).index(mark)
            parent.remove(mark)
            held = ET.Element("g")
            ET.SubElement(held, "title").text = drawable(text)  # what a browser shows under the pointer
            held.append(mark)
            parent.insert(place, held)
    elif not marks and len(names) == 1:
        title = ET.Element("title")
        title.text = drawable(names[0])
        group.insert(0, title)


def _local(value: str, key: str, name: str) -> str:
    """Return an attribute with its id, or its references to ids, prefixed by the figure's name."""
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", f"{XLINK}href"):
        return value.replace("#", f"#{name}-", 1)
    return re.sub(r"url\(#", f"url(#{name}-", value)
