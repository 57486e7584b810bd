"use strict";
// Elements, numbers as text, colours and pictures.

const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
  [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const PALETTE = palette();

function palette() {
  const colours = new Uint32Array(256);
  for (let n = 0; n < 256; n++) {
    const at = n / 255 * (CIVIDIS.length - 1), low = Math.min(Math.floor(at), CIVIDIS.length - 2), part = at - low;
    const [r, g, b] = CIVIDIS[low].map((value, k) => Math.round(value + part * (CIVIDIS[low + 1][k] - value)));
    colours[n] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return colours;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const number = (value, digits = 3) => (Number.isFinite(value) ? Number(value.toPrecision(digits)).toString() : "–").replace("-", "−");
function dataTable(caption, header, rows) { // a cell's class is its column's name
  const cells = (tag, texts, name) => element("tr", {}, ...texts.map((text, n) => element(tag, name(n), text)));
  return element("table", { class: "data" }, element("caption", {}, caption), cells("th", header, () => ({ scope: "col" })),
    ...rows.map((row) => cells("td", row, (n) => ({ class: header[n] }))));
}

const percent = (value) => `${(100 * value).toFixed(2)} %`;

function shown(piece) { // [before, inside, after]: line breaks stand outside of the token, and a sign for them inside
  const [, lead, core, trail] = /^(\n*)([^]*?)(\n*)$/.exec(piece);
  return core ? [lead, core + "↵".repeat(trail.length), trail] : ["", "↵".repeat(lead.length) || "·", lead];
}

const label = (piece) => piece.trim() || (piece.includes("\n") ? "↵" : "·");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function canvas2d(canvas, height) { // a context in CSS pixels, sharp on any screen
  const width = Math.max(canvas.clientWidth, 50), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return [context, width];
}

function image(size, value) { // a picture of size × size; value(y, x) in 0 … 1, or null for what is not seen
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), pixels = context.createImageData(size, size);
  const words = new Uint32Array(pixels.data.buffer);
  for (let y = 0, n = 0; y < size; y++) {
    for (let x = 0; x < size; x++, n++) {
      const v = value(y, x);
      words[n] = v === null ? 0 : PALETTE[Math.round(255 * Math.min(Math.max(v, 0), 1))];
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}
