"""The page of `python -m benchmarks.gpu`: one HTML file that needs no other file."""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mini_gpt.study.report import PAGE

STYLE = """
.number { text-align: right; }
td.number { white-space: nowrap; }
.bar { display: block; height: .7rem; min-width: 1px; background: var(--accent); border-radius: 2px; }
td code { display: block; min-width: 15rem; overflow-wrap: anywhere; }
.failed { border-left: 4px solid var(--accent); background: var(--soft); padding: .5rem .8rem; }
</style>"""
MOST_KERNELS, LONGEST_KERNEL = 25, 60
IMPLEMENTATIONS = ("cudnn", "blockwise", "reference")
PROGRAMS = {"mini_gpt": "mini_gpt", "nanogpt": "nanoGPT"}
GIB = 2**30


def html_of(made: dict[str, Any]) -> str:
    """Return the page of the contents of the JSON file."""
    machine, parts = made["machine"], made["parts"]
    title = f"mini_gpt on {machine['device']}" + (", a trial with small models" if made["small"] else "")
    body = [f"<h1>{_safe(title)}</h1>", f"<p>{_safe(made['date'])}, commit {_safe(machine['mini_gpt'][:12])}.</p>"]
    if made["small"]:
        body.append(
            "<p class='failed'>This run only tried the command, with small models on the CPU. Its times say nothing "
            "about a GPU.</p>"
        )
    body.append(_parts(parts))
    if not made["small"] and "training" in parts:
        body.append(_goals(made["goals"], parts["training"]["numbers"]))
    for name, entry in parts.items():
        body.append(f"<h2>{_safe(entry['title'])}</h2>")
        if entry["failed"]:
            body.append(f"<p class='failed'><strong>Failed:</strong> {_safe(entry['failed'])}.</p>")
        if entry["numbers"]:
            body.append(SECTIONS[name](entry["numbers"]))
    body += ["<h2>The machine</h2>", table(["", ""], [[_safe(name), _safe(str(x))] for name, x in machine.items()])]
    page = PAGE.read_text(encoding="utf-8").replace("</style>", STYLE, 1)
    return page.replace("BODY", "\n".join(body), 1).replace("TITLE", _safe(title), 1)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Return a table of cells that are HTML. numbers: the columns that hold numbers."""
    numbers = set(numbers)
    cells = lambda tag, row: "".join(
        f"<{tag}{' class=number' if index in numbers else ''}>{cell}</{tag}>" for index, cell in enumerate(row)
    )
    head = f"<thead><tr>{cells('th', headers)}</tr></thead>" if any(headers) else ""
    lines = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='wide' tabindex='0'><table>{head}<tbody>\n{lines}\n</tbody></table></div>"


def _safe(text: str) -> str:
    return html.escape(" ".join(str(text).split()))


def _code(text: str) -> str:
    return f"<code>{_safe(text)}</code>"


def _parts(parts: dict[str, Any]) -> str:
    rows = [
        [
            name,
            "<strong>failed</strong>" if entry["failed"] else "done",
            f"{entry['seconds']:.0f} of {entry['limit_seconds']}",
            _code(entry["command"]),
        ]
        for name, entry in parts.items()
    ]
    return table(["part", "result", "seconds", "command"], rows, [2])


def _goals(goals: dict[str, float], training: dict[str, Any]) -> str:
    found = training.get("recipes", {}).get("gpt2_124m", {})
    values = [
        ("MFU of GPT-2 124M in bfloat16", goals["model_flops_utilisation"], found.get("mini_gpt", {}), "at least"),
        ("speed over that of compiled nanoGPT", goals["ratio"], found, "above"),
    ]
    rows = []
    for (said, wanted, where, how), name in zip(values, ("model_flops_utilisation", "ratio"), strict=True):
        value = where.get(name)
        value = value["median"] if isinstance(value, dict) else value
        reached = "not measured" if value is None else "reached" if value >= wanted else "<strong>not reached</strong>"
        rows.append([said, f"{how} {wanted:g}", "–" if value is None else f"{value:.3f}", reached])
    return "<h2>Goals</h2>" + table(["goal", "wanted", "found", ""], rows, [1, 2])


def _spread(found: dict[str, Any], digits: int = 2) -> str:
    low, high = found["quartiles"]
    return f"{found['median']:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _training(numbers: dict[str, Any]) -> str:
    headers = ["model", "program", "ms per step", "tokens per second", "MFU", "peak memory, GiB", "compilation, s"]
    rows, notes = [], []
    for recipe, found in numbers["recipes"].items():
        for name, shown in PROGRAMS.items():
            if of := found.get(name):
                rows.append(
                    [
                        _safe(recipe),
                        shown,
                        _spread(of["milliseconds_per_step"]),
                        f"{of['tokens_per_second']:,.0f}",
                        f"{of['model_flops_utilisation']:.1%}",
                        f"{of['peak_memory_bytes'] / GIB:.2f}",
                        f"{of['compile_seconds']:.1f}",
                    ]
                )
        if shape := found.get("shape"):
            sizes = ", ".join(f"{name} {value:,}" for name, value in shape.items())
            ratio = f" mini_gpt has {_spread(found['ratio'])} times nanoGPT's speed." if "ratio" in found else ""
            notes.append(f"<p><strong>{_safe(recipe)}</strong>:{ratio} Both programs: {_safe(sizes)}.</p>")
        if problem := found.get("problem"):
            notes.append(f"<p><strong>{_safe(recipe)}</strong>: {_safe(problem)}.</p>")
    measured = [found for found in numbers["recipes"].values() if "shape" in found]
    peak = f"{measured[0]['peak_flops']:.3g} FLOP/s, {measured[0]['peak_source']}" if measured else "–"
    text = (
        "<p>Medians and quartiles of turns: while one program runs, the other one waits. bfloat16, random tokens. MFU: "
        "a token costs 6N + 12 · layers · width · context operations in both programs; N leaves out learned positions. "
        f"Peak: {_safe(peak)}.</p>"
    )
    return text + table(headers, rows, range(2, 7)) + "".join(notes)


def _attention(numbers: dict[str, Any]) -> str:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    autos: dict[tuple[str, str, str], str] = {}
    tolerances: dict[str, float] = {}
    for row in numbers["rows"]:
        key = row["encoding"], row["mask"], row["dtype"]
        autos[key] = row["auto"]
        tolerances |= {row["dtype"]: row["tolerance"]} if "tolerance" in row else {}
        said = "lowers for CUDA" if row["ok"] else "no call of cuDNN"
        if "error" in row:
            said = "not finite" if row["error"] is None else f"{row['error']:.1e}"
            said += " (output)" if row["compared"] == "output" else ""
        name = next(name for name in IMPLEMENTATIONS if name in row["implementation"].split(" + "))
        cells.setdefault(key, {})[name] = said if row["ok"] else f"<strong>{said}</strong>"
    rows = [
        [*map(_safe, key), _safe(autos[key]), *(found.get(name, "–") for name in IMPLEMENTATIONS)]
        for key, found in cells.items()
    ]
    limits = ", ".join(f"{value:.1e} in {name}" for name, value in tolerances.items())
    text = (
        "<p>The largest error of the output and of all gradients of one layer, relative to the largest entry, against "
        f"the reference in float32 on the CPU. Allowed: {_safe(limits)}. –: not taken by the implementation. "
        f"An error in bold is too large. {_safe(numbers['progress'])}.</p>"
    )
    return text + table(["encoding", "mask", "dtype", "auto takes", *IMPLEMENTATIONS], rows, [4, 5, 6])


def _kernels(numbers: dict[str, Any]) -> str:
    classes = [
        [
            _safe(name),
            f"{of['milliseconds']:.3f}",
            f"{of['share']:.1%}",
            f"<span class='bar' style='width:{100 * of['share']:.1f}%'></span>",
        ]
        for name, of in numbers["classes"].items()
    ]
    short = lambda name: name if len(name) <= LONGEST_KERNEL else f"{name[: LONGEST_KERNEL - 1]}…"
    rows = [
        [
            _code(short(row["kernel"])),
            _safe(row["kind"]),
            f"{row['milliseconds']:.3f}",
            f"{row['share']:.1%}",
            f"{row['count']:.1f}",
            _safe(row["where"]),
        ]
        for row in numbers["rows"][:MOST_KERNELS]
    ]
    rest = len(numbers["rows"]) - len(rows)
    text = (
        f"<p>{_safe(numbers['recipe'])}: {numbers['milliseconds_per_step']:.2f} ms per step, in a profile of "
        f"{numbers['steps']} steps. Kernels that run at the same time share it equally.</p>"
    )
    names = table(["kernel", "class", "ms per step", "share", "per step", "line"], rows, [2, 3, 4])
    more = f"<p>{rest} more rows are in the JSON file.</p>" if rest > 0 else ""
    return text + table(["class", "ms per step", "share", "of the step"], classes, [1, 2]) + names + more


def _resume(numbers: dict[str, Any]) -> str:
    said = {"plain": "as in training", "deterministic": "with XLA's deterministic operations"}
    rows = [
        [said[name], f"{found['different']} of {found['arrays']}", _safe(", ".join(found["first_different"]) or "–")]
        for name, found in numbers.items()
        if name in said
    ]
    text = f"<p>{numbers['steps']} steps at once, and {numbers['steps'] // 2} steps, a new process, and the rest.</p>"
    return text + table(["operations", "arrays with other bits", "the first"], rows, [1])


def _decoding(numbers: dict[str, Any]) -> str:
    rows = [
        [
            shown,
            _spread(numbers[name]["tokens_per_second"], 0),
            _spread(numbers[name]["seconds_to_first_token"], 4),
        ]
        for name, shown in {"mini_gpt": "mini_gpt", "transformers": "Transformers"}.items()
    ]
    text = (
        f"<p>One text, {numbers['prompt_tokens']} tokens of prompt and {numbers['tokens']} new ones, "
        f"{numbers['dtype']}, {numbers['parameters']:,} parameters. Ratio: {_spread(numbers['ratio'])}.</p>"
    )
    return text + table(["program", "tokens per second", "seconds to the first token"], rows, [1, 2])


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "attention": _attention,
    "training": _training,
    "kernels": _kernels,
    "resume": _resume,
    "decoding": _decoding,
}
