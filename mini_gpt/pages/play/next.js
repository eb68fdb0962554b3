"use strict";
// Bars of the likely next tokens, with those of the unedited model as ghosts.

const percent = (share) => (share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : share >= 0.00095 ? `${(100 * share).toFixed(1)} %` : "< 0.1 %");

// A token on one line. The separator, which has no text, is the end of a document.
const labelOf = (tokenizer, token) => (token === tokenizer.separator ? "⟨end⟩" : shown(tokenizer.decode([token])));

// held: of useResults. colour: of the bars. actual: the token that follows in the text, or null. onToken(token): a bar was
// chosen, or null.
function NextTokens({ id, held, place, tokenizer, actual, most, colour, onToken }) {
  useDark();
  const rows = held.edited ? likelyNext(held, Math.min(place, held.edited.length - 1), most) : [];
  const isEdited = held.plain !== held.edited;
  const row = ({ token, probability, before }) => {
    const text = tokenizer.decode([token]), label = `${token === tokenizer.separator ? "end of the text" : spoken(text)}: ${percent(probability)}${isEdited && before !== null ? `, without edits ${percent(before)}` : ""}`;
    const inner = html`<span class="name">${labelOf(tokenizer, token)}</span>
      <span class="track">${isEdited && before !== null && html`<i class="ghost" style=${`width:${100 * before}%`}></i>`}<i class="fill" style=${`width:${100 * probability}%;background:${colour}`}></i></span>
      <span class="numbers">${percent(probability)}</span>`;
    const kind = `next ${token === actual ? "actual" : ""}`, given = { key: token, class: kind, "data-token": token, "data-probability": probability };
    return html`<li>${onToken && text ? html`<button ...${given} aria-label=${`Append ${label}`} title="Append this token" onClick=${() => onToken(token)}>${inner}</button>`
      : html`<div ...${given} role="img" aria-label=${`${label}${token === actual ? ", the token in the text" : ""}`}>${inner}</div>`}</li>`;
  };
  return html`<ol class="bars" id=${id}>${rows.map(row)}</ol>`;
}

function NextLegend({ isEdited, hasActual }) {
  return html`<p class="legend small soft">${isEdited && html`<span><i class="key fill"></i>with the edits</span><span><i class="key ghost"></i>without</span>`}
    ${hasActual && html`<span><i class="key mark"></i>the token in the text</span>`}<span>␣ a space</span></p>`;
}
