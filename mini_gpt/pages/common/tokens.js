// Flowing text: tokens in a row that wrap as the text does, with signs for white space. A token can be pointed at and
// pinned.

import { hasModifier } from "./controls.js";
import { clamped } from "./numbers.js";
import { html, useRef, useState } from "./preact.js";

// A token's text on one line, for axes and tables.
export const shown = (token) =>
  token
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f]/g, controlSign)
    .replace(/^ +| +$/g, (s) => "␣".repeat(s.length)) || "∅";
const controlSign = (c) => `^${String.fromCharCode(c.charCodeAt(0) ^ 64)}`; // as ^M for a carriage return

// What a screen reader says.
const NAMES = { "": "empty", "\n": "line break", "\r": "carriage return", "\t": "tab", " ": "space" };
export const spoken = (token) =>
  NAMES[token] ?? (/^ +$/.test(token) ? `${token.length} spaces` : token.trim() === token ? token : shown(token));

// A token as nodes: spaces, tabs and line breaks have a sign and act as what they are.
const pieces = (token) =>
  token === ""
    ? "∅"
    : (token.match(/ |\t|\r?\n|[\u0000-\u0008\u000b-\u001f\u007f]|[^ \u0000-\u001f\u007f]+/g) ?? []).map((part) => {
        if (part === " ") return html`<span class="space"> </span>`;
        if (part === "\t") return "⇥\t";
        if (part.endsWith("\n")) return part.length > 1 ? "^M⏎\n" : "⏎\n";
        return part < " " || part === "\u007f" ? controlSign(part) : part;
      });

// The text. tokens: strings. name: what it is, for screen readers. pinned: the index of a token, or null.
// styleOf(n): its style, as of shadeStyle. markOf(n): another class, such as "framed". titleOf(n): a tooltip.
// onPoint(n or null): the pointer is on a token. onPin(n or null): a click, a tap or the Enter key; null unpins.
// The arrow keys go from token to token; only one token is a tab stop.
export function FlowingText({ id, tokens, name, pinned = null, styleOf, markOf, titleOf, onPoint, onPin }) {
  const [focus, setFocus] = useState(0);
  const box = useRef();
  const stop = Math.min(pinned ?? focus, tokens.length - 1);
  const indexOf = (event) => {
    const token = event.target.closest?.(".token");
    return token ? +token.dataset.n : null;
  };
  const pin = (n) => {
    if (n !== null) {
      setFocus(n);
      onPin?.(n === pinned ? null : n);
    }
  };
  const go = (n) => {
    const to = clamped(n, 0, tokens.length - 1);
    const element = box.current.querySelector(`[data-n="${to}"]`);
    setFocus(to);
    element.focus();
  };
  const press = (event) => {
    const at = indexOf(event);
    if (at === null || hasModifier(event)) return;
    const act = {
      ArrowRight: () => go(at + 1),
      ArrowLeft: () => go(at - 1),
      ArrowDown: () => go(below(box.current, at, 1)),
      ArrowUp: () => go(below(box.current, at, -1)),
      Home: () => go(0),
      End: () => go(tokens.length - 1),
      Enter: () => pin(at),
      " ": () => pin(at),
      Escape: () => onPin?.(null),
    }[event.key];
    if (act) {
      event.preventDefault();
      event.stopPropagation();
      act();
    }
  };
  return html`<div
    class="flow"
    id=${id}
    ref=${box}
    role="listbox"
    aria-label=${name}
    onKeyDown=${press}
    onClick=${(event) => pin(indexOf(event))}
    onPointerOver=${(event) => event.pointerType === "mouse" && onPoint?.(indexOf(event))}
    onPointerLeave=${() => onPoint?.(null)}
    onfocusin=${(event) => event.target.matches(":focus-visible") && onPoint?.(indexOf(event))}
    onfocusout=${() => onPoint?.(null)}>
    ${tokens.map(
      (token, n) =>
        html`<span
          key=${n}
          class=${`token ${n === pinned ? "pinned" : ""} ${markOf?.(n) ?? ""}`}
          data-n=${n}
          role="option"
          id=${id && `${id}-${n}`}
          aria-selected=${n === pinned ? "true" : "false"}
          aria-label=${`${n}: ${spoken(token)}`}
          title=${titleOf?.(n)}
          tabindex=${n === stop ? 0 : -1}
          style=${n === pinned ? "" : (styleOf?.(n) ?? "")}
          >${pieces(token)}</span
        >`,
    )}
  </div>`;
}

// The token on the next line (step 1) or the previous one (step -1) that is nearest.
function below(box, at, step) {
  const tokens = box.querySelectorAll(".token");
  const from = tokens[at].getBoundingClientRect();
  const centre = from.left + from.width / 2;
  let best = at;
  let line = null;
  let gap = Infinity;
  for (let n = at + step; n >= 0 && n < tokens.length; n += step) {
    const { top, left, width } = tokens[n].getBoundingClientRect();
    if (Math.abs(top - from.top) < 4) continue;
    line ??= top;
    if (Math.abs(top - line) >= 4) break;
    const distance = Math.abs(left + width / 2 - centre);
    if (distance < gap) [best, gap] = [n, distance];
  }
  return best;
}
