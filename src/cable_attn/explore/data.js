"use strict";
// What is stored in the page: a Model holds its arrays, and a Head answers what its bias and attention are.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RANGE = 8; // of a bias in the pictures: e^-8 of the weight is left, 0.03 %

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const WIDTH = { f16: 2, f32: 4, u16: 2, u8: 1 };

function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

function unpack(bytes, { kind, shape, offset }) {
  const size = shape.reduce((product, n) => product * n, 1), width = WIDTH[kind];
  const whole = new Uint8Array(size * width);
  for (let byte = 0; byte < width; byte++) {
    for (let n = 0, from = offset + byte * size; n < size; n++) whole[n * width + byte] = bytes[from + n];
  }
  if (kind === "u8") return whole;
  if (kind === "f32") return new Float32Array(whole.buffer);
  const words = new Uint16Array(whole.buffer);
  return kind === "u16" ? words : Float32Array.from(words, halfToFloat);
}

class Model {
  static async open(raw) {
    const model = Object.assign(new Model(), raw);
    const bytes = await inflate(raw.blob);
    for (const header of raw.arrays) model[header.name] = unpack(bytes, header);
    model.length = raw.pieces.length;
    model.cells = Math.sqrt(model.maps.length / (raw.layers * raw.heads));
    model.starts = [0];
    for (const piece of raw.pieces) model.starts.push(model.starts.at(-1) + piece.length);
    model.rowStarts = new Uint32Array(model.counts.length + 1);
    model.counts.forEach((count, n) => { model.rowStarts[n + 1] = model.rowStarts[n] + count; });
    delete model.blob;
    return model;
  }

  get hasBias() { return this.form !== "none"; }

  head(layer, head) { return new Head(this, layer, head); }

  sees(i, j) { return (!this.causal || j <= i) && (!this.slidingWindow || Math.abs(i - j) < this.slidingWindow); }

  window(layer, head) { return this.windows[2 * (layer * this.heads + head)]; }

  half(layer, head) { return this.windows[2 * (layer * this.heads + head) + 1]; }

  typical(layer) { // the head whose window is the median
    const heads = Array.from({ length: this.heads }, (_, n) => n).sort((a, b) => this.window(layer, a) - this.window(layer, b));
    return heads[this.heads >> 1];
  }

  atCharacter(place) { // the token that holds this character of the text
    let low = 0, high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= place) low = middle; else high = middle - 1;
    }
    return low;
  }
}

class Head {
  constructor(model, layer, head) {
    const at = layer * model.heads + head, length = model.length;
    Object.assign(this, { model, layer, number: head });
    if (model.form === "potential") {
      this.steps = model.steps.subarray(at * length, (at + 1) * length);
      this.gains = model.gains.subarray(at * length, (at + 1) * length);
      this.c = new Float64Array(length);
      let sum = 0;
      for (let n = 0; n < length; n++) this.c[n] = sum += this.steps[n];
      this.bias = model.kernel === "log" ? (i, j) => -Math.log1p(this.plain(i, j) ** 2) : (i, j) => this.plain(i, j);
    } else if (model.form === "table") {
      const size = model.table.length / (model.layers * model.heads), zero = model.causal ? 0 : length - 1;
      const table = model.table.subarray(at * size, (at + 1) * size);
      this.bias = (i, j) => table[zero + i - j];
    } else if (model.form === "grid") {
      const size = model.places.length * model.distances.length;
      this.grid = model.grid.subarray(at * size, (at + 1) * size);
      this.bias = (i, j) => this.between(i, i - j);
    } else {
      this.bias = null;
    }
    this.stored = model.attentionLayers.indexOf(layer);
  }

  plain(i, j) { return -this.gains[i] * Math.abs(this.c[i] - this.c[j]); }

  between(place, distance) { // linear in the distance and in the place
    const { places, distances } = this.model, columns = distances.length;
    const [p, pPart] = bracket(places, place), [d, dPart] = bracket(distances, distance);
    const p2 = Math.min(p + 1, places.length - 1), d2 = Math.min(d + 1, columns - 1);
    const row = (n) => this.grid[n * columns + d] * (1 - dPart) + this.grid[n * columns + d2] * dPart;
    return row(p) * (1 - pPart) + row(p2) * pPart;
  }

  attention(i) { // [[key, weight], …] of the heaviest keys, or null where this layer is not stored
    if (this.stored < 0) return null;
    const { heads, length, rowStarts, keys, weights } = this.model;
    const row = (this.stored * heads + this.number) * length + i, found = [];
    for (let n = rowStarts[row], key = i; n < rowStarts[row + 1]; n++) {
      key = (key - keys[n]) & 0xffff;
      found.push([key, weights[n] / 10000]);
    }
    return found;
  }

  range() { // of the bias, for colours: 0 to -8, or what there is of a smaller or positive one
    if (!this.bias) return [0, 1];
    const { model } = this;
    if (model.form === "potential") return [-RANGE, 0];
    const values = model.form === "grid" ? this.grid : [];
    if (model.form === "table") {
      const last = model.length - 1;
      for (let j = 0; j <= last; j += Math.max(1, last >> 8)) {
        values.push(this.bias(last, j));
        if (!model.causal) values.push(this.bias(0, j));
      }
      for (let d = 0; d < Math.min(64, model.length); d++) values.push(this.bias(last, last - d));
    }
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    return [Math.max(low, high - RANGE), high > low ? high : low + 1];
  }
}

function bracket(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] <= value) low = middle; else high = middle; }
  if (sorted.length < 2) return [0, 0];
  return [low, Math.min(Math.max((value - sorted[low]) / (sorted[high] - sorted[low]), 0), 1)];
}
