"""Regular expressions of the tokenizers library as JavaScript, with the library's own Unicode classes."""

import functools
import re

import tokenizers

from mini_gpt.runtime.errors import UserError, shown

SPLITS = re.compile(  # the parts of an expression; any other part is refused
    r"""(?P<property>\\[pP]\{\w+\})|(?P<escape>\\[sSdDrntv]|\\[^\w\s])|(?P<open>\(\?(?:i:|:|=|!))|(?P<close>\))
    |(?P<times>(?:[?*+]|\{\d+(?:,\d*)?\})\??)|(?P<set>\[\^?)|(?P<end>\])|(?P<or>\|)|(?P<any>\.)|(?P<plain>[^\\(\[{^$])""",
    re.VERBOSE | re.DOTALL,
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
REPEATED = ("property", "escape", "plain", "any", "end")  # parts that a number of times may follow
FOLDED = {"s": "\N{LATIN SMALL LETTER LONG S}", "k": "\N{KELVIN SIGN}"}  # other cases of ASCII letters


def javascript(expression: str) -> str:
    """Return the source of an equivalent JavaScript expression, for the flags g and u.

    Raises UserError for a part that JavaScript lacks, and for a repeated group, which may take exponential time.
    """
    written: list[str] = []
    groups: list[str] = []
    place, in_set, before = 0, False, ""  # before: the kind of the part before
    while place < len(expression):
        match = SPLITS.match(expression, place)
        kind, part = (match.lastgroup, match.group()) if match else ("", expression[place:])
        if in_set and kind not in ("property", "escape", "set", "end") and part[0] != "\\":
            kind, part = "plain", part[0]
        place += len(part)
        folds = any(group == "(?i:" for group in groups)
        if kind == "set" and not in_set:
            in_set = True
        elif kind == "end" and in_set and before != "set":
            in_set = False
        elif kind == "open":
            groups.append(part)
        elif kind == "close" and groups:
            groups.pop()
        elif kind == "times":
            kind = kind if before in REPEATED or (before == "close" and part == "?") else ""
        elif kind == "any":
            part = r"[^\n]"
        elif kind == "property" or (kind == "escape" and part[1] in "sSdD"):
            part = _class(part, in_set)
        elif kind == "escape" and part[1] in "rntv":
            pass
        elif kind in ("plain", "escape") and not (in_set and part in ("[", "&")):
            part = _character(part, in_set, folds)
        elif kind != "or":
            kind = ""
        if not kind:
            reason = f"has {shown(part[:20])}, which the page's expressions lack"
            raise UserError(f"pre_tokenizer.Split: found the expression {shown(expression)}, which {reason}")
        before = kind
        written.append("(?:" if part == "(?i:" else part)
    return "".join(written)


def _character(part: str, in_set: bool, folds: bool) -> str:
    if in_set and part == "-":
        return part
    character = part[-1]
    cases = {character}
    if folds and character.isascii() and character.isalpha():
        cases |= {character.lower(), character.upper(), *FOLDED.get(character.lower(), "")}
    escaped = "".join(f"\\u{{{ord(case):x}}}" for case in sorted(cases))
    return escaped if in_set or len(cases) == 1 else f"[{escaped}]"


def _class(part: str, in_set: bool) -> str:
    positive = part.lower() if part[1] in "sSdD" else part.replace("\\P", "\\p")
    listed = _ranges(positive, part != positive)
    return listed if in_set else f"[{listed}]"


@functools.cache
def _ranges(name: str, complement: bool) -> str:
    """Return the code points of a class, in the Unicode version of the library, as ranges of JavaScript."""
    others = f"[^{name}]+" if not complement else f"[{name}]+"
    kept = tokenizers.normalizers.Replace(tokenizers.Regex(others), "").normalize_str(_characters())
    return _listed(kept)


def _characters() -> str:
    return "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))


def _listed(characters: str) -> str:
    """Return characters in order of code points as ranges of JavaScript."""
    points = [*map(ord, characters)]
    starts = [point for n, point in enumerate(points) if n == 0 or points[n - 1] != point - 1]
    ends = [point for n, point in enumerate(points) if n == len(points) - 1 or points[n + 1] != point + 1]
    return "".join(
        f"\\u{{{start:x}}}" if start == end else f"\\u{{{start:x}}}-\\u{{{end:x}}}"
        for start, end in zip(starts, ends, strict=True)
    )


@functools.cache
def words() -> str:
    """Return the expression of `simple_tokenizers.WORD` in JavaScript, with Python's classes of characters."""
    word, space = (_listed("".join(re.findall(pattern, _characters()))) for pattern in (r"\w", r"\s"))
    return f" ?[{word}]+| ?[^{word}{space}]+|[{space}]"


def literal(text: str) -> str:
    """Return the source of a JavaScript expression that matches a text."""
    return "".join(f"\\u{{{ord(character):x}}}" for character in text)
