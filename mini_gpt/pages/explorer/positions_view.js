// The positional encodings: those of the run first, then the others for comparison.

import { bytesOf } from "../common/arrays.js";
import { scales, seriesColour } from "../common/colours.js";
import { Slider } from "../common/controls.js";
import { LineChart, MapChart } from "../common/plots.js";
import { html, useMemo } from "../common/preact.js";
import { useDark } from "../common/theme.js";

export const LENGTHS = { min: 16, max: 1024, step: 16, own: 128 }; // tokens of the figures; own: at first
// Decimal logarithms of the bases that can be chosen; own: of the run.
export function basesOf({ positions: { base } }) {
  const own = Math.log10(base);
  return { min: Math.min(1, own), max: Math.max(6, own), own };
}

const SIGNED_UNIT = scales.signed(1, [-1, -0.5, 0, 0.5, 1]);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
// (1, 0), turned to a place.
const turned = (place, radians) => [Math.cos(place * radians), Math.sin(place * radians)];
// The products of such vectors at places and at one key, averaged over all frequencies.
function productsOf(frequencies, places, key) {
  const atKey = frequencies.map((radians) => turned(key, radians));
  return places.map((place) =>
    mean(
      frequencies.map((radians, pair) => {
        const [x, y] = turned(place, radians);
        return x * atKey[pair][0] + y * atKey[pair][1];
      }),
    ),
  );
}
function rangeOf(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high - low < 0.01 ? [low - 0.5, high + 0.5] : [low, high];
}
const whole = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });

// The vector (1, 0) in pairs of a head's dimensions, rotated by RoPE to positions 0 to 7.
function Turns({ frequencies }) {
  const half = frequencies.length;
  const pairs = [...new Set([0, half >> 2, half >> 1, half - 1])].filter((pair) => pair in frequencies);
  const reach = 46;
  useDark();
  return html`<div class="turns">
    ${pairs.map((pair) => {
      const radians = frequencies[pair];
      const tip = (place, by) => {
        const [x, y] = turned(place, radians);
        return [80 + by * x, 70 - by * y];
      };
      return html`<figure>
        <svg viewBox="0 0 160 140" role="img" aria-label=${`Pair ${pair}: the vector at positions 0 to 7`}>
          <circle cx="80" cy="70" r=${reach} fill="none" stroke="var(--line)" />
          ${Array.from({ length: 8 }, (_, place) => {
            const [x2, y2] = tip(place, reach);
            const isSecondTurn = place * radians > 2 * Math.PI; // its numbers are outside those of the first turn
            const [x, y] = tip(place, reach + (isSecondTurn ? 23 : 12));
            return html`<line
                id=${`turn-${pair}-${place}`}
                x1="80"
                y1="70"
                x2=${x2}
                y2=${y2}
                stroke=${seriesColour(0)}
                stroke-width="2"
                opacity=${0.3 + 0.1 * place} />
              ${
                (radians > 0.25 || place === 0 || (place === 7 && radians > 0.05)) &&
                html`<text x=${x} y=${y + 4} text-anchor="middle">${place}</text>`
              }`;
          })}
        </svg>
        <figcaption>pair ${pair}: ${radians.toPrecision(3)} radians per token</figcaption>
      </figure>`;
    })}
  </div>`;
}

// A card. used: text of what the run uses it for, or null. isOwn: what it shows is the run's, not that of another base.
// more: beside the chart.
const Card = ({ id, title, used, isOwn, chart, more, note }) =>
  html`<section class="card" id=${`card-${id}`}>
    <h2>${title} ${used && html`<span class=${`badge ${isOwn ? "used" : ""}`}>${used}</span>`}</h2>
    ${chart}${more}
    <p class="soft small">${note}</p>
  </section>`;

export function Positions({ data, state, set }) {
  const { width, rotated, factors, scaling, slopes, learned, t5, pattern, known, curves } = data.positions;
  const length = state.length;
  const base = 10 ** state.baseLog;
  const bases = basesOf(data);
  const distances = Array.from({ length }, (_, n) => n);
  const headLines = (values) => values.slice(0, 8).map((of, n) => ({ ...of, dash: n % 2 ? "6 3" : undefined }));
  const atBase = (frequencies) => frequencies.map((ofBase10) => ofBase10 ** state.baseLog); // radians per token
  const waves = atBase(data.positions.waves);
  const turns = atBase(data.positions.turns).map((frequency, pair) => factors[pair] * frequency);
  const similar = productsOf(waves, distances, 0);
  const longest = (2 * Math.PI) / waves[waves.length - 1];
  const wave = (place, dimension) => turned(place, waves[dimension >> 1])[1 - (dimension % 2)];
  const cosines = useMemo(() => learned && new Int8Array(bytesOf(learned.cosines).buffer), [learned]);
  const isOwn = state.baseLog === bases.own;
  const based = (...names) => {
    const text = used(...names);
    return text && !isOwn ? `${text} with base ${whole(data.positions.base)}` : text;
  };
  const used = (...names) => usedIn(known.flatMap((own, layer) => (names.includes(own) ? [layer] : [])));
  const usedIn = (layers) => {
    if (layers.length === 0) return null;
    if (layers.length === pattern.length) return "used by this run";
    return `used in layer${layers.length > 1 ? "s" : ""} ${layers.join(", ")}`;
  };
  const compared = (name) => (used("sinusoidal", "rope") && !used(name) ? ", for comparison" : "");
  const byDistance = { xName: "distance (tokens)" };
  const toTheLeft = { xName: "distance to the left (tokens)" };
  const unit = { low: -1, high: 1 };
  const firstEight = (values) => (values.length > 8 ? ` The first 8 of ${values.length} heads.` : "");
  const places = learned && { name: "position (tokens)", last: learned.size * learned.every };
  // of: the encodings that a card is about; those with a base show that of the slider.
  const cards = [
    {
      of: ["sinusoidal"],
      hasBase: true,
      id: "waves",
      title: `Sinusoidal: ${width} dimensions`,
      chart: html`<${MapChart}
        id="waves"
        name="Sinusoids"
        rows=${length}
        columns=${width}
        makeValueAt=${() => wave}
        scale=${SIGNED_UNIT}
        deps=${[length, base]}
        x=${{ name: "dimension", last: width }}
        y=${{ name: "position (tokens)", last: length }}
        bar="value" />`,
      note: html`Each row is a position, each pair of columns a sine and a cosine: wavelengths from 6.28 to${" "}
        <b id="longest">${whole(longest)}</b> tokens.`,
    },
    {
      of: ["sinusoidal", "rope"],
      hasBase: true,
      id: "similarity",
      title: "Similarity of two positions",
      chart: html`<${LineChart}
        ...${{ id: "similarity", name: "Similarity by distance", ...unit, ...byDistance, yName: "cosine, or score" }}
        lines=${[
          { name: `sinusoids, ${width} dimensions${compared("sinusoidal")}`, values: similar },
          {
            name: `RoPE, ${rotated} dimensions${compared("rope")}`,
            values: productsOf(turns, distances, 0),
            dash: "6 3",
          },
        ]} />`,
      note:
        `Cosine of two positions' sinusoids: ${similar[1].toFixed(3)} at distance 1, ${similar[10].toFixed(3)} at 10. ` +
        "With RoPE: the score q·k of two equal vectors, divided by their score at distance 0.",
    },
    {
      of: ["rope"],
      hasBase: true,
      id: "turns",
      title: `RoPE: rotates pairs of a head's ${rotated} dimensions`,
      chart: html`<${Turns} frequencies=${turns} />`,
      more: scaling && html`<p class="small" id="scaling">Frequencies with this run's scaling: ${scaling}.</p>`,
      note: "The vector (1, 0) at positions 0 to 7. Pairs that turn fast separate near tokens, slow pairs far tokens.",
    },
    {
      of: ["rope"],
      hasBase: true,
      id: "offset",
      title: "RoPE: only the offset counts",
      chart: html`<${LineChart}
        ...${{ id: "offset", name: "Scores by offset for two places of the key", ...unit }}
        xName="offset of the query (tokens)"
        yName="score of equal vectors"
        lines=${[
          { name: "key at 0", values: productsOf(turns, distances, 0), wide: true },
          {
            name: "key at 1,000",
            values: productsOf(
              turns,
              distances.map((d) => 1000 + d),
              1000,
            ),
          },
        ]} />`,
      note: "The curves for a key at 0 and at 1,000 are the same curve.",
    },
    {
      of: ["alibi"],
      id: "alibi",
      title: "ALiBi: one slope per head",
      chart: html`<${LineChart}
        ...${{ id: "alibi", name: "ALiBi's factors by distance", low: 0, high: 1, ...byDistance }}
        yName="exp(−slope · distance)"
        lines=${headLines(
          slopes.map((slope, n) => ({
            name: `head ${n}: slope ${slope.toPrecision(3)}`,
            values: distances.map((d) => Math.exp(-slope * d)),
          })),
        )} />`,
      note:
        "The bias multiplies exp(logit) by exp(−slope · distance). Then the softmax divides by the sum of the " +
        `row.${firstEight(slopes)}`,
    },
    learned && {
      of: ["learned"],
      id: "learned",
      title: "Learned positions, after training",
      chart: html`<${MapChart}
        id="learned"
        name="Cosines of learned positions"
        rows=${learned.size}
        columns=${learned.size}
        makeValueAt=${() => (i, j) => cosines[i * learned.size + j] / 127}
        scale=${SIGNED_UNIT}
        deps=${[cosines]}
        x=${places}
        y=${places}
        height=${360}
        bar="cosine" />`,
      note: `Cosines of the vectors of ${learned.size} positions${
        learned.every > 1 ? `, one of every ${learned.every}` : ""
      }.`,
    },
    t5 && {
      of: ["t5"],
      id: "t5",
      title: "T5's biases, after training",
      chart: html`<${LineChart}
        ...${{ id: "t5", name: "T5's biases by distance", ...toTheLeft, yName: "bias of the logit" }}
        low=${Math.min(...t5.flat())}
        high=${Math.max(...t5.flat(), Math.min(...t5.flat()) + 0.01)}
        lines=${headLines(t5.map((values, n) => ({ name: `head ${n}`, values })))} />`,
      note: `What each head adds to its logits at a distance.${firstEight(t5)}`,
    },
    // Encodings without a card of their own, all of this run: what they compute.
    ...curves.map(({ name, kind, meaning, layers, heads, lines }, n) => {
      const ofAllLayers = curves.filter((other) => other.name === name && other.kind === kind);
      const values = ofAllLayers.flatMap((other) => other.lines.flatMap((line) => line.values));
      const [low, high] = rangeOf(values.filter((value) => value !== null));
      const isSimilarity = kind === "similarity";
      return {
        id: `other-${n}`,
        title: `${name}: ${meaning}`,
        used: usedIn(layers),
        chart: html`<${LineChart}
          ...${{ id: `other-${n}`, name: `${name} by ${kind === "place" ? "token" : "distance"}`, low, high, yName: meaning }}
          ...${kind === "place" ? { xName: "token" } : isSimilarity ? byDistance : toTheLeft}
          lines=${headLines(lines)} />`,
        note:
          (kind === "place"
            ? "Where the heads take each token of the text to be."
            : "With the parameters of this run.") +
          (isSimilarity || kind === "place" ? "" : ` The query is at position ${lines[0].values.length - 1}.`) +
          (heads > lines.length ? ` The first ${lines.length} of ${heads} ${lines[0].name.split(" ")[0]}s.` : ""),
      };
    }),
  ].filter(Boolean);
  const isOfRun = ({ of }) => !of || used(...of) !== null;
  const [own, others] = [true, false].map((isUsed) =>
    cards
      .filter((card) => isOfRun(card) === isUsed)
      .map(
        (card) =>
          html`<${Card}
            ...${{ used: card.of && (card.hasBase ? based : used)(...card.of), isOwn: !card.hasBase || isOwn, ...card }} />`,
      ),
  );
  const names = [...new Set(pattern)].join(", ");
  return html`<p id="encoding">
      ${
        own.length
          ? "First the encodings that this run uses, then others for comparison."
          : `This run's encoding (${names}) has no picture here. The others are shown for comparison.`
      }${" "}
      The sliders change the pictures, not the run.
    </p>
    <div class="controls">
      <${Slider}
        id="length"
        name="length"
        ...${LENGTHS}
        value=${length}
        said=${`${length} tokens`}
        onChange=${(value) => set({ length: value })} />
      <${Slider}
        id="base"
        name="base of sinusoids and RoPE"
        ...${bases}
        step="any"
        value=${state.baseLog}
        said=${whole(base)}
        onChange=${(value) => set({ baseLog: value })} />
      ${
        !isOwn &&
        html`<button id="own-base" onClick=${() => set({ baseLog: bases.own })}>
          back to ${whole(data.positions.base)}
        </button>`
      }
    </div>
    <div class="cards wide">${own}</div>
    ${own.length > 0 && html`<h2 class="others">Not used by this run</h2>`}
    <div class="cards wide">${others}</div>`;
}
