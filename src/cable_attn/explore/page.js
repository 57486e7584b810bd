"use strict";
// The state that all panels share and a link restores, and the controls that change it.

const state = { t: 0, pinned: false, span: 64, shade: "step", heat: "bias", heads: [] };
const panels = [];
const SPANS = [16, 32, 64, 128, 512, 2048];
let waiting = null;

function setQuery(panel, t, scroll = false) { // the other model moves to the token at the same character
  waiting = { panel, t, scroll };
  requestAnimationFrame(() => { if (waiting) { showQuery(waiting); waiting = null; } });
}

function showQuery({ panel, t, scroll }) {
  const place = panel.model.starts[t];
  for (const other of panels) {
    const same = other === panel || sameTokens(other.model, panel.model);
    other.setToken(same ? t : other.model.atCharacter(place), scroll || other !== panel);
  }
  state.t = panels[0].t;
  remember();
}

const sameTokens = (one, other) => one.length === other.length && one.starts.every((start, n) => start === other.starts[n]);

function fragment() {
  const heads = state.heads.map(([layer, head], n) => `h${n}=${layer}.${head}`);
  const parts = [`t=${state.t}`, ...heads, ...["span", "shade", "heat"].map((name) => `${name}=${state[name]}`)];
  if (document.getElementById("numbers").checked) parts.push("numbers=1");
  return `#${parts.join("&")}`;
}

let remembering = 0;

function remember() { // browsers allow only so many changes of the address in a while
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", fragment()), 150);
}

function whole(text, most) { return /^\d+$/.test(text || "") && Number(text) <= most ? Number(text) : null; }

function restore() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ["span", "shade", "heat"]) {
    const select = document.getElementById(name);
    if ([...select.options].some((option) => option.value === given.get(name))) select.value = given.get(name);
    state[name] = name === "span" ? Number(select.value) : select.value;
  }
  document.getElementById("numbers").checked = given.get("numbers") === "1";
  const t = whole(given.get("t"), panels[0].model.length - 1);
  state.pinned = t !== null;
  state.t = t ?? Math.min(panels[0].model.length - 1, 120);
  panels.forEach((panel, n) => {
    const [layer, head] = (given.get(`h${n}`) || "").split(".");
    panel.t = n ? panel.model.atCharacter(panels[0].model.starts[state.t]) : state.t;
    if (n && sameTokens(panel.model, panels[0].model)) panel.t = state.t;
    const chosen = whole(layer, panel.model.layers - 1) ?? panel.model.attentionLayers.at(-1) ?? panel.model.layers - 1;
    panel.setHead(chosen, whole(head, panel.model.heads - 1) ?? panel.model.typical(chosen));
    panel.setToken(panel.t, true);
  });
}

function controls() {
  const longest = Math.max(...panels.map((panel) => panel.model.length)), span = document.getElementById("span");
  for (const size of SPANS.filter((n) => n < longest)) span.append(element("option", { value: size }, `${size}`));
  span.append(element("option", { value: longest }, `all (${longest})`));
  span.value = String(longest > 64 ? 64 : longest);
  if (!panels.some((panel) => panel.model.hasBias)) {
    for (const name of ["heat", "shade"]) document.getElementById(name).value = "attention";
  }
  for (const name of ["span", "shade", "heat"]) {
    document.getElementById(name).addEventListener("change", (event) => {
      state[name] = name === "span" ? Number(event.target.value) : event.target.value;
      panels.forEach((panel) => panel.draw());
      remember();
    });
  }
  document.getElementById("numbers").addEventListener("change", () => { panels.forEach((panel) => panel.draw()); remember(); });
  document.getElementById("copy").addEventListener("click", async (event) => {
    history.replaceState(null, "", fragment());
    const copied = await navigator.clipboard.writeText(location.href).then(() => true, () => false);
    event.target.textContent = copied ? "Copied" : "Link is in the address bar";
  });
  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => panels.forEach((panel) => panel.draw()), 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.forEach((panel) => panel.draw()));
  window.addEventListener("hashchange", restore);
}

async function start() {
  const models = await Promise.all(DATA.models.map(Model.open));
  document.getElementById("panels").classList.toggle("alone", models.length === 1);
  models.forEach((model, index) => panels.push(new Panel(model, index)));
  controls();
  restore();
  document.getElementById("panels").setAttribute("aria-busy", "false");
}

start().catch((error) => {
  document.getElementById("failure").textContent = `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
