// Light and dark: what the reader chose, or else what the system has.

import { html, useLayoutEffect, useState } from "./preact.js";

export const theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = new Set();
  const changed = () => listeners.forEach((listener) => listener());
  system.addEventListener("change", changed);
  return {
    // "light", "dark" or null
    get chosen() {
      return root.dataset.theme ?? null;
    },
    get isDark() {
      return (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    },
    choose(name) {
      if (name === "light" || name === "dark") root.dataset.theme = name;
      else delete root.dataset.theme;
      changed();
    },
    exchange() {
      this.choose(this.isDark ? "light" : "dark");
    },
    // Returns a function that ends it.
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
})();

// A hook: whether the page is dark. The component is drawn again when this changes.
export function useDark() {
  const [isDark, set] = useState(theme.isDark);
  useLayoutEffect(() => theme.listen(() => set(theme.isDark)), []);
  return isDark;
}

export function ThemeButton() {
  const isDark = useDark();
  return html`<button id="theme" onClick=${() => theme.exchange()}>${isDark ? "Light" : "Dark"} colours</button>`;
}
