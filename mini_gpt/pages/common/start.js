// The start of a page.

import { render } from "./preact.js";

// Show what make(data) returns, or its promise. It is a text if the page can't be shown.
export async function startPage(make) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("app");
  const view = await make(data);
  root.textContent = typeof view === "string" ? view : "";
  if (typeof view === "string") return;
  render(view, root);
  document.documentElement.dataset.ready = Math.round(performance.now());
}
