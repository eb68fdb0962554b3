// The text, shaded by the attention of one token: the keys that it reads, or the queries that read it.

import { scales, shadeStyle } from "../common/colours.js";
import { Choice } from "../common/controls.js";
import { ColourBar } from "../common/maps.js";
import { html, useMemo, useState } from "../common/preact.js";
import { FlowingText } from "../common/tokens.js";
import { HeadChoice, MEAN, TYPICAL, inContext, isAligned, masked } from "./heads.js";

const MOST_LISTED = 8;

export function TextView({ attention, state, set }) {
  const [hover, point] = useState(null);
  const { isCross } = attention;
  const { layer, head } = state;
  const count = { query: attention.rows, key: attention.columns };
  const weightAt = useMemo(
    () => (head === MEAN ? attention.meansAt(layer) : attention.weightsAt(layer, head)),
    [attention, layer, head],
  );
  const pin = state.pin === TYPICAL ? attention.opening(state.side, layer, head) : state.pin;
  const pinned = pin !== null && pin < count[state.side] ? { side: state.side, at: pin } : null;
  const marked = hover ?? pinned; // {side, at}: the token whose attention is shown
  const valueOf = (n) => (marked.side === "key" ? weightAt(n, marked.at) : weightAt(marked.at, n));
  const other = marked && { query: "key", key: "query" }[marked.side];
  const text = (side, name, own) =>
    html`<${FlowingText}
      id=${own}
      name=${name}
      tokens=${side === "key" ? attention.keys : attention.tokens}
      pinned=${pinned?.side === side || (!isCross && pinned) ? pinned.at : null}
      onPoint=${(at) => point(at === null ? null : { side, at })}
      onPin=${(at) => set({ pin: at, side })}
      styleOf=${(n) =>
        marked && (isCross ? side === other : true) && valueOf(n) !== null
          ? shadeStyle(scales.weights, valueOf(n))
          : ""}
      markOf=${(n) =>
        [
          marked && marked.at === n && (isCross ? side === marked.side : true) ? "pointed" : "",
          marked && (!isCross || side === other) && valueOf(n) === null ? "masked" : "",
          marked && side === other && isAligned(attention, marked, n) ? "framed" : "",
        ].join(" ")} />`;
  return html`<${HeadChoice} ...${{ attention, state, set, withMean: true }} />
    <p>
      ${
        isCross
          ? "Point at a token of the target to see what it reads in the source. Point at a token of the source to " +
            "see which tokens read it. A stronger colour is a larger weight."
          : state.side === "key"
            ? "Each token is shaded by the attention weight that it gives to the marked token."
            : "Each token is shaded by the attention weight that the marked token gives to it."
      }
      ${state.pin === TYPICAL && head !== MEAN && " At first, a token that is typical of the head is pinned."}
      ${" "}Point at another token, or click or tap to pin
      it.${attention.keys.includes("") && " ∅ is a token without text, such as the separator."}
    </p>
    <div class="controls">
      ${
        !isCross &&
        html`<${Choice}
          id="side"
          name="show"
          options=${[
            ["query", "what the token reads"],
            ["key", "which tokens read it"],
          ]}
          value=${state.side}
          onChoose=${(side) => set({ side })} />`
      }
      <${ColourBar} scale=${scales.weights} name="attention weight" masked=${masked(attention)} />
      ${
        attention.alignment &&
        html`<span class="soft small" id="legend"><i class="underline"></i> true alignment of the token</span>`
      }
    </div>
    ${
      isCross
        ? html`<div class="pair">
            <section>
              <h2>Source: the keys</h2>
              ${text("key", "source", "keys")}
            </section>
            <section>
              <h2>Target, as it is written: the queries</h2>
              ${text("query", "target", "queries")}
            </section>
          </div>`
        : text(state.side, "text", "queries")
    }
    <${Strongest} ...${{ attention, marked, valueOf, layer, head }} />`;
}

// The largest weights of the token that is pointed at or pinned.
function Strongest({ attention, marked, valueOf, layer, head }) {
  if (marked === null) return html`<p class="soft" id="strongest">No token is pinned.</p>`;
  const [own, others] = marked.side === "key" ? [attention.keys, attention.tokens] : [attention.tokens, attention.keys];
  const all = others.map((_, n) => [n, valueOf(n)]).filter(([, weight]) => weight !== null);
  const isMean = (n) =>
    head !== MEAN &&
    (marked.side === "key" ? attention.isMean(layer, head, n, marked.at) : attention.isMean(layer, head, marked.at, n));
  all.sort((a, b) => b[1] - a[1] || isMean(a[0]) - isMean(b[0]) || a[0] - b[0]);
  const listed = all.slice(0, MOST_LISTED).filter(([, weight], n) => n === 0 || weight >= 0.0005);
  const total = listed.reduce((sum, [, weight]) => sum + weight, 0);
  const { isCross } = attention;
  return html`<section class="strongest" id="strongest" aria-label="largest weights">
    <h2>
      ${marked.side === "key" ? "Which tokens read " : "What "}${inContext(own, marked.at)}${
        marked.side === "key" ? "" : " reads"
      }${" "}<span class="soft small">(position ${marked.at})</span>
    </h2>
    ${
      all.length === 0
        ? html`<p class="soft">No pair with this token is visible.</p>`
        : html`<table>
              <thead>
                <tr>
                  <th>token</th>
                  <th>position</th>
                  ${!isCross && html`<th>distance</th>`}
                  <th>weight</th>
                  <td aria-hidden="true">
                    <span class="ends"><span>0</span><span>1</span></span>
                  </td>
                </tr>
              </thead>
              <tbody>
                ${listed.map(
                  ([n, weight]) =>
                    html`<tr>
                      <td>${inContext(others, n)}</td>
                      <td>${n}</td>
                      ${!isCross && html`<td>${marked.side === "key" ? n - marked.at : marked.at - n}</td>`}
                      <td>${weight.toFixed(3)}</td>
                      <td>
                        ${
                          isMean(n)
                            ? "mean of its block"
                            : html`<span class="track"><i class="length" style=${`width:${100 * weight}%`}></i></span>`
                        }
                      </td>
                    </tr>`,
                )}
              </tbody>
            </table>
            ${
              marked.side === "query" &&
              html`<p class="soft small">
                The weights of a token's keys add up to 1;${" "}
                ${listed.length === 1 ? "this one" : `these ${listed.length}`} of ${all.length} visible keys${" "}
                ${listed.length === 1 ? "has" : "have"} ${total.toFixed(2)}.
              </p>`
            }`
    }
  </section>`;
}
