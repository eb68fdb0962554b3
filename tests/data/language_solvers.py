"""Solvers of the tasks with two texts of the same meaning. They see only the question."""

import contextlib
import datetime
import re

DATES = ("%d %B %Y", "%B %d, %Y", "%d %b %Y", "%b %d, %Y", "%d.%m.%Y", "%m/%d/%Y", "%Y %b %d")


def solve_date(question):
    """Read the date in the only format that fits."""
    text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", question)
    for form in DATES:
        with contextlib.suppress(ValueError):
            return datetime.datetime.strptime(text, form).date().isoformat()
    raise AssertionError(question)


UNITS_EN = ",one,two,three,four,five,six,seven,eight,nine,ten,eleven,twelve,thirteen,fourteen,fifteen,sixteen,seventeen"
UNITS_EN = [*UNITS_EN.split(","), "eighteen", "nineteen"]
TENS_EN = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
UNITS_DE = ",ein,zwei,drei,vier,fünf,sechs,sieben,acht,neun,zehn,elf,zwölf,dreizehn,vierzehn,fünfzehn,sechzehn,siebzehn"
UNITS_DE = [*UNITS_DE.split(","), "achtzehn", "neunzehn"]
TENS_DE = ["", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def solve_number(question):
    """Write groups of three digits, and then correct the few exceptions."""
    language, digits = question.split()
    groups = [int(digits.zfill(6)[:3]), int(digits.zfill(6)[3:])]
    if language == "en":
        words = []
        for group, name in zip(groups, ("thousand", ""), strict=True):
            hundreds, rest = divmod(group, 100)
            small = UNITS_EN[rest] if rest < 20 else f"{TENS_EN[rest // 10]}-{UNITS_EN[rest % 10]}".strip("-")
            words += [UNITS_EN[hundreds], "hundred"] * (hundreds > 0) + [small] + [name] * (group > 0)
        return " ".join(filter(None, words)) or "zero"
    text = ""
    for group, name in zip(groups, ("tausend", ""), strict=True):
        hundreds, rest = divmod(group, 100)
        text += f"{UNITS_DE[hundreds]}hundert" * (hundreds > 0)
        small = UNITS_DE[rest] if rest < 20 else f"{UNITS_DE[rest % 10]}und{TENS_DE[rest // 10]}"
        text += (small.removeprefix("und") if rest >= 20 else small) + name * (group > 0)
    return re.sub("ein$", "eins", text) or "null"


GERMAN_NOUNS = {  # singular, plural, article
    "man men": ("Mann", "Männer", "der"),
    "dog dogs": ("Hund", "Hunde", "der"),
    "teacher teachers": ("Lehrer", "Lehrer", "der"),
    "tree trees": ("Baum", "Bäume", "der"),
    "woman women": ("Frau", "Frauen", "die"),
    "cat cats": ("Katze", "Katzen", "die"),
    "doctor doctors": ("Ärztin", "Ärztinnen", "die"),
    "child children": ("Kind", "Kinder", "das"),
    "horse horses": ("Pferd", "Pferde", "das"),
    "house houses": ("Haus", "Häuser", "das"),
}
STEMS = {"old": "alt", "small": "klein", "big": "groß", "young": "jung", "new": "neu", "beautiful": "schön"}
GERMAN_VERBS = {
    "sees see seen": "sieht sehen gesehen",
    "finds find found": "findet finden gefunden",
    "loves love loved": "liebt lieben geliebt",
    "hears hear heard": "hört hören gehört",
    "seeks seek sought": "sucht suchen gesucht",
    "draws draw drawn": "zeichnet zeichnen gezeichnet",
}
PHRASE = rf"(?:the|an?) (?:(?:{'|'.join(STEMS)}) )?\w+"


def german_phrase(phrase, *, is_object):
    article, *adjective, noun = phrase.split()
    (singular, plural, gender), is_plural = next(
        (german, noun == names.split()[1]) for names, german in GERMAN_NOUNS.items() if noun in names.split()
    )
    if article == "an" or article == "a":
        assert (article == "an") == (adjective == ["old"]) and not is_plural
        # The ending of the definite article moves to the adjective, and to ein in the accusative and feminine.
        moved = {"der": "en" if is_object else "er", "die": "e", "das": "es"}[gender]
        words = ["ein" + (moved if moved in ("en", "e") else "")] + [STEMS[word] + moved for word in adjective]
    elif is_plural:
        words = ["die"] + [STEMS[word] + "en" for word in adjective]
    else:
        is_den = is_object and gender == "der"
        words = ["den" if is_den else gender] + [STEMS[word] + ("en" if is_den else "e") for word in adjective]
    return " ".join([*words, plural if is_plural else singular])


def solve_sentence(question):
    """Parse the English sentence with a regular expression, and translate its parts."""
    adverbs = {"today": "heute", "often": "oft", "now": "jetzt", "here": "hier"}
    parts = re.fullmatch(
        rf"(I know that )?((?:{'|'.join(adverbs)}) )?({PHRASE}) (has |have )?(\w+) ({PHRASE})", question
    )
    that, adverb, subject, auxiliary, verb, object_ = parts.groups()
    forms = next(
        dict(zip(english.split(), german.split(), strict=True))
        for english, german in GERMAN_VERBS.items()
        if verb in english.split()
    )
    subject, object_ = german_phrase(subject, is_object=False), german_phrase(object_, is_object=True)
    if that:
        return f"ich weiß, dass {subject} {object_} {forms[verb]}"
    if adverb:
        return f"{adverbs[adverb.strip()]} {forms[verb]} {subject} {object_}"
    if auxiliary:
        return f"{subject} {'hat' if auxiliary == 'has ' else 'haben'} {object_} {forms[verb]}"
    return f"{subject} {forms[verb]} {object_}"


def solve_list(question):
    return "; ".join(
        solve_number(item) if item[:3] in ("en ", "de ") else solve_date(item) for item in question.split("; ")
    )


def solve_sort_words(question):
    """Take the smallest word again and again."""
    words, found = question.split(), []
    while words:
        found.append(min(words))
        words.remove(found[-1])
    return " ".join(found)
