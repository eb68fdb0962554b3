// What the views of a matrix share.

import { scales } from "../common/colours.js";
import { html, useState } from "../common/preact.js";
import { LARGEST } from "./cells.js";

const MOST = 4; // the value from which a signed number has the strongest colour

export const SCALES = { signed: scales.signed(MOST), weights: scales.linear(0, 1, [0, 0.5, 1]) };

// Text in which W_Q and its like have subscripts.
export const typeset = (text) =>
  text.split(/_([QKVO])(?!\w)/).map((part, n) => (n % 2 ? html`<sub>${part}</sub>` : part));

// A number that can be typed. The typed text stays until the field is left; what is not a number, or too large,
// changes nothing.
export function NumberField({ value, label, onChange, onBlur, digits = 3, ...rest }) {
  const [typed, setTyped] = useState(null);
  const isAllowed = (number) => Math.abs(number) <= LARGEST;
  const read = (text) => (text.trim() === "" ? NaN : Number(text.replace(",", ".").replace("−", "-")));
  const change = (text) => {
    setTyped(text);
    if (isAllowed(read(text))) onChange(read(text));
  };
  const isBad = typed !== null && !isAllowed(read(typed));
  return html`<input
    type="text"
    inputmode="decimal"
    autocomplete="off"
    aria-label=${label}
    aria-invalid=${isBad ? "true" : "false"}
    ...${rest}
    value=${typed ?? String(+value.toFixed(digits))}
    onInput=${(event) => change(event.target.value)}
    onBlur=${() => {
      setTyped(null);
      onBlur();
    }} />`;
}
