"use strict";
// The page's state in the fragment of its URL, as `#tab=Map&layer=2`. Values are strings.

const fragment = {
  parse(text) {
    return Object.fromEntries(new URLSearchParams(text));
  },
  read() {
    return this.parse(location.hash.slice(1));
  },
  // Replace the fragment. Entries that are null, undefined or "" are left out.
  write(entries) {
    const held = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const text = new URLSearchParams(held.map(([name, value]) => [name, String(value)])).toString();
    if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
  },
  // A whole number from 0 to below `count`, or `otherwise`.
  index(text, count, otherwise = 0) {
    return /^\d+$/.test(text ?? "") && +text < count ? +text : otherwise;
  },
};
