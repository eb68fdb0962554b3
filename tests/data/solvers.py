"""Solvers of the tasks. They see only the question, and use other methods than the tasks."""

import contextlib
import datetime
import re
from collections import Counter
from fractions import Fraction


def solve_sort(question):
    counts = Counter(question)
    return "".join(letter * counts[letter] for letter in "abcdefghijklmnopqrstuvwxyz")


def solve_reverse(question):
    return "".join(question[-place] for place in range(1, len(question) + 1))


def solve_addition(question):
    """Add digit by digit, with a carry."""
    a, b = (list(map(int, reversed(number))) for number in question.split("+"))
    assert len(a) == len(b) and (a[-1] and b[-1])
    carry, digits = 0, []
    for x, y in zip(a, b, strict=True):
        carry, digit = divmod(x + y + carry, 10)
        digits.append(digit)
    return "".join(map(str, digits + [carry] * (carry > 0)))


def solve_missing_duplicate(question):
    half = len(question) // 2
    gap = question.index("_")
    assert Counter(question)["_"] == 1 and set(question) <= set("01_")
    assert all(a == b or "_" in (a, b) for a, b in zip(question[:half], question[half:], strict=True))
    return question[(gap + half) % (2 * half)]


def solve_associative_recall(question):
    pairs, asked = question.split("?")
    found = dict(re.findall(r"([a-zA-Z])(\d)", pairs))
    assert len(found) == len(pairs) / 2, "all letters differ"
    return found[asked]


def solve_passkey(question):
    (key,) = re.findall(r"The pass key is (\d{5})\. Remember it\. ", question)
    assert question.endswith("What is the pass key?")
    return key


def solve_distinct_sort(question):
    assert len(set(question)) == len(question)
    return "".join(chr(code) for code in range(0x100, 0x200) if chr(code) in question)


def solve_stack(question):
    stack, actions = re.fullmatch(r"([01]+)([pab]*)", question).groups()
    text = stack + actions.replace("a", "0").replace("b", "1")
    while "p" in text:  # a pop removes the symbol before it, if there is one
        text = re.sub(r"(^|[01])p", "", text, count=1)
    return text[::-1] + "."


def solve_hints(question):
    digits = re.findall(r"([^0-9+])(\d)", question)
    columns, carry, answer = {}, 0, ""
    for letter, digit in digits:
        columns.setdefault(letter, []).append(int(digit))
    letters = sorted(columns)
    assert (
        all(len(column) == 2 for column in columns.values()) and ord(letters[-1]) - ord(letters[0]) == len(letters) - 1
    )
    for letter in letters:
        carry, digit = divmod(sum(columns[letter]) + carry, 10)
        answer += letter + str(digit)
    return answer + (f"{chr(ord(letters[-1]) + 1)}1" if carry else "")


def bits_value(bits):
    """Return the number with these bits, the highest first."""
    return sum(2**place for place, bit in enumerate(reversed(bits)) if bit == "1")


def bits_of(number):
    return bits_of(number // 2) + str(number % 2) if number > 1 else str(number)


def solve_binary_addition(question):
    return bits_of(sum(map(bits_value, question.split("+"))))


def solve_binary_multiplication(question):
    a, b = question.split("*")
    return bits_of(sum(bits_value(a[::-1]) * 2**place for place, bit in enumerate(b) if bit == "1"))[::-1]


def solve_square_root(question):
    number, root = bits_value(question), 0
    for place in reversed(range(len(question))):
        root += 2**place * ((root + 2**place) ** 2 <= number)
    return bits_of(root)


def evaluate(formula, **names):
    return eval(formula, {"__builtins__": {}}, names)  # the tests' own formulas


def solve_equation(question):
    formula, value = question.split(":")
    (x,) = (x for x in range(5) if evaluate(formula, x=x) % 5 == int(value))
    return str(x)


def solve_polynomial(question):
    x, terms = question.split(">")
    return str(evaluate(re.sub(r"(\d)x(\d)", rf"\1*{x}**\2", terms)) % 10)


def solve_majority(question):
    counts = Counter(question)
    (letter,) = (letter for letter in counts if counts[letter] == max(counts.values()))
    return letter


def solve_binary_majority(question):
    ones = Fraction(question.count("1"), len(question))
    assert ones != Fraction(1, 2)
    return str(round(ones))


def solve_parity(question):
    return (re.sub("0", "", question).replace("11", "") and "o") or "e"


def solve_cycle(question):
    return str((question.count("1") + 4 * question.count("2")) % 5)


def solve_mqar(question):
    pairs = dict(zip(question[: len(question) // 2 * 2 : 2], question[1::2], strict=False))
    return pairs[question[-1]]


def solve_flip_flop(question):
    return re.findall(r"w([01])", question)[-1]


def solve_lego(question):
    """Follow the chain from the asked variable back to the sign."""
    clauses, asked = question.split(">")
    given = {clause[0]: (clause[2], clause[3]) for clause in clauses.split(",")}
    minus = 0
    while asked != "1":
        sign, asked = given[asked]
        minus += sign == "-"
    return "+-"[minus % 2]


def solve_pcfg(question):
    """Reduce the last function, whose arguments are strings, until none is left."""
    while match := re.search(r"(.*)\b([a-z_]+) ([A-Z]+)(?:,([A-Z]+))?(.*)", question):
        head, name, a, b, tail = match.groups()
        if name in ("append", "prepend", "remove_first", "remove_second"):
            value = {"append": a + b, "prepend": b + a, "remove_first": b, "remove_second": a}[name]
        else:
            tail, letters = (f",{b}" if b else "") + tail, list(a)
            value = {"copy": a, "repeat": 2 * a, "echo": a + a[-1], "reverse": "".join(reversed(letters))}.get(name)
            if name == "shift":
                value = "".join([*letters[1:], letters[0]])
            if name == "swap":
                letters[0], letters[-1] = letters[-1], letters[0]
                value = "".join(letters)
        question = head + value + tail
    return question


def solve_scan(question):
    """Read the words from the left."""
    parts, order = re.split(" (?:and|after) ", question), 1 if " after " not in question else -1
    found = []
    for words in (part.split() for part in parts):
        act = {"turn": "", "walk": "W", "look": "K", "run": "N", "jump": "J"}[words.pop(0)]
        acts, count = [act], {"twice": 2, "thrice": 3}.get(words[-1] if words else "", 1)
        if "left" in words or "right" in words:
            turn = "L" if "left" in words else "R"
            acts = [turn, turn, act] if "opposite" in words else [turn, act] * (4 if "around" in words else 1)
        found.append("".join(acts * count))
    return "".join(found[::order])


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


SOLVERS = {
    "copy": lambda question: question,
    "reverse": solve_reverse,
    "sort": solve_sort,
    "addition": solve_addition,
    "missing_duplicate": solve_missing_duplicate,
    "associative_recall": solve_associative_recall,
    "passkey": solve_passkey,
    "unique_copy": lambda question: question,
    "unique_sort": solve_distinct_sort,
    "repeat_copy": lambda question: question,
    "reverse_string": solve_reverse,
    "duplicate_string": lambda question: question + question,
    "odds_first": lambda question: re.sub(r"(.).?", r"\1", question) + re.sub(r".(.?)", r"\1", question),
    "bucket_sort": lambda question: "".join(digit * question.count(digit) for digit in "12345"),
    "stack_manipulation": solve_stack,
    "addition_hints": solve_hints,
    "addition_reversed": lambda question: solve_addition("+".join(solve_reverse(n) for n in question.split("+"))),
    "scan": solve_scan,
    "binary_addition": solve_binary_addition,
    "binary_multiplication": solve_binary_multiplication,
    "square_root": solve_square_root,
    "modular_arithmetic": lambda question: str(evaluate(question) % 5),
    "modular_brackets": lambda question: str(evaluate(question) % 5),
    "solve_equation": solve_equation,
    "polynomial": solve_polynomial,
    "summation": lambda question: str(evaluate(question) % 10),
    "majority": solve_majority,
    "binary_majority": solve_binary_majority,
    "binary_majority_interleave": lambda question: "".join(solve_binary_majority(question[i::3]) for i in range(3)),
    "parity": solve_parity,
    "even_pairs": lambda question: str(int(question[0] == question[-1])),
    "cycle_navigation": solve_cycle,
    "lego": solve_lego,
    "pcfg": solve_pcfg,
    "mqar": solve_mqar,
    **dict.fromkeys(("dates", "number_words", "dates_and_numbers"), solve_list),
    "english_german": lambda question: "; ".join(map(solve_sentence, question.split("; "))),
    "sort_words": solve_sort_words,
    "reverse_words": lambda question: " ".join(question.split()[::-1]),
    **dict.fromkeys(("flip_flop", "flip_flop_sparse", "flip_flop_dense"), solve_flip_flop),
}
NUMBERS = lambda question: len(re.findall(r"[0-9x]", question.split(":")[0]))
LISTS = ("dates", "number_words", "dates_and_numbers", "english_german")
UNITS = dict.fromkeys(SOLVERS, len) | {  # the length of a question, by task
    "addition": lambda question: len(question.split("+")[0]),
    "addition_hints": lambda question: len(question) // 4,
    "addition_reversed": lambda question: len(question.split("+")[0]),
    "scan": lambda question: len(solve_scan(question)),
    "missing_duplicate": lambda question: len(question) // 2,
    "associative_recall": lambda question: question.index("?") // 2,
    "passkey": lambda question: len(re.findall(r"[.] ", question)) - 2,
    "binary_multiplication": lambda question: len(question) - 1,
    "modular_arithmetic": NUMBERS,
    "modular_brackets": NUMBERS,
    "solve_equation": NUMBERS,
    "polynomial": lambda question: question.count("x"),
    "summation": NUMBERS,
    "binary_majority_interleave": lambda question: len(question) // 3,
    "lego": lambda question: question.count(":"),
    "pcfg": lambda question: len(re.findall(r"[a-z_]+", question)),
    "mqar": lambda question: sum(ord(symbol) < 0x5E00 for symbol in question) // 2,
    **dict.fromkeys(("flip_flop", "flip_flop_sparse", "flip_flop_dense"), lambda question: (len(question) + 1) // 2),
    **dict.fromkeys(LISTS, lambda question: question.count(";") + 1),
    **dict.fromkeys(("sort_words", "reverse_words"), lambda question: len(question.split())),
}
