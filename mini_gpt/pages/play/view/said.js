// Sentences and tables about losses: what the edits changed.

import { TableHead } from "../../common/controls.js";
import { thousands } from "../../common/numbers.js";
import { html, useLayoutEffect, useRef, useState } from "../../common/preact.js";
import { phrases } from "./edits.js";
import { ask } from "./engines.js";
import { signedNumber } from "./head_grid.js";
import { meanLoss, predicted, sameTokens } from "./results.js";
import { UNITS } from "./state.js";

// A mean loss, and a change of it that is the difference of the numbers shown.
export const lossText = (nats, unit) => (nats * UNITS[unit]).toFixed(3);
const changeText = (before, after, unit) => signedNumber(lossText(after, unit) - lossText(before, unit));

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// One sentence for a run. name: of the run if there are two. first: of useResults, the first run, for the
// second. range: {first, last, name}, or null for the whole text.
export function Headline({ result, first, edits, range, unit, name, colour }) {
  const { edited, plain, refused, busy } = result;
  const factor = UNITS[unit];
  const said = phrases(edits).join(", ");
  const who = name && html`<b style=${`color:${colour}`}>${name}</b>${": "}`;
  const sign = html`<span class=${busy ? "busy" : "idle"} aria-hidden="true" title="computing">◌</span
    >${busy && html`<span class="slow small soft"> computing …</span>`}`; // words if it takes long
  if (refused) return html`<p class="headline refused">${who}${refused}${sign}</p>`;
  const loss = (result) =>
    html`<b class="numbers" data-loss=${result.mean}>${result.mean === null ? "–" : lossText(result.mean, unit)}</b>`;
  if (!edited) return html`<p class="headline">${who}<span class="soft">The model computes …</span>${sign}</p>`;
  const { count } = predicted(edited, range);
  const part = range ? ` of ${range.name}` : "";
  const isComparable = first?.edited && edited.mean !== null && sameTokens(first.edited, edited.tokens);
  const compared =
    isComparable &&
    html`, <span class="numbers">${changeText(first.edited.mean, edited.mean, unit)}</span> against ${first.name}`;
  const subject = name ? `loss${part}` : `The loss of ${range?.name ?? "this text"} is`;
  const number = !name && html` <span class="soft">(${thousands(count)} predicted tokens)</span>`;
  if (!said)
    return html`<p class="headline">${who}${subject} ${loss(edited)} ${unit} per token${number}${compared}.${sign}</p>`;
  if (!plain || edited.mean === null)
    return html`<p class="headline">
      ${who}${capital(said)}: loss${part} … → ${loss(edited)} ${unit} per token.${sign}
    </p>`;
  const change = (edited.mean - plain.mean) * factor;
  const verdict = change > 0.0005 ? "worse" : change < -0.0005 ? "better" : "";
  return html`<p class="headline">
    ${who}${capital(said)}: loss${part} ${loss(plain)} → ${loss(edited)} ${unit} per token${" "}
    <span class=${`change numbers ${verdict}`}>${changeText(plain.mean, edited.mean, unit)}</span>${sign}
  </p>`;
}

// A hook: the changes of edits of a run with the losses before and after them, the newest first, for the text and
// the range of now.
export function useHistory(result, edits, run, range) {
  const [rows, setRows] = useState([]);
  const last = useRef(null);
  const part = JSON.stringify(range);
  useLayoutEffect(() => {
    const { edited, busy } = result;
    if (!edited || busy || edited.mean === null) return;
    const before = last.current;
    const now = { run, part, tokens: edited.tokens, mean: edited.mean, phrases: phrases(edits) };
    last.current = now;
    if (!before || ["run", "part", "tokens"].some((name) => before[name] !== now[name])) return setRows([]);
    const added = now.phrases.filter((phrase) => !before.phrases.includes(phrase));
    const removed = before.phrases.filter((phrase) => !now.phrases.includes(phrase));
    if (!added.length && !removed.length) return;
    const kind = (phrase) => /^(attention temperature|window|positions|RoPE base|RoPE scaling|ALiBi)/.exec(phrase)?.[0];
    const said = added.length ? added.join(", ") : `${removed.join(", ")}: undone`;
    setRows((old) => {
      // A slider that moves on changes the newest row.
      const isSame = old.length && added.length === 1 && kind(added[0]) && kind(added[0]) === kind(old[0].said);
      const row = { said, before: isSame ? old[0].before : before.mean, after: now.mean };
      return [row, ...(isSame ? old.slice(1) : old)].slice(0, 6);
    });
  }, [result.edited, result.busy, part]);
  return rows;
}

export function History({ rows, unit }) {
  return html`<div class="changes">
    <h3 id="changes-title">Changes</h3>
    <div class="rows" tabindex="0" role="region" aria-labelledby="changes-title">
      <table class="history">
        <caption>
          The newest first, in ${unit} per token
        </caption>
        <${TableHead} columns=${["change", "before", "after", "difference"]} />
        <tbody>
          ${
            rows.length
              ? rows.map(
                  (row) =>
                    html`<tr>
                      <td>${capital(row.said)}</td>
                      <td>${lossText(row.before, unit)}</td>
                      <td>${lossText(row.after, unit)}</td>
                      <td>${changeText(row.before, row.after, unit)}</td>
                    </tr>`,
                )
              : html`<tr>
                  <td colspan="4" class="soft">Switch off a head, or move a slider.</td>
                </tr>`
          }
        </tbody>
      </table>
    </div>
  </div>`;
}

// What the colours of measured heads mean, those that are edited left out. effects: as of useHeadEffects.
export function Effects({ effects, edits, unit }) {
  const found = Object.entries(effects)
    .filter(([name]) => !edits.heads?.[name])
    .sort(([, a], [, b]) => a - b);
  const at = ([name, change]) => `${signedNumber(change * UNITS[unit])} ${unit} (head ${name})`;
  return html`<p class="small soft" id="effects">
    Colour of a head: how the loss changes if this head is off. <span class="better">Blue: it falls</span>;${" "}
    <span class="worse">red: it rises</span>.${" "}
    ${found.length > 0 && `From ${at(found[0])} to ${at(found.at(-1))}. `}Point at a head to see its number.
  </p>`;
}

// A hook: {effects, measure, busy}. effects: change of the loss in nats if a head is off, for the present text and
// edits.
export function useHeadEffects(model, facts, result, edits, range) {
  const [found, setFound] = useState(null);
  const [busy, setBusy] = useState(false);
  const latest = useRef(null);
  // What the effects are about: a result with or without the lens.
  const now = { model, part: JSON.stringify(range), tokens: result.edited?.tokens, written: result.edited?.written };
  const isSame = (a, b) => Object.keys(a).every((name) => a[name] === b[name]);
  latest.current = now;
  const measure = async () => {
    const base = result.edited;
    const effects = {};
    setBusy(true);
    for (const name of facts.kept.flatMap((heads, layer) => heads.map((head) => `${layer}.${head}`))) {
      if (!isSame(now, latest.current)) break;
      const reply = await ask({
        kind: "run",
        model,
        slot: "probe",
        tokens: base.tokens,
        edits: { ...edits, heads: { ...edits.heads, [name]: "off" } },
        ask: { top: 1, lens: 0 },
      });
      if (reply.kind !== "result") break;
      effects[name] = meanLoss(reply, range) - meanLoss(base, range);
      setFound({ about: now, effects: { ...effects } });
    }
    setBusy(false);
  };
  return { effects: found && isSame(found.about, now) ? found.effects : null, measure, busy };
}
