// The likely next tokens as bars, with those of the unedited model as dashed frames.

import { seriesColour } from "../../common/colours.js";
import { html } from "../../common/preact.js";
import { useDark } from "../../common/theme.js";
import { shown, spoken } from "../../common/tokens.js";
import { SHOWN, likelyNext } from "./results.js";

export const percent = (share) =>
  share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : share >= 0.00095 ? `${(100 * share).toFixed(1)} %` : "< 0.1 %";

// A token on one line. The separator, which has no text, is the end of a document.
export const labelOf = (tokenizer, token) => (token === tokenizer.separator ? "⟨end⟩" : shown(tokenizer.textOf(token)));

// result: of useResults. colour: of the bars. actual: the token that follows in the text, or null.
// onToken(token): for a bar that was chosen; null: bars are not buttons.
function NextTokens({ id, result, place, tokenizer, actual, most, colour, onToken }) {
  useDark();
  const rows = result.edited ? likelyNext(result, Math.min(place, result.edited.length - 1), most) : [];
  const isEdited = result.plain !== result.edited;
  const row = ({ token, probability, before }) => {
    const text = tokenizer.textOf(token);
    const unedited = isEdited && before !== null ? `, without edits ${percent(before)}` : "";
    const called = token === tokenizer.separator ? "end of the text" : spoken(text);
    const label = `${called}: ${percent(probability)}${unedited}`;
    const inner = html`<span class="name">${labelOf(tokenizer, token)}</span>
      <span class="track"
        >${isEdited && before !== null && html`<i class="ghost" style=${`width:${100 * before}%`}></i>`}<i
          class="fill"
          style=${`width:${100 * probability}%;background:${colour}`}></i
      ></span>
      <span class="numbers">${percent(probability)}</span>`;
    const kind = `next ${token === actual ? "actual" : ""}`;
    const given = { key: token, class: kind, "data-token": token, "data-probability": probability };
    return html`<li>
      ${
        onToken && text
          ? html`<button
              ...${given}
              aria-label=${`Append ${label}`}
              title="Append this token"
              onClick=${() => onToken(token)}>
              ${inner}
            </button>`
          : html`<div
              ...${given}
              role="img"
              aria-label=${`${label}${token === actual ? ", the token in the text" : ""}`}>
              ${inner}
            </div>`
      }
    </li>`;
  };
  return html`<ol class="bars" id=${id}>
    ${rows.map(row)}
  </ol>`;
}

function NextLegend({ isEdited, hasActual }) {
  return html`<p class="legend small soft">
    ${
      isEdited && html`<span><i class="key fill"></i>with the edits</span><span><i class="key ghost"></i>without</span>`
    }
    ${hasActual && html`<span><i class="key mark"></i>the token in the text</span>`}<span>␣ a space</span>
  </p>`;
}

export function NextCard({ facts, state, set, ids, results, place, tokenizer }) {
  if (!ids.length)
    return html`<section class="card" aria-labelledby="next-title">
      <h2 id="next-title">Next token</h2>
      <p class="soft">Type a text first.</p>
    </section>`;
  const isEnd = place >= ids.length - 1;
  const actual = isEnd ? null : ids[place + 1];
  const tail = [...tokenizer.decode(ids.slice(Math.max(0, place - 11), place + 1))];
  const before =
    (place > 11 || tail[28] ? "…" : "") +
    tail
      .slice(-28)
      .map((c) => (c === " " ? c : shown(c)))
      .join("");
  const onToken = isEnd
    ? (token) => set({ text: state.text + tokenizer.decode([token]), pin: null, range: null })
    : null;
  return html`<section class="card" aria-labelledby="next-title">
    <h2 id="next-title">Next token</h2>
    <p class="soft after">most likely after <q>${before}</q></p>
    ${facts.map(
      (run, n) =>
        html`${facts.length > 1 && html`<h3 style=${`color:${seriesColour(n)}`}>${run.name}</h3>`}
          <${NextTokens}
            id=${`next-${n}`}
            result=${results[n]}
            colour=${seriesColour(n)}
            most=${facts.length > 1 ? 6 : SHOWN}
            ...${{ place, tokenizer, actual, onToken }} />`,
    )}
    <${NextLegend} isEdited=${results.some((each) => each.edited !== each.plain)} hasActual=${!isEnd} />
    <p class="small soft" data-picture="no">
      ${
        isEnd
          ? "Choose a token to append it."
          : "The place is the token before the cursor, or the last one that is selected; " +
            "at the start of the text, the first token."
      }
    </p>
  </section>`;
}
