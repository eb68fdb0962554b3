// The page's state in the fragment of its URL, as `#tab=Map&layer=2`. Values are strings.

import { useLayoutEffect, useRef } from "./preact.js";
import { theme, useDark } from "./theme.js";

export const fragment = {
  known: null, // the text that the page last read or wrote
  parse(text) {
    return Object.fromEntries(new URLSearchParams(text));
  },
  read() {
    this.known = location.hash;
    return this.parse(location.hash.slice(1));
  },
  // Replace the fragment. Entries that are null or undefined are left out. A fragment that was changed from outside and
  // is not read yet stays.
  write(entries) {
    if (location.hash !== this.known) return;
    const kept = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined);
    const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
    if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
    this.known = location.hash;
  },
  // A whole number from 0 to below `count`, or `otherwise`.
  index(text, count, otherwise = 0) {
    return /^\d+$/.test(text ?? "") && +text < count ? +text : otherwise;
  },
};

// The colours of the address, before anything is drawn.
theme.choose(fragment.read().theme);

const PAUSE = 150; // milliseconds without a change before the address changes: browsers limit how often it can

// A hook: the address follows the page, and the page follows the address. entriesOf(state): all but the colours.
// onRead(entries): the address was changed from outside. Without `theme` in it, the colours stay.
export function useFragment(state, entriesOf, onRead) {
  const isDark = useDark();
  const latest = useRef();
  latest.current = onRead;
  useLayoutEffect(() => {
    const timer = setTimeout(() => fragment.write({ ...entriesOf(state), theme: theme.chosen }), PAUSE);
    return () => clearTimeout(timer);
  }, [state, isDark]);
  useLayoutEffect(() => {
    const read = (event) => {
      fragment.known = new URL(event.newURL).hash; // the address can have changed again
      const entries = fragment.parse(fragment.known.slice(1));
      if (entries.theme) theme.choose(entries.theme);
      latest.current(entries);
    };
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
}
