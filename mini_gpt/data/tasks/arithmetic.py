"""Tasks with numbers and formulas."""

import math

from mini_gpt.data.tasks.base import FORMULAS, Problem, Rng, Task, pick

MOST_DIGITS = 4_299  # Python converts at most 4,300 digits, and a sum can have one more digit
MODULUS = 5


def _number(rng: Rng, length: int) -> str:
    return "".join(map(str, [rng.integers(1, 10), *rng.integers(10, size=length - 1)]))


def _addition(rng: Rng, length: int) -> Problem:
    """Return an addition of two `length`-digit numbers. The answer is reversed (Lee et al. 2023)."""
    a, b = (_number(rng, length) for _ in range(2))
    return f"{a}+{b}", str(int(a) + int(b))[::-1]


def _addition_reversed(rng: Rng, length: int) -> Problem:
    """Return an addition with all numbers reversed (Zhou et al. 2024)."""
    a, b = (_number(rng, length) for _ in range(2))
    return f"{a[::-1]}+{b[::-1]}", str(int(a) + int(b))[::-1]


def _addition_hints(rng: Rng, length: int) -> Problem:
    """Return an addition with all numbers reversed and a letter before each digit (index hints, Zhou et al. 2024).

    Digits of equal significance have the same letter. The letters are consecutive in HINTS, from a random one on.
    """
    a, b = (_number(rng, length) for _ in range(2))
    start = int(rng.integers(len(HINTS) - length))
    a, b, total = (
        "".join(hint + digit for hint, digit in zip(HINTS[start:], number[::-1], strict=False))
        for number in (a, b, str(int(a) + int(b)))
    )
    return f"{a}+{b}", total


def _binary_addition(rng: Rng, length: int) -> Problem:
    """Return a binary addition of `length` characters; both numbers have random lengths (Huang et al. 2025)."""
    first = int(rng.integers(1, length - 1))
    a, b = (f"1{pick(rng, '01', n - 1)}" if n > 1 else pick(rng, "01", 1) for n in (first, length - 1 - first))
    return f"{a}+{b}", f"{int(a, 2) + int(b, 2):b}"


def _binary_multiplication(rng: Rng, length: int) -> Problem:
    """Return a product of two binary numbers with `length` bits in all; lowest bits first (Delétang et al. 2023)."""
    first = int(rng.integers(1, length))
    a, b = pick(rng, "01", first), pick(rng, "01", length - first)
    product = int(a[::-1], 2) * int(b[::-1], 2)
    return f"{a}*{b}", f"{product:b}"[::-1]


def _square_root(rng: Rng, length: int) -> Problem:
    """Return a binary number, highest bit first, and the whole part of its square root (Delétang et al. 2023)."""
    bits = f"1{pick(rng, '01', length - 1)}"
    return bits, f"{math.isqrt(int(bits, 2)):b}"


def _modular_arithmetic(rng: Rng, length: int) -> Problem:
    """Return `length` numbers with +, - and * between them, and the value modulo 5 (Delétang et al. 2023)."""
    numbers, operators = pick(rng, "01234", length), pick(rng, "+-*", length - 1)
    text = "".join(map("".join, zip(numbers, f"{operators} ", strict=True))).rstrip()
    terms, sign = [0], 1
    for place, number in enumerate(numbers):
        operator = operators[place - 1] if place else "+"
        sign = {"+": 1, "-": -1}.get(operator, sign)
        if operator == "*":
            terms[-1] = terms[-1] * int(number) % MODULUS
        else:
            terms.append(sign * int(number))
    return text, str(sum(terms) % MODULUS)


def _formula(rng: Rng, numbers: int, unknown: int | None) -> tuple[str, int, int]:
    """Return a formula in brackets with `numbers` numbers, and its value as (constant, factor of x) modulo 5.

    unknown: which number is x. The factor stays 0 or ±1: x is never multiplied.
    """
    if numbers == 1:
        number = int(rng.integers(MODULUS))
        return ("x", 0, 1) if unknown == 0 else (str(number), number, 0)
    left = int(rng.integers(1, numbers))
    first = _formula(rng, left, unknown if unknown is not None and unknown < left else None)
    second = _formula(rng, numbers - left, unknown - left if unknown is not None and unknown >= left else None)
    operator = "+-"[rng.integers(2)] if unknown is not None else "+-*"[rng.integers(3)]
    sign = -1 if operator == "-" else 1
    constant = first[1] * second[1] if operator == "*" else first[1] + sign * second[1]
    return f"({first[0]}{operator}{second[0]})", constant % MODULUS, first[2] + sign * second[2]


def _modular_brackets(rng: Rng, length: int) -> Problem:
    """Return a formula of `length` numbers with brackets, and its value modulo 5 (Delétang et al. 2023)."""
    text, value, _ = _formula(rng, length, None)
    return text, str(value)


def _solve_equation(rng: Rng, length: int) -> Problem:
    """Return a formula of `length` numbers, one of them x, and its value; the answer is x (Delétang et al. 2023)."""
    text, constant, factor = _formula(rng, length, int(rng.integers(length)))
    x = int(rng.integers(MODULUS))
    return f"{text}:{(constant + factor * x) % MODULUS}", str(x)


def _polynomial(rng: Rng, length: int) -> Problem:
    """Return a polynomial with `length` terms and x, and its value modulo 10 (Kazemnejad et al. 2023)."""
    x, factors, powers = int(rng.integers(10)), rng.integers(1, 10, size=length), rng.integers(4, size=length)
    terms = "+".join(f"{factor}x{power}" for factor, power in zip(factors, powers, strict=True))
    value = sum(int(factor) * x ** int(power) for factor, power in zip(factors, powers, strict=True))
    return f"{x}>{terms}", str(value % 10)


def _summation(rng: Rng, length: int) -> Problem:
    """Return digits, and their sum modulo 10 (Kazemnejad et al. 2023)."""
    digits = rng.integers(10, size=length)
    return "+".join(map(str, digits)), str(int(digits.sum()) % 10)


HINTS = "".join(map(chr, range(0x100, 0x180)))  # 128 letters
HINTED = "".join(sorted("0123456789+=\n" + HINTS))
DIGITS = "digits of each number"
NUMBERS = "numbers of the formula"
TASKS = {
    "addition": Task(_addition, lambda n: 3 * n + 4, DIGITS, shortest=1, longest=MOST_DIGITS),
    "addition_reversed": Task(_addition_reversed, lambda n: 3 * n + 4, DIGITS, shortest=1, longest=MOST_DIGITS),
    "addition_hints": Task(
        _addition_hints,
        lambda n: 6 * n + 5,
        DIGITS,
        shortest=1,
        longest=len(HINTS) - 2,
        alphabet=HINTED,
    ),
    "binary_addition": Task(
        _binary_addition, lambda n: 2 * n + 1, "characters of the question", shortest=6, longest=10_000
    ),
    "binary_multiplication": Task(
        _binary_multiplication,
        lambda n: 2 * n + 3,
        "bits of both numbers",
        shortest=3,
        longest=10_000,
        alphabet=FORMULAS,
    ),
    "square_root": Task(_square_root, lambda n: n + (n + 1) // 2 + 2, "bits", shortest=4, longest=10_000),
    "modular_arithmetic": Task(_modular_arithmetic, lambda n: 2 * n + 2, NUMBERS, alphabet=FORMULAS),
    # A formula with n numbers, and n - 1 operators and brackets, has less than 4n characters.
    "modular_brackets": Task(_modular_brackets, lambda n: 4 * n + 2, NUMBERS, longest=500, alphabet=FORMULAS),
    "solve_equation": Task(_solve_equation, lambda n: 4 * n + 4, NUMBERS, longest=500, alphabet=FORMULAS),
    "polynomial": Task(_polynomial, lambda n: 4 * n + 4, "terms", shortest=1, alphabet=FORMULAS),
    "summation": Task(_summation, lambda n: 2 * n + 2, "digits"),
}
