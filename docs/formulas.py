"""Write the formulas of notebooks as MathML, which browsers show without a script and without a network."""

from __future__ import annotations

import html
import re
from typing import Any

LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ",
    "eta": "η", "theta": "θ", "lambda": "λ", "mu": "μ", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
    "phi": "ϕ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Sigma": "Σ", "top": "⊤", "infty": "∞", "dots": "…",
    "partial": "∂", "nabla": "∇",
}  # fmt: skip
SIGNS = {
    "cdot": "⋅", "times": "×", "pm": "±", "odot": "⊙", "le": "≤", "ge": "≥", "ne": "≠", "neq": "≠", "approx": "≈",
    "to": "→", "langle": "⟨", "rangle": "⟩", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "in": "∈",
    "sum": "∑", "otimes": "⊗", "mapsto": "↦",
    "{": "{", "}": "}", "|": "‖", "-": "−", "*": "∗",
}  # fmt: skip
DOUBLE_STRUCK = {"R": "ℝ", "C": "ℂ"}
FUNCTIONS = ("max", "min", "ln", "log", "exp", "sin", "cos", "tanh", "det")
SPACES = {",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.33em", "quad": "1em", "qquad": "2em"}
ACCENTS = {"dot": "˙", "ddot": "¨", "dddot": "⃛", "hat": "^", "bar": "¯", "tilde": "~"}

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\d+(?:\.\d+)?|\S", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$", re.DOTALL)
MARKUP = re.compile(r"(<(pre|code|script|style|svg)\b.*?</\2>|<!--.*?-->|<[^>]*>)", re.DOTALL)
MATHJAX = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)


def on_page_content(content: str, page: Any, **kwargs: Any) -> str:
    """Return the content of a page of the site; of a notebook without MathJax, and with MathML for its formulas."""
    return with_mathml(MATHJAX.sub("", content)) if page.file.src_uri.endswith(".ipynb") else content


def with_mathml(content: str) -> str:
    """Return HTML in which the formulas of the text, between dollars, are MathML; code stays as it is."""
    pieces = MARKUP.split(content)
    pieces[::3] = (FORMULA.sub(_element, text) for text in pieces[::3])
    return "".join(piece for place, piece in enumerate(pieces) if place % 3 < 2)


def _element(found: re.Match[str]) -> str:
    return mathml(html.unescape(found[1] or found[2]), display=found[1] is not None)


def mathml(tex: str, display: bool = False) -> str:
    r"""Return a formula as MathML. Raises ValueError for what is not among the commands that notebooks use.

    >>> mathml(r"\frac{x_1^2}{2}")
    '<math alttext="\\frac{x_1^2}{2}"><mfrac><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup><mn>2</mn></mfrac></math>'
    """
    tokens = TOKEN.findall(tex)[::-1]
    shown = ' display="block"' if display else ""
    try:
        inside = "".join(_row(tokens, None))
    except (IndexError, KeyError) as error:
        raise ValueError(f"A formula must be of the commands that docs/formulas.py knows. Found {tex!r}") from error
    return f'<math{shown} alttext="{html.escape(tex)}">{inside}</math>'


def _row(tokens: list[str], end: str | None) -> list[str]:
    """Return the elements up to the closing token, which is taken, too; tokens come from the end of the list."""
    row: list[str] = []
    while tokens and tokens[-1] != end:
        row.append(_scripted(tokens))
    if end is not None:
        tokens.pop()
    return row


def _scripted(tokens: list[str]) -> str:
    """Return an element with its indices, exponents and primes."""
    base, scripts = _atom(tokens), {}
    while tokens and tokens[-1] in ("_", "^", "'"):
        mark = tokens.pop()
        if mark == "'":
            scripts["^"] = f"<mo>{'′' * (1 + scripts.get('^', '').count('′'))}</mo>"
        else:
            scripts[mark] = _atom(tokens)
    under = "limits" in base
    if len(scripts) == 2:
        name = "munderover" if under else "msubsup"
        return f"<{name}>{base}{scripts['_']}{scripts['^']}</{name}>"
    for mark, script in scripts.items():
        name = {"_": "munder" if under else "msub", "^": "mover" if under else "msup"}[mark]
        return f"<{name}>{base}{script}</{name}>"
    return base


def _atom(tokens: list[str]) -> str:
    """Return the next element: a group, a command with its arguments, a number, a letter or a sign."""
    token = tokens.pop()
    if token == "{":
        row = _row(tokens, "}")
        return row[0] if len(row) == 1 else f"<mrow>{''.join(row)}</mrow>"
    if not token.startswith("\\"):
        kind = "mn" if token[0].isdigit() else "mi" if token.isalpha() else "mo"
        shown = html.escape(SIGNS.get(token, token))
        return f'<mo stretchy="false">{shown}</mo>' if token in "()[]|" else f"<{kind}>{shown}</{kind}>"
    name = token[1:]
    if name == "mathbb":
        return f"<mi>{DOUBLE_STRUCK[_text(tokens)]}</mi>"
    if name == "frac":
        return f"<mfrac>{_atom(tokens)}{_atom(tokens)}</mfrac>"
    if name == "sqrt":
        return f"<msqrt>{_atom(tokens)}</msqrt>"
    if name in ("mathrm", "text", "operatorname"):
        return f'<mi mathvariant="normal">{html.escape(_text(tokens))}</mi>'
    if name in ACCENTS:
        return f'<mover accent="true">{_atom(tokens)}<mo>{ACCENTS[name]}</mo></mover>'
    if name in FUNCTIONS:
        limits = ' movablelimits="true"' if name in ("max", "min") else ""
        return f'<mo{limits} lspace="0" rspace="0.17em">{name}</mo>'
    if name in SPACES:
        return f'<mspace width="{SPACES[name]}"/>'
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    return f'<mo stretchy="false">{SIGNS[name]}</mo>'


def _text(tokens: list[str]) -> str:
    """Return the characters of a group in braces."""
    tokens.pop()  # its brace
    letters = []
    while (letter := tokens.pop()) != "}":
        letters.append(letter)
    return "".join(letters)
