"""Solvers of the tasks. They see only the question, and use other methods than the tasks."""

import itertools
import re
from collections import Counter
from fractions import Fraction

import numpy as np

from tests.data.language_solvers import solve_list, solve_sentence, solve_sort_words


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


def solve_permutations(points, signs):
    """Return a solver that multiplies permutation matrices, those whose determinant is in `signs`."""
    matrices = [np.eye(points, dtype=int)[:, list(p)] for p in sorted(itertools.permutations(range(points)))]
    matrices = [matrix for matrix in matrices if round(np.linalg.det(matrix)) in signs]
    numbers = {matrix.tobytes(): number for number, matrix in enumerate(matrices)}

    def solve(question):
        total, answer = np.eye(points, dtype=int), ""
        for letter in question:
            total = total @ matrices[ord(letter) - 0x100]
            answer += chr(0x100 + numbers[total.tobytes()])
        return answer

    return solve


def solve_cyclic(question):
    turns = np.cumsum([ord(letter) - 0x100 for letter in question]) % 60
    return "".join(chr(0x100 + turn) for turn in turns)


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
    "group_z60": solve_cyclic,
    "group_s3": solve_permutations(3, (-1, 1)),
    "group_a5": solve_permutations(5, (1,)),
    "group_s5": solve_permutations(5, (-1, 1)),
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
