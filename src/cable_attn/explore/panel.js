"use strict";
// A Panel shows one model: its heads, the text, and what the query sees. page.js holds the state that panels share.

const LEVELS = 8;

class Panel {
  constructor(model, index) {
    Object.assign(this, { model, index });
    this.t = 0;
    const direction = model.causal ? "causal" : "bidirectional";
    const shape = `${model.layers} layers × ${model.heads} heads, ${direction}, trained on ${model.trainedAt} tokens`;
    const read = model.of > model.length ? `the first ${model.length} of ${model.of} tokens` : `${model.length} tokens`;
    this.grid = element("div", { class: "heads" });
    const keys = "Left and right move the query, up and down by ten, Home and End to its ends.";
    const told = `Text as ${model.encoding} reads it. ${keys}`;
    this.text = element("div", { class: "text", tabindex: 0, role: "application", "aria-label": told });
    this.legend = element("div", { class: "legend" });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.chart = element("canvas", { class: "chart", role: "img" });
    this.map = element("canvas", { class: "map", role: "img" });
    this.mapNote = element("p", { class: "note", "aria-live": "off" });
    this.topTable = element("div", { class: "scroll" });
    this.kindTable = element("div", { class: "scroll" });
    this.headTitle = element("h3");
    this.root = element("section", { class: "panel", "aria-label": `${model.name}, ${model.encoding}` },
      element("h2", {}, `${model.encoding} · ${model.name}`), element("p", { class: "note" }, `${shape}; ${read}`),
      element("div", { class: "top" },
        element("div", {}, element("h3", {}, "Pick a head"), element("p", { class: "note" }, this.gridNote()), this.grid),
        element("div", {}, this.headTitle, this.text, this.legend, this.readout)),
      element("div", { class: "columns" },
        element("div", {}, element("h3", {}, "What the query sees"), this.chart, this.topTable,
          element("h3", {}, "Which kinds of tokens add distance"), this.kindTable),
        element("div", {}, element("h3", {}, "Heat map of this head"), this.map, this.mapNote)));
    document.getElementById("panels").append(this.root);
    this.makeText();
    this.makeGrid();
    this.map.addEventListener("pointermove", (event) => this.pointAtMap(event, false));
    this.map.addEventListener("click", (event) => this.pointAtMap(event, true));
  }

  gridNote() {
    const { model } = this;
    const bias = `its bias over the first ${this.thumbSpan()} tokens, bright where distance costs nothing`;
    const picture = model.hasBias ? bias : "its attention over the whole text, bright where the weight is";
    const window = `mean weight further away than so many tokens is below ${100 * DATA.far} %`;
    return `Each picture is a head, queries down and keys across: ${picture}. The number is its effective window: ${window}.`;
  }

  thumbSpan() { return Math.min(this.model.length, Math.max(this.model.trainedAt, 16)); }

  makeText() {
    const { model } = this, part = document.createDocumentFragment();
    this.spans = model.pieces.map((piece, n) => {
      const span = document.createElement("span");
      const [before, inside, after] = shown(piece);
      span.textContent = inside;
      span.n = n;
      part.append(before, span, after);
      return span;
    });
    this.classes = new Array(model.length).fill("");
    this.text.append(part);
    this.text.addEventListener("pointerover", (event) => {
      const hovers = event.pointerType === "mouse" && !state.pinned;
      if (hovers && event.target.n !== undefined) setQuery(this, event.target.n);
    });
    this.text.addEventListener("click", (event) => {
      if (event.target.n === undefined) return;
      state.pinned = !(state.pinned && event.target.n === this.t);
      setQuery(this, event.target.n);
    });
    this.text.addEventListener("keydown", (event) => {
      const jump = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -model.length, End: model.length }[event.key];
      if (jump === undefined) return;
      event.preventDefault();
      state.pinned = true;
      const from = waiting && waiting.panel === this ? waiting.t : this.t; // keys may come faster than frames
      setQuery(this, Math.min(Math.max(from + jump, 0), model.length - 1), true);
    });
  }

  makeGrid() {
    const { model } = this, table = element("table"), cells = Math.min(this.thumbSpan(), 52);
    this.buttons = [];
    for (let layer = 0; layer < model.layers; layer++) {
      const row = element("tr", {}, element("th", { scope: "row" }, `layer ${layer}`));
      for (let head = 0; head < model.heads; head++) {
        const wide = model.window(layer, head);
        const button = element("button", { type: "button", "data-head": `${layer}.${head}`, "aria-pressed": "false",
          "aria-label": `Layer ${layer}, head ${head}, effective window ${wide} tokens`, onclick: () => { this.setHead(layer, head); },
          onkeydown: (event) => this.moveInGrid(event, layer, head) }, this.thumb(layer, head, cells), `${head}: ${wide}`);
        this.buttons.push(button);
        row.append(element("td", {}, button));
      }
      table.append(row);
    }
    this.grid.append(table);
  }

  thumb(layer, head, cells) {
    const { model } = this;
    if (!model.hasBias) {
      const at = (layer * model.heads + head) * model.cells ** 2;
      return image(model.cells, (y, x) => (model.causal && x > y ? null : model.maps[at + y * model.cells + x] / 255));
    }
    const one = model.head(layer, head), [low, high] = one.range(), scale = this.thumbSpan() / cells;
    return image(cells, (y, x) => {
      const i = Math.floor((y + 0.5) * scale), j = Math.floor((x + 0.5) * scale);
      return model.sees(i, j) ? (one.bias(i, j) - low) / (high - low) : null;
    });
  }

  moveInGrid(event, layer, head) {
    const [down, right] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key] || [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    const l = (layer + down + this.model.layers) % this.model.layers, h = (head + right + this.model.heads) % this.model.heads;
    this.setHead(l, h);
    this.buttons[l * this.model.heads + h].focus();
  }

  setHead(layer, head) {
    const { model } = this;
    this.head = model.head(layer, head);
    state.heads[this.index] = [layer, head];
    this.range = this.head.range();
    if (this.head.steps) this.measureSteps();
    this.buttons.forEach((button, n) => {
      const chosen = n === layer * model.heads + head;
      button.setAttribute("aria-pressed", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    });
    const reach = `effective window ${model.window(layer, head)} tokens, half of the weight within ${model.half(layer, head)}`;
    this.headTitle.textContent = `Layer ${layer}, head ${head}: ${reach}`;
    this.drawKinds();
    this.draw();
    remember();
  }

  measureSteps() { // nothing lies before the first token, so its step has no effect
    const sorted = this.head.steps.slice(1).sort();
    this.same = sorted[0] === sorted[sorted.length - 1];
    this.topStep = sorted[Math.floor(sorted.length * 0.98)] || sorted[sorted.length - 1] || 1;
  }

  draw() {
    this.row = this.attentionRow();
    this.drawText();
    this.drawReadout();
    this.drawChart();
    this.drawTop();
    this.drawMap();
  }

  attentionRow() {
    const found = this.head.attention(this.t);
    if (!found) return null;
    const row = new Float32Array(this.model.length);
    for (const [key, weight] of found) row[key] = weight;
    return row;
  }

  shading(n, unseen) { // how strongly token n is shaded, 0 … 1, and the number that says the same
    const shade = this.shade();
    if (shade === "step") return [this.head.steps[n] / this.topStep, number(this.head.steps[n], 2)];
    if (unseen) return [0, ""];
    if (shade === "bias") {
      const left = Math.exp(Math.min(this.head.bias(this.t, n) - Math.max(this.range[1], 0), 0));
      return [left, number(left, 2)];
    }
    const weight = this.row ? this.row[n] : 0;
    return [Math.sqrt(weight), weight ? (100 * weight).toFixed(1) : ""];
  }

  shade() {
    if (state.shade === "step" && (!this.head.steps || this.same)) return this.head.bias ? "bias" : "attention";
    return state.shade === "bias" && !this.head.bias ? "attention" : state.shade;
  }

  drawText() {
    const { model, t } = this, withNumbers = document.getElementById("numbers").checked, blind = Math.log(DATA.far);
    const top = Math.max(this.range[1], 0);
    this.sees = 0;
    for (let n = 0; n < model.length; n++) {
      const unseen = !model.sees(t, n);
      const [strength, told] = this.shading(n, unseen);
      let name = `s${Math.round(LEVELS * Math.min(Math.max(strength, 0), 1))}`;
      if (n === t) name += " query";
      else if (unseen) name += " after";
      else if (this.head.bias && this.head.bias(t, n) - top < blind) name += " far";
      if (!unseen && !name.endsWith("far")) this.sees++;
      const weight = this.row ? this.row[n] : 0;
      if (weight >= 0.001) name += weight >= 0.2 ? " a4" : weight >= 0.05 ? " a3" : weight >= 0.01 ? " a2" : " a1";
      if (name !== this.classes[n]) this.classes[n] = this.spans[n].className = name;
      if (withNumbers && this.spans[n].dataset.n !== told) this.spans[n].dataset.n = told;
    }
    this.text.classList.toggle("numbers", withNumbers);
    this.drawLegend();
  }

  drawLegend() {
    const [what, low, high] = {
      step: ["step", "0", `${number(this.topStep || 0, 2)} or more`],
      bias: ["left after the bias", "0", "1"],
      attention: ["attention weight", "0", "100 %"],
    }[this.shade()];
    const sample = (name, text) => element("i", { class: name }, text);
    const parts = [element("span", {}, `Shade: ${what} `, sample("s0", low), sample("s4", "…"), sample("s8", high))];
    if (this.head.bias) parts.push(element("span", {}, sample("far", "grey"), ` the bias leaves less than ${100 * DATA.far} %`));
    const bars = [["a1", "0.1 %"], ["a2", "1 %"], ["a3", "5 %"], ["a4", "20 %"]];
    if (this.row) parts.push(element("span", {}, "Bar: attention ", ...bars.flatMap(([name, text]) => [sample(name, text), " "])));
    this.legend.replaceChildren(...parts);
  }

  drawReadout() {
    const { model, head, t } = this, strong = (name, text) => element("b", { class: name }, text);
    const parts = ["Query ", strong("place", `${t}`), ` “${label(model.pieces[t])}” (${DATA.kinds[model.kindOf[t]]})`];
    if (head.steps) parts.push(" adds ", strong("step", number(head.steps[t])), ", has the gain ", strong("gain", number(head.gains[t])));
    const could = model.pieces.filter((_, n) => model.sees(t, n)).length;
    if (head.bias) parts.push(`, and its bias leaves more than ${100 * DATA.far} % for `, strong("sees", `${this.sees}`), ` of ${could} tokens.`);
    if (model.mixes) parts.push(" This encoding also changes the scores by looking at them; the bias shown is the part before that.");
    if (!this.row) parts.push(` Attention weights are stored for layer ${model.attentionLayers.join(", ")} only (--attention).`);
    this.readout.replaceChildren(...parts);
  }

  visibleSpan() { // [first, last] of the tokens in view around the query
    const { model, t } = this, size = Math.min(state.span, model.length);
    const last = model.causal ? Math.max(t, size - 1) : Math.min(Math.max(t + (size >> 1), size - 1), model.length - 1);
    return [last - size + 1, last];
  }

  drawChart() {
    const height = 190, [context, width] = canvas2d(this.chart, height);
    const [first, last] = this.visibleSpan(), size = last - first + 1;
    const left = 56, right = width - 44, top = 18, bottom = height - 30;
    const ink = colour("--ink"), soft = colour("--soft"), blue = colour("--blue"), orange = colour("--orange");
    const x = (j) => left + (j - first + 0.5) / size * (right - left);
    context.strokeStyle = colour("--line");
    context.strokeRect(left, top, right - left, bottom - top);
    const heaviest = this.row ? Math.max(...this.row.subarray(first, last + 1), 0.01) : 0;
    if (this.row) {
      context.fillStyle = blue;
      const wide = Math.max((right - left) / size - 1, 1);
      for (let j = first; j <= last; j++) {
        const y = this.row[j] / heaviest * (bottom - top);
        if (y) context.fillRect(x(j) - wide / 2, bottom - y, wide, y);
      }
      context.textAlign = "right";
      context.fillText(percent(heaviest).replace(".00", ""), left - 4, top + 8);
      context.fillText("0", left - 4, bottom);
      context.textAlign = "left";
      context.fillText("▮ attention", left, top - 6);
    }
    if (this.head.bias) this.drawBiasLine(context, { x, first, last, top, bottom, left, right, orange });
    context.fillStyle = soft;
    context.textAlign = "left";
    if (x(this.t) > left + 60) context.fillText(`token ${first}`, left, bottom + 14);
    context.textAlign = "right";
    if (x(this.t) < right - 60) context.fillText(`token ${last}`, right, bottom + 14);
    if (this.t >= first && this.t <= last) {
      context.fillStyle = ink;
      context.textAlign = "center";
      context.fillText("▲", x(this.t), bottom + 11);
      context.fillText(`query ${this.t}`, Math.min(Math.max(x(this.t), left + 40), right - 30), bottom + 25);
    }
    const told = `Bias and attention of query ${this.t} over the tokens ${first} to ${last}; the numbers are in the table below.`;
    this.chart.setAttribute("aria-label", told);
  }

  drawBiasLine(context, { x, first, last, top, bottom, left, right, orange }) {
    const [low, high] = this.range, end = this.model.causal ? Math.min(this.t, last) : last;
    context.strokeStyle = context.fillStyle = orange;
    context.lineWidth = 1.6;
    context.setLineDash([5, 2]);
    context.beginPath();
    for (let j = first, begun = false; j <= end; j++) {
      if (!this.model.sees(this.t, j)) continue;
      const y = bottom - Math.min(Math.max((this.head.bias(this.t, j) - low) / (high - low), 0), 1) * (bottom - top);
      if (begun) context.lineTo(x(j), y); else context.moveTo(x(j), y);
      begun = true;
    }
    context.stroke();
    context.setLineDash([]);
    context.textAlign = "left";
    context.fillText(number(high, 2), right + 4, top + 8);
    context.fillText(`${number(low, 2)}`, right + 4, bottom);
    context.textAlign = "right";
    context.fillText("╌ bias", right, top - 6);
  }

  drawTop() {
    const { head, model, t } = this;
    let rows = head.attention(t);
    const caption = rows ? "The heaviest keys of the query" : "The nearest keys of the query";
    rows = rows ? rows.sort((a, b) => b[1] - a[1]).slice(0, 8) : Array.from({ length: Math.min(8, t + 1) }, (_, n) => [t - n, null]);
    const lines = rows.map(([key, weight]) => [label(model.pieces[key]), `${key}`, number(t - key, 6),
      head.bias ? number(head.bias(t, key)) : "–", weight === null ? "–" : percent(weight)]);
    this.topTable.replaceChildren(dataTable(caption, ["token", "place", "tokens back", "bias", "attention"], lines));
  }

  drawKinds() {
    const { model, head } = this;
    if (!head.steps || this.same) {
      const none = head.steps && !head.steps.at(-1);
      const told = none ? "In this head no token adds distance." : `In ${model.encoding} distance does not depend on what the tokens are.`;
      this.kindTable.replaceChildren(element("p", { class: "note" }, told));
      return;
    }
    const kinds = DATA.kinds.length, all = model.layers * model.heads, at = head.layer * model.heads + head.number;
    const counts = new Array(kinds).fill(0);
    model.kindOf.slice(1).forEach((kind) => { counts[kind]++; });
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const overHeads = (value) => mean(Array.from({ length: all }, (_, n) => value(n)));
    const stepsOf = (n) => model.steps.subarray(n * model.length + 1, (n + 1) * model.length);
    const ofHead = (n, kind) => model.kind_steps[n * kinds + kind];
    const overall = model.meanStep ??= overHeads((n) => mean(stepsOf(n))), here = mean(stepsOf(at));
    const times = (value, usual) => (usual > 0 ? `${(value / usual).toFixed(2)}×` : "–");
    const rows = DATA.kinds.map((kind, k) => [kind, counts[k], ofHead(at, k), overHeads((n) => ofHead(n, k))])
      .filter(([, count]) => count).sort((a, b) => b[2] - a[2])
      .map(([kind, count, own, every]) => [kind, `${count}`, number(own), times(own, here), number(every), times(every, overall)]);
    const caption = "Mean step of all tokens but the first; × is over that of all kinds. Most distance first.";
    this.kindTable.replaceChildren(dataTable(caption, ["kind", "tokens", "this head", "", "all heads", ""], rows));
  }

  mapKind() { return state.heat === "bias" && this.head.bias ? "bias" : "attention"; }

  drawMap() {
    const width = Math.min(Math.max(this.map.parentElement.clientWidth, 60), 640);
    const [first, last] = this.visibleSpan(), size = last - first + 1, labelled = size <= 32;
    const margin = labelled ? 72 : 44, side = width - margin - 12, cells = Math.min(size, Math.round(side));
    const below = labelled && !this.model.causal ? 58 : 0, [context] = canvas2d(this.map, side + 36 + below);
    const kind = this.mapKind(), [low, high] = this.range, { model } = this;
    const token = (n) => first + Math.floor((n + 0.5) * size / cells);
    this.shownMap = { first, size, margin, side, kind, below };
    let value;
    if (kind === "bias") {
      value = (y, x) => {
        const i = token(y), j = token(x);
        return model.sees(i, j) ? (this.head.bias(i, j) - low) / (high - low) : null;
      };
    } else {
      value = this.attentionPicture(cells, first, size);
    }
    if (value) {
      const picture = image(cells, value);
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, margin, 6, side, side);
    }
    this.drawMapFrame(context, labelled);
    const lowest = number(low, 2) + (low <= high - RANGE ? " or less" : "");
    this.drawScale(context, kind === "bias" ? [lowest, number(high, 2)] : ["0", "100 % (root scale)"]);
    const what = kind === "bias" ? "Bias" : "Attention";
    const where = `layer ${this.head.layer}, head ${this.head.number}, tokens ${first} to ${last}`;
    this.map.setAttribute("aria-label", `${what} of ${where}: queries down, keys across.`);
    const hint = "queries down, keys across. Point at a square for its number; click to make its row the query.";
    this.mapNote.textContent = value ? `${what}: ${hint}` : "The attention of this layer is not stored: pick another layer, or use --attention.";
  }

  attentionPicture(cells, first, size) {
    const { causal } = this.model;
    if (this.head.stored < 0) return null;
    const squares = new Float32Array(cells * cells), cell = (n) => Math.min(Math.floor((n - first) * cells / size), cells - 1);
    for (let i = first; i < first + size; i++) {
      for (const [key, weight] of this.head.attention(i)) {
        if (key < first || key >= first + size) continue;
        const at = cell(i) * cells + cell(key);
        squares[at] = Math.max(squares[at], weight);
      }
    }
    return (y, x) => (causal && x > y ? null : Math.sqrt(squares[y * cells + x]));
  }

  drawMapFrame(context, labelled) {
    const { first, size, margin, side } = this.shownMap, step = side / size, { pieces } = this.model;
    context.strokeStyle = colour("--line");
    context.strokeRect(margin, 6, side, side);
    context.fillStyle = colour("--soft");
    context.textAlign = "right";
    const cut = (piece) => { const text = label(piece); return text.length > 10 ? `${text.slice(0, 9)}…` : text; };
    const each = labelled ? 1 : Math.ceil(size / 8);
    for (let n = 0; n < size; n += each) {
      const y = 6 + (n + 0.5) * step;
      if (!labelled && Math.abs(n - this.t + first) * step < 12) continue;
      context.fillText(labelled ? cut(pieces[first + n]) : `${first + n}`, margin - 5, y + 4);
    }
    if (labelled) this.nameKeys(context, cut);
    const row = this.t - first;
    if (row < 0 || row >= size) return;
    context.strokeStyle = colour("--orange");
    context.lineWidth = 2;
    context.strokeRect(margin - 1, 6 + row * step - 1, this.model.causal ? (row + 1) * step + 2 : side + 2, Math.max(step, 2) + 2);
    context.fillStyle = colour("--ink");
    context.textAlign = "right";
    if (!labelled) context.fillText(`${this.t} ▶`, margin - 2, 6 + (row + 0.5) * step + 4);
  }

  nameKeys(context, cut) { // along the diagonal, above which a causal map is empty; else below the map
    const { first, size, margin, side } = this.shownMap, step = side / size, { pieces, causal } = this.model;
    context.textAlign = causal ? "left" : "right";
    for (let n = causal ? 2 : 0; n < size; n++) {
      context.save();
      context.translate(margin + (n + 0.5) * step + 3, causal ? 6 + n * step - 2 : side + 14);
      context.rotate(-Math.PI / 4);
      context.fillText(cut(pieces[first + n]), 0, 0);
      context.restore();
    }
  }

  drawScale(context, [low, high]) {
    const { margin, side, below } = this.shownMap, y = side + 16 + below;
    for (let n = 0; n < 100; n++) {
      const word = PALETTE[Math.round(n * 2.55)];
      context.fillStyle = `rgb(${word & 255} ${(word >> 8) & 255} ${(word >> 16) & 255})`;
      context.fillRect(margin + 70 + n * (side - 170) / 100, y, (side - 170) / 100 + 1, 10);
    }
    context.fillStyle = colour("--soft");
    context.textAlign = "right";
    context.fillText(low, margin + 65, y + 9);
    context.textAlign = "left";
    context.fillText(high, margin + side - 95, y + 9);
  }

  pointAtMap(event, clicked) {
    const box = this.map.getBoundingClientRect(), { first, size, margin, side, kind } = this.shownMap;
    const j = first + Math.floor((event.clientX - box.left - margin) / side * size);
    const i = first + Math.floor((event.clientY - box.top - 6) / side * size);
    if (i < first || j < first || i >= first + size || j >= first + size || !this.model.sees(i, j)) return;
    if (clicked) { state.pinned = true; setQuery(this, i); }
    const { pieces } = this.model, found = (this.head.attention(i) || []).find(([key]) => key === j);
    const weight = found ? percent(found[1]) : `below the ${DATA.top} heaviest or ${100 * DATA.lightest} %`;
    const told = kind === "bias" ? `bias ${number(this.head.bias(i, j))}` : `attention ${weight}`;
    this.mapNote.textContent = `Query ${i} “${label(pieces[i])}”, key ${j} “${label(pieces[j])}”: ${told}`;
  }

  setToken(t, scroll) {
    this.t = t;
    this.draw();
    if (scroll) {
      const span = this.spans[t], box = this.text;
      const top = span.offsetTop, bottom = top + span.offsetHeight;
      if (top < box.scrollTop || bottom > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
    }
  }
}
