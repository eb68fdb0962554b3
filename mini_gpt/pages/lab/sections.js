// The sections of the page. On a narrow screen they fold, and only the first one is open at the start.

import { html, useEffect, useLayoutEffect, useState } from "../common/preact.js";
import { STEPS } from "./matrices.js";

const SECTIONS = ["roles", ...STEPS.map(({ id }) => `step-${id}`), "shapes", "one-beside-two", "reorder"];
const narrow = matchMedia("(max-width: 760px)");

// A hook: whether the screen is narrow.
function useNarrow() {
  const [isNarrow, set] = useState(narrow.matches);
  useLayoutEffect(() => {
    const changed = () => set(narrow.matches);
    narrow.addEventListener("change", changed);
    return () => narrow.removeEventListener("change", changed);
  }, []);
  return isNarrow;
}

// The section that a fragment names, as `#step-score`, or null.
export const sectionOf = (entries) => SECTIONS.find((id) => entries[id] === "") ?? null;

// A hook: {isOpen(id), fold(id, isOpen), goTo(id)}. goTo opens a section and brings it into view.
export function useSections(first) {
  const [open, setOpen] = useState(() => ({ [SECTIONS[0]]: true, [first]: true }));
  const [goal, setGoal] = useState(first && { id: first });
  const fold = (id, isOpen) => setOpen((old) => ({ ...old, [id]: isOpen }));
  useEffect(() => {
    if (goal === null) return;
    const section = document.getElementById(goal.id);
    if (section === null) return; // a trained head does not have all sections
    const { top, bottom } = section.getBoundingClientRect();
    section.focus({ preventScroll: true });
    if (top < 0 || bottom > innerHeight) section.scrollIntoView({ block: "start" });
  }, [goal]);
  return {
    isOpen: (id) => open[id] === true,
    fold,
    goTo: (id) => {
      fold(id, true);
      setGoal({ id });
    },
  };
}

// beside: what stands beside the title, or under it on a narrow screen.
export function Section({ id, title, beside, page: { sections }, children }) {
  const isNarrow = useNarrow();
  const heading = html`<h2 id=${`title-${id}`}>${title}</h2>`;
  return html`<section class="card step" id=${id} tabindex="-1" aria-labelledby=${`title-${id}`}>
    ${
      isNarrow
        ? html`<details open=${sections.isOpen(id)} onToggle=${(event) => sections.fold(id, event.currentTarget.open)}>
            <summary>${heading}</summary>
            <div class="row">${beside}</div>
            ${children}
          </details>`
        : html`<header>${heading}${beside}</header>
            ${children}`
    }
  </section>`;
}
