"""Tasks of two texts with the same meaning: dates, number words, English and German, words in another order."""

import calendar
import re
import string
from collections.abc import Callable

from mini_gpt.data.tasks import grammar
from mini_gpt.data.tasks.base import ANSWER, END, Link, Problem, Rng, Task, pick, word_spans

Align = Callable[[str, str], list[Link]]
ALPHABET = "".join(sorted(set(string.ascii_letters + string.digits + " ,.-/;äöüßÄÖÜ" + ANSWER + END)))

FIRST_YEAR, LAST_YEAR = 1900, 2099


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _date(rng: Rng) -> Problem:
    """Return a date in one of eight formats, and as year-month-day (ISO 8601)."""
    year = int(rng.integers(FIRST_YEAR, LAST_YEAR + 1))
    number = 1 + int(rng.integers(len(MONTHS)))
    day = int(rng.integers(1, calendar.monthrange(year, number)[1] + 1))
    name, short = MONTHS[number - 1], MONTHS[number - 1][:3]
    formats = (
        f"{day} {name} {year}",
        f"{name} {day}, {year}",
        f"{day} {short} {year}",
        f"{short} {_ordinal(day)}, {year}",
        f"{_ordinal(day)} {name} {year}",
        f"{day}.{number}.{year}",  # German order
        f"{number}/{day}/{year}",  # American order
        f"{year} {short} {day}",
    )
    return formats[rng.integers(len(formats))], f"{year}-{number:02}-{day:02}"


def _align_date(question: str, answer: str) -> list[Link]:
    """Return the links of year, month and day."""
    numbers = [match.span() for match in re.finditer(r"\d+", question)]
    year = next(span for span in numbers if span[1] - span[0] == 4)
    others = [span for span in numbers if span != year]
    if len(others) == 2:  # month/day/year or day.month.year
        month, day = others if "/" in question else others[::-1]
    else:
        (day,) = others
        name = re.search("[A-Z][a-z]+", question)
        assert name is not None
        month = name.span()
    return list(zip((year, month, day), word_spans(answer.replace("-", " ")), strict=True))


# fmt: off
MONTHS = (  # not calendar.month_name, which depends on the locale
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
EINS = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)
ZEHNER = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
# fmt: on


def english(number: int) -> str:
    """Return the English words of a number below a million, such as `two hundred forty-one`."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{english(number // unit)} {name}" + (f" {english(number % unit)}" if number % unit else "")


def german(number: int) -> str:
    """Return the German word of a number below a million, such as `zweihunderteinundvierzig`."""
    if number < 20:
        return EINS[number]
    if number < 100:
        ones = f"{_ein(number % 10)}und" if number % 10 else ""
        return ones + ZEHNER[number // 10 - 2]
    unit, name = (100, "hundert") if number < 1000 else (1000, "tausend")
    return f"{_ein(number // unit)}{name}" + (german(number % unit) if number % unit else "")


def _ein(number: int) -> str:
    """Return the word of a number before another part of a word: eins loses its s."""
    return german(number).removesuffix("s") if number % 100 == 1 else german(number)


DIGITS = 6  # of the largest numbers
BETWEEN = "; "  # items of a list


def _number(rng: Rng) -> Problem:
    """Return a language with a number below a million, and the number in words; few digits are as likely as many."""
    number = int(rng.integers(10 ** int(rng.integers(1, DIGITS + 1))))
    language, words = (("en", english), ("de", german))[rng.integers(2)]
    return f"{language} {number}", words(number)


def _date_or_number(rng: Rng) -> Problem:
    return _date(rng) if rng.integers(2) else _number(rng)


LONGEST_DATE = len("30th September 2099"), len("2099-09-30")
LONGEST_NUMBER = len(f"en {10**DIGITS - 1}"), max(len(words(777_777)) for words in (english, german))


def _list_of(draw: Callable[[Rng], Problem], longest: tuple[int, int], unit: str, align: Align | None = None) -> Task:
    """Return a task with lists of items.

    longest: the maximum number of characters of an item and its answer.
    align: of an item.
    """

    def draw_list(rng: Rng, length: int) -> Problem:
        questions, answers = zip(*(draw(rng) for _ in range(length)), strict=True)
        return BETWEEN.join(questions), BETWEEN.join(answers)

    def sizes(length: int) -> tuple[int, int]:
        question, answer = (length * (size + len(BETWEEN)) - len(BETWEEN) for size in longest)
        return question, answer + len(END)

    def align_list(question: str, answer: str) -> list[Link]:
        assert align is not None
        links: list[Link] = []
        first, other = 0, 0  # the places of the item and of its answer
        for item, its_answer in zip(question.split(BETWEEN), answer.split(BETWEEN), strict=True):
            for (a, b), (c, d) in align(item, its_answer):
                links.append(((first + a, first + b), (other + c, other + d)))
            first, other = first + len(item + BETWEEN), other + len(its_answer + BETWEEN)
        return links

    return _pairs(draw_list, sizes, unit, align and align_list)


def _pairs(
    draw: Callable[[Rng, int], Problem],
    sizes: Callable[[int], tuple[int, int]],
    unit: str,
    align: Align | None = None,
) -> Task:
    def size(length: int) -> int:
        return sum(sizes(length)) + len(ANSWER)

    return Task(draw, size, unit, shortest=1, alphabet=ALPHABET, sizes=sizes, align=align)


MOST_LETTERS = 6


def _words(rng: Rng, length: int) -> list[str]:
    """Return `length` random words of two to MOST_LETTERS letters."""
    sizes = rng.integers(2, MOST_LETTERS + 1, size=length)
    return [pick(rng, string.ascii_lowercase, int(size)) for size in sizes]


def _sorted_words(rng: Rng, length: int) -> Problem:
    words = _words(rng, length)
    return " ".join(words), " ".join(sorted(words))


def _reversed_words(rng: Rng, length: int) -> Problem:
    words = _words(rng, length)
    return " ".join(words), " ".join(words[::-1])


def _align_reversed(question: str, answer: str) -> list[Link]:
    return list(zip(word_spans(question), word_spans(answer)[::-1], strict=True))


def _align_sorted(question: str, answer: str) -> list[Link]:
    in_order = sorted(word_spans(question), key=lambda span: question[slice(*span)])
    return list(zip(in_order, word_spans(answer), strict=True))


def _word_sizes(length: int) -> tuple[int, int]:
    size = length * (MOST_LETTERS + 1) - 1
    return size, size + len(END)


LONGEST_SENTENCE = (
    len("I know that the beautiful teachers draw the beautiful teachers"),
    len("ich weiß, dass die schönen Ärztinnen die schönen Ärztinnen zeichnen"),
)
LONGEST_ITEM = max(LONGEST_DATE[0], LONGEST_NUMBER[0]), max(LONGEST_DATE[1], LONGEST_NUMBER[1])
TASKS = {
    "dates": _list_of(_date, LONGEST_DATE, "dates", _align_date),
    "number_words": _list_of(_number, LONGEST_NUMBER, "numbers"),
    "dates_and_numbers": _list_of(_date_or_number, LONGEST_ITEM, "dates and numbers"),
    "english_german": _list_of(grammar.sentence, LONGEST_SENTENCE, "sentences", grammar.align),
    "sort_words": _pairs(_sorted_words, _word_sizes, "words", _align_sorted),
    "reverse_words": _pairs(_reversed_words, _word_sizes, "words", _align_reversed),
}
