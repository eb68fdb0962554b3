// Save what the page shows as a PNG: a copy of it is drawn as an SVG image with the page's own styles.

import { theme } from "../../common/theme.js";

const WIDEST = 8000; // points of the picture's sides

function frozen(element) {
  const copy = element.cloneNode(true);
  const canvases = element.querySelectorAll("canvas");
  const fields = element.querySelectorAll("textarea");
  copy.querySelectorAll("canvas").forEach((canvas, n) => {
    const image = document.createElement("img");
    const { width, height } = canvases[n].getBoundingClientRect();
    image.src = canvases[n].toDataURL();
    image.className = canvas.className;
    image.setAttribute(
      "style",
      `${canvas.getAttribute("style") ?? ""};display:block;width:${width}px;height:${height}px`,
    );
    canvas.replaceWith(image);
  });
  copy.querySelectorAll("textarea").forEach((field, n) => {
    const text = document.createElement("div");
    text.className = "field";
    text.textContent = fields[n].value;
    field.replaceWith(text);
  });
  const controls = element.querySelectorAll("input, option");
  copy.querySelectorAll("input, option").forEach((control, n) => {
    // what was entered is not in the attributes
    if (control.tagName === "INPUT") control.setAttribute("value", controls[n].value);
    else control.toggleAttribute("selected", controls[n].selected);
  });
  copy.querySelectorAll("[data-picture=no], .unseen").forEach((part) => part.remove());
  return copy;
}

// Returns a promise of the PNG as a Blob.
async function pictureOf(element) {
  const width = Math.ceil(element.getBoundingClientRect().width);
  const copy = frozen(element);
  const probe = document.createElement("div");
  probe.style = `position:absolute;left:-99999px;top:0;width:${width}px`;
  probe.append(copy);
  document.body.append(probe);
  const height = Math.ceil(copy.getBoundingClientRect().height);
  probe.remove();
  const styles = [...document.querySelectorAll("style")].map((style) => style.textContent).join("\n");
  const style = document.createElement("style");
  const body = document.createElement("div");
  style.textContent = `${styles}
    .sheet { width: ${width}px; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
    .sheet main { margin: 0; max-width: none }
    .sheet .top > h1, .sheet .bar-of-card > h2 { margin-left: 0 }`;
  body.setAttribute("class", "sheet");
  body.append(style, copy);
  const inner = new XMLSerializer().serializeToString(body);
  const name = theme.isDark ? "dark" : "light";
  const svg =
    `<svg xmlns="http://www.w3.org/2000/svg" data-theme="${name}" width="${width}" height="${height}">` +
    `<foreignObject width="100%" height="100%">${inner}</foreignObject></svg>`;
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  const ratio = Math.min(2, WIDEST / Math.max(width, height));
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.drawImage(image, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

export async function savePicture(element, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await pictureOf(element));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
